"""A complete run: from the names of model and data to a folder with the trained model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from regauge.checkpoints.files import make_folder, wrap_write_errors
from regauge.checkpoints.plan import model_mode
from regauge.checkpoints.reader import open_checkpoint
from regauge.data.datasets import open_data
from regauge.data.evaluate import evaluate_model, score_model
from regauge.data.tasks import Examples, read_examples
from regauge.evaluation.report import Evaluation
from regauge.federated import fusion, state_store
from regauge.federated.client import prepare_model, unwrap
from regauge.federated.defences import client_epsilon, frozen_names, read_defences
from regauge.federated.local_state import LocalState, withheld_names
from regauge.federated.outputs import CLIENT_ACCURACY, FederatedRun, finish
from regauge.federated.partitions import partition_examples
from regauge.federated.recorder import make_recorder
from regauge.federated.rounds import Engine, InProcess, run_rounds
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round
from regauge.federated.states import State, digest_of, layout_of, load_state, state_of
from regauge.federated.validation import Limits
from regauge.models.load import load_model, reinitialize

LOCAL_FOLDER = "own"  # in the folder of a run
IN_MEMORY = ("module", "examples", "test_examples")  # fields of a source
HELD_OUT = 0.1  # share of the data that is held out as test data without --test


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
        module: The model, if it is in memory; `model` is then its name.
        examples: The training data, if they are in memory; `data` is then their description.
        test_examples: The test data, if they are in memory.
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
    module: torch.nn.Module | None = field(default=None, compare=False)
    examples: Examples | None = field(default=None, compare=False)
    test_examples: Examples | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the source for JSON, without what is in memory."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in IN_MEMORY}

    @property
    def in_memory(self) -> bool:
        """Whether the model or data are objects of this process."""
        return any(getattr(self, name) is not None for name in IN_MEMORY)

    @property
    def path(self) -> Path | None:
        """The path of the model; None for a model in memory."""
        return Path(self.model) if self.module is None else None

    def build_model(self, settings: Settings) -> torch.nn.Module:
        """Return the model that both sides train; with `fresh`, initialized from the seed."""
        model = (
            load_model(self.model, "float32")
            if self.module is None
            else copy.deepcopy(self.module).float().eval()
        )
        if self.fresh:
            model = reinitialize(model, settings.seed)
        return prepare_model(model, settings).to(self.device)

    def load_examples(self, model: torch.nn.Module) -> tuple[Examples, Examples, dict[str, Any]]:
        """Return the examples of all clients, the test examples of the server, and the task."""
        examples, task = (
            self._read_examples(model, self.data, self.split)
            if self.examples is None
            else (self.examples, {})
        )
        if self.test_examples is not None:
            return examples, self.test_examples, task
        if self.test is not None:
            return examples, self._read_examples(model, self.test, self.test_split)[0], task
        order = np.random.default_rng(109).permutation(len(examples))
        count = max(1, round(HELD_OUT * len(examples)))
        return examples.only(np.sort(order[count:])), examples.only(np.sort(order[:count])), task

    def _read_examples(
        self, model: torch.nn.Module, uri: str, split: str
    ) -> tuple[Examples, dict[str, Any]]:
        folder = None
        if self.module is None:
            checkpoint = open_checkpoint(self.model)
            folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        return read_examples(
            unwrap(model),
            open_data(uri, fields=self.fields, split=split),
            beside=folder,
            tokenizer=self.tokenizer,
            length=self.length,
            mean=self.mean,
            std=self.std,
        )


MakeEngine = Callable[[str], Engine]  # from the name of the run


def run_federated(
    source: Source,
    settings: Settings,
    folder: Path | None,
    *,
    engine: MakeEngine | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_start: Callable[[Mapping[str, float]], None] | None = None,
    record: bool = False,
    about: Mapping[str, Any] | None = None,
) -> FederatedRun:
    """Run federated learning, and write the trained model and the results.

    Args:
        source: The model and data.
        settings: The settings of the run.
        folder: The folder of the run, an interrupted run is resumed; None: nothing is saved.
        engine: Make the engine, from the name of the run; None: clients in this process.
        on_round: Callback after each round.
        on_start: Callback with the evaluation of the model before the first round.
        record: Whether to record what the server receives (`recorder`).
        about: Further facts for the description of the run.
    """
    # Fail now if the accountant of the final report is not installed.
    client_epsilon(read_defences(settings.defences), 0)
    model = source.build_model(settings)
    shared, test, _ = source.load_examples(model)
    test, inputs = fusion.split_test(test) if settings.independent else (test, ())
    local_state = LocalState(None if folder is None else folder / LOCAL_FOLDER)
    # Raises on bad settings, before a folder is created.
    in_process = (
        None
        if engine
        else InProcess(model, partition_examples(shared, settings), settings, local_state)
    )
    limits, state = server_limits(model, shared, settings), state_of(model)
    start = score_model(model, test, test_batch(test))
    if on_start is not None:
        on_start(start.to_dict())

    def run_engine(selected: Engine) -> FederatedRun:
        run_state = run_rounds(
            selected,
            state,
            settings,
            folder=folder,
            measure=make_measure(model, test, local_state=local_state),
            on_round=on_round,
            recorder=make_recorder(folder, settings) if record and folder is not None else None,
            fuse=partial(fusion.average_weights, model, inputs=inputs),
            limits=limits,
        )
        load_state(model, run_state.state)
        evaluation = Evaluation({"start": start, "end": score_model(model, test, test_batch(test))})
        return finish(source, settings, folder, model, run_state, evaluation)

    if folder is None:
        return run_engine(in_process or cast(MakeEngine, engine)(""))
    with wrap_write_errors(folder):
        make_folder(folder, model_mode(source.path))
    with state_store.hold_folder(folder):
        facts = {**(about or {}), "source": source.to_dict()}
        name = state_store.begin(folder, settings, digest_of(layout_of(state)), facts)
        return run_engine(in_process or cast(MakeEngine, engine)(name))


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


def test_batch(test: Examples) -> int:
    """Return the batch size of an evaluation: logits of tokens take much memory."""
    return 16 if test.causal or test.tokens else 256


def make_measure(
    model: torch.nn.Module, test: Examples, local_state: LocalState | None = None
) -> Any:
    """Return a function that evaluates a state: loss and accuracy on the server's examples.

    If clients of this machine have withheld tensors, their mean accuracy is included: the server's
    copies of those tensors are not trained.
    """

    def evaluate(state: State) -> dict[str, float]:
        load_state(model, state)
        batch = test_batch(test)
        measures = evaluate_model(model, test, batch)
        accuracies = []
        for client in local_state.clients() if local_state else ():
            load_state(model, {**state, **local_state.latest(client)})  # type: ignore[union-attr]
            accuracies.append(evaluate_model(model, test, batch).get("accuracy"))
        known = [a for a in accuracies if a is not None]
        return measures | ({CLIENT_ACCURACY: sum(known) / len(known)} if known else {})

    return evaluate
