"""Attacks on labels: what the gradients that a client of split learning sends say about them.
Labels and head stay with the client.

The gradient of a sample's loss by its output is J W^T (p - y): what the head reads, times how wrong
it was. p - y has one sign at the true class and the other everywhere else, whatever the head is.
All attacks take sums over a sample's tokens (`slopes_of`), so that shuffled rows do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from regauge.attacks.views import SentSlopes, Served
from regauge.errors import need

Tensor = torch.Tensor
FEW = 1e-12  # a gradient this small, next to the largest, says nothing


def slopes_of(passes: Sequence[Served]) -> Tensor:
    """One row for each sample of these passes: the gradient that was sent, added up over the
    sample's tokens, in whatever order they were.
    """
    found = [view.slope.detach().double() for view in passes if view.slope is not None]
    return (
        torch.cat([s.flatten(1, -2).sum(1) for s in found])
        if found
        else torch.zeros(0, 0, dtype=torch.float64)
    )


def count_classes(view: SentSlopes, *, most: int = 64) -> int:
    """How many classes there are.

    Sees: gradients by the output. Recovers: the number of classes. Why it works: p - y adds up to
    nothing over the classes, so that gradients lie near a space of one dimension less than there
    are classes, and beyond it there is a gap in their singular values. What stops it: noise on the
    gradients; several labels of one sample (it counts them plus one). Floor: 2. Ceiling: exact.
    References: SDAR (2310.10483). Cost: one SVD.
    """
    x = _directions(view.slopes)
    sizes = torch.linalg.svdvals(x)[
        : min(most, min(x.shape) // 2) + 1
    ]  # a final norm leaves directions out, which are gaps of its own at the end
    if len(sizes) < 2:
        return 2
    return int((sizes[:-1] / sizes[1:].clamp(min=1e-9 * float(sizes[0]))).argmax()) + 2


def clustered(
    view: SentSlopes, classes: int, *, tries: int = 16, rounds: int = 50, seed: int = 0
) -> Tensor:
    """A class for each sample: up to their names, or with their names where some labels are known.

    Sees: gradients by the output, and a few labels if there are any (`view.known`). Recovers:
    labels. Why it works: gradients of one class point the same way, those of others away from it,
    best of all in the first steps, when the model knows nothing. What stops it: noise on the
    gradients (`private`), much; a head that was trained elsewhere and is never wrong sends next to
    nothing. Floor: the share of the most frequent class. Ceiling: all. References: Li et al. 2022
    (label leakage and protection); SDAR (2310.10483: over 98 % in this setting). Cost: k-means.
    """
    x = _directions(view.slopes)
    draw = torch.Generator().manual_seed(seed)
    best, found = -float("inf"), torch.zeros(len(x), dtype=torch.long)
    for _ in range(tries):
        centres = _spread(x, classes, draw)
        for _ in range(rounds):
            near = (x @ centres.T).argmax(1)
            added = torch.zeros_like(centres).index_add_(0, near, x)
            empty = added.norm(dim=1) == 0
            after = torch.where(
                empty[:, None], centres, torch.nn.functional.normalize(added, dim=1)
            )
            if torch.equal(after, centres):
                break
            centres = after
        alike = x @ centres.T
        worth = float(alike.max(1).values.sum())
        if worth > best:
            best, found = worth, alike.argmax(1)
    return _named(found, view.known, classes) if view.known else found


def by_norm(view: SentSlopes) -> Tensor:
    """For each sample of a task with two classes, how surely it is of the rarer one.

    Sees: gradients by the output. Recovers: labels, as a score. Why it works: a model that has
    learned how rare a class is, is mostly wrong about its members, and their gradients are long.
    What stops it: balanced classes; clipped gradients. Floor: AUC 0.5. Ceiling: 1. References: Li
    et al. 2022 (norm attack). Cost: none.
    """
    size: Tensor = torch.linalg.vector_norm(view.slopes.double(), dim=1)
    return size


def by_direction(view: SentSlopes) -> Tensor:
    """The same, by the way in which a gradient points: positive for the rarer class.

    Sees: gradients by the output. Recovers: labels, as a score. Why it works: with two classes a
    gradient is (p - y) times one vector, so the two point in opposite ways, balanced or not; which
    is which is told by length, since the rarer class has the longer ones. What stops it: noise on
    the gradients. Floor: AUC 0.5. Ceiling: 1. References: Li et al. 2022 (direction attack). Cost:
    one SVD.
    """
    x = view.slopes.double()
    along: Tensor = _directions(x) @ torch.linalg.svd(_directions(x), full_matrices=False).Vh[0]
    size, up = torch.linalg.vector_norm(x, dim=1), along > 0
    if bool(up.any()) and bool((~up).any()) and float(size[up].mean()) < float(size[~up].mean()):
        along = -along
    return along


def several(view: SentSlopes, labels: int, *, ridge: float = 1e-2, seed: int = 0) -> Tensor:
    """Scores [samples, labels] of samples that have several labels at once: positive where a label
    is there.

    Sees: gradients by the output, and, of some samples, all labels (`view.many`). Recovers: every
    label of the others; without known ones, labels up to their order and to yes and no. Why it
    works: the gradient is a sum over labels of (p - y) times the head's row, which known labels
    undo by least squares; p - y has two heaps, far from a Gaussian, which independent components
    find by themselves. What stops it: noise on the gradients; more labels than channels; without
    known ones, labels that go together. Floor: AUC 0.5. Ceiling: 1. References: Hyvarinen and Oja
    2000 (independent components); Li et al. 2022. Cost: one least squares, or one FastICA
    (scikit-learn).
    """
    x = view.slopes.double()
    x = x / x.square().mean().sqrt().clamp(min=1e-300)
    if view.many:
        rows = torch.tensor(sorted(view.many))
        y = torch.stack([torch.as_tensor(view.many[int(i)]).double() for i in rows])
        mean, middle = x[rows].mean(0), y.mean(0)
        a = x[rows] - mean
        # As many equations as known samples: the dual form, whose size is theirs.
        gram = a @ a.T
        lead = ridge * float(gram.diagonal().mean()) + 1e-12
        weight = a.T @ torch.linalg.solve(
            gram + lead * torch.eye(len(a), dtype=a.dtype), y - middle
        )
        score: Tensor = (x - mean) @ weight + middle - 0.5
        return score
    need("sklearn", "audit")
    from sklearn.decomposition import FastICA

    parts = FastICA(
        labels, whiten="unit-variance", random_state=seed, max_iter=1000, tol=1e-3
    ).fit_transform(x.numpy())
    middle = torch.from_numpy(np.asarray([_between(column) for column in parts.T]))
    return torch.from_numpy(parts) - middle


def _directions(slopes: Tensor) -> Tensor:
    """Unit rows; those that say nothing are zero."""
    x = slopes.double()
    size = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return torch.where(
        size > FEW * size.max().clamp(min=1e-300), x / size.clamp(min=1e-300), torch.zeros_like(x)
    )


def _spread(x: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Rows far from each other to begin with (k-means++)."""
    chosen = [int(torch.randint(len(x), (1,), generator=draw))]
    for _ in range(count - 1):
        far = (1 - (x @ x[chosen].T).max(1).values).clamp(min=0).square() + 1e-12
        chosen.append(int(torch.multinomial(far, 1, generator=draw)))
    return x[chosen].clone()


def _named(found: Tensor, known: Mapping[int, int], classes: int) -> Tensor:
    """Clusters with the names that agree best with what is known."""
    counts = np.zeros((classes, classes))
    for row, label in known.items():
        counts[int(found[row]), label] += 1
    names = torch.from_numpy(linear_sum_assignment(-counts)[1])
    return names[found]


def _between(values: np.ndarray) -> float:
    """The middle between two heaps of numbers: 2-means on a line."""
    low, high = float(np.min(values)), float(np.max(values))
    for _ in range(50):
        below = values <= (low + high) / 2
        if below.all():
            break
        low, high = float(values[below].mean()), float(values[~below].mean())
    return (low + high) / 2
