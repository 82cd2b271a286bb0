"""Attacks on labels by the gradients that a split-learning client sends.

Labels and head stay with the client. The gradient of a sample's loss with respect to its output is
J W^T (p - y). p - y has one sign at the true class and the other everywhere else, whatever the head
is. All attacks use sums over a sample's tokens (`sample_grads`), so that shuffled rows do not
matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from regauge.attacks.views import SentGradients, ServerPass
from regauge.core.assignment import best_assignment
from regauge.errors import need

Tensor = torch.Tensor
NEGLIGIBLE = 1e-12  # relative to the largest gradient: smaller ones carry no information


def sample_grads(passes: Sequence[ServerPass]) -> Tensor:
    """Return one row per sample of these passes: the gradient summed over the sample's tokens, in
    any order.
    """
    grads = [view.grad.detach().double() for view in passes if view.grad is not None]
    return (
        torch.cat([grad.flatten(1, -2).sum(1) for grad in grads])
        if grads
        else torch.zeros(0, 0, dtype=torch.float64)
    )


def count_classes(view: SentGradients, *, max_classes: int = 64) -> int:
    """Count the classes.

    Sees: gradients of the output.
    Recovers: the number of classes.
    Why it works: p - y sums to zero over the classes, so that gradients of C classes lie near a
        space of dimension C - 1, and the singular values have a gap there.
    What stops it: noise on the gradients; several labels per sample (it counts them plus one).
    Floor: 2.
    Ceiling: exact.
    References: SDAR (2310.10483).
    Cost: one SVD.
    """
    x = _directions(view.grads)
    sizes = torch.linalg.svdvals(x)[
        : min(max_classes, min(x.shape) // 2) + 1
    ]  # a final norm removes directions, which adds gaps at the end
    if len(sizes) < 2:
        return 2
    return int((sizes[:-1] / sizes[1:].clamp(min=1e-9 * float(sizes[0]))).argmax()) + 2


def cluster_labels(
    view: SentGradients, classes: int, *, tries: int = 16, rounds: int = 50, seed: int = 0
) -> Tensor:
    """Assign a class to each sample: up to renaming, or by name where some labels are known.

    Sees: gradients of the output, and a few labels if there are any (`view.known_labels`).
    Recovers: labels.
    Why it works: gradients of one class have similar directions, and differ from those of other
        classes, most clearly in the first steps of training.
    What stops it: strong noise on the gradients (`private`); a pretrained head without errors,
        whose gradients are almost zero.
    Floor: the share of the most frequent class.
    Ceiling: all.
    References: Li et al. 2022 (label leakage and protection); SDAR (2310.10483: over 98 % in this
        setting).
    Cost: k-means.
    """
    x = _directions(view.grads)
    generator = torch.Generator().manual_seed(seed)
    best_score, labels = -float("inf"), torch.zeros(len(x), dtype=torch.long)
    for _ in range(tries):
        centres = _initial_centres(x, classes, generator)
        for _ in range(rounds):
            nearest = (x @ centres.T).argmax(1)
            sums = torch.zeros_like(centres).index_add_(0, nearest, x)
            is_empty = sums.norm(dim=1) == 0
            updated = torch.where(
                is_empty[:, None], centres, torch.nn.functional.normalize(sums, dim=1)
            )
            if torch.equal(updated, centres):
                break
            centres = updated
        similarity = x @ centres.T
        score = float(similarity.max(1).values.sum())
        if score > best_score:
            best_score, labels = score, similarity.argmax(1)
    return _name_clusters(labels, view.known_labels, classes) if view.known_labels else labels


def norm_attack(view: SentGradients) -> Tensor:
    """Score each sample of a two-class task for the rarer class by the norm of its gradient.

    Sees: gradients of the output.
    Recovers: labels, as a score.
    Why it works: the model underestimates the rarer class, so that its samples have long gradients.
    What stops it: balanced classes; clipped gradients.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: Li et al. 2022 (norm attack).
    Cost: negligible.
    """
    norms: Tensor = torch.linalg.vector_norm(view.grads.double(), dim=1)
    return norms


def direction_attack(view: SentGradients) -> Tensor:
    """Score each sample of a two-class task by the direction of its gradient: positive for the
    rarer class.

    Sees: gradients of the output.
    Recovers: labels, as a score.
    Why it works: with two classes a gradient is (p - y) times one vector, so the classes have
        opposite directions, balanced or not; the rarer class has the longer gradients.
    What stops it: noise on the gradients.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: Li et al. 2022 (direction attack).
    Cost: one SVD.
    """
    x = view.grads.double()
    projection: Tensor = (
        _directions(x) @ torch.linalg.svd(_directions(x), full_matrices=False).Vh[0]
    )
    norms, is_positive = torch.linalg.vector_norm(x, dim=1), projection > 0
    if (
        bool(is_positive.any())
        and bool((~is_positive).any())
        and float(norms[is_positive].mean()) < float(norms[~is_positive].mean())
    ):
        projection = -projection
    return projection


def multilabel_attack(
    view: SentGradients, labels: int, *, ridge: float = 1e-2, seed: int = 0
) -> Tensor:
    """Score the labels of samples with several labels each, [samples, labels]: positive where a
    label is set.

    Sees: gradients of the output, and all labels of some samples (`view.known_label_sets`).
    Recovers: every label of the other samples; without known ones, labels up to their order and
        negation.
    Why it works: the gradient is a sum over labels of (p - y) times the head's row. Known labels
        invert it by least squares; otherwise, p - y is bimodal, far from Gaussian, and independent
        component analysis separates it.
    What stops it: noise on the gradients; more labels than channels; without known ones, correlated
        labels.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: Hyvarinen and Oja 2000 (independent components); Li et al. 2022.
    Cost: one least squares, or one FastICA (scikit-learn).
    """
    x = view.grads.double()
    x = x / x.square().mean().sqrt().clamp(min=1e-300)
    if view.known_label_sets:
        rows = torch.tensor(sorted(view.known_label_sets))
        y = torch.stack([torch.as_tensor(view.known_label_sets[int(i)]).double() for i in rows])
        mean, threshold = x[rows].mean(0), y.mean(0)
        a = x[rows] - mean
        # The dual form: as many equations as known samples.
        gram = a @ a.T
        penalty = ridge * float(gram.diagonal().mean()) + 1e-12
        weight = a.T @ torch.linalg.solve(
            gram + penalty * torch.eye(len(a), dtype=a.dtype), y - threshold
        )
        score: Tensor = (x - mean) @ weight + threshold - 0.5
        return score
    need("sklearn", "audit")
    from sklearn.decomposition import FastICA

    components = FastICA(
        labels, whiten="unit-variance", random_state=seed, max_iter=1000, tol=1e-3
    ).fit_transform(x.numpy())
    threshold = torch.from_numpy(np.asarray([_midpoint(column) for column in components.T]))
    return torch.from_numpy(components) - threshold


def _directions(grads: Tensor) -> Tensor:
    """Normalize rows to unit length; rows without information become zero."""
    x = grads.double()
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return torch.where(
        norms > NEGLIGIBLE * norms.max().clamp(min=1e-300),
        x / norms.clamp(min=1e-300),
        torch.zeros_like(x),
    )


def _initial_centres(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose distant rows as initial centres (k-means++)."""
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    for _ in range(count - 1):
        distances = (1 - (x @ x[chosen].T).max(1).values).clamp(min=0).square() + 1e-12
        chosen.append(int(torch.multinomial(distances, 1, generator=generator)))
    return x[chosen].clone()


def _name_clusters(clusters: Tensor, known: Mapping[int, int], classes: int) -> Tensor:
    """Name the clusters so that they agree best with the known labels."""
    counts = np.zeros((classes, classes))
    for row, label in known.items():
        counts[int(clusters[row]), label] += 1
    names = torch.from_numpy(best_assignment(-counts))
    return names[clusters]


def _midpoint(values: np.ndarray) -> float:
    """Return the midpoint between two clusters of numbers (2-means in one dimension)."""
    low, high = float(np.min(values)), float(np.max(values))
    for _ in range(50):
        below = values <= (low + high) / 2
        if below.all():
            break
        low, high = float(values[below].mean()), float(values[~below].mean())
    return (low + high) / 2
