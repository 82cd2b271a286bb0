"""Pickled checkpoints for `convert`: bombs with their peak memory, valid large files, and 10,000
mutants compared with `torch.load`.
"""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import support.bombs as bombs
from regauge.checkpoints.blocks import bits_of
from regauge.checkpoints.convert import open_pickles
from regauge.checkpoints.reader import open_checkpoint
from soak.harness import Counter, Outcome, mutants, run_child

SPARE_MB = 160  # memory of convert beyond the size of its file: 2 million opcodes take 142 MB


def _convert(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "regauge", "convert", str(source), "-o", str(out)]


def convert_bombs(scale: float) -> Iterator[Outcome]:
    """Convert each bomb, and valid checkpoints of up to 800 MB, in child processes."""
    count, large = Counter("convert: bombs"), Counter("convert: large files")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, out = folder / "x.pt", folder / "out"
        path.write_bytes(bombs.archive(bombs.GOOD))
        idle = run_child(_convert(path, folder / "good"), folder).peak_mb
        for what, build in {**{n: b for n, (b, _) in bombs.CONVERT.items()}, **bombs.SLOW}.items():
            path.write_bytes(build())
            run = run_child(_convert(path, out), folder)
            typed = run.code == 1 and "hint: " in run.stderr and "Traceback" not in run.stderr
            kind = (
                "hangs"
                if run.code is None or run.seconds > 10
                else "lost"
                if out.exists()
                else "rejected"
                if typed
                else "untyped"
            )
            count.add(
                kind, None if kind == "rejected" else f"{what}: {run.code} {run.stderr[-300:]}"
            )
            count.peak(max(0.0, run.peak_mb - idle), SPARE_MB + path.stat().st_size / 1e6)
        yield count.outcome()
        for old in (False, True):
            state = {
                f"w{i}": torch.randn(
                    10_000, max(1, int(2_000 * scale)), dtype=torch.float32
                ).bfloat16()
                for i in range(20)
            }
            torch.save(state, path, _use_new_zipfile_serialization=not old)
            run = run_child(_convert(path, out), folder, seconds=600)
            right = run.code == 0 and all(
                torch.equal(open_checkpoint(out)[n], t) for n, t in state.items()
            )
            large.add("accepted" if right else "lost", None if right else run.stderr[-300:])
            large.peak(max(0.0, run.peak_mb - idle), SPARE_MB + path.stat().st_size / 1e6)
            for written in out.iterdir():
                written.unlink()
            out.rmdir()
        yield large.outcome()


def _sources() -> dict[str, tuple[bytes, Callable[[bytes], bytes] | None]]:
    """Return valid files by name, and for bare pickles a function that packs them into a file."""
    torch.manual_seed(0)
    shared = torch.randn(4, 3)
    state = {
        "a": shared,
        "tied": shared,
        "t": shared.T,
        "h": torch.randn(5).bfloat16(),
        "n": torch.arange(4),
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    plain, wrapped, old, deflated = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(state, plain)
    torch.save({"state_dict": state, "epoch": 3, "log": [1.5, None, {"x": (1, 2)}]}, wrapped)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    with (
        zipfile.ZipFile(io.BytesIO(plain.getvalue())) as source,
        zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        entries = {info.filename: source.read(info) for info in source.infolist()}
        for name, raw in entries.items():
            target.writestr(name, raw)

    def packed(pickle: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            for name, raw in entries.items():
                file.writestr(name, pickle if name.endswith("/data.pkl") else raw)
        return out.getvalue()

    pickle = next(raw for name, raw in entries.items() if name.endswith("/data.pkl"))
    return {
        "x.pt": (plain.getvalue(), None),
        "x.ckpt": (wrapped.getvalue(), None),
        "x.pth": (deflated.getvalue(), None),
        "x.bin": (old.getvalue(), None),
        "pickle.bin": (pickle, packed),
    }


def pickle_mutants(scale: float) -> Iterator[Outcome]:
    """Open 10,000 mutants.

    An accepted file with checksums must contain what was saved; any other, what `torch.load` reads,
    if it can read the file.
    """
    sources = _sources()
    for number, (name, (good, pack)) in enumerate(sources.items()):
        count = Counter(f"convert: mutants of {name}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            for data in mutants(good, number, max(1, round(10_000 * scale / len(sources)))):
                raw, saved = (
                    (pack(data), None) if pack else (data, None if name == "x.bin" else good)
                )
                count.trial(lambda path=path, raw=raw, saved=saved: _agrees(path, raw, saved), data)
        yield count.outcome()


def _agrees(path: Path, raw: bytes, saved: bytes | None) -> bool:
    path.write_bytes(raw)
    opened = open_pickles(path)
    stored = {n: t for file in opened.files.values() for n, t in file.items()}
    bits = {n: t.bits().tobytes() for n, t in stored.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = torch.load(
                io.BytesIO(saved or raw), weights_only=True, map_location="cpu"
            )
    except Exception:  # torch reads less than regauge does, or a name that both ignore is damaged
        return True
    for wrapper in ("state_dict", "model_state_dict", "model", "module", "params"):
        loaded = loaded[wrapper] if isinstance(loaded.get(wrapper), dict) else loaded
    tensors = {n: t for n, t in loaded.items() if isinstance(t, torch.Tensor)}
    if tensors.keys() != {*stored, *opened.aliases}:
        return False
    return all(bits[opened.aliases.get(n, n)] == bits_of(t).tobytes() for n, t in tensors.items())
