"""The symmetry of your own module, inferred from its graph and verified, without a hand-written
spec.

python examples/discover_module.py       # some seconds
"""

import torch
from torch import nn

import regauge


class Block(nn.Module):
    """Attention with a norm, and a gated FFN without one: not a block of any known family."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class Mine(nn.Module):
    """Two blocks between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(6, 32),
            nn.ModuleList(Block(32, 4) for _ in range(2)),
            nn.Linear(32, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
model, x = Mine().eval(), torch.randn(2, 5, 6)
spec = regauge.discover(model, x)
for name, space in spec.spaces.items():
    over, folded = (
        f", over {space.over}" if space.over else "",
        f"; folded {space.folded}" if space.folded else "",
    )
    print(f"{name:10} {space.size:4}  {space.group}{over}{folded}")
print("blocks.0.up.weight is", spec.tensors["blocks.0.up.weight"])

before = model(x)
g = regauge.element(spec, key=3)
moved = regauge.apply(g, model.state_dict())
assert all(
    not torch.equal(moved[n], t) for n, t in model.state_dict().items() if n.endswith("up.weight")
)
model.load_state_dict(moved)
assert torch.allclose(model(x), before, atol=1e-4), "the same function in another basis"
