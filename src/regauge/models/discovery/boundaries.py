"""Where a discovered model is cut: the lists of blocks that hand a stream from one to the next, and
the spaces of what enters and leaves them.

The module is run once and its lists are watched: a list is a backbone if each block is given what
the one before it returned. Which spaces the stream and the other arguments have is tried, and
believed only if it holds: a backbone that is moved by a random element, with everything that
crosses moved along, must compute the plain function, strictly in float64.
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
_MAX_CANDIDATES = 64  # ways to read what crosses, tried one after the other


@dataclass(frozen=True)
class BlockList:
    """A list of blocks in one run: its path, the argument that is the stream, the names of what a
    block returns, and all that the first was given.
    """

    path: str
    stream: str
    returns: tuple[str, ...]
    inputs: Mapping[str, Any]
    output: torch.Tensor


def find_boundaries(
    spec: Spec, module: torch.nn.Module, inputs: Mapping[str, Any]
) -> tuple[Boundary, ...]:
    """The boundaries of a module of random weights in float64; none if it has no such list, or if
    nothing that was tried holds.

    Tokens have no place in them: which masks and positions would have to follow their order is not
    known of any module.
    """
    found: list[Boundary] = []
    for seen in _find_block_lists(
        spec, module, inputs
    ):  # each by itself: what crosses at one list does not depend on the others
        alone = with_backbone(spec, [seen.path])
        tried = islice(_candidate_boundaries(alone, seen), _MAX_CANDIDATES)
        found += islice((b for b in tried if _is_valid(alone, module, inputs, [b])), 1)
    if len(found) < 2:
        return tuple(found)
    found = [
        replace(b, name=name)
        for b, name in zip(found, _distinct_names([b.blocks for b in found]), strict=True)
    ]
    return (
        tuple(found)
        if _is_valid(with_backbone(spec, [b.blocks for b in found]), module, inputs, found)
        else ()
    )


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """What tells paths apart: encoder and decoder of model.encoder.layers and
    model.decoder.layers.
    """
    words = [p.split(".") for p in paths]
    shared = set.intersection(*(set(w) for w in words))
    return [
        ".".join(w for w in own if w not in shared) or path
        for own, path in zip(words, paths, strict=True)
    ]


def with_backbone(spec: Spec, paths: Sequence[str]) -> Spec:
    """The spec with these lists as its backbone, and nothing else."""
    if not paths:
        return spec
    inside = tuple(f"{p}." for p in paths)
    names = list(spec.tensors)
    start = next((i for i, n in enumerate(names) if n.startswith(inside)), 0)

    def part(i: int, name: str) -> str:
        if name.startswith(inside):
            return "backbone"
        said = spec.parts.get(name, "backbone")
        return said if said != "backbone" else "embed" if i < start else "head"

    return replace(spec, parts={n: part(i, n) for i, n in enumerate(names)})


def _shared_spaces(spec: Spec) -> dict[str, int]:
    """The spaces that the backbone shares with the edges, and that a tensor can cross in, with
    their sizes.
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
    """The outermost lists of blocks that hand a stream on, in the order in which they are run."""
    listed: dict[str, list[torch.nn.Module]] = {}
    backbone = [n for n in spec.tensors if spec.parts.get(n) == "backbone"]
    for path, one in module.named_modules():
        inner = any(path.startswith(f"{p}.") for p in listed)
        if (
            path
            and not inner
            and isinstance(one, torch.nn.ModuleList | torch.nn.Sequential)
            and any(n.startswith(f"{path}.") for n in backbone)
        ):
            listed[path] = list(one)
    owner = {
        id(block): (path, i) for path, blocks in listed.items() for i, block in enumerate(blocks)
    }
    calls: dict[str, list[tuple[int, dict[str, Any], Any]]] = {path: [] for path in listed}

    def watch(
        block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        path, i = owner[id(block)]
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
        calls[path].append((i, bound.arguments, result))

    handles = [
        b.register_forward_hook(watch, with_kwargs=True)
        for blocks in listed.values()
        for b in blocks
    ]
    try:
        compute_outputs(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for path, made in calls.items():
        if [i for i, _, _ in made] == list(range(len(listed[path]))) and made:
            found = _match_stream(path, [(given, result) for _, given, result in made])
            if found is not None:
                yield found


def _match_stream(path: str, calls: Sequence[tuple[Mapping[str, Any], Any]]) -> BlockList | None:
    """The stream of a list of blocks: what the first place of each result is to the next block."""
    results = [r if isinstance(r, tuple) else (r,) for _, r in calls]
    first, leaves = calls[0][0], results[-1][0]
    candidates = [
        n for n, v in first.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]
    stream = next(
        (
            n
            for n in candidates
            if all(g.get(n) is r[0] for (g, _), r in zip(calls[1:], results, strict=False))
        ),
        None,
    )
    if stream is None or not isinstance(leaves, torch.Tensor):
        return None
    returns: tuple[str, ...] = ()
    if isinstance(calls[0][1], tuple):
        later = [g for g, _ in calls[1:2]]
        names = [
            next(
                (
                    n
                    for g in later
                    for n, v in g.items()
                    if v is r and r is not None and n != stream
                ),
                "",
            )
            for r in results[0][1:]
        ]
        returns = (stream, *names)
    return BlockList(path, stream, returns, first, leaves)


def _candidate_boundaries(spec: Spec, seen: BlockList) -> list[Boundary]:
    """Every way to say which spaces cross here, the plainest first."""
    joints = _shared_spaces(spec)

    def ways(value: Any) -> list[str]:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return []
        out = []
        for dim in reversed(range(value.dim())):  # features come last, as a rule
            named = [name for name, size in joints.items() if size == value.shape[dim]]
            for name in sorted(named, key=lambda n: not n.startswith("stream")):
                out.append(" ".join(name if i == dim else "_" for i in range(value.dim())))
        return out

    others = {
        n: [None, *ways(v)]
        for n, v in seen.inputs.items()
        if n != seen.stream and n not in seen.returns and ways(v)
    }
    rows = [
        (enter, leave, dict(zip(others, chosen, strict=True)))
        for enter, leave in product(ways(seen.inputs[seen.stream]), ways(seen.output))
        for chosen in product(*others.values())
    ]
    rows.sort(key=lambda row: (row[0] != row[1], sum(v is not None for v in row[2].values())))
    return [
        Boundary(
            "",
            seen.path,
            {seen.stream: enter, **{n: a for n, a in more.items() if a is not None}},
            leave,
            seen.returns,
        )
        for enter, leave, more in rows
    ]


def _is_valid(
    spec: Spec, module: torch.nn.Module, inputs: Mapping[str, Any], found: Sequence[Boundary]
) -> bool:
    """Does the backbone, moved by a random element, compute the plain function between these
    boundaries?
    """
    plain = compute_outputs(module, inputs)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    whole = element(spec, _SEED)
    inside = {
        s for n, a in spec.tensors.items() if spec.parts.get(n) == "backbone" for s in ax.spaces(a)
    }
    g = Element(spec, {n: m for n, m in whole.members.items() if n in inside})
    try:
        module.load_state_dict(apply(g, state, "backbone"), strict=False)
        with (
            strict_float64(),
            cut(module, boundaries=found).route(
                lambda crossing: crossing.restore(g, crossing.transform(g).run())
            ),
        ):
            moved = compute_outputs(module, inputs)
    except (
        RegaugeError,
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
    ):  # what crosses does not have these axes
        return False
    finally:
        module.load_state_dict(state, strict=False)
    return all(
        float((moved[k] - v).abs().max()) <= TOLERANCE * max(1.0, float(v.abs().max()))
        for k, v in plain.items()
    )
