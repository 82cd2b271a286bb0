"""Sessions: what a server knows of each client that asks, and who may have one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from regauge.split.frames import CODECS, Frame, FrameError, Limits, Value
from regauge.split.learning import Learner
from regauge.split.memory import Cost
from regauge.split.passing import PROTOCOL
from regauge.split.quotas import require_room

Tensor = torch.Tensor


@dataclass
class Open:
    """A forward pass whose backward pass has not come yet. Its graph is for the weights that it was made with: a step makes it void."""

    request: Frame
    output: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    cost: Cost | None = None  # None in a pass out of a checkpoint, until it is run again


@dataclass
class Cache:
    """Keys and values of a text that is being generated. Its turns are numbered as a session's requests are."""

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
    seen: float = 0.0
    learner: Learner | None = None  # of its own, where copies are averaged
    is_away: bool = False
    open: dict[int, Open] = field(default_factory=dict)
    caches: OrderedDict[str, Cache] = field(default_factory=OrderedDict)


def greeted(frame: Frame, about: Mapping[str, Value], key: str) -> tuple[str, str, Limits]:
    """A session's name, its codec and the client's limits, out of a HELLO that speaks of the server's model and key."""
    if frame.values.get("protocol") != PROTOCOL:
        raise FrameError(
            "version", f"the client speaks protocol {frame.values.get('protocol')!r:.20}, the server {PROTOCOL}", hint="update the older side"
        )
    for what, mine in about.items():
        if frame.values.get(what) != mine:
            other = str(frame.values.get(what))[:64]
            raise FrameError("model", f"the server's {what} is {mine}, the client's {other}", hint="both sides need the same model, of one dtype")
    theirs = frame.values.get("key")
    if theirs and key and theirs != key:
        raise FrameError("key", f"the backbone is locked with key {key}, the client has {theirs!r:.40}", hint="name the other key")
    codec, limits = frame.values.get("codec"), frame.values.get("limits")
    if codec not in CODECS:
        raise FrameError("codec", f"there is no codec {codec!r:.20}")
    if not (isinstance(limits, list) and len(limits) == 4 and all(type(n) is int and n > 0 for n in limits)):
        raise FrameError("limit", "the client does not say what it is ready to take")
    name = name_in(frame)
    if len(name) != 32 or not name.isascii() or not name.isalnum():
        raise FrameError("session", "a session's name is 32 letters and digits")
    return name, str(codec), Limits(*limits)  # type: ignore[arg-type]


def name_in(frame: Frame) -> str:
    found = frame.values.get("session")
    if not isinstance(found, str):
        raise FrameError("session", 'the frame says no "session"')
    return found


def session_of(sessions: Mapping[str, Session], frame: Frame, peer: str) -> Session:
    """The session that a frame names, if it is this client's."""
    session = sessions.get(name_in(frame))
    if session is None or session.peer != peer:
        raise FrameError("session", "there is no such session of this client's", hint="say HELLO first")
    return session


def silent(sessions: Mapping[str, Session], peer: str, own: int, most: int, idle: float) -> list[str]:
    """Whose places a new session takes, if there are too many: of those that are idle, the ones that were silent for longest, of this client's, then
    of all. Where that is not enough the client is refused, and nobody is to go."""
    out: list[str] = []
    now = time.monotonic()
    for mine, bound in ((True, own), (False, most)):
        among = sorted((s.seen, n) for n, s in sessions.items() if n not in out and (not mine or s.peer == peer))
        last = among[: max(0, len(among) + 1 - bound)] if bound else []
        if any(now - seen < idle for seen, _ in last):
            if mine:
                require_room(peer, len(among), own)
            raise FrameError("full", f"the server has {most} sessions, and takes no more", hint="end one, or come back later")
        out += [name for _, name in last]
    return out
