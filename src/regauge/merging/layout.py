"""The layout of a merge: the input tensors of each output tensor, and its position along the
layers.

Layers are recognized by names alone: the first number in "model.layers.7.mlp.up_proj.weight" is the
layer, the text before it is the stack. Gradients and slices need nothing else, so they work for
architectures without a spec.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regauge.checkpoints.headers import FLOATS, Entry
from regauge.checkpoints.reader import Checkpoint
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import Hint, MergeError
from regauge.merging.recipes import Recipe, Slice, Source

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)\.(.+)")
# A numbered list with fewer tensors each is not a stack of layers.
_MIN_LAYER_TENSORS = 4
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True, eq=False)
class Model:
    """A model of the recipe.

    Attributes:
        key: its path or hub id in the recipe.
        checkpoint: its files.
        spec: its spec; None if no family describes it.
        state: its tensors as they are merged: as stored, or transformed.
        shapes: their shapes.
        config: changes of its config.
        element_digest: the digest of the element that transforms it.
        tied_spec: the spec of its files, if `spec` has fewer ties.
    """

    key: str
    checkpoint: Checkpoint
    spec: Spec | None
    state: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any] = field(default_factory=dict)
    element_digest: bytes = b""
    tied_spec: Spec | None = None

    @property
    def file_spec(self) -> Spec | None:
        """The spec of its files."""
        return self.tied_spec or self.spec

    def stored_name(self, name: str) -> str | None:
        """Return the stored tensor with this name's values: itself, or one that it is tied to;
        None if absent.
        """
        if name in self.state:
            return name
        ties = self.spec.ties if self.spec else {}
        target = ties.get(name, name)
        return next(
            (
                n
                for n in (target, *(a for a, to in ties.items() if to == target))
                if n in self.state
            ),
            None,
        )

    def is_buffer(self, name: str) -> bool:
        """Return whether a tensor is a buffer, which is copied."""
        entry: Entry | None = self.checkpoint.entries.get(name)
        return (self.spec is not None and self.spec.is_buffer(name)) or (
            entry is not None and entry.dtype not in FLOATS
        )

    @cached_property
    def token_tables(self) -> frozenset[str]:
        """The tensors with a row for each token."""
        size = self.config.get("vocab_size", (self.checkpoint.config or {}).get("vocab_size"))
        if self.spec is None or not isinstance(size, int):
            return frozenset()
        axes = {name: entry.axes for name, entry in stored_tensors(self.spec).items()}
        positions = ("wpe", "position")
        return frozenset(
            n
            for n, text in axes.items()
            if text.split(" ")[0] == f"_{size}" and not any(position in n for position in positions)
        )


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output.

    Attributes:
        name: its name.
        inputs: the sources that it is made of, each with the name of its tensor.
        slice: the slice of the recipe.
        base: the index of the base among the inputs.
        t: the position along the layers, from 0 to 1.
        shape: its shape.
        is_copy: copy the first input.
        is_table: it has a row for each token.
    """

    name: str
    inputs: tuple[tuple[Source, str], ...]
    slice: Slice
    base: int | None
    t: float
    shape: tuple[int, ...]
    is_copy: bool = False
    is_table: bool = False


def find_stacks(names: Iterable[str]) -> dict[str, int]:
    """Return the stacks of layers and their depths, by the text before the number."""
    counts_by_prefix: dict[str, Counter[int]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match:
            counts_by_prefix.setdefault(match[1], Counter())[int(match[2])] += 1
    return {
        prefix: len(counts)
        for prefix, counts in counts_by_prefix.items()
        if set(counts) == set(range(len(counts))) and min(counts.values()) >= _MIN_LAYER_TENSORS
    }


def lay_out(
    recipe: Recipe, models: Mapping[str, Model], donor: Model, *, force: bool = False
) -> list[OutputTensor]:
    """Return every tensor of the output, in the donor's order.

    Raises:
        MergeError: if the models do not fit each other.
    """
    _require_same_architecture(models, donor, force)
    outputs = (
        _lay_out_slices(recipe, models)
        if recipe.is_sliced
        else _lay_out_models(recipe, models, donor)
    )
    if not outputs:
        raise MergeError(f"{donor.key} must have tensors, got none", hint="name another model")
    return outputs


def _require_same_architecture(models: Mapping[str, Model], donor: Model, force: bool) -> None:
    """Raise unless all models have the model type of the donor, or `force` is set."""

    def kind(model: Model) -> Any:
        config = model.checkpoint.config or {}
        return config.get("model_type") or config.get("architecture")

    for model in models.values():
        if not force and kind(model) != kind(donor):
            raise MergeError(
                f"{donor.key} is a {kind(donor)} and {model.key} a {kind(model)}",
                hint=Hint(
                    "merge models of one architecture; MergeOptions(force=True) tries anyway",
                    cli="merge models of one architecture; --force tries anyway",
                ),
            )


def _slice_sources(recipe: Recipe, part: Slice) -> tuple[tuple[Source, ...], int | None]:
    """Return the sources of a slice, with the base if it is only named as such, and the index of
    the base.
    """
    base, sources = part.base or recipe.base, part.sources
    if (
        base is not None
        and not recipe.is_sliced
        and recipe.method != "passthrough"
        and base not in [s.model for s in sources]
    ):
        sources = (*sources, Source(base, None, {}, part.line))
    return sources, next((i for i, s in enumerate(sources) if s.model == base), None)


def _lay_out_models(
    recipe: Recipe, models: Mapping[str, Model], donor: Model
) -> list[OutputTensor]:
    """Lay out a merge of whole models."""
    part = recipe.slices[0]
    sources, base = _slice_sources(recipe, part)
    used = [models[s.model] for s in sources]
    names = list(dict.fromkeys(name for model in [donor, *used] for name in model.state))
    depths = find_stacks(names)
    outputs = []
    for name in names:
        if all(
            name in (m.spec.ties if m.spec else {}) and m.spec and m.spec.ties[name] in names
            for m in used
        ):
            continue  # tied in all models: written once
        layer_match = _LAYER.fullmatch(name)
        depth = depths.get(layer_match[1], 0) if layer_match else 0
        t = (
            (int(layer_match[2]) / (depth - 1) if depth > 1 else 1.0)
            if layer_match and depth
            else 0.0
        )
        if donor.is_buffer(name) or any(m.is_buffer(name) for m in used):
            donor_source = next(
                (s for s in sources if s.model == donor.key), Source(donor.key, None, {}, part.line)
            )
            wanted = [(s, name) for s in (donor_source, *sources)]
            outputs.append(_copied_tensor(models, name, wanted, part, t))
            continue
        outputs.append(
            _output_tensor(recipe, models, name, [(s, name) for s in sources], part, base, t)
        )
    return outputs


def _lay_out_slices(recipe: Recipe, models: Mapping[str, Model]) -> list[OutputTensor]:
    """Lay out a merge of slices of layers."""
    first = models[recipe.slices[0].sources[0].model]
    depths = find_stacks(first.state)
    if len(depths) != 1 or first.spec is None:
        reason = (
            "is not of a known family"
            if first.spec is None
            else f"has {len(depths)} stacks of layers"
        )
        raise MergeError(
            f"slices need a model of a known family with one stack of layers, but {first.key} "
            f"{reason}",
            hint="merge whole models: models: in place of slices:",
        )
    (stack,) = depths
    for part in recipe.slices:
        for source in part.sources:
            depth = find_stacks(models[source.model].state).get(stack, 0)
            assert source.layers is not None, "the sources of slices have layers"
            if source.layers[1] > depth:
                raise MergeError(
                    f"{recipe.origin}, line {source.line}: layer_range of {source.model} must end "
                    f"at {depth} or before, got {source.layers[1]}",
                    hint="layers are counted from 0, and the last number is excluded: at most "
                    f"[0, {depth}]",
                )
    parts = {
        name: first.spec.parts.get(place.pattern)
        for name, place in stored_tensors(first.spec).items()
    }
    outside = [n for n in first.state if not _in_stack(n, stack)]
    edges = {s.model: models[s.model] for i in (0, -1) for s in recipe.slices[i].sources}
    outside += dict.fromkeys(
        n
        for model in edges.values()
        for n in model.state
        if n not in first.state and model.is_buffer(n) and not _in_stack(n, stack)
    )
    ties = first.spec.ties
    before = [n for n in outside if parts.get(n) == "embed"]
    after = [
        n for n in outside if parts.get(n) != "embed" and not (n in ties and ties[n] in outside)
    ]
    outputs = [_edge_tensor(recipe, models, name, recipe.slices[0]) for name in before]
    layer = 0
    for part in recipe.slices:
        sources, base = _slice_sources(recipe, part)
        starts = [s.layers[0] for s in sources if s.layers]
        length = sources[0].layers[1] - sources[0].layers[0] if sources[0].layers else 0
        for i in range(length):
            t = i / (length - 1) if length > 1 else 1.0
            prefixes = [f"{stack}{start + i}." for start in starts]
            suffixes = dict.fromkeys(
                name[len(prefix) :]
                for source, prefix in zip(sources, prefixes, strict=True)
                for name in models[source.model].state
                if name.startswith(prefix)
                and (source is sources[0] or models[source.model].is_buffer(name))
            )
            for suffix in suffixes:
                wanted = [(s, prefix + suffix) for s, prefix in zip(sources, prefixes, strict=True)]
                name = f"{stack}{layer}.{suffix}"
                if any(models[s.model].is_buffer(n) for s, n in wanted):
                    outputs.append(_copied_tensor(models, name, wanted, part, t))
                else:
                    outputs.append(_output_tensor(recipe, models, name, wanted, part, base, t))
            layer += 1
    return outputs + [_edge_tensor(recipe, models, name, recipe.slices[-1]) for name in after]


def _in_stack(name: str, stack: str) -> bool:
    """Return whether a tensor belongs to a stack of layers."""
    layer_match = _LAYER.fullmatch(name)
    return layer_match is not None and layer_match[1] == stack


def _edge_tensor(
    recipe: Recipe, models: Mapping[str, Model], name: str, part: Slice
) -> OutputTensor:
    """Return a tensor outside of the layers, made of the models of one slice."""
    sources, base = _slice_sources(recipe, part)
    wanted = [(s, name) for s in sources]
    if any(models[s.model].is_buffer(name) for s in sources):
        wanted += [(s, name) for other in recipe.slices for s in other.sources]
        return _copied_tensor(models, name, wanted, part, 0.0)
    return _output_tensor(recipe, models, name, wanted, part, base, 0.0)


def _copied_tensor(
    models: Mapping[str, Model],
    name: str,
    wanted_names: Sequence[tuple[Source, str]],
    part: Slice,
    t: float,
) -> OutputTensor:
    """Return a buffer of the output: a copy of that of the first source that stores it."""
    source, stored = next((s, n) for s, n in wanted_names if n in models[s.model].state)
    shape = models[source.model].shapes[stored]
    return OutputTensor(name, ((source, stored),), part, None, t, shape, is_copy=True)


def _output_tensor(
    recipe: Recipe,
    models: Mapping[str, Model],
    name: str,
    wanted_names: Sequence[tuple[Source, str]],
    part: Slice,
    base: int | None,
    t: float,
) -> OutputTensor:
    """Return an output tensor, after checking its inputs."""
    inputs = []
    for source, wanted in wanted_names:
        stored = models[source.model].stored_name(wanted)
        if stored is None:
            holder = next(
                s.model for s, n in wanted_names if models[s.model].stored_name(n) is not None
            )
            raise MergeError(
                f'{source.model} lacks "{wanted}", which {holder} has',
                hint="models must have one architecture and one depth",
            )
        inputs.append((source, stored))
    shapes = [models[s.model].shapes[n] for s, n in inputs]
    table = any(n in models[s.model].token_tables for s, n in inputs)
    if len(set(shapes)) > 1 and not (
        table and recipe.tokens is not None and len({s[1:] for s in shapes}) == 1
    ):
        i = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        first, other = inputs[0][0].model, inputs[i][0].model
        if table and shapes[0][1:] == shapes[i][1:]:
            raise MergeError(
                f'the vocabularies differ: "{name}" has {shapes[0][0]} rows in {first} and '
                f"{shapes[i][0]} rows in {other}",
                hint=Hint(
                    "write tokenizer_source: union (or base) into the recipe, or "
                    'pass MergeOptions(tokenizer="union")',
                    cli="write tokenizer_source: union (or base) into the recipe, or "
                    "pass --tokenizer union",
                ),
            )
        raise MergeError(
            f'"{name}" is {list(shapes[0])} in {first} and {list(shapes[i])} in {other}',
            hint="models must have one architecture and one width",
        )
    return OutputTensor(name, tuple(inputs), part, base, t, shapes[0], is_table=table)


def sliced_config(recipe: Recipe, donor: Model, depth: int) -> dict[str, Any]:
    """Return the config entries of sliced layers: their number, and every list with a value for
    each.
    """
    if not recipe.is_sliced:
        return {}
    config = donor.checkpoint.config or {}
    layers = [i for part in recipe.slices for i in range(*(part.sources[0].layers or (0, 0)))]
    changes: dict[str, Any] = {key: len(layers) for key in _DEPTH_KEYS if key in config}
    for key, value in config.items():
        if (
            isinstance(value, list)
            and len(value) == depth
            and depth > 1
            and all(i < depth for i in layers)
        ):
            changes[key] = [value[i] for i in layers]
    return changes
