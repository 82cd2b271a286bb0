"""The notation: what is written is what is printed, duals are involutions, and errors point at the
place.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.core import axes as ax
from regauge.errors import AxesError

WRITTEN = [
    "stream",
    "(head.0 qk.0) stream*",
    "stream (head.0 vo.0)*",
    "(head.0 qk.0)+(head.0 qk.0*)+(head.0 vo.0) stream*",
    "(head.0 (rot.0+rest.0)) stream*",
    "(stream.0+stream.0)* stream.1",
    "|ffn.0| stream*",
    "_ _ stream",
    "expert.0 |ffn.0|+ffn.0 stream*",
    "_",
    "",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_values_print_as_they_are_written(text: str) -> None:
    assert str(ax.parse(text)) == text
    assert repr(ax.parse(text)) == repr(text)


def test_white_space_is_folded() -> None:
    assert str(ax.parse("  ( head.0   qk.0 )   stream* ")) == "(head.0 qk.0) stream*"


names = st.sampled_from(["stream", "head.0", "qk.0", "ffn.12", "a_b"])
atoms = st.one_of(
    st.just(ax.Hole()),
    st.builds(ax.Leaf, names, star=st.booleans()),
    st.builds(lambda n: ax.Leaf(n, bar=True), names),
)
terms = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(
            ax.Product, st.lists(inner, min_size=1, max_size=3).map(tuple), star=st.booleans()
        ),
        st.builds(
            lambda t: ax.Product((ax.Sum(t),)),
            st.lists(inner.filter(lambda x: not isinstance(x, ax.Sum)), min_size=2, max_size=3).map(
                tuple
            ),
        ),
    ),
    max_leaves=8,
)


sums = st.builds(ax.Sum, st.lists(terms, min_size=2, max_size=3).map(tuple))
axes_terms = st.one_of(terms, sums)


@given(st.lists(axes_terms, max_size=4))
def test_parse_undoes_print(items: list[ax.Term]) -> None:
    axes = ax.Axes(tuple(items))
    assert ax.parse(str(axes)) == axes


@given(st.lists(axes_terms, min_size=1, max_size=4))
def test_dual_is_an_involution_that_flips_every_star(items: list[ax.Term]) -> None:
    text = str(ax.Axes(tuple(items)))
    flipped = ax.dual(text)
    assert ax.dual(flipped) == text
    before = [leaf for t in ax.parse(text).terms for leaf in ax.leaves(t)]
    after = [leaf for t in ax.parse(flipped).terms for leaf in ax.leaves(t)]
    assert [(a.space, a.bar) for a in before] == [(b.space, b.bar) for b in after]
    assert all(a.bar or a.star != b.star for a, b in zip(before, after, strict=True))
    assert all(not (leaf.bar and leaf.star) for leaf in before)


def test_a_star_on_a_bracket_stars_each_factor() -> None:
    assert [leaf.star for leaf in ax.leaves(ax.parse("(a b*)*").terms[0])] == [True, False]


def test_bar_keeps_the_structure() -> None:
    assert ax.bar("(head.0 qk.0*)+a _ stream*") == "(|head.0| |qk.0|)+|a| _ |stream|"


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("(head.0 qk.0", "expected ')'", 12),
        ("a) b", "unexpected ')'", 1),
        (") b", "unmatched ')'", 0),
        ("a+ b", "expected the name of a space", 2),
        ("|ffn.0 stream", "expected '|'", 6),
        ("|ffn.0|* b", "takes no star", 7),
        ("a ? b", "expected the name of a space", 2),
        ("a**", "unexpected '*'", 2),
        ("()", "empty bracket", 1),
        ("9a", "expected the name of a space", 0),
    ],
)
def test_parse_errors_point_at_the_place(text: str, message: str, column: int) -> None:
    with pytest.raises(AxesError) as caught:
        ax.parse(text)
    lines = str(caught.value).splitlines()
    assert message in lines[0]
    assert lines[1] == "  " + text
    assert lines[2] == "  " + " " * column + "^"


def test_sizes_of_products_and_sums() -> None:
    sizes = {"a": 2, "b": 3}
    assert ax.size(ax.parse("(a b)+b").terms[0], sizes) == 9
    assert ax.size(ax.parse("(a _)").terms[0], sizes) is None
    (product,) = ax.parse("(a _)").terms
    assert isinstance(product, ax.Product)
    assert ax.block_sizes(product.factors, sizes, 10, product=True) == [2, 5]
    assert ax.block_sizes(product.factors, sizes, 11, product=True) is None
    (with_hole,) = ax.parse("a+_").terms
    assert isinstance(with_hole, ax.Sum)
    assert ax.block_sizes(with_hole.terms, sizes, 7, product=False) == [2, 5]
    (without_hole,) = ax.parse("a+b").terms
    assert isinstance(without_hole, ax.Sum)
    assert ax.block_sizes(without_hole.terms, sizes, 6, product=False) is None
