"""Sessions: the server's state of each client, and the admission of new ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from regauge.errors import FrameError
from regauge.split.protocol.frames import CODECS, Frame, Limits, Value, decode
from regauge.split.protocol.messages import PROTOCOL
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.memory import Cost
from regauge.split.server.quotas import require_session_quota

Tensor = torch.Tensor


@dataclass
class PendingForward:
    """A forward pass that awaits its backward pass.

    Attributes:
        request: The FORWARD frame, to run the pass again.
        output: Output of the blocks; None after a step has changed the weights.
        inputs: Inputs that need gradients.
        cost: Memory of the pass; None for one of a checkpoint, until it is run again.
    """

    request: Frame
    output: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    cost: Cost | None = None


@dataclass
class Cache:
    """Keys and values of a text that is being generated.

    Attributes:
        value: The cache of the model's library.
        turn: Number of the last turn; turns are numbered like requests.
        reply: Reply to the last turn.
        check: Checksum of the last turn's request.
        length: Tokens.
        size: Bytes of the streams that the tokens arrived in.
        held: Bytes of keys, values and the last reply.
    """

    value: Any
    turn: int = 0
    reply: bytes = b""
    check: int = 0
    length: int = 0
    size: int = 0
    held: int = 0


@dataclass
class Session:
    """State of one session.

    Attributes:
        peer: Name of the client.
        codec: Compression of replies.
        limits: Largest frame that the client accepts.
        done: Number of the last request that was answered.
        saved: Number of the last request that a checkpoint covers.
        check: Checksum of the last request.
        reply: Reply to the last request.
        last_seen: Monotonic time of the last request.
        backbone: The session's own copy, with averaging.
        is_away: Whether the current round no longer waits for the session.
        pending: Open passes by the number of their request.
        caches: Generation caches by name, the least recently used first.
        has_gradients: Whether a pass was closed since the last loss was counted.
    """

    peer: str
    codec: str
    limits: Limits
    done: int = 0
    saved: int = 0
    check: int = 0
    reply: bytes = b""
    last_seen: float = 0.0
    backbone: TrainableBackbone | None = None
    is_away: bool = False
    pending: dict[int, PendingForward] = field(default_factory=dict)
    caches: OrderedDict[str, Cache] = field(default_factory=OrderedDict)
    has_gradients: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a checkpoint stores, beside tensors and frames."""
        limits = [self.limits.payload, self.limits.table, self.limits.tensors, self.limits.axes]
        out = {
            "peer": self.peer,
            "codec": self.codec,
            "limits": limits,
            "done": self.done,
            "check": self.check,
        }
        return out | {"away": self.is_away, "has_gradients": self.has_gradients}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], reply: bytes) -> Session:
        """Rebuild a session from a checkpoint.

        Raises:
            ValueError: A field is missing, or has the wrong type.
        """
        fields = {"peer": str, "codec": str, "limits": list, "done": int, "check": int}
        invalid = next(
            (
                name
                for name, expected_type in fields.items()
                if type(saved.get(name)) is not expected_type
            ),
            None,
        )
        if invalid is not None:
            raise ValueError(f'"{invalid}" of a session is missing or has the wrong type')
        is_away, has_gradients = saved.get("away", False), saved.get("has_gradients", True)
        if (
            saved["codec"] not in CODECS
            or not is_limits(saved["limits"])
            or min(saved["done"], saved["check"]) < 0
        ):
            raise ValueError("the codec, limits or numbers of a session are out of range")
        if type(is_away) is not bool or type(has_gradients) is not bool:
            raise ValueError("the flags of a session must be true or false")
        session = cls(
            saved["peer"],
            saved["codec"],
            Limits(*saved["limits"]),
            saved["done"],
            saved["done"],
            saved["check"],
            reply,
            time.monotonic(),
        )
        session.is_away, session.has_gradients = is_away, has_gradients
        return session


def parse_hello(frame: Frame, about: Mapping[str, Value], key: str) -> tuple[str, str, Limits]:
    """Validate a HELLO; return the session's name, its codec and the client's limits.

    Args:
        frame: The HELLO.
        about: Description of the server's model.
        key: Id of the key that the backbone is locked with, or "".

    Raises:
        FrameError: The client has another protocol, model or key, or a field is invalid.
    """
    if frame.values.get("protocol") != PROTOCOL:
        raise FrameError(
            "version",
            f"the protocol must be {PROTOCOL}, got {frame.values.get('protocol')!r:.20}",
            hint="update the older side",
        )
    for field_name, expected in about.items():
        if frame.values.get(field_name) != expected:
            other = str(frame.values.get(field_name))[:64]
            raise FrameError(
                "model",
                f"{field_name} must be {expected}, as on the server, got {other}",
                hint="use the same model and dtype on both sides",
            )
    client_key = frame.values.get("key")
    if client_key and key and client_key != key:
        raise FrameError(
            "key",
            f"the key must be {key}, which locks the backbone, got {client_key!r:.40}",
            hint="use the key of the server's backbone",
        )
    codec, limits = frame.values.get("codec"), frame.values.get("limits")
    if codec not in CODECS:
        raise FrameError("codec", f"unknown codec {codec!r:.20}")
    if not is_limits(limits):
        raise FrameError("limit", '"limits" must be four numbers > 0')
    name = session_name(frame)
    if not is_session_name(name):
        raise FrameError("session", "a session's name must be 32 letters and digits")
    return name, str(codec), Limits(*limits)


def is_limits(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a list of four positive integers."""
    return (
        isinstance(value, list) and len(value) == 4 and all(type(n) is int and n > 0 for n in value)
    )


def is_session_name(name: str) -> bool:
    """Return whether a name has 32 ASCII letters and digits."""
    return len(name) == 32 and name.isascii() and name.isalnum()


def restore_sessions(
    saved: Mapping[str, Mapping[str, Any]], frames: Mapping[str, bytes], limits: Limits
) -> dict[str, Session]:
    """Rebuild the sessions of a checkpoint, with their last replies and open passes.

    Raises:
        ValueError: A session has an invalid field, or a frame belongs to none.
        FrameError: A frame is damaged.
    """
    if not all(is_session_name(name) for name in saved):
        raise ValueError("a session's name must be 32 letters and digits")
    sessions = {
        name: Session.from_dict(fields, frames.get(f"{name}/reply", b""))
        for name, fields in saved.items()
    }
    for label, data in frames.items():
        name, _, number = label.partition("/")
        if name not in sessions or not (
            number == "reply" or (number.isascii() and number.isdigit() and len(number) < 20)
        ):
            raise ValueError(f'the frame "{label[:100]}" belongs to no session')
        frame = decode(data, limits)
        if number != "reply":
            sessions[name].pending[int(number)] = PendingForward(frame)
    return sessions


def session_name(frame: Frame) -> str:
    """Return the session that a frame names."""
    name = frame.values.get("session")
    if not isinstance(name, str):
        raise FrameError("session", 'the frame must have a "session", got none')
    return name


def find_session(sessions: Mapping[str, Session], frame: Frame, peer: str) -> Session:
    """Return the session that a frame names; raise FrameError if it is not this client's."""
    session = sessions.get(session_name(frame))
    if session is None or session.peer != peer:
        raise FrameError(
            "session", "the client has no session of this name", hint="send HELLO first"
        )
    return session


def sessions_to_evict(
    sessions: Mapping[str, Session], peer: str, client_limit: int, total_limit: int, idle: float
) -> list[str]:
    """Return the idle sessions to evict for a new one: first the client's, then any, oldest first.

    Args:
        sessions: All sessions, by name.
        peer: Client of the new session.
        client_limit: Sessions of a client; 0 is unlimited.
        total_limit: Sessions of all clients.
        idle: Seconds without a request after which a session may be evicted.

    Raises:
        FrameError: There are not enough idle sessions; none is evicted then.
    """
    evicted: list[str] = []
    now = time.monotonic()
    for is_client, limit in ((True, client_limit), (False, total_limit)):
        candidates = sorted(
            (s.last_seen, n)
            for n, s in sessions.items()
            if n not in evicted and (not is_client or s.peer == peer)
        )
        oldest = candidates[: max(0, len(candidates) + 1 - limit)] if limit else []
        if any(now - last_seen < idle for last_seen, _ in oldest):
            if is_client:
                require_session_quota(peer, len(candidates), client_limit)
            raise FrameError(
                "full",
                f"the server has reached its limit of {total_limit} sessions",
                hint="end one, or retry later",
            )
        evicted += [name for _, name in oldest]
    return evicted
