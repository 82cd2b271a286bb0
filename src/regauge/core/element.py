"""Group elements: one member per space, bound to a spec.

`g @ h` is h first, then g. `~g` undoes g. A space without a member stays as it is. Members of a
space that lies over another are indexed by the parent's place *before* the move, and travel with
it: (pi, A) @ (rho, B) permutes by rho[pi] and pairs A with the B that stood at its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from regauge.core.check import Fault, invertible
from regauge.core.groups import KINDS, Kind
from regauge.core.members import Member, permutation_index
from regauge.core.rng import Ints, Stream, secret_of
from regauge.core.spec import Spec
from regauge.errors import ElementError


@dataclass(frozen=True, eq=False)
class Element:
    """One description's change into another: what moves weights, gradients, activations and
    masks.
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
                hint="compose elements whose specs have the same spaces",
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

    def __invert__(self) -> Element:
        members: dict[str, Member] = {}
        for name, member in self.members.items():
            parent = self._parent(name)
            with invertible(name):
                members[name] = (member if parent is None else member.take(parent)).inverse()
        return Element(self.spec, members)

    def __repr__(self) -> str:
        moved = ", ".join(f"{name}: {self.spec.spaces[name].size}" for name in self.members)
        return f"Element({self.spec.family}; {moved})"

    def _parent(self, name: str) -> Ints | None:
        """Where the parent of this space takes its places from, if it has a parent and the parent
        moves.
        """
        over = self.spec.spaces[name].over
        return (
            None
            if over is None or over not in self.members
            else permutation_index(self.members[over])
        )

    def only(self, *names: str) -> Element:
        """The same element on these spaces, and the identity on all others. `head` also stands for
        `head.0`, `head.1`, ...
        """
        chosen = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n in chosen})

    def without(self, *names: str) -> Element:
        """The identity on these spaces, and the same element on all others."""
        dropped = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n not in dropped})

    def to(self, spec: Spec) -> Element:
        """The same element on another spec with the same spaces: the live model and its stored
        form, say.
        """
        moved = replace(self, spec=spec)
        strangers = [f for f in moved.faults() if moved._is_foreign(f.name)]
        if strangers:
            raise ElementError(
                "the element belongs to another model\n"
                + "\n".join(f"  {f}" for f in strangers[:20])
            )
        return moved

    def _is_foreign(self, name: str) -> bool:
        """Is this a member for another model: of a space that this one lacks, or of another
        size?
        """
        space, member = self.spec.spaces.get(name), self.members[name]
        return space is None or member.size != space.size or member.count != self.spec.count(name)

    def faults(self) -> list[Fault]:
        """Every reason why this element is not allowed on its spec."""
        out: list[Fault] = []
        for name, member in self.members.items():
            space = self.spec.spaces.get(name)
            if space is None:
                out.append(Fault(name, f'the model has no space "{name}"'))
            elif self._is_foreign(name):
                has, want = (
                    f"{member.count} x {member.size}",
                    f"{self.spec.count(name)} x {space.size}",
                )
                out.append(Fault(name, f'the element has size {has} on "{name}", the model {want}'))
            else:
                wrong = space.group.fault(member)
                if wrong:
                    because = f" ({space.why})" if space.why else ""
                    out.append(
                        Fault(
                            name,
                            f'on "{name}" the element {wrong}; the group there is '
                            f"{space.group}{because}",
                        )
                    )
        return out

    def require(self) -> None:
        """Raise one error that lists every fault."""
        faults = self.faults()
        if faults:
            other = all(self._is_foreign(f.name) for f in faults)
            raise ElementError(
                f'the element does not fit the model "{self.spec.family}"\n'
                + "\n".join(f"  {f}" for f in faults[:20]),
                hint="it was made for another model"
                if other
                else "draw it from this model's spec; rotations of the stream need folded norms "
                "(move --fold, fold_norms)",
            )


def element(
    spec: Spec, key: bytes | int, *, within: Kind = "full", spaces: Iterable[str] | None = None
) -> Element:
    """The element that a key (32 bytes, or a seed for experiments) draws at random from each
    space's group or its subgroup `within`.

    Each space has its own stream, labelled "element/" and its name, so a restriction to some spaces
    draws the same members.
    """
    secret = secret_of(key)
    if within not in KINDS:
        raise ElementError(f'there is no kind "{within}"', hint=f"kinds are {', '.join(KINDS)}")
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
    return Element(spec, {})


def match_spaces(spec: Spec, names: Iterable[str]) -> set[str]:
    """The spaces that names stand for: themselves, or all those that continue them after a dot
    (`ffn` for `ffn.0`, `ffn.1`, ...).
    """
    out: set[str] = set()
    for name in names:
        found = {s for s in spec.spaces if s == name or s.startswith(name + ".")}
        if not found:
            roots = sorted({s.split(".")[0] for s in spec.spaces})
            raise ElementError(
                f'the model has no space "{name}"', hint=f"its spaces are {', '.join(roots)}"
            )
        out |= found
    return out


def _argsort(index: Ints | None) -> Ints:
    assert index is not None
    return np.argsort(index)
