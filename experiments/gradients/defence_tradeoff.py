"""Beyond the masked-jigsaw paper: the accuracy of federated training under each combination of
defences (a recipe), and its leakage by the number of images in an update.

A ViT trained on 4,000 images of CIFAR-10 is trained further on 40,000, in rounds of 128 images (256
for sums of as many) that are divided among clients. The 40,000 contain 3,188 of the first images;
none of either set is attacked or used for tests. Each client defends its own update, and the server
receives their mean. The first updates are attacked, because gradients are largest there. The
attacker has the client's code and similar images, and trains under each recipe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from experiments.paper_002.accuracy import results
from experiments.paper_002.gradient_leakage import gradient_subjects
from experiments.paper_002.jigsaw_cells import how, model_of, parameters_with, trained
from experiments.shared.cells import Cell
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from regauge.attacks.passes import double_backward
from regauge.audit.engine import Attack, denormalize, select_attacks
from regauge.audit.gradient_audit.attempts import ATTACKS, QUICK, Budget
from regauge.audit.gradient_audit.clients import (
    batch_grads,
    make_puzzle,
    prepare_model,
)
from regauge.audit.gradient_audit.engine import GradientCase, audit_combination
from regauge.audit.gradient_audit.report import LEAK
from regauge.audit.inputs import cast_inputs
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.evaluate import accuracy
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples, loss_of, prepare
from regauge.data.train import ScheduledOptimizer, cosine_factor, descend
from regauge.defences.gradients import (
    Noise,
    Plan,
    Private,
    Withhold,
    parse_plan,
    part_parameters,
)
from regauge.defences.parser import NONE
from regauge.errors import DefenceError
from regauge.jigsaw.wrapper import MaskedJigsaw
from regauge.results.findings import Figure, Finding, Results, Table, spread_of
from regauge.results.metrics import psnr

Tensor = torch.Tensor
SIZES = {"pico": (1, 4), "small": (1, 8, 32, 128, 256), "paper": (1, 8, 32, 128, 256)}
# A recipe, and the sizes at which it is tried (None: all). Where a recipe treats every sample alike
# and adds nothing, one training stands for all sizes: the server's mean is the same.
RECIPES: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("none", None),
    ("freeze=embedding", (1,)),
    ("freeze=embedding,first", (1, 32, 128, 256)),
    ("mjp=0.5", (1,)),
    ("mjp=0.5+freeze=embedding,first", (1,)),
    ("freeze=matrices", (1, 8, 32)),
    ("noise=1,embedding+noise=1,first", (1,)),
    ("noise=1", (1,)),
    ("freeze=matrices+noise=3", (1,)),
    ("private=1", (1, 128)),
)
PICO = ("none", "freeze=matrices", "private=1")
NEAR, GUESS = 0.5, 0.55
AGAIN = 5000  # the first of the test images that a second attack is tried on
ROUND = {
    "pico": 8,
    "small": 128,
    "paper": 128,
}  # images of a round; of a sum of more, as many as it has
FASTER = 10.0  # biases and gains alone take a larger rate (Ben Zaken et al. 2021, BitFit)


def front(lab: Lab) -> Results:
    """Leakage, images in an update, and accuracy of each recipe, and what lies on the front."""
    subject, _ = gradient_subjects(lab)
    seeds = lab.seeds or {"pico": 2, "small": 3, "paper": 3}[lab.preset_name]
    pairs = [(r, s) for r, at in RECIPES for s in SIZES[lab.preset_name] if at is None or s in at]
    pairs = [(r, s) for r in PICO for s in SIZES["pico"]] if lab.preset_name == "pico" else pairs
    lab.total = 1 + len(pairs) + seeds * len({(r, _trained_at(lab, r, s)) for r, s in pairs}) + 1
    base = model_of(lab, subject, how("A"), 0)
    start = _tuned(lab, subject, base, "none", 1, 0, 0).values["accuracy"]
    runs: dict[tuple[str, int], list[float]] = {}
    leaks: dict[tuple[str, int], Mapping[str, Any]] = {}
    epsilons: dict[str, float | None] = {}
    for recipe, size in pairs:
        at = _trained_at(lab, recipe, size)
        if (recipe, at) not in runs:
            found = [_tuned(lab, subject, base, recipe, at, seed) for seed in range(seeds)]
            runs[recipe, at] = [f.values["accuracy"] for f in found]
            epsilons[recipe] = found[0].values["epsilon"]
        leaks[recipe, size] = _leaked(lab, subject, base, recipe, size).values
    rows: list[tuple[Any, ...]] = []
    points: dict[str, list[list[Any]]] = {}
    safe: list[tuple[str, int]] = []
    refuted: list[tuple[str, int]] = []
    confirmed: list[str] = []
    for recipe, size in pairs:
        reached, leak = runs[recipe, _trained_at(lab, recipe, size)], leaks[recipe, size]
        plain = runs[NONE, _trained_at(lab, NONE, size)]
        level, spread = statistics.fmean(reached), spread_of(reached)
        keeps = level >= statistics.fmean(plain) - max(spread or 0.0, spread_of(plain) or 0.0)
        hides = is_hidden(leak)
        if (
            keeps and hides and lab.preset_name != "pico"
        ):  # of many that were tried some would pass by chance: it must hold on other images too
            lab.total += 1
            again = _leaked(lab, subject, base, recipe, size, AGAIN).values
            hides = is_hidden(again)
            confirmed.append(
                f"{recipe} at {size}: {again['above']:.2f} dB (to {again['upper']:.2f}), AUC "
                f"{again['auc']:.3f} (to {again['auc upper']:.3f})"
            )
            (safe if hides else refuted).append((recipe, size))
        detail = [
            size,
            100 * level,
            None if spread is None else 100 * spread,
            leak["best"],
            leak["above"],
            leak["upper"],
            leak["auc"],
            leak["auc upper"],
        ]
        rows.append(
            (recipe, *detail, leak["labels"], epsilons[recipe], _answer(keeps), _answer(hides))
        )
        points.setdefault(f"{size} image{'s' if size > 1 else ''}", []).append(
            [max(leak["above"] or 0.0, 0.0), 100 * level, recipe]
        )
    rows.append(("no further training", None, 100 * start, *[None] * 10))
    found_all = _build_results(
        lab,
        rows,
        points,
        safe,
        {k: v for k, v in leaks.items() if k not in refuted},
        seeds,
        confirmed,
    )
    return replace(
        found_all,
        facts={**found_all.facts, "seeds": seeds, "attacked again, on other images": confirmed},
    )


def is_hidden(leak: Mapping[str, Any]) -> bool:
    """Within 0.5 dB and AUC 0.55 of the floor, at the upper ends of 95 % intervals. Where no attack
    had anything to work with, nothing was shown.
    """
    return (
        leak["upper"] is not None
        and leak["upper"] <= NEAR
        and leak["auc upper"] is not None
        and leak["auc upper"] <= GUESS
    )


def _answer(yes: bool) -> str:
    return "yes" if yes else "no"


def _build_results(
    lab: Lab,
    rows: Sequence[tuple[Any, ...]],
    points: Mapping[str, Any],
    safe: Sequence[tuple[str, int]],
    leaks: Mapping[tuple[str, int], Mapping[str, Any]],
    seeds: int,
    confirmed: Sequence[str],
) -> Results:
    leaked = (
        "best attack",
        "dB above the mean image",
        "upper 95 % (dB)",
        "patch AUC",
        "upper 95 % (AUC)",
        "labels",
        "epsilon",
    )
    heads = (
        "defences",
        "images per update",
        "accuracy (%)",
        "accuracy ±",
        *leaked,
        "keeps accuracy",
        "hides",
    )
    note = (
        "Accuracy after the same training under the defences, mean and standard deviation over "
        f"{seeds} seeds. Leakage is that of the first update under the strongest attack: dB above "
        "the mean image, and AUC of patch membership, each with the upper end of its 95 % interval "
        "over updates. Labels: share recovered. Keeps accuracy: within the standard deviation of "
        f"the undefended run. Hides: both upper ends are within {NEAR} dB and AUC {GUESS}; where "
        "accuracy is kept, on other images too. Epsilon is for all steps, without amplification by "
        "sampling."
    )
    at_one = [r for r, size in safe if size == 1]
    hidden = [pair for pair, leak in leaks.items() if is_hidden(leak)]
    least = min(leaks, key=lambda pair: _worth(leaks[pair]) if pair[1] == 1 else math.inf)
    sizes = [s for _, s in safe]
    again = f"; attacked again, on other images: {'; '.join(confirmed)}" if confirmed else ""
    more = (
        f"with at least {min(sizes)} images: {', '.join(f'{r} at {s}' for r, s in safe)}"
        if safe
        else "at no size that was tried"
    ) + again
    alone = ", ".join(f"{r} at {s}" for r, s in hidden if (r, s) not in safe) or "none"
    said = f"at batch 1: {', '.join(at_one)}" if at_one else f"none at batch 1; {more}"
    statement = (
        "There is a recipe at batch 1 under which the strongest attack is within 0.5 dB "
        "and AUC 0.55 of its baseline (95 % interval), at an "
    )
    statement += "accuracy within the seeds' spread of the undefended run."
    judged = lab.preset_name != "pico"  # two updates of digits judge nothing
    best = min(safe, key=lambda pair: leaks[pair]["above"], default=None)
    measure = "dB above the mean image"
    findings = [
        Finding(
            "goal/single images",
            statement,
            bool(at_one) if judged else None,
            leaks[least]["above"],
            0.0,
            leaks["none", 1]["above"],
            f"{said}; hides, and costs accuracy: {alone}",
            measure=measure,
            trials=_updates(lab, least[1]),
        ),
        Finding(
            "goal/sums",
            "The same at some number of images in what the server sees.",
            bool(safe) if judged else None,
            None if best is None else leaks[best]["above"],
            0.0,
            leaks["none", 1]["above"],
            more,
            measure=measure,
            trials=1 if best is None else _updates(lab, best[1]),
        ),
    ]
    data = {
        "series": points,
        "xlabel": "dB above the mean image: less is more private",
        "ylabel": "accuracy",
    }
    figure = Figure("Accuracy against leakage", "points", data, "Up and to the left is better.")
    table = Table("Recipes", heads, tuple(rows), note)
    return results(
        lab,
        "gradients/front",
        "Defences of federated training: leakage, batch size and accuracy",
        findings,
        (table,),
        (figure,),
    )


def _worth(leak: Mapping[str, Any]) -> float:
    """Return one number for a leak: dB above the baseline plus ten times the AUC above a guess."""
    return max(leak["above"] or 0.0, 0.0) + 10 * max((leak["auc"] or 0.5) - 0.5, 0.0)


def _trained_at(lab: Lab, recipe: str, size: int) -> int:
    """The size that a training is done for; 0 where it is the same for all that fit into a
    round.
    """
    plan = parse_plan(recipe)
    return (
        size
        if size > ROUND[lab.preset_name]
        or any(isinstance(d, Noise | Private) for d in plan.update_defences)
        else 0
    )


def tune(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train on by the mean of the clients' updates, each defended: AdamW at the server. The
    accuracy at the end.
    """
    examples, test = prepare(p["task"], data["train"]), prepare(p["task"], data["test"])
    examples = examples.only(np.arange(len(examples))[-int(p["rows"]) :])
    plan = parse_plan(p["recipe"], batch=int(p["size"]) or int(p["round"]))
    model = prepare_model(trained(p, data["weights"]).model, plan)
    for q in model.parameters():
        q.requires_grad_(True)
    steps = int(p["steps"])
    follow(model, plan, examples, int(p["round"]), steps, float(p["rate"]), int(p["seed"]))
    inner = model.model if isinstance(model, MaskedJigsaw) else model
    epsilon = None if plan.private is None or not steps else plan.private.epsilon(steps)
    return Outcome(
        {
            "accuracy": accuracy(inner, test.only(np.arange(min(len(test), 2000)))),
            "epsilon": epsilon,
        }
    )


def follow(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    size: int,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """Steps of AdamW, in place, by the mean of `size` / `plan.batch` clients' updates, as the plan
    leaves them.
    """
    model.eval()  # no dropout; MJP's puzzles are given below
    frozen = {n for part in plan.withheld for n in part_parameters(model, part)}
    parameters = {n: q for n, q in model.named_parameters() if n not in frozen}
    config = OptimizerConfig("adamw", rate, weight_decay=0.05)
    optimizer = ScheduledOptimizer(
        parameters.values(), config, lambda step: rate * cosine_factor(step, steps, 0)
    )
    draw = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)

    def backward(step: int) -> float:
        inputs, labels = examples.batch(draw.integers(0, len(examples), size))
        grads = received(
            model,
            plan,
            examples,
            cast_inputs(model, inputs),
            labels,
            parameters,
            f"front/{seed}/{step}",
            noise,
        )
        for name, q in parameters.items():
            q.grad = grads.get(name)
        return math.nan  # the server sees no loss

    for _ in descend(optimizer, backward, range(steps)):
        pass


def received(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    label: str,
    noise: torch.Generator,
) -> dict[str, Tensor]:
    """The mean of the updates of clients with `plan.batch` samples each. The noise of all clients
    is sampled once, with the scale of their mean.
    """
    for defence in plan.update_defences:
        if not isinstance(defence, Withhold | Noise | Private):
            raise DefenceError(
                f"{type(defence).__name__} is not known of many clients at once",
                hint="recipes have withhold, freeze, noise and private",
            )
    mixes = [d for d in plan.update_defences if isinstance(d, Noise | Private)]
    if not mixes:
        return batch_grads(
            model,
            examples,
            inputs,
            labels,
            parameters,
            puzzle=make_puzzle(model, plan, inputs, label),
        )
    clients = len(labels) // plan.batch
    each = _each(model, examples, inputs, labels, parameters)
    if plan.private is not None:
        length = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
        factor = (plan.private.norm / length.clamp(min=1e-12)).clamp(max=1.0)
        each = {n: g * factor.view(-1, *[1] * (g.ndim - 1)) for n, g in each.items()}
    out = {}
    for name, g in each.items():
        sent = g.view(clients, plan.batch, *g.shape[1:]).mean(1)
        found = sent.mean(0)
        for d in mixes:
            if isinstance(d, Private):
                size = torch.tensor(d.multiplier * d.norm / plan.batch / math.sqrt(clients))
            elif d.part is None or name in part_parameters(model, d.part):
                size = d.scale * sent.flatten(1).square().mean(1).sum().sqrt() / clients
            else:
                continue
            found = found + size * torch.randn(found.shape, generator=noise)
        out[name] = found
    return out


def _each(
    model: torch.nn.Module,
    examples: Examples,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
) -> dict[str, Tensor]:
    """The gradient of every sample, [samples, ...]."""
    fixed = {
        n: t.detach()
        for n, t in [*model.named_parameters(), *model.named_buffers()]
        if n not in parameters
    }

    def loss(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found = functional_call(model, {**fixed, **given}, (x[None],))
        logits = found if isinstance(found, Tensor) else found.logits
        return loss_of(examples, logits, y[None])

    of = {n: q.detach() for n, q in parameters.items()}
    with double_backward():  # the fused attention cannot be mapped over samples
        found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(
            of, inputs["pixel_values"], labels
        )
    return found


def leak(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Measure the leakage of the first update under a recipe: the best attack above the baseline,
    with an interval over updates; patches; labels.
    """
    model = trained(p, data["weights"], work.device).model
    for q in model.parameters():
        q.requires_grad_(True)
    examples = prepare(p["task"], data["test"])
    count, size, (mean, std) = (
        int(p["updates"]),
        int(p["size"]),
        (p["task"]["mean"], p["task"]["std"]),
    )
    first = int(p.get("first", 0))
    middle = first + count * size
    victims, own = (
        examples.only(np.arange(first, middle)),
        examples.only(np.arange(middle, min(len(examples), middle + int(p["own"])))),
    )
    case = GradientCase(model, victims, own, mean, std, updates=count, batch=size, seed=0)
    slow: tuple[Attack, ...] = (
        select_attacks(["inverting"], ATTACKS) if size <= int(p["largest"]) else ()
    )
    budget = Budget(int(p["steps"]), practice=int(p["practice"]))
    row = audit_combination(
        case,
        model,
        p["recipe"],
        (*(a for a in QUICK if a.name != "mask"), *slow),
        budget,
        optimized=int(p["optimised"]),
    )
    low = _floor(case)
    gaps = {
        name: [a - b for a, b in zip(got.scores[LEAK], low, strict=False)]
        for name, got in row.by_attack.items()
    }
    # Of an update of several images, one number: they share it, and are not independent trials.
    by = {
        name: [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
        for name, values in gaps.items()
    }
    best = max(by, key=lambda n: statistics.fmean(by[n])) if by else None
    values: dict[str, Any] = {
        "best": best,
        "above": None,
        "upper": None,
        "labels": row.share("labels"),
    }
    if best is not None:
        values |= {"above": statistics.fmean(by[best]), "upper": _upper(by[best])}
    means = {name: statistics.fmean(v) for name, v in by.items()}
    return Outcome(
        {
            **values,
            "auc": row.share("patches"),
            "auc upper": _upper(list(row.shares["patches"])) if "patches" in row.shares else None,
            "all": means,
            "why": dict(row.reasons),
        }
    )


def _floor(case: GradientCase) -> list[float]:
    x = case.victims.batch(np.arange(len(case.victims)))[0]["pixel_values"]
    own = case.own.batch(np.arange(len(case.own)))[0]["pixel_values"]
    true, guess = (
        denormalize(v, case.mean, case.std).clamp(0, 1)
        for v in (x, own.mean(0, keepdim=True).expand_as(x))
    )
    return [float(v) for v in psnr(guess, true, 1.0)]


def _upper(values: Sequence[float]) -> float | None:
    """The upper end of a 95 % interval of the mean; None where there is one value."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return statistics.fmean(values) + float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(
        values
    ) / math.sqrt(len(values))


TUNE = Cell("gradients-tune", 2, tune)
LEAKED = Cell("gradients-leak", 2, leak)


def _tuned(
    lab: Lab,
    subject: Subject,
    base: Outcome,
    recipe: str,
    size: int,
    seed: int,
    steps: int | None = None,
) -> Outcome:
    many, rows = {"pico": (4, 100), "small": (80, 40_000), "paper": (2000, 100_000)}[
        lab.preset_name
    ]
    parameters = {
        **parameters_with(subject, how("A")),
        "recipe": recipe,
        "size": size,
        "seed": seed,
        "steps": many if steps is None else steps,
    }
    parameters |= {
        "round": max(ROUND[lab.preset_name], size),
        "rows": rows,
        "rate": 1e-3 * (FASTER if "matrices" in recipe else 1.0),
    }
    assert subject.train is not None
    more = (
        From(
            "cifar10/cifar10.npz", {"image": "X_train", "label": "y_train"}, otherwise=subject.train
        )
        if lab.preset_name == "small"
        else subject.train
    )
    train = lab.open(more)
    lab.sizes[subject.name]["then on"] = f"{min(rows, len(train)):,} of {train.name}"
    data = {"weights": base, "train": train, "test": lab.open(subject.test)}
    return lab.run(
        TUNE, parameters, data, f"train with {recipe}{f' of {size}' if size else ''}, seed {seed}"
    )


def _updates(lab: Lab, size: int) -> int:
    """Return the number of updates of a size that are attacked."""
    return 2 if lab.preset_name == "pico" else {1: 48, 8: 16, 32: 10, 128: 8, 256: 7}[size]


def _leaked(
    lab: Lab, subject: Subject, base: Outcome, recipe: str, size: int, first: int = 0
) -> Outcome:
    parameters: dict[str, Any] = {
        **parameters_with(subject, how("A")),
        "recipe": recipe,
        "size": size,
        **({"first": first} if first else {}),
    }
    if lab.preset_name == "pico":
        parameters |= {
            "updates": _updates(lab, size),
            "steps": 4,
            "optimised": 1,
            "own": 40,
            "practice": 10,
            "largest": 1,
        }
    else:
        updates = _updates(lab, size) * (2 if first else 1)
        parameters |= {
            "updates": updates,
            "steps": 150,
            "optimised": 2,
            "own": 1400,
            "practice": 300 if size < 32 else 100,
            "largest": 1,
        }
    data = {"weights": base, "test": lab.open(replace(subject.test, rows=None))}
    return lab.run(LEAKED, parameters, data, f"attack {recipe}, {size} in an update")
