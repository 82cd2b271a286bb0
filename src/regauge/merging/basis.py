"""Before a merge: do the models share a basis? And if they are to be aligned, the same models next
to one of them.

A sample of rows of every matrix settles it in most cases, at the price of reading a few rows: in
another basis hardly anything of a matrix points the way that the other's does, while fine-tuned
models of one ancestor do so row by row and column by column. What is in between is for `regauge
compare`, whose verdict is asked for then.
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
from regauge.checkpoints.transform import prepare_source, recipe_digest
from regauge.checkpoints.vocabulary import read_vocabulary
from regauge.core.element import Element, identity
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.matching import MatchError, SharedRows, match
from regauge.matching.compare import MIN_COSINE, compare
from regauge.merging.layout import Model
from regauge.merging.methods import MergeError
from regauge.merging.recipes import AlignConfig
from regauge.merging.state_store import MergeStateStore

SAMPLE_ROWS = 48  # rows of a matrix that are looked at
MAX_UNRELATED_COSINE = (
    0.1  # a cosine of a matrix that says that the two have nothing in common there
)
# a distance after matching, as a share of the norm, at which models have little in common: a cosine
# of a half
MAX_RELATIVE_DISTANCE = 1.0
MIN_ALIGNED_SHARE = 0.9  # the share of the rows, and of the columns, that must be alike


@dataclass(frozen=True)
class Verdict:
    """What was found about a model and the one that it is held against. `shared` is None where it
    could not be told; `element` is what a comparison found, for a match to go on from.
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
        return {key: value for key, value in self.__dict__.items() if key != "element"}


def check_basis(
    model: Model,
    anchor: Model,
    *,
    compare_if_unclear: bool = True,
    progress: Progress | None = None,
) -> Verdict:
    """Do the two share a basis as they stand? By a sample, and where that does not settle it, and a
    `closer` look is wanted, by a comparison.
    """
    found = _sample_cosines(model, anchor)
    told = partial(Verdict, model.key, anchor.key, cosine=found.cosine, seen="a sample")
    words = (
        f"as they stand (cosine {found.cosine:.3f}; the least, {found.min_cosine:.3f}, is that "
        f"of {found.min_tensor})"
    )
    if not found.min_tensor:
        return told(None, "not told", "cannot be told: they have no matrix in common")
    if found.min_cosine >= MIN_COSINE and found.is_aligned:
        return told(True, "same basis", f"share a basis {words}")
    if found.min_cosine < MAX_UNRELATED_COSINE:
        return told(False, "different bases", f"share no basis {words}")
    if model.spec is None or anchor.spec is None or not compare_if_unclear:
        return told(None, "not told", f"may or may not share a basis {words}")
    try:
        compared = compare(
            anchor.spec,
            model.state,
            anchor.state,
            sweeps=1,
            rows=find_shared_rows(model, anchor),
            progress=progress,
        )
    except RegaugeError as error:
        return told(None, "not told", f"cannot be told: {str(error).splitlines()[0]}")
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


@dataclass(frozen=True)
class _SampleCosines:
    """The cosine of all matrices, the least of one and which, and whether in every matrix most rows
    and most columns are alike.
    """

    cosine: float
    min_cosine: float
    min_tensor: str
    is_aligned: bool


def _sample_cosines(model: Model, anchor: Model) -> _SampleCosines:
    totals, least, where, alike = np.zeros(3), 1.0, "", True
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
        inner = [x * y, x.square(), y.square()]
        by_row, by_column = ([p.sum(axis).double() for p in inner] for axis in (1, 0))
        parts = np.array([float(p.sum()) for p in by_row])
        if not parts[1] and not parts[2]:
            continue
        totals += parts
        cosine = float(parts[0] / math.sqrt(max(parts[1] * parts[2], 1e-300)))
        alike = alike and all(
            _mostly_above(sums, cosine / 2)
            for sums, n in ((by_column, x.shape[0]), (by_row, x.shape[1]))
            if n >= 16
        )
        if cosine < least or not where:
            least, where = cosine, name
    return _SampleCosines(
        float(totals[0] / math.sqrt(max(totals[1] * totals[2], 1e-300))), least, where, alike
    )


def _to_float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _mostly_above(sums: Sequence[torch.Tensor], least: float) -> bool:
    """Are most cosines at least this? `sums` are of products and of both squares, by row or by
    column.
    """
    product, x, y = sums
    cosines = product / (x.sqrt() * y.sqrt()).clamp(min=1e-300)
    return float((cosines >= least).double().mean()) >= MIN_ALIGNED_SHARE


def _is_task_head(model: Model, name: str) -> bool:
    """Is this a head that every fine-tuned model has of its own, as classifiers are?"""
    return (
        model.spec is not None
        and model.spec.parts.get(name) == "head"
        and name not in model.token_tables
    )


def find_shared_rows(model: Model, anchor: Model) -> dict[str, SharedRows]:
    """The rows that two models' tables have in common, where their vocabularies differ."""
    tables = [
        n
        for n in anchor.token_tables
        if n in model.shapes and n in anchor.shapes and model.shapes[n] != anchor.shapes[n]
    ]
    if not tables:
        return {}
    here, there = read_vocabulary(model.checkpoint.path), read_vocabulary(anchor.checkpoint.path)
    common = sorted(here.keys() & there.keys(), key=lambda token: there[token])
    shared = SharedRows(tuple(here[t] for t in common), tuple(there[t] for t in common))
    return dict.fromkeys(tables, shared)


def require_shared_basis(verdicts: Mapping[str, Verdict]) -> None:
    """Refuse models that share no basis, or of which that cannot be told."""
    away = [v for v in verdicts.values() if not v.shared]
    if away:
        one = away[0]
        more = f" (and {len(away) - 1} more models)" if len(away) > 1 else ""
        what = (
            "does not share a basis with" if one.shared is False else "may not share a basis with"
        )
        raise MergeError(
            f"{one.model} {what} {one.anchor}{more}, and merging would give noise\n  {one.words}",
            hint="--align (align: true) moves it into the other's basis first, --force merges "
            "it as it is; regauge compare says more",
        )


def align_models(
    models: Mapping[str, Model],
    anchor: Model,
    config: AlignConfig,
    verdicts: Mapping[str, Verdict],
    store: MergeStateStore | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Model], dict[str, Verdict]]:
    """Every model next to the anchor, and what became of the verdicts. Models that share the
    anchor's basis stay as they are, unless norms are folded, which all of them are then. What is
    moved is moved as it is read, in float32.
    """
    if anchor.spec is None:
        raise MatchError(
            f"{anchor.key} is of no family that regauge describes, so that nothing can be "
            "aligned to it",
            hint="merge with --force",
        )
    out, told = {}, dict(verdicts)
    fixed = _prepare(anchor, config.fold)
    for key, model in models.items():
        if key == anchor.key:
            out[key] = _transform(fixed, None)
            continue
        ready = _prepare(model, config.fold)
        if told[key].shared:
            out[key] = _transform(ready, None)
            continue
        g = store.load(key, fixed.spec) if store else None
        if g is None:
            start = None if config.fold or config.options else told[key].element
            options = {"sweeps": 10, **config.options}
            found = match(
                fixed.spec,
                ready.state,
                fixed.state,
                rows=find_shared_rows(model, anchor),
                start=start,
                progress=progress,
                **options,
            )
            g, note = (
                found.element,
                (
                    f"moved next to {anchor.key}: distance {found.distance_before:.4g} before, "
                    f"{found.distance:.4g} after"
                ),
            )
            if found.relative_distance > MAX_RELATIVE_DISTANCE:
                note += (
                    ", which is still far: the two were trained independently, or their "
                    "norms hide a rotation (align: {fold: true})"
                )
            if store:
                store.save(key, g, note)
        else:
            note = store.load_note(key) if store else ""
        out[key] = _transform(ready, g)
        told[key] = replace(told[key], moved=note)
    return out, told


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A model, as it is or with folded norms."""

    model: Model
    spec: Spec
    state: Mapping[str, Any]
    steps: tuple[str, ...]


def _prepare(model: Model, fold: bool) -> _Prepared:
    if model.spec is None:
        raise MatchError(
            f"{model.key} is of no family that regauge describes, so that it cannot be aligned",
            hint="merge with --force",
        )
    source = prepare_source(model.checkpoint, model.spec, fold)
    return _Prepared(model, source.state_spec, source.state, source.steps)


def _transform(ready: _Prepared, g: Element | None) -> Model:
    """The model as it will be read: nothing is computed before that."""
    model = ready.model
    if g is None and not ready.steps:
        return model
    from regauge.core.action import apply_lazily

    g = identity(ready.spec) if g is None else g
    thunks = apply_lazily(g, LazyState(list(ready.state), partial(load_float, ready.state)))
    shapes = {
        n: model.shapes[n] if n in model.shapes else tuple(ready.state[n].shape) for n in thunks
    }
    spec = replace(ready.spec, config={})
    digest = recipe_digest(g, ready.spec, ready.steps, None)
    return replace(
        model,
        spec=spec,
        state=LazyState.from_thunks(thunks),
        shapes=shapes,
        config=dict(ready.spec.config),
        element_digest=digest,
    )


def load_float(state: Mapping[str, Any], name: str) -> Any:
    """A tensor of a state, in float32 where it is stored in less."""
    value = state[name]
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
