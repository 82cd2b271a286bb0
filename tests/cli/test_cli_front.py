"""The front door of the command line: what stands there without a command, every command's example,
doctor, completion, and no debris.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from regauge.cli import EXIT_CODES, main
from regauge.cli import app as cli
from regauge.cli.menu import EXAMPLES, NEXT, OVERVIEW, PANELS, examples_of
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.results import installation
from regauge.results.advisories import satisfies

ALL = dict(cli.leaves_of(typer.main.get_command(cli.build_app([]))))
LINES = [(name, line) for name in sorted(EXAMPLES) for line in examples_of(name)]


def test_every_command_has_an_example_and_every_example_a_command() -> None:
    assert set(EXAMPLES) == set(ALL)
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ALL)


def parse_command(line: str) -> Any:
    """The command of a line, with its arguments taken in; nothing is run. What it does not take is
    refused.
    """
    name, *options = shlex.split(line)
    assert name == "regauge"
    full = next(n for n in (" ".join(options[:2]), options[0]) if n in ALL)
    return ALL[full].make_context(full, options[len(full.split()) :]), full


@pytest.mark.parametrize(("name", "line"), LINES)
def test_an_example_is_taken_by_its_command(name: str, line: str) -> None:
    _, full = parse_command(line)
    assert full == name


def test_an_example_with_an_option_that_is_gone_is_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse_command("regauge move MODEL --random -o OUT --sead 1")
    with pytest.raises(Exception, match="Missing parameter: out"):
        parse_command("regauge move MODEL --random")


def test_the_docs_list_every_exit_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = text.partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.M)
    assert {int(code): words for code, words in rows} == EXIT_CODES
    source = Path(cli.__file__).parent
    named = re.findall(
        r"\b(?:EXIT_\w+|INTERRUPTED) = (\d+)", "".join(p.read_text() for p in source.glob("*.py"))
    )
    assert {0, 1, *map(int, named)} == set(EXIT_CODES)


def test_a_next_step_is_a_command_that_exists() -> None:
    for name, text in NEXT.items():
        assert name.partition(" --")[0] in ALL
        line = text.format(out="OUT").partition("regauge ")[2]
        assert not line or any(line.startswith(f"{known} ") for known in ALL), text


def test_a_written_output_ends_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for purpose, command in (("lock", "lock MODEL"), ("seal", "seal MODEL")):
        key = tmp_path / purpose
        assert main(["keygen", "--purpose", purpose, "-o", str(key)]) == 0
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"regauge: next: regauge {command} -k {key} -o ")
    assert main(["keygen", "-o", str(key)]) == 1
    assert "next:" not in capsys.readouterr().err


def test_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == OVERVIEW + "\n"
    for line in re.findall(r"regauge (?!COMMAND|--)(\w+(?: \w+)?)", OVERVIEW.split("\n\n", 1)[1]):
        groups = {name.split()[0] for name in ALL}
        assert line in ALL or line.split()[0] in groups, line
    assert main(["--nonsense"]) == 2


def test_commands_that_measure_have_json() -> None:
    without = {
        name for name, command in ALL.items() if not any("--json" in p.opts for p in command.params)
    }
    assert without == {"report"}, "whose input is JSON"


def test_every_option_is_spelled_one_way() -> None:
    """Where two commands have an option of one meaning, it has one name, and one short form."""
    short: dict[str, set[str]] = {}
    for command in ALL.values():
        for p in command.params:
            for option in p.opts:
                if re.fullmatch(r"-\w", option):
                    short.setdefault(option, set()).add(
                        next((o for o in p.opts if o.startswith("--")), p.name)
                    )
            assert ("-o" in p.opts) == ("--output" in p.opts), (command.name, p.opts)
    assert short == {"-o": {"--output"}, "-k": {"--key"}, "-g": {"--element"}, "-v": {"verbose"}}


@pytest.mark.parametrize(
    "name",
    sorted(n for n, c in ALL.items() if n != "move" and any("--seed" in p.opts for p in c.params)),
)
def test_an_invalid_seed_is_rejected(name: str) -> None:
    """numpy, torch and scikit-learn raise errors of their own for it, each another one. `move`
    takes any whole number.
    """
    words = examples_of(name)[0]
    for good in (0, 2**32 - 1):
        assert parse_command(f"{words} --seed {good}")[0].params["seed"] == good
    for bad in (-1, 2**32):
        with pytest.raises(Exception, match=r"Input should|range") as caught:
            parse_command(f"{words} --seed {bad}")
        assert "--seed" in caught.value.format_message()  # type: ignore[attr-defined]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert report["torch"]["devices"][0]["name"] == "cpu"
    extras = {extra["name"]: extra for extra in report["extras"]}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(installation._PURPOSES) == set(project["optional-dependencies"]), (
        "every extra says what it brings"
    )
    assert extras["report"]["complete"]
    assert extras["report"]["get"] == "pip install 'regauge[report]'"
    assert {entry["name"] for entry in extras["experiments"]["libraries"]} >= {
        "transformers",
        "jinja2",
    }, "extras of extras are spelled out"


def test_doctor_names_what_is_missing_or_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "jinja2":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "matplotlib" else "1.20" if name == "numpy" and old else real(name)

    old = False
    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 0, "a missing extra is not a fault"
    output = capsys.readouterr().out
    assert re.search(r"jinja2>=3\.1\S*, matplotlib 0\.1 is too old \(>=3\.8\)", output)
    assert "to install report: pip install 'regauge[report]'" in output
    assert all(
        "  # " in line
        for line in output.splitlines()
        if line.startswith(("to install timm", "to install federated"))
    )
    old = True
    assert main(["doctor"]) == 1
    assert (
        "numpy 1.20 is too old (>=1.26); pip install --upgrade regauge" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("version", "safe"),
    [("2.5.1", False), ("2.9.1+cpu", False), ("2.10.0", True), ("2.13.0+cpu", True)],
)
def test_doctor_names_a_vulnerable_torch(
    version: str, safe: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and also where regauge runs from its sources and nothing says what it
    requires.
    """
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "torch" else real(name)
    )
    monkeypatch.setattr(installation, "requirements", dict)
    assert main(["doctor"]) == (0 if safe else 1)
    line = f"torch {version} is unsafe (CVE-2025-32434, CVE-2026-24747): a crafted pickle runs code"
    output = capsys.readouterr().out
    assert (line in output) is not safe
    assert ("pip install 'torch>=2.10'" in output) is not safe
    assert main(["doctor", "--json"]) == (0 if safe else 1)
    report = json.loads(capsys.readouterr().out)
    assert [entry["library"] for entry in report["vulnerable"]] == ([] if safe else ["torch"])
    assert report["healthy"] is safe


def test_doctor_imports_libraries_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation, "requirements", lambda: {"": [("rich", ">=13")], "x": [("jinja2", "")]}
    )
    monkeypatch.setitem(sys.modules, "jinja2", None)  # an import of it fails
    checked = installation.check_installation(load=True)
    assert checked.healthy
    assert checked.facts["extras"][0]["libraries"][0]["state"] == "does not load"
    assert "jinja2" in str(checked)


@pytest.mark.parametrize(
    ("version", "wanted", "yes"),
    [
        ("2.13.0+cpu", ">=2.4", True),
        ("2.3.1", ">=2.4", False),
        ("5.0", ">=5.0,<6", True),
        ("6.0.1", ">=5.0,<6", False),
        ("5.0.0rc1", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, wanted: str, yes: bool) -> None:
    assert satisfies(version, wanted) is yes


def test_completion() -> None:
    def completed(line: str) -> list[str]:
        words = f"regauge {line}".split(" ")
        environment = os.environ | {
            "_REGAUGE_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-m", "regauge"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert completed("au") == ["audit"]
    assert completed("audit lock --fail") == ["--fail-above"]
    assert completed("nonsense") == []


@pytest.mark.parametrize("plain", [True, False])
def test_colour_is_for_terminals_that_want_it(plain: bool) -> None:
    """The help in a terminal has colours, unless NO_COLOR is set; in a pipe it has none."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {
        "TERM": "xterm-256color",
        "COLUMNS": "100",
    }
    environment |= {"NO_COLOR": "1"} if plain else {}
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "regauge", "doctor", "--help"],
        stdout=follower,
        stderr=follower,
        env=environment,
    )
    os.close(follower)
    output = b""
    while True:
        try:
            more = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        output += more
    assert process.wait() == 0
    assert b"regauge doctor" in output
    assert (re.search(rb"\x1b\[[\d;]*3\dm", output) is None) is plain
    piped = subprocess.run(
        [sys.executable, "-m", "regauge", "doctor", "--help"],
        capture_output=True,
        env=environment,
        check=True,
    )
    assert b"\x1b" not in piped.stdout


CTRL_C = {
    "keygen": "keygen -o NEW",
    "seal": "seal llama -k SEALKEY -o NEW",
    "open": "open SEALED -k SEALKEY -o NEW",
    "lock": "lock llama -k KEY -o NEW",
    "unlock": "unlock LOCKED -k KEY -o NEW",
    "rekey": "rekey LOCKED -k KEY --to OTHERKEY -o NEW",
    "move": "move llama --random -o NEW --save-element G",
    "match": "match llama llama -o NEW",
    "convert": "convert PICKLED -o NEW",
    "split certs": "split certs --to NEW",
    "verify": "verify llama --steps 0 --no-general --json NEW",
    "report": "report RESULTS -o NEW",
    "compare": "compare llama llama --json NEW",
}
WITHOUT = {  # and why nothing is left there, or what, and the test that says so
    "extract-lora": "writes its folder at the end, by staged_folder, as rekey does",
    "merge": "keeps its shards, and goes on with them: tests/cli/test_cli_merge.py",
    "jigsaw train": "keeps its steps, and goes on with them",
    "split serve": "ends at Ctrl-C, as it should: tests/cli/test_cli_split.py",
    "split train": "has a journal, and goes on with it: tests/cli/test_cli_split.py",
    "demo": "writes its page at the end, by write_bytes, as verify does",
    "audit lock": "the same",
    "audit split": "the same",
    "barrier": "the same",
    "evaluate": "the same",
    "jigsaw evaluate": "the same",
    "jigsaw study": "the same",
    "split predict": "writes nothing",
    "inspect": "writes nothing",
    "fingerprint": "writes nothing",
    "doctor": "writes nothing",
    "audit gradients": "writes its page at the end, by write_bytes, as verify does",
    "federate": "keeps its rounds, and goes on with them: tests/cli/test_cli_federate.py",
    "split join": "writes as convert does",
}


def test_every_command_is_interrupted_or_says_why_not() -> None:
    assert set(CTRL_C) | set(WITHOUT) == set(ALL)
    assert not set(CTRL_C) & set(WITHOUT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands of CTRL_C read."""
    import torch
    from safetensors.torch import load_file

    here = tmp_path_factory.mktemp("place")
    make_checkpoint(here / "llama", LLAMA, 0)
    (here / "PICKLED").mkdir()
    torch.save(
        load_file(here / "llama" / "model.safetensors"), here / "PICKLED" / "pytorch_model.bin"
    )
    for line in (
        f"keygen -o {here}/KEY",
        f"keygen -o {here}/OTHERKEY",
        f"keygen -o {here}/SEALKEY --purpose seal",
        f"lock {here}/llama -k {here}/KEY -o {here}/LOCKED",
        f"seal {here}/llama -k {here}/SEALKEY -o {here}/SEALED",
        f"verify {here}/llama --steps 0 --no-general --json {here}/RESULTS",
    ):
        assert main(line.split()) == 0, line
    return here


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", sorted(CTRL_C))
def test_ctrl_c_leaves_no_debris(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes when what was written is to be made safe: nothing has its name yet, and much
    of it is there.
    """
    requests: list[int] = []

    def interrupted(fd: int) -> None:
        requests.append(fd)
        raise KeyboardInterrupt

    before = everything(place)
    monkeypatch.chdir(place)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        assert main(CTRL_C[name].split()) == 130
    assert requests, "it was interrupted while it wrote"
    assert "interrupted" in capsys.readouterr().err
    assert everything(place) == before
