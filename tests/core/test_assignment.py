"""The best assignment, and its relaxation."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from regauge.core import fit
from regauge.core.assignment import best_assignment, sinkhorn
from regauge.core.groups import Scaling
from regauge.core.members import Monomial


def test_the_best_assignment_is_that_of_all_permutations() -> None:
    cost = np.random.default_rng(0).random((5, 5))
    totals = {order: cost[range(5), order].sum() for order in permutations(range(5))}
    best = best_assignment(cost)
    assert tuple(best) == min(totals, key=lambda order: totals[order])
    assert (best_assignment(torch.from_numpy(cost)) == best).all()
    assert len(set(best_assignment(cost[:3]))) == 3  # fewer rows than columns
    assert tuple(best) != tuple(cost.argmin(1)), "the control: each row's own minimum"


def test_sinkhorn_gives_a_doubly_stochastic_matrix_that_rounds_to_the_assignment() -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = sinkhorn(scores, rounds=200)
    assert torch.allclose(matrix.sum(0), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(matrix.sum(1), torch.ones(6, dtype=torch.float64))
    sharp = sinkhorn(50 * scores, rounds=500)
    assert (best_assignment(-sharp) == best_assignment(-scores)).all()
    assert not torch.allclose(scores.exp().sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["copies", "near duplicates", "strangers"])
def test_assignments_in_single_precision_are_those_in_double(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near copies are certain in float32, near duplicates need float64. Strangers lose less than
    the rounding of their cosines.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 600, 40))
    order = rng.permutation(600)
    if kind == "near duplicates":
        x[0, 1] = x[0, 0] * (1 + 3e-5 * rng.standard_normal(40))
    noise = {"copies": 0.3, "near duplicates": 1e-6, "strangers": 30.0}[kind]
    y = x[:, order] + noise * rng.standard_normal(x.shape)
    y, x = y.astype(np.float32), x.astype(np.float32)
    used: list[object] = []
    cosines = fit._cosines

    def spy(pair: fit.Pair, dtype: type, rows: slice) -> np.ndarray:
        used.append(dtype)
        return cosines(pair, dtype, rows)

    monkeypatch.setattr(fit, "_cosines", spy)
    single = Scaling(positive=False).fit(plain=(y, x), dual=(y, x))
    assert (np.float64 in used) == (kind == "near duplicates")
    monkeypatch.setattr(fit, "SINGLE_PRECISION_SIZE", 10**9)
    double = Scaling(positive=False).fit(plain=(y, x), dual=(y, x))
    assert isinstance(single, Monomial)
    assert isinstance(double, Monomial)
    assert (single.index == order).all() == (kind != "strangers")
    if kind != "strangers":
        assert (single.index == double.index).all()
    scores = cosines((y, x), np.float64, slice(None)) ** 2
    mean, best = (
        np.take_along_axis(scores, m.index[:, :, None], 2).mean() for m in (single, double)
    )
    assert best - 1e-3 <= mean <= best + 1e-12


def test_strangers_in_double_precision_are_assigned_in_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y, x = np.random.default_rng(0).standard_normal((2, 1, 600, 40))
    single = Scaling(positive=False).fit(plain=(y, x), dual=(y, x))
    monkeypatch.setattr(fit, "SINGLE_PRECISION_SIZE", 10**9)
    double = Scaling(positive=False).fit(plain=(y, x), dual=(y, x))
    assert isinstance(single, Monomial)
    assert isinstance(double, Monomial)
    assert (single.index == double.index).all()


@pytest.mark.parametrize("positive", [True, False])
def test_cosines_in_blocks_are_those_of_one_product(
    positive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    y, x = rng.standard_normal((2, 2, 30, 17))
    y[0, 3] = 0
    units = [v / np.maximum(np.linalg.norm(v, axis=2, keepdims=True), 1e-300) for v in (y, x)]
    cosines = units[0] @ units[1].swapaxes(1, 2)
    wanted = 2 * cosines if positive else cosines**2
    monkeypatch.setattr(fit, "_ROWS", 7)
    monkeypatch.setattr(fit, "_FEATURES", 5)
    for rows in (slice(None), slice(0, None, 4)):
        scores = fit._cosine_scores((y, x), (y, x), None, positive, np.float64, rows)
        assert np.allclose(scores, wanted[:, rows], rtol=0, atol=1e-12)
        assert not np.allclose(scores, wanted[:, rows, ::-1]), (
            "the control: rows of x in another order"
        )


@pytest.mark.parametrize("scale", [1.0, 1e-23, 1e-30, 1e25])
def test_neurons_whose_squares_leave_single_precision_are_assigned_in_double(scale: float) -> None:
    """Weight decay leaves such neurons: in float32 they look like zeros."""
    x, y = np.eye(512), np.eye(512)
    y[0] = 0
    y[0, :2] = 0.8, 0.6
    y[1] = -0.03
    y[1, :2] = -0.02, -0.1
    x[0] *= scale
    found = Scaling(positive=True).fit(plain=(y[None], x[None]))
    assert isinstance(found, Monomial)
    assert (found.index == np.arange(512)).all()
