"""The inverse of norm folding: a folded state, written again with norms.

After `fold_norms` the stream of a model may be rotated, but its norms have no gains. They can have
any gains c and biases b: with the folded reader W and its bias a,

    W n + a  =  (W diag(1/c)) (c * n + b) + (a - W diag(1/c) b)

So a model that was rotated into the basis of another one is written with *that* model's norms. Both
then agree in every norm, and the average of the two computes what the average of the two folded
models computes. Where a reader has no bias to absorb b, the norm's own bias v of the folded state
becomes c * v, since c * (n + v) = c * n + c * v. LayerScales follow a writer: diag(1/s) W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from regauge.core import axes as ax
from regauge.core.fold import (
    NormEdits,
    folded_spec,
    folds_bias,
    gain_of,
    reading_axis,
    scale_axis,
    to_work_dtype,
    writing_axis,
)
from regauge.core.spec import Norm, Spec

if TYPE_CHECKING:
    import torch

    from regauge.core.action import State

    Tensor = torch.Tensor

# A gain below this share of the median gain of its norm is replaced: zero cannot be divided by.
MIN_GAIN = 1e-4
# The largest rounding error of one coordinate of a norm, as a share of its standard deviation: the
# error of gain * n + bias is eps * bias, which a reader of n sees as eps * bias / gain.
MAX_NOISE = 0.1


def unfolded_spec(spec: Spec) -> Spec:
    """Return the spec of a state that was folded and written with norms again: the same spec, with
    the ties removed that folding removes.
    """
    folded = folded_spec(spec)
    return replace(spec, ties=folded.ties, untied={}, config=folded.config)


def norms_of(
    spec: Spec,
    state: State,
    dtypes: Mapping[str, torch.dtype],
    smallest: Mapping[str, float] | None = None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the gains and biases of a model's norms, for another model to take over.

    A gain that is zero or tiny among the others of its norm is replaced by the smallest one that
    another model can be written with. A model with the replaced gain keeps its function; averages
    with it deviate in that coordinate.

    Args:
        spec: The spec of the model.
        state: Its state, not folded.
        dtypes: The dtype in which the other model stores each of them.
        smallest: The smallest factor of each gain that the other model can be written with
            (`smallest_gains`).

    Returns:
        The tensors by name, rounded to these dtypes, and a remark on every replacement.
    """
    values: dict[str, Tensor] = {}
    notes: list[str] = []
    least = smallest or {}
    for norm in spec.norms:
        stored = state[norm.gain].detach().to(dtypes[norm.gain])
        bias = None if norm.bias is None else state[norm.bias].detach().to(dtypes[norm.bias])
        # a bias that is added to each reader's input drowns a small gain in rounding
        added = bias if folds_bias(norm) else None
        values[norm.gain] = _usable_gain(norm.gain, stored, norm.neutral, added, least, notes)
        if norm.bias is not None and bias is not None:
            values[norm.bias] = bias
    for scale in spec.scales:
        stored = state[scale.gain].detach().to(dtypes[scale.gain])
        values[scale.gain] = _usable_gain(scale.gain, stored, 1.0, None, least, notes)
    return values, notes


def smallest_gains(
    spec: Spec, folded: State, dtypes: Mapping[str, torch.dtype]
) -> dict[str, float]:
    """Return for norms and LayerScales the smallest factor that overflows no weight in any basis.

    A rotation of the stream keeps the norm of what a weight reads or writes with, so that no entry
    becomes larger than it.

    Args:
        spec: The spec of the state before it was folded.
        folded: The folded state, in the precision to compute in.
        dtypes: The dtypes of the tensors that are stored in less than the range of float32.
    """
    import torch

    edits = NormEdits(spec, folded)
    places = [(norm.gain, norm.readers, reading_axis) for norm in spec.norms]
    places += [(scale.gain, scale.writers, writing_axis) for scale in spec.scales]
    smallest: dict[str, float] = {}
    for gain, weights, axis in places:
        term = ax.parse(spec.tensors[gain]).terms[-1]
        for weight, _ in weights:
            for name, entry in edits.entries(weight).items():
                if name not in dtypes:
                    continue
                largest = torch.linalg.vector_norm(folded[name], dim=axis(entry, term)).max()
                share = float(largest) / torch.finfo(dtypes[name]).max
                smallest[gain] = max(smallest.get(gain, 0.0), share)
    return smallest


def unfold_lazily(
    spec: Spec, state: State, norms: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Write a folded state with norms again: the same function. One thunk per tensor, unrounded.

    Args:
        spec: The spec of the state before it was folded.
        state: The folded state, transformed or not, in the precision to compute in.
        norms: The gains and biases to write it with (`norms_of`).
    """
    edits = NormEdits(unfolded_spec(spec), state, convert=lambda x: x)
    for norm in spec.norms:
        _unfold(edits, norm, norms)
    for scale in spec.scales:
        edits.scale_writers(scale, 1 / to_work_dtype(norms[scale.gain]))
        edits.values[scale.gain] = partial(norms.__getitem__, scale.gain)
    return edits.thunks(rounded=False)


def _unfold(edits: NormEdits, norm: Norm, norms: Mapping[str, Tensor]) -> None:
    """Write one norm."""
    gain = gain_of(norm, norms[norm.gain])
    shift = None
    if norm.bias is not None and folds_bias(norm):
        shift = -to_work_dtype(norms[norm.bias]) / gain
        edits.values[norm.bias] = partial(norms.__getitem__, norm.bias)
    elif norm.bias is not None:
        edits.edit(norm.bias, partial(scale_axis, by=gain, dim=0))
    edits.scale_readers(norm, 1 / gain, shift)
    edits.values[norm.gain] = partial(norms.__getitem__, norm.gain)


def _usable_gain(
    name: str,
    stored: Tensor,
    neutral: float,
    bias: Tensor | None,
    least: Mapping[str, float],
    notes: list[str],
) -> Tensor:
    """Return a stored gain with zero and tiny factors replaced, and add a remark if there are any.

    Args:
        name: The name of the gain.
        stored: Its stored values.
        neutral: The stored value that means a factor of one.
        bias: The bias that is added after it, if readers have to subtract it again.
        least: The smallest factor of each gain that overflows no weight.
        notes: The remarks.
    """
    import torch

    factor = to_work_dtype(stored) + (1.0 - neutral)
    size = factor.abs()
    median = float(size.median())
    smallest = torch.full_like(size, MIN_GAIN * median if median > 0 else 1.0)
    smallest = smallest.clamp(min=least.get(name, 0.0))
    if bias is not None:
        eps = torch.finfo(stored.dtype).eps / 2
        smallest = torch.maximum(smallest, to_work_dtype(bias).abs() * (eps / MAX_NOISE))
    is_tiny = size < smallest
    if not bool(is_tiny.any()):
        return stored
    count = int(is_tiny.sum())
    notes.append(
        f'"{name}" of B has {count} of {size.numel()} gains that are too small to write A with: '
        f"the output has others there (at least {float(smallest[is_tiny].min()):.2g}), keeps the "
        "function of A, and an average with B deviates in these coordinates"
    )
    sign = torch.where(factor < 0, -1.0, 1.0).to(factor.dtype)
    # rounded up, so that no replaced gain rounds to zero
    new = torch.where(is_tiny, sign * smallest * (1 + torch.finfo(stored.dtype).eps), factor)
    return (new - (1.0 - neutral)).to(stored.dtype)
