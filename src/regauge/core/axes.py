"""Axes strings: the type signature of a tensor, one term per axis.

    stream              the axis is indexed by the space `stream`
    stream*             the dual: the axis is contracted with that space
    (head.0 qk.0)       a product, row-major; transformed from the inside out
    a+b+c               a direct sum along one axis; may appear inside a product
    |ffn.0|             only the permutation part acts: no sign, no scale, no rotation
    _                   nothing acts
    _768                the same, for an axis of this size

A star on a bracket stars every space in it: "(head.0 vo.0)*" is "(head.0* vo.0*)". `| |` and `_`
are their own duals. Brackets around a single term only group: "(rot.0+rest.0)*".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from regauge.errors import AxesError

# Nesting of brackets. Real tensors need one or two levels; the functions below recurse into them.
_MAX_DEPTH = 20
_HOLE = re.compile(r"_([1-9][0-9]{0,17})?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Leaf:
    """One space, optionally starred (dual) or barred (permutation part only)."""

    space: str
    star: bool = False
    bar: bool = False

    def __str__(self) -> str:
        return f"|{self.space}|" if self.bar else self.space + "*" * self.star


@dataclass(frozen=True)
class Hole:
    """An axis, or a part of one, on which nothing acts. Its size may still be known, as that of a
    vocabulary.
    """

    size: int | None = None

    def __str__(self) -> str:
        return "_" if self.size is None else f"_{self.size}"


@dataclass(frozen=True)
class Product:
    """A bracket: a product of its factors, outermost first. With one factor it only groups."""

    factors: tuple[Term, ...]
    star: bool = False

    def __str__(self) -> str:
        return "(" + " ".join(map(str, self.factors)) + ")" + "*" * self.star


@dataclass(frozen=True)
class Sum:
    """A direct sum: blocks one after the other along the axis."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))


Term = Leaf | Hole | Product | Sum


@dataclass(frozen=True)
class Axes:
    """A parsed axes string. `str(parse(text))` is `text` with single spaces."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))

    def __repr__(self) -> str:
        return repr(str(self))

    def __len__(self) -> int:
        return len(self.terms)


@lru_cache(maxsize=65536)
def parse(text: str) -> Axes:
    """Parse an axes string.

    Args:
        text: The axes string.

    Returns:
        The axes, whose text has single spaces.

    Raises:
        AxesError: The text is not an axes string; the message marks the position.

    Example:
        >>> regauge.parse("(head.0 qk.0)  stream*")
        '(head.0 qk.0) stream*'
    """
    return _Parser(text).axes()


def dual(axes: str) -> str:
    """Return the axes of a gradient, given those of its weight: every star flipped.

    Args:
        axes: The axes string.

    Returns:
        The dual axes string.

    Raises:
        AxesError: The text is not an axes string.

    Example:
        >>> regauge.dual("(head.0 qk.0) stream* |ffn.0| _")
        '(head.0 qk.0)* stream |ffn.0| _'
    """
    return str(Axes(tuple(_flip(t) for t in parse(axes).terms)))


def bar(axes: str) -> str:
    """Return the same axes, transformed by the permutation part only.

    Second moments and other even functions of a weight transform in this way.

    >>> bar("(head.0 qk.0*) stream*")
    '(|head.0| |qk.0|) |stream|'
    """
    return str(Axes(tuple(_bar(t) for t in parse(axes).terms)))


def _bar(term: Term) -> Term:
    match term:
        case Leaf():
            return Leaf(term.space, bar=True)
        case Product():
            return Product(tuple(_bar(f) for f in term.factors))
        case Sum():
            return Sum(tuple(_bar(t) for t in term.terms))
        case Hole():
            return term


def _flip(term: Term) -> Term:
    match term:
        case Leaf(bar=True) | Hole():
            return term
        case Leaf() | Product():
            return replace(term, star=not term.star)
        case Sum():
            return Sum(tuple(_flip(t) for t in term.terms))


def leaves(term: Term, star: bool = False) -> Iterator[Leaf]:
    """Yield every space in a term, left to right, with the stars of its brackets multiplied in."""
    match term:
        case Leaf():
            yield replace(term, star=(term.star != star) and not term.bar)
        case Product():
            for factor in term.factors:
                yield from leaves(factor, star != term.star)
        case Sum():
            for t in term.terms:
                yield from leaves(t, star)
        case Hole():
            pass


def spaces(axes: str) -> frozenset[str]:
    """Return the names of the spaces in an axes string."""
    return frozenset(leaf.space for term in parse(axes).terms for leaf in leaves(term))


def size(term: Term, sizes: Mapping[str, int]) -> int | None:
    """Return the length of an axis of this term, or None if it contains a `_` of unknown size."""
    match term:
        case Leaf():
            return sizes[term.space]
        case Hole():
            return term.size
        case Product():
            total = 1
            for factor in term.factors:
                n = size(factor, sizes)
                if n is None:
                    return None
                total *= n
            return total
        case Sum():
            parts = [size(t, sizes) for t in term.terms]
            return None if None in parts else sum(p for p in parts if p is not None)


def block_sizes(
    terms: tuple[Term, ...], sizes: Mapping[str, int], total: int, *, product: bool
) -> list[int] | None:
    """Return the sizes of the terms of a sum (or factors of a product) of a known total size.

    One term of unknown size takes the remainder. None if the sizes do not match the total.
    """
    known = [size(t, sizes) for t in terms]
    if known.count(None) > 1:
        return None
    covered = 1 if product else 0
    for n in known:
        if n is not None:
            covered = covered * n if product else covered + n
    if None in known:
        rest = total - covered
        if product:
            rest = total // covered if covered and total % covered == 0 else -1
        return [rest if n is None else n for n in known] if rest >= 0 else None
    return [n for n in known if n is not None] if covered == total else None


class _Parser:
    """A recursive-descent parser of axes strings."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def fail(self, message: str) -> AxesError:
        start = max(0, self.at - 100)
        return AxesError(
            f"{message} in axes string\n  {self.text[start : self.at + 100]}\n  "
            f"{' ' * (self.at - start)}^"
        )

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def axes(self) -> Axes:
        return Axes(self.sequence(end=""))

    def sequence(self, end: str) -> tuple[Term, ...]:
        terms: list[Term] = []
        self.skip()
        while self.peek() != end:
            if not self.peek():
                raise self.fail(f"expected {end!r}")
            if self.peek() == ")":
                raise self.fail("unmatched ')'")
            terms.append(self.term())
            if self.peek() and self.peek() != end and not self.peek().isspace():
                raise self.fail(f"unexpected {self.peek()!r}")
            self.skip()
        return tuple(terms)

    def term(self) -> Term:
        terms = [self.atom()]
        while self.peek() == "+":
            self.at += 1
            terms.append(self.atom())
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def atom(self) -> Term:
        match self.peek():
            case "_":
                hole = _HOLE.match(self.text, self.at)
                assert hole
                self.at = hole.end()
                return Hole(int(hole.group(1)) if hole.group(1) else None)
            case "|":
                self.at += 1
                name = self.name()
                if self.peek() != "|":
                    raise self.fail("expected '|'")
                self.at += 1
                if self.peek() == "*":
                    raise self.fail("| | is its own dual and takes no star")
                return Leaf(name, bar=True)
            case "(":
                if self.depth == _MAX_DEPTH:
                    raise self.fail(f"brackets more than {_MAX_DEPTH} deep")
                self.at += 1
                self.depth += 1
                factors = self.sequence(end=")")
                if not factors:
                    raise self.fail("empty bracket")
                self.at += 1
                self.depth -= 1
                return Product(factors, star=self.star())
            case _:
                return Leaf(self.name(), star=self.star())

    def name(self) -> str:
        name = _NAME.match(self.text, self.at)
        if not name:
            raise self.fail("expected the name of a space, '(', '|' or '_'")
        self.at = name.end()
        return name.group()

    def star(self) -> bool:
        starred = self.peek() == "*"
        self.at += starred
        return starred
