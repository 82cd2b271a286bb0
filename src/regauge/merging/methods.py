"""Merge methods: pure functions of corresponding tensors of several models, and of their
statistics.

All arithmetic is in float32 (float64 if an input is), block by block, and the result is rounded
once, to the output dtype. Formulas, defaults and edge cases are mergekit's, so its recipes mean the
same here. Methods that depend on angles and lengths alone (slerp, Karcher mean, model stock) return
a combination of their inputs with coefficients that follow from the inner products: two passes,
however many iterations the method has. Methods of transport are the weighted mean of models that
`transport` has transformed before.
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
from regauge.errors import MergeError
from regauge.merging.products import Entries
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
TensorOrBlocks = Tensor | Blocks  # a whole tensor, or its blocks as they are computed
BLOCK_SIZE = 1 << 17  # values: a few float32 arrays of this size fit into the cache


class Required:
    """The default of a parameter that must be passed."""

    def __repr__(self) -> str:
        return "needed"


REQUIRED = Required()


@dataclass(frozen=True)
class MergeInput:
    """The input of a method for one output tensor.

    Attributes:
        tensors: the tensors, in the recipe's order.
        shared: the parameters of the merge.
        per_model: the parameters of each model.
        base: the index of the base model's tensor.
        dtype: the dtype of the result.
        compare_dtype: the dtype in which mergekit would compute: values are selected and voted on
            in it.
        name: the name of the tensor; with `seed` it determines random choices.
        seed: the random seed.
        statistics: a statistic of each tensor, or None if there is none.
        reading: the axes along which neurons read their inputs, if the tensor holds the input
            weights of the neurons of a feed-forward layer.
        products: entries that are not averaged themselves, but factors of averaged products.
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
    reading: tuple[int, ...] = ()
    products: Sequence[Entries] = ()

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result: by default that of the base, or of the first tensor."""
        return self.dtype or self.tensors[self.base or 0].dtype

    @property
    def base_tensor(self) -> Tensor:
        """The base model's tensor."""
        assert self.base is not None, "a method that needs a base is not called without"
        return self.tensors[self.base]

    @property
    def others(self) -> list[int]:
        """The indices of all tensors but the base."""
        return [i for i in range(len(self.tensors)) if i != self.base]


@dataclass(frozen=True)
class Method:
    """A merge method.

    Attributes:
        merge: the function.
        needs_base: whether it needs a base model.
        takes_base: whether it merges differences from a base model, if there is one.
        shared: the parameters of the merge, with their defaults.
        per_model: the parameters of each model, with their defaults.
        description: one line about it.
        statistic: the statistic of each model that it needs: "fisher", "gram", "activations" or
            none.
        is_transport: whether models are first transported to the first one (or the base), by the
            statistic or else by their weights.
    """

    merge: Callable[[MergeInput], TensorOrBlocks]
    needs_base: bool = False
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_model: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    statistic: str = ""
    is_transport: bool = False
    takes_base: bool = False

    @property
    def uses_base(self) -> bool:
        """Whether a base model is not one of the models that are merged."""
        return self.needs_base or self.takes_base


def blockwise(
    tensors: Sequence[Tensor], dtype: torch.dtype, make: Callable[[Sequence[Tensor], slice], Tensor]
) -> Blocks:
    """Return a tensor whose blocks are computed from the blocks of others.

    `make` gets copies in the working precision and may overwrite them.
    """

    def blocks() -> Iterator[Any]:
        out, start = torch.empty(min(BLOCK_SIZE, tensors[0].numel()), dtype=dtype), 0
        bits = bits_of(out)
        for inputs in _iter_blocks(tensors, working_dtype(tensors)):
            size = inputs[0].numel()
            block = make(inputs, slice(start, start + size))
            (out if size == bits.size else out[:size]).copy_(block)
            yield bits if size == bits.size else bits[:size]
            start += size

    return Blocks(tuple(tensors[0].shape), dtype, blocks)


def _iter_blocks(tensors: Sequence[Tensor], work: torch.dtype) -> Iterator[list[Tensor]]:
    """Yield the blocks of all tensors in the working precision. Buffers are reused for the next
    block.
    """
    buffers = [torch.empty(min(BLOCK_SIZE, t.numel()), dtype=work) for t in tensors]
    for parts in zip(*(torch.split(t.reshape(-1), BLOCK_SIZE) for t in tensors), strict=True):
        yield [
            (buffer if buffer.numel() == part.numel() else buffer[: part.numel()]).copy_(part)
            for buffer, part in zip(buffers, parts, strict=True)
        ]


def working_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return float64 if any tensor has it, otherwise float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def combine(tensors: Sequence[Tensor], factors: Sequence[float], dtype: torch.dtype) -> Blocks:
    """Return the sum of tensors times factors."""

    def block(parts: Sequence[Tensor], _: slice) -> Tensor:
        total = parts[0].mul_(factors[0])
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total.add_(part, alpha=factor)
        return total

    return blockwise(tensors, dtype, block)


def inner_products(
    tensors: Sequence[Tensor], work: torch.dtype, minus: Tensor | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the inner products of the tensors with each other, after subtracting `minus` from
    each.
    """
    n = len(tensors)
    gram = np.zeros((n, n))
    for parts in _iter_blocks([*tensors, *([] if minus is None else [minus])], work):
        for i, x in enumerate(parts[:n]):
            if minus is not None:
                x.sub_(parts[n])
            for j in range(i + 1):
                gram[i, j] += float(x.dot(parts[j]))
    return np.tril(gram) + np.tril(gram, -1).T


def normalized_weights(
    shared: Mapping[str, Any], per_model: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the weights of a weighted mean, or of a weighted sum if it is not normalized."""
    weights = [float(p["weight"]) for p in per_model]
    total = sum(weights) if shared.get("normalize", True) else 1.0
    return [weight / total for weight in weights] if total else weights


def linear(inputs: MergeInput) -> TensorOrBlocks:
    """Return the weighted mean, or without `normalize` the weighted sum.

    The mean with equal weights is a model soup. With `keep_norms` the input weights of each neuron
    of a feed-forward layer keep the mean norm of those that were averaged: neurons that are alike
    but not equal average to shorter ones. With `products` the products inside attention heads are
    averaged (see `products`).
    """
    weights = [float(p["weight"]) for p in inputs.per_model]
    total = (
        float(torch.tensor(weights, dtype=working_dtype(inputs.tensors)).sum())
        if inputs.shared.get("normalize", True)
        else None
    )
    if total == 0:
        raise MergeError(
            f'the weights of "{inputs.name}" must not add up to 0 with normalize, got {weights}',
            hint="change a weight, or set normalize: false",
        )

    def block(parts: Sequence[Tensor], _: slice) -> Tensor:
        # Rounded where mergekit rounds: values close to 0 depend on it. addcmul_ rounds once if the
        # processor fuses the two operations, otherwise twice.
        added = parts[0].mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            added.addcmul_(part, torch.tensor(weight, dtype=part.dtype))
        return added if total is None else added.div_(total)

    keep_norms = inputs.shared.get("keep_norms", False) and inputs.reading
    if not keep_norms and not inputs.products:
        return blockwise(inputs.tensors, inputs.out_dtype, block)
    dtype = working_dtype(inputs.tensors)
    mean = blockwise(inputs.tensors, dtype, block).tensor()
    for entries in inputs.products:
        entries.insert_(mean)
    if not keep_norms:
        return mean.to(inputs.out_dtype)

    def norms(tensor: Tensor) -> Tensor:
        out: Tensor = torch.linalg.vector_norm(tensor.to(dtype), dim=inputs.reading, keepdim=True)
        return out

    wanted = torch.stack([w * norms(x) for x, w in zip(inputs.tensors, weights, strict=True)]).sum(
        0
    ) / (total or 1.0)
    present = norms(mean)
    factor = torch.where(present > 0, wanted / present, torch.ones_like(present))
    return (mean * factor).to(inputs.out_dtype)


def fisher(inputs: MergeInput) -> TensorOrBlocks:
    """Return the mean of every value, weighted by the diagonal Fisher information.

    sum w F x / sum w F (Matena and Raffel 2022). Each F is at least `floor` times the mean over the
    tensor and the models, so values without information are averaged.
    """
    fishers = _complete_statistics(inputs)
    if fishers is None:
        return linear(inputs)
    weights = _require_positive_weights(inputs)
    mean = (
        sum(float(f.double().mean()) for f in fishers) / len(fishers)
        if inputs.tensors[0].numel()
        else 0.0
    )
    if not math.isfinite(mean):
        raise MergeError(
            f'the Fisher information of "{inputs.name}" must be finite',
            hint="check the weights and the data of each model",
        )
    n, floor = len(fishers), float(inputs.shared["floor"]) if mean else 1.0

    def block(parts: Sequence[Tensor], _: slice) -> Tensor:
        numerator, denominator = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
        for x, f, w in zip(parts[:n], parts[n:], weights, strict=True):
            share = f.div(mean or 1.0).clamp_(min=floor).mul_(w)
            numerator.addcmul_(share, x)
            denominator.add_(share)
        return numerator.div_(denominator)

    return blockwise([*inputs.tensors, *fishers], inputs.out_dtype, block)


def regmean(inputs: MergeInput) -> TensorOrBlocks:
    """Return the weight whose layer best reproduces each model's layer on its own inputs.

    In least squares (Jin et al. 2023), computed in float64:

        W = (sum w G)^-1 sum w G W_i,     G = X^T X with its off-diagonal multiplied by `alpha`

    Directions that the inputs do not determine are those of the weighted mean. Tensors without a
    Gram matrix (tables, norms, biases) are averaged.
    """
    grams = _complete_statistics(inputs)
    if grams is None:
        return linear(inputs)
    weights, alpha = _require_positive_weights(inputs), float(inputs.shared["alpha"])
    matrices = [_shrink_gram(gram.values, alpha) for gram in grams]
    rows = [gram.to_rows(t).double() for gram, t in zip(grams, inputs.tensors, strict=True)]
    if not all(bool(m.isfinite().all()) for m in matrices):
        raise MergeError(
            f'the inputs of "{inputs.name}" must be finite',
            hint="check the weights and the data of each model",
        )
    total = sum(
        (w * m for w, m in zip(weights, matrices, strict=True)), torch.zeros_like(matrices[0])
    )
    mean = sum(
        (w / sum(weights) * x for w, x in zip(weights, rows, strict=True)),
        torch.zeros_like(rows[0]),
    )
    right = sum(
        (w * (m @ (x - mean)) for w, m, x in zip(weights, matrices, rows, strict=True)),
        torch.zeros_like(mean),
    )
    merged: Tensor = grams[0].from_rows(mean + _solve_psd(total, right), inputs.tensors[0])
    return merged.to(inputs.out_dtype)


def _shrink_gram(gram: Tensor, alpha: float) -> Tensor:
    """Multiply the off-diagonal of a Gram matrix by alpha."""
    return alpha * gram + (1 - alpha) * torch.diag(gram.diagonal())


def _solve_psd(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the least-norm solution of a positive semi-definite system.

    By Cholesky, or if that is not safe, on the span of the eigenvectors.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    if not int(failed) and float(pivots.min()) > 1e-12 * float(pivots.max()):
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(matrix)
    is_positive = values > 1e-12 * float(values.max().clamp(min=1e-300))
    basis = vectors[:, is_positive]
    solution: Tensor = (basis / values[is_positive]) @ (basis.T @ right)
    return solution


def _complete_statistics(inputs: MergeInput) -> Sequence[Any] | None:
    """Return the statistics of all tensors; None if a tensor has none."""
    if len(inputs.statistics) != len(inputs.tensors):
        raise MergeError(
            f'"{inputs.name}" needs {len(inputs.tensors)} statistics, one for each model, got '
            f"{len(inputs.statistics)}",
            hint="pass statistics= with one mapping for each model, by regauge.merging.statistics",
        )
    return None if any(s is None for s in inputs.statistics) else inputs.statistics


def _require_positive_weights(inputs: MergeInput) -> list[float]:
    """Return the weights, which must not be negative nor all 0."""
    weights = [float(p["weight"]) for p in inputs.per_model]
    if min(weights) < 0 or not sum(weights):
        raise MergeError(
            f'the weights of "{inputs.name}" must be >= 0 and not all 0, got {weights}',
            hint="this method divides by their sum",
        )
    return weights


def slerp(inputs: MergeInput) -> TensorOrBlocks:
    """Interpolate along the great circle from the base to the other model.

    If the two are almost parallel (or opposite), along the line.
    """
    t = float(inputs.shared["t"])
    if len(inputs.tensors) == 1:
        return inputs.tensors[0].to(inputs.out_dtype)
    pair = [inputs.base_tensor, inputs.tensors[inputs.others[0]]]
    inner = inner_products(pair, working_dtype(pair))
    norms = [n if n > 1e-8 else 1.0 for n in np.sqrt(np.diag(inner))]
    dot = float(inner[0, 1] / (norms[0] * norms[1]))
    if abs(dot) > 0.9995:
        return combine(pair, (1 - t, t), inputs.out_dtype)
    angle = math.acos(dot)
    return combine(
        pair,
        (math.sin(angle * (1 - t)) / math.sin(angle), math.sin(angle * t) / math.sin(angle)),
        inputs.out_dtype,
    )


def nuslerp(inputs: MergeInput) -> TensorOrBlocks:
    """Interpolate along the arc between two models, at the share of the second one's weight.

    With a base, between their differences from it. Unless `nuslerp_flatten`, row by row of the last
    axis, or with `nuslerp_row_wise` along the first one.
    """
    if len(inputs.tensors) == 1:
        return inputs.tensors[0].to(inputs.out_dtype)
    if len(inputs.others) != 2:
        raise MergeError(
            f"nuslerp takes two models, and a base if there is one, got {len(inputs.others)}",
            hint="use karcher for more than two models",
        )
    pair = [inputs.tensors[i] for i in inputs.others]
    base = None if inputs.base is None else inputs.base_tensor
    first, second = (float(inputs.per_model[i]["weight"]) for i in inputs.others)
    t = 0.5 if abs(first + second) < 1e-6 else second / (first + second)
    work = working_dtype(inputs.tensors)
    if inputs.shared["nuslerp_flatten"]:
        inner = torch.from_numpy(inner_products(pair, work, minus=base))
        a, b = (float(f) for f in _arc(t, inner[0, 0], inner[1, 1], inner[0, 1]))
        whole = pair if base is None else [*pair, base]
        return combine(whole, (a, b, 1 - a - b)[: len(whole)], inputs.out_dtype)
    axis = 0 if inputs.shared["nuslerp_row_wise"] else -1
    u, v = (x.to(work) if base is None else x.to(work) - base.to(work) for x in pair)
    x, y = (z.transpose(axis, -1) if z.dim() else z.reshape(1) for z in (u, v))
    factors = _arc(
        t, *((p * q).sum(-1, keepdim=True).double() for p, q in ((x, x), (y, y), (x, y)))
    )
    mixed = factors[0].to(work) * x + factors[1].to(work) * y
    merged = (mixed.transpose(axis, -1) if u.dim() else mixed.reshape(())).contiguous()
    return (merged if base is None else merged.add_(base)).to(inputs.out_dtype)


def _arc(t: float, xx: Tensor, yy: Tensor, xy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of two vectors at `t` of the arc between them, from their inner products.

    Of parallel vectors, those of the line.
    """
    lengths = xx.sqrt().clamp(min=1e-7) * yy.sqrt().clamp(min=1e-7)
    angle = (xy / lengths).clamp(-1, 1).acos()
    sine = angle.sin()
    is_line = sine.abs() < 1e-8
    divisor = torch.where(is_line, 1.0, sine)
    first = torch.where(is_line, 1 - t, ((1 - t) * angle).sin() / divisor)
    return first, torch.where(is_line, t, (t * angle).sin() / divisor)


def karcher(inputs: MergeInput) -> TensorOrBlocks:
    """Return the Karcher mean of the directions on the sphere, with the mean of the lengths.

    The mean direction lies in the span of the inputs, so the iteration runs on their coefficients.
    """
    tol, count = float(inputs.shared["tol"]), len(inputs.tensors)
    if count == 1:
        return inputs.tensors[0].to(inputs.out_dtype)
    inner = inner_products(inputs.tensors, torch.float64)
    norms = np.sqrt(np.diag(inner))
    valid = [i for i in range(count) if norms[i] > tol]
    if not valid:
        return torch.zeros(inputs.tensors[0].shape, dtype=inputs.out_dtype)
    gram = inner[np.ix_(valid, valid)] / np.outer(norms[valid], norms[valid])
    alpha = 1 / len(valid)

    def size(c: Any) -> float:
        return math.sqrt(max(float(c @ gram @ c), 0.0))

    u = np.full(len(valid), alpha)
    u = np.eye(len(valid))[0] if size(u) < tol else u / size(u)
    for _ in range(int(inputs.shared["max_iter"])):
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
    return combine(inputs.tensors, factors.tolist(), inputs.out_dtype)


def model_stock(inputs: MergeInput) -> TensorOrBlocks:
    """Interpolate between the base and the mean of the others (Model Stock).

    The smaller the angles between the task vectors, the closer to the mean.
    """
    others = [inputs.tensors[i] for i in inputs.others]
    if not others:
        return inputs.base_tensor.to(inputs.out_dtype)
    if len(others) < 2:
        raise MergeError(
            f"model_stock needs two models besides the base, got {len(others)}",
            hint="add a model, or use linear",
        )
    if inputs.shared["filter_wise"]:
        rows = [
            t.reshape(t.shape[0], -1) if t.dim() > 1 else t.reshape(1, -1)
            for t in (inputs.base_tensor, *others)
        ]
        merged_rows = [
            _stock_average([r[i] for r in rows], inputs.out_dtype).tensor()
            for i in range(rows[0].shape[0])
        ]
        return torch.stack(merged_rows).view(inputs.base_tensor.shape)
    return _stock_average([inputs.base_tensor, *others], inputs.out_dtype)


def _stock_average(tensors: Sequence[Tensor], dtype: torch.dtype) -> Blocks:
    """Return the Model Stock average of one tensor or row."""
    base, *others = tensors
    inner, n = inner_products(others, working_dtype(tensors), minus=base), len(others)
    norms = np.sqrt(np.diag(inner))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    cosine = sum(
        min(max(float(inner[i, j] / max(norms[i] * norms[j], 1e-6)), -1.0), 1.0) for i, j in pairs
    ) / len(pairs)
    t = n * cosine / (1 + (n - 1) * cosine) if 1 + (n - 1) * cosine else math.nan
    return combine(tensors, (1 - t, *[t / n] * n), dtype)


def passthrough(inputs: MergeInput) -> TensorOrBlocks:
    """Return the tensor unchanged, or scaled."""
    if len(inputs.tensors) != 1:
        raise MergeError(
            f"passthrough takes one model, got {len(inputs.tensors)}",
            hint="give each slice one source, or use linear",
        )
    scale = inputs.per_model[0]["scale"]
    return (
        inputs.tensors[0].to(inputs.out_dtype)
        if scale is None
        else combine(inputs.tensors, [float(scale)], inputs.out_dtype)
    )


def task_vectors(inputs: MergeInput, sparse: Sparsifier, vote: bool) -> TensorOrBlocks:
    """Return the base plus the weighted task vectors of the others (their differences from it).

    Args:
        inputs: the tensors and parameters.
        sparse: selects the values of each task vector.
        vote: keep only values with the sign of the weighted sum.
    """
    base_tensor, others = inputs.base_tensor, inputs.others
    if not others:
        return base_tensor.to(inputs.out_dtype)
    work, compare_dtype = working_dtype(inputs.tensors), (inputs.compare_dtype or base_tensor.dtype)
    # Values are selected and voted on in the dtype of mergekit: otherwise values that are equal in
    # half precision would not be equal here.
    rounding = (
        compare_dtype
        if (sparse is not keep_all or vote) and compare_dtype in (torch.float16, torch.bfloat16)
        else None
    )
    selections: list[Selection] = []
    # Random choices for a model do not depend on the position of the base in the list.
    for number, i in enumerate(others):
        deltas = TaskVector(inputs.tensors[i], base_tensor, work, rounding, BLOCK_SIZE)
        selections.append(
            sparse(
                deltas,
                inputs.per_model[i],
                bool(inputs.shared["rescale"]),
                f"{inputs.name}/{number}",
                inputs.seed,
            )
        )
    weights = [float(inputs.per_model[i]["weight"]) for i in others]
    factors = [w * selection.scale for w, selection in zip(weights, selections, strict=True)]
    total, normalize, scale = (
        sum(weights),
        bool(inputs.shared["normalize"]),
        float(inputs.shared["lambda"]),
    )
    divisor = 1.0 if abs(total) < 1e-8 else total

    def block(parts: Sequence[Tensor], at: slice) -> Tensor:
        base, *xs = parts
        deltas = []
        for x, selection, factor in zip(xs, selections, factors, strict=True):
            delta = x.sub_(base)
            if rounding is not None:
                delta = delta.to(rounding).to(work)
            deltas.append(selection.apply(delta, at).mul_(factor))
        if vote:
            mixed = _elect_signs(deltas, weights, normalize)
        else:
            mixed = deltas[0]
            for delta in deltas[1:]:
                mixed.add_(delta)
            if normalize:
                mixed.div_(divisor)
        return base.add_(mixed, alpha=scale)

    return blockwise([base_tensor, *(inputs.tensors[i] for i in others)], inputs.out_dtype, block)


def _elect_signs(deltas: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Return the sum of the values with the sign of the total; 0 counts as positive.

    With `normalize` it is divided by the weights of the values that were added. The deltas are
    overwritten.
    """
    total = deltas[0] + 0.0  # a copy, in which -0 becomes 0
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
        mixed.div_(divisor.clamp_(min=1e-30))  # where it is 0, so is the numerator
    elif divisor is not None:
        mixed.div_(torch.where(divisor == 0, 1.0, divisor))
    return mixed


def _task_method(
    sparse: Sparsifier, vote: bool, normalize: bool, rescale: bool, about: str, **each: Any
) -> Method:
    """Return a method of task vectors."""
    shared = {"normalize": normalize, "rescale": rescale, "lambda": 1.0, "int8_mask": False}
    return Method(
        partial(task_vectors, sparse=sparse, vote=vote),
        True,
        shared,
        {"weight": REQUIRED, "density": 1.0, **each},
        about,
    )


def _transport_method(about: str, statistic: str = "", **shared: Any) -> Method:
    """Return a method of transport."""
    return Method(
        linear, False, {"normalize": True, **shared}, {"weight": 1.0}, about, statistic, True
    )


# mergekit's int8_mask sets the storage of masks: it changes no result there or here.
METHODS: dict[str, Method] = {
    "linear": Method(
        linear,
        False,
        {"normalize": True, "keep_norms": False, "products": False},
        {"weight": REQUIRED},
        "the weighted mean",
    ),
    "slerp": Method(
        slerp, True, {"t": REQUIRED}, description="along the great circle between two models"
    ),
    "nuslerp": Method(
        nuslerp,
        False,
        {"nuslerp_flatten": True, "nuslerp_row_wise": False},
        {"weight": REQUIRED},
        "along the arc between two models, or between their differences from a base",
        takes_base=True,
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

# Methods of mergekit that are not supported: the error names them as such, not as a typo.
UNSUPPORTED = (
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
    """Return every parameter that some method has."""
    return frozenset(name for m in METHODS.values() for name in (*m.shared, *m.per_model))
