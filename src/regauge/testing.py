"""Checks that an element leaves a model's function unchanged, for tests of your own models.

Example:
    from regauge.testing import assert_symmetry

    assert_symmetry(model, spec, g, {"input_ids": ids})
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from regauge.core.action import act, apply
from regauge.core.axes import parse
from regauge.core.element import Element
from regauge.core.spec import Spec
from regauge.errors import SpecError

# Largest |difference| of the outputs, relative to max(1, largest absolute output), that rounding
# alone explains.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
_OUTPUTS_HINT = "`outputs` in the spec must name what this class of model returns, with its axes"


@contextlib.contextmanager
def strict_float64() -> Iterator[None]:
    """Compute float64 models in float64 throughout, within this context.

    Many models cast to float32 inside (norms, softmax, rotary tables), which hides errors below
    1e-6 or yields a false exact zero. In this context every float32 dtype argument becomes float64:
    of `Tensor.to`, `.float()`, `.type_as`, softmax and factory functions.
    """
    from torch.overrides import TorchFunctionMode

    class Upcast(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
            if func is getattr(torch, "_grouped_mm", None) and args[0].dtype == torch.float64:
                return _grouped_mm(*args, **kwargs)
            return func(*args, **kwargs)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Upcast():
            yield
    finally:
        torch.set_default_dtype(default)


def _grouped_mm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Multiply each group of rows by its own weights, one group after the other.

    transformers runs experts with torch's grouped product, which does not support float64.
    """
    groups = torch.tensor_split(rows, offs[:-1].tolist())
    out = torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])
    return out if bias is None else out + bias


def compute_outputs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Run a model in evaluation mode and return its floating-point outputs by name.

    Computed strictly in float64 if that is the model's dtype.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    was_training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            strict_float64() if dtype == torch.float64 else contextlib.nullcontext(),
        ):
            result = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        model.train(was_training)
    return name_outputs(result)


def name_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors in a module's result by name.

    A single tensor is named "logits"; the items of a tuple are numbered.
    """
    if isinstance(result, torch.Tensor):
        return {"logits": result}
    items = (
        dict(result.items())
        if hasattr(result, "items")
        else {str(i): r for i, r in enumerate(result)}
    )
    return {
        name: value
        for name, value in items.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def select_outputs(spec: Spec, outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs that the spec declares, or all if it declares none.

    Models may return inner values too: T5 returns its encoder's last state.

    Raises:
        SpecError: The model returns none of the declared outputs, or one with another number of
            axes. Then the spec belongs to another model.
    """
    if not spec.outputs:
        return dict(outs)
    selected = {name: value for name, value in outs.items() if name in spec.outputs}
    if not selected:
        raise SpecError(
            f"the model must return an output of the spec ({', '.join(spec.outputs)}), got "
            f"{', '.join(outs) or 'none'}",
            hint=_OUTPUTS_HINT,
        )
    wrong = [
        f'  "{name}" must have the axes {spec.outputs[name]}, got shape {list(value.shape)}'
        for name, value in selected.items()
        if value.dim() != len(parse(spec.outputs[name]))
    ]
    if wrong:
        raise SpecError(
            "\n".join(["the model's outputs do not have the axes of the spec", *wrong]),
            hint=_OUTPUTS_HINT,
        )
    return selected


def symmetry_error(
    model: torch.nn.Module,
    spec: Spec,
    g: Element,
    inputs: Mapping[str, Any],
    *,
    force: bool = False,
) -> float:
    """Return the largest difference between the outputs of a model and of its transformed copy.

    Outputs in a visible space are transformed before the comparison. The model is not changed.

    Args:
        model: The model to check.
        spec: Its spec.
        g: The element to apply.
        inputs: Keyword arguments of the model's forward.
        force: Apply an element that the spec does not allow.

    Returns:
        The largest absolute difference, relative to the largest absolute output (at least 1); inf
        if it is not a number.
    """
    transformed = copy.deepcopy(model)
    state = {k: v.detach() for k, v in model.state_dict().items()}
    transformed.load_state_dict(apply(g.to(spec), state, force=force))
    before, after = (
        select_outputs(spec, compute_outputs(model, inputs)),
        compute_outputs(transformed, inputs),
    )
    if not before:
        raise SpecError(
            f"{type(model).__name__} returned no floating-point output to compare",
            hint="pass inputs for which it returns logits or hidden states",
        )
    worst = 0.0
    for name in before:
        expected = (
            act(g, before[name], spec.outputs[name])
            if name in spec.outputs and spec.visible
            else before[name]
        )
        scale = max(1.0, float(expected.abs().max()))
        error = float((after[name].double() - expected.double()).abs().max()) / scale
        worst = max(worst, error) if error == error else float("inf")
    return worst


def assert_symmetry(
    model: torch.nn.Module,
    spec: Spec,
    g: Element,
    inputs: Mapping[str, Any],
    *,
    tolerance: float | None = None,
) -> None:
    """Assert that an element leaves the model's function unchanged.

    Args:
        model: The model to check. It is not changed.
        spec: Its spec.
        g: The element to apply.
        inputs: Keyword arguments of the model's forward.
        tolerance: Largest relative difference of the outputs; by default that of the model's dtype.

    Raises:
        AssertionError: The outputs differ by more than the tolerance.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    allowed = TOLERANCE[dtype] if tolerance is None else tolerance
    error = symmetry_error(model, spec, g, inputs)
    if not error <= allowed:
        spaces = ", ".join(g.members)
        raise AssertionError(
            f"{type(model).__name__} changed by {error:.3g} (tolerance {allowed:.3g} for "
            f"{dtype}) under an element on {spaces}"
        )
