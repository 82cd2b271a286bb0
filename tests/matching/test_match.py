"""Matching: what was planted is found, on every family; what the paper's formulas give is given;
unmatchable models are rejected.
"""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import support.picos as picos
from regauge import apply, element
from regauge.checkpoints.element_files import arrays_of
from regauge.checkpoints.resume import StateStore
from regauge.core.action import State
from regauge.core.element import identity
from regauge.core.fold import fold_norms
from regauge.core.groups import GROUPS, Rotary
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.matching import MatchError, layers_of, match_states, preparation
from regauge.matching.blocks import split_blocks
from regauge.matching.closed_forms import (
    assign_factors,
    assign_two_level,
    procrustes,
    product_cosines,
    rotary_cosines,
    solve_rescaling,
)
from regauge.matching.compare import compare_states
from regauge.matching.costs import Costs
from regauge.matching.invariants import invariant_distance, state_invariants
from regauge.matching.many import match_many, nearest_to_mean
from regauge.matching.preparation import select_groups
from regauge.matching.search import _solve_unit
from regauge.matching.solver import Solver
from regauge.testing import strict_float64
from support import forks

FOLDED = (
    "vit",
    "gpt2",
    "llama",
    "qwen3",
    "mixtral",
    "bert",
    "deberta-v3",
    "dinov2",
    "bart",
    "clip",
    "t5",
    "swin",
    "timm-vit",
    "timm-siglip",
)


def state_of(name: str, seed: int = 0) -> tuple[Spec, dict[str, torch.Tensor]]:
    model = picos.build(name, seed)
    return picos.spec_of(model), {n: t.detach().clone() for n, t in model.state_dict().items()}


def furthest(a: State, b: State) -> float:
    """The largest difference of a tensor, as a share of its norm."""
    return max(
        float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-30))
        for n in b
        if b[n].is_floating_point() and b[n].any()
    )


@pytest.mark.parametrize("name", [picos.late(name) for name in picos.PICOS])
def test_a_planted_element_of_the_full_group_is_found_in_one_call(name: str) -> None:
    spec, a = state_of(name)
    b = apply(element(spec, 3), a)
    result = match_states(spec, a, b)
    moved = apply(result.element, a)
    assert max(float((moved[n] - b[n]).abs().max()) for n in b if b[n].is_floating_point()) < 1e-9
    assert result.distance < 1e-9 < result.distance_before
    model = picos.build(name)
    with torch.no_grad(), strict_float64():
        model.load_state_dict(b)
        there = model(**picos.PICOS[name].inputs)
        model.load_state_dict(moved)
        here = model(**picos.PICOS[name].inputs)
    for one, other in zip(_tensors(there), _tensors(here), strict=True):
        assert_allclose(one.numpy(), other.numpy(), rtol=1e-9, atol=1e-9)


def _tensors(output: object) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = (
        output.values()
        if hasattr(output, "values")
        else output
        if isinstance(output, tuple | list)
        else []
    )
    return [t for v in values for t in _tensors(v)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FOLDED)
def test_with_folded_norms_rotations_of_the_stream_are_found_too(
    name: str, dtype: torch.dtype
) -> None:
    spec, a = fold_norms(*state_of(name))
    a = {n: t.to(dtype) if t.is_floating_point() else t for n, t in a.items()}
    b = apply(element(spec, 5), a)
    result = match_states(spec, a, b)
    assert furthest(apply(result.element, a), b) < (1e-9 if dtype == torch.float64 else 1e-4)


def test_noise_up_to_the_threshold_leaves_the_permutations_exact() -> None:
    """Assignment bears noise of sqrt(N / (4 ln n)) feature deviations: 0.8 of that must not cost a
    single place.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=64,
            n_layer=1,
            n_head=4,
            vocab_size=100,
            n_positions=28,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    from regauge import spec_of

    spec = spec_of(model)
    a = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    a["lm_head.weight"] = a["transformer.wte.weight"]
    g = element(spec, 1)
    b = apply(g, a)
    features = {"stream": 128, "ffn.0": 2 * 64 + 1, "head.0": 1}
    sigma = 0.8 * min(
        (features[s] / (4 * np.log(spec.spaces[s].size))) ** 0.5 for s in ("stream", "ffn.0")
    )
    noisy = {n: t + sigma * torch.randn_like(t) for n, t in b.items() if n not in spec.ties}
    noisy |= {alias: noisy[target] for alias, target in spec.ties.items()}
    result = match_states(spec, a, noisy)
    for space in ("stream", "ffn.0"):
        assert (
            result.element.members[space].permutation().index
            == g.members[space].permutation().index
        ).all()


def test_anchors_are_what_a_space_is_found_by_at_first() -> None:
    """The words of the two models have nothing in common, and their places are the same: only the
    places may tell the order of the stream.
    """
    spec, a = state_of("gpt2-untied")
    g = element(spec, 4, within="permutation")
    b = dict(apply(g, a))
    torch.manual_seed(0)
    b |= {n: 5 * torch.randn_like(b[n]) for n in ("transformer.wte.weight", "lm_head.weight")}
    truth = g.members["stream"].permutation().index
    misled = match_states(spec, a, b, sweeps=0, spaces=["stream"])
    result = match_states(spec, a, b, sweeps=0, anchors=["*wpe*"])
    weighed = match_states(spec, a, b, sweeps=0, weights={"*wte*": 0.0, "lm_head.*": 0.0})
    assert (misled.element.members["stream"].permutation().index != truth).any()
    for one in (result, weighed):
        assert (one.element.members["stream"].permutation().index == truth).all()
        assert (
            one.element.members["ffn.0"].permutation().index
            == g.members["ffn.0"].permutation().index
        ).all()
    for more in ({"anchors": ["wpe"]}, {"weights": {"*.wpe": 2.0}}):
        with pytest.raises(MatchError, match="names must match a tensor that something acts on"):
            match_states(spec, a, b, **more)  # type: ignore[arg-type]


def _paper(a: State, b: State, layers: int, heads: int) -> tuple[float, float]:
    """Rotation symmetry on a GPT-2, written down independently: distances after its
    rotations and its assignment, without and with rescaling.
    """
    plain = {n: t.numpy().copy() for n, t in a.items()}
    scaled = {n: t.numpy().copy() for n, t in a.items()}
    there = {n: t.numpy() for n, t in b.items()}
    for i in range(layers):
        qkv, bias, out = (
            f"transformer.h.{i}.attn.{x}" for x in ("c_attn.weight", "c_attn.bias", "c_proj.weight")
        )
        d = there[qkv].shape[0]
        for h in range(heads):
            cut = [slice(k * d + h * d // heads, k * d + (h + 1) * d // heads) for k in range(3)]
            q1, k1, v1 = (np.concatenate([plain[qkv][:, c], plain[bias][None, c]]) for c in cut)
            q2, k2, v2 = (np.concatenate([there[qkv][:, c], there[bias][None, c]]) for c in cut)
            o1, o2 = (x[out][cut[0]].copy() for x in (plain, there))
            for left, right, which in (
                ((q1, q2), (k1, k2), (0, 1)),
                ((v1, v2), (o1.T, o2.T), (2, None)),
            ):
                u, _, vt = np.linalg.svd(left[0].T @ left[1] + right[0].T @ right[1])
                r = u @ vt
                for target, factor in ((plain, 1.0), (scaled, None)):
                    x, y = left[0] @ r, right[0] @ r
                    if factor is None:
                        roots = np.roots(
                            [
                                (x**2).sum(),
                                -(x * left[1]).sum(),
                                0,
                                (y * right[1]).sum(),
                                -(y**2).sum(),
                            ]
                        )
                        real = [z.real for z in roots if abs(z.imag) < 1e-9]
                        factor = min(
                            real,
                            key=lambda z: (
                                ((z * x - left[1]) ** 2).sum() + ((y / z - right[1]) ** 2).sum()
                            ),
                        )
                    x, y = factor * x, y / factor
                    target[qkv][:, cut[which[0]]], target[bias][cut[which[0]]] = x[:-1], x[-1]
                    if which[1] is None:
                        target[out][cut[0]] = y.T
                    else:
                        target[qkv][:, cut[which[1]]], target[bias][cut[which[1]]] = y[:-1], y[-1]
        fc, fb, proj = (
            f"transformer.h.{i}.mlp.{x}" for x in ("c_fc.weight", "c_fc.bias", "c_proj.weight")
        )
        from scipy.optimize import linear_sum_assignment

        gain = (
            there[fc].T @ plain[fc] + np.outer(there[fb], plain[fb]) + there[proj] @ plain[proj].T
        )
        p = linear_sum_assignment(gain, maximize=True)[1]
        for target in (plain, scaled):
            target[fc], target[fb], target[proj] = target[fc][:, p], target[fb][p], target[proj][p]
    names = [n for n in there if n != "lm_head.weight"]
    return tuple(
        float(np.sqrt(sum(((x[n] - there[n]) ** 2).sum() for n in names))) for x in (plain, scaled)
    )  # type: ignore[return-value]


def test_the_papers_own_matcher_is_a_special_case() -> None:
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    plain, scaled = _paper(a, b, layers=2, heads=3)
    options: dict[str, Any] = {
        "spaces": ["qk", "vo", "ffn"],
        "within": "orthogonal",
        "sweeps": 0,
        "whole": True,
    }
    assert match_states(spec, a, b, **options).distance == pytest.approx(plain, abs=1e-6)
    result = match_states(spec, a, b, **options, rescale=True)
    assert result.distance == pytest.approx(scaled, abs=1e-6)
    assert scaled < plain < result.distance_before


def test_more_of_the_group_is_never_further_away() -> None:
    (spec, a), (_, b) = state_of("llama", 0), state_of("llama", 1)
    paper = match_states(spec, a, b, spaces=["qk", "vo", "ffn"])
    heads = match_states(spec, a, b, spaces=["qk", "vo", "ffn", "kv", "rep"])
    everything = match_states(spec, a, b)
    assert everything.distance < heads.distance * 1.02
    assert heads.distance < heads.distance_before
    assert paper.distance < paper.distance_before


def test_only_what_takes_part_moves() -> None:
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    result = match_states(spec, a, b, spaces=["qk", "ffn"], layers=[1])
    assert set(result.element.members) == {"qk.1", "ffn.1"}
    assert layers_of(spec)["vo.1"] == 1
    assert "stream" not in layers_of(spec)
    with pytest.raises(MatchError, match="layers must be from 0 to 1, got 7"):
        match_states(spec, a, b, layers=[7])
    with pytest.raises(RegaugeError, match='no space "nowhere"'):
        match_states(spec, a, b, spaces=["nowhere"])


def test_identical_models_need_nothing() -> None:
    spec, a = state_of("gpt2")
    result = match_states(spec, a, {n: t.clone() for n, t in a.items()})
    assert not result.element.members
    assert result.distance == result.distance_before == 0


def test_unmatchable_models_raise_an_error_that_names_the_cause() -> None:
    spec, a = state_of("gpt2")
    other = dict(a)
    other["transformer.h.0.mlp.c_fc.weight"] = other["transformer.h.0.mlp.c_fc.weight"][:, :-1]
    with pytest.raises(
        RegaugeError,
        match=r"the model that stays does not fit[\s\S]*axis 1 ffn.0 of "
        r'"transformer.h.0.mlp.c_fc.weight"',
    ):
        match_states(spec, a, other)
    broken = dict(a) | {"transformer.ln_f.weight": a["transformer.ln_f.weight"] * float("nan")}
    with pytest.raises(MatchError, match=r'"transformer\.ln_f\.weight" of the model that moves'):
        match_states(spec, broken, a)
    coarse = dict(a) | {
        "transformer.h.0.mlp.c_fc.weight": a["transformer.h.0.mlp.c_fc.weight"].to(torch.int8)
    }
    with pytest.raises(RegaugeError, match="int8"):
        match_states(spec, coarse, a)


def test_blocks_of_a_fused_tensor() -> None:
    spec, a = state_of("gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors = split_blocks(spec, spec.tensors[name], a[name].numpy())
    assert [str(d) for d in tensors[1].dims] == ["stream*", "head.0", "qk.0*"]
    assert tensors[1].values.shape == (12, 3, 4)
    assert_allclose(tensors[1].values.reshape(12, 12), a[name][:, 12:24].numpy())


def _pair(seed: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=shape), random.normal(size=shape)


def test_procrustes_is_better_than_any_other_rotation() -> None:
    (q1, k1), (q2, k2) = _pair(0, (4, 9)), _pair(1, (4, 9))
    best, left = procrustes(q1, k1, q2, k2)
    assert left == pytest.approx(((q1 - best @ q2) ** 2).sum() + ((k1 - best @ k2) ** 2).sum())
    for seed in range(50):
        other = np.linalg.qr(np.random.default_rng(seed).normal(size=(4, 4)))[0]
        assert ((q1 - other @ q2) ** 2).sum() + ((k1 - other @ k2) ** 2).sum() >= left


def test_the_rescaling_is_the_best_of_a_grid() -> None:
    (q1, k1), (q2, k2) = _pair(2, (4, 9)), _pair(3, (4, 9))
    q1, k1 = q1 + 2 * q2, k1 + 0.5 * k2

    def left(a: float) -> float:
        return float(((a * q2 - q1) ** 2).sum() + ((k2 / a - k1) ** 2).sum())

    best = solve_rescaling(q1, k1, q2, k2)
    grid = np.concatenate([np.linspace(-5, -0.05, 2000), np.linspace(0.05, 5, 2000)])
    assert left(best) <= min(map(left, grid)) + 1e-9


def test_scores_of_heads_do_not_depend_on_the_basis_inside() -> None:
    (q1, k1), (q2, k2) = _pair(4, (3, 1, 4, 9)), _pair(5, (3, 1, 4, 9))
    m = GROUPS["linear"].sample(4, 3, Stream(seed_key(0), "test")).matrix()
    q3, k3 = (
        np.einsum("iab,irbf->iraf", m, q2),
        np.einsum("iab,irbf->iraf", np.linalg.inv(m).swapaxes(1, 2), k2),
    )
    assert_allclose(
        product_cosines((q1, k1), (q3, k3)), product_cosines((q1, k1), (q2, k2)), atol=1e-12
    )
    products = [np.einsum("iraf,irag->ifg".replace(" ", ""), q, k) for q, k in ((q1, k1), (q2, k2))]
    direct = np.einsum("ifg,jfg->ij", *products) / np.sqrt(
        np.outer(*((p**2).sum((1, 2)) for p in products))
    )
    assert_allclose(product_cosines((q1, k1), (q2, k2))[:, 0, :, 0], direct, atol=1e-12)
    for layout in ("half", "interleaved"):
        group = Rotary(layout)  # type: ignore[arg-type]
        turn = group.sample(4, 3, Stream(seed_key(1), "test"))
        q4, k4 = (
            np.einsum("iab,irbf->iraf", x, y)
            for x, y in ((turn.matrix(), q2), (turn.dual().matrix(), k2))
        )
        assert_allclose(
            rotary_cosines((q1, k1), (q4, k4), group),
            rotary_cosines((q1, k1), (q2, k2), group),
            atol=1e-12,
        )


def test_two_levels_of_assignment_find_a_planted_wreath() -> None:
    random = np.random.default_rng(6)
    features = random.normal(size=(4, 3, 20))
    outer, inner = random.permutation(4), np.stack([random.permutation(3) for _ in range(4)])
    there = np.stack([features[outer[i]][inner[i]] for i in range(4)])
    assignment = assign_two_level(np.einsum("irf,jsf->irjs", there, features))
    assert_allclose(assignment[0], outer)
    assert_allclose(assignment[1], inner)


def test_two_factors_that_share_one_inner_order_are_assigned_together() -> None:
    """The members resemble each other, so that single pairs prefer wrong orders."""
    random = np.random.default_rng(6)
    common = random.normal(size=(1, 5, 4))
    features = common + 0.3 * random.normal(size=(4, 5, 4))
    outer, inner = random.permutation(4), random.permutation(5)
    there = features[outer][:, inner]
    assignment = assign_factors(np.einsum("irf,jsf->irjs", there, features))
    assert_allclose(assignment[0], outer)
    assert_allclose(assignment[1], inner)


@pytest.mark.parametrize("seed", range(4))
def test_heads_wait_for_more_than_their_biases(seed: int) -> None:
    """A cosine of one feature, such as that of a head's biases alone, tells no heads apart."""
    spec, a = state_of("deberta-v2-xlarge-groups")
    b = apply(element(spec, seed), a)
    assert match_states(spec, a, b).distance < 1e-9


@pytest.fixture
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need not import torch first, which is what most of their time is."""
    monkeypatch.setattr(preparation, "get_context", lambda method: forks.context())


def test_workers_are_spawned_and_solve() -> None:
    """The one test whose worker starts as a user's do: what it is sent and returns is pickled."""
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    groups = {name: space.group for name, space in spec.spaces.items()}
    task = (Solver(Costs(spec, a, b), groups, identity(spec)), ["ffn.0"], False)
    with preparation.worker_pool(2) as pool:
        assert pool._mp_context.get_start_method() == "spawn"
        (found,) = pool.map(_solve_unit, [task])
    order, members, distances = _solve_unit(task)
    assert found[0] == order == ["ffn.0"]
    assert np.array_equal(found[1]["ffn.0"].matrix(), members["ffn.0"].matrix())
    assert found[2] == distances


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "vit"])
def test_tensors_held_for_a_layer_change_nothing(
    name: str, fold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer applies the stream's member once; a rotation is fitted without the old one."""
    (spec, a), (_, b) = (state_of(name, seed) for seed in (0, 1))
    if fold:
        (spec, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
    held = match_states(spec, a, b, sweeps=2)
    moved: list[str] = []
    monkeypatch.setattr(Costs, "within_unit", lambda costs, g, unit: costs)
    monkeypatch.setattr(Solver, "_is_replaceable", lambda solver, space: moved.append(space))
    plain = match_states(spec, a, b, sweeps=2)
    assert moved
    assert [s.squared for s in held.steps] == pytest.approx([s.squared for s in plain.steps])
    for space, member in plain.element.members.items():
        assert_allclose(held.element.members[space].matrix(), member.matrix(), atol=1e-9)
    costs = Costs(spec, a, b)
    measured = {n: d for n, (d, _) in costs.distances(held.element).items()}
    assert held.after == pytest.approx(measured, rel=1e-9, abs=1e-12)


@pytest.mark.usefixtures("_forked_workers")
def test_layers_are_searched_in_processes_to_the_same_end() -> None:
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    alone, parallel = (match_states(spec, a, b, workers=n, sweeps=1) for n in (1, 2))
    assert parallel.distance == pytest.approx(alone.distance, rel=1e-9)
    assert parallel.element.members.keys() == alone.element.members.keys()


def test_a_worker_is_sent_no_layouts() -> None:
    """They are arrays of a shape without values here, and would be whole models there."""
    spec, a = state_of("gpt2")
    search = Solver(Costs(spec, a, a), select_groups(spec, None, None, "full"), identity(spec))
    before = len(pickle.dumps(search))
    assert len(search.costs.layouts) > 5
    assert len(pickle.dumps(search)) <= before + 1000
    again = pickle.loads(pickle.dumps(search))
    assert again.costs.layouts.keys() == search.costs.layouts.keys()


def _end(task: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("_forked_workers")
def test_a_worker_that_the_system_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    monkeypatch.setattr("regauge.matching.search._solve_unit", _end)
    with pytest.raises(MatchError, match="killed, most likely because memory ran out"):
        match_states(spec, a, b, workers=2, sweeps=0)


@pytest.mark.parametrize("broken", [True, False])
def test_a_stored_copy_of_a_tied_head_must_be_finite(broken: bool) -> None:
    """The search reads the embedding in its place."""
    (spec, a), (_, b) = state_of("gpt2", 0), state_of("gpt2", 1)
    a["lm_head.weight"] = a["lm_head.weight"].clone()
    if not broken:
        assert match_states(spec, a, b, sweeps=0).distance > 0
        return
    a["lm_head.weight"][0, 0] = torch.nan
    with pytest.raises(MatchError, match=r"lm_head\.weight"):
        match_states(spec, a, b, sweeps=0)


def test_sweeps_may_leave_a_stream_where_tables_put_it() -> None:
    (spec, a), (_, b) = (fold_norms(*state_of("gpt2", seed)) for seed in (0, 1))
    once, swept, nearest = (
        match_states(spec, a, b, sweeps=0),
        match_states(spec, a, b, sweeps=3, nearest=False),
        match_states(spec, a, b, sweeps=3),
    )
    first, second, third = (m.element.members["stream"].matrix() for m in (once, swept, nearest))
    assert_allclose(first, second, rtol=0, atol=0)
    assert abs(first - third).max() > 1e-3
    assert nearest.distance < swept.distance <= once.distance


def test_sweeps_fit_a_stream_again_that_tables_do_not_determine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (spec, a), (_, b) = (fold_norms(*state_of("gpt2", seed)) for seed in (0, 1))
    monkeypatch.setattr(
        "regauge.matching.solver.ROWS_PER_COORDINATE", 1000
    )  # more than the rows of these tables
    swept, nearest = (
        match_states(spec, a, b, sweeps=3, nearest=False),
        match_states(spec, a, b, sweeps=3),
    )
    assert swept.distance == pytest.approx(nearest.distance, rel=1e-12)
    assert swept.distance < match_states(spec, a, b, sweeps=0).distance


class _Interrupted(StateStore):
    """A store that stops the search when a number of parts was saved."""

    left = 0

    def save(self, *part: Any) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().save(*part)


@pytest.mark.parametrize(("family", "folded"), [("gpt2", False), ("llama", False), ("vit", True)])
def test_a_search_that_was_interrupted_at_every_part_returns_the_same_bits(
    family: str, folded: bool, tmp_path: Path
) -> None:
    (spec, a), (_, b) = (state_of(family, seed) for seed in (0, 1))
    if folded:
        (spec, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
    a, b = ({n: t.float() for n, t in state.items()} for state in (a, b))
    whole = match_states(spec, a, b, sweeps=2)
    resumed, interrupts = None, 0
    while resumed is None:
        store = _Interrupted(tmp_path / "state", b"pair")
        store.left = 1
        try:
            resumed = match_states(spec, a, b, sweeps=2, store=store)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > len(spec.children("stream")) + 2
    assert [s.squared for s in resumed.steps] == [s.squared for s in whole.steps]
    assert resumed.order == whole.order
    first, second = (arrays_of(m.element) for m in (whole, resumed))
    assert first[1] == second[1]
    assert all(np.array_equal(values, second[0][name]) for name, values in first[0].items())


def test_parts_of_another_pair_are_computed_again(tmp_path: Path) -> None:
    (spec, a), (_, b), (_, c) = (state_of("gpt2", seed) for seed in (0, 1, 2))
    match_states(spec, a, c, sweeps=0, store=StateStore(tmp_path / "state", b"a and c"))
    wanted = match_states(spec, a, b, sweeps=0)
    found = match_states(spec, a, b, sweeps=0, store=StateStore(tmp_path / "state", b"a and b"))
    assert found.distance == wanted.distance
    mixed = match_states(spec, a, b, sweeps=0, store=StateStore(tmp_path / "state", b"a and b"))
    assert mixed.distance == wanted.distance
    # The control: the label alone tells the pairs apart.
    wrong = match_states(spec, a, c, sweeps=0, store=StateStore(tmp_path / "state", b"a and b"))
    assert wrong.distance > match_states(spec, a, c, sweeps=0).distance


def test_many_models_go_to_one_of_them_or_to_their_mean() -> None:
    spec, a = state_of("llama")
    generator = torch.Generator().manual_seed(0)
    near = [
        {
            n: t + 0.02 * torch.randn(t.shape, generator=generator, dtype=t.dtype)
            for n, t in a.items()
        }
        for _ in range(3)
    ]
    states = [near[0], *(apply(element(spec, i), s) for i, s in enumerate(near[1:], 1))]
    one = match_many(spec, states, to=0)
    assert one.anchor == 0
    assert not one.elements[0].members
    assert one.spread[1] < 0.1 * one.spread[0]
    middle = match_many(spec, states, to="mean")
    assert middle.spread[-1] <= one.spread[-1] * 1.001
    far = {
        n: t + 3 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in a.items()
    }
    assert nearest_to_mean([far, near[0], near[1]]) in (1, 2)
    with pytest.raises(MatchError, match="to must be from 0 to 2, got 5"):
        match_many(spec, states, to=5)
    with pytest.raises(MatchError, match="at least two"):
        match_many(spec, states[:1])
    with pytest.raises(MatchError, match='"nearest" or "mean", got "meen"'):
        match_many(spec, states, to="meen")  # type: ignore[arg-type]
    with pytest.raises(
        MatchError, match=r'"lm_head.weight" of model 1 must be \[\d+, \d+\] .*, got \[3, \d+\]'
    ):
        match_many(spec, [a, {**a, "lm_head.weight": a["lm_head.weight"][:3]}])
    with pytest.raises(MatchError, match=r'model 1 .*lacks "lm_head\.weight"'):
        match_many(spec, [a, {n: t for n, t in a.items() if n != "lm_head.weight"}])


def test_models_with_a_single_number_are_compared() -> None:
    spec, a = state_of("clip")  # whose logit_scale has no axes
    comparison = compare_states(spec, a, apply(element(spec, 3), a), sweeps=1)
    assert comparison.verdict == "same model, transformed"
    assert compare_states(spec, a, state_of("clip", 1)[1], sweeps=0).verdict == "unrelated"


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", FOLDED)
def test_invariants_agree_in_every_basis_and_differ_between_models(name: str, folded: bool) -> None:
    spec, a = state_of(name)
    _, other = state_of(name, 1)
    if folded:
        (spec, a), (_, other) = fold_norms(spec, a), fold_norms(spec, other)
    here, there, strange = (
        state_invariants(spec, s) for s in (a, apply(element(spec, 3), a), other)
    )
    assert here.keys() == there.keys()
    assert max(d / max(n, 1e-30) for d, n in invariant_distance(here, there).values()) < 1e-18
    distance = invariant_distance(here, strange)
    assert sum(d for d, _ in distance.values()) > 1e-3 * sum(n for _, n in distance.values())


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_suffices_for_what_was_planted(seed: int) -> None:
    """Sweeps would mend a first pass that goes wrong."""
    spec, a = state_of("llama")
    b = apply(element(spec, seed), a)
    assert match_states(spec, a, b, sweeps=0).distance < 1e-9


def test_a_head_is_wholly_like_itself() -> None:
    q, k = _pair(7, (3, 1, 4, 9))
    for scores in (product_cosines((q, k), (q, k)), rotary_cosines((q, k), (q, k), Rotary("half"))):
        assert_allclose(np.diag(scores[:, 0, :, 0]), 1, atol=1e-12)
