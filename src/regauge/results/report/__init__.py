"""The report: results in, one HTML page out, which opens from disk and needs no network.

The page is a function of the results' JSON alone: the same JSON gives the same bytes. Every text in
it is foreign: jinja escapes it, and the page forbids scripts altogether.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from regauge.errors import FindingsError, need
from regauge.results.findings import Finding, Results, Table, from_json, to_json

_MAX_FAILED = 8  # failing findings that the summary names; it is to be read in ten seconds
_MAX_DEPTH = 4  # facts nested deeper than this are shown as one line


def page(results: Results) -> str:
    """One self-contained HTML page: the verdict first, then what it rests on, and last how to
    repeat it.
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
    told = facts.pop("verdict") if isinstance(facts.get("verdict"), list) else []
    if (
        told and colour == "none"
    ):  # an audit checks nothing: it measures, and says in words what that comes to
        words, told = str(told[0]), told[1:]
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
        told=told,
    )


def verdict(results: Results) -> tuple[str, str]:
    """What the banner says: good, bad or none, and the words."""
    checked, failed = sum(f.holds is not None for f in results.findings), len(results.failed)
    inconclusive = f"; {len(results.inconclusive)} cannot be told" if results.inconclusive else ""
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
    """What a finding is listed under: its id up to the first slash."""
    return finding.id.split("/")[0]


def format_amount(value: float | None, finding: Finding) -> str:
    """A number of a finding: errors with two digits, and a power of ten where they are small; all
    else plainly.
    """
    small = value is not None and "error" in finding.measure and 0 < abs(value) < 0.1
    return (
        _format_power(value)
        if value is not None and small
        else format_number(value, 2 if "error" in finding.measure else 4)
    )


def format_number(value: Any, digits: int = 4) -> str:
    """A cell as text: numbers with the digits that say something; nan and inf as words."""
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
    """A fact as the template shows it: (key, value) pairs, or one line of text."""
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
    """The results as their JSON says them, so that nothing else can show on the page; what is no
    finding is refused.
    """
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
    if not any(finding.holds is known for known in (True, False, None)):
        return f"holds is {finding.holds!r}, and not true, false or null"
    texts: Sequence[str] = ("id", "statement", "sentence", "source", "measure", "where")
    wrong = [name for name in texts if not isinstance(getattr(finding, name), str)]
    return (
        f"{', '.join(wrong)} is no text"
        if wrong
        else ""
        if isinstance(finding.trials, int)
        else "trials is no whole number"
    )
