"""Moving a live module in place, with its gradients and the state of its optimizer, so that
training goes on across the move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from regauge.core import axes as ax
from regauge.core.action import (
    TensorTransform,
    act,
    is_permutation_on,
    require_fixed,
    tensor_transforms,
)
from regauge.core.check import Fault, check, require
from regauge.core.element import Element
from regauge.core.groups import SignedPermutation
from regauge.core.spec import stored_tensors
from regauge.errors import ElementError, SpecError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


def apply_(
    g: Element,
    module: torch.nn.Module,
    part: str | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Move a live module in place, its gradients too, and with it the state of its optimizer, so
    that training goes on across the move.

    Everything that can be wrong is looked at first: a refused move changes nothing.

    First moments and momenta follow as gradients do, second moments by the permutation alone. With
    an optimizer, the element must be made of (signed) permutations: Adam-type states have no other
    symmetry.
    """
    import torch

    g.require()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    every = {**tensors, **dict(module.named_parameters(remove_duplicate=False))}
    known = stored_tensors(g.spec)
    missing = [name for name in known if name not in every]
    if missing:
        raise SpecError(
            f'the module has no "{missing[0]}", which the spec "{g.spec.family}" speaks of '
            f"({len(missing)} such names)",
            hint="move the model inside its wrapper (DDP, PEFT), before adapters are put on",
        )
    strange = [
        name
        for name, _ in module.named_parameters()
        if name not in known and not g.spec.is_buffer(name)
    ]
    if strange:
        raise SpecError(
            f'the module has "{strange[0]}", which is not in the spec "{g.spec.family}"',
            hint="move the model before adapters are put on",
        )
    require_fixed(g, tensors)
    plan = [m for m in tensor_transforms(g, part) if m.name in tensors]
    misfits = check(g.spec, {name: every[name] for name in known})
    misfits += [
        Fault(m.name, f'"{m.name}" is {tensors[m.name].dtype}, which follows permutations only')
        for m in plan
        if not tensors[m.name].is_floating_point()
        and not is_permutation_on(g, ax.spaces(m.axes) & g.members.keys())
    ]
    require(misfits, f'the module does not fit the spec "{g.spec.family}"')
    with torch.no_grad():
        states = _transform_optimizer_states(g, plan, tensors, optimizer) if optimizer else []
        for m in plan:
            grad, source = tensors[m.name].grad, tensors[m.source].grad
            if grad is not None and source is not None:
                states.append((grad, act(g, source, ax.dual(m.axes), at=m.at)))
        staged = {m.name: m.run(tensors[m.source]) for m in plan if m.source != m.name}
        for m in plan:
            tensors[m.name].copy_(staged[m.name] if m.name in staged else m.run(tensors[m.name]))
        for target, value in states:
            target.copy_(value)


_FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "exp_avg_diff", "prev"})
_SECOND_MOMENTS = frozenset(
    {"step_size", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"}
)


def _transform_optimizer_states(
    g: Element,
    plan: Sequence[TensorTransform],
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[tuple[Tensor, Tensor]]:
    import torch

    for name, member in g.members.items():
        if SignedPermutation().fault(member):
            raise ElementError(
                f'the optimizer\'s state cannot follow the element on "{name}": Adam-type '
                "states keep signed permutations only",
                hint='draw the element with within="signed", or move before training starts',
            )
    names = {id(tensor): name for name, tensor in tensors.items()}
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise ElementError(
            "the optimizer holds parameters that the module does not have",
            hint="give the optimizer of this module",
        )
    for p, held in optimizer.state.items():
        for key, value in held.items():
            plain = (
                isinstance(value, int | float)
                or value is None
                or (isinstance(value, torch.Tensor) and value.dim() == 0)
            )
            if (
                id(p) in names
                and not plain
                and (
                    not isinstance(value, torch.Tensor)
                    or value.shape != p.shape
                    or key not in _FIRST_MOMENTS | _SECOND_MOMENTS
                )
            ):
                raise ElementError(
                    f'the optimizer holds "{key}" for "{names[id(p)]}", which regauge does not '
                    "know how to move",
                    hint="move the module before its optimizer is made",
                )
    out: list[tuple[Tensor, Tensor]] = []
    for m in plan:
        mine, theirs = (
            optimizer.state.get(tensors[m.name], {}),
            optimizer.state.get(tensors[m.source], {}),
        )
        for key in (_FIRST_MOMENTS | _SECOND_MOMENTS) & mine.keys() & theirs.keys():
            if isinstance(mine[key], torch.Tensor):
                out.append(
                    (
                        mine[key],
                        act(
                            g,
                            theirs[key],
                            ax.dual(m.axes) if key in _FIRST_MOMENTS else ax.bar(m.axes),
                            at=m.at,
                        ),
                    )
                )
    return out
