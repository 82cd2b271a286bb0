"""The audit of split learning: train, record and attack a victim for each combination of defences.

A `Medium` is what images and texts do not share: how a victim is recorded and how attacks on it are
run and scored. `image_audit` and `text_audit` have one each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from regauge.attacks.labels import cluster_labels, multilabel_attack, sample_grads
from regauge.attacks.views import SentGradients, ServerPass
from regauge.audit.engine import (
    Attack,
    Measured,
    Steps,
    apply_verdicts,
    attack_row,
    with_undefended,
)
from regauge.audit.scores import Row
from regauge.audit.split_audit.victims import Pair, drop_singleton_batch, make_split_pair
from regauge.checkpoints.resume import StateStore
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.results.findings import Results
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

Tensor = torch.Tensor
LABEL_STEPS, KNOWN_PER_CLASS = 20, 3  # recorded steps of the label attack; labels that it knows


@dataclass(frozen=True, eq=False)
class SplitCase:
    """A model and its data.

    Attributes:
        model: The model before training.
        train: The examples of the client.
        own: The examples of the attacker, from the same distribution.
        test: Held-out examples for the accuracy; the first `attacked` of them are attacked.
        mean: Channel means of the normalization; empty for texts.
        std: Channel deviations of the normalization; empty for texts.
        training: The optimizer of both sides.
        run: The number of steps, the batch size and the seed.
        attacked: The number of attacked examples.
        name: The name in tables and findings.
    """

    model: torch.nn.Module
    train: Examples
    own: Examples
    test: Examples
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    training: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: Run = field(default_factory=lambda: Run(200, 32))
    attacked: int = 64
    name: str = "split"

    @property
    def batch(self) -> int:
        """The batch size of predictions; a single sample cannot be shuffled."""
        return max(2, self.run.batch_size)

    @property
    def attacked_examples(self) -> Examples:
        """The attacked examples."""
        return self.test.only(np.arange(min(self.attacked, len(self.test))))


class Medium(Protocol):
    """What images and texts do not share."""

    def check(self, combinations: Sequence[str], attacks: Sequence[Attack]) -> None:
        """Check the case before anything is trained.

        Raises:
            AuditError: The case cannot be audited.
        """

    def copy_model(self, combination: str) -> torch.nn.Module:
        """Return a copy of the model for a client with these defences."""

    def collect_views(self, pair: Pair) -> Any:
        """Return the views of the attackers of a trained victim."""

    def attack(self, attack: Attack, views: Any, combination: str, within: Progress) -> Measured:
        """Run and score one attack."""

    def report(self, rows: Sequence[Row], attacks: Sequence[Attack]) -> Results:
        """Return the results, with the baselines of the measurements."""


def audit(
    case: SplitCase,
    medium: Medium,
    combinations: Sequence[str],
    attacks: Sequence[Attack],
    fail_above: float | None = None,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Measure utility and leakage of each combination of defences.

    Args:
        case: The model and its data.
        medium: How its examples are attacked.
        combinations: Combinations of defences; "none", the upper bound, is always added.
        attacks: The attacks to run.
        fail_above: Fail a finding on defended features if its attack gets further than this share
            of the way from baseline to upper bound.
        progress: Progress callback.
        store: The saved steps of an interrupted run.

    Raises:
        AuditError: The case cannot be audited.
    """
    combinations = with_undefended(combinations)
    medium.check(combinations, attacks)
    kinds = [kind for _ in combinations for kind in ("train", *(a.name for a in attacks))]
    steps = Steps(kinds, progress, store)
    rows = [audit_combination(case, medium, c, attacks, steps) for c in combinations]
    steps.finish()
    return apply_verdicts(medium.report(rows, attacks), fail_above)


def audit_combination(
    case: SplitCase, medium: Medium, combination: str, attacks: Sequence[Attack], steps: Steps
) -> Row:
    """Train, evaluate, record and attack a victim under one combination.

    The victim of the attacks is rebuilt from the trained weights, which a store saves.

    Args:
        case: The model and its data.
        medium: How its examples are attacked.
        combination: The defences.
        attacks: The attacks to run.
        steps: The steps of the audit.
    """

    def train(within: Progress) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        model = medium.copy_model(combination)
        pair = make_split_pair(model, combination, case.training, seed=case.run.seed)
        passes = pair.train(
            case.train,
            case.run,
            lambda step, loss: within(step, case.run.steps, "steps"),
            record_first=min(case.run.steps, LABEL_STEPS),
        )
        accuracy = pair.measure(case.test, case.batch)["accuracy"]
        is_classifier = not (case.train.causal or case.train.tokens or case.train.dense)
        leak = measure_label_leak(passes, case.train, case.run) if is_classifier else None
        return {"accuracy": accuracy, "labels": leak}, pair.state()

    trained = steps.run(f"{combination}/train", f"{combination}: train through the split", train)

    @cache
    def views() -> Any:
        model = medium.copy_model(combination)
        model.load_state_dict(dict(trained.tensors))
        return medium.collect_views(make_split_pair(model, combination, seed=case.run.seed))

    row = attack_row(
        steps,
        combination,
        combination,
        attacks,
        lambda attack, within: medium.attack(attack, views(), combination, within),
    )
    accuracy, leak = trained.values["accuracy"], trained.values["labels"]
    chance = chance_accuracy(case.test) if case.train.classifies else 0.0
    shares = {} if leak is None else {"labels": [leak[0]]}
    counts = {} if leak is None else {"labels": leak[1]}
    return replace(
        row,
        accuracy=accuracy,
        chance=chance,
        accuracies=(accuracy,),
        shares=shares,
        guesses={"labels": chance},
        counts=counts,
    )


def measure_label_leak(
    passes: Sequence[ServerPass], examples: Examples, run: Run
) -> tuple[float, int] | None:
    """Return the share of labels that the gradients of the first steps reveal, and their number.

    The server knows `KNOWN_PER_CLASS` labels of each class; with multi-label examples, the labels
    of a tenth of them. None if no gradient was recorded.
    """
    examples = drop_singleton_batch(examples, run.batch_size)
    grads = sample_grads(passes)
    if not len(grads):
        return None
    truth = torch.cat(
        [examples.batch(run.batch_indices(examples, n))[1] for n in range(len(passes))]
    )
    if examples.multi_label:
        known = max(2, len(truth) // 10)
        scores = multilabel_attack(
            SentGradients(
                grads, known_label_sets={i: truth[i].int().tolist() for i in range(known)}
            ),
            examples.classes,
        )
        hits = ((scores[known:] > 0) == (truth[known:] > 0)).double()
    else:
        known_labels = {
            int(i): int(c)
            for c in range(examples.classes)
            for i in (truth == c).nonzero()[:KNOWN_PER_CLASS, 0]
        }
        is_unknown = torch.tensor([i not in known_labels for i in range(len(truth))])
        with torch.random.fork_rng():
            guess = cluster_labels(
                SentGradients(grads, known_labels), examples.classes, seed=run.seed
            )
        hits = (guess == truth)[is_unknown].double()
    return float(hits.mean()), hits.numel()


def chance_accuracy(examples: Examples) -> float:
    """Return the accuracy of the most frequent class; with multi-label examples, of each label."""
    labels = torch.cat(
        [
            examples.batch(rows)[1]
            for rows in np.array_split(np.arange(len(examples)), max(1, len(examples) // 256))
        ]
    )
    if examples.multi_label:
        share = labels.float().mean(0)
        return float(torch.maximum(share, 1 - share).mean())
    return float(torch.bincount(labels).max()) / len(labels)
