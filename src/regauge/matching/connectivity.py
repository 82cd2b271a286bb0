"""Connectivity of two models as findings: the paths between them and the plane through three.

Paths are measured unaligned and after A was aligned with B. The unaligned path is the baseline of
every barrier: a small barrier means nothing if it was small before. If the stream is rotated, both
ends have folded norms; A written with the norms of B gives the same path (`core.unfold`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from regauge.core.action import State, apply
from regauge.core.element import Element
from regauge.core.fold import fold_norms
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.errors import Hint, PathError, RegaugeError, SpecError
from regauge.matching.barriers import Path, Plane, measure_path, measure_plane, require_interpolable
from regauge.matching.pairs import Stream, allows_rotations
from regauge.matching.result import Match
from regauge.models.resolve import spec_of
from regauge.results.findings import Claim, Figure, Finding, Results, Table

Tensor = torch.Tensor
Aligner = Callable[[Spec, State, State], Element]
UNALIGNED = "unaligned"
_STORED_UNALIGNED = "as-they-stand"  # in ids and facts of `--json`, which predate the label
# Nats by which the loss of A may change when it is transformed: rounding in float32 stays far
# below, a wrong element far above.
MAX_LOSS_CHANGE = 1e-3
NEGLIGIBLE_BARRIER = 0.05  # nats below which a barrier does not matter in practice
CALIBRATION_STRIDE = 5  # one example in five is for the temperatures
DEFINITION = (
    "the largest excess of the loss, inside the path, over the straight line between "
    "the losses of the two ends"
)


def align_by_weights(spec: Spec, a: State, b: State) -> Element:
    """Return the element that aligns A with B by their weights, without data."""
    from regauge.matching import match_states

    return match_states(spec, a, b).element


def align_by_activations(
    first: torch.nn.Module,
    second: torch.nn.Module,
    inputs: Callable[[], Sequence[Mapping[str, Tensor]]],
    *,
    only_apart: bool = False,
    on_match: Callable[[Match], None] | None = None,
) -> Aligner:
    """Return an aligner that matches by the activations on these inputs.

    Args:
        first: model A.
        second: model B.
        inputs: returns the inputs, when they are needed.
        only_apart: match by the weights first, and by activations only models trained apart.
        on_match: called with the match.
    """

    def align(spec: Spec, a: State, b: State) -> Element:
        """Match by activations."""
        from regauge.matching.activations import record
        from regauge.matching.paired import match_apart, match_by_activations
        from regauge.matching.refine import mixture_divergences

        def record_both() -> Any:
            batches = inputs()
            recorded = record(first, a, spec, batches), record(second, b, spec, batches)
            judge = None
            if not spec.visible:
                judge = partial(_judge, batches)
            return recorded, judge

        def _judge(batches: Any, elements: Sequence[Element]) -> list[float]:
            return mixture_divergences(spec, a, b, elements, first, batches)

        found = (
            match_apart(spec, a, b, record_both)
            if only_apart
            else match_by_activations(spec, a, b, *record_both())
        )
        if on_match is not None:
            on_match(found)
        return found.element

    return align


def connect(
    first: torch.nn.Module,
    second: torch.nn.Module,
    examples: Examples,
    *,
    aligner: Aligner | None = align_by_weights,
    label: str = "matched",
    stream: Stream = "auto",
    points: int = 11,
    grid: int = 0,
    samples: int | None = None,
    calibrate: bool = True,
    batch_size: int = 16,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Results:
    """Measure loss and accuracy on the straight lines between two live models of one class.

    Args:
        first: model A.
        second: model B.
        examples: the labelled examples to measure on.
        aligner: finds the element that aligns A with B; None measures only the unaligned path.
        label: the name of the path after alignment.
        stream: "auto" folds the norms of both ends if that allows rotations of the stream;
            "permutation" does not.
        points: points on a path.
        grid: points on a side of the plane through A, B and the aligned A; 0 for no plane.
        samples: the number of examples to sample; None for all.
        calibrate: fit a temperature for each point, on one example in five that is not measured on.
        batch_size: examples in a batch.
        seed: the seed of the sample.
        device: the device to compute on.
        progress: the progress callback.

    >>> # results = connect(a, b, prepare(task, data)); results.tables[0].rows
    """
    a, b = first.state_dict(), second.state_dict()
    require_interpolable(a, b, ("A", "B"))
    measured, held_out = _split(examples, samples, seed, calibrate)
    states: dict[str, tuple[State, State]] = {UNALIGNED: (a, b)}
    notes: list[str] = []
    report = progress or (lambda done, total, label: None)
    if aligner is not None:
        report(0, 1, "align A")
        spec = spec_of(first)
        if stream == "auto" and allows_rotations(spec):
            try:
                (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
            except SpecError as error:
                notes.append(f"the stream is matched by permutations only: {error}")
            else:
                untied = sorted(spec.ties.keys() - folded.ties.keys())
                untying = f", and {', '.join(untied)} untied," if untied else ""
                notes.append(f"norms are folded{untying} before alignment: the same function")
                spec = folded
        states[label] = (apply(aligner(spec, a, b), a), b)
    measure = partial(
        measure_path,
        first,
        points=points,
        calibration=held_out,
        batch_size=batch_size,
        device=device,
    )
    count = points + (points % 2 == 0)
    total = count * len(states) + (grid**2 if len(states) > 1 else 0)
    paths: dict[str, Path] = {}
    for i, (name, (start, end)) in enumerate(states.items()):
        paths[name] = measure(
            start,
            end,
            measured,
            progress=_offset_progress(report, i * count, total, f"path {name}: "),
        )
    landscape, unchecked = None, []
    if aligner is None:
        unchecked.append("a path after matching: only the unaligned path was measured")
    elif grid:
        corners = {"A": a, "B": b, f"A, {label}": states[label][0]}
        plane_progress = _offset_progress(report, count * len(states), total, "plane: ")
        try:
            landscape = measure_plane(
                first,
                corners,
                measured,
                points=grid,
                batch_size=batch_size,
                device=device,
                progress=plane_progress,
            )
        except PathError as error:  # the aligned A equals A or B
            unchecked.append(f"the plane through A, B and the moved A: {error}")
    report(total, total, "")
    figures = (
        _curve_figure(paths, "losses", "loss, in nats"),
        _curve_figure(paths, "accuracies", "accuracy"),
    ) + ((_plane_figure(landscape),) if landscape else ())
    facts = {
        "class": type(first).__name__,
        "parameters": sum(p.numel() for p in first.parameters()),
        "barrier": DEFINITION,
        "examples": len(measured),
        "examples for temperatures": len(held_out) if held_out is not None else 0,
        "points": count,
        "notes": notes,
        "paths": {_stored_name(name): _path_to_dict(path) for name, path in paths.items()},
    }
    return Results(
        "The path between two models",
        tuple(_findings(paths, label, notes)),
        (_barrier_table(paths),),
        figures,
        facts,
        tuple(unchecked),
        _conclude(paths, label),
    )


def _split(
    examples: Examples, samples: int | None, seed: int, calibrate: bool
) -> tuple[Examples, Examples | None]:
    """Return the examples to measure on, and one in five to fit temperatures on."""
    rows = np.arange(len(examples))
    if samples is not None and samples < len(rows):
        rows = np.sort(np.random.default_rng(seed).permutation(len(rows))[:samples])
    if not calibrate:
        return examples.only(rows), None
    is_held_out = np.arange(len(rows)) % CALIBRATION_STRIDE == CALIBRATION_STRIDE - 1
    if not is_held_out.any():
        raise RegaugeError(
            f"examples must be >= {CALIBRATION_STRIDE} to fit temperatures, got {len(rows)}",
            hint=Hint(
                "pass more examples, or calibrate=False",
                cli="pass more examples, or --no-calibrate",
            ),
        )
    return examples.only(rows[~is_held_out]), examples.only(rows[is_held_out])


def _offset_progress(progress: Progress, start: int, total: int, prefix: str) -> Progress:
    """Return a progress callback for one part of the whole run."""
    return lambda done, _, label: progress(start + done, total, prefix + label)


def _conclude(paths: Mapping[str, Path], label: str) -> Claim:
    """Return the headline: the barrier before and after alignment."""
    before = paths[UNALIGNED]
    if label not in paths:
        return Claim(
            "The loss on the straight line between A and B",
            "none",
            f"{before.barrier:.3g} nats",
            "barrier: the largest excess of the loss over the line between the ends",
        )
    after = paths[label]
    share = after.barrier / before.barrier if before.barrier > 0 else 1.0
    if before.barrier <= NEGLIGIBLE_BARRIER:
        text, tone = "A and B can be averaged without alignment", "good"
    elif after.barrier <= NEGLIGIBLE_BARRIER:
        text, tone = "Alignment removes the barrier: A and B can be averaged", "good"
    elif share < 1:
        text, tone = "Alignment lowers the barrier between A and B, and does not remove it", "mixed"
    else:
        text, tone = "Alignment does not lower the barrier between A and B", "bad"
    half = len(before.ts) // 2
    sentence = ""
    if before.accuracies and after.accuracies:
        sentence = (
            f"Half-way between A and B the accuracy is {before.accuracies[half]:.1%} before "
            f"alignment and {after.accuracies[half]:.1%} after it; A has "
            f"{before.accuracies[0]:.1%}, B {before.accuracies[-1]:.1%}."
        )
    number = f"{before.barrier:.3g} → {after.barrier:.3g} nats"
    meaning = "barrier before and after alignment: the largest excess of the loss over the line "
    return Claim(text, tone, number, f"{meaning}between the ends", sentence)


def _findings(paths: Mapping[str, Path], label: str, notes: Sequence[str]) -> list[Finding]:
    """Return the findings: unchanged ends, and barriers with the unaligned path as the control."""
    unaligned = paths[UNALIGNED]
    findings = []
    for name in (label,):
        if name in paths:
            change = max(abs(paths[name].losses[i] - unaligned.losses[i]) for i in (0, -1))
            statement = f"The ends of the path, {name}, compute what A and B compute"
            sentence = (
                ". ".join(notes)
                if change <= MAX_LOSS_CHANGE
                else "The loss of an end changed: the element is not a symmetry of the model, or "
                "rounding was too large."
            )
            findings.append(
                Finding(
                    f"ends/{_slug(name)}",
                    statement,
                    change <= MAX_LOSS_CHANGE,
                    change,
                    MAX_LOSS_CHANGE,
                    sentence=sentence,
                    measure="change of the loss, in nats",
                )
            )
    for name, path in paths.items():
        share = (
            f"; {path.barrier / unaligned.barrier:.3g} of the unaligned barrier"
            if name != UNALIGNED and unaligned.barrier > 0
            else ""
        )
        for kind, value, control, unit in (
            ("loss", path.barrier, unaligned.barrier, "nats"),
            ("accuracy", path.accuracy_barrier, unaligned.accuracy_barrier, "accuracy"),
            ("calibrated", _calibrated_barrier(path), _calibrated_barrier(unaligned), "nats"),
            ("midpoint", path.midpoint, unaligned.midpoint, "nats"),
        ):
            if value is None:
                continue
            statement = {
                "loss": f"The barrier {name}, at t = {path.peak:g}{share}",
                "accuracy": f"The largest shortfall of accuracy {name}",
                "calibrated": f"The barrier {name}, with a temperature fitted for each point",
                "midpoint": f"The midpoint {name} over the better end",
            }[kind]
            findings.append(
                Finding(
                    f"{kind}/{_slug(name)}",
                    statement,
                    None,
                    value,
                    0.0,
                    control if name != UNALIGNED else None,
                    "A number, no verdict.",
                    measure=unit,
                )
            )
    return findings


def _barrier_table(paths: Mapping[str, Path]) -> Table:
    """Return the table of barriers, one row for each path."""
    unaligned = paths[UNALIGNED].barrier
    rows = []
    for name, path in paths.items():
        share = path.barrier / unaligned if unaligned > 0 else None
        rows.append(
            (
                name,
                path.barrier,
                share,
                path.peak,
                _calibrated_barrier(path),
                path.rise,
                path.span,
                path.midpoint,
                path.accuracy_barrier,
                path.losses[0],
                path.losses[-1],
            )
        )
    columns = (
        "path",
        "barrier",
        "of unaligned",
        "at t",
        "calibrated",
        "rotation symmetry: rise",
        "rotation symmetry: range",
        "midpoint",
        "accuracy",
        "loss of A",
        "loss of B",
    )
    note = (
        f"Barrier: {DEFINITION}, in nats; negative if the path lies below that line. "
        "Of unaligned: its share of the unaligned barrier. "
        "Calibrated: the same with a temperature for each point, fitted on other examples. "
        "Rise and range: two other definitions (Zhang et al., arXiv:2502.00264), the largest "
        "loss above the better end's, and above "
        "the smallest on the path. "
        "Midpoint: its loss above the better end's. "
        "Accuracy: its largest shortfall below the line between the ends."
    )
    return Table("Barriers", columns, tuple(rows), note)


def _calibrated_barrier(path: Path) -> float | None:
    """Return the barrier with fitted temperatures, or None without calibration."""
    return None if path.calibrated is None else path.calibrated.barrier


def _path_to_dict(path: Path) -> dict[str, Any]:
    """Return the points of a path as JSON values."""
    out: dict[str, Any] = {
        "t": list(path.ts),
        "loss": list(path.losses),
        "accuracy": list(path.accuracies),
    }
    if path.calibrated is not None:
        out |= {"calibrated": list(path.calibrated.losses), "temperature": list(path.temperatures)}
    return out


def _curve_figure(paths: Mapping[str, Path], measure: str, ylabel: str) -> Figure:
    """Return the figure of losses or accuracies along every path."""
    ts = next(iter(paths.values())).ts
    y = {name: list(getattr(path, measure)) for name, path in paths.items()}
    if measure == "losses":
        y |= {
            f"{name}, calibrated": list(p.calibrated.losses)
            for name, p in paths.items()
            if p.calibrated is not None
        }
    title = {
        "losses": "The loss on the way from A to B",
        "accuracies": "The accuracy on the way from A to B",
    }[measure]
    return Figure(
        title,
        "lines",
        {
            "x": list(ts),
            "y": y,
            "xlabel": "t (0 is A, 1 is B)",
            "ylabel": ylabel,
            "log": False,
            "percent": measure == "accuracies",
        },
        "Each point is a model whose weights are a mixture: 1 - t of A, and t of B.",
    )


def _plane_figure(plane: Plane) -> Figure:
    """Return the figure of the plane."""
    data = {
        "x": list(plane.xs),
        "y": list(plane.ys),
        "values": [list(row) for row in plane.losses],
        "points": {n: list(p) for n, p in plane.points.items()},
    }
    names = list(plane.points)
    data |= {
        "joined": [[names[1], names[0]], [names[1], names[2]]],
        "xlabel": "distance of weights, from B towards A",
        "ylabel": "across it",
        "unit": "nats",
    }
    return Figure(
        "The loss on the plane through A, B and the moved A",
        "plane",
        data,
        "B is the origin. Lines are the measured paths.",
    )


def _slug(name: str) -> str:
    """Return the part of a finding's id that names its path."""
    if name == UNALIGNED:
        return _STORED_UNALIGNED
    return name.split(",")[0].replace(" ", "-")


def _stored_name(name: str) -> str:
    """Return the key of a path in the facts of `--json`."""
    return _STORED_UNALIGNED.replace("-", " ") if name == UNALIGNED else name
