"""A run from its source: model and data by name in, a folder with the trained model and its history
out.
"""

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
from regauge.data.tasks import Examples, read_examples
from regauge.federated import fusion, state_store
from regauge.federated.client import prepare_model, unwrap
from regauge.federated.defences import DELTA, client_epsilon, frozen_names, read_defences
from regauge.federated.local_state import LocalState, withheld_names
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import make_recorder
from regauge.federated.rounds import Engine, InProcess, completed_rounds, run
from regauge.federated.settings import FederatedError, Settings
from regauge.federated.state_store import Round, RunState
from regauge.federated.states import State, digest_of, layout_of, load_state, state_of
from regauge.federated.validation import Limits
from regauge.jigsaw import MaskedJigsaw
from regauge.models.load import load_model, quiet
from regauge.results.findings import Figure, Results, Table, to_json
from regauge.split.client.train import measure

CLIENT_ACCURACY = "accuracy of clients"  # the mean of theirs, where they have parts of their own
LOCAL_FOLDER = "own"  # the folder in a run's
HELD_OUT = 0.1  # of the data, where no test data are given: no client has it
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
    """Where model and data come from, and how the model reads the data. Every side of a run reads
    its own: only weights travel.
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
        return asdict(self)

    def build_model(self, settings: Settings) -> torch.nn.Module:
        """The model as both sides train it; with `fresh`, its weights are drawn from the seed."""
        model = load_model(self.model, "float32")
        if self.fresh:
            config = getattr(model, "config", None)
            if config is None:
                raise FederatedError(
                    f"{type(model).__name__} has no config to be made anew from",
                    hint="leave out --fresh",
                )
            with torch.random.fork_rng():
                torch.manual_seed(settings.seed)
                model = type(model)(config)
        return prepare_model(model, settings).to(self.device)

    def load_examples(self, model: torch.nn.Module) -> tuple[Examples, Examples, dict[str, Any]]:
        """What clients share, what the server measures on, and the task of both: how the model
        reads them.
        """
        whole, task = self._read_examples(model, self.data, self.split)
        if self.test is not None:
            return whole, self._read_examples(model, self.test, self.test_split)[0], task
        order = np.random.default_rng(109).permutation(len(whole))
        held = max(1, round(HELD_OUT * len(whole)))
        return whole.only(np.sort(order[held:])), whole.only(np.sort(order[:held])), task

    def _read_examples(
        self, model: torch.nn.Module, uri: str, split: str
    ) -> tuple[Examples, dict[str, Any]]:
        checkpoint = open_checkpoint(self.model)
        beside = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        how: dict[str, Any] = {
            "beside": beside,
            "tokenizer": self.tokenizer,
            "length": self.length,
            "mean": self.mean,
            "std": self.std,
        }
        return read_examples(unwrap(model), open_data(uri, fields=self.fields, split=split), **how)


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that is done: its state and history, and what is said of it."""

    run_state: RunState
    results: Results
    lines: tuple[str, ...]


MakeEngine = Callable[[str], Engine]  # from the run's name


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
    """Train on an engine, or in this process. A folder that holds this run goes on where it stood;
    with `spy` it keeps what the server sees.
    """
    client_epsilon(
        read_defences(settings.defences), 0
    )  # what was spent is told at the end: the accountant is asked for now
    model = source.build_model(settings)
    shared, test, _ = source.load_examples(model)
    test, inputs = fusion.split_test(test) if settings.independent else (test, ())
    own = LocalState(folder / LOCAL_FOLDER)
    here = (
        None if engine else InProcess(model, partition_examples(shared, settings), settings, own)
    )  # what cannot be is refused before a folder is made
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
        chosen = here or cast(MakeEngine, engine)(name)
        watch = make_recorder(folder, settings) if record else None
        judge = make_measure(model, test, local_state=own)
        fuse = partial(fusion.average_weights, model, inputs=inputs)
        kept = run(
            chosen,
            state,
            settings,
            folder=folder,
            measure=judge,
            on_round=on_round,
            recorder=watch,
            fuse=fuse,
            limits=limits,
        )
        return finish(source, settings, folder, model, kept)


def server_limits(model: torch.nn.Module, shared: Examples, settings: Settings) -> Limits:
    """Return what clients may claim and send: as many examples as the largest part of the server's
    data, and tensors that the run neither freezes nor withholds. A secure sum has all tensors, zero
    where a client sends none.
    """
    if settings.max_examples:
        largest = settings.max_examples
    elif settings.partition == "iid":
        largest = math.ceil(len(shared) / settings.clients)
    else:
        largest = max(len(part) for part in partition_examples(shared, settings))
    defences = read_defences(settings.defences)
    closed = frozen_names(model, defences) | withheld_names(model, defences)
    return Limits(
        max(1, largest), None if settings.secure or not closed else state_of(model).keys() - closed
    )


def make_measure(
    model: torch.nn.Module, test: Examples, batch: int = 256, local_state: LocalState | None = None
) -> Any:
    """A function of a state: its loss and accuracy on the server's own examples. Where clients of
    this machine have parts of their `own`, their mean accuracy with them too: the server's part
    beside theirs has not been trained.
    """

    def measured(state: State) -> dict[str, float]:
        load_state(model, state)
        found = measure(model, test, batch)
        theirs = []
        for client in local_state.clients() if local_state else ():
            load_state(model, {**state, **local_state.latest(client)})  # type: ignore[union-attr]
            theirs.append(measure(model, test, batch).get("accuracy"))
        known = [a for a in theirs if a is not None]
        return found | ({CLIENT_ACCURACY: sum(known) / len(known)} if known else {})

    return measured


def finish(
    source: Source, settings: Settings, folder: Path, model: torch.nn.Module, kept: RunState
) -> RunResult:
    """Write the trained model and the results beside the run."""
    load_state(model, kept.state)
    save_model(model, folder / "model", Path(source.model))
    results = build_results(settings, kept, source)
    write_bytes(folder / "results.json", to_json(results).encode())
    last = completed_rounds(kept.history)[-1]
    measures = ", ".join(
        f"{name} {value:.4f}" for name, value in last.measures.items() if name != "examples"
    )
    voids = sum(r.void for r in kept.history)
    lost = sum(len(r.absent) for r in kept.history)
    rejected = count_rejected(kept)
    first = (
        f"{folder / 'model'}: {len(completed_rounds(kept.history))} rounds of {settings.clients} "
        f"clients, {settings.strategy}; {measures}"
    )
    spent = max_epsilon(settings, kept)
    if spent is not None:
        first += f"; epsilon {spent:.2f} at delta 1e-5 for a client that was in all of its rounds"
    more = (
        [
            (
                f"{lost} contributions were absent or refused, {voids} rounds were void: "
                f"{folder / 'results.json'} says which"
            )
        ]
        if lost or voids
        else []
    )
    reasons = [
        f"client {c}: " + ", ".join(f"{reason} {n}" for reason, n in by.items())
        for c, by in rejected.items()
    ]
    more += [f"rejected contributions: {'; '.join(reasons)}"] if reasons else []
    return RunResult(kept, results, (first, *more))


def count_rejected(kept: RunState) -> dict[str, dict[str, int]]:
    """Count the rejected contributions of a run by client and reason."""
    counts = Counter(
        (client, reason) for r in kept.history for client, reason in r.rejected.items()
    )
    clients = sorted({client for client, _ in counts}, key=lambda c: (len(c), c))
    return {
        c: {reason: n for (client, reason), n in sorted(counts.items()) if client == c}
        for c in clients
    }


def max_epsilon(settings: Settings, kept: RunState) -> float | None:
    """What the client that contributed most often has spent."""
    counts = Counter(c for r in completed_rounds(kept.history) for c in r.contributed)
    return client_epsilon(read_defences(settings.defences), max(counts.values(), default=0))


def save_model(model: torch.nn.Module, out: Path, source: Path) -> None:
    """Write the plain model, in place of an older one of this run. What puzzles have learned lies
    beside it, as `regauge jigsaw train` writes it.
    """
    from safetensors.torch import save_file

    inner = unwrap(model)
    copied = existing_files(source, COPIED_FILES)
    for left in out.parent.glob(
        f".{out.name}.partial-*"
    ):  # by a kill: the run's folder is held by one process
        shutil.rmtree(left, ignore_errors=True)
    with staged_folder(out, model_mode(source, copied), replace=True) as partial_:
        if isinstance(model, MaskedJigsaw):
            from regauge.jigsaw.folder import write_wrapped

            write_wrapped(model, partial_)
        elif hasattr(inner, "save_pretrained"):
            with quiet():
                inner.save_pretrained(partial_)  # type: ignore[operator]
        else:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in inner.state_dict().items()},
                partial_ / "model.safetensors",
            )
        for path in copied:
            if not (partial_ / path.name).exists():
                copy_file(path, partial_ / path.name, OWNER)


def build_results(settings: Settings, kept: RunState, source: Source) -> Results:
    """Accuracy over rounds, and who was absent."""
    rows: list[tuple[Any, ...]] = [
        (
            r.number + 1,
            len(r.contributed),
            len(r.absent),
            r.loss,
            r.measures.get("accuracy"),
            r.seconds,
            "; ".join(f"{c}: {w}" for c, w in r.absent.items()),
        )
        for r in kept.history
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
    good = completed_rounds(kept.history)
    curves = {"accuracy": [r.measures.get("accuracy") for r in good]}
    if any(CLIENT_ACCURACY in r.measures for r in good):
        columns.append(CLIENT_ACCURACY)
        rows = [
            (*row, r.measures.get(CLIENT_ACCURACY))
            for row, r in zip(rows, kept.history, strict=True)
        ]
        curves[CLIENT_ACCURACY] = [r.measures.get(CLIENT_ACCURACY) for r in good]
    table = Table("Rounds", tuple(columns), tuple(rows))
    lines = {
        "x": [r.number + 1 for r in good],
        "y": curves,
        "xlabel": "round",
        "ylabel": "accuracy",
    }
    figure = Figure("Accuracy over rounds", "lines", {**lines, "log": False})
    facts: dict[str, Any] = {
        "settings": settings.to_dict(),
        "source": json.loads(json.dumps(source.to_dict())),
        "rounds": len(good),
    }
    rejected = count_rejected(kept)
    facts["rejected"] = rejected
    counts = tuple(
        (client, reason, n) for client, by in rejected.items() for reason, n in by.items()
    )
    tables = (
        (table, Table("Rejected contributions", ("client", "reason", "rounds"), counts))
        if counts
        else (table,)
    )
    spent = max_epsilon(settings, kept)
    facts |= {} if spent is None else {"epsilon": spent, "delta": DELTA}
    return Results("A federated run", (), tables, (figure,) if good else (), facts)
