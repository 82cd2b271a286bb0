"""Time of each attack of `regauge audit lock`, by group of the lock, in seconds and as a multiple
of one pass over the same test data.

GPT-2s with random weights (the search does not depend on training): one of width 256 under every
attack, one of GPT-2's own shape under the attacks on weights. One run each; the audit measures the
times. Model theft is left out: it applies to classifiers only, and its time is that of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from regauge import apply, element, spec_of
from regauge.audit.lock_audit import LockCase, audit_lock
from regauge.core.fold import fold_norms
from regauge.core.groups import Kind
from regauge.data.tasks import Examples
from regauge.matching.barriers import score

GROUPS: dict[str, tuple[Kind, bool]] = {
    "permutation": ("permutation", False),
    "signed": ("signed", False),
    "rotation": ("orthogonal", True),
}
SHAPES: dict[str, tuple[dict[str, int], Sequence[str] | None]] = {
    "GPT-2, 6 layers, width 256": (
        {"n_layer": 6, "n_head": 4, "n_embd": 256, "vocab_size": 1024, "n_positions": 128},
        None,
    ),
    "GPT-2, 12 layers, width 768": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 2048, "n_positions": 128},
        ("public edges", "public base", "lineage"),
    ),
}


def make_case(shape: dict[str, int], within: Kind, fold: bool) -> LockCase:
    """Build a locked GPT-2 of a shape, near its public base model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **shape,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    spec, base = spec_of(model), {n: v.detach().clone() for n, v in model.state_dict().items()}
    if fold:
        spec, base = fold_norms(spec, base)
    tuned = {
        n: v + 0.01 * v.std() * torch.randn_like(v) if v.dim() > 1 else v for n, v in base.items()
    }
    g = element(spec, 1, within=within)
    locked = apply(g, tuned, "backbone")
    model.load_state_dict(locked)
    ids = torch.randint(shape["vocab_size"], (96, 64))
    examples = Examples(
        len(ids),
        shape["vocab_size"],
        lambda rows: ({"input_ids": ids[rows]}, ids[rows]),
        causal=True,
    )
    return LockCase(
        spec, locked, within, g, base, model=model, test=examples.only(np.arange(64, 96))
    )


def main() -> int:
    for name, (shape, attacks) in SHAPES.items():
        seconds: dict[str, dict[str, float]] = {}
        for group, (within, fold) in GROUPS.items():
            case = make_case(shape, within, fold)
            assert case.model is not None
            assert case.test is not None
            started = time.perf_counter()
            score(case.model, dict(case.state), case.test)
            seconds.setdefault("one pass over the test", {})[group] = time.perf_counter() - started
            results = audit_lock(case, attacks=attacks)
            for row in results.tables[0].rows:
                seconds.setdefault(str(row[0]).removeprefix("lock/"), {})[group] = float(
                    row[-1] or 0.0
                )
        wide = max(map(len, seconds))
        print(f"\n{name}: seconds, and the equivalent number of passes over the test data")
        print(f"{'':{wide}}  " + "  ".join(f"{group:>18}" for group in GROUPS))
        for attack, by in seconds.items():
            passes = seconds["one pass over the test"]
            cells = (f"{by[g]:9.2f} s {by[g] / passes[g]:6.0f}" if g in by else "" for g in GROUPS)
            print(f"{attack:{wide}}  " + "  ".join(f"{cell:>18}" for cell in cells))
    return 0
