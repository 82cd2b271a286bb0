"""The subject of a verification, one pass of it, and the comparison of two passes.

Measure: the error of a tensor is ||a - b|| / ||b||, and that of a pass the root mean square over
its tensors. Compared are the streams where they leave the backbone, the outputs, and the gradients
of the weights and of the features that enter. The tolerance is 1e-9 in float64; in narrower dtypes
it is `MULTIPLE` times the model's own rounding error by the same measure, taken against the same
pass with the same weights in float64.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.action import act
from regauge.core.element import Element
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec, stored_tensors
from regauge.data.train import exact_arithmetic
from regauge.errors import SpecError
from regauge.locking.permuted import sample_row_permutation
from regauge.models.cut import Crossing, Cut
from regauge.testing import name_outputs

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

MULTIPLE = {torch.float64: 1.0, torch.float32: 16.0, torch.bfloat16: 1.5, torch.float16: 4.0}
EXACT = 1e-9


@dataclass(frozen=True)
class Transform:
    """A transform of the features at the cut: rows shuffled by a seed, columns transformed by an
    element, both undone at the exit.

    `is_control` is the control for rows: the features are shuffled, masks and positions do not
    follow, and nothing is undone.
    """

    rows: int | None = None
    columns: Element | None = None
    is_control: bool = False

    def shuffle(self, crossing: Crossing) -> Element | None:
        """Return the shuffle of the rows at a crossing, or None."""
        return (
            None
            if self.rows is None
            else sample_row_permutation(
                crossing.stream.shape[1], self.rows, f"verify/{crossing.boundary.name}"
            )
        )

    def restore(self, crossing: Crossing, z: Tensor) -> Tensor:
        """Undo the transform on the stream that leaves the backbone."""
        shuffle = self.shuffle(crossing)
        z = z if shuffle is None else crossing.restore(shuffle, z)
        return z if self.columns is None else crossing.restore(self.columns, z)


PLAIN = Transform()


@dataclass(frozen=True, eq=False)
class Pass:
    """The result of one pass.

    `forward` are the outputs and the streams at the exits, `gradients` those of the weights,
    `features` those of the entering features, as transformed.
    """

    forward: Tensors
    gradients: Tensors = field(default_factory=dict)
    features: Tensors = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its inputs, its spec and its cut.

    `targets` define the loss: every entry of every output and stream has its own.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Any]
    spec: Spec
    cut: Cut | None
    targets: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def rows_fixed_reason(self) -> str:
        """The reason why rows cannot be shuffled in this model; empty if they can."""
        if self.cut is None:
            return "the model is not cut, so that rows cannot be reached"
        if not all("token" in boundary.leave.split() for boundary in self.cut.boundaries):
            # A discovered spec is named after the class.
            if self.spec.family == type(self.model).__name__:
                return (
                    "the cut was read off the graph, which does not say what must follow the "
                    "order of the tokens"
                )
            return (
                "attention looks at windows of neighbouring tokens, so their order is part "
                "of the function"
            )
        return ""

    def part(self, name: str) -> str:
        """Return the part of a tensor: embed, backbone or head."""
        entry = stored_tensors(self.spec).get(name)
        return self.spec.parts.get(entry.pattern, "") if entry else ""

    def transform_feature_grads(self, gradients: Tensors, transform: Transform) -> Tensors:
        """Return the gradients of the plain features under the dual action, as a transformed
        backbone gives them.
        """
        assert self.cut is not None
        transformed = {}
        for boundary in self.cut.boundaries:
            name = f"features {boundary.name}".strip()
            axes, value = ax.dual(boundary.enter[boundary.stream]), gradients[name]
            spaces = {s for s in ax.spaces(axes) if s != "token"}
            if transform.columns is not None and spaces:
                value = act(transform.columns, value, axes.replace("token*", "_"))
            if transform.rows is not None:
                value = act(
                    sample_row_permutation(
                        value.shape[1], transform.rows, f"verify/{boundary.name}"
                    ),
                    value,
                    "_ token _",
                )
            transformed[name] = value
        return transformed

    def suggest_lr(self, plain: Pass) -> float:
        """Return an SGD learning rate at which the first step reduces the loss by about a
        hundredth, to first order.
        """
        squared_norm = sum(float(g.double().square().sum()) for g in plain.gradients.values())
        return (
            0.01 * float(loss(plain.forward, self.targets)) / squared_norm if squared_norm else 0.0
        )

    def with_model(self, model: torch.nn.Module) -> Subject:
        """Return the subject with another model of the same shape."""
        return replace(self, model=model, cut=replace(self.cut, model=model) if self.cut else None)

    def to_float64(self) -> Subject:
        """Return the subject in float64."""
        inputs = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in self.inputs.items()
        }
        return replace(self.with_model(copy.deepcopy(self.model).double()), inputs=inputs)

    def with_targets(self, seed: int) -> Subject:
        """Return the subject with random targets of the outputs' magnitude."""
        targets = {}
        for name, value in run(self).forward.items():
            normals = torch.from_numpy(
                Stream(seed_key(seed), f"verify/target/{name}").normals(value.numel())
            ).view(value.shape)
            size = float(value.double().square().mean().sqrt())
            targets[name] = normals.to(value.device) * (
                size or 1.0
            )  # a zero head gives zero outputs
        return replace(self, targets=targets)


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The function after training, on the training inputs, and the weights."""

    forward: Tensors
    weights: Tensors


def train(
    subject: Subject, transform: Transform, steps: int, optimizer: str, lr: float
) -> TrainingResult:
    """Train a subject's model in place, with fresh rows in every step.

    In half precision the optimizer keeps float32 copies of the weights, as is usual. Each weight is
    stepped as soon as its gradient is computed, so that the gradients are never all in memory.

    Args:
        subject: The model and its inputs.
        transform: The transform at the cut.
        steps: Number of steps.
        optimizer: "sgd" or "adamw".
        lr: Learning rate of SGD.
    """
    parameters = dict(subject.model.named_parameters())
    masters = {
        n: p if p.dtype.itemsize >= 4 else p.detach().float().requires_grad_()
        for n, p in parameters.items()
    }
    handles = [
        p.register_post_accumulate_grad_hook(_make_step_hook(masters[n], optimizer, lr))
        for n, p in parameters.items()
        if p.requires_grad
    ]
    try:
        for step in range(steps):
            run(
                subject,
                replace(transform, rows=None if transform.rows is None else transform.rows + step),
                backward=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    return TrainingResult(
        run(subject, transform).forward, {n: p.detach() for n, p in masters.items()}
    )


def _make_step_hook(master: Tensor, optimizer: str, lr: float) -> Callable[[Tensor], None]:
    """Return a hook that steps a weight with its own optimizer and frees its gradient."""
    instance: torch.optim.Optimizer
    if optimizer == "sgd":
        instance = torch.optim.SGD([master], lr=lr, foreach=False)
    else:
        instance = torch.optim.AdamW([master], lr=1e-3, foreach=False)

    def step(p: Tensor) -> None:
        assert p.grad is not None
        gradient, p.grad = p.grad, None
        master.grad = gradient.to(master.dtype)
        instance.step()
        master.grad = None
        if p is not master:
            p.data.copy_(master.data)

    return step


def compare_with_exact(exact: Subject, plain: Pass) -> tuple[Pass, dict[str, float], set[str]]:
    """Run the exact model and compare the plain pass with it.

    Gradients are compared one by one, so that the exact ones are never all in memory.

    Returns:
        The exact pass, the plain pass's error in each weight gradient, and the parameters whose
        exact gradient is zero up to rounding.
    """
    rounding, sizes, handles = {}, {}, []
    for name, p in exact.model.named_parameters():
        if not p.requires_grad:
            continue

        def compare(p: Tensor, name: str = name) -> None:
            assert p.grad is not None
            gradient, p.grad = p.grad, None
            rounding[name] = (
                relative_error(plain.gradients[name], gradient)
                if name in plain.gradients
                else math.inf
            )
            sizes[name] = float(gradient.norm()) / math.sqrt(gradient.numel())

        handles.append(p.register_post_accumulate_grad_hook(compare))
    try:
        result = run(exact, backward=True)
    finally:
        for handle in handles:
            handle.remove()
    return result, rounding, _below_rounding(sizes)


def run(
    subject: Subject,
    transform: Transform = PLAIN,
    *,
    backward: bool = False,
    training: bool = False,
) -> Pass:
    """Run one pass in evaluation mode and leave the model unchanged.

    Args:
        subject: The model and its inputs.
        transform: The transform at the cut.
        backward: Whether to compute the gradients of the loss.
        training: Whether to run in training mode instead.
    """
    model, left_streams, entered_streams = subject.model, {}, {}

    def cross(crossing: Crossing) -> Tensor:
        crossed = crossing if transform.columns is None else crossing.transform(transform.columns)
        shuffle = transform.shuffle(crossing)
        if shuffle is not None:
            crossed = (
                crossed.with_inputs(
                    **{crossed.boundary.stream: act(shuffle, crossed.stream, "_ token _")}
                )
                if transform.is_control
                else crossed.transform(shuffle)
            )
        if backward:
            name, stream = crossed.boundary.stream, crossed.stream
            if not stream.requires_grad:
                crossed = crossed.with_inputs(**{name: stream.detach().requires_grad_()})
            crossed.stream.retain_grad()
            entered_streams[f"features {crossing.boundary.name}".strip()] = crossed.stream
        z = crossed.run()
        z = z if transform.is_control else transform.restore(crossing, z)
        left_streams[f"stream {crossing.boundary.name}".strip()] = z
        return z

    route = subject.cut.route(cross) if subject.cut else contextlib.nullcontext()
    with (
        eval_mode(model, training),
        exact_arithmetic(subject.dtype),
        torch.set_grad_enabled(backward),
        _explicit_masks(subject),
        route,
    ):
        outputs = _floats(model(**subject.inputs)) | left_streams
        if not backward:
            return Pass({k: v.detach() for k, v in outputs.items()})
        model.zero_grad()
        loss(outputs, subject.targets).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()  # sets them to None; the tensors above stay
    return Pass(
        {k: v.detach() for k, v in outputs.items()},
        gradients,
        {k: v.grad for k, v in entered_streams.items() if v.grad is not None},
    )


def loss(outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    """Return the squared distance of all outputs and streams from their targets, relative to the
    targets' size.
    """
    return torch.stack(
        [(outputs[k].double() - t).square().mean() / t.square().mean() for k, t in targets.items()]
    ).sum()


def _floats(result: Any) -> Tensors:
    """Return the floating-point outputs by name; raise SpecError if none exist."""
    tensors = name_outputs(result)
    if not tensors:
        raise SpecError(
            "the model must return a floating-point output, got none",
            hint="pass inputs for which it returns logits or hidden states",
        )
    return tensors


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module, training: bool = False) -> Iterator[None]:
    """Set evaluation (or training) mode and restore every module's mode afterwards."""
    before = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _explicit_masks(subject: Subject) -> Iterator[None]:
    """Use eager attention, which takes its mask as a tensor: fused kernels create the causal mask
    where no permutation reaches it.
    """
    model: Any = subject.model
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    implicit = subject.cut is not None and any(
        "attention_mask" in b.implicit for b in subject.cut.boundaries
    )
    if not implicit or before in (None, "eager"):
        yield
        return
    configs = {
        id(m.config): m.config
        for m in model.modules()
        if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    previous = [(c, c._attn_implementation) for c in configs.values()]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, implementation in previous:
            config._attn_implementation = implementation


def relative_errors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor of a from its counterpart in b; infinite if one is
    missing.
    """
    errors = dict.fromkeys(a.keys() ^ b.keys(), math.inf)
    for name in a.keys() & b.keys():
        errors[name] = relative_error(a[name], b[name])
    return errors


def relative_error(got: Tensor, want: Tensor, start: Tensor | None = None) -> float:
    """Return ||got - want|| / ||want||, or / ||want - start||, in float64, computed in pieces."""
    if got.shape != want.shape:
        return math.inf
    parts = [t.reshape(-1).split(_PIECE) for t in (got, want, want if start is None else start)]
    error = size = 0.0
    for x, y, z in zip(*parts, strict=True):
        y = y.double()
        error += float((x.double() - y).square().sum())
        size += float((y if start is None else y - z.double()).square().sum())
    if error != error or (size == 0 and error > 0):
        return math.inf
    return math.sqrt(error / size) if error else 0.0


_PIECE = 1 << 22


def weighted_error(parts: Mapping[str, float], rounding: Mapping[str, float]) -> float:
    """Return the root mean square over tensors, weighted by the inverse square of the model's own
    rounding error.
    """
    if parts.keys() != rounding.keys() or math.inf in parts.values():
        return math.inf
    return (
        math.sqrt(
            sum((e / rounding[n]) ** 2 for n, e in parts.items())
            / sum(rounding[n] ** -2 for n in parts)
        )
        if parts
        else 0.0
    )


def find_zero_gradients(gradients: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters whose gradient in an exact pass is zero up to rounding: key biases
    without rotary positions, unused tables.
    """
    return _below_rounding(
        {n: float(g.norm()) / math.sqrt(g.numel()) for n, g in gradients.items()}
    )


def _below_rounding(sizes: Mapping[str, float]) -> set[str]:
    """Return the names whose size is zero relative to the largest."""
    return {n for n, size in sizes.items() if size <= 1e-12 * max(sizes.values())}
