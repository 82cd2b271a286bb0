"""Terms of axes: atoms, products and direct sums, found by first-order unification.

    Atom(n)          n coordinates without known structure; may later be bound to another term
    Product(a, b)    a block b for each coordinate of a, row-major; the empty product has size 1
    Sum(a, b)        a followed by b

`unify(a, b)` makes two axes the same and refines both until they have the same form: an atom of 768
unified with (12, 64) becomes that product, unified with 256 + 512 it becomes that sum. Where no
common form exists nothing may act, and the `freeze` callback is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod

_IDS = count()


@dataclass(eq=False)
class Atom:
    """Coordinates of one kind. Once `bound`, the atom stands for that term."""

    size: int
    bound: Term | None = None
    id: int = field(default_factory=lambda: next(_IDS))

    def __repr__(self) -> str:
        return f"{self.size}#{self.id}" if self.bound is None else repr(self.bound)


@dataclass(frozen=True, eq=False)
class Product:
    """A product of terms, row-major."""

    factors: tuple[Term, ...]

    @property
    def size(self) -> int:
        return prod(f.size for f in self.factors)

    def __repr__(self) -> str:
        return "(" + " ".join(map(repr, self.factors)) + ")"


@dataclass(frozen=True, eq=False)
class Sum:
    """A direct sum of terms."""

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
    """Return a term without known structure."""
    return UNIT if size == 1 else Atom(size)


def find(term: Term) -> Term:
    """Return the term that a bound atom stands for."""
    while isinstance(term, Atom) and term.bound is not None:
        term = term.bound
    return term


def factors(term: Term) -> list[Atom | Sum]:
    """Write a term as a product of atoms and sums, outermost first."""
    term = find(term)
    match term:
        case Product():
            return [f for inner in term.factors for f in factors(inner)]
        case Sum() if len(parts(term)) == 1:
            return factors(parts(term)[0])
        case _:
            return [term]


def parts(term: Sum) -> list[Term]:
    """Return the terms of a sum, with nested sums flattened and empty terms dropped."""
    out: list[Term] = []
    for t in term.terms:
        t = find(t)
        out += parts(t) if isinstance(t, Sum) else [t] if t.size else []
    return out


def leaves(term: Term) -> Iterator[Atom]:
    """Yield the atoms of a term, left to right; one that occurs twice is yielded twice."""
    for f in factors(term):
        if isinstance(f, Atom):
            yield f
        else:
            for t in parts(f):
                yield from leaves(t)


def unify(a: Term, b: Term, freeze: Freeze) -> None:
    """Make two terms of the same size equal; call `freeze` for parts that cannot be."""
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
    """Unify a sum of equal blocks with a product: every block equals the inner factors, and the
    order of the blocks is frozen. Returns whether the terms have this form.
    """
    stack = left[-1]
    number = 0
    while prod(f.size for f in right[len(right) - number :]) < stack.size and number < len(right):
        number += 1
    tail = right[len(right) - number :]
    if not isinstance(stack, Sum) or number < 2 or prod(f.size for f in tail) != stack.size:
        return False
    inner = Product(tuple(tail[1:]))
    if {t.size for t in parts(stack)} != {inner.size}:
        return False
    left.pop()
    del right[len(right) - number :]
    for t in parts(stack):
        unify(t, inner, freeze)
    freeze(tail[0])
    return True


def _unify_atoms(x: Atom | Sum, y: Atom | Sum, freeze: Freeze) -> None:
    """Unify two factors of the same size."""
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
        halves = cut(a, b.size)
        if halves is None:
            break
        left[:1] = halves
    for t in [*left, *right]:
        freeze(t)


def cut(term: Term, at: int) -> tuple[Term, Term] | None:
    """Split a term in two, the first of size `at`; None if that is not possible. A product is split
    between the coordinates of its first factor.
    """
    if at == 0:
        return Sum(()), term
    if at == term.size:
        return term, Sum(())
    split = factors(term)
    if len(split) > 1:
        inner = Product(tuple(split[1:]))
        if at % inner.size:
            return None
        halves = cut(split[0], at // inner.size)
        return (
            None if halves is None else (Product((halves[0], inner)), Product((halves[1], inner)))
        )
    (single,) = split
    if isinstance(single, Atom):
        first, rest = atom(at), atom(single.size - at)
        single.bound = Sum((first, rest))
        return first, rest
    before: list[Term] = []
    for i, t in enumerate(summands := parts(single)):
        if t.size > at:
            halves = cut(t, at)
            return (
                None
                if halves is None
                else (Sum((*before, halves[0])), Sum((halves[1], *summands[i + 1 :])))
            )
        before, at = [*before, t], at - t.size
        if at == 0:
            return Sum(tuple(before)), Sum(tuple(summands[i + 1 :]))
    return None
