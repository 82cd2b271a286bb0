"""Former words of stored results, and what the rendered pages write instead.

Results in docs/results keep the words of the code that computed them. `former_words.toml` lists
them with their replacements; numbers are never changed. A fresh run prints the new words, so that
`rename_results` leaves it as it is.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from regauge.results.findings import Finding, Results, Table, load_results

FILE = Path(__file__).with_suffix(".toml")


@cache
def _rules() -> tuple[tuple[tuple[re.Pattern[str], str], ...], dict[str, str], dict[Any, Any]]:
    rules = tomllib.loads(FILE.read_text())
    texts = tuple((re.compile(former), new) for former, new in rules["texts"].items())
    columns = {tuple(entry["former"]): tuple(entry["now"]) for entry in rules["columns"]}
    return texts, rules["cells"], columns


def load_renamed(path: Path) -> Results:
    """Load results in the present words."""
    return rename_results(load_results(path))


def rename_results(results: Results) -> Results:
    """Replace the former words of results: title, tables, findings and facts."""
    return replace(
        results,
        title=renamed(results.title),
        findings=tuple(_rename_finding(finding) for finding in results.findings),
        tables=tuple(_rename_table(table) for table in results.tables),
        facts={name: _rename_fact(name, fact) for name, fact in results.facts.items()},
    )


def renamed(text: str) -> str:
    """Replace the former words of a text."""
    texts, cells, _ = _rules()
    text = cells.get(text, text)
    for pattern, new in texts:
        text = pattern.sub(new, text)
    return text


def _rename_finding(finding: Finding) -> Finding:
    return replace(
        finding,
        id=renamed(finding.id),
        statement=renamed(finding.statement),
        sentence=renamed(finding.sentence),
    )


def _rename_table(table: Table) -> Table:
    columns = _rules()[2].get(table.columns) or tuple(renamed(head) for head in table.columns)
    rows = tuple(tuple(_rename_cell(cell) for cell in row) for row in table.rows)
    return Table(renamed(table.title), columns, rows, renamed(table.note))


def _rename_cell(cell: Any) -> Any:
    return renamed(cell) if isinstance(cell, str) else cell


def _rename_fact(name: str, fact: Any) -> Any:
    if name in ("command", "versions", "code"):
        return fact
    if isinstance(fact, dict):
        return {renamed(key): _rename_fact(name, value) for key, value in fact.items()}
    if isinstance(fact, list | tuple):
        return type(fact)(_rename_fact(name, value) for value in fact)
    return _rename_cell(fact)
