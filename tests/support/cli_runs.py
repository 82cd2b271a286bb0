"""Run the command line in-process and look at what it wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from regauge.cli import main


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., CommandResult]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object) -> CommandResult:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return CommandResult(code, captured.out, captured.err)

    return command


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def shard(folder: Path, out: Path, parts: int = 3) -> Path:
    """The same model in shards."""
    out.mkdir()
    state = load_file(folder / "model.safetensors")
    names, where = list(state), {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = names[i::parts]
        save_file({n: state[n] for n in part}, out / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": where})
    )
    shutil.copy(folder / "config.json", out)
    return out


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
