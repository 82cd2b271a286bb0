"""A merge of checkpoints, from a recipe to a folder: opened, laid out, tested, aligned, and
streamed tensor by tensor through the writer.

Nothing is held but the tensors in flight. What can be refused is refused before the first byte;
what is written is there whole or not at all, and a merge that was killed goes on where its last
whole shard ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.adapted import open_adapted
from regauge.checkpoints.files import strictest_mode
from regauge.checkpoints.headers import DTYPE_NAMES, DTYPES
from regauge.checkpoints.plan import (
    File,
    Plan,
    check_target,
    index_of,
    is_file_name,
    nbytes,
    other_files,
)
from regauge.checkpoints.reader import INDEX, WEIGHTS
from regauge.core.check import check
from regauge.core.progress import Progress
from regauge.errors import RegaugeError, SpecError, UnknownModelError
from regauge.merging.basis import Verdict, align_models, check_basis, require_shared_basis
from regauge.merging.card import model_card
from regauge.merging.layout import Model, OutputTensor, find_stacks, lay_out, sliced_config
from regauge.merging.methods import METHODS, MergeError, MergeInput, TensorOrBlocks
from regauge.merging.recipes import Recipe
from regauge.merging.state_store import MergeStateStore
from regauge.merging.tokens import TOKENIZER_FILES, TokenTables, plan_token_tables
from regauge.models.resolve import spec_of

SHARD_BYTES = 2_000_000_000  # bytes in a file of the output, at most: what a kill may cost
RECIPE_FILE = "recipe.yaml"
_STALE = (
    "README.md",
    RECIPE_FILE,
    "mergekit_config.yml",
    "match.json",
)  # of the donor's files: these speak of the donor alone


@dataclass(frozen=True, eq=False)
class Merge:
    """A recipe with its models opened and its tensors laid out. The donor gives config, tokenizer
    and order: it is the base, or the first model.
    """

    recipe: Recipe
    models: Mapping[str, Model]
    donor: Model
    outputs: Sequence[OutputTensor]
    tables: TokenTables | None
    seed: int
    force: bool
    verdicts: Mapping[str, Verdict]
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()

    @property
    def anchor(self) -> Model:
        """The model that the others are held against, and moved next to."""
        to = self.recipe.align.to if self.recipe.align else None
        return self.models[to] if to is not None else self.donor


def open_merge(recipe: Recipe, *, seed: int = 0, force: bool = False) -> Merge:
    """Open every model of a recipe and lay the output out. Headers are read, and no tensor."""
    models = {key: _open_model(key) for key in recipe.models}
    to = recipe.align.to if recipe.align else None
    if to is not None and to not in models:
        raise MergeError(
            f"align asks for {to}, which is no model of the recipe",
            hint=f"choose from {', '.join(models)}",
        )
    donor = models[recipe.base or recipe.slices[0].sources[0].model]
    places = lay_out(recipe, models, donor, force=force)
    merge = Merge(
        recipe, models, donor, places, plan_token_tables(recipe, models, donor), seed, force, {}
    )
    for place in places:
        _resolve_parameters(merge, place)  # a parameter that is missing is missed now
    return merge


def _open_model(key: str) -> Model:
    checkpoint = open_adapted(key)
    try:
        spec = spec_of(checkpoint)
        fits = not check(spec, checkpoint.entries)
    except (UnknownModelError, SpecError):
        return Model(key, checkpoint, None, checkpoint, checkpoint.shapes)
    return Model(key, checkpoint, spec if fits else None, checkpoint, checkpoint.shapes)


def require_basis(
    merge: Merge, store: MergeStateStore | None = None, progress: Progress | None = None
) -> Merge:
    """The merge with its verdicts. Models that share no basis are refused, unless they are to be
    aligned, or by force.
    """
    verdicts = {}
    for key, model in merge.models.items():
        if key == merge.anchor.key:
            continue
        known = store.load_verdict(key) if store else None
        verdicts[key] = (
            Verdict(**known)
            if known
            else check_basis(
                model, merge.anchor, compare_if_unclear=not merge.force, progress=progress
            )
        )
        if store and known is None and merge.recipe.align is not None:
            store.save_verdict(key, verdicts[key].to_dict())
    if (
        merge.recipe.align is None
        and not merge.force
        and not METHODS[merge.recipe.method].is_transport
    ):
        require_shared_basis(verdicts)
    return replace(merge, verdicts=verdicts)


def align(
    merge: Merge, store: MergeStateStore | None = None, progress: Progress | None = None
) -> Merge:
    """The merge with its models moved, if the recipe asks for it."""
    how = merge.recipe.align
    if how is None:
        return merge
    models, verdicts = align_models(
        merge.models, merge.anchor, how, merge.verdicts, store, progress
    )
    donor = models[merge.donor.key]
    return replace(
        merge,
        models=models,
        donor=donor,
        verdicts=verdicts,
        outputs=lay_out(merge.recipe, models, donor, force=merge.force),
    )


def serialize_inputs(merge: Merge) -> bytes:
    """What determines the result: the version, the recipe, the seed, the files, and the elements
    that move them.
    """
    from regauge import __version__

    r = merge.recipe
    files = {
        key: [(n, s.size, s.path.stat().st_mtime_ns) for n, s in m.checkpoint.files.items()]
        for key, m in merge.models.items()
    }
    elements = {key: m.element_digest.hex() for key, m in merge.models.items()}
    said = [
        __version__,
        r.method,
        repr(r.slices),
        r.base,
        repr(r.parameters),
        r.dtype,
        r.out_dtype,
        repr(r.tokens),
        repr(r.align),
    ]
    return json.dumps([said, merge.seed, files, elements, repr(r.data), merge.digests]).encode()


def plan_merge(
    merge: Merge, out: Path, *, shard_bytes: int = SHARD_BYTES
) -> tuple[Plan, dict[str, Callable[[], TensorOrBlocks]]]:
    """The files of the output and what makes each tensor."""
    if is_file_name(out):
        raise MergeError(
            f"the output {out} is named like a file",
            hint="a merge is written as a folder: name one with -o",
        )
    for model in merge.models.values():
        for path in model.checkpoint.sources:
            check_target(out, path)
    tensors = [
        (place.name, _output_dtype(merge, place), _output_shape(merge, place))
        for place in merge.outputs
    ]
    files = _pack_shards(tensors, shard_bytes)
    small = (
        {"config.json": _output_config(merge)} if merge.donor.checkpoint.config is not None else {}
    )
    if len(files) > 1:
        small[INDEX] = index_of(files)
    small[RECIPE_FILE] = merge.recipe.text.encode()
    small["README.md"] = model_card(merge, out.name).encode()
    copies: dict[str, Path] = {}
    left: tuple[str, ...] = ()
    if merge.donor.checkpoint.is_folder:
        written = {*small, *(f.name for f in files), *merge.donor.checkpoint.files, *_STALE}
        copies, left = other_files(merge.donor.checkpoint.path, written)
    if merge.tables is not None:
        copies = {
            name: path for name, path in copies.items() if name not in TOKENIZER_FILES
        } | dict(merge.tables.copies)
        small |= merge.tables.files
    thunks: dict[str, Callable[[], TensorOrBlocks]] = {
        place.name: partial(_merge_output, merge, place) for place in merge.outputs
    }
    places = {place.name: place for place in merge.outputs}
    mode = strictest_mode([where] if (where := Path(merge.recipe.origin)).is_file() else [])
    for model in merge.models.values():
        mode &= model.checkpoint.mode
    plan = Plan(
        tuple(files),
        small,
        copies,
        left,
        serialize_inputs(merge),
        lambda name: _has_finite_inputs(merge, places[name]),
        mode=mode,
    )
    return plan, thunks


def _resolve_parameters(
    merge: Merge, place: OutputTensor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The parameters of one place: those of the merge, and those of each model. The base needs none
    of its own.
    """
    recipe, method = merge.recipe, METHODS[merge.recipe.method]
    if place.is_copy:
        return {}, []
    shared = {
        name: recipe.resolve_parameter(name, place.slice, None, place.name, place.t, default)
        for name, default in method.shared.items()
    }
    each = []
    for i, (source, name) in enumerate(place.inputs):
        own = method.needs_base and i == place.base
        each.append(
            {
                p: None
                if own
                else recipe.resolve_parameter(p, place.slice, source, name, place.t, default)
                for p, default in method.per_model.items()
            }
        )
    return shared, each


def _merge_output(merge: Merge, place: OutputTensor) -> TensorOrBlocks:
    states = [merge.models[source.model].state for source, _ in place.inputs]
    tensors: list[torch.Tensor] = [
        state[name] for state, (_, name) in zip(states, place.inputs, strict=True)
    ]
    if place.is_copy:
        return tensors[0]
    dtype = getattr(torch, DTYPES[_output_dtype(merge, place)][0])
    kind = (
        getattr(torch, merge.recipe.dtype)
        if merge.recipe.dtype
        else getattr(torch, DTYPES[_stored_dtype(merge, place)][0])
    )
    if merge.tables is not None and place.is_table:
        tensors = merge.tables.remap([source.model for source, _ in place.inputs], tensors)
    shared, each = _resolve_parameters(merge, place)
    base = place.base if METHODS[merge.recipe.method].needs_base else None
    rewritten = (
        merge.tables is not None and place.is_table
    )  # rows that were put elsewhere are not those that were looked at
    known = (
        [
            None if rewritten else merge.statistics[source.model].get(name)
            for source, name in place.inputs
        ]
        if merge.statistics
        else ()
    )
    try:
        return METHODS[merge.recipe.method].merge(
            MergeInput(tensors, shared, each, base, dtype, kind, place.name, merge.seed, known)
        )
    except RegaugeError as error:
        raise MergeError(f'"{place.name}": {error}', hint=error.hint) from error


def _stored_dtype(merge: Merge, place: OutputTensor) -> str:
    """The dtype in which the base, or the first model, stores a tensor. One that folding has made
    is as its neighbours are.
    """
    source, name = place.inputs[place.base or 0]
    entries = merge.models[source.model].checkpoint.entries
    return entries[name].dtype if name in entries else next(iter(entries.values())).dtype


def _output_dtype(merge: Merge, place: OutputTensor) -> str:
    asked = merge.recipe.out_dtype or merge.recipe.dtype
    return _stored_dtype(merge, place) if asked is None or place.is_copy else DTYPE_NAMES[asked]


def _output_shape(merge: Merge, place: OutputTensor) -> tuple[int, ...]:
    return (
        (merge.tables.rows, *place.shape[1:])
        if merge.tables is not None and place.is_table
        else place.shape
    )


def _pack_shards(tensors: Sequence[tuple[str, str, tuple[int, ...]]], shard: int) -> list[File]:
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        if groups[-1] and held + size > shard:
            groups.append([])
            held = 0
        groups[-1].append((name, dtype, shape))
        held += size
    if len(groups) == 1:
        return [File(WEIGHTS, tuple(groups[0]), {"format": "pt"})]
    return [
        File(f"model-{i + 1:05}-of-{len(groups):05}.safetensors", tuple(group), {"format": "pt"})
        for i, group in enumerate(groups)
    ]


def _output_config(merge: Merge) -> bytes:
    """The donor's config.json, with what the merge changed."""
    config, changes = dict(merge.donor.checkpoint.config or {}), dict(merge.donor.config)
    asked = merge.recipe.out_dtype or merge.recipe.dtype
    if asked is not None:
        changes |= {key: asked for key in ("dtype", "torch_dtype") if key in config} or {
            "torch_dtype": asked
        }
    changes |= sliced_config(
        merge.recipe, merge.donor, max(find_stacks(merge.donor.state).values(), default=0)
    )
    if merge.tables is not None and "vocab_size" in config:
        changes["vocab_size"] = merge.tables.rows
    names = {place.name for place in merge.outputs}
    ties = merge.donor.spec.ties if merge.donor.spec else {}
    if any(
        alias in names and target in names for alias, target in ties.items()
    ):  # another model's head is its own
        changes |= {
            "tie_word_embeddings": False,
            **(merge.donor.spec.untied_config if merge.donor.spec else {}),
        }
    if not changes and merge.donor.checkpoint.config_path is not None:
        return merge.donor.checkpoint.config_path.read_bytes()
    return (json.dumps({**config, **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def _has_finite_inputs(merge: Merge, place: OutputTensor) -> bool:
    return all(
        bool(merge.models[source.model].state[name].isfinite().all())
        for source, name in place.inputs
    )
