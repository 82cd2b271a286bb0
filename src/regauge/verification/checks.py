"""The theorems of permutation equivariance (arXiv:2304.07735) as checks on a model, each with a
negative control that must fail by far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from regauge.checkpoints.reader import LazyState
from regauge.core import axes as ax
from regauge.core.action import act, apply_lazily, tensor_transforms
from regauge.core.element import Element, element
from regauge.core.spec import stored_tensors
from regauge.results.findings import INCONCLUSIVE, Finding
from regauge.verification.faults import first_fault
from regauge.verification.head_columns import head_columns
from regauge.verification.subject import (
    EXACT,
    MULTIPLE,
    PLAIN,
    Pass,
    Subject,
    TrainingResult,
    Transform,
    compare_with_exact,
    find_zero_gradients,
    relative_error,
    relative_errors,
    run,
    train,
    weighted_error,
)

# Multiple of the tolerance that a negative control must reach for a check to be conclusive.
MARGIN = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 10.0, torch.float16: 10.0}

# SINGLE_LIMIT: multiple of its share of the tolerance by which a single tensor may be off. NOISE:
# rounding error above which a tensor cannot be compared. NOISY_LIMIT: one tensor in this many may
# be that noisy and is left out; with more the check is inconclusive.
SINGLE_LIMIT, NOISE, NOISY_LIMIT = 4.0, 0.5, 20

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Errors = Mapping[str, float]
COLUMNS = "permutation equivariance, Thm 4.4"
ROWS_ONLY = "the rows shuffled, and nothing with them or after them"


@dataclass(frozen=True, eq=False)
class Case:
    """A subject, its plain pass, its rounding errors by tensor, and the element for its columns."""

    subject: Subject
    plain: Pass
    rounding: Mapping[str, Errors]  # of "forward", "gradients", "features"
    zero_gradients: frozenset[str]  # parameters without a gradient
    columns: Element
    seed: int
    steps: int
    optimizer: str
    lr: float

    def resample(self, k: int) -> Case:
        """Return the same case with other rows and columns."""
        return replace(
            self,
            seed=self.seed + k,
            columns=element(self.subject.spec, self.seed + k, within="permutation"),
        )

    def transformed(self, g: Element) -> Subject:
        """Return the subject with a transformed copy of its backbone."""
        return self.subject.with_model(transform_copy(self.subject.model, g))

    def with_gradient(self, values: State) -> State:
        """Return the tensors of parameters that have a gradient."""
        return LazyState([n for n in values if n not in self.zero_gradients], values.__getitem__)


def prepare(subject: Subject, seed: int, steps: int, optimizer: str) -> Case:
    """Run the plain model and the same in float64 to measure its rounding."""
    subject = subject.with_targets(seed)
    columns = element(subject.spec, seed, within="permutation")
    plain = run(subject, backward=True)
    rounding: dict[str, Errors]
    if subject.dtype == torch.float64:
        zero_gradients = find_zero_gradients(plain.gradients)
        rounding = {
            kind: dict.fromkeys(getattr(plain, kind), EXACT)
            for kind in ("forward", "gradients", "features")
        }
    else:
        exact, gradient_errors, zero_gradients = compare_with_exact(subject.to_float64(), plain)
        rounding = {
            "forward": relative_errors(plain.forward, exact.forward),
            "gradients": gradient_errors,
            "features": relative_errors(plain.features, exact.features),
        }
        rounding = {
            kind: _at_least(parts, getattr(plain, kind), subject.dtype)
            for kind, parts in rounding.items()
        }
    rounding["gradients"] = {
        n: e for n, e in rounding["gradients"].items() if n not in zero_gradients
    }
    return Case(
        subject,
        plain,
        rounding,
        frozenset(zero_gradients),
        columns,
        seed,
        steps,
        optimizer,
        subject.suggest_lr(plain),
    )


def transform_copy(
    model: torch.nn.Module, g: Element, part: str | None = "backbone"
) -> torch.nn.Module:
    """Return a copy with its backbone, or all of it, transformed. Tensors outside the spec are
    unchanged.
    """
    transformed, entries = copy.deepcopy(model), stored_tensors(g.spec)
    with torch.no_grad():
        state, target = model.state_dict(), transformed.state_dict()
        for name, thunk in apply_lazily(
            g, {k: v for k, v in state.items() if k in entries}, part
        ).items():
            target[name].copy_(thunk())
    return transformed


def transform_weights(g: Element, values: State) -> State:
    """Return these tensors with the backbone transformed as weights, lazily."""
    return _transform_lazily(g, values, lambda axes: axes)


def transform_gradients(g: Element, values: State) -> State:
    """Return these tensors with the backbone transformed as gradients, lazily."""
    return _transform_lazily(g, values, ax.dual)


def _transform_lazily(g: Element, values: State, axes: Callable[[str], str]) -> State:
    """Return the tensors of the backbone under g, with axes mapped by `axes`, computed on
    access.
    """
    plan = {m.name: m for m in tensor_transforms(g, "backbone")}

    def read(name: str) -> Tensor:
        move = plan.get(name)
        return (
            values[name]
            if move is None
            else act(g, values[move.source], axes(move.axes), at=move.at)
        )

    return LazyState(list(values), read)


def _at_least(rounding: Errors, tensors: State, dtype: torch.dtype) -> dict[str, float]:
    """Return rounding errors bounded below by a fraction of the dtype's epsilon, and enlarged for
    tensors with few entries.
    """
    smallest = torch.finfo(dtype).eps / 4
    return {
        n: max(e, smallest) * (1 + 3 / math.sqrt(2 * tensors[n].numel())) if n in tensors else e
        for n, e in rounding.items()
    }


# The checks: each takes a case and returns its findings.


def row_forward(c: Case) -> list[Finding]:
    """Check that the forward pass commutes with a shuffle of the tokens."""
    statement = (
        "T(P Z) = P T(Z): shuffling the tokens after the position embedding, with masks "
        "and positions, shuffles the result and nothing else."
    )
    findings = []
    # Two shuffles: one may fix the very row that a broken module treats differently.
    for seed in (c.seed, c.seed + 1):
        transform = Transform(rows=seed)
        result, control_result = (
            run(c.subject, transform),
            run(c.subject, replace(transform, is_control=True)),
        )
        comparison = _compare(
            c, "forward", result.forward, c.plain.forward, control_result.forward, ROWS_ONLY
        )
        findings.append(
            _locate_fault(
                c,
                comparison.finding("row/forward", statement, "permutation equivariance, Thm 4.1"),
                c.subject,
                transform,
            )
        )
    return [_worst(*findings)]


def row_backward(c: Case) -> list[Finding]:
    """Check that weight gradients ignore a shuffle of the tokens and feature gradients follow
    it.
    """
    transform = Transform(rows=c.seed)
    result, control_result = (
        run(c.subject, transform, backward=True),
        run(c.subject, replace(transform, is_control=True), backward=True),
    )
    weights = _compare(
        c,
        "gradients",
        c.with_gradient(result.gradients),
        c.with_gradient(c.plain.gradients),
        c.with_gradient(control_result.gradients),
        ROWS_ONLY,
    )
    shuffled = c.subject.transform_feature_grads(c.plain.features, transform)
    features = _compare(
        c,
        "features",
        result.features,
        shuffled,
        c.plain.features,
        "the plain gradients, not shuffled",
    )
    return [
        weights.finding(
            "row/weights",
            "Weight gradients are equal with and without the shuffle.",
            "permutation equivariance, Thm 4.2, Cor 4.3",
        ),
        features.finding(
            "row/features",
            "Gradients of the features are shuffled as the features are.",
            "permutation equivariance, Lem 4.8",
        ),
    ]


def column_forward(c: Case) -> list[Finding]:
    """Check that the forward pass commutes with a permutation of the channels."""
    statement = (
        "T_C(Z P) = T(Z) P for a permutation of the stream's channels without "
        "restriction, of heads, of their insides and of neurons."
    )
    findings = []
    for g in (c.columns, c.resample(1).columns):
        transform, subject = Transform(columns=g), c.transformed(g)
        comparison = _compare_columns(c, subject, transform)
        finding = comparison.finding("column/forward", statement, COLUMNS)
        findings.append(_locate_fault(c, finding, subject, transform))
    return [_worst(*findings)]


def _compare_columns(c: Case, moved: Subject, transform: Transform) -> _Comparison:
    """Compare the forward pass of a moved backbone, given features that are moved likewise."""
    return _compare(
        c,
        "forward",
        run(moved, transform).forward,
        c.plain.forward,
        run(moved).forward,
        "the moved backbone given plain features",
    )


def _worst(a: Finding, b: Finding) -> Finding:
    """Return the finding that fails, else the inconclusive one, else the one with the larger
    error.
    """
    severity = {True: 0, None: 1, False: 2}
    return max(a, b, key=lambda f: (severity[f.holds], f.value or 0))


def column_heads(c: Case) -> list[Finding]:
    """Check the paper's own, head-restricted column permutation."""
    statement = (
        "The paper's own columns: one permutation on both sides of every projection, "
        "which therefore keeps heads together."
    )
    g, remark = head_columns(c.subject.spec, c.seed)
    if g is None:
        return [Finding("column/heads", statement, None, sentence=remark, source=COLUMNS)]
    comparison = _compare_columns(c, c.transformed(g), Transform(columns=g))
    return [comparison.finding("column/heads", statement, COLUMNS, remark)]


def column_backward(c: Case) -> list[Finding]:
    """Check that gradients follow a permutation of the channels."""
    transform = Transform(columns=c.columns)
    got = run(c.transformed(c.columns), transform, backward=True)
    expected, control = (
        c.with_gradient(transform_gradients(c.columns, c.plain.gradients)),
        "the plain gradients, not moved",
    )
    weights = _compare(
        c,
        "gradients",
        c.with_gradient(got.gradients),
        expected,
        c.with_gradient(c.plain.gradients),
        control,
    )
    features = _compare(
        c,
        "features",
        got.features,
        c.subject.transform_feature_grads(c.plain.features, transform),
        c.plain.features,
        control,
    )
    statement = (
        "Gradients of the moved backbone are the plain ones, moved; those of embedding "
        "and head are equal."
    )
    return [
        weights.finding(
            "column/weights",
            statement,
            "permutation equivariance, Thm 4.5",
            _zero_gradient_remark(c),
        ),
        features.finding(
            "column/features",
            "Gradients of the features are moved as the features are.",
            "permutation equivariance, Thm 4.5",
        ),
    ]


def rows_and_columns(c: Case) -> list[Finding]:
    """Check rows and columns at once, forward and backward."""
    transform, subject = Transform(rows=c.seed, columns=c.columns), c.transformed(c.columns)
    result, control_result = (
        run(subject, transform, backward=True),
        run(subject, replace(transform, columns=None), backward=True),
    )
    control = "the columns of the features left alone"
    forward = _compare(
        c, "forward", result.forward, c.plain.forward, control_result.forward, control
    )
    expected = c.with_gradient(transform_gradients(c.columns, c.plain.gradients))
    weights = _compare(
        c,
        "gradients",
        c.with_gradient(result.gradients),
        expected,
        c.with_gradient(control_result.gradients),
        control,
    )
    edges = [n for n in c.rounding["gradients"] if c.subject.part(n) == "embed"]
    embed = _compare(
        c,
        "gradients",
        _select(result.gradients, edges),
        _select(c.plain.gradients, edges),
        _select(control_result.gradients, edges),
        control,
    )
    return [
        forward.finding(
            "both/forward",
            "Rows and columns at once: the function is the same.",
            "permutation equivariance, Eq. 8",
        ),
        weights.finding(
            "both/weights",
            "Rows and columns at once: weight gradients follow the columns and do not see the "
            "rows.",
            "permutation equivariance, Eq. 8",
        ),
        embed.finding(
            "both/embedding",
            "The embedding and its positions get the gradients they would get without it.",
            "permutation equivariance, Thm 10.1",
        ),
    ]


def training(c: Case) -> list[Finding]:
    """Train the plain model and the same with rows, with columns and with both (Algorithm 1), with
    fresh rows in every step.
    """
    start = {n: p.detach() for n, p in c.subject.model.named_parameters()}

    def train_subject(subject: Subject, transform: Transform) -> TrainingResult:
        return train(subject, transform, c.steps, c.optimizer, c.lr)

    plain = train_subject(c.subject.with_model(copy.deepcopy(c.subject.model)), PLAIN)
    if c.subject.dtype == torch.float64:
        function, weights = (
            dict.fromkeys(plain.forward, EXACT),
            {n: EXACT for n in plain.weights if n not in c.zero_gradients},
        )
    else:
        exact = train_subject(c.subject.to_float64(), PLAIN)
        function = _at_least(
            relative_errors(plain.forward, exact.forward), plain.forward, c.subject.dtype
        )
        weights = _at_least(
            _update_errors(c, plain.weights, exact.weights, start), start, c.subject.dtype
        )
        del exact
    findings = []
    duration = f"{c.steps} steps of {c.optimizer}"
    for name, transform, source in (
        ("row", Transform(rows=c.seed), "permutation equivariance, Cor 4.3, Lem 4.8"),
        ("column", Transform(columns=c.columns), "permutation equivariance, Cor 4.6"),
        ("both", Transform(rows=c.seed, columns=c.columns), "permutation equivariance, Alg. 1"),
    ):
        if transform.rows is not None and c.subject.rows_fixed_reason:
            continue
        trainee = (
            c.subject.with_model(copy.deepcopy(c.subject.model))
            if transform.columns is None
            else c.transformed(c.columns)
        )
        result = train_subject(trainee, transform)
        control_result = run(
            trainee, replace(transform, is_control=True) if transform.columns is None else PLAIN
        )
        first_weights = start if transform.columns is None else transform_weights(c.columns, start)
        expected = (
            plain.weights
            if transform.columns is None
            else transform_weights(c.columns, plain.weights)
        )
        control_weights = (
            transform_weights(c.columns, plain.weights)
            if transform.columns is None
            else plain.weights
        )
        of_function = _assess(
            c,
            function,
            relative_errors(result.forward, plain.forward),
            relative_errors(control_result.forward, plain.forward),
            "the trained model used plainly",
        )
        of_weights = replace(
            _assess(
                c,
                weights,
                _update_errors(c, result.weights, expected, first_weights),
                _update_errors(c, control_weights, expected, first_weights),
                "in another description",
            ),
            noise=math.inf,  # an update may be smaller than its weight's last digit
        )
        # Weights of a half-precision model are rounded after training; its float32 copies are
        # compared below.
        if c.subject.dtype.itemsize >= 4:
            findings.append(
                of_function.finding(
                    f"{name}/trained",
                    f"The trained function is the same, after {duration}.",
                    source,
                )
            )
        statement = (
            f"The trained weights correspond, after {duration}; errors are relative to the update."
        )
        findings.append(of_weights.finding(f"{name}/trained-weights", statement, source))
        del trainee, result, expected, control_weights
    return findings


def autocast(c: Case) -> list[Finding]:
    """Check rows and columns under bfloat16 autocast."""
    statement = (
        "Under bfloat16 autocast, rows and columns at once change the function by no "
        "more than autocast itself does."
    )
    if c.subject.dtype != torch.float32:
        return []
    transform, subject = (
        Transform(rows=None if c.subject.rows_fixed_reason else c.seed, columns=c.columns),
        c.transformed(c.columns),
    )
    exact = run(c.subject.to_float64()).forward
    with torch.autocast(next(c.subject.model.parameters()).device.type, torch.bfloat16):
        plain, result, control_result = (
            run(c.subject).forward,
            run(subject, transform).forward,
            run(subject).forward,
        )
    rounding = _at_least(relative_errors(plain, exact), plain, torch.bfloat16)
    comparison = _assess(
        c,
        rounding,
        relative_errors(result, plain),
        relative_errors(control_result, plain),
        "the moved backbone given plain features",
        torch.bfloat16,
    )
    comparison = replace(comparison, advice="")  # autocast has no wider dtype
    return [comparison.finding("both/mixed", statement, "THEORY 2")]


def dropout(c: Case) -> list[Finding]:
    """Measure the effect of dropout masks, which follow storage order."""
    statement = (
        "Dropout commutes with shuffles in distribution only: masks are sampled in the order of "
        "storage, and do not follow a shuffle."
    )
    drops = [m for m in c.subject.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    if not drops:
        return []
    transform, subject = (
        Transform(rows=None if c.subject.rows_fixed_reason else c.seed, columns=c.columns),
        c.transformed(c.columns),
    )
    with torch.random.fork_rng():
        torch.manual_seed(c.seed)
        plain = run(
            c.subject.with_model(copy.deepcopy(c.subject.model)), training=True
        ).forward  # running statistics change in training mode
        torch.manual_seed(c.seed)
        other = run(subject, transform, training=True).forward
    rounding = c.rounding["forward"]
    value = weighted_error(relative_errors(other, plain), rounding)
    sentence = (
        f"with dropout on, one seed gives outputs that differ by {value:.1e}; every "
        "check here runs with dropout off"
    )
    return [Finding("both/dropout", statement, None, value, None, None, sentence, "THEORY 2")]


def full_group(c: Case) -> list[Finding]:
    """Check that a random element of the whole group changes the weights and not the function."""
    spec, is_half = c.subject.spec, c.subject.dtype.itemsize < 4
    statement = (
        "Every tensor moved by a random element of the model's whole group: other "
        "weights, the same function."
    )
    remark = (
        "signed permutations only: anything else would round the weights once more"
        if is_half
        else ""
    )
    g = element(spec, c.seed, within="signed" if is_half else "full")
    names = [
        n
        for n in c.plain.forward
        if (n in spec.outputs if spec.outputs else not n.startswith("stream"))
    ]
    expected = {
        n: act(g, v, spec.outputs[n]) if spec.visible else v
        for n, v in _select(c.plain.forward, names).items()
    }
    uncut = replace(c.subject, cut=None)
    transformed = transform_copy(c.subject.model, g, None)
    result = run(uncut.with_model(transformed)).forward
    plain = c.subject.model.state_dict()
    transformed.load_state_dict({n: plain[n] for n in list(plain)[::2]}, strict=False)
    control_result = run(uncut.with_model(transformed)).forward
    comparison = _compare(
        c,
        "forward",
        _select(result, names),
        expected,
        _select(control_result, names),
        "every second tensor left as it was",
    )
    if is_half:  # embedding and head also compute in another order
        comparison = replace(comparison, tolerance=2 * comparison.tolerance)
    return [comparison.finding("description/forward", statement, "THEORY 1", remark)]


def _zero_gradient_remark(c: Case) -> str:
    """Return a remark about parameters without a gradient."""
    if not c.zero_gradients:
        return ""
    first = min(c.zero_gradients)
    return (
        f"{len(c.zero_gradients)} tensors have no gradient ({first}, ...) and are compared "
        "through the function"
    )


def _select(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the values with these names."""
    return {n: values[n] for n in names if n in values}


def _update_errors(c: Case, a: State, b: State, start: State) -> dict[str, float]:
    """Return the distance of trained weights relative to the update."""
    return {n: relative_error(a[n], b[n], start[n]) for n in c.with_gradient(a)}


# From comparisons to findings.


@dataclass(frozen=True)
class _Comparison:
    """The errors of a comparison next to its tolerance and its control.

    `parts` are the errors by tensor, `own` the rounding errors, `drowned` the tensors that are not
    judged because their rounding is too large.
    """

    value: float
    tolerance: float
    control: float
    parts: Errors
    how: str
    dtype: torch.dtype
    own: Errors
    noise: float = NOISE
    advice: str = "; try a wider dtype"
    drowned: Errors = field(default_factory=dict)

    def typical(self, name: str) -> float:
        """Return a tensor's rounding error, but at least the median: a small tensor may be precise
        by accident.
        """
        return max(self.own[name], median(self.own.values())) if name in self.own else math.inf

    def finding(self, name: str, statement: str, source: str, remark: str = "") -> Finding:
        """Judge the comparison and return it as a finding."""
        if not self.parts:
            return Finding(
                name,
                statement,
                None,
                sentence="nothing to compare: parameters are frozen, or outputs have no names",
                source=source,
            )
        worst = max(self.parts, key=lambda n: self.parts[n] / self.typical(n))
        lone = self.parts[worst] / self.typical(worst) / MULTIPLE[self.dtype]
        reached = self.control / self.tolerance
        noisy = [n for n, e in self.own.items() if e > self.noise]
        holds: bool | None = True
        if self.value <= self.tolerance and lone > SINGLE_LIMIT:
            holds = False
            sentence = (
                f"does not hold: {worst} is off by {self.parts[worst]:.1e}, "
                f"{lone / SINGLE_LIMIT:.2g} times what rounding allows one tensor"
            )
        elif not self.value <= self.tolerance:
            holds = False
            sentence = (
                f"does not hold: off by {self.value:.1e}, "
                f"{self.value / self.tolerance:.2g} times what rounding allows; furthest off: "
                f"{worst}"
            )
        elif noisy:
            holds = None
            sentence = (
                f"{INCONCLUSIVE} in {str(self.dtype)[6:]}: {noisy[0]} is off by "
                f"{self.own[noisy[0]]:.1e} from its own value in float64"
            )
        elif self.control == 0:
            holds = None
            sentence = f"{INCONCLUSIVE}: the control ({self.how}) changes nothing here"
        elif not reached >= MARGIN[self.dtype]:
            holds = None
            sentence = (
                f"{INCONCLUSIVE} in {str(self.dtype)[6:]}: the control ({self.how}) is only "
                f"{reached:.2g} times the tolerance{self.advice}"
            )
        else:
            sentence = (
                f"holds to {self.value:.1e}; the control ({self.how}) is off by {self.control:.1e}"
            )
        sentence += f"; {remark}" if remark else ""
        if self.drowned:
            first, more = max(self.drowned, key=lambda n: self.drowned[n]), len(self.drowned) - 1
            off = f"{str(self.dtype)[6:]} gets {self.drowned[first]:.0%} of it wrong"
            sentence += f"; not judged: {first} ({off}){f' and {more} more' if more else ''}"
        return Finding(
            name,
            statement,
            holds,
            self.value,
            self.tolerance,
            self.control,
            sentence,
            source,
            where=worst if holds is False else "",
        )


def _compare(
    c: Case, kind: str, got: State, want: State, control: State, control_name: str
) -> _Comparison:
    """Compare a pass and its control with the expected values."""
    rounding = {n: c.rounding[kind][n] for n in want if n in c.rounding[kind]}
    return _assess(
        c, rounding, relative_errors(got, want), relative_errors(control, want), control_name
    )


def _assess(
    c: Case,
    rounding: Errors,
    parts: Errors,
    control: Errors,
    control_name: str,
    dtype: torch.dtype | None = None,
) -> _Comparison:
    """Weigh errors and control against the rounding errors."""
    dtype = dtype or c.subject.dtype
    undefined = {
        n for n, e in rounding.items() if e == math.inf
    }  # zero in exact arithmetic: not comparable
    drowned = {n: e for n, e in rounding.items() if n not in undefined and e > NOISE}
    drowned = (
        drowned if dtype.itemsize == 2 and len(drowned) * NOISY_LIMIT <= len(rounding) else {}
    )  # in wider dtypes this is not rounding
    rounding, parts, control = (
        {n: e for n, e in errors.items() if n not in undefined and n not in drowned}
        for errors in (rounding, parts, control)
    )
    return _Comparison(
        weighted_error(parts, rounding),
        MULTIPLE[dtype] * weighted_error(rounding, rounding),
        weighted_error(control, rounding),
        parts,
        control_name,
        dtype,
        rounding,
        drowned=drowned,
    )


def _locate_fault(c: Case, finding: Finding, subject: Subject, transform: Transform) -> Finding:
    """Add the module in which a failing check goes wrong."""
    if finding.holds is not False or finding.floor is None:
        return finding
    module = first_fault(c.subject, subject, transform, finding.floor)
    return (
        finding
        if module is None
        else replace(
            finding, where=module, sentence=f"{finding.sentence}; it goes wrong in {module}"
        )
    )
