"""The report: one HTML page of results, which opens from disk without a network.

The page is a function of the results' JSON: the same JSON gives the same bytes. Every text is
untrusted: jinja escapes it, and the page forbids scripts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from regauge.checkpoints.files import wrap_write_errors, write_bytes
from regauge.errors import FindingsError, Hint, need
from regauge.results.findings import (
    Claim,
    Figure,
    Finding,
    Results,
    Table,
    from_json,
    load_results,
    to_json,
)
from regauge.results.headline import count_checks, remaining_verdicts
from regauge.results.report.numbers import format_amount, format_number, section_name

__all__ = ["format_amount", "format_number", "page", "section_name", "write_page"]

_MAX_FAILED = 8  # failing findings that the summary names; it is to be read in ten seconds
_MAX_DEPTH = 4  # facts nested deeper than this are shown as one line
_MAX_OPEN_ROWS = 25  # of a table that is shown without a click
_MAX_OPEN_FIGURES = 4
_MAX_UNBROKEN = 16  # characters of a name in a table that stay on one line
_TEMPLATES = ("page.html", "parts.html", "page.css")


class Part(NamedTuple):
    """Results as the page shows them: a whole page, or one of its chapters."""

    results: Results
    prefix: str  # of all ids
    headline: Claim
    checks: str  # how many pass
    verdicts: list[str]  # beyond the headline
    failed: list[tuple[int, Finding]]
    more: int  # failed findings that are not listed
    sections: dict[str, list[tuple[int, Finding]]]
    quiet: list[tuple[int, Finding]]
    panels: list[Any]
    figures: list[tuple[Figure, Any, int]]
    thumbnail: Any


def page(results: Results) -> str:
    """Render results as a self-contained HTML page: verdict, evidence, and how to reproduce it.

    Raises:
        FindingsError: The results are not plain data, or a finding or figure is invalid.
    """
    need("jinja2", "report")
    from jinja2 import DictLoader, Environment, StrictUndefined

    results = _to_plain(results)
    facts = dict(results.facts)
    command = facts.pop("command", None)
    if isinstance(facts.get("verdict"), list):
        del facts["verdict"]
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=DictLoader(
            {name: files(__name__).joinpath(name).read_text("utf-8") for name in _TEMPLATES}
        ),
    )
    environment.globals |= {
        "number": format_number,
        "amount": format_amount,
        "fact": _format_fact,
        "cell_text": _format_cell,
        "numeric": _is_numeric,
        "empty": _is_empty,
        "marks": {"good": "✓", "bad": "✕", "mixed": "◐", "none": "○"},
        "max_rows": _MAX_OPEN_ROWS,
        "max_figures": _MAX_OPEN_FIGURES,
    }
    return environment.get_template("page.html").render(
        part=_build_part(results, ""),
        chapters=[
            _build_part(chapter, f"c{i}-", has_thumbnail=True)
            for i, chapter in enumerate(results.chapters, 1)
        ],
        command=shlex.join(map(str, command)) if isinstance(command, list) else command,
        facts=facts,
    )


def _build_part(results: Results, prefix: str, has_thumbnail: bool = False) -> Part:
    from regauge.results.report.panels import build_panels
    from regauge.results.report.plots import draw_figure

    sections: dict[str, list[tuple[int, Finding]]] = {}
    numbered = list(enumerate(results.findings))
    for i, finding in numbered:
        if finding.holds is not None:
            sections.setdefault(section_name(finding), []).append((i, finding))
    failed = [(i, f) for i, f in numbered if f.holds is False]
    figures = [(f, *draw_figure(f, f"{prefix}f{i}-")) for i, f in enumerate(results.figures)]
    if not has_thumbnail:  # galleries first; a chapter begins with the picture of its claim
        figures.sort(key=lambda entry: entry[0].kind != "images")
    thumbnail = None
    if has_thumbnail and results.figures:
        thumbnail, _ = draw_figure(results.figures[0], f"{prefix}t-", compact=True)
    return Part(
        results=results,
        prefix=prefix,
        headline=results.headline,
        checks=count_checks(results),
        verdicts=remaining_verdicts(results),
        failed=failed[:_MAX_FAILED],
        more=len(failed) - _MAX_FAILED,
        sections=sections,
        quiet=[(i, f) for i, f in numbered if f.holds is None],
        panels=build_panels(results.findings),
        figures=figures,
        thumbnail=thumbnail,
    )


def write_page(source: Path | str, out: Path) -> str:
    """Write the page of a results file to a new file.

    Args:
        source: The JSON that `--json` or `save` of a result wrote.
        out: The page.

    Returns:
        The headline of the page.

    Raises:
        FindingsError: The page exists, or the source is not a results file.
    """
    with wrap_write_errors(out):
        taken = os.path.lexists(out)
    if taken:
        raise FindingsError(
            f"the output {out} exists already",
            hint=Hint(
                "pass another file, or remove this one first",
                cli="pass another file with -o, or remove this one first",
            ),
        )
    results = load_results(source)
    write_bytes(out, page(results).encode(), new=True)
    return results.headline.text


def _is_numeric(table: Table, column: int) -> bool:
    return any(isinstance(row[column], int | float) for row in table.rows if column < len(row))


def _format_cell(value: Any) -> Any:
    """Format a cell; a long name may be broken after its dots, slashes and underscores."""
    from markupsafe import Markup, escape

    text = format_number(value)
    if not isinstance(value, str) or len(text) <= _MAX_UNBROKEN:
        return text
    return Markup(re.sub(r"(?<=\w[./_])(?=\w)", "<wbr>", str(escape(text))))


def _is_empty(table: Table, column: int) -> bool:
    """Return whether no row has a value in a column."""
    return all(row[column] is None for row in table.rows if column < len(row))


def _format_fact(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Format a fact for the template: (key, value) pairs, or one line of text."""
    if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
        return list(value.items())
    if isinstance(value, list) and not any(isinstance(v, Mapping | list) for v in value):
        return ", ".join(map(_format_fact, value)) or "none"
    if isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False)
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
        if isinstance(value, int) and not isinstance(value, bool)
        else format_number(value)
    )


def _to_plain(results: Results) -> Results:
    """Return results after a round trip through JSON, and reject invalid findings."""
    try:
        plain = from_json(to_json(results).encode("utf-8", "replace"), "the results")
    except (TypeError, ValueError, RecursionError) as error:
        raise FindingsError(
            f"the results are not plain data: {error}",
            hint="facts, tables and figures hold text, numbers, lists and dicts",
        ) from error
    faults = [f"finding {f.id!r}: {what}" for f in plain.all_findings if (what := _find_fault(f))]
    if faults:
        raise FindingsError(
            "\n  ".join([f"{len(faults)} findings cannot be shown", *faults[:20]]),
            hint="write the results again, with this version of regauge",
        )
    return plain


def _find_fault(finding: Finding) -> str:
    """Return why a finding cannot be shown, or an empty text."""
    if not any(finding.holds is value for value in (True, False, None)):
        return f"holds must be true, false or null, got {finding.holds!r}"
    texts: Sequence[str] = ("id", "statement", "sentence", "source", "measure", "where")
    wrong = [name for name in texts if not isinstance(getattr(finding, name), str)]
    if wrong:
        return f"{', '.join(wrong)} must be text"
    return "" if isinstance(finding.trials, int) else "trials must be an integer"
