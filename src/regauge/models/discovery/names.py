"""Names for what was found: `stream`, `head.3`, `qk.3`, `ffn.3`, from what a kind of coordinate
does and from the names of its parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from regauge.core.groups import Rotary
from regauge.models.discovery.infer_groups import GroupInference, Kind
from regauge.models.discovery.terms import Atom
from regauge.models.discovery.walk import Axis

_SIDES = ("text", "vision", "visual", "image", "audio", "encoder", "decoder")
_GENERIC_WORDS = frozenset(
    [
        "weight",
        "bias",
        "dense",
        "fc",
        "fc1",
        "fc2",
        "linear",
        "linear1",
        "linear2",
        "proj",
        "projection",
        "in",
        "out",
        "net",
        "layer",
        "layers",
        "blocks",
        "block",
        "model",
        "module",
        "modules",
        "attn",
        "attention",
        "self",
        "mlp",
        "ffn",
        "act",
        "norm",
        "conv0",
    ]
)


def layer_label(names: Sequence[str]) -> str:
    """The layer that parameters have in common, as text: "3", "decoder.3", "1.0"; empty if there is
    none.
    """
    paths = [_module_numbers(n) for n in names]
    common: list[str] = []
    for column in zip(*paths, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    side = side_of(names)
    return ".".join([*([side] if side else []), *common])


def _module_numbers(name: str) -> list[str]:
    """The numbers of a name's modules, from the outside in: `label` keeps those that all names
    share.
    """
    return re.findall(r"(?<=\.)\d+(?=\.)", f".{name}")


def side_of(names: Sequence[str]) -> str:
    """Which of several networks parameters belong to, if one module's name says it."""
    for side in _SIDES:
        if all(re.search(rf"(^|\.){side}(_model)?\.", n) for n in names):
            return side
    return ""


def name_kinds(reading: GroupInference, sided: bool) -> dict[Atom, str]:
    """A name for each kind that acts on something, or that another lies over."""
    roles: dict[Atom, Counter[str]] = {}
    for axis, role, _ in reading.walk.roles:
        for atom in reading.scales.atoms(axis):
            roles.setdefault(atom, Counter())[role] += 1
    owner = {axis: name for name, axes in reading.parameters.items() for axis in axes}
    parents = {k.over for k in reading.kinds.values() if k.over is not None}
    wanted = [
        k
        for k in reading.kinds.values()
        if k.occurrences and (not k.is_frozen or k.atom in parents)
    ]
    users = {k.atom: list(dict.fromkeys(owner[axis] for axis, _ in k.occurrences)) for k in wanted}
    many = {k.atom: _spans_layers(k, owner) for k in wanted}
    bases = {
        k.atom: _base_name(
            k, roles.get(k.atom, Counter()), users[k.atom], reading.kinds, many[k.atom]
        )
        for k in wanted
    }
    for k in wanted:  # partial rotary positions: what is turned, and the rest
        beside = [
            o
            for o in wanted
            if o is not k and bases[o.atom] == "qk" and users[o.atom] == users[k.atom]
        ]
        if (
            bases[k.atom] == "qk"
            and beside
            and isinstance(k.group, Rotary)
            and not any(isinstance(o.group, Rotary) for o in beside)
        ):
            bases[k.atom] = "rot"
            bases |= {o.atom: "rest" for o in beside}
    streams = _stream_suffixes({k.atom: users[k.atom] for k in wanted if bases[k.atom] == "stream"})
    out: dict[Atom, str] = {}
    for k in wanted:
        numbers = layer_label(users[k.atom])
        if not sided:
            numbers = re.sub(r"^[a-z]+\.?", "", numbers)
        if bases[k.atom] == "stream":
            numbers = streams[k.atom]
        out[k.atom] = ".".join(t for t in (bases[k.atom], numbers) if t)
    return _make_unique(out, users)


def _stream_suffixes(users: Mapping[Atom, Sequence[str]]) -> dict[Atom, str]:
    """What to call each of several streams: by the side that most of its parameters are on, or by
    their order.
    """
    if len(users) == 1:
        return dict.fromkeys(users, "")
    sides = {
        atom: Counter(side_of([n]) for n in names).most_common(1)[0][0]
        for atom, names in users.items()
    }
    if all(sides.values()) and len(set(sides.values())) == len(sides):
        return sides
    return {atom: str(i) for i, atom in enumerate(users)}


def _make_unique(names: dict[Atom, str], users: Mapping[Atom, Sequence[str]]) -> dict[Atom, str]:
    """Names that several kinds share are told apart: by what their parameters' names do not share,
    or by a number.
    """
    for name, times in Counter(names.values()).items():
        if times < 2:
            continue
        alike = [a for a, n in names.items() if n == name]
        words = [_common_words(users[a]) for a in alike]
        told = [
            next(
                (w for w in own if all(w not in other for other in words if other is not own)), None
            )
            for own in words
        ]
        base, _, number = name.partition(".")
        for i, (atom, word) in enumerate(zip(alike, told, strict=True)):
            if word is not None and len(set(told)) == len(told):
                names[atom] = ".".join(t for t in (base, word, number) if t)
            else:
                names[atom] = ".".join(t for t in (base, number, str(i)) if t)
    taken: set[str] = set()
    for atom, name in names.items():
        fresh, i = name, 1
        while fresh in taken:
            fresh, i = f"{name}.{i}", i + 1
        names[atom] = fresh
        taken.add(fresh)
    return names


def _common_words(names: Sequence[str]) -> list[str]:
    found = Counter(
        w
        for n in names
        for w in set(re.split(r"[.]", n))
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", w)
    )
    return [w for w, times in found.items() if times == len(names) and w not in _GENERIC_WORDS]


def _base_name(
    kind: Kind, roles: Counter[str], users: Sequence[str], kinds: Mapping[Atom, Kind], many: bool
) -> str:
    if roles["head"]:
        parent = kind.over
        if parent is not None:
            return "rep"
        if any(k.over is kind.atom and k.has_restriction("batch") for k in kinds.values()):
            return "kv"
        return "head"
    if roles["contracted"] and (kind.over is not None or roles["free"] == 0) and not many:
        return "qk"
    if roles["free"] and not many:
        return "vo"
    if any(k.over is kind.atom for k in kinds.values()):
        return "expert" if any("expert" in u for u in users) else "group"
    if many:
        return "stream"
    if re.search(r"\d", layer_label(users)):
        return "ffn"
    return (
        "embed"
        if any("embed" in u for u in users) and not kind.has_restriction("softmax")
        else _module_word(users)
    )  # tokens of their own are called by theirs


def _spans_layers(kind: Kind, owner: Mapping[Axis, str]) -> bool:
    """Do parameters of several layers have it, or those of a layer and those around it? Then it is
    what runs through them.

    What one of two layers writes and the other reads is the inside of a small network (net.0,
    net.2), and does not.
    """
    sides: dict[str, set[int]] = {}
    for place in kind.occurrences:
        first = re.match(r"(.*?\.)?\d+(?=\.)", owner[place[0]])
        sides.setdefault(first.group() if first else "", set()).add(kind.exponents.get(place, 0))
    lists = {re.sub(r"\d+$", "", layer) for layer in sides}
    return len(sides) > 2 or (
        len(sides) == 2 and (len(lists) > 1 or any({1, -1} <= found for found in sides.values()))
    )


def _module_word(users: Sequence[str]) -> str:
    """The most telling word in the name of the first parameter."""
    words = [w for w in users[0].split(".") if w.lower() not in _GENERIC_WORDS and not w.isdigit()]
    return re.sub(r"[^A-Za-z0-9_]", "", words[-1]) if words else "hidden"
