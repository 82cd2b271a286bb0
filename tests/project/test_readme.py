"""Every command and snippet of the README runs as it is written, on a small model in place of the
reader's.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regauge
from regauge.cli import main
from regauge.errors import RegaugeError
from support.picos import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate(("MODEL", "BASE", "VIT", "OTHER")):
        model = build("vit", seed=0 if seed < 2 else 2).float()
        if name == "MODEL":  # fine-tuned from BASE
            for parameter in model.parameters():
                parameter.data += 0.01 * torch.randn_like(parameter)
        if name == "OTHER":  # the same function as VIT, so that a match can succeed
            spec = regauge.spec_of(model)
            g = regauge.element(spec, key=5, within="permutation")
            model.load_state_dict(regauge.apply(g, model.state_dict()))
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(
            '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
        )
    for i, pixels in enumerate(
        np.random.default_rng(0).integers(0, 255, (70, 8, 8, 3), dtype=np.uint8)
    ):
        (tmp_path / "IMAGES" / str(i % 5)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "IMAGES" / str(i % 5) / f"{i}.png")
    (tmp_path / "PICKLED").mkdir()
    shutil.copy(tmp_path / "MODEL" / "config.json", tmp_path / "PICKLED")
    torch.save(build("vit").state_dict(), tmp_path / "PICKLED" / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Appended to a command that trains: attackers that learn less, which no reader would ask for.
LESS = {
    "audit gradients": "--updates 2 --practice 10 --batches 1",
    "audit split": "--epochs 1 --attacker 16,1,5 --attacked 8",
}


def test_commands(folder: Path) -> None:
    lines = [
        line.split("#")[0].strip() for line in README.splitlines() if line.startswith("regauge ")
    ]
    assert len(lines) >= 4
    for line in lines:
        less = next((more for name, more in LESS.items() if f"regauge {name} " in line), "")
        assert main(shlex.split(f"{line} {less}")[1:]) == 0, line
    before, *after = (
        folder / name / "model.safetensors" for name in ("MODEL", "BACK", "UNLOCKED", "OPENED")
    )
    assert all(before.read_bytes() == path.read_bytes() for path in after), "and back, bit for bit"


def test_python(folder: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert snippets
    for snippet in snippets:
        exec(snippet, {})
        for output in re.findall(r'save\("([\w-]+)"\)', snippet):
            assert (folder / output / "model.safetensors").exists()


SECTIONS = (
    "Try it",
    "Use cases",
    "Supported models",
    "Installation",
    "How it compares",
    "Limits",
)
USE_CASES = ("Align and merge", "Check", "Lock or seal", "Audit", "Train split")


def test_the_order() -> None:
    """One sentence, the picture, two commands, then the use cases in the order of need."""
    assert tuple(re.findall(r"^## (.*)$", README, re.M)) == SECTIONS
    head = README.split("## ")[0]
    assert head.index("**Many different weights") < head.index("](docs/idea.svg)")
    cases = re.findall(r"^### \d\. (.*)$", README, re.M)
    assert [case.startswith(use) for case, use in zip(cases, USE_CASES, strict=True)] == [True] * 5
    assert len(README.splitlines()) <= 150


def test_every_command_is_named() -> None:
    from regauge.cli import app as cli

    lines = " ".join(line for line in README.splitlines() if line.startswith(("regauge ", "make ")))
    for name in {command.split()[0] for command in cli._COMMANDS}:
        assert f"regauge {name}" in lines or f"make {name}" in lines or name == "rekey", name


def test_make_targets_and_extras_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [
        extra for found in re.findall(r"'\.\[([\w,]+)\]'", README) for extra in found.split(",")
    ]
    assert named
    assert set(named) <= project.keys()
    install = README[README.index("## Install") : README.index("## How it compares")]
    assert {
        extra
        for listed in re.findall(r"^Extras: .*\n.*$", install, re.M)
        for extra in re.findall(r"`(\w+)`", listed)
    } == project.keys() - {"dev"}


def test_facts_of_the_comparison() -> None:
    from regauge.models.families import FAMILIES

    table = README[README.index("## How it compares") : README.index("## Limits")]
    rows = [
        line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| |")
    ]
    assert len(rows) == 8
    assert all("](http" in row.rsplit(" | ", 1)[1] or "**regauge**" in row for row in rows), (
        "each with its source"
    )
    assert f"{len(FAMILIES)} families" in table


def without_numbers(line: str) -> str:
    return re.sub(r"[\s\d.+-]+", " ", line).strip()


@pytest.mark.slow
def test_the_demo_and_the_commands_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All words, that is; numbers differ from machine to machine."""
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--output", "regauge-demo"]) == 0
    demo, *_ = re.findall(r"```\n(1\. .*?)```", README, re.S)
    assert_printed(demo, capsys.readouterr().out)
    monkeypatch.chdir(tmp_path / "regauge-demo")
    blocks = re.findall(r"```\n((?:regauge [^\n]*\n)+)```\n```\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    for commands, shown in blocks:
        for command in commands.splitlines():
            assert main(shlex.split(command.split(" #")[0])[1:]) == 0, command
        assert_printed(shown, capsys.readouterr().out)


def assert_printed(shown: str, output: str) -> None:
    printed = {without_numbers(line) for line in output.splitlines()}
    lines = [line for line in shown.splitlines() if line.strip(" .")]
    assert {without_numbers(line) for line in lines} <= printed


def test_the_documented_refusal_is_the_real_one() -> None:
    from regauge.core.element import Element, element
    from regauge.core.groups import Orthogonal
    from regauge.core.rng import Stream, seed_key
    from support.picos import spec_of

    spec = spec_of(build("gpt2"))
    turned = Orthogonal().sample(12, 1, Stream(seed_key(1), "x"))
    with pytest.raises(RegaugeError) as refused:
        Element(spec, {**element(spec, 1, spaces=[]).members, "stream": turned}).require()
    text = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    assert str(refused.value) in text
