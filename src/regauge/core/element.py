"""Group elements: one member per space, bound to a spec.

`g @ h` applies h first, then g. `~g` is the inverse. A space without a member is unchanged. Members
of a space that lies over another are indexed by the parent's place *before* the permutation of the
parent, and are permuted with it: (pi, A) @ (rho, B) permutes by rho[pi] and composes A with the B
at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from regauge.core.check import Fault, invertible
from regauge.core.groups import KINDS, Kind
from regauge.core.members import Member, SpaceMember, permutation_index
from regauge.core.rng import Ints, Stream, secret_of
from regauge.core.spec import Spec
from regauge.errors import ElementError, Hint


@dataclass(frozen=True, eq=False)
class Element:
    """A change of basis: acts on weights, gradients, activations and masks.

    Args:
        spec: The spec whose spaces it acts on.
        members: One group member per space; the identity on all others.

    Example:
        >>> g = regauge.element(regauge.spec_of(model), 0, within="permutation")
        >>> moved = regauge.apply(g, model.state_dict())
        >>> back = regauge.apply(~g, moved)
        >>> all(torch.equal(back[name], t) for name, t in model.state_dict().items())
        True
        >>> regauge.element(regauge.spec_of(model), 0)["qk.1"].matrix(head=2).shape
        (4, 4)
    """

    spec: Spec
    members: Mapping[str, Member]

    def __matmul__(self, other: Element) -> Element:
        if (
            other.spec.spaces.keys() != self.spec.spaces.keys()
            or other.spec.sizes != self.spec.sizes
        ):
            raise ElementError(
                "the two elements belong to different models",
                hint="compose elements whose specs have the same spaces and sizes",
            )
        members: dict[str, Member] = {}
        for name in self.spec.spaces:
            a, b = self.members.get(name), other.members.get(name)
            if a is not None:
                a = a.take(_argsort(other._parent(name))) if other._parent(name) is not None else a
            if a is not None and b is not None:
                members[name] = a.after(b)
            elif a is not None or b is not None:
                members[name] = a or b  # type: ignore[assignment]
        return Element(self.spec, members)

    def __getitem__(self, name: str) -> SpaceMember:
        """Return what the element does on a space; the identity if it has no member there."""
        space = self.spec.spaces.get(name)
        if space is None:
            match_spaces(self.spec, [name])  # raises if there is no such space at all
            raise ElementError(f'"{name}" names several spaces', hint=f"name one, as {name}.0")
        member = self.members.get(name) or space.group.identity(space.size, self.spec.count(name))
        return SpaceMember(name, member, space.over)

    def __invert__(self) -> Element:
        members: dict[str, Member] = {}
        for name, member in self.members.items():
            parent = self._parent(name)
            with invertible(name):
                members[name] = (member if parent is None else member.take(parent)).inverse()
        return Element(self.spec, members)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {self.spec.spaces[name].size}" for name in self.members)
        return f"Element({self.spec.family}; {sizes})"

    def _parent(self, name: str) -> Ints | None:
        """Return the permutation of the parent of a space, or None if it has no parent or the
        parent is unchanged.
        """
        over = self.spec.spaces[name].over
        return (
            None
            if over is None or over not in self.members
            else permutation_index(self.members[over])
        )

    def only(self, *names: str) -> Element:
        """Return the element restricted to these spaces. `head` also selects `head.0`, `head.1`,
        ...
        """
        chosen = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n in chosen})

    def without(self, *names: str) -> Element:
        """Return the element with the identity on these spaces."""
        dropped = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n not in dropped})

    def to(self, spec: Spec) -> Element:
        """Return the same element on another spec with the same spaces, such as the spec of the
        stored form of a live model.
        """
        rebound = replace(self, spec=spec)
        foreign = [f for f in rebound.faults() if rebound._is_foreign(f.name)]
        if foreign:
            raise ElementError(
                "the element belongs to another model\n" + "\n".join(f"  {f}" for f in foreign[:20])
            )
        return rebound

    def _is_foreign(self, name: str) -> bool:
        """Return whether a member belongs to another model: to an unknown space, or of another
        size.
        """
        space, member = self.spec.spaces.get(name), self.members[name]
        return space is None or member.size != space.size or member.count != self.spec.count(name)

    def faults(self) -> list[Fault]:
        """List every reason why this element is not allowed on its spec."""
        faults: list[Fault] = []
        for name, member in self.members.items():
            space = self.spec.spaces.get(name)
            if space is None:
                faults.append(Fault(name, f'the model has no space "{name}"'))
            elif self._is_foreign(name):
                size = f"{member.count} x {member.size}"
                expected = f"{self.spec.count(name)} x {space.size}"
                text = f'on "{name}" the element has size {size}, expected {expected}'
                faults.append(Fault(name, text))
            else:
                fault = space.group.fault(member)
                if fault:
                    reason = f" ({space.why})" if space.why else ""
                    text = f'on "{name}" the element {fault}; the group there is {space.group}'
                    faults.append(Fault(name, text + reason))
        return faults

    def require(self) -> None:
        """Raise an ElementError that lists every fault, if there are any."""
        faults = self.faults()
        if faults:
            foreign = all(self._is_foreign(f.name) for f in faults)
            raise ElementError(
                f'the element does not fit the model "{self.spec.family}"\n'
                + "\n".join(f"  {f}" for f in faults[:20]),
                hint="use the element of this model: this one was made for another"
                if foreign
                else Hint(
                    "sample it from this model's spec; rotations of the stream need "
                    "regauge.fold_norms first",
                    cli="sample it from this model; rotations of the stream need "
                    "regauge move --fold",
                ),
            )


def element(
    spec: Spec, key: bytes | int, *, within: Kind = "full", spaces: Iterable[str] | None = None
) -> Element:
    """Sample an element at random, determined by a key.

    Each space has its own stream of random numbers, labelled "element/" and its name, so that a
    restriction to some spaces gives the same members on them.

    Args:
        spec: The spec whose groups are sampled.
        key: 32 secret bytes, or an integer as a public seed for experiments.
        within: The kind of subgroup to sample from: permutation, signed, orthogonal or full.
        spaces: The spaces to act on, by name or root (`ffn` for `ffn.0`, `ffn.1`, ...); by default
            all.

    Returns:
        The element.

    Raises:
        ElementError: The key, the kind or a space is invalid.

    Example:
        >>> key = regauge.generate_key()
        >>> g = regauge.element(regauge.spec_of(model), key.derive("element"), spaces=["ffn"])
        >>> sorted(g.members)
        ['ffn.0', 'ffn.1']
    """
    secret = secret_of(key)
    if within not in KINDS:
        raise ElementError(f'within must be one of {", ".join(KINDS)}, got "{within}"')
    spaces = [spaces] if isinstance(spaces, str) else spaces
    chosen = spec.spaces.keys() if spaces is None else match_spaces(spec, spaces)
    members: dict[str, Member] = {}
    for name, space in spec.spaces.items():
        group = space.group.within(within)
        if name in chosen and group.bits(space.size) + group.dim(space.size) > 0:
            members[name] = group.sample(
                space.size, spec.count(name), Stream(secret, f"element/{name}")
            )
    return Element(spec, members)


def identity(spec: Spec) -> Element:
    """Return the element that changes nothing.

    Args:
        spec: The spec of the element.

    Returns:
        The identity, which has no members.

    Example:
        >>> dict(regauge.identity(regauge.spec_of(model)).members)
        {}
    """
    return Element(spec, {})


def match_spaces(spec: Spec, names: Iterable[str]) -> set[str]:
    """Return the spaces that names select: those of that name, or that continue it after a dot
    (`ffn` for `ffn.0`, `ffn.1`, ...).
    """
    selected: set[str] = set()
    for name in names:
        matches = {s for s in spec.spaces if s == name or s.startswith(name + ".")}
        if not matches:
            roots = sorted({s.split(".")[0] for s in spec.spaces})
            raise ElementError(
                f'the model has no space "{name}"', hint=f"its spaces are {', '.join(roots)}"
            )
        selected |= matches
    return selected


def _argsort(index: Ints | None) -> Ints:
    assert index is not None
    return np.argsort(index)
