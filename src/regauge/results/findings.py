"""Findings: measurements between a baseline and a control, never bare numbers.

`Results` holds the findings, tables, figures and facts of one command. It is plain data: its JSON
is complete, and every page, plot and text is generated from that JSON alone.
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
from regauge.errors import CheckpointError, FindingsError, Hint
from regauge.results.views import ResultView

VERSION = 1
TONES = ("good", "bad", "mixed", "none")
INCONCLUSIVE = "inconclusive"  # the sentence of an undecided finding starts with this word
_INCONCLUSIVE = (INCONCLUSIVE, "cannot be ")  # the second in older files


@dataclass(frozen=True)
class Finding:
    """One statement and its measurement.

    Attributes:
        id: The section and the name, separated by slashes.
        statement: The claim that is checked.
        holds: Whether the statement holds; None if it does not apply, is undecided, or if only a
            number is reported.
        value: The measurement.
        floor: The baseline: a tolerance, or a random guess.
        ceiling: The control: the same measurement where the statement is false, or an attack
            without a defence.
        sentence: The result in words, and the reason if `holds` is None.
        source: The paper and section of the statement.
        measure: The name of the measured quantity.
        where: The module or tensor that decides.
        spread: The standard deviation over `trials`.
        trials: The number of repeated measurements.
        interval: The 99 % interval of the value, given the baseline; None if it was not computed.
        beats_floor: Whether the value exceeds the baseline; None if undecided, or not judged.
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
    interval: tuple[float, float] | None = None
    beats_floor: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under column heads; the page rounds the numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | bool | None, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure as data, of one of these kinds:

    lines   {"x", "y": {label: values}, "xlabel", "ylabel", "log"}; values may be shorter than x
    points  {"series": {label: [[x, y, name]]}, "xlabel", "ylabel", "scatter"}; a scatter plot has
            neither names nor lines, but the diagonal
    bars    {"labels", "y": {label: values}, "ylabel"}
    images  {"columns": labels, "rows": [{"label", "images": [2-D or 3-D lists in 0..1]}]}
    matrix  {"rows", "columns", "values", "log"}
    plane   {"x", "y", "values": [y][x], "points": {label: [x, y]}, "joined": [[label, label]],
            "xlabel", "ylabel", "unit"}
    net     {"lines": {label: [[x, y], ...]}}

    With "percent": true, values of lines, points and bars are shares, and shown in percent.
    Lines and bars may have a "spread" ({label: values}), drawn as bands and error bars.
    """

    title: str
    kind: str
    data: Mapping[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Claim:
    """The conclusion of results in words: the headline of their page.

    Attributes:
        text: The conclusion, understandable without the rest of the page.
        tone: "good"; "bad" if something that the reader relies on does not hold; "mixed"; or
            "none" for a measurement without a verdict.
        number: The number that decides, with its unit, such as "93.6 %".
        label: What the number measures.
        sentence: One sentence of explanation.
        command: A command that measures the same on the reader's own model.

    Example:
        >>> from regauge.results.findings import Claim, Results
        >>> claim = Claim("The base undoes this lock.", "bad", "100 %", "of the key recovered")
        >>> Results("What a lock is worth", claim=claim).headline.text
        'The base undoes this lock.'
    """

    text: str
    tone: str = "none"
    number: str = ""
    label: str = ""
    sentence: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if self.tone not in TONES:
            raise FindingsError(
                f'the tone of a claim must be one of {", ".join(TONES)}, got "{self.tone}"',
                hint="good, bad and mixed are verdicts; none is a measurement",
            )


@dataclass(frozen=True, repr=False)
class Results(ResultView):
    """The results of one command.

    Attributes:
        title: The subject of the page.
        findings: Statements with their measurements.
        tables: Tables of the page.
        figures: Figures of the page.
        facts: The command, versions, seed, model, dtype and seconds.
        unchecked: Checks that were skipped, with the reason.
        claim: The conclusion in words; without one the page counts its checks.
        chapters: Results that form one page together, each with a claim. Their findings, tables
            and figures are their own.
    """

    title: str
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    claim: Claim | None = None
    chapters: tuple[Results, ...] = ()

    @property
    def results(self) -> Results:
        """The results themselves."""
        return self

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that do not hold."""
        return tuple(f for f in self.all_findings if f.holds is False)

    @property
    def inconclusive(self) -> tuple[Finding, ...]:
        """The findings whose measurement is too weak for a verdict."""
        undecided = (f for f in self.all_findings if f.holds is None)
        return tuple(f for f in undecided if f.sentence.startswith(_INCONCLUSIVE))

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings, those of chapters included."""
        return (*self.findings, *(f for chapter in self.chapters for f in chapter.all_findings))

    @property
    def headline(self) -> Claim:
        """The conclusion in words: the worst of the checks that fail and the claim."""
        from regauge.results.headline import headline_of

        return headline_of(self)


def spread_of(values: Sequence[float]) -> float | None:
    """Compute the standard deviation over trials for `Finding.spread`.

    It is None for one trial: a 0 would be a measurement.
    """
    return statistics.stdev(values) if len(values) > 1 else None


def apply_threshold(f: Finding, threshold: float | None) -> Finding:
    """Return a finding with a verdict by a threshold.

    It holds up to this share of the distance from its floor to its ceiling. Beyond, it fails if the
    value exceeds the floor by `beats_floor`, by its interval, or without one; it holds if
    `beats_floor` excludes that, and is inconclusive else. Findings with a verdict, without one of
    these numbers, or without a threshold are returned unchanged.
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
    gain, range_ = f.value - f.floor, f.ceiling - f.floor
    if f.beats_floor is False or gain <= 0 or (range_ > 0 and gain / range_ <= threshold):
        return replace(f, holds=True)
    if f.beats_floor or f.interval is None or f.interval[0] > f.floor:
        return replace(f, holds=False)
    reason = "the interval contains the floor"
    return replace(f, sentence=f"{INCONCLUSIVE}, {reason}: {f.sentence}")


def to_json(results: Results) -> str:
    """Serialize results; nan and inf, which JSON lacks, are written as strings."""
    return json.dumps(
        {"regauge": "results", "version": VERSION, **_to_plain(asdict(results))},
        indent=1,
        allow_nan=False,
        ensure_ascii=False,
    )


_RESULTS_HINT = Hint(
    "pass a file that to_json or the command line wrote", cli="pass a file that --json wrote"
)


def from_json(text: str | bytes, where: str = "the text") -> Results:
    """Parse the output of `to_json`.

    Args:
        text: The JSON.
        where: The name of its source, for errors.

    Raises:
        FindingsError: The text is not a results file, is damaged, or of an unsupported version.
    """
    document = parse_json(text, where, FindingsError, _RESULTS_HINT, surrogates=True)
    if not isinstance(document, dict) or document.get("regauge") != "results":
        raise FindingsError(
            f"{where} is not a results file of regauge",
            hint=_RESULTS_HINT,
        )
    if document.get("version") != VERSION:
        raise FindingsError(
            f"{where} has version {document.get('version')!r}; this regauge reads {VERSION}",
            hint="install a newer regauge",
        )
    try:
        return _build_results(document)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, FindingsError) as error:
        raise FindingsError(
            f"{where} is damaged: {type(error).__name__}: {error}",
            hint="write the results again, with this version of regauge",
        ) from error


def _build_results(document: Mapping[str, Any], depth: int = 0) -> Results:
    """Construct results from their JSON; files before 0.2 have neither claim nor chapters."""
    claim, chapters = document.get("claim"), document.get("chapters", ())
    if chapters and depth:
        raise ValueError("chapters must not have chapters")
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
        claim=None if claim is None else _build_claim(claim),
        chapters=tuple(_build_results(chapter, depth + 1) for chapter in chapters),
    )


def _build_claim(values: Mapping[str, Any]) -> Claim:
    return Claim(**{str(name): str(value) for name, value in values.items()})


def load_results(path: Path | str) -> Results:
    """Load the results of a file that `--json` wrote."""
    try:
        data = read_document(Path(path), RESULTS_BYTES, FindingsError)
    except CheckpointError as error:
        raise FindingsError(
            str(error),
            hint=_RESULTS_HINT,
        ) from error
    return from_json(data, str(path))


_NUMBERS = {"value", "floor", "ceiling", "spread"}


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """Construct a dataclass from its JSON; strings of nan and inf become numbers again."""
    unknown = values.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f'unknown field "{min(unknown)}" of a {kind.__name__}')
    if values.get("interval") is not None:
        low, high = values["interval"]
        values = {**values, "interval": (float(low), float(high))}
    return kind(
        **{k: float(v) if k in _NUMBERS and v is not None else v for k, v in values.items()}
    )


def _to_plain(value: Any) -> Any:
    """Replace tuples by lists, keys by strings, and numbers that are not finite by their names."""
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
