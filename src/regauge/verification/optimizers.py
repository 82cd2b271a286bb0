"""Which optimizers keep which symmetries in training: the claim behind Corollaries 4.3 and 4.6,
which are proved for plain gradient steps.

Two small models of the transformers library, plain and moved, are trained on the same data in
strict float64, by every recipe and under every move of `claims`; all runs of a model are one stack,
so that a step of all of them costs one batched gradient.
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
    KEPT,
    MODELS,
    MOVES,
    RECIPES,
    WORDS,
    Cell,
    Move,
    Recipe,
    Start,
    State,
    agrees,
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
    """Train with every optimizer, plain and under every move: a finding per optimizer, a table of
    all numbers, and the matrix as a figure.
    """
    recipes = [r for r in RECIPES if hasattr(torch.optim, r.needs)]
    cells = measure(recipes, MOVES, seed, steps)
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
                r.name.rstrip(","),
                m.model,
                m.name,
                WORDS[letter],
                c.weights,
                c.function,
                agrees(letter, c),
            )
            for r in recipes
            for m, letter in zip(MOVES, r.letters, strict=True)
            for c in [cells[r.id, m]]
        ),
        f"{steps} steps in float64; deviations are relative to what training changed.",
    )
    matrix = {
        "rows": [r.name.rstrip(",") for r in recipes],
        "columns": [_label(m) for m in MOVES],
        "values": [[cells[r.id, m].weights for m in MOVES] for r in recipes],
        "log": True,
    }
    caption = (
        "How far the moved run's weights are from the plain run's weights, moved: "
        "rounding where the optimizer keeps the move."
    )
    return (
        [finding(r, MOVES, cells) for r in recipes],
        table,
        Figure("Optimizers and moves", "matrix", matrix, caption),
    )


def finding(
    recipe: Recipe, moves: Sequence[Move], cells: Mapping[tuple[str, Move], Cell]
) -> Finding:
    """What one optimizer keeps and breaks. The value is the worst kept move; the ceiling is the
    least broken one, or where none is, the control.
    """
    found = [
        (m, letter, cells[recipe.id, m]) for m, letter in zip(moves, recipe.letters, strict=True)
    ]
    kept = {m: max(c.weights, c.function) for m, letter, c in found if letter in "Kr"}
    broken = {m: c.weights for m, letter, c in found if letter == "B"}
    noisy = [c for _, letter, c in found if letter == "n"]
    worst = max(kept, key=lambda m: kept[m], default=None)
    says = []
    if kept:
        says.append(f"keeps {_list(kept, broken)} (deviations of at most {max(kept.values()):.1e})")
    if broken:
        says.append(f"breaks {_list(broken, kept)} (at least {min(broken.values()):.1e})")
    for c in noisy:
        says.append(
            "turns the rounding noise of free key biases, whose gradient is zero, into steps "
            f"(weights {c.weights:.1e}, function {c.function:.1e})"
        )
    wrong = [
        f"{_label(m)} ({WORDS[letter]} expected, {c.weights:.1e} found)"
        for m, letter, c in found
        if not agrees(letter, c)
    ]
    return Finding(
        f"optimizer/{recipe.id}",
        f"{recipe.name} {recipe.claim}",
        holds=not wrong,
        value=None if worst is None else kept[worst],
        floor=max((c.rounding for _, letter, c in found if letter == "r"), default=KEPT),
        ceiling=min(broken.values(), default=min(c.control for _, _, c in found)),
        sentence=f"Not as expected: {', '.join(wrong)}."
        if wrong
        else f"{recipe.name} {'; '.join(says)}.",
        source="Cor. 4.3, Cor. 4.6",
        measure="error relative to the update",
        where=", ".join(wrong) or ("" if worst is None else _label(worst)),
    )


def _label(move: Move) -> str:
    return f"{MODELS[move.model]}: {move.name}"


def _list(moves: Iterable[Move], others: Iterable[Move]) -> str:
    """The moves by name; with the model where the other one fares otherwise."""
    split = {m.name for m in others}
    return ", ".join(
        dict.fromkeys(
            f"{m.name} of {MODELS[m.model]}" if m.name in split else m.name for m in moves
        )
    )


def measure(
    recipes: Sequence[Recipe], moves: Sequence[Move], seed: int = 0, steps: int = 12
) -> dict[tuple[str, Move], Cell]:
    """Every cell: all runs of a model, plain and moved, are trained side by side."""
    out: dict[tuple[str, Move], Cell] = {}
    for kind in dict.fromkeys(m.model for m in moves):
        out |= _measure(kind, recipes, [m for m in moves if m.model == kind], seed, steps)
    return out


@dataclass(frozen=True)
class Run:
    """One training: by which recipe, from which weights, with which of them frozen."""

    recipe: Recipe
    state: State
    frozen: frozenset[str]
    free: bool


class Trained(NamedTuple):
    """What came of a run: its weights, and its logits on a batch that it was not trained on, before
    and after.
    """

    weights: State
    before: Tensor
    after: Tensor


def _measure(
    kind: str, recipes: Sequence[Recipe], moves: Sequence[Move], seed: int, steps: int
) -> dict[tuple[str, Move], Cell]:
    model, state = build(kind, seed)
    with strict_float64():
        spec = spec_of(model)
    folded = fold_norms(spec, state) if any(m.folded for m in moves) else (spec, state)

    def prepared(start: Start) -> tuple[Spec, State]:
        return folded if start.folded else (spec, state)

    def run(recipe: Recipe, start: Start, weights: State) -> Run:
        return Run(
            recipe, weights, frozenset(folded[0].fixed) if start.frozen else frozenset(), start.free
        )

    elements = {
        m: element(prepared(m.start)[0], seed, within=m.within, spaces=m.spaces) for m in moves
    }
    starts = list(dict.fromkeys(m.start for m in moves))
    moved = {m: apply(elements[m], prepared(m.start)[1]) for m in moves}
    runs: dict[tuple[str, Start | Move], Run] = {}
    for recipe in recipes:
        runs |= {(recipe.id, s): run(recipe, s, prepared(s)[1]) for s in starts}
        runs |= {(recipe.id, m): run(recipe, m.start, moved[m]) for m in moves}
    results = dict(zip(runs, train(model, list(runs.values()), seed, steps), strict=True))
    out: dict[tuple[str, Move], Cell] = {}
    for recipe in recipes:
        for m in moves:
            a, b = results[recipe.id, m.start], results[recipe.id, m]
            change, shift = (
                distance(a.weights, prepared(m.start)[1]),
                float((a.after - a.before).norm()),
            )
            expected = apply(
                elements[m], a.weights, force=True
            )  # trained gains are no longer the unit gains of the folded spec
            rounding = KEPT
            if (
                recipe.exact is not None
            ):  # each of the two runs may be as far off as it is from the same run in float64
                pairs = [(run, results[recipe.exact, key]) for run, key in ((a, m.start), (b, m))]
                weights = sum(ratio(distance(x.weights, y.weights), change) for x, y in pairs)
                rounding += max(
                    weights, sum(ratio(float((x.after - y.after).norm()), shift) for x, y in pairs)
                )
            out[recipe.id, m] = Cell(
                weights=ratio(distance(b.weights, expected), change),
                function=ratio(float((b.after - a.after).norm()), shift),
                control=ratio(distance(b.weights, a.weights), change),
                rounding=rounding,
            )
    return out


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def ratio(a: float, b: float) -> float:
    """a / b; what is not a number is infinitely far."""
    out = a / b if b else math.inf
    return out if out == out else math.inf


def build(kind: str, seed: int) -> tuple[torch.nn.Module, State]:
    """A pico-model in float64, and random weights for it: gains, biases and positions too."""
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
    random = torch.Generator().manual_seed(seed)
    state = {
        name: 0.3 * torch.randn(p.shape, generator=random, dtype=torch.float64)
        + float(p.dim() == 1)
        for name, p in model.named_parameters()
    }
    return model, state


def train(model: torch.nn.Module, runs: Sequence[Run], seed: int, steps: int) -> list[Trained]:
    """Train every run on the same batches."""
    random = torch.Generator().manual_seed(seed + 1)
    batches = [
        torch.randint(0, model.config.vocab_size, IDS, generator=random)  # type: ignore[arg-type, union-attr]
        for _ in range(steps + 1)
    ]

    def logits(params: State, ids: Tensor) -> Tensor:
        out: Tensor = functional_call(
            model, params, kwargs={"input_ids": ids, "use_cache": False}
        ).logits
        return out

    def loss(params: State, ids: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits(params, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )

    def stacked() -> State:
        return {name: torch.stack([p[name].detach() for p in params]) for name in params[0]}

    params = [
        {name: torch.nn.Parameter(w.clone()) for name, w in run.state.items()} for run in runs
    ]
    trained = [
        {name: p for name, p in ps.items() if name not in run.frozen}
        for ps, run in zip(params, runs, strict=True)
    ]
    optimizers = [run.recipe.make(dict(ps)) for ps, run in zip(trained, runs, strict=True)]
    with strict_float64():
        before = vmap(logits, in_dims=(0, None))(stacked(), batches[-1])
    for ids in batches[:-1]:
        with strict_float64():
            grads = vmap(grad(loss), in_dims=(0, None))(stacked(), ids)
        for i, run in enumerate(runs):
            for name, p in trained[i].items():
                p.grad = grads[name][i]
                if name.endswith("c_attn.bias") and not run.free:
                    p.grad.view(3, -1)[1] = 0.0
            if run.recipe.clip:
                run.recipe.clip([p.grad for p in trained[i].values() if p.grad is not None])
            for optimizer in optimizers[i]:
                optimizer.step()
    with strict_float64():
        after = vmap(logits, in_dims=(0, None))(stacked(), batches[-1])
    return [
        Trained({name: p.detach() for name, p in ps.items()}, x, y)
        for ps, x, y in zip(params, before, after, strict=True)
    ]
