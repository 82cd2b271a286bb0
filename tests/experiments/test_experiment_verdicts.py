"""Verdicts: a difference beyond the seeds' spread and a stated size, from three seeds on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.former_words import load_renamed
from experiments.shared.verdicts import compare, judge, require_seeds
from experiments.stored_verdicts import RULES, rejudge
from regauge.results.findings import Results

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("values", "base", "sign", "size", "holds"),
    [
        ([0.62, 0.61, 0.63], [0.75, 0.74, 0.76], -1, 0.0, True),
        ([0.62, 0.61, 0.63], [0.75, 0.74, 0.76], 1, 0.0, False),
        ([0.62, 0.61, 0.63], [0.626, 0.616, 0.636], -1, 0.0, None),  # within the spread
        ([0.62, 0.62, 0.62], [0.626, 0.626, 0.626], -1, 0.01, None),  # smaller than the size
        ([0.62, 0.62, 0.62], [0.64, 0.64, 0.64], -1, 0.01, True),
        ([0.62], [0.75], -1, 0.0, None),
        ([0.62, 0.61], [0.75, 0.74, 0.76], -1, 0.0, None),
    ],
)
def test_a_comparison_needs_a_margin_and_three_seeds(
    values: list[float], base: list[float], sign: int, size: float, holds: bool | None
) -> None:
    assert compare(values, base, sign, size=size).holds is holds


def test_the_reason_names_the_margin_or_what_is_missing() -> None:
    assert compare([1.0, 2.0, 3.0], [7.0, 8.0, 9.0], -1).reason == (
        "difference -6, margin 1 (3 seeds)"
    )
    assert compare([1.0], [2.0]).reason == "inconclusive: 1 seed, a verdict needs 3"
    assert judge(1.0, (0.1, None), 3).reason == "inconclusive: the spread over seeds is not known"
    assert judge(1.0, (0.1, 0.2), 3, unit="pair").holds
    assert require_seeds(True, 2, "pair").reason == "inconclusive: 2 pairs, a verdict needs 3"
    assert require_seeds(False, 3).holds is False


def judged(results: Results) -> dict[str, tuple[bool | None, str]]:
    return {f.id: (f.holds, f.sentence) for f in results.findings}


def test_stored_comparisons_are_judged_again_where_their_spreads_are_stored() -> None:
    stored = load_renamed(RESULTS / "000-table7.json")
    assert judged(rejudge("000-table7", stored))["image/without key"][0] is True
    wide = tuple(
        replace(f, spread=0.2) if f.id == "image/without key" else f for f in stored.findings
    )
    found = judged(rejudge("000-table7", replace(stored, findings=wide)))
    assert found["image/without key"] == (
        None,
        "inconclusive, no clear difference: difference -0.0775, margin 0.2 (3 seeds)",
    )
    assert found["bert/without key"][0] is True
    assert found["image/with key"][0] is True  # an equality, which needs no seeds


def test_stored_comparisons_of_one_seed_have_no_verdict() -> None:
    found = judged(rejudge("002-table5", load_renamed(RESULTS / "002-table5.json")))
    assert {holds for holds, _ in found.values()} == {None}
    assert found["table5/paper/a"][1] == "inconclusive: 1 seed, a verdict needs 3; 16.6 to 16.4 dB"
    found = judged(rejudge("000-table6", load_renamed(RESULTS / "000-table6.json")))
    assert found["claim/faces/low-pass=0.1"] == (
        None,
        "inconclusive: the spread over seeds is not known",
    )
    found = judged(rejudge("002-beyond", load_renamed(RESULTS / "002-beyond.json")))
    assert all("selected on the test data" in said for _, said in found.values())


def test_results_that_name_their_code_keep_their_verdicts() -> None:
    stored = load_renamed(RESULTS / "002-table5.json")
    fresh = replace(stored, facts={**stored.facts, "code": {"a": "0"}})
    assert rejudge("002-table5", fresh) == fresh
    assert rejudge("002-table5", stored) != stored


def test_every_rule_applies_to_a_stored_finding() -> None:
    import re

    for rule in RULES:
        files = [p for p in RESULTS.glob("*.json") if re.fullmatch(rule.results, p.stem)]
        ids = [f.id for p in files for f in load_renamed(p).findings]
        assert any(re.fullmatch(rule.findings, name) for name in ids), rule
