"""The merge of checkpoints, from a recipe to a folder: opened, laid out, checked, aligned and
streamed.

Only the tensors in flight are in memory. Errors are raised before the first byte is written. The
output is atomic, and a merge that was killed resumes after its last complete shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from regauge.checkpoints.resume import StateStore
from regauge.core import axes as ax
from regauge.core.check import check
from regauge.core.groups import Permutation, Scaling, SignedPermutation
from regauge.core.progress import Progress
from regauge.errors import Hint, MergeError, RegaugeError, SpecError, UnknownModelError
from regauge.matching.preparation import layers_of
from regauge.merging.basis import (
    Verdict,
    align_models,
    check_basis,
    require_shared_basis,
    save_verdict,
    saved_verdict,
    untie_alike,
)
from regauge.merging.card import model_card
from regauge.merging.chat_template import CONFIG_FILE, resolve_template, template_files
from regauge.merging.layout import Model, OutputTensor, find_stacks, lay_out, sliced_config
from regauge.merging.methods import (
    METHODS,
    MergeInput,
    TensorOrBlocks,
    normalized_weights,
)
from regauge.merging.products import Entries, Products, product_spaces, tensors_of
from regauge.merging.recipes import Recipe
from regauge.merging.tokens import TOKENIZER_FILES, TokenTables, plan_token_tables
from regauge.models.resolve import spec_of
from regauge.models.sources import open_source, require_unlocked

if TYPE_CHECKING:
    from regauge.core.spec import Spec
    from regauge.matching.live_pair import Batches, Generated
    from regauge.models.sources import Source as ModelSource

SHARD_BYTES = 2_000_000_000  # in a file of the output: the most that a kill may cost
RECIPE_FILE = "recipe.yaml"
# The donor's files that describe only the donor.
_STALE = ("README.md", RECIPE_FILE, "mergekit_config.yml", "match.json")


@dataclass(frozen=True, eq=False)
class Merge:
    """A recipe with its models opened and its outputs laid out.

    Attributes:
        recipe: the recipe.
        models: the models, by key.
        donor: the model that gives config, tokenizer and tensor order: the base, or the first
            model.
        outputs: the output tensors, in order.
        tables: the embedding tables of different vocabularies, if the recipe joins them.
        seed: the random seed.
        force: merge models of other architectures or bases.
        verdicts: the results of the basis check.
        statistics: statistics of each model, for methods that need data.
        notes: remarks for the user.
        digests: digests of the data.
        chat_template: the chat template of the output; None leaves the donor's.
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
    chat_template: str | None = None

    @property
    def anchor(self) -> Model:
        """The model that the others are compared and aligned with."""
        key = self.recipe.align.to if self.recipe.align else None
        return self.models[key] if key is not None else self.donor


def open_merge(
    recipe: Recipe,
    *,
    sources: Mapping[str, ModelSource] | None = None,
    spec: Spec | None = None,
    seed: int = 0,
    force: bool = False,
) -> Merge:
    """Open every model of a recipe and lay out the output. Only headers are read.

    Args:
        recipe: the recipe.
        sources: models that are not named by a path or hub id, by their names in the recipe.
        spec: the spec of all models; by default that of their families.
        seed: the random seed.
        force: merge models of other architectures or bases.

    Raises:
        MergeError: if models do not fit each other, or a required parameter is missing.
        LockError: if one of them is locked.
    """
    models = {key: open_model(key, (sources or {}).get(key), spec) for key in recipe.models}
    for model in models.values():
        require_unlocked(model.checkpoint)
    models = untie_alike(models)
    anchor = recipe.align.to if recipe.align else None
    if anchor is not None and anchor not in models:
        raise MergeError(
            f"align: to must be a model of the recipe, got {anchor}",
            hint=f"choose from {', '.join(models)}",
        )
    donor = models[recipe.base or recipe.slices[0].sources[0].model]
    outputs = lay_out(recipe, models, donor, force=force)
    merge = Merge(
        recipe,
        models,
        donor,
        outputs,
        plan_token_tables(recipe, models, donor),
        seed,
        force,
        {},
        chat_template=_chat_template(recipe, models),
    )
    for output in outputs:
        _resolve_parameters(merge, output)  # raises if a parameter is missing
    return merge


def _chat_template(recipe: Recipe, models: Mapping[str, Model]) -> str | None:
    """Return the text of the chat template that the recipe chooses, if it chooses one."""
    if recipe.chat_template is None:
        return None
    folders = [m.checkpoint.path for m in models.values() if m.checkpoint.is_folder]
    return resolve_template(recipe.chat_template, folders)


def open_model(key: str, source: ModelSource | None = None, spec: Spec | None = None) -> Model:
    """Open a model; its spec is None if no family describes it."""
    module = None
    if source is None or isinstance(source, str | Path):
        checkpoint = open_adapted(key if source is None else str(source))
    else:
        checkpoint, module = open_source(source)
    try:
        spec = spec or spec_of(checkpoint if module is None else module)
        fits = not check(spec, checkpoint.entries)
    except (UnknownModelError, SpecError):
        return Model(key, checkpoint, None, checkpoint, checkpoint.shapes)
    return Model(key, checkpoint, spec if fits else None, checkpoint, checkpoint.shapes)


def require_basis(
    merge: Merge, store: StateStore | None = None, progress: Progress | None = None
) -> Merge:
    """Return the merge with the verdicts of the basis check.

    Raises:
        MergeError: if models do not share a basis, unless they are to be aligned or `force` is set.
    """
    verdicts = {}
    for key, model in merge.models.items():
        if key == merge.anchor.key:
            continue
        saved = saved_verdict(model, merge.anchor, store) if store else None
        verdicts[key] = saved or check_basis(
            model, merge.anchor, compare_if_unclear=not merge.force, progress=progress
        )
        if store and saved is None and merge.recipe.align is not None:
            save_verdict(verdicts[key], store)
    if (
        merge.recipe.align is None
        and not merge.force
        and not METHODS[merge.recipe.method].is_transport
    ):
        require_shared_basis(verdicts)
    return replace(merge, verdicts=verdicts)


def align_merge(
    merge: Merge,
    store: StateStore | None = None,
    progress: Progress | None = None,
    inputs: Mapping[str, Batches | Generated] | None = None,
) -> Merge:
    """Return the merge with its models aligned, if the recipe requires it.

    Args:
        merge: the merge.
        store: saved state of an interrupted merge.
        progress: the progress callback.
        inputs: the inputs of each model's refinement, of `read_refinement`.
    """
    config = merge.recipe.align
    if config is None:
        return merge
    models, verdicts = align_models(
        merge.models, merge.anchor, config, merge.verdicts, store, progress, inputs
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
    """Return everything that determines the result: version, recipe, seed, files and elements."""
    from regauge import __version__

    recipe = merge.recipe
    files = {key: model.checkpoint.stamps for key, model in merge.models.items()}
    elements = {key: model.element_digest.hex() for key, model in merge.models.items()}
    settings = [
        __version__,
        recipe.method,
        repr(recipe.slices),
        recipe.base,
        repr(recipe.parameters),
        recipe.dtype,
        recipe.out_dtype,
        repr(recipe.tokens),
        repr(recipe.align),
    ]
    return json.dumps(
        [settings, merge.seed, files, elements, repr(recipe.data), merge.digests]
    ).encode()


def plan_merge(
    merge: Merge, out: Path, *, shard_bytes: int = SHARD_BYTES
) -> tuple[Plan, dict[str, Callable[[], TensorOrBlocks]]]:
    """Return the files of the output, and one thunk per tensor that computes it.

    Args:
        merge: the merge.
        out: the output folder.
        shard_bytes: the largest size of a file.

    Raises:
        MergeError: if the output cannot be written there.
    """
    if is_file_name(out):
        raise MergeError(
            f"the output must be a folder, got {out}",
            hint=Hint("pass a folder as out", cli="pass a folder with -o"),
        )
    for model in merge.models.values():
        for path in model.checkpoint.sources:
            check_target(out, path)
    tensors = [
        (output.name, _output_dtype(merge, output), _output_shape(merge, output))
        for output in merge.outputs
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
    skipped: tuple[str, ...] = ()
    if merge.donor.checkpoint.is_folder:
        written = {*small, *(f.name for f in files), *merge.donor.checkpoint.files, *_STALE}
        copies, skipped = other_files(merge.donor.checkpoint.path, written)
    if merge.tables is not None:
        copies = {
            name: path for name, path in copies.items() if name not in TOKENIZER_FILES
        } | dict(merge.tables.copies)
        small |= merge.tables.files
    if merge.chat_template is not None:
        config = copies.get(CONFIG_FILE)
        small |= template_files(
            merge.chat_template, small.get(CONFIG_FILE) or (config and config.read_bytes()) or None
        )
        copies = {name: path for name, path in copies.items() if name not in small}
    products = Products()
    thunks: dict[str, Callable[[], TensorOrBlocks]] = {
        output.name: partial(_merge_output, merge, output, products) for output in merge.outputs
    }
    outputs = {output.name: output for output in merge.outputs}
    mode = strictest_mode([origin] if (origin := Path(merge.recipe.origin)).is_file() else [])
    for model in merge.models.values():
        mode &= model.checkpoint.mode
    plan = Plan(
        tuple(files),
        small,
        copies,
        skipped,
        serialize_inputs(merge),
        lambda name: _has_finite_inputs(merge, outputs[name]),
        mode=mode,
    )
    return plan, thunks


def _resolve_parameters(
    merge: Merge, output: OutputTensor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the parameters of one output tensor: shared ones, and those of each model.

    The base has no parameters of its own.
    """
    recipe, method = merge.recipe, METHODS[merge.recipe.method]
    if output.is_copy:
        return {}, []
    shared = {
        name: recipe.resolve_parameter(name, output.slice, None, output.name, output.t, default)
        for name, default in method.shared.items()
    }
    per_model = []
    for i, (source, name) in enumerate(output.inputs):
        is_base = method.uses_base and i == output.base
        per_model.append(
            {
                parameter: None
                if is_base
                else recipe.resolve_parameter(
                    parameter, output.slice, source, name, output.t, default
                )
                for parameter, default in method.per_model.items()
            }
        )
    return shared, per_model


def _merge_output(merge: Merge, output: OutputTensor, products: Products) -> TensorOrBlocks:
    """Compute one output tensor."""
    states = [merge.models[source.model].state for source, _ in output.inputs]
    tensors: list[torch.Tensor] = [
        state[name] for state, (_, name) in zip(states, output.inputs, strict=True)
    ]
    if output.is_copy:
        return tensors[0]
    dtype = getattr(torch, DTYPES[_output_dtype(merge, output)][0])
    compare_dtype = (
        getattr(torch, merge.recipe.dtype)
        if merge.recipe.dtype
        else getattr(torch, DTYPES[_stored_dtype(merge, output)][0])
    )
    if merge.tables is not None and output.is_table:
        tensors = merge.tables.remap([source.model for source, _ in output.inputs], tensors)
    shared, per_model = _resolve_parameters(merge, output)
    base = output.base if METHODS[merge.recipe.method].uses_base else None
    # Statistics were computed from the original rows.
    is_remapped = merge.tables is not None and output.is_table
    statistics = (
        [
            None if is_remapped else merge.statistics[source.model].get(name)
            for source, name in output.inputs
        ]
        if merge.statistics
        else ()
    )
    try:
        return METHODS[merge.recipe.method].merge(
            MergeInput(
                tensors,
                shared,
                per_model,
                base,
                dtype,
                compare_dtype,
                output.name,
                merge.seed,
                statistics,
                reading_axes(merge.anchor.spec, output.inputs[0][1]),
                _averaged_products(merge, output, products) if shared.get("products") else (),
            )
        )
    except RegaugeError as error:
        raise MergeError(f'"{output.name}": {error}', hint=error.hint) from error


def _averaged_products(merge: Merge, output: OutputTensor, products: Products) -> Sequence[Entries]:
    """Return the entries of an output tensor that are factors of averaged products."""
    models = [merge.models[source.model] for source, _ in output.inputs]
    specs, names = [model.spec for model in models], [name for _, name in output.inputs]
    known = [spec for spec in specs if spec is not None]
    if len(known) < len(specs):
        return ()
    spaces, weights = product_spaces(known[0], names[0]), _weights_of(merge, output)
    partners = {tensor for space in spaces for tensor in tensors_of(known[0], space)}
    for other in merge.outputs:
        source, name = other.inputs[0]
        if source is output.inputs[0][0] and name in partners:
            found = _weights_of(merge, other)
            if found != weights:
                raise MergeError(
                    f'"{output.name}" and "{other.name}" must have the same weights with products, '
                    f"got {weights} and {found}",
                    hint="give both factors of a product the same weights, or leave products out",
                )
    return products.entries(known, [model.state for model in models], names, weights)


def _weights_of(merge: Merge, output: OutputTensor) -> list[float]:
    """Return the weights of the models in one output tensor, normalized if the merge is."""
    shared, per_model = _resolve_parameters(merge, output)
    return normalized_weights(shared, per_model)


def reading_axes(spec: Spec | None, name: str) -> tuple[int, ...]:
    """Return the axes along which the neurons of a feed-forward layer read, if this tensor holds
    their input weights.

    Neurons are the coordinates of a space of one layer that is only permuted and scaled, and is
    neither a set of heads nor of experts.
    """
    if spec is None or name not in spec.tensors:
        return ()
    terms = ax.parse(spec.tensors[name]).terms
    leaves = {i: term for i, term in enumerate(terms) if isinstance(term, ax.Leaf)}
    layers = layers_of(spec)
    writes_neurons = any(
        not leaf.star
        and leaf.space in layers
        and spec.spaces[leaf.space].over is None
        and not spec.children(leaf.space)
        and isinstance(spec.spaces[leaf.space].group, Permutation | SignedPermutation | Scaling)
        for leaf in leaves.values()
    )
    return tuple(i for i, leaf in leaves.items() if leaf.star) if writes_neurons else ()


def _stored_dtype(merge: Merge, output: OutputTensor) -> str:
    """Return the dtype in which the base, or the first model, stores a tensor.

    A tensor that folding created has the dtype of the first stored one.
    """
    source, name = output.inputs[output.base or 0]
    entries = merge.models[source.model].checkpoint.entries
    return entries[name].dtype if name in entries else next(iter(entries.values())).dtype


def _output_dtype(merge: Merge, output: OutputTensor) -> str:
    """Return the dtype of an output tensor."""
    requested = merge.recipe.out_dtype or merge.recipe.dtype
    return (
        _stored_dtype(merge, output)
        if requested is None or output.is_copy
        else DTYPE_NAMES[requested]
    )


def _output_shape(merge: Merge, output: OutputTensor) -> tuple[int, ...]:
    """Return the shape of an output tensor."""
    return (
        (merge.tables.rows, *output.shape[1:])
        if merge.tables is not None and output.is_table
        else output.shape
    )


def _pack_shards(tensors: Sequence[tuple[str, str, tuple[int, ...]]], shard: int) -> list[File]:
    """Distribute the tensors over files of at most `shard` bytes."""
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        if groups[-1] and used + size > shard:
            groups.append([])
            used = 0
        groups[-1].append((name, dtype, shape))
        used += size
    if len(groups) == 1:
        return [File(WEIGHTS, tuple(groups[0]), {"format": "pt"})]
    return [
        File(f"model-{i + 1:05}-of-{len(groups):05}.safetensors", tuple(group), {"format": "pt"})
        for i, group in enumerate(groups)
    ]


def _output_config(merge: Merge) -> bytes:
    """Return the donor's config.json with the changes of the merge."""
    config, changes = dict(merge.donor.checkpoint.config or {}), dict(merge.donor.config)
    requested = merge.recipe.out_dtype or merge.recipe.dtype
    if requested is not None:
        changes |= {key: requested for key in ("dtype", "torch_dtype") if key in config} or {
            "torch_dtype": requested
        }
    changes |= sliced_config(
        merge.recipe, merge.donor, max(find_stacks(merge.donor.state).values(), default=0)
    )
    if merge.tables is not None and "vocab_size" in config:
        changes["vocab_size"] = merge.tables.rows
    names = {output.name for output in merge.outputs}
    ties = merge.donor.spec.ties if merge.donor.spec else {}
    # Tied in the donor, but another model has a head of its own.
    if any(alias in names and target in names for alias, target in ties.items()):
        changes |= {
            "tie_word_embeddings": False,
            **(merge.donor.spec.untied_config if merge.donor.spec else {}),
        }
    if not changes and merge.donor.checkpoint.config_path is not None:
        return merge.donor.checkpoint.config_path.read_bytes()
    return (json.dumps({**config, **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def _has_finite_inputs(merge: Merge, output: OutputTensor) -> bool:
    """Return whether all inputs of an output tensor are finite."""
    return all(
        bool(merge.models[source.model].state[name].isfinite().all())
        for source, name in output.inputs
    )
