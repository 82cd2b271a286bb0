"""What a server makes of the images of a recorded run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.membership import auc
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.audit.gradients.attempts import (
    ATTACKS,
    QUICK,
    Attack,
    Budget,
    attempt,
    filter_applicable,
    fit_attack,
    resolve_attacks,
)
from regauge.audit.gradients.clients import Truth, build_recorded_view
from regauge.audit.gradients.engine import REHEARSALS, sample_candidates, split_own_images
from regauge.audit.gradients.scores import average, label_recall, score_reconstructions
from regauge.audit.recorded import to_update
from regauge.audit.recorded.engine import (
    LeakFormat,
    RecordedRun,
    Row,
    build_results,
    rehearse_recorded,
)
from regauge.audit.split.engine import denormalize
from regauge.audit.split.scores import best_assignment as by_name
from regauge.audit.split.scores import mean_score as mean_of
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.errors import UpdateError
from regauge.federated.recorder import RecordedUpdate
from regauge.federated.settings import Settings
from regauge.federated.states import load_state
from regauge.results.findings import Figure, Results

Tensor = torch.Tensor
PixelStats = tuple[Sequence[float], Sequence[float]]  # mean and deviation of pixels
PLAIN_DB, PARTIAL_DB = 10.0, 1.0  # dB above the mean image
MAX_OWN_IMAGES = 300  # of the server's test images: the attacker's


@dataclass(eq=False)
class Practice:
    """Where a server practises: `make` gives so many updates of its own, from a seed. What attacks
    learned of a round is kept.
    """

    make: Callable[[int, int], Iterator[Rehearsal]]
    first: tuple[Rehearsal, ...] = ()
    fitted: dict[Any, Any] = field(default_factory=dict)

    def rehearsals(self) -> tuple[Rehearsal, ...]:
        self.first = self.first or tuple(self.make(REHEARSALS, 500))
        return self.first

    def fit(self, attack: Attack, view: SentUpdate, budget: Budget) -> Any:
        """What an attack learns of this round."""
        return fit_attack(self.fitted, attack, view, budget, lambda n: self.make(n, 700))


def make_practice(
    model: torch.nn.Module,
    seen: RecordedUpdate,
    own: Examples,
    settings: Settings,
    clients: int = 1,
) -> Practice:
    """Practice for a round, by the first update that is seen of it."""

    def make(count: int, seed: int) -> Iterator[Rehearsal]:
        return rehearse_recorded(
            copy.deepcopy(model),
            seen,
            own,
            settings,
            count,
            settings.seed * 1000 + seed + seen.round,
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
    attacks, unfit = filter_applicable(resolve_attacks(names, ATTACKS, QUICK, "images"), run.test)
    units: PixelStats = (run.task["mean"], run.task["std"])
    mine, apart = split_own_images(run.test.only(np.arange(min(MAX_OWN_IMAGES, len(run.test)))))
    images = mine.batch(np.arange(len(mine)))[0]["pixel_values"]
    rows: list[Row] = []
    gallery: list[dict[str, Any]] = []
    practice: dict[int, Practice] = {}
    for n, clients in run.iterate(progress):
        seen = run.load_update(n, clients)
        if n not in practice:
            practice[n] = make_practice(run.model, seen, mine, run.settings, len(clients))
        row, true, best = attack_update(
            run.model,
            seen,
            run.load_truth(n, clients),
            images,
            apart,
            units,
            attacks,
            budget,
            practice[n],
        )
        rows.append({**row, "round": n, "client": clients[0]})
        if best is not None and pictures and (n, clients) in (run.targets[0], run.targets[-1]):
            lists = (
                (f"round {n + 1}, client {clients[0]}: the client's", true),
                ("what the server makes of the update", best),
            )
            gallery += [
                {"label": label, "images": [_to_picture(x) for x in some[:pictures]]}
                for label, some in lists
            ]
    figures = []
    if any("AUC" in row for row in rows):
        x = sorted({row["round"] for row in rows})
        spans = [
            average([row["AUC"] for row in rows if row["round"] == n and "AUC" in row]) for n in x
        ]
        lines = {
            "x": [n + 1 for n in x],
            "y": {"the best attack": spans, "a guess": [0.5] * len(x)},
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
    return replace(build_results(run, rows, IMAGES, attacks, figures), unchecked=tuple(unfit))


def attack_update(
    model: torch.nn.Module,
    seen: RecordedUpdate,
    truth: Truth,
    images: Tensor,
    apart: Tensor,
    units: PixelStats,
    attacks: Sequence[Attack],
    budget: Budget,
    practice: Practice | None = None,
) -> tuple[Row, Tensor, Tensor | None]:
    """One update under all attacks: what each got, the true images, and the best reconstruction.
    `images` are the attacker's own; patches of the batch are told from those of images `apart`,
    which it has not.
    """
    load_state(model, seen.state)
    model.eval()
    true = denormalize(truth.original["pixel_values"].float(), *units).clamp(0, 1)
    floor = score_reconstructions(
        denormalize(images, *units).clamp(0, 1).mean(0, keepdim=True).expand_as(true), true, None
    )
    row: Row = {"images": len(true), "steps": seen.steps, "floor": mean_of(floor, "PSNR")}
    best: Tensor | None = None
    for attack in attacks:
        try:
            rehearsals = (
                practice.rehearsals() if practice is not None and attack.learn is not None else ()
            )
            view = build_recorded_view(
                model, to_update(seen), truth, attack.threat, images, rehearsals
            )
            learned = (
                practice.fit(attack, view, budget)
                if practice is not None and attack.learn is not None
                else None
            )
            asked, inside = (
                sample_candidates(view, truth, apart, seen.round)
                if attack.kind == "patches"
                else (None, 0)
            )
            one = attempt(attack, view, budget, asked, learned)
        except UpdateError as error:
            row[f"why {attack.name}"] = str(error)
            continue
        if one.output is None:
            row[f"why {attack.name}"] = one.reason
        elif attack.kind == "images":
            guess = by_name(denormalize(one.output.float(), *units).clamp(0, 1), true)
            value = mean_of(score_reconstructions(guess, true, None), "PSNR")
            if value is not None and value >= row.get("leak", -np.inf):
                row["leak"], best = value, guess
        elif attack.kind == "patches":
            row["AUC"] = max(row.get("AUC", 0.0), auc(one.output[:inside], one.output[inside:]))
        elif attack.kind == "labels":
            row["labels"] = label_recall(one.output, truth.labels)
        elif attack.kind == "mask" and truth.puzzle is not None:
            row["mask"] = float((one.output == truth.puzzle.mask[0]).double().mean())
    return row, true, best


def _describe_round(of: Callable[[str], float | None]) -> str:
    """What a server got of a round, in words."""
    leak, floor, spans, labels = of("leak"), of("floor"), of("AUC"), of("labels")
    if leak is None or floor is None:
        images = "none of the attacks on images could try"
    elif leak > floor + PLAIN_DB:
        images = f"images come back ({leak:.1f} dB, the mean image {floor:.1f})"
    elif leak > floor + PARTIAL_DB:
        images = f"something of the images comes back ({leak:.1f} dB, the mean image {floor:.1f})"
    else:
        images = f"images do not come back ({leak:.1f} dB, the mean image {floor:.1f})"
    patches = (
        ""
        if spans is None
        else f"; patches can {'be told' if spans > 0.75 else 'hardly be told'} (AUC {spans:.2f})"
    )
    return images + patches + ("" if labels is None else f"; {labels:.0%} of the labels are told")


def _to_picture(image: Tensor) -> Any:
    return image[0].tolist() if len(image) == 1 else image.permute(1, 2, 0).tolist()


IMAGES = LeakFormat(
    "images",
    "PSNR, dB",
    "the mean image, dB",
    {"AUC": "patches, AUC", "labels": "labels told", "mask": "mask told"},
    _describe_round,
    lambda leak, floor: leak > floor + PLAIN_DB,
)
