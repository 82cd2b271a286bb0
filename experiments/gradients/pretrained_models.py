"""Leakage of updates of pretrained models: DINOv2-small on ImageNet images at 224 pixels, a ViT on
faces at three stages of its training, and MiniLM on sentences. Only numbers are stored, no images
of people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.paper_002.accuracy import results
from experiments.paper_002.gradient_leakage import examples_of
from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import From, vit_config
from experiments.shared.runner import Lab
from experiments.shared.verdicts import require_seeds
from regauge.audit.engine import select_attacks
from regauge.audit.gradient_audit.attempts import ATTACKS, QUICK, Budget
from regauge.audit.gradient_audit.engine import (
    GradientCase,
    audit_combination,
    audit_gradients,
)
from regauge.audit.gradient_audit.report import LEAK
from regauge.audit.scores import mean_score
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.evaluate import accuracy
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import prepare
from regauge.data.train import ScheduledOptimizer, backward_on, descend
from regauge.results.findings import Figure, Finding, Results, Table

DINO = {"class": "Dinov2ForImageClassification", "config": {"num_labels": 10}}
SEEN = {
    "kind": "images",
    "classes": 10,
    "size": 224,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}
FACES = {
    "kind": "images",
    "classes": 2,
    "size": 64,
    "mean": [0.5],
    "std": [0.25],
    "names": ["neutral", "happiness"],
}
MINI = {"class": "BertForSequenceClassification", "config": {"num_labels": 2}}
SENTENCES = {"kind": "reviews", "classes": 2, "length": 24, "first": 101, "pad": 0}
HELD = 400  # faces that are not trained on: the attacked, and the attacker's
ON_IMAGES = ("none", "batch=4", "noise=0.1")
ON_FACES = ("none", "batch=8", "freeze=embedding,first", "private=1")
ON_TEXTS = ("none", "noise=0.1")
STEPS = 20  # of descent, on one update: too few to say what it can do
STAGES = {"small": (0, 50, 600), "pico": (0, 4)}


def real(lab: Lab) -> Results:
    """Updates of real models, attacked under a few defences; and one model at three times of its
    training.
    """
    preset = "pico" if lab.preset_name == "pico" else "small"
    stages = STAGES[preset]
    combinations = ON_FACES if preset == "small" else ("none", "freeze=matrices")
    lab.total = (
        1 + len(stages) * len(combinations) + (len(ON_IMAGES) + 2 if preset == "small" else 0)
    )
    rows: list[tuple[Any, ...]] = []
    weights = _trained(lab, preset, stages)
    curve: dict[str, list[float | None]] = {c: [] for c in combinations}
    for stage in stages:
        for combination in combinations:
            found = _faces(lab, preset, weights, stage, combination).values
            detail = (
                f"ViT on faces after {stage} steps "
                f"({100 * weights.values['accuracy'][str(stage)]:.0f} %)"
            )
            rows.append(_row(detail, combination, found))
            curve[combination].append(
                None if found["best"] is None else found["best"] - found["floor"]
            )
    texts: tuple[Table, ...] = ()
    worst, floor = min((r for r in rows if r[1] == "none"), key=lambda r: r[2]), rows[0][3]
    least = worst[2]
    verdict = require_seeds(least > floor + 20, 1)
    findings = [
        Finding(
            "pretrained/faces",
            "An undefended update reveals its face at every stage of training: 20 dB above "
            "the mean image.",
            verdict.holds,
            least,
            floor,
            100.0,
            f"{verdict.reason}: at least {least:.1f} dB",
            measure=LEAK,
            trials=worst[-1],
        )
    ]
    if preset == "small":
        seen = {c: _seen(lab, c).values for c in ON_IMAGES}
        rows = [
            *(_row("DINOv2-small, ImageNet at 224 px", c, found) for c, found in seen.items()),
            *rows,
        ]
        rows.append(
            _row(
                "DINOv2-small, ImageNet at 224 px",
                f"none; GradViT-style descent, {STEPS} steps",
                _descended(lab).values,
            )
        )
        texts = (_texts(lab),)
        findings.append(
            Finding(
                "pretrained/imagenet",
                "An undefended update of a pretrained ViT reveals a real image: 60 dB.",
                seen["none"]["best"] > 60,
                seen["none"]["best"],
                seen["none"]["floor"],
                100.0,
                f"{seen['none']['best']:.1f} dB of ImageNet's images at 224 pixels",
                measure=LEAK,
                trials=int(seen["none"]["updates"]),
            )
        )
    heads = (
        "model",
        "defences",
        "best PSNR (dB)",
        "the mean image (dB)",
        "attack",
        "patch AUC",
        "labels recovered",
        "updates",
    )
    note = (
        "PSNR is the mean over the images; the mean image is the baseline. Faces are 64 x 64 "
        "pixels; the ViT is trained here for 0, 50 or 600 steps (held-out accuracy in brackets) "
        "and attacked on unseen faces. Empty: no attack applies."
    )
    figure = Figure(
        "Leakage against training: faces",
        "lines",
        {
            "x": list(stages),
            "y": curve,
            "xlabel": "steps of training",
            "ylabel": "dB above the mean image",
        },
        "Batch 1 unless stated otherwise. The best attack on the images of each.",
    )
    tables = (Table("Images", heads, tuple(rows), note), *texts)
    found_all = results(
        lab, "gradients/real", "Updates of pretrained models", findings, tables, (figure,)
    )
    return replace(found_all, facts={**found_all.facts, "seeds": 1})


def _row(model: str, combination: str, found: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        model,
        combination,
        found["best"],
        found["floor"],
        found["attack"],
        found["auc"],
        found["labels"],
        found["updates"],
    )


def train(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """A ViT on faces, its weights at each stage, and its accuracy on faces that are held out."""
    examples = prepare(p["task"], data["faces"])
    order = np.random.default_rng(0).permutation(len(examples))
    held, used = examples.only(order[: int(p["held"])]), examples.only(order[int(p["held"]) :])
    model = build(p["model"], 0).to(work.device)
    optimizer = ScheduledOptimizer(
        model.parameters(), OptimizerConfig("adamw", 1e-3, weight_decay=0.05)
    )
    draw = np.random.default_rng(0)
    backward = backward_on(model, used, lambda _: draw.integers(0, len(used), 32))
    reached: dict[str, float] = {}
    state: dict[str, torch.Tensor] = {}

    def look(step: int) -> None:
        if step in p["stages"]:
            reached[str(step)] = accuracy(model, held)
            state.update(
                {f"{step}/{n}": t.detach().cpu().clone() for n, t in model.state_dict().items()}
            )
        model.train()

    look(0)
    for step, _ in descend(optimizer, backward, range(max(p["stages"]))):
        look(step)
    return Outcome(
        {
            "accuracy": reached,
            "parameters": sum(q.numel() for q in model.parameters()),
            "examples": len(used),
        },
        state,
    )


def faces(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Updates of that ViT at one stage, under one combination, on faces that it has not seen."""
    model = build(p["model"], 0)
    lead = f"{p['stage']}/"
    model.load_state_dict(
        {n.removeprefix(lead): t for n, t in data["weights"].tensors.items() if n.startswith(lead)}
    )
    examples = prepare(p["task"], data["faces"])
    order = np.random.default_rng(0).permutation(len(examples))[: int(p["held"])]
    count = int(p["updates"])
    victims, own = examples.only(order[: count * 8]), examples.only(order[count * 8 :])
    case = GradientCase(
        model.to(work.device).eval(),
        victims,
        own,
        p["task"]["mean"],
        p["task"]["std"],
        updates=count,
    )
    return _attacked(
        case, p["combination"], [a.name for a in QUICK if a.name != "mask"], int(p["practice"])
    )


def seen(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Updates of a pretrained ViT with a new head, under one combination, of images at its usual
    size.
    """
    model = build(p["model"], 0, data["source"].uri).to(work.device).eval()
    examples = examples_of(p["task"], data["images"])
    count = int(p["updates"])
    case = GradientCase(
        model,
        examples.only(np.arange(4 * count)),
        examples.only(np.arange(4 * count, len(examples))),
        p["task"]["mean"],
        p["task"]["std"],
        updates=count,
    )
    return _attacked(
        case, p["combination"], p["attacks"], int(p["practice"]), int(p.get("steps", 0))
    )


def _attacked(
    case: GradientCase, combination: str, attacks: list[str], practice: int, steps: int = 0
) -> Outcome:
    for q in case.model.parameters():
        q.requires_grad_(True)
    budget = Budget(steps or 300, practice=practice)
    row = audit_combination(
        case, case.model, combination, select_attacks(attacks, ATTACKS), budget, optimized=1
    )
    name, best = row.best(LEAK)
    values = {
        "best": best,
        "attack": name or None,
        "floor": mean_score(row.floor or {}, LEAK),
        "auc": row.share("patches"),
    }
    return Outcome(
        {**values, "labels": row.share("labels"), "updates": case.updates, "why": dict(row.reasons)}
    )


def texts(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Updates of MiniLM with a new head, of sentences."""
    model = build(p["model"], 0, data["source"].uri).to(work.device).eval()
    examples = prepare(p["task"], data["texts"], data["tokenizer"].uri)
    case = GradientCase(
        model,
        examples.only(np.arange(60)),
        examples.only(np.arange(60, 120)),
        updates=int(p["updates"]),
        name="sentences",
    )
    found = audit_gradients(case, p["combinations"])
    (table,) = found.tables
    return Outcome(
        {
            "columns": list(table.columns),
            "rows": [list(r) for r in table.rows],
            "note": table.note,
            "why": list(found.unchecked),
        }
    )


TRAIN = Cell("gradients-faces-train", 1, train)
ON = Cell("gradients-faces", 1, faces)
PRETRAINED = Cell("gradients-pretrained", 1, seen)
TEXTS = Cell("gradients-minilm", 1, texts)


def _model(preset: str) -> dict[str, Any]:
    if preset == "pico":
        return {
            "class": "ViTForImageClassification",
            "config": vit_config(8, 2, 16, 1, num_labels=10),
        }
    config = {**vit_config(64, 8, 96, 4, num_channels=1, num_labels=2), "intermediate_size": 192}
    return {"class": "ViTForImageClassification", "config": config}


def _about(preset: str, stages: tuple[int, ...]) -> tuple[dict[str, Any], From]:
    digits = {"kind": "images", "classes": 10, "size": 8, "mean": [0.3], "std": [0.38]}
    parameters = {
        "model": _model(preset),
        "task": digits if preset == "pico" else FACES,
        "held": 100 if preset == "pico" else HELD,
    }
    source = (
        From("digits", rows=300)
        if preset == "pico"
        else From("faces_2000_gray64.npz", {"image": "X", "label": "emotion"})
    )
    return {**parameters, "stages": list(stages)}, source


def _trained(lab: Lab, preset: str, stages: tuple[int, ...]) -> Outcome:
    parameters, source = _about(preset, stages)
    found = lab.run(TRAIN, parameters, {"faces": lab.open(source)}, "train a ViT on faces")
    lab.sizes["ViT on faces"] = {
        "parameters": found.values["parameters"],
        "trained on": f"{found.values['examples']:,} of {lab.open(source).name}",
    }
    return found


def _faces(lab: Lab, preset: str, weights: Outcome, stage: int, combination: str) -> Outcome:
    parameters, source = _about(preset, ())
    parameters |= {
        "stage": stage,
        "combination": combination,
        "updates": 2 if preset == "pico" else 8,
        "practice": 10 if preset == "pico" else 100,
    }
    return lab.run(
        ON,
        parameters,
        {"faces": lab.open(source), "weights": weights},
        f"attack faces after {stage} steps: {combination}",
    )


def _seen(lab: Lab, combination: str) -> Outcome:
    parameters = {
        "model": DINO,
        "task": SEEN,
        "updates": 4,
        "practice": 10,
        "combination": combination,
        "attacks": ["least squares", "span", "labels"],
    }
    return lab.run(PRETRAINED, parameters, _imagenet(lab), f"attack DINOv2-small: {combination}")


def _descended(lab: Lab) -> Outcome:
    parameters = {
        "model": DINO,
        "task": SEEN,
        "updates": 1,
        "practice": 10,
        "combination": "none",
        "attacks": ["gradvit"],
        "steps": STEPS,
    }
    return lab.run(PRETRAINED, parameters, _imagenet(lab), "attack DINOv2-small by descent")


def _imagenet(lab: Lab) -> dict[str, Any]:
    images = From("imagenet_sample_1000_224.parquet", {"image": "jpeg"}, size=224, rows=80)
    return {"images": lab.open(images), "source": lab.source("dinov2-small")}


def _texts(lab: Lab) -> Table:
    parameters = {"model": MINI, "task": SENTENCES, "updates": 3, "combinations": list(ON_TEXTS)}
    data = {
        "texts": lab.open(From("sst2_dev.tsv", {"text": "content", "label": "label"}, rows=120)),
        "source": lab.source("minilm"),
    }
    found = lab.run(
        TEXTS,
        parameters,
        {**data, "tokenizer": lab.source("minilm/tokenizer.json")},
        "attack MiniLM",
    ).values
    return Table(
        "Sentences",
        tuple(found["columns"]),
        tuple(tuple(r) for r in found["rows"]),
        found["note"],
    )
