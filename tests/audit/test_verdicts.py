"""Verdicts agree with their numbers: what chance explains is not called a leak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from regauge.audit.engine import Attack
from regauge.audit.gradient_audit.clients import Truth
from regauge.audit.gradient_audit.engine import GradientCase, score_other_texts, token_lists
from regauge.audit.recorded_audit.report import Target, build_results
from regauge.audit.report import AuditReport
from regauge.audit.scores import AttackScores, Row
from regauge.audit.text_scores import score_texts
from regauge.audit.verdicts import (
    Evidence,
    Quantity,
    Verdict,
    evidence_of_mean,
    evidence_of_share,
    order_verdicts,
    with_verdicts,
    write_verdicts,
)
from regauge.cli.run import deliver
from regauge.data.tasks import Examples
from regauge.results.findings import Finding, Results, apply_threshold, from_json, to_json

LABELS = Quantity("labels", "", 0.05, 0.9, "%", "labels")
IMAGES = Quantity("images", "PSNR", 0.5, 20.0, "dB", "updates", 1)


@pytest.mark.parametrize(
    ("share", "guess", "count", "level"),
    [
        (0.23, 0.20, 100, "unclear"),
        (0.23, 0.20, 100_000, "none"),  # significant, and of no use
        (0.60, 0.20, 100, "partial"),
        (1.00, 0.20, 100, "leak"),
        (1.00, 0.20, 2, "unclear"),
        (0.20, 0.20, 10_000, "none"),
        (0.00, 0.33, 3, "unclear"),
    ],
)
def test_shares_are_judged_against_a_guess(
    share: float, guess: float, count: int, level: str
) -> None:
    assert evidence_of_share(share, guess, count).level(0.05, 0.9) == level


def test_a_guess_is_rarely_called_a_leak() -> None:
    rng = np.random.default_rng(0)
    hits = rng.binomial(200, 0.3, 400) / 200
    false = [evidence_of_share(float(h), 0.3, 200).level(0.0, 0.9) != "unclear" for h in hits]
    assert sum(false) <= 0.02 * len(hits)
    noise = rng.normal(12, 2, (200, 10))
    judged = [evidence_of_mean(list(row), 12.0).level(0.0, 20.0) for row in noise]
    assert judged.count("partial") <= 4


def test_means_are_paired_with_the_guess_on_the_same_example() -> None:
    guesses = [float(g) for g in np.linspace(5, 25, 12)]
    better = [g + 2 + 0.1 * (i % 3) for i, g in enumerate(guesses)]
    assert evidence_of_mean(better, guesses).level(0.5, 20.0) == "partial"
    assert evidence_of_mean(better, float(np.mean(guesses))).level(0.5, 40.0) == "unclear"
    many = evidence_of_mean(better * 3, guesses * 3)
    assert many.interval is not None
    assert many.interval[0] < many.value < many.interval[1]
    four = evidence_of_mean(better, guesses, group=4)
    assert four.count == 3, "the images of an update are one trial"
    assert evidence_of_mean([60.0], 13.0).level(0.5, 20.0) == "leak"
    assert evidence_of_mean([15.0], 13.0).level(0.5, 20.0) == "unclear"
    assert evidence_of_mean([60.0, 40.0], 13.0).level(0.5, 20.0) == "leak"
    assert evidence_of_mean([15.0, 12.0], 13.0).level(0.5, 20.0) == "unclear"
    with pytest.raises(ValueError):
        evidence_of_mean([1.0, 2.0], [1.0] * 3)


def test_a_sentence_says_what_its_numbers_do() -> None:
    measured = [
        ("none", evidence_of_share(1.0, 0.2, 50), "labels and counts"),
        ("noise=1", evidence_of_share(0.23, 0.2, 50), ""),
    ]
    leak, unclear = write_verdicts(LABELS, measured)
    assert (
        leak.text
        == "Labels are revealed under no defence: 100% by labels and counts (a guess: 20%)."
    )
    assert unclear.text == (
        "Inconclusive for labels under noise=1: 23% (a guess: 20%); 50 labels are too few to "
        "distinguish it from a guess."
    )
    values = [45.0] + [13.0] * 7
    (one,) = write_verdicts(IMAGES, [("rows", evidence_of_mean(values, 13.0), "DLG")])
    assert one.text == (
        "Images are partly revealed under rows: PSNR 17.0 dB by DLG (a guess: 13.0 dB); 1 of 8 "
        "images is recovered with certainty, the best at 45.0 dB."
    )
    (hidden,) = write_verdicts(IMAGES, [("private=1", evidence_of_mean([12.0] * 8, 12.1), "DLG")])
    assert hidden.text == (
        "Images are not revealed under private=1: PSNR 12.0 dB, about as a guess "
        "(a guess: 12.1 dB)."
    )


def test_attacks_for_another_optimizer_do_not_exclude_a_leak() -> None:
    rows = Row("", {"dlg": AttackScores("dlg", {"PSNR": [12.0]})}, floor={"PSNR": [12.1]})
    targets = [Target(0, client, rows) for client in range(8)]
    attacks = [Attack("dlg", "DLG", "", lambda: None)]
    plain = build_results(targets, {}, attacks, is_text=False)
    assert plain.headline.tone == "good"
    assert plain.headline.text.startswith("Images are not revealed in round 1")
    adaptive = build_results(targets, {}, attacks, False, "adamw")
    assert adaptive.headline.tone == "none"
    assert adaptive.headline.text == (
        "Inconclusive for images in round 1: PSNR 12.0 dB (a guess: 12.1 dB); the attacks invert "
        "steps of SGD, and the clients trained with adamw."
    )
    leaky = {"dlg": AttackScores("dlg", {"PSNR": [45.0]})}
    targets[3] = replace(targets[3], row=replace(rows, by_attack=leaky))
    leak = build_results(targets, {}, attacks, False, "adamw").headline.text
    assert leak.startswith("Images are partly revealed in round 1")
    assert "1 of 8 images is recovered" in leak


def test_the_baseline_of_texts_is_assigned_as_an_attack_is() -> None:
    """A guess at random scores like the baseline, whatever the number of texts in an update."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 101)

    def sample(count: int) -> Examples:
        ids = torch.from_numpy(rng.choice(100, (count, 12), p=weights / weights.sum()))
        return Examples(count, 2, lambda i: ({"input_ids": ids[i]}, torch.zeros(len(i)).long()))

    case = GradientCase(torch.nn.Identity(), sample(400), sample(400), (), (), updates=100, batch=4)
    floor = np.mean(score_other_texts(case, 4, 100)["ROUGE-L"])

    def tokens(texts: Examples) -> list[list[int]]:
        inputs, labels = texts.batch(np.arange(400))
        return token_lists(Truth(inputs, inputs, labels), False)

    guesses, victims = tokens(sample(400)), tokens(case.victims)
    at = [slice(i, i + 4) for i in range(0, 400, 4)]
    attack = np.mean([score_texts(guesses[s], victims[s])["ROUGE-L"] for s in at])
    assert abs(attack - floor) < 0.01
    alone = np.mean(
        [score_texts([g], [v])["ROUGE-L"] for g, v in zip(guesses, victims, strict=True)]
    )
    assert attack - alone > 0.02, "the assignment alone gains"


def test_leaks_come_first_and_decide_the_headline() -> None:
    verdicts = [Verdict("a note"), Verdict("hidden", "none"), Verdict("a leak", "leak")]
    assert [v.level for v in order_verdicts(verdicts)] == ["leak", "none", "note"]
    results = with_verdicts(Results("t", facts={"kind": "x"}), verdicts)
    assert (results.headline.text, results.headline.tone) == ("a leak", "bad")
    assert results.facts == {"kind": "x", "verdict": ["a leak", "hidden", "a note"]}
    assert with_verdicts(Results("t"), verdicts[:2]).headline.tone == "good"


@pytest.mark.parametrize("others", [13.0, 12.0])
@pytest.mark.parametrize("count", [2, 8, 40, 400])
def test_one_certain_example_is_a_leak_in_part(count: int, others: float) -> None:
    assert evidence_of_mean([45.0] + [others] * (count - 1), 13.0).level(0.5, 20.0) == "partial"
    guesses = list(np.linspace(10, 22, count))  # the mean image itself reaches 22 dB
    assert evidence_of_mean(guesses, guesses).level(0.5, 20.0) in ("none", "unclear")


def test_few_or_equal_examples_do_not_exclude_a_leak() -> None:
    assert evidence_of_mean([0.0, 0.0], [0.0, 0.0]).level(0.05, 0.9) == "unclear"
    assert evidence_of_mean([12.0] * 6, 12.1).level(0.5, 20.0) == "unclear"
    assert Evidence(0.24, 0.2, 100, (0.205, 0.6)).level(0.05, 0.9) == "unclear"


def test_intervals_of_20_examples_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    samples = [evidence_of_mean(list(row), 0.0).interval for row in rng.normal(0, 1, (1500, 20))]
    missed = sum(not low <= 0 <= high for low, high in filter(None, samples))
    assert missed <= 24, "1 % of 1500, and three standard errors; the bootstrap alone misses 2 %"


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([30.0, 28.0], False),
        ([25.0, 14.0], False),
        ([30.0, 16.0], False),
        ([18.5, 18.0], False),  # each above the guess
        ([19.5, 12.9], None),
        ([12.0, 12.9], True),
    ],
)
def test_a_gate_agrees_with_the_verdict(values: list[float], holds: bool | None) -> None:
    evidence = evidence_of_mean(values, 13.0)
    finding = Finding("x", "", None, evidence.value, 13.0, 29.5, interval=evidence.interval)
    finding = replace(finding, beats_floor=IMAGES.beats_guess(evidence))
    judged = apply_threshold(finding, 0.15)
    assert judged.holds is holds
    assert bool(Results("t", (judged,)).inconclusive) == (holds is None)
    if IMAGES.level(evidence) in ("leak", "partial"):
        assert judged.holds is False


def test_a_threshold_fails_closed() -> None:
    weak = Finding("x/rows/dlg", "", None, 8.1, 13.2, 8.0)  # less than a guess, and its ceiling too
    assert apply_threshold(weak, 0.5).holds is True
    noisy = Finding("x/rows/any", "", None, 0.6, 0.2, 0.7, interval=(0.1, 1.1))
    assert apply_threshold(noisy, 0.5).holds is None
    assert Results("t", (apply_threshold(noisy, 0.5),)).inconclusive
    assert apply_threshold(replace(noisy, beats_floor=False), 0.5).holds is True
    assert apply_threshold(replace(noisy, interval=None), 0.5).holds is False
    sure = Finding("x/rows/any", "", None, 0.6, 0.2, 0.7, interval=(0.5, 0.7))
    assert apply_threshold(sure, 0.5).holds is False
    assert from_json(to_json(Results("t", (sure,)))).findings == (sure,)


def test_an_inconclusive_gate_has_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = Finding("x/rows/any", "", None, 0.6, 0.2, 0.7, interval=(0.1, 1.1))
    judged = Results("t", (apply_threshold(noisy, 0.5),), facts={"verdict": ["unclear"]})
    report = AuditReport("gradients", judged)
    assert deliver(judged, str(report), None, None, must_decide=True) == 3
    assert "INCONCLUSIVE  x/rows/any" in capsys.readouterr().out
    assert deliver(Results("t", (noisy,)), "", None, None, must_decide=True) == 0
