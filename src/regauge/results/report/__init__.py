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
from typing import Any

from regauge.checkpoints.files import wrap_write_errors, write_bytes
from regauge.errors import FindingsError, need
from regauge.results.findings import Finding, Results, Table, from_json, load_results, to_json

_MAX_FAILED = 8  # failing findings that the summary names; it is to be read in ten seconds
_MAX_DEPTH = 4  # facts nested deeper than this are shown as one line


def page(results: Results) -> str:
    """Render results as a self-contained HTML page: verdict, evidence, and how to reproduce it.

    Raises:
        FindingsError: The results are not plain data, or a finding or figure is invalid.
    """
    need("jinja2", "report")
    from jinja2 import Environment, StrictUndefined

    from regauge.results.report.plots import build_panels, draw_figure

    results = _to_plain(results)
    colour, words = verdict(results)
    sections: dict[str, list[tuple[int, Finding]]] = {}
    for i, finding in enumerate(results.findings):
        if finding.holds is not None:
            sections.setdefault(section_name(finding), []).append((i, finding))
    facts = dict(results.facts)
    command = facts.pop("command", None)
    summary = facts.pop("verdict") if isinstance(facts.get("verdict"), list) else []
    if summary and colour == "none":  # an audit only measures, and summarizes in words
        words, summary = str(summary[0]), summary[1:]
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals |= {
        "number": format_number,
        "amount": format_amount,
        "fact": _format_fact,
        "numeric": _is_numeric,
    }
    template = environment.from_string(files(__name__).joinpath("page.html").read_text("utf-8"))
    return template.render(
        results=results,
        colour=colour,
        words=words,
        failed=results.failed[:_MAX_FAILED],
        more=len(results.failed) - _MAX_FAILED,
        sections=sections,
        quiet=[(i, f) for i, f in enumerate(results.findings) if f.holds is None],
        panels=build_panels(results.findings),
        figures=[(f, *draw_figure(f, f"f{i}-")) for i, f in enumerate(results.figures)],
        command=shlex.join(map(str, command)) if isinstance(command, list) else command,
        facts=facts,
        summary=summary,
    )


def write_page(source: Path | str, out: Path) -> str:
    """Write the page of a results file to a new file.

    Args:
        source: The JSON that `--json` or `save` of a result wrote.
        out: The page.

    Returns:
        The verdict in words.

    Raises:
        FindingsError: The page exists, or the source is not a results file.
    """
    with wrap_write_errors(out):
        taken = os.path.lexists(out)
    if taken:
        raise FindingsError(
            f"the output {out} exists already",
            hint="name a new file with -o, or remove this one first",
        )
    results = load_results(source)
    write_bytes(out, page(results).encode(), new=True)
    return verdict(results)[1]


def verdict(results: Results) -> tuple[str, str]:
    """Return the colour of the banner ("good", "bad" or "none") and its words."""
    checked, failed = sum(f.holds is not None for f in results.findings), len(results.failed)
    inconclusive = f"; {len(results.inconclusive)} inconclusive" if results.inconclusive else ""
    if not checked:
        return "none", f"Measured: nothing here passes or fails{inconclusive}"
    if failed:
        return (
            "bad",
            f"{failed} of {checked} checks {'fails' if failed == 1 else 'fail'}{inconclusive}",
        )
    if inconclusive:
        return "none", f"{checked} {'check holds' if checked == 1 else 'checks hold'}{inconclusive}"
    return "good", f"All {checked} checks hold" if checked > 1 else "The one check holds"


def section_name(finding: Finding) -> str:
    """Return the section of a finding: its id up to the first slash."""
    return finding.id.split("/")[0]


def format_amount(value: float | None, finding: Finding) -> str:
    """Format a number of a finding: errors with two digits, small ones as powers of ten."""
    is_small = value is not None and "error" in finding.measure and 0 < abs(value) < 0.1
    return (
        _format_power(value)
        if value is not None and is_small
        else format_number(value, 2 if "error" in finding.measure else 4)
    )


def format_number(value: Any, digits: int = 4) -> str:
    """Format a cell: numbers with their significant digits, nan and inf as words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    if value == 0 or value != value or abs(value) == float("inf"):
        return "0" if value == 0 else str(value)
    if not 1e-3 <= abs(value) < 1e6:
        return _format_power(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _format_power(value: float) -> str:
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.1e}")


def _is_numeric(table: Table, column: int) -> bool:
    return any(isinstance(row[column], int | float) for row in table.rows if column < len(row))


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
    faults = [f"finding {f.id!r}: {what}" for f in plain.findings if (what := _find_fault(f))]
    if faults:
        raise FindingsError(
            "\n  ".join([f"{len(faults)} findings cannot be shown", *faults[:20]]),
            hint="run the command again with --json",
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
