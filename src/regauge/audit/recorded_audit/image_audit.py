"""Attacks on the images of a recorded run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.audit.engine import Attack, denormalize, resolve_attacks
from regauge.audit.gradient_audit.attempts import (
    ATTACKS,
    QUICK,
    Budget,
    filter_applicable,
    fit_attack,
)
from regauge.audit.gradient_audit.clients import Truth, build_recorded_view
from regauge.audit.gradient_audit.engine import REHEARSALS, split_own_images
from regauge.audit.gradient_audit.engine import attack_update as score_update
from regauge.audit.gradient_audit.scores import average, score_reconstructions
from regauge.audit.recorded_audit import to_update
from regauge.audit.recorded_audit.engine import (
    LeakFormat,
    RecordedRun,
    Row,
    build_results,
    rehearse_recorded,
)
from regauge.audit.scores import best_assignment, mean_score
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.errors import UpdateError
from regauge.federated.recorder import RecordedUpdate
from regauge.federated.settings import Settings
from regauge.federated.states import load_state
from regauge.results.findings import Figure, Results

Tensor = torch.Tensor
PixelStats = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of pixels
PLAIN_DB, PARTIAL_DB = 10.0, 1.0  # dB above the mean image
MAX_OWN_IMAGES = 300  # of the server's test images


@dataclass(eq=False)
class Practice:
    """The rehearsals of one round.

    Attributes:
        make: Make so many updates of the server's own examples, from a seed.
        first: The first rehearsals, made once.
        fitted: The cache of fitted attacks.
    """

    make: Callable[[int, int], Iterator[Rehearsal]]
    first: tuple[Rehearsal, ...] = ()
    fitted: dict[Any, Any] = field(default_factory=dict)

    def rehearsals(self) -> tuple[Rehearsal, ...]:
        """Return the first rehearsals."""
        self.first = self.first or tuple(self.make(REHEARSALS, 500))
        return self.first

    def fit(self, attack: Attack, view: SentUpdate, budget: Budget) -> Any:
        """Fit an attack to this round."""
        return fit_attack(self.fitted, attack, view, budget, lambda n: self.make(n, 700))


def make_practice(
    model: torch.nn.Module,
    update: RecordedUpdate,
    own: Examples,
    settings: Settings,
    clients: int = 1,
) -> Practice:
    """Return the rehearsals of a round, made like its first recorded update."""

    def make(count: int, seed: int) -> Iterator[Rehearsal]:
        return rehearse_recorded(
            copy.deepcopy(model),
            update,
            own,
            settings,
            count,
            settings.seed * 1000 + seed + update.round,
            clients,
        )

    return Practice(make)


def audit_images(
    run: RecordedRun,
    names: Sequence[str] | None,
    budget: Budget,
    pictures: int,
    progress: Progress | None,
) -> Results:
    """Attack all targets of a run of images, see `audit_recorded`."""
    attacks, skipped = filter_applicable(resolve_attacks(names, ATTACKS, QUICK, "images"), run.test)
    stats: PixelStats = (run.task["mean"], run.task["std"])
    own, others = split_own_images(run.test.only(np.arange(min(MAX_OWN_IMAGES, len(run.test)))))
    images = own.batch(np.arange(len(own)))[0]["pixel_values"]
    rows: list[Row] = []
    gallery: list[dict[str, Any]] = []
    practice: dict[int, Practice] = {}
    for number, clients in run.iterate(progress):
        update = run.load_update(number, clients)
        if number not in practice:
            practice[number] = make_practice(run.model, update, own, run.settings, len(clients))
        row, originals, best = attack_update(
            run.model,
            update,
            run.load_truth(number, clients),
            images,
            others,
            stats,
            attacks,
            budget,
            practice[number],
        )
        rows.append({**row, "round": number, "client": clients[0]})
        if best is not None and pictures and (number, clients) in (run.targets[0], run.targets[-1]):
            lists = (
                (f"round {number + 1}, client {clients[0]}: the client's", originals),
                ("the server's reconstruction", best),
            )
            gallery += [
                {"label": label, "images": [_to_picture(image) for image in shown[:pictures]]}
                for label, shown in lists
            ]
    figures = []
    if any("AUC" in row for row in rows):
        x = sorted({row["round"] for row in rows})
        aucs = [
            average([row["AUC"] for row in rows if row["round"] == number and "AUC" in row])
            for number in x
        ]
        lines = {
            "x": [number + 1 for number in x],
            "y": {"the best attack": aucs, "a guess": [0.5] * len(x)},
            "xlabel": "round",
            "ylabel": "AUC",
        }
        figures.append(Figure("Was this patch in the batch?", "lines", {**lines, "log": False}))
    if gallery:
        figures.append(
            Figure(
                "First and last",
                "images",
                {"columns": ["" for _ in gallery[0]["images"]], "rows": gallery},
            )
        )
    return replace(build_results(run, rows, IMAGES, attacks, figures), unchecked=tuple(skipped))


def attack_update(
    model: torch.nn.Module,
    update: RecordedUpdate,
    truth: Truth,
    images: Tensor,
    others: Tensor,
    stats: PixelStats,
    attacks: Sequence[Attack],
    budget: Budget,
    practice: Practice | None = None,
) -> tuple[Row, Tensor, Tensor | None]:
    """Run all attacks on one update.

    Args:
        model: The model of both sides; its weights are overwritten.
        update: The recorded update.
        truth: The examples of the client.
        images: The attacker's own images.
        others: Images that the attacker does not have, for non-members.
        stats: Mean and standard deviation of pixels.
        attacks: The attacks.
        budget: The budget of attacks that optimise or learn.
        practice: The rehearsals of the round, for attacks that learn.

    Returns:
        The scores, the true images, and the best reconstruction.
    """
    load_state(model, update.state)
    model.eval()
    originals = denormalize(truth.original["pixel_values"].float(), *stats).clamp(0, 1)
    floor = score_reconstructions(
        denormalize(images, *stats).clamp(0, 1).mean(0, keepdim=True).expand_as(originals),
        originals,
        None,
    )
    row: Row = {"images": len(originals), "steps": update.steps, "floor": mean_score(floor, "PSNR")}
    best: Tensor | None = None
    for attack in attacks:
        try:
            rehearsals = (
                practice.rehearsals() if practice is not None and attack.learn is not None else ()
            )
            view = build_recorded_view(
                model, to_update(update), truth, attack.threat, images, rehearsals
            )
            learned = (
                practice.fit(attack, view, budget)
                if practice is not None and attack.learn is not None
                else None
            )
            result, score = score_update(attack, view, truth, others, budget, update.round, learned)
        except UpdateError as error:
            row[f"why {attack.name}"] = str(error)
            continue
        if result.output is None:
            row[f"why {attack.name}"] = result.reason
        elif attack.kind == "images":
            guess = best_assignment(
                denormalize(result.output.float(), *stats).clamp(0, 1), originals
            )
            value = mean_score(score_reconstructions(guess, originals, None), "PSNR")
            if value is not None and value >= row.get("leak", -np.inf):
                row["leak"], best = value, guess
        elif score is not None:
            key = {"patches": "AUC"}.get(attack.kind, attack.kind)
            row[key] = max(row.get(key, 0.0), score)
    return row, originals, best


def _describe_round(mean_of_round: Callable[[str], float | None]) -> str:
    """Describe what the server recovers of a round."""
    leak, floor, membership, labels = (
        mean_of_round(name) for name in ("leak", "floor", "AUC", "labels")
    )
    if leak is None or floor is None:
        images = "none of the attacks on images applies"
    elif leak > floor + PLAIN_DB:
        images = f"images come back ({leak:.1f} dB, the mean image {floor:.1f})"
    elif leak > floor + PARTIAL_DB:
        images = f"something of the images comes back ({leak:.1f} dB, the mean image {floor:.1f})"
    else:
        images = f"images do not come back ({leak:.1f} dB, the mean image {floor:.1f})"
    patches = (
        ""
        if membership is None
        else f"; patches can {'' if membership > 0.75 else 'hardly '}be recognised "
        f"(AUC {membership:.2f})"
    )
    return (
        images + patches + ("" if labels is None else f"; {labels:.0%} of the labels are revealed")
    )


def _to_picture(image: Tensor) -> Any:
    return image[0].tolist() if len(image) == 1 else image.permute(1, 2, 0).tolist()


IMAGES = LeakFormat(
    "images",
    "PSNR, dB",
    "the mean image, dB",
    {"AUC": "patches, AUC", "labels": "labels recovered", "mask": "mask recovered"},
    _describe_round,
    lambda leak, floor: leak > floor + PLAIN_DB,
)
