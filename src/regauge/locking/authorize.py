"""Authorization: a locked model computes the plain function while its weights stay locked.

A lock transforms the backbone alone, so that embedding and head no longer fit it.
`authorize_with_element(model, g)` registers hooks on the first and the last block of every
boundary, the edges of the backbone: the stream is transformed by g at the input and by ~g at the
output. Other inputs of the blocks (the encoder's states, DeBERTa's table of relative positions) are
transformed at the input too.

    model = authorize("locked", key)   # or a live module: same class and state dict, still locked
    model.generate(**inputs)           # the output of the plain model
    deauthorize(model)                 # locked again

The model stays an ordinary module: torch, torch.compile, gradient checkpointing and DDP all support
hooks. A deepcopy is authorized like its original. The element is never written to disk: a pickled
copy raises until it is authorized again.

Optimizers whose steps would differ from those on the plain model raise at their first step
(`regauge.locking.optimizer_guard`).
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
from regauge.core.options import require_type
from regauge.errors import AuthorizeError, CutError
from regauge.locking.optimizer_guard import PERMUTED, Edge, release
from regauge.models.cut import TOKEN_SPACES, Cut, cut
from regauge.models.families import Boundary

if TYPE_CHECKING:
    from regauge.locking.keys import KeySource
    from regauge.models.sources import Source

Tensor = torch.Tensor
Module = torch.nn.Module

_AxisTensors = tuple[Tensor | None, Tensor | None, Tensor | None]

_EDGE_ATTRIBUTE = "_regauge_edge"


class AxisTransform:
    """The action of one member along one axis of activations.

    It is a gather, with signs or scales, or a matrix product. Its tensors are cached for every
    device and dtype in use.
    """

    def __init__(self, space: str, member: Member, dim: int) -> None:
        self.space, self.size, self.dim = space, member.size, dim
        self.cache: dict[tuple[str, torch.dtype], _AxisTensors] = {}
        with torch.inference_mode(False):  # a model authorized for inference may be trained later
            self._set_member(member)
        for dtype in (torch.float32, torch.float64):
            self._tensors(torch.device("cpu"), dtype)

    def _set_member(self, member: Member) -> None:
        """Set the tensors of a member on the CPU."""
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
            if x.shape[self.dim] == 1:  # broadcast: equal at every index
                return x
            raise AuthorizeError(
                f'the axis of space "{self.space}" must have size {self.size}, got '
                f"{x.shape[self.dim]}",
                hint="check that the inputs belong to this model",
            )
        dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        index, inverse, factor = self._tensors(x.device, dtype)
        if index is not None and inverse is not None:
            # The compiler fuses a plain gather; a custom autograd Function would prevent that.
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
        # The stream stays in full precision, and so does its rotation.
        with torch.autocast(x.device.type, enabled=False):
            return (x.to(dtype).movedim(self.dim, -1) @ factor.T).movedim(-1, self.dim).to(x.dtype)

    def _tensors(self, device: torch.device, dtype: torch.dtype) -> _AxisTensors:
        """Return index, inverse index and factor on a device, from the cache if possible."""
        key = (str(device), dtype)
        if key in self.cache:
            return self.cache[key]
        if torch.compiler.is_compiling():
            return self._copy_tensors(device, dtype)
        with torch.inference_mode(False):  # cached tensors may be used for training later
            self.cache[key] = self._copy_tensors(device, dtype)
        return self.cache[key]

    def _copy_tensors(self, device: torch.device, dtype: torch.dtype) -> _AxisTensors:
        index = None if self.index is None else self.index.to(device)
        inverse = None if self.inverse is None else self.inverse.to(device)
        return index, inverse, None if self.factor is None else self.factor.to(device, dtype)


class _Hook:
    """A hook that never leaves the process: copies in memory share it, pickles replace it."""

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[type[_Closed], tuple[()]]:
        return _Closed, ()


class _Closed(_Hook):
    """The replacement of a hook in a pickle; pickles refer to it by this name."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AuthorizeError(
            "this model was saved while it was authorized, and the key was not saved with it",
            hint="authorize it again, or call regauge.locking.authorize.deauthorize(model) to "
            "use it as the locked model",
        )


@dataclass(frozen=True, eq=False)
class _EnterHook(_Hook):
    """A forward pre-hook that transforms arguments, given by position or by name."""

    arguments: tuple[tuple[str, int, AxisTransform], ...]

    def __call__(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, position, transform in self.arguments:
            if position < len(args):
                if args[position] is not None:
                    args = (*args[:position], transform(args[position]), *args[position + 1 :])
            elif kwargs.get(name) is not None:
                kwargs = {**kwargs, name: transform(kwargs[name])}
        return args, kwargs


@dataclass(frozen=True, eq=False)
class _LeaveHook(_Hook):
    """A forward hook of the last block that transforms the stream, its first output, back."""

    transform: AxisTransform

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        return (
            (self.transform(output[0]), *output[1:])
            if isinstance(output, tuple)
            else self.transform(output)
        )


@dataclass(frozen=True, eq=False)
class _HiddenStatesHook(_Hook):
    """A forward hook of the stack of blocks that transforms `output_hidden_states` back.

    Attributes:
        transform: Maps a hidden state back. None if the spaces of the stream differ between input
            and output; then requested hidden states raise.
        blocks: The number of blocks.
        first: The index of the first transformed state, if there is one for the input. (There is
            none if the caller passes a list of layers instead of True.) The last state has left
            the backbone and is plain.
    """

    transform: AxisTransform | None
    blocks: int
    first: int

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self._restore(o) if self._is_states(o) else o for o in output)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            output["hidden_states"] = self._restore(states)
        return output

    def _is_states(self, value: Any) -> bool:
        """Return whether an output is a tuple of hidden states: one per block, or one more.

        Some of them may be None. (Attentions have an additional axis.)
        """
        if (
            not isinstance(value, tuple)
            or len(value) - self.blocks not in (0, 1)
            or all(v is None for v in value)
        ):
            return False
        return all(v is None or (isinstance(v, torch.Tensor) and v.dim() == 3) for v in value)

    def _restore(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the hidden states of the plain model."""
        if self.transform is None:
            raise AuthorizeError(
                "the hidden states between the blocks of this model cannot be restored",
                hint="unlock the model to read its hidden states",
            )
        locked = range(self.first if len(states) > self.blocks else 0, len(states) - 1)
        return tuple(
            self.transform(s) if i in locked and s is not None else s for i, s in enumerate(states)
        )


def authorize(
    model: Source,
    key: KeySource,
    *,
    files: Path | str | None = None,
    retrained: bool = False,
    dtype: str | None = None,
    **options: Any,
) -> Module:
    """Make a locked model compute the plain function while its backbone stays locked.

    Only hooks at the edges of the backbone apply the key. The key, the record and the spaces are
    checked. The weights of a path are checked against the record too; those of a live module only
    with `files`, because in memory they may have another dtype, or be trained.

    This protects weights on disk and everything that is saved from this process. It does not
    protect the process itself, which holds the key and the locked weights at once. For that, key
    and weights must be on different machines (split learning).

    Args:
        model: A locked folder, which is loaded, or a model that was loaded from one, which is
            changed in place; its config has the lock record.
        key: The key that locked it, or its file.
        files: The folder that a live model was loaded from. Its files are checked as by `unlock`,
            and the weights in memory must equal them.
        retrained: Accept a folder whose weights training has changed.
        dtype: The dtype to load a folder in. Default: that of the stored weights.
        options: Passed on to `authorize_with_element`.

    Returns:
        The model.

    Raises:
        LockError: The model is not locked.
        WrongKeyError: Another key locked it.
        TamperedModelError: The record or, with `files`, a file or weight was changed.
        AuthorizeError: The model was loaded with an adapter (transformers loads an
            `adapter_model.safetensors` in the folder by default), or is authorized already.

    Example:
        >>> key = regauge.generate_key()
        >>> _ = regauge.lock("model", key).save("locked")
        >>> authorized = regauge.authorize("locked", key)
        >>> logits = authorized(torch.arange(6)[None]).logits  # those of the plain model
    """
    from regauge.locking.keys import resolve_key
    from regauge.locking.lock import locked_element, require_locked
    from regauge.locking.locked_checkpoints import check_files, verify_loaded
    from regauge.models.load import load_model
    from regauge.models.resolve import spec_of
    from regauge.models.sources import open_source

    secret = resolve_key(key, "lock")
    checkpoint = None
    if not isinstance(model, Module):
        checkpoint, _ = open_source(model)
        record = require_locked(checkpoint, checkpoint.path)
        locked_element(spec_of(checkpoint), record, secret)  # raises before the weights are loaded
        model = load_model(checkpoint, dtype)
    else:
        record = require_locked(model, f"this {type(model).__name__}")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise AuthorizeError(
                f"this {type(model).__name__} was loaded with an adapter, which its lock does not "
                "cover",
                hint="remove adapter_config.json from the folder if you did not add it; add "
                "adapters after authorize",
            )
    element = locked_element(spec_of(model), record, secret)
    if files is not None:
        checkpoint, _ = open_source(files)
        if require_locked(checkpoint, files) != record:
            raise AuthorizeError(
                f"the lock record of this {type(model).__name__} differs from that of {files}",
                hint="pass the folder that it was loaded from",
            )
    if checkpoint is not None and retrained:
        check_files(checkpoint, record)
    elif checkpoint is not None:
        verify_loaded(model, checkpoint, spec_of(checkpoint), secret)
    return authorize_with_element(model, element, **options)


def save_trained(model: Module, folder: Path | str, key: KeySource) -> None:
    """Save a locked model after training, and renew its commitment.

    The new tags distinguish it from a model that was tampered with.

    Args:
        model: The locked model.
        folder: The output folder.
        key: The key that locked it, or its file.

    Raises:
        WrongKeyError: Another key locked it; nothing is written.
    """
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.locking.keys import resolve_key
    from regauge.locking.lock import locked_element, require_locked
    from regauge.locking.locked_checkpoints import reseal
    from regauge.models.resolve import spec_of

    key = resolve_key(key, "lock")
    # Raises for a wrong key before anything is written.
    locked_element(spec_of(model), require_locked(model, f"this {type(model).__name__}"), key)
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
    """Make a model with a backbone transformed by an element compute the plain function.

    The weights are unchanged. Attentions, router logits and caches are those of the locked blocks:
    their heads and experts are in the locked order.

    Args:
        model: The model. It is changed in place.
        element: The element that transformed its backbone.
        config: The config of a model that has none (see `cut`).
        boundaries: The boundaries of a model without a family (see `cut`).
        any_optimizer: Allow optimizers whose steps differ from those on the plain model. By
            default they raise at their first step.

    Returns:
        The model.

    Raises:
        AuthorizeError: The model is authorized or permuted already, or drops layers.
        SpecError: The model does not fit the element's spec.
        CutError: The model cannot be cut.
    """
    if is_authorized(model):
        raise AuthorizeError(
            f"this {type(model).__name__} is authorized already",
            hint="call regauge.locking.authorize.deauthorize(model) first",
        )
    if getattr(model, PERMUTED, False):
        raise AuthorizeError(
            f"the backbone of this {type(model).__name__} is permuted by a wrapper",
            hint="unwrap it first",
        )
    dropping = next((name for name, m in model.named_modules() if getattr(m, "layerdrop", 0)), None)
    if dropping is not None:
        raise AuthorizeError(
            f'layer dropping may skip the first and last blocks of "{dropping}"',
            hint=f"set {dropping or 'model'}.layerdrop to 0",
        )
    element.require()
    model_cut = cut(model, config, boundaries=boundaries)
    require(
        check(element.spec, model.state_dict()),
        f'this {type(model).__name__} does not fit the element\'s spec "{element.spec.family}"',
        hint="authorize the model itself, before adding adapters and wrappers",
    )
    hooks = list(_plan_hooks(model_cut, element))
    _remove_hooks(model)
    for module, kind, hook in hooks:
        if kind == "enter":
            module.register_forward_pre_hook(hook, with_kwargs=True)
        # Before hooks that read the output: those of transformers collect hidden states.
        else:
            module.register_forward_hook(hook, prepend=kind == "leave")
    stream_spaces = (
        frozenset().union(
            *(ax.spaces(b.enter[b.stream]) | ax.spaces(b.leave) for b in model_cut.boundaries)
        )
        - TOKEN_SPACES
    )
    setattr(
        model,
        _EDGE_ATTRIBUTE,
        Edge(model, element, any_optimizer=any_optimizer, stream_spaces=stream_spaces),
    )
    return model


def deauthorize(model: Module) -> None:
    """Remove the authorization: the locked backbone fits neither embedding nor head again.

    Args:
        model: An authorized model, which is changed in place.

    Example:
        >>> key = regauge.generate_key()
        >>> _ = regauge.lock("model", key).save("locked")
        >>> authorized = regauge.authorize("locked", key)
        >>> regauge.deauthorize(authorized)
    """
    require_type(model, Module, "model")
    _remove_hooks(model)
    for module in model.modules():
        edge = module.__dict__.pop(_EDGE_ATTRIBUTE, None)
        if edge is not None:
            release(edge)


def is_authorized(model: Module) -> bool:
    """Return whether a model, or one that it wraps, is authorized."""
    return any(
        module.__dict__.get(_EDGE_ATTRIBUTE) is not None
        or any(
            isinstance(hook, _Hook) and not isinstance(hook, _Closed)
            for hook in _forward_hooks_of(module)
        )
        for module in model.modules()
    )


def edge_of(model: Module) -> Edge | None:
    """Return the edge of a model, or of one that it wraps; None if it is not authorized."""
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
    """Remove the hooks of an authorization from all modules."""
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
    model_cut: Cut, g: Element
) -> Iterator[tuple[Module, Literal["enter", "leave", "states"], Any]]:
    """Yield the modules and their hooks; everything is checked before the first is registered."""
    back = ~g
    for boundary in model_cut.boundaries:
        _require_known_spaces(boundary, g)
        stack = model_cut.model.get_submodule(boundary.blocks)
        blocks = (
            list(stack) if isinstance(stack, torch.nn.ModuleList | torch.nn.Sequential) else [stack]
        )
        if len({id(b) for b in blocks}) < len(blocks):
            raise CutError(
                f'a block occurs twice in "{boundary.blocks}"',
                hint="the first and last blocks must be distinct modules; copy the shared one",
            )
        owner = model_cut.model.get_submodule(boundary.blocks.rpartition(".")[0])
        transforms = {
            name: transform
            for name, axes in boundary.enter.items()
            for transform in _axis_transforms(g, axes)
        }
        # An argument that blocks pass on to the next is transformed once, at the first block. An
        # argument of all blocks is transformed once by their owner, if the owner passes it on.
        once = {
            n: t for n, t in transforms.items() if n == boundary.stream or n in boundary.returns
        }
        shared = {
            n: t
            for n, t in transforms.items()
            if n not in once and n in inspect.signature(owner.forward).parameters
        }
        per_block = {n: t for n, t in transforms.items() if n not in once and n not in shared}
        if shared:
            yield owner, "enter", _make_enter_hook(owner, shared)
        for i, block in enumerate(blocks):
            if i == 0 or per_block:
                yield (
                    block,
                    "enter",
                    _make_enter_hook(block, {**once, **per_block} if i == 0 else per_block),
                )
        for transform in _axis_transforms(back, boundary.leave):
            yield blocks[-1], "leave", _LeaveHook(transform)
        collector, first = _find_collector(model_cut.model, boundary.blocks)
        if collector is not None:
            same_spaces = _model_spaces(boundary.enter[boundary.stream]) == _model_spaces(
                boundary.leave
            )
            for transform in _axis_transforms(back, boundary.leave):
                yield (
                    collector,
                    "states",
                    _HiddenStatesHook(transform if same_spaces else None, len(blocks), first),
                )


def _require_known_spaces(boundary: Boundary, g: Element) -> None:
    """Raise if a boundary has a space that the element's spec lacks."""
    unknown = (
        frozenset().union(*(ax.spaces(axes) for axes in (*boundary.enter.values(), boundary.leave)))
        - g.spec.sizes.keys()
        - TOKEN_SPACES
    )
    if unknown:
        raise CutError(
            f'the boundary has the space "{min(unknown)}", which the element\'s spec lacks',
            hint="sample the element from this model's spec",
        )


def _model_spaces(axes: str) -> frozenset[str]:
    return ax.spaces(axes) - TOKEN_SPACES


def _axis_transforms(g: Element, axes: str) -> list[AxisTransform]:
    """Return the transform of a tensor that crosses a boundary; empty if the element is trivial."""
    terms = ax.parse(axes).terms
    acted_on = [
        (dim, t)
        for dim, t in enumerate(terms)
        if any(leaf.space in g.members for leaf in ax.leaves(t))
    ]
    if not acted_on:
        return []
    ((dim, term),) = acted_on  # tensors of a boundary have one axis with spaces of the model
    assert isinstance(term, ax.Leaf)
    assert not term.star
    assert g.spec.spaces[term.space].over is None
    return [AxisTransform(term.space, g.members[term.space], dim - len(terms))]


def _make_enter_hook(module: Module, transforms: Mapping[str, AxisTransform]) -> _EnterHook:
    """Build the pre-hook of a module; arguments that its forward lacks are skipped."""
    positions = {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}
    return _EnterHook(
        tuple(
            (name, positions[name], transform)
            for name, transform in transforms.items()
            if name in positions
        )
    )


def _find_collector(model: Module, blocks: str) -> tuple[Module | None, int]:
    """Return the module nearest to the blocks that collects hidden states.

    transformers collects them by hooks on the blocks, which record the transformed input of the
    first block; older models collect them in their loop.

    Returns:
        The module, or None, and the index of the first state in the locked basis.
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
    """Return the outputs that transformers collects by hooks for the class of a module, or None."""
    outputs = getattr(type(module), "_can_record_outputs", None)
    return outputs if isinstance(outputs, dict) else None
