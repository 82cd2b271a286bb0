"""Theft without a base: a locked backbone and a few labels.

The backbone is intact; only its edges (embedding and head) do not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from regauge.attacks.views import LockedFileWithLabels
from regauge.core.assignment import best_assignment, sinkhorn
from regauge.core.members import Monomial
from regauge.core.progress import Progress
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples
from regauge.data.train import ScheduledOptimizer, backward_on, cosine_factor, descend, seeded
from regauge.models.cut import Crossing, Route, cut
from regauge.models.load import reinitialize

Tensor = torch.Tensor


@dataclass(frozen=True)
class Budget:
    """The training budget of a thief.

    The learning rate rises over a tenth of the steps and falls to zero along a cosine. An audit
    tries all learning rates and reports the best.
    """

    steps: int = 300
    batch: int = 32
    lrs: tuple[float, ...] = (3e-4, 3e-3)
    seed: int = 0

    @property
    def lr(self) -> float:
        """The first learning rate."""
        return self.lrs[0]

    def each_lr(self) -> Iterator[Budget]:
        """Return one budget for every learning rate."""
        return (replace(self, lrs=(lr,)) for lr in self.lrs)


def new_edges(
    view: LockedFileWithLabels, budget: Budget, progress: Progress | None = None
) -> torch.nn.Module:
    """Train a new embedding and head around the locked, frozen backbone.

    Sees: the locked file and some labelled examples.
    Recovers: a model for the owner's task.
    Why it works: the first layer of a new embedding learns any order of the stream, and the
        backbone keeps what it has learned.
    What stops it: too few labels; a task that is as easy from scratch.
    Floor: the locked model.
    Ceiling: the owner's.
    References: No Privacy Left Outside (2310.07152), for what remains usable of a protected model;
        Table 7 of Xu et al.
    """
    model = reinitialize(view.model, budget.seed, reset_modules=True)
    backbone = {name for name, part in view.spec.parts.items() if part == "backbone"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in backbone:
                parameter.copy_(view.state[name])
                parameter.requires_grad_(False)
    return fit(model, view.examples, budget, progress)


def fine_tune(
    view: LockedFileWithLabels, budget: Budget, progress: Progress | None = None
) -> torch.nn.Module:
    """Fine-tune the whole locked model, as the unauthorized user of Xu et al. does.

    Sees: the locked file and some labelled examples.
    Recovers: a model for the owner's task.
    Why it works: training works from any weights.
    What stops it: too few labels.
    Floor: the locked model.
    Ceiling: the owner's.
    References: Xu et al. (permutation equivariance, 2304.07735), Table 7.
    """
    return fit(copy.deepcopy(view.model), view.examples, budget, progress)


def train_from_scratch(
    view: LockedFileWithLabels, budget: Budget, progress: Progress | None = None
) -> torch.nn.Module:
    """Train the same class from random weights: the value of the labels alone.

    What a theft gains over this is what the lock has lost.
    """
    model = reinitialize(view.model, budget.seed, reset_modules=True)
    return fit(model, view.examples, budget, progress)


def learn_order(
    view: LockedFileWithLabels, budget: Budget, *, rounds: int = 20
) -> tuple[torch.nn.Module, Monomial]:
    """Learn the stream's key between the public edges and the locked backbone.

    Sees: the locked file, with embedding and head in plain, and some labelled examples.
    Recovers: the stream's permutation, and with it the owner's model.
    Why it works: the right order makes the loss small, and orders can be learned: as a doubly
        stochastic matrix (Sinkhorn), rounded by assignment at the end.
    What stops it: the loss is mostly flat until almost the whole order is right.
    Floor: one position in d.
    Ceiling: the owner's model.
    References: Gumbel-Sinkhorn (1802.08665).
    """
    model = copy.deepcopy(view.model).requires_grad_(False)
    size = next(space.size for name, space in view.spec.spaces.items() if name.startswith("stream"))
    generator = torch.Generator().manual_seed(budget.seed)
    scores = torch.nn.Parameter(0.01 * torch.randn(size, size, generator=generator))
    with _insert_matrix(model, lambda: sinkhorn(10 * scores, rounds)):
        _train(model, [scores], view.examples, budget)
    order = best_assignment(-scores.detach())
    final = torch.eye(size)[torch.from_numpy(order)]
    _insert_matrix(model, lambda: final)  # remains in the returned model
    return model, Monomial(np.asarray(order, np.int64)[None])


def _insert_matrix(model: torch.nn.Module, matrix: Callable[[], Tensor]) -> Route:
    """Route the stream through a matrix before the backbone and its transpose after it."""

    def transform(crossing: Crossing) -> Tensor:
        m = matrix().to(crossing.stream)
        return crossing.run(**{crossing.boundary.stream: crossing.stream @ m.T}) @ m

    return cut(model).route(transform)


def fit(
    model: torch.nn.Module, examples: Examples, budget: Budget, progress: Progress | None = None
) -> torch.nn.Module:
    """Train the trainable parameters of a model and return it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    _train(model, trained, examples, budget, progress)
    return model.eval()


def _train(
    model: torch.nn.Module,
    parameters: Iterable[torch.nn.Parameter],
    examples: Examples,
    budget: Budget,
    progress: Progress | None = None,
) -> None:
    """Train parameters by AdamW with warm-up and a cosine schedule."""
    steps, size = budget.steps, min(budget.batch, len(examples))
    optimizer = ScheduledOptimizer(
        parameters,
        OptimizerConfig("adamw", budget.lr, weight_decay=0.01),
        lambda step: budget.lr * cosine_factor(step, steps, max(1, steps // 10)),
    )
    rng = np.random.default_rng(budget.seed)

    def rows_of(step: int) -> np.ndarray:
        return np.sort(rng.choice(len(examples), size, replace=False))

    with seeded(budget.seed):
        model.train()
        for done, _ in descend(optimizer, backward_on(model, examples, rows_of), range(steps)):
            if progress is not None:
                progress(done, steps, "steps")
        model.eval()
