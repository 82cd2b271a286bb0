"""What the command line prints is safe on a terminal: no control characters, and no crash on text
that is not Unicode.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from regauge.cli.console import escape, info, print_error, print_json, print_result
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.errors import RegaugeError
from support.cli_runs import Run

NASTY = "a\x1b]0;title\x07\x1b[2J\r\x9b31m\u202eb\udcff\x7f"
SHOWN = r"a\u001b]0;title\u0007\u001b[2J\u000d\u009b31m\u202eb\udcff\u007f"


def test_escapes() -> None:
    assert escape(NASTY) == SHOWN
    assert escape("plain, ünïcode 漢字 🙂\n\ttabs") == "plain, ünïcode 漢字 🙂\n\ttabs"


def test_everything_printed_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(b, "utf-8") for b in buffers)  # strict: a surrogate would raise
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    print_result(NASTY)
    print_json({"name": NASTY})
    info(NASTY)
    print_error(RegaugeError(f"bad {NASTY}", hint=NASTY))
    out.flush()
    err.flush()
    printed = [buffer.getvalue().decode() for buffer in buffers]
    assert printed[1] == f"regauge: {SHOWN}\nregauge: error: bad {SHOWN}\nregauge: hint: {SHOWN}\n"
    assert all(c.isprintable() or c == "\n" for text in printed for c in text)
    assert json.loads(printed[0].split("\n", 1)[1]) == {"name": NASTY}, "JSON says the same name"


def test_names_of_files_tensors_and_configs(run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", LLAMA, 0)
    for source in (tmp_path / NASTY, "\udcff\x1b[31m"):
        result = run("inspect", source)
        assert result.code == 1
        assert "\x1b" not in result.err
        assert r"\udcff" in result.err
    named = Path(shutil.copytree(folder, tmp_path / "x\x1b[2J"))
    state = load_file(named / "model.safetensors")
    save_file(
        {**state, "evil\x1b]0;t\x07": state["model.norm.weight"].clone()},
        named / "model.safetensors",
        {"format": "pt"},
    )
    result = run("move", named, "--random", "-o", tmp_path / "out")
    assert result.code == 1
    assert r"evil\u001b]0;t\u0007" in result.err
    (named / "config.json").write_text(json.dumps({**LLAMA, "model_type": "x\x1b[2J\u009b"}))
    result = run("inspect", named)
    assert result.code == 1
    assert not {"\x1b", "\x9b"} & set(result.err + result.out)
