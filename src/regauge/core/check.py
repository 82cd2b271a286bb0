"""Checks of a state against its spec, and of a spec for consistency. They list all faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from regauge.core import axes as ax
from regauge.core.groups import GeneralLinear, Orthogonal, Permutation, Trivial
from regauge.core.spec import (
    MAX_STACK,
    PARTS,
    STACK,
    Shaped,
    Spec,
    iter_stored_tensors,
    stored_tensors,
)
from regauge.errors import AxesError, ElementError, SpecError


@dataclass(frozen=True)
class Fault:
    """One mismatch: the name of the tensor or space, and a message."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.text


def check(spec: Spec, state: Mapping[str, Shaped], *, complete: bool = True) -> list[Fault]:
    """List every mismatch between a spec and a state.

    Args:
        spec: The spec. If it is inconsistent, only its own faults are listed.
        state: Tensors, or anything else with shapes, by name. Values are read only to check that
            folded gains are constant, and only if there are values.
        complete: Whether every space of the spec must appear in a tensor.

    Returns:
        The faults; empty if the state fits.

    Example:
        >>> regauge.check(regauge.spec_of(model), model.state_dict())
        []
    """
    inconsistencies = check_spec(spec, complete=complete)
    return inconsistencies or [
        *_check_names(spec, state),
        *_check_shapes(spec, state),
        *check_fixed(spec, state),
    ]


def require(faults: Sequence[Fault], message: str, hint: str | None = None) -> None:
    """Raise one SpecError that lists the faults (the first twenty), if there are any."""
    if faults:
        lines = [f"  {f}" for f in faults[:20]]
        if len(faults) > 20:
            lines.append(f"  ... and {len(faults) - 20} more")
        raise SpecError("\n".join([message, *lines]), hint=hint)


def check_spec(spec: Spec, *, complete: bool = True) -> list[Fault]:
    """List every inconsistency of a spec.

    Args:
        spec: The spec.
        complete: Whether a space without tensors is a fault. Not if parts of the spec could not be
            read.
    """
    faults: list[Fault] = []

    def fault(name: str, text: str) -> None:
        faults.append(Fault(name, text))

    for name, space in spec.spaces.items():
        if type(space.size) is not int or space.size < 1:
            fault(
                name,
                f'the size of space "{name}" must be a positive whole number, got {space.size!r}',
            )
        if space.over is not None:
            parent = spec.spaces.get(space.over)
            if parent is None:
                fault(name, f'space "{name}" lies over "{space.over}", which is not a space')
            elif parent.over is not None or type(parent.group) not in (Permutation, Trivial):
                fault(
                    name,
                    f'space "{name}" lies over "{space.over}", which must be a space of '
                    "permutations with no parent of its own",
                )
    for name, text in [
        *spec.tensors.items(),
        *((f"output {n}", a) for n, a in spec.outputs.items()),
    ]:
        try:
            known = ax.spaces(text)
        except AxesError as error:
            fault(name, f'"{name}": {error}')
            continue
        for unknown in sorted(s for s in known if s not in spec.spaces):
            fault(name, f'"{name}" has axes {text}, but "{unknown}" is not a space')
        if known <= spec.spaces.keys():
            faults += _check_bars(spec, name, text)
        braces = STACK.search(name)
        stack = braces.group(1) if braces else ""
        first_axis = str(ax.Axes(ax.parse(text).terms[:1]))
        if braces and first_axis != stack:
            fault(name, f'the first axis of "{name}" must be "{stack}", got "{first_axis}"')
        elif braces and stack in spec.spaces:
            size = spec.spaces[stack].size
            if type(size) is int and size > MAX_STACK:
                fault(name, f'the stack "{name}" must have at most {MAX_STACK} tensors, got {size}')
    for alias, target in spec.ties.items():
        if target not in spec.tensors or alias not in spec.tensors:
            fault(alias, f'"{alias}" repeats "{target}", but both must be tensors of the spec')
        elif _leaf_places(spec.tensors[alias]) != _leaf_places(spec.tensors[target]):
            fault(
                alias,
                f'"{alias}" repeats "{target}" and must have its axes {spec.tensors[target]}, got '
                f"{spec.tensors[alias]}",
            )
        elif _signature(spec.tensors[alias]) != _signature(spec.tensors[target]):
            for space_name in sorted(ax.spaces(spec.tensors[target])):
                if not spec.spaces[space_name].group.is_orthogonal:
                    group = spec.spaces[space_name].group
                    fault(
                        alias,
                        f'"{alias}" repeats "{target}" as its dual: "{space_name}" must be '
                        f"orthogonal, but its group is {group}",
                    )
    for name, part in spec.parts.items():
        if part not in PARTS:
            fault(name, f'the part of "{name}" must be one of {", ".join(PARTS)}, got "{part}"')
        if name not in spec.tensors:
            fault(name, f'"{name}" is in the part "{part}", but is not a tensor of the spec')
    for name in spec.fixed:
        if name not in spec.tensors:
            fault(name, f'"{name}" must be constant, but is not a tensor of the spec')
    for gain, pairs in [
        *((n.gain, [(n.gain, n.bias), *n.readers]) for n in spec.norms),
        *((s.gain, [(s.gain, None), *s.writers]) for s in spec.scales),
    ]:
        for name in (
            name for pair in pairs for name in pair if name is not None and name not in spec.tensors
        ):
            fault(name, f'"{gain}" folds with "{name}", which is not a tensor of the spec')
        if len(pairs) == 1:
            fault(gain, f'"{gain}" must have at least one layer to fold into')
    for gain, times in Counter(
        [*(n.gain for n in spec.norms), *(s.gain for s in spec.scales)]
    ).items():
        if times > 1:
            fault(
                gain,
                f'"{gain}" must be listed once among norms and scales, got {times} times: each '
                "would fold it again",
            )
    return faults or [*_check_use(spec, complete)]


def _check_use(spec: Spec, complete: bool) -> Iterator[Fault]:
    """Yield stacks that collide with other tensors, and spaces that no tensor uses."""
    for name, times in Counter(name for name, _ in iter_stored_tensors(spec)).items():
        if times > 1:
            yield Fault(
                name,
                f'"{name}" is described {times} times: by a stack, and by another tensor or stack',
            )
    used = frozenset().union(*(ax.spaces(text) for text in spec.tensors.values()))
    for name in spec.spaces if complete else ():
        if name not in used:
            yield Fault(name, f'space "{name}" is on no axis of any tensor')


def _check_bars(spec: Spec, name: str, text: str) -> Iterator[Fault]:
    """Yield bars without a permutation part, and spaces whose parent is not an axis."""
    for term in ax.parse(text).terms:
        for leaf in ax.leaves(term):
            group = spec.spaces[leaf.space].group
            if leaf.bar and isinstance(group, Orthogonal | GeneralLinear):
                yield Fault(
                    name,
                    f'"{name}" follows the permutation part of "{leaf.space}", but its group '
                    f"{group} has none",
                )
            over = spec.spaces[leaf.space].over
            if over is not None and over not in ax.spaces(text) and not name.startswith("output "):
                yield Fault(
                    name,
                    f'"{name}" has axes {text}: "{leaf.space}" lies over "{over}", which must be '
                    "an axis too",
                )


def _leaf_places(text: str) -> list[list[tuple[str, bool]]]:
    """Return the spaces and bars of every axis, without stars."""
    return [[(leaf.space, leaf.bar) for leaf in ax.leaves(t)] for t in ax.parse(text).terms]


def _signature(text: str) -> list[list[ax.Leaf]]:
    """Return the spaces, bars and stars of every axis."""
    return [list(ax.leaves(t)) for t in ax.parse(text).terms]


def _check_names(spec: Spec, state: Mapping[str, Shaped]) -> Iterator[Fault]:
    """Yield missing and unexpected names. Of tied tensors, one is enough."""
    known = stored_tensors(spec)
    by_target: dict[str, set[str]] = {}
    for alias, target in spec.ties.items():
        by_target.setdefault(target, {target}).add(alias)
    tied = {name: names for names in by_target.values() for name in names}
    for name in known:
        if name not in state and not any(other in state for other in tied.get(name, ())):
            yield Fault(name, f'"{name}" is in the spec but not in the file')
    for name in state:
        if name not in known and not spec.is_buffer(name):
            yield Fault(name, f'"{name}" is in the file but not in the spec')


def _check_shapes(spec: Spec, state: Mapping[str, Shaped]) -> Iterator[Fault]:
    """Yield tensors of another shape than their axes, or of a dtype that cannot be transformed."""
    sizes = spec.sizes
    headers = getattr(state, "entries", None) or {}  # need not be read or computed
    for name, entry in stored_tensors(spec).items():
        if name not in state or not ax.spaces(entry.axes) <= spec.spaces.keys():
            continue
        value = headers[name] if name in headers else state[name]
        shape, terms = tuple(value.shape), ax.parse(entry.axes).terms
        dtype = str(getattr(value, "dtype", "float")).removeprefix("torch.")
        if ax.spaces(entry.axes) and not dtype.lower().startswith(("f", "bf")):
            yield Fault(name, f'"{name}" must have a floating-point dtype, got {dtype}')
        if len(shape) != len(terms):
            yield Fault(
                name,
                f'"{name}" has {len(shape)} axes {list(shape)}, expected {len(terms)}: '
                f"{entry.axes}",
            )
            continue
        for i, (n, term) in enumerate(zip(shape, terms, strict=True)):
            if not _fits(term, n, sizes):
                size = ax.size(term, sizes)
                expected = "which does not fit" if size is None else f"expected {size}"
                yield Fault(name, f'axis {i} {term} of "{name}" has size {n}, {expected}')


def _fits(term: ax.Term, n: int, sizes: Mapping[str, int]) -> bool:
    """Return whether an axis of size n can have this term."""
    match term:
        case ax.Hole():
            return term.size in (None, n)
        case ax.Leaf():
            return sizes[term.space] == n
        case ax.Product() | ax.Sum():
            product = isinstance(term, ax.Product)
            inner = term.factors if isinstance(term, ax.Product) else term.terms
            parts = ax.block_sizes(inner, sizes, n, product=product)
            return parts is not None and all(
                _fits(t, p, sizes) for t, p in zip(inner, parts, strict=True)
            )


def check_fixed(spec: Spec, state: Mapping[str, Any]) -> list[Fault]:
    """List the tensors that must be constant by the spec and are not. Entries of a file header,
    which have no values, are skipped.
    """
    tensors = {
        name: state[name] for name in spec.fixed if name in state and hasattr(state[name], "all")
    }
    wrong = [
        (name, spec.fixed[name])
        for name, x in tensors.items()
        if not bool((x == spec.fixed[name]).all())
    ]
    return [
        Fault(name, f'"{name}" was folded and must be {value:g} everywhere, but is not')
        for name, value in wrong
    ]


@contextmanager
def invertible(space: str) -> Iterator[None]:
    """Raise an ElementError that names the space if an inverse or dual computed in this context
    does not exist.
    """
    try:
        with np.errstate(divide="raise", invalid="raise"):
            yield
    except (np.linalg.LinAlgError, FloatingPointError) as error:
        raise ElementError(
            f'on "{space}" the element is singular: it has no inverse',
            hint="g.faults() lists every fault of the element",
        ) from error
