"""Barriers: the loss on the straight line between two models, and on the plane through three.

Convention: theta_t = (1 - t) A + t B, computed in float32 or better; t = 0 is A. There is one
definition of a barrier: **the largest excess of the loss over the straight line between the two
ends' losses, at the points inside the path**, with its sign. If the whole path lies below that
line, the barrier is negative. For accuracy it is the largest shortfall. Zhang et al.
(rotation symmetry, arXiv:2502.00264) use two other definitions, which are reported beside it: the
largest increase from an end (`rise`) and the range of the losses (`span`). A mixture of two models
is often unsure rather than wrong, so the same numbers are also measured after each point's logits
were divided by a temperature of its own, fitted on examples that the losses are not measured on
(`calibrated`).

    path = measure_path(module, a, b, examples, calibration=others)   # a, b: states of the module
    path.barrier, path.midpoint, path.accuracy_barrier, path.calibrated.barrier
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
from regauge.errors import PathError

Tensor = torch.Tensor
MAX_LOGITS = 2**24  # logits that a temperature is fitted on
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e3  # temperatures


@dataclass(frozen=True)
class Score:
    """The quality of one model on a data set.

    Attributes:
        loss: the mean loss in nats.
        accuracy: the share of correct predictions.
        calibrated_loss: the loss at `temperature`.
        temperature: the temperature that was fitted on the calibration examples.
    """

    loss: float
    accuracy: float
    calibrated_loss: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Curve:
    """A loss along a path, with its barrier by each definition of the module docstring."""

    ts: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def excesses(self) -> tuple[float, ...]:
        """The loss above the straight line between the ends' losses, point by point."""
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
        """The t of the largest excess; nan counts as the largest."""
        inside = self.excesses[1:-1]
        return self.ts[
            1
            + max(
                range(len(inside)), key=lambda i: inside[i] if inside[i] == inside[i] else math.inf
            )
        ]

    @property
    def rise(self) -> float:
        """The largest loss on the path above that of the better end (the first definition of
        rotation symmetry).
        """
        return _max_or_nan(self.losses) - min(self.losses[0], self.losses[-1])

    @property
    def span(self) -> float:
        """The range of the losses on the path (the second definition of rotation
        symmetry).
        """
        return _max_or_nan(self.losses) - min(self.losses)

    @property
    def midpoint(self) -> float:
        """The loss of the average of the two models above that of the better end.

        Below zero, averaging helps.
        """
        return self.losses[self.ts.index(0.5)] - min(self.losses[0], self.losses[-1])


@dataclass(frozen=True)
class Path(Curve):
    """A measured path: also accuracies, and losses at a temperature fitted for each point."""

    accuracies: tuple[float, ...] = ()
    calibrated: Curve | None = None
    temperatures: tuple[float, ...] = ()

    @property
    def accuracy_barrier(self) -> float:
        """The largest shortfall of the accuracy below the line between the ends'."""
        return Curve(self.ts, tuple(-a for a in self.accuracies)).barrier


@dataclass(frozen=True)
class Plane:
    """Losses on the plane through three models.

    Attributes:
        xs: coordinates of the columns, in units of the weights' Euclidean distance.
        ys: coordinates of the rows.
        losses: `losses[j][i]` is the loss at (xs[i], ys[j]).
        points: the coordinates of the three models.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    points: Mapping[str, tuple[float, float]]


def interpolate(a: State, b: State, t: float) -> dict[str, Tensor]:
    """Return (1 - t) a + t b, tensor by tensor, in float32 or better.

    Tensors that are not floating-point (an index, a mask) must be the same in both and are copied.

    >>> # middle = interpolate(a, b, 0.5); interpolate(a, b, 0) has the values of a
    """
    require_interpolable(a, b)
    return _combine(((1 - t, a), (t, b)))


def require_interpolable(
    a: State, b: State, names: tuple[str, str] = ("the first model", "the second model")
) -> None:
    """Raise unless a straight line joins two states.

    Raises:
        PathError: if tensors or shapes differ, or values are not finite.
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
        listed = "\n".join(f"  {fault}" for fault in faults[:8]) + (
            f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        )
        raise PathError(
            f"{first} and {second} must have the same tensors and shapes to be interpolated"
            f"\n{listed}",
            hint="use two models of one class and one config",
        )
    for n in shared:
        same = a[n].is_floating_point() == b[n].is_floating_point()
        if not same or (not a[n].is_floating_point() and not torch.equal(a[n], b[n])):
            raise PathError(
                f'"{n}" is not floating-point and differs between {first} and {second}',
                hint="it cannot be interpolated; use models of one config",
            )
    for name, state in zip(names, (a, b), strict=True):
        bad = [
            n
            for n, x in state.items()
            if x.is_floating_point() and not bool(torch.isfinite(x).all())
        ]
        if bad:
            rest = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise PathError(
                f'"{bad[0]}"{rest} of {name} has values that are not finite (nan or inf)',
                hint="the training may have diverged",
            )


def _combine(parts: Sequence[tuple[float, State]]) -> dict[str, Tensor]:
    """Return the weighted sum of states, in float32 or better."""
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
    """Evaluate a module with these weights on all examples.

    The module's own weights are neither used nor changed. Ties are not enforced: a state with an
    untied head is used as it is.

    Args:
        module: the module whose forward pass is used.
        state: the weights.
        examples: the examples to measure on.
        calibration: other examples, to fit a temperature on.
        batch_size: examples in a batch.
        device: the device to compute on.
    """
    state = {name: x.to(device) for name, x in state.items()}
    temperature = None
    if calibration is not None:
        temperature = _fit_temperature(
            _collect_logits(module, state, calibration, batch_size, device)
        )
    loss = correct = count = calibrated = 0.0
    for logits, labels in _iter_logits(module, state, examples, batch_size, device):
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        correct += float((logits.argmax(1) == labels).sum())
        count += len(labels)
        if temperature is not None:
            calibrated += float(F.cross_entropy(logits / temperature, labels, reduction="sum"))
    if not count:
        raise PathError("examples must not be empty: a loss needs one", hint="pass more data")
    return Score(
        loss / count,
        correct / count,
        None if temperature is None else calibrated / count,
        temperature,
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
    """Measure the loss and accuracy on the straight line from a to b.

    Args:
        module: the module whose forward pass is used.
        a: the weights at t = 0.
        b: the weights at t = 1.
        examples: the examples to measure on.
        points: the number of points, ends included; the midpoint is always among them.
        calibration: other examples, to fit a temperature for each point.
        batch_size: examples in a batch.
        device: the device to compute on.
        progress: the progress callback.

    >>> # measure_path(model, a.state_dict(), b.state_dict(), examples).barrier
    """
    if points < 3:
        raise PathError(f"points must be >= 3, got {points}", hint="a path needs a point inside")
    require_interpolable(a, b)
    ts = sorted({round(t, 9) for t in np.linspace(0, 1, points).tolist()} | {0.5})
    scores: list[Score] = []
    for i, t in enumerate(ts):
        if progress:
            progress(i, len(ts), f"t = {t:.2g}")
        scores.append(
            score(
                module,
                _combine(((1 - t, a), (t, b))),
                examples,
                calibration=calibration,
                batch_size=batch_size,
                device=device,
            )
        )
    calibrated_losses = [s.calibrated_loss for s in scores if s.calibrated_loss is not None]
    calibrated = (
        Curve(tuple(ts), tuple(calibrated_losses)) if len(calibrated_losses) == len(ts) else None
    )
    temperatures = tuple(s.temperature for s in scores if s.temperature is not None)
    return Path(
        tuple(ts),
        tuple(s.loss for s in scores),
        tuple(s.accuracy for s in scores),
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
    """Measure the losses on the plane through three models (rotation symmetry, Figure 5).

    The second corner (B, say) is the origin, the first (A) lies on the axis to the right, the third
    (the transformed A) above it.

    Args:
        module: the module whose forward pass is used.
        corners: the weights of three models, by name.
        examples: the examples to measure on.
        points: the number of grid points on each side.
        margin: how far the grid reaches beyond the models, as a share of its width.
        batch_size: examples in a batch.
        device: the device to compute on.
        progress: the progress callback.
    """
    if len(corners) != 3:
        raise PathError(f"a plane must have 3 corners, got {len(corners)}")
    names = list(corners)
    right, origin, above = corners.values()
    for name, state in zip(names[:1] + names[2:], (right, above), strict=True):
        require_interpolable(state, origin, (name, names[1]))
    uu, uv, vv = _gram(right, above, origin)
    width = math.sqrt(uu)
    height = math.sqrt(max(vv - uv**2 / uu, 0.0)) if uu > 0 else 0.0
    if width == 0 or height <= 1e-6 * width:
        raise PathError(
            "the three models lie on one line",
            hint="a plane needs a third model that is not on the line through A and B",
        )
    across = uv / width
    points_by_name = {names[0]: (width, 0.0), names[1]: (0.0, 0.0), names[2]: (across, height)}
    xs, ys = (_grid_axis([p[i] for p in points_by_name.values()], points, margin) for i in (0, 1))
    rows = []
    for j, y in enumerate(ys):
        row = []
        for i, x in enumerate(xs):
            if progress:
                progress(j * len(xs) + i, len(xs) * len(ys), f"({x:.3g}, {y:.3g})")
            t = y / height  # the point is s * right + t * above + (1 - s - t) * origin
            s = (x - t * across) / width
            state = _combine(((s, right), (t, above), (1 - s - t, origin)))
            row.append(score(module, state, examples, batch_size=batch_size, device=device).loss)
        rows.append(tuple(row))
    return Plane(xs, ys, tuple(rows), points_by_name)


def _gram(first: State, second: State, origin: State) -> tuple[float, float, float]:
    """Return <u, u>, <u, v> and <v, v>, where u = first - origin and v = second - origin."""
    uu = uv = vv = 0.0
    for name, origin_tensor in origin.items():
        if origin_tensor.is_floating_point():
            u, v = (x[name].double() - origin_tensor.double() for x in (first, second))
            uu, uv, vv = (
                uu + float((u * u).sum()),
                uv + float((u * v).sum()),
                vv + float((v * v).sum()),
            )
    return uu, uv, vv


def _grid_axis(values: Sequence[float], points: int, margin: float) -> tuple[float, ...]:
    """Return evenly spaced coordinates that reach beyond the values by a margin."""
    low, high = min(values), max(values)
    reach = margin * (high - low)
    return tuple(np.linspace(low - reach, high + reach, points).tolist())


def _iter_logits(
    module: torch.nn.Module, state: State, examples: Examples, batch: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [rows, classes] and labels, batch by batch.

    There is one row for each example, pixel or next token that counts.
    """
    if examples.multi_label:
        raise PathError(
            "examples must have one label each, got multi-label examples",
            hint="pass data with one label each",
        )
    dtype = next(x.dtype for x in state.values() if x.is_floating_point())
    model = _WithState(module, state)
    for start in range(0, len(examples), batch):
        inputs, labels = examples.batch(np.arange(start, min(start + batch, len(examples))))
        converted = {
            k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()
        }
        with torch.no_grad():
            logits = logits_of(model, converted)
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
        # In a list, so that its parameters are not registered here.
        self.inner, self.state = [module.eval()], dict(state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.inner[0], self.state, args, kwargs, tie_weights=False)


def _collect_logits(
    module: torch.nn.Module, state: State, examples: Examples, batch: int, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Return logits and labels to fit a temperature on, at most `MAX_LOGITS` logits."""
    batches, left = [], MAX_LOGITS
    for logits, labels in _iter_logits(module, state, examples, batch, device):
        rows = min(len(labels), left // logits.shape[1])
        batches.append((logits[:rows], labels[:rows]))
        left -= rows * logits.shape[1]
        if rows < len(labels):
            break
    if not batches or not len(batches[0][1]):
        raise PathError(
            "calibration examples must not be empty: a temperature needs one",
            hint="pass more data, or skip the calibration",
        )
    return batches


def _fit_temperature(sample: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the temperature T that minimizes the loss of logits / T.

    In 1/T the loss is convex: Newton steps inside a bracket.
    """
    low, high, at = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    count = sum(len(labels) for _, labels in sample)
    for _ in range(40):
        grad = curvature = 0.0
        for logits, labels in sample:
            probs = (at * logits).softmax(1)
            mean = (probs * logits).sum(1)
            grad += float((mean - logits.gather(1, labels[:, None])[:, 0]).double().sum()) / count
            curvature += float((probs * (logits - mean[:, None]).square()).double().sum()) / count
        if not math.isfinite(grad):
            return 1.0
        low, high = (low, at) if grad > 0 else (at, high)
        step = at - grad / curvature if curvature > 0 else math.inf
        new = step if low < step < high else math.sqrt(low * high)
        if abs(new - at) <= 1e-4 * at:
            return 1 / new
        at = new
    return 1 / at


def _max_or_nan(values: Sequence[float]) -> float:
    """Return the largest value; nan if any is nan, since a loss that is not finite is not small."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _format_shape(x: Tensor) -> str:
    """Format a shape as [2, 3]."""
    return f"[{', '.join(map(str, x.shape))}]"
