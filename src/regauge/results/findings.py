"""Findings: what was measured, between what nothing wrong would give and what something wrong
gives. Never a bare number.

`Results` is what a command found: findings, tables, figures and the facts of the run. It is data:
JSON says all of it, and every page, plot and line of text is made from that JSON alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import RESULTS_BYTES, parse_json, read_document
from regauge.errors import CheckpointError, FindingsError

VERSION = 1
INCONCLUSIVE = "cannot be told"  # how the sentence of a finding begins that could not be decided


@dataclass(frozen=True)
class Finding:
    """One statement and its measurement.

    `value` stands between `floor` (what is allowed or costs nothing: a tolerance, a random guess)
    and `ceiling` (what the same measurement gives where the statement is false or nothing defends:
    a negative control, an attack without defence). `holds` is None where the statement does not
    apply or only a number is reported; `sentence` then says why. `where` names the module or tensor
    that decides. `spread` is the standard deviation over `trials`.
    """

    id: str
    statement: str
    holds: bool | None
    value: float | None = None
    floor: float | None = None
    ceiling: float | None = None
    sentence: str = ""
    source: str = ""
    measure: str = "relative error"
    where: str = ""
    spread: float | None = None
    trials: int = 1


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under column heads. Numbers stay numbers: the page decides how many
    digits it shows.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | bool | None, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture as data: "lines" {"x", "y": {label: values}, "xlabel", "ylabel", "log"} (values may
    end before x does), "points" {"series": {label: [[x, y, name]]}, "xlabel", "ylabel"}, "bars"
    {"labels", "y": {label: values}, "ylabel"}, "images" {"columns": labels, "rows": [{"label",
    "images": [2-D or 3-D lists in 0..1]}]}, "matrix" {"rows", "columns", "values", "log"}, "plane"
    {"x", "y", "values": [y][x], "points": {label: [x, y]}, "joined": [[label, label]], "xlabel",
    "ylabel", "unit"}, "net" {"lines": {label: [[x, y], ...]}}.
    """

    title: str
    kind: str
    data: Mapping[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Results:
    """What one command found. `facts` are the command, versions, seed, model, dtype, seconds;
    `unchecked` says what was not looked at, and why.
    """

    title: str
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings whose statement should hold and does not."""
        return tuple(f for f in self.findings if f.holds is False)

    @property
    def inconclusive(self) -> tuple[Finding, ...]:
        """The findings whose statement should hold, where the measurement sees too little to say
        so.
        """
        return tuple(
            f for f in self.findings if f.holds is None and f.sentence.startswith(INCONCLUSIVE)
        )


def spread_of(values: Sequence[float]) -> float | None:
    """The standard deviation over trials, as `Finding.spread` tells it. One trial has none: a 0
    would be a measurement.
    """
    return statistics.stdev(values) if len(values) > 1 else None


def apply_threshold(f: Finding, threshold: float | None) -> Finding:
    """A finding that fails where its value has gone further than this share of the way from its
    floor to its ceiling.
    """
    if (
        f.holds is not None
        or threshold is None
        or f.value is None
        or f.floor is None
        or f.ceiling is None
        or f.ceiling == f.floor
    ):
        return f
    return replace(f, holds=(f.value - f.floor) / (f.ceiling - f.floor) <= threshold)


def to_json(results: Results) -> str:
    """The whole of it as text. Numbers that JSON has no word for (nan, inf) become their names."""
    return json.dumps(
        {"regauge": "results", "version": VERSION, **_to_plain(asdict(results))},
        indent=1,
        allow_nan=False,
        ensure_ascii=False,
    )


def from_json(text: str | bytes, where: str = "the text") -> Results:
    """What `to_json` wrote, here or in an older version; anything else is refused by name."""
    document = parse_json(
        text, where, FindingsError, "give the file that --json wrote", surrogates=True
    )
    if not isinstance(document, dict) or document.get("regauge") != "results":
        raise FindingsError(
            f"{where} holds no results of regauge", hint="give the file that --json wrote"
        )
    if document.get("version") != VERSION:
        raise FindingsError(
            f"{where} has version {document.get('version')!r}; this regauge reads {VERSION}",
            hint="install a newer regauge",
        )
    try:
        return Results(
            title=str(document["title"]),
            findings=tuple(_build(Finding, f) for f in document["findings"]),
            tables=tuple(
                _build(
                    Table,
                    {
                        **t,
                        "columns": tuple(t["columns"]),
                        "rows": tuple(tuple(r) for r in t["rows"]),
                    },
                )
                for t in document["tables"]
            ),
            figures=tuple(_build(Figure, f) for f in document["figures"]),
            facts=dict(document["facts"]),
            unchecked=tuple(map(str, document["unchecked"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FindingsError(
            f"{where} is damaged: {type(error).__name__}: {error}",
            hint="run the command again with --json",
        ) from error


def load_results(path: Path | str) -> Results:
    """The results in a file that `--json` wrote."""
    try:
        data = read_document(Path(path), RESULTS_BYTES, FindingsError)
    except CheckpointError as error:
        raise FindingsError(str(error), hint="give the file that --json wrote") from error
    return from_json(data, str(path))


_NUMBERS = {"value", "floor", "ceiling", "spread"}


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    unknown = values.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f'"{min(unknown)}" is no field of a {kind.__name__}')
    return kind(
        **{k: float(v) if k in _NUMBERS and v is not None else v for k, v in values.items()}
    )


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
