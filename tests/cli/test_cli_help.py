"""The help of every command in a terminal of 80 columns: one line per command, groups, wide texts,
and examples that a shell accepts.
"""

from __future__ import annotations

import re
import shlex
import shutil
from typing import Any

import pytest
import typer

from regauge.cli import main
from regauge.cli.app import build_app, leaves_of
from regauge.cli.help import OPTIONS, format_sections, groups_of, summary_of
from regauge.cli.help import Style as Colors
from regauge.cli.menu import PANELS, examples_of
from regauge.cli.options import ADVANCED, DATA, GENERAL

ALL = dict(leaves_of(typer.main.get_command(build_app([]))))
PLAIN = Colors(False)


@pytest.fixture(params=[80])
def columns(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert shutil.get_terminal_size().columns == request.param
    return int(request.param)


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([*name.split(), "--help"]) == 0
    return capsys.readouterr().out.splitlines()


def text_columns(lines: list[str]) -> set[int]:
    """Return where the texts of the options start."""
    starts = set()
    for line in lines[: lines.index("Examples:")]:
        if (found := re.match(r"  (?:-\w, |    )?--?\S+(?: \S+)*?  +(?=\S)", line)) or (
            found := re.match(r" {9,}(?=\S)", line)
        ):
            starts.add(found.end())
    return starts


def test_the_overview_fits_a_terminal(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_the_program_lists_every_command_on_one_line(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of("", capsys)
    assert max(map(len, lines)) <= columns
    rows = {name: line for line in lines for name in ALL if line.startswith(f"  {name} ")}
    assert rows.keys() == ALL.keys()
    for name, line in rows.items():
        assert line.split("  ")[-1].strip() == summary_of(ALL[name].help)
    titles = [line[:-1] for line in lines if line.endswith(":")]
    assert titles == [*PANELS, OPTIONS]


@pytest.mark.parametrize("group", ["audit", "jigsaw", "split"])
def test_a_group_lists_its_commands_on_one_line(
    group: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of(group, capsys)
    for name in ALL:
        if name.startswith(f"{group} "):
            summary = summary_of(ALL[name].help)
            assert any(
                re.fullmatch(rf"  {name.split()[1]} +{re.escape(summary)}", x) for x in lines
            )


@pytest.mark.parametrize("name", sorted(ALL))
def test_help_at_80_columns(name: str, columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(name, capsys)
    assert max(map(len, lines)) <= columns
    assert summary_of(ALL[name].help) in lines, "on one line"
    starts = text_columns(lines)
    assert starts
    assert columns - max(starts) >= 40
    end = lines.index("Examples:")
    assert shlex.split(" ".join(" ".join(lines[end + 1 :]).split()).replace("\\ ", "")) == (
        shlex.split(" ".join(examples_of(name)))
    )
    assert not {"<bool>", "<int>", "\0"} & set("".join(lines).split())
    titles = [line[:-1] for line in lines[:end] if re.fullmatch(r"\w[\w ]+:", line)]
    last = [t for t in titles if t in (DATA, GENERAL, ADVANCED)]
    assert titles[-len(last) :] == last == sorted(last, key=[DATA, GENERAL, ADVANCED].index)


@pytest.mark.parametrize("name", sorted(ALL))
def test_common_options_come_first(name: str) -> None:
    context = ALL[name].make_context(name, [], resilient_parsing=True)
    groups = groups_of(ALL[name], context)
    assert {o for p in groups[GENERAL] for o in p.opts} >= {"--help", "-v"}
    shown = [p for title, members in groups.items() if title != GENERAL for p in members]
    if len(shown) > 20:
        assert ADVANCED in groups
    assert len(groups.get(OPTIONS, [])) <= 17
    assert not any(p.required for p in groups.get(ADVANCED, []))


def test_on_a_narrow_terminal_texts_stand_below_the_names() -> None:
    rows = {"Options": [("--name VALUE", "word " * 30)]}
    wide, narrow = (list(format_sections(rows, width, PLAIN)) for width in (80, 60))
    assert wide[2].startswith("  --name VALUE  word word")
    assert narrow[2] == "  --name VALUE"
    assert narrow[3].startswith("        word")
    assert max(map(len, narrow)) <= 60


def test_a_long_name_has_a_line_of_its_own() -> None:
    rows = {"Options": [("--short", "text"), ("--a-very-long-name CHOICE-OF-MANY", "word " * 20)]}
    lines = list(format_sections(rows, 80, PLAIN))
    assert lines[2:5] == [
        "  --short  text",
        "  --a-very-long-name CHOICE-OF-MANY",
        f"           {('word ' * 14).strip()}",
    ]


def test_defaults_and_choices_are_shown(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(" ".join(help_of("federate", capsys)).split())
    assert "One of: fedavg, fedprox, fedadam, matched. [default: fedavg]" in text
    assert "--weigh examples|clients" in text
    assert "--rounds R Number of rounds. A larger number extends a finished run. [required]" in text
    assert "[default: 0.06667]" in " ".join(help_of("jigsaw train", capsys))
