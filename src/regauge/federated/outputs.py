"""The outcome of a run: the trained model, the history, and their report."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regauge.checkpoints.files import OWNER, copy_file, staged_folder, write_bytes
from regauge.checkpoints.plan import check_new, existing_files, model_mode
from regauge.errors import FederatedError, QualityWarning
from regauge.evaluation.report import Evaluation, is_worse
from regauge.federated.aggregation import Memory
from regauge.federated.client import unwrap
from regauge.federated.defences import DELTA, client_epsilon, read_defences
from regauge.federated.rounds import completed_rounds, describe_measures
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round, RunState
from regauge.jigsaw import MaskedJigsaw
from regauge.models.load import quiet
from regauge.results.findings import Claim, Figure, Finding, Results, Table
from regauge.results.views import ResultView

if TYPE_CHECKING:
    from regauge.federated.runs import Source

CLIENT_ACCURACY = "accuracy of clients"  # the mean over clients with withheld tensors
MODEL_FOLDER = "model"  # in the folder of a run
COPIED_FILES = (
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
)


@dataclass(frozen=True, eq=False, repr=False)
class FederatedRun(ResultView):
    """A finished run: the trained model, its state and history, and their report.

    Attributes:
        source: The model and data.
        settings: The settings of the run.
        folder: The folder of the run; None: nothing was saved.
        run_state: The state, the memory of the strategy, and the history.
        trained: The trained model, in its wrapper for puzzles if the settings have them; None if
            the folder is on another machine.
        evaluation: The scores of the model before the first round ("start") and after the last
            ("end") on the test data; None if the folder is on another machine.

    Example:
        >>> trained = regauge.federated.run(vit, images, clients=2, rounds=1, test=images)
        >>> trained.history[-1].contributed
        (0, 1)
    """

    source: Source
    settings: Settings
    folder: Path | None
    run_state: RunState
    trained: torch.nn.Module | None
    evaluation: Evaluation | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The trained model, in evaluation mode.

        Raises:
            FederatedError: The run was a deployment whose folder is on another machine.
        """
        return unwrap(self._trained).eval()

    @property
    def history(self) -> tuple[Round, ...]:
        """All rounds, with those that were void."""
        return self.run_state.history

    @property
    def epsilon(self) -> float | None:
        """The privacy loss of the client with the most contributions; None without `private`."""
        counts = Counter(c for r in completed_rounds(self.history) for c in r.contributed)
        defences = read_defences(self.settings.defences)
        return client_epsilon(defences, max(counts.values(), default=0))

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """The numbers of rejected contributions by client and reason."""
        counts = Counter(pair for r in self.history for pair in r.rejected.items())
        nested: dict[str, dict[str, int]] = {}
        for client, reason in sorted(counts, key=lambda pair: (len(pair[0]), *pair)):
            nested.setdefault(client, {})[reason] = counts[client, reason]
        return nested

    @property
    def is_worse(self) -> bool:
        """Whether the model is significantly worse on the test data than it was at the start.

        False if clients withhold tensors: the server's copies of those are not trained.
        """
        return (
            self.evaluation is not None
            and not self._has_client_models
            and self.evaluation.is_worse("end", "start")
        )

    @property
    def _has_client_models(self) -> bool:
        return any(CLIENT_ACCURACY in r.measures for r in self.history)

    @cached_property
    def results(self) -> Results:
        """Accuracy over rounds, absences and rejections."""
        return build_results(self)

    @property
    def lines(self) -> tuple[str, ...]:
        """The summary, in lines of text."""
        if self.trained is None:
            return (f"{self.folder}: on the SuperLink's machine",)
        completed = completed_rounds(self.history)
        last = completed[-1].measures if completed else {}
        where = "the model" if self.folder is None else self.folder / MODEL_FOLDER
        summary = (
            f"{where}: {len(completed)} rounds of {self.settings.clients} clients, "
            f"{self.settings.strategy}; {describe_measures(last)}"
        )
        if self.epsilon is not None:
            summary += (
                f"; epsilon {self.epsilon:.2f} at delta 1e-5 for the client with the most rounds"
            )
        lines = [summary]
        voids, lost = sum(r.void for r in self.history), sum(len(r.absent) for r in self.history)
        if lost or voids:
            table = "results.tables" if self.folder is None else self.folder / "results.json"
            text = f"{lost} contributions were absent or rejected, {voids} rounds were void"
            lines.append(f"{text}: see {table}")
        reasons = [
            f"client {client}: "
            + ", ".join(f"{reason} {count}" for reason, count in counts.items())
            for client, counts in self.rejected.items()
        ]
        lines += [f"rejected contributions: {'; '.join(reasons)}"] if reasons else []
        return tuple(lines)

    def save(self, out: str | Path) -> None:
        """Write the trained model to a new folder.

        Raises:
            CheckpointError: The folder exists or cannot be written.
        """
        check_new(Path(out))
        save_model(self._trained, Path(out), self.source.path)

    @property
    def _trained(self) -> torch.nn.Module:
        if self.trained is None:
            raise FederatedError(
                f"the model of the run is on the SuperLink's machine, in {self.folder}",
                hint=f"copy its folder {MODEL_FOLDER} to this machine",
            )
        return self.trained

    def __str__(self) -> str:
        lines = list(self.lines)
        if self.evaluation is not None:
            lines += ["", str(self.evaluation)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<federated run: {self.lines[0]}>"


def finish(
    source: Source,
    settings: Settings,
    folder: Path | None,
    model: torch.nn.Module,
    run_state: RunState,
    evaluation: Evaluation,
) -> FederatedRun:
    """Return a finished run; write the trained model and the results into its folder.

    Args:
        source: The model and data.
        settings: The settings of the run.
        folder: The folder of the run; None: nothing is written.
        model: The model, in its last state.
        run_state: The state and the history.
        evaluation: The scores of the model at the start and at the end.
    """
    named = replace(evaluation, facts={"data": source.test or f"{source.data} (held out)"})
    finished = FederatedRun(source, settings, folder, run_state, model, named)
    if finished.is_worse:
        warnings.warn(
            f"the model is worse than before training: {named.describe('start')}; "
            f"{named.describe('end')}. Lower the learning rate ({settings.learning_rate:g}), or "
            "check that the data belong to the model",
            QualityWarning,
            stacklevel=2,
        )
    if folder is not None:
        save_model(model, folder / MODEL_FOLDER, source.path)
        write_bytes(folder / "results.json", finished.to_json().encode())
    return finished


def remote_run(source: Source, settings: Settings, folder: Path) -> FederatedRun:
    """Return a run whose folder is on another machine."""
    return FederatedRun(source, settings, folder, RunState({}, Memory()), None)


def save_model(model: torch.nn.Module, out: Path, source: Path | None) -> None:
    """Write the model without wrapper, replacing an older one of this run.

    Parameters of puzzles are written as by `regauge jigsaw train`.
    """
    from safetensors.torch import save_file

    inner = unwrap(model)
    copied = [] if source is None else existing_files(source, COPIED_FILES)
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


def build_results(finished: FederatedRun) -> Results:
    """Return the model before and after, its accuracy over rounds, absences and rejections."""
    completed = completed_rounds(finished.history)
    tables = [_round_table(finished)]
    facts: dict[str, Any] = {
        "settings": finished.settings.to_dict(),
        "source": json.loads(json.dumps(finished.source.to_dict())),
        "rounds": len(completed),
    }
    rejected = facts["rejected"] = finished.rejected
    counts = tuple(
        (client, reason, count)
        for client, by_reason in rejected.items()
        for reason, count in by_reason.items()
    )
    if counts:
        tables.append(Table("Rejected contributions", ("client", "reason", "rounds"), counts))
    if finished.epsilon is not None:
        facts |= {"epsilon": finished.epsilon, "delta": DELTA}
    figures = (_round_figure(finished),) if completed else ()
    findings: tuple[Finding, ...] = ()
    if finished.evaluation is not None:
        evaluation = finished.evaluation
        tables.append(evaluation.results.tables[0])
        if not finished.is_worse:  # else the failed check says so
            facts["verdict"] = evaluation.results.facts["verdict"]
        findings = (_find_loss(finished, evaluation),)
    claim = None if finished.evaluation is None else _claim(finished, finished.evaluation)
    return Results("A federated run", findings, tuple(tables), figures, facts, claim=claim)


def _claim(finished: FederatedRun, evaluation: Evaluation) -> Claim | None:
    """Return the headline: what training changed, if the server can measure it."""
    if finished._has_client_models:
        return None
    start, end = evaluation.scores["start"], evaluation.scores["end"]
    is_accuracy = evaluation.metric == "accuracy"
    if finished.is_worse:
        text, tone = "Training made the model worse", "bad"
    elif is_worse(start, end):
        text, tone = "Training improved the model", "good"
    else:
        text, tone = "Training made no significant difference", "none"
    before, after = (
        f"{100 * score.accuracy:.1f} %" if is_accuracy else f"{score.perplexity:,.2f}"
        for score in (start, end)
    )
    label = f"{evaluation.metric} on the test data after training; before: {before}"
    clients = f"{finished.settings.clients} clients, {finished.settings.strategy}"
    sentence = f"{len(completed_rounds(finished.history))} rounds of {clients}."
    return Claim(text, tone, after, label, sentence)


def _find_loss(finished: FederatedRun, evaluation: Evaluation) -> Finding:
    """Return the finding that training did not make the model worse."""
    start, end = evaluation.scores["start"], evaluation.scores["end"]
    is_accuracy = evaluation.metric == "accuracy"
    sentence = f"{evaluation.describe('start')}; {evaluation.describe('end')}"
    if finished.is_worse:
        sentence += ": training made the model worse"
    return Finding(
        "federated/not-worse",
        "The model is not worse on the test data than before training",
        None if finished._has_client_models else not finished.is_worse,
        end.accuracy if is_accuracy else end.perplexity,
        start.accuracy if is_accuracy else start.perplexity,
        sentence=sentence,
        measure=evaluation.metric,
    )


def _round_table(finished: FederatedRun) -> Table:
    """Return the history, with the model before training as round 0."""
    columns = ["round", "contributed", "absent", "training loss", "test loss", "test accuracy"]
    columns += ["seconds", "why absent"]
    rows: list[tuple[Any, ...]] = [
        (
            r.number + 1,
            len(r.contributed),
            len(r.absent),
            r.loss,
            r.measures.get("loss"),
            r.measures.get("accuracy"),
            r.seconds,
            "; ".join(f"{client}: {reason}" for client, reason in r.absent.items()),
        )
        for r in finished.history
    ]
    if finished.evaluation is not None:
        start = finished.evaluation.scores["start"]
        rows.insert(0, (0, 0, 0, None, start.loss, start.accuracy, None, ""))
    if finished._has_client_models:
        columns.append(CLIENT_ACCURACY)
        values = [r.measures.get(CLIENT_ACCURACY) for r in finished.history]
        before = [None] * (len(rows) - len(values))
        rows = [(*row, v) for row, v in zip(rows, [*before, *values], strict=True)]
    note = "Round 0 is the model before training. The training loss is the mean of the clients on "
    note += "their data, in their local steps; the test loss is that of the aggregated model."
    return Table("Rounds", tuple(columns), tuple(rows), note)


def _round_figure(finished: FederatedRun) -> Figure:
    completed = completed_rounds(finished.history)
    rounds = [r.number + 1 for r in completed]
    curves: dict[str, list[float | None]] = {
        "test accuracy": [r.measures.get("accuracy") for r in completed]
    }
    if finished._has_client_models:
        curves[CLIENT_ACCURACY] = [r.measures.get(CLIENT_ACCURACY) for r in completed]
    if finished.evaluation is not None:
        start = {"test accuracy": finished.evaluation.scores["start"].accuracy}
        rounds = [0, *rounds]
        curves = {name: [start.get(name), *values] for name, values in curves.items()}
    lines = {"x": rounds, "y": curves, "xlabel": "round", "ylabel": "accuracy", "percent": True}
    return Figure("Accuracy over rounds", "lines", lines, "Round 0 is the model before training.")
