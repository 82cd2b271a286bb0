"""The client's training loop: embedding and head are trained on local data, the backbone remotely.

A run is a function of its options, its data and its seed: the examples and the dropout of every
step depend on the seed and the step's number alone. A client that was killed can therefore restart
from its checkpoint and repeat its requests bit for bit (`journal`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.core.canonical import canonical_json
from regauge.data.optimizer_config import OptimizerConfig, moment_fault
from regauge.data.tasks import Examples, logits_of, loss_of
from regauge.data.train import descend, move_batch
from regauge.errors import CheckpointError, RunError
from regauge.split.client.remote_backbone import RemoteBackbone
from regauge.split.master_weights import MasterOptimizer, are_finite
from regauge.split.server import checkpoint
from regauge.split.server.executor import seeded_rng

CHECKPOINT_FOLDER = "client"  # in the folder of the journal


@dataclass(frozen=True)
class Run:
    """Length, batch size and random seed of a training run."""

    steps: int
    batch_size: int
    seed: int = 0

    def batch_indices(self, examples: Examples, n: int) -> np.ndarray:
        """Return the indices of the examples in batch `n`; every epoch has its own order."""
        batches_per_epoch = math.ceil(len(examples) / self.batch_size)
        order = np.random.default_rng([self.seed, n // batches_per_epoch]).permutation(
            len(examples)
        )
        return order[(n % batches_per_epoch) * self.batch_size :][: self.batch_size]


def train(
    model: torch.nn.Module,
    link: RemoteBackbone,
    examples: Examples,
    config: OptimizerConfig,
    run: Run,
    *,
    folder: Path | None = None,
    save_every: int = 50,
    on_step: Callable[[int, float], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[float]:
    """Train embedding and head, with one step for each step of the server.

    Args:
        model: The model, connected by `link`.
        link: Its remote backbone.
        examples: Training data.
        config: Optimizer of embedding and head.
        run: Number of steps, batch size and seed.
        folder: Folder of the journal. Checkpoints are written there, and a run resumes from the
            last one.
        save_every: Steps between checkpoints.
        on_step: Called after each step with the number of steps done and the loss.
        stop: Checked before each step; the run is saved and ends if it returns True.

    Returns:
        The losses of the steps taken by this call.

    Raises:
        RunError: `folder` holds a run with other options or data.
        CheckpointError: The checkpoint in `folder` is damaged.
    """
    device = (
        link.anchor.device
        if (p := next((p for p in model.parameters() if not p.is_meta), None)) is None
        else p.device
    )
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta}
    optimizer = MasterOptimizer(config, trained)
    digest = hashlib.sha256(
        canonical_json(
            [
                run.batch_size,
                run.seed,
                len(examples),
                sorted(map(str, config.to_dict().items())),
                sorted(trained),
            ]
        )
    ).hexdigest()
    restored = None if folder is None else checkpoint.load(folder / CHECKPOINT_FOLDER)
    begin = 0
    if restored is not None:
        if restored.digest != digest:
            raise RunError(
                f"{folder} holds a run with other options or data",
                hint="resume with the same ones, or name an empty folder",
            )
        link.load_state_dict(_restore(optimizer, restored, folder))
        begin = restored.step
    model.train()
    model.zero_grad(set_to_none=True)
    losses: list[float] = []

    def save(step: int) -> None:
        if folder is not None:
            state = checkpoint.TrainingState(
                step, 0, 0, trained, optimizer.moments(), {}, optimizer.half_masters
            )
            checkpoint.save(
                folder / CHECKPOINT_FOLDER,
                checkpoint.SplitCheckpoint(
                    digest, step, state, sessions={"link": link.state_dict()}
                ),
            )
            link.mark_saved()

    def backward(n: int) -> torch.Tensor:
        batch = examples.batch(run.batch_indices(examples, n))
        inputs, labels = move_batch(batch, device, dtype)
        with batch_rng(run.seed, n):
            loss = loss_of(examples, logits_of(model, inputs), labels) / config.accumulate
            loss.backward()
        return loss.detach()

    steps = takewhile(lambda _: stop is None or not stop(), range(begin, run.steps))
    for step, loss in descend(optimizer, backward, steps, accumulate=config.accumulate):
        losses.append(loss)
        if on_step is not None:
            on_step(step, loss)
        if step % save_every == 0 and step < run.steps:
            save(step)
    if begin + len(losses) < run.steps:  # stopped
        save(begin + len(losses))
        return losses
    link.log.flush()
    save(run.steps)
    return losses


def _restore(
    optimizer: MasterOptimizer, restored: checkpoint.SplitCheckpoint, folder: Path | None
) -> Mapping[str, Any]:
    """Load embedding, head and optimizer state; return the state of the remote backbone."""
    link_state = restored.sessions.get("link", {})
    parameters, state = optimizer.parameters, restored.main
    matches = {n: (p.shape, p.dtype) for n, p in parameters.items()} == {
        n: (t.shape, t.dtype) for n, t in state.weights.items()
    }
    matches = matches and all(
        n in parameters and m.shape == parameters[n].shape for n, m in state.masters.items()
    )
    matches = matches and all(
        n in parameters and moment_fault(m, parameters[n]) is None
        for n, m in state.optimizer.items()
    )
    matches = (
        matches
        and isinstance(link_state.get("session"), str)
        and type(link_state.get("number")) is int
    )
    matches = (
        matches
        and isinstance(link_state.get("dead"), list)
        and all(type(n) is int for n in link_state["dead"])
    )
    if not matches or not are_finite((*state.weights.values(), *state.masters.values())):
        raise CheckpointError(
            f"{folder} is damaged: its checkpoint does not match embedding and head",
            hint="restore it from a copy",
        )
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(state.weights[name])
    optimizer.restore(state)
    return link_state


def batch_rng(seed: int, n: int) -> AbstractContextManager[None]:
    """Seed torch's random numbers by a batch's number, so that a repeated step is the same."""
    return seeded_rng(f"{seed}/{n}")
