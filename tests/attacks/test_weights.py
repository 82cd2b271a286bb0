"""Attacks: each finds what it says it finds, and does not where what it needs is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from regauge import apply, element
from regauge.attacks import labels, linear, served, texts
from regauge.attacks.edges import anneal, has_permuted_stream, public_edges, refine_order
from regauge.attacks.features import GROUPS, feature_statistics, known_inputs, vocabulary_search
from regauge.attacks.inversion import (
    decoder_inversion,
    link_samples,
    position_probe,
    public_patches,
)
from regauge.attacks.products import fit_permutation, layer_products
from regauge.attacks.theft import Budget, fine_tune, learn_order, new_edges, train_from_scratch
from regauge.attacks.views import (
    HiddenStates,
    KnownInputs,
    LockedFile,
    LockedFileWithBase,
    LockedFileWithCandidates,
    LockedFileWithLabels,
    ObservedFeatures,
    part_spec,
)
from regauge.attacks.weights import lineage, norm_vectors, public_base
from regauge.checkpoints.reader import open_checkpoint
from regauge.core.element import Element
from regauge.core.groups import Kind
from regauge.core.members import Member
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.matching.costs import Costs
from regauge.models.load import reinitialize
from regauge.models.resolve import spec_of as stored_spec
from support.locked_models import State, add_drift, model_of
from support.picos import build, spec_of

ASSETS = Path(__file__).parents[3] / "shared" / "assets"


def wrong(g: Element, h: Element) -> float:
    """The largest error of a member, relative to it."""
    distance = [
        np.linalg.norm(g.members[s].matrix() - m.matrix()) / np.linalg.norm(m.matrix())
        for s, m in h.members.items()
    ]
    return float(max(distance))


@pytest.mark.parametrize(
    ("name", "kind", "fold"),
    [
        ("gpt2", "permutation", False),
        ("bert", "signed", False),
        ("llama", "signed", False),
        ("vit", "permutation", False),
        ("swin", "permutation", False),
        ("llama", "orthogonal", True),
        ("gpt2", "orthogonal", True),
        ("gpt2", "full", False),
    ],
)
def test_a_public_base_gives_the_whole_key(name: str, kind: Kind, fold: bool) -> None:
    spec, base = model_of(name, fold)
    tuned_ = add_drift(spec, base, 0.01)
    g = element(spec, 5, within=kind)
    locked = apply(g, tuned_, "backbone")
    recovered = public_base(LockedFileWithBase(spec, locked, kind, base=base))
    unlocked = recovered.unlock(spec, locked)
    names = [n for n, part in spec.parts.items() if part == "backbone" and n in locked]
    distance, size = (
        sum(float((x[n] - tuned_[n]).square().sum()) for n in names) for x in (unlocked, locked)
    )
    assert size > 1  # the lock did something
    assert distance < 0.01 * size
    inside = Element(
        recovered.element.spec,
        {s: m for s, m in g.members.items() if s in recovered.element.members and kind != "full"},
    )
    assert (
        wrong(recovered.element, inside) < (1e-9 if kind in ("permutation", "signed") else 0.05)
        if inside.members
        else kind == "full"
    )


def test_gains_and_biases_give_the_stream_and_folded_norms_do_not() -> None:
    spec, base = model_of("gpt2")
    g = element(spec, 5, within="permutation")
    recovered = norm_vectors(
        LockedFileWithBase(
            spec, apply(g, add_drift(spec, base, 0.01), "backbone"), "permutation", base=base
        )
    )
    assert (
        recovered.element.members["stream"].permutation().index
        == g.members["stream"].permutation().index
    ).all()
    spec, base = model_of("gpt2", fold=True)
    g = element(spec, 5, within="orthogonal")
    assert not norm_vectors(
        LockedFileWithBase(spec, apply(g, base, "backbone"), "orthogonal", base=base)
    ).element.members


def test_a_stranger_as_base_gives_nothing() -> None:
    spec, base = model_of("gpt2")
    torch.manual_seed(99)
    other = {n: torch.randn_like(v) for n, v in base.items()}
    g = element(spec, 5, within="permutation")
    recovered = public_base(
        LockedFileWithBase(spec, apply(g, base, "backbone"), "permutation", base=other)
    )
    right = (
        recovered.element.members["stream"].permutation().index
        == g.members["stream"].permutation().index
    )
    assert right.mean() < 0.5
    assert recovered.relative > 0.5


def test_the_base_is_identified_through_any_lock() -> None:
    spec, base = model_of("llama")
    torch.manual_seed(3)
    candidates = {"base": base, "stranger": {n: v + torch.randn_like(v) for n, v in base.items()}}
    kinds: tuple[Kind, ...] = ("permutation", "signed", "full")
    for kind in kinds:
        locked = apply(element(spec, 8, within=kind), add_drift(spec, base, 0.01), "backbone")
        distances = lineage(LockedFileWithCandidates(spec, locked, kind, candidates=candidates))
        assert distances["base"] < 0.05 < 0.2 < distances["stranger"]


def test_products_do_not_depend_on_what_is_inside_a_layer() -> None:
    spec, state = model_of("llama")
    inside = element(spec, 2, spaces=["kv", "rep", "qk", "vo", "ffn"])
    backbone = part_spec(spec, "backbone")
    products = layer_products(Costs(backbone, state, apply(inside, state)), "stream")
    assert len(products) >= 3 * 2
    for y, x in products:
        np.testing.assert_allclose(y, x, atol=1e-9 * np.abs(x).max())
    assert LockedFile(spec, state).kind == "full"


def test_an_order_is_found_from_a_wrong_beginning() -> None:
    draw = np.random.default_rng(0)
    mix = draw.standard_normal((40, 6)) * np.linspace(1, 3, 6)
    t = mix @ mix.T
    truth = draw.permutation(40)
    moved = t[truth][:, truth] + 0.1 * draw.standard_normal((40, 40))
    start = truth.copy()
    start[:30] = np.roll(truth[:30], 1)  # three in four are wrong
    assert (fit_permutation([(moved, t)], start) == truth).all()
    assert (fit_permutation([(-moved, t)], start) != truth).any()


@pytest.mark.parametrize("alike", [True, False])
def test_an_order_is_found_without_a_beginning_if_matrices_are_alike(alike: bool) -> None:
    draw = np.random.default_rng(0)
    plain, noise, vector = (
        draw.standard_normal((60, 60)),
        draw.standard_normal((60, 60)),
        draw.standard_normal(60),
    )
    plain, noise = plain + plain.T, noise + noise.T
    like = 0.8 * plain + 0.6 * noise if alike else noise
    truth = draw.permutation(60)
    likeness = np.outer(
        vector[truth], vector + draw.standard_normal(60)
    )  # a hint of the order, which is not enough
    assert (likeness.argmax(1) == truth).mean() < 0.2
    right = anneal([(like[truth][:, truth] / 2, plain)], likeness, 16).argmax(1) == truth
    assert right.all() if alike else right.mean() < 0.2
    near = truth.copy()
    near[:4] = truth[[1, 0, 3, 2]]
    assert (
        refine_order([(like[truth][:, truth] / 2, plain)], likeness, near) == truth
    ).all() == alike


@pytest.mark.skipif(not (ASSETS / "gpt2_pair").exists(), reason="the shared assets are not here")
def test_the_edges_of_a_trained_gpt2_give_the_order_of_its_stream_and_those_of_another_do_not() -> (
    None
):
    spec, state = stored_model("seed1")
    g = element(spec, 5, within="permutation")
    locked = apply(g, state, "backbone")
    recovered = public_edges(LockedFile(spec, locked, "permutation"))
    assert wrong(recovered.element, Element(spec, {"stream": g.members["stream"]})) == 0
    unlocked = recovered.unlock(spec, locked)
    assert torch.equal(
        unlocked["transformer.h.2.ln_1.weight"], state["transformer.h.2.ln_1.weight"]
    )  # type: ignore[arg-type]
    other = stored_model("seed2")[1]
    mixed = {n: v if spec.parts.get(n) == "backbone" else other[n] for n, v in locked.items()}
    stranger = (
        public_edges(LockedFile(spec, mixed, "permutation")).element.members["stream"].permutation()
    )
    assert (stranger.index == g.members["stream"].permutation().index).mean() < 0.05


def test_edges_tell_no_signs_and_no_rotations() -> None:
    spec, state = model_of("llama")
    assert has_permuted_stream(LockedFile(spec, state, "permutation"))
    assert not has_permuted_stream(LockedFile(spec, state, "signed"))
    assert not public_edges(LockedFile(spec, state, "signed")).element.members
    spec, state = model_of("gpt2", fold=True)
    assert not has_permuted_stream(LockedFile(spec, state, "orthogonal"))
    assert sorted(
        public_edges(LockedFile(*model_of("gpt2"), "signed"))
        .element.members["stream"]
        .permutation()
        .index[0]
    ) == list(range(12))


def stored_model(seed: str) -> tuple[Spec, State]:
    """A GPT-2 of the assets, in single precision."""
    checkpoint = open_checkpoint(ASSETS / "gpt2_pair" / seed)
    return stored_spec(checkpoint), {n: checkpoint[n].float() for n in checkpoint}


def features(tokens: int, seed: int) -> torch.Tensor:
    """Rows of one distribution with channels that differ."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    x = torch.randn(tokens, 24, generator=draw).abs() ** torch.linspace(0.5, 2, 24)
    return x @ mix.T


def member(kind: Kind) -> Member:
    return GROUPS[kind].sample(24, 1, Stream(seed_key(4), "test"))


@pytest.mark.parametrize(
    ("kind", "tokens"), [("permutation", 4), ("signed", 4), ("orthogonal", 40)]
)
def test_a_few_known_inputs_give_the_key(kind: Kind, tokens: int) -> None:
    m = member(kind)
    x = features(tokens, 0)
    moved = x @ torch.from_numpy(m.matrix()[0]).float().T
    np.testing.assert_allclose(
        known_inputs(KnownInputs(x, moved, kind)).matrix(), m.matrix(), atol=1e-4
    )
    if kind == "orthogonal":  # fewer tokens than channels do not
        few = known_inputs(KnownInputs(x[:4], moved[:4], kind)).matrix()
        assert np.abs(few - m.matrix()).max() > 0.1


@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_moved_features_alone_give_a_permutation(kind: Kind) -> None:
    m = member(kind)
    moved = features(3000, 0) @ torch.from_numpy(m.matrix()[0]).float().T
    np.testing.assert_allclose(
        feature_statistics(ObservedFeatures(moved, features(3000, 1), kind)).matrix(),
        m.matrix(),
        atol=1e-9,
    )
    if kind == "signed":  # products cannot tell M from -M, what features lean to can
        np.testing.assert_allclose(
            feature_statistics(ObservedFeatures(-moved, features(3000, 1), kind)).matrix(),
            -m.matrix(),
            atol=1e-9,
        )
    noise = torch.randn(
        3000, 24, generator=torch.Generator().manual_seed(2)
    )  # features that tell nothing
    blind = feature_statistics(
        ObservedFeatures(
            noise @ torch.from_numpy(m.matrix()[0]).float().T, torch.randn(3000, 24), kind
        )
    ).matrix()
    assert (np.abs(blind - m.matrix()).max(2) < 1e-9).mean() < 0.5


@pytest.mark.parametrize("sign", [1, -1])
def test_moved_features_alone_give_most_of_a_rotation(sign: int) -> None:
    """Of what features restore: the turn is right where they have the same statistics in both
    samples, and so is its sign.
    """
    turn = torch.from_numpy(sign * member("orthogonal").matrix()[0]).float()
    x, others = features(20_000, 0), features(20_000, 1)
    estimate = torch.from_numpy(
        feature_statistics(ObservedFeatures(x @ turn.T, others, "orthogonal")).matrix()[0]
    ).float()
    distance = (x @ (estimate - turn).T).square().sum() / x.square().sum()
    assert distance < 0.2


@pytest.mark.parametrize("kind", ["permutation", "signed", "orthogonal"])
def test_hidden_states_give_the_text(kind: Kind) -> None:
    model = build("gpt2").eval()
    text = torch.tensor([[3, 17, 17, 5, 29, 8]])
    with torch.no_grad():
        states = model(input_ids=text, output_hidden_states=True).hidden_states[1][0]
    m = GROUPS[kind].sample(12, 1, Stream(seed_key(4), "test"))
    assert (
        vocabulary_search(
            HiddenStates(states @ torch.from_numpy(m.matrix()[0]).T, model, 1, kind), batch=16
        )
        == text[0].tolist()
    )
    assert (
        vocabulary_search(
            HiddenStates(torch.randn(6, 12, dtype=torch.float64), model, 1, kind), batch=16
        )
        != text[0].tolist()
    )


def task(model: torch.nn.Module, count: int, seed: int) -> Examples:
    pixels = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    labels = (pixels[:, 0, :4].mean((1, 2)) > 0).long() + 2 * (
        pixels[:, 1, 4:].mean((1, 2)) > 0
    ).long()
    return Examples(count, 5, lambda rows: ({"pixel_values": pixels[rows]}, labels[rows]))


def test_a_locked_backbone_is_worth_something_to_a_thief_and_keeps_its_weights() -> None:
    model = build("vit").float()
    spec, plain = spec_of(model), {n: v.clone() for n, v in model.state_dict().items()}
    locked = apply(element(spec, 3, within="permutation"), plain, "backbone")
    model.load_state_dict(locked)
    view = LockedFileWithLabels(
        spec, locked, "permutation", model=model, examples=task(model, 64, 0)
    )
    budget = Budget(steps=12, batch=16, lrs=(5e-3,))
    for steal in (new_edges, fine_tune, train_from_scratch):
        stolen = steal(view, budget).state_dict()
        inside = [n for n, part in spec.parts.items() if part == "backbone"]
        is_unchanged = all(torch.equal(stolen[n], locked[n]) for n in inside)
        assert is_unchanged is (steal is new_edges)
        assert not torch.equal(stolen["classifier.weight"], locked["classifier.weight"])
    assert all(
        torch.equal(v, locked[n]) for n, v in model.state_dict().items()
    )  # the view is not touched


def test_a_learned_order_is_a_permutation_that_the_model_uses() -> None:
    model = build("vit").float()
    spec = spec_of(model)
    view = LockedFileWithLabels(
        spec, dict(model.state_dict()), "permutation", model=model, examples=task(model, 64, 0)
    )
    learned, order = learn_order(view, Budget(steps=5, batch=16, lrs=(1e-2,)))
    assert sorted(order.index[0].tolist()) == list(range(12))
    pixels = view.examples.batch(np.arange(4))[0]["pixel_values"]
    with torch.no_grad():
        assert not torch.allclose(learned(pixels).logits, model(pixels).logits)


def test_attacks_know_nothing_of_keys_and_truth() -> None:
    folder = Path(__file__).parents[2] / "src/regauge/attacks"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            assert not [
                n
                for n in named
                if n.startswith(
                    (
                        "regauge.locking.keys",
                        "regauge.locking.lock",
                        "regauge.audit.lock_audit",
                        "regauge.locking.authorize",
                    )
                )
            ], path.name


def test_every_attack_says_what_it_is() -> None:
    of_locks = (
        public_edges,
        norm_vectors,
        public_base,
        lineage,
        known_inputs,
        feature_statistics,
        vocabulary_search,
        new_edges,
        fine_tune,
        learn_order,
    )
    of_labels = (
        labels.count_classes,
        labels.cluster_labels,
        labels.norm_attack,
        labels.direction_attack,
        labels.multilabel_attack,
    )
    of_passes = (
        served.known_streams,
        served.reused_key,
        served.relink_samples,
        served.average_views,
        served.regroup_tokens,
    )
    for attack in (
        *of_locks,
        *of_labels,
        *of_passes,
        texts.order_leak,
        texts.embedding_search,
        linear.ridge_inversion,
        decoder_inversion,
        position_probe,
        public_patches,
        link_samples,
    ):
        for word in (
            "Sees:",
            "Recovers:",
            "Why it works:",
            "What stops it:",
            "Floor:",
            "Ceiling:",
            "References:",
        ):
            assert word in " ".join((attack.__doc__ or "").split()), (attack.__name__, word)


def test_a_model_from_scratch_depends_on_its_seed_alone() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    states = []
    for seed in (0, 0, 1):
        torch.rand(7)  # the global random state does not matter
        states.append(reinitialize(own, seed, reset_modules=True).state_dict()["0.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert not torch.equal(states[0], own.state_dict()["0.weight"])
