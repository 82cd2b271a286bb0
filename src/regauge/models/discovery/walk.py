"""Walking a graph: every tensor gets a term for each axis, and what an operator does to its axes is
written down as a relation.

An operator's rule speaks of axes in five words, and everything else is read off what they leave
behind:

    same(a, b)          the axes are one, and move by one and the same matrix
    contract(a, b)      the axes are summed over against each other: the matrices are inverse
    transposes
    times(a, b, out)    the axes are multiplied coordinate by coordinate: scales multiply
    restrict(a, kind)   something on this axis keeps only some matrices (RESTRICTIONS says which)
    freeze(a, why)      nothing may act on this axis
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

Node = Any  # an fx.Node: its arguments may be of any type, and each operator's rule knows its own


@dataclass(eq=False)
class Axis:
    """One axis of one tensor. `uniform`: its values are all the same along it."""

    term: Term
    uniform: bool = False

    @property
    def size(self) -> int:
        return self.term.size


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    `source`: the parameter whose numbers these are, reshaped or cut at most. `weights`: it depends
    on parameters and nothing else. `shift`: what has been added to the parameter (Gemma's 1 + w).
    `places`: its values are places on this axis. `cases`: along axis `dim` lie these values, one
    behind the other, each with axes of its own (`regauge.models.discovery.cases`).
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
    kind: str
    left: tuple[Axis, ...]
    right: tuple[Axis, ...]
    out: Axis | None = None
    sign: int = 1


@dataclass(frozen=True)
class Restriction:
    """What an operator does to an axis: a kind of RESTRICTIONS, and words on it."""

    axis: Axis
    kind: str
    node: fx.Node | None
    detail: str = ""


@dataclass(frozen=True)
class Gain:
    """A parameter that multiplies an axis: the node that has been multiplied, the one that was, and
    the bias that is added in the same operator.
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
    implied: list[tuple[Axis, Axis]] = field(
        default_factory=list
    )  # where the first is, a place of the second is chosen
    gain_axes: dict[str, int] = field(default_factory=dict)  # which axis of a weight reads a gain
    unsupported: dict[str, fx.Node] = field(default_factory=dict)
    aliases: dict[fx.Node, dict[str, Value]] = field(default_factory=dict)
    first_use: dict[str, int] = field(default_factory=dict)
    parameter_dependent: set[fx.Node] = field(default_factory=set)
    zeros: frozenset[fx.Node] = frozenset()
    current_node: fx.Node | None = None

    def value(self, node: Any) -> Value:
        if node in self.aliases:
            return self._alias_value(node)
        if node in self.zeros:
            return self._zero_value(node)
        found = self.values[node]
        if isinstance(found, list):
            raise TypeError(f"{node} is several tensors")
        return self.collapse(found) if found.cases else found

    def _alias_value(self, node: fx.Node) -> Value:
        """A parameter as the module that reads it calls it: one that is tied has several names."""
        named = self.aliases[node]
        path = source_location(self.current_node).module if self.current_node is not None else ""
        found = next(
            (v for name, v in named.items() if name.rpartition(".")[0] == path),
            next(iter(named.values())),
        )
        self.first_use.setdefault(found.source or "", len(self.values))
        return found

    def _zero_value(self, node: fx.Node) -> Value:
        """Zero stays what it is, whatever moves it: each reader may move it as it likes."""
        return Value(tuple(Axis(atom(n)) for n in shape(node)), is_weight=True)

    def value_with_cases(self, node: Any) -> Value:
        """The same, with its cases left apart."""
        if node in self.aliases:
            return self._alias_value(node)
        if node in self.zeros:
            return self._zero_value(node)
        found = self.values[node]
        assert isinstance(found, Value)
        return found

    def collapse(self, value: Value) -> Value:
        """Cases that an operator treats alike are alike: one term for all, and the order of the
        cases fixed.
        """
        first, *rest = value.cases
        for other in rest:
            for i, (a, b) in enumerate(zip(first.axes, other.axes, strict=True)):
                if a is not b and i != value.dim:
                    self.equate([a], [b])
        blocks = [case.axes[value.dim] for case in value.cases]
        if all(a.size == 1 for a in blocks):
            which = self.new_frozen_axis(
                len(blocks), "tensors lie side by side along it, each with its own part"
            )
        else:
            which = self.concat(blocks)
        axes = [which if i == value.dim else a for i, a in enumerate(first.axes)]
        return replace(value, axes=tuple(axes), dim=-1, cases=())

    # The five words.

    def equate(self, left: Sequence[Axis], right: Sequence[Axis], kind: str = "same") -> None:
        unify(_product_term(left), _product_term(right), self.freeze_misfit)
        self.relations.append(Relation(kind, tuple(left), tuple(right)))

    def contract(self, a: Axis, b: Axis) -> None:
        unify(a.term, b.term, self.freeze_misfit)
        self.relations.append(Relation("contract", (a,), (b,)))

    def multiply(self, a: Axis, b: Axis, out: Axis, sign: int = 1) -> None:
        unify(a.term, b.term, self.freeze_misfit)
        unify(a.term, out.term, self.freeze_misfit)
        self.relations.append(Relation("times", (a,), (b,), out, sign))

    def restrict(self, axis: Axis, kind: str, detail: str = "") -> None:
        self.restrictions.append(Restriction(axis, kind, self.current_node, detail))

    def freeze(self, axis: Axis, why: str) -> None:
        self.restrict(axis, "frozen", why)

    def freeze_misfit(self, term: Term) -> None:
        self.freeze(Axis(term), "its shapes are taken apart in ways that do not fit together")

    # Axes made from others.

    def follow(self, axis: Axis) -> Axis:
        """A new axis that moves as this one does."""
        out = Axis(axis.term, axis.uniform)
        self.relations.append(Relation("same", (axis,), (out,)))
        return out

    def new_frozen_axis(self, size: int, why: str) -> Axis:
        """A new axis on which nothing acts."""
        out = Axis(atom(size))
        if size > 1:
            self.freeze(out, why)
        return out

    def split(
        self, axis: Axis, sizes: Iterable[int], why: str = "it is cut where its blocks do not end"
    ) -> list[Axis]:
        """An axis cut into consecutive pieces. `why`: what to say where its blocks do not end
        there.
        """
        out, rest = [], axis.term
        for n in sizes:
            two = cut(rest, n)
            if two is None:
                self.freeze(axis, why)
                two = (atom(n), atom(rest.size - n))
                for t in two:
                    self.freeze_misfit(t)
            first, rest = two
            out.append(Axis(first, axis.uniform))
        self.relations.append(Relation("same", (axis,), tuple(out)))
        return out

    def concat(self, axes: Sequence[Axis]) -> Axis:
        """Axes one behind the other."""
        out = Axis(Sum(tuple(a.term for a in axes)))
        self.relations.append(Relation("same", tuple(axes), (out,)))
        return out

    def add_role(self, axis: Axis, role: str) -> None:
        assert self.current_node is not None
        self.roles.append((axis, role, self.current_node))


def _product_term(axes: Sequence[Axis]) -> Term:
    return axes[0].term if len(axes) == 1 else Product(tuple(a.term for a in axes))


def shape(node: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in node.meta["val"].shape)


def walk(graph: Graph) -> Walk:
    """Give every tensor of a graph its terms, operator by operator."""
    from regauge.models.discovery.rotary import find_rotaries
    from regauge.models.discovery.rules import RULES, constant_value, source_value, unsupported

    zeros = frozenset(
        n for n, v in graph.constants.items() if v.is_floating_point() and not bool(v.any())
    )
    w = Walk(graph, parameter_dependent=parameter_dependent(graph), zeros=zeros)
    turned = find_rotaries(graph)
    inside = _nodes_inside_rotaries(graph, {n: t.x for n, t in turned.items()})
    for node in graph.nodes:
        w.current_node = node
        if node in inside or node.op == "output":
            continue
        if node.op == "placeholder":
            w.values[node] = source_value(w, node)
        elif node in turned:
            from regauge.models.discovery.rotary import rotary

            w.values[node] = rotary(w, turned[node])
        elif node in graph.constants:
            w.values[node] = constant_value(w, node)
        elif node.op == "call_function":
            name = operator_name(node)
            rule = RULES.get(name.removesuffix("_") if mutates(node) else name, unsupported)
            try:
                w.values[node] = rule(w, node)
            except (
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
                AssertionError,
            ):  # called in a way that the rule does not know
                w.values[node] = unsupported(w, node)
        else:
            w.values[node] = unsupported(w, node)
    w.current_node = None
    return w


def _nodes_inside_rotaries(graph: Graph, turned: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Nodes that only a recognised rotation reads: the operators that it is written with."""
    needed: set[fx.Node] = set()
    known = set(graph.nodes)
    todo = list(graph.outputs.values())
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [turned[node]] if node in turned else node.all_input_nodes
            todo += [u for u in node.users if u in known and mutates(u) and u.args[0] is node]
    return known - needed
