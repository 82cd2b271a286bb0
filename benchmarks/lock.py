"""Time to lock and unlock the 2 GB bf16 Llama-shaped checkpoint of `benchmarks.move`, against `cp`
and `sync` of the same files.

Goals: lock at most 3.0 times, unlock at most 4.0 times the wall time, hashing included: a lock
reads the plain model once for its digest, transforms it, and hashes what it writes; unlocking
hashes everything before it transforms anything. The full command is timed, Python's start included;
warm cache, interleaved, median of five. $REGAUGE_BENCH_LAYERS makes a smaller model for a quick
check.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.move import Shape, clean, interleave, make, shell

GOALS = {"lock": 3.0, "lock, signed": 3.0, "unlock": 4.0, "unlock, signed": 4.0}


def main() -> int:
    from regauge.core.rng import seed_key
    from regauge.locking.keys import Key, save_key

    cache = Path(os.environ.get("REGAUGE_BENCH") or Path(tempfile.gettempdir()) / "regauge-bench")
    cache.mkdir(parents=True, exist_ok=True)
    layers = int(os.environ.get("REGAUGE_BENCH_LAYERS", "20"))
    model, out, key = (
        cache / ("llama-2gb" if layers == 20 else f"llama-{layers}-layers"),
        cache / "out",
        cache / "key",
    )
    if not model.exists():
        print(f"creating {model}", file=sys.stderr)
        make(model, shape_=Shape(layers=layers))
    key.unlink(missing_ok=True)
    save_key(Key(seed_key(1)), key)
    locked = {group: cache / f"locked-{group}" for group in ("permutation", "signed")}
    for group, folder in locked.items():
        clean(folder)
        _run("lock", model, key, folder, "--group", group)
    size = sum(p.stat().st_size for p in model.iterdir())
    print(
        f"{size / 1e9:.2f} GB in {len(list(model.glob('*.safetensors')))} shards, "
        f"{os.cpu_count()} cores"
    )
    times = interleave(
        {
            "cp + sync": partial(shell, f"cp -r '{model}' '{out}' && sync"),
            "lock": partial(_run, "lock", model, key, out, "--group", "permutation"),
            "lock, signed": partial(_run, "lock", model, key, out, "--group", "signed"),
            "unlock": partial(_run, "unlock", locked["permutation"], key, out),
            "unlock, signed": partial(_run, "unlock", locked["signed"], key, out),
        },
        out,
    )
    for folder in (out, *locked.values()):
        clean(folder)
    base, met = statistics.median(times["cp + sync"]), True
    print(f"{'':16}  {'median':>8}  {'least':>7}  {'most':>7}  {'ratio':>6}  {'goal':>6}")
    for name, seconds in times.items():
        median, goal = statistics.median(seconds), GOALS.get(name)
        met = met and (goal is None or median <= goal * base)
        goal_text = "" if goal is None else f"{goal:6.1f}"
        print(
            f"{name:16}  {median:6.2f} s  {min(seconds):5.2f} s  {max(seconds):5.2f} s  "
            f"{median / base:6.2f}  {goal_text}"
        )
    print(f"goals: {'met' if met else 'NOT MET'}")
    return 0 if met else 1


def _run(command: str, model: Path, key: Path, out: Path, *options: str) -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "regauge.cli",
            command,
            str(model),
            "-k",
            str(key),
            "-o",
            str(out),
            *options,
        ],
        check=True,
        capture_output=True,
    )
    return {"": time.perf_counter() - start}
