"""The methods: each a pure function of the tensors that stand in one place of several models, and
of what data said about each where it needs that.

All arithmetic is in float32 (float64 where an input is), block by block, and the result is rounded
once, to the dtype that is asked for. Formulas, defaults and edge cases are mergekit's, so that its
recipes mean the same here. Where a method looks at angles and lengths alone (slerp, Karcher mean,
model stock) the result is a combination of its inputs, and the coefficients follow from their inner
products: two passes, whatever the method iterates. Methods of transport are the weighted mean of
models that `transport` has moved before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.blocks import Blocks, bits_of
from regauge.errors import RegaugeError
from regauge.merging.sparsify import (
    Selection,
    Sparsifier,
    TaskVector,
    keep_all,
    keep_by_rank,
    keep_largest,
    keep_random,
)

Tensor = torch.Tensor
TensorOrBlocks = Tensor | Blocks  # a whole tensor, or what makes one
BLOCK_SIZE = 1 << 17  # values in a block: what the cache holds of a few float32 arrays


class MergeError(RegaugeError):
    """Models that cannot be merged as asked."""


class Required:
    """The default of a parameter that has none."""

    def __repr__(self) -> str:
        return "needed"


REQUIRED = Required()


@dataclass(frozen=True)
class MergeInput:
    """What a method is given: the tensors in the recipe's order, which of them is the base model's,
    and the parameters, of all and of each.

    `dtype` is that of the result, `kind` the one in which mergekit would have computed: what is
    selected or voted on is compared in it. `name` and `seed` determine what is drawn. `statistics`
    has one of each model, or None where nothing is known of a tensor.
    """

    tensors: Sequence[Tensor]
    shared: Mapping[str, Any]
    per_model: Sequence[Mapping[str, Any]]
    base: int | None = None
    dtype: torch.dtype | None = None
    compare_dtype: torch.dtype | None = None
    name: str = ""
    seed: int = 0
    statistics: Sequence[Any] = ()

    @property
    def out_dtype(self) -> torch.dtype:
        return self.dtype or self.tensors[self.base or 0].dtype

    @property
    def base_tensor(self) -> Tensor:
        assert self.base is not None, "a method that needs a base is not called without"
        return self.tensors[self.base]

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.tensors)) if i != self.base]


@dataclass(frozen=True)
class Method:
    """A method, whether it needs a base model, and its parameters with their defaults: those of the
    whole merge, and those of each model.

    `statistic` is what it needs to know from data of every model ("fisher", "gram" or
    "activations"); `transport` says that the models are moved next to the first (or the base)
    before, by what is known or else by their weights.
    """

    merge: Callable[[MergeInput], TensorOrBlocks]
    needs_base: bool = False
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_model: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    statistic: str = ""
    is_transport: bool = False


def blockwise(
    tensors: Sequence[Tensor], dtype: torch.dtype, make: Callable[[Sequence[Tensor], slice], Tensor]
) -> Blocks:
    """A tensor of this shape and dtype whose blocks are made of the blocks of others, in the
    working precision: copies, which may be used up.
    """

    def blocks() -> Iterator[Any]:
        out, at = torch.empty(min(BLOCK_SIZE, tensors[0].numel()), dtype=dtype), 0
        bits = bits_of(out)
        for parts in _iter_blocks(tensors, working_dtype(tensors)):
            size = parts[0].numel()
            made = make(parts, slice(at, at + size))
            (out if size == bits.size else out[:size]).copy_(made)
            yield bits if size == bits.size else bits[:size]
            at += size

    return Blocks(tuple(tensors[0].shape), dtype, blocks)


def _iter_blocks(tensors: Sequence[Tensor], work: torch.dtype) -> Iterator[list[Tensor]]:
    """The blocks of tensors, all at once, in the working precision. The next blocks take the place
    of the last.
    """
    held = [torch.empty(min(BLOCK_SIZE, t.numel()), dtype=work) for t in tensors]
    for parts in zip(*(torch.split(t.reshape(-1), BLOCK_SIZE) for t in tensors), strict=True):
        yield [
            (h if h.numel() == p.numel() else h[: p.numel()]).copy_(p)
            for h, p in zip(held, parts, strict=True)
        ]


def working_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def combine(tensors: Sequence[Tensor], factors: Sequence[float], dtype: torch.dtype) -> Blocks:
    """The sum of tensors times factors."""

    def block(parts: Sequence[Tensor], _: slice) -> Tensor:
        total = parts[0].mul_(factors[0])
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total.add_(part, alpha=factor)
        return total

    return blockwise(tensors, dtype, block)


def inner_products(
    tensors: Sequence[Tensor], work: torch.dtype, minus: Tensor | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The inner products of tensors with each other, all less another one if that is given."""
    n = len(tensors)
    out = np.zeros((n, n))
    for parts in _iter_blocks([*tensors, *([] if minus is None else [minus])], work):
        for i, x in enumerate(parts[:n]):
            if minus is not None:
                x.sub_(parts[n])
            for j in range(i + 1):
                out[i, j] += float(x.dot(parts[j]))
    return np.tril(out) + np.tril(out, -1).T


def linear(g: MergeInput) -> TensorOrBlocks:
    """The weighted mean, or with normalize off the weighted sum. A weighted mean of equal weights
    is a model soup.
    """
    weights = [float(p["weight"]) for p in g.per_model]
    total = (
        float(torch.tensor(weights, dtype=working_dtype(g.tensors)).sum())
        if g.shared.get("normalize", True)
        else None
    )
    if total == 0:
        raise MergeError(
            f'the weights of "{g.name}" add up to 0, and normalize would divide by that',
            hint="change a weight, or set normalize: false",
        )

    def block(
        parts: Sequence[Tensor], _: slice
    ) -> Tensor:  # rounded where mergekit rounds: a value that is almost 0 depends on it
        added = parts[0].mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            added.addcmul_(
                part, torch.tensor(weight, dtype=part.dtype)
            )  # one rounding where the processor fuses the two, two where it does not
        return added if total is None else added.div_(total)

    return blockwise(g.tensors, g.out_dtype, block)


def fisher(g: MergeInput) -> TensorOrBlocks:
    """The mean of every value, weighted by what the diagonal Fisher says that it matters: sum w F x
    / sum w F (Matena and Raffel 2022). No Fisher counts as less than `floor` times the mean over
    the tensor and the models, so that what matters nowhere is averaged.
    """
    known = _complete_statistics(g)
    if known is None:
        return linear(g)
    weights = _require_positive_weights(g)
    mean = (
        sum(float(f.double().mean()) for f in known) / len(known) if g.tensors[0].numel() else 0.0
    )
    if not math.isfinite(mean):
        raise MergeError(
            f'a Fisher information of "{g.name}" is not finite',
            hint="is a model broken, or the data not its own?",
        )
    n, floor = len(known), float(g.shared["floor"]) if mean else 1.0

    def block(parts: Sequence[Tensor], _: slice) -> Tensor:
        above, below = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
        for x, f, w in zip(parts[:n], parts[n:], weights, strict=True):
            share = f.div(mean or 1.0).clamp_(min=floor).mul_(w)
            above.addcmul_(share, x)
            below.add_(share)
        return above.div_(below)

    return blockwise([*g.tensors, *known], g.out_dtype, block)


def regmean(g: MergeInput) -> TensorOrBlocks:
    """The weight whose layer does what each model's layer did to its own inputs, as nearly as can
    be in squares (Jin et al. 2023):

        W = (sum w G)^-1 sum w G W_i,     G = X^T X with its off-diagonal multiplied by `alpha`

    In float64. Of what the inputs do not determine, W is what the weighted mean is. Tensors without
    a Gram (tables, norms, biases) are averaged.
    """
    known = _complete_statistics(g)
    if known is None:
        return linear(g)
    weights, alpha = _require_positive_weights(g), float(g.shared["alpha"])
    matrices = [_shrink_gram(k.values, alpha) for k in known]
    rows = [k.to_rows(t).double() for k, t in zip(known, g.tensors, strict=True)]
    if not all(bool(m.isfinite().all()) for m in matrices):
        raise MergeError(
            f'the inputs of "{g.name}" are not finite',
            hint="is a model broken, or the data not its own?",
        )
    total = sum(
        (w * m for w, m in zip(weights, matrices, strict=True)), torch.zeros_like(matrices[0])
    )
    mean = sum(
        (w / sum(weights) * x for w, x in zip(weights, rows, strict=True)),
        torch.zeros_like(rows[0]),
    )
    left = sum(
        (w * (m @ (x - mean)) for w, m, x in zip(weights, matrices, rows, strict=True)),
        torch.zeros_like(mean),
    )
    found: Tensor = known[0].from_rows(mean + _solve_psd(total, left), g.tensors[0])
    return found.to(g.out_dtype)


def _shrink_gram(gram: Tensor, alpha: float) -> Tensor:
    """A Gram matrix with its off-diagonal multiplied."""
    return alpha * gram + (1 - alpha) * torch.diag(gram.diagonal())


def _solve_psd(matrix: Tensor, right: Tensor) -> Tensor:
    """The least solution of a positive semi-definite system: by Cholesky, or where that is not
    safe, on the span of its eigenvectors.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    if not int(failed) and float(pivots.min()) > 1e-12 * float(pivots.max()):
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > 1e-12 * float(values.max().clamp(min=1e-300))
    basis = vectors[:, kept]
    found: Tensor = (basis / values[kept]) @ (basis.T @ right)
    return found


def _complete_statistics(g: MergeInput) -> Sequence[Any] | None:
    """What is known of each of the tensors; None where nothing is, or not of all."""
    if len(g.statistics) != len(g.tensors):
        raise MergeError(
            f"there are {len(g.statistics)} statistics for the {len(g.tensors)} models of "
            f'"{g.name}"',
            hint="give statistics= with one mapping for each model, by regauge.merging.statistics",
        )
    return None if any(s is None for s in g.statistics) else g.statistics


def _require_positive_weights(g: MergeInput) -> list[float]:
    weights = [float(p["weight"]) for p in g.per_model]
    if min(weights) < 0 or not sum(weights):
        raise MergeError(
            f'the weights of "{g.name}" are {weights}',
            hint="this method divides by them: none may be negative, nor all 0",
        )
    return weights


def slerp(g: MergeInput) -> TensorOrBlocks:
    """Along the great circle from the base to the other model. Where the two point almost one way
    (or opposite ways), along the line.
    """
    t = float(g.shared["t"])
    if len(g.tensors) == 1:
        return g.tensors[0].to(g.out_dtype)
    pair = [g.base_tensor, g.tensors[g.others[0]]]
    inner = inner_products(pair, working_dtype(pair))
    norms = [n if n > 1e-8 else 1.0 for n in np.sqrt(np.diag(inner))]
    dot = float(inner[0, 1] / (norms[0] * norms[1]))
    if abs(dot) > 0.9995:
        return combine(pair, (1 - t, t), g.out_dtype)
    angle = math.acos(dot)
    return combine(
        pair,
        (math.sin(angle * (1 - t)) / math.sin(angle), math.sin(angle * t) / math.sin(angle)),
        g.out_dtype,
    )


def karcher(g: MergeInput) -> TensorOrBlocks:
    """The mean on the sphere of the directions, with the mean of the lengths. The mean direction
    lies in the span of the inputs, so that it is sought among their coefficients.
    """
    tol, count = float(g.shared["tol"]), len(g.tensors)
    if count == 1:
        return g.tensors[0].to(g.out_dtype)
    inner = inner_products(g.tensors, torch.float64)
    norms = np.sqrt(np.diag(inner))
    valid = [i for i in range(count) if norms[i] > tol]
    if not valid:
        return torch.zeros(g.tensors[0].shape, dtype=g.out_dtype)
    gram = inner[np.ix_(valid, valid)] / np.outer(norms[valid], norms[valid])
    alpha = 1 / len(valid)

    def size(c: Any) -> float:
        return math.sqrt(max(float(c @ gram @ c), 0.0))

    u = np.full(len(valid), alpha)
    u = np.eye(len(valid))[0] if size(u) < tol else u / size(u)
    for _ in range(int(g.shared["max_iter"])):
        step = np.zeros(len(valid))
        for i in range(len(valid)):
            dot = min(max(float(gram[i] @ u), -1.0), 1.0)
            angle = math.acos(dot)
            if angle >= tol and math.sin(angle) > 0:
                step += alpha * (angle / math.sin(angle)) * (np.eye(len(valid))[i] - dot * u)
        length = size(step)
        if length < tol:
            break
        u = math.cos(length) * u + math.sin(length) * step / length
        u = u / size(u) if size(u) > tol else u
    factors = np.zeros(count)
    factors[valid] = norms.mean() * u / norms[valid]
    return combine(g.tensors, factors.tolist(), g.out_dtype)


def model_stock(g: MergeInput) -> TensorOrBlocks:
    """Between the base and the mean of the others, nearer to the mean the smaller the angles
    between what they learned.
    """
    others = [g.tensors[i] for i in g.others]
    if not others:
        return g.base_tensor.to(g.out_dtype)
    if len(others) < 2:
        raise MergeError(
            "model_stock needs two models besides the base", hint="add a model, or use linear"
        )
    if g.shared["filter_wise"]:
        rows = [
            t.reshape(t.shape[0], -1) if t.dim() > 1 else t.reshape(1, -1)
            for t in (g.base_tensor, *others)
        ]
        made = [
            _stock_average([r[i] for r in rows], g.out_dtype).tensor()
            for i in range(rows[0].shape[0])
        ]
        return torch.stack(made).view(g.base_tensor.shape)
    return _stock_average([g.base_tensor, *others], g.out_dtype)


def _stock_average(tensors: Sequence[Tensor], dtype: torch.dtype) -> Blocks:
    root, *others = tensors
    inner, n = inner_products(others, working_dtype(tensors), minus=root), len(others)
    norms = np.sqrt(np.diag(inner))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    cosine = sum(
        min(max(float(inner[i, j] / max(norms[i] * norms[j], 1e-6)), -1.0), 1.0) for i, j in pairs
    ) / len(pairs)
    t = n * cosine / (1 + (n - 1) * cosine) if 1 + (n - 1) * cosine else math.nan
    return combine(tensors, (1 - t, *[t / n] * n), dtype)


def passthrough(g: MergeInput) -> TensorOrBlocks:
    """The tensor as it is, or scaled."""
    if len(g.tensors) != 1:
        raise MergeError(
            f"passthrough takes one model in each place, and here are {len(g.tensors)}",
            hint="give each slice one source, or use linear",
        )
    scale = g.per_model[0]["scale"]
    return (
        g.tensors[0].to(g.out_dtype)
        if scale is None
        else combine(g.tensors, [float(scale)], g.out_dtype)
    )


def task_vectors(g: MergeInput, sparse: Sparsifier, vote: bool) -> TensorOrBlocks:
    """The base plus what the others learned (their differences from it), weighted: all of it, or
    what `sparse` keeps; all of it, or with a `vote` only what has the sign of the weighted sum.
    """
    root, others = g.base_tensor, g.others
    if not others:
        return root.to(g.out_dtype)
    work, kind = working_dtype(g.tensors), (g.compare_dtype or root.dtype)
    # What is selected or voted on is compared as mergekit stores it: else equal values of a half
    # precision would not be equal here.
    rounding = (
        kind
        if (sparse is not keep_all or vote) and kind in (torch.float16, torch.bfloat16)
        else None
    )
    kept: list[Selection] = []
    for place, i in enumerate(
        others
    ):  # what is drawn for a model does not depend on where the base is listed
        deltas = TaskVector(g.tensors[i], root, work, rounding, BLOCK_SIZE)
        kept.append(
            sparse(deltas, g.per_model[i], bool(g.shared["rescale"]), f"{g.name}/{place}", g.seed)
        )
    weights = [float(g.per_model[i]["weight"]) for i in others]
    factors = [w * k.scale for w, k in zip(weights, kept, strict=True)]
    total, normalize, amount = sum(weights), bool(g.shared["normalize"]), float(g.shared["lambda"])
    even = 1.0 if abs(total) < 1e-8 else total

    def block(parts: Sequence[Tensor], at: slice) -> Tensor:
        base, *xs = parts
        deltas = []
        for x, keep, factor in zip(xs, kept, factors, strict=True):
            delta = x.sub_(base)
            if rounding is not None:
                delta = delta.to(rounding).to(work)
            deltas.append(keep.apply(delta, at).mul_(factor))
        if vote:
            mixed = _elect_signs(deltas, weights, normalize)
        else:
            mixed = deltas[0]
            for delta in deltas[1:]:
                mixed.add_(delta)
            if normalize:
                mixed.div_(even)
        return base.add_(mixed, alpha=amount)

    return blockwise([root, *(g.tensors[i] for i in others)], g.out_dtype, block)


def _elect_signs(deltas: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """The sum of what has the sign of the sum of all, 0 counting as positive; with normalize,
    divided by the weights of what was added up. The deltas are used up.
    """
    total = deltas[0] + 0.0  # a copy, in which -0 has become 0
    for delta in deltas[1:]:
        total += delta
    sign = torch.copysign(torch.ones((), dtype=total.dtype), total)
    mixed = torch.zeros_like(total)
    divisor = torch.zeros_like(total) if normalize else None
    for delta, weight in zip(deltas, weights, strict=True):
        mixed += delta.mul_(sign).clamp_(min=0)
        if divisor is not None:
            divisor.add_(delta.sign_(), alpha=weight)
    mixed.mul_(sign)
    if divisor is not None and min(weights) >= 0:
        mixed.div_(divisor.clamp_(min=1e-30))  # where it is 0, so is what it divides
    elif divisor is not None:
        mixed.div_(torch.where(divisor == 0, 1.0, divisor))
    return mixed


def _task_method(
    sparse: Sparsifier, vote: bool, normalize: bool, rescale: bool, about: str, **each: Any
) -> Method:
    shared = {"normalize": normalize, "rescale": rescale, "lambda": 1.0, "int8_mask": False}
    return Method(
        partial(task_vectors, sparse=sparse, vote=vote),
        True,
        shared,
        {"weight": REQUIRED, "density": 1.0, **each},
        about,
    )


def _transport_method(about: str, statistic: str = "", **shared: Any) -> Method:
    return Method(
        linear, False, {"normalize": True, **shared}, {"weight": 1.0}, about, statistic, True
    )


# int8_mask is how mergekit stores its masks: it changes no result there, and none here.
METHODS: dict[str, Method] = {
    "linear": Method(linear, False, {"normalize": True}, {"weight": REQUIRED}, "the weighted mean"),
    "slerp": Method(
        slerp, True, {"t": REQUIRED}, description="along the great circle between two models"
    ),
    "task_arithmetic": _task_method(
        keep_all, False, False, False, "the base plus weighted task vectors"
    ),
    "ties": _task_method(
        keep_largest, True, True, False, "task vectors, trimmed by magnitude, with elected signs"
    ),
    "dare_linear": _task_method(
        keep_random, False, False, True, "task vectors, dropped at random and rescaled"
    ),
    "dare_ties": _task_method(keep_random, True, False, True, "the same, with elected signs"),
    "della_linear": _task_method(
        keep_by_rank,
        False,
        False,
        True,
        "task vectors, dropped at random by rank of magnitude and rescaled",
        epsilon=0.15,
    ),
    "della": _task_method(
        keep_by_rank, True, True, True, "the same, with elected signs", epsilon=0.15
    ),
    "model_stock": Method(
        model_stock,
        True,
        {"filter_wise": False},
        description="between the base and the mean, by the angles of the task vectors",
    ),
    "karcher": Method(
        karcher,
        False,
        {"max_iter": 10, "tol": 1e-5},
        description="the Riemannian mean on the sphere",
    ),
    "fisher": Method(
        fisher,
        False,
        {"floor": 1e-6},
        {"weight": 1.0},
        "the mean, weighted by the diagonal Fisher",
        "fisher",
    ),
    "regmean": Method(
        regmean,
        False,
        {"alpha": 0.9},
        {"weight": 1.0},
        "the least-squares fit to what each layer does to its inputs",
        "gram",
    ),
    "ot_wts": _transport_method(
        "transported softly by weights, then averaged", regularization=0.05
    ),
    "ot_acts": _transport_method(
        "transported softly by activations, then averaged", "activations", regularization=0.05
    ),
    "ot_acts_emd": _transport_method(
        "transported exactly by activations, then averaged", "activations"
    ),
    "passthrough": Method(
        passthrough, False, {}, {"scale": None}, "layers as they are, for slices"
    ),
}

# Methods of mergekit that are not here yet, to be refused by name and not as a typo.
UNSUPPORTED = (
    "nuslerp",
    "multislerp",
    "breadcrumbs",
    "breadcrumbs_ties",
    "sce",
    "nearswap",
    "arcee_fusion",
    "ram",
    "ramplus_tl",
)


def parameter_names() -> frozenset[str]:
    """Every parameter that some method has."""
    return frozenset(name for m in METHODS.values() for name in (*m.shared, *m.per_model))
