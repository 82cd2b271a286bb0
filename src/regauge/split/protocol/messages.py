"""What crosses: a pass of the backbone as named tensors and a layout, and back, with nothing in it
that is not looked at.

The client sends every tensor that its blocks were given (tuples, such as rotary tables, as key.0,
key.1), a few plain values, and the layout: which argument of each block takes which key. The server
holds all of it against its own blocks: argument names against their signatures, shapes against the
boundary's axes, numbers against NaN and Inf. Blocks are called by name, and nothing of what was
sent is executed.
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
from regauge.errors import CutError, RegaugeError
from regauge.models.cut import TOKEN_SPACES, Call, Crossing, Cut
from regauge.models.families import Boundary, family_of
from regauge.models.resolve import config_of, spec_of
from regauge.split.protocol.frames import Frame, FrameError, Value

Tensor = torch.Tensor

# What a client's model asks of blocks that are not its own is answered for it: caches stay with the
# server, and so do attentions.
_OVERRIDES = {
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
    "use_cache": False,
    "cache_position": None,
}
_SERVER_ONLY = ("output_attentions", "output_router_logits")
CACHE = "past_key_values"
PROTOCOL = 1  # of the conversation; the layout of a frame has a version of its own
_LOSS_ARGUMENTS = frozenset(
    {"num_items_in_batch"}
)  # what transformers' Trainer says to the loss passes by the blocks, which have no use for it


def describe_model(where: Cut, config: Mapping[str, Any] | None = None) -> dict[str, Value]:
    """What two sides must agree on: the family, the boundaries, the sizes of all spaces, the shapes
    of the blocks' weights.

    Elements change none of it.
    """
    try:
        config = config_of(where.model) if config is None else config
        family, sizes = (
            family_of(config).name,
            dict(sorted(spec_of(where.model, config=config).sizes.items())),
        )
    except RegaugeError:
        family, sizes = "", {}  # a module of the user's own, cut at given boundaries
    parts: list[Any] = []
    depth: list[Value] = []
    for b in where.boundaries:
        blocks = where.model.get_submodule(b.blocks)
        parts.append(
            [
                b.name,
                dict(b.enter),
                b.leave,
                list(b.returns),
                {name: list(t.shape) for name, t in sorted(blocks.state_dict().items())},
            ]
        )
        depth.append(len(blocks_of(where, b)))
    digest = hashlib.sha256(canonical_json([family, sizes, parts])).hexdigest()[:32]
    return {
        "family": family,
        "digest": digest,
        "depth": depth,
        "dtype": str(dtype_of(where)).removeprefix("torch."),
    }


def blocks_of(where: Cut, boundary: Boundary) -> tuple[torch.nn.Module, ...]:
    found = where.model.get_submodule(boundary.blocks)
    return (
        tuple(found) if isinstance(found, torch.nn.ModuleList | torch.nn.Sequential) else (found,)
    )


def dtype_of(where: Cut) -> torch.dtype:
    for b in where.boundaries:
        for p in where.model.get_submodule(b.blocks).parameters():
            if p.is_floating_point():
                return p.dtype
    return torch.float32


def pack(crossing: Crossing) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """A pass as values and tensors. Tensors keep their place in the graph: whoever sends them
    detaches them.
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
                f'"{name}" is made by blocks that are on the server, and does not cross',
                hint=f"call the model with {name}=False",
            )
        if name in _LOSS_ARGUMENTS and _is_extra_kwarg(crossing, name):
            dropped.add(key)
            continue
        given = _OVERRIDES.get(name, value)
        if isinstance(given, Tensor):
            tensors[key] = given
        elif (
            isinstance(given, tuple | list) and given and all(isinstance(v, Tensor) for v in given)
        ):
            tensors |= {f"{key}.{i}": v for i, v in enumerate(given)}
        elif (given is None or name in _SERVER_ONLY) and _is_extra_kwarg(crossing, name):
            dropped.add(key)
        else:
            plain.append([key, _to_plain(name, given)])
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
    """Is there no such argument: is it one of `**kwargs`?"""
    return not any(name in inspect.signature(b.forward).parameters for b in crossing.blocks)


def _to_plain(name: str, value: Any) -> Value:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list) and all(isinstance(v, int) for v in value):
        return list(value)
    if isinstance(value, torch.Size):
        return list(value)
    raise CutError(
        f'the blocks are given "{name}", a {type(value).__name__}, which does not cross',
        hint="call the model without it",
    )


def exact_keys(boundary: Boundary, keys: Mapping[str, Any]) -> frozenset[str]:
    """The tensors that no codec may round: all but those that have an axis of the model's own."""
    return frozenset(key for key in keys if not _is_features(boundary, key))


def _is_features(boundary: Boundary, key: str) -> bool:
    axes = boundary.enter.get(_argument_name(key))
    return axes is not None and bool(ax.spaces(axes) - TOKEN_SPACES)


def _argument_name(key: str) -> str:
    return key.partition("@")[0].partition(".")[0]


def unpack(
    frame: Frame,
    where: Cut,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    length: int,
) -> Crossing:
    """The pass that a frame describes, on this side's blocks. Everything that is wrong with it is a
    `FrameError` that names it.
    """
    name = frame.values.get("boundary")
    boundary = next((b for b in where.boundaries if b.name == name), None)
    if boundary is None:
        raise FrameError(
            "boundary",
            f"the model has no boundary {name!r:.40}",
            hint=f"it has {', '.join(repr(b.name) for b in where.boundaries)}",
        )
    blocks = blocks_of(where, boundary)
    inputs = _parse_inputs(frame)
    calls = tuple(_parse_calls(frame, boundary, blocks, inputs))
    if not isinstance(inputs.get(boundary.stream), Tensor):
        raise FrameError("stream", f'there is no tensor "{boundary.stream}", which is the stream')
    used = {key for call in calls for _, key in call.kwargs}
    if used != inputs.keys():
        raise FrameError("layout", f'no block is given "{min(inputs.keys() ^ used)[:64]}"')
    bound = dict(sizes)
    for key in sorted(
        inputs, key=lambda k: k != boundary.stream
    ):  # the stream first: it says how many tokens there are
        for part in _iter_tensors(inputs[key]):
            axes = boundary.enter.get(key.partition("@")[0])
            if axes is not None:
                _require_shape(key, part, axes, bound, length)
            _require_finite(key, part, is_mask=not _is_features(boundary, key))
    stream: Tensor = inputs[boundary.stream]
    if stream.dtype != dtype:
        raise FrameError(
            "dtype",
            f'"{boundary.stream}" is {_dtype_name(stream.dtype)}, and the server computes in '
            f"{_dtype_name(dtype)}",
        )
    moved = {key: _to_device(value, device) for key, value in inputs.items()}
    return Crossing(boundary, moved, calls, blocks, tuple(b.__call__ for b in blocks))


def _parse_inputs(frame: Frame) -> dict[str, Any]:
    out: dict[str, Any] = {}
    tuples: dict[str, dict[int, Tensor]] = {}
    for key, tensor in frame.tensors.items():
        stem, dot, place = key.partition(".")
        if not dot:
            out[key] = tensor
        elif place.isdigit() and len(place) < 4:
            tuples.setdefault(stem, {})[int(place)] = tensor
        else:
            raise FrameError("layout", f"there is no input {key!r:.64}")
    for stem, found in tuples.items():
        if sorted(found) != list(range(len(found))) or stem in out:
            raise FrameError("layout", f"the parts of {stem!r:.64} are not 0, 1, 2, ...")
        out[stem] = tuple(found[i] for i in range(len(found)))
    for row in _get_list(frame, "plain"):
        if (
            not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str))
            or row[0] in out
        ):
            raise FrameError(
                "layout", "a plain value is not [key, value], or its key is there already"
            )
        key, value = row
        if isinstance(value, list) and len(value) <= 8 and all(type(v) is int for v in value):
            value = tuple(value)
        elif not (value is None or isinstance(value, bool | int | float)):
            raise FrameError("layout", f"{key!r:.64} is neither a number nor a few whole ones")
        if key.partition("@")[0] in _SERVER_ONLY and value:
            raise FrameError("arguments", f'"{key}" stays on the server')
        out[key] = value
    return out


def _parse_calls(
    frame: Frame, boundary: Boundary, blocks: tuple[torch.nn.Module, ...], inputs: Mapping[str, Any]
) -> Iterator[Call]:
    layouts, order = _get_list(frame, "layouts"), _get_list(frame, "order")
    if len(order) != len(blocks):
        raise FrameError(
            "layout", f"the layout is for {len(order)} blocks, and the backbone has {len(blocks)}"
        )
    for block, i in zip(blocks, order, strict=True):
        if type(i) is not int or not 0 <= i < len(layouts):
            raise FrameError("layout", "a block has no layout")
        layout: Any = layouts[i]
        if not isinstance(layout, list) or not all(
            isinstance(row, list) and len(row) == 2 and all(isinstance(t, str) for t in row)
            for row in layout
        ):
            raise FrameError("layout", "a layout is not a list of [argument, key]")
        known = inspect.signature(block.forward).parameters
        named = {n for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if any(p.kind is p.VAR_KEYWORD for p in known.values()):
            named |= boundary.enter.keys()  # what the library hands on to its attention
            named |= {"position_ids", "is_causal", "use_cache"}
        for argument, key in layout:
            if argument not in named:
                raise FrameError(
                    "arguments",
                    f"a block has no argument {argument!r:.64}",
                    hint="are both sides of one version of the library?",
                )
            if key not in inputs or key.partition("@")[0] != argument:
                raise FrameError(
                    "arguments",
                    f"the argument {argument!r:.64} is given {key!r:.64}, which is not there or "
                    "not its own",
                )
        missing = {
            n for n in named & known.keys() if known[n].default is inspect.Parameter.empty
        } - {a for a, _ in layout}
        if missing:
            raise FrameError("arguments", f'a block is not given "{min(missing)}"')
        if len({a for a, _ in layout}) < len(layout) or boundary.stream not in {
            a for a, _ in layout
        }:
            raise FrameError(
                "arguments", f'a block is given an argument twice, or not "{boundary.stream}"'
            )
        yield Call((), tuple((a, k) for a, k in layout))


def _get_list(frame: Frame, name: str) -> list[Any]:
    found = frame.values.get(name)
    if not isinstance(found, list):
        raise FrameError("layout", f'"{name}" is not a list')
    return found


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (v for v in value if isinstance(v, Tensor))


def _require_shape(key: str, tensor: Tensor, axes: str, bound: dict[str, int], length: int) -> None:
    """Hold a tensor against its axes. Tokens are as many as the first tensor says that has them; an
    axis of one stands for any number.
    """
    terms = ax.parse(axes).terms
    wrong = FrameError(
        "shape", f"{key!r:.64} has shape {list(tensor.shape)}, which is not {axes!r}"
    )
    if tensor.dim() != len(terms) or 0 in tensor.shape:
        raise wrong
    for term, n in zip(terms, tensor.shape, strict=True):
        if isinstance(term, ax.Leaf):
            if term.space in TOKEN_SPACES and n > length:
                raise FrameError("limit", f"{key!r:.64} has {n} tokens, of at most {length}")
            is_row, known = term.space in TOKEN_SPACES, bound.get(term.space)
            if known is None and is_row:
                bound[term.space] = n
            elif known is not None and n != known and not (is_row and n == 1):
                raise FrameError(
                    "shape",
                    f'{key!r:.64} has shape {list(tensor.shape)}, and "{term.space}" has {known}',
                    hint=f"its axes are {axes!r}",
                )
        elif isinstance(term, ax.Sum) and n < bound.get("token", 0) and n != 1:
            raise wrong


def _require_finite(key: str, tensor: Tensor, *, is_mask: bool) -> None:
    if (
        not tensor.is_floating_point() or tensor.is_meta
    ):  # a tensor on the meta device stands for one that is declared and not unpacked yet
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
