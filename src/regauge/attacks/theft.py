"""Theft without a base: what a locked backbone is worth to whoever has a few labels. It is intact;
only what stands around it does not fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from regauge.attacks.views import WithLabels
from regauge.core.members import Monomial
from regauge.data.tasks import Examples, logits_of, loss_of
from regauge.models.cut import Crossing, Route, cut

Tensor = torch.Tensor


@dataclass(frozen=True)
class Budget:
    """How long a thief trains: steps of so many examples, at a rate that rises over a tenth of them
    and falls to nothing. An audit tries all of the rates, and counts the best.
    """

    steps: int = 300
    batch: int = 32
    rates: tuple[float, ...] = (3e-4, 3e-3)
    seed: int = 0

    @property
    def rate(self) -> float:
        return self.rates[0]

    def each(self) -> Iterator[Budget]:
        """One for every rate."""
        return (replace(self, rates=(rate,)) for rate in self.rates)


def new_edges(view: WithLabels, budget: Budget) -> torch.nn.Module:
    """The locked backbone, frozen, between an embedding and a head of the thief's own.

    Sees: the locked file and some labelled examples. Recovers: a model that does the owner's task.
    Why it works: the first layer of a new embedding takes up whatever order the stream is in, and
    what the backbone has learned stays. What stops it: too few labels; a task that is as easy from
    scratch. Floor: the locked model as it stands. Ceiling: the owner's. References: No Privacy Left
    Outside (2310.07152), for what stays usable of a protected model; paper 000's Table 7.
    """
    model = fresh(view.model)
    inside = {name for name, part in view.spec.parts.items() if part == "backbone"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in inside:
                parameter.copy_(view.state[name])
                parameter.requires_grad_(False)
    return fitted(model, view.examples, budget)


def tuned(view: WithLabels, budget: Budget) -> torch.nn.Module:
    """All of the locked model, fine-tuned as it stands: paper 000's unauthorised user.

    Sees: the locked file and some labelled examples. Recovers: a model that does the owner's task.
    Why it works: training from any weights does. What stops it: too few labels. Floor: the locked
    model as it stands. Ceiling: the owner's. References: paper 000, Table 7.
    """
    return fitted(copy.deepcopy(view.model), view.examples, budget)


def scratch(view: WithLabels, budget: Budget) -> torch.nn.Module:
    """The same class from random weights: what the labels alone are worth. What a theft adds to
    this is what the lock has lost.
    """
    return fitted(fresh(view.model), view.examples, budget)


def learned_order(
    view: WithLabels, budget: Budget, *, rounds: int = 20
) -> tuple[torch.nn.Module, Monomial]:
    """The key of the stream itself, learned between the public edges and the locked backbone.

    Sees: the locked file, whose embedding and head are as they were, and some labelled examples.
    Recovers: the stream's permutation, and with it the owner's model. Why it works: of all orders,
    the right one makes the loss small, and orders can be learned: as a doubly stochastic matrix
    (Sinkhorn), rounded by assignment in the end. What stops it: a loss that is flat until nearly
    all is right, which it mostly is. Floor: one place in d. Ceiling: the owner's model. References:
    Gumbel-Sinkhorn (1802.08665).
    """
    from scipy.optimize import linear_sum_assignment

    model = copy.deepcopy(view.model).requires_grad_(False)
    size = next(space.size for name, space in view.spec.spaces.items() if name.startswith("stream"))
    draw = torch.Generator().manual_seed(budget.seed)
    scores = torch.nn.Parameter(0.01 * torch.randn(size, size, generator=draw))
    with _between(model, lambda: _sinkhorn(scores, rounds)):
        _descend(model, [scores], view.examples, budget)
    order = linear_sum_assignment(-scores.detach().numpy())[1]
    final = torch.eye(size)[torch.from_numpy(order)]
    _between(model, lambda: final)  # stays
    return model, Monomial(np.asarray(order, np.int64)[None])


def _sinkhorn(scores: Tensor, rounds: int) -> Tensor:
    """A doubly stochastic matrix."""
    x = 10 * scores
    for _ in range(rounds):
        x = x - x.logsumexp(1, keepdim=True)
        x = x - x.logsumexp(0, keepdim=True)
    return x.exp()


def _between(model: torch.nn.Module, matrix: Callable[[], Tensor]) -> Route:
    """The stream through a matrix before the backbone, and back behind it."""

    def turned(crossing: Crossing) -> Tensor:
        m = matrix().to(crossing.stream)
        return crossing.run(**{crossing.boundary.stream: crossing.stream @ m.T}) @ m

    return cut(model).route(turned)


def fresh(model: torch.nn.Module) -> torch.nn.Module:
    """The same class and sizes with weights as they are before training."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "post_init"):
        return type(model)(copy.deepcopy(config))
    new = copy.deepcopy(model)
    for module in new.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return new


def fitted(model: torch.nn.Module, examples: Examples, budget: Budget) -> torch.nn.Module:
    """The model after training what of it may be trained."""
    _descend(model, [p for p in model.parameters() if p.requires_grad], examples, budget)
    return model.eval()


def _descend(
    model: torch.nn.Module, parameters: Iterable[Tensor], examples: Examples, budget: Budget
) -> None:
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=budget.rate)
    draw = np.random.default_rng(budget.seed)
    with torch.random.fork_rng():
        torch.manual_seed(budget.seed)
        model.train()
        for step in range(budget.steps):
            rise = max(1, budget.steps // 10)
            share = (
                (step + 1) / rise
                if step < rise
                else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, budget.steps - rise)))
            )
            for group in optimizer.param_groups:
                group["lr"] = budget.rate * share
            rows = draw.choice(len(examples), min(budget.batch, len(examples)), replace=False)
            inputs, labels = examples.batch(np.sort(rows))
            optimizer.zero_grad()
            loss_of(examples, logits_of(model, inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
