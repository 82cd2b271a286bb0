"""The image audit of split learning: decoders and inversions, scored by SSIM."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from regauge.audit.engine import Attack, Measured, denormalize, pixel_values, to_pixels
from regauge.audit.scores import (
    AttackScores,
    Case,
    Row,
    best_assignment,
    score_baselines,
    score_images,
)
from regauge.audit.split_audit import engine, report
from regauge.audit.split_audit.attempts import (
    ATTACKS,
    Budget,
    Setting,
    Views,
    attempt,
    collect_views,
    patch_size,
)
from regauge.audit.split_audit.engine import SplitCase
from regauge.audit.split_audit.victims import Pair, has_batch_shuffle, make_split_pair
from regauge.checkpoints.resume import StateStore
from regauge.core.progress import Progress
from regauge.defences.parser import NONE
from regauge.errors import AuditError, Hint
from regauge.results.findings import Results
from regauge.results.metrics import Lpips

MIN_IMAGES = 20  # of the attacker


def audit_split(
    case: SplitCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] = ATTACKS,
    budget: Budget | None = None,
    lpips: Lpips | None = None,
    pictures: int = 6,
    fail_above: float | None = None,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Measure utility and the leakage of images, see `engine.audit`.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the upper bound, is always added.
        attacks: The attacks to run.
        budget: The training budget of the attacker's decoder.
        lpips: The LPIPS network; without it LPIPS and F-SIM are skipped.
        pictures: The number of images in the gallery.
        fail_above: The threshold of findings.
        progress: Progress callback.
        store: The saved steps of an interrupted run.
    """
    medium = Images(case, budget or Budget(), lpips, pictures)
    return engine.audit(case, medium, combinations, attacks, fail_above, progress, store)


@dataclass(frozen=True, eq=False)
class Images:
    """How images are attacked.

    Attributes:
        case: The model and its data.
        budget: The training budget of the attacker's decoder.
        lpips: The LPIPS network; None: without LPIPS and F-SIM.
        pictures: The number of images in the gallery.
    """

    case: SplitCase
    budget: Budget
    lpips: Lpips | None
    pictures: int

    def check(self, combinations: Sequence[str], attacks: Sequence[Attack]) -> None:
        """Check the case: run each combination on two images."""
        case, count = self.case, len(self.case.attacked_examples)
        if not any(a.fits(NONE) for a in attacks):
            raise AuditError(
                "attacks must contain one that applies to an undefended victim, the upper bound, "
                f"got {', '.join(a.name for a in attacks) or 'none'}",
                hint="add least squares or decoder",
            )
        if len(case.own) < MIN_IMAGES:
            raise AuditError(
                f"the attacker must have >= {MIN_IMAGES} images, got {len(case.own)}",
                hint="pass more data, or a larger share of it to the attacker",
            )
        if count < 2:
            raise AuditError(
                f"the number of attacked images must be >= 2, got {count}: a single image is "
                "always nearest to itself",
                hint="pass more data",
            )
        shuffling = next(filter(has_batch_shuffle, combinations), None)
        if shuffling is not None and case.run.batch_size < 2:
            raise AuditError(
                f'the batch size must be >= 2 for "{shuffling}", which shuffles tokens between '
                f"samples, got {case.run.batch_size}",
                hint=Hint("set batch_size to 2 or more", cli="set --batch-size to 2 or more"),
            )
        images = case.test.batch(np.arange(2))[0]["pixel_values"]
        patch_size(case.model, images)
        for combination in combinations:
            pair = make_split_pair(self.copy_model(combination), combination)
            pair.record_features(images, 2, "check")

    def copy_model(self, combination: str) -> torch.nn.Module:
        """Return a copy of the model."""
        return copy.deepcopy(self.case.model)

    def collect_views(self, pair: Pair) -> Views:
        """Return the views of the attackers of a trained victim."""
        case = self.case
        own, images = (pixel_values(part) for part in (case.own, case.attacked_examples))
        return collect_views(pair, own, images, case.batch, case.run.seed)

    def attack(self, attack: Attack, views: Views, combination: str, within: Progress) -> Measured:
        """Run an attack, and score its images."""
        case = self.case
        device = next(case.model.parameters()).device
        setting = Setting(combination, self.budget, case.batch, case.run.seed, within, device)
        tried = attempt(attack, views, setting)
        if tried is None or tried.output is None:
            return Measured()
        images = to_pixels(case, case.attacked_examples)
        guesses = denormalize(tried.output, case.mean, case.std)
        guesses = guesses if attack.is_ordered else best_assignment(guesses, images)
        return Measured(
            AttackScores(
                attack.name,
                score_images(guesses, images, self.lpips),
                tried.facts["losses"],
                tried.facts["floor"],
                tried.seconds,
                guesses[: self.pictures].clamp(0, 1),
            )
        )

    def report(self, rows: Sequence[Row], attacks: Sequence[Attack]) -> Results:
        """Return the results, with the baselines of the measurements."""
        case = self.case
        own, images = (to_pixels(case, part) for part in (case.own, case.attacked_examples))
        patch = patch_size(case.model, images)
        floors = score_baselines(own, images, patch, self.lpips, case.run.seed)
        measured = Case(case.name, tuple(rows), floors, shown=images[: self.pictures])
        tried = {name for row in rows for name in row.by_attack}
        unchecked = [
            f"{a.title}: {type(case.model).__name__} has no patch embedding with a position table"
            for a in attacks
            if a.name not in tried and any(a.fits(row.combination) for row in rows)
        ]
        if self.lpips is None:
            unchecked.append("LPIPS and F-SIM: the weights of AlexNet were not given (--lpips)")
        elif not any("LPIPS" in s.scores for s in rows[0].by_attack.values()):
            unchecked.append("LPIPS and F-SIM: images under 32 x 32 are too small for AlexNet")
        return report.build_results(report.TITLE, [measured], attacks, unchecked)
