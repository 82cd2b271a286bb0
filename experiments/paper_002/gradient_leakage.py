"""Table 5 of the masked-jigsaw paper: leakage of gradients with and without puzzles, by the paper's
attack on its modified block and by least squares on the unmodified model.

Settings, as in the table: (a) the update is of the plain image; (b) of the image under a puzzle of
ratio 0.9; (c) as (b), without the unknown embedding; (d) as (b), compared with the original image.
In (a) to (c) reconstructions are compared with the input of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.paper_000.reconstruction import unscored
from experiments.paper_002.accuracy import results
from experiments.paper_002.jigsaw_cells import (
    how,
    model_of,
    parameters_with,
    score_of,
    subjects_of,
    trained,
)
from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from experiments.shared.verdicts import Verdict, require_seeds, too_few
from regauge.attacks.april import make_april_model
from regauge.audit.engine import denormalize, select_attacks
from regauge.audit.gradient_audit.attempts import ATTACKS as GRADIENT_ATTACKS
from regauge.audit.gradient_audit.attempts import Budget
from regauge.audit.gradient_audit.engine import GradientCase, audit_combination, score_baselines
from regauge.audit.gradient_audit.report import LEAK
from regauge.audit.scores import AttackScores, mean_score
from regauge.audit.tables import to_pictures
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.datasets import Data
from regauge.data.tasks import Examples, prepare
from regauge.errors import RegaugeError
from regauge.jigsaw.metrics import evaluate
from regauge.jigsaw.variants import Variant
from regauge.jigsaw.wrapper import MaskedJigsaw, wrap
from regauge.results.findings import Figure, Finding, Results, Table
from regauge.results.metrics import Lpips

RATIO = 0.9
COLUMNS = ("MSE", "FFT2D", "PSNR", "SSIM", "LPIPS")
SHOWN = 4
OWN = 400  # images of the attacker's
# model, setting, how it was trained ("random": not at all), the client's plan, against the
# original; and the paper's row
ROWS: tuple[tuple[str, str, str, str, bool, tuple[float, ...]], ...] = (
    ("random weights", "a", "random", "none", False, (78.1, 0.0278, 0.0039, 19.27, 0.5203, 0.3623)),
    ("ViT", "a", "A", "none", False, (79.8, 0.0350, 0.0057, 18.94, 0.5182, 0.3767)),
    (
        "ViT w/o PEs",
        "a",
        "B",
        "no-positions=sent",
        False,
        (77.5, 0.0379, 0.0082, 20.22, 0.5912, 0.2692),
    ),
    (
        "ViT + MJP",
        "a",
        "J",
        f"mjp={RATIO},shuffle=false",
        False,
        (80.5, 0.1055, 0.0166, 11.52, 0.4053, 0.6545),
    ),
    (
        "random weights",
        "b",
        "random",
        f"mjp={RATIO},unknown=false,localize=false",
        False,
        (18.7, 0.0327, 0.0016, 18.44, 0.6065, 0.2836),
    ),
    (
        "ViT",
        "b",
        "A",
        f"mjp={RATIO},unknown=false,localize=false",
        False,
        (36.0, 0.0391, 0.0024, 17.60, 0.5991, 0.3355),
    ),
    (
        "ViT w/o PEs",
        "b",
        "B",
        f"mjp={RATIO},unknown=false,localize=false",
        False,
        (77.5, 0.0379, 0.0025, 20.25, 0.6655, 0.2370),
    ),
    ("ViT + MJP", "b", "J", f"mjp={RATIO}", False, (62.9, 0.1043, 0.0059, 11.66, 0.4493, 0.6519)),
    (
        "ViT + MJP w/o unknown",
        "c",
        "J",
        f"mjp={RATIO},unknown=false",
        False,
        (40.6, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
    ),
    ("ViT + MJP", "d", "J", f"mjp={RATIO}", True, (62.9, 0.1706, 0.0338, 8.07, 0.0875, 0.8945)),
)
MODELS = 1  # trained models of each kind that are attacked: too few for a verdict
ATTACKS = {
    "april": "APRIL, modified block",
    "april, float64": "APRIL, modified block, float64",
    "least squares": "least squares, unmodified",
}


def table5(lab: Lab) -> Results:
    """What gradients leak: the paper's attack and ours, in its settings (a) to (d)."""
    subject, images = gradient_subjects(lab)
    count = attacked_count(lab)
    kinds = sorted({row[2] for row in ROWS} - {"random"})
    pairs = dict.fromkeys((kind, plan) for _, _, kind, plan, _, _ in ROWS)
    lab.total = 2 * len(kinds) + len(pairs) * len(ATTACKS) + 1
    lab.ahead(_trained_part, kinds)
    lab.ahead(_attacked_part, [(*pair, attack, count) for pair in pairs for attack in ATTACKS])
    scores = {kind: score_of(lab, subject, how(kind), 0).values for kind in kinds}
    cells: dict[tuple[str, str, str], Outcome] = {}
    for _, _, kind, plan, _, _ in ROWS:
        for attack in ATTACKS:
            if (kind, plan, attack) not in cells:
                cells[kind, plan, attack] = _attacked(
                    lab, subject, kind, plan, attack, images, count
                )
    bare = _bare(lab, subject)
    rows: list[tuple[Any, ...]] = []
    for name, setting, kind, plan, original, paper in ROWS:
        accuracy = None if kind == "random" else _accuracy(scores[kind], setting, bare)
        for attack, title in ATTACKS.items():
            found = cells[kind, plan, attack].values
            side = found["original" if original else "read"]
            values = [mean_score(side, m) for m in COLUMNS]
            most = max(side[LEAK]) if side else None
            printed = [*paper[1:], paper[0]] if attack == "april" else [None] * 6
            rows.append(
                (
                    name,
                    f"({setting})",
                    title,
                    None if accuracy is None else 100 * accuracy,
                    *values,
                    most,
                    *printed,
                )
            )
    floor = cells["A", "none", "least squares"].values["floor"]
    rows.append(
        (
            "baseline: the mean image",
            "",
            "",
            None,
            *(mean_score(floor, m) for m in COLUMNS),
            max(floor[LEAK]),
            *[None] * 6,
        )
    )
    heads = (
        "model",
        "setting",
        "attack",
        "accuracy (%)",
        *("PSNR (dB)" if c == "PSNR" else c for c in COLUMNS),
        "highest PSNR (dB)",
        *(f"paper: {c}" for c in (*COLUMNS, "accuracy")),
    )
    note = (
        f"{count} images of {lab.open(images).name}; puzzles of ratio {RATIO:g}, MJP models "
        f"trained at ratio {how('J')['ratio']:g}; batch 1, float32 "
        "unless stated otherwise. Random weights replace the paper's ViT-S. (a) to (c) compare "
        "with "
        "the input, (d) with the original. FFT2D is a cosine distance, here corrected: it equals "
        "that of the pixels. Empty: the attack does not apply."
    )
    findings = _findings(cells, floor, count)
    lab.pictures.append(_gallery(cells))
    found_all = results(
        lab,
        "002/table5",
        "Table 5: what gradients leak",
        findings,
        (Table("Gradients", heads, tuple(rows), note),),
        (),
        unscored(lab, "LPIPS"),
    )
    return replace(found_all, facts={**found_all.facts, "seeds": 1})


def attacked_count(lab: Lab) -> int:
    """Return how many images are attacked: at most two of three, the others are the attacker's."""
    available = len(lab.open(gradient_subjects(lab)[1]))
    return min({"pico": 2, "small": 16, "paper": 1000}[lab.preset_name], 2 * available // 3)


def _trained_part(lab: Lab, kind: str) -> None:
    score_of(lab, gradient_subjects(lab)[0], how(kind), 0)


def _attacked_part(lab: Lab, item: tuple[str, str, str, int]) -> None:
    kind, plan, attack, count = item
    subject, images = gradient_subjects(lab)
    _attacked(lab, subject, kind, plan, attack, images, count)


def _findings(
    cells: Mapping[tuple[str, str, str], Outcome], floor: Mapping[str, Any], count: int
) -> list[Finding]:
    low = mean_score(dict(floor), LEAK)

    def psnr(kind: str, plan: str, attack: str = "least squares", side: str = "read") -> float:
        return mean_score(cells[kind, plan, attack].values[side], LEAK) or 0.0

    plain, calm = psnr("A", "none"), f"mjp={RATIO},shuffle=false"
    shuffled, bare = psnr("J", f"mjp={RATIO}"), psnr("J", f"mjp={RATIO},unknown=false")
    weak = [
        psnr(k, p, "april")
        for k, p in (("A", "none"), ("B", "no-positions=sent"), ("J", calm), ("J", f"mjp={RATIO}"))
    ]
    two = abs(psnr("J", f"mjp={RATIO}", "april") - psnr("J", f"mjp={RATIO},unknown=false", "april"))

    def found(key: str, statement: str, holds: bool | None, value: float, sentence: str) -> Finding:
        verdict = Verdict(None, "") if holds is None else require_seeds(holds, MODELS)
        return Finding(
            f"table5/{key}",
            statement,
            verdict.holds,
            value,
            low,
            plain,
            "; ".join(filter(None, (verdict.reason, sentence))),
            "002 Tab. 5",
            "PSNR",
            trials=count,
        )

    return [
        found(
            "plain",
            "A gradient of an unmodified ViT reveals its image: 20 dB above the mean image.",
            plain > (low or 0) + 20,
            plain,
            f"{plain:.1f} dB",
        ),
        found(
            "a",
            "An update of a model trained with MJP on the plain image reveals it as that of any "
            "other model does: to within 6 dB.",
            psnr("J", calm) > plain - 6,
            psnr("J", calm),
            f"{psnr('J', calm):.1f} dB by least squares on the unmodified model; the "
            "paper's protection in (a) is due to its attack",
        ),
        found(
            "unknown",
            "Under a puzzle the unknown embedding hides the image, not the shuffle: without it the "
            "shuffled image is recovered.",
            bare > shuffled + 6,
            bare,
            f"{bare:.1f} dB without, {shuffled:.1f} dB with it",
        ),
        found(
            "paper/a",
            "MJP lowers the PSNR of APRIL in setting (a).",
            None,
            weak[2],
            f"{too_few(MODELS)}: {weak[0]:.1f} to {weak[2]:.1f} dB",
        ),
        found(
            "paper/positions",
            "Without positions, the PSNR of APRIL is higher.",
            None,
            weak[1],
            f"{too_few(MODELS)}: {weak[0]:.1f} to {weak[1]:.1f} dB",
        ),
        found(
            "paper/b-c",
            "With and without the unknown embedding, the PSNR of APRIL is the same.",
            None,
            weak[3],
            f"{too_few(MODELS)}: they differ by {two:.2f} dB",
        ),
    ]


def _accuracy(score: Mapping[str, Any], setting: str, bare: float) -> float:
    if setting == "a":
        return float(score["accuracy"])
    return (
        bare
        if setting == "c"
        else float(next(s["accuracy"] for s in score["shuffled"] if s["ratio"] == RATIO))
    )


def _gallery(cells: Mapping[tuple[str, str, str], Outcome]) -> Figure:
    shown = []
    for name, setting, kind, plan, _, _ in ROWS:
        held = cells[kind, plan, "least squares"].tensors
        if setting == "a" and kind == "random":
            shown.append({"label": "the images", "images": to_pictures(held["original"])})
        if setting == "d":
            continue
        for attack in ("april", "least squares"):
            tensors = cells[kind, plan, attack].tensors
            if "found" in tensors:
                shown.append(
                    {
                        "label": f"({setting}) {name}: {ATTACKS[attack]}",
                        "images": to_pictures(tensors["found"]),
                    }
                )
    return Figure(
        "Table 5: the reconstructions of each attack",
        "images",
        {"columns": [], "rows": shown},
        "The first images.",
    )


def attack(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Updates of a trained model under a plan, one attack on them, and its scores against the
    original and against what was read.
    """
    model = _model(p, data.get("weights"))
    slow = p["attack"].startswith("april")
    model = (make_april_model(model) if slow else model).to(work.device)
    model = model.double() if p["attack"].endswith("float64") else model.float()
    count, (mean_, std) = int(p["count"]), (p["task"]["mean"], p["task"]["std"])
    examples = examples_of(p["task"], data["images"])
    own = examples.only(np.arange(count, min(len(examples), count + OWN)))
    case = GradientCase(
        model,
        examples.only(np.arange(count)),
        own,
        mean_,
        std,
        updates=count,
        seed=p["seed"],
        name="table5",
    )
    lpips = Lpips(data["lpips"].uri) if "lpips" in data else None
    name = "april" if slow else "least squares"
    row = audit_combination(
        case, model, p["plan"], select_attacks([name], GRADIENT_ATTACKS), Budget(), lpips, SHOWN
    )
    got: AttackScores | None = row.by_attack.get(name)
    values: dict[str, Any] = {
        "floor": score_baselines(case, lpips)["the mean image"],
        "original": {},
        "read": {},
        "why": dict(row.reasons),
    }
    shown = case.victims.batch(np.arange(min(SHOWN, count)))[0]["pixel_values"]
    tensors = {"original": denormalize(shown, mean_, std).clamp(0, 1)}
    if got is not None:
        values |= {
            "original": got.scores,
            "read": got.scores if got.read is None else got.read,
            "condition": got.facts[0].get("condition"),
            "seconds": got.seconds,
        }
        if got.images is not None:
            tensors["found"] = got.images
    return Outcome(values, {k: t.contiguous() for k, t in tensors.items()})


def examples_of(task: Mapping[str, Any], data: Data) -> Examples:
    """Return images with their labels, or with alternating labels if the classes are not the
    model's.
    """
    if "label" in data.fields and int(np.max(data["label"])) < int(task["classes"]):
        return prepare(task, data)
    plain = prepare({**task, "labelled": False}, data)
    return replace(
        plain,
        batch=lambda rows: (
            plain.batch(rows)[0],
            torch.as_tensor(np.asarray(rows)) % int(task["classes"]),
        ),
    )


def bare(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """The accuracy of a model of MJP under puzzles, with its own positions in place of the unknown
    one.
    """
    wrapped = trained(p, data["weights"], work.device)
    plain = MaskedJigsaw(wrapped.model, RATIO, variant=Variant("JP", shuffle="patches")).eval()
    found = evaluate(
        plain,
        prepare(p["task"], data["test"]),
        [RATIO],
        seed=0,
        batch=p["batch"],
    )
    return Outcome({"accuracy": found.shuffled[0].accuracy})


ATTACK = Cell("gradients-table5", 1, attack)
BARE = Cell("gradients-bare", 1, bare)


def _model(p: Mapping[str, Any], weights: Outcome | None) -> torch.nn.Module:
    """The model as its client has it: wrapped where the plan is of MJP's own model, plain
    elsewhere, its table open to gradients again.
    """
    if weights is None:
        found: torch.nn.Module = build(p["model"], 0)
    else:
        wrapped = wrap(build(p["model"], 0), p["how"], 1, 0)
        wrapped.load_state_dict(weights.tensors)
        keeps = wrapped.unknown is not None and "unknown=false" not in p["plan"]
        found = wrapped if keeps else wrapped.model
    for parameter in found.parameters():
        parameter.requires_grad_(True)
    return found


def _attacked(
    lab: Lab, subject: Subject, kind: str, plan: str, name: str, images: From, count: int
) -> Outcome:
    parameters: dict[str, Any] = {
        "model": subject.model,
        "task": subject.task,
        "plan": plan,
        "attack": name,
        "count": count,
        "seed": 0,
    }
    data: dict[str, Any] = {"images": lab.open(images)}
    if kind != "random":
        data["weights"] = model_of(lab, subject, how(kind), 0)
        lab.done, lab.seconds = (
            lab.done - 1,
            lab.seconds - data["weights"].seconds,
        )  # it is counted once, with its test
        parameters["how"] = parameters_with(subject, how(kind))["how"]
    if subject.task["size"] >= 32:
        with contextlib.suppress(RegaugeError):  # without it there is no LPIPS
            data["lpips"] = lab.source("lpips_alex.safetensors")
    return lab.run(ATTACK, parameters, data, f"attack {kind}, {plan}: {name}")


def _bare(lab: Lab, subject: Subject) -> float:
    weights = model_of(lab, subject, how("J"), 0)
    lab.done, lab.seconds = lab.done - 1, lab.seconds - weights.seconds
    parameters = {**parameters_with(subject, how("J")), "batch": subject.batch}
    return float(
        lab.run(
            BARE,
            parameters,
            {"weights": weights, "test": lab.open(subject.test)},
            "test MJP without its unknown embedding",
        ).values["accuracy"]
    )


def gradient_subjects(lab: Lab) -> tuple[Subject, From]:
    """The model, and the images: some are attacked, others are the attacker's. Small: a ViT that is
    to its patches as ViT-S/16 is (more channels than tokens, fewer than values of a patch), trained
    on CIFAR-10; ImageNet's images, made as small, are attacked.
    """
    vit = subjects_of(lab.preset_name)["vit"]
    if lab.preset_name == "pico":
        return vit, From("digits", split="test", rows=60)
    if lab.preset_name == "paper":
        return vit, From("imagenet/val", size=224, rows=1500)
    config = {
        **vit.model["config"],
        "patch_size": 8,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 192,
    }
    few = From("cifar10_train_4k.npz", {"image": "X", "label": "y"})
    assert vit.recipe is not None
    recipe = {**vit.recipe, "batch": 100, "epochs": 12, "rate": 1e-3, "looks": 3}
    del recipe["steps"]
    subject = replace(
        vit,
        name="ViT, patches of 8",
        model={"class": vit.model["class"], "config": config},
        train=few,
        recipe=recipe,
    )
    return subject, From("imagenet_sample_1000_224.parquet", {"image": "jpeg"}, size=32)
