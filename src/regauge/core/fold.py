"""Folding norms: the same function, written so that the stream has a larger group.

A norm with gain c and bias b that is read by linear layers only satisfies W (c * n + b) + a = (W
diag(c)) n + (W b + a), where n is the normalised vector. So the gain goes into the columns of every
reader and the bias into theirs, and what is left of the norm commutes with rotations: all of them
for RMSNorm, those that keep the all-ones vector for LayerNorm (the mean is a product with that
vector). A reader without a bias of its own, or one that is also given zeros for padding, leaves the
norm's bias where it is, divided by the gain: c * n + b = c * (n + b / c); it then lives in the
stream and rotates with it.

LayerScale stands behind a writer, s * (W x + a) = (diag(s) W) x + s * a, and folds backwards into
its rows.

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
    """Fold every norm and LayerScale that can be folded; a new spec and a new state of the same
    function (the module's docstring says why).

    Tensors that folding does not touch are the input's own, not copies. In the new spec folded
    gains are constant, and `check` holds them to it: freeze them in training. Spaces whose norms
    are all folded get their larger group. Computed in float64 (float32 for half precision), rounded
    once.
    """
    new, thunks = fold_lazily(spec, state)
    return new, {name: thunk() for name, thunk in thunks.items()}


def fold_lazily(
    spec: Spec, state: State, *, rounded: bool = True
) -> tuple[Spec, dict[str, Callable[[], Tensor]]]:
    """What `fold_norms` does, one thunk per tensor. Norm vectors are read at once, everything else
    when its thunk is called.

    Without `rounded` what folding touches stays in the precision it is computed in, for whoever
    computes on and rounds in the end.
    """
    require(check(spec, state), f'the state does not fit the spec "{spec.family}"')
    folding = _Folding(spec, state)
    for norm in spec.norms:
        _require_own_weights(spec, norm)
        folding.fold(norm)
    for scale in spec.scales:
        folding.fold_back(scale)
    return folded_spec(spec), folding.thunks(rounded)


def _require_own_weights(spec: Spec, norm: Norm) -> None:
    """A reader takes the gain up. One that another tensor repeats would hand it on to that."""
    read = {weight for weight, _ in norm.readers}
    for alias, target in spec.ties.items():
        if target in read and alias not in read:
            hint = f'turn the tie around, so that "{target}" repeats "{alias}" and can be untied'
            raise SpecError(
                f'"{norm.gain}" cannot be folded into "{target}", which "{alias}" repeats',
                hint=hint,
            )


def resolve_tie(spec: Spec, state: Container[str], name: str) -> str:
    """Where a tensor's values are: under its own name, or under that of one that is tied to it."""
    target = spec.ties.get(name, name)
    tied = [name, target, *(alias for alias, t in spec.ties.items() if t == target)]
    return next(n for n in tied if n in state)


def folded_spec(spec: Spec) -> Spec:
    """The spec of a folded state."""
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


class _Folding:
    """The edits that folding makes, gathered per tensor and run in one go when the tensor is asked
    for.
    """

    def __init__(self, spec: Spec, state: State) -> None:
        self.spec, self.state = spec, state
        self.stored = stored_tensors(spec)
        self.edits: dict[str, list[Edit]] = {}
        self.constants: dict[str, float] = {}

    def edit(self, name: str, change: Edit) -> None:
        self.edits.setdefault(name, []).append(change)

    def source(self, name: str) -> str:
        return resolve_tie(self.spec, self.state, name)

    def each(self, pattern: str) -> dict[str, StoredTensor]:
        return {name: entry for name, entry in self.stored.items() if entry.pattern == pattern}

    def fold(self, norm: Norm) -> None:
        gain = to_work_dtype(self.state[norm.gain]) + (1.0 - norm.neutral)
        term = ax.parse(self.spec.tensors[norm.gain]).terms[-1]
        shift = None if norm.bias is None else to_work_dtype(self.state[norm.bias])
        taken = not norm.padded and all(b is not None for _, b in norm.readers)
        for weight, bias in norm.readers:
            for name, entry in self.each(weight).items():
                dim = _reading_axis(entry, term)
                self.edit(name, partial(_scale_axis, by=gain, dim=dim))
                if shift is not None and taken:
                    assert bias is not None
                    self.edit(
                        _bias_name(bias, entry),
                        partial(self._shifted, name=name, dim=dim, shift=shift),
                    )
        if norm.bias is not None and shift is not None:
            if taken:
                self.constants[norm.bias] = 0.0
            else:
                lost = (gain == 0) & (shift != 0)
                if bool(lost.any()):
                    raise SpecError(
                        f'"{norm.gain}" cannot be folded: {int(lost.sum())} zero gains have a '
                        "bias that its reader, without one, cannot take up"
                    )
                self.edit(
                    norm.bias,
                    partial(_scale_axis, by=1 / gain.where(gain != 0, gain.new_ones(())), dim=0),
                )
        self.constants[norm.gain] = norm.neutral

    def _shifted(self, a: Tensor, name: str, dim: int, shift: Tensor) -> Tensor:
        """a + W b, with the values that W had before folding. A convolution adds up its kernel too:
        b is the same at every place that it reads.
        """
        w = to_work_dtype(self.state[self.source(name)]) * self.spec.untied.get(name, 1.0)
        total = _scale_axis(w, shift, dim).sum(dim)
        while total.dim() > a.dim() and total.numel() > a.numel():
            total = total.sum(-1)
        if total.numel() != a.numel():
            raise SpecError(
                f'"{name}" of shape {list(w.shape)} reads a norm, but its bias of shape '
                f"{list(a.shape)} cannot take the norm's bias up"
            )
        return a + total.reshape(a.shape)

    def fold_back(self, scale: Scale) -> None:
        gain = to_work_dtype(self.state[scale.gain])
        for weight, bias in scale.writers:
            for pattern in [weight] if bias is None else [weight, bias]:
                for name, entry in self.each(pattern).items():
                    dim = _writing_axis(entry, ax.parse(self.spec.tensors[scale.gain]).terms[-1])
                    self.edit(name, partial(_scale_axis, by=gain, dim=dim))
        self.constants[scale.gain] = 1.0

    def thunks(self, rounded: bool) -> dict[str, Callable[[], Tensor]]:
        out: dict[str, Callable[[], Tensor]] = {
            name: partial(self.state.__getitem__, name) for name in self.state
        }
        out |= {name: partial(self._edited, name, rounded) for name in self.edits}
        for alias in (
            self.edits.keys() & self.spec.ties.keys()
        ):  # the one it repeats may not be stored: it becomes a tensor of its own too
            out.setdefault(
                self.spec.ties[alias], partial(self.state.__getitem__, self.source(alias))
            )
        out |= {
            name: partial(self._constant, name, value) for name, value in self.constants.items()
        }
        return out

    def _constant(self, name: str, value: float) -> Tensor:
        return self.state[name].new_full(self.state[name].shape, value)

    def _edited(self, name: str, rounded: bool) -> Tensor:
        original = self.state[self.source(name)]
        work = to_work_dtype(original) * self.spec.untied.get(name, 1.0)
        for change in self.edits[name]:
            work = change(work)
        return work.to(original.dtype) if rounded else work


def to_work_dtype(x: Tensor) -> Tensor:
    """Folding's precision: float64, or float32 for what was stored in half precision."""
    import torch

    return x.to(torch.float64 if x.dtype.itemsize >= 4 else torch.float32)


def _scale_axis(w: Tensor, by: Tensor, dim: int) -> Tensor:
    """w with one axis multiplied by a vector, which repeats where the axis is a multiple of it."""
    shape = [1] * w.dim()
    shape[dim] = -1
    return w * by.repeat(w.shape[dim] // by.shape[0]).to(w.dtype).view(shape)


def _bias_name(bias: str, entry: StoredTensor) -> str:
    """The bias of a weight: of one of a stack that is stored apart, that of the same place."""
    return bias if entry.parent is None else bias.replace(f"{{{entry.parent}}}", str(entry.place))


def _reading_axis(entry: StoredTensor, gain: ax.Term) -> int:
    """The axis of a reader that contracts what the norm writes."""
    return _axis(entry, gain, star=True)


def _writing_axis(entry: StoredTensor, gain: ax.Term) -> int:
    return _axis(entry, gain, star=False)


def _axis(entry: StoredTensor, gain: ax.Term, star: bool) -> int:
    wanted = {leaf.space for leaf in ax.leaves(gain)}
    for dim, term in enumerate(ax.parse(entry.axes).terms):
        found = list(ax.leaves(term))
        if (
            found
            and {leaf.space for leaf in found} == wanted
            and all(leaf.star == star for leaf in found)
        ):
            return dim
    raise SpecError(
        f'"{entry.pattern}" with axes {entry.axes} does not {"read" if star else "write"} {gain}'
    )
