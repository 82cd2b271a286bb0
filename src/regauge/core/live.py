"""In-place transforms of a live module with its gradients and optimizer state, so that training
can continue.
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
    """Transform a live module in place, with its gradients and optimizer state.

    Everything is checked first: if an error is raised, nothing has changed. First moments and
    momenta transform as gradients do, second moments by the permutation alone.

    Args:
        g: The element. With an optimizer it must consist of (signed) permutations, since Adam-type
            states have no other symmetry.
        module: The module.
        part: Transform only this part: embed, backbone or head.
        optimizer: The optimizer of the module, if training continues.

    Raises:
        ElementError: The element is not allowed, or the optimizer's state cannot follow it.
        SpecError: The module does not fit the element's spec.

    Example:
        >>> ids = torch.arange(6)[None]
        >>> before = model(ids).logits
        >>> regauge.apply_(regauge.element(regauge.spec_of(model), 0), model)
        >>> torch.allclose(model(ids).logits, before, atol=1e-4)
        True
    """
    import torch

    g.require()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with_ties = {**tensors, **dict(module.named_parameters(remove_duplicate=False))}
    known = stored_tensors(g.spec)
    missing = [name for name in known if name not in with_ties]
    if missing:
        raise SpecError(
            f'the module has no "{missing[0]}", which is in the spec "{g.spec.family}" '
            f"({len(missing)} missing)",
            hint="pass the model inside its wrapper (DDP, PEFT), before adapters are added",
        )
    unexpected = [
        name
        for name, _ in module.named_parameters()
        if name not in known and not g.spec.is_buffer(name)
    ]
    if unexpected:
        raise SpecError(
            f'the module has "{unexpected[0]}", which is not in the spec "{g.spec.family}"',
            hint="transform the model before adapters are added",
        )
    require_fixed(g, tensors)
    plan = [t for t in tensor_transforms(g, part) if t.name in tensors]
    faults = check(g.spec, {name: with_ties[name] for name in known})
    faults += [
        Fault(t.name, f'"{t.name}" is {tensors[t.name].dtype}, which can only be permuted')
        for t in plan
        if not tensors[t.name].is_floating_point()
        and not is_permutation_on(g, ax.spaces(t.axes) & g.members.keys())
    ]
    require(faults, f'the module does not fit the spec "{g.spec.family}"')
    with torch.no_grad():
        states = _transform_optimizer_states(g, plan, tensors, optimizer) if optimizer else []
        for t in plan:
            grad, source = tensors[t.name].grad, tensors[t.source].grad
            if grad is not None and source is not None:
                states.append((grad, act(g, source, ax.dual(t.axes), at=t.at)))
        staged = {t.name: t.run(tensors[t.source]) for t in plan if t.source != t.name}
        for t in plan:
            tensors[t.name].copy_(staged[t.name] if t.name in staged else t.run(tensors[t.name]))
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
    """Return (tensor of the optimizer's state, its new value) pairs."""
    import torch

    for name, member in g.members.items():
        if SignedPermutation().fault(member):
            raise ElementError(
                f'the optimizer\'s state cannot follow the element on "{name}": Adam-type '
                "states allow signed permutations only",
                hint='sample the element with within="signed", or apply it before training starts',
            )
    names = {id(tensor): name for name, tensor in tensors.items()}
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise ElementError(
            "the optimizer has parameters that the module does not have",
            hint="pass the optimizer of this module",
        )
    for p, state in optimizer.state.items():
        for key, value in state.items():
            is_scalar = (
                isinstance(value, int | float)
                or value is None
                or (isinstance(value, torch.Tensor) and value.dim() == 0)
            )
            if (
                id(p) in names
                and not is_scalar
                and (
                    not isinstance(value, torch.Tensor)
                    or value.shape != p.shape
                    or key not in _FIRST_MOMENTS | _SECOND_MOMENTS
                )
            ):
                raise ElementError(
                    f'the optimizer has a state "{key}" for "{names[id(p)]}", which regauge cannot '
                    "transform",
                    hint="transform the module before its optimizer is created",
                )
    values: list[tuple[Tensor, Tensor]] = []
    for t in plan:
        target = optimizer.state.get(tensors[t.name], {})
        source = optimizer.state.get(tensors[t.source], {})
        for key in (_FIRST_MOMENTS | _SECOND_MOMENTS) & target.keys() & source.keys():
            if isinstance(target[key], torch.Tensor):
                axes = ax.dual(t.axes) if key in _FIRST_MOMENTS else ax.bar(t.axes)
                values.append((target[key], act(g, source[key], axes, at=t.at)))
    return values
