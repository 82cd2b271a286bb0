"""Are two models connected? The paths between them as findings: as they stand, folded, and with A
moved next to B; and the plane through all three.

The baseline without alignment is always there, for a small barrier means nothing beside one that
was small before.
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
from regauge.errors import RegaugeError
from regauge.matching.barriers import (
    Path,
    PathError,
    Plane,
    measure_path,
    measure_plane,
    require_interpolable,
)
from regauge.models.resolve import spec_of
from regauge.results.findings import Figure, Finding, Results, Table

Tensor = torch.Tensor
Aligner = Callable[[Spec, State, State], Element]
UNALIGNED, FOLDED = "as they stand", "folded, not moved"
# nats by which moving A may change its loss: rounding in float32 stays far below, a wrong element
# far above
MAX_LOSS_CHANGE = 1e-3
CALIBRATION_STRIDE = 5  # one example in five is for the temperatures
DEFINITION = (
    "the largest excess of the loss, inside the path, over the straight line between "
    "the losses of the two ends"
)


def align_by_weights(spec: Spec, a: State, b: State) -> Element:
    """The element that moves A next to B, data-free."""
    from regauge.matching import match

    return match(spec, a, b).element


def align_by_activations(
    first: torch.nn.Module, second: torch.nn.Module, batches: Sequence[Mapping[str, Tensor]]
) -> Aligner:
    """A mover that matches by what the two do on these inputs."""

    def move(spec: Spec, a: State, b: State) -> Element:
        from regauge.matching import match
        from regauge.matching.activations import record

        return match(
            spec,
            a,
            b,
            activations=(record(first, a, spec, batches), record(second, b, spec, batches)),
        ).element

    return move


def connect(
    first: torch.nn.Module,
    second: torch.nn.Module,
    examples: Examples,
    *,
    aligner: Aligner | None = align_by_weights,
    label: str = "matched",
    fold: bool = True,
    points: int = 11,
    grid: int = 0,
    samples: int | None = None,
    calibrate: bool = True,
    batch_size: int = 16,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Results:
    """Loss and accuracy on the straight lines between two live models of one class, before and
    after A is moved by what `mover` finds (None: only as they stand). With `fold` the norms of both
    ends are folded first, which unties heads and keeps the function; `grid` points on a side for
    the plane through A, B and the moved A. `samples` examples are drawn by the seed; one in five is
    for the temperatures and for nothing else.

    >>> # results = connect(a, b, prepare(task, data)); results.tables[0].rows
    """
    a, b = first.state_dict(), second.state_dict()
    require_interpolable(a, b, ("A", "B"))
    measured, others = _split(examples, samples, seed, calibrate)
    states: dict[str, tuple[State, State]] = {UNALIGNED: (a, b)}
    notes: list[str] = []
    tell = progress or (lambda done, total, now: None)
    if aligner is not None:
        tell(0, 1, "moves A")
        spec = spec_of(first)
        if fold:
            (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
            if folded is not spec and (spec.norms or spec.scales):
                states[FOLDED] = (a, b)
                untied = spec.ties.keys() - folded.ties.keys()
                what = (
                    f"norms are folded, and {', '.join(sorted(untied))} untied,"
                    if untied
                    else "norms are folded"
                )
                notes.append(f"{what} in what is moved: the same function")
            spec = folded
        states[label] = (apply(aligner(spec, a, b), a), b)
    walk = partial(
        measure_path, first, points=points, calibration=others, batch_size=batch_size, device=device
    )
    count = points + (points % 2 == 0)
    total = count * len(states) + (grid**2 if len(states) > 1 else 0)
    paths: dict[str, Path] = {}
    for i, (name, (one, two)) in enumerate(states.items()):
        paths[name] = walk(
            one, two, measured, progress=_offset_progress(tell, i * count, total, f"path {name}: ")
        )
    landscape, unchecked = None, []
    if aligner is None:
        unchecked.append("a path after matching: only the models as they stand were measured")
    elif grid:
        corners = {"A": a, "B": b, f"A, {label}": states[label][0]}
        told = _offset_progress(tell, count * len(states), total, "plane: ")
        try:
            landscape = measure_plane(
                first,
                corners,
                measured,
                points=grid,
                batch_size=batch_size,
                device=device,
                progress=told,
            )
        except PathError as error:  # A was moved onto B, or not at all
            unchecked.append(f"the plane through A, B and the moved A: {error}")
    tell(total, total, "")
    figures = (
        _curve_figure(paths, "losses", "nats"),
        _curve_figure(paths, "accuracies", "accuracy"),
    ) + ((_plane_figure(landscape),) if landscape else ())
    facts = {
        "class": type(first).__name__,
        "parameters": sum(p.numel() for p in first.parameters()),
        "barrier": DEFINITION,
        "examples": len(measured),
        "examples for temperatures": len(others) if others is not None else 0,
        "points": count,
        "notes": notes,
        "paths": {name: _path_to_dict(path) for name, path in paths.items()},
    }
    return Results(
        "The path between two models",
        tuple(_findings(paths, label, notes)),
        (_barrier_table(paths),),
        figures,
        facts,
        tuple(unchecked),
    )


def _split(
    examples: Examples, samples: int | None, seed: int, calibrate: bool
) -> tuple[Examples, Examples | None]:
    rows = np.arange(len(examples))
    if samples is not None and samples < len(rows):
        rows = np.sort(np.random.default_rng(seed).permutation(len(rows))[:samples])
    if not calibrate:
        return examples.only(rows), None
    kept = np.arange(len(rows)) % CALIBRATION_STRIDE == CALIBRATION_STRIDE - 1
    if not kept.any():
        raise RegaugeError(
            f"of {len(rows)} examples none is left to fit a temperature on",
            hint=f"give at least {CALIBRATION_STRIDE}, or --no-calibrate",
        )
    return examples.only(rows[~kept]), examples.only(rows[kept])


def _offset_progress(progress: Progress, start: int, total: int, what: str) -> Progress:
    return lambda done, _, now: progress(start + done, total, what + now)


def _findings(paths: Mapping[str, Path], moved: str, notes: Sequence[str]) -> list[Finding]:
    plain = paths[UNALIGNED]
    out = []
    for name in (FOLDED, moved):
        if name in paths:
            change = max(abs(paths[name].losses[i] - plain.losses[i]) for i in (0, -1))
            said = f"The ends of the path, {name}, compute what A and B compute"
            sentence = (
                ". ".join(notes)
                if change <= MAX_LOSS_CHANGE
                else "The loss of an end changed: what moved it is no symmetry of the model, or "
                "was lost to rounding."
            )
            out.append(
                Finding(
                    f"ends/{_slug(name)}",
                    said,
                    change <= MAX_LOSS_CHANGE,
                    change,
                    MAX_LOSS_CHANGE,
                    sentence=sentence,
                    measure="change of the loss, in nats",
                )
            )
    for name, path in paths.items():
        share = (
            f"; {path.barrier / plain.barrier:.3g} of what it is as they stand"
            if name != UNALIGNED and plain.barrier > 0
            else ""
        )
        for kind, value, ceiling, unit in (
            ("loss", path.barrier, plain.barrier, "nats"),
            ("accuracy", path.accuracy_barrier, plain.accuracy_barrier, "accuracy"),
            ("calibrated", _calibrated_barrier(path), _calibrated_barrier(plain), "nats"),
            ("midpoint", path.midpoint, plain.midpoint, "nats"),
        ):
            if value is None:
                continue
            said = {
                "loss": f"The barrier {name}, at t = {path.peak:g}{share}",
                "accuracy": f"The largest shortfall of accuracy {name}",
                "calibrated": f"The barrier {name}, with a temperature fitted for each point",
                "midpoint": f"The midpoint {name} over the better end",
            }[kind]
            out.append(
                Finding(
                    f"{kind}/{_slug(name)}",
                    said,
                    None,
                    value,
                    0.0,
                    ceiling if name != UNALIGNED else None,
                    "A number, no verdict.",
                    measure=unit,
                )
            )
    return out


def _barrier_table(paths: Mapping[str, Path]) -> Table:
    plain = paths[UNALIGNED].barrier
    rows = []
    for name, p in paths.items():
        share = p.barrier / plain if plain > 0 else None
        rows.append(
            (
                name,
                p.barrier,
                share,
                p.peak,
                _calibrated_barrier(p),
                p.rise,
                p.span,
                p.midpoint,
                p.accuracy_barrier,
                p.losses[0],
                p.losses[-1],
            )
        )
    heads = (
        "path",
        "barrier",
        "of as they stand",
        "at t",
        "calibrated",
        "003: rise",
        "003: range",
        "midpoint",
        "accuracy",
        "loss of A",
        "loss of B",
    )
    note = (
        f"Barrier: {DEFINITION}, in nats; negative where the path lies below that line. "
        "Calibrated: the same with a temperature for each point, "
    )
    note += (
        "fitted on other examples. Rise and range: 003's two wordings, the largest loss "
        "over the better end's, and over the least on the path. "
    )
    note += (
        "Midpoint: its loss over the better end's. Accuracy: its largest shortfall under "
        "the line between the ends."
    )
    return Table("Barriers", heads, tuple(rows), note)


def _calibrated_barrier(path: Path) -> float | None:
    return None if path.calibrated is None else path.calibrated.barrier


def _path_to_dict(path: Path) -> dict[str, Any]:
    out: dict[str, Any] = {
        "t": list(path.ts),
        "loss": list(path.losses),
        "accuracy": list(path.accuracies),
    }
    if path.calibrated is not None:
        out |= {"calibrated": list(path.calibrated.losses), "temperature": list(path.temperatures)}
    return out


def _curve_figure(paths: Mapping[str, Path], what: str, unit: str) -> Figure:
    ts = next(iter(paths.values())).ts
    y = {name: list(getattr(path, what)) for name, path in paths.items()}
    if what == "losses":
        y |= {
            f"{name}, calibrated": list(p.calibrated.losses)
            for name, p in paths.items()
            if p.calibrated is not None and name != FOLDED
        }
    title = {
        "losses": "The loss on the way from A to B",
        "accuracies": "The accuracy on the way from A to B",
    }[what]
    return Figure(
        title,
        "lines",
        {"x": list(ts), "y": y, "xlabel": "t (0 is A, 1 is B)", "ylabel": unit, "log": False},
    )


def _plane_figure(found: Plane) -> Figure:
    data = {
        "x": list(found.xs),
        "y": list(found.ys),
        "values": [list(row) for row in found.losses],
        "points": {n: list(p) for n, p in found.points.items()},
    }
    names = list(found.points)
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
        "B is the origin. Lines join what is walked between.",
    )


def _slug(name: str) -> str:
    return name.split(",")[0].replace(" ", "-")
