"""The basis check before a merge, and the alignment of models with one of them.

A sample of rows of every matrix decides most cases at the cost of reading a few rows. In another
basis hardly any direction of a matrix agrees with the other's; fine-tuned models of one ancestor
agree row by row and column by column. Cases in between are decided by `regauge compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from regauge.checkpoints.headers import FLOATS, Entry
from regauge.checkpoints.reader import LazyState
from regauge.checkpoints.resume import StateStore
from regauge.checkpoints.transform import recipe_digest
from regauge.checkpoints.vocabulary import read_vocabulary
from regauge.core.element import Element
from regauge.core.progress import Progress
from regauge.core.ties import untie_lazily
from regauge.errors import Hint, MergeError, RegaugeError
from regauge.matching import MatchError, SharedRows
from regauge.matching.compare import MIN_COSINE, compare_states, is_mostly_above, matrix_cosine
from regauge.matching.live_pair import SAMPLES, Generated, LivePair, read_inputs
from regauge.matching.paired import match_pair
from regauge.matching.pairs import Pair, prepare_pair
from regauge.matching.saved_parts import SavedParts
from regauge.merging.layout import Model
from regauge.merging.recipes import AlignConfig

if TYPE_CHECKING:
    from regauge.matching.live_pair import Batches

SAMPLE_ROWS = 48  # rows of a matrix that are compared
MAX_UNRELATED_COSINE = 0.1  # below this cosine of a matrix, two models have nothing in common
ALIGNED = "aligned"  # the verdict on models that were trained independently and then aligned
_FOLDED = "folded"  # of a saved alignment that was found with folded norms
# Standard errors by which a row of a matrix resembles the other model's row at the same place more
# than its other rows: of every matrix, and of the median one, if two models were aligned.
MIN_SIGMAS, MIN_MEDIAN_SIGMAS = 1.5, 5.0
# The cosine of two models, after alignment if any, above which averages of them keep their quality.
# A fine-tune that changes weights by 20 % has 0.98. Models that were trained independently have
# 0.3 to 0.7 once they are aligned, and averages of them are worse than both: ViTs on digits 76 %
# (0.46), of 92 %; GPT-2s 0.15 nats (0.38), Llamas 0.44 nats (0.66).
MIN_MERGED_COSINE = 0.8
# The divergence of mixtures after a refinement, in nats, up to which averages keep their quality.
# Of GPT-2s 0.035 (within 0.03 nats of the ends); of ViTs on digits 0.11 (93 %, of 94 and 96 %),
# 0.13 (89 %, of 93 and 92 %) and 0.29 (88 %, of 94 and 96 %).
MAX_DIVERGENCE = 0.12


@dataclass(frozen=True)
class Verdict:
    """The result of the basis check of a model and the anchor.

    Attributes:
        model: the model.
        anchor: the model that it is compared with.
        shared: whether they share a basis; None if inconclusive.
        verdict: the verdict in one or two words.
        words: the verdict in a sentence.
        cosine: the cosine of their matrices.
        seen: what was compared: "a sample" or "a comparison".
        moved: how the model was aligned, if it was.
        merged_cosine: the cosine of their matrices as they are merged, after an alignment.
        divergence: the divergence of their mixtures from the ends, after a refinement, on inputs
            that it did not see.
        element: the element that a comparison found, to start a match from.
    """

    model: str
    anchor: str
    shared: bool | None
    verdict: str
    words: str
    cosine: float | None
    seen: str
    moved: str = ""
    merged_cosine: float | None = None
    divergence: float | None = None
    element: Element | None = None

    @property
    def warning(self) -> str:
        """A warning if an average of the two is unlikely to keep their quality, or nothing."""
        if self.divergence is not None:  # measured, so the cosine has no say
            if self.divergence <= MAX_DIVERGENCE:
                return ""
            return (
                f"mixtures of {self.model} and {self.anchor} diverge from them by "
                f"{self.divergence:.2f} after refinement: their average is likely to be worse than "
                "both. Measure it with labelled --data"
            )
        cosine = self.cosine if self.merged_cosine is None else self.merged_cosine
        if cosine is None or cosine >= MIN_MERGED_COSINE:
            return ""
        way_out = (
            "--refine learns a better alignment. Measure the result with labelled --data"
            if self.moved
            else "Measure it with labelled --data"
        )
        return (
            f"the cosine of the matrices of {self.model} and {self.anchor} is {cosine:.2f}"
            f"{' after alignment' if self.moved else ''}: models so far apart average to one that "
            f"is usually worse than both, and may be useless. {way_out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {key: value for key, value in self.__dict__.items() if key != "element"}


def check_basis(
    model: Model,
    anchor: Model,
    *,
    compare_if_unclear: bool = True,
    progress: Progress | None = None,
) -> Verdict:
    """Check whether two models share a basis without alignment.

    Args:
        model: the model.
        anchor: the model to compare it with.
        compare_if_unclear: run a comparison if the sample is inconclusive.
        progress: the progress callback.
    """
    sample = _sample_cosines(model, anchor)
    verdict = partial(Verdict, model.key, anchor.key, cosine=sample.cosine, seen="a sample")
    evidence = (
        f"without alignment (cosine {sample.cosine:.3f}; the smallest, {sample.min_cosine:.3f}, is "
        f"that of {sample.min_tensor})"
    )
    if not sample.min_tensor:
        return verdict(None, "inconclusive", "cannot be compared: they have no matrix in common")
    if sample.min_cosine >= MIN_COSINE and sample.is_aligned:
        return verdict(True, "same basis", f"share a basis {evidence}")
    if sample.is_matched:
        return verdict(
            True, ALIGNED, f"were trained independently and aligned (cosine {sample.cosine:.3f})"
        )
    if sample.min_cosine < MAX_UNRELATED_COSINE:
        return verdict(False, "different bases", f"do not share a basis {evidence}")
    if model.spec is None or anchor.spec is None or not compare_if_unclear:
        return verdict(None, "inconclusive", f"may or may not share a basis {evidence}")
    try:
        compared = compare_states(
            anchor.spec,
            model.state,
            anchor.state,
            sweeps=1,
            rows=find_shared_rows(model, anchor),
            progress=progress,
        )
    except RegaugeError as error:
        return verdict(None, "inconclusive", f"cannot be compared: {str(error).splitlines()[0]}")
    return Verdict(
        model.key,
        anchor.key,
        compared.shares_basis,
        compared.verdict,
        compared.explanation,
        compared.cosines[0],
        "a comparison",
        element=compared.match.element,
    )


def saved_verdict(model: Model, anchor: Model, store: StateStore) -> Verdict | None:
    """Return the verdict that an interrupted merge has saved, with the element that it found."""
    outcome = store.load(f"basis {model.key}")
    if outcome is None:
        return None
    part = None if anchor.spec is None else SavedParts(anchor.spec, store).load(f"near {model.key}")
    element = None if part is None or anchor.spec is None else Element(anchor.spec, part[1])
    return Verdict(**outcome.values, element=element)


def save_verdict(verdict: Verdict, store: StateStore) -> None:
    """Save the verdict of a model, so that a resumed merge aligns it from the same start."""
    if verdict.element is not None:
        parts = SavedParts(verdict.element.spec, store)
        parts.save(f"near {verdict.model}", [], verdict.element.members)
    if verdict.cosine is None or math.isfinite(verdict.cosine):
        store.save(f"basis {verdict.model}", verdict.to_dict())


@dataclass(frozen=True)
class _SampleCosines:
    """Cosines of sampled rows.

    Attributes:
        cosine: of all matrices together.
        min_cosine: the smallest of one matrix.
        min_tensor: the name of that matrix; empty if there is none.
        is_aligned: whether most rows and columns of every matrix are similar.
        is_matched: whether rows of every matrix resemble those at the same place more than others.
    """

    cosine: float
    min_cosine: float
    min_tensor: str
    is_aligned: bool
    is_matched: bool


def _sample_cosines(model: Model, anchor: Model) -> _SampleCosines:
    """Compare sampled rows of every matrix that both models have."""
    totals, min_cosine, min_tensor, is_aligned = np.zeros(3), 1.0, "", True
    sigmas: list[float] = []
    for name, entry in anchor.checkpoint.entries.items():
        if (
            len(entry.shape) < 2
            or entry.dtype not in FLOATS
            or not entry.numel
            or model.checkpoint.shapes.get(name) != entry.shape
        ):
            continue
        if _is_task_head(anchor, name):
            continue
        rows = np.unique(np.linspace(0, entry.shape[0] - 1, SAMPLE_ROWS).astype(np.int64))
        x, y = (_to_float(m.checkpoint[name][rows].reshape(len(rows), -1)) for m in (model, anchor))
        products = [x * y, x.square(), y.square()]
        by_row, by_column = ([p.sum(axis).double() for p in products] for axis in (1, 0))
        parts = np.array([float(p.sum()) for p in by_row])
        if not parts[1] and not parts[2]:
            continue
        totals += parts
        cosine = float(parts[0] / math.sqrt(max(parts[1] * parts[2], 1e-300)))
        is_aligned = is_aligned and all(
            is_mostly_above(sums, cosine / 2)
            for sums, n in ((by_column, x.shape[0]), (by_row, x.shape[1]))
            if n >= 16
        )
        if min(x.shape) >= 16:
            sigmas.append(_sigmas_at_place(x, y))
        if cosine < min_cosine or not min_tensor:
            min_cosine, min_tensor = cosine, name
    return _SampleCosines(
        float(totals[0] / math.sqrt(max(totals[1] * totals[2], 1e-300))),
        min_cosine,
        min_tensor,
        is_aligned,
        bool(sigmas)
        and min(sigmas) >= MIN_SIGMAS
        and float(np.median(sigmas)) >= MIN_MEDIAN_SIGMAS,
    )


def _sigmas_at_place(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return by how many standard errors rows of x resemble the rows of y at their own places more
    than those at others, on average.
    """
    cosines = functional.normalize(x, dim=1) @ functional.normalize(y, dim=1).T
    same = cosines.diag()
    others = cosines[~torch.eye(len(cosines), dtype=torch.bool)]
    error = float(others.std()) / math.sqrt(len(same))
    return float(same.mean() - others.mean()) / max(error, 1e-300)


def _to_float(x: torch.Tensor) -> torch.Tensor:
    """Convert to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _is_task_head(model: Model, name: str) -> bool:
    """Return whether a tensor is a head that each fine-tuned model trains anew, such as a
    classifier.
    """
    return (
        model.spec is not None
        and model.spec.parts.get(name) == "head"
        and name not in model.token_tables
    )


def find_shared_rows(model: Model, anchor: Model) -> dict[str, SharedRows]:
    """Return the rows that the tables of two models have in common, if their vocabularies
    differ.
    """
    tables = [
        n
        for n in anchor.token_tables
        if n in model.shapes and n in anchor.shapes and model.shapes[n] != anchor.shapes[n]
    ]
    if not tables:
        return {}
    rows, anchor_rows = (
        read_vocabulary(model.checkpoint.path),
        read_vocabulary(anchor.checkpoint.path),
    )
    common = sorted(rows.keys() & anchor_rows.keys(), key=lambda token: anchor_rows[token])
    shared = SharedRows(tuple(rows[t] for t in common), tuple(anchor_rows[t] for t in common))
    return dict.fromkeys(tables, shared)


def require_shared_basis(verdicts: Mapping[str, Verdict]) -> None:
    """Raise unless all models share a basis with the anchor.

    Raises:
        MergeError: if a model does not, or if that is inconclusive.
    """
    failed = [v for v in verdicts.values() if not v.shared]
    if failed:
        first = failed[0]
        others = f" (and {len(failed) - 1} more models)" if len(failed) > 1 else ""
        relation = (
            "does not share a basis with" if first.shared is False else "may not share a basis with"
        )
        raise MergeError(
            f"{first.model} {relation} {first.anchor}{others}: merging would give noise"
            f"\n  {first.words}",
            hint=Hint(
                "align=True aligns it first, MergeOptions(force=True) merges it "
                "unaligned; regauge.compare shows details",
                cli="--align (in a recipe, align: true) aligns it first, --force "
                "merges it unaligned; regauge compare shows details",
            ),
        )


def align_models(
    models: Mapping[str, Model],
    anchor: Model,
    config: AlignConfig,
    verdicts: Mapping[str, Verdict],
    store: StateStore | None = None,
    progress: Progress | None = None,
    inputs: Mapping[str, Batches | Generated] | None = None,
) -> tuple[dict[str, Model], dict[str, Verdict]]:
    """Align every model with the anchor: in its basis, and with its norms.

    The anchor and models that share its basis are unchanged; only their heads are untied if that of
    another model is. Tensors are transformed when they are read, in float32.

    Args:
        models: the models, by key.
        anchor: the model to align with.
        config: the alignment options of the recipe.
        verdicts: the results of the basis check.
        store: saved state of an interrupted merge.
        progress: the progress callback.
        inputs: the inputs of each model's refinement, of `read_refinement`.

    Returns:
        The aligned models, and the verdicts with a note on each alignment.
    """
    if anchor.spec is None:
        raise MatchError(
            f"{anchor.key} must be of a known family to align models with it",
            hint=Hint(
                "pass MergeOptions(force=True) to merge them unaligned",
                cli="pass --force to merge them unaligned",
            ),
        )
    aligned, noted = dict(models), dict(verdicts)
    for key, model in models.items():
        # models that were aligned before may come closer, such as by rotations
        if key == anchor.key or (noted[key].shared and noted[key].verdict != ALIGNED):
            continue
        if model.spec is None:
            raise MatchError(
                f"{key} must be of a known family to be aligned",
                hint=Hint(
                    "pass MergeOptions(force=True) to merge them unaligned",
                    cli="pass --force to merge them unaligned",
                ),
            )
        aligned[key], noted[key] = _align_model(
            model, anchor, config, noted[key], (inputs or {}).get(key), store, progress
        )
    return untie_alike(aligned), noted


def read_refinement(
    models: Mapping[str, Model], anchor: Model, config: AlignConfig
) -> dict[str, Batches | Generated]:
    """Read the inputs on which alignments are refined, so that bad data fail before any work.

    Raises:
        DataError: they do not exist, or do not fit a model.
        RecordError: a model cannot generate text.
    """
    if config.refine is None:
        return {}
    return {
        key: read_inputs(config.refine, model.checkpoint)
        for key, model in models.items()
        if key != anchor.key and model.spec is not None
    }


def _align_model(
    model: Model,
    anchor: Model,
    config: AlignConfig,
    verdict: Verdict,
    inputs: Batches | Generated | None,
    store: StateStore | None,
    progress: Progress | None,
) -> tuple[Model, Verdict]:
    """Return a model aligned with the anchor, and the verdict with notes on the alignment."""
    assert model.file_spec is not None
    assert anchor.file_spec is not None
    options = {"sweeps": 10, **config.options}
    pair = prepare_pair(
        (model.checkpoint, model.file_spec),
        (anchor.checkpoint, anchor.file_spec),
        stream=config.stream,
        within=options.get("within", "full"),
        spaces=options.get("spaces"),
    )
    pair = replace(pair, rows=find_shared_rows(model, anchor))
    name = f"aligned {model.key}"
    saved = SavedParts(pair.spec, store).load(name)
    if saved is not None:
        (note, gauge, cosine, divergence), members, _ = saved
        pair = pair if gauge == _FOLDED else pair.unfolded()
        verdict = replace(
            verdict,
            moved=note,
            merged_cosine=float(cosine),
            divergence=float(divergence) if divergence else None,
        )
        return _transform(model, pair, Element(pair.spec, members)), verdict
    start = None if pair.is_folded or config.options else verdict.element
    live = LivePair(pair, SAMPLES, 0)
    is_plain = start is None and not config.options and config.stream == "auto"
    written = live.default_inputs() if is_plain else None
    pair, result = match_pair(
        pair,
        start=start,
        record=partial(live.record, written) if written is not None else None,
        only_apart=True,
        store=store.nested(model.key) if store else None,
        progress=progress,
        **options,
    )
    refined = None
    if inputs is not None:
        result, refined = live.with_pair(pair).refine_match(
            result, inputs, config.refine_steps, progress
        )
    note = (
        f"aligned with {anchor.key}: distance {result.distance_before:.4g} before, "
        f"{result.distance:.4g} after"
    )
    notes = [note, *pair.notes, *pair.output[1]]
    if refined is not None:
        notes.append(
            f"refined in {refined.best_step} of {config.refine_steps} steps: divergence from the "
            f"ends {refined.initial_loss:.4f} before, {refined.loss:.4f} after"
        )
    verdict = replace(
        verdict,
        moved="; ".join(notes),
        merged_cosine=matrix_cosine(pair.spec, *pair.states, result.element, pair.rows),
        divergence=None if refined is None else refined.loss,
    )
    gauge = _FOLDED if pair.is_folded else ""
    divergence = "" if refined is None else repr(refined.loss)
    labels = [verdict.moved, gauge, repr(verdict.merged_cosine), divergence]
    SavedParts(pair.spec, store).save(name, labels, result.element.members)
    return _transform(model, pair, result.element), verdict


def _transform(model: Model, pair: Pair, g: Element) -> Model:
    """Return a model moved by an element; tensors are computed when they are read."""
    from regauge.core.action import apply_lazily

    source = pair.output[0]
    if pair.is_folded:
        thunks = source.thunks(g, as_bits=False, rounded=False)
        thunks = {
            name: partial(_as_merged, make, model.checkpoint.entries.get(name))
            for name, make in thunks.items()
        }
    else:
        thunks = apply_lazily(g, LazyState(list(source.state), partial(load_float, source.state)))
    state = LazyState.from_thunks(thunks)
    spec = source.output_spec
    return replace(
        model,
        spec=replace(spec, config={}),
        state=state,
        shapes={n: model.shapes[n] if n in model.shapes else tuple(state[n].shape) for n in thunks},
        config=dict(spec.config),
        element_digest=recipe_digest(g, source.spec, source.steps, None),
    )


def _as_merged(make: Callable[[], Any], entry: Entry | None) -> Any:
    """Return a tensor in float32, unless it is stored in more."""
    value = make()
    is_single = entry is None or entry.dtype != "F64"
    return value.float() if is_single and value.dtype == torch.float64 else value


def untie_alike(models: Mapping[str, Model]) -> dict[str, Model]:
    """Return the models with a tensor of its own for each tied one that is not tied in another."""
    own = {name for model in models.values() for name in model.state}
    return {key: _untie(model, own) for key, model in models.items()}


def _untie(model: Model, names: Collection[str]) -> Model:
    """Return a model in which none of these names repeats another tensor."""
    ties = {} if model.spec is None else model.spec.ties
    lost = {a for a, t in ties.items() if a in names and t in names and a not in model.state}
    if not lost or model.spec is None:
        return model
    spec, thunks = untie_lazily(model.spec, model.state, lost)
    shapes = {n: model.shapes[model.stored_name(n) or n] for n in thunks}
    return replace(
        model,
        spec=replace(spec, config={}),
        tied_spec=model.file_spec,
        state=LazyState.from_thunks(thunks),
        shapes=shapes,
        config={**model.config, **spec.config},
    )


def load_float(state: Mapping[str, Any], name: str) -> Any:
    """Return a tensor of a state, in float32 if it is stored in less."""
    value = state[name]
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
