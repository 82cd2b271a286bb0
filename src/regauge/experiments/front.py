"""Beyond paper 002: what each defence costs a federated training and what it leaves to the best attack, over batch sizes. The front of the two is the
advice.

A ViT that was trained on CIFAR-10 is trained on with other images, as a server would by the clients' gradients, with each defence in every step; its
start is attacked, since that is when gradients are largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regauge.experiments.cells import Cell, Outcome, Work
from regauge.experiments.jigsaws import results
from regauge.experiments.lab import Lab
from regauge.experiments.presets import From, Subject
from regauge.experiments.puzzles import accuracy, how, model_of, parameters_with, trained
from regauge.experiments.updates import _subjects
from regauge.findings import Figure, Finding, Results, Table
from regauge.gradients.attacking import CLOSED, Attack, Budget, named
from regauge.gradients.auditing import GradientCase, floors, row_of
from regauge.gradients.clients import _puzzle, _slopes, on, prepared
from regauge.gradients.defences import Plan, names_of, plan_of
from regauge.gradients.scoring import LEAK, average
from regauge.jigsaw.wrapping import MaskedJigsaw
from regauge.leakage.auditing import in_unit
from regauge.metrics import psnr
from regauge.split.defences import Draw
from regauge.streams import seed_key
from regauge.tasks import Examples, prepare

RECIPES = (
    "none",
    "mjp=0.5",
    "noise=0.1",
    "noise=1,embedding+noise=1,first",
    "freeze=embedding",
    "freeze=embedding,first",
    "mjp=0.5+freeze=embedding,first",
    "private=1.0",
)
SIZES = {"pico": (1, 4), "small": (1, 8), "paper": (1, 8, 32)}
NEAR, GUESS = 0.5, 0.55


def front(lab: Lab) -> Results:
    """Leakage, batch and accuracy of each recipe, and what lies on the front."""
    subject, _ = _subjects(lab)
    seeds = lab.seeds or {"pico": 2, "small": 3, "paper": 3}[lab.preset_name]
    sizes = SIZES[lab.preset_name]
    lab.total = 1 + len(RECIPES) * (seeds + len(sizes))
    base = model_of(lab, subject, how("A"), 0)
    got: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES:
        found = [_tuned(lab, subject, base, recipe, seed) for seed in range(seeds)]
        got[recipe] = {"accuracy": [f.values["accuracy"] for f in found], "epsilon": found[0].values["epsilon"]}
        for size in sizes:
            got[recipe][f"batch {size}"] = _leaked(lab, subject, base, recipe, size).values
    rows: list[tuple[Any, ...]] = []
    plain = got["none"]["accuracy"]
    spread = statistics.stdev(plain) if len(plain) > 1 else 0.0
    safe: list[tuple[str, int]] = []
    for recipe in RECIPES:
        one = got[recipe]
        level = statistics.fmean(one["accuracy"])
        for size in sizes:
            leak = one[f"batch {size}"]
            keeps = level >= statistics.fmean(plain) - max(spread, statistics.stdev(one["accuracy"]) if seeds > 1 else 0.0)
            hides = leak["upper"] is not None and leak["upper"] <= NEAR and (leak["auc"] is None or (leak["auc upper"] or 1.0) <= GUESS)
            if keeps and hides:
                safe.append((recipe, size))
            told = [size, 100 * level, 100 * statistics.stdev(one["accuracy"]) if seeds > 1 else None, leak["best"], leak["above"], leak["upper"]]
            rows.append((recipe, *told, leak["auc"], leak["auc upper"], leak["labels"], one["epsilon"], keeps and hides))
    heads = (
        "recipe",
        "batch",
        "accuracy",
        "spread",
        "best attack",
        "dB above floor",
        "upper 95 %",
        "patches (AUC)",
        "upper 95 %",
        "labels",
        "epsilon",
        "both",
    )
    note = f"Accuracy in percent after the same steps of training with the recipe, {seeds} seeds. Leakage of the first update, of the attack that "
    note += "gets most, least squares or inverting gradients, in dB above the mean image; upper ends of 95 % intervals over updates. Both: within "
    note += f"{NEAR} dB and AUC {GUESS} of the floor at an accuracy within the seeds' spread of the undefended run. Epsilon is for all steps."
    at_one = [r for r, size in safe if size == 1]
    advice = at_one[0] if at_one else None
    tried = [got[r]["batch 1"] for r in RECIPES if got[r]["batch 1"]["above"] is not None]
    best = got[advice]["batch 1"] if advice else min(tried, key=lambda v: v["above"])
    rest = ", ".join(f"{r} at {s}" for r, s in safe) or "none"
    sentence = f"at batch 1: {', '.join(at_one)}" if at_one else f"none at batch 1; with larger batches: {rest}"
    finding = Finding(
        "front/recipe",
        "There is a recipe under which the strongest attack is within 0.5 dB and AUC 0.55 of its floor, at an accuracy within the seeds' spread.",
        None,
        best["above"],
        0.0,
        got["none"]["batch 1"]["above"],
        f"{'holds' if at_one else 'does not hold'} here: {sentence}",
        measure="dB above the mean image",
        trials=seeds,
    )
    series = {f"batch {s}": [[got[r][f"batch {s}"]["above"] or 0.0, 100 * statistics.fmean(got[r]["accuracy"]), r] for r in RECIPES] for s in sizes}
    data = {"series": series, "xlabel": "dB above the mean image: less is more private", "ylabel": "accuracy"}
    figure = Figure("Accuracy against leakage", "points", data, "Up and to the left is better.")
    table = Table("Recipes", heads, tuple(rows), note)
    return results(lab, "gradients/front", "Leakage, batch and accuracy of recipes for federated training", [finding], (table,), (figure,))


def tune(p: Mapping[str, Any], data: Mapping[str, Any], work: Work) -> Outcome:
    """Train on by the clients' gradients, defended in every step: AdamW at the server. The accuracy at the end."""
    examples, test = prepare(p["task"], data["train"]), prepare(p["task"], data["test"])
    examples = examples.only(np.arange(len(examples))[-int(p["rows"]) :])
    plan = plan_of(p["recipe"], batch=int(p["batch"]))
    model = prepared(trained(p, data["weights"]).model, plan)
    steps = int(p["steps"])
    follow(model, plan, examples, steps, float(p["rate"]), int(p["seed"]))
    inner = model.model if isinstance(model, MaskedJigsaw) else model
    epsilon = None if plan.private is None else plan.private.epsilon(steps)
    return Outcome({"accuracy": accuracy(inner, test.only(np.arange(min(len(test), 2000)))), "epsilon": epsilon})


def follow(model: torch.nn.Module, plan: Plan, examples: Examples, steps: int, rate: float, seed: int) -> None:
    """Steps of AdamW, in place, by the updates of one batch each, as the plan leaves them."""
    model.train()
    frozen = {n for part in plan.withheld for n in names_of(model, part)}
    parameters = {n: q for n, q in model.named_parameters() if n not in frozen}
    optimizer = torch.optim.AdamW(parameters.values(), rate, weight_decay=0.05)
    draw = np.random.default_rng(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        inputs, labels = examples.batch(draw.integers(0, len(examples), plan.batch))
        label = f"front/{seed}/{step}"
        here = on(model, inputs)
        slopes = _slopes(model, plan, examples, here, labels, _puzzle(model, plan, here, label), parameters, label)
        for defence in plan.leaving:
            more: dict[str, Any] = {"count": plan.batch} if defence is plan.private else {}
            slopes = defence.leave(slopes, model, Draw(seed_key(0), label), **more)
        for name, q in parameters.items():
            q.grad = slopes.get(name)
        optimizer.step()


def leak(p: Mapping[str, Any], data: Mapping[str, Any], work: Work) -> Outcome:
    """What the first update gives away under a recipe: the best attack above the floor, with an interval over updates; patches; labels."""
    model = trained(p, data["weights"]).model
    for q in model.parameters():
        q.requires_grad_(True)
    examples = prepare(p["task"], data["test"])
    count, size, (mean, std) = int(p["updates"]), int(p["size"]), (p["task"]["mean"], p["task"]["std"])
    victims, own = examples.only(np.arange(count * size)), examples.only(np.arange(count * size, min(len(examples), count * size + 300)))
    case = GradientCase(model, victims, own, mean, std, updates=count, batch=size, seed=0)
    slow: tuple[Attack, ...] = named(["inverting"]) if size <= int(p["largest"]) else ()
    row = row_of(
        case, model, p["recipe"], (*(a for a in CLOSED if a.name != "mask"), *slow), Budget(int(p["steps"])), None, 0, _silent, int(p["optimised"])
    )
    low = _floor(case)
    gaps = {name: [a - b for a, b in zip(got.original[LEAK], low, strict=False)] for name, got in row.images.items()}
    best = max(gaps, key=lambda n: statistics.fmean(gaps[n])) if gaps else None
    values = {"best": best, "above": None, "upper": None, "floor": floors(case, None)["the mean image"][LEAK], "labels": average(row.labels)}
    if best is not None:
        values |= {"above": statistics.fmean(gaps[best]), "upper": _upper(gaps[best])}
    return Outcome({**values, "auc": average(row.patches), "auc upper": _upper(list(row.patches)) if row.patches else None, "all": gaps})


def _silent(now: str) -> None:
    """Progress is told by the cell's own bar."""


def _floor(case: GradientCase) -> list[float]:
    x = case.victims.batch(np.arange(len(case.victims)))[0]["pixel_values"]
    own = case.own.batch(np.arange(len(case.own)))[0]["pixel_values"]
    true, guess = (in_unit(v, case.mean, case.std).clamp(0, 1) for v in (x, own.mean(0, keepdim=True).expand_as(x)))
    return [float(v) for v in psnr(guess, true, 1.0)]


def _upper(values: Sequence[float]) -> float | None:
    """The upper end of a 95 % interval of the mean; None where there is one value."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return statistics.fmean(values) + float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


TUNE = Cell("gradients-tune", 1, tune)
LEAKED = Cell("gradients-leak", 1, leak)


def _tuned(lab: Lab, subject: Subject, base: Outcome, recipe: str, seed: int) -> Outcome:
    much = {"pico": (4, 8, 100), "small": (200, 32, 4000), "paper": (2000, 64, 100_000)}[lab.preset_name]
    parameters = {
        **parameters_with(subject, how("A")),
        "recipe": recipe,
        "seed": seed,
        "steps": much[0],
        "batch": much[1],
        "rows": much[2],
        "rate": 5e-4,
    }
    assert subject.train is not None
    more = (
        From("cifar10/cifar10.npz", {"image": "X_train", "label": "y_train"}, otherwise=subject.train)
        if lab.preset_name == "small"
        else subject.train
    )
    data = {"weights": base, "train": lab.open(more), "test": lab.open(subject.test)}
    return lab.run(TUNE, parameters, data, f"train with {recipe}, seed {seed}")


def _leaked(lab: Lab, subject: Subject, base: Outcome, recipe: str, size: int) -> Outcome:
    much = {"pico": (2, 4, 1), "small": (8, 300, 4), "paper": (32, 3000, 16)}[lab.preset_name]
    parameters = {**parameters_with(subject, how("A")), "recipe": recipe, "size": size, "updates": much[0], "steps": much[1], "optimised": much[2]}
    data = {"weights": base, "test": lab.open(replace(subject.test, rows=None) if lab.preset_name == "paper" else subject.test)}
    return lab.run(LEAKED, {**parameters, "largest": 1 if lab.preset_name != "paper" else 8}, data, f"attack {recipe}, batch {size}")
