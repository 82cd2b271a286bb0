"""`merge` on what users hold: paths, hub ids, checkpoints, modules, state dicts, or a recipe."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from regauge.checkpoints.plan import check_new
from regauge.checkpoints.resume import StateStore
from regauge.core.options import require_at_least, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import limited_threads, within_threads
from regauge.data.sources import DataSource, source_of
from regauge.errors import MergeError
from regauge.matching.live_pair import REFINE_STEPS, digest_of_inputs
from regauge.merging.basis import read_refinement
from regauge.merging.engine import (
    SHARD_BYTES,
    Merge,
    align_merge,
    open_merge,
    plan_merge,
    require_basis,
    serialize_inputs,
)
from regauge.merging.methods import METHODS
from regauge.merging.recipe_yaml import parse_recipe, read_recipe
from regauge.merging.recipes import AlignConfig, Recipe
from regauge.results.findings import Claim, Results, Table
from regauge.results.views import ResultView

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.plan import Plan
    from regauge.checkpoints.writer import WriteResult
    from regauge.core.spec import Spec
    from regauge.evaluation.models import DataInput
    from regauge.evaluation.report import Evaluation
    from regauge.matching.live_pair import Batches, Generated
    from regauge.merging.basis import Verdict
    from regauge.models.sources import Source

VERSION = 1
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge.

    Attributes:
        parameters: parameters of the method: {"density": 0.5}; a list runs along the layers.
        dtype: the dtype of the output; by default that of the base, or of the first model.
        tokenizer: the vocabulary of the output if vocabularies differ: "base", "union" or a model.
        chat_template: the chat template of the output: "auto" (the most common one of the models),
            "chatml", a .jinja file or the template itself. By default that of the base or of the
            first model.
        seed: the seed of randomized methods.
        force: merge models that share no basis, or of different kinds, unaligned.
        refine_steps: steps of the refinement.
        shard_bytes: the largest size of an output file.

    Example:
        >>> _ = regauge.move("model", 1).save("moved")
        >>> options = regauge.MergeOptions({"t": 0.3}, dtype="bfloat16")
        >>> merged = regauge.merge(["model", "moved"], method="slerp", align=True, options=options)
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    seed: int = 0
    force: bool = False
    refine_steps: int = REFINE_STEPS
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        require_at_least(MergeError, 1, refine_steps=self.refine_steps)


@dataclass(frozen=True, eq=False)
class MergeResult(ResultView):
    """A merge that was checked, and aligned if required. Its tensors are computed when they are
    written or read.

    Attributes:
        job: the models, laid out.
        options: the options.
        out: the output that was checked, if any.
        store: saved state, which `save` deletes.
    """

    job: Merge
    options: MergeOptions
    out: Path | None = None
    store: StateStore | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe, as data and as text that can be run again."""
        return self.job.recipe

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Whether each model shares a basis with the base or the first model."""
        return tuple(self.job.verdicts.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about models whose average is unlikely to keep their quality."""
        if METHODS[self.recipe.method].is_transport:
            return ()
        return tuple(v.warning for v in self.verdicts if v.warning)

    def evaluate(
        self,
        folder: str | Path,
        data: DataInput | None = None,
        *,
        batch_size: int = 32,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Measure the inputs and the merged model on the same labelled data.

        Args:
            folder: the folder that `save` wrote.
            data: the data; by default those of the merge.
            batch_size: examples per forward pass.
            progress: the progress callback, in examples of all models.

        Raises:
            DataError: the data cannot be read, do not fit, or have no labels.
        """
        from regauge.evaluation.models import evaluate_sources

        chosen = self.recipe.data if data is None else data
        if chosen is None:
            raise MergeError("data must be passed to measure a merge, got none")
        models: dict[str, Source] = {k: model.checkpoint for k, model in self.job.models.items()}
        models[str(folder)] = Path(folder)  # an output is none of its inputs
        return evaluate_sources(models, chosen, batch_size=batch_size, progress=progress)

    @cached_property
    def plan(self) -> Plan | None:
        """The files of the checked output, if there is one."""
        if self.out is None:
            return None
        return plan_merge(self.job, self.out, shard_bytes=self.options.shard_bytes)[0]

    @cached_property
    def results(self) -> Results:
        """The table of the models, and the facts of the merge."""
        rows = tuple((v.model, v.anchor, v.verdict, v.cosine, v.moved) for v in self.verdicts)
        columns = ("model", "compared with", "verdict", "cosine", "alignment")
        table = Table("Do the models share a basis?", columns, rows)
        title = f"{len(self.job.models)} models merged by {self.recipe.method}"
        return Results(title, (), (table,), (), self.to_dict(), self.job.notes, self._conclude())

    def _conclude(self) -> Claim:
        """Return the headline: whether the models share a basis or were aligned."""
        merged = f"{len(self.job.models)} models merged by {self.recipe.method}"
        apart = [v for v in self.verdicts if v.shared is False and not v.moved]
        aligned = [v for v in self.verdicts if v.moved]
        if apart:
            names = ", ".join(v.model for v in apart)
            return Claim(f"{merged}, of which some do not share a basis: {names}", "bad")
        if aligned:
            return Claim(f"{merged} after alignment: measure the result with data", "none")
        if self.verdicts and all(v.shared for v in self.verdicts):
            return Claim(f"{merged}, which share a basis", "good")
        return Claim(merged)

    def to_dict(self) -> dict[str, Any]:
        """Return the merge as plain data."""
        plan = self.plan
        about = {
            "version": VERSION,
            "command": "merge",
            "method": self.recipe.method,
            "models": list(self.job.models),
            "base": self.recipe.base,
            "out": None if self.out is None else str(self.out),
            "tensors": len(self.job.outputs),
            "bytes": None if plan is None else plan.size,
            "files": None if plan is None else [f.name for f in plan.files],
            "basis": [v.to_dict() for v in self.verdicts],
            "warnings": list(self.warnings),
            "seed": self.options.seed,
        }
        return {name: value for name, value in about.items() if value is not None or name == "base"}

    def to_json(self) -> str:
        """Return the merge as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the merged model as a state dict."""
        from regauge.checkpoints.blocks import materialize

        with tempfile.TemporaryDirectory() as folder, limited_threads():
            _, thunks = plan_merge(self.job, Path(folder) / "merged")
            return {name: materialize(compute()) for name, compute in thunks.items()}

    def save(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> WriteResult:
        """Write the merged model to a new folder, tensor by tensor.

        Args:
            out: the folder; by default the one that `merge` has checked.
            resume: keep the files that an interrupted run of the same merge has finished.
            threads: the number of tensors that are computed at the same time.
            progress: called with the bytes written and the total.

        Raises:
            MergeError: the output is missing, or not a folder.
            CheckpointError: it exists, overlaps an input, or cannot be written.
        """
        from regauge.checkpoints.writer import write_plan

        folder = self.out if out is None else Path(out)
        if folder is None:
            raise MergeError("the output must be a folder, got none", hint="pass save(out)")
        plan, thunks = plan_merge(self.job, folder, shard_bytes=self.options.shard_bytes)
        check_new(folder)  # models in memory have no path that `plan_merge` compares it with
        if folder == self.out:
            vars(self)["plan"] = plan  # once the output exists, it cannot be planned again
        with limited_threads(1):  # tensors are computed in parallel, each by one thread
            written = write_plan(
                folder, plan, thunks, progress=progress, resume=resume, threads=threads
            )
        if self.store is not None:
            self.store.delete()
        return written

    def __str__(self) -> str:
        lines = [
            self.results.title,
            *(f"{v.model} and {v.anchor}: {v.words}" for v in self.verdicts),
        ]
        lines += [f"{v.model} was {v.moved}" for v in self.verdicts if v.moved]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<merge of {len(self.job.models)} models by {self.recipe.method}>"


@within_threads
def merge(
    models: Recipe | str | Path | Sequence[Source],
    *,
    method: str | None = None,
    base: Source | None = None,
    weights: float | Sequence[float] | None = None,
    align: bool = False,
    refine: DataSource | str | Path | None = None,
    data: DataSource | str | Path | None = None,
    spec: Spec | None = None,
    options: MergeOptions | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Merge models of one architecture, after checking that they share a basis.

    Args:
        models: the models: paths, hub ids, checkpoints, modules or state dicts. Or a recipe, or
            the path of its YAML file, which then defines method, base, weights and data.
        method: "linear" (the default), "slerp", "ties", ...: `regauge.merging.methods.METHODS`.
        base: the base model, for methods that add differences from one.
        weights: the weight of each model, or one for all; 1 by default.
        align: align every model with the base, or with the first, before merging.
        refine: refine the alignment by gradient descent, as `match` does: on unlabelled data, on
            "self" (text that the models generate) or on "noise". Requires `align`.
        data: data for methods that need it (fisher, regmean, ot_acts), and for `evaluate`.
        spec: the spec of all models; by default that of their family.
        options: further options.
        out: the output that `save` will write. It is checked first, and alignments and statistics
            are saved beside it.
        resume: continue from the state that an interrupted merge of the same inputs has saved
            beside `out`.
        dry_run: check everything, but read no data and save nothing. Methods that need data cannot
            be saved then.
        progress: the progress callback.

    Returns:
        The merge, with `save(folder)` and `state()`.

    Raises:
        MergeError: the models do not fit each other or the method, or share no basis.
        RecipeError: the recipe is not valid.
        LockError: one of the models is locked.

    Example:
        >>> _ = regauge.move("model", 1).save("moved")
        >>> merged = regauge.merge(["model", "moved"], weights=0.5, align=True)
        >>> _ = merged.save("merged")
    """
    chosen = resolve_options(options, MergeOptions())
    if refine is not None and not align:
        raise MergeError(
            "refine requires an alignment to refine, got align=False", hint="pass align=True"
        )
    alignment = _align_section(refine, chosen.refine_steps) if align else None
    sources: dict[str, Source] = {}
    if isinstance(models, str | Path):
        if not str(models).lower().endswith(_YAML):
            raise MergeError(
                f"models must be a list of models or a recipe (RECIPE.yaml), got {models}",
                hint="pass [A, B]",
            )
        models = read_recipe(Path(models))
    if isinstance(models, Recipe):
        texts = (chosen.dtype, chosen.tokenizer, chosen.chat_template)
        given = (method, base, weights, data, *texts)
        if chosen.parameters or any(value is not None for value in given):
            raise MergeError(
                "the recipe defines the merge: method, base, weights, parameters, dtype, "
                "tokenizer, chat_template and data must be set there"
            )
        recipe = models
        if refine is not None and recipe.align is not None:
            raise MergeError(
                "the recipe defines the alignment: refine must be set there",
                hint="write align: {refine: DATA}",
            )
        if alignment is not None and recipe.align is None:
            section = yaml.safe_dump({"align": alignment}, sort_keys=False, allow_unicode=True)
            config = AlignConfig(
                refine=None if refine is None else source_of(refine, kinds="or a DataSource"),
                refine_steps=chosen.refine_steps,
            )
            recipe = replace(recipe, align=config, text=f"{recipe.text.rstrip()}\n{section}")
    else:
        names = [_add_source(sources, model) for model in models]
        base_name = None if base is None else _add_source(sources, base)
        recipe = build_recipe(
            names, method or "linear", base_name, weights, alignment, data, chosen
        )
    target = None if out is None else Path(out)
    if target is not None:
        check_new(target)
    job = open_merge(recipe, sources=sources, spec=spec, seed=chosen.seed, force=chosen.force)
    if target is not None:  # rejects a bad output before anything is read
        plan_merge(job, target, shard_bytes=chosen.shard_bytes)
    needs_data = bool(METHODS[recipe.method].statistic) or METHODS[recipe.method].is_transport
    opened: Any = {}
    if needs_data:
        from regauge.merging.data_pass import collect_statistics, open_samples

        opened = open_samples(job)
        job = replace(job, digests=tuple(dataset.digest for _, dataset in opened.values()))
    elif recipe.data is not None:
        recipe.data.open()  # so that unreadable data fail before anything is merged
    inputs: dict[str, Batches | Generated] = {}
    if recipe.align is not None:
        inputs = read_refinement(job.models, job.anchor, recipe.align)
        digests = tuple(digest_of_inputs(batches) for batches in inputs.values())
        job = replace(job, digests=(*job.digests, *digests))
    store = None
    if target is not None and not dry_run:
        store = StateStore.beside(target, serialize_inputs(job))
        if not resume:
            store.delete()
    job = require_basis(job, store, _prefixed(progress, "basis"))
    job = align_merge(job, store, _prefixed(progress, "align"), {} if dry_run else inputs)
    if needs_data and not dry_run:
        job = collect_statistics(job, opened, store, _prefixed(progress, "statistics"))
    return MergeResult(job, chosen, target, store)


def build_recipe(
    models: Sequence[str],
    method: str,
    base: str | None,
    weights: float | Sequence[float] | None,
    align: dict[str, Any] | bool | None,
    data: DataSource | str | Path | None,
    options: MergeOptions,
) -> Recipe:
    """Return the recipe that the arguments of `merge` stand for, as text that can be run again."""
    if not models or (len(models) < 2 and base is None):
        raise MergeError(
            f"models must be two or more, or one and a base, got {len(models)}",
            hint="pass [A, B], or a recipe (RECIPE.yaml)",
        )
    each = [weights] if isinstance(weights, int | float) else list(weights or [1.0])
    each *= len(models) if len(each) == 1 else 1
    if len(each) != len(models):
        raise MergeError(
            f"weights must be one number, or one for each of {len(models)} models, got {len(each)}"
        )
    has_weights = method in METHODS and "weight" in METHODS[method].per_model
    if weights is not None and not has_weights and method in METHODS:
        raise MergeError(f"{method} takes no weights", hint="leave the weights out")
    if base is None and method == "slerp" and len(models) == 2:
        base = models[0]
    entries: list[dict[str, Any]] = [{"model": model} for model in models]
    if has_weights:
        for entry, weight in zip(entries, each, strict=True):
            entry["parameters"] = {"weight": weight}
        if METHODS[method].uses_base or base not in models:
            entries = [entry for entry in entries if entry["model"] != base]
    document: dict[str, Any] = {"merge_method": method, "models": entries}
    document |= {
        "base_model": base,
        "parameters": dict(options.parameters) or None,
        "dtype": options.dtype,
        "tokenizer_source": options.tokenizer,
        "chat_template": options.chat_template,
        "align": align,
        "data": None if data is None else _data_section(data),
    }
    document = {name: value for name, value in document.items() if value is not None}
    return parse_recipe(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "the command line"
    )


def _align_section(
    refine: DataSource | str | Path | None, steps: int
) -> dict[str, Any] | Literal[True]:
    """Return an alignment as the section of a recipe."""
    if refine is None:
        return True
    section: dict[str, Any] = {"refine": _data_section(refine)}
    return section if steps == REFINE_STEPS else section | {"refine_steps": steps}


def _data_section(data: DataSource | str | Path) -> dict[str, Any]:
    """Return data as the section of a recipe: what differs from the defaults."""
    source = source_of(data, kinds="or a DataSource")
    values = {**source.__dict__, "fields": dict(source.fields)}
    values |= {name: list(values[name]) for name in ("mean", "std", "attributes")}
    default = DataSource(source.uri, split="test").__dict__
    return {
        name: value
        for name, value in values.items()
        if name == "uri" or (value and value != default[name])
    }


def _add_source(sources: dict[str, Source], model: Source) -> str:
    """Return the name of a model in the recipe; models in memory are added to `sources`."""
    from regauge.models.sources import open_source

    if isinstance(model, str | Path):
        return str(model)
    known = next((name for name, source in sources.items() if source is model), None)
    if known is not None:
        return known
    stem = str(open_source(model)[0].path)
    names = (stem, *(f"{stem} ({i})" for i in range(2, len(sources) + 3)))
    name = next(name for name in names if name not in sources)
    sources[name] = model
    return name


def _prefixed(progress: Progress | None, stage: str) -> Progress | None:
    """Return a progress callback whose messages start with the stage."""
    if progress is None:
        return None
    return lambda done, total, message: progress(
        done, total, f"{stage}: {message}" if message else ""
    )
