"""Refinement: learned steps that move an element, and nothing else, towards a path without a
barrier.

The closed forms of matching minimize the distance of weights; the goal is a low loss between the
models. So the mean loss of

    theta_t = (1 - t) (g . A) + t (h . B)

over mini-batches and over t is minimized in g (and in h, with `move_both`), by Adam in the tangent
space of the group (tangents.py). g and h stay elements of the spec's groups at every step: each end
keeps its architecture and its function.

The caller chooses the loss: one with labels; by default the divergence from the ends' own
predictions, mixed as the weights are (no labels); with text that the two models generate
(`activations.generate_text`) not even data.

Moving both ends reaches no path that moving one does not. The action is linear, so h^-1 maps the
path from g.A to h.B to the path from (h^-1 g).A to B, point by point, with the same function all
along. `move_both` is for ends that should meet halfway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from regauge.errors import ElementError, MatchError, SpecError
from regauge.matching import tangents
from regauge.matching.activations import eval_mode
from regauge.matching.tangents import Array, Sides

MAX_CACHE_BYTES = 1 << 30  # of the ends' predictions

Tensor = torch.Tensor
Batch = Mapping[str, Tensor] | Tensor
Forward = Callable[..., Any]
Loss = Callable[[Forward, Batch], Tensor]


@dataclass(frozen=True)
class LearningRates:
    """The learning rate of each kind of group.

    Attributes:
        rotation: radians.
        linear: entries of a matrix.
        scale: logarithms of scales.
        turn: radians and logarithms of rotary planes.
        assignment: weight of the gradient in the scores of a new assignment; 0 keeps the old one.
    """

    rotation: float = 3e-3
    linear: float = 1e-2
    scale: float = 1e-2
    turn: float = 1e-2
    assignment: float = 0.0

    def for_group(self, group: Group) -> float:
        """Return the learning rate of a group."""
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
    """One evaluation on the held-out batches.

    Attributes:
        step: the number of steps before it.
        train_loss: the mean training loss since the last evaluation.
        held_out_loss: the loss on the held-out batches.
    """

    step: int
    train_loss: float
    held_out_loss: float


@dataclass(frozen=True)
class Refinement:
    """The result of a refinement.

    Attributes:
        g: the element of A.
        h: the element of B; the identity unless both move.
        initial_loss: the held-out loss before the first step.
        loss: the best held-out loss; never above `initial_loss`.
        best_step: the step at which it was reached.
        history: all evaluations.
        seconds: the duration.
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
        """The decrease of the held-out loss."""
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
    """Improve the element g that aligns A with B by gradient steps.

    The same seed gives the same result.

    Args:
        spec: the spec of both models.
        a: the weights of A.
        b: the weights of B.
        g: the element of A to start from.
        model: a live module of the family. Only its forward pass is used, with weights of the path;
            it
            is not changed.
        batches: the training batches.
        loss: `loss(forward, batch)` calls `forward` like the model. By default the ends are
            teachers:
            the loss is the divergence of the mixed model's predictions from theirs.
        h: the element of B to start from; the identity by default.
        move_both: also improve h.
        spaces: the spaces that move; all by default.
        steps: the number of steps.
        t_range: the interval that t is sampled from.
        lr: the learning rates.
        held_out: a share of the batches (spread over them), or other batches, to evaluate on.
        eval_every: steps between evaluations. The best element evaluated is returned; the start if
            no
            later one is better.
        seed: the random seed.
        on_mark: called with each evaluation.

    Raises:
        MatchError: if an option is out of range, or the loss is not finite at the start.
        SpecError: if the module does not fit the spec, or a loss is needed.
    """
    started = time.perf_counter()
    h = identity(spec) if h is None else h
    path = _Path(spec, a, b, model, loss, t_range)
    train, evaluated = _split_batches(batches, held_out)
    for element in (g, h):
        _require_element(element, spec)
    g, h = g.to(spec), h.to(spec)  # the spec of a file may use other tensor names
    moving = set(spec.spaces) if spaces is None else match_spaces(spec, spaces)
    lr = lr or LearningRates()
    ends = [
        _End(spec, g, path.a, moving, lr),
        _End(spec, h, path.b, moving if move_both else set(), lr),
    ]
    rng = np.random.default_rng(seed)
    with eval_mode(model):
        best = path.held_out_loss(ends, evaluated)
        if not np.isfinite(best):
            raise MatchError(
                "the loss between the models is not finite at the start",
                hint="check the batches and both models' own losses",
            )
        history, best_elements, best_step = [Evaluation(0, best, best)], (g, h), 0
        order = _shuffled_indices(rng, len(train))
        losses: list[float] = []
        for step in range(1, steps + 1):
            t = float(rng.uniform(*t_range))
            value, grads = path.gradient(ends, train[next(order)], t)
            if not np.isfinite(value):
                break
            losses.append(value)
            decay = 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))
            ends[0].update(grads, 1 - t, decay)
            ends[1].update(grads, t, decay)
            if step % eval_every == 0 or step == steps:
                evaluation = Evaluation(
                    step, float(np.mean(losses)), path.held_out_loss(ends, evaluated)
                )
                losses = []
                history.append(evaluation)
                if on_mark:
                    on_mark(evaluation)
                if evaluation.held_out_loss < best:
                    best, best_elements, best_step = (
                        evaluation.held_out_loss,
                        (ends[0].element, ends[1].element),
                        step,
                    )
    for element in best_elements:
        element.require()
    return Refinement(
        best_elements[0],
        best_elements[1],
        history[0].held_out_loss,
        best,
        best_step,
        tuple(history),
        time.perf_counter() - started,
    )


def mixture_divergences(
    spec: Spec,
    a: State,
    b: State,
    elements: Sequence[Element],
    model: torch.nn.Module,
    batches: Sequence[Batch],
) -> list[float]:
    """Return, for each element g, the divergence of the average of g . A and B from the predictions
    of both, averaged. Lower is better.

    Args:
        spec: the spec of both models.
        a: the weights of A.
        b: the weights of B.
        elements: the elements of A.
        model: a live module of the family, as in `refine`.
        batches: the inputs.
    """
    path = _Path(spec, a, b, model, None, (0.5, 0.5))
    still = _End(spec, identity(spec), path.b, set(), LearningRates())
    with eval_mode(model):
        return [
            path.held_out_loss(
                [_End(spec, g.to(spec), path.a, set(), LearningRates()), still], batches
            )
            for g in elements
        ]


def bind_weights(model: torch.nn.Module, state: Mapping[str, Tensor]) -> Forward:
    """Return the model's forward pass with other weights.

    Ties are not enforced: each name uses its own tensor.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, dict(state), args, kwargs, tie_weights=False)

    return forward


class _Path:
    """The straight line between two transformed models, and the loss on it."""

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
            raise MatchError(f"t_range must satisfy 0 <= low <= high <= 1, got {low} and {high}")
        self.spec, self.model, self.loss = spec, model, loss
        # By the id of a batch, which the caller's list keeps alive.
        self.teacher_cache: dict[int, list[dict[str, Tensor]]] = {}
        self.cache_bytes_left = MAX_CACHE_BYTES
        self.eval_points = (
            (0.5 * (low + high),)
            if high - low <= 0.25
            else tuple(low + (high - low) * f for f in (0.25, 0.5, 0.75))
        )
        self.a, self.b = (
            _prepare_state(spec, state, model, which) for state, which in ((a, "A"), (b, "B"))
        )
        module_names = {
            *dict(model.named_parameters(remove_duplicate=False)),
            *dict(model.named_buffers(remove_duplicate=False)),
        }
        missing = next((n for n in self.a if n not in module_names), None)
        if missing is not None:
            raise SpecError(
                f'the module must have the tensors of the spec "{spec.family}", but lacks '
                f'"{missing}"',
                hint="pass a module of the class that the spec describes",
            )
        if loss is None and spec.visible:
            raise SpecError(
                f"the outputs of this {spec.family} live in {', '.join(sorted(spec.visible))}, "
                "which moves: the ends cannot be averaged as teachers",
                hint="pass your own loss",
            )

    def compute_loss(self, batch: Batch, t: float, mixed: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of one batch at t, with the mixed weights."""
        if self.loss is not None:
            return self.loss(bind_weights(self.model, mixed), batch)
        return _divergence(
            _predictions(self.spec, bind_weights(self.model, mixed), batch),
            self._teacher_outputs(batch),
            t,
            batch,
        )

    def _teacher_outputs(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Return the ends' predictions for a batch.

        Their functions do not change, so predictions are computed once, within `MAX_CACHE_BYTES`.
        """
        if id(batch) in self.teacher_cache:
            return self.teacher_cache[id(batch)]
        with torch.no_grad():
            outputs = [
                _predictions(self.spec, bind_weights(self.model, state), batch)
                for state in (self.a, self.b)
            ]
        size = sum(
            v.numel() * v.element_size() for predictions in outputs for v in predictions.values()
        )
        if size <= self.cache_bytes_left:
            self.cache_bytes_left -= size
            self.teacher_cache[id(batch)] = outputs
        return outputs

    def gradient(
        self, ends: Sequence[_End], batch: Batch, t: float
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of one batch at t, and its gradient with respect to theta_t."""
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
        """Return the mean loss over the batches and the evaluated points of the path."""
        first, second = ends[0].weights, ends[1].weights
        total = 0.0
        with torch.no_grad():
            for t in self.eval_points:
                mixed = {n: torch.lerp(w, second[n], t) for n, w in first.items()}
                total += sum(float(self.compute_loss(batch, t, mixed)) for batch in batches)
        return total / (len(self.eval_points) * len(batches))


class _End:
    """One end of the path: its state, the element that transforms it, and the state of its
    optimizer.
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
        """Return the state transformed by the element."""
        weights = dict(self.state)
        for transform in tensor_transforms(self.element):
            if (
                transform.source != transform.name
                or ax.spaces(transform.axes) & self.element.members.keys()
            ):
                weights[transform.name] = act(
                    self.element, self.state[transform.source], transform.axes, at=transform.at
                )
        return weights

    def update(self, grads: Mapping[str, Tensor], share: float, decay: float) -> None:
        """Take one gradient step in every space at once.

        Args:
            grads: gradients with respect to the mixed weights.
            share: the share of this end in the mixture.
            decay: the factor of the learning-rate schedule.
        """
        if not self.spaces:
            return
        sides = tangents.collect_sides(self.spec, self.weights, grads, self.spaces)
        members: dict[str, Member] = {}
        for name, side in sides.items():
            if side.plain or side.dual or side.bar:
                member = self._space_step(name, side, share, decay)
                if member is not None:
                    members[name] = member
        after = Element(self.spec, members) @ self.element
        rejected = {
            n
            for n in members
            if not (group := self.spec.spaces[n].group).is_orthogonal
            and group.fault(after.members[n])
        }
        if rejected:  # these would exceed the largest scale of their group: they stay
            members = {n: m for n, m in members.items() if n not in rejected}
            after = Element(self.spec, members) @ self.element
        for name in self.spaces:
            parent = self.spec.spaces[name].over
            if parent in members:
                order = permutation_index(members[parent])
                self.adam[name].permute(order)
                self.assignments[name].permute(order)
        self.element = after
        self.weights = self._apply_element()

    def _space_step(self, name: str, side: Sides, share: float, decay: float) -> Member | None:
        """Return the member of one step in one space; None if it does not move."""
        group = self.spec.spaces[name].group
        grad = tangents.tangent_grad(group, side)
        member: Member | None = None
        if grad is not None:
            x = (
                -decay
                * self.lr.for_group(group)
                * tangents.project(group, self.adam[name].direction(share * grad))
            )
            member = tangents.retract(group, x)
        if self.lr.assignment:
            assigned = self.assignments[name].update(
                tangents.assignment_scores(group, side), decay * self.lr.assignment
            )
            if assigned is not None:
                member = assigned if member is None else assigned.after(member)
        return member


class _Adam:
    """The direction of Adam for one space, in the coordinates of its tangent space."""

    def __init__(self, first: float = 0.9, second: float = 0.99) -> None:
        self.betas, self.steps = (first, second), 0
        self.mean: Array | None = None
        self.square: Array | None = None

    def direction(self, grad: Array) -> Array:
        """Return the direction for a new gradient and update the moments."""
        (b1, b2), self.steps = self.betas, self.steps + 1
        self.mean = (1 - b1) * grad + (0 if self.mean is None else b1 * self.mean)
        self.square = (1 - b2) * np.abs(grad) ** 2 + (
            0 if self.square is None else b2 * self.square
        )
        size = np.sqrt(self.square / (1 - b2**self.steps))
        return np.asarray(self.mean / (1 - b1**self.steps) / (size + 1e-8 * size.max() + 1e-30))

    def permute(self, order: Ints) -> None:
        """Reorder the moments after the members of the parent were permuted."""
        if self.mean is not None and self.square is not None:
            self.mean, self.square = self.mean[order], self.square[order]


class _StraightThroughAssignment:
    """A straight-through assignment: scores of every candidate at every place, used by the best
    assignment.

    At first the scores are similarities, so that every candidate stays. Every step subtracts the
    gradient of the loss, as if the weights wanted at a place could be learned freely; the candidate
    most similar to them is assigned.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.signs = group, tangents.has_signs(group)
        self.scores: Floats | None = None

    def update(self, similarity_and_grad: tuple[Floats, Floats] | None, lr: float) -> Member | None:
        """Return the permutation (or signs) after one step; None if nothing changes."""
        if similarity_and_grad is None:
            return None
        scores = (
            similarity_and_grad[0] if self.scores is None else self.scores
        ) - lr * similarity_and_grad[1]
        if isinstance(self.group, PlaneSigns):
            signs = np.where(scores < 0, -1.0, 1.0)
            self.scores = np.abs(scores)
            return (
                None
                if (signs > 0).all()
                else Planes(signs.astype(np.complex128), self.group.layout)
            )
        magnitude = np.abs(scores) if self.signs else scores
        self.scores = scores
        if (np.einsum("kii->ki", scores) >= magnitude.max(2)).all():
            return None
        index = assign(magnitude)
        assigned = np.take_along_axis(scores, index[:, :, None], 2)[:, :, 0]
        sign = np.where(assigned < 0, -1.0, 1.0) if self.signs else np.ones_like(assigned)
        self.scores = np.take_along_axis(scores, index[:, None, :], 2) * sign[:, None, :]
        if (sign > 0).all() and (index == np.arange(index.shape[1])).all():
            return None
        return Monomial(index, sign if self.signs else None)

    def permute(self, order: Ints) -> None:
        """Reorder the scores after the members of the parent were permuted."""
        if self.scores is not None:
            self.scores = self.scores[order]


def _require_element(g: Element, spec: Spec) -> None:
    """Raise unless an element belongs to models of this spec."""
    if g.spec.spaces.keys() != spec.spaces.keys() or g.spec.sizes != spec.sizes:
        raise ElementError(
            "the element to start from must have the spaces of the spec",
            hint="match the two models with this spec first",
        )
    Element(spec, g.members).require()


def _prepare_state(
    spec: Spec, state: State, model: torch.nn.Module, label: str
) -> dict[str, Tensor]:
    """Return every tensor of the spec, tied ones under both names, in float32 or better.

    Raises:
        MatchError: if values are not finite.
    """
    complete = dict(state)
    for alias, target in spec.ties.items():
        if alias in complete or target in complete:
            complete.setdefault(alias, complete.get(target))  # type: ignore[arg-type]
            complete.setdefault(target, complete[alias])
    require(
        check(spec, complete),
        f'model {label} does not fit the spec "{spec.family}"',
        hint="both models must be of the spec's class, folded if it is",
    )
    dtype = next((p.dtype for p in model.parameters() if p.dtype == torch.float64), torch.float32)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    out = {n: complete[n].detach().to(device, dtype) for n in stored_tensors(spec)}
    nonfinite = [n for n, w in out.items() if not bool(torch.isfinite(w).all())]
    if nonfinite:
        raise MatchError(
            f'model {label} has values that are not finite in "{nonfinite[0]}" ({len(nonfinite)} '
            "such tensors)",
            hint="restore the checkpoint",
        )
    return out


def _split_batches(
    batches: Sequence[Batch], held_out: float | Sequence[Batch]
) -> tuple[list[Batch], list[Batch]]:
    """Return training and held-out batches. A single batch is used for both."""
    train = list(batches)
    if not train:
        raise MatchError(
            "batches must not be empty",
            hint="pass data, or activations.generate_text(...): text that the models generate",
        )
    if not isinstance(held_out, int | float):
        return train, list(held_out) or train
    if not 0 <= held_out < 1:
        raise MatchError(
            f"held_out must be a share from 0 to below 1, got {held_out}",
            hint="or pass other batches",
        )
    n = max(1, round(held_out * len(train))) if held_out else 0
    if not 0 < n < len(train):
        return train, train
    # Spread over the batches: each model may have generated one half.
    held_indices = set(np.linspace(0, len(train) - 1, n + 2).round().astype(int)[1:-1].tolist())
    return (
        [batch for i, batch in enumerate(train) if i not in held_indices],
        [train[i] for i in sorted(held_indices)],
    )


def _shuffled_indices(rng: np.random.Generator, n: int) -> Iterator[int]:
    """Yield indices below n, in a new random order for each epoch."""
    while True:
        yield from rng.permutation(n).tolist()


def _predictions(spec: Spec, forward: Forward, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs that the spec names."""
    result = forward(**batch) if isinstance(batch, Mapping) else forward(batch)
    returned = {"logits": result} if isinstance(result, Tensor) else dict(result.items())
    outputs = {n: v for n, v in returned.items() if n in spec.outputs} if spec.outputs else returned
    outputs = {n: v for n, v in outputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if not outputs:
        raise SpecError(
            f"the model must return one of {', '.join(spec.outputs)}", hint="pass your own loss"
        )
    return outputs


def _divergence(
    student: Mapping[str, Tensor], teachers: Sequence[Mapping[str, Tensor]], t: float, batch: Batch
) -> Tensor:
    """Return the divergence of the student from the teachers, mixed by t.

    For logits it is the mean KL divergence of the distributions, otherwise the mean square.
    """
    total = torch.zeros(())
    for name, out in student.items():
        first, second = (teacher[name] for teacher in teachers)
        if "logits" in name:
            p = torch.lerp(first.softmax(-1), second.softmax(-1), t)
            divergences = (torch.xlogy(p, p) - p * out.log_softmax(-1)).sum(-1)
        else:
            divergences = (out - torch.lerp(first, second, t)).square().mean(-1)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is not None and mask.shape == divergences.shape:
            total = total + (divergences * mask).sum() / mask.sum()
        else:
            total = total + divergences.mean()
    return total
