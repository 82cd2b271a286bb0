"""The page of hyper-parameters of the paper presets: each with its source in the paper or its code,
or "ours". Rendered from the presets by `experiments.document`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.paper_002.jigsaw_cells import TRAINED, subjects_of
from experiments.shared.presets import PRESETS, Subject

OURS = "ours"
FIXED = "App. 11: a fixed learning rate"
CODE = "the reference code"
# What is not in this table is ours. (page entry, subject, parameter) -> source; "*" is any.
SOURCES: dict[tuple[str, str, str], str] = {
    ("000", "*", "schedule"): FIXED,
    ("000", "ViT-Base", "model"): "Sec. 5.1: timm's pre-trained ViT-Base",
    ("000", "ViT-Base", "optimizer"): "App. 11: Adam",
    ("000", "ViT-Base", "rate"): "App. 11: 1e-4 on CIFAR-10",
    ("000", "ViT-Base", "epochs"): "App. 11: 5 epochs on CIFAR-10",
    ("000", "ViT-Base", "batch"): CODE,
    ("000", "ViT-Base", "size"): CODE,
    ("000", "ViT-Base, to convergence", "model"): "Sec. 5.1: timm's pre-trained ViT-Base",
    ("000", "ViT-Base, to convergence", "epochs"): "App. 11: 200 epochs for Fig. 5",
    ("000", "ViT-Base, to convergence", "optimizer"): "App. 11: Adam",
    ("000", "ViT-Base, to convergence", "schedule"): 'ours: Sec. 5.3 has "a better strategy"',
    ("000", "BERT", "model"): "Sec. 5.1: huggingface's pre-trained Bert",
    ("000", "BERT", "optimizer"): "App. 11: Adam",
    ("000", "BERT", "rate"): "App. 11: 1e-5 on IMDB",
    ("000", "BERT", "epochs"): "App. 11: 2 epochs on IMDB",
    ("000", "GPT-2", "model"): "Sec. 5.1: huggingface's pre-trained GPT2",
    ("000", "GPT-2", "optimizer"): "App. 11: Adam",
    ("000", "GPT-2", "rate"): "App. 11: 1e-5 on IMDB",
    ("000", "GPT-2", "epochs"): "App. 11: 2 epochs on IMDB",
    ("000", "BERT (small)", "model"): "Sec. 5.2: 2 layers and input of size (128, 256)",
    ("000", "BERT (small)", "length"): "Sec. 5.2: 2 layers and input of size (128, 256)",
    ("000", "GPT-2 (G)", "model"): "Sec. 5.1: the GPT2 trained by huggingface on WebText",
    ("000", "GPT-2 (G), fine-tuned", "model"): "Sec. 5.1: the GPT2 trained on WebText",
    ("000", "GPT-2 (G), fine-tuned", "rate"): "App. 11: 1e-5",
    ("000", "GPT-2 (G), fine-tuned", "epochs"): "App. 11: one epoch",
    ("000", "CelebA", "optimizer"): "App. 11: SGD with a cosine",
    ("000", "CelebA", "rate"): "App. 11: encoder from 5e-4 (to 2e-6; here to 0)",
    ("000", "CelebA", "rates: head"): "App. 11: head from 0.05 (to 2e-4; here to 0)",
    ("000", "CelebA", "epochs"): CODE,
    ("000", "CelebA", "attacker: rate"): "App. 11: AdamW 1e-4",
    ("000", "CelebA", "attacker: epochs"): "App. 11: 30 epochs",
    ("000", "CelebA", "attacker: batch"): CODE,
    ("000", "CelebA", "attacker: hidden"): "MAE's decoder (Sec. 5.3: an MAE inversion model)",
    ("000", "CelebA", "attacker: depth"): "MAE's decoder (Sec. 5.3: an MAE inversion model)",
    ("002", "*", "size"): "Tab. 1: 224",
    ("002", "*", "optimizer"): "App. A, Tab. 6: AdamW",
    ("002", "*", "rate"): "App. A, Tab. 6: 0.0005 x batch / 512",
    ("002", "*", "more: weight_decay"): "App. A, Tab. 6: 0.05",
    ("002", "*", "batch"): "App. A, Tab. 6: 1024",
    ("002", "*", "epochs"): "App. A, Tab. 6: 300",
    ("002", "*", "warmup"): "App. A, Tab. 6: 20 warm-up epochs of 300",
    ("002", "*", "clip"): CODE,
    ("002", "*", "training ratio"): "Sec. 5.1: 0.1 is sufficient",
    ("002", "*", "MJP: weight"): "Sec. 4.1: lambda 0.01 of Eq. 4, the sum over two coordinates",
    ("002", "*", "MJP: mlp"): "Sec. 5.1: a 3-layers MLP",
    ("002", "*", "augment: strength"): "App. A, Tab. 6: Rand Augment 9/0.5",
    ("002", "*", "augment: mixup"): "App. A, Tab. 6: 0.8",
    ("002", "*", "augment: cutmix"): "App. A, Tab. 6: 1.0",
    ("002", "*", "augment: erase"): "App. A, Tab. 6: 0.25",
    ("002", "*", "augment: smooth"): "App. A, Tab. 6: 0.1",
    ("002", "*", "augment: repeat"): "App. A, Tab. 6: repeated augmentation",
    ("002", "DeiT-S", "model"): "Tab. 1: DeiT-S",
    ("002", "Swin-T", "model"): "Tab. 1: Swin-T",
    ("002", "Swin-T", "without MJP: use_absolute_embeddings"): "Swin-T has relative positions",
    ("002", "ResNet-50", "model"): "Tab. 1: ResNet-50",
}
HIDDEN = ("looks", "dtype", "mean", "std")  # evaluations on the way, and constants
HEAD = """# Hyper-parameters of the paper presets

Every parameter of `python -m experiments ID --preset paper`, and where it comes from: a section or
table of the paper, its reference code, or *ours* where neither states it. 000 is the
permutation-equivariance paper (arXiv 2304.07735), 002 the masked-jigsaw paper (arXiv 2205.12551).
`python -m experiments ID --preset paper --estimate` states time, memory and disk before a run.

| experiments | subject | parameter | value | source |
|---|---|---|---|---|
"""


def render_recipes() -> str:
    """Render docs/experiments/paper-presets.md."""
    lines = [f"| {' | '.join(row)} |" for row in rows()]
    return HEAD + "\n".join(lines) + "\n\n[All results](../experiments.md)\n"


def rows() -> list[tuple[str, ...]]:
    """Return one row per parameter; parameters that several experiments share are listed once."""
    return [
        (", ".join(where), name, parameter, _shown(value), _source(paper, name, parameter))
        for (paper, name), (where, subject) in subjects().items()
        for parameter, value in parameters(subject)
    ]


def subjects() -> dict[tuple[str, str], tuple[list[str], Subject]]:
    """Return the subjects of the paper presets with the experiments that have them."""
    found: dict[tuple[str, str], tuple[list[str], Subject]] = {}
    for table, held in PRESETS["paper"]().tables.items():
        for subject in held.values():
            name = subject.name
            if table == "figure5":
                name = f"{name}, to convergence"
            found.setdefault(("000", name), ([], subject))[0].append(f"000/{table}")
    for subject in subjects_of("paper").values():
        found["002", subject.name] = (["002"], subject)
    return found


def parameters(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a subject by name."""
    yield "model", _model_of(subject)
    for name in ("size", "length"):
        if name in subject.task:
            yield name, subject.task[name]
    for name, value in (subject.recipe or {}).items():
        if name in HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}: {k}", v) for k, v in value.items() if k not in HIDDEN)
        else:
            yield name, value
    for name, value in subject.plan.get("budget", {}).items():
        yield f"attacker: {name}", value
    if "how" in subject.plan:
        yield "training ratio", TRAINED["paper"]
        yield from ((f"MJP: {k}", v) for k, v in subject.plan["how"].items())
    yield from ((f"without MJP: {k}", v) for k, v in subject.plan.get("plain", {}).items())


def _model_of(subject: Subject) -> str:
    if subject.sources:
        return subject.sources[0]
    return str(subject.model.get("timm") or subject.model["class"])


def _source(paper: str, name: str, parameter: str) -> str:
    return SOURCES.get((paper, name, parameter)) or SOURCES.get((paper, "*", parameter), OURS)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
