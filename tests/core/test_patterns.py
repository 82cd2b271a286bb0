"""Patterns of tensor names: those of `re` on the supported subset, and bounded time where `re`
backtracks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from regauge.core import patterns
from regauge.core.patterns import compile_pattern
from regauge.errors import PatternError
from regauge.models.families import FAMILIES

PIECES = (
    "a",
    "b",
    "ab",
    ".",
    r"\.",
    r"\d",
    r"\w",
    r"[ab]",
    r"[^a]",
    r"[a-c.]",
    r"[\d_]",
    "0",
    "_",
    "(a|b)",
    "(?:ab|)",
    "(a(b|0)*)",
    "^",
    "$",
    "-",
)
QUANTIFIERS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?")


def random_pattern(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(1, 6)):
        piece = rng.choice(PIECES)
        parts.append(
            piece
            + (
                ""
                if piece in ("^", "$") or (len(piece) > 1 and piece[0] not in "([\\")
                else rng.choice(QUANTIFIERS)
            )
        )
        if rng.random() < 0.15:
            parts.append("|")
    return "".join(parts)


def test_the_subset_means_what_re_means() -> None:
    rng, matched = random.Random(1), 0
    for _ in range(2000):
        pattern = random_pattern(rng)
        for _ in range(6):
            name = "".join(rng.choice("ab0._c-") for _ in range(rng.randrange(7)))
            expected = re.fullmatch(pattern, name) is not None
            assert compile_pattern(pattern).matches(name) == expected, (pattern, name)
            matched += expected
    assert matched > 500


@pytest.mark.parametrize(
    "pattern", ["(", ")", "a)", "*a", "a**", "[", "[b-a]", "a{2,1}", "\\", "(?P<x>a", "[a"]
)
def test_malformed_patterns_are_malformed_in_re_too(pattern: str) -> None:
    with pytest.raises(re.error):
        re.compile(pattern)
    with pytest.raises(PatternError):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!a)b",
        "(?i)a",
        r"(a)\1",
        r"\ba",
        "a*+",
        "(?P<x>a)",
        "a" * 501,
        "((a{99}){99}){99}",
        "(" * 30 + ")" * 30,
        "a{99999}",
    ],
)
def test_what_is_not_supported_is_rejected(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(pattern)


def test_patterns_that_hang_re_take_bounded_steps() -> None:
    """Every pattern here takes more than 2^60 steps in `re`; a set of states is stepped once per
    character.
    """
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*b", "(.*a){30}b", "a?" * 60 + "a" * 60 + "b"):
        compiled = compile_pattern(pattern)
        steps = 0

        def count_steps(
            states: frozenset[int],
            character: str,
            step: Callable[[frozenset[int], str], frozenset[int]] = compiled._step,
        ) -> frozenset[int]:
            nonlocal steps
            steps += len(states)
            return step(states, character)

        compiled._step = count_steps  # type: ignore[method-assign]
        assert not compiled.matches("a" * 100)
        assert steps <= 100 * patterns.MAX_STATES


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MAX_CACHED", 10)
    pattern = patterns.Pattern(r"(\w|x)*z")
    assert pattern.matches("".join(chr(97 + i % 25) for i in range(500)) + "z")
    assert len(pattern._cache) <= 10


def test_every_pattern_of_the_families_is_supported() -> None:
    for pattern, yes, no in (
        (
            r".*h\.\d+\.attn\.(masked_)?bias",
            "transformer.h.11.attn.masked_bias",
            "transformer.h.x.attn.bias",
        ),
        (
            r".*rotary_emb\.inv_freq",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.rotary_emb_inv_freq",
        ),
        (re.escape("a.b-c[0]"), "a.b-c[0]", "a.b-c[1]"),
    ):
        assert compile_pattern(pattern).matches(yes)
        assert not compile_pattern(pattern).matches(no)
    assert FAMILIES
