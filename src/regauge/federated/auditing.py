"""Attacks on what a server was sent in a run, round by round: `regauge audit gradients --from RUN`.

The attacker is the server: it has the state that it sent out, each contribution as it came, its own test images, and the run's settings. Scores are
against the images that the client used, which are read again from the data; nothing of them goes into an attack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.attacks.updates import Granted, SentUpdate, UpdateError
from regauge.federated import keeping
from regauge.federated.clients import aim
from regauge.federated.partitions import parts_of
from regauge.federated.rounds import done
from regauge.federated.running import Source
from regauge.federated.settings import FederatedError, Settings, read_settings
from regauge.federated.spying import Seen, load_kept, load_seen, seen_rounds
from regauge.federated.states import load_state
from regauge.findings import Figure, Finding, Results, Table
from regauge.gradients.attacking import CLOSED, Attack, Budget, attempt
from regauge.gradients.auditing import _asked
from regauge.gradients.clients import Truth, on
from regauge.gradients.scoring import assigned, auc, average, score, told_labels
from regauge.jigsaw import MaskedJigsaw
from regauge.leakage.auditing import in_unit
from regauge.leakage.scoring import mean as mean_of
from regauge.tasks import Examples, task_of

Tensor = torch.Tensor
PLAIN, SOME = 10.0, 1.0  # dB above the mean image
OWN = 200  # of the server's test images: the attacker's


def audit_run(
    folder: Path,
    *,
    rounds: Sequence[int] = (),
    clients: Sequence[int] = (),
    attacks: Sequence[Attack] = CLOSED,
    budget: Budget | None = None,
    pictures: int = 4,
    progress: Callable[[int, int, str], None] | None = None,
) -> Results:
    """Attack what was sent in these rounds by these clients (by default all that was recorded): accuracy and leakage over rounds, on one page."""
    found = keeping.about_of(folder)
    settings, source = read_settings(found["settings"]), Source(**found["about"]["source"])
    model = source.live(settings)
    shared, test = source.read(model)
    parts = parts_of(shared, settings)
    units = _units(source, model)
    images = test.batch(np.arange(min(OWN, len(test))))[0]["pixel_values"]
    recorded = {n: [c for c in who if not clients or c in clients] for n, who in seen_rounds(folder).items() if not rounds or n in rounds}
    todo = [(n, c) for n, who in recorded.items() for c in who]
    if not todo:
        raise FederatedError("nothing of these rounds and clients was recorded", hint=f"recorded: rounds {sorted(seen_rounds(folder))}")
    rows: list[dict[str, Any]] = []
    gallery: list[dict[str, Any]] = []
    for i, (n, c) in enumerate(todo):
        if progress:
            progress(i, len(todo), f"round {n + 1}, client {c}")
        truth = truth_of(model, parts[c], load_kept(folder, n, c), settings, n, c)
        row, true, best = attacked(model, load_seen(folder, n, c), truth, images, units, attacks, budget or Budget(seed=settings.seed))
        rows.append({**row, "round": n, "client": c})
        if best is not None and pictures and i in (0, len(todo) - 1):
            lists = ((f"round {n + 1}, client {c}: the client's", true), ("what the server makes of the update", best))
            gallery += [{"label": label, "images": [_picture(x) for x in some[:pictures]]} for label, some in lists]
    if progress:
        progress(len(todo), len(todo), "")
    return _told(folder, settings, source, rows, gallery, attacks)


def truth_of(model: torch.nn.Module, examples: Examples, rows: Sequence[Sequence[int]], settings: Settings, number: int, client: int) -> Truth:
    """What the client kept, from its data: images as they were, as the model read them (puzzles are drawn again), and labels. All of its steps."""
    original, read, labels, first = [], [], [], None
    aim(model, settings, number, client)
    for chosen in rows:
        inputs, answers = examples.batch(np.asarray(chosen))
        pixels, puzzle = inputs["pixel_values"], None
        if isinstance(model, MaskedJigsaw):
            height, width = pixels.shape[-2:]
            puzzle, _ = model._next(len(pixels), (height // model.place.patch[0], width // model.place.patch[1]), pixels)
        first = first or puzzle
        original.append(pixels)
        read.append(pixels if puzzle is None else puzzle.apply(pixels))
        labels.append(answers)
    return Truth({"pixel_values": torch.cat(original)}, {"pixel_values": torch.cat(read)}, torch.cat(labels), first)


def attacked(
    model: torch.nn.Module,
    seen: Seen,
    truth: Truth,
    images: Tensor,
    units: tuple[Sequence[float], Sequence[float]],
    attacks: Sequence[Attack],
    budget: Budget,
) -> tuple[dict[str, Any], Tensor, Tensor | None]:
    """One update under all attacks: what each got, the true images, and the best reconstruction. `images` are the attacker's own."""
    load_state(model, seen.state)
    model.eval()
    true = in_unit(truth.original["pixel_values"].float(), *units).clamp(0, 1)
    floor = score(in_unit(images, *units).clamp(0, 1).mean(0, keepdim=True).expand_as(true), true, None)
    row: dict[str, Any] = {"images": len(true), "steps": seen.update.steps, "floor": mean_of(floor, "PSNR")}
    best: Tensor | None = None
    for attack in attacks:
        view = _view(model, seen, truth, attack, images)
        try:
            asked, inside = _asked(view, truth, images, seen.round) if attack.kind == "patches" else (None, 0)
            one = attempt(attack, view, budget, asked)
        except UpdateError as error:
            row[f"why {attack.name}"] = str(error)
            continue
        if one.found is None:
            row[f"why {attack.name}"] = one.why
        elif attack.kind == "images":
            guess = assigned(in_unit(one.found.float(), *units).clamp(0, 1), true)
            value = mean_of(score(guess, true, None), "PSNR")
            if value is not None and value >= row.get("PSNR", -np.inf):
                row["PSNR"], best = value, guess
        elif attack.kind == "patches":
            row["AUC"] = auc(one.found[:inside], one.found[inside:])
        elif attack.kind == "labels":
            row["labels"] = told_labels(one.found, truth.labels)
        elif attack.kind == "mask" and truth.puzzle is not None:
            row["mask"] = float((one.found == truth.puzzle.mask[0]).double().mean())
    return row, true, best


def _view(model: torch.nn.Module, seen: Seen, truth: Truth, attack: Attack, images: Tensor) -> SentUpdate:
    threat = attack.threat
    pixels = on(model, truth.read)["pixel_values"]
    granted = Granted(
        batch=len(truth.labels) if threat.batch else None,
        labels=truth.labels if threat.labels else None,
        mask=truth.puzzle.mask if threat.mask and truth.puzzle is not None else None,
        images=images if threat.images else None,
    )
    return SentUpdate(model, seen.update, tuple(pixels.shape[1:]), granted)


def _units(source: Source, model: torch.nn.Module) -> tuple[Sequence[float], Sequence[float]]:
    from regauge.data import open_data
    from regauge.federated.clients import plain

    beside = Path(source.model) if Path(source.model).is_dir() else Path(source.model).parent
    task, _ = task_of(plain(model), open_data(source.data, fields=source.fields, split=source.split), beside=beside, mean=source.mean, std=source.std)
    if task["kind"] != "images":
        raise FederatedError("attacks on recorded runs are for images here", hint="regauge audit gradients has attacks on texts")
    return task["mean"], task["std"]


def _verdict(leak: float | None, floor: float | None, spans: float | None, labels: float | None) -> str:
    """What a server got of a round, in words."""
    if leak is None or floor is None:
        images = "none of the attacks on images could try"
    elif leak > floor + PLAIN:
        images = f"images come back ({leak:.1f} dB, the mean image {floor:.1f})"
    elif leak > floor + SOME:
        images = f"something of the images comes back ({leak:.1f} dB, the mean image {floor:.1f})"
    else:
        images = f"images do not come back ({leak:.1f} dB, the mean image {floor:.1f})"
    patches = "" if spans is None else f"; patches can {'be told' if spans > 0.75 else 'hardly be told'} (AUC {spans:.2f})"
    return images + patches + ("" if labels is None else f"; {labels:.0%} of the labels are told")


def _picture(image: Tensor) -> Any:
    return image[0].tolist() if len(image) == 1 else image.permute(1, 2, 0).tolist()


def _told(
    folder: Path, settings: Settings, source: Source, rows: Sequence[dict[str, Any]], gallery: list[dict[str, Any]], attacks: Sequence[Attack]
) -> Results:
    kept = keeping.load(folder)
    history = done(kept.history) if kept else []
    accuracy = {r.number: r.measures.get("accuracy") for r in history}
    numbers = sorted({row["round"] for row in rows})

    def over(name: str) -> list[float | None]:
        return [average([r[name] for r in rows if r["round"] == n and r.get(name) is not None]) for n in numbers]

    leak, floor, spans = over("PSNR"), over("floor"), over("AUC")
    columns = (
        "round",
        "accuracy",
        "PSNR of the best attack, dB",
        "the mean image, dB",
        "patches, AUC",
        "labels told",
        "mask told",
        "updates attacked",
    )
    body = tuple(
        (n + 1, accuracy.get(n), leak[i], floor[i], spans[i], over("labels")[i], over("mask")[i], sum(r["round"] == n for r in rows))
        for i, n in enumerate(numbers)
    )
    reasons = {row[key] for row in rows for key in row if key.startswith("why ")}
    note = "Each update is attacked as it was sent. " + " ".join(f"{text[:1].upper()}{text[1:]}." for text in sorted(reasons))
    x = [n + 1 for n in numbers]
    figures = [
        Figure(
            "Accuracy over rounds",
            "lines",
            {"x": [r.number + 1 for r in history], "y": {"accuracy": list(accuracy.values())}, "xlabel": "round", "ylabel": "accuracy", "log": False},
        ),
        Figure(
            "Leakage over rounds",
            "lines",
            {"x": x, "y": {"the best attack": leak, "the mean image": floor}, "xlabel": "round", "ylabel": "PSNR, dB", "log": False},
            "How near the server's best reconstruction came to the images that a client used. At the mean image's height it has got nothing.",
        ),
    ]
    if any(a is not None for a in spans):
        lines = {"x": x, "y": {"span membership": spans, "a guess": [0.5] * len(x)}, "xlabel": "round", "ylabel": "AUC", "log": False}
        figures.append(Figure("Was this patch in the batch?", "lines", lines))
    if gallery:
        figures.append(Figure("First and last", "images", {"columns": ["" for _ in gallery[0]["images"]], "rows": gallery}))
    plainly = [n + 1 for i, n in enumerate(numbers) if (one := leak[i]) is not None and (base := floor[i]) is not None and one > base + PLAIN]
    first = f"Images come back from what was sent in {len(plainly)} of {len(numbers)} rounds that were attacked."
    said = [_verdict(leak[i], floor[i], spans[i], over("labels")[i]) for i in range(len(numbers))]
    verdict = [first, *(f"round {n + 1}: {text}" for n, text in zip(numbers, said, strict=True))]
    wide = len(str(max(x)))  # so that they are sorted as they came
    findings = [
        Finding(
            f"round-{at:0{wide}}/leak", f"What the server makes of the updates of round {at}", None, leak[i], floor[i], None, text, measure="PSNR, dB"
        )
        for i, (at, text) in enumerate(zip(x, said, strict=True))
        if leak[i] is not None
    ]
    facts = {"verdict": verdict, "run": str(folder), "settings": settings.told(), "attacks": [a.title for a in attacks], "source": source.told()}
    return Results("What a server sees of a federated run", tuple(findings), (Table("Rounds", columns, body, note),), tuple(figures), facts)
