"""The result of a verification: its findings, as text, JSON or a page."""

from __future__ import annotations

from dataclasses import dataclass

from regauge.results.findings import Finding, Results
from regauge.results.text import format_verdict
from regauge.results.views import ResultView

GENERAL_PREFIXES = ("operator/", "optimizer/")


@dataclass(frozen=True, eq=False)
class Verification(ResultView):
    """The theorems, checked on one model.

    Attributes:
        checked: Findings, tables, figures and facts.
        notes: Remarks on how the spec was found.
    """

    checked: Results
    notes: tuple[str, ...] = ()

    @property
    def results(self) -> Results:
        """Findings, tables, figures and facts."""
        return self.checked

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One finding for each check."""
        return self.results.findings

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings of laws that should hold and do not."""
        return self.results.failed

    @property
    def inconclusive(self) -> tuple[Finding, ...]:
        """The findings without a verdict."""
        return self.results.inconclusive

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What was not checked, and why."""
        return self.results.unchecked

    def format(self, *, verbose: bool = False) -> str:
        """Format the findings as a table; general ones are counted unless `verbose` is set."""
        from regauge.models.summary import format_columns

        results = self.results
        rows = [("", "check", "error", "allowed", "control", "")]
        general = [f for f in results.findings if f.id.startswith(GENERAL_PREFIXES) and f.holds]
        for f in results.findings:
            if f not in general or verbose:
                value, floor, ceiling = map(_format_number, (f.value, f.floor, f.ceiling))
                sentence = "" if f.holds else f.sentence
                rows.append((format_verdict(f), f.id, value, floor, ceiling, sentence))
        if general and not verbose:
            rows.append(("holds", f"{len(general)} general checks (-v lists them)", "", "", "", ""))
        passed = sum(f.holds is True for f in results.findings)
        decided = sum(f.holds is not None for f in results.findings)
        lines = [results.title, "", format_columns(rows, right=(2, 3, 4)), ""]
        lines += [f"not checked: {text}" for text in results.unchecked]
        last = f"{passed} of {decided} checks hold"
        last += f"; {len(results.inconclusive)} inconclusive" if results.inconclusive else ""
        last += f"; {len(results.failed)} FAILED" if results.failed else ""
        return "\n".join([*lines, last])

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        passed = sum(f.holds is True for f in self.findings)
        return (
            f"<verification of {self.results.title.partition(':')[0]}: {passed} checks hold, "
            f"{len(self.failed)} failed>"
        )


def _format_number(value: float | None) -> str:
    """Format a number, or nothing for None."""
    return "" if value is None else f"{value:.1e}"
