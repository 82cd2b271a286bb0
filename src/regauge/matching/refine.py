"""Refinement: a few learned steps that move an element, and nothing else, towards a path without a
barrier.

The closed forms bring weights together; what is wanted is a low loss between the models. So the
mean loss of

    theta_t = (1 - t) (g . A) + t (h . B)

over mini-batches and over t is made smaller in g (and in h, with `both`), by Adam in the tangent
space of the group (tangents.py). g and h stay elements of the spec's groups at every step: each end
keeps its architecture and its function.

What is learnt from is the caller's choice: a loss with labels; without one, the divergence from the
ends' own predictions, mixed as the weights are (no labels); on text that the two models write
themselves (`recording.written`) not even data.

On moving both ends. The action is linear, so h^-1 takes the path from g.A to h.B to the path from
(h^-1 g).A to B, point by point, and the function is the same all along: moving both reaches no path
that moving one does not. It is there for those who want the ends to meet halfway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.core import axes as ax
from regauge.core.action import State, act, tensor_transforms
from regauge.core.check import check, require
from regauge.core.element import Element, identity, match_spaces
from regauge.core.fit import assign
from regauge.core.groups import GeneralLinear, Group, Orthogonal, PlaneSigns, Scaling
from regauge.core.members import Member, Monomial, Planes, permutation_index
from regauge.core.rng import Floats, Ints
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import ElementError, SpecError
from regauge.matching import tangents
from regauge.matching.costs import MatchError
from regauge.matching.tangents import Array, Sides

MAX_CACHE_BYTES = 1 << 30  # bytes of the ends' predictions that are kept while they teach

Tensor = torch.Tensor
Batch = Mapping[str, Tensor] | Tensor
Forward = Callable[..., Any]
Loss = Callable[[Forward, Batch], Tensor]


@dataclass(frozen=True)
class LearningRates:
    """The size of a step in each kind of group: radians, logarithms of scales, and votes for a new
    assignment (0 keeps what it was).
    """

    rotation: float = 3e-3
    linear: float = 1e-2
    scale: float = 1e-2
    turn: float = 1e-2
    assignment: float = 0.0

    def for_group(self, group: Group) -> float:
        match group:
            case Orthogonal():
                return self.rotation
            case GeneralLinear():
                return self.linear
            case Scaling():
                return self.scale
            case _:
                return self.turn


@dataclass(frozen=True)
class Evaluation:
    """One look at the held-out part: after how many steps, the mean training loss since the last
    look, and the loss there.
    """

    step: int
    train_loss: float
    held_out_loss: float


@dataclass(frozen=True)
class Refinement:
    """The elements of both ends (h is the identity unless both move), and the losses on the
    held-out part. `loss` is never above `start`.
    """

    g: Element
    h: Element
    initial_loss: float
    loss: float
    best_step: int
    history: tuple[Evaluation, ...]
    seconds: float

    @property
    def gain(self) -> float:
        return self.initial_loss - self.loss


def refine(
    spec: Spec,
    a: State,
    b: State,
    g: Element,
    model: torch.nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Loss | None = None,
    h: Element | None = None,
    move_both: bool = False,
    spaces: Sequence[str] | None = None,
    steps: int = 200,
    t_range: tuple[float, float] = (0.4, 0.6),
    lr: LearningRates | None = None,
    held_out: float | Sequence[Batch] = 0.1,
    eval_every: int = 20,
    seed: int = 0,
    on_mark: Callable[[Evaluation], None] | None = None,
) -> Refinement:
    """Improve the element g that moves A next to B (and h, that moves B, with `both`) by `steps`
    steps of learning.

    `model` is a live module of the family: only its forward pass is used, with weights of the path;
    it is not changed. `loss(run, batch)` calls `run` as it would call the model. Without a loss the
    ends teach: the divergence of the mixed model's predictions from theirs. `between` is where t is
    drawn from. `held` is a share of the batches (spread over them) or other batches: there the loss
    is looked at every `every` steps, and the best element is what comes back, the start if nothing
    was better. `spaces` restricts what moves. The same seed gives the same result.
    """
    began = time.perf_counter()
    h = identity(spec) if h is None else h
    path = _Path(spec, a, b, model, loss, t_range)
    train, test = _split_batches(batches, held_out)
    for one in (g, h):
        _require_element(one, spec)
    g, h = g.to(spec), h.to(spec)  # the spec of a file may name tensors otherwise
    chosen = set(spec.spaces) if spaces is None else match_spaces(spec, spaces)
    lr = lr or LearningRates()
    ends = [
        _End(spec, g, path.a, chosen, lr),
        _End(spec, h, path.b, chosen if move_both else set(), lr),
    ]
    rng = np.random.default_rng(seed)
    with _eval_mode(model):
        best = path.held_out_loss(ends, test)
        if not np.isfinite(best):
            raise MatchError(
                "the loss between the models is not finite at the start",
                hint="look at the batches and at both models' own losses",
            )
        marks, kept, reached = [Evaluation(0, best, best)], (g, h), 0
        order = _shuffled_indices(rng, len(train))
        since: list[float] = []
        for step in range(1, steps + 1):
            t = float(rng.uniform(*t_range))
            value, grads = path.gradient(ends, train[next(order)], t)
            if not np.isfinite(value):
                break
            since.append(value)
            slowing = 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))
            ends[0].update(grads, 1 - t, slowing)
            ends[1].update(grads, t, slowing)
            if step % eval_every == 0 or step == steps:
                mark = Evaluation(step, float(np.mean(since)), path.held_out_loss(ends, test))
                since = []
                marks.append(mark)
                if on_mark:
                    on_mark(mark)
                if mark.held_out_loss < best:
                    best, kept, reached = (
                        mark.held_out_loss,
                        (ends[0].element, ends[1].element),
                        step,
                    )
    for one in kept:
        one.require()
    return Refinement(
        kept[0],
        kept[1],
        marks[0].held_out_loss,
        best,
        reached,
        tuple(marks),
        time.perf_counter() - began,
    )


def bind_weights(model: torch.nn.Module, state: Mapping[str, Tensor]) -> Forward:
    """The model with other weights, to be called as the model is. Weights that it ties are taken as
    they are given, each under its own name.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, dict(state), args, kwargs, tie_weights=False)

    return run


class _Path:
    """The straight line between two moved models, and the loss on it."""

    def __init__(
        self,
        spec: Spec,
        a: State,
        b: State,
        model: torch.nn.Module,
        loss: Loss | None,
        t_range: tuple[float, float],
    ) -> None:
        low, high = t_range
        if not 0 <= low <= high <= 1:
            raise MatchError(
                f"t cannot be drawn between {low} and {high}", hint="0 <= low <= high <= 1"
            )
        self.spec, self.model, self.loss = spec, model, loss
        self.teacher_cache: dict[
            int, list[dict[str, Tensor]]
        ] = {}  # by the identity of batches, which the caller's list keeps alive
        self.cache_bytes_left = MAX_CACHE_BYTES
        self.eval_points = (
            (0.5 * (low + high),)
            if high - low <= 0.25
            else tuple(low + (high - low) * f for f in (0.25, 0.5, 0.75))
        )
        self.a, self.b = (
            _prepare_state(spec, state, model, which) for state, which in ((a, "A"), (b, "B"))
        )
        known = {
            *dict(model.named_parameters(remove_duplicate=False)),
            *dict(model.named_buffers(remove_duplicate=False)),
        }
        missing = next((n for n in self.a if n not in known), None)
        if missing is not None:
            raise SpecError(
                f'the module has no "{missing}", which the spec "{spec.family}" speaks of',
                hint="give a module of the class that the spec is of",
            )
        if loss is None and spec.visible:
            raise SpecError(
                f"the outputs of this {spec.family} live in {', '.join(sorted(spec.visible))}, "
                "which moves: the ends cannot be averaged as teachers",
                hint="give a loss of your own",
            )

    def compute_loss(self, batch: Batch, t: float, mixed: Mapping[str, Tensor]) -> Tensor:
        if self.loss is not None:
            return self.loss(bind_weights(self.model, mixed), batch)
        return _divergence(
            _predictions(self.spec, bind_weights(self.model, mixed), batch),
            self._teacher_outputs(batch),
            t,
            batch,
        )

    def _teacher_outputs(self, batch: Batch) -> list[dict[str, Tensor]]:
        """What the ends say of a batch. They keep their functions, so this is computed once, as
        long as there is room to keep it.
        """
        if id(batch) in self.teacher_cache:
            return self.teacher_cache[id(batch)]
        with torch.no_grad():
            found = [
                _predictions(self.spec, bind_weights(self.model, state), batch)
                for state in (self.a, self.b)
            ]
        size = sum(v.numel() * v.element_size() for one in found for v in one.values())
        if size <= self.cache_bytes_left:
            self.cache_bytes_left -= size
            self.teacher_cache[id(batch)] = found
        return found

    def gradient(
        self, ends: Sequence[_End], batch: Batch, t: float
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss of one batch at t, and its gradient with respect to theta_t."""
        first, second = ends[0].weights, ends[1].weights
        mixed = {
            n: torch.lerp(w, second[n], t).requires_grad_(w.is_floating_point())
            for n, w in first.items()
        }
        with torch.enable_grad():
            value = self.compute_loss(batch, t, mixed)
        names = list(mixed)
        grads = torch.autograd.grad(value, [mixed[n] for n in names], allow_unused=True)
        return float(value.detach()), {
            n: grad for n, grad in zip(names, grads, strict=True) if grad is not None
        }

    def held_out_loss(self, ends: Sequence[_End], batches: Sequence[Batch]) -> float:
        first, second = ends[0].weights, ends[1].weights
        total = 0.0
        with torch.no_grad():
            for t in self.eval_points:
                mixed = {n: torch.lerp(w, second[n], t) for n, w in first.items()}
                total += sum(float(self.compute_loss(batch, t, mixed)) for batch in batches)
        return total / (len(self.eval_points) * len(batches))


class _End:
    """One end of the path: its state, the element that moves it, and what the optimizer
    remembers.
    """

    def __init__(
        self,
        spec: Spec,
        element: Element,
        state: dict[str, Tensor],
        spaces: set[str],
        lr: LearningRates,
    ) -> None:
        self.spec, self.element, self.state, self.lr = spec, element, state, lr
        self.spaces = {
            n
            for n in spaces
            if spec.spaces[n].size > 1 or isinstance(spec.spaces[n].group, Scaling | GeneralLinear)
        }
        self.adam: dict[str, _Adam] = {n: _Adam() for n in self.spaces}
        self.assignments = {
            n: _StraightThroughAssignment(spec.spaces[n].group) for n in self.spaces
        }
        self.weights = self._apply_element()

    def _apply_element(self) -> dict[str, Tensor]:
        out = dict(self.state)
        for move in tensor_transforms(self.element):
            if move.source != move.name or ax.spaces(move.axes) & self.element.members.keys():
                out[move.name] = act(self.element, self.state[move.source], move.axes, at=move.at)
        return out

    def update(self, grads: Mapping[str, Tensor], share: float, slowing: float) -> None:
        """One step down the slope, in every space at once. `share` is that of this end in the
        mixture that the gradients are of.
        """
        if not self.spaces:
            return
        found = tangents.collect_sides(self.spec, self.weights, grads, self.spaces)
        members: dict[str, Member] = {}
        for name, side in found.items():
            if side.plain or side.dual or side.bar:
                member = self._space_step(name, side, share, slowing)
                if member is not None:
                    members[name] = member
        after = Element(self.spec, members) @ self.element
        strained = {
            n
            for n in members
            if not (group := self.spec.spaces[n].group).is_orthogonal
            and group.fault(after.members[n])
        }
        if strained:  # at the limit of what a member may stretch: these stay where they are
            members = {n: m for n, m in members.items() if n not in strained}
            after = Element(self.spec, members) @ self.element
        for name in self.spaces:
            parent = self.spec.spaces[name].over
            if parent in members:
                order = permutation_index(members[parent])
                self.adam[name].permute(order)
                self.assignments[name].permute(order)
        self.element = after
        self.weights = self._apply_element()

    def _space_step(self, name: str, side: Sides, share: float, slowing: float) -> Member | None:
        group = self.spec.spaces[name].group
        slope = tangents.tangent_grad(group, side)
        member: Member | None = None
        if slope is not None:
            x = (
                -slowing
                * self.lr.for_group(group)
                * tangents.project(group, self.adam[name].direction(share * slope))
            )
            member = tangents.retract(group, x)
        if self.lr.assignment:
            elected = self.assignments[name].update(
                tangents.assignment_scores(group, side), slowing * self.lr.assignment
            )
            if elected is not None:
                member = elected if member is None else elected.after(member)
        return member


class _Adam:
    """Adam's direction for one space, in the coordinates of its tangent space."""

    def __init__(self, first: float = 0.9, second: float = 0.99) -> None:
        self.betas, self.steps = (first, second), 0
        self.mean: Array | None = None
        self.square: Array | None = None

    def direction(self, grad: Array) -> Array:
        (b1, b2), self.steps = self.betas, self.steps + 1
        self.mean = (1 - b1) * grad + (0 if self.mean is None else b1 * self.mean)
        self.square = (1 - b2) * np.abs(grad) ** 2 + (
            0 if self.square is None else b2 * self.square
        )
        size = np.sqrt(self.square / (1 - b2**self.steps))
        return np.asarray(self.mean / (1 - b1**self.steps) / (size + 1e-8 * size.max() + 1e-30))

    def permute(self, order: Ints) -> None:
        """The parent's places changed: what belongs to a member goes with it."""
        if self.mean is not None and self.square is not None:
            self.mean, self.square = self.mean[order], self.square[order]


class _StraightThroughAssignment:
    """A straight-through assignment: a score for everyone at every place, of which the best
    assignment is what is used.

    At first the scores say how alike those who stand there are to each other, so that all stay. The
    slope of the loss is then taken off at every step, as if the weights that are wanted at a place
    could be learnt freely; whoever is most like them gets it.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.signs = group, tangents.has_signs(group)
        self.scores: Floats | None = None

    def update(self, votes: tuple[Floats, Floats] | None, rate: float) -> Member | None:
        """One step; the permutation (or the signs) that is elected by it, or None if all stay."""
        if votes is None:
            return None
        scores = (votes[0] if self.scores is None else self.scores) - rate * votes[1]
        if isinstance(self.group, PlaneSigns):
            signs = np.where(scores < 0, -1.0, 1.0)
            self.scores = np.abs(scores)
            return (
                None
                if (signs > 0).all()
                else Planes(signs.astype(np.complex128), self.group.layout)
            )
        height = np.abs(scores) if self.signs else scores
        self.scores = scores
        if (np.einsum("kii->ki", scores) >= height.max(2)).all():
            return None
        index = assign(height)
        picked = np.take_along_axis(scores, index[:, :, None], 2)[:, :, 0]
        sign = np.where(picked < 0, -1.0, 1.0) if self.signs else np.ones_like(picked)
        self.scores = np.take_along_axis(scores, index[:, None, :], 2) * sign[:, None, :]
        if (sign > 0).all() and (index == np.arange(index.shape[1])).all():
            return None
        return Monomial(index, sign if self.signs else None)

    def permute(self, order: Ints) -> None:
        """The parent's places changed: what belongs to a member goes with it."""
        if self.scores is not None:
            self.scores = self.scores[order]


def _require_element(g: Element, spec: Spec) -> None:
    if g.spec.spaces.keys() != spec.spaces.keys() or g.spec.sizes != spec.sizes:
        raise ElementError(
            "the element to start from belongs to another model",
            hint="match the two models with this spec first",
        )
    Element(spec, g.members).require()


def _prepare_state(
    spec: Spec, state: State, model: torch.nn.Module, which: str
) -> dict[str, Tensor]:
    """A state as the path needs it: every tensor of the spec, tied ones under both names, in
    float32 or better; finite.
    """
    full = dict(state)
    for alias, target in spec.ties.items():
        if alias in full or target in full:
            full.setdefault(alias, full.get(target))  # type: ignore[arg-type]
            full.setdefault(target, full[alias])
    require(
        check(spec, full),
        f'model {which} does not fit the spec "{spec.family}"',
        hint="both models must be of the spec's class, folded if it is",
    )
    wide = next((p.dtype for p in model.parameters() if p.dtype == torch.float64), torch.float32)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    out = {n: full[n].detach().to(device, wide) for n in stored_tensors(spec)}
    broken = [n for n, w in out.items() if not bool(torch.isfinite(w).all())]
    if broken:
        raise MatchError(
            f'model {which} has numbers that are not finite in "{broken[0]}" ({len(broken)} '
            "such tensors)",
            hint="restore the checkpoint",
        )
    return out


def _split_batches(
    batches: Sequence[Batch], held: float | Sequence[Batch]
) -> tuple[list[Batch], list[Batch]]:
    """What is learnt from, and what is looked at. A single batch must do for both."""
    train = list(batches)
    if not train:
        raise MatchError(
            "there are no batches to refine on",
            hint="give some, or recording.written(...): text that the models write themselves",
        )
    if not isinstance(held, int | float):
        return train, list(held) or train
    if not 0 <= held < 1:
        raise MatchError(
            f"a share of {held} of the batches cannot be held out",
            hint="0 <= held < 1, or other batches",
        )
    n = max(1, round(held * len(train))) if held else 0
    if not 0 < n < len(train):
        return train, train
    apart = set(
        np.linspace(0, len(train) - 1, n + 2).round().astype(int)[1:-1].tolist()
    )  # spread: each model may have written its own half
    return [b for i, b in enumerate(train) if i not in apart], [train[i] for i in sorted(apart)]


def _shuffled_indices(rng: np.random.Generator, n: int) -> Iterator[int]:
    while True:
        yield from rng.permutation(n).tolist()


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """The model without dropout, for as long as it is used; its parameters take no part in any
    gradient.
    """
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, was in training.items():
            m.training = was


def _predictions(spec: Spec, run: Forward, batch: Batch) -> dict[str, Tensor]:
    """What the model returns of what the spec calls its outputs."""
    result = run(**batch) if isinstance(batch, Mapping) else run(batch)
    named = {"logits": result} if isinstance(result, Tensor) else dict(result.items())
    found = {n: v for n, v in named.items() if n in spec.outputs} if spec.outputs else named
    found = {n: v for n, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if not found:
        raise SpecError(
            f"the model returns none of {', '.join(spec.outputs)}", hint="give a loss of your own"
        )
    return found


def _divergence(
    student: Mapping[str, Tensor], teachers: Sequence[Mapping[str, Tensor]], t: float, batch: Batch
) -> Tensor:
    """Of scores (logits): the mean divergence of the student's distribution from the teachers',
    mixed by t. Of anything else: the mean square.
    """
    total = torch.zeros(())
    for name, out in student.items():
        first, second = (teacher[name] for teacher in teachers)
        if "logits" in name:
            p = torch.lerp(first.softmax(-1), second.softmax(-1), t)
            each = (torch.xlogy(p, p) - p * out.log_softmax(-1)).sum(-1)
        else:
            each = (out - torch.lerp(first, second, t)).square().mean(-1)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is not None and mask.shape == each.shape:
            total = total + (each * mask).sum() / mask.sum()
        else:
            total = total + each.mean()
    return total
