"""Claims about optimizers: the rows (training recipes) and columns (symmetries) of a matrix, and a
letter for each cell.

A symmetry T of the weights with L(T w) = L(w) transforms gradients by T^-T. An optimizer preserves
it if its step commutes with T on every state tensor: gradient descent if T is orthogonal,
element-wise second moments and signs if T is a signed permutation, orthogonalised updates if T is
orthogonal on either side of each matrix. `optimizers` measures all of it.
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

PRESERVED, BROKEN = (
    1e-9,
    1e-3,
)  # preserved up to the first deviation, broken from the second on, neither in between
NOISE = 1e-6  # smallest deviation of sign-like optimizers along a flat direction
MODELS = {"llama": "Llama", "gpt2": "GPT-2"}


@dataclass(frozen=True)
class Symmetry:
    """One column: an element on these spaces of a model.

    `folded`: norms are folded first. `frozen`: their unit gains are not trained. `free`: GPT-2's
    key biases are trained. Their gradient is zero (softmax is invariant to them), so that only
    rounding noise remains, which sign-like optimizers turn into steps of full size; elsewhere it is
    set to exactly zero.
    """

    name: str
    model: str
    spaces: tuple[str, ...]
    within: Kind
    folded: bool = False
    frozen: bool = False
    free: bool = False

    @property
    def baseline(self) -> Baseline:
        """The plain run to compare with."""
        return Baseline(self.folded, self.frozen, self.free)


class Baseline(NamedTuple):
    """The options of a plain run, which several symmetries share."""

    folded: bool
    frozen: bool
    free: bool


SYMMETRIES: tuple[Symmetry, ...] = (
    Symmetry("stream permutations", "llama", ("stream",), "permutation"),
    Symmetry("signed stream permutations", "llama", ("stream",), "signed"),
    Symmetry("head permutations", "llama", ("kv", "rep"), "permutation"),
    Symmetry("FFN permutations", "llama", ("ffn",), "permutation"),
    Symmetry("QK turns", "llama", ("qk",), "orthogonal"),
    Symmetry("VO rotations", "llama", ("vo",), "orthogonal"),
    Symmetry(
        "stream rotations with frozen unit gains",
        "llama",
        ("stream",),
        "full",
        folded=True,
        frozen=True,
    ),
    Symmetry("stream rotations with trained gains", "llama", ("stream",), "full", folded=True),
    Symmetry("gated FFN scalings", "llama", ("ffn",), "full"),
    Symmetry("general linear VO", "llama", ("vo",), "full"),
    Symmetry("stream permutations", "gpt2", ("stream",), "permutation"),
    Symmetry("head permutations", "gpt2", ("head",), "permutation"),
    Symmetry("FFN permutations", "gpt2", ("ffn",), "permutation"),
    Symmetry("QK rotations", "gpt2", ("qk",), "orthogonal"),
    Symmetry("VO rotations", "gpt2", ("vo",), "orthogonal"),
    Symmetry("head permutations with free key biases", "gpt2", ("head",), "permutation", free=True),
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
    """torch.optim.Muon in the dtype of its parameters: the original always runs Newton-Schulz in
    bfloat16.
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


def make_sgd(**options: Any) -> Callable[[State], list[Optimizer]]:
    """Return a factory of SGD optimizers."""
    return lambda params: [torch.optim.SGD(params.values(), **options)]


def make_muon(kind: Any, *, everywhere: bool) -> Callable[[State], list[Optimizer]]:
    """Return a factory of Muon for the matrices (embeddings and head only if `everywhere`) and
    AdamW for the rest.
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
    """Clip gradients by their global norm."""
    scale = min(1.0, 0.1 / math.sqrt(sum(float(g.square().sum()) for g in grads)))
    for g in grads:
        g.mul_(scale)


def clip_value(grads: list[Tensor]) -> None:
    """Clip gradients by value."""
    for g in grads:
        g.clamp_(-0.003, 0.003)


def zero_grads(grads: list[Tensor]) -> None:
    """Set gradients to zero."""
    for g in grads:
        g.zero_()


@dataclass(frozen=True)
class Recipe:
    """One row: the optimizers of a run, the preprocessing of gradients, and the expected outcome,
    in words and per symmetry.

    The letters of `expected`: K preserved, B broken, r preserved up to the rounding of bfloat16, n
    preserved up to noise in the flat direction, - lost in rounding. `exact` is the recipe that
    computes the same in float64.
    """

    id: str
    name: str
    make: Callable[[State], list[Optimizer]]
    claim: str
    expected: str
    clip: Callable[[list[Tensor]], None] | None = None
    exact: str | None = None
    needs: str = "SGD"  # the class of torch.optim that the row requires

    @property
    def letters(self) -> str:
        """The expected letters without spaces."""
        return self.expected.replace(" ", "")


# Llama: stream, signed, heads, FFN; QK, VO; stream rotations with frozen gains, trained; FFN
# scalings, linear VO. GPT-2: stream, heads, FFN; QK, VO; heads with free key biases.
ORTHOGONAL = ("keeps orthogonal moves", "KKKK KK KB BB  KKK KK K")
SIGNED = ("keeps signed permutations and nothing else", "KKKK BB BB BB  KKK BB K")
SIGN_LIKE = (SIGNED[0], "KKKK BB BB BB  KKK BB n")
RECIPES: tuple[Recipe, ...] = (
    Recipe("sgd", "SGD", make_sgd(lr=0.05), *ORTHOGONAL),
    Recipe(
        "momentum",
        "SGD with momentum and weight decay",
        make_sgd(lr=0.02, momentum=0.9, weight_decay=0.01),
        *ORTHOGONAL,
    ),
    Recipe(
        "nesterov",
        "SGD with Nesterov momentum",
        make_sgd(lr=0.02, momentum=0.9, nesterov=True),
        *ORTHOGONAL,
    ),
    Recipe("clip-norm", "SGD clipped by global norm", make_sgd(lr=0.1), *ORTHOGONAL, clip_norm),
    Recipe("clip-value", "SGD clipped by value", make_sgd(lr=0.1), *SIGNED, clip_value),
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
    # The biases of queries and values rotate with them and are trained by AdamW: rotations break in
    # GPT-2 and are preserved in models without biases.
    Recipe(
        "muon",
        "Muon, with AdamW on embeddings, head and vectors,",
        make_muon(Muon, everywhere=False),
        "keeps orthogonal moves of the matrices that it trains, and signed permutations",
        "KKKK KK BB BB  KKK BB K",
    ),
    Recipe(
        "muon-all",
        "Muon, with AdamW on vectors only,",
        make_muon(Muon, everywhere=True),
        "keeps orthogonal moves of matrices, and signed permutations",
        "KKKK KK KB BB  KKK BB K",
    ),
    Recipe(
        "muon-torch",
        "torch.optim.Muon, with AdamW on embeddings, head and vectors,",
        make_muon(getattr(torch.optim, "Muon", Muon), everywhere=False),
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
        zero_grads,
    ),
)


class Cell(NamedTuple):
    """A measured cell, relative to the change by training.

    `weights` is the distance of T w from w' after training, `function` that of their functions,
    `control` the distance of w from w', and `rounding` the part that rounding explains.
    """

    weights: float
    function: float
    control: float
    rounding: float


VERDICTS = {
    "K": "keeps",
    "B": "breaks",
    "r": "keeps to bfloat16",
    "n": "keeps but for noise",
    "-": "lost in rounding",
}


def is_expected(letter: str, cell: Cell) -> bool:
    """Return whether the measured cell agrees with its letter."""
    worst = max(cell.weights, cell.function)
    return {
        "K": worst <= PRESERVED,
        "B": cell.weights >= BROKEN,
        "r": worst <= cell.rounding,
        "n": cell.weights >= NOISE,
        "-": True,
    }[letter]
