"""Attacks on what a server was sent in a run, round by round: `regauge audit gradients --from RUN`.

The attacker is the server: it has the state that it sent out, each contribution as it came, its own
test examples, the run's settings and the code of its clients, so that it can practise: it makes
updates of its own examples as a client would. Scores are against what the client used, which is
read again from the data; nothing of that goes into an attack. `seeing` has what is of images,
`reading` what is of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.attacks.updates import Rehearsal, Update, average_updates
from regauge.audit.gradients.attempts import Attack, Budget
from regauge.audit.gradients.clients import Truth, concat_inputs, concat_truths, to_rehearsal
from regauge.audit.gradients.scores import average
from regauge.audit.gradients.text_audit import TextAttack
from regauge.core.progress import Progress
from regauge.core.rng import seed_key
from regauge.data.tasks import Examples
from regauge.federated import state_store
from regauge.federated.client import contribute, set_puzzle_seed
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import RecordedUpdate, load_rows, load_update, recorded_rounds
from regauge.federated.rounds import completed_rounds
from regauge.federated.runs import Source
from regauge.federated.settings import FederatedError, Settings, read_settings
from regauge.jigsaw import MaskedJigsaw
from regauge.results.findings import Figure, Finding, Results, Table

Tensor = torch.Tensor
Row = dict[
    str, Any
    # of one update: "round", "client", "leak", "floor", what else was told, and "why ..." an attack
    # could not try
]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run that was recorded: what both sides had, what was sent (`todo`, by round and client),
    and how the model reads its data.
    """

    folder: Path
    settings: Settings
    source: Source
    model: torch.nn.Module
    parts: Sequence[Examples]
    test: Examples
    targets: Sequence[
        tuple[int, tuple[int, ...]]
    ]  # under secure sums all clients of a round are one
    task: dict[str, Any]

    def iterate(self, progress: Progress | None) -> Iterator[tuple[int, tuple[int, ...]]]:
        """What is to be attacked, one after the other, and told as it goes."""
        for i, (number, clients) in enumerate(self.targets):
            if progress:
                progress(
                    i,
                    len(self.targets),
                    f"round {number + 1}, client {', '.join(map(str, clients))}",
                )
            yield number, clients
        if progress:
            progress(len(self.targets), len(self.targets), "")

    def load_update(self, number: int, clients: Sequence[int]) -> RecordedUpdate:
        return load_update(self.folder, number, clients[0])

    def load_truth(self, number: int, clients: Sequence[int]) -> Truth:
        """What these clients kept."""
        found = [
            rebuild_truth(
                self.model,
                self.parts[c],
                load_rows(self.folder, number, c),
                self.settings,
                number,
                c,
            )
            for c in clients
        ]
        return found[0] if len(found) == 1 else concat_truths(found)


@dataclass(frozen=True)
class LeakFormat:
    """How leakage is told: of `what`, by which `measure`, next to which `floor`; further columns by
    their key in a row; the verdict of a round.
    """

    subject: str
    measure: str
    floor: str
    columns: dict[str, str]
    verdict: Callable[[Callable[[str], float | None]], str]
    is_plain: Callable[[float, float], bool]  # do they come back plainly? of the leak and the floor


def open_run(folder: Path, rounds: Sequence[int] = (), clients: Sequence[int] = ()) -> RecordedRun:
    """A recorded run and, of it, these rounds and clients (by default all)."""
    found = state_store.load_about(folder)
    settings, source = read_settings(found["settings"]), Source(**found["about"]["source"])
    model = source.build_model(settings)
    shared, test, task = source.load_examples(model)
    recorded = {
        n: [c for c in who if not clients or c in clients]
        for n, who in recorded_rounds(folder).items()
        if not rounds or n in rounds
    }
    todo = [
        (n, group)
        for n, who in recorded.items()
        for group in ([tuple(who)] if settings.secure and who else [(c,) for c in who])
    ]
    if not todo:
        raise FederatedError(
            "nothing of these rounds and clients was recorded",
            hint="recorded: rounds "
            f"{', '.join(str(n + 1) for n in sorted(recorded_rounds(folder)))}",
        )
    return RecordedRun(
        folder, settings, source, model, partition_examples(shared, settings), test, todo, task
    )


def rebuild_truth(
    model: torch.nn.Module,
    examples: Examples,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    number: int,
    client: int,
) -> Truth:
    """What the client kept, from its data: inputs as they were, images as the model read them
    (puzzles are drawn again), and labels. All steps.
    """
    original: list[dict[str, Tensor]] = []
    read: list[dict[str, Tensor]] = []
    labels, first = [], None
    set_puzzle_seed(model, settings, number, client)
    for chosen in rows:
        inputs, answers = examples.batch(np.asarray(chosen))
        puzzle = None
        if isinstance(model, MaskedJigsaw):
            pixels = inputs["pixel_values"]
            puzzle = model.puzzle_at(model.passes, len(pixels), model.grid_of(pixels))
            model.passes += 1
        first = first or puzzle
        original.append(dict(inputs))
        read.append(
            dict(inputs)
            if puzzle is None
            else {**inputs, "pixel_values": puzzle.apply(inputs["pixel_values"])}
        )
        labels.append(answers)
    return Truth(concat_inputs(original), concat_inputs(read), torch.cat(labels), first)


def rehearse_recorded(
    model: torch.nn.Module,
    seen: RecordedUpdate,
    own: Examples,
    settings: Settings,
    count: int,
    seed: int,
    clients: int = 1,
) -> Iterator[Rehearsal]:
    """Updates that a server makes of its own examples as a client made what was seen: as many
    examples and steps, the same training and defences; under a secure sum as many clients. On a
    model that is used up by it.
    """
    defences = read_defences(settings.defences)
    still, draw = frozen_names(model, defences), np.random.default_rng(seed)
    for _ in range(count):
        like = replace(
            settings,
            steps=seen.steps,
            step_jitter=0.0,
            secure=False,
            seed=int(draw.integers(1 << 31)),
        )
        made, truths = [], []
        for client in range(clients):
            mine = own.only(draw.choice(len(own), seen.examples, replace=seen.examples > len(own)))
            sent = contribute(model, seen.state, mine, like, seen.round, client, frozen=still)
            truths.append(rebuild_truth(model, mine, sent.rows, like, seen.round, client))
            made.append(
                Update(
                    apply_defences(sent, model, defences, seed_key(like.seed)).tensors,
                    "change",
                    sent.steps,
                    sent.lr,
                )
            )
        yield to_rehearsal(
            made[0] if clients == 1 else average_updates(made),
            truths[0] if clients == 1 else concat_truths(truths),
        )


def build_results(
    run: RecordedRun,
    rows: Sequence[Row],
    leak: LeakFormat,
    attacks: Sequence[Attack] | Sequence[TextAttack],
    pictures: Sequence[Figure] = (),
) -> Results:
    """Accuracy and leakage over rounds, on one page."""
    kept = state_store.load(run.folder)
    history = completed_rounds(kept.history) if kept else []
    accuracy = {r.number: r.measures.get("accuracy") for r in history}
    numbers = sorted({row["round"] for row in rows})

    def at(n: int, name: str) -> float | None:
        return average([r[name] for r in rows if r["round"] == n and r.get(name) is not None])

    leaks, floors = ([at(n, name) for n in numbers] for name in ("leak", "floor"))
    columns = (
        "round",
        "accuracy",
        f"the best attack, {leak.measure}",
        leak.floor,
        *leak.columns.values(),
        "updates attacked",
    )
    body = tuple(
        (
            n + 1,
            accuracy.get(n),
            leaks[i],
            floors[i],
            *(at(n, key) for key in leak.columns),
            sum(r["round"] == n for r in rows),
        )
        for i, n in enumerate(numbers)
    )
    reasons = sorted({str(row[key]) for row in rows for key in row if key.startswith("why ")})
    note = "Each update is attacked as it was sent. " + " ".join(
        f"{text[:1].upper()}{text[1:]}." for text in reasons
    )
    x = [n + 1 for n in numbers]
    figures = [
        Figure(
            "Accuracy over rounds",
            "lines",
            {
                "x": [r.number + 1 for r in history],
                "y": {"accuracy": list(accuracy.values())},
                "xlabel": "round",
                "ylabel": "accuracy",
                "log": False,
            },
        ),
        Figure(
            "Leakage over rounds",
            "lines",
            {
                "x": x,
                "y": {"the best attack": leaks, leak.floor: floors},
                "xlabel": "round",
                "ylabel": leak.measure,
                "log": False,
            },
            f"How near the server's best attack came to the {leak.subject} that a client used. At "
            "the floor's height it has got nothing.",
        ),
        *pictures,
    ]
    plainly = sum(
        a is not None and b is not None and leak.is_plain(a, b)
        for a, b in zip(leaks, floors, strict=True)
    )
    said = [leak.verdict(partial(at, n)) for n in numbers]
    first = (
        f"{leak.subject.capitalize()} come back from what was sent in {plainly} of "
        f"{len(numbers)} rounds that were attacked."
    )
    wide = len(str(max(x)))  # so that they are sorted as they came
    findings = [
        Finding(
            f"round-{k:0{wide}}/leak",
            f"What the server makes of the updates of round {k}",
            None,
            a,
            floors[i],
            None,
            text,
            measure=leak.measure,
        )
        for i, (k, a, text) in enumerate(zip(x, leaks, said, strict=True))
        if a is not None
    ]
    facts: dict[str, Any] = {
        "verdict": [first, *(f"round {k}: {text}" for k, text in zip(x, said, strict=True))],
        "run": str(run.folder),
    }
    facts |= {
        "settings": run.settings.to_dict(),
        "attacks": [a.title for a in attacks],
        "source": run.source.to_dict(),
    }
    return Results(
        "What a server sees of a federated run",
        tuple(findings),
        (Table("Rounds", columns, body, note),),
        tuple(figures),
        facts,
    )


def audit_run(
    folder: Path,
    *,
    rounds: Sequence[int] = (),
    clients: Sequence[int] = (),
    attacks: Sequence[str] | None = None,
    budget: Budget | None = None,
    pictures: int = 4,
    progress: Progress | None = None,
) -> Results:
    """Attack what was sent in these rounds by these clients (by default all that was recorded), by
    attacks of these names (by default all that take no descent): accuracy and leakage over rounds,
    on one page.
    """
    return audit_recorded(
        open_run(folder, rounds, clients),
        attacks=attacks,
        budget=budget,
        pictures=pictures,
        progress=progress,
    )


def audit_recorded(
    run: RecordedRun,
    *,
    attacks: Sequence[str] | None = None,
    budget: Budget | None = None,
    pictures: int = 4,
    progress: Progress | None = None,
) -> Results:
    """The same, of a run that is open."""
    from regauge.audit.recorded.image_audit import audit_images
    from regauge.audit.recorded.text_audit import audit_texts

    if run.task["kind"] == "images":
        return audit_images(
            run, attacks, budget or Budget(seed=run.settings.seed), pictures, progress
        )
    return audit_texts(run, attacks, progress)
