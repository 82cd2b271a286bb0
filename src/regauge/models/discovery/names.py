"""Readable names for discovered spaces (`stream`, `head.3`, `qk.3`, `ffn.3`), from the role of a
kind of coordinate and the names of its parameters.
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
    """Return the layer that parameters have in common as text: "3", "decoder.3", "1.0"; empty if
    there is none.
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
    """Return the module indices in a name, outermost first."""
    return re.findall(r"(?<=\.)\d+(?=\.)", f".{name}")


def side_of(names: Sequence[str]) -> str:
    """Return the network that all parameters belong to (text, vision, encoder, ...), by a module's
    name; empty if none.
    """
    for side in _SIDES:
        if all(re.search(rf"(^|\.){side}(_model)?\.", n) for n in names):
            return side
    return ""


def name_kinds(inference: GroupInference, has_sides: bool) -> dict[Atom, str]:
    """Name each kind that acts on something, or that another lies over."""
    roles: dict[Atom, Counter[str]] = {}
    for axis, role, _ in inference.walk.roles:
        for atom in inference.scales.atoms(axis):
            roles.setdefault(atom, Counter())[role] += 1
    owner = {axis: name for name, axes in inference.parameters.items() for axis in axes}
    parents = {k.over for k in inference.kinds.values() if k.over is not None}
    named = [
        k
        for k in inference.kinds.values()
        if k.occurrences and (not k.is_frozen or k.atom in parents)
    ]
    users = {k.atom: list(dict.fromkeys(owner[axis] for axis, _ in k.occurrences)) for k in named}
    spans_layers = {k.atom: _spans_layers(k, owner) for k in named}
    bases = {
        k.atom: _base_name(
            k, roles.get(k.atom, Counter()), users[k.atom], inference.kinds, spans_layers[k.atom]
        )
        for k in named
    }
    for k in named:  # partial rotary positions: the rotated part and the rest
        siblings = [
            other
            for other in named
            if other is not k and bases[other.atom] == "qk" and users[other.atom] == users[k.atom]
        ]
        if (
            bases[k.atom] == "qk"
            and siblings
            and isinstance(k.group, Rotary)
            and not any(isinstance(other.group, Rotary) for other in siblings)
        ):
            bases[k.atom] = "rot"
            bases |= {other.atom: "rest" for other in siblings}
    streams = _stream_suffixes({k.atom: users[k.atom] for k in named if bases[k.atom] == "stream"})
    out: dict[Atom, str] = {}
    for k in named:
        numbers = layer_label(users[k.atom])
        if not has_sides:
            numbers = re.sub(r"^[a-z]+\.?", "", numbers)
        if bases[k.atom] == "stream":
            numbers = streams[k.atom]
        out[k.atom] = ".".join(t for t in (bases[k.atom], numbers) if t)
    return _make_unique(out, users)


def _stream_suffixes(users: Mapping[Atom, Sequence[str]]) -> dict[Atom, str]:
    """Return a suffix for each of several streams: the side of most parameters, or a number."""
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
    """Make names unique: by a word that only one kind's parameters share, or by a number."""
    for name, number in Counter(names.values()).items():
        if number < 2:
            continue
        atoms = [a for a, n in names.items() if n == name]
        words = [_common_words(users[a]) for a in atoms]
        distinct = [
            next(
                (
                    w
                    for w in atom_words
                    if all(w not in other for other in words if other is not atom_words)
                ),
                None,
            )
            for atom_words in words
        ]
        base, _, layer = name.partition(".")
        for i, (atom, word) in enumerate(zip(atoms, distinct, strict=True)):
            if word is not None and len(set(distinct)) == len(distinct):
                names[atom] = ".".join(t for t in (base, word, layer) if t)
            else:
                names[atom] = ".".join(t for t in (base, layer, str(i)) if t)
    used: set[str] = set()
    for atom, name in names.items():
        unique, i = name, 1
        while unique in used:
            unique, i = f"{name}.{i}", i + 1
        names[atom] = unique
        used.add(unique)
    return names


def _common_words(names: Sequence[str]) -> list[str]:
    """Return the words that all parameter names share, without generic ones."""
    counts = Counter(
        w
        for n in names
        for w in set(re.split(r"[.]", n))
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", w)
    )
    return [w for w, number in counts.items() if number == len(names) and w not in _GENERIC_WORDS]


def _base_name(
    kind: Kind,
    roles: Counter[str],
    users: Sequence[str],
    kinds: Mapping[Atom, Kind],
    spans_layers: bool,
) -> str:
    """Return the first part of a name, by the role of a kind."""
    if roles["head"]:
        parent = kind.over
        if parent is not None:
            return "rep"
        if any(k.over is kind.atom and k.has_restriction("batch") for k in kinds.values()):
            return "kv"
        return "head"
    if roles["contracted"] and (kind.over is not None or roles["free"] == 0) and not spans_layers:
        return "qk"
    if roles["free"] and not spans_layers:
        return "vo"
    if any(k.over is kind.atom for k in kinds.values()):
        return "expert" if any("expert" in u for u in users) else "group"
    if spans_layers:
        return "stream"
    if re.search(r"\d", layer_label(users)):
        return "ffn"
    return (
        "embed"
        if any("embed" in u for u in users) and not kind.has_restriction("softmax")
        else _module_word(users)
    )  # learned tokens take the name of their parameter


def _spans_layers(kind: Kind, owner: Mapping[Axis, str]) -> bool:
    """Return whether parameters of several layers have a kind, or those of a layer and those around
    it.

    A kind that one of two layers writes and the other reads is internal to a small network (net.0,
    net.2), and does not.
    """
    sides: dict[str, set[int]] = {}
    for occurrence in kind.occurrences:
        match = re.match(r"(.*?\.)?\d+(?=\.)", owner[occurrence[0]])
        sides.setdefault(match.group() if match else "", set()).add(
            kind.exponents.get(occurrence, 0)
        )
    lists = {re.sub(r"\d+$", "", layer) for layer in sides}
    return len(sides) > 2 or (
        len(sides) == 2
        and (len(lists) > 1 or any({1, -1} <= exponents for exponents in sides.values()))
    )


def _module_word(users: Sequence[str]) -> str:
    """Return the most specific word in the name of the first parameter."""
    words = [w for w in users[0].split(".") if w.lower() not in _GENERIC_WORDS and not w.isdigit()]
    return re.sub(r"[^A-Za-z0-9_]", "", words[-1]) if words else "hidden"
