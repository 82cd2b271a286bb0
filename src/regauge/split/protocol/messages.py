"""Messages: a pass of the backbone as named tensors and a layout, validated completely.

The client sends every tensor that its blocks take (tuples, such as rotary tables, as key.0, key.1),
a few plain values, and the layout: which argument of each block takes which key. The server
validates all of it against its own blocks: argument names against their signatures, shapes against
the boundary's axes, floats for NaN and Inf. Arguments are passed by name, and no received data is
executed.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.canonical import canonical_json
from regauge.errors import CutError, FrameError, RegaugeError
from regauge.models.cut import TOKEN_SPACES, Call, Crossing, Cut
from regauge.models.families import Boundary, family_of
from regauge.models.resolve import config_of, spec_of
from regauge.split.protocol.frames import Frame, Value

Tensor = torch.Tensor

# Arguments with a fixed value on the wire: the server has its own caches.
_OVERRIDES = {
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "use_cache": False,
    "cache_position": None,
}
# Arguments that request outputs which stay on the server.
_SERVER_ONLY = ("output_attentions", "output_router_logits")
CACHE = "past_key_values"
PROTOCOL = 1  # version of the messages; frames have their own
# Arguments of the loss that transformers' Trainer passes through the blocks, which ignore them.
_LOSS_ARGUMENTS = frozenset({"num_items_in_batch"})


def describe_model(cut: Cut, config: Mapping[str, Any] | None = None) -> dict[str, Value]:
    """Return what client and server must agree on.

    The digest covers the family, the boundaries, the sizes of all spaces and the shapes of the
    blocks' weights. All of these are invariant under elements.
    """
    try:
        config = config_of(cut.model) if config is None else config
        family, sizes = (
            family_of(config).name,
            dict(sorted(spec_of(cut.model, config=config).sizes.items())),
        )
    except RegaugeError:
        family, sizes = "", {}  # a custom module, cut at given boundaries
    parts: list[Any] = []
    depth: list[Value] = []
    for b in cut.boundaries:
        blocks = cut.model.get_submodule(b.blocks)
        parts.append(
            [
                b.name,
                dict(b.enter),
                b.leave,
                list(b.returns),
                {name: list(t.shape) for name, t in sorted(blocks.state_dict().items())},
            ]
        )
        depth.append(len(blocks_of(cut, b)))
    digest = hashlib.sha256(canonical_json([family, sizes, parts])).hexdigest()[:32]
    return {
        "family": family,
        "digest": digest,
        "depth": depth,
        "dtype": str(dtype_of(cut)).removeprefix("torch."),
    }


def blocks_of(cut: Cut, boundary: Boundary) -> tuple[torch.nn.Module, ...]:
    """Return the blocks of a boundary."""
    blocks = cut.model.get_submodule(boundary.blocks)
    return (
        tuple(blocks)
        if isinstance(blocks, torch.nn.ModuleList | torch.nn.Sequential)
        else (blocks,)
    )


def dtype_of(cut: Cut) -> torch.dtype:
    """Return the dtype of the backbone's weights."""
    for b in cut.boundaries:
        for p in cut.model.get_submodule(b.blocks).parameters():
            if p.is_floating_point():
                return p.dtype
    return torch.float32


def pack(crossing: Crossing) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Return a pass as values and tensors. The tensors stay in the autograd graph.

    Raises:
        CutError: An argument cannot be sent.
    """
    values: dict[str, Value] = {
        "boundary": crossing.boundary.name,
        "training": crossing.blocks[0].training,
    }
    tensors: dict[str, Tensor] = {}
    plain: list[Value] = []
    dropped: set[str] = set()
    for key, value in crossing.inputs.items():
        name = key.partition("@")[0]
        if name in _SERVER_ONLY and value:
            raise CutError(
                f'"{name}" must be False: the server does not return it',
                hint=f"call the model with {name}=False",
            )
        if name in _LOSS_ARGUMENTS and _is_extra_kwarg(crossing, name):
            dropped.add(key)
            continue
        sent = _OVERRIDES.get(name, value)
        if isinstance(sent, Tensor):
            tensors[key] = sent
        elif isinstance(sent, tuple | list) and sent and all(isinstance(v, Tensor) for v in sent):
            tensors |= {f"{key}.{i}": v for i, v in enumerate(sent)}
        elif (sent is None or name in _SERVER_ONLY) and _is_extra_kwarg(crossing, name):
            dropped.add(key)
        else:
            plain.append([key, _to_plain(name, sent)])
    layouts: list[Value] = []
    order: list[Value] = []
    for call in crossing.calls:
        layout: Value = [
            [name, key] for name, key in (*call.args, *call.kwargs) if key not in dropped
        ]
        if layout not in layouts:
            layouts.append(layout)
        order.append(layouts.index(layout))
    return {**values, "plain": plain, "layouts": layouts, "order": order}, tensors


def _is_extra_kwarg(crossing: Crossing, name: str) -> bool:
    """Return whether no block names this argument, so that it is one of `**kwargs`."""
    return not any(name in inspect.signature(b.forward).parameters for b in crossing.blocks)


def _to_plain(name: str, value: Any) -> Value:
    """Return a value as JSON; raise CutError if it has another type."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list) and all(isinstance(v, int) for v in value):
        return list(value)
    if isinstance(value, torch.Size):
        return list(value)
    raise CutError(
        f'argument "{name}" of the blocks has an unsupported type: {type(value).__name__}',
        hint="call the model without it",
    )


def exact_keys(boundary: Boundary, keys: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of tensors that no codec may round: all but features."""
    return frozenset(key for key in keys if not _is_features(boundary, key))


def _is_features(boundary: Boundary, key: str) -> bool:
    """Return whether a tensor has an axis that elements act on."""
    axes = boundary.enter.get(_argument_name(key))
    return axes is not None and bool(ax.spaces(axes) - TOKEN_SPACES)


def _argument_name(key: str) -> str:
    return key.partition("@")[0].partition(".")[0]


def unpack(
    frame: Frame,
    cut: Cut,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
) -> Crossing:
    """Return the pass that a frame describes, on the blocks of `cut`.

    Args:
        frame: A FORWARD frame.
        cut: The server's model.
        sizes: Sizes of the model's spaces.
        dtype: Dtype of the backbone.
        device: Device to move the tensors to.
        max_length: Largest number of tokens.

    Raises:
        FrameError: The frame does not match the blocks; the message names the fault.
    """
    name = frame.values.get("boundary")
    boundary = next((b for b in cut.boundaries if b.name == name), None)
    if boundary is None:
        raise FrameError(
            "boundary",
            f"unknown boundary {name!r:.40}",
            hint=f"the model has {', '.join(repr(b.name) for b in cut.boundaries)}",
        )
    blocks = blocks_of(cut, boundary)
    inputs = _parse_inputs(frame)
    calls = tuple(_parse_calls(frame, boundary, blocks, inputs))
    if not isinstance(inputs.get(boundary.stream), Tensor):
        raise FrameError("stream", f'the stream "{boundary.stream}" must be a tensor, got none')
    used = {key for call in calls for _, key in call.kwargs}
    if used != inputs.keys():
        raise FrameError("layout", f'no block takes "{min(inputs.keys() ^ used)[:64]}"')
    bound = dict(sizes)
    # The stream first: it defines the number of tokens.
    for key in sorted(inputs, key=lambda k: k != boundary.stream):
        for part in _iter_tensors(inputs[key]):
            axes = boundary.enter.get(key.partition("@")[0])
            if axes is not None:
                _require_shape(key, part, axes, bound, max_length)
            _require_finite(key, part, is_mask=not _is_features(boundary, key))
    stream: Tensor = inputs[boundary.stream]
    if stream.dtype != dtype:
        raise FrameError(
            "dtype",
            f'"{boundary.stream}" must be {_dtype_name(dtype)}, got {_dtype_name(stream.dtype)}',
        )
    on_device = {key: _to_device(value, device) for key, value in inputs.items()}
    return Crossing(boundary, on_device, calls, blocks, tuple(b.__call__ for b in blocks))


def _parse_inputs(frame: Frame) -> dict[str, Any]:
    """Return the inputs of a frame by key, with tuples put together."""
    inputs: dict[str, Any] = {}
    tuples: dict[str, dict[int, Tensor]] = {}
    for key, tensor in frame.tensors.items():
        stem, dot, place = key.partition(".")
        if not dot:
            inputs[key] = tensor
        elif place.isdigit() and len(place) < 4:
            tuples.setdefault(stem, {})[int(place)] = tensor
        else:
            raise FrameError("layout", f"unknown input {key!r:.64}")
    for stem, parts in tuples.items():
        if sorted(parts) != list(range(len(parts))) or stem in inputs:
            raise FrameError("layout", f"the parts of {stem!r:.64} must be numbered 0, 1, 2, ...")
        inputs[stem] = tuple(parts[i] for i in range(len(parts)))
    for row in _get_list(frame, "plain"):
        if (
            not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str))
            or row[0] in inputs
        ):
            raise FrameError("layout", "a plain value must be [key, value], with a key of its own")
        key, value = row
        if isinstance(value, list) and len(value) <= 8 and all(type(v) is int for v in value):
            value = tuple(value)
        elif not (value is None or isinstance(value, bool | int | float)):
            raise FrameError(
                "layout", f"{key!r:.64} must be a number or a list of at most 8 integers"
            )
        if key.partition("@")[0] in _SERVER_ONLY and value:
            raise FrameError("arguments", f'"{key}" must be False: the server does not return it')
        inputs[key] = value
    return inputs


def _parse_calls(
    frame: Frame, boundary: Boundary, blocks: tuple[torch.nn.Module, ...], inputs: Mapping[str, Any]
) -> Iterator[Call]:
    """Yield the validated arguments of each block."""
    layouts, order = _get_list(frame, "layouts"), _get_list(frame, "order")
    if len(order) != len(blocks):
        raise FrameError("layout", f"the layout must be for {len(blocks)} blocks, got {len(order)}")
    for block, i in zip(blocks, order, strict=True):
        if type(i) is not int or not 0 <= i < len(layouts):
            raise FrameError("layout", f"a block must have a layout, got index {i!r:.20}")
        layout: Any = layouts[i]
        if not isinstance(layout, list) or not all(
            isinstance(row, list) and len(row) == 2 and all(isinstance(t, str) for t in row)
            for row in layout
        ):
            raise FrameError("layout", "a layout must be a list of [argument, key]")
        parameters = inspect.signature(block.forward).parameters
        named = {
            n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            named |= boundary.enter.keys()  # arguments that are passed on to the attention
            named |= {"position_ids", "is_causal", "use_cache"}
        for argument, key in layout:
            if argument not in named:
                raise FrameError(
                    "arguments",
                    f"a block has no argument {argument!r:.64}",
                    hint="use the same version of the model's library on both sides",
                )
            if key not in inputs or key.partition("@")[0] != argument:
                raise FrameError(
                    "arguments",
                    f"the argument {argument!r:.64} must take an input of its name, got "
                    f"{key!r:.64}",
                )
        missing = {
            n for n in named & parameters.keys() if parameters[n].default is inspect.Parameter.empty
        } - {a for a, _ in layout}
        if missing:
            raise FrameError("arguments", f'a block needs the argument "{min(missing)}"')
        if len({a for a, _ in layout}) < len(layout) or boundary.stream not in {
            a for a, _ in layout
        }:
            raise FrameError(
                "arguments",
                f'a block must take each argument once, and "{boundary.stream}" among them',
            )
        yield Call((), tuple((a, k) for a, k in layout))


def _get_list(frame: Frame, name: str) -> list[Any]:
    """Return a list among a frame's values; raise FrameError if it is not one."""
    value = frame.values.get(name)
    if not isinstance(value, list):
        raise FrameError("layout", f'"{name}" must be a list, got {type(value).__name__}')
    return value


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an input, which may be a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (v for v in value if isinstance(v, Tensor))


def _require_shape(
    key: str, tensor: Tensor, axes: str, bound: dict[str, int], max_length: int
) -> None:
    """Check a tensor's shape against its axes.

    The first tensor with tokens fixes their number in `bound`; an axis of size 1 is broadcast.
    """
    terms = ax.parse(axes).terms
    mismatch = FrameError(
        "shape", f"{key!r:.64} must have the axes {axes!r}, got shape {list(tensor.shape)}"
    )
    if tensor.dim() != len(terms) or 0 in tensor.shape:
        raise mismatch
    for term, n in zip(terms, tensor.shape, strict=True):
        if isinstance(term, ax.Leaf):
            if term.space in TOKEN_SPACES and n > max_length:
                raise FrameError(
                    "limit", f"{key!r:.64} must have at most {max_length} tokens, got {n}"
                )
            is_row, size = term.space in TOKEN_SPACES, bound.get(term.space)
            if size is None and is_row:
                bound[term.space] = n
            elif size is not None and n != size and not (is_row and n == 1):
                raise FrameError(
                    "shape",
                    f'"{term.space}" of {key!r:.64} must have size {size}, got shape '
                    f"{list(tensor.shape)}",
                    hint=f"its axes are {axes!r}",
                )
        elif isinstance(term, ax.Sum) and n < bound.get("token", 0) and n != 1:
            raise mismatch


def _require_finite(key: str, tensor: Tensor, *, is_mask: bool) -> None:
    """Raise FrameError for NaN or Inf; masks may hold -Inf."""
    # Tensors on the meta device are declared, but not unpacked yet.
    if not tensor.is_floating_point() or tensor.is_meta:
        return
    if is_mask:
        tensor = tensor.masked_fill(tensor == -math.inf, 0)
    if not bool(torch.isfinite(tensor).all()):
        raise FrameError("nonfinite", f"{key!r:.64} holds NaN or Inf")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_to_device(v, device) for v in value) if isinstance(value, tuple) else value
