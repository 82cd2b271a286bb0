"""What is verified, one pass of it, and how two passes are compared.

The measure. An error is ||a - b|| / ||b|| for each tensor, and the root mean square of that over
the tensors of a pass. What is compared are the streams where they leave the backbone, the outputs,
the gradients of the weights and of the features that enter. The tolerance is 1e-9 in float64;
below, it is `MULTIPLE` times the model's own rounding error by the same measure: the same pass with
the same weights in float64.
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
from regauge.core.spec import Spec, stored
from regauge.errors import SpecError
from regauge.locking.permuted import rows
from regauge.models.cut import Crossing, Cut
from regauge.testing import named, strict_float64

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

MULTIPLE = {torch.float64: 1.0, torch.float32: 16.0, torch.bfloat16: 1.5, torch.float16: 4.0}
EXACT = 1e-9


@dataclass(frozen=True)
class Way:
    """How features go through the backbone: rows shuffled by a seed, columns moved by an element,
    and put back where they leave.

    `alone` is the control for rows: the features are shuffled, nothing follows them (masks,
    positions), and nothing is put back.
    """

    rows: int | None = None
    columns: Element | None = None
    alone: bool = False

    def shuffle(self, crossing: Crossing) -> Element | None:
        return (
            None
            if self.rows is None
            else rows(crossing.stream.shape[1], self.rows, f"verify/{crossing.boundary.name}")
        )

    def restored(self, crossing: Crossing, z: Tensor) -> Tensor:
        shuffle = self.shuffle(crossing)
        z = z if shuffle is None else crossing.restored(shuffle, z)
        return z if self.columns is None else crossing.restored(self.columns, z)


PLAIN = Way()


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass gave: streams where they leave and outputs; gradients of the weights, and of
    the features where they enter, as moved.
    """

    forward: Tensors
    gradients: Tensors = field(default_factory=dict)
    features: Tensors = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its inputs, its spec and its cut. `targets` make the loss: every entry of every
    output and stream has one of its own.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Any]
    spec: Spec
    cut: Cut | None
    targets: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def rows_fixed(self) -> str:
        """Why rows cannot move in this model, or nothing if they can."""
        if self.cut is None:
            return "the model is not cut, so that rows cannot be reached"
        if not all("token" in boundary.leave.split() for boundary in self.cut.boundaries):
            if (
                self.spec.family == type(self.model).__name__
            ):  # a spec that was discovered is called by the class
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
        """The part that a tensor belongs to: embed, backbone or head."""
        entry = stored(self.spec).get(name)
        return self.spec.parts.get(entry.pattern, "") if entry else ""

    def features_moved(self, gradients: Tensors, way: Way) -> Tensors:
        """Gradients of the plain features as a moved backbone should give them: they follow the
        dual action.
        """
        assert self.cut is not None
        out = {}
        for boundary in self.cut.boundaries:
            name = f"features {boundary.name}".strip()
            axes, value = ax.dual(boundary.enter[boundary.stream]), gradients[name]
            spaces = {s for s in ax.spaces(axes) if s != "token"}
            if way.columns is not None and spaces:
                value = act(way.columns, value, axes.replace("token*", "_"))
            if way.rows is not None:
                value = act(
                    rows(value.shape[1], way.rows, f"verify/{boundary.name}"), value, "_ token _"
                )
            out[name] = value
        return out

    def rate(self, plain: Pass) -> float:
        """A learning rate for SGD at which the first step takes about a hundredth off the loss, if
        that is as steep as it looks.
        """
        steepness = sum(float(g.double().square().sum()) for g in plain.gradients.values())
        return 0.01 * float(loss(plain.forward, self.targets)) / steepness if steepness else 0.0

    def of(self, model: torch.nn.Module) -> Subject:
        """The same with another model of the same shape."""
        return replace(self, model=model, cut=replace(self.cut, model=model) if self.cut else None)

    def exact(self) -> Subject:
        """The same in float64."""
        inputs = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in self.inputs.items()
        }
        return replace(self.of(copy.deepcopy(self.model).double()), inputs=inputs)

    def aimed(self, seed: int) -> Subject:
        """The same with targets, as large as the outputs that they are for."""
        out = {}
        for name, value in run(self).forward.items():
            drawn = torch.from_numpy(
                Stream(seed_key(seed), f"verify/target/{name}").normals(value.numel())
            ).view(value.shape)
            size = float(value.double().square().mean().sqrt())
            out[name] = drawn.to(value.device) * (size or 1.0)  # a head of zeros gives zeros
        return replace(self, targets=out)


@dataclass(frozen=True, eq=False)
class Trained:
    """What training left: the function on the inputs that it was trained on, and the weights."""

    forward: Tensors
    weights: Tensors


def train(subject: Subject, way: Way, steps: int, optimizer: str, rate: float) -> Trained:
    """Train a subject's model in place, with fresh rows in every step. In half precision the
    optimizer holds the weights in float32, as is usual.

    Each weight is stepped as soon as its gradient is there, so that the gradients are never all in
    memory.
    """
    parameters = dict(subject.model.named_parameters())
    masters = {
        n: p if p.dtype.itemsize >= 4 else p.detach().float().requires_grad_()
        for n, p in parameters.items()
    }
    handles = [
        p.register_post_accumulate_grad_hook(_stepper(masters[n], optimizer, rate))  # type: ignore[no-untyped-call]
        for n, p in parameters.items()
        if p.requires_grad
    ]
    try:
        for step in range(steps):
            run(
                subject,
                replace(way, rows=None if way.rows is None else way.rows + step),
                backward=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    return Trained(run(subject, way).forward, {n: p.detach() for n, p in masters.items()})


def _stepper(master: Tensor, optimizer: str, rate: float) -> Callable[[Tensor], None]:
    chosen: torch.optim.Optimizer
    if optimizer == "sgd":
        chosen = torch.optim.SGD([master], lr=rate, foreach=False)
    else:
        chosen = torch.optim.AdamW([master], lr=1e-3, foreach=False)

    def step(p: Tensor) -> None:
        assert p.grad is not None
        gradient, p.grad = p.grad, None
        master.grad = gradient.to(master.dtype)
        chosen.step()
        master.grad = None
        if p is not master:
            p.data.copy_(master.data)

    return step


def against(exact: Subject, plain: Pass) -> tuple[Pass, dict[str, float], set[str]]:
    """A pass of the exact model, the plain pass's errors in each weight gradient, and the
    parameters whose exact gradient is zero but for rounding.

    Gradients are compared as they come, so that the exact ones are never all in memory.
    """
    own, sizes, handles = {}, {}, []
    for name, p in exact.model.named_parameters():
        if not p.requires_grad:
            continue

        def note(p: Tensor, name: str = name) -> None:
            assert p.grad is not None
            gradient, p.grad = p.grad, None
            own[name] = (
                relative_error(plain.gradients[name], gradient)
                if name in plain.gradients
                else math.inf
            )
            sizes[name] = float(gradient.norm()) / math.sqrt(gradient.numel())

        handles.append(p.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
    try:
        passed = run(exact, backward=True)
    finally:
        for handle in handles:
            handle.remove()
    return passed, own, _flat(sizes)


def run(
    subject: Subject, way: Way = PLAIN, *, backward: bool = False, training: bool = False
) -> Pass:
    """One pass in evaluation mode, as given or another way, with the loss's gradients if asked. The
    model is left as it was.
    """
    model, leaving, entering = subject.model, {}, {}

    def cross(crossing: Crossing) -> Tensor:
        there = crossing if way.columns is None else crossing.moved(way.columns)
        shuffle = way.shuffle(crossing)
        if shuffle is not None:
            there = (
                there.replaced(**{there.boundary.stream: act(shuffle, there.stream, "_ token _")})
                if way.alone
                else there.moved(shuffle)
            )
        if backward:
            name, stream = there.boundary.stream, there.stream
            if not stream.requires_grad:
                there = there.replaced(**{name: stream.detach().requires_grad_()})
            there.stream.retain_grad()
            entering[f"features {crossing.boundary.name}".strip()] = there.stream
        z = there.run()
        z = z if way.alone else way.restored(crossing, z)
        leaving[f"stream {crossing.boundary.name}".strip()] = z
        return z

    route = subject.cut.route(cross) if subject.cut else contextlib.nullcontext()
    with (
        evaluating(model, training),
        precisely(subject.dtype),
        torch.set_grad_enabled(backward),
        _whole_masks(subject),
        route,
    ):
        outs = _floats(model(**subject.inputs)) | leaving
        if not backward:
            return Pass({k: v.detach() for k, v in outs.items()})
        model.zero_grad()
        loss(outs, subject.targets).backward()  # type: ignore[no-untyped-call]
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()  # sets them to None: the tensors are ours now
    return Pass(
        {k: v.detach() for k, v in outs.items()},
        gradients,
        {k: v.grad for k, v in entering.items() if v.grad is not None},
    )


def loss(outs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    """The squared distance of all outputs and streams from their targets, relative to the targets'
    size.
    """
    return torch.stack(
        [(outs[k].double() - t).square().mean() / t.square().mean() for k, t in targets.items()]
    ).sum()


def _floats(result: Any) -> Tensors:
    out = named(result)
    if not out:
        raise SpecError(
            "the model returned no floating-point output to compare",
            hint="give inputs that make it return logits or hidden states",
        )
    return out


@contextlib.contextmanager
def evaluating(model: torch.nn.Module, training: bool = False) -> Iterator[None]:
    """In evaluation mode, or not, every module back in its own afterwards."""
    before = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def precisely(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return strict_float64() if dtype == torch.float64 else contextlib.nullcontext()


@contextlib.contextmanager
def _whole_masks(subject: Subject) -> Iterator[None]:
    """Attention that is given its mask: fused kernels make the causal one themselves, where no
    permutation reaches it.
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
    chosen = [(c, c._attn_implementation) for c in configs.values()]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, implementation in chosen:
            config._attn_implementation = implementation


def errors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor of a is from its counterpart, relative to that. A tensor that is missing
    on one side is infinitely far.
    """
    out = dict.fromkeys(a.keys() ^ b.keys(), math.inf)
    for name in a.keys() & b.keys():
        out[name] = relative_error(a[name], b[name])
    return out


def relative_error(got: Tensor, want: Tensor, start: Tensor | None = None) -> float:
    """||got - want|| / ||want||, or / ||want - start||, in float64 but never as a whole."""
    if got.shape != want.shape:
        return math.inf
    parts = [t.reshape(-1).split(_PIECE) for t in (got, want, want if start is None else start)]  # type: ignore[no-untyped-call]
    error = size = 0.0
    for x, y, z in zip(*parts, strict=True):
        y = y.double()
        error += float((x.double() - y).square().sum())
        size += float((y if start is None else y - z.double()).square().sum())
    if error != error or (size == 0 and error > 0):
        return math.inf
    return math.sqrt(error / size) if error else 0.0


_PIECE = 1 << 22


def overall(parts: Mapping[str, float], own: Mapping[str, float]) -> float:
    """The root mean square over tensors, each weighed by how precisely the model itself computes
    it: by the inverse square of its own error.
    """
    if parts.keys() != own.keys() or math.inf in parts.values():
        return math.inf
    return (
        math.sqrt(
            sum((e / own[n]) ** 2 for n, e in parts.items()) / sum(own[n] ** -2 for n in parts)
        )
        if parts
        else 0.0
    )


def flat(gradients: Mapping[str, Tensor]) -> set[str]:
    """Parameters whose gradient is zero but for rounding, judged by an exact pass: key biases
    without rotary positions, unused tables.
    """
    return _flat({n: float(g.norm()) / math.sqrt(g.numel()) for n, g in gradients.items()})


def _flat(sizes: Mapping[str, float]) -> set[str]:
    return {n for n, size in sizes.items() if size <= 1e-12 * max(sizes.values())}
