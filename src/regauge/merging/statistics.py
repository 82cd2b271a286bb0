"""What data say about a model's weights: the diagonal Fisher, the Gram matrices of what its layers
read, and what its layers write.

Each is a pure function of a module, a state in place of the module's own weights, and batches
(arguments of forward by name). A statistic belongs to the description that it was computed in: that
of a model which is moved afterwards must be computed of the moved state, or be moved by the same
element. In a merge the states come first, in the basis of the merge, so that there is no wrong
order.

    f = [fisher(module, state, batches) for state in states]       # Matena and Raffel 2022
    g = [grams(module, state, batches) for state in states]        # Jin et al. 2023
    merge(states, "fisher", statistics=f); merge(states, "regmean", statistics=g)

Tokens that an attention mask calls padding count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F

from regauge.errors import RegaugeError

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]
MAX_EXACT_CLASSES = 32  # classes of which every one has its own gradient; of more, labels are drawn
MAX_ROWS = 4096  # rows of what a layer writes that are kept


class StatisticsError(RegaugeError):
    """A model that predicts nothing, or that was not seen at work."""


@dataclass(frozen=True, eq=False)
class Gram:
    """X^T X of what one layer reads, in float64. The inputs run along the axes of its weight from
    `dim` = 1 on, or along the first one (0).
    """

    values: Tensor
    dim: int

    def to_rows(self, weight: Tensor) -> Tensor:
        """A weight as a matrix [inputs, outputs]."""
        return weight.reshape(weight.shape[0], -1).T if self.dim else weight

    def from_rows(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Such a matrix, in the weight's own layout again."""
        return (rows.T if self.dim else rows).reshape(weight.shape)


@dataclass(frozen=True)
class Layer:
    """A layer that multiplies: the name of its weight, and which of its axes are contracted with
    what it reads (as in `Gram`).
    """

    name: str
    module: torch.nn.Module
    dim: int


def linear_layers(module: torch.nn.Module) -> Iterator[Layer]:
    """The linear layers of a model: nn.Linear, Conv1D of the transformers library, and convolutions
    of patches that do not overlap.
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
    """The diagonal of the Fisher information of every parameter (Matena and Raffel 2022, "Merging
    Models with Fisher-Weighted Averaging"):

        F = mean over examples x of E_{y ~ p(y|x)} [ (d log p(y|x) / d theta)^2 ]

    The expectation is over the model's own predictions: exact for up to `MANY` classes of an
    example, else by one draw from `seed`. A text has a label for each token, drawn on its own: the
    gradients of different tokens are then uncorrelated, so that the square of their sum estimates
    the sum of their squares. With `labels` it is the *empirical* Fisher instead, of the labels that
    are given, -100 where there is none; with `causal` a token's logits are those of the next one.
    """
    parameters = _prepare_parameters(module, state)
    leaves: dict[int, str] = {}
    for name, p in parameters.items():
        leaves.setdefault(id(p), name)
    total = {name: torch.zeros_like(parameters[name]) for name in leaves.values()}
    draw, count = torch.Generator().manual_seed(seed), 0
    given = iter(labels) if labels is not None else None
    for batch in batches:
        truth = next(given) if given is not None else None
        for i in range(_batch_size(batch)):
            one = {name: x[i : i + 1] for name, x in batch.items()}
            for weight, loss, more in _log_likelihoods(
                module, parameters, one, None if truth is None else truth[i : i + 1], causal, draw
            ):
                found = torch.autograd.grad(
                    loss, [parameters[n] for n in total], retain_graph=more, allow_unused=True
                )
                for name, gradient in zip(total, found, strict=True):
                    if gradient is not None:
                        total[name].addcmul_(gradient, gradient, value=weight)
            count += 1
    if not count:
        raise StatisticsError(
            "there is no example to compute a Fisher information from", hint="give at least one"
        )
    return {name: t.div_(count) for name, t in total.items()}


def _log_likelihoods(
    module: torch.nn.Module,
    parameters: State,
    one: Batch,
    truth: Tensor | None,
    causal: bool,
    draw: torch.Generator,
) -> Iterator[tuple[float, Tensor, bool]]:
    """The log-likelihoods of labels of one example, each with its weight and whether another one
    follows.
    """
    out = _forward(module, parameters, one)
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[-1] < 2:
        what = "has a single output" if isinstance(logits, Tensor) else "gives no logits"
        raise StatisticsError(
            f"a {type(module).__name__} {what}: there is no prediction to take a Fisher "
            "information of",
            hint="merge models with a head, or by regmean",
        )
    if logits.dim() == 4:  # of pixels: classes come second
        logits = logits.movedim(1, -1)
    scores = logits.flatten(0, -2).log_softmax(-1)
    if truth is not None:
        wanted = truth[:, 1:] if causal else truth
        if causal:
            scores = logits[:, :-1].flatten(0, -2).log_softmax(-1)
        yield (
            1.0,
            -F.nll_loss(scores, wanted.reshape(-1), ignore_index=-100, reduction="sum"),
            False,
        )
        return
    mask = one.get("attention_mask")
    if mask is not None and logits.dim() == 3 and mask.shape == logits.shape[:2]:
        scores = scores[mask.reshape(-1).bool()]
    chances = scores.detach().exp()
    if len(scores) == 1 and scores.shape[1] <= MAX_EXACT_CLASSES:
        for y in range(scores.shape[1]):
            yield float(chances[0, y]), scores[0, y], y + 1 < scores.shape[1]
        return
    drawn = torch.multinomial(chances.double().cpu(), 1, generator=draw).to(scores.device)
    yield 1.0, scores.gather(1, drawn).sum(), False


def grams(
    module: torch.nn.Module, state: State | None, batches: Iterable[Batch]
) -> dict[str, Gram]:
    """X^T X of what each linear layer reads, by the name of its weight (Jin et al. 2023, "Dataless
    Knowledge Fusion by Merging Weights of Language Models"). A layer that was never reached has
    none.
    """
    out: dict[str, Gram] = {}

    def see(layer: Layer, batch: Batch, x: Tensor, y: Tensor) -> None:
        rows = _input_rows(layer, x, batch).double()
        product = (rows.T @ rows).cpu()
        out[layer.name] = Gram(
            out[layer.name].values + product if layer.name in out else product, layer.dim
        )

    _run_hooked(module, state, batches, list(linear_layers(module)), see)
    if not out:
        raise StatisticsError(
            f"no layer of this {type(module).__name__} was seen at work",
            hint="give at least one batch of inputs",
        )
    return out


def activations(
    module: torch.nn.Module,
    state: State | None,
    batches: Iterable[Batch],
    *,
    max_rows: int = MAX_ROWS,
) -> dict[str, Tensor]:
    """What each layer writes, [rows, outputs], by the name of its weight: linear layers,
    convolutions of patches and tables. The rows are those of the first tokens, the same for every
    model that is given the same batches.
    """
    found: dict[str, list[Tensor]] = {}
    tables = [
        Layer(f"{n}.weight", m, 1)
        for n, m in module.named_modules()
        if isinstance(m, torch.nn.Embedding)
    ]

    def see(layer: Layer, batch: Batch, x: Tensor, y: Tensor) -> None:
        kept = found.setdefault(layer.name, [])
        y = y.flatten(2).transpose(1, 2) if isinstance(layer.module, torch.nn.Conv2d) else y
        kept.append(
            _unpadded_rows(y, batch)[: max(max_rows - sum(map(len, kept)), 0)].float().cpu()
        )

    _run_hooked(module, state, batches, [*linear_layers(module), *tables], see)
    if not found:
        raise StatisticsError(
            f"no layer of this {type(module).__name__} was seen at work",
            hint="give at least one batch of inputs",
        )
    return {name: torch.cat(parts) for name, parts in found.items()}


def _run_hooked(
    module: torch.nn.Module,
    state: State | None,
    batches: Iterable[Batch],
    watched: list[Layer],
    see: Callable[[Layer, Batch, Tensor, Tensor], None],
) -> None:
    """Run a model, and show what each of these layers reads and writes."""
    parameters = _prepare_parameters(module, state)
    now: list[Batch] = [{}]
    with torch.no_grad(), _forward_hooks(watched, now, see):
        for batch in batches:
            now[0] = batch
            _forward(module, parameters, batch)


@contextmanager
def _forward_hooks(
    watched: list[Layer], now: list[Batch], see: Callable[[Layer, Batch, Tensor, Tensor], None]
) -> Iterator[None]:
    def hook(layer: Layer) -> Any:
        return lambda module, args, output: (
            see(layer, now[0], args[0].detach(), output.detach()) if args else None
        )

    handles = [layer.module.register_forward_hook(hook(layer)) for layer in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_rows(layer: Layer, x: Tensor, batch: Batch) -> Tensor:
    if isinstance(layer.module, torch.nn.Conv2d):
        kernel, step = layer.module.kernel_size, layer.module.stride
        return (
            F.unfold(x, (kernel[0], kernel[1]), stride=(step[0], step[1]))
            .transpose(1, 2)
            .flatten(0, 1)
        )
    return _unpadded_rows(x, batch)


def _unpadded_rows(x: Tensor, batch: Batch) -> Tensor:
    """The rows of an activation [..., width] that count: of tokens, those that are no padding."""
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
    """The module's parameters with the values of a state: in float32 at least, and on their own in
    the graph. Tied names share one tensor, unless the state has different values for them, as
    folded ones have.
    """
    module.eval()
    tied: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    own = dict(module.named_parameters(remove_duplicate=False))
    given = own if state is None else state
    out: dict[str, Tensor] = {}
    for names in tied.values():
        held = [n for n in names if n in given]
        if not held:
            raise StatisticsError(
                f'the state has no "{names[0]}", which the {type(module).__name__} has',
                hint="give a state of this module",
            )
        for name in names:
            value = given[name if name in given else held[0]].detach()
            value = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
            known = next((out[n] for n in names if n in out and torch.equal(out[n], value)), None)
            out[name] = value.clone().requires_grad_(True) if known is None else known
    return out


def _forward(module: torch.nn.Module, parameters: State, batch: Batch) -> Any:
    dtype = next(iter(parameters.values())).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    if "pixel_values" in inputs and getattr(module, "config", None) is None:  # timm calls them x
        return functional_call(
            module, dict(parameters), (inputs["pixel_values"],), tie_weights=False
        )
    return functional_call(module, dict(parameters), (), inputs, tie_weights=False)


def _batch_size(batch: Batch) -> int:
    return len(next(iter(batch.values())))
