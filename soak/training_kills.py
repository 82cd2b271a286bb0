"""Kills (-9) of commands that compute for a while before or between their writes: match, aligned
merge, training with puzzles, federated runs.

After each kill the inputs are unchanged and the output is absent or complete; the old model of a
federated run stays until the new one is in place. The same command, run again, must succeed and
write what an undisturbed run writes, and leave nothing beside it. Where the output was already
complete, the state that the process had no time to delete may remain: the second run, with the
output out of the way, uses and deletes it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from regauge.checkpoints.reader import open_checkpoint
from regauge.checkpoints.writer import digest_of
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.errors import CheckpointError
from soak.harness import Counter, Outcome
from soak.interruptions import CONFIG, digests

LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A command and what it must write.

    Attributes:
        name: The command.
        arguments: Its arguments, without the output.
        resume: Options of the second run.
        model: The model within the output folder.
        replaces: Whether the output folder exists before, with a complete model.
    """

    name: str
    arguments: tuple[str, ...]
    resume: tuple[str, ...] = ()
    model: str = "."
    replaces: bool = False


def _vit(folder: Path) -> Path:
    """Save a small ViT for digits."""
    import torch
    import transformers

    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.2,
    }
    config = transformers.ViTConfig(
        **size, image_size=8, patch_size=2, num_channels=1, num_labels=10
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def _cases(top: Path) -> list[Case]:
    config = {**LLAMA, **CONFIG, "num_hidden_layers": LAYERS}
    a, b = (str(make_checkpoint(top / name, config, seed)) for seed, name in enumerate("ab"))
    vit = str(_vit(top / "vit"))
    digits = ("--data", "digits", "--mean", "0.3", "--std", "0.38")
    puzzles = ("--ratio", "0.5", "--epochs", "3", "--lr", "1e-2")
    clients = ("--clients", "2", "--rounds", "4", "--lr", "1e-3")
    return [
        Case("match", ("match", a, b), ("--resume",)),
        Case("merge --align", ("merge", a, b, "--align", "--force"), ("--resume",)),
        Case("jigsaw train", ("jigsaw", "train", vit, *digits, *puzzles)),
        Case("federate", ("federate", vit, *digits, *clients), (), "model", True),
    ]


def _command(case: Case, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "regauge", *case.arguments, "-o", str(out), *more]


def _clean(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for path in out.parent.glob(f".{out.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _weights(out: Path, case: Case) -> dict[str, bytes]:
    """Return the digest of every tensor: in files, metadata have no fixed order."""
    folder = out / case.model
    return {
        f"{path.relative_to(folder)}/{name}": digest_of(tensor)
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _is_complete(out: Path, case: Case) -> bool:
    """Return whether all tensors of an output can be read."""
    try:
        dict(open_checkpoint(out / case.model))
    except CheckpointError:
        return False
    return True


def kills(scale: float) -> Iterator[Outcome]:
    """Kill each command at random moments, and run it again."""
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        cases = _cases(top)
        before = {p.name: digests(p) for p in top.iterdir()}
        out, old = top / "out", top / "old"
        for case in cases:
            count = Counter(f"kill -9 during {case.name}")
            if case.replaces:
                first = list(_command(case, old))
                first[first.index("--rounds") + 1] = "1"
                subprocess.run(first, check=True, capture_output=True)
            _start(case, old, out)
            start = time.monotonic()
            subprocess.run(_command(case, out), check=True, capture_output=True)
            seconds, expected = time.monotonic() - start, _weights(out, case)
            for _ in range(max(2, round(50 * scale))):
                _clean(out)
                _start(case, old, out)
                process = subprocess.Popen(
                    _command(case, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                time.sleep(rng.uniform(0.2, 1.05) * seconds)
                process.kill()
                process.wait()
                kept = _is_complete(out, case) if case.replaces or out.exists() else True
                note = ""
                if out.exists() and not case.replaces:
                    kept = kept and _weights(out, case) == expected
                    shutil.rmtree(out)
                ended = subprocess.run(
                    _command(case, out, *case.resume), capture_output=True, text=True
                )
                if ended.returncode:
                    note = f"exit code {ended.returncode}: {ended.stderr[-300:]}"
                same = not note and _weights(out, case) == expected
                unchanged = all(digests(top / n) == d for n, d in before.items())
                left = [p.name for p in out.parent.glob(f".{out.name}*")]
                passed = kept and same and unchanged and not left
                facts = f"{case.name}: {kept=} {same=} {unchanged=} {left=} {note}"
                count.add("accepted" if passed else "lost", None if passed else facts)
            _clean(out)
            yield count.outcome()


def _start(case: Case, old: Path, out: Path) -> None:
    if case.replaces:
        shutil.copytree(old, out)
