"""The boundaries of a discovered model: lists of blocks that pass a stream on, and the spaces of
their inputs and outputs.

The module is run once with hooks: a list is a backbone if each block receives the output of the
previous one. The spaces of the stream and of the other arguments are guessed and then verified: a
backbone transformed by a random element, with its inputs and outputs transformed accordingly, must
compute the plain function in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.action import apply
from regauge.core.element import Element, element
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.models.cut import cut
from regauge.models.families.family import Boundary
from regauge.testing import compute_outputs, strict_float64

TOLERANCE = 1e-9
_SEED = 21
_MAX_CANDIDATES = 64  # tried in order
_MISFITS = (RegaugeError, RuntimeError, TypeError, ValueError, IndexError)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks in one run.

    Attributes:
        path: the path of the list.
        stream: the argument of a block that is the stream.
        returns: the names of a block's outputs.
        inputs: all arguments of the first block.
        output: the stream returned by the last block.
    """

    path: str
    stream: str
    returns: tuple[str, ...]
    inputs: Mapping[str, Any]
    output: torch.Tensor


def find_boundaries(
    spec: Spec, module: torch.nn.Module, inputs: Mapping[str, Any]
) -> tuple[Boundary, ...]:
    """Find the boundaries of a module with random weights in float64.

    Returns none if the module has no such list or if no candidate is valid. Boundaries contain no
    token spaces: for an arbitrary module it is unknown which masks and positions depend on the
    order of the tokens.
    """
    boundaries: list[Boundary] = []
    for block_list in _find_block_lists(spec, module, inputs):  # independent of each other
        part_spec = with_backbone(spec, [block_list.path])
        candidates = islice(_candidate_boundaries(part_spec, block_list), _MAX_CANDIDATES)
        boundaries += islice(
            (b for b in candidates if _is_valid(part_spec, module, inputs, [b])), 1
        )
    if len(boundaries) < 2:
        return tuple(boundaries)
    boundaries = [
        replace(b, name=name)
        for b, name in zip(boundaries, _distinct_names([b.blocks for b in boundaries]), strict=True)
    ]
    return (
        tuple(boundaries)
        if _is_valid(
            with_backbone(spec, [b.blocks for b in boundaries]), module, inputs, boundaries
        )
        else ()
    )


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """Return the words in which paths differ: encoder and decoder of model.encoder.layers and
    model.decoder.layers.
    """
    words = [p.split(".") for p in paths]
    shared = set.intersection(*(set(w) for w in words))
    return [
        ".".join(w for w in path_words if w not in shared) or path
        for path_words, path in zip(words, paths, strict=True)
    ]


def with_backbone(spec: Spec, paths: Sequence[str]) -> Spec:
    """Return the spec with exactly these lists as its backbone."""
    if not paths:
        return spec
    prefixes = tuple(f"{p}." for p in paths)
    names = list(spec.tensors)
    start = next((i for i, n in enumerate(names) if n.startswith(prefixes)), 0)

    def part(i: int, name: str) -> str:
        if name.startswith(prefixes):
            return "backbone"
        assigned = spec.parts.get(name, "backbone")
        return assigned if assigned != "backbone" else "embed" if i < start else "head"

    return replace(spec, parts={n: part(i, n) for i, n in enumerate(names)})


def _shared_spaces(spec: Spec) -> dict[str, int]:
    """Return the sizes of the spaces that the backbone shares with the edges and that a tensor can
    cross in.
    """
    inside, outside = (
        {
            s
            for n, a in spec.tensors.items()
            if (spec.parts.get(n) == "backbone") == backbone
            for s in ax.spaces(a)
        }
        for backbone in (True, False)
    )
    outside |= spec.visible
    return {
        n: s.size
        for n, s in spec.spaces.items()
        if n in inside & outside and s.over is None and s.size > 1
    }


def _find_block_lists(
    spec: Spec, module: torch.nn.Module, inputs: Mapping[str, Any]
) -> Iterator[BlockList]:
    """Yield the outermost lists of blocks that pass a stream on, in the order in which they run."""
    lists: dict[str, list[torch.nn.Module]] = {}
    backbone = [n for n in spec.tensors if spec.parts.get(n) == "backbone"]
    for path, submodule in module.named_modules():
        is_nested = any(path.startswith(f"{p}.") for p in lists)
        if (
            path
            and not is_nested
            and isinstance(submodule, torch.nn.ModuleList | torch.nn.Sequential)
            and any(n.startswith(f"{path}.") for n in backbone)
        ):
            lists[path] = list(submodule)
    owner = {
        id(block): (path, i) for path, blocks in lists.items() for i, block in enumerate(blocks)
    }
    calls: dict[str, list[tuple[int, dict[str, Any], Any]]] = {path: [] for path in lists}

    def record(
        block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        path, i = owner[id(block)]
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
        calls[path].append((i, bound.arguments, result))

    handles = [
        b.register_forward_hook(record, with_kwargs=True)
        for blocks in lists.values()
        for b in blocks
    ]
    try:
        compute_outputs(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for path, recorded in calls.items():
        if [i for i, _, _ in recorded] == list(range(len(lists[path]))) and recorded:
            block_list = _match_stream(
                path, [(arguments, result) for _, arguments, result in recorded]
            )
            if block_list is not None:
                yield block_list


def _match_stream(path: str, calls: Sequence[tuple[Mapping[str, Any], Any]]) -> BlockList | None:
    """Find the argument of each block that is the first output of the previous one; None if no
    argument is.
    """
    results = [r if isinstance(r, tuple) else (r,) for _, r in calls]
    first, output = calls[0][0], results[-1][0]
    candidates = [
        n for n, v in first.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]
    stream = next(
        (
            n
            for n in candidates
            if all(
                arguments.get(n) is r[0]
                for (arguments, _), r in zip(calls[1:], results, strict=False)
            )
        ),
        None,
    )
    if stream is None or not isinstance(output, torch.Tensor):
        return None
    returns: tuple[str, ...] = ()
    if isinstance(calls[0][1], tuple):
        later = [arguments for arguments, _ in calls[1:2]]
        names = [
            next(
                (
                    n
                    for arguments in later
                    for n, v in arguments.items()
                    if v is r and r is not None and n != stream
                ),
                "",
            )
            for r in results[0][1:]
        ]
        returns = (stream, *names)
    return BlockList(path, stream, returns, first, output)


def _candidate_boundaries(spec: Spec, block_list: BlockList) -> list[Boundary]:
    """List all assignments of spaces to the tensors that cross, simplest first."""
    shared = _shared_spaces(spec)

    def candidates(value: Any) -> list[str]:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return []
        out = []
        for dim in reversed(range(value.dim())):  # features come last, as a rule
            named = [name for name, size in shared.items() if size == value.shape[dim]]
            for name in sorted(named, key=lambda n: not n.startswith("stream")):
                out.append(" ".join(name if i == dim else "_" for i in range(value.dim())))
        return out

    others = {
        n: [None, *candidates(v)]
        for n, v in block_list.inputs.items()
        if n != block_list.stream and n not in block_list.returns and candidates(v)
    }
    rows = [
        (enter, leave, dict(zip(others, chosen, strict=True)))
        for enter, leave in product(
            candidates(block_list.inputs[block_list.stream]), candidates(block_list.output)
        )
        for chosen in product(*others.values())
    ]
    rows.sort(key=lambda row: (row[0] != row[1], sum(v is not None for v in row[2].values())))
    return [
        Boundary(
            "",
            block_list.path,
            {block_list.stream: enter, **{n: a for n, a in extra.items() if a is not None}},
            leave,
            block_list.returns,
        )
        for enter, leave, extra in rows
    ]


def _is_valid(
    spec: Spec, module: torch.nn.Module, inputs: Mapping[str, Any], boundaries: Sequence[Boundary]
) -> bool:
    """Return whether the backbone, transformed by a random element, computes the plain function
    between these boundaries.
    """
    plain = compute_outputs(module, inputs)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    full = element(spec, _SEED)
    inside = {
        s for n, a in spec.tensors.items() if spec.parts.get(n) == "backbone" for s in ax.spaces(a)
    }
    g = Element(spec, {n: m for n, m in full.members.items() if n in inside})
    try:
        module.load_state_dict(apply(g, state, "backbone"), strict=False)
        with (
            strict_float64(),
            cut(module, boundaries=boundaries).route(
                lambda crossing: crossing.restore(g, crossing.transform(g).run())
            ),
        ):
            transformed = compute_outputs(module, inputs)
    except _MISFITS:  # the tensors that cross do not have these axes
        return False
    finally:
        module.load_state_dict(state, strict=False)
    return all(
        float((transformed[k] - v).abs().max()) <= TOLERANCE * max(1.0, float(v.abs().max()))
        for k, v in plain.items()
    )
