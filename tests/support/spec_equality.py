"""Two specs of one model, compared: the same partition of slots, and the groups of one against
those of the other.
"""

from __future__ import annotations

from regauge.core import axes as ax
from regauge.core.fold import folded_spec
from regauge.core.groups import Group, Trivial
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec

Tokens = list[tuple[str, int]]


def tokens(term: ax.Term, sizes: dict[str, int], whole: int) -> Tokens:
    """An axis written out: brackets, and a (space, size) for each leaf; holes have no name, and
    nothing of size 1 is listed.
    """
    match term:
        case ax.Leaf():
            return [(term.space, sizes[term.space])] if sizes[term.space] > 1 else []
        case ax.Hole():
            return [("", whole)] if whole > 1 else []
        case ax.Product():
            known = ax.block_sizes(term.factors, sizes, whole, product=True)
            assert known is not None
            outer, rest = term.factors[0], term.factors[1:]
            if (
                isinstance(outer, ax.Hole)
                and 1 < known[0] <= 16
                and any(True for f in rest for _ in ax.leaves(f))
            ):  # as many copies as it has places
                return tokens(ax.Sum((ax.Product(rest),) * known[0]), sizes, whole)
            inner = [tokens(f, sizes, n) for f, n in zip(term.factors, known, strict=True)]
            listed = [t for part in inner for t in part]
            return _merged(listed, "(") if sum(bool(p) for p in inner) > 1 else listed
        case ax.Sum():
            known = ax.block_sizes(term.terms, sizes, whole, product=False)
            assert known is not None
            inner = [
                tokens(t, sizes, n) or [("", 1)] for t, n in zip(term.terms, known, strict=True)
            ]
            if all(part == [("", n)] for part, n in zip(inner, known, strict=True)):
                return [("", whole)]
            return [("[", 0), *(t for part in inner for t in (*part, ("+", 0))), ("]", 0)]


def _merged(listed: Tokens, bracket: str) -> Tokens:
    if all(name == "" for name, _ in listed):
        size = 1
        for _, n in listed:
            size *= n
        return [("", size)]
    return [(bracket, 0), *listed, (")", 0)]


def contains(big: Group, small: Group, size: int) -> bool:
    """Is every member of one group (judging by a few) one of another?"""
    return all(
        big.fault(small.sample(size, 2, Stream(seed_key(seed), "contains"))) is None
        for seed in range(3)
    )


def differences(inferred: Spec, known: Spec, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Where `found` is not the same as `known`, or larger. Empty if it is."""
    out: list[str] = []
    to: dict[str, str] = {}
    back: dict[str, str] = {}
    for name, text in known.tensors.items():
        if name not in shapes or (name not in inferred.tensors and not ax.spaces(text)):
            continue
        if name not in inferred.tensors:
            out.append(f"{name} is missing")
            continue
        a, b = ax.parse(text).terms, ax.parse(inferred.tensors[name]).terms
        for i, (x, y, n) in enumerate(zip(a, b, shapes[name], strict=True)):
            if all(isinstance(known.spaces[leaf.space].group, Trivial) for leaf in ax.leaves(x)):
                continue
            left, right = tokens(x, known.sizes, n), tokens(y, inferred.sizes, n)
            if all(s == "" for s, _ in left):
                continue  # what the family leaves alone may move
            if [(s in "([])+" and s, k) for s, k in left] != [
                (s in "([])+" and s, k) for s, k in right
            ]:
                out.append(f"{name}[{i}]: {y} is not {x}")
                continue
            for (s, _), (t, _) in zip(left, right, strict=True):
                if s and s not in "([])+" and t == "":
                    out.append(f"{name}[{i}]: {s} is not found")
                elif (
                    s
                    and s not in "([])+"
                    and (to.setdefault(s, t) != t or back.setdefault(t, s) != s)
                ):
                    out.append(
                        f"{name}[{i}]: {s} is {t} here, {to[s]} elsewhere, which is {back.get(t)}"
                    )
    for space, other in to.items():
        s, t = known.spaces[space], inferred.spaces[other]
        if not contains(t.group, s.group, s.size):
            out.append(f"{space}: {t.group} is smaller than {s.group}")
        s, t = folded_spec(known).spaces[space], folded_spec(inferred).spaces[other]
        if not contains(t.group, s.group, s.size):
            out.append(f"{space}: folded, {t.group} is smaller than {s.group}")
        over = s.over if s.over is not None and known.sizes[s.over] > 1 else None
        if over is not None and to.get(over) != t.over:
            out.append(f"{space} lies over {over}, {other} over {t.over}")
    return sorted(set(out))


def larger(inferred: Spec, known: Spec, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What the other direction lacks: where `found` moves more than `known`."""
    return differences(known, inferred, shapes)
