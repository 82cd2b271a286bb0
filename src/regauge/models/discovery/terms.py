"""What lies along an axis: an atom, a product, or a direct sum, found by first-order unification.

    Atom(n)          n coordinates about which no more is known; may later be bound to a product or
    a sum
    Product(a, b)    a block of b for each place of a, row-major; the empty product is an axis of
    size 1
    Sum(a, b)        a, and b behind it

`unify(a, b)` says that two axes are the same, and refines both until they are written alike: an
atom of 768 met by (12, 64) becomes that product, met by 256 + 512 it becomes that sum. Where the
two cannot be written alike nothing may act there, and `frozen` is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod

_IDS = count()


@dataclass(eq=False)
class Atom:
    """Coordinates of one kind. Once `bound`, it stands for that term."""

    size: int
    bound: Term | None = None
    id: int = field(default_factory=lambda: next(_IDS))

    def __repr__(self) -> str:
        return f"{self.size}#{self.id}" if self.bound is None else repr(self.bound)


@dataclass(frozen=True, eq=False)
class Product:
    factors: tuple[Term, ...]

    @property
    def size(self) -> int:
        return prod(f.size for f in self.factors)

    def __repr__(self) -> str:
        return "(" + " ".join(map(repr, self.factors)) + ")"


@dataclass(frozen=True, eq=False)
class Sum:
    terms: tuple[Term, ...]

    @property
    def size(self) -> int:
        return sum(t.size for t in self.terms)

    def __repr__(self) -> str:
        return "[" + "+".join(map(repr, self.terms)) + "]"


Term = Atom | Product | Sum
Freeze = Callable[[Term], None]
UNIT = Product(())


def atom(size: int) -> Term:
    """An axis about which nothing is known yet."""
    return UNIT if size == 1 else Atom(size)


def find(term: Term) -> Term:
    """What a term stands for."""
    while isinstance(term, Atom) and term.bound is not None:
        term = term.bound
    return term


def factors(term: Term) -> list[Atom | Sum]:
    """A term as a product of atoms and sums, outermost first."""
    term = find(term)
    match term:
        case Product():
            return [f for inner in term.factors for f in factors(inner)]
        case Sum() if len(parts(term)) == 1:
            return factors(parts(term)[0])
        case _:
            return [term]


def parts(term: Sum) -> list[Term]:
    """The terms of a sum, sums within it written out, nothing of size 0."""
    out: list[Term] = []
    for t in term.terms:
        t = find(t)
        out += parts(t) if isinstance(t, Sum) else [t] if t.size else []
    return out


def leaves(term: Term) -> Iterator[Atom]:
    """The atoms of a term, left to right; one that occurs twice is listed twice."""
    for f in factors(term):
        if isinstance(f, Atom):
            yield f
        else:
            for t in parts(f):
                yield from leaves(t)


def unify(a: Term, b: Term, freeze: Freeze) -> None:
    """Make two terms of one size the same."""
    left, right = factors(a), factors(b)
    while left and right:
        x, y = left[-1], right[-1]
        if x is y:
            left.pop(), right.pop()
        elif x.size == y.size:
            left.pop(), right.pop()
            _unify_atoms(x, y, freeze)
        else:
            if x.size < y.size:
                left, right, x, y = right, left, y, x
            if isinstance(x, Atom) and x.size % y.size == 0 and x not in leaves(y):
                x.bound = Product((Atom(x.size // y.size), Atom(y.size)))
                left[-1:] = factors(x)
            elif not _unify_stack(left, right, freeze):
                break
    for f in [*left, *right]:
        freeze(f)


def _unify_stack(left: list[Atom | Sum], right: list[Atom | Sum], freeze: Freeze) -> bool:
    """A sum of equal blocks, met by a product: every block is what the product has inside, and the
    order of the blocks is fixed.
    """
    total = left[-1]
    taken = 0
    while prod(f.size for f in right[len(right) - taken :]) < total.size and taken < len(right):
        taken += 1
    met = right[len(right) - taken :]
    if not isinstance(total, Sum) or taken < 2 or prod(f.size for f in met) != total.size:
        return False
    inner = Product(tuple(met[1:]))
    if {t.size for t in parts(total)} != {inner.size}:
        return False
    left.pop()
    del right[len(right) - taken :]
    for t in parts(total):
        unify(t, inner, freeze)
    freeze(met[0])
    return True


def _unify_atoms(x: Atom | Sum, y: Atom | Sum, freeze: Freeze) -> None:
    if isinstance(x, Sum):
        x, y = y, x
    if isinstance(x, Atom):
        if any(leaf is x for leaf in leaves(y)):
            if x is not y:
                freeze(x)
                freeze(y)
        else:
            x.bound = y
        return
    assert isinstance(y, Sum)
    left, right = parts(x), parts(y)
    while left and right:
        a, b = left[0], right[0]
        if a.size == b.size:
            del left[0], right[0]
            unify(a, b, freeze)
            continue
        if a.size < b.size:
            left, right, a, b = right, left, b, a
        pieces = cut(a, b.size)
        if pieces is None:
            break
        left[:1] = pieces
    for t in [*left, *right]:
        freeze(t)


def cut(term: Term, at: int) -> tuple[Term, Term] | None:
    """A term as two, the first of size `at`; None if it cannot be written so. A product is cut
    between the places of its first factor.
    """
    if at == 0:
        return Sum(()), term
    if at == term.size:
        return term, Sum(())
    inside = factors(term)
    if len(inside) > 1:
        inner = Product(tuple(inside[1:]))
        if at % inner.size:
            return None
        two = cut(inside[0], at // inner.size)
        return None if two is None else (Product((two[0], inner)), Product((two[1], inner)))
    (only,) = inside
    if isinstance(only, Atom):
        first, rest = atom(at), atom(only.size - at)
        only.bound = Sum((first, rest))
        return first, rest
    before: list[Term] = []
    for i, t in enumerate(listed := parts(only)):
        if t.size > at:
            two = cut(t, at)
            return (
                None if two is None else (Sum((*before, two[0])), Sum((two[1], *listed[i + 1 :])))
            )
        before, at = [*before, t], at - t.size
        if at == 0:
            return Sum(tuple(before)), Sum(tuple(listed[i + 1 :]))
    return None
