"""The command line of the benchmarks: runs all, or those named."""

from __future__ import annotations

import sys

from benchmarks import (
    alignment,
    audit,
    authorized,
    discover,
    federated,
    gradients,
    hostile,
    jigsaw,
    lock,
    matching,
    merging,
    move,
    permuted,
    split,
    start,
    threads,
)

BENCHMARKS = {
    "start": start.main,
    "threads": threads.main,
    "move": move.main,
    "lock": lock.main,
    "audit": audit.main,
    "permuted": permuted.main,
    "authorized": authorized.main,
    "matching": matching.main,
    "alignment": alignment.main,
    "merging": merging.main,
    "gradients": gradients.main,
    "split": split.main,
    "jigsaw": jigsaw.main,
    "discover": discover.main,
    "federated": federated.main,
    "hostile": hostile.main,
}

names = sys.argv[1:] or list(BENCHMARKS)
unknown = [n for n in names if n not in BENCHMARKS]
if unknown:
    sys.exit(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
sys.exit(max(BENCHMARKS[n]() for n in names))
