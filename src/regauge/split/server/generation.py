"""Inference at the server: one pass that leaves nothing behind, or the next turn of a text whose
keys and values stay in a cache that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regauge.split.protocol.frames import Frame, FrameError, Kind
from regauge.split.protocol.messages import CACHE
from regauge.split.protocol.replies import encode_reply
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.executor import Executor
from regauge.split.server.sessions import Cache, Session

Admit = Callable[[Session, Frame, Cache | None], int]


def predict(
    runner: Executor,
    learner: TrainableBackbone,
    session: Session,
    frame: Frame,
    admit: Admit,
    *,
    max_caches: int,
    max_bytes: int,
) -> bytes:
    """The reply to a FORWARD without a number. A session has at most so many `caches`; the streams
    of one text have at most `payload` bytes. `admit` refuses a pass that needs too much memory,
    before it is unpacked; it returns the bytes that a cache will hold.
    """
    name, turn = frame.values.get("cache"), frame.values.get("turn")
    if name is None:
        admit(session, frame, None)
        with torch.no_grad():
            return encode_reply(
                session,
                Kind.OUTPUT,
                frame,
                {"stream": runner.run(runner.unpack_pass(learner, frame), frame, "predict")},
            )
    if not isinstance(name, str) or len(name) > 64 or type(turn) is not int or turn < 1:
        raise FrameError("layout", "a cache has a name, and its turns are 1, 2, 3, ...")
    cache = session.caches.get(name)
    if cache is not None and cache.turn == turn and cache.check == frame.check:
        return cache.reply
    if turn != (cache.turn if cache else 0) + 1:
        raise FrameError(
            "cache",
            "the server has no such cache",
            hint="it was dropped, or the server was started again: generate anew",
        )
    cache = cache or Cache(_new_cache(runner.model))
    held = admit(session, frame, cache)
    crossing = runner.unpack_pass(learner, frame)
    stream, order = crossing.stream, frame.values.get("rows")
    if order is not None and not (
        isinstance(order, list)
        and len(order) == len(stream)
        and all(type(i) is int and i >= 0 for i in order)
    ):
        raise FrameError(
            "layout", '"rows" is not a list of numbers, one for each row of the stream'
        )
    length, size = (
        cache.length + stream.shape[1],
        cache.size + stream.numel() * stream.element_size(),
    )
    if length > runner.max_length or size > max_bytes:
        raise FrameError(
            "limit",
            f"a text has at most {runner.max_length} tokens, and all of its streams {max_bytes} "
            "bytes",
        )
    try:
        if order is not None:
            cache.value.reorder_cache(torch.tensor(order, device=runner.device))
        with torch.no_grad():
            z = runner.run(crossing.with_inputs(**{CACHE: cache.value}), frame, "predict")
        cache.reply = encode_reply(session, Kind.OUTPUT, frame, {"stream": z})
    except BaseException:
        session.caches.pop(
            name, None
        )  # some layers may have taken this turn, and it must not be taken twice
        raise
    cache.length, cache.size, cache.held = length, size, held
    cache.turn, cache.check = turn, frame.check
    session.caches[name] = cache
    session.caches.move_to_end(name)
    while len(session.caches) > max_caches:
        session.caches.popitem(last=False)
    return cache.reply


def _new_cache(model: torch.nn.Module) -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise FrameError(
            "cache",
            "the server has no transformers library, and so no caches",
            hint="generate with use_cache=False",
        ) from error
    config = getattr(model, "config", None)
    if config is None:
        raise FrameError("cache", "this model has no caches")
    return DynamicCache(config=config)
