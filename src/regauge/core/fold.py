"""Norm folding: the same function, written so that the stream has a larger group.

A norm with gain c and bias b that is read by linear layers only satisfies W (c * n + b) + a = (W
diag(c)) n + (W b + a), where n is the normalized vector. So the gain is folded into the columns of
every reader and the bias into the readers' biases, and the rest of the norm commutes with
rotations: all of them for RMSNorm, those that fix the all-ones vector for LayerNorm (the mean is a
product with that vector). If a reader has no bias, or also reads zeros for padding, the norm's bias
stays where it is, divided by the gain: c * n + b = c * (n + b / c); it is then a vector in the
stream and rotates with it.

LayerScale follows a writer, s * (W x + a) = (diag(s) W) x + s * a, and folds back into its rows.

A reader that is tied to the embedding is untied first: the table that writes the stream keeps its
values, the one that reads it takes the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from regauge.core import axes as ax
from regauge.core.action import State
from regauge.core.check import check, require
from regauge.core.spec import Norm, Scale, Spec, StoredTensor, stored_tensors
from regauge.errors import SpecError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor
    Edit = Callable[[Tensor], Tensor]


def fold_norms(spec: Spec, state: State) -> tuple[Spec, dict[str, Tensor]]:
    """Fold every norm and LayerScale that can be folded. The function stays the same.

    Computed in float64 (float32 for half precision) and rounded once. In the new spec, folded gains
    are constant, which `check` verifies: freeze them in training. Spaces whose norms are all folded
    get their larger group.

    Args:
        spec: The spec of the state.
        state: The state dict. It is not changed.

    Returns:
        A new spec and a new state. Tensors that folding does not touch are shared with the input.

    Raises:
        SpecError: The state does not fit the spec, or a norm cannot be folded.
    """
    new, thunks = fold_lazily(spec, state)
    return new, {name: thunk() for name, thunk in thunks.items()}


def fold_lazily(
    spec: Spec, state: State, *, rounded: bool = True
) -> tuple[Spec, dict[str, Callable[[], Tensor]]]:
    """Return what `fold_norms` returns, as one thunk per tensor. Norm vectors are read at once,
    other tensors when their thunk is called.

    Args:
        spec: The spec of the state.
        state: The state dict.
        rounded: Whether folded tensors are rounded to their stored dtype. If not, they stay in the
            precision of the computation, for callers that compute further and round at the end.
    """
    require(check(spec, state), f'the state does not fit the spec "{spec.family}"')
    edits = NormEdits(spec, state)
    for norm in spec.norms:
        _require_own_weights(spec, norm)
        edits.fold(norm)
    for scale in spec.scales:
        edits.fold_back(scale)
    return folded_spec(spec), edits.thunks(rounded)


def _require_own_weights(spec: Spec, norm: Norm) -> None:
    """Raise a SpecError if another tensor repeats a reader of the norm: the gain would be folded
    into that tensor too.
    """
    read = {weight for weight, _ in norm.readers}
    for alias, target in spec.ties.items():
        if target in read and alias not in read:
            hint = f'turn the tie around, so that "{target}" repeats "{alias}" and can be untied'
            raise SpecError(
                f'"{norm.gain}" cannot be folded into "{target}", which "{alias}" repeats',
                hint=hint,
            )


def resolve_tie(spec: Spec, state: Container[str], name: str) -> str:
    """Return the name under which a state has a tensor's values: its own, or that of a tensor tied
    to it.
    """
    target = spec.ties.get(name, name)
    tied = [name, target, *(alias for alias, t in spec.ties.items() if t == target)]
    return next(n for n in tied if n in state)


def folded_spec(spec: Spec) -> Spec:
    """Return the spec of the folded state."""
    fixed = {
        **spec.fixed,
        **{n.gain: n.neutral for n in spec.norms},
        **{s.gain: 1.0 for s in spec.scales},
    }
    tensors = {
        name: " ".join("_" for _ in ax.parse(text).terms) if name in fixed else text
        for name, text in spec.tensors.items()
    }
    read = {weight for norm in spec.norms for weight, _ in norm.readers}
    ties = {alias: target for alias, target in spec.ties.items() if alias not in read}
    barred = {
        leaf.space
        for text in tensors.values()
        for term in ax.parse(text).terms
        for leaf in ax.leaves(term)
        if leaf.bar
    }
    spaces = {
        name: replace(
            space,
            group=space.folded,
            folded=None,
            why=f"{space.why}, folded" if space.why else "norms folded",
        )
        if space.folded is not None and name not in barred
        else space
        for name, space in spec.spaces.items()
    }
    config = (
        {**spec.config, "tie_word_embeddings": False, **spec.untied_config}
        if ties != spec.ties
        else spec.config
    )
    return replace(
        spec,
        spaces=spaces,
        tensors=tensors,
        ties=ties,
        norms=(),
        scales=(),
        fixed=fixed,
        config=config,
    )


class NormEdits:
    """Edits of the tensors around norms, collected per tensor and run together when it is read.

    Args:
        spec: The spec of the state.
        state: The state.
        convert: Converts a tensor to the precision of the computation.
    """

    def __init__(self, spec: Spec, state: State, convert: Edit | None = None) -> None:
        self.spec, self.state = spec, state
        self.convert = convert or to_work_dtype
        self.stored = stored_tensors(spec)
        self.edits: dict[str, list[Edit]] = {}
        self.values: dict[str, Callable[[], Tensor]] = {}

    def edit(self, name: str, change: Edit) -> None:
        self.edits.setdefault(name, []).append(change)

    def source(self, name: str) -> str:
        return resolve_tie(self.spec, self.state, name)

    def entries(self, pattern: str) -> dict[str, StoredTensor]:
        """Return the stored tensors of a pattern."""
        return {name: entry for name, entry in self.stored.items() if entry.pattern == pattern}

    def fold(self, norm: Norm) -> None:
        """Fold a norm into its readers."""
        gain = gain_of(norm, self.state[norm.gain])
        shift = None if norm.bias is None else to_work_dtype(self.state[norm.bias])
        self.scale_readers(norm, gain, shift)
        if norm.bias is not None and shift is not None:
            if folds_bias(norm):
                self.values[norm.bias] = partial(self._make_constant, norm.bias, 0.0)
            else:
                lost = (gain == 0) & (shift != 0)
                if bool(lost.any()):
                    raise SpecError(
                        f'"{norm.gain}" cannot be folded: {int(lost.sum())} zero gains have a '
                        "nonzero bias, which a reader without a bias cannot absorb"
                    )
                self.edit(
                    norm.bias,
                    partial(scale_axis, by=1 / gain.where(gain != 0, gain.new_ones(())), dim=0),
                )
        self.values[norm.gain] = partial(self._make_constant, norm.gain, norm.neutral)

    def scale_readers(self, norm: Norm, gain: Tensor, shift: Tensor | None) -> None:
        """Replace W by W diag(gain) in every reader of a norm and, if the readers absorb the norm's
        bias, a by a + W shift in its bias.
        """
        term = ax.parse(self.spec.tensors[norm.gain]).terms[-1]
        for weight, bias in norm.readers:
            for name, entry in self.entries(weight).items():
                dim = reading_axis(entry, term)
                self.edit(name, partial(scale_axis, by=gain, dim=dim))
                if shift is not None and folds_bias(norm):
                    assert bias is not None
                    self.edit(
                        _bias_name(bias, entry),
                        partial(self._shifted, name=name, dim=dim, shift=shift),
                    )

    def _shifted(self, a: Tensor, name: str, dim: int, shift: Tensor) -> Tensor:
        """Return a + W b with the values of W before folding. The kernel of a convolution is summed
        too: b is the same at every position it reads.
        """
        w = self.convert(self.state[self.source(name)]) * self.spec.untied.get(name, 1.0)
        total = scale_axis(w, shift, dim).sum(dim)
        while total.dim() > a.dim() and total.numel() > a.numel():
            total = total.sum(-1)
        if total.numel() != a.numel():
            raise SpecError(
                f'"{name}" of shape {list(w.shape)} reads a norm, but its bias of shape '
                f"{list(a.shape)} cannot absorb the norm's bias"
            )
        return a + total.reshape(a.shape)

    def fold_back(self, scale: Scale) -> None:
        """Fold a LayerScale into its writers."""
        self.scale_writers(scale, to_work_dtype(self.state[scale.gain]))
        self.values[scale.gain] = partial(self._make_constant, scale.gain, 1.0)

    def scale_writers(self, scale: Scale, gain: Tensor) -> None:
        """Multiply the rows and the biases of every writer of a LayerScale."""
        for weight, bias in scale.writers:
            for pattern in [weight] if bias is None else [weight, bias]:
                for name, entry in self.entries(pattern).items():
                    dim = writing_axis(entry, ax.parse(self.spec.tensors[scale.gain]).terms[-1])
                    self.edit(name, partial(scale_axis, by=gain, dim=dim))

    def thunks(self, rounded: bool) -> dict[str, Callable[[], Tensor]]:
        """Return a thunk for every tensor of the edited state."""
        thunks: dict[str, Callable[[], Tensor]] = {
            name: partial(self.state.__getitem__, name) for name in self.state
        }
        thunks |= {name: partial(self._run_edits, name, rounded) for name in self.edits}
        # The tensor that an untied one repeats may not be stored: it becomes its own tensor too.
        for alias in self.edits.keys() & self.spec.ties.keys():
            thunks.setdefault(
                self.spec.ties[alias], partial(self.state.__getitem__, self.source(alias))
            )
        return thunks | self.values

    def _make_constant(self, name: str, value: float) -> Tensor:
        return self.state[name].new_full(self.state[name].shape, value)

    def _run_edits(self, name: str, rounded: bool) -> Tensor:
        original = self.state[self.source(name)]
        work, factor = self.convert(original), self.spec.untied.get(name, 1.0)
        work = work if factor == 1 else work * factor
        for edit in self.edits[name]:
            work = edit(work)
        return work.to(original.dtype) if rounded else work


def folds_bias(norm: Norm) -> bool:
    """Return whether the readers of a norm can absorb its bias."""
    return not norm.padded and all(bias is not None for _, bias in norm.readers)


def gain_of(norm: Norm, stored: Tensor) -> Tensor:
    """Return the factors of a norm, in the precision of folding, from its stored gain."""
    return to_work_dtype(stored) + (1.0 - norm.neutral)


def to_work_dtype(x: Tensor) -> Tensor:
    """Convert a tensor to the precision of folding: float64, or float32 if it is half precision."""
    import torch

    return x.to(torch.float64 if x.dtype.itemsize >= 4 else torch.float32)


def scale_axis(w: Tensor, by: Tensor, dim: int) -> Tensor:
    """Multiply one axis of w by a vector, repeated if the axis is a multiple of its length."""
    shape = [1] * w.dim()
    shape[dim] = -1
    return w * by.repeat(w.shape[dim] // by.shape[0]).to(w.dtype).view(shape)


def _bias_name(bias: str, entry: StoredTensor) -> str:
    """Return the name of a weight's bias. For a tensor of a stack, it is the bias at the same
    place.
    """
    return bias if entry.parent is None else bias.replace(f"{{{entry.parent}}}", str(entry.place))


def reading_axis(entry: StoredTensor, gain: ax.Term) -> int:
    """Return the axis of a reader that is contracted with the norm's output."""
    return _axis(entry, gain, star=True)


def writing_axis(entry: StoredTensor, gain: ax.Term) -> int:
    """Return the axis of a writer that the gain multiplies."""
    return _axis(entry, gain, star=False)


def _axis(entry: StoredTensor, gain: ax.Term, star: bool) -> int:
    wanted = {leaf.space for leaf in ax.leaves(gain)}
    for dim, term in enumerate(ax.parse(entry.axes).terms):
        leaves = list(ax.leaves(term))
        if (
            leaves
            and {leaf.space for leaf in leaves} == wanted
            and all(leaf.star == star for leaf in leaves)
        ):
            return dim
    raise SpecError(
        f'"{entry.pattern}" with axes {entry.axes} does not {"read" if star else "write"} {gain}'
    )
