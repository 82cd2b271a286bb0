"""Split training on pico-models, and networks that misbehave by a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from regauge.core.action import apply
from regauge.core.element import Element, element
from regauge.split import Host, OptimizerConfig, TransportError
from regauge.split.protocol.frames import chunks
from regauge.split.protocol.transport import deliver
from regauge.testing import strict_float64
from support.picos import IDS, IMAGES, PICOS, build, spec_of

NAMES = ("gpt2", "bert-classifier", "vit", "llama")
ADAMW = OptimizerConfig("adamw", lr=1e-2, weight_decay=0.01)


def batch(name: str, step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A batch of random data with labels; a function of the step."""
    made = torch.Generator().manual_seed(step)
    inputs = PICOS[name].inputs
    if "pixel_values" in inputs:
        images = torch.randn(IMAGES["pixel_values"].shape, generator=made, dtype=torch.float64).to(
            dtype
        )
        return {"pixel_values": images, "labels": torch.randint(0, 5, (2,), generator=made)}
    ids = torch.randint(3, 30, IDS["input_ids"].shape, generator=made)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0  # padding
    labels = torch.randint(0, 2, (2,), generator=made) if "classifier" in name else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
    """A pico-model that may be trained: dropout off unless asked for, causal masks as tensors."""
    model = build(name).to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = more.get("dropout", 0.0)
    for blocks in model.modules():
        for attribute in ("attn_dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(blocks, attribute, None), float):
                setattr(blocks, attribute, 0.0)
    model.set_attn_implementation("eager")
    return model.train()


def lock_backbone(model: torch.nn.Module, g: Element | None) -> torch.nn.Module:
    """The server's copy: its backbone moved, if there is a key."""
    twin = copy.deepcopy(model)
    if g is not None:
        twin.load_state_dict(apply(g, model.state_dict(), part="backbone"))
    return twin


def columns(model: torch.nn.Module, seed: int = 3) -> Element:
    return element(spec_of(model), seed, within="permutation")


def optimizer_of(model: torch.nn.Module, options: OptimizerConfig = ADAMW) -> torch.optim.Optimizer:
    return options.build(p for p in model.parameters() if p.requires_grad)


def train(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    after: Callable[[int], None] | None = None,
) -> list[float]:
    losses = []
    dtype = next(p for p in model.parameters() if not p.is_meta).dtype
    for step in steps:
        optimizer.zero_grad()
        with strict_float64() if dtype == torch.float64 else nullcontext():
            loss = model(**batch(name, step, dtype)).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after(step)
    return losses


def assemble_state(
    model: torch.nn.Module, host: Host, g: Element | None
) -> dict[str, torch.Tensor]:
    """The trained model as its owner has it at the end: the client's edges, the server's backbone,
    unlocked.
    """
    state = {**{n: t for n, t in model.state_dict().items() if not t.is_meta}, **host.backbone()}
    return dict(state if g is None else apply(~g, state, part="backbone"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor. Key biases are left out: their gradient is zero
    but for rounding, which AdamW makes steps of.
    """
    assert a.keys() == b.keys()
    pairs = [(_busy(k, a[k]), _busy(k, b[k])) for k in a]
    return max(float((x - y).norm() / y.norm().clamp(min=1e-12)) for x, y in pairs if y.numel())


def _busy(name: str, value: torch.Tensor) -> torch.Tensor:
    if name.endswith("c_attn.bias"):
        q, _, v = value.chunk(3)
        return torch.cat([q, v])
    return value[:0] if name.endswith(("key.bias", "k_proj.bias")) else value


class Faulty:
    """A network that loses, repeats, delays, garbles and truncates, by a seed."""

    def __init__(
        self,
        host: Callable[[], Host],
        seed: int,
        rate: float = 0.4,
        kinds: Sequence[str] | None = None,
    ) -> None:
        self.host, self.random, self.rate, self.kinds = (
            host,
            random.Random(seed),
            rate,
            kinds or KINDS,
        )
        self.sent: list[list[bytes]] = []
        self.came: list[bytes] = []
        self.faults: dict[str, int] = {}

    def exchange(self, request: Sequence[memoryview]) -> bytes:
        pieces = list(chunks(request, 1000))
        kind = self.random.choice(self.kinds) if self.random.random() < self.rate else "none"
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.sent.append(pieces)
        if kind == "lost":
            raise TransportError("lost")
        if kind == "truncated":
            whole = b"".join(pieces)
            deliver(self.host(), [whole[: self.random.randrange(1, len(whole))]])
        if kind == "garbled":
            whole = bytearray(b"".join(pieces))
            whole[self.random.randrange(len(whole))] ^= 1 << self.random.randrange(8)
            return deliver(self.host(), [bytes(whole)])
        if kind == "repeated":
            deliver(self.host(), pieces)
        if kind == "reordered":
            for old in self.random.sample(self.sent, min(3, len(self.sent))):
                deliver(self.host(), old)
        reply = deliver(self.host(), pieces)
        self.came.append(reply)
        if kind == "reply lost":
            raise TransportError("the reply was lost")
        if kind == "reply truncated":
            return reply[: self.random.randrange(len(reply))]
        if kind == "another reply":
            return self.random.choice(self.came)
        return reply


KINDS = (
    "lost",
    "truncated",
    "garbled",
    "repeated",
    "reordered",
    "reply lost",
    "reply truncated",
    "another reply",
)
