"""Inference on the server: a single pass without state, or a generation turn with a named cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regauge.errors import FrameError
from regauge.split.protocol.frames import Frame, Kind
from regauge.split.protocol.messages import CACHE
from regauge.split.protocol.replies import encode_reply
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.executor import Executor
from regauge.split.server.sessions import Cache, Session

Admit = Callable[[Session, Frame, Cache | None], int]


def predict(
    executor: Executor,
    backbone: TrainableBackbone,
    session: Session,
    frame: Frame,
    admit: Admit,
    *,
    max_caches: int,
    max_bytes: int,
) -> bytes:
    """Answer a FORWARD without a number.

    Args:
        executor: Runs the blocks.
        backbone: Backbone of the session.
        session: The client's session.
        frame: The request.
        admit: Rejects a pass that needs too much memory, before it is unpacked; returns the bytes
            that its cache will hold.
        max_caches: Caches of a session; the least recently used one is evicted.
        max_bytes: Bytes of all streams of one text.

    Returns:
        The encoded reply.

    Raises:
        FrameError: The request is invalid, too large, or its cache was evicted.
    """
    name, turn = frame.values.get("cache"), frame.values.get("turn")
    if name is None:
        admit(session, frame, None)
        with torch.no_grad():
            return encode_reply(
                session,
                Kind.OUTPUT,
                frame,
                {"stream": executor.run(executor.unpack_pass(backbone, frame), frame, "predict")},
            )
    if not isinstance(name, str) or len(name) > 64 or type(turn) is not int or turn < 1:
        raise FrameError(
            "layout", "a cache must have a name of at most 64 characters, and turns 1, 2, 3, ..."
        )
    cache = session.caches.get(name)
    if cache is not None and cache.turn == turn and cache.check == frame.check:
        return cache.reply
    if turn != (cache.turn if cache else 0) + 1:
        raise FrameError(
            "cache",
            "unknown cache: it was evicted, or the server was restarted",
            hint="generate from the beginning",
        )
    cache = cache or Cache(_new_cache(executor.model))
    cache_bytes = admit(session, frame, cache)
    crossing = executor.unpack_pass(backbone, frame)
    stream, order = crossing.stream, frame.values.get("rows")
    if order is not None and not (
        isinstance(order, list)
        and len(order) == len(stream)
        and all(type(i) is int and i >= 0 for i in order)
    ):
        raise FrameError(
            "layout", '"rows" must be a list of numbers, one for each row of the stream'
        )
    length, size = (
        cache.length + stream.shape[1],
        cache.size + stream.numel() * stream.element_size(),
    )
    if length > executor.max_length or size > max_bytes:
        raise FrameError(
            "limit",
            f"a text must have at most {executor.max_length} tokens and {max_bytes} bytes of "
            f"streams, got {length} and {size}",
        )
    try:
        if order is not None:
            cache.value.reorder_cache(torch.tensor(order, device=executor.device))
        with torch.no_grad():
            z = executor.run(crossing.with_inputs(**{CACHE: cache.value}), frame, "predict")
        cache.reply = encode_reply(session, Kind.OUTPUT, frame, {"stream": z})
    except BaseException:
        # Some layers may have stored this turn already, and it must not be stored twice.
        session.caches.pop(name, None)
        raise
    cache.length, cache.size, cache.held = length, size, cache_bytes
    cache.turn, cache.check = turn, frame.check
    session.caches[name] = cache
    session.caches.move_to_end(name)
    while len(session.caches) > max_caches:
        session.caches.popitem(last=False)
    return cache.reply


def _new_cache(model: torch.nn.Module) -> Any:
    """Return an empty cache of transformers."""
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise FrameError(
            "cache",
            "caches need the transformers library, which the server does not have",
            hint="generate with use_cache=False",
        ) from error
    config = getattr(model, "config", None)
    if config is None:
        raise FrameError("cache", "caches need a model with a config, got one without")
    return DynamicCache(config=config)
