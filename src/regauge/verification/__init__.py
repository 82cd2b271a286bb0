"""Verify: do permutations of tokens (rows) and of channels (columns) commute with forward, backward
and training, on the model at hand?

    for finding in regauge.verify(model).findings:
        print(finding.id, finding.holds, finding.sentence)

Every check runs the unmodified model, cut where the stream enters and leaves its blocks, and
compares it with the plain run; `subject` says how. Beside each check stands its negative control:
the same with something wrong, which must fail by far.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from regauge.core.spec import Spec, check, require, stored
from regauge.errors import CutError, RegaugeError, SpecError
from regauge.models.cut import Cut, cut
from regauge.models.families import Boundary
from regauge.models.resolve import spec_of
from regauge.results.findings import Finding, Results
from regauge.verification import checks
from regauge.verification.inputs import example_inputs
from regauge.verification.scratch import scratch
from regauge.verification.subject import Subject, run

Progress = Callable[[int, int, str], None]

DRAWS = 3
OPTIMIZERS = ("sgd", "adamw")
# (check, does it need the rows to move, does it need a cut)
CHECKS: tuple[tuple[Callable[[checks.Case], list[Finding]], bool, bool], ...] = (
    (checks.row_forward, True, True),
    (checks.row_backward, True, True),
    (checks.column_forward, False, True),
    (checks.column_heads, False, True),
    (checks.column_backward, False, True),
    (checks.both, True, True),
    (checks.training, False, True),
    (scratch, False, True),
    (checks.mixed, False, True),
    (checks.dropout, False, True),
    (checks.description, False, False),
)


def verify(
    model: torch.nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    spec: Spec | None = None,
    boundaries: Sequence[Boundary] | None = None,
    steps: int = 3,
    optimizer: str = "sgd",
    seed: int = 0,
    progress: Progress | None = None,
) -> Results:
    """Check the theorems on a model, with its own inputs or random ones of the right shape. The
    model is left as it was.

    A module of your own needs its `spec` (a spec file) and `boundaries` (where its backbone is).
    `steps` of the optimizer ("sgd", or "adamw") are trained; 0 leaves training out.
    """
    if optimizer not in OPTIMIZERS:
        raise SpecError(
            f'there is no optimizer "{optimizer}" here', hint=f"choose from {', '.join(OPTIMIZERS)}"
        )
    spec = spec_of(model) if spec is None else spec
    for name, value in model.state_dict().items():
        if value.is_meta:
            raise SpecError(
                f"this {type(model).__name__} has no weights: it lies on the meta device",
                hint="load it first",
            )
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SpecError(
                f'"{name}" holds values that are not finite',
                hint="nothing can be verified on such weights; look at how they came about",
            )
    findings, unchecked = [_fits(spec, model)], []
    here: Cut | None = None
    try:
        here = cut(model, boundaries=boundaries)
    except CutError as error:
        unchecked.append(f"rows and columns at the cut: {error}")
    if inputs is not None:
        _require_arguments(model, inputs)
    subject = Subject(
        model, dict(inputs) if inputs is not None else example_inputs(model, seed), spec, here
    )
    pending = {p: p.grad for p in model.parameters()}
    model.zero_grad()
    try:
        _require_run(subject)
        return _verify(subject, findings, unchecked, seed, steps, optimizer, progress)
    finally:
        for p, gradient in pending.items():
            p.grad = gradient


def _require_run(subject: Subject) -> None:
    """Run the model once, so that what it cannot be given is its own error and no fault of a
    check.
    """
    name = type(subject.model).__name__
    if torch.is_inference_mode_enabled():
        raise SpecError(
            "nothing can be verified in inference mode: there are no gradients in it",
            hint="call verify outside of torch.inference_mode",
        )
    try:
        passed = run(subject).forward
    except RegaugeError:
        raise
    except Exception as error:  # whatever a model raises for inputs that are not its own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecError(
            f"this {name} cannot be run on its inputs: {first}",
            hint="look at their names, shapes, dtypes and token ids",
        ) from error
    for key, value in passed.items():
        if not bool(value.isfinite().all()):
            raise SpecError(
                f'"{key}" of this {name} is not finite on these inputs',
                hint="look at the inputs, or try a wider dtype",
            )


def _verify(
    subject: Subject,
    findings: list[Finding],
    unchecked: list[str],
    seed: int,
    steps: int,
    optimizer: str,
    progress: Progress | None,
) -> Results:
    model, here = subject.model, subject.cut
    case = checks.prepare(subject, seed, steps, optimizer)
    if subject.rows_fixed and here is not None:
        findings.append(
            Finding(
                "row/forward",
                "Shuffling the tokens shuffles the result.",
                None,
                sentence=subject.rows_fixed,
                source="000 Thm 4.1",
            )
        )
    chosen = [
        one
        for one, rows, parts in CHECKS
        if not (rows and subject.rows_fixed) and not (parts and here is None)
    ]
    chosen = [one for one in chosen if one is not checks.training or (steps > 0 and case.rate > 0)]
    for done, one in enumerate(chosen):
        if progress:
            progress(done, len(chosen), one.__name__.replace("_", " "))
        if (
            one is checks.training
            # needs room for weights, gradients and momenta in float64, and no check after it needs
            # these gradients
        ):
            case = replace(case, plain=replace(case.plain, gradients={}))
        findings += _settled(one, case)
    if progress:
        progress(len(chosen), len(chosen), "")
    if steps == 0:
        unchecked.append("training (0 steps)")
    return Results(
        f"{type(model).__name__}: rows and columns", tuple(findings), unchecked=tuple(unchecked)
    )


def _require_arguments(model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
    takes = inspect.signature(model.forward).parameters
    strange = [
        n
        for n in inputs
        if n not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values())
    ]
    known = [n for n, p in takes.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if strange or not inputs.keys() & set(known):
        named = strange[0] if strange else next(iter(inputs), "nothing")
        raise SpecError(
            f'{type(model).__name__} is given "{named}", which its forward does not take',
            hint=f"it takes {', '.join(known[:6])}",
        )


def _settled(one: Callable[[checks.Case], list[Finding]], case: checks.Case) -> list[Finding]:
    """A check's findings; those that fail by little are tried with other draws before they are
    believed.

    Where a ReLU stands at its kink, rounding decides its gradient, and with it every gradient
    before it: by far more than rounding, by far less than a broken law. Another order of the same
    sums falls on another side.
    """
    found = one(case)
    near = {
        f.id
        for f in found
        if f.holds is False
        and f.value is not None
        and f.ceiling is not None
        and f.value < 0.05 * f.ceiling
    }
    near = {
        name for name in near if name.endswith(("weights", "features", "embedding", "trained"))
    }  # a forward pass falls on no side of a kink
    if not near or case.subject.dtype == torch.float64:
        return found
    others = [{f.id: f for f in one(case.again(k))} for k in range(1, DRAWS)]
    out = []
    for f in found:
        held = [o[f.id] for o in others if f.id in near and f.id in o and o[f.id].holds]
        if len(held) == DRAWS - 1:
            remark = (
                f"one draw of {DRAWS} was off by {f.value:.1e}: rounding decides the "
                "gradient of a unit at its kink"
            )
            f = replace(held[-1], sentence=f"{held[-1].sentence}; {remark}", trials=DRAWS)
        out.append(f)
    return out


def _fits(spec: Spec, model: torch.nn.Module) -> Finding:
    """Does the spec speak of every tensor? One that it does not know is a finding; one that is
    missing or has another shape is an error.
    """
    state, known = model.state_dict(), stored(spec)
    strange = [n for n in state if n not in known and not spec.is_buffer(n)]
    require(
        [f for f in check(spec, state) if f.name not in strange],
        f"{type(model).__name__} does not fit its spec",
    )
    statement = "The spec speaks of every tensor of the model."
    if not strange:
        return Finding("spec/fits", statement, True, sentence=f"{len(state)} tensors, all known")
    names = ", ".join(strange[:3])
    return Finding(
        "spec/fits",
        statement,
        False,
        sentence=f"{len(strange)} tensors that nothing is known of: {names}",
        where=strange[0],
    )
