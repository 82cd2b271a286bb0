"""The headline of results: their conclusion in words, decided by the worst verdict."""

from __future__ import annotations

from dataclasses import replace

from regauge.results.findings import Claim, Results


def headline_of(results: Results) -> Claim:
    """Return the conclusion of results.

    A check that fails precedes the claim, unless the claim itself is bad news: it then names the
    consequence, which is more than a count. Without a claim the headline is the title.
    """
    claim = results.claim or _first_verdict(results)
    if results.failed and (claim is None or claim.tone != "bad"):
        command = "" if claim is None else claim.command
        return Claim(count_checks(results), "bad", command=command)
    if claim is None:
        return Claim(results.title)
    if results.inconclusive and claim.tone == "good":
        return replace(claim, tone="none")
    return claim


def count_checks(results: Results) -> str:
    """Count the checks of results in words: "2 of 9 checks fail"."""
    checked, failed = sum(f.holds is not None for f in results.all_findings), len(results.failed)
    inconclusive = f"; {len(results.inconclusive)} inconclusive" if results.inconclusive else ""
    if not checked:
        return f"Measurements without a verdict{inconclusive}"
    if checked == 1:
        return f"1 check {'fails' if failed else 'passes'}{inconclusive}"
    if failed:
        return f"{failed} of {checked} checks {'fails' if failed == 1 else 'fail'}{inconclusive}"
    return f"{checked} of {checked} checks pass{inconclusive}"


def remaining_verdicts(results: Results) -> list[str]:
    """Return the verdicts of `facts["verdict"]` that the headline does not repeat."""
    shown = headline_of(results).text
    claim = [results.claim.text] if results.claim is not None else []
    lines = [*claim, *_verdicts(results)]
    return [line for line in dict.fromkeys(lines) if line != shown]


def _verdicts(results: Results) -> list[str]:
    lines = results.facts.get("verdict")
    return list(map(str, lines)) if isinstance(lines, list | tuple) else []


def _first_verdict(results: Results) -> Claim | None:
    lines = _verdicts(results)
    return Claim(lines[0]) if lines else None
