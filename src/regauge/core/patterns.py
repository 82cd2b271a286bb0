"""Patterns of tensor names from untrusted files: a subset of Python's regular expressions, matched
in bounded time.

Supported are literals, `.`, classes (`[a-z_]`, `\\d`, `\\w`, `\\s`), groups, `|`, the quantifiers
`* + ? {m} {m,} {m,n}` and the anchors `^` and `$`. Look-around, back-references, flags and word
boundaries are rejected. An accepted pattern matches what `re.fullmatch` matches.

`re` backtracks: `(a+)+b` takes 2^n steps on a name of n characters. Here a set of states is stepped
once per character, so a match takes at most `MAX_STATES` steps per character for any pattern.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache

from regauge.errors import PatternError

MAX_LENGTH = 500  # characters of a pattern
MAX_STATES = 1000  # states of a pattern, with its counts expanded
_MAX_DEPTH = 20  # nesting of groups
_MAX_CACHED = 10_000  # transitions in the cache of a pattern

_Test = Callable[[str], bool]
_CATEGORIES: dict[str, _Test] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


@lru_cache(maxsize=2048)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern.

    Raises:
        PatternError: The pattern is malformed, too long, or uses unsupported syntax.
    """
    return Pattern(text)


class Pattern:
    """A pattern as a nondeterministic automaton (Thompson's construction), stepped by sets of
    states with a cache of transitions.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        # For each state, those reached without a character. State 0 is the accepting one.
        self._jumps: list[tuple[int, ...]] = [()]
        # For each state, the test of the character it consumes and the state that follows.
        self._tests: list[tuple[_Test, int] | None] = [None]
        # States that are passed only at the start ("^") or at the end ("$") of a name.
        self._anchors: dict[int, str] = {}
        if len(text) > MAX_LENGTH:
            raise PatternError(
                f"a pattern must have at most {MAX_LENGTH} characters, got {len(text)}: "
                f"{text[:40]!r}..."
            )
        node = _Parser(text).parse()
        self._start = self._closure({node(self, 0)}, "^")
        self._cache: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        states = self._start
        for character in name:
            if not states:
                return False
            key = (states, character)
            following = self._cache.get(key)
            if following is None:
                if len(self._cache) >= _MAX_CACHED:
                    self._cache.clear()
                following = self._cache[key] = self._step(states, character)
            states = following
        return 0 in self._closure(set(states), "$" if name else "^$")

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        tests = (self._tests[s] for s in states)
        return self._closure({t[1] for t in tests if t is not None and t[0](character)}, "")

    def _closure(self, states: set[int], anchors: str) -> frozenset[int]:
        """Add every state that is reached without a character. States whose anchor does not hold
        are included, but not passed.
        """
        pending, reached = list(states), set(states)
        while pending:
            state = pending.pop()
            if self._anchors.get(state, "") not in anchors:
                continue
            new = [s for s in self._jumps[state] if s not in reached]
            reached.update(new)
            pending += new
        return frozenset(reached)

    def _add(
        self, jumps: tuple[int, ...] = (), test: tuple[_Test, int] | None = None, anchor: str = ""
    ) -> int:
        """Add a state and return its number."""
        if len(self._jumps) >= MAX_STATES:
            raise PatternError(
                f"a pattern must have at most {MAX_STATES} states with its counts expanded: "
                f"{self.text[:80]!r}"
            )
        self._jumps.append(jumps)
        self._tests.append(test)
        if anchor:
            self._anchors[len(self._jumps) - 1] = anchor
        return len(self._jumps) - 1


# A node builds the states of a part of the pattern, given the state that follows it, and returns
# its first state.
_Node = Callable[[Pattern, int], int]


def _character(test: _Test) -> _Node:
    return lambda p, after: p._add(test=(test, after))


def _anchor(which: str) -> _Node:
    return lambda p, after: p._add((after,), anchor=which)


def _sequence(nodes: list[_Node]) -> _Node:
    def build(p: Pattern, after: int) -> int:
        for node in reversed(nodes):
            after = node(p, after)
        return after

    return build


def _alternation(nodes: list[_Node]) -> _Node:
    return (
        nodes[0]
        if len(nodes) == 1
        else lambda p, after: p._add(tuple(node(p, after) for node in nodes))
    )


def _repeat(node: _Node, minimum: int, maximum: int | None) -> _Node:
    def build(p: Pattern, after: int) -> int:
        if maximum is None:
            loop = p._add()
            p._jumps[loop] = (node(p, loop), after)
            after = loop
        else:
            end = after
            for _ in range(maximum - minimum):
                after = p._add((node(p, after), end))
        for _ in range(minimum):
            after = node(p, after)
        return after

    return build


class _Parser:
    """A recursive-descent parser of patterns."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def parse(self) -> _Node:
        node = self.either()
        if self.at < len(self.text):
            raise self.fault("unbalanced parenthesis")
        return node

    def fault(self, message: str) -> PatternError:
        return PatternError(
            f"pattern {self.text[:80]!r}, character {self.at + 1}: {message}",
            hint="supported: literals, . [a-z] \\d \\w \\s ( | ) * + ? {m,n} ^ $",
        )

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def take(self) -> str:
        if self.at >= len(self.text):
            raise self.fault("unexpected end")
        self.at += 1
        return self.text[self.at - 1]

    def either(self) -> _Node:
        nodes = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            nodes.append(self.sequence())
        return _alternation(nodes)

    def sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            nodes.append(self.quantified())
        return _sequence(nodes)

    def quantified(self) -> _Node:
        is_anchor = self.peek() in ("^", "$")
        node = self.atom()
        counts = self.counts()
        if counts is None:
            return node
        if is_anchor:
            raise self.fault("an anchor cannot be repeated")
        if self.peek() == "?":  # lazy: the same names match
            self.at += 1
        if self.peek() == "+" or self.counts() is not None:
            raise self.fault("multiple repeat")
        return _repeat(node, *counts)

    def counts(self) -> tuple[int, int | None] | None:
        """Read a quantifier, or return None. Any other brace is a literal, as in `re`."""
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self.peek())
        if simple is not None:
            self.at += 1
            return simple
        if self.peek() != "{":
            return None
        inner, closed, _ = self.text[self.at + 1 :].partition("}")
        low, comma, high = inner.partition(",")
        if not closed or not all(c in string.digits for c in low + high) or not (low or comma):
            return None
        if len(low) > 4 or len(high) > 4:
            raise self.fault(f"a count must be below {MAX_STATES}")
        minimum, maximum = int(low or 0), (int(high) if high else None) if comma else int(low)
        if max(minimum, maximum or 0) > MAX_STATES or (maximum is not None and maximum < minimum):
            raise self.fault(f"a count must be below {MAX_STATES}, the smaller first")
        self.at += len(inner) + 2
        return minimum, maximum

    def atom(self) -> _Node:
        match self.take():
            case "(":
                return self.group()
            case "[":
                return _character(self.characters())
            case ".":
                return _character(lambda c: c != "\n")
            case "^" | "$" as which:
                return _anchor(which)
            case "\\":
                return self.escaped()
            case "*" | "+" | "?":
                raise self.fault("nothing to repeat")
            case character:
                return _character(character.__eq__)

    def group(self) -> _Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.fault(f"groups must be nested at most {_MAX_DEPTH} deep")
        if self.peek() == "?":
            if self.peek(2) != "?:":
                raise self.fault("named groups, flags and look-around are not supported")
            self.at += 2
        node = self.either()
        if self.take() != ")":
            raise self.fault("missing )")
        self.depth -= 1
        return node

    def escaped(self) -> _Node:
        if self.peek() in ("A", "Z"):
            return _anchor("^" if self.take() == "A" else "$")
        test, character = self.escape()
        return _character(test if test is not None else character.__eq__)

    def escape(self) -> tuple[_Test | None, str]:
        """Read an escape after its backslash: the test of a category, or a literal character."""
        letter = self.take()
        if letter.lower() in _CATEGORIES:
            test = _CATEGORIES[letter.lower()]
            return (test if letter.islower() else (lambda c: not test(c))), ""
        if letter in _CONTROLS:
            return None, _CONTROLS[letter]
        if letter in string.ascii_letters + string.digits:
            raise self.fault(f"\\{letter} is not supported")
        return None, letter

    def characters(self) -> _Test:
        """Read a character class after its bracket."""
        negated = self.peek() == "^"
        self.at += negated
        single: set[str] = set()
        ranges: list[tuple[str, str]] = []
        tests: list[_Test] = []
        first = True
        while first or self.peek() != "]":
            first = False
            test, low = self.member()
            if self.peek() == "-" and self.peek(2) not in ("-", "-]"):
                self.at += 1
                end, high = self.member()
                if test is not None or end is not None or high < low:
                    raise self.fault("bad range of characters")
                ranges.append((low, high))
            elif test is not None:
                tests.append(test)
            else:
                single.add(low)
        self.at += 1
        return lambda c: (
            negated
            != (c in single or any(a <= c <= b for a, b in ranges) or any(t(c) for t in tests))
        )

    def member(self) -> tuple[_Test | None, str]:
        character = self.take()
        return self.escape() if character == "\\" else (None, character)
