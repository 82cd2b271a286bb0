"""The report of an audit: its findings, as text, JSON, a page, or a cell of a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from regauge.checkpoints.resume import StateStore
from regauge.models.summary import format_columns
from regauge.results.findings import Results
from regauge.results.report import format_number
from regauge.results.views import ResultView


@dataclass(frozen=True, eq=False)
class AuditReport(ResultView):
    """The findings of an audit.

    Attributes:
        subject: What was audited: "lock", "split learning", "gradients", "recorded run".
        measured: One finding for each attack and combination of defences, tables and figures.
        tables: The number of tables in the text.
        store: The saved steps; None if none were saved.

    Example:
        >>> _ = regauge.lock("model", regauge.generate_key()).save("locked")
        >>> report = regauge.audit.lock("locked", base="model")
        >>> report.to_html("page.html")
    """

    subject: str
    measured: Results
    tables: int = 1
    store: StateStore | None = None

    @property
    def results(self) -> Results:
        """Findings, tables, figures and facts."""
        return self.measured

    def delete_state(self) -> None:
        """Delete the saved steps of the audit. Call this once its outputs are written."""
        if self.store is not None:
            self.store.delete()

    @property
    def verdict(self) -> tuple[str, ...]:
        """The conclusions, one sentence each."""
        return tuple(self.results.facts["verdict"])

    def __str__(self) -> str:
        return format_lock(self.results) if self.subject == "lock" else format_audit(self)

    def __repr__(self) -> str:
        failed = f", {len(self.results.failed)} failed" if self.results.failed else ""
        count = len(self.results.findings)
        return f"<audit of {self.subject}: {count} findings{failed}: {self.verdict[0]}>"


def format_audit(report: AuditReport) -> str:
    """Format an audit as text: the verdict, the first tables, and what was not measured."""
    results = report.results
    lines = [results.title, "", *report.verdict, ""]
    for table in results.tables[: report.tables]:
        rows = [
            table.columns,
            *(tuple("" if c is None else format_number(c) for c in row) for row in table.rows),
        ]
        columns = format_columns(rows, right=tuple(range(1, len(table.columns))))
        lines += [columns, "", table.note, ""]
    lines += [f"not measured: {u}" for u in results.unchecked]
    lines += [
        f"{'FAILS' if f.holds is False else 'INCONCLUSIVE'}  {f.id}: {f.measure} {f.value:.3f}, a "
        f"guess {f.floor:.3f}, undefended {f.ceiling:.3f}"
        for f in (*results.failed, *results.inconclusive)
    ]
    return "\n".join(lines).rstrip()


def format_lock(results: Results) -> str:
    """Format the audit of a lock: the verdict, a line for each attack, and those not tried."""
    rows: list[tuple[str, ...]] = [("attack", "baseline", "value", "control", "seconds")]
    for name, floor, value, ceiling, _, seconds in results.tables[0].rows:
        numbers = (format_number(cell) for cell in (floor, value, ceiling, seconds))
        rows.append((str(name).removeprefix("lock/"), *numbers))
    verdict = results.facts["verdict"]
    lines = [results.title, "", *verdict, "", format_columns(rows, right=(1, 2, 3, 4)), ""]
    lines += [f"not tried: {u}" for u in results.unchecked]
    lines += [
        f"holds  {f.id.removeprefix('lock/')}: {f.statement}"
        for f in results.findings
        if f.holds and "/handling/" in f.id
    ]
    lines += [f"FAILS  {f.id.removeprefix('lock/')}: {f.sentence}" for f in results.failed]
    lines += [f"INCONCLUSIVE  {f.id.removeprefix('lock/')}" for f in results.inconclusive]
    return "\n".join(lines).rstrip()
