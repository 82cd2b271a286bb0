"""Pairs of models of one shape: the ends that matching and barriers are measured between. Trained
once, kept as cells, and loaded from there.

    python -m experiments 003/pairs            # trains what is not there yet, one pair of each kind
    first, and says how good the ends are
    finished(lab)                          # {"gpt2": [0, 1], ...}: which are there
    a, b = (model(lab, "gpt2", seed) for seed in (0, 1))

Pairs are seeds 0 and 1, 2 and 3, and so on; the two of a pair differ in nothing but the seed, of
the first weights and of the order of the data. Sizes follow the benchmark of Theus et al.
(2506.22712); budgets are ours. Heads are untied, so that norms can be folded. Language models read
the first 90 % of the text; the next 5 % are for validation (of a refinement, say), the last 5 % for
the test. Of images and reviews a twentieth of the training data is kept for validation, and the
test is the data's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.shared.models import build
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from experiments.shared.verdicts import require_seeds
from regauge.checkpoints.resume import Outcome
from regauge.data.tasks import Examples, loss_of, prepare
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

Tensor = torch.Tensor
KEPT = (
    {"part": [0, 0.95]},
    {"part": [0.95, 1]},
    {"part": [0, 1]},
)  # train, validation, test: of images and reviews
READ = (
    {"part": [0, 0.9]},
    {"part": [0.9, 0.95]},
    {"part": [0.95, 1]},
)  # the same of one running text
CLEARLY = 0.25  # the share of accuracy by which a classifier is better than a guess
# Nats by which a language model is better than a bigram that is tuned on the test. A pico-model is
# only to have learned something.
MARGIN = {"small": 0.15, "paper": 0.15, "pico": -1.0}


def _gpt2(vocabulary: int, width: int, layers: int, length: int) -> dict[str, Any]:
    size = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": 4,
        "n_inner": 4 * width,
        "n_positions": length,
        "vocab_size": vocabulary,
    }
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return {
        "class": "GPT2LMHeadModel",
        "config": {"model_type": "gpt2", **size, **still, **ids, "tie_word_embeddings": False},
    }


def _llama(vocabulary: int, width: int, layers: int, length: int, inner: int) -> dict[str, Any]:
    size = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return {
        "class": "LlamaForCausalLM",
        "config": {"model_type": "llama", **size, **heads, **ids, "tie_word_embeddings": False},
    }


def _vit(
    width: int,
    layers: int,
    heads: int,
    inner: int,
    side: int,
    patch: int,
    channels: int,
    spread: float,
) -> dict[str, Any]:
    size = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    seen = {"image_size": side, "patch_size": patch, "num_channels": channels, "num_labels": 10}
    return {
        "class": "ViTForImageClassification",
        "config": {"model_type": "vit", **size, **seen, "initializer_range": spread},
    }


def _bert(width: int, layers: int, inner: int, vocabulary: int) -> dict[str, Any]:
    size = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": inner,
        "max_position_embeddings": 64,
    }
    ids = {
        "vocab_size": vocabulary + 2,
        "pad_token_id": vocabulary,
        "num_labels": 2,
        "initializer_range": 0.05,
    }
    return {
        "class": "BertForSequenceClassification",
        "config": {"model_type": "bert", **size, **ids},
    }


def _book(
    name: str,
    model: Mapping[str, Any],
    vocabulary: int,
    length: int,
    stride: int,
    recipe: Mapping[str, Any],
    tokenizer: str,
) -> Subject:
    train, validated, tested = READ
    side_by_side = {"stride": length}
    return Subject(
        name,
        model,
        {"kind": "text", "classes": vocabulary, "length": length, "stride": stride, **train},
        test=From("tinyshakespeare.txt"),
        train=From("tinyshakespeare.txt"),
        recipe=recipe,
        tested=side_by_side | tested,
        validated=side_by_side | validated,
        tokenizer=tokenizer,
        batch=16,
    )


ADAMW = {"optimizer": "adamw", "dtype": "float32", "clip": 1.0}
READER = {**ADAMW, "rate": 6e-4, "more": {"weight_decay": 0.1, "betas": [0.9, 0.95]}}
CIFAR = {
    "kind": "images",
    "classes": 10,
    "mean": [0.4914, 0.4822, 0.4465],
    "std": [0.2023, 0.1994, 0.2010],
}
TOKENIZER = "gpt2_pair/tokenizer.json"


def _cifar(split: str) -> From:
    """All of CIFAR-10 where it has been brought into the assets; otherwise the part of it that is
    always there.
    """
    part = {
        "train": From("cifar10_train_4k.npz", {"image": "X", "label": "y"}),
        "test": From("cifar10_test.npz", {"image": "X", "label": "y"}),
    }
    return From(
        "cifar10/cifar10.npz", {"image": f"X_{split}", "label": f"y_{split}"}, otherwise=part[split]
    )


def _seen(
    name: str,
    model: Mapping[str, Any],
    task: Mapping[str, Any],
    train: From,
    test: From,
    recipe: Mapping[str, Any],
) -> Subject:
    kept, validated, tested = KEPT
    return Subject(
        name,
        model,
        {**task, **kept},
        test=test,
        train=train,
        recipe=recipe,
        tested=tested,
        validated=validated,
        batch=250,
    )


def _reviews(
    name: str,
    model: Mapping[str, Any],
    task: Mapping[str, Any],
    tokenizer: str,
    recipe: Mapping[str, Any],
    **more: Any,
) -> Subject:
    kept, validated, tested = KEPT
    train = From(
        "sst2_train.tsv", {"text": "sentence", "label": "label"}, rows=more.pop("rows", None)
    )
    test = From("sst2_dev.tsv", {"text": "content", "label": "label"})
    task = {"kind": "reviews", "classes": 2, "length": 48, **task, **kept}
    return Subject(
        name,
        model,
        task,
        test=test,
        train=train,
        recipe=recipe,
        tested=tested,
        validated=validated,
        tokenizer=tokenizer,
        **more,
    )


def _longer() -> dict[str, Subject]:
    """The pairs of the benchmark, with higher learning rates and more passes over the data.

    Learning rates and lengths were chosen on seeds 100 and 101, which are not reported.
    """
    reader = {**READER, "batch": 16, "steps": 700, "rate": 2e-3, "autocast": "bfloat16"}
    looker = {
        **ADAMW,
        "rate": 2e-3,
        "batch": 100,
        "epochs": 10,
        "more": {"weight_decay": 0.05},
        "augment": {"flip": True, "shift": 4},
        "autocast": "bfloat16",
    }
    gpt2, llama = _gpt2(1024, 256, 6, 128), _llama(1024, 256, 6, 128, 688)
    vit = _vit(128, 6, 8, 256, 32, 8, 3, 0.05)
    return {
        "gpt2-longer": _book("GPT-2", _eager(gpt2), 1024, 128, 64, reader, TOKENIZER),
        "llama-longer": _book("Llama", _eager(llama), 1024, 128, 64, reader, TOKENIZER),
        "vit-longer": _seen("ViT", _eager(vit), CIFAR, _cifar("train"), _cifar("test"), looker),
    }


def _eager(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model with attention in plain matrix products, which bfloat16 makes faster on a CPU."""
    return {**model, "config": {**model["config"], "attn_implementation": "eager"}}


def _small() -> dict[str, Subject]:
    reader = {**READER, "batch": 8, "epochs": 1}
    mini = {"class": "BertForSequenceClassification", "config": {"num_labels": 2}}
    tuned = {**ADAMW, "rate": 5e-5, "batch": 32, "epochs": 1}
    looker = {
        **ADAMW,
        "rate": 1e-3,
        "batch": 100,
        "epochs": 5,
        "more": {"weight_decay": 0.05},
        "augment": {"flip": True, "shift": 4},
    }
    return {
        "gpt2": _book("GPT-2", _gpt2(1024, 256, 6, 256), 1024, 256, 64, reader, TOKENIZER),
        "llama": _book("Llama", _llama(1024, 256, 6, 256, 688), 1024, 256, 64, reader, TOKENIZER),
        "vit": _seen(
            "ViT",
            _vit(128, 6, 8, 256, 32, 4, 3, 0.05),
            CIFAR,
            _cifar("train"),
            _cifar("test"),
            looker,
        ),
        "bert": _reviews(
            "BERT",
            _bert(128, 4, 512, 1024),
            {"first": 1025, "pad": 1024},
            TOKENIZER,
            {**ADAMW, "rate": 5e-4, "batch": 64, "epochs": 1},
        ),
        "minilm": _reviews(
            "MiniLM, fine-tuned",
            mini,
            {"first": 101, "pad": 0},
            "minilm/tokenizer.json",
            tuned,
            rows=8000,
            sources=("minilm",),
        ),
        **_longer(),
    }


def _pico() -> dict[str, Subject]:
    reader = {**READER, "rate": 1e-2, "batch": 8, "epochs": 2}
    looker = {**ADAMW, "rate": 5e-3, "batch": 64, "epochs": 6, "augment": {"shift": 1}}
    grey = {"kind": "images", "classes": 10, "mean": [0.1307], "std": [0.3081]}
    return {
        "gpt2": _book("GPT-2", _gpt2(1024, 16, 1, 32), 1024, 32, 16, reader, TOKENIZER),
        "llama": _book("Llama", _llama(1024, 16, 1, 32, 32), 1024, 32, 16, reader, TOKENIZER),
        "vit": _seen(
            "ViT",
            _vit(32, 1, 4, 64, 8, 2, 1, 0.1),
            grey,
            From("digits", split="train"),
            From("digits", split="test"),
            looker,
        ),
        "bert": _reviews(
            "BERT",
            _bert(16, 1, 32, 1024),
            {"first": 1025, "pad": 1024},
            TOKENIZER,
            {**ADAMW, "rate": 1e-2, "batch": 16, "epochs": 4},
        ),
    }


def _paper() -> dict[str, Subject]:
    """The sizes of Theus et al.: GPT-2 with its own tokenizer, and a ViT of width 256. They do not
    say how long they train; the epochs are ours.
    """
    tokenizer = "openai-community/gpt2"
    looker = {
        **ADAMW,
        "rate": 1e-3,
        "batch": 128,
        "epochs": 100,
        "more": {"weight_decay": 0.05},
        "augment": {"flip": True, "shift": 4},
    }
    return {
        "gpt2": _book(
            "GPT-2",
            _gpt2(50257, 256, 6, 256),
            50257,
            256,
            64,
            {**READER, "batch": 32, "epochs": 5},
            tokenizer,
        ),
        "llama": _book(
            "Llama",
            _llama(50257, 256, 6, 256, 688),
            50257,
            256,
            64,
            {**READER, "batch": 32, "epochs": 5},
            tokenizer,
        ),
        "vit": _seen(
            "ViT",
            _vit(256, 6, 8, 512, 32, 4, 3, 0.02),
            CIFAR,
            _cifar("train"),
            _cifar("test"),
            looker,
        ),
    }


PAIRS: dict[str, Callable[[], dict[str, Subject]]] = {
    "small": _small,
    "paper": _paper,
    "pico": _pico,
}
SEEDS: dict[str, dict[str, int]] = {
    "small": {
        "gpt2": 10,
        "llama": 4,
        "vit": 4,
        "bert": 4,
        "minilm": 2,
        "gpt2-longer": 5,
        "llama-longer": 5,
        "vit-longer": 5,
    },
    "paper": {"gpt2": 10, "llama": 10, "vit": 6},
    "pico": {"gpt2": 2, "llama": 2, "vit": 2, "bert": 2},
}
# Kinds whose pairs form a ring: seeds 0 and 1, 1 and 2, ..., the last and 0. Of all others a seed
# is in one pair only.
RINGS = frozenset({"gpt2-longer", "llama-longer", "vit-longer"})


def subject(lab: Lab, name: str) -> Subject:
    return PAIRS[lab.preset_name]()[name]


def finished(lab: Lab) -> dict[str, list[int]]:
    """The seeds of each kind whose training is over, in this cache."""
    kinds = PAIRS[lab.preset_name]()
    return {
        name: [seed for seed in range(n) if lab.is_trained(kinds[name], seed, "plain")]
        for name, n in SEEDS[lab.preset_name].items()
    }


def save(lab: Lab, name: str, seed: int, folder: Path) -> None:
    """One end as a plain Hugging Face folder, with its tokenizer or with what its images are
    normalised by.
    """
    about = subject(lab, name)
    model(lab, name, seed).save_pretrained(folder)  # type: ignore[operator]
    if about.tokenizer is not None and about.tokenizer.endswith(".json"):
        (folder / "tokenizer.json").write_bytes(Path(lab.source(about.tokenizer).uri).read_bytes())
    if about.task["kind"] == "images":
        size = about.model["config"]["image_size"]
        how = {
            "image_mean": about.task["mean"],
            "image_std": about.task["std"],
            "size": {"height": size, "width": size},
        }
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "ViTImageProcessor", **how})
        )


def model(lab: Lab, name: str, seed: int) -> torch.nn.Module:
    """One end, in evaluation mode: trained now, if it was not yet."""
    about = subject(lab, name)
    source = lab.source(about.sources[0]).uri if about.sources else None
    built = build(about.model, seed, source)
    built.load_state_dict(lab.train(about, seed, "plain").tensors)
    return built.eval()


def examples(lab: Lab, name: str, which: str = "test") -> Examples:
    """The examples that an end was trained on ("train"), those kept for a choice ("validation"), or
    those of the "test".
    """
    return examples_of(lab, subject(lab, name), which)


def examples_of(lab: Lab, about: Subject, which: str = "test") -> Examples:
    """The same of any subject."""
    assert about.train is not None
    task = {
        **about.task,
        **{"train": {}, "validation": about.validated, "test": about.tested}[which],
    }
    tokenizer = None if about.tokenizer is None else lab.source(about.tokenizer).uri
    return prepare(task, lab.open(about.test if which == "test" else about.train), tokenizer)


def order(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """One pair of each kind first, then the others, kind by kind."""
    first = [(name, seed) for name, n in counts.items() for seed in range(min(2, n))]
    return first + [(name, seed) for name, n in counts.items() for seed in range(2, n)]


def bigram(train: Examples, test: Examples) -> float:
    """The nats of a next token for whoever knows the one before it: counts of the training text,
    mixed with those of single tokens so that the test is best for it (which is more than it could
    know).
    """
    n = train.classes
    seen, asked = (e.batch(np.arange(len(e)))[1] for e in (train, test))
    # Only pairs that occur are counted: of 50,257 tokens a table of all would take 20 GB.
    codes, counts = torch.unique(seen[:, :-1] * n + seen[:, 1:], return_counts=True)
    first = torch.bincount(seen[:, :-1].flatten(), minlength=n).double()
    single = (torch.bincount(seen.flatten(), minlength=n).double() + 1) / (seen.numel() + n)
    before, after = asked[:, :-1].flatten(), asked[:, 1:].flatten()
    wanted = before * n + after
    at = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    together = torch.where(codes[at] == wanted, counts[at], 0).double()
    found = []
    for k in (1, 3, 10, 30, 100, 300):
        chance = (together + k * single[after]) / (first[before] + k)
        found.append(float(-chance.log().mean()))
    return min(found)


def trained_pairs(lab: Lab) -> Results:
    """The pairs that Figures 3 to 6 of 003 and the benchmark of Theus et al. are measured on:
    trained here, and better than a bigram or a guess.
    """
    subjects = PAIRS[lab.preset_name]()
    counts = {name: lab.seeds or n for name, n in SEEDS[lab.preset_name].items()}
    plan = order(counts)
    lab.total = 2 * len(plan)
    trained: dict[str, list[Outcome]] = {}
    ends: dict[str, list[dict[str, float]]] = {}
    for name, seed in plan:
        outcome = lab.train(subjects[name], seed, "plain")
        scored = lab.score(subjects[name], seed, "plain", weights=outcome)
        trained.setdefault(name, []).append(outcome)
        ends.setdefault(name, []).append(_end(lab, name, scored))
    findings = tuple(_finding(lab, name, subjects[name], found) for name, found in ends.items())
    rows = []
    for name, found in ends.items():
        accuracy = [f["accuracy"] for f in found if "accuracy" in f]
        outcomes = trained[name]
        rows.append(
            (
                subjects[name].name,
                len(found),
                outcomes[0].values["parameters"],
                outcomes[0].values["steps"],
                round(sum(o.seconds for o in outcomes) / len(outcomes) / 60, 1),
                *_range([f["loss"] for f in found]),
                round(float(np.mean(accuracy)), 4) if accuracy else None,
            )
        )
    heads = (
        "model",
        "endpoints",
        "parameters",
        "steps",
        "minutes each",
        "lowest loss (nats)",
        "mean loss",
        "highest loss",
        "mean accuracy",
    )
    table = Table("Endpoints", heads, tuple(rows), "On the test data.")
    figures = tuple(_curve(subjects[name], found) for name, found in trained.items())
    facts = lab.facts("003/pairs", counts)
    return Results(
        "Pairs of models trained from different seeds", findings, (table,), figures, facts
    )


def _end(lab: Lab, name: str, scored: Outcome) -> dict[str, float]:
    if "nats" in scored.values["measures"]:
        return {"loss": scored.values["measures"]["nats"]}
    found = examples(lab, name)
    labels = found.batch(np.arange(len(found)))[1]
    return {
        "loss": float(loss_of(found, scored.tensors["outputs"].double(), labels)),
        "accuracy": scored.values["measures"]["accuracy"],
    }


def _finding(lab: Lab, name: str, about: Subject, found: Sequence[Mapping[str, float]]) -> Finding:
    """The worst end against a bigram, or against a guess."""
    if "accuracy" not in found[0]:
        losses = [f["loss"] for f in found]
        floor = bigram(examples(lab, name, "train"), examples(lab, name))
        margin = MARGIN[lab.preset_name]
        verdict = require_seeds(max(losses) <= floor - margin, len(losses), "endpoint")
        said = (
            f"The worst {about.name} endpoint is at least {margin} nats better than a bigram model"
        )
        return Finding(
            f"goal/endpoints/{name}",
            said,
            verdict.holds,
            max(losses),
            floor,
            sentence=verdict.reason,
            spread=spread_of(losses),
            trials=len(losses),
            measure="nats of a next token",
        )
    shares = [f["accuracy"] for f in found]
    floor = 1 / examples(lab, name).classes
    verdict = require_seeds(min(shares) >= floor + CLEARLY, len(shares), "endpoint")
    said = f"The worst {about.name} endpoint has at least {CLEARLY:.0%} more accuracy than a guess"
    return Finding(
        f"goal/endpoints/{name}",
        said,
        verdict.holds,
        min(shares),
        floor,
        1.0,
        verdict.reason,
        spread=spread_of(shares),
        trials=len(shares),
        measure="accuracy",
    )


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return round(min(values), 4), round(float(np.mean(values)), 4), round(max(values), 4)


def _curve(about: Subject, trained: Sequence[Outcome]) -> Figure:
    """The losses of training, as means over fortieths of it."""
    parts = [
        np.array_split(np.asarray(o.values["losses"]), min(40, len(o.values["losses"])))
        for o in trained
    ]
    x = np.cumsum([len(p) for p in parts[0]]).tolist()
    y = {
        f"seed {seed}": [round(float(p.mean()), 4) for p in found]
        for seed, found in enumerate(parts)
    }
    return Figure(
        f"{about.name}: the loss of training",
        "lines",
        {"x": x, "y": y, "xlabel": "step", "ylabel": "nats", "log": False},
    )
