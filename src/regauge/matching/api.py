"""`match` and `compare` on what users hold: paths, hub ids, checkpoints, modules or state dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.element_files import save_element
from regauge.checkpoints.plan import check_new, check_target
from regauge.checkpoints.resume import StateStore
from regauge.core.element import Element
from regauge.core.groups import KINDS, Kind
from regauge.core.options import require_at_least, require_choice, resolve_options
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.core.threads import limited_threads, within_threads
from regauge.errors import MatchError
from regauge.matching import Match
from regauge.matching.compare import Comparison, compare_states, compare_unmatched
from regauge.matching.live_pair import (
    REFINE_STEPS,
    SAMPLES,
    LivePair,
    describe_inputs,
    digest_of_inputs,
)
from regauge.matching.paired import match_pair
from regauge.matching.pairs import STREAMS, Pair, Stream, open_pair
from regauge.matching.report import (
    format_comparison,
    format_match,
    results_of_comparison,
    results_of_match,
)
from regauge.matching.search import MAX_SWEEPS
from regauge.models.sources import require_unlocked
from regauge.results.findings import Results
from regauge.results.views import ResultView

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.writer import WriteResult
    from regauge.evaluation.models import DataInput
    from regauge.evaluation.report import Evaluation
    from regauge.matching.live_pair import Inputs
    from regauge.matching.refine import Refinement
    from regauge.models.sources import Source


@dataclass(frozen=True)
class MatchOptions:
    """Options of a match; of a comparison those of the search (see `match_states`).

    Attributes:
        spaces: the spaces that take part ("qk", "head.3", ...); all by default.
        layers: the layers whose spaces take part; all by default.
        stream: "auto" rotates the residual stream where the model allows it; "permutation" permutes
            it, as Git Re-Basin does.
        within: the kind that every group is restricted to ("orthogonal": rotations only).
        weights: the weight of each tensor in the distance, by name (* matches anything).
        anchors: the tensors that determine a space in the first pass.
        sweeps: the largest number of sweeps after the first pass.
        nearest: let sweeps also move spaces that tables determine.
        rescale: add one factor per head to its rotation (rotation symmetry).
        whole: compare key biases as stored, as rotation symmetry does; softmax cancels them.
        workers: the number of processes.
        samples: the number of examples to read from data, or of texts to generate.
        seed: the seed of both, and of the refinement.
        refine_steps: steps of the refinement.

    Example:
        >>> options = regauge.MatchOptions(within="permutation", sweeps=2)
        >>> m = regauge.match(model, "model", options=options)
    """

    spaces: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    stream: Stream = "auto"
    within: Kind = "full"
    weights: Mapping[str, float] | None = None
    anchors: Sequence[str] | None = None
    sweeps: int = MAX_SWEEPS
    nearest: bool = True
    rescale: bool = False
    whole: bool = False
    workers: int = 1
    samples: int = SAMPLES
    seed: int = 0
    refine_steps: int = REFINE_STEPS

    def __post_init__(self) -> None:
        require_choice(MatchError, "stream", self.stream, STREAMS)
        require_choice(MatchError, "within", self.within, KINDS)
        require_at_least(MatchError, 0, sweeps=self.sweeps)
        names = ("workers", "samples", "refine_steps")
        require_at_least(MatchError, 1, **{name: getattr(self, name) for name in names})

    @property
    def is_plain(self) -> bool:
        """Whether the search has its default options: all spaces, over their full groups."""
        plain = MatchOptions()
        names = ("workers", "sweeps", "samples", "seed", "refine_steps")
        return replace(self, **{name: getattr(plain, name) for name in names}) == plain

    def for_search(self) -> dict[str, Any]:
        """Return the options of `match_states`."""
        others = ("stream", "samples", "seed", "refine_steps")
        return {name: value for name, value in self.__dict__.items() if name not in others}


@dataclass(frozen=True, eq=False)
class ModelMatch(ResultView):
    """A aligned with B: the element, the distances, and the files that they become.

    Attributes:
        pair: the two models, as they were compared.
        match: the element, and distances before, after and at every step.
        facts: facts of the run, for the report.
        refined: the refinement by gradient descent, if there was one.
        by_weights: whether the distance of the weights was minimized.
        store: the saved parts of the search, which `save` deletes.
    """

    pair: Pair
    match: Match
    facts: Mapping[str, Any]
    refined: Refinement | None = None
    by_weights: bool = True
    store: StateStore | None = None

    @property
    def element(self) -> Element:
        """The element that moves A into the basis of B."""
        return self.match.element

    @property
    def distance(self) -> float:
        """The Euclidean distance between the aligned A and B, with norms folded if the stream was
        rotated.
        """
        return self.match.distance

    @property
    def distance_before(self) -> float:
        """The Euclidean distance between A and B."""
        return self.match.distance_before

    @cached_property
    def results(self) -> Results:
        """Findings, tables and figures of the match."""
        return results_of_match(
            self.pair,
            self.match,
            dict(self.facts),
            by_weights=self.by_weights,
            refined=self.refined,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return the aligned A as a state dict."""
        thunks = self.pair.output[0].thunks(self.element, as_bits=False)
        return {name: make() for name, make in thunks.items()}

    def save(
        self,
        out: str | Path,
        *,
        resume: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> WriteResult:
        """Write the aligned A, with match.json, to a new folder or .safetensors file.

        Args:
            out: the output.
            resume: keep the shards that an interrupted run of the same match has finished.
            threads: the number of threads.
            progress: called with the bytes written and the total.

        Raises:
            CheckpointError: the output exists, overlaps an input, or cannot be written.
        """
        from regauge.checkpoints.writer import write_plan

        source, g = self.pair.output[0], self.element
        thunks = source.thunks(g)
        mode = self.pair.a.checkpoint.mode & self.pair.b.checkpoint.mode
        plan = source.plan(Path(out), g, thunks, mode=mode, match_json=self.to_json().encode())
        with limited_threads(threads):
            written = write_plan(
                Path(out), plan, thunks, progress=progress, resume=resume, threads=threads
            )
        if self.store is not None:
            self.store.delete()
        return written

    def evaluate(
        self,
        folder: str | Path,
        data: DataInput,
        *,
        batch_size: int = 32,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Measure A, the aligned A, B, and the averages of A and of the aligned A with B.

        Args:
            folder: the folder that `save` wrote.
            data: labelled data.
            batch_size: examples per forward pass.
            progress: the progress callback, in examples of all models.

        Raises:
            DataError: the data cannot be read, do not fit, or have no labels.
        """
        from regauge.evaluation.models import Subject, evaluate_subjects, open_subjects

        sides = [
            side.checkpoint if module is None else module
            for side, module in zip((self.pair.a, self.pair.b), self.pair.modules, strict=True)
        ]
        out = str(folder)
        a, aligned, b = open_subjects({"A": sides[0], out: Path(folder), "B": sides[1]})

        def average(first: Subject) -> torch.nn.Module:
            mean = aligned.build()  # its head is untied if one of the others is
            states = [subject.build().state_dict() for subject in (first, b)]
            mean.load_state_dict(
                {
                    n: (x + states[1][n]) / 2 if x.is_floating_point() else x
                    for n, x in states[0].items()
                }
            )
            return mean

        averages = [
            Subject(f"average of {x.name} and B", aligned.checkpoint, load=partial(average, x))
            for x in (a, aligned)
        ]
        return evaluate_subjects(
            [a, aligned, b, *averages], data, batch_size=batch_size, progress=progress
        )

    def save_element(self, path: str | Path) -> None:
        """Write the element to a new file."""
        save_element(self.element, Path(path), new=True)

    def __str__(self) -> str:
        return format_match(self.match, self.results)

    def __repr__(self) -> str:
        return (
            f"<match of {self.pair.a.checkpoint.path.name} with "
            f"{self.pair.b.checkpoint.path.name}: distance {self.distance_before:.4g} -> "
            f"{self.distance:.4g}>"
        )


@dataclass(frozen=True, eq=False)
class ModelComparison(ResultView):
    """Whether two models share a basis, directly or after matching.

    Attributes:
        pair: the two models.
        comparison: the verdict and the measurements.
        facts: facts of the run, for the report.
    """

    pair: Pair
    comparison: Comparison
    facts: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """The verdict: "equal", "same basis", "same model, transformed", "related", "unrelated"."""
        return self.comparison.verdict

    @cached_property
    def results(self) -> Results:
        """Findings, tables and figures of the comparison."""
        return results_of_comparison(self.pair, self.comparison, dict(self.facts))

    def __str__(self) -> str:
        return format_comparison(self.comparison, self.results)

    def __repr__(self) -> str:
        names = (side.checkpoint.path.name for side in (self.pair.a, self.pair.b))
        return f"<comparison of {' and '.join(names)}: {self.verdict}>"


@within_threads
def match(
    a: Source,
    b: Source,
    *,
    spec: Spec | str | Path | None = None,
    shared_tokens: bool = False,
    data: Inputs | None = "auto",
    refine: Inputs | None = None,
    options: MatchOptions | None = None,
    out: str | Path | None = None,
    outputs: Sequence[str | Path] = (),
    resume: bool | None = False,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ModelMatch:
    """Align A with B: the same function as A, in the basis nearest to B and with B's norms.

    B stays as it is. Where the model allows it (pre-norm LayerNorm or RMSNorm), the residual stream
    is rotated; the aligned A is then written with the gains of B's norms, and a tied head is
    untied.

    Args:
        a: the model to align: a path, a hub id, a checkpoint, a module, or a state dict with
            `spec`. It is not changed.
        b: the model to align to.
        spec: a spec or spec file for both; by default that of their family.
        shared_tokens: match by the shared tokens of two different vocabularies.
        data: match by activations: the path or hub id of a dataset, a `DataSource`, batches of
            inputs, "self" for text that the models generate, or "noise"; None matches by the
            weights. By default language models that were trained apart are matched by text that
            they generate (up to 500 million parameters), all others by the weights.
        refine: refine the element by gradient descent on such data.
        options: options of the match.
        out: the output that `save` will write. It is checked first, and finished parts of the
            search are saved beside it.
        outputs: further new files and folders, which are checked first.
        resume: continue from the parts that an interrupted match of the same inputs has saved
            beside `out`; None saves nothing.
        facts: further facts of the run, for the report.
        progress: the progress callback.

    Returns:
        The match, with `element`, `distance`, `save(folder)`, `to_html()`.

    Raises:
        MatchError: the two do not fit each other, or hold values that are not finite.
        LockError: one of them is locked.
        CheckpointError: an output exists or overlaps an input.

    Example:
        >>> _ = regauge.move("model", 1).save("moved")
        >>> m = regauge.match("model", "moved")
        >>> m.distance < 1e-3 < m.distance_before
        True
        >>> _ = m.save("aligned")
    """
    chosen = resolve_options(options, MatchOptions())
    targets = [Path(path) for path in (*([] if out is None else [out]), *outputs)]
    _require_separate(targets)
    for target in targets:
        check_new(target)
    pair = _open(a, b, spec, shared_tokens, chosen)
    for side in (pair.a, pair.b):
        require_unlocked(side.checkpoint)
        for target in targets:
            for source in side.checkpoint.sources:
                check_target(target, source)
    live = LivePair(pair, chosen.samples, chosen.seed)
    by_default = live.default_inputs() if data == "auto" and chosen.is_plain else None
    to_refine, to_match = live.read(refine), live.read(None if data == "auto" else data)
    report = progress or (lambda done, total, label: None)
    store = None
    if out is not None and resume is not None:
        digest = digest_of_inputs(to_match)
        if by_default is not None:  # its first parts are of a search by weights
            digest = f"by default {digest_of_inputs(by_default)}"
        store = StateStore.beside(Path(out), _label(pair, chosen, digest))
        if not resume:
            store.delete()
    inputs = by_default if to_match is None else to_match

    def record() -> Any:
        assert inputs is not None
        report(0, 1, "recording the activations of both models")
        return live.record(inputs)

    pair, found = match_pair(
        pair,
        record=None if inputs is None else record,
        only_apart=to_match is None,
        store=store,
        progress=progress,
        **chosen.for_search(),
    )
    refined = None
    if to_refine is not None:
        live = live.with_pair(pair)
        found, refined = live.refine_match(found, to_refine, chosen.refine_steps, progress)
    found = replace(found, notes=(*pair.notes, *found.notes, *pair.output[1]))
    facts = {
        **(facts or {}),
        **_names_of(a, b, pair),
        "folded": pair.is_folded,
        "group": chosen.within,
        "by": describe_inputs(
            None if found.by == "weights" else "self" if to_match is None else data
        ),
        **_facts_of_refinement(refine, refined),
    }
    return ModelMatch(pair, found, facts, refined, found.by == "weights", store)


def _open(
    a: Source,
    b: Source,
    spec: Spec | str | Path | None,
    shared_tokens: bool,
    options: MatchOptions,
) -> Pair:
    """Open a pair as the options require."""
    return open_pair(
        a,
        b,
        spec,
        stream=options.stream,
        within=options.within,
        spaces=options.spaces,
        shared_tokens=shared_tokens,
    )


def _label(pair: Pair, options: MatchOptions, data_digest: str) -> bytes:
    """Return everything that determines the parts of a search."""
    from regauge import __version__

    stamps = [side.checkpoint.stamps for side in (pair.a, pair.b)]
    others = ("workers", "sweeps", "refine_steps")  # any number of sweeps has the same parts
    settings = {name: value for name, value in asdict(options).items() if name not in others}
    return json.dumps(
        [
            __version__,
            stamps,
            [pair.spec.family, repr(pair.spec.spaces), dict(pair.spec.tensors)],
            [pair.is_folded, len(pair.rows)],
            settings,
            data_digest,
        ],
        default=str,
    ).encode()


def _require_separate(targets: Sequence[Path]) -> None:
    """Raise if an output lies in another one: an element is a secret, and must not be published."""
    paths = [target.resolve() for target in targets]
    for i, path in enumerate(paths):
        for j, other in enumerate(paths):
            if i != j and path.is_relative_to(other):
                raise MatchError(
                    f"outputs must not overlap, got {targets[i]} and {targets[j]}",
                    hint="keep each output, and the element, in a place of its own",
                )


def _names_of(a: Source, b: Source, pair: Pair) -> dict[str, str]:
    """Return the names of the two models, as facts."""
    sources = {"a": (a, pair.a), "b": (b, pair.b)}
    return {
        key: str(source) if isinstance(source, str | Path) else side.checkpoint.path.name
        for key, (source, side) in sources.items()
    }


def _facts_of_refinement(inputs: Inputs | None, refined: Refinement | None) -> dict[str, Any]:
    """Return the facts of a refinement."""
    if refined is None:
        return {}
    about = {
        "data": describe_inputs(inputs),
        "steps": refined.best_step,
        "seconds": round(refined.seconds, 1),
        "divergence before": refined.initial_loss,
        "divergence after": refined.loss,
    }
    return {"refined": about}


@within_threads
def compare(
    a: Source,
    b: Source,
    *,
    spec: Spec | str | Path | None = None,
    shared_tokens: bool = False,
    options: MatchOptions | None = None,
    deep: bool = False,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ModelComparison:
    """Measure whether two models share a basis, directly or after matching.

    Args:
        a: the first model: a path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        b: the second model.
        spec: a spec or spec file for both; by default that of their family.
        shared_tokens: compare by the shared tokens of two different vocabularies.
        options: options of the search; by default three sweeps.
        deep: match also two models that share a basis already, with a shuffled control.
        seed: the seed of the shuffled control.
        facts: further facts of the run, for the report.
        progress: the progress callback.

    Returns:
        The comparison, with `verdict` and `to_html()`.

    Raises:
        MatchError: the two do not fit each other, or hold values that are not finite.

    Example:
        >>> _ = regauge.move("model").save("moved")
        >>> regauge.compare("model", "moved").verdict
        'same model, transformed'
    """
    chosen = resolve_options(options, MatchOptions(sweeps=3))
    pair = _open(a, b, spec, shared_tokens, chosen)
    comparison = None
    if not deep:
        plain = pair.unfolded() if pair.is_folded else pair
        comparison = compare_unmatched(plain.spec, *plain.states, rows=pair.rows)
    if comparison is None:
        comparison = compare_states(
            pair.spec,
            *pair.states,
            seed=seed,
            rows=pair.rows,
            progress=progress,
            **chosen.for_search(),
        )
    facts = {
        **(facts or {}),
        **_names_of(a, b, pair),
        "folded": pair.is_folded,
        "group": chosen.within,
        "seed": seed,
    }
    return ModelComparison(pair, comparison, facts)
