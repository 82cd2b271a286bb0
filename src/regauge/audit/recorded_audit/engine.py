"""The audit of a recorded run, round by round: `regauge audit gradients --from RUN`.

The attacker is the server. It has the state that it sent out, each contribution, its own test
examples, the settings of the run and the code of its clients, so that it can rehearse: make updates
of its own examples as a client would. Attacks are scored by the client's examples, which are read
again from the data and are not part of any view. `image_audit` has the attacks on images,
`text_audit` those on texts.
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
from regauge.audit.engine import Attack, Steps
from regauge.audit.gradient_audit.attempts import Budget
from regauge.audit.gradient_audit.clients import Truth, concat_inputs, concat_truths, to_rehearsal
from regauge.audit.gradient_audit.scores import average
from regauge.core.progress import Progress
from regauge.core.rng import seed_key
from regauge.data.tasks import Examples
from regauge.errors import FederatedError
from regauge.federated import state_store
from regauge.federated.client import contribute, set_puzzle_seed
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import RecordedUpdate, load_rows, load_update, recorded_rounds
from regauge.federated.rounds import completed_rounds
from regauge.federated.runs import Source
from regauge.federated.settings import Settings, read_settings
from regauge.jigsaw import MaskedJigsaw
from regauge.results.findings import Figure, Finding, Results, Table

Tensor = torch.Tensor
# The scores of one update: "round", "client", "leak", "floor", further scores, and "why ..." with
# the reason of each attack that does not apply.
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A recorded run.

    Attributes:
        folder: The folder of the run.
        settings: Its settings.
        source: Its model and data.
        model: The model of both sides.
        parts: The examples of each client.
        test: The examples of the server.
        targets: Rounds with the clients of each recorded contribution; under secure sums, all
            clients of a round together.
        task: How the model reads the data.
    """

    folder: Path
    settings: Settings
    source: Source
    model: torch.nn.Module
    parts: Sequence[Examples]
    test: Examples
    targets: Sequence[tuple[int, tuple[int, ...]]]
    task: dict[str, Any]

    def iterate(self, progress: Progress | None) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the targets one by one, and report progress."""
        steps = Steps(len(self.targets), progress)
        for number, clients in self.targets:
            steps(f"round {number + 1}, client {', '.join(map(str, clients))}")
            yield number, clients
        steps.finish()

    def load_update(self, number: int, clients: Sequence[int]) -> RecordedUpdate:
        """Return the contribution of these clients; under secure sums it is the mean of all."""
        return load_update(self.folder, number, clients[0])

    def load_truth(self, number: int, clients: Sequence[int]) -> Truth:
        """Return the examples of these clients."""
        truths = [
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
        return truths[0] if len(truths) == 1 else concat_truths(truths)


@dataclass(frozen=True)
class LeakFormat:
    """The presentation of leakage in the report.

    Attributes:
        subject: What is recovered: "images", "texts".
        measure: The measure of leakage.
        floor: The title of the baseline.
        columns: Titles of further columns, by key of a row.
        verdict: Describe a round by its mean scores.
        is_plain: Whether a round reveals the subject plainly, by leak and floor.
    """

    subject: str
    measure: str
    floor: str
    columns: dict[str, str]
    verdict: Callable[[Callable[[str], float | None]], str]
    is_plain: Callable[[float, float], bool]


def open_run(folder: Path, rounds: Sequence[int] = (), clients: Sequence[int] = ()) -> RecordedRun:
    """Open a recorded run.

    Args:
        folder: The folder of the run.
        rounds: The rounds to attack; empty for all.
        clients: The clients to attack; empty for all.

    Raises:
        FederatedError: Nothing was recorded for these rounds and clients.
    """
    about = state_store.load_about(folder)
    settings, source = read_settings(about["settings"]), Source(**about["about"]["source"])
    model = source.build_model(settings)
    shared, test, task = source.load_examples(model)
    recorded = {
        number: [c for c in present if not clients or c in clients]
        for number, present in recorded_rounds(folder).items()
        if not rounds or number in rounds
    }
    targets = [
        (number, group)
        for number, present in recorded.items()
        for group in ([tuple(present)] if settings.secure and present else [(c,) for c in present])
    ]
    if not targets:
        raise FederatedError(
            "rounds and clients must have been recorded, got none of them",
            hint="recorded: rounds "
            f"{', '.join(str(number + 1) for number in sorted(recorded_rounds(folder)))}",
        )
    return RecordedRun(
        folder, settings, source, model, partition_examples(shared, settings), test, targets, task
    )


def rebuild_truth(
    model: torch.nn.Module,
    examples: Examples,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    number: int,
    client: int,
) -> Truth:
    """Return the truth of a contribution, all steps: inputs, puzzled inputs and labels.

    Puzzles are sampled again from the same seed.
    """
    original: list[dict[str, Tensor]] = []
    read: list[dict[str, Tensor]] = []
    labels, first_puzzle = [], None
    set_puzzle_seed(model, settings, number, client)
    for indices in rows:
        inputs, batch_labels = examples.batch(np.asarray(indices))
        puzzle = None
        if isinstance(model, MaskedJigsaw):
            pixels = inputs["pixel_values"]
            puzzle = model.puzzle_at(model.passes, len(pixels), model.grid_of(pixels))
            model.passes += 1
        first_puzzle = first_puzzle or puzzle
        original.append(dict(inputs))
        read.append(
            dict(inputs)
            if puzzle is None
            else {**inputs, "pixel_values": puzzle.apply(inputs["pixel_values"])}
        )
        labels.append(batch_labels)
    return Truth(concat_inputs(original), concat_inputs(read), torch.cat(labels), first_puzzle)


def rehearse_recorded(
    model: torch.nn.Module,
    update: RecordedUpdate,
    own: Examples,
    settings: Settings,
    count: int,
    seed: int,
    clients: int = 1,
) -> Iterator[Rehearsal]:
    """Yield updates of the server's own examples, made like a recorded one.

    They have as many examples and steps, the same training and defences and, under a secure sum, as
    many clients. The weights of `model` are overwritten.

    Args:
        model: The model of both sides.
        update: The recorded update.
        own: The server's examples.
        settings: The settings of the run.
        count: The number of rehearsals.
        seed: The random seed.
        clients: The number of clients in a secure sum.
    """
    defences = read_defences(settings.defences)
    frozen, rng = frozen_names(model, defences), np.random.default_rng(seed)
    for _ in range(count):
        sampled = replace(
            settings,
            steps=update.steps,
            step_jitter=0.0,
            secure=False,
            seed=int(rng.integers(1 << 31)),
        )
        updates, truths = [], []
        for client in range(clients):
            examples = own.only(
                rng.choice(len(own), update.examples, replace=update.examples > len(own))
            )
            contribution = contribute(
                model, update.state, examples, sampled, update.round, client, frozen=frozen
            )
            truths.append(
                rebuild_truth(model, examples, contribution.rows, sampled, update.round, client)
            )
            updates.append(
                Update(
                    apply_defences(contribution, model, defences, seed_key(sampled.seed)).tensors,
                    "change",
                    contribution.steps,
                    contribution.lr,
                )
            )
        yield to_rehearsal(
            updates[0] if clients == 1 else average_updates(updates),
            truths[0] if clients == 1 else concat_truths(truths),
        )


def build_results(
    run: RecordedRun,
    rows: Sequence[Row],
    leak: LeakFormat,
    attacks: Sequence[Attack],
    pictures: Sequence[Figure] = (),
) -> Results:
    """Return accuracy and leakage over rounds.

    Args:
        run: The recorded run.
        rows: The scores of the attacked updates.
        leak: How leakage is presented.
        attacks: The attacks.
        pictures: Further figures.
    """
    run_state = state_store.load(run.folder)
    history = completed_rounds(run_state.history) if run_state else []
    accuracy = {past.number: past.measures.get("accuracy") for past in history}
    numbers = sorted({row["round"] for row in rows})

    def mean_at(number: int, name: str) -> float | None:
        return average(
            [row[name] for row in rows if row["round"] == number and row.get(name) is not None]
        )

    leaks, floors = ([mean_at(number, name) for number in numbers] for name in ("leak", "floor"))
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
            number + 1,
            accuracy.get(number),
            leaks[i],
            floors[i],
            *(mean_at(number, key) for key in leak.columns),
            sum(row["round"] == number for row in rows),
        )
        for i, number in enumerate(numbers)
    )
    reasons = sorted({str(row[key]) for row in rows for key in row if key.startswith("why ")})
    note = "Each update is attacked as it was sent. " + " ".join(
        f"{text[:1].upper()}{text[1:]}." for text in reasons
    )
    x = [number + 1 for number in numbers]
    figures = [
        Figure(
            "Accuracy over rounds",
            "lines",
            {
                "x": [past.number + 1 for past in history],
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
            f"The server's best attack against the {leak.subject} of a client. At the floor it "
            "recovers nothing.",
        ),
        *pictures,
    ]
    plain_rounds = sum(
        value is not None and baseline is not None and leak.is_plain(value, baseline)
        for value, baseline in zip(leaks, floors, strict=True)
    )
    sentences = [leak.verdict(partial(mean_at, number)) for number in numbers]
    summary = (
        f"{leak.subject.capitalize()} come back from contributions in {plain_rounds} of "
        f"{len(numbers)} attacked rounds."
    )
    width = len(str(max(x)))  # so that ids sort by round
    findings = [
        Finding(
            f"round-{round_number:0{width}}/leak",
            f"Leakage of the updates of round {round_number}",
            None,
            value,
            floors[i],
            None,
            text,
            measure=leak.measure,
        )
        for i, (round_number, value, text) in enumerate(zip(x, leaks, sentences, strict=True))
        if value is not None
    ]
    facts: dict[str, Any] = {
        "verdict": [
            summary,
            *(
                f"round {round_number}: {text}"
                for round_number, text in zip(x, sentences, strict=True)
            ),
        ],
        "run": str(run.folder),
    }
    facts |= {
        "settings": run.settings.to_dict(),
        "attacks": [attack.title for attack in attacks],
        "source": run.source.to_dict(),
    }
    return Results(
        "What a server sees of a federated run",
        tuple(findings),
        (Table("Rounds", columns, body, note),),
        tuple(figures),
        facts,
    )


def audit_recorded(
    run: RecordedRun,
    *,
    attacks: Sequence[str] | None = None,
    budget: Budget | None = None,
    pictures: int = 4,
    progress: Progress | None = None,
) -> Results:
    """Attack the contributions of an open run.

    Args:
        run: The recorded run.
        attacks: Names of attacks; None for all but the slow ones.
        budget: The budget of attacks that optimise or learn.
        pictures: The number of images of an update in the gallery.
        progress: Progress callback.

    Returns:
        Accuracy and leakage over rounds.
    """
    from regauge.audit.recorded_audit.image_audit import audit_images
    from regauge.audit.recorded_audit.text_audit import audit_texts

    if run.task["kind"] == "images":
        return audit_images(
            run, attacks, budget or Budget(seed=run.settings.seed), pictures, progress
        )
    return audit_texts(run, attacks, progress)
