"""Shared by all tests: no hub, no network, and torchvision's missing operators declared once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# One thread per process, in child processes and their threads too: two workers share two cores, and
# sums over two threads differ in the last bit, where a test compares bits.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch

import support.torchvision_ops  # noqa: F401
from support.cli_runs import run  # noqa: F401

torch.set_num_threads(1)

# Files are handed out whole, in this order: the longest first, so that no worker is left with one
# at the end.
LONG = (
    "paper_tables",
    "split_faults",
    "cli_move",
    "families",
    "verify",
    "mutants",
    "cut",
    "report",
    "authorize",
    "match",
    "paper_003",
    "completeness",
    "docstrings",
    "real_weights",
    "readme",
    "audit_split",
    "statistics",
    "wrapper",
    "federated_experiments",
    "verify_real",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))
