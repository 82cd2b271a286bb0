"""A complete run: from the names of model and data to a folder with the trained model."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from regauge.checkpoints.files import (
    OWNER,
    copy_file,
    make_folder,
    staged_folder,
    wrap_write_errors,
    write_bytes,
)
from regauge.checkpoints.plan import existing_files, model_mode
from regauge.checkpoints.reader import open_checkpoint
from regauge.data.datasets import open_data
from regauge.data.evaluate import evaluate_model
from regauge.data.tasks import Examples, read_examples
from regauge.errors import FederatedError
from regauge.federated import fusion, state_store
from regauge.federated.client import prepare_model, unwrap
from regauge.federated.defences import DELTA, client_epsilon, frozen_names, read_defences
from regauge.federated.local_state import LocalState, withheld_names
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import make_recorder
from regauge.federated.rounds import Engine, InProcess, completed_rounds, run
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round, RunState
from regauge.federated.states import State, digest_of, layout_of, load_state, state_of
from regauge.federated.validation import Limits
from regauge.jigsaw import MaskedJigsaw
from regauge.models.load import load_model, quiet
from regauge.results.findings import Figure, Results, Table, to_json

CLIENT_ACCURACY = "accuracy of clients"  # the mean over clients with withheld tensors
LOCAL_FOLDER = "own"  # in the folder of a run
HELD_OUT = 0.1  # share of the data that is held out as test data without --test
COPIED_FILES = (
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class Source:
    """The model and data of one side of a run; only weights are exchanged.

    Attributes:
        model: The path or hub id of the model.
        data: The URI of the training data.
        split: Its split.
        fields: Names of its fields.
        tokenizer: The tokenizer of texts; None: the model's.
        length: The maximum number of tokens.
        mean: Channel means of the normalization of images.
        std: Channel deviations of the normalization of images.
        test: The URI of the test data; None: a held-out share of the data.
        test_split: Its split.
        fresh: Whether the weights are initialized from the seed.
        device: The torch device.
    """

    model: str
    data: str
    split: str = "train"
    fields: Mapping[str, str] | None = None
    tokenizer: str | None = None
    length: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    test: str | None = None
    test_split: str = "test"
    fresh: bool = False
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Return the source for JSON."""
        return asdict(self)

    def build_model(self, settings: Settings) -> torch.nn.Module:
        """Return the model that both sides train; with `fresh`, initialized from the seed."""
        model = load_model(self.model, "float32")
        if self.fresh:
            config = getattr(model, "config", None)
            if config is None:
                raise FederatedError(
                    f"a model must have a config to be initialized, got {type(model).__name__}",
                    hint="leave out --fresh",
                )
            with torch.random.fork_rng():
                torch.manual_seed(settings.seed)
                model = type(model)(config)
        return prepare_model(model, settings).to(self.device)

    def load_examples(self, model: torch.nn.Module) -> tuple[Examples, Examples, dict[str, Any]]:
        """Return the examples of all clients, the test examples of the server, and the task."""
        examples, task = self._read_examples(model, self.data, self.split)
        if self.test is not None:
            return examples, self._read_examples(model, self.test, self.test_split)[0], task
        order = np.random.default_rng(109).permutation(len(examples))
        count = max(1, round(HELD_OUT * len(examples)))
        return examples.only(np.sort(order[count:])), examples.only(np.sort(order[:count])), task

    def _read_examples(
        self, model: torch.nn.Module, uri: str, split: str
    ) -> tuple[Examples, dict[str, Any]]:
        checkpoint = open_checkpoint(self.model)
        folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        options: dict[str, Any] = {
            "beside": folder,
            "tokenizer": self.tokenizer,
            "length": self.length,
            "mean": self.mean,
            "std": self.std,
        }
        return read_examples(
            unwrap(model), open_data(uri, fields=self.fields, split=split), **options
        )


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run: its state and history, the results, and a summary in lines of text."""

    run_state: RunState
    results: Results
    lines: tuple[str, ...]


MakeEngine = Callable[[str], Engine]  # from the name of the run


def run_federated(
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    engine: MakeEngine | None = None,
    on_round: Callable[[Round], None] | None = None,
    record: bool = False,
    about: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run federated learning, and write the trained model and the results.

    Args:
        source: The model and data.
        settings: The settings of the run.
        folder: The folder of the run; an interrupted run is resumed.
        engine: Make the engine, from the name of the run; None: clients in this process.
        on_round: Callback after each round.
        record: Whether to record what the server receives (`recorder`).
        about: Further facts for the description of the run.
    """
    # Fail now if the accountant of the final report is not installed.
    client_epsilon(read_defences(settings.defences), 0)
    model = source.build_model(settings)
    shared, test, _ = source.load_examples(model)
    test, inputs = fusion.split_test(test) if settings.independent else (test, ())
    local_state = LocalState(folder / LOCAL_FOLDER)
    # Raises on bad settings, before a folder is created.
    in_process = (
        None
        if engine
        else InProcess(model, partition_examples(shared, settings), settings, local_state)
    )
    limits, state = server_limits(model, shared, settings), state_of(model)
    with wrap_write_errors(folder):
        make_folder(folder, model_mode(Path(source.model)))
    with state_store.hold_folder(folder):
        name = state_store.begin(
            folder,
            settings,
            digest_of(layout_of(state)),
            {**(about or {}), "source": source.to_dict()},
        )
        selected = in_process or cast(MakeEngine, engine)(name)
        recorder = make_recorder(folder, settings) if record else None
        evaluate = make_measure(model, test, local_state=local_state)
        fuse = partial(fusion.average_weights, model, inputs=inputs)
        run_state = run(
            selected,
            state,
            settings,
            folder=folder,
            measure=evaluate,
            on_round=on_round,
            recorder=recorder,
            fuse=fuse,
            limits=limits,
        )
        return finish(source, settings, folder, model, run_state)


def server_limits(model: torch.nn.Module, shared: Examples, settings: Settings) -> Limits:
    """Return the bounds of what clients may claim and send.

    These are the number of examples of the largest part of the server's data, and the tensors that
    the run neither freezes nor withholds. A secure sum has all tensors, with zeros for missing
    ones.
    """
    if settings.max_examples:
        largest = settings.max_examples
    elif settings.partition == "iid":
        largest = math.ceil(len(shared) / settings.clients)
    else:
        largest = max(len(part) for part in partition_examples(shared, settings))
    defences = read_defences(settings.defences)
    withheld = frozen_names(model, defences) | withheld_names(model, defences)
    return Limits(
        max(1, largest),
        None if settings.secure or not withheld else state_of(model).keys() - withheld,
    )


def make_measure(
    model: torch.nn.Module, test: Examples, batch: int = 256, local_state: LocalState | None = None
) -> Any:
    """Return a function that evaluates a state: loss and accuracy on the server's examples.

    If clients of this machine have withheld tensors, their mean accuracy is included: the server's
    copies of those tensors are not trained.
    """

    def evaluate(state: State) -> dict[str, float]:
        load_state(model, state)
        measures = evaluate_model(model, test, batch)
        accuracies = []
        for client in local_state.clients() if local_state else ():
            load_state(model, {**state, **local_state.latest(client)})  # type: ignore[union-attr]
            accuracies.append(evaluate_model(model, test, batch).get("accuracy"))
        known = [a for a in accuracies if a is not None]
        return measures | ({CLIENT_ACCURACY: sum(known) / len(known)} if known else {})

    return evaluate


def finish(
    source: Source, settings: Settings, folder: Path, model: torch.nn.Module, run_state: RunState
) -> RunResult:
    """Write the trained model and the results into the folder of the run."""
    load_state(model, run_state.state)
    save_model(model, folder / "model", Path(source.model))
    results = build_results(settings, run_state, source)
    write_bytes(folder / "results.json", to_json(results).encode())
    completed = completed_rounds(run_state.history)
    measures = ", ".join(
        f"{name} {value:.4f}"
        for name, value in completed[-1].measures.items()
        if name != "examples"
    )
    voids = sum(r.void for r in run_state.history)
    lost = sum(len(r.absent) for r in run_state.history)
    rejected = count_rejected(run_state)
    summary = (
        f"{folder / 'model'}: {len(completed)} rounds of {settings.clients} clients, "
        f"{settings.strategy}; {measures}"
    )
    epsilon = max_epsilon(settings, run_state)
    if epsilon is not None:
        summary += f"; epsilon {epsilon:.2f} at delta 1e-5 for the client with the most rounds"
    lines = (
        [
            (
                f"{lost} contributions were absent or rejected, {voids} rounds were void: see "
                f"{folder / 'results.json'}"
            )
        ]
        if lost or voids
        else []
    )
    reasons = [
        f"client {client}: " + ", ".join(f"{reason} {count}" for reason, count in counts.items())
        for client, counts in rejected.items()
    ]
    lines += [f"rejected contributions: {'; '.join(reasons)}"] if reasons else []
    return RunResult(run_state, results, (summary, *lines))


def count_rejected(run_state: RunState) -> dict[str, dict[str, int]]:
    """Count the rejected contributions of a run by client and reason."""
    counts = Counter(
        (client, reason) for r in run_state.history for client, reason in r.rejected.items()
    )
    clients = sorted({client for client, _ in counts}, key=lambda client: (len(client), client))
    return {
        client: {
            reason: count for (other, reason), count in sorted(counts.items()) if other == client
        }
        for client in clients
    }


def max_epsilon(settings: Settings, run_state: RunState) -> float | None:
    """Return the privacy loss of the client with the most contributions."""
    counts = Counter(c for r in completed_rounds(run_state.history) for c in r.contributed)
    return client_epsilon(read_defences(settings.defences), max(counts.values(), default=0))


def save_model(model: torch.nn.Module, out: Path, source: Path) -> None:
    """Write the model without wrapper, replacing an older one of this run.

    Parameters of puzzles are written as by `regauge jigsaw train`.
    """
    from safetensors.torch import save_file

    inner = unwrap(model)
    copied = existing_files(source, COPIED_FILES)
    # Partial folders are left by killed processes: the folder of the run is locked.
    for partial_folder in out.parent.glob(f".{out.name}.partial-*"):
        shutil.rmtree(partial_folder, ignore_errors=True)
    with staged_folder(out, model_mode(source, copied), replace=True) as staged:
        if isinstance(model, MaskedJigsaw):
            from regauge.jigsaw.folder import write_wrapped

            write_wrapped(model, staged)
        elif hasattr(inner, "save_pretrained"):
            with quiet():
                inner.save_pretrained(staged)  # type: ignore[operator]
        else:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in inner.state_dict().items()},
                staged / "model.safetensors",
            )
        for path in copied:
            if not (staged / path.name).exists():
                copy_file(path, staged / path.name, OWNER)


def build_results(settings: Settings, run_state: RunState, source: Source) -> Results:
    """Return accuracy over rounds, absences and rejections."""
    rows: list[tuple[Any, ...]] = [
        (
            r.number + 1,
            len(r.contributed),
            len(r.absent),
            r.loss,
            r.measures.get("accuracy"),
            r.seconds,
            "; ".join(f"{client}: {reason}" for client, reason in r.absent.items()),
        )
        for r in run_state.history
    ]
    columns = [
        "round",
        "contributed",
        "absent",
        "loss of clients",
        "accuracy",
        "seconds",
        "why absent",
    ]
    completed = completed_rounds(run_state.history)
    curves = {"accuracy": [r.measures.get("accuracy") for r in completed]}
    if any(CLIENT_ACCURACY in r.measures for r in completed):
        columns.append(CLIENT_ACCURACY)
        rows = [
            (*row, r.measures.get(CLIENT_ACCURACY))
            for row, r in zip(rows, run_state.history, strict=True)
        ]
        curves[CLIENT_ACCURACY] = [r.measures.get(CLIENT_ACCURACY) for r in completed]
    table = Table("Rounds", tuple(columns), tuple(rows))
    lines = {
        "x": [r.number + 1 for r in completed],
        "y": curves,
        "xlabel": "round",
        "ylabel": "accuracy",
    }
    figure = Figure("Accuracy over rounds", "lines", {**lines, "log": False})
    facts: dict[str, Any] = {
        "settings": settings.to_dict(),
        "source": json.loads(json.dumps(source.to_dict())),
        "rounds": len(completed),
    }
    rejected = count_rejected(run_state)
    facts["rejected"] = rejected
    counts = tuple(
        (client, reason, count)
        for client, by_reason in rejected.items()
        for reason, count in by_reason.items()
    )
    tables = (
        (table, Table("Rejected contributions", ("client", "reason", "rounds"), counts))
        if counts
        else (table,)
    )
    epsilon = max_epsilon(settings, run_state)
    facts |= {} if epsilon is None else {"epsilon": epsilon, "delta": DELTA}
    return Results("A federated run", (), tables, (figure,) if completed else (), facts)
