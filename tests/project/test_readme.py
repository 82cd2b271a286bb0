"""Every command and snippet of the README runs as it is written, on a small model in place of the
reader's.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regauge.cli import main
from regauge.errors import RegaugeError
from support.picos import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate(("MODEL", "BASE", "OTHER", "VIT")):
        build("vit", seed=seed).float().save_pretrained(tmp_path / name)
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


def test_commands(folder: Path) -> None:
    lines = [
        line.split("#")[0].strip() for line in README.splitlines() if line.startswith("regauge ")
    ]
    assert len(lines) >= 4
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
    before, *after = (
        folder / name / "model.safetensors" for name in ("MODEL", "BACK", "UNLOCKED", "OPENED")
    )
    assert all(before.read_bytes() == path.read_bytes() for path in after), "and back, bit for bit"


def test_python(folder: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert snippets
    for snippet in snippets:
        scope: dict[str, Any] = {}
        exec(snippet, scope)
    spec = scope["spec"]
    assert f"`{spec.tensors['model.layers.0.self_attn.q_proj.weight']!r}`" in README


SECTIONS = (
    "Try it",
    "Five lines of Python",
    "What it protects against, and what it does not",
    "The commands at a glance",
    "Install",
    "How it compares",
    "Quantised models",
    "Data that examples use",
    "Read on",
)


def test_the_order() -> None:
    """One sentence, the picture, and then what a reader asks, one after the other."""
    assert tuple(re.findall(r"^## (.*)$", README, re.M)) == SECTIONS
    head = README.split("## ")[0]
    assert head.index("**A Transformer's weights") < head.index("](docs/picture.svg)")


def test_every_command_is_named() -> None:
    from regauge.cli import app as cli

    lines = " ".join(line for line in README.splitlines() if line.startswith(("regauge ", "make ")))
    for name in cli._COMMANDS.keys() | cli._GROUPS.keys():
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
        for row in re.findall(r"^\| (`.*?) \|", install, re.M)
        for extra in re.findall(r"`(\w+)`", row)
    } == project.keys() - {"dev"}


def test_facts_of_the_comparison() -> None:
    from regauge.models.families import FAMILIES

    table = README[README.index("## How it compares") : README.index("## Quantised models")]
    rows = [
        line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| |")
    ]
    assert len(rows) == 8
    assert all("](http" in row.rsplit(" | ", 1)[1] or "**regauge**" in row for row in rows), (
        "each with its source"
    )
    assert f"{len(FAMILIES)} families" in table


@pytest.mark.slow
def test_the_demo_prints_what_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows, that is; numbers differ from machine to machine."""
    assert main(["demo"]) == 0
    output = capsys.readouterr().out
    shown = README[README.index("```\nmodel  element") : README.index("## Five lines")].strip(
        "`\n "
    )
    for line in filter(None, shown.splitlines()):
        label = re.split(r"  +|\d", line.strip())[0].strip()
        assert label in output, label


def test_the_documented_refusal_is_the_real_one() -> None:
    from regauge.core.element import Element, element
    from regauge.core.groups import Orthogonal
    from regauge.core.rng import Stream, seed_key
    from support.picos import spec_of

    spec = spec_of(build("gpt2"))
    turned = Orthogonal().sample(12, 1, Stream(seed_key(1), "x"))
    with pytest.raises(RegaugeError) as refused:
        Element(spec, {**element(spec, 1, spaces=[]).members, "stream": turned}).require()
    text = (Path(__file__).parents[2] / "docs" / "notation.md").read_text()
    assert str(refused.value) in text
