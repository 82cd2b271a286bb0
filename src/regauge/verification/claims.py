"""What is claimed of optimizers: the rows (how one trains) and columns (which move) of a matrix,
and a letter for each cell.

A move T of the weights with L(T w) = L(w) turns gradients by T^-T. An optimizer keeps the move if
its step commutes with that on every state tensor: gradient descent if T is orthogonal, element-wise
second moments and signs if T is a signed permutation, orthogonalised updates if T is orthogonal on
either side of each matrix. `optimizers` measures all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from regauge.core.groups import Kind

Tensor = torch.Tensor
State = dict[str, Tensor]
Optimizer = torch.optim.Optimizer

KEPT, BROKEN = (
    1e-9,
    1e-3,
)  # a deviation up to the one, from the other on; what lies between is neither
NOISE = 1e-6  # what sign-like optimizers make of a flat direction, at least
MODELS = {"llama": "Llama", "gpt2": "GPT-2"}


@dataclass(frozen=True)
class Move:
    """One column: an element on these spaces of a model. `folded`: norms are folded first;
    `frozen`: their unit gains are not trained.

    `free`: GPT-2's key biases are trained. Their gradient is zero (softmax does not see them), so
    what arrives is rounding noise, which sign-like optimizers turn into steps of full size;
    elsewhere it is set to the zero that it is.
    """

    name: str
    model: str
    spaces: tuple[str, ...]
    within: Kind
    folded: bool = False
    frozen: bool = False
    free: bool = False

    @property
    def start(self) -> Start:
        return Start(self.folded, self.frozen, self.free)


class Start(NamedTuple):
    """What moves share the unmoved run of."""

    folded: bool
    frozen: bool
    free: bool


MOVES: tuple[Move, ...] = (
    Move("stream permutations", "llama", ("stream",), "permutation"),
    Move("signed stream permutations", "llama", ("stream",), "signed"),
    Move("head permutations", "llama", ("kv", "rep"), "permutation"),
    Move("FFN permutations", "llama", ("ffn",), "permutation"),
    Move("QK turns", "llama", ("qk",), "orthogonal"),
    Move("VO rotations", "llama", ("vo",), "orthogonal"),
    Move(
        "stream rotations with frozen unit gains",
        "llama",
        ("stream",),
        "full",
        folded=True,
        frozen=True,
    ),
    Move("stream rotations with trained gains", "llama", ("stream",), "full", folded=True),
    Move("gated FFN scalings", "llama", ("ffn",), "full"),
    Move("general linear VO", "llama", ("vo",), "full"),
    Move("stream permutations", "gpt2", ("stream",), "permutation"),
    Move("head permutations", "gpt2", ("head",), "permutation"),
    Move("FFN permutations", "gpt2", ("ffn",), "permutation"),
    Move("QK rotations", "gpt2", ("qk",), "orthogonal"),
    Move("VO rotations", "gpt2", ("vo",), "orthogonal"),
    Move("head permutations with free key biases", "gpt2", ("head",), "permutation", free=True),
)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of an interpolated momentum."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(momentum.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 0.01)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in the dtype of its parameters: that one runs Newton-Schulz in bfloat16,
    whatever they are.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = (
                    self.state[p]
                    .setdefault("momentum_buffer", torch.zeros_like(p))
                    .lerp_(p.grad, 0.05)
                )
                x = p.grad.lerp(momentum, 0.95)
                x = x.T if len(x) > len(x.T) else x
                x = x / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.mul_(1 - 0.1 * group["lr"]).sub_(
                    x if x.shape == p.shape else x.T,
                    alpha=group["lr"] * max(1, len(p) / len(p.T)) ** 0.5,
                )


def sgd(**options: Any) -> Callable[[State], list[Optimizer]]:
    return lambda params: [torch.optim.SGD(params.values(), **options)]


def muon(kind: Any, *, everywhere: bool) -> Callable[[State], list[Optimizer]]:
    """Muon on the matrices, those of embeddings and head only if `everywhere`; AdamW on the
    rest.
    """

    def make(params: State) -> list[Optimizer]:
        outer = ("embed_tokens", "lm_head", "wte", "wpe")
        matrices = {
            n: p
            for n, p in params.items()
            if p.dim() == 2 and (everywhere or not any(o in n for o in outer))
        }
        rest = [p for n, p in params.items() if n not in matrices]
        return [
            kind(matrices.values(), lr=0.02),
            *([torch.optim.AdamW(rest, lr=0.01)] if rest else []),
        ]

    return make


def clip_norm(grads: list[Tensor]) -> None:
    scale = min(1.0, 0.1 / math.sqrt(sum(float(g.square().sum()) for g in grads)))
    for g in grads:
        g.mul_(scale)


def clip_value(grads: list[Tensor]) -> None:
    for g in grads:
        g.clamp_(-0.003, 0.003)


def no_gradient(grads: list[Tensor]) -> None:
    for g in grads:
        g.zero_()


@dataclass(frozen=True)
class Recipe:
    """One row: how the optimizers of a run are made, what is done to gradients first, and what is
    to be expected, in words and per move.

    The letters of `expected`: K it keeps the move, B it breaks it, r it keeps it but for the
    rounding of bfloat16, n it keeps it but for noise in the flat direction, - what it does is lost
    in rounding. `exact` is the recipe that computes the same in float64.
    """

    id: str
    name: str
    make: Callable[[State], list[Optimizer]]
    claim: str
    expected: str
    clip: Callable[[list[Tensor]], None] | None = None
    exact: str | None = None
    needs: str = "SGD"  # the class of torch.optim without which the row is left out

    @property
    def letters(self) -> str:
        return self.expected.replace(" ", "")


# Llama: stream, signed, heads, FFN; QK, VO; stream rotations with frozen gains, trained; FFN
# scalings, linear VO. GPT-2: stream, heads, FFN; QK, VO; heads with free key biases.
ORTHOGONAL = ("keeps orthogonal moves", "KKKK KK KB BB  KKK KK K")
SIGNED = ("keeps signed permutations and nothing else", "KKKK BB BB BB  KKK BB K")
SIGN_LIKE = (SIGNED[0], "KKKK BB BB BB  KKK BB n")
RECIPES: tuple[Recipe, ...] = (
    Recipe("sgd", "SGD", sgd(lr=0.05), *ORTHOGONAL),
    Recipe(
        "momentum",
        "SGD with momentum and weight decay",
        sgd(lr=0.02, momentum=0.9, weight_decay=0.01),
        *ORTHOGONAL,
    ),
    Recipe(
        "nesterov",
        "SGD with Nesterov momentum",
        sgd(lr=0.02, momentum=0.9, nesterov=True),
        *ORTHOGONAL,
    ),
    Recipe("clip-norm", "SGD clipped by global norm", sgd(lr=0.1), *ORTHOGONAL, clip_norm),
    Recipe("clip-value", "SGD clipped by value", sgd(lr=0.1), *SIGNED, clip_value),
    Recipe("adam", "Adam", lambda p: [torch.optim.Adam(p.values(), lr=0.01)], *SIGNED),
    Recipe("adamw", "AdamW", lambda p: [torch.optim.AdamW(p.values(), lr=0.01)], *SIGNED),
    Recipe("lion", "Lion", lambda p: [Lion(p.values(), lr=0.003)], *SIGN_LIKE),
    Recipe(
        "adafactor",
        "Adafactor",
        lambda p: [torch.optim.Adafactor(p.values(), lr=0.05)],
        *SIGN_LIKE,
        needs="Adafactor",
    ),
    # The biases of queries and values rotate with them, and are AdamW's: rotations break in GPT-2
    # and are kept in models without biases.
    Recipe(
        "muon",
        "Muon, with AdamW on embeddings, head and vectors,",
        muon(Muon, everywhere=False),
        "keeps orthogonal moves of the matrices that it trains, and signed permutations",
        "KKKK KK BB BB  KKK BB K",
    ),
    Recipe(
        "muon-all",
        "Muon, with AdamW on vectors only,",
        muon(Muon, everywhere=True),
        "keeps orthogonal moves of matrices, and signed permutations",
        "KKKK KK KB BB  KKK BB K",
    ),
    Recipe(
        "muon-torch",
        "torch.optim.Muon, with AdamW on embeddings, head and vectors,",
        muon(getattr(torch.optim, "Muon", Muon), everywhere=False),
        "keeps what Muon keeps only up to the rounding of bfloat16, in which it runs Newton-Schulz",
        "rrrr rr BB BB  rrr -- r",
        exact="muon",
        needs="Muon",
    ),
    Recipe(
        "decay",
        "Decoupled weight decay alone",
        lambda p: [torch.optim.AdamW(p.values(), lr=0.01, weight_decay=0.1)],
        "keeps every linear move",
        "KKKK KK KK KK  KKK KK K",
        no_gradient,
    ),
)


class Cell(NamedTuple):
    """How far T w is from w' after training, and how far their functions are apart; how far w is
    from w' (the control); what rounding explains.

    All relative to what training changed.
    """

    weights: float
    function: float
    control: float
    rounding: float


WORDS = {
    "K": "keeps",
    "B": "breaks",
    "r": "keeps to bfloat16",
    "n": "keeps but for noise",
    "-": "lost in rounding",
}


def agrees(letter: str, cell: Cell) -> bool:
    """Is the measured cell what its letter says?"""
    worst = max(cell.weights, cell.function)
    return {
        "K": worst <= KEPT,
        "B": cell.weights >= BROKEN,
        "r": worst <= cell.rounding,
        "n": cell.weights >= NOISE,
        "-": True,
    }[letter]
