"""What a split-learning server learns besides images: labels, links between samples, the key of the
columns, texts. Defences are shuffles, keys and noise.

A ViT is trained, and the tensors that a server receives are recorded: the gradient of the output in
every step, and the streams of some samples before the first epoch and after each. Texts are random
tokens, so that a language model does not help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.runner import Lab
from experiments.split.defence_recipes import CIFAR, FACES, PICO, Scene
from experiments.split.defended_client import pictures_of
from regauge.attacks.features import GROUPS
from regauge.attacks.labels import cluster_labels, count_classes, sample_grads
from regauge.attacks.served import known_streams, regroup_tokens, relink_samples, reused_key
from regauge.attacks.texts import embedding_search
from regauge.attacks.views import (
    EmbeddedText,
    KnownStreams,
    PairedImages,
    SentGradients,
    ServerPass,
)
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.groups import Kind
from regauge.core.members import Member
from regauge.core.rng import Stream, seed_key
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples
from regauge.data.train import ScheduledOptimizer, compute_gradients, descend
from regauge.models.cut import Crossing, cut
from regauge.models.load import load_model
from regauge.results.findings import Finding, Results, Table, spread_of

Tensor = torch.Tensor
KINDS: tuple[Kind, ...] = ("permutation", "signed", "orthogonal")
SCENES = {"small": (FACES, CIFAR), "paper": (FACES, CIFAR), "pico": (PICO,)}
TEXTS = {"small": ("gpt2_pair/seed1", "minilm"), "paper": ("gpt2_pair/seed1", "minilm"), "pico": ()}
SIZES = {
    "small": {"epochs": 6, "samples": 200, "train": 1200},
    "paper": {"epochs": 6, "samples": 200, "train": 1200},
}
SIZES["pico"] = {"epochs": 1, "samples": 40, "train": 150}
NOISES, KNOWN, BATCHES = (0.0, 1.0, 2.0), (1, 4, 8), (10, 50)


def leaks(lab: Lab) -> Results:
    """The shares of labels, links over epochs, keys of columns, shuffled batches and texts that a
    server recovers.
    """
    trials = range(lab.seeds or 1)
    scenes = [
        s
        for s in SCENES[lab.preset_name]
        if s.data.uri == "digits" or (lab.assets / s.data.uri).exists()
    ]
    texts = [t for t in TEXTS[lab.preset_name] if (lab.assets / t).exists()]
    lab.total = (len(scenes) + len(texts)) * len(trials)
    findings: list[Finding] = []
    rows: list[tuple[str | float | None, ...]] = []
    for scene in scenes:
        found = [_recorded(lab, scene, t) for t in trials]
        findings += [_finding(f"{scene.name}/{what}", found, what) for what in found[0]]
    for text in texts:
        found = [
            lab.run(
                TEXT,
                {"tokens": 32, "seed": t},
                {"source": lab.source(text)},
                f"read {text}, seed {t}",
            ).values["found"]
            for t in trials
        ]
        findings += [_finding(f"{text}/{what}", found, what) for what in found[0]]
    rows = [(f.id, f.floor, f.value, f.ceiling) for f in findings]
    facts = lab.facts("split/leaks", len(trials))
    note = "The control is perfect recovery."
    missing = [
        f"{s.name} ({s.data.uri} is not in the assets)"
        for s in SCENES[lab.preset_name]
        if s not in scenes
    ]
    missing += [
        f"texts of {t} (it is not in the assets)" for t in TEXTS[lab.preset_name] if t not in texts
    ]
    table = Table(
        "Recovered by the server",
        ("recovered", "baseline", "share", "control"),
        tuple(rows),
        note,
    )
    return Results(
        "What a split-learning server learns besides images",
        tuple(findings),
        (table,),
        (),
        facts,
        tuple(missing),
    )


def _finding(name: str, found: Sequence[Mapping[str, Any]], what: str) -> Finding:
    values = [float(one[what][1]) for one in found]
    mean, floor = float(np.mean(values)), float(found[0][what][0])
    said = f"{mean:.1%}, where a guess gets {floor:.1%}"
    return Finding(
        f"leak/{name}",
        f"{what} leak",
        None,
        mean,
        floor,
        1.0,
        said,
        measure="share",
        spread=spread_of(values),
        trials=len(found),
    )


def _recorded(lab: Lab, scene: Scene, trial: int) -> Mapping[str, Any]:
    shared = {
        "model": scene.model,
        "side": scene.side,
        "patch": scene.patch,
        "rate": scene.training["rate"],
        "seed": trial,
        **SIZES[lab.preset_name],
    }
    outcome = lab.run(
        PASSES, shared, {"images": lab.open(scene.data)}, f"watch {scene.name}, seed {trial}"
    )
    found: Mapping[str, Any] = outcome.values["found"]
    return found


def passes(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train, record as the server does, and attack: [floor, value] by the attacked quantity."""
    seed, samples = int(p["seed"]), int(p["samples"])
    pixels, labels = pictures_of(data["images"], int(p["side"]))
    order = np.random.default_rng(0).permutation(len(pixels))
    train, own = order[: int(p["train"])], order[int(p["train"]) : int(p["train"]) + 400]
    images = (pixels - pixels[train].mean()) / pixels[train].std()
    model = build(p["model"], seed).float().train()
    config = OptimizerConfig("adamw", float(p["rate"]), weight_decay=0.01)
    optimizer = ScheduledOptimizer(model.parameters(), config)
    classes, found = int(labels.max()) + 1, {}
    examples = Examples(
        len(images), classes, lambda rows: ({"pixel_values": images[rows]}, labels[rows])
    )
    drawn = np.random.default_rng(seed)

    def stream(rows: Any) -> Tensor:
        with torch.no_grad():
            return cut(model).embed(pixel_values=images[rows]).stream.detach()

    def learn(batches: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Train for an epoch: the rows of each step, and the gradient that the server sees."""
        outputs: list[Tensor] = []

        def backward(n: int) -> Tensor:
            outputs.clear()
            with cut(model).route(lambda crossing: _kept(crossing, outputs)):
                return compute_gradients(model, examples, *examples.batch(batches[n]))

        for step, _ in descend(optimizer, backward, range(len(batches))):
            gradient = outputs[0].grad
            assert gradient is not None
            yield batches[step - 1], gradient

    streams = [stream(train[:samples])]
    for epoch in range(int(p["epochs"])):
        sent, true = [], []
        for rows, gradient in learn(
            np.array_split(drawn.permutation(train), max(1, len(train) // 50))
        ):
            sent.append(_shuffled(gradient, drawn)[0])
            true.append(labels[rows])
        streams.append(stream(train[:samples]))
        if epoch in (0, int(p["epochs"]) - 1):
            grads, detail = sample_grads([ServerPass(s, {}, s) for s in sent]), torch.cat(true)
            loud = sample_grads(
                [
                    ServerPass(
                        s,
                        {},
                        s + _noise(s, s.flatten(1).norm(dim=1).mean() / s[0].numel() ** 0.5, drawn),
                    )
                    for s in sent
                ]
            )
            most = float(torch.bincount(detail).max() / len(detail))
            when = f"epoch {epoch + 1}"
            found[f"labels, {when}"] = [
                most,
                _named(cluster_labels(SentGradients(grads), classes), detail, classes),
            ]
            found[f"labels, gradients with noise of their own size, {when}"] = [
                most,
                _named(cluster_labels(SentGradients(loud), classes), detail, classes),
            ]
            found[f"the number of classes, {when}"] = [
                0.0,
                float(count_classes(SentGradients(grads)) == classes),
            ]
    for noise in NOISES:
        who = torch.from_numpy(drawn.permutation(samples))
        first, last = (z + _noise(z, noise * z.std(), drawn) for z in (streams[0], streams[-1]))
        right = who[
            relink_samples(_shuffled(first, drawn)[0], _shuffled(last[who], drawn)[0])
        ] == torch.arange(samples)
        found[f"links from before training to after it, noise {noise:g}"] = [
            1 / samples,
            float(right.double().mean()),
        ]
    found |= _columns(streams[-1], stream(own), drawn)
    for count in BATCHES:
        if count < samples:
            found[f"images of a shuffled batch of {count}"] = _regroup(
                streams[-1][:count], stream(own), images[own], int(p["patch"]), drawn
            )
    return Outcome({"found": found})


def _kept(crossing: Crossing, outputs: list[Tensor]) -> Tensor:
    z = crossing.run()
    z.retain_grad()
    outputs.append(z)
    return z


def _noise(like: Tensor, size: Any, drawn: np.random.Generator) -> Tensor:
    return float(size) * torch.from_numpy(drawn.standard_normal(like.shape)).to(like)


def _shuffled(x: Tensor, drawn: np.random.Generator) -> tuple[Tensor, Tensor]:
    order = torch.stack([torch.from_numpy(drawn.permutation(x.shape[1])) for _ in x])
    return x.gather(1, order[..., None].expand_as(x)), order


def _named(found: Tensor, true: Tensor, classes: int) -> float:
    """The share that is right under the best names for clusters."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (found.numpy(), true.numpy()), 1)
    return float(counts[linear_sum_assignment(-counts)].sum() / len(true))


def _columns(seen: Tensor, own: Tensor, drawn: np.random.Generator) -> dict[str, list[float]]:
    out, width = {}, seen.shape[-1]
    for kind in KINDS:
        member = GROUPS[kind].sample(
            width, 1, Stream(seed_key(int(drawn.integers(1 << 30))), "leaks")
        )
        matrix = torch.from_numpy(member.matrix()[0])

        def right(found: Member, truth: Member = member) -> float:
            return float((np.abs(found.matrix() - truth.matrix()).max(2) < 0.1).mean())

        for count in KNOWN:
            plain = seen[:count].double()
            found, _ = known_streams(
                KnownStreams(plain, _shuffled(plain, drawn)[0] @ matrix.T, kind)
            )
            out[f"columns ({kind}) from {count} known images"] = [1 / width, right(found)]
        moved = ServerPass(_shuffled(seen.double(), drawn)[0] @ matrix.T, {})
        out[f"columns ({kind}) from {len(seen)} unknown images"] = [
            1 / width,
            right(reused_key([moved], own, kind)),
        ]
    return out


def _regroup(
    z: Tensor, own: Tensor, images: Tensor, patch: int, drawn: np.random.Generator
) -> list[float]:
    """The share of tokens that stand with most of their group: of random groups, and of those that
    were found. A first token stays.
    """
    count, tokens = z.shape[:2]
    places = (images.shape[-1] // patch) ** 2
    skip = tokens - places
    body = drawn.permutation(count * places)
    mixed = torch.cat([z[:, :skip], z[:, skip:].flatten(0, 1)[body].view(count, places, -1)], 1)
    found = regroup_tokens(PairedImages(mixed, own, images, patch))
    at = found // tokens * places + found % tokens - skip
    random = np.stack([drawn.permutation(count) for _ in range(places)], 1)
    return [_together(torch.from_numpy(random)), _together(torch.from_numpy(body)[at] // places)]


def _together(group: Tensor) -> float:
    return float((group == group.mode(1).values[:, None]).double().mean())


def text(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Random tokens through a model's embedding, shuffled and moved, and read: [floor, share] of
    tokens and of places.
    """
    from regauge.checkpoints.reader import open_checkpoint

    model = load_model(open_checkpoint(data["source"].uri), "float32").eval()
    drawn, count = np.random.default_rng(int(p["seed"])), int(p["tokens"])
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.from_numpy(drawn.integers(0, size, (1, count)))
    with torch.no_grad():
        rows, order = _shuffled(cut(model).embed(input_ids=ids).stream.detach(), drawn)
    found: dict[str, list[float]] = {}
    for kind in (None, *KINDS):
        x = rows[0].double()
        if kind is not None:
            member = GROUPS[kind].sample(
                x.shape[1], 1, Stream(seed_key(int(drawn.integers(1 << 30))), "leaks")
            )
            x = x @ torch.from_numpy(member.matrix()[0]).T
        tokens, places = embedding_search(EmbeddedText(x.float(), model, kind))
        about = f"rows shuffled, columns moved ({kind})" if kind else "rows shuffled"
        found[f"tokens, {about}"] = [1 / size, float((tokens == ids[0, order[0]]).double().mean())]
        found[f"their places, {about}"] = [1 / count, float((places == order[0]).double().mean())]
    return Outcome({"found": found})


PASSES, TEXT = Cell("leaks-passes", 1, passes), Cell("leaks-text", 1, text)
