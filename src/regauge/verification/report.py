"""The result of a verification: its findings, as text, JSON or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from regauge.results.findings import Claim, Finding, Results, Table
from regauge.results.headline import count_checks
from regauge.results.text import format_verdict
from regauge.results.views import ResultView

GENERAL_PREFIXES = ("operator/", "optimizer/")
# The kinds of checks, by the section of their ids, in words.
_KINDS = {
    "spec": "the spec describes every tensor of the model",
    "row": "tokens shuffled after the embedding: outputs, gradients, training",
    "column": "channels, heads and neurons permuted in the weights: outputs, gradients, training",
    "both": "tokens and channels permuted at once",
    "description": "every tensor transformed by a random element of the whole group: outputs",
    "operator": "each operator alone: outputs and gradients",
    "optimizer": "which optimizers keep which symmetry",
}
_ERRORS = "relative error"


def summarize(results: Results) -> Results:
    """Return the results of a verification with their claim, and a table of the kinds of checks."""
    sections: dict[str, list[Finding]] = {}
    for f in results.findings:
        if f.holds is not None:
            sections.setdefault(f.id.split("/")[0], []).append(f)
    moved = [
        name for name, section in (("tokens", "row"), ("channels", "column")) if section in sections
    ] or ["weights"]
    permuted = f"Permuting {' and '.join(moved)}"
    if results.failed:
        claim = Claim(f"{permuted} changes the model: {count_checks(results)}", "bad")
    else:
        errors = [f for fs in sections.values() for f in fs if f.measure == _ERRORS]
        largest = max((f.value for f in errors if _is_exact(f) and f.value is not None), default=0)
        controls = [f.ceiling for f in errors if _is_exact(f) and f.ceiling is not None]
        claim = Claim(
            f"{permuted} changes nothing: {count_checks(results)}",
            "good" if sections else "none",
            f"{largest:.1e}".replace("e-0", "e-"),
            "largest relative difference of outputs, gradients and trained weights: rounding",
            f"Permuted wrongly on purpose, they differ by {min(controls):.2g} or more."
            if controls
            else "",
        )
    rows = tuple(
        (_KINDS.get(name, name), len(fs), sum(f.holds is True for f in fs), *_extremes(fs))
        for name, fs in sections.items()
    )
    columns = ("what is checked", "checks", "pass", "largest error", "smallest error of a control")
    note = "Errors are relative. A control permutes wrongly on purpose, and must differ."
    table = Table("What was checked", columns, rows, note)
    return replace(results, claim=claim, tables=(table, *results.tables))


def _is_exact(f: Finding) -> bool:
    """Return whether a check compares two computations that differ by rounding alone."""
    is_small = f.value is not None and f.floor is not None and f.value <= f.floor <= 1e-3
    return f.holds is True and is_small


def _extremes(findings: Sequence[Finding]) -> tuple[float | None, float | None]:
    exact = [f for f in findings if f.measure == _ERRORS and (_is_exact(f) or not f.holds)]
    values = [f.value for f in exact if f.value is not None]
    controls = [f.ceiling for f in exact if f.ceiling is not None]
    return max(values, default=None), min(controls, default=None)


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
        notes = [*self.notes, ""] if self.notes else []
        lines = [results.title, "", *notes, format_columns(rows, right=(2, 3, 4)), ""]
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
