"""Models at several stages of their training."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from regauge.data.tasks import Examples, logits_of, loss_of


def train_snapshots(
    model: torch.nn.Module, examples: Examples, snapshot_steps: Sequence[int], seed: int
) -> dict[int, torch.nn.Module]:
    """Return copies of the model after each of these numbers of training steps, with AdamW on
    batches of 32 of the clients' samples.
    """
    if not snapshot_steps:
        return {}
    trained, snapshots = copy.deepcopy(model).train(), {}
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    like = next(p for p in trained.parameters() if p.is_floating_point())
    for step in range(1, max(snapshot_steps) + 1):
        inputs, labels = examples.batch(rng.integers(0, len(examples), min(32, len(examples))))
        loss = loss_of(
            examples,
            logits_of(trained, {k: v.to(like) for k, v in inputs.items()}),
            labels.to(like.device),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in snapshot_steps:
            snapshots[step] = copy.deepcopy(trained).eval()
    return snapshots
