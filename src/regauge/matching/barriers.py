"""Barriers: what the loss does on the straight line between two models, and on the plane through
three.

Convention. theta_t = (1 - t) A + t B, computed in float32 or better; t = 0 is A. One definition of
a barrier: **the largest excess of the loss over the straight line between the two ends' losses, at
the points inside the path**, with its sign: where the path lies below that line all along, the
barrier is negative. Of accuracy it is the largest shortfall. Paper 003 has two other wordings: the
largest increase from an end (`rise`) and the range of the losses (`span`); both stand beside it. A
mixture of two models is often unsure rather than wrong, so that the same is also measured after
each point's logits were divided by a temperature of its own, fitted on examples that the losses are
not measured on (`calibrated`).

    path = along(module, a, b, examples, calibration=others)     # a, b: states of the module's
    class
    path.barrier, path.midpoint, path.of_accuracy, path.calibrated.barrier
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional as F

from regauge.core.action import State
from regauge.core.progress import Progress
from regauge.data.tasks import Examples, logits_of
from regauge.errors import RegaugeError

Tensor = torch.Tensor
MAX_LOGITS = 2**24  # numbers that a temperature is fitted on, at most
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e3  # temperatures


class PathError(RegaugeError):
    """Two models that no straight line joins, or a path on which nothing can be measured."""


@dataclass(frozen=True)
class Score:
    """One model on a data set: the mean loss in nats, the share that is right, and the loss at the
    temperature that was fitted elsewhere.
    """

    loss: float
    accuracy: float
    calibrated_loss: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Curve:
    """A loss along a path. The properties are what is known as its barrier; the module's docstring
    says which.
    """

    ts: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def excesses(self) -> tuple[float, ...]:
        """The loss over the straight line between the ends' losses, point by point."""
        first, last = self.losses[0], self.losses[-1]
        return tuple(
            loss - ((1 - t) * first + t * last)
            for t, loss in zip(self.ts, self.losses, strict=True)
        )

    @property
    def barrier(self) -> float:
        """The largest excess inside the path, with its sign."""
        return _max_or_nan(self.excesses[1:-1])

    @property
    def peak(self) -> float:
        """Where that is."""
        inside = self.excesses[1:-1]
        return self.ts[
            1
            + max(
                range(len(inside)), key=lambda i: inside[i] if inside[i] == inside[i] else math.inf
            )
        ]

    @property
    def rise(self) -> float:
        """003's first wording: the largest loss on the path over that of the better end."""
        return _max_or_nan(self.losses) - min(self.losses[0], self.losses[-1])

    @property
    def span(self) -> float:
        """003's second wording: the range of the losses on the path."""
        return _max_or_nan(self.losses) - min(self.losses)

    @property
    def midpoint(self) -> float:
        """The loss of the average of the two models, over that of the better end: below zero,
        averaging pays.
        """
        return self.losses[self.ts.index(0.5)] - min(self.losses[0], self.losses[-1])


@dataclass(frozen=True)
class Path(Curve):
    """A path that was walked: also the accuracies, and what a temperature of its own does for each
    point.
    """

    accuracies: tuple[float, ...] = ()
    calibrated: Curve | None = None
    temperatures: tuple[float, ...] = ()

    @property
    def accuracy_barrier(self) -> float:
        """The largest shortfall of the accuracy under the straight line between the ends'
        accuracies, inside the path.
        """
        return Curve(self.ts, tuple(-a for a in self.accuracies)).barrier


@dataclass(frozen=True)
class Plane:
    """Losses on the plane through three models: `losses[j][i]` is at (xs[i], ys[j]). `points` are
    the models' own places; lengths are those of the space of weights.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    points: Mapping[str, tuple[float, float]]


def interpolate(a: State, b: State, t: float) -> dict[str, Tensor]:
    """(1 - t) a + t b, tensor by tensor, in float32 or better. What is no number of the model (an
    index, a mask) is the same in both and kept.

    >>> # middle = interpolate(a, b, 0.5); interpolate(a, b, 0) has the values of a
    """
    require_interpolable(a, b)
    return _combine(((1 - t, a), (t, b)))


def require_interpolable(
    a: State, b: State, names: tuple[str, str] = ("the first model", "the second model")
) -> None:
    """Refuse two states between which there is no straight line: other tensors, other shapes, or
    values that are no numbers.
    """
    first, second = names
    faults = [f'"{n}" is in {first} and not in {second}' for n in a if n not in b]
    faults += [f'"{n}" is in {second} and not in {first}' for n in b if n not in a]
    shared = [n for n in a if n in b]
    faults += [
        f'"{n}" is {_format_shape(a[n])} in {first} and {_format_shape(b[n])} in {second}'
        for n in shared
        if a[n].shape != b[n].shape
    ]
    if faults:
        told = "\n".join(f"  {fault}" for fault in faults[:8]) + (
            f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        )
        raise PathError(
            f"{first} and {second} are of different architectures, and no straight line joins "
            f"them\n{told}",
            hint="compare two models of one class and one config; regauge inspect shows each",
        )
    for n in shared:
        same = a[n].is_floating_point() == b[n].is_floating_point()
        if not same or (not a[n].is_floating_point() and not torch.equal(a[n], b[n])):
            raise PathError(
                f'"{n}" holds no weights, and differs between {first} and {second}',
                hint="it cannot be mixed; use models of one config",
            )
    for name, state in zip(names, (a, b), strict=True):
        bad = [
            n
            for n, x in state.items()
            if x.is_floating_point() and not bool(torch.isfinite(x).all())
        ]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise PathError(
                f'"{bad[0]}"{more} of {name} holds values that are no numbers (nan or inf)',
                hint="a training that diverged leaves such",
            )


def _combine(parts: Sequence[tuple[float, State]]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, first in parts[0][1].items():
        if not first.is_floating_point():
            out[name] = first
            continue
        dtype = torch.promote_types(
            torch.promote_types(first.dtype, parts[-1][1][name].dtype), torch.float32
        )
        out[name] = sum(
            (weight * state[name].to(dtype) for weight, state in parts if weight),
            torch.zeros((), dtype=dtype, device=first.device),
        )
        out[name] = out[name].expand(first.shape)
    return out


def score(
    module: torch.nn.Module,
    state: State,
    examples: Examples,
    *,
    calibration: Examples | None = None,
    batch_size: int = 16,
    device: str = "cpu",
) -> Score:
    """The module with these weights on all of the examples. The module's own weights are neither
    used nor changed, and ties are not enforced: a state with an untied head is used as it is.
    """
    state = {name: x.to(device) for name, x in state.items()}
    temperature = None
    if calibration is not None:
        temperature = _fit_temperature(
            _collect_logits(module, state, calibration, batch_size, device)
        )
    loss = right = count = cool = 0.0
    for logits, labels in _iter_logits(module, state, examples, batch_size, device):
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += float((logits.argmax(1) == labels).sum())
        count += len(labels)
        if temperature is not None:
            cool += float(F.cross_entropy(logits / temperature, labels, reduction="sum"))
    if not count:
        raise PathError("there is no example to measure a loss on", hint="give more data")
    return Score(
        loss / count, right / count, None if temperature is None else cool / count, temperature
    )


def measure_path(
    module: torch.nn.Module,
    a: State,
    b: State,
    examples: Examples,
    *,
    points: int = 11,
    calibration: Examples | None = None,
    batch_size: int = 16,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Walk from A to B in `points` steps, ends included; the midpoint is always among them.

    >>> # along(model, a.state_dict(), b.state_dict(), examples).barrier
    """
    if points < 3:
        raise PathError(f"a path of {points} points has none inside", hint="give at least 3")
    require_interpolable(a, b)
    ts = sorted({round(t, 9) for t in np.linspace(0, 1, points).tolist()} | {0.5})
    found: list[Score] = []
    for i, t in enumerate(ts):
        if progress:
            progress(i, len(ts), f"t = {t:.2g}")
        found.append(
            score(
                module,
                _combine(((1 - t, a), (t, b))),
                examples,
                calibration=calibration,
                batch_size=batch_size,
                device=device,
            )
        )
    cool = [s.calibrated_loss for s in found if s.calibrated_loss is not None]
    calibrated = Curve(tuple(ts), tuple(cool)) if len(cool) == len(ts) else None
    temperatures = tuple(s.temperature for s in found if s.temperature is not None)
    return Path(
        tuple(ts),
        tuple(s.loss for s in found),
        tuple(s.accuracy for s in found),
        calibrated,
        temperatures,
    )


def measure_plane(
    module: torch.nn.Module,
    corners: Mapping[str, State],
    examples: Examples,
    *,
    points: int = 9,
    margin: float = 0.25,
    batch_size: int = 16,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Plane:
    """The losses on the plane through three models, on a grid that reaches beyond them by a
    `margin` of its width (Figure 5 of 003).

    The second corner (B, say) is the origin, the first (A) lies on the axis to the right, the third
    (A moved) above it.
    """
    if len(corners) != 3:
        raise PathError(f"a plane goes through 3 models, and not {len(corners)}")
    names = list(corners)
    one, origin, other = corners.values()
    for name, state in zip(names[:1] + names[2:], (one, other), strict=True):
        require_interpolable(state, origin, (name, names[1]))
    uu, uv, vv = _gram(one, other, origin)
    width = math.sqrt(uu)
    height = math.sqrt(max(vv - uv**2 / uu, 0.0)) if uu > 0 else 0.0
    if width == 0 or height <= 1e-6 * width:
        raise PathError(
            "the three models lie on one line",
            hint="a plane needs a moved model that is neither A nor B, nor between them",
        )
    across = uv / width
    places = {names[0]: (width, 0.0), names[1]: (0.0, 0.0), names[2]: (across, height)}
    xs, ys = (_grid_axis([p[i] for p in places.values()], points, margin) for i in (0, 1))
    rows = []
    for j, y in enumerate(ys):
        row = []
        for i, x in enumerate(xs):
            if progress:
                progress(j * len(xs) + i, len(xs) * len(ys), f"({x:.3g}, {y:.3g})")
            t = y / height  # the place is s * one + t * other + (1 - s - t) * origin
            s = (x - t * across) / width
            state = _combine(((s, one), (t, other), (1 - s - t, origin)))
            row.append(score(module, state, examples, batch_size=batch_size, device=device).loss)
        rows.append(tuple(row))
    return Plane(xs, ys, tuple(rows), places)


def _gram(one: State, other: State, origin: State) -> tuple[float, float, float]:
    """The products of one - origin and other - origin with themselves and each other."""
    uu = uv = vv = 0.0
    for name, zero in origin.items():
        if zero.is_floating_point():
            u, v = (x[name].double() - zero.double() for x in (one, other))
            uu, uv, vv = (
                uu + float((u * u).sum()),
                uv + float((u * v).sum()),
                vv + float((v * v).sum()),
            )
    return uu, uv, vv


def _grid_axis(values: Sequence[float], points: int, margin: float) -> tuple[float, ...]:
    low, high = min(values), max(values)
    reach = margin * (high - low)
    return tuple(np.linspace(low - reach, high + reach, points).tolist())


def _iter_logits(
    module: torch.nn.Module, state: State, examples: Examples, batch: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [rows, classes] and labels, batch by batch: a row for each example, pixel or next
    token that counts.
    """
    if examples.multi_label:
        raise PathError(
            "the examples have several answers each, and losses on a path are of one answer",
            hint="give data with one label each",
        )
    dtype = next(x.dtype for x in state.values() if x.is_floating_point())
    whole = _WithState(module, state)
    for start in range(0, len(examples), batch):
        inputs, labels = examples.batch(np.arange(start, min(start + batch, len(examples))))
        moved = {
            k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()
        }
        with torch.no_grad():
            logits = logits_of(whole, moved)
        labels = labels.to(device)
        if examples.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        elif examples.dense:
            logits = logits.movedim(1, -1)
        logits, labels = logits.flatten(0, -2).float(), labels.flatten()
        counted = labels != -100
        yield logits[counted], labels[counted]


class _WithState(torch.nn.Module):
    """A module that computes with other weights than its own."""

    def __init__(self, module: torch.nn.Module, state: State) -> None:
        super().__init__()
        self.inner, self.state = (
            [module.eval()],
            dict(state),
        )  # in a list: its parameters are not ours

    def forward(self, *given: Any, **named: Any) -> Any:
        return functional_call(self.inner[0], self.state, given, named, tie_weights=False)


def _collect_logits(
    module: torch.nn.Module, state: State, examples: Examples, batch: int, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Logits and labels for a temperature, as many as there is room for."""
    kept, room = [], MAX_LOGITS
    for logits, labels in _iter_logits(module, state, examples, batch, device):
        rows = min(len(labels), room // logits.shape[1])
        kept.append((logits[:rows], labels[:rows]))
        room -= rows * logits.shape[1]
        if rows < len(labels):
            break
    if not kept or not len(kept[0][1]):
        raise PathError(
            "there is no example to fit a temperature on",
            hint="give more data, or leave the temperature out",
        )
    return kept


def _fit_temperature(sample: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The temperature T that makes the loss of logits / T least. In 1/T the loss is convex:
    Newton's steps, inside a bracket.
    """
    low, high, at = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    count = sum(len(labels) for _, labels in sample)
    for _ in range(40):
        slope = bend = 0.0
        for logits, labels in sample:
            chance = (at * logits).softmax(1)
            mean = (chance * logits).sum(1)
            slope += float((mean - logits.gather(1, labels[:, None])[:, 0]).double().sum()) / count
            bend += float((chance * (logits - mean[:, None]).square()).double().sum()) / count
        if not math.isfinite(slope):
            return 1.0
        low, high = (low, at) if slope > 0 else (at, high)
        step = at - slope / bend if bend > 0 else math.inf
        new = step if low < step < high else math.sqrt(low * high)
        if abs(new - at) <= 1e-4 * at:
            return 1 / new
        at = new
    return 1 / at


def _max_or_nan(values: Sequence[float]) -> float:
    """The largest; nan counts as largest of all, for a loss that is no number is no small one."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _format_shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"
