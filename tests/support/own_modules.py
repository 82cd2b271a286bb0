"""Modules of no library: the networks of three checkpoints in the shared assets, as torch modules
with the checkpoints' names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from regauge.models.families import Boundary


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    split = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return (
        F.scaled_dot_product_attention(*split, attn_mask=mask, scale=scale)
        .transpose(1, 2)
        .flatten(2)
    )


class Cifar(nn.Module):
    """Post-norm, of torch's own encoder layers."""

    boundaries = (Boundary("", "transformer.layers", {"src": "_ token stream"}, "_ token stream"),)

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, 128, 4, 4)
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.zeros(1, 1, 128)),
            nn.Parameter(torch.zeros(1, 65, 128)),
        )
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 8, 256, dropout=0.0, batch_first=True) for _ in range(6)
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.cls_token.expand(len(z), -1, -1), z], 1) + self.pos_embed
        for layer in self.transformer.layers:
            z = layer(z)
        return self.mlp_head(z[:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_out(attend(*self.to_qkv(x).chunk(3, -1), 8, scale=1 / 8))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class PreNorm(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(64), fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.norm(x))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fn(x)


class Mnist(nn.Module):
    """Pre-norm without a final norm; blocks are sequences."""

    boundaries = (
        Boundary("", "transformer.layers", {"input": "_ token stream"}, "_ token stream"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.patch_to_embedding = nn.Linear(49, 64)
        self.cls_token, self.pos_embedding = (
            nn.Parameter(torch.zeros(1, 1, 64)),
            nn.Parameter(torch.zeros(1, 17, 64)),
        )
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            nn.Sequential(Residual(PreNorm(Attention())), Residual(PreNorm(FeedForward())))
            for _ in range(6)
        )
        self.mlp_head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.patch_to_embedding(x.reshape(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49))
        z = torch.cat([self.cls_token.expand(len(z), -1, -1), z], 1) + self.pos_embedding
        for layer in self.transformer.layers:
            z = layer(z)
        return self.mlp_head(z[:, 0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.ffn = nn.Module(), nn.Module()
        for c in "qkvo":
            setattr(self.self_attn, f"W_{c}", nn.Linear(128, 128))
        self.ffn.linear1, self.ffn.linear2 = nn.Linear(128, 512), nn.Linear(512, 128)
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)

    def forward(self, z: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        a = self.self_attn
        z = self.norm1(z + a.W_o(attend(a.W_q(z), a.W_k(z), a.W_v(z), 4, mask=mask)))
        return self.norm2(z + self.ffn.linear2(self.ffn.linear1(z).relu()))


class Characters(nn.Module):
    """A causal model of characters that makes its mask itself."""

    boundaries = (
        Boundary(
            "", "blocks", {"z": "_ token stream", "mask": "_ _ token token*"}, "_ token stream"
        ),
    )

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token_embedding, self.pos_embedding = (
            nn.Embedding(vocabulary, 128),
            nn.Embedding(128, 128),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(128), nn.Linear(128, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        z = self.token_embedding(x) + self.pos_embedding.weight[:n]
        mask = torch.full((n, n), float("-inf"), dtype=z.dtype).triu(1)[None, None]
        for block in self.blocks:
            z = block(z, mask)
        return self.lm_head(self.ln_f(z))


class Perceptual(nn.Module):
    """AlexNet's features of two images, compared channel by channel: LPIPS."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(3, 64, 11, 4, 2), nn.Conv2d(64, 192, 5, padding=2)
        self.conv2, self.conv3, self.conv4 = (
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((192, 384), (384, 256), (256, 256))
        )
        for i, width in enumerate((64, 192, 384, 256, 256)):
            setattr(self, f"lin{i}", nn.Conv2d(width, 1, 1, bias=False))

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        mean, std = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        out = [F.relu(self.conv0((x - mean.to(x)[:, None, None]) / std.to(x)[:, None, None]))]
        for i, layer in enumerate((self.conv1, self.conv2, self.conv3, self.conv4)):
            out.append(F.relu(layer(F.max_pool2d(out[-1], 3, 2) if i < 2 else out[-1])))
        return [z / (z.square().sum(1, keepdim=True).sqrt() + 1e-10) for z in out]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = (self.lin0, self.lin1, self.lin2, self.lin3, self.lin4)
        pairs = zip(self.features(x), self.features(y), heads, strict=True)
        return torch.stack([head((a - b).square()).mean((1, 2, 3)) for a, b, head in pairs]).sum(0)
