"""Data files that would exhaust memory: images, npz and parquet, opened in child processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import support.bombs as bombs
from soak.harness import Counter, Outcome, mutants, run_child

# An image of 100 million pixels in RGB takes 300 MB, a column of 33 million numbers 270 MB.
BUDGET_MB = 512

_OPEN = """
import sys
from regauge.data.datasets import EncodedImages, open_data
from regauge.errors import RegaugeError
try:
    for values in open_data(sys.argv[1]).fields.values():
        if isinstance(values, EncodedImages):
            values.to_array()
except RegaugeError as error:
    print("error:", error, "hint:", error.hint)
    sys.exit(1)
"""


def data_bombs(scale: float) -> Iterator[Outcome]:
    """Open each bomb, and large files within the bounds."""
    count = Counter("data: bombs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = folder / "good.txt"
        good.write_text("a")
        idle = run_child([sys.executable, "-c", _OPEN, str(good)], folder).peak_mb
        accepted = {
            "text.parquet": (bombs.repeated_text, ""),
            "90-megapixel.png": (lambda: bombs.png(10_000, 9_000), ""),
        }
        for what, (build, message) in {**bombs.DATA, **accepted}.items():
            place = folder / what.replace(".", "-")
            place.mkdir()
            (place / what).write_bytes(build())
            target = place if what.endswith(".png") else place / what
            run = run_child([sys.executable, "-c", _OPEN, str(target)], folder)
            right = (
                "accepted"
                if run.code == 0 and not message
                else "rejected"
                if run.code == 1 and message and message in run.stdout
                else None
            )
            kind = "hangs" if run.code is None else right or "untyped"
            count.add(
                kind, None if right else f"{what}: {run.code} {(run.stdout + run.stderr)[-300:]}"
            )
            count.peak(max(0.0, run.peak_mb - idle), BUDGET_MB)
    yield count.outcome()


def data_mutants(scale: float) -> Iterator[Outcome]:
    """Open mutants of every kind of data file."""
    from regauge.data.datasets import open_data

    good = {
        "a.npz": bombs.npz(
            {"image": bombs.npy("(2, 2)", bytes(32)), "label": bombs.npy("(2,)", bytes(16))}
        ),
        "a.parquet": bombs.parquet({"text": ["one", "two"] * 20, "label": [0, 1] * 20}),
        "a.png": bombs.png(8, 8),
        "a.jsonl": b'{"text": "one", "label": 1}\n{"text": "two", "label": 0}\n',
        "a.csv": b"text,label\none,1\ntwo,0\n",
    }
    for number, (name, raw) in enumerate(good.items()):
        count = Counter(f"data: mutants of {name}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name

            def opens(data: bytes, path: Path = path) -> bool:
                path.write_bytes(data)
                opened = open_data(path.parent if path.suffix == ".png" else path)
                if path.suffix == ".png":
                    opened["image"].to_array()
                if path.suffix == ".npz":  # its entries have checksums
                    return not any(values.any() for values in opened.fields.values())
                return True

            for data in mutants(raw, number, max(1, round(10_000 * scale / len(good)))):
                count.trial(lambda opens=opens, data=data: opens(data), data)  # type: ignore[misc]
        yield count.outcome()
