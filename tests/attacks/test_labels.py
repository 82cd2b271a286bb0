"""Labels from the gradients that a client sends, against the truth: through heads as models have
them, and from gradients that say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from regauge.attacks.labels import (
    cluster_labels,
    count_classes,
    direction_attack,
    multilabel_attack,
    norm_attack,
    sample_grads,
)
from regauge.attacks.views import SentGradients, ServerPass

TOKENS, WIDTH = 9, 48


class Task:
    """Outputs of a backbone, labels, and a head of final norm and one linear layer that reads the
    first token or the mean of all.
    """

    def __init__(
        self,
        count: int,
        classes: int,
        *,
        pooled: bool = False,
        rare: float | None = None,
        many: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(3)
        if many:
            self.labels = (torch.rand(count, many, generator=draw) < 0.4).long()
            centre = self.labels.double() @ torch.randn(
                many, WIDTH, generator=draw, dtype=torch.float64
            )
        else:
            chances = torch.ones(classes) if rare is None else torch.tensor([1 - rare, rare])
            self.labels = torch.multinomial(chances, count, replacement=True, generator=draw)
            centre = torch.randn(classes, WIDTH, generator=draw, dtype=torch.float64)[self.labels]
        self.outputs = (
            0.3 * centre[:, None]
            + torch.randn(count, TOKENS, WIDTH, generator=draw, dtype=torch.float64)
        ).requires_grad_()
        torch.manual_seed(4)
        self.norm = torch.nn.LayerNorm(WIDTH).double()
        self.head = torch.nn.Linear(WIDTH, many or classes).double()
        self.pooled, self.many = pooled, many
        self.order = torch.stack([torch.randperm(TOKENS, generator=draw) for _ in range(count)])

    def loss(self) -> torch.Tensor:
        read = self.norm(self.outputs)
        logits = self.head(read.mean(1) if self.pooled else read[:, 0])
        if self.many:
            return torch.nn.functional.binary_cross_entropy_with_logits(
                logits, self.labels.double()
            )
        return torch.nn.functional.cross_entropy(logits, self.labels)

    def learned(self, steps: int, rate: float = 0.5) -> Task:
        chosen = [*self.norm.parameters(), *self.head.parameters()]
        for _ in range(steps):
            for p, g in zip(chosen, torch.autograd.grad(self.loss(), chosen), strict=True):
                p.data -= rate * g
        return self

    def served(self) -> ServerPass:
        """What the server sees: rows shuffled, sample by sample."""
        (grad,) = torch.autograd.grad(self.loss(), [self.outputs])
        index = self.order[..., None].expand_as(grad)
        return ServerPass(self.outputs.detach().gather(1, index), {}, grad.gather(1, index))

    def view(self, known: int = 0) -> SentGradients:
        grads = sample_grads([self.served()])
        if self.many:
            return SentGradients(
                grads, known_label_sets={i: self.labels[i].tolist() for i in range(known)}
            )
        return SentGradients(grads, {i: int(self.labels[i]) for i in range(known)})


def right(found: torch.Tensor, true: torch.Tensor, classes: int) -> float:
    """The share that is right under the best names for clusters."""
    counts = (
        torch.zeros(classes, classes)
        .index_put_((found, true), torch.ones(len(true)), accumulate=True)
        .numpy()
    )
    return float(counts[linear_sum_assignment(-counts)].sum() / len(true))


def auc(score: torch.Tensor, true: torch.Tensor) -> float:
    pos, neg = score[true == 1], score[true == 0]
    return float((pos[:, None] > neg[None]).double().mean())


def noise(of: SentGradients, known: Mapping[int, int] | None = None) -> SentGradients:
    return SentGradients(
        torch.randn(of.grads.shape, generator=torch.Generator().manual_seed(0)).double(),
        known or {},
    )


@pytest.mark.parametrize("pooled", [False, True], ids=["first token", "mean"])
@pytest.mark.parametrize("classes", [2, 5])
def test_gradients_of_a_class_point_one_way(classes: int, pooled: bool) -> None:
    task = Task(300, classes, pooled=pooled)
    view = task.view()
    assert count_classes(view) == classes
    assert right(cluster_labels(view, classes), task.labels, classes) > 0.97
    assert right(cluster_labels(noise(view), classes), task.labels, classes) < 1 / classes + 0.12


def test_a_few_known_labels_name_the_clusters() -> None:
    task = Task(300, 5)
    view = task.view(known=12)
    assert float((cluster_labels(view, 5) == task.labels).double()[12:].mean()) > 0.97
    assert (
        float(
            (cluster_labels(noise(view, view.known_labels), 5) == task.labels).double()[12:].mean()
        )
        < 0.35
    )


def test_a_rare_class_has_long_gradients_and_points_elsewhere() -> None:
    task = Task(600, 2, rare=0.1).learned(30)
    view = task.view()
    assert auc(norm_attack(view), task.labels) > 0.9
    assert auc(direction_attack(view), task.labels) > 0.99
    for attack in (norm_attack, direction_attack):
        assert abs(auc(attack(noise(view)), task.labels) - 0.5) < 0.12
    balanced = Task(600, 2).learned(5)  # equally long, and still in opposite ways
    assert abs(auc(norm_attack(balanced.view()), balanced.labels) - 0.5) < 0.2
    score = auc(direction_attack(balanced.view()), balanced.labels)
    assert max(score, 1 - score) > 0.99


def test_several_labels_at_once() -> None:
    task = Task(1200, 0, many=4)
    known = multilabel_attack(task.view(known=60), 4)
    assert float(((known > 0) == task.labels.bool()).double()[60:].mean()) > 0.97
    alone = multilabel_attack(task.view(), 4)
    match = torch.tensor(
        [[auc(alone[:, j], task.labels[:, k]) for k in range(4)] for j in range(4)]
    )
    sure = torch.maximum(match, 1 - match).numpy()
    assert float(sure[linear_sum_assignment(-sure)].mean()) > 0.95, (
        "up to their order, and to yes and no"
    )
    blind = multilabel_attack(
        SentGradients(noise(task.view()).grads, known_label_sets=task.view(60).known_label_sets), 4
    )
    assert abs(float(((blind > 0) == task.labels.bool()).double()[60:].mean()) - 0.55) < 0.1


def test_passes_without_a_gradient_tell_nothing() -> None:
    assert sample_grads([ServerPass(torch.zeros(2, 3, 4), {})]).numel() == 0
