"""The client's loop: embedding and head are trained here, on data that stay here, while the
backbone is with the server.

A run is a function of its options, its data and its seed: every step draws its examples and its
dropout from the seed and its number. So a client that was killed can start again from its
checkpoint, and repeat what it had asked since, bit for bit (`journal`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.core.canonical import canonical_json
from regauge.core.progress import Progress
from regauge.data.tasks import Examples, logits_of, loss_of
from regauge.errors import CheckpointError, RegaugeError
from regauge.split.client.remote_backbone import RemoteBackbone
from regauge.split.master_weights import MasterOptimizer, are_finite
from regauge.split.server import checkpoint
from regauge.split.server.executor import seeded_rng
from regauge.split.server.optimizer_config import OptimizerConfig, moment_fault

CHECKPOINT_FOLDER = "client"  # the folder of the client's checkpoint in its journal


class RunError(RegaugeError):
    """A run that cannot go on as asked."""


@dataclass(frozen=True)
class Run:
    """How long, with how many examples at a time, and drawn from which seed."""

    steps: int
    batch_size: int
    seed: int = 0

    def batch_indices(self, examples: Examples, n: int) -> np.ndarray:
        """The examples of the n-th batch: every epoch has an order of its own."""
        each = math.ceil(len(examples) / self.batch_size)
        order = np.random.default_rng([self.seed, n // each]).permutation(len(examples))
        return order[(n % each) * self.batch_size :][: self.batch_size]


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
    """Train embedding and head, one step of theirs for each of the server's. Returns the losses of
    the steps that were taken here.

    With `folder`, the journal's, there is a checkpoint every so many steps, and the run goes on
    from the last one. `stop` is asked before each step.
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
    kept = None if folder is None else checkpoint.load(folder / CHECKPOINT_FOLDER)
    begin = 0
    if kept is not None:
        if kept.digest != digest:
            raise RunError(
                f"{folder} holds a run with other options or data",
                hint="go on with the same ones, or name an empty folder",
            )
        link.load_state_dict(_restore(optimizer, kept, folder))
        begin = kept.step
    model.train()
    model.zero_grad(set_to_none=True)
    losses: list[float] = []

    def save(step: int) -> None:
        if folder is not None:
            copy = checkpoint.TrainingState(
                step, 0, 0, trained, optimizer.moments(), {}, optimizer.half
            )
            checkpoint.save(
                folder / CHECKPOINT_FOLDER,
                checkpoint.SplitCheckpoint(
                    digest, step, copy, sessions={"link": link.state_dict()}
                ),
            )
            link.mark_saved()

    for step in range(begin, run.steps):
        if stop is not None and stop():
            save(step)
            return losses
        total = 0.0
        for part in range(config.accumulate):
            n = step * config.accumulate + part
            inputs, labels = examples.batch(run.batch_indices(examples, n))
            moved = {
                k: v.to(device, dtype) if v.is_floating_point() else v.to(device)
                for k, v in inputs.items()
            }
            with batch_rng(run.seed, n):
                loss = (
                    loss_of(examples, logits_of(model, moved), labels.to(device))
                    / config.accumulate
                )
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.collect()
            total += float(loss.detach())
        optimizer.step(step)
        losses.append(total)
        if on_step is not None:
            on_step(step + 1, total)
        if (step + 1) % save_every == 0 and step + 1 < run.steps:
            save(step + 1)
    link.log.flush()
    save(run.steps)
    return losses


def measure(
    model: torch.nn.Module,
    examples: Examples,
    batch_size: int,
    progress: Progress | None = None,
) -> dict[str, float]:
    """The mean loss, and with it the accuracy (of several answers to each example, their mean), or
    the perplexity where tokens are predicted from those before them.
    """
    device = next(p.device for p in model.parameters() if not p.is_meta)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    nats = right = count = 0.0
    model.eval()
    for at in range(0, len(examples), batch_size):
        inputs, labels = examples.batch(np.arange(at, min(at + batch_size, len(examples))))
        moved, labels = (
            {
                k: v.to(device, dtype) if v.is_floating_point() else v.to(device)
                for k, v in inputs.items()
            },
            labels.to(device),
        )
        with torch.no_grad():
            logits = logits_of(model, moved)
        if examples.multi_label:
            nats += (
                float(
                    torch.nn.functional.binary_cross_entropy_with_logits(
                        logits, labels.to(logits.dtype)
                    )
                )
                * labels.numel()
            )
            right, count = (
                right + float(((logits > 0) == (labels > 0)).sum()),
                count + labels.numel(),
            )
            if progress is not None:
                progress(min(at + batch_size, len(examples)), len(examples), "")
            continue
        if examples.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        guess = logits.argmax(1 if examples.dense else -1)
        counted = labels != -100
        n = int(counted.sum())
        flat = logits if examples.dense else logits.flatten(0, -2)
        nats += (
            float(
                torch.nn.functional.cross_entropy(
                    flat, labels if examples.dense else labels.flatten(), ignore_index=-100
                )
            )
            * n
        )
        right, count = right + float((guess == labels)[counted].sum()), count + n
        if progress is not None:
            progress(min(at + batch_size, len(examples)), len(examples), "")
    loss = nats / count
    found = {"loss": loss, "accuracy": right / count, "examples": float(len(examples))}
    return found | (
        {"perplexity": math.exp(min(loss, 700.0))} if examples.causal or examples.tokens else {}
    )


def _restore(
    optimizer: MasterOptimizer, kept: checkpoint.SplitCheckpoint, folder: Path | None
) -> Mapping[str, Any]:
    """Load embedding, head and optimizer state, and return the state of the link."""
    link = kept.sessions.get("link", {})
    trained, saved = optimizer.parameters, kept.main
    fits = {n: (p.shape, p.dtype) for n, p in trained.items()} == {
        n: (t.shape, t.dtype) for n, t in saved.weights.items()
    }
    fits = fits and all(
        n in trained and m.shape == trained[n].shape for n, m in saved.masters.items()
    )
    fits = fits and all(
        n in trained and moment_fault(m, trained[n]) is None for n, m in saved.optimizer.items()
    )
    fits = fits and isinstance(link.get("session"), str) and type(link.get("number")) is int
    fits = fits and isinstance(link.get("dead"), list) and all(type(n) is int for n in link["dead"])
    if not fits or not are_finite((*saved.weights.values(), *saved.masters.values())):
        raise CheckpointError(
            f"{folder} is damaged: its checkpoint does not fit embedding and head",
            hint="restore it from a copy",
        )
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(saved.weights[name])
    optimizer.restore(saved)
    return link


def batch_rng(seed: int, n: int) -> AbstractContextManager[None]:
    """Random numbers that are a function of the seed and the batch's number: a step that is
    repeated draws the same.
    """
    return seeded_rng(f"{seed}/{n}")
