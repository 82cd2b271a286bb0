"""Verdicts of stored results, judged again by `shared.verdicts` when pages are rendered.

Results that name their code (`facts["code"]`) were judged by that rule when they were computed.
Older ones hold verdicts by a bare comparison of two means. They are judged again where the JSON
has the spreads of both means, and have no verdict otherwise. Numbers are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.shared.verdicts import Verdict, judge, require_seeds
from regauge.results.findings import INCONCLUSIVE, Finding, Results


@dataclass(frozen=True)
class Rule:
    """How findings of some results are judged: both patterns match a whole name.

    Attributes:
        results: The pattern of names of results.
        findings: The pattern of ids of findings.
        judge: A function of the results and a finding to a verdict.
    """

    results: str
    findings: str
    judge: Callable[[Results, Finding], Verdict]


SAID = re.compile(r"(?:does not hold|holds): ")  # a verdict in the sentence of a finding


def rejudge(name: str, results: Results) -> Results:
    """Judge the findings of stored results again, where a rule applies."""
    if "code" in results.facts:
        return results
    rules = [rule for rule in RULES if re.fullmatch(rule.results, name)]
    return replace(results, findings=tuple(_rejudged(results, rules, f) for f in results.findings))


def _rejudged(results: Results, rules: list[Rule], finding: Finding) -> Finding:
    """Judge a finding by the first rule that applies; also one that only its sentence judges."""
    said = SAID.search(finding.sentence)
    rule = next((r for r in rules if re.fullmatch(r.findings, finding.id)), None)
    if rule is None or (finding.holds is None and said is None):
        return finding
    verdict = rule.judge(results, finding)
    if verdict.holds is not None and finding.holds is not None:
        return replace(finding, holds=verdict.holds)
    if verdict.holds is None:
        numbers = SAID.sub("", finding.sentence) if said else ""
        reason = "; ".join(filter(None, (verdict.reason, numbers)))
        return replace(finding, holds=None, sentence=reason)
    return finding


def _counted(unit: str) -> Callable[[Results, Finding], Verdict]:
    """Return a rule that requires three seeds and keeps the stored verdict then."""

    def judge_count(results: Results, finding: Finding) -> Verdict:
        return require_seeds(bool(finding.holds), _count(results, finding), unit)

    return judge_count


def _count(results: Results, finding: Finding) -> int:
    seeds = results.facts.get("seeds")
    return min(finding.trials, seeds) if isinstance(seeds, int) else finding.trials


def _no_spread(results: Results, finding: Finding) -> Verdict:
    """A comparison of means over seeds whose spreads are not stored."""
    count = _count(results, finding)
    return judge(0.0, (None, None), count)


def _selected(results: Results, finding: Finding) -> Verdict:
    return Verdict(None, f"{INCONCLUSIVE}: the setting was selected on the test data")


def _below_plain(results: Results, finding: Finding) -> Verdict:
    """Fine-tuning without the key against plain fine-tuning; the model with the key has the values
    of the plain one in every trial, and so its spread.
    """
    twin = finding.id.replace("without key", "with key")
    plain = next((f for f in results.findings if f.id == twin), None)
    assert finding.value is not None
    assert finding.ceiling is not None
    return judge(
        finding.value - finding.ceiling,
        (finding.spread, None if plain is None else plain.spread),
        _count(results, finding),
        1 if finding.measure == "perplexity" else -1,
    )


def _above_unmatched(results: Results, finding: Finding) -> Verdict:
    """A matched average against the unmatched one, whose spread is in the table."""
    unmatched = next(row for row in results.tables[0].rows if row[0] == "unmatched")
    spread = unmatched[results.tables[0].columns.index("round 1 ±")]
    assert finding.value is not None
    assert finding.floor is not None
    assert isinstance(spread, float)
    return judge(finding.value - finding.floor, (finding.spread, spread), _count(results, finding))


RULES = (
    Rule("000-figure5", "image/validation", _no_spread),
    Rule("000-(table7|figure5)", ".*/without key", _below_plain),
    Rule("000-figure6", ".*/without key", _counted("model")),
    Rule("000-table6", "claim/.*/accuracy", _counted("seed")),
    Rule("000-table6", "claim/.*/no positions", _counted("seed")),
    Rule("000-table6", "claim/.*", _no_spread),
    Rule("000-figure7", "claim/.*", _counted("seed")),
    Rule("002-beyond", ".*", _selected),
    Rule("002-table9", "robust/corruptions", _no_spread),
    Rule("002-table5", "table5/.*", _counted("seed")),
    Rule("003-barriers", "goal/.*", _counted("pair")),
    Rule("003-(figure3|table2)", ".*/loss|claim/.*", _counted("pair")),
    Rule("003-pairs", "goal/.*", _counted("endpoint")),
    Rule("federated-fusion", "goal/.*/better", _above_unmatched),
    Rule("gradients-real", "pretrained/faces", _counted("seed")),
)
