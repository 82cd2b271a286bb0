"""Discovery of a module's symmetry from its traced graph: trace, walk, infer, assemble, prove.

Modules:
    graph           the operators of a module and their source lines, by torch.export
    walk, terms     one term per axis; operators unify terms, by one rule each
    rules           the table of rules (shapes, elementwise, contractions, lookups, rotary, cases)
    scales          which scales and signs pass through the network
    infer_groups    the largest group that every restriction preserves
    assemble        an ordinary spec with readable names (names) and foldable gains (folds)
    proof           verification by random elements in float64, on a small twin (models) if needed
    boundaries      where the model can be cut: lists of blocks that pass a stream on
    explain         the operators that keep a group from being larger
    stored_names    the spec under the tensor names of a checkpoint
    cache           discoveries on disk
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regauge.core.spec import Spec
from regauge.errors import DiscoveryError
from regauge.models.discovery.assemble import assemble
from regauge.models.discovery.boundaries import find_boundaries, with_backbone
from regauge.models.discovery.cache import Discovery, cache_key, default_folder, load, save
from regauge.models.discovery.explain import Reason, collect_reasons
from regauge.models.discovery.graph import trace
from regauge.models.discovery.infer_groups import GroupInference
from regauge.models.discovery.proof import Proof, prove, randomized_copy, to_float64, transfer_proof
from regauge.models.discovery.stored_names import stored_spec
from regauge.models.discovery.terms import Atom
from regauge.models.discovery.twins import (
    MAX_PARAMETERS,
    buffers_of,
    build,
    count_parameters,
    example_inputs,
    is_on_meta,
    make_twin,
)
from regauge.models.discovery.walk import walk
from regauge.models.families.family import Boundary
from regauge.models.load import require_numel

__all__ = [
    "Discovery",
    "DiscoveryError",
    "discover",
    "discover_config",
    "discover_model",
    "discovery_of",
    "example_inputs",
]

if TYPE_CHECKING:
    from regauge.models.sources import Source

Inputs = Mapping[str, Any] | torch.Tensor | tuple[Any, ...]


def discover(
    source: Source, example_inputs: Inputs | None = None, *, cache: Path | None = None
) -> Spec:
    """Discover the spec of any module from its graph, and verify it.

    Every group is verified with a random element in float64, on a copy with random weights. Groups
    that fail are made smaller or dropped, and `spec.notes` names them. A module on the meta device,
    or one of more than 150 million parameters, is verified on a small twin of its class that is
    built from its config.

    Args:
        source: the module to trace; or a path, a hub id or a checkpoint, whose class is traced.
        example_inputs: the inputs of forward: a dict by name, a tensor, or a tuple of positional
            arguments. By default they are made from the model's config.
        cache: a folder in which discoveries are cached by class and config. Without example
            inputs, it is in the user's cache folder.

    Returns:
        The spec. `discovery_of` also returns the reasons and the errors.

    Raises:
        DiscoveryError: torch.export cannot trace the module.
        UnknownModelError: a checkpoint has no config that names a class.

    Example:
        >>> layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
        >>> spec = regauge.discover(torch.nn.Sequential(*layers), torch.randn(3, 4))
        >>> [str(space.group) for space in spec.spaces.values() if space.size == 8]
        ['monomial+']
    """
    if not isinstance(source, torch.nn.Module):
        from regauge.models.sources import discover_source

        return discover_source(source).spec
    if example_inputs is None:
        return discover_model(source).spec
    return discovery_of(source, example_inputs, cache=cache).spec


def discovery_of(
    module: torch.nn.Module, example_inputs: Inputs, *, cache: Path | None = None
) -> Discovery:
    """Discover a module like `discover`, and return the reasons and errors with the spec."""
    inputs = to_kwargs(module, example_inputs)
    key = cache_key(module, inputs) if cache is not None else None
    if cache is not None and key is not None:
        cached = load(cache, key)
        if cached is not None:
            return cached
    spec, inference, names = assemble(
        walk(trace(module, inputs, buffers_of(module) if is_on_meta(module) else {})),
        module,
        type(module).__name__,
    )
    if is_on_meta(module) or (
        count_parameters(module) > MAX_PARAMETERS and getattr(module, "config", None) is not None
    ):
        proof, boundaries, where = _prove_twin(spec, module)
    else:
        twin, twin_inputs = randomized_copy(module), to_float64(inputs)
        proof, where = prove(spec, twin, twin_inputs), "the module itself"
        boundaries = find_boundaries(proof.spec, twin, twin_inputs)
    reasons, frozen = _explain_axes(inference, names)
    spec = with_backbone(proof.spec, [b.blocks for b in boundaries])
    discovery = Discovery(
        spec, proof.error, proof.folded_error, reasons, frozen, where, proof.dropped, boundaries
    )
    if cache is not None and key is not None:
        save(cache, key, discovery)
    return discovery


def discover_config(
    config: Mapping[str, Any],
    parameters: int,
    names: Iterable[str] = (),
    *,
    cache: Path | None = None,
) -> Discovery:
    """Discover the symmetry of the model that a config.json describes.

    A model with too many parameters is traced without memory for its weights.

    Args:
        config: the contents of config.json.
        parameters: the number of parameters in the checkpoint, or 0 if unknown.
        names: the tensor names of the checkpoint; the library may store tensors under other names
            than the live model has.
        cache: a folder in which discoveries are cached.
    """
    module = build(config, "meta")
    if parameters:
        require_numel(module, parameters, "the model")
    if parameters <= MAX_PARAMETERS:
        module = build(config)
    discovery = discovery_of(module, example_inputs(module), cache=cache)
    spec, renamed = stored_spec(discovery.spec, module, names)
    frozen = {
        (axis if name is None else f"{name}[{axis.rpartition('[')[2]}"): reasons
        for axis, reasons in discovery.frozen.items()
        for name in _stored_names(axis, renamed)
    }
    return replace(discovery, spec=spec, frozen=frozen)


def _stored_names(axis: str, renamed: Mapping[str, Sequence[str]]) -> Sequence[str | None]:
    return renamed.get(axis.rpartition("[")[0], [None])


def discover_model(module: torch.nn.Module) -> Discovery:
    """Discover the symmetry of a live model of transformers or timm, with example inputs from its
    config; cached in the user's cache folder.
    """
    return discovery_of(module, example_inputs(module), cache=default_folder())


def _prove_twin(spec: Spec, module: torch.nn.Module) -> tuple[Proof, tuple[Boundary, ...], str]:
    """Verify a spec on a small twin of a module, and find its boundaries."""
    small = make_twin(module)
    inputs = example_inputs(small)
    small_spec, _, _ = assemble(walk(trace(small, inputs)), small, type(small).__name__)
    where = f"a twin of {count_parameters(small):,} parameters"
    twin, twin_inputs = randomized_copy(small), to_float64(inputs)
    proof = prove(small_spec, twin, twin_inputs)
    return (
        transfer_proof(spec, small_spec, proof, where),
        find_boundaries(proof.spec, twin, twin_inputs),
        where,
    )


def _explain_axes(
    inference: GroupInference, names: Mapping[Atom, str]
) -> tuple[dict[str, Sequence[Reason]], dict[str, Sequence[Reason]]]:
    """Return the reasons by space, and by the axes of parameters on which nothing acts."""
    by_space: dict[str, Sequence[Reason]] = {
        name: collect_reasons(inference.kinds[atom].restrictions) for atom, name in names.items()
    }
    owner = {
        axis: (name, i)
        for name, axes in inference.parameters.items()
        for i, axis in enumerate(axes)
    }
    frozen: dict[str, list[Reason]] = {}
    for kind in inference.kinds.values():
        if kind.is_frozen and kind.atom not in names:
            for axis, _ in kind.occurrences:
                name, i = owner[axis]
                frozen.setdefault(f"{name}[{i}]", []).extend(
                    collect_reasons([r for r in kind.restrictions if r.kind == "frozen"])
                )
    return by_space, {name: list(dict.fromkeys(listed)) for name, listed in frozen.items()}


def to_kwargs(module: torch.nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Convert inputs to keyword arguments of forward."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    names = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < len(values):
        raise DiscoveryError(
            f"{type(module).__name__}.forward takes {len(names)} arguments, got {len(values)}"
        )
    return dict(zip(names, values, strict=False))
