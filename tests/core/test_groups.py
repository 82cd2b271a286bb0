"""The groups: laws of the six verbs, refusals, distributions, and fits that find what was
planted.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment

from regauge.core.fit import PRECONDITION_SIZE, assign
from regauge.core.groups import (
    GROUPS,
    KINDS,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Rotary,
    Scaling,
)
from regauge.core.members import MAX_STRETCH, Dense, Member, Monomial, Planes
from regauge.core.rng import Stream, seed_key
from regauge.core.uniform import haar

N, K = 6, 3
EACH = pytest.mark.parametrize("group", GROUPS.values(), ids=str)


def draw(group: Group, label: str, n: int = N, k: int = K) -> Member:
    return group.sample(n, k, Stream(seed_key(0), label))


def close(a: Member, b: Member, tol: float = 1e-12) -> bool:
    return bool(np.abs(a.matrix() - b.matrix()).max() < tol)


@EACH
def test_group_laws(group: Group) -> None:
    a, b, c = draw(group, "a"), draw(group, "b"), draw(group, "c")
    one = group.identity(N, K)
    np.testing.assert_allclose(one.matrix(), np.broadcast_to(np.eye(N), (K, N, N)))
    assert close(group.compose(a, group.inverse(a)), one)
    assert close(group.compose(group.inverse(a), a), one)
    assert close(group.compose(a, one), a)
    assert close(group.compose(one, a), a)
    assert close(group.compose(group.compose(a, b), c), group.compose(a, group.compose(b, c)))
    np.testing.assert_allclose(group.compose(a, b).matrix(), a.matrix() @ b.matrix(), atol=1e-12)
    np.testing.assert_allclose(group.inverse(a).matrix(), np.linalg.inv(a.matrix()), atol=1e-12)
    np.testing.assert_allclose(
        a.dual().matrix(), np.linalg.inv(a.matrix()).swapaxes(1, 2), atol=1e-12
    )
    assert group.name == "trivial" or not close(a, b)


@EACH
def test_members_are_in_their_group_and_in_no_smaller_one(group: Group) -> None:
    a, b = draw(group, "a"), draw(group, "b")
    for member in (
        a,
        group.identity(N, K),
        group.inverse(a),
        group.compose(a, b),
        Dense(a.matrix()),
    ):
        assert group.fault(member) is None
    for other in GROUPS.values():
        if other.fault(a) is None and other != group:
            # a larger group: its dimension and its count are at least as large
            assert other.dim(N) >= group.dim(N)
    for kind in KINDS:
        sub = group.within(kind)
        assert group.fault(draw(sub, "sub")) is None
        if kind != "full":
            assert sub.is_orthogonal


def test_within_gives_the_named_kind() -> None:
    for group in GROUPS.values():
        assert group.within("full") == group
        perm = draw(group.within("permutation"), "p")
        assert isinstance(perm, Monomial)
        assert perm.scale is None
        signed = draw(group.within("signed"), "s")
        assert set(np.round(np.abs(signed.matrix()), 12).reshape(-1)) == {0.0, 1.0}


@EACH
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_act_is_the_matrix_product(group: Group, dim: int) -> None:
    member = draw(group, "a")
    x = torch.randn(K * N, K * N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dual in (False, True):
        blocks = (member.dual() if dual else member).matrix()
        full = torch.block_diag(*(torch.from_numpy(b.copy()) for b in blocks))
        expected = full @ x if dim == 0 else x @ full.T
        torch.testing.assert_close(
            group.act(member, x, dim, dual=dual), expected, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        ("permutation", "signed"),
        ("permutation", "orthogonal"),
        ("signed", "monomial"),
        ("signed", "orthogonal"),
        ("monomial+", "monomial"),
        ("monomial", "orthogonal"),
        ("orthogonal", "linear"),
        ("orthogonal", "monomial+"),
        ("orthogonal-ones", "orthogonal"),
        ("orthogonal-ones", "signed"),
        ("rotary-half", "rotary-interleaved"),
        ("rotary-interleaved", "orthogonal"),
        ("rotary-half", "permutation"),
        ("turns-half", "rotary-half"),
        ("signs-half", "turns-half"),
        ("trivial", "permutation"),
        ("trivial", "signs-half"),
    ],
)
def test_strangers_are_refused(group: str, wrong: str) -> None:
    assert GROUPS[group].fault(draw(GROUPS[wrong], "w"))


def test_broken_members_are_refused() -> None:
    assert GROUPS["permutation"].fault(Monomial(np.array([[0, 0, 1]])))
    assert GROUPS["monomial"].fault(Monomial(np.array([[0, 1]]), np.array([[1.0, 0.0]])))
    assert GROUPS["monomial"].fault(Monomial(np.array([[0, 1]]), np.array([[1.0, np.nan]])))
    assert GROUPS["linear"].fault(Dense(np.zeros((1, 2, 2))))
    assert GROUPS["linear"].fault(Dense(np.full((1, 2, 2), np.nan)))
    assert GROUPS["rotary-half"].fault(Planes(np.array([[0j]]), "half"))


@pytest.mark.parametrize("name", ["monomial", "monomial+", "rotary-half", "linear"])
@pytest.mark.parametrize(
    ("low", "high", "allowed"),
    [
        (1.0, 1e3, True),
        (1e-3, 1.0, True),
        (0.1, 99.0, True),
        (900.0, 901.0, True),
        (0.1, 101.0, False),
        (1e-60, 1e-59, False),
        (2000.0, 2001.0, False),
    ],
)
def test_members_stretch_within_the_limit(
    name: str, low: float, high: float, allowed: bool
) -> None:
    """Condition numbers and scales are bounded by the same number, and the worst matrix of the
    stack is the one that counts.
    """
    factors, index = np.array([[1.0, 1.0], [high, low]]), np.tile(np.arange(2), (2, 1))
    member = {
        "monomial": Monomial(index, -factors),
        "monomial+": Monomial(index, factors),
        "rotary-half": Planes(factors * 1j, "half"),
        "linear": Dense(factors[:, None, :] * haar(2, Stream(seed_key(9), "limit"))),
    }[name]
    refused = (
        f"stretches by factors from {low:.3g} to {high:.3g}, which with 1 must lie within "
        f"a ratio of {MAX_STRETCH:g}"
    )
    assert GROUPS[name].fault(member) == (None if allowed else refused)


@EACH
@pytest.mark.parametrize("sides", ["plain", "dual", "both"])
@pytest.mark.parametrize("case", ["one far coordinate", "all far", "rank one"])
def test_fit_stays_within_the_limit(group: Group, sides: str, case: str) -> None:
    rng = np.random.default_rng(7)
    x, xd = rng.normal(size=(2, K, N, 40))
    factors = np.ones(N)
    factors[: 1 if case == "one far coordinate" else N] = 1e9
    y, yd = factors[:, None] * x, xd / factors[:, None]
    if case == "rank one":
        y, yd = np.tile(y[:, :1], (1, N, 1)), np.tile(yd[:, :1], (1, N, 1))
    fitted = group.fit(
        plain=(y, x) if sides != "dual" else None, dual=(yd, xd) if sides != "plain" else None
    )
    assert group.fault(fitted) is None


@pytest.mark.parametrize("name", ["monomial", "monomial+", "rotary-half", "linear"])
def test_fit_leaves_alone_what_the_limit_allows(name: str) -> None:
    factors = np.array([900.0, 1, 1, 900, 1, 1])  # the half-split planes are (0, 3), (1, 4), (2, 5)
    x, xd = np.random.default_rng(8).normal(size=(2, 1, N, 40))
    fitted = GROUPS[name].fit(plain=(factors[:, None] * x, x), dual=(xd / factors[:, None], xd))
    np.testing.assert_allclose(fitted.matrix()[0], np.diag(factors), rtol=0, atol=1e-8)


def test_counts() -> None:
    assert GROUPS["permutation"].bits(5) == pytest.approx(math.log2(120))
    assert GROUPS["signed"].bits(5) == pytest.approx(math.log2(120 * 32))
    assert GROUPS["signs-half"].bits(8) == 4
    dims = {name: group.dim(6) for name, group in GROUPS.items()}
    assert dims["orthogonal"] == 15
    assert dims["orthogonal-ones"] == 10
    assert dims["linear"] == 36
    assert dims["rotary-half"] == 6
    assert dims["turns-half"] == 3
    assert dims["monomial"] == dims["monomial+"] == 6
    assert dims["permutation"] == dims["signed"] == dims["signs-half"] == 0


def test_vectors() -> None:
    """Committed vectors (docs/formats-keys.md). Integers are exact; rotations to 1e-12, since QR
    differs between BLAS builds.
    """
    key = bytes(range(32))
    m = haar(3, Stream(key, "test"))
    np.testing.assert_allclose(m, HAAR, rtol=0, atol=1e-12)
    turn = Rotary("half").sample(4, 1, Stream(key, "test"))
    assert isinstance(turn, Planes)
    np.testing.assert_allclose(turn.factor, TURN, rtol=0, atol=1e-12)
    scaled = Scaling(positive=False).sample(4, 1, Stream(key, "test"))
    assert isinstance(scaled, Monomial)
    assert scaled.index.tolist() == INDEX
    np.testing.assert_allclose(scaled.scale, SCALE, rtol=0, atol=1e-12)
    ones = OrthogonalFixingOnes().sample(3, 1, Stream(key, "test")).matrix()
    np.testing.assert_allclose(ones, ONES, rtol=0, atol=1e-12)


HAAR = [
    [-0.5987425619682283, -0.7590062779630186, -0.2557671098879758],
    [0.7883629530813893, -0.6148550245930634, -0.02090820273134409],
    [-0.1413902355062544, -0.21415594492189283, 0.9665123033661274],
]
TURN = [
    [(-0.37295308109391867 - 0.7895359389122196j), (-0.8083091516619797 + 0.27699425067187605j)]
]
INDEX = [[1, 0, 2, 3]]
SCALE = [[0.8544527485857737, 0.7122458683765457, -1.1824142393964185, 1.6935845470123045]]
ONES = [
    [
        [-0.14848919937229887, 0.17522252189322765, 0.9732666774790715],
        [0.17522252189322768, 0.9732666774790715, -0.1484891993722991],
        [0.9732666774790715, -0.1484891993722992, 0.1752225218932273],
    ]
]


def test_haar_moments() -> None:
    """E[M_ij] = 0, E[M_ij^2] = 1/n, E[tr M] = 0, E[(tr M)^2] = 1. QR without the sign fix fails the
    first on the diagonal.
    """
    n, trials = 4, 4000
    stream = Stream(seed_key(4), "haar")
    m = np.stack([haar(n, stream) for _ in range(trials)])
    error = 5 / math.sqrt(trials)
    assert np.abs(m.mean(0)).max() < error
    assert np.abs((m**2).mean(0) - 1 / n).max() < error
    trace = np.einsum("kii->k", m)
    assert abs(trace.mean()) < error
    assert abs((trace**2).mean() - 1) < 3 * error
    signs = (np.linalg.det(m) > 0).mean()
    assert abs(signs - 0.5) < error
    # one entry of a Haar matrix has the law of a coordinate on the sphere: (x + 1) / 2 ~
    # Beta((n-1)/2, (n-1)/2)
    assert (
        stats.kstest((m[:, 0, 0] + 1) / 2, stats.beta((n - 1) / 2, (n - 1) / 2).cdf).pvalue > 1e-4
    )
    assert (
        stats.kstest((m[:, n - 1, 0] + 1) / 2, stats.beta((n - 1) / 2, (n - 1) / 2).cdf).pvalue
        > 1e-4
    )


def test_fixing_ones_is_haar_on_the_complement() -> None:
    n, trials = 4, 3000
    m = OrthogonalFixingOnes().sample(n, trials, Stream(seed_key(5), "ones")).matrix()
    np.testing.assert_allclose(m.sum(2), 1, atol=1e-12)
    assert np.abs(m.mean(0) - 1 / n).max() < 5 / math.sqrt(trials)
    assert abs((np.einsum("kii->k", m) - 1).mean()) < 5 / math.sqrt(trials)


def test_scales_and_turns_have_their_law() -> None:
    turns = Rotary("half").sample(2, 5000, Stream(seed_key(6), "t"))
    assert isinstance(turns, Planes)
    assert stats.kstest(np.angle(turns.factor[:, 0]) / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-4
    logs = np.log(np.abs(turns.factor[:, 0])) / math.log(3) + 0.5
    assert stats.kstest(logs, "uniform").pvalue > 1e-4
    general = GROUPS["linear"].sample(5, 200, Stream(seed_key(7), "g")).matrix()
    assert np.linalg.cond(general).max() <= 3 + 1e-9
    scale = Scaling(positive=False).sample(1, 5000, Stream(seed_key(8), "s"))
    assert isinstance(scale, Monomial)
    assert scale.scale is not None
    assert abs(np.sign(scale.scale).mean()) < 0.08


@EACH
@pytest.mark.parametrize("sides", ["plain", "dual", "both", "all"])
def test_fit_finds_what_was_planted(group: Group, sides: str) -> None:
    rng = np.random.default_rng(0)
    member = draw(group, "planted")
    x, xd, xb = (rng.normal(size=(K, N, 40)) for _ in range(3))
    plain = (member.matrix() @ x, x) if sides != "dual" else None
    dual = (member.dual().matrix() @ xd, xd) if sides != "plain" else None
    bar = None
    if sides == "all" and isinstance(member, Monomial):
        bar = (member.permutation().matrix() @ xb, xb)
    assert close(group.fit(plain=plain, dual=dual, bar=bar), member, 1e-9)


@EACH
def test_fit_from_the_permutation_alone(group: Group) -> None:
    """Only a gate is seen, say: the permutation is found, the rest stays as it is."""
    member = draw(group.within("permutation"), "bar")
    x = np.random.default_rng(3).normal(size=(K, N, 30))
    assert isinstance(member, Monomial)
    assert close(group.fit(bar=(member.matrix() @ x, x)), member)


@EACH
def test_fit_bears_noise_and_beats_the_identity(group: Group) -> None:
    rng = np.random.default_rng(1)
    member = draw(group, "noisy")
    x, xd = (rng.normal(size=(K, N, 60)) for _ in range(2))
    noise = [0.05 * rng.normal(size=(K, N, 60)) for _ in range(2)]
    fitted = group.fit(
        plain=(member.matrix() @ x + noise[0], x), dual=(member.dual().matrix() @ xd + noise[1], xd)
    )
    assert group.fault(fitted) is None
    assert close(fitted, member, 0.1)


def test_fit_is_the_best_rotation() -> None:
    """Against a search: no small rotation away from the fit does better."""
    rng = np.random.default_rng(2)
    y, x = rng.normal(size=(2, 1, N, 8))
    best = Orthogonal().fit(plain=(y, x)).matrix()
    value = np.linalg.norm(best @ x - y)
    for _ in range(50):
        skew = rng.normal(size=(N, N)) * 0.05
        near, _ = np.linalg.qr(np.eye(N) + skew - skew.T)
        assert np.linalg.norm(near @ best @ x - y) >= value - 1e-9


@pytest.mark.parametrize("kind", ["random", "planted", "flat", "tied", "far"])
def test_large_assignments_are_exact(kind: str) -> None:
    """They are prepared (fitting._levelled), which may change who searches how long, and never what
    is found.
    """
    rng = np.random.default_rng(3)
    n = PRECONDITION_SIZE + 40
    a, b = rng.standard_normal((2, n, 64))
    scores = {
        "random": a @ b.T,
        "planted": a @ (a[rng.permutation(n)] + 0.5 * b).T,
        "flat": np.ones((n, n)),
        "tied": np.rint(a @ b.T / 8),
        "far": np.exp(a @ b.T),  # over many orders of magnitude
    }[kind]
    assignment = assign(scores[None])[0]
    assert sorted(assignment) == list(range(n))
    rows, columns = linear_sum_assignment(scores, maximize=True)
    assert scores[np.arange(n), assignment].sum() == pytest.approx(
        scores[rows, columns].sum(), rel=1e-12
    )
