"""Checkpoints of the assets that spec files describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regauge.checkpoints.reader import open_checkpoint

SPECS = Path(__file__).parents[1] / "support" / "specs"


ASSETS = Path(__file__).parents[3] / "shared" / "assets"


needs_assets = pytest.mark.skipif(
    not ASSETS.is_dir(), reason=f"the real weights are not there ({ASSETS})"
)


State = Mapping[str, torch.Tensor]


def linear(s: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, s[f"{name}.weight"], s.get(f"{name}.bias"))


def norm(s: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], s[f"{name}.weight"], s[f"{name}.bias"])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    split = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return (
        F.scaled_dot_product_attention(*split, is_causal=causal, scale=scale)
        .transpose(1, 2)
        .flatten(2)
    )


def cifar(s: State, x: torch.Tensor) -> torch.Tensor:
    z = (
        F.conv2d(x, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=4)
        .flatten(2)
        .transpose(1, 2)
    )
    z = torch.cat([s["cls_token"].expand(len(z), -1, -1), z], 1) + s["pos_embed"]
    for i in range(6):
        at = f"transformer.layers.{i}."
        q, k, v = F.linear(
            z, s[at + "self_attn.in_proj_weight"], s[at + "self_attn.in_proj_bias"]
        ).chunk(3, -1)
        z = norm(s, at + "norm1", z + linear(s, at + "self_attn.out_proj", attend(q, k, v, 8)))
        z = norm(
            s, at + "norm2", z + linear(s, at + "linear2", linear(s, at + "linear1", z).relu())
        )
    return linear(s, "mlp_head.1", norm(s, "mlp_head.0", z[:, 0]))


def mnist(s: State, x: torch.Tensor) -> torch.Tensor:
    z = linear(
        s, "patch_to_embedding", x.reshape(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
    )
    z = torch.cat([s["cls_token"].expand(len(z), -1, -1), z], 1) + s["pos_embedding"]
    for i in range(6):
        at = f"transformer.layers.{i}."
        q, k, v = linear(s, at + "0.fn.fn.to_qkv", norm(s, at + "0.fn.norm", z)).chunk(3, -1)
        z = z + linear(s, at + "0.fn.fn.to_out", attend(q, k, v, 8, scale=1 / 8))
        z = z + linear(
            s,
            at + "1.fn.fn.net.2",
            F.gelu(linear(s, at + "1.fn.fn.net.0", norm(s, at + "1.fn.norm", z))),
        )
    return linear(s, "mlp_head.2", F.gelu(linear(s, "mlp_head.0", z[:, 0])))


def gptchar(s: State, x: torch.Tensor) -> torch.Tensor:
    z = s["token_embedding.weight"][x] + s["pos_embedding.weight"][: x.shape[1]]
    for i in range(4):
        at = f"blocks.{i}."
        q, k, v = (linear(s, f"{at}self_attn.W_{c}", z) for c in "qkv")
        z = norm(
            s, at + "norm1", z + linear(s, at + "self_attn.W_o", attend(q, k, v, 4, causal=True))
        )
        z = norm(
            s,
            at + "norm2",
            z + linear(s, at + "ffn.linear2", linear(s, at + "ffn.linear1", z).relu()),
        )
    return linear(s, "lm_head", norm(s, "ln_f", z))


def data(
    name: str, n: int
) -> tuple[Callable[[State, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]:
    """A model's forward, n inputs and their targets."""
    if name == "vit_cifar10_postln":
        file = np.load(ASSETS / "cifar10_test.npz")
        x = torch.from_numpy(file["X"][:n]).permute(0, 3, 1, 2) / 255
        mean, std = (
            torch.tensor(v).view(3, 1, 1)
            for v in ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
        )
        return cifar, (x - mean) / std, torch.from_numpy(file["y"][:n].astype(np.int64)).reshape(-1)
    if name == "vit_mnist_preln":
        file = np.load(ASSETS / "mnist.npz")
        x = torch.from_numpy(file["X_test"][:n]) / 255
        return mnist, (x - 0.1307) / 0.3081, torch.from_numpy(file["y_test"][:n].astype(np.int64))
    metadata = (
        open_checkpoint(ASSETS / f"{name}.safetensors").files[f"{name}.safetensors"].metadata or {}
    )
    places = {c: i for i, c in enumerate(json.loads(metadata["chars"]))}
    text = (ASSETS / "tinyshakespeare.txt").read_text()[-(128 * n + 1) :]
    ids = torch.tensor([places[c] for c in text])
    return gptchar, ids[:-1].view(n, 128), ids[1:].view(n, 128)
