"""The methods of merging, each against a plain formula that shares no code with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from regauge.errors import DensityError, MergeError
from regauge.merging import merge_states, merge_tensors, methods
from regauge.merging.methods import METHODS
from regauge.merging.statistics import Gram

BIG = (1 << 17) + 77  # more than one block


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def three(
    *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    base = random_tensor(*shape, seed=1)
    return (
        base.to(dtype),
        (base + 0.1 * random_tensor(*shape, seed=2)).to(dtype),
        (base + 0.1 * random_tensor(*shape, seed=3)).to(dtype),
    )


def same(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert actual.shape == wanted.shape
    scale = wanted.double().abs().max().item()
    assert (actual.double() - wanted.double()).abs().max().item() <= tolerance * scale


def one_unit(actual: torch.Tensor, wanted: torch.Tensor, units: float = 1.0) -> None:
    """Equal up to so many units in the last place of bfloat16, which is the dtype of the found;
    half a unit is what one rounding costs.
    """
    assert actual.dtype == torch.bfloat16
    wanted = wanted.double()
    unit = torch.exp2(wanted.abs().clamp(min=1e-30).log2().floor() - 7)
    assert bool(
        ((actual.double() - wanted).abs() <= units * unit + 1e-6 * wanted.abs().max()).all()
    )


@pytest.mark.parametrize("shape", [(3, 5), (BIG,), (0, 4)])
def test_linear(shape: tuple[int, ...]) -> None:
    a, b, c = three(*shape)
    same(
        merge_tensors("linear", [a, b, c], weight=[1, 0.3, 0.5]), (a + 0.3 * b + 0.5 * c) / 1.8
    ) if a.numel() else None
    merged_tensor = merge_tensors("linear", [a, b, c], weight=[1, 0.3, 0.5], normalize=False)
    assert merged_tensor.shape == a.shape
    if a.numel():
        same(merged_tensor, a + 0.3 * b + 0.5 * c)


def test_linear_rounds_once() -> None:
    a, b, _ = three(BIG, dtype=torch.bfloat16)
    merged_tensor = merge_tensors("linear", [a, b], weight=[0.3, 0.7])
    one_unit(merged_tensor, a.double() * 0.3 + b.double() * 0.7, 0.5)
    with pytest.raises(MergeError, match="must not add up to 0"):
        merge_tensors("linear", [a, b], weight=[1, -1], name="x")


def test_the_precision_of_a_double_is_preserved() -> None:
    a, b = random_tensor(50, seed=1).double(), random_tensor(50, seed=2).double() * math.pi
    assert torch.equal(merge_tensors("linear", [a, b], weight=[0.5, 0.5]), a / 2 + b / 2)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp(t: float) -> None:
    a, b = (
        random_tensor(BIG, seed=1),
        random_tensor(BIG, seed=2) * 3 + 0.2 * random_tensor(BIG, seed=1),
    )
    x, y = a.double(), b.double()
    angle = math.acos(float(x @ y / x.norm() / y.norm()))
    wanted = (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)
    same(merge_tensors("slerp", [b], base=a, t=t), wanted)


def test_slerp_of_what_is_almost_parallel_is_the_line() -> None:
    a, b, _ = three(40, 40)
    b = a + 1e-3 * (b - a)
    same(merge_tensors("slerp", [b], base=a, t=0.25), 0.75 * a + 0.25 * b)
    same(
        merge_tensors("slerp", [-b], base=a, t=0.25), 0.75 * a - 0.25 * b
    )  # and of what is almost opposite


def test_slerp_from_zero() -> None:
    a, b = torch.zeros(30), random_tensor(30, seed=2)
    same(
        merge_tensors("slerp", [b], base=a, t=0.25), math.sin(0.25 * math.pi / 2) * b
    )  # a vector without direction counts as orthogonal


def arc(t: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The point of the arc between two vectors, one vector at a time."""
    angle = math.acos(float(x @ y) / math.sqrt(float(x @ x) * float(y @ y)))
    return (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)


def test_nuslerp() -> None:
    a, b = random_tensor(BIG, seed=1), random_tensor(BIG, seed=2) * 3
    wanted = arc(0.75, a.double().numpy(), b.double().numpy())
    same(merge_tensors("nuslerp", [a, b], weight=[0.5, 1.5]), torch.from_numpy(wanted))
    base, c, d = three(30, 40)
    x, y = (z.double().numpy() - base.double().numpy() for z in (c, d))
    flat = base.double() + torch.from_numpy(arc(0.25, x.ravel(), y.ravel()).reshape(x.shape))
    same(merge_tensors("nuslerp", [c, d], base=base, weight=[3, 1]), flat)
    rows = np.stack([arc(0.25, p, q) for p, q in zip(x, y, strict=True)])
    by_row = merge_tensors("nuslerp", [c, d], base=base, weight=[3, 1], nuslerp_flatten=False)
    same(by_row, base.double() + torch.from_numpy(rows))
    assert (by_row - flat).abs().max() > 1e-3
    columns = np.stack([arc(0.25, p, q) for p, q in zip(x.T, y.T, strict=True)]).T
    options = {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    by_column = merge_tensors("nuslerp", [c, d], base=base, weight=[3, 1], **options)
    same(by_column, base.double() + torch.from_numpy(columns))


def test_nuslerp_of_parallel_and_of_empty_vectors() -> None:
    a, zero = random_tensor(4, 6, seed=1), torch.zeros(4, 6)
    for flatten in (True, False):
        same(merge_tensors("nuslerp", [a, 2 * a], weight=[1, 1], nuslerp_flatten=flatten), 1.5 * a)
        half = merge_tensors("nuslerp", [a, zero], weight=[1, 1], nuslerp_flatten=flatten)
        same(half, math.sin(math.pi / 4) * a)  # a vector without direction counts as orthogonal
    same(merge_tensors("nuslerp", [a, 3 * a], weight=[1, -1]), 2 * a)  # no share: the middle
    with pytest.raises(MergeError, match="takes two models"):
        merge_tensors("nuslerp", [a, a, a])


def test_task_arithmetic() -> None:
    base, a, b = three(40, 50)
    same(
        merge_tensors("task_arithmetic", [a, b], base=base, weight=[0.7, -0.4], lambda_=0.5),
        base + 0.5 * (0.7 * (a - base) - 0.4 * (b - base)),
    )
    same(
        merge_tensors("task_arithmetic", [a, b], base=base, weight=[3, 1], normalize=True),
        base + (3 * (a - base) + (b - base)) / 4,
    )
    x, y, z = three(BIG, dtype=torch.bfloat16)
    one_unit(
        merge_tensors("task_arithmetic", [y, z], base=x, weight=0.5),
        0.5 * (y.double() + z.double()),
    )


def plain_ties(
    base: np.ndarray,
    models: list[np.ndarray],
    weights: list[float],
    density: list[float],
    normalize: bool,
    rescale: bool,
) -> np.ndarray:
    """Trim, elect, merge: by sorting whole tensors, value by value."""
    deltas = []
    for model, d in zip(models, density, strict=True):
        delta = (model - base).ravel()
        order = np.argsort(-np.abs(delta), kind="stable")
        trimmed = np.zeros_like(delta)
        trimmed[order[: int(d * delta.size)]] = delta[order[: int(d * delta.size)]]
        deltas.append(trimmed * (np.abs(delta).sum() / np.abs(trimmed).sum() if rescale else 1))
    out = base.ravel().copy()
    for i in range(out.size):
        votes = [w * d[i] for w, d in zip(weights, deltas, strict=True)]
        sign = 1 if sum(votes) >= 0 else -1
        agreed = [(v, w) for v, w in zip(votes, weights, strict=True) if v * sign > 0]
        total = sum(v for v, _ in agreed)
        share = sum(w for _, w in agreed)
        out[i] += total / (share if normalize and share else 1)
    return out.reshape(base.shape)


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rescale", [True, False])
def test_ties(density: float, normalize: bool, rescale: bool) -> None:
    base, a, b = three(37, 53)
    c = base + 0.3 * random_tensor(37, 53, seed=5)
    wanted = plain_ties(
        base.numpy(),
        [x.numpy() for x in (a, b, c)],
        [1.0, 0.5, -0.7],
        [density, 0.4, 0.6],
        normalize,
        rescale,
    )
    how = {
        "weight": [1.0, 0.5, -0.7],
        "density": [density, 0.4, 0.6],
        "normalize": normalize,
        "rescale": rescale,
    }
    same(merge_tensors("ties", [a, b, c], base=base, **how), torch.from_numpy(wanted), 1e-5)
    assert torch.equal(
        merge_tensors("ties", [a, b, c], base=base, int8_mask=True, **how),
        merge_tensors("ties", [a, b, c], base=base, **how),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ties_keeps_exactly_so_many_and_of_equal_ones_the_first(dtype: torch.dtype) -> None:
    base = torch.zeros(BIG, dtype=dtype)
    a = (random_tensor(BIG, seed=3) * 8).round().to(dtype)  # few different values: ties everywhere
    merged_tensor = merge_tensors("ties", [a], base=base, weight=1, density=0.3)
    order = np.argsort(-a.double().abs().numpy(), kind="stable")[: int(0.3 * BIG)]
    wanted = torch.zeros_like(a)
    wanted[order] = a[order]
    assert torch.equal(merged_tensor, wanted)
    b = random_tensor(BIG, seed=4).to(dtype)  # and hardly any ties
    merged_tensor = merge_tensors("ties", [b], base=base, weight=1, density=0.3)
    assert int((merged_tensor != 0).sum()) == int(0.3 * BIG)
    assert merged_tensor.abs()[merged_tensor != 0].min() >= b.abs()[merged_tensor == 0].max()


SAMPLED = (1 << 18) + 7_777  # large enough for a sample


@pytest.mark.parametrize("density", [0.0001, 0.3, 0.5, 0.97, 0.9999])
@pytest.mark.parametrize("values", ["normal", "rounded", "zeros", "deceiving", "equal", "double"])
def test_what_is_selected_by_a_sample_is_what_sorting_selects(density: float, values: str) -> None:
    """However the values are spread: few of them, most of them zero, or such that the sample sees
    none of the large ones.
    """
    x = random_tensor(SAMPLED, seed=3).double()
    x = {
        "normal": x,
        "rounded": (x * 8).round(),
        "zeros": x * (x > 1),
        "deceiving": x * 1e-3,
        "equal": torch.ones(SAMPLED),
        "double": x,
    }[values]
    if values == "deceiving":
        x[torch.arange(SAMPLED) % 61 != 0] *= 1e6
    x = x if values == "double" else x.float()
    merged_tensor = merge_tensors("ties", [x], base=torch.zeros_like(x), weight=1, density=density)
    wanted = torch.zeros_like(x)
    order = np.argsort(-x.abs().numpy(), kind="stable")[: int(density * SAMPLED)]
    wanted[order] = x[order]
    assert torch.equal(merged_tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_that_keep_nothing_or_cancel(dtype: torch.dtype) -> None:
    base, a, b = three(6, 7, dtype=dtype)
    assert torch.equal(merge_tensors("ties", [a, b], base=base, weight=1, density=0), base)
    assert torch.equal(
        merge_tensors("ties", [a, a], base=base, weight=[1, 1], density=0.01), base
    )  # of 42 values, none
    zero = torch.zeros_like(base)
    assert torch.equal(
        merge_tensors("ties", [a, -a], base=zero, weight=1), a.abs()
    )  # a sum of 0 counts as positive
    half = merge_tensors("ties", [a, b], base=base, weight=[1, 0.5], density=0.5, rescale=True)
    wanted = plain_ties(
        base.double().numpy(),
        [a.double().numpy(), b.double().numpy()],
        [1, 0.5],
        [0.5, 0.5],
        True,
        True,
    )
    same(half, torch.from_numpy(wanted), 1e-5 if dtype == torch.float32 else 2e-2)


def test_ties_of_half_precision_selects_as_half_precision_computes() -> None:
    """mergekit subtracts, sorts and masks in the stored dtype: values that it sees as equal are
    equal here.
    """
    base, a, b = three(300, 70, dtype=torch.bfloat16)
    deltas = [(x - base) for x in (a, b)]
    trimmed = []
    for delta in deltas:
        order = torch.argsort(delta.abs().float().view(-1), descending=True, stable=True)[
            : int(0.5 * delta.numel())
        ]
        mask = torch.zeros(delta.numel())
        mask[order] = 1
        trimmed.append(delta.float() * mask.view(delta.shape))
    total = trimmed[0] + trimmed[1]
    sign = torch.where(total >= 0, 1.0, -1.0)
    agreed = [(k.sign() == sign) for k in trimmed]
    share = agreed[0].float() + agreed[1].float()
    wanted = base.float() + (trimmed[0] * agreed[0] + trimmed[1] * agreed[1]) / share.clamp(min=1)
    one_unit(merge_tensors("ties", [a, b], base=base, weight=1, density=0.5), wanted)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della_linear", "della"])
def test_random_methods_drop_by_chance_and_keep_the_length(method: str) -> None:
    base, a, _ = three(300, 400)
    delta = a - base
    merged_tensor = (
        merge_tensors(method, [a], base=base, weight=1, density=0.4, name="x", seed=7) - base
    )
    mask = merged_tensor.abs() > 1e-7
    assert abs(float(mask.float().mean()) - 0.4) < 0.01
    assert (
        abs(float(merged_tensor.abs().sum() / delta.abs().sum()) - 1) < 1e-4
    )  # rescaled to the same sum of magnitudes
    factor = (merged_tensor[mask] / delta[mask]).median()
    same(merged_tensor[mask], factor * delta[mask], 1e-4)
    plain = (
        merge_tensors(
            method, [a], base=base, weight=1, density=0.4, name="x", seed=7, rescale=False
        )
        - base
    )
    same(plain[mask], delta[mask], 1e-5)  # the same draws, not rescaled


@pytest.mark.parametrize("method", ["dare_ties", "della"])
def test_samples_depend_on_name_seed_and_model(method: str) -> None:
    base, a, b = three(60, 70)

    def run(**more: object) -> torch.Tensor:
        return merge_tensors(
            method,
            [a, b],
            base=base,
            **{"weight": 1, "density": 0.5, "name": "x", "seed": 0, **more},
        )

    assert torch.equal(run(), run())
    for other in ({"name": "y"}, {"seed": 1}):
        assert not torch.equal(run(), run(**other))
    one = (
        merge_tensors(
            "dare_linear",
            [base + 1, base + 1],
            base=base,
            weight=1,
            density=0.5,
            name="x",
            rescale=False,
        )
        - base
    )
    assert {round(v) for v in one.flatten().tolist()} == {0, 1, 2}  # two models, two masks


def test_della_keeps_large_values_more_often() -> None:
    base = torch.zeros(500, 200)
    a = random_tensor(500, 200, seed=4)
    mask = (
        merge_tensors("della_linear", [a], base=base, weight=1, density=0.5, epsilon=0.3) != 0
    ).float()
    rank = a.abs().argsort(dim=1).argsort(dim=1)
    low, high = (float(mask[rank < 40].mean()), float(mask[rank >= 160].mean()))
    assert (
        abs(low - 0.26) < 0.02
    )  # the mean chance of the lowest fifth of each row: 0.2 + 0.1 * 0.6
    assert abs(high - 0.74) < 0.02
    with pytest.raises(DensityError, match="must be between 0 and 1"):
        merge_tensors("della_linear", [a], base=base, weight=1, density=0.9, epsilon=0.3)
    assert torch.equal(
        merge_tensors("della_linear", [a[0]], base=base[0], weight=1), a[0]
    )  # a density of 1 drops nothing


@pytest.mark.parametrize("filter_wise", [False, True])
def test_model_stock(filter_wise: bool) -> None:
    base, a, b = three(20, 30)
    c = base + 0.1 * random_tensor(20, 30, seed=6) + 0.5 * (a - base)

    def stock(w0: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        offsets = [(w - w0).double().flatten() for w in ws]
        pairs = [(0, 1), (0, 2), (1, 2)]
        cosine = (
            sum(
                float(offsets[i] @ offsets[j] / offsets[i].norm() / offsets[j].norm())
                for i, j in pairs
            )
            / 3
        )
        t = 3 * cosine / (1 + 2 * cosine)
        return t * sum(ws) / 3 + (1 - t) * w0

    wanted = (
        torch.stack([stock(base[i], [a[i], b[i], c[i]]) for i in range(20)])
        if filter_wise
        else stock(base, [a, b, c])
    )
    same(merge_tensors("model_stock", [a, b, c], base=base, filter_wise=filter_wise), wanted, 1e-5)
    with pytest.raises(MergeError, match="two models besides the base"):
        merge_tensors("model_stock", [a], base=base)


def test_karcher_is_where_the_logarithms_cancel() -> None:
    xs = [random_tensor(3000, seed=i).double() * (i + 1) + 2 for i in range(4)]
    merged_tensor = merge_tensors("karcher", xs, max_iter=100, tol=1e-12)
    assert math.isclose(
        float(merged_tensor.norm()), sum(float(x.norm()) for x in xs) / 4, rel_tol=1e-9
    )
    u = merged_tensor / merged_tensor.norm()
    total = torch.zeros_like(u)
    for x in xs:
        unit = x / x.norm()
        angle = torch.arccos(unit @ u)
        total += angle / torch.sin(angle) * (unit - (unit @ u) * u)
    assert float(total.norm()) < 1e-9
    assert not torch.allclose(merged_tensor, sum(xs) / 4)  # it is not the plain mean
    two = merge_tensors("karcher", xs[:2])
    middle = merge_tensors("slerp", [xs[1] / xs[1].norm()], base=xs[0] / xs[0].norm(), t=0.5)
    same(two / two.norm(), middle / middle.norm(), 1e-5)  # of two, the middle of the great circle


def test_karcher_of_zeros() -> None:
    zero, x = torch.zeros(20), random_tensor(20, seed=1)
    assert torch.equal(merge_tensors("karcher", [zero, zero]), zero)
    same(merge_tensors("karcher", [zero, x]), x / 2)  # a zero has no direction, but a length
    assert torch.equal(merge_tensors("karcher", [x]), x)


def test_passthrough() -> None:
    a, b, _ = three(10, 10)
    assert torch.equal(merge_tensors("passthrough", [a]), a)
    same(merge_tensors("passthrough", [a], scale=0.5), a / 2)
    with pytest.raises(MergeError, match="passthrough takes one model, got"):
        merge_tensors("passthrough", [a, b])


def test_nothing_is_changed_in_place() -> None:
    base, a, b = three(30, 40)
    before = [t.clone() for t in (base, a, b)]
    for name, method in METHODS.items():
        if method.is_transport:
            with pytest.raises(MergeError, match="transports whole models"):
                merge_tensors(name, [a, b])
            continue
        more: dict[str, Any] = (
            {"weight": 0.5}
            if "weight" in method.per_model
            else {"t": 0.4}
            if name == "slerp"
            else {}
        )
        more |= {"statistics": [a.square(), b.square()]} if name == "fisher" else {}
        more |= (
            {"statistics": [Gram((t.T @ t).double(), 1) for t in (a, b)]}
            if name == "regmean"
            else {}
        )
        others = [a] if name in ("slerp", "passthrough") else [a, b]
        out = merge_tensors(name, others, **({"base": base} if method.needs_base else {}), **more)
        assert out.dtype == torch.float32
        assert all(torch.equal(x, y) for x, y in zip(before, (base, a, b), strict=True)), name


def test_state_dicts() -> None:
    base = {"w": random_tensor(4, 5, seed=1), "ids": torch.arange(3)}
    others = [{"w": random_tensor(4, 5, seed=i), "ids": torch.arange(3)} for i in (2, 3)]
    merged_state = merge_states(others, "task_arithmetic", base=base, weight=[0.5, 0.25])
    same(
        merged_state["w"],
        base["w"] + 0.5 * (others[0]["w"] - base["w"]) + 0.25 * (others[1]["w"] - base["w"]),
    )
    assert torch.equal(merged_state["ids"], base["ids"])
    same(merge_states(others, weight=1)["w"], (others[0]["w"] + others[1]["w"]) / 2)


def test_invalid_input_raises_an_error_that_names_it() -> None:
    a, b, _ = three(4, 5)
    for call, words in (
        (lambda: merge_tensors("tie", [a, b]), 'got "tie"'),
        (lambda: merge_tensors("slerp", [a], base=b), 'needs the parameter "t"'),
        (lambda: merge_tensors("linear", [a, b], weight=1, density=0.5), 'no parameter "density"'),
        (
            lambda: merge_tensors("linear", [a, b], weight=[1, 2, 3]),
            "must have 2 values, one for each model, got 3",
        ),
        (lambda: merge_tensors("linear", [a], base=b, weight=1), "takes no base"),
        (lambda: merge_tensors("ties", [a, b], weight=1), "needs a base"),
        (lambda: merge_tensors("linear", [a, b[:3]], weight=1, name="x"), "different shapes"),
        (lambda: merge_states([{"w": a}, {}], weight=1), 'state 1 lacks "w"'),
        (
            lambda: merge_states([{"w": a}, {"w": b, "v": b}], weight=1),
            'state 1 has "v", which state 0 lacks',
        ),
        (
            lambda: merge_states([{"w": a, "v": b}], "task_arithmetic", base={"w": a}, weight=1),
            'state 0 has "v", which the base lacks',
        ),
        (lambda: merge_states([]), "states must not be empty"),
    ):
        with pytest.raises(MergeError, match=words):
            call()


def test_linear_rounds_as_mergekit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two models almost cancel, the order of the sums decides on the digits that are left: so
    it is mergekit's, in every block.
    """
    monkeypatch.setattr(methods, "BLOCK_SIZE", 1000)
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2500, generator=g).bfloat16()
    b = (-7 / 4 * a.float() * (1 + 1e-3 * torch.randn(2500, generator=g))).bfloat16()
    weights = torch.tensor([0.7, 0.4])
    wanted = torch.zeros(len(a))
    for x, weight in zip(
        (a, b), weights, strict=True
    ):  # its way: the processor may fuse product and sum
        wanted.addcmul_(x.float(), weight)
    wanted /= weights.sum()
    assert torch.equal(merge_tensors("linear", [a, b], weight=[0.7, 0.4]), wanted.bfloat16())
    fused = torch.addcmul(a.float() * (0.7 / 1.1), b.float(), torch.tensor(0.4 / 1.1))
    assert not torch.equal(fused.bfloat16(), wanted.bfloat16()), (
        "the order makes a difference here, or this test shows nothing"
    )
