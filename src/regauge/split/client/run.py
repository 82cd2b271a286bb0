"""A client's runs in one call: training, and prediction, on local data with a remote backbone."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from regauge.checkpoints.files import exclusive_folder
from regauge.checkpoints.plan import check_new
from regauge.core.options import require_at_least, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.evaluate import evaluate_model
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.sources import DataSource, source_of
from regauge.data.tasks import Examples
from regauge.errors import (
    FrameError,
    Hint,
    JournalError,
    RegaugeError,
    SplitError,
    StoppedError,
    TrainingError,
)
from regauge.models.sources import open_source
from regauge.results.findings import Claim, Figure, Results, Table
from regauge.results.views import ResultView
from regauge.split.client.connection import (
    ClientModel,
    ConnectOptions,
    abandon,
    join_server,
    load_client,
)
from regauge.split.client.remote_backbone import RemoteBackbone
from regauge.split.client.train import CHECKPOINT_FOLDER, Run
from regauge.split.client.train import train as run_training
from regauge.split.parts import write_part
from regauge.split.protocol.transport import Transport

if TYPE_CHECKING:
    from regauge.models.sources import Source

    DataInput: TypeAlias = Examples | DataSource | str | Path

_log = logging.getLogger("regauge.split.run")


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`. Those of the optimizer default to the server's.

    Attributes:
        epochs: Passes over the data; default 1.
        steps: Training steps, instead of epochs.
        batch_size: Examples per batch.
        seed: Seed of the order of examples and of local dropout.
        save_every: Steps between checkpoints in the journal.
        lr: Peak learning rate of embedding and head.
        optimizer: "sgd", "adam" or "adamw".
        schedule: "constant", or "linear" or "cosine" down to 0 at the last step.
        warmup: Steps in which the learning rate rises linearly.
        clip: Largest norm of the gradient.
        weight_decay: Weight decay.
        momentum: Momentum of sgd.

    Raises:
        TrainingError: Both epochs and steps are set, or a number is not positive.

    Example:
        >>> training = regauge.split.OptimizerConfig("sgd", lr=0.1)
        >>> host = regauge.split.Host(regauge.load_model("vit"), training)
        >>> how = {"options": regauge.split.TrainOptions(steps=2, batch_size=8)}
        >>> result = regauge.split.train(vit, regauge.split.InProcess(host), images, **how)
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 16
    seed: int = 0
    save_every: int = 50
    lr: float | None = None
    optimizer: str | None = None
    schedule: str | None = None
    warmup: int | None = None
    clip: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise TrainingError("pass either epochs or steps, not both")
        names = ("epochs", "steps", "batch_size", "save_every")
        require_at_least(TrainingError, 1, **{name: getattr(self, name) for name in names})

    def count_steps(self, examples: int, accumulate: int) -> int:
        """Return the number of steps of a run over so many examples."""
        return self.steps or (self.epochs or 1) * -(-examples // (self.batch_size * accumulate))

    def optimizer_config(self, server: Mapping[str, Any], steps: int) -> OptimizerConfig:
        """Return the optimizer of embedding and head: the server's, with the options that are set.

        A schedule that is set ends with the run.
        """
        own = {
            "optimizer": self.optimizer,
            "rate": self.lr,
            "decay": self.weight_decay,
            "momentum": self.momentum,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "clip": self.clip,
            "steps": None if self.schedule is None else steps,
        }
        names = (*own, "accumulate")
        inherited = {n: server[n] for n in names if n in server and server.get("trains")}
        passed = {n: value for n, value in own.items() if value is not None}
        return OptimizerConfig.from_dict(inherited | passed)


@dataclass(frozen=True)
class TrainResult(ResultView):
    """The end of a training.

    Attributes:
        losses: Losses of the steps that this call has taken.
        steps: Steps of the run.
        out: Folder of the trained embedding and head, if they were written.
        seconds: Time of the call.

    Example:
        >>> training = regauge.split.OptimizerConfig("sgd", lr=0.1)
        >>> host = regauge.split.Host(regauge.load_model("vit"), training)
        >>> result = regauge.split.train(vit, regauge.split.InProcess(host), images)
        >>> result.steps
        7
    """

    losses: list[float]
    steps: int
    out: Path | None
    seconds: float

    @property
    def results(self) -> Results:
        """The loss of each step."""
        first = self.steps - len(self.losses) + 1
        steps = list(range(first, self.steps + 1))
        data = {"x": steps, "y": {"loss": self.losses}, "xlabel": "step", "ylabel": "loss"}
        figure = Figure("Training loss", "lines", data)
        facts = {"steps": self.steps, "seconds": self.seconds}
        claim = Claim(f"Trained for {self.steps} steps with the backbone on a server")
        if self.losses:
            change = f"{self.losses[0]:.3g} → {self.losses[-1]:.3g}"
            claim = replace(claim, number=change, label="loss of the first and the last step")
        return Results("Split training", figures=(figure,), facts=facts, claim=claim)

    def __str__(self) -> str:
        last = "" if not self.losses else f", last loss {self.losses[-1]:.4f}"
        return f"{self.steps} steps{last}, {self.seconds:.0f} s"

    def __repr__(self) -> str:
        return f"<split training: {self}>"


@dataclass(frozen=True)
class Prediction(ResultView):
    """Metrics of a model on data: loss and accuracy, or loss and perplexity.

    Attributes:
        metrics: "loss", "accuracy", "examples", and "perplexity" of language models.

    Example:
        >>> prediction = regauge.split.Prediction({"loss": 0.7, "accuracy": 0.5, "examples": 100})
        >>> prediction.metrics["loss"]
        0.7
    """

    metrics: Mapping[str, float]

    @property
    def results(self) -> Results:
        """The metrics as a table."""
        table = Table("Metrics", ("metric", "value"), tuple(self.metrics.items()))
        return Results("Split prediction", tables=(table,))

    def __str__(self) -> str:
        from regauge.models.summary import format_columns

        return format_columns(
            [
                (name, f"{value:.4f}" if isinstance(value, float) else str(value))
                for name, value in self.metrics.items()
            ],
            right=(1,),
        )

    def __repr__(self) -> str:
        return f"<split prediction: loss {self.metrics['loss']:.4g}>"


@within_threads
def train(
    client: Source,
    server: str | Transport,
    data: DataInput,
    *,
    out: Path | str | None = None,
    journal: Path | str | None = None,
    resume: bool = False,
    options: TrainOptions | None = None,
    connection: ConnectOptions | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train embedding and head on local data, together with a server's backbone.

    Progress is logged to "regauge.split.run".

    Args:
        client: The model, of which embedding and head are used: a path, a hub id, a checkpoint, or
            a module, which is trained in place.
        server: HOST:PORT of a server, or another transport.
        data: The URI of a dataset, a `DataSource`, or examples. They stay here.
        out: New folder for the trained embedding and head.
        journal: Folder for the state to resume from after a kill. It contains secrets, and is
            emptied at the end.
        resume: Resume the run of the journal.
        options: Length of the run and optimizer.
        connection: How to connect.
        on_step: Called after each step with the number of steps done, their total, and the loss.
        stop: Checked before each step; the run is saved in its journal and ends if it returns True.

    Returns:
        The losses, with `to_html()`.

    Raises:
        CheckpointError: The model is missing or damaged, or `out` exists.
        JournalError: The journal has a run and `resume` is not set, or the reverse.
        LockError: Model, key and server do not have the same lock.
        StoppedError: The run was stopped before its last step.
        TransportError: The server cannot be reached.

    Example:
        >>> training = regauge.split.OptimizerConfig("sgd", lr=0.1)
        >>> host = regauge.split.Host(regauge.load_model("vit"), training)
        >>> result = regauge.split.train("vit", regauge.split.InProcess(host), images, out="edges")
    """
    start, options, done = time.monotonic(), resolve_options(options, TrainOptions()), 0
    connection = resolve_options(connection, ConnectOptions())
    folder = None if journal is None else Path(journal)
    if out is not None:
        check_new(Path(out))
    _require_journal(folder, resume)
    model = load_client(client, connection)
    examples = _read(data, model, "train")
    with (
        nullcontext() if folder is None else exclusive_folder(folder, "run"),
        _session(join_server(model, server, connection, folder)) as link,
    ):
        server_config = require_server_config(link.server_info)
        trains = bool(server_config.get("trains"))
        steps = options.count_steps(len(examples), server_config["accumulate"] if trains else 1)
        config = options.optimizer_config(server_config, steps)
        _log.info(
            "%d examples, %d steps; here %s at %g, on the server %s",
            len(examples),
            steps,
            config.optimizer,
            config.lr,
            f"{server_config['optimizer']} at {server_config['rate']:g}"
            if trains
            else "nothing: its backbone is frozen",
        )

        def report(step: int, loss: float) -> None:
            nonlocal done
            done = step
            if on_step is not None:
                on_step(step, steps, loss)

        losses = run_training(
            model.module,
            link,
            examples,
            config,
            Run(steps, options.batch_size, options.seed),
            folder=folder,
            save_every=options.save_every,
            on_step=report,
            stop=stop,
        )
        if stop is not None and stop() and done < steps:
            note = (
                f"; the same command with --resume resumes from {folder}"
                if folder is not None
                else ", and nothing is saved; --journal DIR saves a run"
            )
            raise StoppedError(f"stopped after step {done} of {steps}{note}")
        if out is not None:
            source = model.checkpoint or open_source(model.module)[0]
            write_part(Path(out), model.module, source, "edges", extra_fields={"steps": steps})
        link.end()
        _clear_journal(folder)
    return TrainResult(losses, steps, None if out is None else Path(out), time.monotonic() - start)


@within_threads
def predict(
    client: Source,
    server: str | Transport,
    data: DataInput,
    *,
    samples: int | None = None,
    batch_size: int = 16,
    connection: ConnectOptions | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Measure a model with a remote backbone on local data.

    The metrics are loss and accuracy, or loss and perplexity of a language model.

    Args:
        client: The model, as in `train`.
        server: HOST:PORT of a server, or another transport.
        data: Examples, or where they are, as in `train`.
        samples: First examples only. Default: all.
        batch_size: Examples per batch.
        connection: How to connect.
        progress: Progress callback, in examples.

    Returns:
        The metrics.

    Raises:
        LockError: Model, key and server do not have the same lock.
        TransportError: The server cannot be reached.

    Example:
        >>> server = regauge.split.InProcess(regauge.split.Host(regauge.load_model("vit")))
        >>> regauge.split.predict(vit, server, images).metrics["examples"]
        100
    """
    connection = resolve_options(connection, ConnectOptions())
    require_at_least(SplitError, 1, samples=samples, batch_size=batch_size)
    model = load_client(client, connection)
    examples = _read(data, model, "test")
    if samples is not None:
        examples = examples.only(range(min(samples, len(examples))))
    with _session(join_server(model, server, connection)) as link:
        metrics = evaluate_model(model.module, examples, batch_size, progress)
        link.end()
    return Prediction(metrics | {"examples": int(metrics["examples"])})


@contextmanager
def _session(link: RemoteBackbone) -> Iterator[RemoteBackbone]:
    """Close a link at the end, and end its session if it failed and cannot be resumed."""
    with link:
        try:
            yield link
        except RegaugeError as error:
            abandon(link, error)
            raise


def _read(data: DataInput, model: ClientModel, split: str) -> Examples:
    """Return examples as inputs of a model. `split` is that of a dataset without options."""
    if isinstance(data, Examples):
        return data
    return source_of(data, split).read(model.module, model.checkpoint)[0]


def require_server_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a server's training options; raise FrameError if they are malformed."""
    if config.get("trains"):
        kinds = {
            (int, float): ("rate", "decay", "momentum", "clip"),
            (int,): ("warmup", "steps", "accumulate"),
            (str,): ("optimizer", "schedule"),
        }
        invalid = [
            n for types, names in kinds.items() for n in names if type(config.get(n)) not in types
        ]
        if invalid or config["accumulate"] < 1:
            raise FrameError(
                "hello",
                f'the server sent an invalid "{(*invalid, "accumulate")[0]}"',
                hint="check that both sides run the same version of regauge",
            )
    return config


def _require_journal(folder: Path | None, resume: bool) -> None:
    """Raise if the journal's state and `resume` contradict each other."""
    if folder is None:
        if resume:
            raise JournalError("resume requires the journal of the run", hint="pass journal=")
        return
    has_run = (folder / "session.json").exists()
    if has_run and not resume:
        raise JournalError(
            f"{folder} contains an interrupted run",
            hint=Hint(
                "pass resume=True to resume it, or an empty folder",
                cli="pass --resume to resume it, or an empty folder",
            ),
        )
    if resume and not has_run:
        raise JournalError(
            f"{folder} contains no run to resume",
            hint=Hint("start it without resume=True", cli="start it without --resume"),
        )


def _clear_journal(folder: Path | None) -> None:
    """Delete the journal of a finished run, which contains secrets."""
    if folder is None:
        return
    for path in folder.iterdir():
        # left by a write that was killed
        is_partial = path.name.startswith(".") and ".partial-" in path.name
        is_frame = path.stem.isdigit() and path.suffix in (".request", ".reply")
        if is_partial or is_frame or path.name == "session.json":
            path.unlink(missing_ok=True)
    shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)
