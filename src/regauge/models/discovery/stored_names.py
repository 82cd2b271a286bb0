"""A discovered spec under the tensor names of a checkpoint. transformers renames some tensors when
it saves a model, and splits others (fused experts).

The mapping is not hard-coded: the library's own conversion is run on tensors that hold their own
indices (expanded views, so that a large model needs no memory), and the result is inspected.
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
from regauge.errors import DiscoveryError


@dataclass(frozen=True)
class Origin:
    """The location of a stored tensor in a live one.

    Attributes:
        live: the name of the live tensor.
        axes: for each live axis the range (start, stop) and the stored axis it becomes (None:
            a single index).
        along: the stored axis along which further live tensors are concatenated.
        rest: the origins of those tensors.
    """

    live: str
    axes: tuple[tuple[int, int, int | None], ...]
    along: int = 0
    rest: tuple[Origin, ...] = ()


def stored_spec(
    spec: Spec, module: torch.nn.Module, names: Iterable[str]
) -> tuple[Spec, Mapping[str, Sequence[str]]]:
    """Return the spec of a checkpoint of a module with these tensor names: the same spaces, with
    the names and axes of the stored tensors.

    Returns:
        The spec, and the stored names of every live tensor (empty if they are the same).

    Raises:
        DiscoveryError: a tensor is stored in a form that cannot be mapped to the live model.
    """
    if all(n in spec.tensors or spec.is_buffer(n) for n in names):
        return spec, {}
    origins = _find_origins(module, [n for n in spec.tensors if n not in spec.ties])
    if not origins:
        return spec, {}
    stacks = _find_stacks(spec, origins, module)
    stored: dict[str, list[str]] = {}
    tensors: dict[str, str] = {}
    for name, origin in origins.items():
        pattern = stacks.get(name, name)
        if pattern not in tensors:
            tensors[pattern] = _stored_axes(spec, origin, module, stacked=pattern != name)
            for source in (origin, *origin.rest):
                stored.setdefault(source.live, []).append(pattern)
    # an alias that is stored under its own name is renamed as its target would be
    for alias, target in spec.ties.items():
        if alias not in stored and target in stored:
            (renamed,) = _find_origins(module, [alias])
            stored[alias], tensors[renamed] = [renamed], spec.tensors[alias]
    for name in spec.tensors:
        if name not in stored:
            stored[name], tensors[name] = [name], spec.tensors[name]

    def stored_pairs(
        layers: Sequence[tuple[str, str | None]],
    ) -> tuple[tuple[str, str | None], ...]:
        pairs = [
            (w, None if bias is None else stored[bias][min(i, len(stored[bias]) - 1)])
            for weight, bias in layers
            for i, w in enumerate(stored[weight])
        ]
        return tuple(dict.fromkeys(pairs))

    renamed_spec = replace(
        spec,
        tensors=tensors,
        parts={
            stored_name: part for name, part in spec.parts.items() for stored_name in stored[name]
        },
        ties={stored[a][0]: stored[t][0] for a, t in spec.ties.items()},
        norms=tuple(
            Norm(
                stored[n.gain][0],
                None if n.bias is None else stored[n.bias][0],
                stored_pairs(n.readers),
                n.neutral,
                n.padded,
            )
            for n in spec.norms
        ),
        scales=tuple(Scale(stored[s.gain][0], stored_pairs(s.writers)) for s in spec.scales),
    )
    return renamed_spec, stored


def _find_origins(module: torch.nn.Module, live: Sequence[str]) -> dict[str, Origin]:
    """Return the origin of every stored tensor; empty for a module that is stored unchanged."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    if not hasattr(module, "config"):
        return {}
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items() if n in set(live)}
    rank = max((len(s) for s in shapes.values()), default=0)

    def convert(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with _NoClone():  # type: ignore[no-untyped-call]
            return dict(revert_weight_conversion(module, dict(state)))  # type: ignore[arg-type]

    names = list(shapes)
    owners = convert({n: torch.tensor(i).expand(shapes[n]) for i, n in enumerate(names)})
    indices = [
        convert({n: _indices_along(s, dim) for n, s in shapes.items()}) for dim in range(rank)
    ]
    return {
        name: _find_origin(name, value, names, shapes, [p[name] for p in indices])
        for name, value in owners.items()
    }


class _NoClone(TorchDispatchMode):
    """A mode in which clones return views: a clone of an expanded view would allocate the full
    tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].detach()
            if func is torch.ops.aten.clone.default
            else func(*args, **(kwargs or {}))
        )


def _indices_along(shape: Sequence[int], dim: int) -> torch.Tensor:
    """Return a tensor of the indices along one axis."""
    if dim >= len(shape):
        return torch.tensor(0).expand(shape)
    return (
        torch.arange(shape[dim])
        .view([-1 if i == dim else 1 for i in range(len(shape))])
        .expand(shape)
    )


def _find_origin(
    name: str,
    owners: torch.Tensor,
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    indices: Sequence[torch.Tensor],
) -> Origin:
    """Return the origin of one stored tensor."""
    for along in range(owners.dim()):
        line = _line_along(owners, along)
        ends = [0, *(i for i in range(1, len(line)) if int(line[i]) != int(line[i - 1])), len(line)]
        if len(ends) > 2:
            spans = [(a, b - a) for a, b in pairwise(ends)]
            origins = [
                _find_origin(
                    name,
                    owners.narrow(along, a, n),
                    names,
                    shapes,
                    [p.narrow(along, a, n) for p in indices],
                )
                for a, n in spans
            ]
            if any(origin.rest for origin in origins):
                raise _unsupported_form(name)
            return replace(origins[0], along=along, rest=tuple(origins[1:]))
    live = names[int(owners[tuple(0 for _ in owners.shape)])]
    axes: list[tuple[int, int, int | None]] = []
    for dim, size in enumerate(shapes[live]):
        lines = [_line_along(indices[dim], j) for j in range(owners.dim())]
        varying = [
            j for j, line in enumerate(lines) if len(line) > 1 and int(line[-1]) != int(line[0])
        ]
        first = int(indices[dim][tuple(0 for _ in owners.shape)])
        if not varying:
            singletons = [
                j
                for j in range(owners.dim())
                if owners.shape[j] == size == 1 and j not in [a[2] for a in axes]
            ]
            axes.append((first, first + 1, singletons[0] if singletons else None))
            continue
        (j,) = varying if len(varying) == 1 else (-1,)
        if j < 0 or not torch.equal(lines[j], torch.arange(first, first + len(lines[j]))):
            raise _unsupported_form(name)
        axes.append((first, first + len(lines[j]), j))
    if sorted(j for *_, j in axes if j is not None) != list(range(owners.dim())):
        raise _unsupported_form(name)
    return Origin(live, tuple(axes))


def _line_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x[tuple(slice(None) if i == dim else 0 for i in range(x.dim()))]


def _unsupported_form(name: str) -> DiscoveryError:
    return DiscoveryError(
        f'"{name}" is stored in a form that cannot be mapped to the live model',
        hint="load the model and discover it in Python: regauge.discover(model, inputs)",
    )


def _find_stacks(
    spec: Spec, origins: Mapping[str, Origin], module: torch.nn.Module
) -> dict[str, str]:
    """Return the pattern of tensors that are stored one by one for each index of a space (experts):
    the name with the space in braces.
    """
    patterns = {}
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    for name, origin in origins.items():
        for dim, (start, _, j) in enumerate(origin.axes):
            term = ax.parse(spec.tensors[origin.live]).terms[dim]
            if j is not None or shapes[origin.live][dim] == 1 or not isinstance(term, ax.Leaf):
                continue
            expected = {
                i: replace(
                    origin,
                    axes=tuple(
                        (i, i + 1, None) if d == dim else a for d, a in enumerate(origin.axes)
                    ),
                )
                for i in (0, 1)
            }
            first_two = [
                n
                for i in (0, 1)
                for n, o in origins.items()
                if o == expected[i] and _differ_in_numbers_only(n, name)
            ]
            spans = [
                m.span() for m in re.finditer(r"(?<=\.)\d+(?=\.)", name) if m.group() == str(start)
            ]
            matching = [
                s
                for s in spans
                if all(f"{name[: s[0]]}{i}{name[s[1] :]}" in first_two for i in (0, 1))
            ]
            if len(matching) != 1:
                raise _unsupported_form(name)
            patterns[name] = f"{name[: matching[0][0]]}{{{term.space}}}{name[matching[0][1] :]}"
    return patterns


def _differ_in_numbers_only(a: str, b: str) -> bool:
    return re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)


def _stored_axes(spec: Spec, origin: Origin, module: torch.nn.Module, stacked: bool) -> str:
    """Return the axes of a stored tensor: those of the live one, sliced and reordered; the space of
    a stack comes first.
    """
    terms = ax.parse(spec.tensors[origin.live]).terms
    stack_axes = (
        [
            t
            for t, (*_, j) in zip(terms, origin.axes, strict=True)
            if j is None and isinstance(t, ax.Leaf)
        ]
        if stacked
        else []
    )
    first, *rest = (_stored_terms(spec, part, module) for part in (origin, *origin.rest))
    if any(
        first[: origin.along] + first[origin.along + 1 :]
        != other[: origin.along] + other[origin.along + 1 :]
        for other in rest
    ):
        raise _unsupported_form(origin.live)
    if rest:
        first[origin.along] = ax.Sum(tuple(other[origin.along] for other in (first, *rest)))
    return str(ax.Axes((*stack_axes, *first)))


def _stored_terms(spec: Spec, origin: Origin, module: torch.nn.Module) -> list[ax.Term]:
    """Return the terms of the live axes that a stored tensor has, in its order."""
    terms, shape = ax.parse(spec.tensors[origin.live]).terms, module.state_dict()[origin.live].shape
    by_axis = [
        (j, _slice_term(spec, t, n, a, b))
        for t, n, (a, b, j) in zip(terms, shape, origin.axes, strict=True)
        if j is not None
    ]
    return [t for _, t in sorted(by_axis, key=lambda item: item[0])]


def _slice_term(spec: Spec, term: ax.Term, n: int, start: int, stop: int) -> ax.Term:
    """Return the term of a range of an axis."""
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
            selected = term.terms[ends.index(start) : ends.index(stop)]
            return selected[0] if len(selected) == 1 else ax.Sum(selected)
    raise DiscoveryError(
        f"{term} is stored in slices that end inside a space",
        hint="load the model and discover it in Python",
    )
