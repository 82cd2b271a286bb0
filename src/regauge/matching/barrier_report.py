"""`barrier` on what users hold: the loss on the straight line between two models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge.core.element import Element
from regauge.core.options import (
    require_at_least,
    require_choice,
    require_device,
    resolve_options,
)
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.sources import DataSource, source_of
from regauge.errors import PathError
from regauge.matching.live_pair import GENERATED
from regauge.matching.pairs import STREAMS, Stream
from regauge.matching.result import Match
from regauge.results.findings import Results
from regauge.results.text import format_verdict
from regauge.results.views import ResultView

if TYPE_CHECKING:
    import torch

    from regauge.data.tasks import Examples
    from regauge.models.sources import Source


@dataclass(frozen=True)
class BarrierOptions:
    """Options of a barrier.

    Attributes:
        points: points of the path, ends included.
        samples: the number of examples to sample; all by default.
        grid: points on a side of the plane through A, B and the aligned A; 0 for no plane.
        calibrate: also measure with a temperature fitted at each point.
        batch_size: examples in a batch.
        seed: the seed of the sample.
        device: the device to compute on.

    Example:
        >>> options = regauge.BarrierOptions(points=3, calibrate=False)
        >>> report = regauge.barrier("vit", vit, images, options=options)
    """

    points: int = 11
    samples: int | None = None
    grid: int = 0
    calibrate: bool = True
    batch_size: int = 16
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_at_least(PathError, 3, points=self.points)
        require_at_least(PathError, 0, grid=self.grid)
        require_at_least(PathError, 1, samples=self.samples, batch_size=self.batch_size)


@dataclass(frozen=True, eq=False)
class BarrierReport(ResultView):
    """The loss on the straight lines between two models.

    Attributes:
        measured: findings, the table of barriers, and figures.
    """

    measured: Results

    @property
    def results(self) -> Results:
        """Findings, the table of barriers, and figures."""
        return self.measured

    @property
    def barriers(self) -> dict[str, float]:
        """The barrier of each path, in nats."""
        (table,) = self.results.tables
        return {str(row[0]): float(row[1] or 0.0) for row in table.rows}

    def __str__(self) -> str:
        """One line for each path, and the checks."""
        from regauge.models.summary import format_columns

        (table,) = self.results.tables
        rows = [
            table.columns,
            *(
                tuple("" if c is None else c if isinstance(c, str) else f"{c:.4f}" for c in row)
                for row in table.rows
            ),
        ]
        facts = self.results.facts
        lines = [
            f"{facts['class']}: the loss on the straight line from A to B",
            "",
            format_columns(rows, right=tuple(range(1, len(table.columns)))),
            "",
            f"barrier: {facts['barrier']}, in nats",
            *map(str, facts["notes"]),
        ]
        lines += [
            f"{format_verdict(f)}  {f.statement.lower()[0] + f.statement[1:]} (change "
            f"{f.value:.1e}, allowed {f.floor:.0e})"
            for f in self.results.findings
            if f.holds is not None
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        barriers = ", ".join(f"{name}: {value:.4g}" for name, value in self.barriers.items())
        return f"<barrier in nats: {barriers}>"


@within_threads
def barrier(
    a: Source,
    b: Source,
    data: Examples | DataSource | str | Path,
    *,
    align: Literal["auto", "weights", "self"] | Element | str | Path | None = "auto",
    stream: Stream = "auto",
    options: BarrierOptions | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> BarrierReport:
    """Measure loss and accuracy on the straight line between two models, before and after matching.

    The barrier is the largest excess, inside the path, over the straight line between the losses of
    the two ends.

    Args:
        a: model A: a path, a hub id, a checkpoint, or a module.
        b: model B, of the same class and size.
        data: labelled data: a path, a hub id, a `DataSource`, or `Examples`.
        align: "weights" matches A to B by the weights, "self" by activations on text that they
            generate, "auto" as `match` does; an element or its file moves A; None measures only
            the path between A and B.
        stream: "auto" rotates the residual stream where the model allows it; "permutation" permutes
            it, as Git Re-Basin does.
        options: points, samples, batches and device.
        facts: further facts of the run, for the report.
        progress: the progress callback.

    Returns:
        The report, with `barriers`, `to_html()`. Its finding `ends/...` fails if moving A changed
        what it computes.

    Raises:
        PathError: no straight line joins the two, or there is nothing to measure.
        DataError: the data do not exist, or do not fit the model.

    Example:
        >>> report = regauge.barrier("vit", regauge.load_model("vit"), images)
        >>> abs(report.barriers["matched"]) < 1e-4
        True
    """
    from regauge.data.tasks import Examples
    from regauge.matching.barriers import require_interpolable
    from regauge.matching.connectivity import connect
    from regauge.models.load import load_empty, load_model
    from regauge.models.sources import open_source

    started = time.monotonic()
    chosen = resolve_options(options, BarrierOptions())
    require_choice(PathError, "stream", stream, STREAMS)
    require_device(chosen.device)
    report = progress or (lambda done, total, label: None)
    sides = [open_source(source) for source in (a, b)]
    names = [
        str(source) if isinstance(source, str | Path) else checkpoint.path.name
        for source, (checkpoint, _) in zip((a, b), sides, strict=True)
    ]
    task: dict[str, Any] = {}
    if isinstance(data, Examples):
        examples = data
    else:  # before the weights are loaded, so that unreadable data fail at once
        source = source_of(data)
        checkpoint, module = sides[0]
        examples, task = source.read(
            load_empty(checkpoint) if module is None else module, checkpoint
        )
    report(0, 1, f"loading {names[0]} and {names[1]}")
    first, second = (
        (load_model(checkpoint, "float32") if module is None else module).to(chosen.device)
        for checkpoint, module in sides
    )
    require_interpolable(first.state_dict(), second.state_dict(), (names[0], names[1]))
    is_matched = align in ("auto", "weights", "self", None)
    matches: list[Match] = []
    results = connect(
        first,
        second,
        examples,
        aligner=_make_aligner(align, first, second, stream, chosen.seed, matches.append),
        label="matched" if is_matched else "moved",
        stream=stream,
        progress=progress,
        **chosen.__dict__,
    )
    described = {
        **(facts or {}),
        "A": names[0],
        "B": names[1],
        "data": data.uri if isinstance(data, DataSource) else _name_of_data(data),
        "task": task,
        "matched by": GENERATED["self"]
        if any(match.by == "activations" for match in matches)
        else "weights",
        **results.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    return BarrierReport(replace(results, facts=described))


def _name_of_data(data: Examples | str | Path) -> str:
    """Return the name of data, as a fact."""
    return str(data) if isinstance(data, str | Path) else f"{len(data)} examples"


def _make_aligner(
    align: Any,
    first: torch.nn.Module,
    second: torch.nn.Module,
    stream: Stream,
    seed: int,
    on_match: Callable[[Match], None],
) -> Any:
    """Return the function that finds the element that aligns A with B; None for none.

    An alignment by text is passed to `on_match`.
    """
    from regauge.checkpoints.element_files import load_element
    from regauge.matching.activations import generate_text, writes_by_default
    from regauge.matching.connectivity import align_by_activations, align_by_weights

    def generate() -> list[dict[str, torch.Tensor]]:
        return generate_text([first, second], seed=seed)

    if align is None:
        return None
    if isinstance(align, Element):
        return lambda spec, *_: align.to(spec)
    by_text = stream == "auto" and writes_by_default(first)  # as `match` does
    if align == "weights" or (align == "auto" and not by_text):
        return align_by_weights
    if align in ("auto", "self"):
        return align_by_activations(
            first, second, generate, only_apart=align == "auto", on_match=on_match
        )
    return lambda spec, *_: load_element(align, spec)
