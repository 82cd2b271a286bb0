"""Replies of a server as bytes: results, and errors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from regauge.errors import FrameError
from regauge.split.protocol.frames import Frame, Kind, Value, encode
from regauge.split.server.sessions import Session

Tensor = torch.Tensor


def encode_reply(
    session: Session, kind: Kind, frame: Frame, tensors: Mapping[str, Tensor]
) -> bytes:
    """Encode the reply to a request, in the codec and within the limits of its session.

    Raises:
        FrameError: The reply is larger than the client accepts.
    """
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > session.limits.payload:
        raise FrameError(
            "limit",
            f"the reply must have at most {session.limits.payload} bytes, the client's limit, got "
            f"{size}",
        )
    values: dict[str, Value] = {"session": frame.values["session"], "saved": session.saved}
    if "ticket" in frame.values:
        values["ticket"] = frame.values["ticket"]
    return frame_bytes(Frame(kind, frame.number, values, tensors), session.codec)


def encode_error(
    error: FrameError, frame: Frame | None = None, done: int = 0, saved: int = 0
) -> bytes:
    """Encode an error; `done` and `saved` state how far the session is."""
    values: dict[str, Value] = {
        "code": error.code,
        "message": str(error)[:500],
        "hint": error.hint,
        "done": done,
        "saved": saved,
    }
    if frame is not None:
        values["check"] = frame.check
    return frame_bytes(Frame(Kind.ERROR, 0 if frame is None else frame.number, values))


def frame_bytes(frame: Frame, codec: str = "") -> bytes:
    """Encode a frame as one bytes object."""
    return b"".join(encode(frame, codec))
