"""A discovered spec on the names of a checkpoint. transformers renames some tensors when it saves a
model, and takes others apart (fused experts).

What becomes of each tensor is not written down here: the library's own conversion is run on tensors
that hold nothing but the numbers of their places (views of one row, so that a large model needs no
memory), and read off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regauge.core import axes as ax
from regauge.core.spec import Norm, Scale, Spec
from regauge.models.discovery.graph import DiscoveryError


@dataclass(frozen=True)
class Origin:
    """Where a stored tensor lies in a live one: of each live axis the places from start to stop,
    and the stored axis that they are (None: one place).

    `then`: what lies behind it along the stored axis `along`, where several live tensors are stored
    as one.
    """

    live: str
    axes: tuple[tuple[int, int, int | None], ...]
    along: int = 0
    rest: tuple[Origin, ...] = ()


def stored_spec(
    spec: Spec, module: torch.nn.Module, names: Iterable[str]
) -> tuple[Spec, Mapping[str, Sequence[str]]]:
    """The spec of a checkpoint of this module with these tensor names: the same spaces, with the
    names and axes of what is stored.

    With it the stored names of every live tensor; none if they are the same.
    """
    if all(n in spec.tensors or spec.is_buffer(n) for n in names):
        return spec, {}
    origins = _find_origins(module, [n for n in spec.tensors if n not in spec.ties])
    if not origins:
        return spec, {}
    stacks = _find_stacks(spec, origins, module)
    to: dict[str, list[str]] = {}
    tensors: dict[str, str] = {}
    for name, origin in origins.items():
        pattern = stacks.get(name, name)
        if pattern not in tensors:
            tensors[pattern] = _stored_axes(spec, origin, module, stacked=pattern != name)
            for one in (origin, *origin.rest):
                to.setdefault(one.live, []).append(pattern)
    for (
        alias,
        target,
    ) in (
        spec.ties.items()
    ):  # renamed as what it repeats would be, where only its own name is stored
        if alias not in to and target in to:
            (renamed,) = _find_origins(module, [alias])
            to[alias], tensors[renamed] = [renamed], spec.tensors[alias]
    for name in spec.tensors:
        if name not in to:
            to[name], tensors[name] = [name], spec.tensors[name]

    def pairs(listed: Sequence[tuple[str, str | None]]) -> tuple[tuple[str, str | None], ...]:
        found = [
            (w, None if bias is None else to[bias][min(i, len(to[bias]) - 1)])
            for weight, bias in listed
            for i, w in enumerate(to[weight])
        ]
        return tuple(dict.fromkeys(found))

    described = replace(
        spec,
        tensors=tensors,
        parts={new: part for name, part in spec.parts.items() for new in to[name]},
        ties={to[a][0]: to[t][0] for a, t in spec.ties.items()},
        norms=tuple(
            Norm(
                to[n.gain][0],
                None if n.bias is None else to[n.bias][0],
                pairs(n.readers),
                n.neutral,
                n.padded,
            )
            for n in spec.norms
        ),
        scales=tuple(Scale(to[s.gain][0], pairs(s.writers)) for s in spec.scales),
    )
    return described, to


def _find_origins(module: torch.nn.Module, live: Sequence[str]) -> dict[str, Origin]:
    """Every stored tensor, and where it lies in a live one; nothing for a module that is stored as
    it is.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    if not hasattr(module, "config"):
        return {}
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items() if n in set(live)}
    rank = max((len(s) for s in shapes.values()), default=0)

    def run(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with _NoClone():  # type: ignore[no-untyped-call]
            return dict(revert_weight_conversion(module, dict(state)))  # type: ignore[arg-type]

    names = list(shapes)
    whose = run({n: torch.tensor(i).expand(shapes[n]) for i, n in enumerate(names)})
    places = [run({n: _indices_along(s, dim) for n, s in shapes.items()}) for dim in range(rank)]
    return {
        name: _find_origin(name, value, names, shapes, [p[name] for p in places])
        for name, value in whose.items()
    }


class _NoClone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Views stay views: a copy of one row that stands for a large tensor would be as large as that
    tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].detach()
            if func is torch.ops.aten.clone.default
            else func(*args, **(kwargs or {}))
        )


def _indices_along(shape: Sequence[int], dim: int) -> torch.Tensor:
    """The number of its place along one axis, at every place of a tensor."""
    if dim >= len(shape):
        return torch.tensor(0).expand(shape)
    return (
        torch.arange(shape[dim])
        .view([-1 if i == dim else 1 for i in range(len(shape))])
        .expand(shape)
    )


def _find_origin(
    name: str,
    whose: torch.Tensor,
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    places: Sequence[torch.Tensor],
) -> Origin:
    for along in range(whose.dim()):
        line = _line_along(whose, along)
        ends = [0, *(i for i in range(1, len(line)) if int(line[i]) != int(line[i - 1])), len(line)]
        if len(ends) > 2:
            spans = [(a, b - a) for a, b in pairwise(ends)]
            found = [
                _find_origin(
                    name,
                    whose.narrow(along, a, n),
                    names,
                    shapes,
                    [p.narrow(along, a, n) for p in places],
                )
                for a, n in spans
            ]
            if any(one.rest for one in found):
                raise _unsupported_form(name)
            return replace(found[0], along=along, rest=tuple(found[1:]))
    live = names[int(whose[tuple(0 for _ in whose.shape)])]
    axes: list[tuple[int, int, int | None]] = []
    for dim, size in enumerate(shapes[live]):
        lines = [_line_along(places[dim], j) for j in range(whose.dim())]
        varying = [
            j for j, line in enumerate(lines) if len(line) > 1 and int(line[-1]) != int(line[0])
        ]
        first = int(places[dim][tuple(0 for _ in whose.shape)])
        if not varying:
            same = [
                j
                for j in range(whose.dim())
                if whose.shape[j] == size == 1 and j not in [a[2] for a in axes]
            ]
            axes.append((first, first + 1, same[0] if same else None))
            continue
        (j,) = varying if len(varying) == 1 else (-1,)
        if j < 0 or not torch.equal(lines[j], torch.arange(first, first + len(lines[j]))):
            raise _unsupported_form(name)
        axes.append((first, first + len(lines[j]), j))
    if sorted(j for *_, j in axes if j is not None) != list(range(whose.dim())):
        raise _unsupported_form(name)
    return Origin(live, tuple(axes))


def _line_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x[tuple(slice(None) if i == dim else 0 for i in range(x.dim()))]


def _unsupported_form(name: str) -> DiscoveryError:
    return DiscoveryError(
        f'"{name}" is stored in a form that cannot be read off the live model',
        hint="load the model and discover it in Python: regauge.discover(model, inputs)",
    )


def _find_stacks(
    spec: Spec, origins: Mapping[str, Origin], module: torch.nn.Module
) -> dict[str, str]:
    """Tensors that are stored one by one for each place of a space (experts): the name with the
    space in braces for the number.
    """
    out = {}
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    for name, origin in origins.items():
        for dim, (start, _, j) in enumerate(origin.axes):
            term = ax.parse(spec.tensors[origin.live]).terms[dim]
            if j is not None or shapes[origin.live][dim] == 1 or not isinstance(term, ax.Leaf):
                continue
            like = {
                i: replace(
                    origin,
                    axes=tuple(
                        (i, i + 1, None) if d == dim else a for d, a in enumerate(origin.axes)
                    ),
                )
                for i in (0, 1)
            }
            pair = [
                n
                for i in (0, 1)
                for n, o in origins.items()
                if o == like[i] and _differ_in_numbers_only(n, name)
            ]
            spots = [
                m.span() for m in re.finditer(r"(?<=\.)\d+(?=\.)", name) if m.group() == str(start)
            ]
            told = [
                s for s in spots if all(f"{name[: s[0]]}{i}{name[s[1] :]}" in pair for i in (0, 1))
            ]
            if len(told) != 1:
                raise _unsupported_form(name)
            out[name] = f"{name[: told[0][0]]}{{{term.space}}}{name[told[0][1] :]}"
    return out


def _differ_in_numbers_only(a: str, b: str) -> bool:
    return re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)


def _stored_axes(spec: Spec, origin: Origin, module: torch.nn.Module, stacked: bool) -> str:
    """The axes of a stored tensor: those of the live one, cut and in its order; the space of a
    stack in front.
    """
    terms = ax.parse(spec.tensors[origin.live]).terms
    front = (
        [
            t
            for t, (*_, j) in zip(terms, origin.axes, strict=True)
            if j is None and isinstance(t, ax.Leaf)
        ]
        if stacked
        else []
    )
    first, *rest = (_stored_terms(spec, one, module) for one in (origin, *origin.rest))
    if any(
        first[: origin.along] + first[origin.along + 1 :]
        != o[: origin.along] + o[origin.along + 1 :]
        for o in rest
    ):
        raise _unsupported_form(origin.live)
    if rest:
        first[origin.along] = ax.Sum(tuple(o[origin.along] for o in (first, *rest)))
    return str(ax.Axes((*front, *first)))


def _stored_terms(spec: Spec, origin: Origin, module: torch.nn.Module) -> list[ax.Term]:
    terms, shape = ax.parse(spec.tensors[origin.live]).terms, module.state_dict()[origin.live].shape
    listed = [
        (j, _slice_term(spec, t, n, a, b))
        for t, n, (a, b, j) in zip(terms, shape, origin.axes, strict=True)
        if j is not None
    ]
    return [t for _, t in sorted(listed, key=lambda item: item[0])]


def _slice_term(spec: Spec, term: ax.Term, n: int, start: int, stop: int) -> ax.Term:
    if (start, stop) == (0, n):
        return term
    if isinstance(term, ax.Hole):
        return ax.Hole(stop - start)
    sizes = (
        ax.block_sizes(term.terms, spec.sizes, n, product=False)
        if isinstance(term, ax.Sum)
        else None
    )
    if sizes is not None and isinstance(term, ax.Sum):
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        if start in ends and stop in ends:
            inside = term.terms[ends.index(start) : ends.index(stop)]
            return inside[0] if len(inside) == 1 else ax.Sum(inside)
    raise DiscoveryError(
        f"{term} is stored in parts that no space ends with",
        hint="load the model and discover it in Python",
    )
