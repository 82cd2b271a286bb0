"""`train`, `evaluate` and `study` on what users hold: paths, hub ids, checkpoints or modules."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from regauge.checkpoints import resume
from regauge.checkpoints.plan import check_new
from regauge.checkpoints.reader import Checkpoint
from regauge.core.options import require_at_least, require_device, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.augment import DEIT_AUGMENTATION
from regauge.data.sources import DataSource, sample_examples, source_of
from regauge.data.tasks import Examples
from regauge.data.train import count_steps, train_model
from regauge.errors import Hint, JigsawError, QualityWarning
from regauge.evaluation.models import evaluate_modules
from regauge.evaluation.report import Evaluation as ModelEvaluation
from regauge.jigsaw import figures
from regauge.jigsaw.corruptions import CORRUPTIONS
from regauge.jigsaw.folder import FOLDER, folder_of, load_together, rewrap_plain, save_wrapped
from regauge.jigsaw.masks import check_ratio, check_size
from regauge.jigsaw.metrics import Evaluation
from regauge.jigsaw.metrics import evaluate as evaluate_puzzles
from regauge.jigsaw.robustness import aupr, aurra, evaluate_corruptions, score_predictions
from regauge.jigsaw.studies import attention_maps, study_positions
from regauge.jigsaw.variants import resolve_variant
from regauge.jigsaw.wrapper import LAMBDA, MaskedJigsaw, wrap
from regauge.models.load import load_model, reinitialize
from regauge.models.sources import open_source
from regauge.results.findings import Results
from regauge.results.views import ResultView

if TYPE_CHECKING:
    from regauge.models.sources import Source

    ModelInput: TypeAlias = Source | "JigsawTraining"

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
EVALUATED = 1000  # training images that a model is evaluated on, without test data
SHOWN = 6  # images with attention maps
CORRUPTED = 100  # images that are corrupted, by default
DataInput = str | Path | DataSource | Examples
Note = Callable[[str], None]


@dataclass(frozen=True)
class JigsawOptions:
    """Options of a training with masked jigsaw puzzles.

    Attributes:
        variant: The variant of the paper's Table 2; by default J, or the nearest that applies.
        per: Whether there is one puzzle for a "batch" or for each "sample".
        probability: The share of steps with puzzles.
        warmup: The share of warm-up steps: no puzzles, and a rising learning rate.
        weight: The lambda of the position regression.
        schedule: The schedule of lambda: "constant", or "reference" as in the paper's code.
        until: The share of the steps after which puzzles end.
        patch: The patch size of models without patches.
        fresh: Train from scratch, with randomly initialized weights.
        epochs: Passes over the data.
        batch_size: Images per batch.
        lr: The peak learning rate of AdamW.
        weight_decay: The weight decay of AdamW.
        flip: Flip half of the images horizontally.
        shift: Shift images by up to this many pixels.
        strong: Use DeiT's augmentation.

    Example:
        >>> options = regauge.jigsaw.JigsawOptions(epochs=2, batch_size=32)
        >>> trained = regauge.jigsaw.train(vit, images, ratio=0.3, options=options)
    """

    variant: str | None = None
    per: Literal["batch", "sample"] = "batch"
    probability: float = 0.5
    warmup: float = 1 / 15
    weight: float = LAMBDA
    schedule: Literal["constant", "reference"] = "constant"
    until: float | None = None
    patch: int | None = None
    fresh: bool = False
    epochs: int = 1
    batch_size: int = 64
    lr: float = 1e-4
    weight_decay: float = 0.05
    flip: bool = False
    shift: int = 0
    strong: bool = False

    def __post_init__(self) -> None:
        require_at_least(JigsawError, 1, epochs=self.epochs, batch_size=self.batch_size)
        require_at_least(JigsawError, 0, shift=self.shift)

    def wrapping(self, ratio: float) -> dict[str, Any]:
        """Return the options of `regauge.jigsaw.wrapper.wrap`."""
        names = ("variant", "per", "probability", "warmup", "weight")
        options = {"ratio": ratio, **{name: getattr(self, name) for name in names}}
        if self.schedule != "constant":
            options["schedule"] = self.schedule
        given = {name: getattr(self, name) for name in ("patch", "until")}
        return options | {name: value for name, value in given.items() if value is not None}

    def recipe(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe of `regauge.data.train.train_model`.

        Args:
            task: The task, with `mean` and `std` of the images.

        Raises:
            JigsawError: Strong augmentation lacks mean and std.
        """
        augment: dict[str, Any] = {}
        if self.flip or self.shift:
            augment = {"flip": self.flip, "shift": self.shift}
        if self.strong and "mean" not in task:
            raise JigsawError(
                "strong augmentation requires the mean and std of the images, which examples lack",
                hint="pass a URI or a DataSource",
            )
        if self.strong:
            augment |= {**DEIT_AUGMENTATION, "mean": task["mean"], "std": task["std"]}
        recipe = {
            "optimizer": "adamw",
            "rate": self.lr,
            "more": {"weight_decay": self.weight_decay},
            "batch": self.batch_size,
            "epochs": self.epochs,
            "dtype": "float32",
            "clip": 5.0,
            "warmup": self.warmup,
        }
        return recipe | ({"augment": augment} if augment else {})


@dataclass(frozen=True, eq=False)
class JigsawTraining(ResultView):
    """A model that was trained with masked jigsaw puzzles.

    Attributes:
        wrapped: The wrapped model.
        losses: The loss of every step.
        facts: Facts of the run, for the report.
        source: The path of the original model, if it is on disk.
        evaluation: The plain model before training ("start") and after ("end").
    """

    wrapped: MaskedJigsaw
    losses: Sequence[float]
    facts: Mapping[str, Any]
    source: Path | None = None
    evaluation: ModelEvaluation | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The plain model, without the unknown embedding and the regression."""
        return self.wrapped.unwrap()

    def summary(self) -> dict[str, Any]:
        """Return the variant, the number of steps, the training loss at the start and at the end
        (the mean of the last tenth; None without steps), and the scores before and after.
        """
        recent = self.losses[-max(1, len(self.losses) // 10) :]
        return {
            "variant": self.wrapped.variant.name,
            "steps": len(self.losses),
            "first_loss": self.losses[0] if recent else None,
            "last_loss": sum(recent) / len(recent) if recent else None,
            **({} if self.evaluation is None else _scores_of(self.evaluation)),
        }

    @cached_property
    def results(self) -> Results:
        """The losses as a table and a figure."""
        return figures.report_training(self.losses, self.facts, self.evaluation)

    def save(self, out: str | Path) -> None:
        """Write the plain checkpoint and the puzzles' parameters to a new folder, atomically.

        Raises:
            CheckpointError: The folder exists, or cannot be written.
        """
        save_wrapped(self.wrapped, Path(out), self.source)

    @property
    def line(self) -> str:
        """The variant, the number of steps and the training losses, in one line."""
        values = self.summary()
        if not self.losses:
            return f"{values['variant']}, 0 steps"
        return (
            f"{values['variant']}, {values['steps']} steps, training loss with puzzles "
            f"{values['first_loss']:.4f} at the start, {values['last_loss']:.4f} at the end"
        )

    def __str__(self) -> str:
        return self.line if self.evaluation is None else f"{self.line}\n\n{self.evaluation}"

    def __repr__(self) -> str:
        return f"<training with puzzles: {self.line}>"


@dataclass(frozen=True, eq=False)
class JigsawEvaluation(ResultView):
    """The effect of puzzles at inference on models, by name.

    Attributes:
        evaluations: The evaluation of each model.
        grids: The patches of its puzzles.
        unwrapped: The evaluation of the plain checkpoint of each model that was trained with
            puzzles; the same object if nothing marks shuffled patches.
        facts: Facts of the run, for the report.
    """

    evaluations: Mapping[str, Evaluation]
    grids: Mapping[str, figures.PuzzleGrid]
    unwrapped: Mapping[str, Evaluation]
    facts: Mapping[str, Any]

    @cached_property
    def results(self) -> Results:
        """A table of all models and ratios, and curves over the ratios."""
        tables, plots = figures.report_evaluations(self.evaluations, self.grids, self.unwrapped)
        claim = figures.conclude_evaluations(self.evaluations)
        return Results("Puzzles at inference", (), tables, plots, self.facts, claim=claim)

    def __str__(self) -> str:
        return figures.format_report(self.results)

    def __repr__(self) -> str:
        accuracies = (f"{name} {e.accuracy:.1%}" for name, e in self.evaluations.items())
        return f"<evaluation on puzzles: top-1 {', '.join(accuracies)}>"


@dataclass(frozen=True, eq=False)
class JigsawStudy(ResultView):
    """Studies of the positions of models, and of their robustness.

    Attributes:
        report: Tables, figures and facts, and in `unchecked` the reasons for parts that were
            skipped for a model.
    """

    report: Results

    @property
    def results(self) -> Results:
        """Tables, figures and facts."""
        return self.report

    def __str__(self) -> str:
        return figures.format_report(self.results)

    def __repr__(self) -> str:
        return f"<study of positions: {', '.join(table.title for table in self.report.tables)}>"


@within_threads
def train(
    model: Source,
    data: DataInput,
    ratio: float = 0.1,
    *,
    out: str | Path | None = None,
    test: DataInput | None = None,
    options: JigsawOptions | None = None,
    seed: int = 0,
    device: str = "cpu",
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_note: Note | None = None,
) -> JigsawTraining:
    """Train a model with masked jigsaw puzzles.

    Args:
        model: The image model: a path, a hub id, a checkpoint or a module, which is not changed.
        data: Images with labels: a URI, a `DataSource` or examples.
        ratio: The share of patches to shuffle.
        out: A new folder to save the model to. The state of an interrupted training is saved beside
            it, from which the same call resumes.
        test: Labelled images to evaluate the model on, before training and after; by default at
            most 1,000 of the training images.
        options: Options of puzzles and training.
        seed: The random seed.
        device: The device that computes.
        facts: Facts of the run, for the report.
        progress: The progress callback, about fifty times.
        on_note: Called before the first step with notes on what is trained.

    Returns:
        The training, with `model`, `losses`, `save(folder)`, `to_html()`.

    Raises:
        JigsawError: The model reads no images, or its weights or a loss are not finite.
        CheckpointError: `out` exists.
        CacheError: The state beside `out` belongs to another training.

    Example:
        >>> trained = regauge.jigsaw.train(vit, images, ratio=0.3)
        >>> _ = trained.save("vit-puzzled")
    """
    started = time.monotonic()
    options, note = resolve_options(options, JigsawOptions()), on_note or (lambda text: None)
    check_ratio(ratio)
    require_device(device)
    if out is not None:
        check_new(Path(out))
    checkpoint, live = open_source(model)
    name = str(model) if isinstance(model, str | Path) else checkpoint.path.name
    module = load_model(checkpoint, "float32") if live is None else copy.deepcopy(live).float()
    if getattr(module, "main_input_name", "pixel_values") != "pixel_values":
        raise JigsawError(
            f"MODEL must be an image model, got {type(module).__name__}",
            hint="for texts use regauge.jigsaw.TextJigsaw in Python",
        )
    if (checkpoint.path / FOLDER).is_dir():
        note(
            f"{name} was trained with puzzles: training starts from its plain weights, with a new "
            "unknown embedding"
        )
    module = reinitialize(module, seed) if options.fresh else module
    _require_finite(module, name)
    examples, task = _read(data, module, folder_of(model), split="train")
    examples = sample_examples(examples, data, seed)
    recipe, settings = options.recipe(task), options.wrapping(ratio)
    held, tested_on = _read_test(test, examples, module, folder_of(model), seed)
    total = count_steps(recipe, len(examples))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrap warns about what is noted next
        wrapped = wrap(module.to(device), settings, total, seed)
    if wrapped.layout.note:
        note(wrapped.layout.note)
    note(f"{wrapped.extra_repr()}: {total} steps of {options.batch_size} images")
    label = _digest(wrapped, examples, recipe, settings, seed)
    # without an output there is nothing to resume for, and the state is never saved
    place = Path("unsaved") if out is None else Path(out)
    every = math.inf if out is None else resume.SAVE_INTERVAL
    state = resume.ResumeState(place.with_name(f".{place.name}.training"), every, device, label)

    start = evaluate_modules({"start": wrapped}, held, batch_size=options.batch_size)

    def on_step(step: int, total: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise JigsawError(
                f"the loss must be finite, got {loss} at step {step}",
                hint=Hint(
                    "lower lr, or check mean, std and the labels",
                    cli="lower --lr, or check --mean, --std and the labels",
                ),
            )
        if progress is not None and (step % max(1, total // 50) == 0 or step == total):
            progress(step - 1, total, f"loss {loss:.4f}")

    losses, _ = train_model(wrapped, examples, recipe, seed, state, on_step=on_step)
    about = {
        "model": name,
        "data": _name_of(data),
        "images": len(examples),
        "training": wrapped.extra_repr(),
        **recipe,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    source = checkpoint.path if live is None else None
    end = evaluate_modules({"end": wrapped}, held, batch_size=options.batch_size)
    evaluation = replace(start.joined(end), facts={"data": tested_on})
    if evaluation.is_worse("end"):
        warnings.warn(
            f"the model is worse than before training: {evaluation.describe('start')}; "
            f"{evaluation.describe('end')}. Lower lr ({options.lr:g}), or train longer",
            QualityWarning,
            stacklevel=2,
        )
    result = JigsawTraining(wrapped, losses, {**(facts or {}), **about}, source, evaluation)
    if out is not None:
        result.save(out)
        state.path.unlink(missing_ok=True)
    return result


@within_threads
def evaluate(
    models: ModelInput | Sequence[ModelInput],
    data: DataInput,
    *,
    ratios: float | Sequence[float] = RATIOS,
    patch: int | None = None,
    batch_size: int = 100,
    seed: int = 0,
    device: str = "cpu",
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_note: Note | None = None,
) -> JigsawEvaluation:
    """Evaluate models on puzzles.

    Without puzzles it measures top-1; for every ratio top-1, agreement with the unshuffled
    prediction, and distance of the features.

    Args:
        models: Plain models, or outputs of `train`: paths, hub ids, checkpoints or modules. Modules
            are left in evaluation mode, on the CPU.
        data: Images with labels: a URI, a `DataSource` or examples.
        ratios: The share of patches to shuffle, or several.
        patch: The patch size of models without patches; by default that of the others, or 16.
        batch_size: Images per batch.
        seed: The seed of the puzzles and of the sample.
        device: The device that computes.
        facts: Facts of the run, for the report.
        progress: The progress callback, in batches of all models.
        on_note: Called with a note on models whose unknown embedding marks shuffled patches.

    Returns:
        The measurements, with `to_html()`.

    Raises:
        JigsawError: A ratio is invalid, or the models have different puzzles.

    Example:
        >>> evaluation = regauge.jigsaw.evaluate([vit], images, ratios=[0.3])
        >>> evaluation.to_html("page.html")
    """
    started = time.monotonic()
    ratios = [check_ratio(r) for r in (ratios if isinstance(ratios, Iterable) else [ratios])]
    require_at_least(JigsawError, 1, batch_size=batch_size)
    require_device(device)
    sources = _as_list(models)
    loaded = load_together(sources, patch)
    datasets: dict[str, Examples] = {}
    grids: dict[str, figures.PuzzleGrid] = {}
    for name, (wrapped, folder) in loaded.items():
        examples = sample_examples(_read(data, wrapped.model, folder)[0], data, seed)
        datasets[name] = examples
        height, width = examples.batch(np.arange(1))[0]["pixel_values"].shape[-2:]
        layout = wrapped.layout
        cells = check_size((height, width), layout.patch)
        grids[name] = figures.PuzzleGrid(layout.patch, cells, layout.table is not None)
    if patch is None:
        figures.check_puzzle_grids(grids)
    marked = [name for name, (wrapped, _) in loaded.items() if wrapped.unknown is not None]
    parts = _Parts(len(loaded) + len(marked), progress)

    def measure(name: str, wrapped: MaskedJigsaw, label: str) -> Evaluation:
        return evaluate_puzzles(
            wrapped,
            datasets[name],
            ratios,
            seed=seed,
            batch=batch_size,
            progress=parts.next(label),
        )

    evaluations: dict[str, Evaluation] = {}
    unwrapped: dict[str, Evaluation] = {}
    for name, (wrapped, _) in loaded.items():
        label = Path(name).name
        evaluations[name] = measure(name, wrapped.to(device), label)
        if name in marked:
            unwrapped[name] = measure(name, rewrap_plain(wrapped), f"{label}, unwrapped")
        elif wrapped.variant != resolve_variant("A"):
            unwrapped[name] = evaluations[name]  # shuffled patches are not marked
        wrapped.to("cpu")  # free the memory for the next model
    if marked and on_note is not None:
        on_note(
            f"the unknown embedding marks shuffled patches for: {', '.join(marked)}; rows "
            '"unwrapped" measure the plain checkpoints, without it'
        )
    about = {
        "models": list(loaded),
        "data": _name_of(data),
        "images": len(examples),
        "seconds": round(time.monotonic() - started, 1),
    }
    return JigsawEvaluation(evaluations, grids, unwrapped, {**(facts or {}), **about})


@within_threads
def study(
    models: ModelInput | Sequence[ModelInput],
    data: str | Path | DataSource | None = None,
    *,
    corruptions: bool = False,
    hard: DataInput | None = None,
    outside: DataInput | None = None,
    umap: bool = False,
    patch: int | None = None,
    batch_size: int = 100,
    seed: int = 0,
    device: str = "cpu",
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> JigsawStudy:
    """Study the position embeddings of models.

    It measures explained variance, eigenvalues, projections, and how well positions can be
    predicted from them. A part that a model lacks is skipped for that model and named in
    `results.unchecked`.

    Args:
        models: Plain models, or outputs of `train`: paths, hub ids, checkpoints or modules.
        data: Images, for attention maps; with labels, for corruptions, which change `samples` of
            them (100 by default).
        corruptions: Measure errors under the corruptions of ImageNet-C too; mCE is relative to the
            first model.
        hard: Hard images with labels, as ImageNet-A: accuracy and AURRA. Class folders are found
            by the names of the model's classes, or among those of `data`.
        outside: Out-of-distribution images, as ImageNet-O: AUPR against `data`.
        umap: Also project positions with UMAP.
        patch: The patch size of models without patches; by default that of the others, or 16.
        batch_size: Images per batch.
        seed: The seed of regression, UMAP and the sample.
        device: The device that computes.
        facts: Facts of the run, for the report.
        progress: The progress callback, in parts of the study.

    Returns:
        The study, with `to_html()`.

    Raises:
        JigsawError: Data are missing, or no part of the study applies to any model.

    Example:
        >>> study = regauge.jigsaw.study(vit)
        >>> study.to_html("page.html")
    """
    started = time.monotonic()
    if data is None and (corruptions or outside is not None):
        part = "corruptions require" if corruptions else "outside requires"
        raise JigsawError(
            f"{part} data to compare with",
            hint=Hint("pass images with labels as data", cli="pass images with labels: --data"),
        )
    require_at_least(JigsawError, 1, batch_size=batch_size)
    require_device(device)
    loaded = {
        name: (wrapped.to(device), folder)
        for name, (wrapped, folder) in load_together(_as_list(models), patch).items()
    }
    parts = _Parts(len(loaded) * (1 + corruptions), progress)
    studies: dict[str, Any] = {}
    unchecked: list[str] = []
    for name, (wrapped, _) in loaded.items():
        parts.next()(0, len(CORRUPTIONS) if corruptions else 1, Path(name).name)
        try:
            studies[name] = study_positions(wrapped, seed=seed, umap=umap)
        except JigsawError as error:
            unchecked.append(f"positions of {name}: {error}")
    tables, plots = figures.report_studies(studies)
    if data is not None:
        datasets = {
            name: _read(data, wrapped.model, folder, labelled=corruptions)
            for name, (wrapped, folder) in loaded.items()
        }
        maps: dict[str, Any] = {}
        for name, (wrapped, _) in loaded.items():
            try:
                images = _first_images(datasets[name][0]).to(device)
                maps[name] = attention_maps(wrapped, images).mean(1).tolist()
            except JigsawError as error:
                unchecked.append(f"attention of {name}: {error}")
        if maps:
            examples, task = datasets[next(iter(maps))]
            plots = (*plots, figures.plot_attention(_first_images(examples), task, maps))
        if corruptions:
            source = source_of(data, kinds="or a DataSource")
            subset = source.open().take(source.samples or CORRUPTED, seed=seed)
            errors = {
                name: evaluate_corruptions(
                    wrapped.unwrap(),
                    subset,
                    datasets[name][1],
                    batch=batch_size,
                    progress=parts.next(f"corruptions, {Path(name).name}"),
                )
                for name, (wrapped, _) in loaded.items()
            }
            more_tables, more_plots, skipped = figures.report_corruptions(errors)
            tables, plots = (*tables, *more_tables), (*plots, *more_plots)
            unchecked += skipped
        if outside is not None:
            areas = {}
            for name, (wrapped, folder) in loaded.items():
                outliers, _ = _read(outside, wrapped.model, folder, labelled=False)
                outliers = sample_examples(outliers, outside, seed)
                inner, outer = (
                    score_predictions(wrapped.unwrap(), inputs, batch_size)[0]
                    for inputs in (datasets[name][0], outliers)
                )
                areas[name] = aupr(inner, outer), len(inner), len(outer)
            tables = (*tables, figures.tabulate_outliers(areas))
    if hard is not None:
        scores = {}
        for name, (wrapped, folder) in loaded.items():
            read, _ = _read(hard, wrapped.model, folder, folders=_class_folders(data))
            examples = sample_examples(read, hard, seed)
            confidence, correct = score_predictions(wrapped.unwrap(), examples, batch_size)
            scores[name] = float(correct.mean()), aurra(confidence, correct), len(correct)
        tables = (*tables, figures.tabulate_hard_images(scores))
    if not tables and not plots:
        raise JigsawError(
            "\n".join(unchecked),
            hint=Hint(
                "pass a model with CLS or absolute positions (ViT, DeiT), or data "
                "with corruptions=True",
                cli="pass a model with CLS or absolute positions (ViT, DeiT), or "
                "--data with --corruptions",
            ),
        )
    about = {
        "models": list(loaded),
        **{
            name: source if source is None else _name_of(source)
            for name, source in (("data", data), ("hard", hard), ("outside", outside))
        },
        "seconds": round(time.monotonic() - started, 1),
    }
    facts = {**(facts or {}), **about}
    return JigsawStudy(Results("Positions", (), tables, plots, facts, tuple(unchecked)))


def _scores_of(evaluation: ModelEvaluation) -> dict[str, dict[str, float]]:
    """Return the scores of each model as plain numbers."""
    return {name: score.to_dict() for name, score in evaluation.scores.items()}


class _Parts:
    """One progress callback over parts of equal weight."""

    def __init__(self, count: int, progress: Progress | None) -> None:
        self.count, self.progress, self.done = count, progress, 0

    def next(self, label: str = "") -> Progress:
        """Return the callback of the next part. Its messages start with a label."""
        part, self.done = self.done, self.done + 1

        def report(done: int, total: int, message: str) -> None:
            if self.progress is not None:
                text = f"{label}: {message}" if label else message
                self.progress(part * total + done, self.count * total, text)

        return report


def _as_list(models: ModelInput | Sequence[ModelInput]) -> list[Source]:
    if isinstance(models, str | Path | Checkpoint | torch.nn.Module | Mapping | JigsawTraining):
        models = [models]
    every = [m.wrapped if isinstance(m, JigsawTraining) else m for m in models]
    if not every:
        raise JigsawError("models must not be empty", hint="pass one model or several")
    return every


def _read(
    data: DataInput,
    module: torch.nn.Module,
    folder: Path | None,
    *,
    split: str = "test",
    labelled: bool = True,
    folders: Sequence[str] = (),
) -> tuple[Examples, dict[str, Any]]:
    """Return data as examples for a model, and their task, which is empty for examples."""
    if isinstance(data, Examples):
        return data, {}
    return source_of(data, split).read(module, folder, labelled=labelled, folders=folders)


def _class_folders(data: DataInput | None) -> list[str]:
    """Return the class folders of data, by which those of other data are numbered; maybe none."""
    if data is None or isinstance(data, Examples):
        return []
    return list(source_of(data).open().folders)


def _read_test(
    test: DataInput | None,
    examples: Examples,
    module: torch.nn.Module,
    folder: Path | None,
    seed: int,
) -> tuple[Examples, str]:
    """Return the examples to evaluate on, and their name."""
    if test is not None:
        return sample_examples(_read(test, module, folder)[0], test, seed), _name_of(test)
    rows = np.random.default_rng(seed).permutation(len(examples))[:EVALUATED]
    return examples.only(np.sort(rows)), "training images"


def _name_of(data: DataInput) -> str:
    return "examples" if isinstance(data, Examples) else source_of(data).uri


def _first_images(examples: Examples) -> torch.Tensor:
    return examples.batch(range(min(SHOWN, len(examples))))[0]["pixel_values"]


def _require_finite(module: torch.nn.Module, name: str) -> None:
    """Raise if a weight is not finite, before a training that would only find that its loss is."""
    for tensor_name, t in module.state_dict().items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise JigsawError(
                f'"{tensor_name}" of {name} is not finite',
                hint=Hint(
                    "restore it from a copy, or train from scratch with fresh=True",
                    cli="restore it from a copy, or train from scratch with --fresh",
                ),
            )


def _digest(wrapped: MaskedJigsaw, examples: Examples, *settings: Any) -> str:
    """Return a digest of a training (initial weights, a sample of its data, all settings), so that
    it never resumes from the state of another.
    """
    digest = hashlib.sha256(json.dumps([len(examples), *settings], sort_keys=True).encode())
    inputs, labels = examples.batch(np.unique(np.linspace(0, len(examples) - 1, 64).astype(int)))
    for t in (*wrapped.state_dict().values(), *inputs.values(), labels):
        digest.update(t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
