"""Verification of a discovered spec: a random element of every space must leave the outputs of a
module with random weights unchanged, in float64.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.check import check_spec
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.groups import Group, Permutation, SignedPermutation, Trivial
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.testing import symmetry_error

TOLERANCE = 1e-9
_NUMBER = re.compile(r"(?<=\.)\d+\b")
_HOLE = re.compile(r"(?<![A-Za-z0-9._])_\d+")
_SEED = 12
# Smaller groups to try where one fails, largest first.
_FALLBACKS: tuple[Group, ...] = (SignedPermutation(), Permutation())


@dataclass(frozen=True)
class Proof:
    """The result of verification: the spec that holds, the largest error, and what was dropped."""

    spec: Spec
    error: float
    folded_error: float | None
    dropped: tuple[str, ...]


def randomized_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module in float64 with random weights, so that nothing holds by accident of the
    initialization (zero biases, unit gains).
    """
    twin = copy.deepcopy(module).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                fan_in = parameter.numel() / parameter.shape[0] if parameter.dim() > 1 else 1.0
                parameter.copy_(
                    noise * 1.2 / fan_in**0.5 if parameter.dim() > 1 else 1 + 0.3 * noise
                )
    return twin


def to_float64(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert floating-point inputs to float64."""
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def prove(spec: Spec, twin: torch.nn.Module, inputs: Mapping[str, Any]) -> Proof:
    """Verify a spec on a module in float64; groups that fail are made smaller or dropped.

    Args:
        spec: the spec to verify.
        twin: a module from `randomized_copy`.
        inputs: its inputs in float64.

    Raises:
        RegaugeError: the spec contradicts itself, which is a bug in discovery.
    """
    faults = check_spec(spec)
    if faults:
        raise RegaugeError(
            "discovery produced an inconsistent spec\n" + "\n".join(f"  {f}" for f in faults[:10])
        )
    dropped: list[str] = []
    error = _error(twin, spec, inputs, None)
    if not error <= TOLERANCE:
        for name in list(spec.spaces):
            if not _error(twin, spec, inputs, name) <= TOLERANCE:
                spec, message = _shrink_group(twin, spec, inputs, name)
                dropped.append(message)
        error = _error(twin, spec, inputs, None)
        if not error <= TOLERANCE:  # each holds alone, but not together: trust none
            dropped.append(f"all spaces together are off by {error:.1e}: all are dropped")
            for name in list(spec.spaces):
                spec = drop_space(spec, name)
            error = 0.0
    folded_error = None
    if spec.norms or spec.scales:
        folded_error = _folded_error(twin, spec, inputs)
        if not folded_error <= TOLERANCE:
            dropped.append(f"folding is off by {folded_error:.1e}: norms are not folded")
            spec = replace(
                spec,
                norms=(),
                scales=(),
                spaces={n: replace(s, folded=None) for n, s in spec.spaces.items()},
            )
            folded_error = None
    return Proof(
        replace(spec, notes=(*spec.notes, *(f"dropped: {d}" for d in dropped))),
        error,
        folded_error,
        tuple(dropped),
    )


def _error(
    twin: torch.nn.Module, spec: Spec, inputs: Mapping[str, Any], space: str | None
) -> float:
    """Return the error of a random element of one space, or of all."""
    return symmetry_error(
        twin, spec, element(spec, _SEED, spaces=None if space is None else [space]), inputs
    )


def _folded_error(twin: torch.nn.Module, spec: Spec, inputs: Mapping[str, Any]) -> float:
    """Return the larger of the errors of folding and of a random element of the folded spec."""
    from regauge.testing import compute_outputs, select_outputs

    new, state = fold_norms(spec, {k: v.detach() for k, v in twin.state_dict().items()})
    folded = copy.deepcopy(twin)
    for alias in spec.ties.keys() - new.ties.keys():  # folding unties a table
        path, _, last = alias.rpartition(".")
        setattr(
            folded.get_submodule(path),
            last,
            torch.nn.Parameter(torch.empty_like(folded.get_parameter(alias))),
        )
    folded.load_state_dict({n: state[n] for n in folded.state_dict()})
    before = select_outputs(spec, compute_outputs(twin, inputs))
    after = select_outputs(spec, compute_outputs(folded, inputs))
    folding_error = max(
        float((after[k] - before[k]).abs().max()) / max(1.0, float(before[k].abs().max()))
        for k in before
    )
    return max(folding_error, _error(folded, new, inputs, None))


def _shrink_group(
    twin: torch.nn.Module, spec: Spec, inputs: Mapping[str, Any], name: str
) -> tuple[Spec, str]:
    """Return the spec with the largest smaller group that holds on a space, or with none, and a
    message.
    """
    space = spec.spaces[name]
    for group in _FALLBACKS:
        if type(group) is type(space.group):
            continue
        candidate = replace(
            spec, spaces={**spec.spaces, name: replace(space, group=group, folded=None)}
        )
        if not check_spec(candidate) and _error(twin, candidate, inputs, name) <= TOLERANCE:
            return candidate, f'"{name}" has the group {group}, not {space.group} as inferred'
    message = f'"{name}" does not have the group {space.group} as inferred: nothing acts there'
    return drop_space(spec, name), message


def drop_space(spec: Spec, name: str) -> Spec:
    """Return the spec in which nothing acts on a space. Spaces over it stay, with one member for
    each of its coordinates.
    """
    if any(s.over == name for s in spec.spaces.values()):
        return replace(
            spec,
            spaces={**spec.spaces, name: replace(spec.spaces[name], group=Trivial(), folded=None)},
        )
    size = spec.spaces[name].size

    def clear(term: ax.Term) -> ax.Term:
        match term:
            case ax.Leaf():
                return ax.Hole(size) if term.space == name else term
            case ax.Product():
                return replace(term, factors=tuple(clear(f) for f in term.factors))
            case ax.Sum():
                return replace(term, terms=tuple(clear(t) for t in term.terms))
            case ax.Hole():
                return term

    def cleared(text: str) -> str:
        return str(ax.Axes(tuple(clear(t) for t in ax.parse(text).terms)))

    return replace(
        spec,
        spaces={n: s for n, s in spec.spaces.items() if n != name},
        tensors={n: cleared(t) for n, t in spec.tensors.items()},
        outputs={n: cleared(t) for n, t in spec.outputs.items()},
        norms=tuple(n for n in spec.norms if name not in ax.spaces(spec.tensors[n.gain])),
        scales=tuple(s for s in spec.scales if name not in ax.spaces(spec.tensors[s.gain])),
    )


def transfer_proof(spec: Spec, small: Spec, proof: Proof, where: str) -> Proof:
    """Transfer a proof from a small twin to the large model. Both specs must agree up to layer
    numbers and sizes.
    """
    differing = sorted(
        f"{name}: {axes}"
        for name, axes in (_size_free_pattern(spec).items() ^ _size_free_pattern(small).items())
    )
    if differing:
        raise RegaugeError(
            "the model is too large to verify, and the spec of a small twin of its class differs\n"
            + "\n".join(f"  {w}" for w in differing[:6]),
            hint="discover a smaller module of the same class",
        )
    proved = {_NUMBER.sub("#", n): s for n, s in proof.spec.spaces.items()}
    for name, space in list(spec.spaces.items()):
        twin_space = proved.get(_NUMBER.sub("#", name))
        if twin_space is None:
            spec = drop_space(spec, name)
        elif twin_space.group != space.group or twin_space.folded != space.folded:
            spec = replace(
                spec,
                spaces={
                    **spec.spaces,
                    name: replace(space, group=twin_space.group, folded=twin_space.folded),
                },
            )
    if not proof.spec.norms and not proof.spec.scales:
        spec = replace(spec, norms=(), scales=())
    note = f"verified on {where} of the same class: the model itself is too large"
    return replace(
        proof,
        spec=replace(spec, notes=(*spec.notes, note, *(f"dropped: {d}" for d in proof.dropped))),
    )


def _size_free_pattern(spec: Spec) -> dict[str, str]:
    """Return a spec without its numbers: names with # for each, axes without sizes."""
    out: dict[str, set[str]] = {}
    for name, axes in spec.tensors.items():
        out.setdefault(_NUMBER.sub("#", name), set()).add(_NUMBER.sub("#", _HOLE.sub("_", axes)))
    for name, space in spec.spaces.items():
        text = f"{space.group} over {_NUMBER.sub('#', space.over or '-')}, folded {space.folded}"
        out.setdefault(f"space {_NUMBER.sub('#', name)}", set()).add(text)
    return {name: " | ".join(sorted(texts)) for name, texts in out.items()}
