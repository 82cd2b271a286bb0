"""The walk over a graph: every axis of every tensor gets a term, and operators relate the axes.

The rule of an operator describes it with five methods. Everything else is inferred from what they
record:

    equate(a, b)          the axes are one and are transformed by the same matrix
    contract(a, b)        the axes are summed over against each other: inverse transposes
    multiply(a, b, out)   the axes are multiplied coordinate by coordinate: scales multiply
    restrict(a, kind)     an operator on this axis preserves only some matrices (RESTRICTIONS)
    freeze(a, why)        nothing may act on this axis
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from regauge.models.discovery.graph import (
    Graph,
    mutates,
    operator_name,
    parameter_dependent,
    source_location,
)
from regauge.models.discovery.terms import Product, Sum, Term, atom, cut, unify

Node = Any  # an fx.Node; its arguments may be of any type, which the operator's rule checks


_RULE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, AssertionError)


@dataclass(eq=False)
class Axis:
    """One axis of one tensor. `uniform`: its values are constant along the axis."""

    term: Term
    uniform: bool = False

    @property
    def size(self) -> int:
        return self.term.size


@dataclass(frozen=True)
class Value:
    """The properties of a tensor.

    Attributes:
        axes: its axes; empty if it has cases.
        source: the parameter whose values these are, at most reshaped or sliced.
        is_weight: it depends on parameters and on nothing else.
        shift: a number added to the parameter (Gemma's 1 + w).
        indexed_axis: its values are indices into this axis.
        dim: the axis along which the cases lie.
        cases: values concatenated along `dim`, each with its own axes
            (`regauge.models.discovery.cases`).
    """

    axes: tuple[Axis, ...]
    source: str | None = None
    is_weight: bool = False
    shift: float = 0.0
    indexed_axis: Axis | None = None
    dim: int = -1
    cases: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Relation:
    """A relation between axes: "same", "contract", "times", or a variant of "same"."""

    kind: str
    left: tuple[Axis, ...]
    right: tuple[Axis, ...]
    out: Axis | None = None
    sign: int = 1


@dataclass(frozen=True)
class Restriction:
    """A restriction of an axis by an operator: a kind of RESTRICTIONS, with details."""

    axis: Axis
    kind: str
    node: fx.Node | None
    detail: str = ""


@dataclass(frozen=True)
class Gain:
    """A parameter that multiplies an axis: the node of the product, its other operand, and the bias
    that the same operator adds.
    """

    gain: str
    bias: str | None
    node: fx.Node
    input: fx.Node
    neutral: float


@dataclass
class Walk:
    """The state of a walk over a graph."""

    graph: Graph
    values: dict[fx.Node, Value | list[Value]] = field(default_factory=dict)
    relations: list[Relation] = field(default_factory=list)
    restrictions: list[Restriction] = field(default_factory=list)
    roles: list[tuple[Axis, str, fx.Node]] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    # (a, b): wherever axis a occurs, an index into axis b has been selected
    implied: list[tuple[Axis, Axis]] = field(default_factory=list)
    # the axis of a weight that a gain folds into
    gain_axes: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, fx.Node] = field(default_factory=dict)
    aliases: dict[fx.Node, dict[str, Value]] = field(default_factory=dict)
    first_use: dict[str, int] = field(default_factory=dict)
    parameter_dependent: set[fx.Node] = field(default_factory=set)
    zeros: frozenset[fx.Node] = frozenset()
    current_node: fx.Node | None = None

    def value(self, node: Any) -> Value:
        """Return the value of a node, with its cases merged."""
        if node in self.aliases:
            return self._alias_value(node)
        if node in self.zeros:
            return self._zero_value(node)
        value = self.values[node]
        if isinstance(value, list):
            raise TypeError(f"{node} has several outputs")
        return self.collapse(value) if value.cases else value

    def _alias_value(self, node: fx.Node) -> Value:
        """Return a parameter under the name that the reading module has for it: a tied parameter
        has several names.
        """
        by_name = self.aliases[node]
        path = source_location(self.current_node).module if self.current_node is not None else ""
        value = next(
            (v for name, v in by_name.items() if name.rpartition(".")[0] == path),
            next(iter(by_name.values())),
        )
        self.first_use.setdefault(value.source or "", len(self.values))
        return value

    def _zero_value(self, node: fx.Node) -> Value:
        """Return a zero tensor with fresh axes: zero is invariant, so each reader may transform it
        differently.
        """
        return Value(tuple(Axis(atom(n)) for n in shape(node)), is_weight=True)

    def value_with_cases(self, node: Any) -> Value:
        """Return the value of a node, with its cases apart."""
        if node in self.aliases:
            return self._alias_value(node)
        if node in self.zeros:
            return self._zero_value(node)
        value = self.values[node]
        assert isinstance(value, Value)
        return value

    def collapse(self, value: Value) -> Value:
        """Merge cases that an operator treats alike: one term for all, and a fixed order of the
        cases.
        """
        first, *rest = value.cases
        for other in rest:
            for i, (a, b) in enumerate(zip(first.axes, other.axes, strict=True)):
                if a is not b and i != value.dim:
                    self.equate([a], [b])
        blocks = [case.axes[value.dim] for case in value.cases]
        if all(a.size == 1 for a in blocks):
            case_axis = self.new_frozen_axis(
                len(blocks), "tensors are concatenated along it, each with its own slice"
            )
        else:
            case_axis = self.concat(blocks)
        axes = [case_axis if i == value.dim else a for i, a in enumerate(first.axes)]
        return replace(value, axes=tuple(axes), dim=-1, cases=())

    # The five relations.

    def equate(self, left: Sequence[Axis], right: Sequence[Axis], kind: str = "same") -> None:
        """Record that two lists of axes are the same."""
        unify(_product_term(left), _product_term(right), self.freeze_misfit)
        self.relations.append(Relation(kind, tuple(left), tuple(right)))

    def contract(self, a: Axis, b: Axis) -> None:
        """Record that two axes are summed over against each other."""
        unify(a.term, b.term, self.freeze_misfit)
        self.relations.append(Relation("contract", (a,), (b,)))

    def multiply(self, a: Axis, b: Axis, out: Axis, sign: int = 1) -> None:
        """Record that two axes are multiplied coordinate by coordinate; `sign` is -1 for a
        quotient.
        """
        unify(a.term, b.term, self.freeze_misfit)
        unify(a.term, out.term, self.freeze_misfit)
        self.relations.append(Relation("times", (a,), (b,), out, sign))

    def restrict(self, axis: Axis, kind: str, detail: str = "") -> None:
        """Record a restriction of an axis by the current operator."""
        self.restrictions.append(Restriction(axis, kind, self.current_node, detail))

    def freeze(self, axis: Axis, why: str) -> None:
        """Record that nothing may act on an axis."""
        self.restrict(axis, "frozen", why)

    def freeze_misfit(self, term: Term) -> None:
        """Freeze a term that cannot be unified."""
        self.freeze(Axis(term), "its shapes are split in incompatible ways")

    # New axes.

    def follow(self, axis: Axis) -> Axis:
        """Return a new axis that is transformed as this one is."""
        out = Axis(axis.term, axis.uniform)
        self.relations.append(Relation("same", (axis,), (out,)))
        return out

    def new_frozen_axis(self, size: int, why: str) -> Axis:
        """Return a new axis on which nothing acts."""
        out = Axis(atom(size))
        if size > 1:
            self.freeze(out, why)
        return out

    def split(
        self, axis: Axis, sizes: Iterable[int], why: str = "it is split inside a block"
    ) -> list[Axis]:
        """Split an axis into consecutive slices. `why`: the reason for freezing it where a slice
        ends inside a block.
        """
        out, rest = [], axis.term
        for size in sizes:
            halves = cut(rest, size)
            if halves is None:
                self.freeze(axis, why)
                halves = (atom(size), atom(rest.size - size))
                for half in halves:
                    self.freeze_misfit(half)
            first, rest = halves
            out.append(Axis(first, axis.uniform))
        self.relations.append(Relation("same", (axis,), tuple(out)))
        return out

    def concat(self, axes: Sequence[Axis]) -> Axis:
        """Return the concatenation of axes."""
        out = Axis(Sum(tuple(a.term for a in axes)))
        self.relations.append(Relation("same", tuple(axes), (out,)))
        return out

    def add_role(self, axis: Axis, role: str) -> None:
        """Record the role of an axis at the current operator: "head", "contracted" or "free"."""
        assert self.current_node is not None
        self.roles.append((axis, role, self.current_node))


def _product_term(axes: Sequence[Axis]) -> Term:
    return axes[0].term if len(axes) == 1 else Product(tuple(a.term for a in axes))


def shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node."""
    return tuple(int(n) for n in node.meta["val"].shape)


def walk(graph: Graph) -> Walk:
    """Assign terms to the axes of every tensor of a graph, operator by operator."""
    from regauge.models.discovery.rotary import find_rotaries
    from regauge.models.discovery.rules import RULES, constant_value, source_value, unsupported

    zeros = frozenset(
        n for n, v in graph.constants.items() if v.is_floating_point() and not bool(v.any())
    )
    w = Walk(graph, parameter_dependent=parameter_dependent(graph), zeros=zeros)
    rotaries = find_rotaries(graph)
    skipped = _nodes_inside_rotaries(graph, {n: t.x for n, t in rotaries.items()})
    for node in graph.nodes:
        w.current_node = node
        if node in skipped or node.op == "output":
            continue
        if node.op == "placeholder":
            w.values[node] = source_value(w, node)
        elif node in rotaries:
            from regauge.models.discovery.rotary import rotary

            w.values[node] = rotary(w, rotaries[node])
        elif node in graph.constants:
            w.values[node] = constant_value(w, node)
        elif node.op == "call_function":
            name = operator_name(node)
            rule = RULES.get(name.removesuffix("_") if mutates(node) else name, unsupported)
            try:
                w.values[node] = rule(w, node)
            except _RULE_ERRORS:  # a call that the rule does not support
                w.values[node] = unsupported(w, node)
        else:
            w.values[node] = unsupported(w, node)
    w.current_node = None
    return w


def _nodes_inside_rotaries(graph: Graph, rotaries: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the nodes that only a recognized rotary embedding reads: the operators it is written
    with.
    """
    needed: set[fx.Node] = set()
    nodes = set(graph.nodes)
    todo = list(graph.outputs.values())
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [rotaries[node]] if node in rotaries else node.all_input_nodes
            todo += [u for u in node.users if u in nodes and mutates(u) and u.args[0] is node]
    return nodes - needed
