"""Optimizers and the symmetries they preserve in training: the claim behind Corollaries 4.3 and
4.6, which are proved for plain gradient steps.

Two small models of the transformers library, plain and transformed, are trained on the same data in
strict float64, by every recipe and under every symmetry of `claims`. All runs of a model are
stacked, so that a step of all of them costs one batched gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.func import functional_call, grad, vmap

from regauge.core.action import apply
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.spec import Spec
from regauge.errors import need
from regauge.models.resolve import spec_of
from regauge.results.findings import Figure, Finding, Table
from regauge.testing import strict_float64
from regauge.verification.claims import (
    MODELS,
    PRESERVED,
    RECIPES,
    SYMMETRIES,
    VERDICTS,
    Baseline,
    Cell,
    Recipe,
    State,
    Symmetry,
    is_expected,
)

Tensor = torch.Tensor

LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 30,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "vocab_size": 30,
    "n_positions": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
IDS = (4, 8)


def optimizer_matrix(seed: int = 0, steps: int = 12) -> tuple[list[Finding], Table, Figure]:
    """Train with every optimizer, plain and under every symmetry: a finding per optimizer, a table
    of all numbers, and the matrix as a figure.
    """
    recipes = [recipe for recipe in RECIPES if hasattr(torch.optim, recipe.needs)]
    cells = measure(recipes, SYMMETRIES, seed, steps)
    table = Table(
        "Which optimizers keep which symmetries",
        (
            "optimizer",
            "model",
            "move",
            "expected",
            "weights deviate",
            "function deviates",
            "as expected",
        ),
        tuple(
            (
                recipe.name.rstrip(","),
                symmetry.model,
                symmetry.name,
                VERDICTS[letter],
                cell.weights,
                cell.function,
                is_expected(letter, cell),
            )
            for recipe in recipes
            for symmetry, letter in zip(SYMMETRIES, recipe.letters, strict=True)
            for cell in [cells[recipe.id, symmetry]]
        ),
        f"{steps} steps in float64; deviations are relative to what training changed.",
    )
    matrix = {
        "rows": [recipe.name.rstrip(",") for recipe in recipes],
        "columns": [_label(symmetry) for symmetry in SYMMETRIES],
        "values": [
            [cells[recipe.id, symmetry].weights for symmetry in SYMMETRIES] for recipe in recipes
        ],
        "log": True,
    }
    caption = (
        "How far the moved run's weights are from the plain run's weights, moved: "
        "rounding where the optimizer keeps the move."
    )
    return (
        [make_finding(recipe, SYMMETRIES, cells) for recipe in recipes],
        table,
        Figure("Optimizers and moves", "matrix", matrix, caption),
    )


def make_finding(
    recipe: Recipe, symmetries: Sequence[Symmetry], cells: Mapping[tuple[str, Symmetry], Cell]
) -> Finding:
    """Return what one optimizer preserves and breaks. The value is the worst preserved symmetry;
    the ceiling is the least broken one, or else the control.
    """
    results = [
        (symmetry, letter, cells[recipe.id, symmetry])
        for symmetry, letter in zip(symmetries, recipe.letters, strict=True)
    ]
    preserved = {
        symmetry: max(cell.weights, cell.function)
        for symmetry, letter, cell in results
        if letter in "Kr"
    }
    broken = {symmetry: cell.weights for symmetry, letter, cell in results if letter == "B"}
    noisy = [cell for _, letter, cell in results if letter == "n"]
    worst = max(preserved, key=lambda symmetry: preserved[symmetry], default=None)
    clauses = []
    if preserved:
        clauses.append(
            f"keeps {_join_names(preserved, broken)} "
            f"(deviations of at most {max(preserved.values()):.1e})"
        )
    if broken:
        clauses.append(
            f"breaks {_join_names(broken, preserved)} (at least {min(broken.values()):.1e})"
        )
    for cell in noisy:
        clauses.append(
            "turns the rounding noise of free key biases, whose gradient is zero, into steps "
            f"(weights {cell.weights:.1e}, function {cell.function:.1e})"
        )
    unexpected = [
        f"{_label(symmetry)} ({VERDICTS[letter]} expected, {cell.weights:.1e} found)"
        for symmetry, letter, cell in results
        if not is_expected(letter, cell)
    ]
    return Finding(
        f"optimizer/{recipe.id}",
        f"{recipe.name} {recipe.claim}",
        holds=not unexpected,
        value=None if worst is None else preserved[worst],
        floor=max(
            (cell.rounding for _, letter, cell in results if letter == "r"), default=PRESERVED
        ),
        ceiling=min(broken.values(), default=min(cell.control for _, _, cell in results)),
        sentence=f"Not as expected: {', '.join(unexpected)}."
        if unexpected
        else f"{recipe.name} {'; '.join(clauses)}.",
        source="Cor. 4.3, Cor. 4.6",
        measure="error relative to the update",
        where=", ".join(unexpected) or ("" if worst is None else _label(worst)),
    )


def _label(symmetry: Symmetry) -> str:
    """Return the model and the name of a symmetry."""
    return f"{MODELS[symmetry.model]}: {symmetry.name}"


def _join_names(symmetries: Iterable[Symmetry], others: Iterable[Symmetry]) -> str:
    """Join the names of symmetries; add the model if the other model behaves differently."""
    ambiguous = {symmetry.name for symmetry in others}
    return ", ".join(
        dict.fromkeys(
            f"{symmetry.name} of {MODELS[symmetry.model]}"
            if symmetry.name in ambiguous
            else symmetry.name
            for symmetry in symmetries
        )
    )


def measure(
    recipes: Sequence[Recipe], symmetries: Sequence[Symmetry], seed: int = 0, steps: int = 12
) -> dict[tuple[str, Symmetry], Cell]:
    """Measure every cell; all runs of a model, plain and transformed, are trained side by side."""
    cells: dict[tuple[str, Symmetry], Cell] = {}
    for kind in dict.fromkeys(symmetry.model for symmetry in symmetries):
        cells |= _measure(
            kind,
            recipes,
            [symmetry for symmetry in symmetries if symmetry.model == kind],
            seed,
            steps,
        )
    return cells


@dataclass(frozen=True)
class Run:
    """One training: its recipe, its initial weights, and which of them are frozen."""

    recipe: Recipe
    state: State
    frozen: frozenset[str]
    free: bool


class TrainingResult(NamedTuple):
    """The weights after a run, and its logits on a held-out batch before and after."""

    weights: State
    before: Tensor
    after: Tensor


def _measure(
    kind: str, recipes: Sequence[Recipe], symmetries: Sequence[Symmetry], seed: int, steps: int
) -> dict[tuple[str, Symmetry], Cell]:
    """Measure every cell of one model."""
    model, state = build_model(kind, seed)
    with strict_float64():
        spec = spec_of(model)
    folded = (
        fold_norms(spec, state)
        if any(symmetry.folded for symmetry in symmetries)
        else (spec, state)
    )

    def initial(baseline: Baseline) -> tuple[Spec, State]:
        return folded if baseline.folded else (spec, state)

    def run(recipe: Recipe, baseline: Baseline, weights: State) -> Run:
        return Run(
            recipe,
            weights,
            frozenset(folded[0].fixed) if baseline.frozen else frozenset(),
            baseline.free,
        )

    elements = {
        symmetry: element(
            initial(symmetry.baseline)[0], seed, within=symmetry.within, spaces=symmetry.spaces
        )
        for symmetry in symmetries
    }
    baselines = list(dict.fromkeys(symmetry.baseline for symmetry in symmetries))
    transformed = {
        symmetry: apply(elements[symmetry], initial(symmetry.baseline)[1])
        for symmetry in symmetries
    }
    runs: dict[tuple[str, Baseline | Symmetry], Run] = {}
    for recipe in recipes:
        runs |= {
            (recipe.id, baseline_): run(recipe, baseline_, initial(baseline_)[1])
            for baseline_ in baselines
        }
        runs |= {
            (recipe.id, symmetry): run(recipe, symmetry.baseline, transformed[symmetry])
            for symmetry in symmetries
        }
    results = dict(zip(runs, train(model, list(runs.values()), seed, steps), strict=True))
    cells: dict[tuple[str, Symmetry], Cell] = {}
    for recipe in recipes:
        for symmetry in symmetries:
            a, b = results[recipe.id, symmetry.baseline], results[recipe.id, symmetry]
            change, shift = (
                distance(a.weights, initial(symmetry.baseline)[1]),
                float((a.after - a.before).norm()),
            )
            expected = apply(
                elements[symmetry], a.weights, force=True
            )  # trained gains differ from the unit gains of the folded spec
            rounding = PRESERVED
            if (
                recipe.exact is not None
            ):  # each of the two runs may differ as much as from the same run in float64
                pairs = [
                    (run, results[recipe.exact, key])
                    for run, key in ((a, symmetry.baseline), (b, symmetry))
                ]
                weights = sum(ratio(distance(x.weights, y.weights), change) for x, y in pairs)
                rounding += max(
                    weights, sum(ratio(float((x.after - y.after).norm()), shift) for x, y in pairs)
                )
            cells[recipe.id, symmetry] = Cell(
                weights=ratio(distance(b.weights, expected), change),
                function=ratio(float((b.after - a.after).norm()), shift),
                control=ratio(distance(b.weights, a.weights), change),
                rounding=rounding,
            )
    return cells


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance of two states."""
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def ratio(a: float, b: float) -> float:
    """Return a / b, or infinity for NaN and division by zero."""
    quotient = a / b if b else math.inf
    return quotient if quotient == quotient else math.inf


def build_model(kind: str, seed: int) -> tuple[torch.nn.Module, State]:
    """Build a tiny model in float64 and random weights for it, gains, biases and positions
    included.
    """
    need("transformers", "models")
    transformers: Any = import_module("transformers")
    with torch.random.fork_rng(devices=[]):
        if kind == "llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**LLAMA, attn_implementation="eager")
            )
        else:
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**GPT2, attn_implementation="eager")
            )
    model = model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        + float(p.dim() == 1)
        for name, p in model.named_parameters()
    }
    return model, state


def train(
    model: torch.nn.Module, runs: Sequence[Run], seed: int, steps: int
) -> list[TrainingResult]:
    """Train every run on the same batches."""
    generator = torch.Generator().manual_seed(seed + 1)
    config: Any = model.config
    batches = [
        torch.randint(0, config.vocab_size, IDS, generator=generator) for _ in range(steps + 1)
    ]

    def logits(params: State, ids: Tensor) -> Tensor:
        result: Tensor = functional_call(
            model, params, kwargs={"input_ids": ids, "use_cache": False}
        ).logits
        return result

    def loss(params: State, ids: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits(params, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )

    def stacked() -> State:
        return {name: torch.stack([p[name].detach() for p in params]) for name in params[0]}

    params = [
        {name: torch.nn.Parameter(w.clone()) for name, w in run.state.items()} for run in runs
    ]
    trainable = [
        {name: p for name, p in parameters.items() if name not in run.frozen}
        for parameters, run in zip(params, runs, strict=True)
    ]
    optimizers = [
        run.recipe.make(dict(parameters)) for parameters, run in zip(trainable, runs, strict=True)
    ]
    with strict_float64():
        before = vmap(logits, in_dims=(0, None))(stacked(), batches[-1])
    for ids in batches[:-1]:
        with strict_float64():
            grads = vmap(grad(loss), in_dims=(0, None))(stacked(), ids)
        for i, run in enumerate(runs):
            for name, p in trainable[i].items():
                p.grad = grads[name][i]
                if name.endswith("c_attn.bias") and not run.free:
                    p.grad.view(3, -1)[1] = 0.0
            if run.recipe.clip:
                run.recipe.clip([p.grad for p in trainable[i].values() if p.grad is not None])
            for optimizer in optimizers[i]:
                optimizer.step()
    with strict_float64():
        after = vmap(logits, in_dims=(0, None))(stacked(), batches[-1])
    return [
        TrainingResult({name: p.detach() for name, p in parameters.items()}, x, y)
        for parameters, x, y in zip(params, before, after, strict=True)
    ]
