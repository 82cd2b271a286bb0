"""`match` and `compare` on what users hold: paths, hub ids, checkpoints, modules or state dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge.checkpoints.element_files import save_element
from regauge.core.action import apply
from regauge.core.element import Element, identity
from regauge.core.groups import Kind
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import MatchError
from regauge.matching import Match
from regauge.matching.compare import Comparison, compare_states
from regauge.matching.pairs import Pair, open_pair
from regauge.matching.report import (
    format_comparison,
    format_match,
    results_of_comparison,
    results_of_match,
)
from regauge.matching.search import MAX_SWEEPS, match_states
from regauge.models.sources import require_unlocked
from regauge.results.findings import Results
from regauge.results.views import ResultView

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.writer import WriteResult
    from regauge.matching.refine import Refinement
    from regauge.models.sources import Source

    Batches = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class MatchOptions:
    """Options of the search; see `regauge.matching.search.match_states`.

    Attributes:
        spaces: the spaces that take part ("qk", "head.3", ...); all by default.
        layers: the layers whose spaces take part; all by default.
        within: the kind that every group is restricted to ("orthogonal": rotations only).
        weights: the weight of each tensor in the distance, by name (* matches anything).
        anchors: the tensors that determine a space in the first pass.
        sweeps: the largest number of sweeps after the first pass.
        nearest: let sweeps also move spaces that tables determine.
        rescale: add one factor per head to its rotation (paper 003).
        workers: the number of processes.
    """

    spaces: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    within: Kind = "full"
    weights: Mapping[str, float] | None = None
    anchors: Sequence[str] | None = None
    sweeps: int = MAX_SWEEPS
    nearest: bool = True
    rescale: bool = False
    workers: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `match_states`."""
        return dict(self.__dict__)


@dataclass(frozen=True, eq=False)
class ModelMatch(ResultView):
    """A aligned with B: the element, the distances, and the files that they become.

    Attributes:
        pair: the two models, prepared by folding norms or fixing gauges.
        match: the element, and distances before, after and at every step.
        facts: facts of the run, for the report.
        refined: the refinement by gradient descent, if there was one.
        by_weights: whether the distance of the weights was minimized.
    """

    pair: Pair
    match: Match
    facts: Mapping[str, Any]
    refined: Refinement | None = None
    by_weights: bool = True

    @property
    def element(self) -> Element:
        """The element that moves A into the basis of B."""
        return self.match.element

    @property
    def distance(self) -> float:
        """The Euclidean distance between the aligned A and B."""
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
        return apply(self.element, self.pair.a.state)

    def save(self, out: str | Path) -> WriteResult:
        """Write the aligned A, with match.json, to a new folder or .safetensors file.

        Raises:
            CheckpointError: the output exists, overlaps an input, or cannot be written.
        """
        return self._write(self.pair.a, Path(out), self.element, match_json=self.to_json().encode())

    def save_b(self, out: str | Path) -> WriteResult:
        """Write B as it was prepared, with folded norms or fixed gauges: what A is aligned with."""
        return self._write(self.pair.b, Path(out), identity(self.pair.spec))

    def save_element(self, path: str | Path) -> None:
        """Write the element to a new file."""
        save_element(self.element, Path(path), new=True)

    def _write(self, side: Any, out: Path, g: Element, **small: bytes) -> WriteResult:
        from regauge.checkpoints.writer import write_plan

        thunks = side.thunks(g)
        mode = self.pair.a.checkpoint.mode & self.pair.b.checkpoint.mode
        return write_plan(out, side.plan(out, g, thunks, mode=mode, **small), thunks)

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
        """The verdict: "equal", "same basis", "another description", "related", "unrelated"."""
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


def match(
    a: Source,
    b: Source,
    *,
    spec: Spec | str | Path | None = None,
    fold: bool = False,
    fix: Sequence[str] = (),
    shared_tokens: bool = False,
    data: Batches | Literal["self"] | None = None,
    refine: Batches | Literal["self"] | None = None,
    options: MatchOptions | None = None,
    progress: Progress | None = None,
) -> ModelMatch:
    """Align A with B: the same function as A, in the basis nearest to B.

    Args:
        a: the model to align: a path, a hub id, a checkpoint, a module, or a state dict with
            `spec`. It is not changed.
        b: the model to align to.
        spec: a spec or spec file for both; by default that of their family.
        fold: fold the norms of both first, which allows rotations of the stream. A is then aligned
            with the folded B, which `save_b` writes.
        fix: gauges to fix in both first: "keys", "values", "balance".
        shared_tokens: match by the shared tokens of two different vocabularies.
        data: match by activations: batches of inputs, or "self" for text that the models generate.
            By default by the weights.
        refine: refine the element by gradient descent on these batches, or on generated text.
        options: options of the search.
        progress: the progress callback.

    Returns:
        The match, with `element`, `distance`, `save(folder)`, `to_html()`.

    Raises:
        MatchError: the two do not fit each other, or hold values that are not finite.
        LockError: one of them is locked.

    Example:
        >>> # m = regauge.match("A", "B")
        >>> # m.distance_before, m.distance
        >>> # m.save("A-aligned")
    """
    pair = open_pair(a, b, spec, fold=fold, fix=fix, shared_tokens=shared_tokens)
    for side in (pair.a, pair.b):
        require_unlocked(side.checkpoint)
    return match_pair(pair, data=data, refine=refine, options=options, progress=progress)


def match_pair(
    pair: Pair,
    *,
    data: Batches | Literal["self"] | None = None,
    refine: Batches | Literal["self"] | None = None,
    refine_steps: int = 200,
    samples: int = 64,
    seed: int = 0,
    options: MatchOptions | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **state: Any,
) -> ModelMatch:
    """Match two models that were opened by `open_pair`; as `match`.

    Args:
        pair: the two models.
        data: as in `match`.
        refine: as in `match`.
        refine_steps: steps of the refinement.
        samples: texts to generate for "self".
        seed: seed of the generated text and of the refinement.
        options: options of the search.
        facts: facts of the run, for the report.
        progress: the progress callback.
        state: `start`, `known_spaces` and `save` of `match_states`, to resume a search.
    """
    chosen = (options or MatchOptions()).to_dict()
    loaded = None
    activations, batches = None, None
    if data is not None or refine is not None:
        loaded = LoadedPair(pair, samples, seed)
        batches = None if refine is None else loaded.batches_or_generated(refine)
        if data is not None:
            activations = loaded.record_activations(loaded.batches_or_generated(data))
    found = match_states(
        pair.spec,
        pair.a.state,
        pair.b.state,
        rows=pair.rows,
        activations=activations,
        progress=progress,
        **chosen,
        **state,
    )
    result = ModelMatch(pair, found, facts or {}, by_weights=activations is None)
    if loaded is None or batches is None:
        return result
    refined = loaded.refine(found.element, batches, refine_steps, progress)
    found = found.with_element(refined.g, pair.spec, pair.a.state, pair.b.state)
    return replace(result, match=found, refined=refined)


def compare(
    a: Source,
    b: Source,
    *,
    spec: Spec | str | Path | None = None,
    fold: bool = False,
    shared_tokens: bool = False,
    options: MatchOptions | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ModelComparison:
    """Measure whether two models share a basis, directly or after matching.

    Args:
        a: the first model: a path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        b: the second model.
        spec: a spec or spec file for both; by default that of their family.
        fold: fold the norms of both first, which allows rotations of the stream.
        shared_tokens: compare by the shared tokens of two different vocabularies.
        options: options of the search; by default three sweeps.
        seed: the seed of the shuffled control.
        progress: the progress callback.

    Example:
        >>> # regauge.compare("A", "B").verdict
    """
    pair = open_pair(a, b, spec, fold=fold, shared_tokens=shared_tokens)
    return compare_pair(pair, options=options, seed=seed, progress=progress)


def compare_pair(
    pair: Pair,
    *,
    options: MatchOptions | None = None,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ModelComparison:
    """Compare two models that were opened by `open_pair`; as `compare`."""
    comparison = compare_states(
        pair.spec,
        pair.a.state,
        pair.b.state,
        seed=seed,
        rows=pair.rows,
        progress=progress,
        **(options or MatchOptions(sweeps=3)).to_dict(),
    )
    return ModelComparison(pair, comparison, facts or {})


class LoadedPair:
    """Both models in memory, with the weights that are matched, folded or not."""

    def __init__(self, pair: Pair, samples: int, seed: int) -> None:
        from regauge.models.load import load_model

        self.pair, self.samples, self.seed = pair, samples, seed
        sides = (pair.a, pair.b)
        self.models = [
            load_model(side.checkpoint, "float32") if module is None else module
            for side, module in zip(sides, pair.modules, strict=True)
        ]
        self.states = [
            {n: v.float() if v.is_floating_point() else v for n, v in side.state.items()}
            for side in sides
        ]

    def batches_or_generated(self, batches: Batches | Literal["self"]) -> list[dict[str, Any]]:
        """Return the batches, or text that the two models generate."""
        if not isinstance(batches, str):
            return [dict(batch) for batch in batches]
        if batches != "self":
            raise MatchError(
                f'data must be batches of inputs or "self", got {batches!r}',
                hint='read examples with regauge.data, or pass "self" for language models',
            )
        from regauge.matching.activations import generate_text

        return generate_text(self.models, count=self.samples, seed=self.seed, batch_size=8)

    def record_activations(self, batches: list[dict[str, Any]]) -> tuple[Any, Any]:
        """Record the activations of both models on these batches."""
        from regauge.matching.activations import record

        of_a, of_b = (
            record(model, state, self.pair.spec, batches)
            for model, state in zip(self.models, self.states, strict=True)
        )
        return of_a, of_b

    def refine(
        self, g: Element, batches: list[dict[str, Any]], steps: int, progress: Progress | None
    ) -> Refinement:
        """Refine an element by gradient descent on these batches."""
        from regauge.matching.refine import Evaluation, refine

        def report(mark: Evaluation) -> None:
            if progress is not None:
                message = f"refinement: divergence from the ends {mark.held_out_loss:.4f}"
                progress(mark.step, steps, message if mark.step < steps else "")

        return refine(
            self.pair.spec,
            self.states[0],
            self.states[1],
            g,
            self.models[0],
            batches,
            steps=steps,
            seed=self.seed,
            on_mark=report,
        )
