"""Table 6 and Figure 7 of the permutation-equivariance paper: attacks on split learning with noise,
a low-pass filter and batch shuffle, each with and without row permutation.

Differences from the reference implementation: the attacked features contain position embeddings;
the defence acts in training, in the test and under attack; PSNR and SSIM are per image, of pixels
in 0..1 with a data range of 1; a multi-label answer is yes if its logit is positive; and some
attackers expect shuffles. Cells: a victim, trained through the split engine, and an attack on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from experiments.shared.train_cells import parameters_of, uri_of
from experiments.shared.verdicts import ENOUGH, Verdict, compare, require_seeds, too_few
from regauge.audit.engine import Attack, denormalize, select_attacks
from regauge.audit.scores import (
    AttackScores,
    Case,
    Row,
    merge_scores,
    score_baselines,
    score_images,
)
from regauge.audit.scores import best_assignment as by_name
from regauge.audit.split_audit import report
from regauge.audit.split_audit.attempts import (
    ATTACKS,
    Budget,
    Setting,
    attempt,
    collect_views,
    patch_size,
)
from regauge.audit.split_audit.engine import chance_accuracy
from regauge.audit.split_audit.victims import make_split_pair
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.tasks import Examples, prepare
from regauge.defences.gradients import part_parameters
from regauge.defences.parser import NONE
from regauge.results.findings import Finding, Results, Table, spread_of
from regauge.results.metrics import Lpips
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

Tensor = torch.Tensor
LPIPS = "lpips_alex.safetensors"
PICTURES = 8
EVERY = tuple(a.name for a in ATTACKS)
EQUAL = 0.03  # accuracies this near are equal: three images in a hundred
# What the paper prints: accuracy in percent, SSIM, PSNR on [-1, 1] with a span of 1 (with the right
# span 6.02 dB more), F-SIM by a face network.
PAPER = {
    "none": (91.9, 0.645, 16.25, 0.933),
    "noise": (88.8, 0.457, 15.47, 0.663),
    "noise+rows": (88.8, 0.167, 8.07, 0.187),
    "low-pass": (90.1, 0.450, 14.71, 0.614),
    "low-pass+rows": (90.2, 0.110, 5.69, 0.154),
    "batch-shuffle": (90.8, 0.148, 8.18, 0.176),
    "batch-shuffle+rows": (91.1, 0.143, 7.61, 0.167),
}


Bare = dict[
    str, Mapping[str, float]
]  # by combination: metrics of the paper's decoder on features without positions


def table6(lab: Lab) -> Results:
    """Split learning with each defence, with and without row permutation: accuracy, and what
    attackers make of the features.
    """
    cases, attacks = _cases(lab, "table6")
    found = report.build_results(
        "Table 6: what the server learns, under each defence", cases, attacks
    )
    bare: list[Bare] = [
        _bare(lab, subject) if i == 0 else {}
        for i, subject in enumerate(lab.preset.tables["table6"].values())
    ]
    claims = [
        claim
        for case, without in zip(cases, bare, strict=True)
        for claim in (*_claims(case), *_bare_claims(case, without))
    ]
    lab.pictures += [f for f in found.figures if f.kind == "images"]
    figures = tuple(f for f in found.figures if f.kind != "images")
    tables = (
        *(_paper_table(case, without) for case, without in zip(cases, bare, strict=True)),
        *found.tables,
    )
    return replace(
        found,
        findings=(*claims, *found.findings),
        tables=tables,
        figures=figures,
        facts=_facts(lab, "table6", attacks, found),
        unchecked=_left(lab),
    )


def figure7(lab: Lab) -> Results:
    """The trade-off between accuracy and privacy over the filter's radius and the level of noise,
    with and without row permutation.
    """
    cases, attacks = _cases(lab, "figure7")
    found = report.build_results(
        "Figure 7: accuracy against privacy, by radius and by noise", cases, attacks
    )
    lab.pictures += [f for f in found.figures if f.kind == "images"]
    figures = tuple(f for f in found.figures if f.kind != "images")
    claims = [claim for case in cases for claim in _curve_claims(case)]
    return replace(
        found,
        findings=(*claims, *found.findings),
        figures=figures,
        facts=_facts(lab, "figure7", attacks, found),
        unchecked=_left(lab),
    )


def _cases(lab: Lab, table: str) -> tuple[list[Case], tuple[Attack, ...]]:
    trials = lab.seeds or 1
    subjects = lab.preset.tables[table]
    every = table == "table6" and trials > 1  # of a curve its points are what costs
    chosen = {
        key: ATTACKS if every else select_attacks(subject.plan.get("attacks", EVERY), ATTACKS)
        for key, subject in subjects.items()
    }
    lab.total = trials * sum(
        1 + sum(a.fits(c) for a in chosen[key])
        for key, subject in subjects.items()
        for c in subject.plan["combinations"]
    )
    if table == "table6":
        lab.total += len(_bared(next(iter(subjects.values()))))
    parts = [
        (table, key, c, t, every)
        for t in range(trials)
        for key, subject in subjects.items()
        for c in subject.plan["combinations"]
    ]
    lab.ahead(_part, parts)
    if table == "table6":
        lab.ahead(_part_of_bare, _bared(next(iter(subjects.values()))))
    cases = [_case(lab, subject, range(trials), chosen[key]) for key, subject in subjects.items()]
    return cases, tuple(a for a in ATTACKS if any(a in some for some in chosen.values()))


def _part(lab: Lab, item: tuple[str, str, str, int, bool]) -> None:
    """One row of one seed: all of its cells."""
    table, key, combination, trial, every = item
    subject = lab.preset.tables[table][key]
    _row(
        lab,
        subject,
        combination,
        trial,
        ATTACKS if every else select_attacks(subject.plan.get("attacks", EVERY), ATTACKS),
    )


def _part_of_bare(lab: Lab, combination: str) -> None:
    _bare_one(lab, next(iter(lab.preset.tables["table6"].values())), combination)


def _bared(subject: Subject) -> list[str]:
    return [c for c in subject.plan["combinations"] if "batch-shuffle" not in c]


def _bare(lab: Lab, subject: Subject) -> Bare:
    """The paper's decoder where its code has it: on features from which the positions were left
    out, one seed.
    """
    return {combination: _bare_one(lab, subject, combination) for combination in _bared(subject)}


def _bare_one(lab: Lab, subject: Subject, combination: str) -> dict[str, float]:
    shared, data = _shared(lab, subject, combination, 0)
    victim = lab.run(
        VICTIM,
        shared,
        {k: v for k, v in data.items() if k != "lpips"},
        f"{subject.name}, {combination}: train",
    )
    lab.done -= 1  # it was trained before
    now = f"{subject.name}, {combination}: the paper's decoder, positions left out"
    outcome = lab.run(
        ATTACK, {**shared, "attack": "decoder", "bare": True}, {**data, "victim": victim}, now
    )
    return {metric: sum(v) / len(v) for metric, v in outcome.values["scores"].items()}


def _shared(
    lab: Lab, subject: Subject, combination: str, trial: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and data of a victim's cells."""
    assert subject.train is not None
    data: dict[str, Any] = {
        "train": lab.open(subject.train),
        "test": lab.open(subject.test),
        **lab.sources(subject, 0),
    }
    if (lab.assets / LPIPS).exists():
        data["lpips"] = lab.source(LPIPS)
    plan = {k: v for k, v in subject.plan.items() if k not in ("combinations", "attacks")}
    shared: dict[str, Any] = {
        "model": subject.model,
        "task": subject.task,
        "tested": {**subject.task, **subject.tested},
        "plan": plan,
    }
    return {**shared, "recipe": subject.recipe, "combination": combination, "seed": trial}, data


def merge_trials(trials: Sequence[Row]) -> Row:
    """Merge the rows of several seeds: scores of all images, losses and pictures of the first."""
    first = trials[0]
    by_attack = {}
    for name, result in first.by_attack.items():
        results = [trial.by_attack[name] for trial in trials if name in trial.by_attack]
        by_attack[name] = replace(
            result,
            scores=merge_scores([r.scores for r in results]),
            seconds=statistics.fmean(r.seconds for r in results),
            seeds=len(results),
        )
    accuracies = tuple(trial.accuracy for trial in trials)
    return Row(
        first.combination,
        by_attack,
        statistics.fmean(accuracies),
        first.chance,
        statistics.fmean(trial.seconds for trial in trials),
        accuracies,
    )


def _case(lab: Lab, subject: Subject, trials: Sequence[int], attacks: Sequence[Attack]) -> Case:
    rows = []
    for combination in subject.plan["combinations"]:
        found = [_row(lab, subject, combination, trial, attacks) for trial in trials]
        rows.append(merge_trials([row for row, _, _ in found]))
    _, victim, outcome = found[-1]
    train, test = (lab.open(part) for part in (subject.train, subject.test) if part is not None)
    about = lab.sizes.setdefault(subject.name, {"parameters": victim.values["parameters"]})
    about["trained on"] = f"{victim.values['examples']:,} of {train.name}"
    about["tested on"] = f"{victim.values['tested']:,} of {test.name}"
    about["attacked"] = (
        f"{outcome.values['attacked']} of them, with {outcome.values['own']} images of the "
        "attacker's own"
    )
    return Case(subject.name, tuple(rows), outcome.values["floors"], shown=outcome.tensors["true"])


def _row(
    lab: Lab, subject: Subject, combination: str, trial: int, attacks: Sequence[Attack]
) -> tuple[Row, Outcome, Outcome]:
    """One combination from one seed: the row, the victim, and the last attack on it."""
    shared, data = _shared(lab, subject, combination, trial)
    victim = lab.run(
        VICTIM,
        shared,
        {k: v for k, v in data.items() if k != "lpips"},
        f"{subject.name}, {combination}, seed {trial}: train",
    )
    attacked, outcome = {}, victim
    for attack in attacks:
        if not attack.fits(combination):
            continue
        now = f"{subject.name}, {combination}, seed {trial}: {attack.title}"
        outcome = lab.run(
            ATTACK, {**shared, "attack": attack.name}, {**data, "victim": victim}, now
        )
        if outcome.values["scores"]:
            v = outcome.values
            attacked[attack.name] = AttackScores(
                attack.name,
                v["scores"],
                v["losses"],
                v["floor"],
                outcome.seconds,
                outcome.tensors["images"],
            )
    return (
        Row(
            combination,
            attacked,
            victim.values["accuracy"],
            victim.values["chance"],
            victim.seconds,
        ),
        victim,
        outcome,
    )


def victim(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train through the split engine with a combination of defences, and test with it: all weights,
    and the accuracy.
    """
    recipe, seed = p["recipe"], int(p["seed"])
    train, test = prepare(p["task"], data["train"]), prepare(p["tested"], data["test"])
    steps = math.ceil(len(train) / recipe["batch"]) * int(recipe["epochs"])
    how = OptimizerConfig(
        recipe["optimizer"],
        recipe["rate"],
        weight_decay=recipe.get("decay", 0.0),
        schedule="cosine",
        warmup=max(1, steps // 10),
        steps=steps,
    )
    how = replace(how, momentum=recipe.get("momentum", 0.0), clip=recipe.get("clip", 0.0))
    # In float64 shuffled rows change only the rounding, which then does not grow: the cost of a
    # defence is distinguishable from chance.
    model = build(p["model"], seed, uri_of(data, "source")).to(
        work.device, getattr(torch, recipe.get("dtype", "float32"))
    )
    pair = make_split_pair(model, p["combination"], how, seed=seed)
    scale_rates(model, recipe)
    pair.train(train, Run(steps, int(recipe["batch"]), seed))
    found = pair.measure(test, int(recipe["batch"]))
    values = {
        "accuracy": found["accuracy"],
        "chance": chance_accuracy(test),
        "loss": found["loss"],
        "losses": pair.losses,
        "steps": steps,
    }
    values |= {"examples": len(train), "tested": len(test), "parameters": parameters_of(pair.model)}
    return Outcome(values, {name: t.cpu() for name, t in pair.state().items()})


def scale_rates(model: torch.nn.Module, recipe: Mapping[str, Any]) -> None:
    """Give the parts in `rates` learning rates of their own, by the scale of their gradients: for
    SGD without weight decay and clipping that is the same, with momentum too.
    """
    rates = recipe.get("rates", {})
    if rates and (recipe["optimizer"] != "sgd" or recipe.get("decay") or recipe.get("clip")):
        raise ValueError("rates must be those of sgd without decay and clip")
    for part, rate in rates.items():
        factor = rate / recipe["rate"]
        for name in part_parameters(model, part):
            model.get_parameter(name).register_hook(lambda grad, f=factor: f * grad)


def attack_victim(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Record the features of a defended victim, attack them, and score the reconstructions."""
    plan, seed, batch = p["plan"], int(p["seed"]), int(p["recipe"]["batch"])
    model = build(p["model"], seed, uri_of(data, "source"))
    model.load_state_dict(data["victim"].tensors)
    model.to(work.device)
    if p.get("bare"):  # the reference implementation adds positions and throws the sum away
        for name, table in model.named_parameters():
            if name.endswith(("position_embeddings", "pos_embed")):
                torch.nn.init.zeros_(table)
    test, own = (
        _pixels(prepare({**p["tested"], "part": plan[part]}, data["test"]))
        for part in ("attacked", "own")
    )
    pair = make_split_pair(model, p["combination"], seed=seed)
    views = collect_views(pair, own, test, batch, seed)
    chosen = next(a for a in ATTACKS if a.name == p["attack"])
    setting = Setting(p["combination"], Budget(**plan["budget"]), batch, seed, device=work.device)
    tried = attempt(chosen, views, setting)
    lpips = Lpips(data["lpips"].uri) if "lpips" in data else None
    mean, std = p["tested"]["mean"], p["tested"]["std"]
    true, mine = (denormalize(v, mean, std).clamp(0, 1) for v in (test, own))
    values = {
        "floors": score_baselines(mine, true, patch_size(model, true), lpips, seed),
        "attacked": len(test),
        "own": len(own),
    }
    if tried is None:
        return Outcome(
            {**values, "scores": {}, "losses": [], "floor": 0.0},
            {"images": true[:0], "true": true[:PICTURES]},
        )
    images = denormalize(tried.output, mean, std)
    images = images if chosen.is_ordered else by_name(images, true)
    values |= {
        "scores": score_images(images, true, lpips),
        "losses": list(tried.facts["losses"]),
        "floor": tried.facts["floor"],
    }
    return Outcome(values, {"images": images[:PICTURES].clamp(0, 1), "true": true[:PICTURES]})


VICTIM = Cell("victim", 1, victim)
ATTACK = Cell("leak", 2, attack_victim)


def _pixels(examples: Examples) -> Tensor:
    return examples.batch(np.arange(len(examples)))[0]["pixel_values"]


def _base(combination: str) -> str:
    """A combination as the paper's table names it: without its level."""
    return report.series_key(combination)[0].replace(", ", "+").replace("pixel-noise", "noise")


def _paper_table(case: Case, bare: Bare) -> Table:
    """Return the paper's table with our numbers: under its decoder, with and without positions in
    the features, and under the best attack.
    """
    heads: tuple[str, ...] = (
        "defences",
        "accuracy (%)",
        "paper",
        "SSIM",
        "paper",
        "PSNR (dB)",
        "paper",
        "F-SIM",
        "paper",
        "SSIM, no positions",
        "SSIM, best attack",
        "best attack",
    )
    titles = {attack.name: attack.title for attack in ATTACKS}
    rows = []
    for row in case.rows:
        theirs = PAPER.get(_base(row.combination), (None,) * 4)
        ours = [100 * row.accuracy, *(row.value("decoder", m) for m in ("SSIM", "PSNR", "F-SIM"))]
        name = row.best("SSIM")[0]
        pairs = [cell for a, b in zip(ours, theirs, strict=True) for cell in (a, b)]
        means = row.by_attack[name].by_seed("SSIM")
        spread = (spread_of(means),) if len(means) > 1 else ()
        rows.append(
            (
                row.combination,
                *pairs,
                bare.get(row.combination, {}).get("SSIM"),
                row.value(name, "SSIM"),
                *spread,
                titles[name],
            )
        )
    several = len(case.rows[0].accuracies) > 1
    heads = (*heads[:-1], "± over seeds", heads[-1]) if several else heads
    guess = [
        100 * case.rows[0].chance,
        None,
        *(cell for m in ("SSIM", "PSNR", "F-SIM") for cell in (case.floor(m), None)),
        None,
        None,
        None,
        *([None] if several else []),
    ]
    rows.append(("a guess, the mean image", *guess))
    note = (
        "Attacker: the paper's decoder, trained on features under the same defences. The paper "
        "uses "
        "CelebA's 40 attributes, ViT-B/16, a PSNR of pixels in -1..1 with a data range of 1 (6.02 "
        "dB too low), and F-SIM by a face network; here F-SIM compares the last features of "
        "LPIPS's "
        "AlexNet. The paper attacks features without positions, as does the column *SSIM, no "
        "positions*; in all other columns the features contain positions, as those of a client do."
    )
    return Table(f"Table 6: {case.name}, the paper's attacker", heads, tuple(rows), note)


def seeds_of(case: Case) -> int:
    """Return the number of victims of each row."""
    return max(1, len(case.rows[0].accuracies))


def _claims(case: Case) -> list[Finding]:
    """Check the paper's claim under its own attacker and under the others."""
    out = []
    pairs = [
        (row, case.row(report.without_rows(row.combination) or ""))
        for row in case.rows
        if report.without_rows(row.combination)
    ]
    seeds = seeds_of(case)
    for row, before in pairs:
        base = before.combination
        judged = base != NONE and not base.startswith(
            "batch-shuffle"
        )  # what the paper claims it for
        lower = {
            m: (before.value("decoder", m), row.value("decoder", m))
            for m in ("SSIM", "PSNR", "F-SIM")
        }
        known = {m: (a, b) for m, (a, b) in lower.items() if a is not None and b is not None}
        detail = ", ".join(f"{m} {a:.3f} to {b:.3f}" for m, (a, b) in known.items())
        found = [_lowered(row, before, m) for m in known]
        verdict = _all_of(found, seeds)
        detail = f"{detail}; {verdict.reason}" if verdict.reason else detail
        out.append(
            Finding(
                f"claim/{case.name}/{base}",
                f"Against the paper's own decoder, row permutation on top of {base} lowers "
                "SSIM, PSNR and similarity.",
                verdict.holds if judged else None,
                row.value("decoder", "SSIM"),
                case.floor("SSIM"),
                before.value("decoder", "SSIM"),
                detail,
                "000 Tab. 6",
                "SSIM",
                trials=seeds,
            )
        )
        gap = abs(row.accuracy - before.accuracy)
        equal = require_seeds(gap <= EQUAL, seeds)
        out.append(
            Finding(
                f"claim/{case.name}/{base}/accuracy",
                f"Row permutation on top of {base} leaves the accuracy as it is.",
                equal.holds if judged else None,
                row.accuracy,
                row.chance,
                before.accuracy,
                f"{before.accuracy:.3f} without, {row.accuracy:.3f} with; equal to rounding "
                f"before training amplifies it{equal.reason and f'; {equal.reason}'}",
                "000 Tab. 6",
                "accuracy",
                trials=seeds,
            )
        )
        (_, was), (name, now) = before.best("SSIM"), row.best("SSIM")
        weak = [r.value("decoder", "SSIM") or 0.0 for r in (before, row)]
        out.append(
            Finding(
                f"claim/{case.name}/{base}/adaptive",
                f"What row permutation on top of {base} keeps from the best of the attacks.",
                None,
                now,
                case.floor("SSIM"),
                was,
                f"SSIM {was:.3f} to {now:.3f} ({name}); the paper's decoder alone {weak[0]:.3f} "
                f"to {weak[1]:.3f}",
                measure="SSIM",
                trials=seeds,
            )
        )
    return out


SMALLEST = {"SSIM": 0.01, "PSNR": 0.5, "F-SIM": 0.01}  # differences below it are no finding


def _lowered(row: Row, before: Row, measure: str) -> Verdict:
    """Judge whether the paper's decoder has less of a measure after a defence than before it."""
    now, then = (one.by_attack["decoder"].by_seed(measure) for one in (row, before))
    return compare(now, then, -1, size=SMALLEST[measure])


def _all_of(verdicts: Sequence[Verdict], seeds: int) -> Verdict:
    """Return one verdict of several: it fails if one fails, and needs a verdict on each."""
    if seeds < ENOUGH:
        return Verdict(None, too_few(seeds))
    if any(v.holds is False for v in verdicts):
        return Verdict(False, "")
    undecided = [v.reason for v in verdicts if v.holds is None]
    return Verdict(None, undecided[0]) if undecided else Verdict(True, "")


def _bare_claims(case: Case, bare: Bare) -> list[Finding]:
    """The claim in the setting of the paper's code."""
    out = []
    for combination, after in bare.items():
        base = report.without_rows(combination)
        if not base:
            continue
        before = bare[base]
        known = [m for m in ("SSIM", "PSNR", "F-SIM") if m in before]
        out.append(
            Finding(
                f"claim/{case.name}/{base}/no positions",
                "Against its own decoder, on features without positions as in the paper's "
                f"code, rows on top of {base} lower all measures.",
                None,
                after["SSIM"],
                case.floor("SSIM"),
                before["SSIM"],
                ", ".join(f"{m} {before[m]:.3f} to {after[m]:.3f}" for m in known)
                + f"; {too_few(1)}",
                "000 Tab. 6",
                "SSIM",
            )
        )
    return out


def _curve_claims(case: Case) -> list[Finding]:
    """At every point of the curve rows leak less to the paper's decoder; and to the best attack?"""
    out = []
    for way, title in (("decoder", "the paper's decoder"), ("best", "the best attack")):
        pairs = [
            (row, case.row(base))
            for row in case.rows
            if (base := report.without_rows(row.combination)) and base != NONE
        ]
        value = [
            (row.value(way, "SSIM") or 0.0) if way == "decoder" else (row.best("SSIM")[1] or 0.0)
            for row, _ in pairs
        ]
        before = [
            (row.value(way, "SSIM") or 0.0) if way == "decoder" else (row.best("SSIM")[1] or 0.0)
            for _, row in pairs
        ]
        below = sum(a < b for a, b in zip(value, before, strict=True))
        known = [p for p in pairs if all("decoder" in row.by_attack for row in p)]
        verdict = _all_of([_lowered(*p, "SSIM") for p in known], seeds_of(case))
        out.append(
            Finding(
                f"claim/{case.name}/curve/{way}",
                f"With rows, every point of the curve leaks less to {title}.",
                verdict.holds if way == "decoder" else None,
                sum(value) / len(value),
                case.floor("SSIM"),
                sum(before) / len(before),
                f"{below} of {len(pairs)} points; the mean SSIM over them"
                + (f"; {verdict.reason}" if way == "decoder" and verdict.reason else ""),
                "000 Fig. 7",
                "SSIM",
                trials=seeds_of(case),
            )
        )
    return out


def _left(lab: Lab) -> tuple[str, ...]:
    return (*unscored(lab, "F-SIM and LPIPS"), *_own_models(lab))


def unscored(lab: Lab, metrics: str) -> tuple[str, ...]:
    """Return the metrics that are left out because the weights of their network are missing."""
    return () if (lab.assets / LPIPS).exists() else (f"{metrics}: {LPIPS} is not in the assets",)


def _own_models(lab: Lab) -> tuple[str, ...]:
    return (
        ("the paper's own model and data: --preset paper, with CelebA and ViT-B/16 by path",)
        if lab.preset_name != "paper"
        else ()
    )


def _facts(lab: Lab, table: str, attacks: Sequence[Attack], found: Results) -> dict[str, Any]:
    return lab.facts(
        f"000/{table}",
        lab.seeds or 1,
        attacks=[a.title for a in attacks],
        verdict=found.facts["verdict"],
    )
