"""Subjects and cells of the masked-jigsaw experiments: a training with puzzles and a test with
them.

A training is described by its subject and by `how` it is wrapped: {"variant", "ratio", "per", ...},
plain JSON, as `MaskedJigsaw` takes it, with the warm-up as a share of the steps. So every table
that needs the same training finds it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import From, Subject, vit_config
from experiments.shared.runner import Lab
from experiments.shared.train_cells import parameters_of
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.augment import DEIT_AUGMENTATION
from regauge.data.evaluate import accuracy
from regauge.data.tasks import prepare
from regauge.data.train import count_steps, train_model
from regauge.jigsaw.metrics import evaluate
from regauge.jigsaw.wrapper import MaskedJigsaw, wrap

How = Mapping[str, Any]
Parameters = Mapping[str, Any]
WARMUP = 20 / 300  # epochs of the paper without puzzles
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The default training ratio. Table 3 has several, Table 5 (`gradient_leakage`) has the paper's, and
# `beyond` has both. The paper's 0.1 is 19 of 196 patches; of 64 patches it is 6, too few to train
# the unknown embedding.
TRAINED = {"small": 0.3, "paper": 0.1, "pico": 0.3}
SHOWN = 1000  # test images that a training looks at on its way


def how(variant: str, ratio: float = 0.1, **more: Any) -> dict[str, Any]:
    """A way to wrap: the paper's settings, but for what is given."""
    return {
        "variant": variant,
        "ratio": 0.0 if variant in "ABD" else ratio,
        "warmup": WARMUP,
        **more,
    }


def train(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train from scratch with puzzles: the wrapped model's state, the losses, and the accuracy on
    some test images on the way.
    """
    recipe, seed = p["recipe"], int(p["seed"])
    examples, test = prepare(p["task"], data["train"]), prepare(p["task"], data["test"])
    model = build(p["model"], seed).to(work.device, getattr(torch, recipe["dtype"]))
    wrapped = wrap(model, p["how"], count_steps(recipe, len(examples)), seed)
    shown = test.only(np.arange(min(SHOWN, len(test))))
    losses, seen = train_model(
        wrapped, examples, recipe, seed, work, lambda: accuracy(wrapped, shown)
    )
    state = {name: t.detach().cpu().clone() for name, t in wrapped.state_dict().items()}
    return Outcome(
        {
            "losses": losses,
            "seen": seen,
            "examples": len(examples),
            "parameters": parameters_of(wrapped),
        },
        state,
    )


def trained(p: Parameters, weights: Outcome, device: str = "cpu") -> MaskedJigsaw:
    """The wrapped model that a training ended with."""
    wrapped = wrap(build(p["model"], 0), p["how"], 1, 0).to(device)
    wrapped.load_state_dict(weights.tensors)
    return wrapped.eval()


def score(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Score accuracy, and the effect of puzzles of every ratio; `bare` is the unwrapped model,
    which does not know which patches are shuffled.
    """
    examples = prepare(p["task"], data["test"])
    wrapped = trained(p, data["weights"], work.device)
    found = evaluate(wrapped, examples, p["ratios"], seed=0, batch=p["batch"])
    values = {
        "accuracy": found.accuracy,
        "shuffled": [s.to_dict() for s in found.shuffled],
        "examples": len(examples),
    }
    bare = evaluate(
        MaskedJigsaw(wrapped.unwrap(), 0.0, variant="A", patch=p["how"].get("patch")),
        examples,
        batch=p["batch"],
    )
    values["bare"] = bare.at_half.to_dict()
    return Outcome({**values, "parameters": parameters_of(wrapped.model)})


TRAIN = Cell("jigsaw-train", 1, train)
SCORE = Cell("jigsaw-score", 2, score)


def model_of(lab: Lab, subject: Subject, given: How, trial: int) -> Outcome:
    """A training of this run: from the cache, or done now."""
    assert subject.train is not None
    parameters = {
        "model": _model(subject, given),
        "task": subject.task,
        "recipe": subject.recipe,
        "seed": trial,
        "how": _how(subject, given),
    }
    data = {"train": lab.open(subject.train), "test": lab.open(subject.test)}
    found = lab.run(
        TRAIN, parameters, data, f"train {subject.name}, {describe(given)}, seed {trial}"
    )
    lab.sizes[subject.name] = {
        "parameters": found.values["parameters"],
        "trained on": f"{found.values['examples']:,} of {data['train'].name}",
    }
    return found


def parameters_with(subject: Subject, given: How) -> dict[str, Any]:
    """What every cell after a training is known by, beside the weights."""
    return {
        "model": _model(subject, given),
        "task": subject.task,
        "how": _how(subject, given),
    }


def score_of(lab: Lab, subject: Subject, given: How, trial: int) -> Outcome:
    """A training and its test: two cells."""
    weights = model_of(lab, subject, given, trial)
    parameters = {**parameters_with(subject, given), "ratios": list(RATIOS), "batch": subject.batch}
    found = lab.run(
        SCORE,
        parameters,
        {"test": lab.open(subject.test), "weights": weights},
        f"test {subject.name}, {describe(given)}, seed {trial}",
    )
    lab.sizes[subject.name]["tested on"] = (
        f"{found.values['examples']:,} of {lab.open(subject.test).name}"
    )
    return found


def describe(given: How) -> str:
    return ", ".join(
        [
            str(given["variant"]),
            *(
                f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in given.items()
                if k not in SILENT
            ),
        ]
    )


SILENT = ("variant", "warmup")


def _how(subject: Subject, given: How) -> dict[str, Any]:
    """Convolutional nets have no patches of their own: theirs are those of the ViT beside them. The
    `how` of a subject's plan has further options of every training.
    """
    patch = subject.tested.get("patch")
    return {**subject.plan.get("how", {}), **given, **({"patch": patch} if patch else {})}


def _model(subject: Subject, given: How) -> dict[str, Any]:
    """The `plain` of a subject's plan is how its config differs where it is trained without MJP."""
    plain = subject.plan.get("plain", {}) if given["variant"] == "A" else {}
    if not plain:
        return dict(subject.model)
    return {**subject.model, "config": {**subject.model["config"], **plain}}


def subjects_of(preset: str) -> dict[str, Subject]:
    """Return ViT, Swin and ResNet of a preset. If the ViT's training is short, also longer ones:
    "vit-longer", "vit-300-epochs", and "vit-3000-steps", in which a position table takes shape.
    """
    return _PRESETS[preset]()


def _small() -> dict[str, Subject]:
    task = {
        "kind": "images",
        "classes": 10,
        "size": 32,
        "mean": [0.4914, 0.4822, 0.4465],
        "std": [0.2023, 0.1994, 0.2010],
    }
    few = From("cifar10_train_4k.npz", {"image": "X", "label": "y"})
    recipe = {
        "optimizer": "adamw",
        "rate": 2e-3,
        "more": {"weight_decay": 0.05},
        "dtype": "float32",
    }
    recipe |= {"warmup": WARMUP, "clip": 5.0, "augment": {"flip": True, "shift": 4}}
    config = vit_config(32, 4, 48, 2, num_channels=3, num_labels=10, num_attention_heads=2)
    vit = Subject(
        "ViT",
        # Patches are what a ViT learns first, and places late: with positions as large as patches
        # it minds them within minutes.
        {"class": "ViTForImageClassification", "config": config, "positions": 5.0},
        task,
        test=From("cifar10_test.npz", {"image": "X", "label": "y"}, rows=2000),
        train=From("cifar10/cifar10.npz", {"image": "X_train", "label": "y_train"}, otherwise=few),
        recipe={**recipe, "batch": 50, "steps": 600, "looks": 5},
        batch=200,
    )
    found = _beside(
        vit,
        {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        {"embedding_size": 16, "hidden_sizes": [32, 64]},
    )
    others = {**recipe, "batch": 100, "epochs": 1, "looks": 10}
    longer = replace(
        vit, name="ViT, longer training", recipe={**recipe, "batch": 50, "steps": 1200, "looks": 5}
    )
    # As many epochs as the paper's, of as many images as leave time for them: nothing is left to be
    # learned, as in its trainings, and much to forget.
    most = From(
        "cifar10/cifar10.npz",
        {"image": "X_train", "label": "y_train"},
        rows=1000,
        otherwise=replace(few, rows=1000),
    )
    out = replace(
        vit,
        name="ViT, 300 epochs on 1,000 images",
        train=most,
        recipe={**recipe, "batch": 50, "steps": 6000, "looks": 5},
    )
    # Positions as they are drawn, and steps enough that a table of them has a shape: what the
    # studies of positions look at.
    drawn = {name: value for name, value in vit.model.items() if name != "positions"}
    places = replace(
        vit,
        name="ViT, 3,000 steps",
        model=drawn,
        recipe={**recipe, "batch": 50, "steps": 3000, "looks": 5},
    )
    return {
        "vit": vit,
        "vit-longer": longer,
        "vit-300-epochs": out,
        "vit-3000-steps": places,
        **{name: replace(found[name], recipe=others) for name in ("swin", "resnet")},
    }


def _beside(vit: Subject, swin: Mapping[str, Any], resnet: Mapping[str, Any]) -> dict[str, Subject]:
    config = vit.model["config"]
    kept = {name: config[name] for name in ("image_size", "num_channels", "num_labels")}
    windows = {
        "model_type": "swin",
        "patch_size": config["patch_size"],
        "use_absolute_embeddings": True,
        "drop_path_rate": 0.0,
        **kept,
        **swin,
    }
    folds = {
        "model_type": "resnet",
        "num_channels": kept["num_channels"],
        "num_labels": kept["num_labels"],
        **resnet,
    }
    folds |= (
        {"layer_type": "basic", "depths": [1] * len(folds["hidden_sizes"])}
        if "layer_type" not in resnet
        else {}
    )
    return {
        "vit": vit,
        "swin": replace(
            vit, name="Swin", model={"class": "SwinForImageClassification", "config": windows}
        ),
        "resnet": replace(
            vit,
            name="ResNet",
            model={"class": "ResNetForImageClassification", "config": folds},
            tested={"patch": config["patch_size"]},
        ),
    }


def _pico() -> dict[str, Subject]:
    recipe = {
        "optimizer": "adamw",
        "rate": 1e-2,
        "batch": 60,
        "epochs": 2,
        "dtype": "float32",
        "warmup": WARMUP,
        "looks": 2,
    }
    vit = Subject(
        "ViT",
        {"class": "ViTForImageClassification", "config": vit_config(8, 2, 16, 1, num_labels=10)},
        {"kind": "images", "classes": 10, "size": 8, "mean": [0.3], "std": [0.38]},
        test=From("digits", split="test", rows=60),
        train=From("digits", rows=360),
        recipe=recipe,
        batch=60,
    )
    return _beside(
        vit,
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
        {"embedding_size": 8, "hidden_sizes": [8, 16]},
    )


def _paper() -> dict[str, Subject]:
    """The paper's Table 6 on ImageNet-1K: a folder `imagenet` with `train` and `val`, a folder per
    class in each.
    """
    task = {
        "kind": "images",
        "classes": 1000,
        "size": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    recipe = {
        "optimizer": "adamw",
        "rate": 1e-3,
        "more": {"weight_decay": 0.05},
        "batch": 1024,
        "epochs": 300,
        "dtype": "float32",
    }
    recipe |= {
        "warmup": WARMUP,
        "clip": 5.0,
        "augment": {**DEIT_AUGMENTATION, "mean": task["mean"], "std": task["std"]},
        "looks": 60,
    }
    size = {
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    }
    deit = Subject(
        "DeiT-S",
        {
            "class": "ViTForImageClassification",
            "config": {
                "model_type": "vit",
                **size,
                "image_size": 224,
                "patch_size": 16,
                "num_channels": 3,
                "num_labels": 1000,
            },
        },
        task,
        test=From("imagenet/val", size=224),
        train=From("imagenet/train", size=224),
        recipe=recipe,
        # lambda 0.01 of the sum of both coordinates (Eq. 4), which is 0.02 of their mean
        plan={"how": {"weight": 0.02, "mlp": "mlp3"}},
        batch=64,
    )
    found = _beside(
        deit,
        {"patch_size": 4, "depths": [2, 2, 6, 2], "drop_path_rate": 0.2},
        {"layer_type": "bottleneck"} | {"depths": [3, 4, 6, 3]} | _FIFTY,
    )
    return {
        **found,
        # plain Swin-T has relative positions only
        "swin": replace(
            found["swin"],
            name="Swin-T",
            plan={**found["swin"].plan, "plain": {"use_absolute_embeddings": False}},
        ),
        "resnet": replace(found["resnet"], name="ResNet-50"),
    }


_FIFTY = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048]}
_PRESETS: dict[str, Callable[[], dict[str, Subject]]] = {
    "small": _small,
    "paper": _paper,
    "pico": _pico,
}
