"""A match that is killed at a random moment resumes and writes the same bytes."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge
import support.picos as picos
from support import forks
from support.merges import digests

# Every part and every tensor takes a moment, so that a kill meets the match in the middle.
SLOW = """
import sys, time
import regauge
from regauge.checkpoints import resume, writer
save, write = resume.StateStore.save, writer._TensorWriter.write
def slowly(*arguments):
    time.sleep(0.05)
    return save(*arguments)
resume.StateStore.save = slowly
def write_slowly(*arguments):
    time.sleep(0.2)
    return write(*arguments)
writer._TensorWriter.write = write_slowly
regauge.match, regauge.MatchOptions  # imported before the clock starts
print("ready", flush=True)
a, b, out = sys.argv[1:]
options = regauge.MatchOptions(sweeps=2)
regauge.match(a, b, out=out, resume=True, options=options).save(out, resume=True)
"""


def run_and_kill(a: Path, b: Path, out: Path, after: float | None) -> bool:
    """Match in a process, killed so many seconds after its first part was saved (or at once, if
    that is negative); return whether it finished.
    """
    matching = forks.Program(SLOW, a, b, out)
    assert matching.stdout.readline() == "ready\n"
    while (after or -1) >= 0 and matching.poll() is None:
        if out.with_name(f".{out.name}.state").exists():
            break
        time.sleep(0.01)
    try:
        return matching.wait(None if after is None else max(after, 0.0)) == 0
    except TimeoutError:
        return False
    finally:
        matching.kill()


def contents(out: Path) -> tuple[dict[str, str], Any]:
    """The digests of the files, and the report without times."""
    files = digests(out)
    report = json.loads((out / "match.json").read_text())
    del files["match.json"]
    steps = [row[:-1] for row in report["tables"][1]["rows"]]
    return files, (report["findings"], report["tables"][0], steps)


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_killed_match_writes_the_same_bytes(kills: int, tmp_path: Path) -> None:
    model: Any = picos.build("gpt2").float()
    model.save_pretrained(tmp_path / "a")
    spec = regauge.spec_of(model)
    generator = torch.Generator().manual_seed(1)
    near = {
        n: t + 0.05 * torch.randn(t.shape, generator=generator)
        for n, t in model.state_dict().items()
    }
    near["lm_head.weight"] = near["transformer.wte.weight"]
    model.load_state_dict(regauge.apply(regauge.element(spec, 3), near))
    model.save_pretrained(tmp_path / "b")
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    assert run_and_kill(a, b, tmp_path / "whole", None)
    wanted = contents(tmp_path / "whole")
    moments, killed, found = random.Random(kills), 0, 0
    while killed < kills:
        if run_and_kill(a, b, out, moments.uniform(-0.2, 1.2)):
            assert contents(out) == wanted
            shutil.rmtree(out)
            continue
        killed += 1
        found += (tmp_path / ".out.state").exists()
        assert not out.exists() or contents(out) == wanted
        if out.exists():  # killed between the last rename and the end
            shutil.rmtree(out)
    assert found
    assert run_and_kill(a, b, out, None)
    assert contents(out) == wanted
    assert not list(tmp_path.glob(".out*"))
