"""The law checker: does an element leave a model's function as it is? For tests of your own models
as much as of ours.

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

# Largest |difference| of the outputs, relative to their largest absolute value (and at least 1),
# that rounding alone explains.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
_OUTPUTS_HINT = "the spec's `outputs` name what this class of model returns, with its axes"


@contextlib.contextmanager
def strict_float64() -> Iterator[None]:
    """Within this context float64 models compute in float64 throughout.

    Many models cast to float32 inside (norms, softmax, rotary tables), which hides errors below
    1e-6 or shows a false exact zero. Here every request for float32 is answered with float64:
    `Tensor.to`, `.float()`, `.type_as` targets, softmax's and factory functions' dtype.
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
    """torch's grouped product, which transformers runs experts with, knows no float64: each group
    of rows by its own weights, one after the other.
    """
    groups = torch.tensor_split(rows, offs[:-1].tolist())
    out = torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])
    return out if bias is None else out + bias


def compute_outputs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The named floating-point outputs of a model in evaluation mode, computed strictly in float64
    if that is the model's dtype.
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
    """The floating-point tensors that a module returned, by name: one alone is called logits, those
    of a tuple are numbered.
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
    """The outputs that the spec speaks of, or all if it names none: T5 also hands out its encoder's
    last state, which is an inner value.

    They must have the axes that the spec says, or it is the spec of another model.
    """
    if not spec.outputs:
        return dict(outs)
    named = {name: value for name, value in outs.items() if name in spec.outputs}
    if not named:
        raise SpecError(
            f"the spec speaks of {', '.join(spec.outputs)}, but the model returns "
            f"{', '.join(outs) or 'nothing'}",
            hint=_OUTPUTS_HINT,
        )
    wrong = [
        f'  "{name}" is {spec.outputs[name]} in the spec, and {list(value.shape)} in the model'
        for name, value in named.items()
        if value.dim() != len(parse(spec.outputs[name]))
    ]
    if wrong:
        raise SpecError(
            "\n".join(["the model's outputs have other axes than the spec says", *wrong]),
            hint=_OUTPUTS_HINT,
        )
    return named


def symmetry_error(
    model: torch.nn.Module,
    spec: Spec,
    g: Element,
    inputs: Mapping[str, Any],
    *,
    force: bool = False,
) -> float:
    """How far the moved model's outputs are from the model's own: the largest difference, relative
    to the largest output (at least 1).

    Outputs that the spec says live in a moved space are moved before they are compared. The model
    is not changed. `force` tries an element that the spec does not allow.
    """
    moved = copy.deepcopy(model)
    state = {k: v.detach() for k, v in model.state_dict().items()}
    moved.load_state_dict(apply(g.to(spec), state, force=force))
    before, after = (
        select_outputs(spec, compute_outputs(model, inputs)),
        compute_outputs(moved, inputs),
    )
    if not before:
        raise SpecError(
            f"{type(model).__name__} returned no floating-point output to compare",
            hint="give inputs that it answers with logits or states",
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
    """Raise AssertionError unless the element leaves the model's function as it is, within the
    tolerance of the model's dtype.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    allowed = TOLERANCE[dtype] if tolerance is None else tolerance
    error = symmetry_error(model, spec, g, inputs)
    if not error <= allowed:
        moved = ", ".join(g.members)
        raise AssertionError(
            f"{type(model).__name__} changed by {error:.3g} (tolerance {allowed:.3g} for "
            f"{dtype}) when {moved} moved"
        )
