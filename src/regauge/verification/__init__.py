"""Verification: whether permutations of tokens (rows) and channels (columns) commute with forward,
backward and training, on a given model.

    for finding in regauge.verify(model).findings:
        print(finding.id, finding.holds, finding.sentence)

Every check runs the unmodified model, cut where the stream enters and leaves its blocks, and
compares it with the plain run (see `subject`). Each has a negative control: the same check with a
deliberate mistake, which must fail by far.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from regauge.core.check import check, require
from regauge.core.options import require_device, require_type
from regauge.core.progress import Progress
from regauge.core.spec import Spec, stored_tensors
from regauge.core.threads import is_set, limited_threads
from regauge.errors import CutError, RegaugeError, SpecError, UnknownModelError
from regauge.models.cut import Cut, cut
from regauge.models.discovery import to_kwargs
from regauge.models.families import Boundary
from regauge.models.load import load_model
from regauge.models.resolve import discover_unknown, spec_of
from regauge.models.sources import describe_discovery, load_spec_file
from regauge.results.findings import Finding, Results
from regauge.verification import checks
from regauge.verification.initialization import fresh_initialization
from regauge.verification.inputs import example_inputs, read_inputs
from regauge.verification.report import Verification, summarize
from regauge.verification.subject import Subject, run

if TYPE_CHECKING:
    from regauge.models.discovery import Discovery, Inputs
    from regauge.models.sources import Source

DRAWS = 3
SMALL_MODEL = 5_000_000  # parameters
OPTIMIZERS = ("sgd", "adamw")
# (check, needs shuffled rows, needs a cut)
CHECKS: tuple[tuple[Callable[[checks.Case], list[Finding]], bool, bool], ...] = (
    (checks.row_forward, True, True),
    (checks.row_backward, True, True),
    (checks.column_forward, False, True),
    (checks.column_heads, False, True),
    (checks.column_backward, False, True),
    (checks.rows_and_columns, True, True),
    (checks.training, False, True),
    (fresh_initialization, False, True),
    (checks.autocast, False, True),
    (checks.dropout, False, True),
    (checks.full_group, False, False),
)


def verify(
    model: Source,
    inputs: Inputs | str | Path | None = None,
    *,
    spec: Spec | str | Path | None = None,
    boundaries: Sequence[Boundary] | None = None,
    steps: int = 3,
    optimizer: str = "sgd",
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    general: bool = False,
    optimizers: bool = False,
    facts: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Verification:
    """Check the theorems on a model and leave it unchanged.

    The symmetry of a model that no family describes is discovered from its graph.

    Args:
        model: A live module, which is checked as it is, or a path, a hub id or a checkpoint, which
            is loaded.
        inputs: Inputs of its forward: a dict by name, a tensor, a tuple, or a file (.npz or
            .safetensors). Default: random ones by its config; a custom module requires them.
        spec: A spec or spec file. Default: that of the family.
        boundaries: The cuts of a custom module. Default: those of the family, or discovered.
        steps: Training steps to verify; 0 skips training.
        optimizer: "sgd" or "adamw".
        seed: Random seed of the inputs and the elements.
        dtype: The dtype to load a checkpoint in. Default: that of the stored weights.
        device: The device to check on. Default: that of the module, or the CPU.
        general: Also check Theorem 4.7, operator by operator.
        optimizers: Also measure which optimizers preserve which symmetry (half a minute).
        facts: Further facts of the run, for the report.
        progress: Callback with (done, total, name of the check).

    Returns:
        The findings, and what was not checked: `results`, `failed`, `to_html()`.

    Raises:
        SpecError: The optimizer, the weights or the inputs are invalid.

    Example:
        >>> report = regauge.verify("model", steps=0)
        >>> report.failed
        ()
    """
    started = time.monotonic()
    if inputs is not None:
        require_type(inputs, (Mapping, torch.Tensor, tuple, str, Path), "inputs")
    if device is not None:
        require_device(device)
    name = str(model) if isinstance(model, str | Path) else None
    module = load_model(model, dtype)
    if device is not None:
        module = module.to(device)
    parameters = sum(p.numel() for p in module.parameters())
    # below, one thread is faster than several
    with limited_threads(1 if parameters < SMALL_MODEL and not is_set() else None):
        if isinstance(inputs, str | Path):
            inputs = read_inputs(inputs, module)
        elif inputs is not None:
            inputs = to_kwargs(module, inputs)
        known, discovery = _describe(module, inputs, spec)
        if boundaries is None and discovery is not None:
            boundaries = discovery.boundaries or None
        results = verify_module(
            module,
            inputs,
            spec=known,
            boundaries=boundaries,
            steps=steps,
            optimizer=optimizer,
            seed=seed,
            progress=progress,
        )
        first = next(p.dtype for p in module.parameters() if p.is_floating_point())
        if general or optimizers:
            from regauge.verification.general import add_general_findings

            results = add_general_findings(
                results, first, seed, operators=general, optimizers=optimizers
            )
    facts = {
        **facts,
        "model": name or type(module).__name__,
        "class": type(module).__name__,
        "parameters": parameters,
        "dtype": str(first).removeprefix("torch."),
        "seed": seed,
        "training": f"{steps} steps of {optimizer}",
        "seconds": round(time.monotonic() - started, 1),
    }
    notes = (*describe_discovery(discovery), *_describe_symmetry(discovery))
    return Verification(summarize(replace(results, facts=facts)), notes)


def _describe(
    module: torch.nn.Module, inputs: Mapping[str, Any] | None, spec: Spec | str | Path | None
) -> tuple[Spec, Discovery | None]:
    """Return the spec of a module; it is discovered if nothing else describes the module."""
    if spec is not None:
        return load_spec_file(spec), None
    try:
        return spec_of(module, discover=False), None
    except SpecError:  # the name of a family in the config of a class that is not the family's
        if inputs is None or _is_of_library(module):
            raise
    except UnknownModelError as unknown:
        if inputs is None:
            try:
                discovery = discover_unknown(module, unknown)
            except UnknownModelError as failed:
                raise UnknownModelError(
                    str(failed),
                    hint="pass inputs, with which its symmetry is discovered: regauge.verify("
                    f'module, {{"{_first_argument(module)}": tensor}})',
                ) from failed
            return discovery.spec, discovery
        if _is_of_library(module):
            with contextlib.suppress(UnknownModelError):  # else with the inputs that are given
                discovery = discover_unknown(module, unknown)
                return discovery.spec, discovery
    from regauge.models.discovery import discovery_of

    discovery = discovery_of(module, inputs)
    return discovery.spec, discovery


def _is_of_library(module: torch.nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "timm")


def _first_argument(module: torch.nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "x")


def _describe_symmetry(discovery: Discovery | None) -> tuple[str, ...]:
    """Return what was discovered: the spaces by their roots, with group, size and number."""
    if discovery is None:
        return ()
    kinds: dict[tuple[str, str, int], int] = {}
    for name, space in discovery.spec.spaces.items():
        kind = (name.split(".")[0], str(space.group), space.size)
        kinds[kind] = kinds.get(kind, 0) + 1
    spaces = ", ".join(
        f"{root} ({group} of {size}{f', {count} times' if count > 1 else ''})"
        for (root, group, size), count in kinds.items()
    )
    cuts = ", ".join(b.blocks for b in discovery.boundaries)
    return (
        f"discovered spaces: {spaces or 'none'}",
        f"discovered backbone: {cuts}" if cuts else "discovered no backbone to cut at",
    )


def verify_module(
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
    """Check the theorems on a live module of a known spec; the arguments are those of `verify`."""
    if optimizer not in OPTIMIZERS:
        raise SpecError(
            f'optimizer must be one of {", ".join(OPTIMIZERS)}, got "{optimizer}"',
            hint="both are in torch.optim",
        )
    spec = spec_of(model) if spec is None else spec
    for name, value in model.state_dict().items():
        if value.is_meta:
            raise SpecError(
                f"the weights of {type(model).__name__} must be loaded, got meta tensors",
                hint="load the model first",
            )
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SpecError(
                f'"{name}" must be finite, got NaN or Inf',
                hint="check how these weights were made; nothing can be verified on them",
            )
    findings, unchecked = [_check_spec(spec, model)], []
    model_cut: Cut | None = None
    try:
        model_cut = cut(model, boundaries=boundaries)
    except (CutError, UnknownModelError) as error:
        unchecked.append(f"rows and columns at the cut: {error}")
    if inputs is not None:
        _require_arguments(model, inputs)
    subject = Subject(
        model, dict(inputs) if inputs is not None else example_inputs(model, seed), spec, model_cut
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
    """Run the model once, so that invalid inputs raise an error instead of failing a check."""
    name = type(subject.model).__name__
    if torch.is_inference_mode_enabled():
        raise SpecError(
            "verify must run outside of torch.inference_mode, got it enabled: it needs gradients",
            hint="call verify outside of torch.inference_mode",
        )
    try:
        outputs = run(subject).forward
    except RegaugeError:
        raise
    except Exception as error:  # models raise anything for invalid inputs
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecError(
            f"{name} failed on its inputs: {message}",
            hint="check their names, shapes, dtypes and token ids",
        ) from error
    for key, value in outputs.items():
        if not bool(value.isfinite().all()):
            raise SpecError(
                f'output "{key}" of {name} must be finite, got NaN or Inf',
                hint="check the inputs, or use a wider dtype",
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
    """Run the checks that apply and collect their findings."""
    model, model_cut = subject.model, subject.cut
    case = checks.prepare(subject, seed, steps, optimizer)
    if subject.rows_fixed_reason and model_cut is not None:
        findings.append(
            Finding(
                "row/forward",
                "Shuffling the tokens shuffles the result.",
                None,
                sentence=subject.rows_fixed_reason,
                source="permutation equivariance, Thm 4.1",
            )
        )
    selected = [
        theorem
        for theorem, needs_rows, needs_cut in CHECKS
        if not (needs_rows and subject.rows_fixed_reason) and not (needs_cut and model_cut is None)
    ]
    selected = [
        theorem
        for theorem in selected
        if theorem is not checks.training or (steps > 0 and case.lr > 0)
    ]
    for done, theorem in enumerate(selected):
        if progress:
            progress(done, len(selected), theorem.__name__.replace("_", " "))
        # Training needs memory for weights, gradients and momenta in float64, and no later check
        # needs these gradients.
        if theorem is checks.training:
            case = replace(case, plain=replace(case.plain, gradients={}))
        findings += _run_check(theorem, case)
    if progress:
        progress(len(selected), len(selected), "")
    if steps == 0:
        unchecked.append("training (0 steps)")
    return Results(
        f"{type(model).__name__}: rows and columns", tuple(findings), unchecked=tuple(unchecked)
    )


def _require_arguments(model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
    """Check that the model's forward accepts the inputs."""
    parameters = inspect.signature(model.forward).parameters
    unknown = [
        n
        for n in inputs
        if n not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ]
    accepted = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if unknown or not inputs.keys() & set(accepted):
        name = unknown[0] if unknown else next(iter(inputs), "nothing")
        raise SpecError(
            f'inputs must be arguments of {type(model).__name__}.forward, got "{name}"',
            hint=f"it takes {', '.join(accepted[:6])}",
        )


def _run_check(theorem: Callable[[checks.Case], list[Finding]], case: checks.Case) -> list[Finding]:
    """Run a check; repeat it with other seeds if it fails by little.

    If a ReLU is at its kink, rounding decides its gradient and every gradient before it: by far
    more than rounding, by far less than a broken symmetry. Another order of the same sums falls on
    another side.
    """
    findings = theorem(case)
    near_misses = {
        finding.id
        for finding in findings
        if finding.holds is False
        and finding.value is not None
        and finding.ceiling is not None
        and finding.value < 0.05 * finding.ceiling
    }
    near_misses = {
        name
        for name in near_misses
        if name.endswith(("weights", "features", "embedding", "trained"))
    }  # a forward pass has no kink
    if not near_misses or case.subject.dtype == torch.float64:
        return findings
    repeats = [
        {finding.id: finding for finding in theorem(case.resample(k))} for k in range(1, DRAWS)
    ]
    results = []
    for finding in findings:
        passing = [
            repeat[finding.id]
            for repeat in repeats
            if finding.id in near_misses and finding.id in repeat and repeat[finding.id].holds
        ]
        if len(passing) == DRAWS - 1:
            remark = (
                f"one draw of {DRAWS} was off by {finding.value:.1e}: rounding decides the "
                "gradient of a unit at its kink"
            )
            finding = replace(
                passing[-1], sentence=f"{passing[-1].sentence}; {remark}", trials=DRAWS
            )
        results.append(finding)
    return results


def _check_spec(spec: Spec, model: torch.nn.Module) -> Finding:
    """Check that the spec covers every tensor. An unknown tensor is a finding; a missing or
    misshapen one raises SpecError.
    """
    state, entries = model.state_dict(), stored_tensors(spec)
    unknown = [n for n in state if n not in entries and not spec.is_buffer(n)]
    require(
        [f for f in check(spec, state) if f.name not in unknown],
        f"{type(model).__name__} does not fit its spec",
    )
    statement = "The spec speaks of every tensor of the model."
    if not unknown:
        return Finding("spec/fits", statement, True, sentence=f"{len(state)} tensors, all known")
    names = ", ".join(unknown[:3])
    return Finding(
        "spec/fits",
        statement,
        False,
        sentence=f"{len(unknown)} tensors that nothing is known of: {names}",
        where=unknown[0],
    )
