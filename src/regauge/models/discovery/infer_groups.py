"""From a walk to what each kind of coordinate keeps: its group, where it stands starred or barred,
and what it lies over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from regauge.core.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    PlaneSigns,
    Rotary,
    Scaling,
    SignedPermutation,
    Trivial,
)
from regauge.models.discovery.rules import RESTRICTIONS
from regauge.models.discovery.scales import Scales, Variable
from regauge.models.discovery.terms import Atom, Sum, factors, parts
from regauge.models.discovery.walk import Axis, Restriction, Value, Walk

_ROTARY = {"rotary-half": "half", "rotary-interleaved": "interleaved"}


@dataclass
class Kind:
    """A kind of coordinate: what becomes a space of the spec."""

    atom: Atom
    restrictions: list[Restriction] = field(default_factory=list)
    occurrences: list[Variable] = field(default_factory=list)  # in parameters
    group: Group = field(default_factory=Trivial)
    folded: Group | None = None
    exponents: dict[Variable, int] = field(default_factory=dict)
    over: Atom | None = None
    note: str = ""

    @property
    def is_frozen(self) -> bool:
        return isinstance(self.group, Trivial)

    def occurs_on(self, axis: Axis) -> bool:
        return any(a is axis for a, _ in self.occurrences)

    def has_restriction(self, *kinds: str) -> bool:
        return any(r.kind in kinds for r in self.restrictions)


@dataclass(frozen=True, eq=False)
class GroupInference:
    """What a walk leaves: the kinds of coordinates by their atoms, and the axes of each parameter
    by name.
    """

    walk: Walk
    scales: Scales
    kinds: Mapping[Atom, Kind]
    parameters: Mapping[str, tuple[Axis, ...]]


def infer_groups(w: Walk, foldable: set[str], closed: Mapping[Axis, str]) -> GroupInference:
    """`foldable`: gains that can be folded. `closed`: axes of outputs that callers must find as
    they are, and why.
    """
    sources = [v for named in w.aliases.values() for v in named.values()]
    sources += [
        v
        for n, v in w.values.items()
        if n.op == "placeholder" and n not in w.aliases and isinstance(v, Value)
    ]
    parameters = {v.source: v.axes for v in sources if v.source}
    ties = [
        (a, b)
        for alias, target in w.graph.ties.items()
        if alias in parameters and target in parameters
        for a, b in zip(parameters[alias], parameters[target], strict=True)
    ]
    for a, b in ties:
        w.equate([a], [b], kind="tied")
    scales = Scales(w, ties)
    kinds: dict[Atom, Kind] = {}

    def kind(atom: Atom) -> Kind:
        return kinds.setdefault(atom, Kind(atom))

    for axes in parameters.values():
        for axis in axes:
            for i, atom in enumerate(scales.atoms(axis)):
                kind(atom).occurrences.append((axis, i))
    frozen = [
        Restriction(a, "frozen", None, "it is taken apart in ways that do not fit together")
        for a in scales.misfits
    ]
    frozen += [Restriction(a, "frozen", None, why) for a, why in closed.items()]
    for restriction in (*w.restrictions, *frozen):
        for atom in dict.fromkeys(scales.atoms(restriction.axis)):
            kind(atom).restrictions.append(restriction)
    activations: dict[Atom, list[Variable]] = {}
    for value in _iter_values(w):
        for axis in value.axes if not value.is_weight else ():
            for i, atom in enumerate(scales.atoms(axis)):
                activations.setdefault(atom, []).append((axis, i))
    summed = {
        a
        for r in w.relations
        if r.kind == "contract"
        for axis in (*r.left, *r.right)
        for a in scales.atoms(axis)
    }
    for one in kinds.values():
        if (
            one.occurrences
            and not one.has_restriction("frozen")
            and one.atom not in activations
            and one.atom not in summed
        ):  # the example inputs are shorter than the table
            one.restrictions.append(
                Restriction(
                    one.occurrences[0][0],
                    "frozen",
                    None,
                    "the example inputs do not read this part of it",
                )
            )
        if one.occurrences:
            _choose_group(one, scales, foldable, activations.get(one.atom, []))
    _assign_parents(w, scales, kinds, parameters)
    return GroupInference(w, scales, kinds, parameters)


def _choose_group(
    kind: Kind, scales: Scales, foldable: set[str], activations: list[Variable]
) -> None:
    """The largest group that all restrictions keep. `activations`: where tensors that are no
    parameters have it; the first is its plain side.
    """
    if kind.has_restriction("frozen"):
        return
    wanted = [*kind.occurrences, *activations]
    scale = _unit_solution(scales.scales.solutions(wanted), len(kind.occurrences))
    sign = scales.signs.solutions(kind.occurrences)
    star = scales.stars.solutions(wanted)
    seen = [r for r in kind.restrictions if RESTRICTIONS[r.kind].mixtures == "none"]
    others = [r for r in seen if r.kind != "gain"]
    gains = {r.detail for r in seen if r.kind == "gain"}
    turned = {layout for k, layout in _ROTARY.items() if kind.has_restriction(k)}
    normed = kind.has_restriction("ones", "rms", "shift")
    if turned:
        _choose_rotary_group(kind, turned, scale, sign, star, bool(seen) or normed)
    elif not seen and not normed and scale is not None and all(scale):
        kind.group, kind.exponents = (
            GeneralLinear(),
            dict(zip(kind.occurrences, scale, strict=True)),
        )
    elif not others and (normed or not gains):
        ones = kind.has_restriction("ones", "shift")
        rotations: Group = OrthogonalFixingOnes() if ones else Orthogonal()
        kind.exponents = _dual_exponents(kind, star)
        if not gains:
            kind.group = rotations
        else:
            kind.group = SignedPermutation() if sign and not ones else Permutation()
            kind.folded = rotations if gains <= foldable else None
            kind.exponents = _dual_exponents(kind, star, sign)
    elif scale is not None and any(scale):
        flips = [Fraction(abs(s) % 2) for s in scale] in _span_mod_2(sign)
        kind.group, kind.exponents = (
            Scaling(positive=not flips),
            dict(zip(kind.occurrences, scale, strict=True)),
        )
    elif sign:
        kind.group, kind.exponents = SignedPermutation(), _dual_exponents(kind, star, sign)
    else:
        kind.group, kind.exponents = Permutation(), _dual_exponents(kind, star)


def _choose_rotary_group(
    kind: Kind,
    layouts: set[str],
    scale: list[int] | None,
    sign: list[list[Fraction]],
    star: list[list[Fraction]],
    more: bool,
) -> None:
    """Rotary positions leave a turn and a scale for each plane; what else sees coordinates leaves
    one sign.
    """
    if len(layouts) > 1 or kind.atom.size % 2:
        kind.note = "rotary positions of two layouts meet on it"
        return
    layout = "half" if "half" in layouts else "interleaved"
    if not more and scale is not None and all(scale):
        kind.group, kind.exponents = Rotary(layout), dict(zip(kind.occurrences, scale, strict=True))  # type: ignore[arg-type]
    elif not more:
        kind.group, kind.exponents = Rotary(layout, unit=True), _dual_exponents(kind, star)  # type: ignore[arg-type]
    elif sign:
        kind.group, kind.exponents = PlaneSigns(layout), _dual_exponents(kind, star, sign)  # type: ignore[arg-type]


def _unit_solution(basis: list[list[Fraction]], size: int) -> list[int] | None:
    """The one solution, with exponents 1, -1 and 0; of several the first that is so. What stands
    behind `size` is made positive.
    """
    for solution in basis:
        largest = max((abs(s) for s in solution), default=Fraction(0))
        scaled = [s / largest for s in solution] if largest else []
        if scaled and set(scaled) <= {-1, 0, 1}:
            sign = next(s for s in (*scaled[size:], *scaled) if s)
            if any(scaled[:size]):
                return [int(s * sign) for s in scaled[:size]]
    return None


def _dual_exponents(
    kind: Kind, star: list[list[Fraction]], sign: list[list[Fraction]] | None = None
) -> dict[Variable, int]:
    """Exponents of a group for which the star changes nothing: which side is the dual, and (by the
    signs) what is barred.
    """
    sides = [0] * len(kind.occurrences)  # parts that only a tie joins have solutions of their own
    for solution in filter(None, (_unit_solution([s], len(kind.occurrences)) for s in star)):
        sides = [a or b for a, b in zip(sides, solution, strict=True)]
    if not any(sides):
        sides = [1] * len(kind.occurrences)
    kept = sign[0] if sign else None
    out = {}
    for i, place in enumerate(kind.occurrences):
        side = sides[i] or 1
        if kept is not None:
            out[place] = side if kept[i] else 0
        else:
            out[place] = sides[i]
    return out


def _span_mod_2(basis: list[list[Fraction]]) -> list[list[Fraction]]:
    """All sums modulo 2 of a few vectors."""
    out: list[list[Fraction]] = [[Fraction(0)] * len(basis[0])] if basis else []
    for vector in basis[:10]:
        out += [[Fraction((a + b) % 2) for a, b in zip(v, vector, strict=True)] for v in out]
    return out


def _can_act_per_parent(
    parameters: Mapping[str, tuple[Axis, ...]],
    axis: Axis,
    child: Atom,
    parent: Atom,
    scales: Scales,
) -> bool:
    """Can a member for each place of the parent act here: does the parent stand before it in a
    product, or is it an axis of its own?
    """
    if all(parent in p[: p.index(child)] for p in _iter_products(axis) if child in p):
        return True
    beside = next(axes for axes in parameters.values() if any(a is axis for a in axes))
    return any(scales.atoms(a) == [parent] for a in beside) or all(
        parent not in scales.atoms(a) for a in beside
    )


def _assign_parents(
    w: Walk, scales: Scales, kinds: Mapping[Atom, Kind], parameters: Mapping[str, tuple[Axis, ...]]
) -> None:
    """A kind lies over another if wherever it occurs the other does too: then it has one member for
    each place of that.
    """
    together: dict[Atom, set[Atom]] = {}
    implied = {a: set(scales.atoms(y)) for x, y in w.implied for a in scales.atoms(x)}
    for value in _iter_values(w):
        inside = [a for axis in value.axes for a in scales.atoms(axis)]
        for atom in set(inside):
            one = kinds.get(atom)
            if one is None or (
                isinstance(one.group, Rotary)
                and value.is_weight
                and all(
                    not one.exponents.get((x, i), 0)
                    for x in value.axes
                    for i, b in enumerate(scales.atoms(x))
                    if b is atom
                )
            ):
                continue
            others = set(inside).union(*(implied[a] for a in inside if a in implied)) - {atom}
            together[atom] = together[atom] & others if atom in together else others
    beside: dict[Atom, list[Atom]] = {}
    for one in kinds.values():
        for axis, _ in one.occurrences:
            for product in _iter_products(axis):
                if one.atom in product:
                    beside.setdefault(one.atom, []).extend(
                        a for a in product[: product.index(one.atom)]
                    )
    order = sorted(
        (k for k in kinds.values() if k.occurrences and not k.is_frozen),
        key=lambda k: k.atom in together and len(together[k.atom]),
    )
    for one in order:
        fixed = [a for a in beside.get(one.atom, []) if kinds[a].is_frozen]
        free = [
            a
            for a in together.get(one.atom, ())
            if a in kinds
            and type(kinds[a].group) is Permutation
            and kinds[a].over is None
            and kinds[a].occurrences
        ]
        found = [a for a in (*free, *fixed) if a in together.get(one.atom, ())]
        outer = [
            a for a in found if one.atom not in beside.get(a, [])
        ]  # of two that always come together, the outer one is the parent
        outer = [
            a
            for a in outer
            if all(
                _can_act_per_parent(parameters, axis, one.atom, a, scales)
                for axis, _ in one.occurrences
            )
        ]
        mine = [
            a
            for a in outer
            if not any(k.over is one.atom for k in kinds.values()) and a is not one.atom
        ]
        if mine:
            one.over = min(mine, key=lambda a: (a not in free, a.id))


def _iter_values(w: Walk) -> Iterator[Value]:
    for named in w.aliases.values():
        yield from named.values()
    for found in w.values.values():
        for value in found if isinstance(found, list) else [found]:
            yield from value.cases or (value,)


def _iter_products(axis: Axis) -> Iterator[list[Atom]]:
    """The atoms of each product along an axis, outermost first."""

    def inside(term: object) -> Iterator[list[Atom]]:
        listed = factors(term)  # type: ignore[arg-type]
        sums = [f for f in listed if isinstance(f, Sum)]
        yield [f for f in listed if isinstance(f, Atom)]
        before = [f for f in listed if isinstance(f, Atom)]
        for s in sums:
            for t in parts(s):
                for rest in inside(t):
                    yield [*before, *rest]

    yield from inside(axis.term)
