"""Rotary positions, recognized as a whole: x * cos + turn(x) * sin, where turn(x) rotates every
2-plane of x by a quarter turn.

The planes are (j, j + n/2), written cat(-x[n/2:], x[:n/2]), or (2j, 2j + 1), written
stack(-x[1::2], x[0::2]) and flattened. The rules of the single operators would find only that cos
and sin differ along the axis, and freeze it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from regauge.models.discovery.graph import Graph, operator_name, parameter_dependent
from regauge.models.discovery.walk import Node, Value, Walk, shape

_CASTS = frozenset({"to", "_to_copy", "clone", "contiguous", "alias", "float", "type_as"})


@dataclass(frozen=True)
class RotaryMatch:
    """A tensor x that is rotated by angles that depend on positions only."""

    x: fx.Node
    layout: Literal["half", "interleaved"]


def find_rotaries(graph: Graph) -> dict[fx.Node, RotaryMatch]:
    """Return the nodes of a graph at which a rotation is complete."""
    dependent = parameter_dependent(graph)
    out = {}
    for node in graph.nodes:
        if node.op == "call_function":
            match = (
                _match_sum_of_products(node, dependent)
                if operator_name(node) == "add"
                else _match_halves(node, dependent)
                if operator_name(node) == "cat"
                else None
            )
            if match is not None:
                out[node] = match
    return out


def rotary(w: Walk, match: RotaryMatch) -> Value:
    """Restrict the last axis to rotations of the planes."""
    x = w.value(match.x)
    axes = [w.follow(a) for a in x.axes]
    w.restrict(axes[-1], f"rotary-{match.layout}")
    return Value(tuple(axes))


def strip_casts(node: Any) -> Any:
    """Return a node without the casts around it."""
    while (
        isinstance(node, fx.Node) and node.op == "call_function" and operator_name(node) in _CASTS
    ):
        node = node.args[0]
    return node


def _is_call(node: Any, name: str) -> bool:
    """Return whether a node calls an operator."""
    return isinstance(node, fx.Node) and node.op == "call_function" and operator_name(node) == name


def _scaled_operand(node: Any, dependent: set[fx.Node]) -> fx.Node | None:
    """Return x of a product x * c where c does not depend on parameters."""
    node = strip_casts(node)
    if not _is_call(node, "mul") or len(node.args) < 2:
        return None
    a, b = node.args[:2]
    for x, c in ((a, b), (b, a)):
        if (
            isinstance(x, fx.Node)
            and isinstance(c, fx.Node)
            and x in dependent
            and c not in dependent
        ):
            return x
    return None


def _match_sum_of_products(node: Node, dependent: set[fx.Node]) -> RotaryMatch | None:
    """Match x * cos + turn(x) * sin."""
    operands = [_scaled_operand(a, dependent) for a in node.args[:2]]
    if len(operands) < 2 or None in operands:
        return None
    for x, turn in (operands, operands[::-1]):
        x, turn = strip_casts(x), strip_casts(turn)
        layout = _quarter_turn_layout(turn, x)
        if layout is not None:
            return RotaryMatch(x, layout)
    return None


def _quarter_turn_layout(turn: Any, x: Node) -> Literal["half", "interleaved"] | None:
    """Return the layout in which a node is the quarter turn of x; None if it is not."""
    if _is_call(turn, "cat"):
        second, first = map(strip_casts, turn.args[0]) if len(turn.args[0]) == 2 else (turn, turn)
        if _is_call(second, "neg"):
            n = shape(x)[-1]
            if _slice_range(strip_casts(second.args[0]), x) == (n // 2, n, 1) and _slice_range(
                first, x
            ) == (
                0,
                n // 2,
                1,
            ):
                return "half"
        return None
    while _is_call(turn, "flatten") or _is_call(turn, "view") or _is_call(turn, "reshape"):
        turn = strip_casts(turn.args[0])
    if _is_call(turn, "stack") and len(turn.args[0]) == 2:
        second, first = (strip_casts(a) for a in turn.args[0])
        n = shape(x)[-1]
        if (
            _is_call(second, "neg")
            and _slice_range(strip_casts(second.args[0]), x) == (1, n, 2)
            and _slice_range(first, x) == (0, n, 2)
        ):
            return "interleaved"
    return None


def _slice_range(node: Any, x: Node) -> tuple[int, int, int] | None:
    """Return the part of x's last axis that a node is: start, stop, step."""
    n = shape(x)[-1]
    if (_is_call(node, "getitem") and _is_call(node.args[0], "chunk")) or (
        _is_call(node, "getitem") and _is_call(node.args[0], "split")
    ):
        split, i = node.args[0], node.args[1]
        if strip_casts(split.args[0]) is x and shape(node)[-1] * 2 == n:
            return (i * n // 2, (i + 1) * n // 2, 1)
        return None
    while _is_call(node, "slice") and shape(node) == shape(node.args[0]):
        node = strip_casts(node.args[0])
    if not _is_call(node, "slice"):
        return None
    sliced = strip_casts(node.args[0])
    while _is_call(sliced, "slice") and shape(sliced) == shape(sliced.args[0]):
        sliced = strip_casts(sliced.args[0])
    if sliced is not x or node.args[1] not in (-1, len(shape(x)) - 1):
        return None
    start, stop = (
        node.args[2] if len(node.args) > 2 else 0,
        node.args[3] if len(node.args) > 3 else n,
    )
    step = node.args[4] if len(node.args) > 4 else 1
    start, stop = (0 if start is None else start), (n if stop is None else stop)
    return (start + n if start < 0 else start, min(stop + n if stop < 0 else stop, n), step)


def _match_halves(node: Node, dependent: set[fx.Node]) -> RotaryMatch | None:
    """Match cat(a * cos - b * sin, b * cos + a * sin), where a and b are the halves of x."""
    joined = [strip_casts(a) for a in node.args[0]] if node.args and len(node.args[0]) == 2 else []
    if len(joined) != 2 or not _is_call(joined[0], "sub") or not _is_call(joined[1], "add"):
        return None
    halves = [[strip_casts(_scaled_operand(a, dependent)) for a in end.args[:2]] for end in joined]
    if (
        any(h is None for pair in halves for h in pair)
        or set(halves[0]) != set(halves[1])
        or len(set(halves[0])) != 2
    ):
        return None
    first, second = halves[0]
    for x in _split_inputs(first):
        n = shape(x)[-1]
        if _slice_range(first, x) == (0, n // 2, 1) and _slice_range(second, x) == (n // 2, n, 1):
            return RotaryMatch(x, "half")
    return None


def _split_inputs(half: Node) -> list[fx.Node]:
    """Return the tensor that a half is a part of."""
    source = (
        half.args[0]
        if _is_call(half, "slice")
        else half.args[0].args[0]
        if _is_call(half, "getitem")
        else None
    )
    return [strip_casts(source)] if isinstance(source, fx.Node) else []
