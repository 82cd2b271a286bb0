"""The lock: a backbone transformed by a secret element, with embedding and head unchanged.

A lock is obfuscation, not encryption. Transforming every tensor would not change the function. A
lock transforms the *backbone* alone, so that embedding and head no longer fit it; the key holder
can make them fit again. The weights themselves are not hidden: `docs/guides/lock.md` lists the
attackers who can undo a lock without its key. To encrypt files at rest, use `regauge.locking.seal`.

The element is derived from the key and the digest of the plain model, so that one key locks many
models by unrelated elements. The lock record (`docs/formats-keys.md`) is stored under
"regauge_lock" in config.json, or in the metadata of a single file. It has three tags, HMAC-SHA256
under keys derived from the key, the name of the tag and the digest:

    record      authenticates the record, from which the element is derived
    structure   also the names, dtypes and shapes of the backbone, which training does not change
    data        also every tensor of the model, by name, dtype, shape and SHA-256

The record also lists the other files of the locked folder with their SHA-256 (`files`), and the
digest of the plain weights that unlocking must reproduce (`plain`). Records of version 1 have
neither.

The functions here are pure functions of states; `regauge.locking.locked_checkpoints` reads and
writes checkpoints.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.checkpoints.headers import DTYPE_NAMES, FLOATS
from regauge.checkpoints.reader import LOCK_FIELD, Checkpoint
from regauge.checkpoints.writer import digests_of
from regauge.core import axes as ax
from regauge.core.canonical import canonical_json
from regauge.core.check import check, check_spec, require
from regauge.core.element import Element, element, match_spaces
from regauge.core.groups import Kind
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import Hint, LockError, TamperedModelError, WrongKeyError
from regauge.locking.keys import Key

if TYPE_CHECKING:
    import torch

    from regauge.core.action import State

VERSION = 2
UNKNOWN = "0" * 64  # in place of a digest that is not known
SCHEME = "backbone"  # the part that is transformed
TAGS = ("record", "structure", "data")


class LockGroup(NamedTuple):
    """The subgroup that a lock samples from, and whether norms are folded first."""

    within: Kind
    fold: bool


# The values of --group. Permutations and signs unlock bit for bit and train with SGD, Adam and
# AdamW; rotations unlock up to rounding.
LOCKS: dict[str, LockGroup] = {
    "permutation": LockGroup("permutation", fold=False),
    "signed": LockGroup("signed", fold=False),
    "rotation": LockGroup("orthogonal", fold=True),
}
DEFAULT_GROUP = "signed"  # the largest that unlocks bit for bit and trains with Adam too

# The dtype and shape of every tensor by name, as in the headers of a checkpoint.
Header = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Record:
    """The public record of a lock.

    Attributes:
        family: The family of the model.
        group: The name of the lock's group, a key of `LOCKS`.
        key: The id of the key.
        digest: The digest of the plain model.
        layout: The digest of the spaces that the element acts on.
        spaces: The names that select these spaces; None if all spaces of the backbone are locked.
        folded: Whether norms were folded.
        tags: The tags by name.
        files: The SHA-256 of every other file of the folder that must not change, by name. None if
            no folder was locked, and in records of version 1.
        plain: The digest of the weights that unlocking reproduces bit for bit. `UNKNOWN` for
            rotations, after training, and in records of version 1.
        version: The format version.
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
        """Return all fields but the tags, which authenticate them."""
        spaces = None if self.spaces is None else list(self.spaces)
        version_2 = (
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
            **version_2,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {**self.body(), "tags": dict(self.tags)}


class LockedState(NamedTuple):
    """A locked state, its spec (after folding, if norms were folded) and its record."""

    spec: Spec
    state: dict[str, torch.Tensor]
    record: Record


def lock_state(
    spec: Spec,
    state: State,
    key: Key,
    *,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
) -> LockedState:
    """Lock a state: transform its backbone by the element of a key.

    Args:
        spec: The spec of the plain state.
        state: The plain state.
        key: A key for locks.
        group: The group to sample from: "permutation", "signed" or "rotation".
        spaces: Lock only these spaces. Default: all of the backbone.

    Returns:
        The locked state, with its spec and record.

    Raises:
        LockError: The group is unknown, or the lock would have no effect.

    Example:
        >>> # spec, state, record = lock_state(spec_of(model), model.state_dict(), key)
        >>> # plain = unlock_state(spec, state, record, key)
    """
    from regauge.core.action import apply
    from regauge.core.fold import fold_norms

    require(check(spec, state), f'the state does not fit the spec "{spec.family}"')
    locked_spec, record = draft_record(
        spec, key, model_digest(header_of(state), digests_of(state)), group, spaces
    )
    g = locked_element(locked_spec, record, key, tags=False)
    locked = apply(g, fold_norms(spec, state)[1] if record.folded else state, "backbone")
    return LockedState(
        locked_spec,
        locked,
        add_tags(record, key, locked_spec, header_of(locked), digests_of(locked)),
    )


def unlock_state(
    spec: Spec, state: State, record: Record, key: Key, *, retrained: bool = False
) -> dict[str, torch.Tensor]:
    """Undo `lock_state`, bit for bit for permutations and signs, up to rounding for rotations.

    Folded norms stay folded. Everything is checked before anything is computed.

    Args:
        spec: The spec of the locked state.
        state: The locked state.
        record: Its record.
        key: The key that locked it.
        retrained: Accept data that training has changed since the lock; the structure must match.

    Raises:
        WrongKeyError: Another key locked the model.
        TamperedModelError: The record, the structure or the data were changed.
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
    """Return the spec of a lock's element, and the record of the lock without its tags.

    Args:
        spec: The spec of the plain model.
        key: A key for locks.
        digest: The digest of the plain model.
        group: The group to sample from.
        spaces: Lock only these spaces. Default: all of the backbone.

    Raises:
        LockError: The group is unknown, or the lock would have no effect.
    """
    key.require("lock")
    if group not in LOCKS:
        raise LockError(
            f'the group of a lock must be one of {", ".join(LOCKS)}, got "{group}"',
            hint=f"the default is {DEFAULT_GROUP}",
        )
    named = (
        None
        if spaces is None
        else tuple(sorted({spaces} if isinstance(spaces, str) else set(spaces)))
    )
    folded = LOCKS[group].fold and bool(spec.norms or spec.scales)
    locked_spec = element_spec(spec, folded)
    selected = _select_spaces(locked_spec, named)
    shared = _spaces_of(locked_spec, "backbone") & (
        _spaces_of(locked_spec, "embed") | _spaces_of(locked_spec, "head")
    )
    nontrivial = [name for name in selected if not _is_trivial(locked_spec, name, group)]
    if not shared & set(nontrivial):
        raise LockError(
            f"the lock would have no effect: {', '.join(nontrivial) or 'no space'} can be "
            "transformed without changing the function",
            hint=f"lock a space that the parts share: {', '.join(sorted(shared))}"
            if shared
            else "the spec has no embedding or head beside its backbone: a spec file assigns "
            "tensors to parts (docs/guides/adding-a-model.md)",
        )
    layout = _layout_digest(locked_spec, selected, group)
    exact = LOCKS[group].within != "orthogonal" and not folded
    return locked_spec, Record(
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
    """Return the spec of a lock's element: that of the model, or of its folded form."""
    from regauge.core.fold import folded_spec

    return folded_spec(spec) if folded and (spec.norms or spec.scales) else spec


def locked_element(spec: Spec, record: Record, key: Key, *, tags: bool = True) -> Element:
    """Derive the element that locked a model, after checking the key, the record and the layout.

    Args:
        spec: The spec of the locked model, stored or live: an element depends on its spaces only.
        record: The record of the lock.
        key: The key that locked it.
        tags: Check the tag of the record.

    Raises:
        WrongKeyError: Another key locked the model.
        TamperedModelError: The record or the config was changed.
    """
    key.require("lock")
    if not hmac.compare_digest(key.id.encode(), record.key.encode()):
        raise WrongKeyError(
            f"the model was locked by the key {record.key}, got {key.id}",
            hint="pass the key that locked it",
        )
    if tags:
        _require_tag(record, key, "record", None, "its lock record was changed")
    require(check_spec(spec), "the model's config is not consistent", hint="restore config.json")
    locked_spec = element_spec(spec, record.folded)
    selected = _select_spaces(locked_spec, record.spaces)
    if (
        spec.family != record.family
        or _layout_digest(locked_spec, selected, record.group) != record.layout
    ):
        raise TamperedModelError(
            f'the model was locked as a "{record.family}" with other spaces than its config '
            "declares",
            hint="restore config.json: the number and sizes of layers, heads and FFNs must be "
            "those of the locked model",
        )
    sampled = element(
        locked_spec,
        key.derive("lock/element", bytes.fromhex(record.digest)),
        within=LOCKS[record.group].within,
        spaces=selected,
    )
    # `spaces` also matches longer names.
    return Element(
        locked_spec, {name: member for name, member in sampled.members.items() if name in selected}
    )


def add_tags(
    record: Record, key: Key, spec: Spec, header: Header, digests: Mapping[str, bytes]
) -> Record:
    """Return the record with its three tags, for a model with this header and these digests."""
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
    """Return a record with new tags, for a model that may have been trained since it was locked.

    If the data have changed, the digest of the plain weights becomes `UNKNOWN`.

    Args:
        before: The previous record of the model.
        record: The record to tag.
        key: The key that locked it.
        spec: The spec of the model.
        header: Its header.
        digests: The SHA-256 of its tensors.
    """
    same = _has_valid_tag(before, key, "data", _data_message(header, digests))
    return add_tags(
        replace(record, plain=before.plain if same else UNKNOWN), key, spec, header, digests
    )


def verify_tags(
    record: Record, key: Key, spec: Spec, header: Header, digests: Mapping[str, bytes] | None
) -> str | None:
    """Raise if a model was changed since it was locked.

    Args:
        record: The record of the lock.
        key: The key that locked it.
        spec: The spec of the model.
        header: Its header.
        digests: The SHA-256 of its tensors; None for a model that was trained since, whose data
            and dtype may differ.

    Returns:
        The dtype that all weights were locked in, if it has changed; otherwise None.

    Raises:
        TamperedModelError: The record, the structure or the data were changed.
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
        hint = Hint(
            "restore it from a copy; if it was trained while locked: retrained=True, or "
            "regauge.locking.reseal",
            cli="restore it from a copy; if it was trained while locked: unlock --retrained, or "
            "lock --reseal",
        )
        message = _data_message(header, digests)
        _require_tag(record, key, "data", message, "its data were changed", hint)
        return None
    structure = _structure_message(spec, header)
    if _has_valid_tag(record, key, "structure", structure):
        return None
    # All of it may have been trained in another precision.
    for dtype in FLOATS if len({row[1] for row in structure} & FLOATS.keys()) == 1 else ():
        cast = {
            name: (dtype if current in FLOATS else current, shape)
            for name, (current, shape) in header.items()
        }
        if _has_valid_tag(record, key, "structure", _structure_message(spec, cast)):
            return dtype
    raise _tampered_error(
        "names, shapes or dtypes of its backbone were changed",
        "training does not change them; check that the record belongs to this model",
    )


def record_of(source: Any) -> Record | None:
    """Return the lock record of a checkpoint, a config (a mapping) or a live module.

    None if it is not locked.
    """
    if isinstance(source, Checkpoint):
        records = [_parse_json(r) if isinstance(r, str) else r for r in source.lock_records()]
        if any(value != records[0] for value in records):
            raise _tampered_error("it has two lock records that differ")
        value = records[0] if records else None
    elif isinstance(source, Mapping):
        value = source.get(LOCK_FIELD)
    else:
        value = getattr(getattr(source, "config", None), LOCK_FIELD, None)
    return None if value is None else read_record(value)


def read_record(value: Any) -> Record:
    """Parse a record from JSON values, without authenticating it, which requires the key.

    Raises:
        LockError: The format version is newer than this regauge.
        TamperedModelError: The record is damaged.
    """
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
    """Return the lock record of a model; raise LockError if it is not locked."""
    record = record_of(source)
    if record is None:
        raise LockError(
            f"{where} is not locked",
            hint=Hint(
                "regauge.lock(model, key) locks one",
                cli="regauge lock MODEL -k KEY -o OUT locks one",
            ),
        )
    return record


def require_plain(source: Any, where: object) -> None:
    """Raise LockError if a model is locked already."""
    record = record_of(source)
    if record is not None:
        raise LockError(
            f"{where} is locked already, by the key {record.key}",
            hint=Hint(
                "regauge.locking.rekey changes its key; regauge.locking.reseal "
                "renews its commitment",
                cli="regauge rekey LOCKED -k OLD --to NEW -o OUT changes its key; "
                "regauge lock LOCKED -k KEY --reseal renews its commitment",
            ),
        )


def model_digest(header: Header, digests: Mapping[str, bytes]) -> str:
    """Return the digest of a model.

    It is the SHA-256 of the canonical JSON of name, dtype, shape and SHA-256 of its tensors.
    """
    return hashlib.sha256(
        canonical_json(
            {"regauge": "model", "version": 1, "tensors": _data_message(header, digests)}
        )
    ).hexdigest()


def header_of(state: State | Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype, by the safetensors name, and the shape of every tensor."""
    if isinstance(state, Checkpoint):
        return {name: (entry.dtype, entry.shape) for name, entry in state.entries.items()}
    return {
        name: (DTYPE_NAMES.get(str(t.dtype).removeprefix("torch."), str(t.dtype)), tuple(t.shape))
        for name, t in state.items()
    }


def _data_message(header: Header, digests: Mapping[str, bytes]) -> list[Any]:
    """Return name, dtype, shape and SHA-256 of every tensor, sorted by name."""
    return [
        [name, dtype, list(shape), digests[name].hex()]
        for name, (dtype, shape) in sorted(header.items())
    ]


def _structure_message(spec: Spec, header: Header) -> list[Any]:
    """Return name, dtype and shape of the backbone's tensors.

    Names lack the prefix that all of them share: it differs between a model and its base model.
    """
    names = [
        name
        for name, entry in stored_tensors(spec).items()
        if spec.parts.get(entry.pattern) == "backbone" and name in header
    ]
    first, last = min(names, default="").split("."), max(names, default="").split(".")
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    cut = sum(len(part) + 1 for part in first[:shared])
    return sorted([name[cut:], header[name][0], list(header[name][1])] for name in names)


def _compute_tag(record: Record, key: Key, name: str, message: Any) -> str:
    """Return the HMAC-SHA256 of the record and a message, under the derived key of a tag."""
    secret = key.derive(f"lock/{name}", bytes.fromhex(record.digest))
    return hmac.digest(secret, canonical_json([record.body(), message]), "sha256").hex()


def _has_valid_tag(record: Record, key: Key, name: str, message: Any) -> bool:
    return hmac.compare_digest(
        _compute_tag(record, key, name, message).encode(), record.tags[name].encode()
    )


def _require_tag(
    record: Record, key: Key, name: str, message: Any, reason: str, hint: str | None = None
) -> None:
    if not _has_valid_tag(record, key, name, message):
        raise _tampered_error(reason, hint)


def _tampered_error(reason: str, hint: str | None = None) -> TamperedModelError:
    return TamperedModelError(
        f"the model was changed since it was locked: {reason}",
        hint=hint or "restore it from a copy",
    )


def _spaces_of(spec: Spec, part: str) -> set[str]:
    return {
        space
        for name, text in spec.tensors.items()
        if spec.parts.get(name) == part
        for space in ax.spaces(text)
    }


def _select_spaces(spec: Spec, named: tuple[str, ...] | None) -> list[str]:
    """Return the spaces of the backbone that a lock acts on, including trivial ones."""
    backbone = _spaces_of(spec, "backbone")
    selected = backbone if named is None else match_spaces(spec, named) & backbone
    return [name for name in spec.spaces if name in selected]


def _is_trivial(spec: Spec, name: str, group: str) -> bool:
    """Return whether the identity is the only member of a space within a group."""
    allowed, size = spec.spaces[name].group.within(LOCKS[group].within), spec.spaces[name].size
    return allowed.bits(size) + allowed.dim(size) == 0


def _layout_digest(spec: Spec, selected: Iterable[str], group: str) -> str:
    """Return the SHA-256 of the spaces that determine a sampled element: size, parent and group."""
    rows = [
        [
            name,
            spec.spaces[name].size,
            spec.spaces[name].over,
            str(spec.spaces[name].group.within(LOCKS[group].within)),
        ]
        for name in selected
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
    """Parse the files of a record."""
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
