"""The pairs of models that experiments can measure: trained ones in the cache, and pairs of the
assets. Nothing is trained without being requested.

Only the preset `pico` trains missing models. Otherwise an experiment uses the pairs that
`python -m experiments 003/pairs` has finished, reports their number, and raises if there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.paper_003.pair_models import CIFAR, KEPT, PAIRS, READ, RINGS, SEEDS, TOKENIZER
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from regauge.checkpoints.resume import Outcome
from regauge.errors import DataError, RegaugeError
from regauge.models.trust import library_class, without_code

TRAINS = ("pico",)  # presets whose models are trained wherever they are missing


class NoPairsError(RegaugeError):
    """No pair of trained models is available for an experiment."""


@dataclass(frozen=True)
class Pair:
    """Two endpoints: the weights of A, which is matched, and of B. Results are averaged over the
    pairs of a `kind`.
    """

    kind: str
    label: str
    about: Subject
    a: Outcome
    b: Outcome


@dataclass(frozen=True)
class Ready:
    """A pair that can be loaded, and the number of cells that this takes."""

    kind: str
    seeds: tuple[int, int] | None
    about: Subject | None = None
    steps: int = 2


@dataclass(frozen=True)
class AssetPair:
    """A pair trained elsewhere, in two folders of the assets; `how` states its origin."""

    name: str
    folders: tuple[str, str]
    task: Mapping[str, Any]
    test: From
    train: From
    tested: Mapping[str, Any]
    validated: Mapping[str, Any]
    how: str
    tokenizer: str | None = None
    batch: int = 16


def _asset() -> AssetPair:
    """The two GPT-2s of the assets, with a context of 128."""
    text = From("tinyshakespeare.txt")
    task = {"kind": "text", "classes": 1024, "length": 128, **READ[0]}
    how = "two folders of the assets"
    return AssetPair(
        "GPT-2, provided pair",
        ("gpt2_pair/seed1", "gpt2_pair/seed2"),
        task,
        text,
        text,
        READ[2],
        READ[1],
        how,
        TOKENIZER,
    )


def _imfeld() -> AssetPair:
    """The two ViTs of Imfeld et al. that the paper merges (width 384, 12 heads, patch 4)."""
    hub = [
        From("uoft-cs/cifar10", {"image": "img", "label": "label"}, split=split, hub=True)
        for split in ("train", "test")
    ]
    own = [
        From("cifar10/cifar10.npz", {"image": f"X_{s}", "label": f"y_{s}"}, otherwise=h)
        for s, h in zip(("train", "test"), hub, strict=True)
    ]
    how = (
        "the repository graldij/transformer-fusion links to them (a Google Drive folder); put "
        "them there as Hugging Face folders"
    )
    return AssetPair(
        "ViT of Imfeld et al.",
        ("imfeld/vit_a", "imfeld/vit_b"),
        CIFAR,
        own[1],
        own[0],
        KEPT[2],
        KEPT[1],
        how,
        batch=100,
    )


def _emotion(name: str, folder: str, first: int, pad: int) -> AssetPair:
    """A language model fine-tuned on two of the Emotion sets, the paper's first of five pairs."""
    task = {"kind": "reviews", "classes": None, "length": 128, "first": first, "pad": pad}
    fields = {"text": "text", "label": "label"}
    how = (
        "no fine-tuned weights were published: fine-tune on dailydialog and on crowdflower "
        "(20 epochs, rate 1e-5, batch 16, warm-up 0.06), put the "
    )
    how += "two folders there, and the sets as emotion_train.tsv and emotion_test.tsv (text, label)"
    folders = (f"{folder}/dailydialog", f"{folder}/crowdflower")
    tokenizer = f"{folder}/dailydialog/tokenizer.json"
    return AssetPair(
        name,
        folders,
        task,
        From("emotion_test.tsv", fields),
        From("emotion_train.tsv", fields),
        KEPT[2],
        KEPT[1],
        how,
        tokenizer,
    )


ASSET_PAIRS: dict[str, dict[str, AssetPair]] = {
    "small": {"gpt2-provided": _asset()},
    "paper": {
        "imfeld": _imfeld(),
        "roberta": _emotion("RoBERTa, fine-tuned", "roberta-base", 0, 1),
        "deberta": _emotion("DeBERTa-v3, fine-tuned", "deberta-v3-large", 1, 0),
    },
    "pico": {},
}


@dataclass
class Ends:
    """The available pairs of some kinds, and the reasons why others are absent."""

    ready: list[Ready] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    most: int | None = None  # the largest number of pairs of a kind; None: all

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(r.kind for r in self.ready))

    @property
    def steps(self) -> int:
        return sum(r.steps for r in self.ready)

    def list_absent(self) -> tuple[str, ...]:
        """List what was not measured, for `Results.unchecked`."""
        return tuple(f"{kind}: {why}" for kind, why in self.absent.items())


def look(lab: Lab, kinds: Sequence[str], most: int | None = None) -> Ends:
    """Find the available pairs of these kinds, at most `most` of each; trains nothing. `--seeds N`
    restricts them to the first N seeds.
    """
    found, subjects, placed = (
        Ends(most=most),
        PAIRS[lab.preset_name](),
        ASSET_PAIRS[lab.preset_name],
    )
    for kind in kinds:
        try:
            ready = (
                _open_asset_pair(lab, kind, placed[kind])
                if kind in placed
                else _trained(lab, kind, subjects[kind])
                if kind in subjects
                else []
            )
        except DataError as error:
            found.absent[kind] = str(error).replace(
                f"{lab.assets}/", ""
            )  # results contain no paths of this machine
            continue
        found.ready += ready[:most]
        if not ready:
            found.absent[kind] = (
                "no pair is finished in this cache"
                if kind in subjects
                else "this preset has no such pair"
            )
    if not found.ready:
        detail = "\n".join(f"  {line}" for line in found.list_absent())
        hint = (
            "put the folders that are named above into the assets (--assets DIR or REGAUGE_ASSETS)"
        )
        if any(kind in subjects for kind in found.absent):
            preset = "" if lab.preset_name == "small" else f" --preset {lab.preset_name}"
            hint = (
                f"python -m experiments 003/pairs{preset} trains them, one pair of each kind "
                "first; it may be interrupted, and goes on where it was"
            )
        raise NoPairsError(f"there is no pair of models to measure on\n{detail}", hint=hint)
    return found


def load(lab: Lab, ready: Ready) -> Pair:
    """Load a pair."""
    if ready.seeds is None:
        assert ready.about is not None
        return _from_folders(lab, ready.kind, ready.about)
    about = PAIRS[lab.preset_name]()[ready.kind]
    a, b = (lab.train(about, seed, "plain") for seed in ready.seeds)
    return Pair(
        ready.kind, f"{about.name}, seeds {ready.seeds[0]} and {ready.seeds[1]}", about, a, b
    )


def _trained(lab: Lab, kind: str, about: Subject) -> list[Ready]:
    count = min(SEEDS[lab.preset_name][kind], lab.seeds or SEEDS[lab.preset_name][kind])
    pairs = [(seed, seed + 1) for seed in range(0, count - 1, 2)]
    if kind in RINGS and count > 2:
        pairs = [(seed, (seed + 1) % count) for seed in range(count)]
    return [
        Ready(kind, pair)
        for pair in pairs
        if lab.preset_name in TRAINS or all(lab.is_trained(about, seed, "plain") for seed in pair)
    ]


def _open_asset_pair(lab: Lab, kind: str, placed: AssetPair) -> list[Ready]:
    for folder in placed.folders:
        if not (lab.assets / folder).is_dir():
            raise DataError(
                f"{placed.name}: {folder} is not in the assets; {placed.how}",
                hint="--assets DIR or REGAUGE_ASSETS names the folder",
            )
    config = json.loads((lab.assets / placed.folders[0] / "config.json").read_text())
    task = {**placed.task, "classes": placed.task["classes"] or len(config["id2label"])}
    name = library_class(config, placed.folders[0]).__name__
    model = {
        "class": name,
        "config": {k: v for k, v in without_code(config).items() if k != "architectures"},
    }
    about = Subject(
        placed.name,
        model,
        task,
        placed.test,
        placed.train,
        None,
        placed.tested,
        placed.validated,
        placed.tokenizer,
        batch=placed.batch,
    )
    for source in (about.test, about.train):
        assert source is not None
        lab.open(source)
    return [Ready(kind, None, replace(about, sources=placed.folders), 0)]


def _from_folders(lab: Lab, kind: str, about: Subject) -> Pair:
    from regauge.models.load import load_model

    states = []
    for folder in about.sources:
        model = load_model(Path(lab.assets / folder), "float32")
        states.append({name: t.detach().clone() for name, t in model.state_dict().items()})
    size = sum(t.numel() for t in model.parameters())
    lab.sizes.setdefault(about.name, {"parameters": size, "from": "the experiments' assets"})
    a, b = (Outcome({}, state) for state in states)
    return Pair(kind, about.name, replace(about, sources=()), a, b)
