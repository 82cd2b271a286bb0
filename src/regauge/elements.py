"""Group elements: one member per space, bound to a spec.

`g @ h` is h first, then g. `~g` undoes g. A space without a member stays as it is. Members of a space that lies over another are indexed by the
parent's place *before* the move, and travel with it: (pi, A) @ (rho, B) permutes by rho[pi] and pairs A with the B that stood at its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regauge.errors import ElementError
from regauge.groups import KINDS, Kind
from regauge.members import Dense, Member, Monomial, Planes
from regauge.spec import Fault, Spec
from regauge.streams import Ints, Stream, seed_key

VERSION = 1


@dataclass(frozen=True, eq=False)
class Element:
    """One description's change into another: what moves weights, gradients, activations and masks."""

    spec: Spec
    members: Mapping[str, Member]

    def __matmul__(self, other: Element) -> Element:
        if other.spec.spaces.keys() != self.spec.spaces.keys() or other.spec.sizes != self.spec.sizes:
            raise ElementError("the two elements belong to different models", hint="compose elements whose specs have the same spaces")
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
        """Where the parent of this space takes its places from, if it has a parent and the parent moves."""
        over = self.spec.spaces[name].over
        return None if over is None or over not in self.members else permutation_index(self.members[over])

    def only(self, *names: str) -> Element:
        """The same element on these spaces, and the identity on all others. `head` also stands for `head.0`, `head.1`, ..."""
        chosen = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n in chosen})

    def without(self, *names: str) -> Element:
        """The identity on these spaces, and the same element on all others."""
        dropped = match_spaces(self.spec, names)
        return Element(self.spec, {n: m for n, m in self.members.items() if n not in dropped})

    def to(self, spec: Spec) -> Element:
        """The same element on another spec with the same spaces: the live model and its stored form, say."""
        moved = replace(self, spec=spec)
        strangers = [f for f in moved.faults() if moved._is_stranger(f.name)]
        if strangers:
            raise ElementError("the element belongs to another model\n" + "\n".join(f"  {f}" for f in strangers[:20]))
        return moved

    def _is_stranger(self, name: str) -> bool:
        """Is this a member for another model: of a space that this one lacks, or of another size?"""
        space, member = self.spec.spaces.get(name), self.members[name]
        return space is None or member.size != space.size or member.count != self.spec.count(name)

    def faults(self) -> list[Fault]:
        """Every reason why this element is not allowed on its spec."""
        out: list[Fault] = []
        for name, member in self.members.items():
            space = self.spec.spaces.get(name)
            if space is None:
                out.append(Fault(name, f'the model has no space "{name}"'))
            elif self._is_stranger(name):
                has, want = f"{member.count} x {member.size}", f"{self.spec.count(name)} x {space.size}"
                out.append(Fault(name, f'the element has size {has} on "{name}", the model {want}'))
            else:
                wrong = space.group.fault(member)
                if wrong:
                    because = f" ({space.why})" if space.why else ""
                    out.append(Fault(name, f'on "{name}" the element {wrong}; the group there is {space.group}{because}'))
        return out

    def require(self) -> None:
        """Raise one error that lists every fault."""
        faults = self.faults()
        if faults:
            other = all(self._is_stranger(f.name) for f in faults)
            raise ElementError(
                f'the element does not fit the model "{self.spec.family}"\n' + "\n".join(f"  {f}" for f in faults[:20]),
                hint="it was made for another model"
                if other
                else "draw it from this model's spec; rotations of the stream need folded norms (move --fold, fold_norms)",
            )


def element(spec: Spec, key: bytes | int, *, within: Kind = "full", spaces: Iterable[str] | None = None) -> Element:
    """The element that a key (32 bytes, or a seed for experiments) draws at random from each space's group or its subgroup `within`.

    Each space has its own stream, labelled "element/" and its name, so a restriction to some spaces draws the same members.
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
            members[name] = group.sample(space.size, spec.count(name), Stream(secret, f"element/{name}"))
    return Element(spec, members)


def secret_of(key: bytes | int) -> bytes:
    given: object = key
    if isinstance(given, bytes) and len(given) == 32:
        return given
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return seed_key(int(given))
    raise ElementError("a key is 32 bytes, or a whole number as a public seed", hint="os.urandom(32) makes one")


def identity(spec: Spec) -> Element:
    return Element(spec, {})


def match_spaces(spec: Spec, names: Iterable[str]) -> set[str]:
    """The spaces that names stand for: themselves, or all those that continue them after a dot (`ffn` for `ffn.0`, `ffn.1`, ...)."""
    out: set[str] = set()
    for name in names:
        found = {s for s in spec.spaces if s == name or s.startswith(name + ".")}
        if not found:
            roots = sorted({s.split(".")[0] for s in spec.spaces})
            raise ElementError(f'the model has no space "{name}"', hint=f"its spaces are {', '.join(roots)}")
        out |= found
    return out


@contextmanager
def invertible(space: str) -> Iterator[None]:
    """Inverses and duals are computed in here: a singular member of this space becomes an error that names it."""
    try:
        with np.errstate(divide="raise", invalid="raise"):
            yield
    except (np.linalg.LinAlgError, FloatingPointError) as error:
        raise ElementError(f'on "{space}" the element is singular: it has no inverse', hint="g.faults() lists all that is wrong with it") from error


def permutation_index(member: Member) -> Ints:
    """The index of a single permutation."""
    order = member.permutation()
    assert order is not None, "a parent moves by permutations"
    return np.asarray(order.index[0], np.int64)


def _argsort(index: Ints | None) -> Ints:
    assert index is not None
    return np.argsort(index)


def save_element(g: Element, path: Path | str, *, new: bool = False) -> None:
    """Write an element as a safetensors file, members as arrays. It appears whole or not at all, for its owner only: who has it can undo it.

    One that its model does not allow is refused: it could not be loaded again.
    """
    from safetensors.numpy import save

    from regauge.files import write_bytes

    g.require()
    arrays, kinds = arrays_of(g)
    metadata = {"regauge": "element", "version": str(VERSION), "family": g.spec.family, "members": json.dumps(kinds)}
    write_bytes(Path(path), save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata), mode=0o600, new=new)


def arrays_of(g: Element) -> tuple[dict[str, Any], dict[str, str]]:
    """An element as plain arrays, and the kind of each member: what `element_of` makes one of again."""
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name, member in g.members.items():
        match member:
            case Monomial():
                kinds[name] = "monomial"
                arrays[f"{name}:index"] = member.index
                if member.scale is not None:
                    arrays[f"{name}:scale"] = np.asarray(member.scale, np.float64)
            case Dense():
                kinds[name] = "dense"
                arrays[f"{name}:matrix"] = np.ascontiguousarray(member.values, np.float64)  # a fit of float32 models has float32 members
            case Planes():
                kinds[name] = f"planes-{member.layout}"
                arrays[f"{name}:factor"] = np.stack([member.factor.real, member.factor.imag], axis=-1).astype(np.float64)
    return arrays, kinds


def element_of(spec: Spec, arrays: Mapping[str, Any], kinds: Mapping[str, str], where: Path | str = "the element") -> Element:
    """An element of a model, out of its arrays. Whether the model allows it is not looked at."""
    return Element(spec, {name: _member(where, name, kind, arrays) for name, kind in kinds.items()})


def load_element(path: Path | str, spec: Spec) -> Element:
    """Read an element for a model. One that was made for another model is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ElementError(f"{path} cannot be read as an element: {error}", hint="regauge move --random --save-element FILE writes one") from error
    if metadata.get("regauge") != "element":
        raise ElementError(f"{path} is not an element", hint="regauge move --random --save-element FILE writes one")
    try:
        version = int(metadata["version"])
        if version > VERSION:
            raise ElementError(f"{path} has format version {version}; this regauge reads up to {VERSION}", hint="upgrade regauge")
        g = element_of(spec, arrays, json.loads(metadata["members"]), path)
        if version < 1:
            raise ValueError(f"its version is {version}")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ElementError(f"{path} is damaged: {error}", hint="restore it from a copy") from error
    g.require()
    return g


def _member(path: Path | str, name: str, kind: str, arrays: Mapping[str, Any]) -> Member:
    """One member out of its arrays, whose shapes and dtypes must be those that it was written with."""

    def array(key: str, ndim: int, dtype: str) -> Any:
        found = arrays[f"{name}:{key}"]
        if found.ndim != ndim or found.dtype != dtype or 0 in found.shape:
            raise ValueError(f'"{name}:{key}" is {found.dtype} {list(found.shape)}')
        return found

    match kind:
        case "monomial":
            index = array("index", 2, "int64")
            scale = array("scale", 2, "float64") if f"{name}:scale" in arrays else None
            if scale is not None and scale.shape != index.shape:
                raise ValueError(f'"{name}:scale" has shape {list(scale.shape)}, its index {list(index.shape)}')
            return Monomial(index, scale)
        case "dense":
            values = array("matrix", 3, "float64")
            if values.shape[1] != values.shape[2]:
                raise ValueError(f'"{name}:matrix" has shape {list(values.shape)}')
            return Dense(values)
        case "planes-half" | "planes-interleaved":
            factor = array("factor", 3, "float64")
            if factor.shape[2] != 2:
                raise ValueError(f'"{name}:factor" has shape {list(factor.shape)}')
            return Planes(factor[..., 0] + 1j * factor[..., 1], "half" if kind.endswith("half") else "interleaved")
        case _:
            raise ElementError(f'{path} has a member of unknown kind "{kind}" on "{name}"', hint="upgrade regauge")
