"""Theorem 4.7 by operator: what commutes with permutations of rows (tokens) and columns (channels),
forward and backward.

An operator is data: the axes of its weights, of the features it reads, of its constants (masks,
running statistics) and of its output. One driver transforms all of these by an element g and
compares the output and every gradient with the plain ones under g. The control transforms the
features by a different element. "Columns" are all channel spaces at once: the stream, and the
heads, the channels inside each head and the hidden units if the operator has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F

from regauge.core import axes as ax
from regauge.core.action import act, apply
from regauge.core.element import Element, element, identity
from regauge.core.groups import Permutation, Trivial
from regauge.core.spec import Space, Spec
from regauge.results.findings import Finding

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

TOLERANCE = 1e-9  # in float64
# In narrower dtypes: multiple of the operator's own rounding error, measured against float64.
MULTIPLE = 8.0
DROPOUT, DRAWS = 0.25, 4000

SPACES = {
    "token": Space(9, Permutation()),
    "stream": Space(12, Permutation()),
    "head": Space(3, Permutation()),
    "qk": Space(4, Permutation(), over="head"),
    "vo": Space(4, Permutation(), over="head"),
    "ffn": Space(20, Permutation()),
    # No group acts on these: `place` and `channel` are the token and the stream axis before the
    # permutation.
    **{
        name: Space(size, Trivial())
        for name, size in {"batch": 3, "vocabulary": 11, "seed": 2, "kernel": 3, "mode": 2}.items()
    },
    "place": Space(9, Trivial()),
    "channel": Space(12, Trivial()),
}
FEATURES = {"z": "batch token stream"}
DIRECTIONS = {"rows": "tokens", "columns": "channels", "both": "tokens and channels"}


@dataclass(frozen=True)
class Operator:
    """One row of the table: `run` takes weights, features and constants by name and returns the
    output.

    With a `front`, features are not sampled but computed from weights before they are transformed
    (the embedding of Theorem 10.1). `breaks` are the directions in which the operator does not
    commute.
    """

    name: str
    title: str
    source: str
    run: Callable[[Tensors], Tensor]
    weights: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=lambda: FEATURES)
    constants: Mapping[str, str] = field(default_factory=dict)
    output: str = "batch token stream"
    front: Callable[[Tensors], Tensors] | None = None
    directions: tuple[str, ...] = tuple(DIRECTIONS)
    breaks: tuple[str, ...] = ()
    remark: str = ""

    @property
    def spec(self) -> Spec:
        """The spec of the weights."""
        return Spec(self.name, SPACES, dict(self.weights))

    @property
    def compared(self) -> dict[str, str]:
        """The axes of what is compared: the output, and the gradient of every weight and
        feature.
        """
        return {
            "output": self.output,
            **{
                f"gradient of {n}": ax.dual(a) for n, a in {**self.weights, **self.features}.items()
            },
        }


def linear(t: Tensors) -> Tensor:
    return F.linear(t["z"], t["weight"], t["bias"])


def mlp(t: Tensors) -> Tensor:
    return F.linear(F.gelu(F.linear(t["z"], t["up"], t["up.bias"])), t["down"], t["down.bias"])


def layer_norm(t: Tensors) -> Tensor:
    return F.layer_norm(t["z"], t["z"].shape[-1:], t["gain"], t["bias"])


def rms_norm(t: Tensors) -> Tensor:
    return F.rms_norm(t["z"], t["z"].shape[-1:], t["gain"])


def batch_norm(t: Tensors) -> Tensor:
    """Apply batch norm in training mode and in evaluation mode, one after the other."""
    z, mean, variance = t["z"].transpose(1, 2), t["mean"], t["log variance"].exp()
    modes = [
        F.batch_norm(z, mean.clone(), variance.clone(), t["gain"], t["bias"], training=training)
        for training in (True, False)
    ]
    return torch.stack(modes).transpose(2, 3)


def split_heads(x: Tensor) -> Tensor:
    """Split the channels into heads."""
    return x.view(*x.shape[:2], SPACES["head"].size, -1).transpose(1, 2)


def attend(t: Tensors, queries: Tensor, z: Tensor) -> Tensor:
    q, k, v = (
        split_heads(F.linear(x, t[n], t.get(f"{n}.bias")))
        for n, x in (("q", queries), ("k", z), ("v", z))
    )
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mixed = (scores + t["mask"] if "mask" in t else scores).softmax(-1) @ v
    return F.linear(mixed.transpose(1, 2).flatten(2), t["o"], t["o.bias"])


def attention(t: Tensors) -> Tensor:
    return attend(t, t["z"], t["z"])


def masked_softmax(t: Tensors) -> Tensor:
    return (t["queries"] @ t["keys"].mT / math.sqrt(t["keys"].shape[-1]) + t["mask"]).softmax(-1)


def element_wise(t: Tensors) -> Tensor:
    return F.gelu(t["a"]) * t["b"] + t["a"]


def dropout(t: Tensors) -> Tensor:
    return t["z"] * t["kept"] / (1 - DROPOUT)


def convolution(t: Tensors) -> Tensor:
    return F.conv1d(t["z"].transpose(1, 2), t["weight"], t["bias"], padding="same").transpose(1, 2)


def pma(t: Tensors) -> Tensor:
    """Apply the Set Transformer's pooling by multi-head attention: learned seeds attend to
    rFF(Z).
    """
    z = t["z"] + F.gelu(F.linear(t["z"], t["rff"], t["rff.bias"]))
    seeds = t["seeds"].expand(len(z), -1, -1)
    return seeds + attend(t, seeds, z)


def embed(t: Tensors) -> Tensors:
    ids = (
        torch.arange(SPACES["batch"].size * SPACES["place"].size).view(SPACES["batch"].size, -1)
        ** 2
        % SPACES["vocabulary"].size
    )
    return {"z": F.embedding(ids, t["table"]) + t["positions"]}


AFFINE = {"gain": "|stream|", "bias": "stream"}
# Keys have no bias: softmax is invariant to it, so its gradient is zero up to rounding and has no
# relative error.
ATTENTION = {
    "q": "(head qk) stream*",
    "q.bias": "(head qk)",
    "k": "(head qk*) stream*",
    "v": "(head vo) stream*",
    "v.bias": "(head vo)",
    "o": "stream (head vo)*",
    "o.bias": "stream",
}

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "linear",
        "A linear layer",
        "Lemma 9.3",
        linear,
        {"weight": "stream stream*", "bias": "stream"},
    ),
    Operator(
        "mlp",
        "An MLP with GELU",
        "Lemma 9.4",
        mlp,
        {"up": "ffn stream*", "up.bias": "ffn", "down": "stream ffn*", "down.bias": "stream"},
    ),
    Operator(
        "layernorm",
        "LayerNorm",
        "Lemma 9.5",
        layer_norm,
        AFFINE,
        remark="The lemma's right-hand side lacks the permutations.",
    ),
    Operator("rmsnorm", "RMSNorm", "Lemma 9.5", rms_norm, {"gain": "|stream|"}),
    Operator(
        "batchnorm",
        "BatchNorm over the channels (training and evaluation)",
        "Lemma 9.5",
        batch_norm,
        AFFINE,
        constants={"mean": "stream", "log variance": "|stream|"},
        output="mode batch token stream",
    ),
    Operator("softmax", "Softmax over the channels", "Lemma 9.2", lambda t: t["z"].softmax(-1)),
    Operator("attention", "Multi-head attention", "Lemma 9.6", attention, ATTENTION),
    Operator(
        "masked-attention",
        "Causal attention with its mask permuted on both sides",
        "Lemma 9.6",
        attention,
        ATTENTION,
        constants={"mask": "token token*"},
        remark="The paper leaves rows out here (sec. 10.4); they pass, as long as the mask is "
        "permuted along.",
    ),
    Operator(
        "masked-softmax",
        "Masked softmax of Q K^T",
        "Thm 10.2",
        masked_softmax,
        features={"queries": "batch token stream", "keys": "batch token stream*"},
        constants={"mask": "token token*"},
        output="batch token token*",
        directions=("columns",),
        remark="A permutation of the columns of Q and K cancels before the mask takes effect.",
    ),
    Operator(
        "elementwise",
        "Element-wise work (GELU, product, residual sum)",
        "Lemma 9.1",
        element_wise,
        features={"a": "batch token stream", "b": "batch token stream"},
    ),
    Operator(
        "dropout",
        "Dropout whose mask is drawn once and permuted along",
        "Lemma 9.1",
        dropout,
        constants={"kept": "batch token stream"},
    ),
    Operator(
        "convolution",
        "A convolution",
        "sec. 4.2",
        convolution,
        {"weight": "stream stream* kernel", "bias": "stream"},
        directions=("rows", "columns"),
        breaks=("rows",),
    ),
    Operator(
        "pma",
        "Set Transformer's pooling head",
        "sec. 4.2",
        pma,
        {"seeds": "seed stream", "rff": "stream stream*", "rff.bias": "stream", **ATTENTION},
        output="batch seed stream",
        remark="The paper calls its gradients misaligned; they are not: those of features are "
        "permuted, those of weights equal.",
    ),
    Operator(
        "embeddings",
        "An embedding in front of shuffled attention",
        "Thm 10.1",
        attention,
        {"table": "vocabulary channel", "positions": "place channel", **ATTENTION},
        front=embed,
        directions=("both",),
        remark="What stands before the permutation, position embeddings included, gets the same "
        "gradients.",
    ),
)


def check_operators(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Finding]:
    """Return one finding per operator and direction, and one on dropout with masks in storage
    order. `holds` is relative to the operator's own rounding.
    """
    findings = [finding for op in OPERATORS for finding in check_operator(op, dtype, seed)]
    return [*findings, check_dropout_law(dtype, seed)]


def check_operator(
    op: Operator, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Iterator[Finding]:
    """Check whether an operator commutes, forward and backward, in each of its directions."""
    spec, tensors = op.spec, {name: t.to(dtype) for name, t in sample_tensors(op, seed).items()}
    plain = run(op, identity(spec), identity(spec), tensors)
    limits = tolerances(op, plain, tensors)
    for direction in op.directions:
        spaces = {"rows": ["token"], "columns": [s for s in SPACES if s != "token"], "both": None}[
            direction
        ]
        g, other = (element(spec, 2 * seed + i, spaces=spaces) for i in range(2))
        expected = {name: act(g, plain[name], axes) for name, axes in op.compared.items()}
        errors = {
            name: relative_error(x, expected[name]) for name, x in run(op, g, g, tensors).items()
        }
        control_errors = {
            name: relative_error(x, expected[name])
            for name, x in run(op, g, other, tensors).items()
        }
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        remark = op.remark if direction == op.directions[0] else ""
        commutes, breaks = errors[worst] <= limits[worst], direction in op.breaks
        prefix = "" if commutes != breaks else f"{_claim(op, direction, commutes)}: "
        yield Finding(
            f"operator/{op.name}/{direction}",
            _claim(op, direction, not breaks)
            + ("" if breaks else ", and its gradients move along"),
            holds=commutes != breaks,
            value=errors[worst],
            floor=limits[worst],
            ceiling=max(control_errors.values()),
            sentence=f"{prefix}the {worst} differs by {errors[worst]:.1e}. {remark}".rstrip(),
            source=op.source if op.source.startswith("Thm") else f"Thm 4.7, {op.source}",
            where=worst,
        )


def _claim(op: Operator, direction: str, commutes: bool) -> str:
    """Return the claim on an operator and a direction as text."""
    permuted = (
        ax.spaces(op.output)
        & {"rows": {"token"}, "columns": {"stream"}, "both": {"token", "stream"}}[direction]
    )
    verb = (
        ("commutes with" if commutes else "does not commute with")
        if permuted
        else ("is unchanged by" if commutes else "is changed by")
    )
    weights = (
        " once its weights move along" if commutes and op.weights and direction != "rows" else ""
    )
    return f"{op.title} {verb} permutations of the {DIRECTIONS[direction]}{weights}"


def sample_tensors(op: Operator, seed: int) -> Tensors:
    """Sample every tensor of an operator, and the cotangent of its output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: space.size for name, space in SPACES.items()}

    def normal(axes: str) -> Tensor:
        return torch.randn(
            [ax.size(term, sizes) or 1 for term in ax.parse(axes).terms],
            generator=generator,
            dtype=torch.float64,
        )

    tensors = {name: 0.4 * normal(axes) + ("|" in axes) for name, axes in op.weights.items()}
    tensors |= {
        name: normal(axes)
        for name, axes in {**op.features, **op.constants, "cotangent": op.output}.items()
    }
    if "mask" in tensors:
        tensors["mask"] = torch.full_like(tensors["mask"], -torch.inf).triu(1)
    if "kept" in tensors:
        tensors["kept"] = (
            torch.rand(tensors["kept"].shape, generator=generator) >= DROPOUT
        ).double()
    return tensors


def run(op: Operator, g: Element, features: Element, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the output and all gradients.

    `features` acts on the features, g on all else: weights, constants and the cotangent of the
    output.
    """
    weights = apply(g, {name: tensors[name] for name in op.weights})
    values = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    values |= {name: act(g, tensors[name], axes) for name, axes in op.constants.items()}
    entered = (
        op.front(values)
        if op.front
        else {name: tensors[name].clone().requires_grad_() for name in op.features}
    )
    values |= {name: act(features, entered[name], axes) for name, axes in op.features.items()}
    output = op.run(values)
    names = [*op.weights, *op.features]
    gradients = torch.autograd.grad(
        output, [values[name] for name in names], act(g, tensors["cotangent"], ax.dual(op.output))
    )
    return {
        "output": output.detach(),
        **{f"gradient of {name}": x for name, x in zip(names, gradients, strict=True)},
    }


def tolerances(op: Operator, plain: Tensors, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the tolerance of each compared tensor: 1e-9 in float64, else a multiple of its
    rounding error, bounded below by the median error and epsilon.
    """
    dtype = plain["output"].dtype
    if dtype == torch.float64:
        return dict.fromkeys(plain, TOLERANCE)
    exact = run(
        op, identity(op.spec), identity(op.spec), {name: t.double() for name, t in tensors.items()}
    )
    rounding = {name: relative_error(plain[name], exact[name]) for name in plain}
    rounding = {
        name: error if error < math.inf else 0.0 for name, error in rounding.items()
    }  # NaN and Inf give no allowance
    smallest = max(median(rounding.values()), torch.finfo(dtype).eps)
    return {name: MULTIPLE * max(error, smallest) for name, error in rounding.items()}


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||, or infinity for NaN."""
    error = float((a.double() - b.double()).norm() / b.double().norm())
    return error if error == error else math.inf


def check_dropout_law(dtype: torch.dtype = torch.float64, seed: int = 0) -> Finding:
    """Check that dropout with masks in storage order has other outputs of the same distribution."""
    op = next(op for op in OPERATORS if op.name == "dropout")
    z, g = (
        sample_tensors(op, seed)["z"].to(dtype),
        element(op.spec, 2 * seed, spaces=["token", "stream"]),
    )

    def outputs(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return F.dropout(x.expand(DRAWS, *x.shape), DROPOUT).double()

    plain, permuted = outputs(z), outputs(act(g, z, "batch token stream"))
    single_error = relative_error(permuted[0], act(g, plain[0], "batch token stream"))
    value = max(
        relative_error((permuted**k).mean(0), act(g, (plain**k).mean(0), "batch token stream"))
        for k in (1, 2)
    )
    limit = 4 * math.sqrt(
        2 * DROPOUT / (1 - DROPOUT) / DRAWS
    )  # four standard errors of the difference of two means
    return Finding(
        "operator/dropout/law",
        "Dropout with masks in storage order commutes with permutations in distribution only",
        holds=value <= limit and single_error > 10 * limit,
        value=value,
        floor=limit,
        ceiling=single_error,
        sentence=f"One draw differs by {single_error:.1e}; "
        f"the first two moments over {DRAWS} draws by {value:.1e}, "
        "as two independent samples would.",
        source="Thm 4.7",
        measure="relative error of moments",
        trials=DRAWS,
    )
