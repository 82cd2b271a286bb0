"""The audit of a recorded run, round by round: `regauge audit gradients --from RUN`.

The attacker is the server. It has the state that it sent out, each contribution, its own test
examples, the settings of the run and the code of its clients, so that it can rehearse: make updates
of its own examples as a client would. Attacks are scored by the client's examples, which are read
again from the data and are not part of any view. `report` has tables, figures and the verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.attacks.updates import Rehearsal, Update, average_updates
from regauge.audit.engine import Attack, Measured, Steps, attack_row, resolve_attacks, to_pixels
from regauge.audit.gradient_audit.attempts import ATTACKS, TEXT_ATTACKS, Budget, filter_applicable
from regauge.audit.gradient_audit.clients import Truth, concat_inputs, concat_truths, to_rehearsal
from regauge.audit.gradient_audit.engine import (
    REHEARSALS,
    AttackedUpdate,
    Attacker,
    attack_updates,
    default_attacks,
    score_reconstructions,
    split_own_images,
    token_lists,
)
from regauge.audit.recorded_audit import report
from regauge.audit.recorded_audit.report import Target
from regauge.audit.scores import Row, Scores
from regauge.audit.text_scores import score_texts
from regauge.checkpoints.resume import StateStore
from regauge.core.progress import Progress
from regauge.core.rng import seed_key
from regauge.data.tasks import Examples
from regauge.errors import FederatedError
from regauge.federated import state_store
from regauge.federated.client import contribute, set_puzzle_seed, unwrap
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import (
    RecordedUpdate,
    load_rows,
    load_update,
    recorded_files,
    recorded_rounds,
)
from regauge.federated.rounds import completed_rounds
from regauge.federated.runs import Source
from regauge.federated.settings import Settings, read_settings
from regauge.federated.states import load_state
from regauge.jigsaw import MaskedJigsaw
from regauge.results.findings import Results

Tensor = torch.Tensor
MAX_OWN = 300  # of the server's test examples


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


def files_of(run: RecordedRun) -> list[Path]:
    """Return the recorded files of the attacked rounds."""
    numbers = dict.fromkeys(number for number, _ in run.targets)
    return [path for number in numbers for path in recorded_files(run.folder, number)]


def audit_recorded(
    run: RecordedRun,
    *,
    attacks: Sequence[str] | None = None,
    budget: Budget | None = None,
    pictures: int = 4,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Attack the contributions of an open run.

    Args:
        run: The recorded run.
        attacks: Names of attacks; None for all but the slow ones.
        budget: The budget of attacks that optimize or learn.
        pictures: The number of images of an update in the gallery.
        progress: Progress callback.
        store: The saved steps of an interrupted run.

    Returns:
        Accuracy and leakage over rounds.
    """
    is_text = run.task["kind"] != "images"
    table = TEXT_ATTACKS if is_text else ATTACKS
    requested = resolve_attacks(
        attacks, table, default_attacks(is_text), "texts" if is_text else "images"
    )
    chosen, skipped = filter_applicable(requested, run.test)
    own = run.test.only(np.arange(min(MAX_OWN, len(run.test))))
    base = Attacker(
        own,
        budget or Budget(seed=run.settings.seed),
        () if is_text else run.task["mean"],
        () if is_text else run.task["std"],
        pictures=pictures,
    )
    steps = Steps([a.name for a in chosen] * len(run.targets), progress, store)
    targets: list[Target] = []
    practice: dict[int, Attacker] = {}
    for number, clients in run.targets:
        if number not in practice:
            practice[number] = practise_like(
                base, run.model, run.load_update(number, clients), run.settings, len(clients)
            )
        truth = run.load_truth(number, clients)
        row = attack_recorded(
            run.model, run.load_update(number, clients), truth, practice[number], chosen, steps
        )
        shown = None
        if not is_text and pictures and (number, clients) in (run.targets[0], run.targets[-1]):
            shown = to_pixels(base, truth.original["pixel_values"])[:pictures]
        targets.append(Target(number, clients[0], row, shown))
    steps.finish()
    run_state = state_store.load(run.folder)
    history = completed_rounds(run_state.history) if run_state else []
    accuracy = {past.number: past.measures.get("accuracy") for past in history}
    results = report.build_results(targets, accuracy, chosen, is_text, run.settings.optimizer)
    facts = {
        **results.facts,
        "run": str(run.folder),
        "settings": run.settings.to_dict(),
        "attacks": [attack.title for attack in chosen],
        "source": run.source.to_dict(),
    }
    if run.settings.optimizer != "sgd":
        skipped.append(
            f"attacks made for {run.settings.optimizer}: its updates are read as steps of SGD, "
            "and an attack that inverts the optimizer may recover more"
        )
    return replace(results, facts=facts, unchecked=tuple(skipped))


def practise_like(
    attacker: Attacker,
    model: torch.nn.Module,
    update: RecordedUpdate,
    settings: Settings,
    clients: int = 1,
) -> Attacker:
    """Return an attacker that rehearses a round, as its first recorded update was made."""
    own, _ = split_own_images(attacker.own)

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

    @cache
    def rehearsals() -> tuple[Rehearsal, ...]:
        return tuple(make(REHEARSALS, 500))

    return replace(
        attacker,
        seed=update.round,
        rehearse=lambda attack: rehearsals() if attack.learn is not None else (),
        practise=lambda count: make(count, 700),
        fitted={},
    )


def attack_recorded(
    model: torch.nn.Module,
    recorded: RecordedUpdate,
    truth: Truth,
    attacker: Attacker,
    attacks: Sequence[Attack],
    steps: Steps | None = None,
) -> Row:
    """Run all attacks on one recorded update, and score them by the original examples.

    Args:
        model: The model of both sides; its weights are overwritten.
        recorded: The recorded update.
        truth: The examples of the client.
        attacker: What the server has.
        attacks: The attacks.
        steps: The steps of the audit.
    """

    @cache
    def sent() -> list[AttackedUpdate]:
        load_state(model, recorded.state)
        model.eval()
        update, inner = to_update(recorded), unwrap(model)
        if "input_ids" not in truth.original:
            return [AttackedUpdate(model, update, truth)]
        if inner is not model:  # without the parameters that a puzzle adds
            own = {n.removeprefix("model."): t for n, t in update.tensors.items() if n != "unknown"}
            update = replace(update, tensors=own)
        length = max(map(len, token_lists(truth, causal=False)))
        read = {n: t[:, :length] if t.ndim > 1 else t for n, t in truth.read.items()}
        return [AttackedUpdate(inner, update, replace(truth, read=read))]

    def run(attack: Attack, within: Progress) -> Measured:
        return attack_updates(attack, sent(), attacker, within)

    label = f"round {recorded.round + 1}, client {recorded.client}"
    row = attack_row(steps or Steps(), label, label, attacks, run)
    return replace(row, samples=len(truth.labels), floor=score_guess(truth, attacker))


def score_guess(truth: Truth, attacker: Attacker) -> Scores:
    """Score the mean image of the attacker, or its own texts, against the truth."""
    images = attacker.images()
    if images is not None:
        originals = to_pixels(attacker, truth.original["pixel_values"])
        mean = to_pixels(attacker, images).mean(0, keepdim=True)
        return score_reconstructions(mean.expand_as(originals), originals, None)
    texts = token_lists(truth, attacker.own.causal)
    return score_texts(attacker.texts(len(texts)), texts)


def to_update(record: RecordedUpdate) -> Update:
    """Return a recorded update as an attack gets it."""
    return Update(record.tensors, "change", record.steps, record.lr)


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
