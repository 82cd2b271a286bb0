"""Refinement: gradients on the group are right, members stay in it, ends keep their function, and
nothing comes back worse than it started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regauge.core.action import act, apply, tensor_transforms
from regauge.core.element import Element, element, identity
from regauge.core.fit import assign
from regauge.core.fold import fold_norms
from regauge.core.groups import GROUPS, Group
from regauge.core.members import Member, Monomial, Planes
from regauge.core.spec import Spec
from regauge.errors import ElementError, SpecError
from regauge.matching import MatchError, tangents
from regauge.matching.activations import generate_text
from regauge.matching.refine import LearningRates, refine
from regauge.testing import symmetry_error
from support.picos import PICOS, build, of_each_family, spec_of

State = dict[str, torch.Tensor]
N, K = 6, 3
CONTINUOUS = [g for g in GROUPS.values() if g.dim(N) > 0]


def folded_model(name: str, seed: int) -> tuple[Spec, State]:
    model = build(name, seed)
    return fold_norms(spec_of(model), model.state_dict())


def squares(run: Any, batch: Any) -> torch.Tensor:
    """A loss of its own for models whose outputs cannot be averaged."""
    out = run(**batch)
    values = (
        [out]
        if isinstance(out, torch.Tensor)
        else [v for v in out.values() if isinstance(v, torch.Tensor)]
    )
    return sum((v.square().mean() for v in values), torch.zeros(()))


def near(spec: Spec, size: float, seed: int = 0) -> Element:
    """A random element near the identity, on every space with a continuous part."""
    rng = np.random.default_rng(seed)
    members = {}
    for name, space in spec.spaces.items():
        x = tangent(space.group, space.size, spec.count(name), rng)
        if x is not None:
            members[name] = tangents.retract(space.group, size * x)
    return Element(spec, members)


def tangent(group: Group, size: int, count: int, rng: np.random.Generator) -> Any:
    if group.dim(size) == 0:
        return None
    shape = {"linear": (count, size, size)}.get(
        str(group), (count, size, size) if "orthogonal" in str(group) else (count, size)
    )
    if "rotary" in str(group) or "turns" in str(group):
        return tangents.project(
            group, rng.normal(size=(count, size // 2)) + 1j * rng.normal(size=(count, size // 2))
        )
    return tangents.project(group, rng.normal(size=shape))


# The tangent space


@pytest.mark.parametrize("group", CONTINUOUS, ids=str)
@pytest.mark.parametrize("size", [0.01, 1.0])
def test_members_of_any_tangent_lie_in_the_group(group: Group, size: float) -> None:
    x = tangent(group, N, K, np.random.default_rng(1))
    member = tangents.retract(group, size * x)
    assert group.fault(member) is None
    assert not np.allclose(member.matrix(), np.eye(N))


@pytest.mark.parametrize("group", CONTINUOUS, ids=str)
def test_a_small_member_is_the_identity_and_its_tangent(group: Group) -> None:
    x = tangent(group, N, K, np.random.default_rng(1))
    once, twice = (tangents.retract(group, f * x).matrix() - np.eye(N) for f in (1e-5, 2e-5))
    np.testing.assert_allclose(twice, 2 * once, atol=1e-8)
    np.testing.assert_allclose(
        tangents.retract(group, 0 * x).matrix(), np.broadcast_to(np.eye(N), (K, N, N)), atol=1e-15
    )


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mixtral", "qwen3", "timm-vit-swiglu", "swin", "deberta-v3", "bert"]
)
def test_the_gradient_equals_finite_differences(name: str) -> None:
    """For a loss that is linear in the moved weights, on every space at once: products, sums,
    stacks, duals, bars and children.
    """
    spec, state = folded_model(name, 0)
    g = element(spec, 3)
    rng = np.random.default_rng(0)
    grads = {
        n: torch.from_numpy(rng.normal(size=tuple(w.shape)))
        for n, w in state.items()
        if w.is_floating_point()
    }

    def loss(h: Element) -> float:
        return sum(
            float((grads[m.name] * act(h, state[m.source], m.axes, at=m.at)).sum())
            for m in tensor_transforms(h)
            if m.source in state
        )

    moved = apply(g, state)
    sides = tangents.collect_sides(spec, moved, grads, set(spec.spaces))
    for space, side in sides.items():
        group = spec.spaces[space].group
        x = tangent(group, spec.spaces[space].size, spec.count(space), rng)
        grad = tangents.tangent_grad(group, side)
        assert (x is None) == (grad is None)
        if x is not None:
            up, down = (
                loss(Element(spec, {space: tangents.retract(group, e * x)}) @ g)
                for e in (1e-5, -1e-5)
            )
            assert (up - down) / 2e-5 == pytest.approx(
                float((grad.conj() * x).real.sum()), rel=1e-5, abs=1e-5
            ), space


def test_votes_are_the_gradient_of_the_permutation_matrix() -> None:
    """Permuting neurons, or heads, changes a linear loss by what the votes say, in one unit; and by
    likeness alone all stay.
    """
    spec, state = folded_model("gpt2", 0)
    rng = np.random.default_rng(0)
    grads = {n: torch.from_numpy(rng.normal(size=tuple(w.shape))) for n, w in state.items()}
    for space in ("ffn.1", "head.0"):
        votes = tangents.assignment_scores(
            spec.spaces[space].group, tangents.collect_sides(spec, state, grads, {space})[space]
        )
        assert votes is not None
        alike, matrix_grad = votes
        units = []
        for by in (1, 2):
            g = Element(spec, {space: Monomial(np.roll(np.arange(alike.shape[1]), by)[None])})
            moved = apply(g, state)
            change = sum(float((grads[n] * (moved[n] - state[n])).sum()) for n in state)
            units.append(
                change
                / float(
                    (matrix_grad * (g.members[space].matrix() - np.eye(matrix_grad.shape[1]))).sum()
                )
            )
        assert units[0] == pytest.approx(units[1])
        assert units[0] > 0
        assert (assign(alike) == np.arange(alike.shape[1])).all()


# Refining


def plant_element(name: str, size: float) -> tuple[Spec, State, State, Element, Element]:
    spec, a = folded_model(name, 0)
    truth = element(spec, 7)
    return spec, a, apply(truth, a), truth, near(spec, size) @ truth


@pytest.mark.parametrize("name", ["gpt2-untied", "llama", "vit", "qwen3"])
def test_a_planted_element_is_found_again_from_nearby(name: str) -> None:
    spec, a, b, _, g = plant_element(name, 0.02)
    model = build(name)
    result = refine(
        spec,
        a,
        b,
        g,
        model,
        [PICOS[name].inputs],
        steps=60,
        eval_every=20,
        lr=LearningRates(0.01, 0.01, 0.01, 0.01),
    )
    assert result.loss < 0.1 * result.initial_loss
    assert result.gain == pytest.approx(result.initial_loss - result.loss)
    assert result.best_step > 0
    assert [m.step for m in result.history] == [0, 20, 40, 60]
    assert symmetry_error_of(name, spec, a, result.g) < 1e-9
    assert result.h.members == {}


def symmetry_error_of(name: str, spec: Spec, state: State, g: Element) -> float:
    """Of the folded model: does g keep its function?"""
    model = build(name)
    if hasattr(model, "config"):
        model.config.tie_word_embeddings = False
    if hasattr(model, "lm_head"):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.load_state_dict(state)
    return symmetry_error(model, spec, g, PICOS[name].inputs)


def test_both_ends_move_and_keep_their_functions() -> None:
    spec, a, b, _, g = plant_element("gpt2-untied", 0.02)
    result = refine(
        spec,
        a,
        b,
        g,
        build("gpt2-untied"),
        [PICOS["gpt2-untied"].inputs],
        move_both=True,
        steps=40,
        lr=LearningRates(1e-3, 1e-3, 1e-3, 1e-3),
    )
    assert result.loss < 0.3 * result.initial_loss
    assert result.h.members.keys() == {n for n, s in spec.spaces.items() if s.group.dim(s.size)}
    for state, one in ((a, result.g), (b, result.h)):
        assert symmetry_error_of("gpt2-untied", spec, state, one) < 1e-9


def test_moving_both_ends_reaches_no_other_path() -> None:
    """The action is linear: h^-1 takes one path to the other, point by point."""
    spec, a, b, _, g = plant_element("llama", 0.3)
    h = element(spec, 5)
    one = [
        torch.lerp(x, y, 0.3) for x, y in zip(apply(~h @ g, a).values(), b.values(), strict=True)
    ]
    other = {n: torch.lerp(w, apply(h, b)[n], 0.3) for n, w in apply(g, a).items()}
    for x, y in zip(one, apply(~h, other).values(), strict=True):
        torch.testing.assert_close(x, y)


def test_it_is_never_worse_than_the_start() -> None:
    spec, a, b, truth, _ = plant_element("gpt2-untied", 0.0)
    wild = LearningRates(rotation=1.0, linear=1.0)
    result = refine(
        spec,
        a,
        b,
        truth,
        build("gpt2-untied"),
        [PICOS["gpt2-untied"].inputs],
        steps=4,
        eval_every=1,
        lr=wild,
    )
    assert result.loss <= result.initial_loss < 1e-12
    noisy = near(spec, 0.05) @ truth
    result = refine(
        spec,
        a,
        b,
        noisy,
        build("gpt2-untied"),
        [PICOS["gpt2-untied"].inputs],
        steps=4,
        eval_every=1,
        lr=wild,
    )
    assert result.loss <= result.initial_loss
    result.g.require()


def test_the_same_seed_gives_the_same_element() -> None:
    spec, a, b, _, g = plant_element("llama", 0.02)
    batches = [
        {"input_ids": torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(i))}
        for i in range(6)
    ]
    runs = [
        refine(spec, a, b, g, build("llama"), batches, steps=5, eval_every=5, seed=seed)
        for seed in (0, 0, 1)
    ]
    first, again, other = (r.g.members["stream"].matrix() for r in runs)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("name", "space"), [("llama", "kv.0"), ("qwen3", "qk.0")])
def test_a_wrong_assignment_is_put_right(name: str, space: str) -> None:
    """Two key-value heads in each other's places, with all that is theirs; a plane with the wrong
    sign: the votes bring them back.
    """
    spec, a, b, truth, _ = plant_element(name, 0.0)
    wrong: Member = Monomial(np.array([[1, 0]]))
    if space == "qk.0":
        factor = np.ones((2, 4), np.complex128)
        factor[0, 1] = -1
        wrong = Planes(factor, "half")
    batches = [
        {"input_ids": torch.randint(0, 30, (8, 12), generator=torch.Generator().manual_seed(i))}
        for i in range(4)
    ]
    begin = Element(spec, {space: wrong}) @ truth
    rates = LearningRates(assignment=0.5)
    result = refine(
        spec,
        a,
        b,
        begin,
        build(name),
        batches,
        spaces=[space],
        steps=16,
        eval_every=2,
        lr=rates,
        held_out=batches[:1],
    )
    assert result.initial_loss > 0.1
    assert result.loss < 1e-9
    assert np.allclose(result.g.members[space].matrix(), truth.members[space].matrix())
    result = refine(
        spec,
        a,
        b,
        begin,
        build(name),
        batches,
        spaces=[space],
        steps=2,
        eval_every=1,
        held_out=batches[:1],
    )
    assert result.loss == result.initial_loss  # without votes nothing discrete moves


@pytest.mark.parametrize("name", [of_each_family(name) for name in PICOS])
def test_every_family_takes_a_step(name: str) -> None:
    model = build(name)
    spec = spec_of(model)
    if not spec.untied:  # where untying changes the config, another module would be needed
        spec, a = fold_norms(spec, model.state_dict())
        _, b = fold_norms(spec_of(model), build(name, 1).state_dict())
    else:
        a, b = model.state_dict(), build(name, 1).state_dict()
    g = element(spec, 2)
    before = {n: w.clone() for n, w in model.state_dict().items()}
    result = refine(
        spec,
        a,
        b,
        g,
        model,
        [PICOS[name].inputs],
        loss=squares if spec.visible else None,
        move_both=True,
        steps=1,
        eval_every=1,
        t_range=(0.0, 1.0),
        lr=LearningRates(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
    )
    assert result.loss <= result.initial_loss
    result.g.require()
    result.h.require()
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


def test_text_that_the_models_write_serves_as_data() -> None:
    spec, a, b, _, g = plant_element("gpt2-untied", 0.02)
    models = []
    for state in (a, b):
        model = build("gpt2-untied")
        model.load_state_dict(state)
        models.append(model)
    batches = generate_text(models, count=8, length=8, batch_size=2)
    result = refine(
        spec, a, b, g, models[0], batches, steps=20, eval_every=10, lr=LearningRates(1e-3, 1e-3)
    )
    assert result.loss < 0.8 * result.initial_loss


def test_an_element_over_the_stored_form_is_that_over_the_live_one() -> None:
    spec, a, b, _, g = plant_element("gpt2-untied", 0.02)
    aside = replace(
        spec,
        tensors={f"file.{n}": text for n, text in spec.tensors.items()},
        ties={},
        parts={},
        fixed={},
    )
    how = {"steps": 4, "eval_every": 2, "move_both": True}
    model, batches = build("gpt2-untied"), [PICOS["gpt2-untied"].inputs]
    one = refine(spec, a, b, g, model, batches, **how)
    other = refine(spec, a, b, replace(g, spec=aside), model, batches, h=identity(aside), **how)
    assert other.loss == one.loss
    assert other.g.spec == spec


def test_held_out_batches_are_not_trained_on() -> None:
    spec, a, b, _, g = plant_element("gpt2-untied", 0.02)
    batches = [{"input_ids": torch.full((1, 4), i)} for i in range(10)]
    recorded: dict[bool, set[int]] = {True: set(), False: set()}

    def loss(run: Any, batch: Any) -> torch.Tensor:
        recorded[torch.is_grad_enabled()].add(int(batch["input_ids"][0, 0]))
        return squares(run, batch)

    refine(
        spec, a, b, g, build("gpt2-untied"), batches, loss=loss, steps=8, eval_every=4, held_out=0.2
    )
    assert len(recorded[False]) == 2
    assert recorded[True] == set(range(10)) - recorded[False]


# What is refused


def test_bad_input_is_one_clear_error() -> None:
    spec, a, b, _, g = plant_element("gpt2-untied", 0.0)
    model, inputs = build("gpt2-untied"), PICOS["gpt2-untied"].inputs
    broken = {n: w.clone() for n, w in a.items()}
    broken["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(
        MatchError, match=r'model A has values that are not finite in "lm_head\.weight" \(1 such'
    ):
        refine(spec, broken, b, g, model, [inputs])
    with pytest.raises(MatchError, match="batches must not be empty"):
        refine(spec, a, b, g, model, [])
    other, _ = folded_model("llama", 0)
    with pytest.raises(ElementError, match="must have the spaces of the spec"):
        refine(spec, a, b, identity(other), model, [inputs])
    with pytest.raises(SpecError, match='but lacks "transformer'):
        refine(spec, a, b, g, build("llama"), [inputs])
    with pytest.raises(SpecError, match="model B does not fit"):
        refine(spec, a, folded_model("llama", 0)[1], g, model, [inputs])
    with pytest.raises(MatchError, match=r"got 0\.6 and 0\.4"):
        refine(spec, a, b, g, model, [inputs], t_range=(0.6, 0.4))
    with pytest.raises(MatchError, match="not finite at the start"):
        refine(
            spec,
            a,
            b,
            g,
            model,
            [inputs],
            loss=lambda run, batch: squares(run, batch) * float("inf"),
        )
    base, state = folded_model("gpt2-base", 0)
    with pytest.raises(SpecError, match="live in stream, which moves"):
        refine(base, state, state, identity(base), build("gpt2-base"), [inputs])
