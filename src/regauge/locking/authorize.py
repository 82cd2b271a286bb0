"""The edge of a locked model: with its element it computes the plain function while the weights of
its backbone stay locked.

A lock moves the backbone alone, so that embedding and head no longer fit it. `authorized(model, g)`
puts hooks on the first and the last block of every boundary: the stream is moved by g where it
enters, and by ~g where it leaves. Whatever else the blocks read from outside (the encoder's states,
DeBERTa's table of relative positions) is moved on its way in.

    model = authorize(model, key)      # or authorized(model, g): the same module: same class, same
    state dict, still locked
    model.generate(**inputs)           # what the plain model says
    deauthorize(model)                 # locked again

The model stays an ordinary module: hooks are what torch, torch.compile, gradient checkpointing and
DDP expect. A deepcopy is authorised like its original. What is written to disk never holds the
element: a pickled copy refuses to run until it is authorised again.

Optimizers whose steps would part from the plain model's are refused (`guarding`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from regauge.core import axes as ax
from regauge.core.check import check, require
from regauge.core.element import Element
from regauge.core.gather import permute
from regauge.core.members import Member, Monomial
from regauge.errors import CutError, EdgeError
from regauge.locking.optimizer_guard import PERMUTED, Edge, release
from regauge.models.cut import TOKEN_SPACES, Cut, cut
from regauge.models.families import Boundary

if TYPE_CHECKING:
    from regauge.locking.keys import Key

Tensor = torch.Tensor
Module = torch.nn.Module

_AxisTensors = tuple[Tensor | None, Tensor | None, Tensor | None]

_EDGE_ATTRIBUTE = "_regauge_edge"


class AxisTransform:
    """What one member does along one axis of activations: a gather, with signs or scales, or a
    matrix. Ready on whatever device it is given.
    """

    def __init__(self, space: str, member: Member, dim: int) -> None:
        self.space, self.size, self.dim = space, member.size, dim
        self.ready: dict[tuple[str, torch.dtype], _AxisTensors] = {}
        with torch.inference_mode(
            False
        ):  # whoever authorises a model to look at it may train it later
            self._take(member)
        for dtype in (torch.float32, torch.float64):
            self._on(torch.device("cpu"), dtype)

    def _take(self, member: Member) -> None:
        self.index = self.inverse = self.factor = None
        if isinstance(member, Monomial):
            self.index = torch.from_numpy(np.ascontiguousarray(member.index[0]))
            self.inverse = torch.argsort(self.index)
            scale = member.scale
            self.factor = (
                None
                if scale is None
                else torch.from_numpy(np.ascontiguousarray(scale[0], np.float64))
            )
        else:
            self.factor = torch.from_numpy(np.ascontiguousarray(member.matrix()[0], np.float64))

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[self.dim] != self.size:
            if x.shape[self.dim] == 1:  # broadcast: the same for every place
                return x
            raise EdgeError(
                f'an axis of size {x.shape[self.dim]} enters where the space "{self.space}" has '
                f"{self.size}"
            )
        dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        index, inverse, factor = self._on(x.device, dtype)
        if index is not None and inverse is not None:
            # A compiler fuses a plain gather; a Function of our own would only be in its way.
            x = (
                x.index_select(self.dim, index)
                if torch.compiler.is_compiling()
                else permute(x, index, self.dim, inverse)
            )
            if factor is None:
                return x
            shape = [1] * x.dim()
            shape[self.dim] = self.size
            return x * factor.view(shape).to(x.dtype)
        assert factor is not None
        with torch.autocast(
            x.device.type, enabled=False
        ):  # the stream is kept in full precision, and so is what turns it
            return (x.to(dtype).movedim(self.dim, -1) @ factor.T).movedim(-1, self.dim).to(x.dtype)

    def _on(self, device: torch.device, dtype: torch.dtype) -> _AxisTensors:
        key = (str(device), dtype)
        if key in self.ready:
            return self.ready[key]
        if torch.compiler.is_compiling():
            return self._made(device, dtype)
        with torch.inference_mode(
            False
        ):  # what is made here is kept, and may be needed for training later
            self.ready[key] = self._made(device, dtype)
        return self.ready[key]

    def _made(self, device: torch.device, dtype: torch.dtype) -> _AxisTensors:
        index = None if self.index is None else self.index.to(device)
        inverse = None if self.inverse is None else self.inverse.to(device)
        return index, inverse, None if self.factor is None else self.factor.to(device, dtype)


class _Hook:
    """A hook that never leaves the process: copies in memory share it, and a pickled one is
    closed.
    """

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[type[_Closed], tuple[()]]:
        return _Closed, ()


class _Closed(_Hook):
    """What a saved copy has in place of a hook."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise EdgeError(
            "this model was saved while it was authorised, and the key was not saved with it",
            hint="authorize it again, or call regauge.locking.authorize.deauthorize(model) to "
            "have the locked model that it is",
        )


@dataclass(frozen=True, eq=False)
class _EnterHook(_Hook):
    """Before a module runs: arguments, by place or by name, are moved."""

    arguments: tuple[tuple[str, int, AxisTransform], ...]

    def __call__(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, place, along in self.arguments:
            if place < len(args):
                if args[place] is not None:
                    args = (*args[:place], along(args[place]), *args[place + 1 :])
            elif kwargs.get(name) is not None:
                kwargs = {**kwargs, name: along(kwargs[name])}
        return args, kwargs


@dataclass(frozen=True, eq=False)
class _LeaveHook(_Hook):
    """After the last block has run: the stream, which comes first, is moved back."""

    along: AxisTransform

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        return (
            (self.along(output[0]), *output[1:])
            if isinstance(output, tuple)
            else self.along(output)
        )


@dataclass(frozen=True, eq=False)
class _HiddenStatesHook(_Hook):
    """After the whole stack has run: the streams between its blocks, where the caller asked for
    them, are moved back.

    `first` is the number of the first one that is moved; the last has left the backbone and is
    plain. With a list of layers in place of True there is none for the input. None in place of what
    moves back: the blocks have streams of their own, and nothing is said of them.
    """

    along: AxisTransform | None
    blocks: int
    first: int

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self._restored(o) if self._is_states(o) else o for o in output)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            output["hidden_states"] = self._restored(states)
        return output

    def _is_states(self, value: Any) -> bool:
        """Of a tuple's places: one stream per block, or one more, and perhaps not all of them.
        (Attentions have an axis more.)
        """
        if (
            not isinstance(value, tuple)
            or len(value) - self.blocks not in (0, 1)
            or all(v is None for v in value)
        ):
            return False
        return all(v is None or (isinstance(v, torch.Tensor) and v.dim() == 3) for v in value)

    def _restored(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.along is None:
            raise EdgeError(
                "the streams between the blocks of this model are not put back",
                hint="unlock the model to look at its hidden states",
            )
        moved = range(self.first if len(states) > self.blocks else 0, len(states) - 1)
        return tuple(
            self.along(s) if i in moved and s is not None else s for i, s in enumerate(states)
        )


def authorize(model: Module, key: Key, *, files: Path | str | None = None, **more: Any) -> Module:
    """Make a locked model compute the plain function while its backbone stays locked; only the
    edges apply the key. In place, and returned.

    The model is one that was loaded from a locked folder: its config carries the lock's record. The
    key, the record and the spaces are checked, the numbers are not: in memory they may be of
    another dtype, or trained. With `files`, the folder that it was loaded from, those are checked
    as `unlock` checks them, the list of files too, and the numbers in memory must be those of the
    files. A model that was loaded together with an adapter is refused: an
    `adapter_model.safetensors` in the folder is loaded without being asked for.

    What this protects: weights on disk, and whatever is saved from here. Not this process, which
    has the key and the locked weights at once: for that the two must be on different machines
    (split).
    """
    from regauge.locking.lock import locked_element, require_locked
    from regauge.models.resolve import spec_of

    record = require_locked(model, f"this {type(model).__name__}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise EdgeError(
            f"this {type(model).__name__} was loaded with an adapter, which its lock does not "
            "cover",
            hint="remove adapter_config.json from the folder if it is not yours; put adapters "
            "on after authorize",
        )
    element = locked_element(spec_of(model), record, key)
    if files is not None:
        from regauge.checkpoints.reader import open_checkpoint
        from regauge.locking.lock_files import verify_loaded

        checkpoint = open_checkpoint(files)
        if require_locked(checkpoint, files) != record:
            raise EdgeError(
                f"this {type(model).__name__} has another lock record than {files}",
                hint="name the folder that it was loaded from",
            )
        verify_loaded(model, checkpoint, spec_of(checkpoint), key)
    return authorize_with_element(model, element, **more)


def save_trained(model: Module, folder: Path | str, key: Key) -> None:
    """Save a locked model that was trained, and renew its commitment, so that it is told from one
    that was tampered with.
    """
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.locking.lock import locked_element, require_locked
    from regauge.locking.lock_files import reseal
    from regauge.models.resolve import spec_of

    locked_element(
        spec_of(model), require_locked(model, f"this {type(model).__name__}"), key
    )  # a wrong key is found before anything is written
    model.save_pretrained(folder)  # type: ignore[operator]
    checkpoint = open_checkpoint(folder)
    reseal(checkpoint, spec_of(checkpoint), key)


def authorize_with_element(
    model: Module,
    element: Element,
    *,
    config: Mapping[str, Any] | None = None,
    boundaries: Sequence[Boundary] | None = None,
    any_optimizer: bool = False,
) -> Module:
    """Make a model whose backbone was moved by this element compute the plain function. It is
    changed in place, and returned.

    The weights stay as they are. `config` and `boundaries` are for models that do not say
    themselves where they are cut (see `cut`). An optimizer whose steps would part from those on the
    plain model is refused at its first step; `any_optimizer` lets it pass.

    Attentions, router logits and caches that a caller asks for are those of the locked blocks:
    their heads and experts are in the locked order.
    """
    if is_authorized(model):
        raise EdgeError(
            f"this {type(model).__name__} is authorised already",
            hint="call regauge.locking.authorize.deauthorize(model) first",
        )
    if getattr(model, PERMUTED, False):
        raise EdgeError(
            f"the backbone of this {type(model).__name__} is permuted by a wrapper",
            hint="unwrap it first",
        )
    drops = next((name for name, m in model.named_modules() if getattr(m, "layerdrop", 0)), None)
    if drops is not None:
        raise EdgeError(
            f'layer dropping may skip the blocks at the edges of "{drops}"',
            hint=f"set {drops or 'model'}.layerdrop to 0",
        )
    element.require()
    where = cut(model, config, boundaries=boundaries)
    require(
        check(element.spec, model.state_dict()),
        f'this {type(model).__name__} does not fit the element\'s spec "{element.spec.family}"',
        hint="authorise the model itself, before adapters and wrappers are put on",
    )
    hooks = list(_plan_hooks(where, element))
    _remove_hooks(model)
    for module, kind, hook in hooks:
        if kind == "enter":
            module.register_forward_pre_hook(hook, with_kwargs=True)
        # before hooks that look at the output: those of transformers that collect hidden states
        else:
            module.register_forward_hook(hook, prepend=kind == "leave")
    entry = (
        frozenset().union(
            *(ax.spaces(b.enter[b.stream]) | ax.spaces(b.leave) for b in where.boundaries)
        )
        - TOKEN_SPACES
    )
    setattr(
        model,
        _EDGE_ATTRIBUTE,
        Edge(model, element, any_optimizer=any_optimizer, stream_spaces=entry),
    )
    return model


def deauthorize(model: Module) -> None:
    """Take the authorisation off: the model is the locked one again, which fits neither its
    embedding nor its head.
    """
    _remove_hooks(model)
    for module in model.modules():
        edge = module.__dict__.pop(_EDGE_ATTRIBUTE, None)
        if edge is not None:
            release(edge)


def is_authorized(model: Module) -> bool:
    """Does this model, or one that it wraps, have its edges moved?"""
    return any(
        module.__dict__.get(_EDGE_ATTRIBUTE) is not None
        or any(
            isinstance(hook, _Hook) and not isinstance(hook, _Closed)
            for hook in _forward_hooks_of(module)
        )
        for module in model.modules()
    )


def edge_of(model: Module) -> Edge | None:
    """The record of the model's authorisation, or of the model's that it wraps."""
    return next(
        (
            m.__dict__[_EDGE_ATTRIBUTE]
            for m in model.modules()
            if m.__dict__.get(_EDGE_ATTRIBUTE) is not None
        ),
        None,
    )


def _forward_hooks_of(module: Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _remove_hooks(model: Module) -> None:
    for module in model.modules():
        for hooks, options in (
            (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
            (
                module._forward_hooks,
                [module._forward_hooks_with_kwargs, module._forward_hooks_always_called],
            ),
        ):
            for key in [k for k, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
                for option in options:
                    option.pop(key, None)


def _plan_hooks(
    where: Cut, g: Element
) -> Iterator[tuple[Module, Literal["enter", "leave", "states"], Any]]:
    """Which module takes which hook. Everything that can be wrong is found before the first one is
    put on.
    """
    back = ~g
    for boundary in where.boundaries:
        _require_known_spaces(boundary, g)
        found = where.model.get_submodule(boundary.blocks)
        blocks = (
            list(found) if isinstance(found, torch.nn.ModuleList | torch.nn.Sequential) else [found]
        )
        if len({id(b) for b in blocks}) < len(blocks):
            raise CutError(
                f'one block stands twice in "{boundary.blocks}"',
                hint="the edges need blocks of their own; copy the shared one",
            )
        owner = where.model.get_submodule(boundary.blocks.rpartition(".")[0])
        alongs = {
            name: along
            for name, axes in boundary.enter.items()
            for along in _axis_transforms(g, axes)
        }
        # What one block hands to the next is moved once, where it enters; what all of them are
        # given, once by their owner if it only passes it on.
        once = {n: a for n, a in alongs.items() if n == boundary.stream or n in boundary.returns}
        above = {
            n: a
            for n, a in alongs.items()
            if n not in once and n in inspect.signature(owner.forward).parameters
        }
        each = {n: a for n, a in alongs.items() if n not in once and n not in above}
        if above:
            yield owner, "enter", _make_enter_hook(owner, above)
        for i, block in enumerate(blocks):
            if i == 0 or each:
                yield block, "enter", _make_enter_hook(block, {**once, **each} if i == 0 else each)
        for along in _axis_transforms(back, boundary.leave):
            yield blocks[-1], "leave", _LeaveHook(along)
        collector, first = _find_collector(where.model, boundary.blocks)
        if collector is not None:
            same = _model_spaces(boundary.enter[boundary.stream]) == _model_spaces(boundary.leave)
            for along in _axis_transforms(back, boundary.leave):
                yield (
                    collector,
                    "states",
                    _HiddenStatesHook(along if same else None, len(blocks), first),
                )


def _require_known_spaces(boundary: Boundary, g: Element) -> None:
    strange = (
        frozenset().union(*(ax.spaces(axes) for axes in (*boundary.enter.values(), boundary.leave)))
        - g.spec.sizes.keys()
        - TOKEN_SPACES
    )
    if strange:
        raise CutError(
            f'the boundary speaks of "{min(strange)}", which the element\'s model does not have',
            hint="draw the element from this model's spec",
        )


def _model_spaces(axes: str) -> frozenset[str]:
    return ax.spaces(axes) - TOKEN_SPACES


def _axis_transforms(g: Element, axes: str) -> list[AxisTransform]:
    """What an element does to a tensor that crosses: nothing, or something along one axis."""
    terms = ax.parse(axes).terms
    moved = [
        (dim, t)
        for dim, t in enumerate(terms)
        if any(leaf.space in g.members for leaf in ax.leaves(t))
    ]
    if not moved:
        return []
    ((dim, term),) = moved  # a boundary's tensors have one axis of the model's spaces
    assert isinstance(term, ax.Leaf)
    assert not term.star
    assert g.spec.spaces[term.space].over is None
    return [AxisTransform(term.space, g.members[term.space], dim - len(terms))]


def _make_enter_hook(module: Module, alongs: Mapping[str, AxisTransform]) -> _EnterHook:
    places = {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}
    return _EnterHook(
        tuple((name, places[name], along) for name, along in alongs.items() if name in places)
    )


def _find_collector(model: Module, blocks: str) -> tuple[Module | None, int]:
    """The module that gathers hidden states, the one nearest to the blocks, and the first state
    that is in the locked basis.

    transformers has hooks of its own on the blocks for it, which see the first block's input as it
    was moved; older models gather in their loop.
    """
    path = blocks
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if "hidden_states" in (_recordable_outputs(module) or {}):
            return module, 0
        if "output_hidden_states" in inspect.signature(module.forward).parameters:
            return module, 1
    return None, 0


def _recordable_outputs(module: Module) -> Any:
    """What transformers collects by hooks for this class."""
    own = getattr(type(module), "_can_record_outputs", None)
    return own if isinstance(own, dict) else None
