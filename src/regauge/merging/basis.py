"""The basis check before a merge, and the alignment of models with one of them.

A sample of rows of every matrix decides most cases at the cost of reading a few rows. In another
basis hardly any direction of a matrix agrees with the other's; fine-tuned models of one ancestor
agree row by row and column by column. Cases in between are decided by `regauge compare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.headers import FLOATS
from regauge.checkpoints.reader import LazyState
from regauge.checkpoints.resume import StateStore
from regauge.checkpoints.transform import prepare_source, recipe_digest
from regauge.checkpoints.vocabulary import read_vocabulary
from regauge.core.element import Element, identity
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import MergeError, RegaugeError
from regauge.matching import MatchError, SharedRows, match_states
from regauge.matching.compare import MIN_COSINE, compare_states
from regauge.matching.saved_parts import SavedParts
from regauge.merging.layout import Model
from regauge.merging.recipes import AlignConfig

SAMPLE_ROWS = 48  # rows of a matrix that are compared
MAX_UNRELATED_COSINE = 0.1  # below this cosine of a matrix, two models have nothing in common
# The distance after matching, as a share of the norm, above which models have little in common: a
# cosine of a half.
MAX_RELATIVE_DISTANCE = 1.0
MIN_ALIGNED_SHARE = 0.9  # the share of rows, and of columns, that must be similar


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
    element: Element | None = None

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
    """

    cosine: float
    min_cosine: float
    min_tensor: str
    is_aligned: bool


def _sample_cosines(model: Model, anchor: Model) -> _SampleCosines:
    """Compare sampled rows of every matrix that both models have."""
    totals, min_cosine, min_tensor, is_aligned = np.zeros(3), 1.0, "", True
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
            _mostly_above(sums, cosine / 2)
            for sums, n in ((by_column, x.shape[0]), (by_row, x.shape[1]))
            if n >= 16
        )
        if cosine < min_cosine or not min_tensor:
            min_cosine, min_tensor = cosine, name
    return _SampleCosines(
        float(totals[0] / math.sqrt(max(totals[1] * totals[2], 1e-300))),
        min_cosine,
        min_tensor,
        is_aligned,
    )


def _to_float(x: torch.Tensor) -> torch.Tensor:
    """Convert to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _mostly_above(sums: Sequence[torch.Tensor], threshold: float) -> bool:
    """Return whether most cosines are at least `threshold`.

    `sums` are sums of products and of both squares, by row or by column.
    """
    product, x, y = sums
    cosines = product / (x.sqrt() * y.sqrt()).clamp(min=1e-300)
    return float((cosines >= threshold).double().mean()) >= MIN_ALIGNED_SHARE


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
            hint="--align (align: true) aligns it first, --force merges it unaligned; regauge "
            "compare shows details",
        )


def align_models(
    models: Mapping[str, Model],
    anchor: Model,
    config: AlignConfig,
    verdicts: Mapping[str, Verdict],
    store: StateStore | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Model], dict[str, Verdict]]:
    """Align every model with the anchor.

    Models that share the anchor's basis are unchanged, unless norms are folded, which then applies
    to all. Tensors are transformed when they are read, in float32.

    Args:
        models: the models, by key.
        anchor: the model to align with.
        config: the alignment options of the recipe.
        verdicts: the results of the basis check.
        store: saved state of an interrupted merge.
        progress: the progress callback.

    Returns:
        The aligned models, and the verdicts with a note on each alignment.
    """
    if anchor.spec is None:
        raise MatchError(
            f"{anchor.key} must be of a known family to align models with it",
            hint="merge with --force",
        )
    aligned, noted = {}, dict(verdicts)
    target = _prepare(anchor, config.fold)
    for key, model in models.items():
        if key == anchor.key:
            aligned[key] = _transform(target, None)
            continue
        source = _prepare(model, config.fold)
        if noted[key].shared:
            aligned[key] = _transform(source, None)
            continue
        parts = SavedParts(target.spec, store)
        part = parts.load(f"aligned {key}")
        if part is None:
            start = None if config.fold or config.options else noted[key].element
            options = {"sweeps": 10, **config.options}
            result = match_states(
                target.spec,
                source.state,
                target.state,
                rows=find_shared_rows(model, anchor),
                start=start,
                store=store.nested(key) if store else None,
                progress=progress,
                **options,
            )
            note = (
                f"aligned with {anchor.key}: distance {result.distance_before:.4g} before, "
                f"{result.distance:.4g} after"
            )
            if result.relative_distance > MAX_RELATIVE_DISTANCE:
                note += (
                    ", which is still far: the two were trained independently, or their "
                    "norms hide a rotation (align: {fold: true})"
                )
            part = parts.save(f"aligned {key}", [note], result.element.members)
        (note,), members = part
        g = Element(target.spec, members)
        aligned[key] = _transform(source, g)
        noted[key] = replace(noted[key], moved=note)
    return aligned, noted


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A model with its spec and state, folded if required, and the steps that prepared it."""

    model: Model
    spec: Spec
    state: Mapping[str, Any]
    steps: tuple[str, ...]


def _prepare(model: Model, fold: bool) -> _Prepared:
    """Return a model, with folded norms if required."""
    if model.spec is None:
        raise MatchError(
            f"{model.key} must be of a known family to be aligned",
            hint="merge with --force",
        )
    source = prepare_source(model.checkpoint, model.spec, fold)
    return _Prepared(model, source.state_spec, source.state, source.steps)


def _transform(source: _Prepared, g: Element | None) -> Model:
    """Return the model transformed by an element; tensors are computed when they are read."""
    model = source.model
    if g is None and not source.steps:
        return model
    from regauge.core.action import apply_lazily

    g = identity(source.spec) if g is None else g
    thunks = apply_lazily(g, LazyState(list(source.state), partial(load_float, source.state)))
    shapes = {
        n: model.shapes[n] if n in model.shapes else tuple(source.state[n].shape) for n in thunks
    }
    spec = replace(source.spec, config={})
    digest = recipe_digest(g, source.spec, source.steps, None)
    return replace(
        model,
        spec=spec,
        state=LazyState.from_thunks(thunks),
        shapes=shapes,
        config=dict(source.spec.config),
        element_digest=digest,
    )


def load_float(state: Mapping[str, Any], name: str) -> Any:
    """Return a tensor of a state, in float32 if it is stored in less."""
    value = state[name]
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
