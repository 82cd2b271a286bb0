"""Sessions: what a server knows of each client that asks, and who may have one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from regauge.split.protocol.frames import CODECS, Frame, FrameError, Limits, Value, decode
from regauge.split.protocol.messages import PROTOCOL
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.memory import Cost
from regauge.split.server.quotas import require_session_quota

Tensor = torch.Tensor


@dataclass
class PendingForward:
    """A forward pass whose backward pass has not come yet. Its graph is for the weights that it was
    made with: a step makes it void.
    """

    request: Frame
    output: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    cost: Cost | None = None  # None in a pass out of a checkpoint, until it is run again


@dataclass
class Cache:
    """Keys and values of a text that is being generated. Its turns are numbered as a session's
    requests are.
    """

    value: Any
    turn: int = 0
    reply: bytes = b""
    check: int = 0
    length: int = 0  # tokens, and bytes of the streams that they came in
    size: int = 0
    held: int = 0  # bytes of keys, values and the last reply


@dataclass
class Session:
    peer: str
    codec: str
    limits: Limits
    done: int = 0
    saved: int = 0
    check: int = 0
    reply: bytes = b""
    last_seen: float = 0.0
    backbone: TrainableBackbone | None = None  # of its own, where copies are averaged
    is_away: bool = False
    pending: dict[int, PendingForward] = field(default_factory=dict)
    caches: OrderedDict[str, Cache] = field(default_factory=OrderedDict)
    has_gradients: bool = False  # has it gone back through a pass since it last counted a loss?

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it beside tensors and frames."""
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
        """Rebuild a session of a checkpoint.

        Raises:
            ValueError: a field is missing, or has the wrong type.
        """
        fields = {"peer": str, "codec": str, "limits": list, "done": int, "check": int}
        wrong = next(
            (name for name, kind in fields.items() if type(saved.get(name)) is not kind), None
        )
        if wrong is not None:
            raise ValueError(f'"{wrong}" of a session is missing or has the wrong type')
        away, pending = saved.get("away", False), saved.get("has_gradients", True)
        if (
            saved["codec"] not in CODECS
            or not is_limits(saved["limits"])
            or min(saved["done"], saved["check"]) < 0
        ):
            raise ValueError("the codec, limits or numbers of a session are out of range")
        if type(away) is not bool or type(pending) is not bool:
            raise ValueError("the flags of a session must be true or false")
        made = cls(
            saved["peer"],
            saved["codec"],
            Limits(*saved["limits"]),
            saved["done"],
            saved["done"],
            saved["check"],
            reply,
            time.monotonic(),
        )
        made.is_away, made.has_gradients = away, pending
        return made


def parse_hello(frame: Frame, about: Mapping[str, Value], key: str) -> tuple[str, str, Limits]:
    """A session's name, its codec and the client's limits, out of a HELLO that speaks of the
    server's model and key.
    """
    if frame.values.get("protocol") != PROTOCOL:
        raise FrameError(
            "version",
            f"the client speaks protocol {frame.values.get('protocol')!r:.20}, the server "
            f"{PROTOCOL}",
            hint="update the older side",
        )
    for what, mine in about.items():
        if frame.values.get(what) != mine:
            other = str(frame.values.get(what))[:64]
            raise FrameError(
                "model",
                f"the server's {what} is {mine}, the client's {other}",
                hint="both sides need the same model, of one dtype",
            )
    theirs = frame.values.get("key")
    if theirs and key and theirs != key:
        raise FrameError(
            "key",
            f"the backbone is locked with key {key}, the client has {theirs!r:.40}",
            hint="name the other key",
        )
    codec, limits = frame.values.get("codec"), frame.values.get("limits")
    if codec not in CODECS:
        raise FrameError("codec", f"there is no codec {codec!r:.20}")
    if not is_limits(limits):
        raise FrameError("limit", "the client does not say what it is ready to take")
    name = session_name(frame)
    if not is_session_name(name):
        raise FrameError("session", "a session's name is 32 letters and digits")
    return name, str(codec), Limits(*limits)


def is_limits(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list) and len(value) == 4 and all(type(n) is int and n > 0 for n in value)
    )


def is_session_name(name: str) -> bool:
    return len(name) == 32 and name.isascii() and name.isalnum()


def restore_sessions(
    saved: Mapping[str, Mapping[str, Any]], frames: Mapping[str, bytes], limits: Limits
) -> dict[str, Session]:
    """Rebuild the sessions of a checkpoint, with their last replies and open passes.

    Raises:
        ValueError: a session has a wrong field, or a frame belongs to none.
        FrameError: a frame is damaged.
    """
    if not all(is_session_name(name) for name in saved):
        raise ValueError("a session's name must be 32 letters and digits")
    out = {
        name: Session.from_dict(fields, frames.get(f"{name}/reply", b""))
        for name, fields in saved.items()
    }
    for place, data in frames.items():
        name, _, number = place.partition("/")
        if name not in out or not (
            number == "reply" or (number.isascii() and number.isdigit() and len(number) < 20)
        ):
            raise ValueError(f'the frame "{place[:100]}" belongs to no session')
        frame = decode(data, limits)
        if number != "reply":
            out[name].pending[int(number)] = PendingForward(frame)
    return out


def session_name(frame: Frame) -> str:
    found = frame.values.get("session")
    if not isinstance(found, str):
        raise FrameError("session", 'the frame says no "session"')
    return found


def find_session(sessions: Mapping[str, Session], frame: Frame, peer: str) -> Session:
    """The session that a frame names, if it is this client's."""
    session = sessions.get(session_name(frame))
    if session is None or session.peer != peer:
        raise FrameError(
            "session", "there is no such session of this client's", hint="say HELLO first"
        )
    return session


def sessions_to_evict(
    sessions: Mapping[str, Session], peer: str, own: int, most: int, idle: float
) -> list[str]:
    """Whose places a new session takes, if there are too many: of those that are idle, the ones
    that were silent for longest, of this client's, then of all. Where that is not enough the client
    is refused, and nobody is to go.
    """
    out: list[str] = []
    now = time.monotonic()
    for mine, bound in ((True, own), (False, most)):
        among = sorted(
            (s.last_seen, n)
            for n, s in sessions.items()
            if n not in out and (not mine or s.peer == peer)
        )
        last = among[: max(0, len(among) + 1 - bound)] if bound else []
        if any(now - seen < idle for seen, _ in last):
            if mine:
                require_session_quota(peer, len(among), own)
            raise FrameError(
                "full",
                f"the server has {most} sessions, and takes no more",
                hint="end one, or come back later",
            )
        out += [name for _, name in last]
    return out
