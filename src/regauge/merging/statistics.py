"""Statistics of a model on data: diagonal Fisher, Gram matrices of layer inputs, layer outputs.

Each is a pure function of a module, a state in place of the module's own weights, and batches
(arguments of forward by name). A statistic belongs to the basis that it was computed in: for a
model that is transformed afterwards, compute it from the transformed state, or transform it by the
same element. In a merge the states are in the basis of the merge before statistics are computed.

    f = [fisher(module, state, batches) for state in states]       # Matena and Raffel 2022
    g = [grams(module, state, batches) for state in states]        # Jin et al. 2023
    merge(states, "fisher", statistics=f); merge(states, "regmean", statistics=g)

Tokens that an attention mask marks as padding are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F

from regauge.errors import StatisticsError

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]
MAX_EXACT_CLASSES = 32  # the expectation over more classes is estimated by sampling labels
MAX_ROWS = 4096  # of a layer's outputs


@dataclass(frozen=True, eq=False)
class Gram:
    """X^T X of the inputs of one layer, in float64.

    The inputs run along the axes of its weight from `dim` = 1 on, or along the first one (0).
    """

    values: Tensor
    dim: int

    def to_rows(self, weight: Tensor) -> Tensor:
        """Return a weight as a matrix [inputs, outputs]."""
        return weight.reshape(weight.shape[0], -1).T if self.dim else weight

    def from_rows(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return such a matrix in the weight's own layout."""
        return (rows.T if self.dim else rows).reshape(weight.shape)


@dataclass(frozen=True)
class Layer:
    """A linear layer: the name of its weight, and the axes that are contracted with the inputs.

    `dim` is as in `Gram`.
    """

    name: str
    module: torch.nn.Module
    dim: int


def linear_layers(module: torch.nn.Module) -> Iterator[Layer]:
    """Yield the linear layers of a model.

    These are nn.Linear, Conv1D of the transformers library, and convolutions of patches that do not
    overlap.
    """
    for name, layer in module.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(layer, torch.nn.Linear):
            yield Layer(weight, layer, 1)
        elif type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith(
            "transformers."
        ):
            yield Layer(weight, layer, 0)
        elif (
            isinstance(layer, torch.nn.Conv2d)
            and layer.kernel_size == layer.stride
            and layer.groups == 1
            and not any(layer.padding)
        ):
            yield Layer(weight, layer, 1)


def fisher(
    module: torch.nn.Module,
    state: State | None,
    batches: Iterable[Batch],
    labels: Iterable[Tensor] | None = None,
    *,
    causal: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Compute the diagonal of the Fisher information of every parameter.

    Matena and Raffel 2022, "Merging Models with Fisher-Weighted Averaging":

        F = mean over examples x of E_{y ~ p(y|x)} [ (d log p(y|x) / d theta)^2 ]

    The expectation is over the model's own predictions: exact for up to `MAX_EXACT_CLASSES` classes
    of an example, else by one sampled label. A text has a label for each token, sampled
    independently: the gradients of different tokens are then uncorrelated, so the square of their
    sum estimates the sum of their squares.

    Args:
        module: the model.
        state: weights to use in place of the module's own; None for its own.
        batches: arguments of forward, by name.
        labels: labels of each batch, -100 where there is none, for the *empirical* Fisher.
        causal: the logits of a token predict the next one.
        seed: the seed of the sampled labels.

    Raises:
        StatisticsError: if batches are empty, or the model has no logits.
    """
    parameters = _prepare_parameters(module, state)
    leaves: dict[int, str] = {}
    for name, p in parameters.items():
        leaves.setdefault(id(p), name)
    total = {name: torch.zeros_like(parameters[name]) for name in leaves.values()}
    generator, count = torch.Generator().manual_seed(seed), 0
    label_batches = iter(labels) if labels is not None else None
    for batch in batches:
        batch_labels = next(label_batches) if label_batches is not None else None
        for i in range(_batch_size(batch)):
            example = {name: x[i : i + 1] for name, x in batch.items()}
            for weight, loss, has_more in _log_likelihoods(
                module,
                parameters,
                example,
                None if batch_labels is None else batch_labels[i : i + 1],
                causal,
                generator,
            ):
                grads = torch.autograd.grad(
                    loss, [parameters[n] for n in total], retain_graph=has_more, allow_unused=True
                )
                for name, grad in zip(total, grads, strict=True):
                    if grad is not None:
                        total[name].addcmul_(grad, grad, value=weight)
            count += 1
    if not count:
        raise StatisticsError(
            "batches must not be empty: a Fisher information needs examples",
            hint="pass at least one example",
        )
    return {name: t.div_(count) for name, t in total.items()}


def _log_likelihoods(
    module: torch.nn.Module,
    parameters: State,
    example: Batch,
    labels: Tensor | None,
    causal: bool,
    generator: torch.Generator,
) -> Iterator[tuple[float, Tensor, bool]]:
    """Yield the log-likelihoods of labels of one example, each with its weight and whether
    another follows.
    """
    out = _forward(module, parameters, example)
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[-1] < 2:
        fault = "has a single output" if isinstance(logits, Tensor) else "gives no logits"
        raise StatisticsError(
            f"a Fisher information needs predictions, but a {type(module).__name__} {fault}",
            hint="merge models with a head, or by regmean",
        )
    if logits.dim() == 4:  # pixels: classes are the second axis
        logits = logits.movedim(1, -1)
    scores = logits.flatten(0, -2).log_softmax(-1)
    if labels is not None:
        targets = labels[:, 1:] if causal else labels
        if causal:
            scores = logits[:, :-1].flatten(0, -2).log_softmax(-1)
        yield (
            1.0,
            -F.nll_loss(scores, targets.reshape(-1), ignore_index=-100, reduction="sum"),
            False,
        )
        return
    mask = example.get("attention_mask")
    if mask is not None and logits.dim() == 3 and mask.shape == logits.shape[:2]:
        scores = scores[mask.reshape(-1).bool()]
    probs = scores.detach().exp()
    if len(scores) == 1 and scores.shape[1] <= MAX_EXACT_CLASSES:
        for y in range(scores.shape[1]):
            yield float(probs[0, y]), scores[0, y], y + 1 < scores.shape[1]
        return
    sampled = torch.multinomial(probs.double().cpu(), 1, generator=generator).to(scores.device)
    yield 1.0, scores.gather(1, sampled).sum(), False


def grams(
    module: torch.nn.Module, state: State | None, batches: Iterable[Batch]
) -> dict[str, Gram]:
    """Compute X^T X of the inputs of each linear layer, by the name of its weight.

    Jin et al. 2023, "Dataless Knowledge Fusion by Merging Weights of Language Models". Layers that
    were not reached have none.
    """
    gram_by_name: dict[str, Gram] = {}

    def add(layer: Layer, batch: Batch, x: Tensor, y: Tensor) -> None:
        rows = _input_rows(layer, x, batch).double()
        product = (rows.T @ rows).cpu()
        gram_by_name[layer.name] = Gram(
            gram_by_name[layer.name].values + product if layer.name in gram_by_name else product,
            layer.dim,
        )

    _run_hooked(module, state, batches, list(linear_layers(module)), add)
    if not gram_by_name:
        raise StatisticsError(
            f"no layer of this {type(module).__name__} was reached",
            hint="pass at least one batch of inputs",
        )
    return gram_by_name


def activations(
    module: torch.nn.Module,
    state: State | None,
    batches: Iterable[Batch],
    *,
    max_rows: int = MAX_ROWS,
) -> dict[str, Tensor]:
    """Record the outputs of each layer [rows, outputs], by the name of its weight.

    Layers are linear layers, convolutions of patches and embedding tables. The rows are those of
    the first tokens, the same for every model with the same batches.
    """
    outputs: dict[str, list[Tensor]] = {}
    tables = [
        Layer(f"{n}.weight", m, 1)
        for n, m in module.named_modules()
        if isinstance(m, torch.nn.Embedding)
    ]

    def add(layer: Layer, batch: Batch, x: Tensor, y: Tensor) -> None:
        recorded = outputs.setdefault(layer.name, [])
        y = y.flatten(2).transpose(1, 2) if isinstance(layer.module, torch.nn.Conv2d) else y
        recorded.append(
            _unpadded_rows(y, batch)[: max(max_rows - sum(map(len, recorded)), 0)].float().cpu()
        )

    _run_hooked(module, state, batches, [*linear_layers(module), *tables], add)
    if not outputs:
        raise StatisticsError(
            f"no layer of this {type(module).__name__} was reached",
            hint="pass at least one batch of inputs",
        )
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def _run_hooked(
    module: torch.nn.Module,
    state: State | None,
    batches: Iterable[Batch],
    hooked: list[Layer],
    callback: Callable[[Layer, Batch, Tensor, Tensor], None],
) -> None:
    """Run a model and call `callback` with each of these layers' inputs and outputs."""
    parameters = _prepare_parameters(module, state)
    current: list[Batch] = [{}]
    with torch.no_grad(), _forward_hooks(hooked, current, callback):
        for batch in batches:
            current[0] = batch
            _forward(module, parameters, batch)


@contextmanager
def _forward_hooks(
    hooked: list[Layer],
    current: list[Batch],
    callback: Callable[[Layer, Batch, Tensor, Tensor], None],
) -> Iterator[None]:
    """Install a forward hook on each layer; remove them on exit."""

    def hook(layer: Layer) -> Any:
        return lambda module, args, output: (
            callback(layer, current[0], args[0].detach(), output.detach()) if args else None
        )

    handles = [layer.module.register_forward_hook(hook(layer)) for layer in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_rows(layer: Layer, x: Tensor, batch: Batch) -> Tensor:
    """Return the inputs of a layer as rows."""
    if isinstance(layer.module, torch.nn.Conv2d):
        kernel, stride = layer.module.kernel_size, layer.module.stride
        return (
            F.unfold(x, (kernel[0], kernel[1]), stride=(stride[0], stride[1]))
            .transpose(1, 2)
            .flatten(0, 1)
        )
    return _unpadded_rows(x, batch)


def _unpadded_rows(x: Tensor, batch: Batch) -> Tensor:
    """Return the rows of an activation [..., width], without those of padding tokens."""
    rows = x.reshape(-1, x.shape[-1])
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if (
            mask is not None
            and mask.dim() == 2
            and (
                tuple(x.shape[:2]) == tuple(mask.shape)
                if x.dim() > 2
                else len(rows) == mask.numel() > len(mask)
            )
        ):
            return rows[mask.reshape(-1).bool().to(rows.device)]
    return rows


def _prepare_parameters(module: torch.nn.Module, state: State | None) -> dict[str, Tensor]:
    """Return the module's parameters with the values of a state, as leaves in float32 or better.

    Tied names share one tensor, unless the state has different values for them, as after folding.
    """
    module.eval()
    tied: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    own_values = dict(module.named_parameters(remove_duplicate=False))
    values = own_values if state is None else state
    parameters: dict[str, Tensor] = {}
    for names in tied.values():
        present = [n for n in names if n in values]
        if not present:
            raise StatisticsError(
                f'the state lacks "{names[0]}", which the {type(module).__name__} has',
                hint="pass a state of this module",
            )
        for name in names:
            value = values[name if name in values else present[0]].detach()
            value = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
            equal = next(
                (
                    parameters[n]
                    for n in names
                    if n in parameters and torch.equal(parameters[n], value)
                ),
                None,
            )
            parameters[name] = value.clone().requires_grad_(True) if equal is None else equal
    return parameters


def _forward(module: torch.nn.Module, parameters: State, batch: Batch) -> Any:
    """Run the module with these parameters."""
    dtype = next(iter(parameters.values())).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    if "pixel_values" in inputs and getattr(module, "config", None) is None:  # timm names them x
        return functional_call(
            module, dict(parameters), (inputs["pixel_values"],), tie_weights=False
        )
    return functional_call(module, dict(parameters), (), inputs, tie_weights=False)


def _batch_size(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return len(next(iter(batch.values())))
