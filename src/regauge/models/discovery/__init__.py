"""The symmetry of any torch module, found by reading its graph: trace, walk, read, assemble, prove.

graph         torch.export: the operators, and where they stand in the source walk, terms   every
axis gets a term; operators unify them, one rule each (rules: the table; shapes, elementwise,
contractions, rotary) scales        which scales and signs run through reading       the largest
group that every restriction keeps assembling    an ordinary spec, with readable names (naming), and
what folds (folds) proving       verified by random elements in strict float64, on a small twin
(models) where the module itself is too large boundaries    where the model can be cut: lists of
blocks that hand a stream on explaining    why a group is not larger, operator by operator storing
the same on the names of a checkpoint, which may be others keeping       what was discovered, kept
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regauge.core.spec import Spec
from regauge.models.discovery.assemble import assemble
from regauge.models.discovery.boundaries import find_boundaries, with_backbone
from regauge.models.discovery.cache import Discovery, cache_key, default_folder, load, save
from regauge.models.discovery.explain import Reason, collect_reasons
from regauge.models.discovery.graph import DiscoveryError, trace
from regauge.models.discovery.infer_groups import GroupInference
from regauge.models.discovery.models import (
    MAX_PARAMETERS,
    buffers_of,
    build,
    count_parameters,
    example_inputs,
    is_on_meta,
    make_twin,
)
from regauge.models.discovery.proof import Proof, prove, randomized_copy, to_float64, transfer_proof
from regauge.models.discovery.stored_names import stored_spec
from regauge.models.discovery.terms import Atom
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

Inputs = Mapping[str, Any] | torch.Tensor | tuple[Any, ...]


def discover(module: torch.nn.Module, example_inputs: Inputs, *, cache: Path | None = None) -> Spec:
    """The spec of any module, read off its graph and verified.

    `example_inputs` are what forward is called with: a dict by name, or positional arguments. Every
    group is verified by a random element in strict float64 on a copy with random weights; what
    fails is dropped, and `spec.notes` say so. A module on the meta device, or one of more than 150
    million parameters, is verified on a small twin of its class, made from its config. `cache` is a
    folder to keep what was found, by class and config.

    >>> # spec = regauge.discover(model, {"input_ids": ids})
    """
    return discovery_of(module, example_inputs, cache=cache).spec


def discovery_of(module: torch.nn.Module, given: Inputs, *, cache: Path | None = None) -> Discovery:
    """What `discover` does, with the reasons and the errors."""
    inputs = to_kwargs(module, given)
    key = cache_key(module, inputs) if cache is not None else None
    if cache is not None and key is not None:
        kept = load(cache, key)
        if kept is not None:
            return kept
    spec, reading, names = assemble(
        walk(trace(module, inputs, buffers_of(module) if is_on_meta(module) else {})),
        module,
        type(module).__name__,
    )
    if is_on_meta(module) or (
        count_parameters(module) > MAX_PARAMETERS and getattr(module, "config", None) is not None
    ):
        proof, cuts, where = _prove_twin(spec, module)
    else:
        twin, given = randomized_copy(module), to_float64(inputs)
        proof, where = prove(spec, twin, given), "the module itself"
        cuts = find_boundaries(proof.spec, twin, given)
    told, frozen = _explain_axes(reading, names)
    spec = with_backbone(proof.spec, [b.blocks for b in cuts])
    found = Discovery(
        spec, proof.error, proof.folded_error, told, frozen, where, proof.dropped, cuts
    )
    if cache is not None and key is not None:
        save(cache, key, found)
    return found


def discover_config(
    config: Mapping[str, Any],
    parameters: int,
    names: Iterable[str] = (),
    *,
    cache: Path | None = None,
) -> Discovery:
    """The symmetry of the model that a config.json describes; without memory for its weights if it
    has too many parameters.

    `names`: those of its tensors in a checkpoint, where the library may store them under other
    names than the live model has.
    """
    module = build(config, "meta")
    if parameters:
        require_numel(module, parameters, "the model")
    if parameters <= MAX_PARAMETERS:
        module = build(config)
    found = discovery_of(module, example_inputs(module), cache=cache)
    spec, to = stored_spec(found.spec, module, names)
    frozen = {
        (axis if n is None else f"{n}[{axis.rpartition('[')[2]}"): told
        for axis, told in found.frozen.items()
        for n in _stored_names(axis, to)
    }
    return replace(found, spec=spec, frozen=frozen)


def _stored_names(axis: str, to: Mapping[str, Sequence[str]]) -> Sequence[str | None]:
    return to.get(axis.rpartition("[")[0], [None])


def discover_model(module: torch.nn.Module) -> Discovery:
    """The symmetry of a live model of the transformers library or timm, which say what they are
    given; kept in the user's cache.
    """
    return discovery_of(module, example_inputs(module), cache=default_folder())


def _prove_twin(spec: Spec, module: torch.nn.Module) -> tuple[Proof, tuple[Boundary, ...], str]:
    small = make_twin(module)
    inputs = example_inputs(small)
    described, _, _ = assemble(walk(trace(small, inputs)), small, type(small).__name__)
    where = f"a twin of {count_parameters(small):,} parameters"
    twin, given = randomized_copy(small), to_float64(inputs)
    proof = prove(described, twin, given)
    return (
        transfer_proof(spec, described, proof, where),
        find_boundaries(proof.spec, twin, given),
        where,
    )


def _explain_axes(
    reading: GroupInference, names: Mapping[Atom, str]
) -> tuple[dict[str, Sequence[Reason]], dict[str, Sequence[Reason]]]:
    """Reasons by space, and by the axes of parameters on which nothing acts."""
    told: dict[str, Sequence[Reason]] = {
        name: collect_reasons(reading.kinds[atom].restrictions) for atom, name in names.items()
    }
    owner = {
        axis: (name, i) for name, axes in reading.parameters.items() for i, axis in enumerate(axes)
    }
    frozen: dict[str, list[Reason]] = {}
    for kind in reading.kinds.values():
        if kind.is_frozen and kind.atom not in names:
            for axis, _ in kind.occurrences:
                name, i = owner[axis]
                frozen.setdefault(f"{name}[{i}]", []).extend(
                    collect_reasons([r for r in kind.restrictions if r.kind == "frozen"])
                )
    return told, {name: list(dict.fromkeys(found)) for name, found in frozen.items()}


def to_kwargs(module: torch.nn.Module, given: Inputs) -> dict[str, Any]:
    """Inputs as keyword arguments of forward."""
    if isinstance(given, Mapping):
        return dict(given)
    values = given if isinstance(given, tuple) else (given,)
    names = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < len(values):
        raise DiscoveryError(
            f"{type(module).__name__}.forward takes {len(names)} arguments, {len(values)} were "
            "given"
        )
    return dict(zip(names, values, strict=False))
