"""Attacks that learn from updates of their own: they get past defences that closed forms do not,
and get nothing where nothing is left.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regauge.attacks.classes import label_counts
from regauge.attacks.membership import auc, available_layers, calibrate, calibrated_membership
from regauge.attacks.regression import fit_ridge, resemblance, ridge_regression, update_features
from regauge.attacks.spans import span_membership
from regauge.attacks.updates import Granted, SentUpdate, Threat
from regauge.audit.engine import select_attacks
from regauge.audit.gradient_audit.attempts import ATTACKS, Budget, attempt
from regauge.audit.gradient_audit.clients import (
    build_view,
    contribute,
    prepare_model,
    rehearse,
    sample_rehearsals,
)
from regauge.audit.gradient_audit.engine import (
    GradientCase,
    audit_combination,
    extract_patches,
    split_own_images,
)
from regauge.defences.gradients import parse_plan, part_parameters
from regauge.errors import UpdateError
from regauge.jigsaw.layers import find_layers
from support.updates import examples, psnr, vit


def make_view(combination: str, first: int = 0, count: int = 4) -> tuple[SentUpdate, torch.Tensor]:
    """A view with other images and rehearsals, and the image."""
    plan = parse_plan(combination)
    model = prepare_model(vit(), plan)
    data, own = examples(12), examples(60, seed=5)
    inputs, labels = data.batch(range(first, first + plan.samples * plan.clients))
    update, truth = contribute(model, plan, data, inputs, labels, first)
    images = own.batch(range(60))[0]["pixel_values"]
    rehearsals = rehearse(model, plan, own, count, 7)
    return build_view(
        model, plan, update, truth, Threat(images=True), images, rehearsals
    ), truth.read["pixel_values"]


def membership_auc(view: SentUpdate, true: torch.Tensor) -> float:
    others = extract_patches(examples(12, seed=9).batch(range(4))[0]["pixel_values"], 4)
    candidates = torch.cat([extract_patches(true, 4), others])
    scores = calibrated_membership(view, candidates)
    inside = len(candidates) - len(others)
    return auc(scores[:inside], scores[inside:])


def test_membership_goes_by_deeper_layers_where_the_first_are_not_sent() -> None:
    view, true = make_view("freeze=embedding,first")
    with pytest.raises(UpdateError, match="patch embedding or of the first attention"):
        span_membership(view, extract_patches(true, 4))
    assert available_layers(view, find_layers(view.model, view.shape)) == ["block 1"]
    views = [make_view("freeze=embedding,first", first) for first in (0, 3, 6)]
    strangers = [examples(12, seed=77).batch([n])[0]["pixel_values"] for n in (3, 4, 5)]
    members = sum(membership_auc(view, true) for view, true in views) / 3
    others = (
        sum(membership_auc(view, other) for (view, _), other in zip(views, strangers, strict=True))
        / 3
    )
    assert members > 0.7
    assert others < 0.6  # patches of other images are not members


def test_membership_is_a_guess_under_private_gradients() -> None:
    values = [membership_auc(*make_view("private=4", first)) for first in (0, 3, 6)]
    assert 0.3 < sum(values) / 3 < 0.7


def test_membership_needs_something_to_practise_on() -> None:
    view, true = make_view("none")
    bare = SentUpdate(view.model, view.update, view.shape, Granted(batch=1))
    with pytest.raises(UpdateError, match="number of rehearsals must be >= 2"):
        calibrate(bare)
    view, true = make_view("freeze=matrices")
    with pytest.raises(UpdateError, match="patch embedding or an attention"):
        calibrated_membership(view, extract_patches(true, 4))


@pytest.mark.parametrize(
    ("combination", "helps"), [("freeze=embedding,first", True), ("private=20", False)]
)
def test_regression_learns_what_updates_say(combination: str, helps: bool) -> None:
    plan = parse_plan(combination)
    model, own = prepare_model(vit(), plan), examples(80, seed=5)
    learned = fit_ridge(sample_rehearsals(model, plan, own, 80, 1000))
    mean = own.batch(range(80))[0]["pixel_values"].mean(0, keepdim=True)
    gained = []
    for first in range(8):
        view, true = make_view(combination, first, 1)
        gained.append(psnr(ridge_regression(view, learned), true) - psnr(mean, true))
    if helps:
        assert np.mean(gained) > 0.3
        assert learned.unexplained < 0.97
        view, true = make_view(combination, 0, 1)
        assert resemblance(view, extract_patches(true, 4), learned).shape == (16,)
    else:
        assert abs(np.mean(gained)) < 0.3  # the mean image, and not below it
        assert learned.unexplained > 0.97


def test_a_layer_that_reads_one_token_gives_it_away() -> None:
    view, _ = make_view("none")
    grads = view.grads
    head = {n: grads[n] for n in ("classifier.weight", "classifier.bias")}
    features = update_features(head, "inputs")
    k = int(grads["classifier.bias"].abs().argmax())
    assert torch.allclose(
        features, (grads["classifier.weight"][k] / grads["classifier.bias"][k]).double(), atol=1e-4
    )
    with pytest.raises(UpdateError, match="rehearsed updates must be >= 10"):
        fit_ridge([])


def test_matrices_are_all_but_biases_and_gains_and_labels_stay() -> None:
    model = vit()
    gone = part_parameters(model, "matrices")
    assert all((p.ndim > 1) == (n in gone) for n, p in model.named_parameters())
    view, _ = make_view("freeze=matrices")
    assert view.update.tensors
    assert not set(view.update.tensors) & gone
    plain, _ = make_view("none")
    assert torch.equal(label_counts(view), label_counts(plain))
    many, _ = make_view("freeze=matrices+batch=4")
    assert int(label_counts(many).sum()) == 4


def test_practice_samples_the_requested_number() -> None:
    plan, own = parse_plan("batch=4"), examples(6)
    made = list(sample_rehearsals(vit(), plan, own, 5, 0))
    assert [len(m.inputs) for m in made] == [4] * 5
    assert not torch.equal(made[0].inputs, made[1].inputs)
    assert not list(
        sample_rehearsals(vit(), parse_plan("batch=7"), own, 5, 0)
    )  # never more than there are


def test_members_are_distinguished_from_held_out_images() -> None:
    mine, heldout = split_own_images(examples(40))
    options = mine.batch(range(len(mine)))[0]["pixel_values"]
    assert len(mine) + len(heldout) == 40
    assert not any(
        torch.equal(a, b)
        for a in heldout.batch(range(len(heldout)))[0]["pixel_values"]
        for b in options
    )


def test_attacks_that_learn_share_a_lesson_and_say_where_they_cannot() -> None:
    case = GradientCase(vit(), examples(4), examples(40, seed=5), [0.5] * 3, [0.5] * 3, updates=2)
    attacks = select_attacks(["regression", "membership", "resemblance"], ATTACKS)
    row = audit_combination(case, case.model, "none", attacks, Budget(practice=12))
    assert row.by_attack["regression"].facts[0]["features"] in ("inputs", "vectors")
    assert len(row.shares["patches"]) == 2
    row = audit_combination(case, case.model, "none", attacks, Budget(practice=2))
    assert "rehearsed updates must be >= 10" in row.reasons["regression"]
    assert "rehearsed updates must be >= 10" in row.reasons["resemblance"]
    view, _ = make_view("none")
    assert "learns from updates" in attempt(attacks[0], view, Budget()).reason
