"""Checkpoints to merge, and merges that are interrupted."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.reader import open_checkpoint
from support import forks
from support.cli_runs import Run

State = dict[str, torch.Tensor]


def finetune(
    folder: Path, out: Path, seed: int, amount: float = 0.02, dtype: torch.dtype | None = None
) -> Path:
    """A model with a little noise on every weight, as fine-tuning leaves it."""
    shutil.copytree(folder, out)
    g = torch.Generator().manual_seed(seed)
    state = {
        n: t + amount * torch.randn(t.shape, generator=g)
        for n, t in load_file(folder / "model.safetensors").items()
    }
    save_file(
        {n: t.to(dtype or t.dtype) for n, t in state.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    return out


def state_of(folder: Path) -> State:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint[name].clone() for name in checkpoint}


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool(
        (actual.double() - wanted.double()).abs().max() <= tolerance * wanted.double().abs().max()
    )


# A process that merges slowly, so that it can be killed in the middle: every tensor takes a moment.
SLOW = """
import sys, time, torch
torch.set_num_threads(1)
from regauge.merging import engine
make = engine._merge_output
def slowly(*arguments):
    time.sleep(0.02)
    return make(*arguments)
engine._merge_output = slowly
from regauge.cli import main
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""


def kill_merge(arguments: list[str], out: Path, writing: bool, after: float) -> None:
    """Start a merge and kill it so many seconds after it began, or after it began to write."""
    merge = forks.Program(SLOW, *arguments)
    assert merge.stdout.readline() == "ready\n"
    while writing and merge.poll() is None and not out.with_name(f".{out.name}.partial").exists():
        time.sleep(0.01)
    time.sleep(after)
    merge.kill()


def kill_and_resume(
    run: Run, tmp_path: Path, arguments: list[object], kills: int, seed: int, always_writing: bool
) -> None:
    assert run(*arguments, "-o", tmp_path / "whole").code == 0
    wanted = digests(tmp_path / "whole")
    wanted.pop("README.md")  # it has the name of the folder in it
    draws, interrupted = random.Random(seed), 0
    for i in range(kills):
        out = tmp_path / f"out{i}"
        writing = always_writing or draws.random() < 0.7
        kill_merge(
            [str(x) for x in (*arguments, "-o", out)],
            out,
            writing,
            draws.uniform(0.0, 0.5) if writing else draws.uniform(0.0, 6.0),
        )
        interrupted += not out.exists()
        if not out.exists():
            result = run(*arguments, "-o", out)
            assert result.code == 0, result.err
        digests_after = digests(out)  # if it was there already, it is whole all the same
        digests_after.pop("README.md")
        assert digests_after == wanted
        assert not list(tmp_path.glob(f".out{i}.partial"))
        shutil.rmtree(out)
    assert interrupted


def interrupting(monkeypatch: pytest.MonkeyPatch, after: int) -> Callable[[], None]:
    """Interrupt a merge after so many tensors; what is returned ends that."""
    from regauge.merging import engine

    make_it, made = engine._merge_output, 0

    def until(*arguments: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made > after:
            raise KeyboardInterrupt
        return make_it(*arguments)

    monkeypatch.setattr(engine, "_merge_output", until)
    return lambda: monkeypatch.setattr(engine, "_merge_output", make_it)


def reader(folder: Path, count: int = 256) -> Path:
    """A tokenizer of words beside a model, as its own would be."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(count)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder
