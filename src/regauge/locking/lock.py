"""The lock: a backbone moved by a secret element, between an embedding and a head that are not. It
is obfuscation, not encryption.

Moving every tensor changes nothing that anyone can see. A lock is a mismatch between parts: it
moves the *backbone* alone, so that embedding and head no longer fit it, and who has the key can
make them fit again. Nothing in the weights is hidden: `docs/lock.md` says who can undo a lock
without its key. For files at rest there is encryption: `regauge.locking.seal`.

The element is drawn from the key and from the digest of the plain model, so that one key locks many
models by unrelated elements. What was done is written down in the lock's record
(`docs/formats.md`), under "regauge_lock" in config.json or in the metadata of a bare file, with
three tags (HMAC-SHA256 under keys derived from the key, the tag's name and the digest):

    record      the record itself: what the element is drawn from
    structure   and the names, dtypes and shapes of the backbone: what training leaves as it is
    data        and every tensor of the model, by name, dtype, shape and SHA-256

The record also lists the other files of the locked folder with their SHA-256 (`files`), and has the
digest of the plain weights that unlocking must give (`plain`). Records of version 1 have neither.

These are pure functions on states; `regauge.locking.lock_files` reads and writes checkpoints.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.checkpoints.headers import DTYPE_NAMES, FLOATS
from regauge.checkpoints.reader import Checkpoint
from regauge.checkpoints.writer import digests_of
from regauge.core import axes as ax
from regauge.core.canonical import canonical_json
from regauge.core.check import check, check_spec, require
from regauge.core.element import Element, element, match_spaces
from regauge.core.groups import Kind
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import LockError, TamperedModelError, WrongKeyError
from regauge.locking.keys import Key

if TYPE_CHECKING:
    import torch

    from regauge.core.action import State

VERSION = 2
UNKNOWN = "0" * 64  # in place of a digest that nobody has
SCHEME = "backbone"  # what is moved
FIELD = "regauge_lock"
TAGS = ("record", "structure", "data")


class LockGroup(NamedTuple):
    """The subgroup that a lock draws from, and whether norms are folded first."""

    within: Kind
    fold: bool


# What --group names. Permutations and signs unlock bit for bit and train with any of SGD, Adam and
# AdamW; rotations unlock to rounding.
LOCKS: dict[str, LockGroup] = {
    "permutation": LockGroup("permutation", fold=False),
    "signed": LockGroup("signed", fold=False),
    "rotation": LockGroup("orthogonal", fold=True),
}
DEFAULT_GROUP = (
    "signed"  # the largest that unlocks bit for bit and trains with the user's optimizer
)

# The dtype and shape of every tensor by name, as a checkpoint's headers have them.
Header = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Record:
    """What a lock did, without its secret. `spaces` is None where all spaces of the backbone move;
    `digest` is that of the plain model.

    `files` has the SHA-256 of every other file of the folder that must not change, by name; None
    where no folder was locked. `plain` is the digest of the weights that unlocking gives, bit for
    bit; `UNKNOWN` for rotations, and for what was trained since. Both are None or `UNKNOWN` in
    records of version 1, which do not have them.
    """

    family: str
    group: str
    key: str
    digest: str
    layout: str
    spaces: tuple[str, ...] | None = None
    folded: bool = False
    tags: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(TAGS, UNKNOWN))
    files: Mapping[str, str] | None = None
    plain: str = UNKNOWN
    version: int = VERSION

    def body(self) -> dict[str, Any]:
        """All but the tags: what they authenticate."""
        spaces = None if self.spaces is None else list(self.spaces)
        more = (
            {"files": None if self.files is None else dict(self.files), "plain": self.plain}
            if self.version > 1
            else {}
        )
        return {
            "version": self.version,
            "scheme": SCHEME,
            "family": self.family,
            "group": self.group,
            "spaces": spaces,
            "folded": self.folded,
            "key": self.key,
            "digest": self.digest,
            "layout": self.layout,
            **more,
        }

    def to_dict(self) -> dict[str, Any]:
        return {**self.body(), "tags": dict(self.tags)}


class LockedState(NamedTuple):
    """A locked state, its spec (a folded one where norms were folded) and the record that goes with
    it.
    """

    spec: Spec
    state: dict[str, torch.Tensor]
    record: Record


def lock(
    spec: Spec,
    state: State,
    key: Key,
    *,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
) -> LockedState:
    """Lock a state: its backbone moved by the key's element, everything else as it is. `spec`
    describes the plain state.

    >>> # spec, state, record = lock(spec_of(model), model.state_dict(), key); plain = unlock(spec,
    state, record, key)
    """
    from regauge.core.action import apply
    from regauge.core.fold import fold_norms

    require(check(spec, state), f'the state does not fit the spec "{spec.family}"')
    described, record = draft_record(
        spec, key, model_digest(header_of(state), digests_of(state)), group, spaces
    )
    g = locked_element(described, record, key, tags=False)
    moved = apply(g, fold_norms(spec, state)[1] if record.folded else state, "backbone")
    return LockedState(
        described, moved, add_tags(record, key, described, header_of(moved), digests_of(moved))
    )


def unlock(
    spec: Spec, state: State, record: Record, key: Key, *, retrained: bool = False
) -> dict[str, torch.Tensor]:
    """Undo `lock`: permutations and signs bit for bit, rotations to rounding (and norms stay
    folded). All is checked before anything is computed.

    With `retrained` the data may have changed since the lock, by training; the structure may not.
    """
    from regauge.core.action import apply

    g = locked_element(spec, record, key)
    verify_tags(record, key, g.spec, header_of(state), None if retrained else digests_of(state))
    return apply(~g, state, "backbone")


def draft_record(
    spec: Spec,
    key: Key,
    digest: str,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
) -> tuple[Spec, Record]:
    """The record of a lock that is still to be made, without its tags, and the spec that its
    element is of.
    """
    key.require("lock")
    if group not in LOCKS:
        raise LockError(f'there is no lock by "{group}"', hint=f"groups are {', '.join(LOCKS)}")
    named = (
        None
        if spaces is None
        else tuple(sorted({spaces} if isinstance(spaces, str) else set(spaces)))
    )
    folded = LOCKS[group].fold and bool(spec.norms or spec.scales)
    described = element_spec(spec, folded)
    chosen = _select_spaces(described, named)
    joints = _spaces_of(described, "backbone") & (
        _spaces_of(described, "embed") | _spaces_of(described, "head")
    )
    moving = [name for name in chosen if not _is_trivial(described, name, group)]
    if not joints & set(moving):
        raise LockError(
            f"nothing would be locked: {', '.join(moving) or 'no space'} can move without any "
            "effect",
            hint=f"a lock moves a space that joins the parts: {', '.join(sorted(joints))}"
            if joints
            else "the spec has no embedding or head beside its backbone: a spec file says which "
            "tensors are which (docs/adding-a-model.md)",
        )
    layout = _layout_digest(described, chosen, group)
    exact = LOCKS[group].within != "orthogonal" and not folded
    return described, Record(
        spec.family,
        group,
        key.id,
        digest,
        layout,
        named,
        folded,
        plain=digest if exact else UNKNOWN,
    )


def element_spec(spec: Spec, folded: bool) -> Spec:
    """The spec that a lock's element is of: the model's own, or that of its folded form."""
    from regauge.core.fold import folded_spec

    return folded_spec(spec) if folded and (spec.norms or spec.scales) else spec


def locked_element(spec: Spec, record: Record, key: Key, *, tags: bool = True) -> Element:
    """The element that locked a model: what its edges need to use it. The key, the record and the
    model's layout are checked first.

    `spec` is that of the locked model, stored or live: an element depends on its spaces only.
    """
    key.require("lock")
    if not hmac.compare_digest(key.id.encode(), record.key.encode()):
        raise WrongKeyError(
            f"the model was locked by the key {record.key}, and this is {key.id}",
            hint="give the key that locked it",
        )
    if tags:
        _require_tag(record, key, "record", None, "its lock record was changed")
    require(check_spec(spec), "the model's config makes no sense", hint="restore config.json")
    described = element_spec(spec, record.folded)
    chosen = _select_spaces(described, record.spaces)
    if (
        spec.family != record.family
        or _layout_digest(described, chosen, record.group) != record.layout
    ):
        raise TamperedModelError(
            f'the model was locked as a "{record.family}" with other spaces than its config now '
            "says",
            hint="restore config.json: the number and sizes of layers, heads and FFNs must be "
            "those it was locked with",
        )
    drawn = element(
        described,
        key.derive("lock/element", bytes.fromhex(record.digest)),
        within=LOCKS[record.group].within,
        spaces=chosen,
    )
    return Element(
        described, {name: member for name, member in drawn.members.items() if name in chosen}
    )  # a name also stands for longer ones


def add_tags(
    record: Record, key: Key, spec: Spec, header: Header, digests: Mapping[str, bytes]
) -> Record:
    """The record with its three tags, for a model with this header and these digests."""
    messages = {
        "record": None,
        "structure": _structure_message(spec, header),
        "data": _data_message(header, digests),
    }
    return replace(
        record,
        tags={name: _compute_tag(record, key, name, message) for name, message in messages.items()},
    )


def renew_tags(
    before: Record,
    record: Record,
    key: Key,
    spec: Spec,
    header: Header,
    digests: Mapping[str, bytes],
) -> Record:
    """The record of a model that may have been trained since it was locked, with tags that fit it
    now. `before` is the record that it had.

    If the data are another model's, the plain weights are not known any more.
    """
    same = _has_valid_tag(before, key, "data", _data_message(header, digests))
    return add_tags(
        replace(record, plain=before.plain if same else UNKNOWN), key, spec, header, digests
    )


def verify_tags(
    record: Record, key: Key, spec: Spec, header: Header, digests: Mapping[str, bytes] | None
) -> str | None:
    """Refuse a model that is not as it was locked. Without digests (of a model trained since then)
    its data may differ, and its dtype.

    Returns the dtype that all of it was locked in, where that is another one now.
    """
    _require_tag(record, key, "record", None, "its lock record was changed")
    if digests is not None:
        _require_tag(
            record,
            key,
            "structure",
            _structure_message(spec, header),
            "names, shapes or dtypes of its backbone were changed",
        )
        why = "its data were changed"
        hint = (
            "restore it from a copy; if it was trained while locked: unlock --retrained, or "
            "lock --reseal"
        )
        _require_tag(record, key, "data", _data_message(header, digests), why, hint)
        return None
    structure = _structure_message(spec, header)
    if _has_valid_tag(record, key, "structure", structure):
        return None
    for dtype in (
        FLOATS if len({row[1] for row in structure} & FLOATS.keys()) == 1 else ()
    ):  # trained in another precision, all of it
        cast = {
            name: (dtype if was in FLOATS else was, shape) for name, (was, shape) in header.items()
        }
        if _has_valid_tag(record, key, "structure", _structure_message(spec, cast)):
            return dtype
    raise _tampered_error(
        "names, shapes or dtypes of its backbone were changed",
        "training keeps them: is it a model that was locked by this record?",
    )


def record_of(source: Any) -> Record | None:
    """The lock's record of a checkpoint, a config (a mapping) or a live module, or None if it is
    not locked.
    """
    if isinstance(source, Checkpoint):
        found = [(source.config or {}).get(FIELD)]
        for shard in source.files.values():
            text = (shard.metadata or {}).get(FIELD)
            found.append(None if text is None else _parse_json(text))
        there = [value for value in found if value is not None]
        if any(value != there[0] for value in there):
            raise _tampered_error("it has two lock records that differ")
        value = there[0] if there else None
    elif isinstance(source, Mapping):
        value = source.get(FIELD)
    else:
        value = getattr(getattr(source, "config", None), FIELD, None)
    return None if value is None else read_record(value)


def read_record(value: Any) -> Record:
    """A record out of its JSON. Whether it is genuine is not looked at: that takes the key."""
    if (
        isinstance(value, Mapping)
        and type(value.get("version")) is int
        and value["version"] > VERSION
    ):
        raise LockError(
            f"the lock has format version {value['version']}; this regauge reads up to {VERSION}",
            hint="upgrade regauge",
        )
    try:
        spaces = value["spaces"]
        tags = {name: _parse_hex(value["tags"][name], 64) for name in TAGS}
        record = Record(
            family=_parse_text(value["family"]),
            group=_parse_text(value["group"]),
            key=_parse_hex(value["key"], 16),
            digest=_parse_hex(value["digest"], 64),
            layout=_parse_hex(value["layout"], 64),
            spaces=None if spaces is None else tuple(_parse_text(name) for name in spaces),
            folded=value["folded"],
            tags=tags,
            files=_parse_files(value["files"]) if value["version"] != 1 else None,
            plain=_parse_hex(value["plain"], 64) if value["version"] != 1 else UNKNOWN,
            version=value["version"],
        )
        if type(record.version) is not int or record.version < 1:
            raise ValueError
        if (
            record.to_dict() != dict(value)
            or type(record.folded) is not bool
            or record.group not in LOCKS
        ):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _tampered_error("its lock record is damaged") from None
    return record


def require_locked(source: Any, where: object) -> Record:
    """The record of a model that must have one."""
    record = record_of(source)
    if record is None:
        raise LockError(
            f"{where} is not locked", hint="regauge lock MODEL -k KEY -o OUT locks a model"
        )
    return record


def require_plain(source: Any, where: object) -> None:
    """Refuse a model that is locked already."""
    record = record_of(source)
    if record is not None:
        raise LockError(
            f"{where} is locked already, by the key {record.key}",
            hint="regauge rekey LOCKED -k OLD --to NEW -o OUT changes its key; regauge lock "
            "--reseal renews its commitment",
        )


def model_digest(header: Header, digests: Mapping[str, bytes]) -> str:
    """The SHA-256 of a model: of the canonical JSON of its tensors by name, dtype, shape and
    SHA-256.
    """
    return hashlib.sha256(
        canonical_json(
            {"regauge": "model", "version": 1, "tensors": _data_message(header, digests)}
        )
    ).hexdigest()


def header_of(state: State | Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    if isinstance(state, Checkpoint):
        return {name: (entry.dtype, entry.shape) for name, entry in state.entries.items()}
    return {
        name: (DTYPE_NAMES.get(str(t.dtype).removeprefix("torch."), str(t.dtype)), tuple(t.shape))
        for name, t in state.items()
    }


def _data_message(header: Header, digests: Mapping[str, bytes]) -> list[Any]:
    return [
        [name, dtype, list(shape), digests[name].hex()]
        for name, (dtype, shape) in sorted(header.items())
    ]


def _structure_message(spec: Spec, header: Header) -> list[Any]:
    """The backbone's tensors by name, dtype and shape, without the path that all of them share: it
    differs between a model and its base.
    """
    names = [
        name
        for name, entry in stored_tensors(spec).items()
        if spec.parts.get(entry.pattern) == "backbone" and name in header
    ]
    lowest, highest = min(names, default="").split("."), max(names, default="").split(".")
    same = next((i for i, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b), 0)
    cut = sum(len(part) + 1 for part in lowest[:same])
    return sorted([name[cut:], header[name][0], list(header[name][1])] for name in names)


def _compute_tag(record: Record, key: Key, name: str, message: Any) -> str:
    secret = key.derive(f"lock/{name}", bytes.fromhex(record.digest))
    return hmac.digest(secret, canonical_json([record.body(), message]), "sha256").hex()


def _has_valid_tag(record: Record, key: Key, name: str, message: Any) -> bool:
    return hmac.compare_digest(
        _compute_tag(record, key, name, message).encode(), record.tags[name].encode()
    )


def _require_tag(
    record: Record, key: Key, name: str, message: Any, why: str, hint: str | None = None
) -> None:
    if not _has_valid_tag(record, key, name, message):
        raise _tampered_error(why, hint)


def _tampered_error(why: str, hint: str | None = None) -> TamperedModelError:
    return TamperedModelError(
        f"the model is not as it was locked: {why}", hint=hint or "restore it from a copy"
    )


def _spaces_of(spec: Spec, part: str) -> set[str]:
    return {
        space
        for name, text in spec.tensors.items()
        if spec.parts.get(name) == part
        for space in ax.spaces(text)
    }


def _select_spaces(spec: Spec, named: tuple[str, ...] | None) -> list[str]:
    """The spaces of the backbone that a lock moves, those with no more than the identity
    included.
    """
    inside = _spaces_of(spec, "backbone")
    wanted = inside if named is None else match_spaces(spec, named) & inside
    return [name for name in spec.spaces if name in wanted]


def _is_trivial(spec: Spec, name: str, group: str) -> bool:
    allowed, size = spec.spaces[name].group.within(LOCKS[group].within), spec.spaces[name].size
    return allowed.bits(size) + allowed.dim(size) == 0


def _layout_digest(spec: Spec, chosen: Iterable[str], group: str) -> str:
    """The SHA-256 of all that an element's draw depends on: spaces with size, parent, and the group
    that is drawn from.
    """
    rows = [
        [
            name,
            spec.spaces[name].size,
            spec.spaces[name].over,
            str(spec.spaces[name].group.within(LOCKS[group].within)),
        ]
        for name in chosen
    ]
    return hashlib.sha256(canonical_json(sorted(rows, key=lambda row: str(row[0])))).hexdigest()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _tampered_error("its lock record is damaged") from None


def _parse_hex(text: Any, n: int) -> str:
    if not isinstance(text, str) or len(text) != n or not set(text) <= set("0123456789abcdef"):
        raise ValueError
    return text


def _parse_files(value: Any) -> dict[str, str] | None:
    """The list of files in a record."""
    if value is None:
        return None
    if (
        not isinstance(value, Mapping)
        or len(value) > 10_000
        or not all(isinstance(name, str) and 0 < len(name) <= 1024 for name in value)
    ):
        raise ValueError
    return {name: _parse_hex(digest, 64) for name, digest in value.items()}


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError
    return value
