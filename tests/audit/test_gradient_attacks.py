"""Closed forms on updates: exact where the issue says so, nothing where a defence takes the
equations away, and errors that say what is missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from regauge.attacks.april import april, is_april, make_april_model
from regauge.attacks.classes import apportion, expand_counts, label_counts
from regauge.attacks.descents import (
    DescentConfig,
    april_descent,
    dlg,
    gradvit,
    idlg,
    inverting_gradients,
)
from regauge.attacks.embeddings import embedding_least_squares
from regauge.attacks.membership import auc
from regauge.attacks.passes import double_backward, make_gradient_fn
from regauge.attacks.spans import mask_leak, span_membership
from regauge.attacks.updates import Granted, SentUpdate, Update, check_update
from regauge.audit.gradient_audit.clients import contribute, prepare_model, rehearse
from regauge.audit.gradient_audit.engine import extract_patches
from regauge.defences.gradients import Clip, Private, clip_global_norm, parse_plan, part_parameters
from regauge.defences.parser import split_combination
from regauge.errors import DefenceError, UpdateError
from regauge.results.metrics import spectral_distance
from support.updates import examples, make_update, pictures, psnr, replace_tensors, timm_vit, vit

MODELS = {
    "transformers": vit,
    "timm": timm_vit,
    "timm DeiT, distilled": lambda: timm_vit("deit_small_distilled_patch16_224"),
}
NAMES = "vit.embeddings.position_embeddings", "vit.embeddings.patch_embeddings.projection.weight"


@pytest.mark.parametrize("name", MODELS)
def test_least_squares_is_exact_on_unmodified_models(name: str) -> None:
    view, truth = make_update(MODELS[name]())
    recovered, solved = embedding_least_squares(view)
    assert psnr(recovered, truth.read["pixel_values"]) > 60
    assert solved.rank == solved.unknowns == 16
    assert solved.residual < 1e-5
    other, _ = embedding_least_squares(make_update(MODELS[name](), first=3)[0])
    assert (
        psnr(other, truth.read["pixel_values"]) < 20
    )  # another image's update gives another image


@pytest.mark.slow
@pytest.mark.parametrize(("width", "heads"), [(384, 6), (768, 12)])
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_least_squares_gives_60_db_on_vit_s_and_vit_b_in_float32(
    width: int, heads: int, library: str
) -> None:
    if library == "timm":
        model = timm_vit(
            f"vit_{'small' if width == 384 else 'base'}_patch16_224",
            img_size=224,
            patch_size=16,
            embed_dim=width,
            depth=12,
            num_heads=heads,
        )
    else:
        model = vit(
            hidden_size=width,
            num_attention_heads=heads,
            num_hidden_layers=12,
            intermediate_size=4 * width,
            image_size=224,
            patch_size=16,
            initializer_range=0.02,
        )
    data = examples(1, side=224)
    inputs, labels = data.batch([0])
    update, truth = contribute(model, parse_plan("none"), data, inputs, labels)
    view = SentUpdate(model, update, (3, 224, 224), Granted(batch=1))
    assert psnr(embedding_least_squares(view)[0], truth.read["pixel_values"]) > 60
    patches = extract_patches(truth.read["pixel_values"], 16)
    others = extract_patches(pictures(1, seed=9, side=224), 16)
    scores = span_membership(view, torch.cat([patches, others]))
    assert auc(scores[:196], scores[196:]) > 0.99


def test_local_steps_on_one_image_do_not_hide_it() -> None:
    view, truth = make_update(vit(), "steps=5,lr=0.1", dtype=torch.float64)
    assert view.update.kind == "change"
    assert psnr(embedding_least_squares(view)[0], truth.read["pixel_values"]) > 100


def test_rows_shuffled_after_the_positions_change_nothing() -> None:
    plain, truth = make_update(vit(), dtype=torch.float64)
    shuffled, _ = make_update(vit(), "rows", dtype=torch.float64)
    for name, grad in plain.update.tensors.items():
        assert torch.allclose(grad, shuffled.update.tensors[name], atol=1e-10), name
    assert psnr(embedding_least_squares(shuffled)[0], truth.read["pixel_values"]) > 100


@pytest.mark.parametrize(
    "combination", ["batch=4", "clients=4", "noise=1", "private=1", "prune=0.95"]
)
def test_rehearsed_least_squares_is_at_the_floor_where_nothing_is_left(combination: str) -> None:
    own = examples(64, seed=5)
    images = own.batch(range(64))[0]["pixel_values"]
    gained = []
    for first in (0, 4, 8):
        view, truth = make_update(vit(), combination, first=first)
        rehearsals = tuple(rehearse(view.model, parse_plan(combination), own, 6, 7))
        granted = Granted(view.granted.batch, images=images, rehearsals=rehearsals)
        recovered, _ = embedding_least_squares(
            SentUpdate(view.model, view.update, view.shape, granted)
        )
        true = truth.original["pixel_values"]
        gained.append(
            psnr(recovered.expand_as(true), true) - psnr(images.mean(0).expand_as(true), true)
        )
    assert -1 < sum(gained) / 3 < 3


def test_a_prior_helps_where_equations_are_too_few() -> None:
    narrow = vit(hidden_size=12)  # 16 patches, 12 channels
    view, truth = make_update(narrow)
    recovered, solved = embedding_least_squares(view)
    plain, _ = embedding_least_squares(view, plain=True)
    assert solved.rank < solved.unknowns
    assert psnr(recovered, truth.read["pixel_values"]) > psnr(plain, truth.read["pixel_values"]) + 1


def test_mjp_without_its_unknown_embedding_gives_the_shuffled_image_away() -> None:
    view, truth = make_update(vit(), "mjp=0.5,unknown=false")
    recovered, _ = embedding_least_squares(view)
    assert (
        psnr(recovered, truth.read["pixel_values"]) > 60
    )  # the regression of positions is in the update, and is taken out of it
    assert psnr(recovered, truth.original["pixel_values"]) < 30


def test_mjp_without_a_shuffle_gives_the_image_away() -> None:
    view, truth = make_update(vit(), "mjp=0.5,shuffle=false")
    assert truth.puzzle is None
    assert psnr(embedding_least_squares(view)[0], truth.original["pixel_values"]) > 60


def test_mjp_hides_masked_patches_from_least_squares_and_not_its_mask() -> None:
    view, truth = make_update(vit(), "mjp=0.5")
    recovered, _ = embedding_least_squares(view)
    assert psnr(recovered, truth.read["pixel_values"]) < 40
    assert truth.puzzle is not None
    assert torch.equal(mask_leak(view), truth.puzzle.mask[0])
    noisy, _ = make_update(vit(), "mjp=0.5+noise=0.1")
    assert not torch.equal(mask_leak(noisy), truth.puzzle.mask[0])
    with pytest.raises(UpdateError, match="must have an unknown embedding"):
        mask_leak(make_update(vit())[0])


@pytest.mark.parametrize(
    "combination", ["none", "mjp=0.5", "withhold=positions", "freeze=embedding", "no-positions"]
)
def test_spans_tell_patches_at_batch_1(combination: str) -> None:
    view, truth = make_update(vit(hidden_size=64), combination, dtype=torch.float64)
    true, others = (
        extract_patches(truth.read["pixel_values"], 4),
        extract_patches(pictures(4, seed=3).double(), 4),
    )
    scores = span_membership(view, torch.cat([true, others]))
    assert auc(scores[: len(true)], scores[len(true) :]) >= 0.99


def test_spans_say_nothing_of_more_tokens_than_channels_or_of_withheld_layers() -> None:
    view, truth = make_update(vit(), "batch=8")
    true, others = (
        extract_patches(truth.read["pixel_values"], 4),
        extract_patches(pictures(8, seed=3), 4),
    )
    scores = span_membership(view, torch.cat([true, others]))
    assert 0.4 < auc(scores[: len(true)], scores[len(true) :]) < 0.6
    with pytest.raises(UpdateError, match="patch embedding or of the first attention"):
        span_membership(make_update(vit(), "freeze=embedding,first")[0], true)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("combination", ["none", "batch=4", "batch=7"])
def test_labels_are_counted(name: str, combination: str) -> None:
    view, truth = make_update(MODELS[name](), combination, first=2)
    assert torch.equal(label_counts(view), torch.bincount(truth.labels, minlength=5))
    assert sorted(truth.labels.tolist()) == expand_counts(label_counts(view)).tolist()


def test_labels_are_revealed_without_the_bias_and_not_without_the_head() -> None:
    view, truth = make_update(vit())
    assert int(label_counts(replace_tensors(view, classifier__bias=None)).argmax()) == int(
        truth.labels
    )
    with pytest.raises(UpdateError, match=r"classifier\.weight"):
        label_counts(make_update(vit(), "withhold=head")[0])
    assert apportion(torch.tensor([0.2, 1.4, 1.4]), 3).tolist() == [0, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_without_a_bias_reveals_labels(dtype: torch.dtype) -> None:
    """Their gradients add up to 0 in float64 too: the sign is that of the one number which is
    below.
    """
    for label in range(5):
        model = vit(seed=label)
        model.classifier = torch.nn.Linear(48, 5, bias=False)
        view, truth = make_update(model, first=label, dtype=dtype)
        assert int(truth.labels) == label
        assert int(label_counts(view).argmax()) == label


def test_invalid_updates_are_rejected() -> None:
    view, _ = make_update(vit())
    model, tensors = view.model, dict(view.update.tensors)
    name = NAMES[0]
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "at least one gradient"),
        ({"nobody": torch.zeros(2)}, "nobody"),
        ({name: torch.zeros(1, 3, 48)}, r"got \[1, 3, 48\]"),
        ({name: torch.full_like(tensors[name], torch.nan)}, "NaN"),
        ({n: torch.zeros_like(t) for n, t in tensors.items()}, "zero everywhere"),
    ]
    for options, message in bad:
        with pytest.raises(UpdateError, match=message):
            check_update(model, Update(options))
    with pytest.raises(UpdateError, match="steps must be >= 1 and lr > 0"):
        check_update(model, Update(tensors, "change"))
    check_update(model, Update(tensors))


def test_attacks_say_which_layer_is_missing() -> None:
    for part, name in (("positions", NAMES[0]), ("patches", NAMES[1])):
        view, _ = make_update(vit(), f"withhold={part}")
        with pytest.raises(UpdateError, match=name):
            embedding_least_squares(view)
    view, _ = make_update(vit())
    with pytest.raises(UpdateError, match="must have a nonzero row"):
        embedding_least_squares(
            replace_tensors(
                view,
                **{NAMES[0].replace(".", "__"): torch.zeros_like(view.update.tensors[NAMES[0]])},
            )
        )
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 5))
    with pytest.raises(UpdateError, match="no patch embedding"):
        embedding_least_squares(SentUpdate(plain, Update({}), (3, 16, 16)))


def test_combinations_are_read_and_refused() -> None:
    plan = parse_plan("noise=0.1+mjp=0.3,unknown=false+batch=4+withhold=positions,head")
    assert (plan.batch, plan.withheld, [type(d).__name__ for d in plan.update_defences]) == (
        4,
        ("positions", "head"),
        ["Withhold", "Noise"],
    )
    assert parse_plan("steps=3,fresh=true", batch=2).samples == 6
    assert parse_plan("none", batch=3, steps=2).steps is not None
    assert split_combination("clip=1e+1+noise=0.1,head+rows") == [
        "clip=1e+1",
        "noise=0.1,head",
        "rows",
    ]
    assert isinstance(parse_plan("clip=1e+1+noise=0.1").update_defences[0], Clip)
    for text, message in (
        ("fog", "fog"),
        ("mjp=0.5+no-positions", "no-positions"),
        ("withhold=tail", "tail"),
        ("batch=0", "samples must be an integer, got 0"),
        ("batch=2.5", "samples must be an integer, got 2.5"),
        ("steps=inf", "steps must be an integer, got inf"),
        ("clients=inf", "clients must be an integer, got inf"),
        ("batch=nan", "got nan"),
        ("noise=0", "noise must be positive"),
        ("clip=1+clip=2", "twice"),
        ("private=1+steps=3", "local steps"),
        ("mjp=0", "ratio of mjp must be > 0"),
        ("round=1", "bits"),
        ("prune=1", "share"),
    ):
        with pytest.raises(DefenceError, match=message):
            parse_plan(text)
    with pytest.raises(UpdateError, match="made of 4 samples"):
        contribute(vit(), parse_plan("batch=4"), examples(2), *examples(2).batch([0, 1]))


def test_what_is_withheld_is_trained_in_local_steps_and_what_is_frozen_is_not() -> None:
    plain, withheld, frozen = (
        make_update(vit(), f"steps=3,0.5{more}")[0].update.tensors
        for more in ("", "+withhold=embedding", "+freeze=embedding")
    )
    assert withheld.keys() == frozen.keys() == plain.keys() - part_parameters(vit(), "embedding")
    assert all(
        torch.equal(withheld[n], plain[n]) for n in withheld
    )  # it is not sent, and all else is as if it were
    assert not torch.equal(frozen["classifier.weight"], plain["classifier.weight"])
    plan = parse_plan("withhold=positions+freeze=head")
    assert (sorted(plan.withheld), plan.frozen) == (["head", "positions"], ("head",))


def test_parts_are_what_they_are_called() -> None:
    model = vit()
    assert part_parameters(model, "positions") == {NAMES[0]}
    assert part_parameters(model, "patches") == {NAMES[1], NAMES[1].replace("weight", "bias")}
    assert part_parameters(model, "embedding") == {
        n for n, _ in model.named_parameters() if ".embeddings." in n
    }
    assert part_parameters(model, "first") == {
        n for n, _ in model.named_parameters() if ".layers.0." in n
    }
    wrapped = prepare_model(model, parse_plan("mjp=0.5"))
    assert "unknown" in part_parameters(wrapped, "positions")
    assert all(n.startswith("model.vit.layers.0.") for n in part_parameters(wrapped, "first"))


def test_private_updates_are_clipped_by_sample_and_have_an_epsilon() -> None:
    pytest.importorskip("dp_accounting")
    view, _ = make_update(vit(), "batch=3+private=0.000001,norm=0.5")
    norm = sum(float(t.double().square().sum()) for t in view.update.tensors.values()) ** 0.5
    assert 0 < norm <= 0.5
    assert 4 < Private(1.0).epsilon() < 5.5
    assert Private(1.0).epsilon(10) > Private(1.0).epsilon() > Private(2.0).epsilon()
    assert clip_global_norm({"a": torch.tensor([3.0, 4.0])}, 10)["a"].tolist() == [3, 4]


def test_the_spectral_distance_is_that_of_the_pixels() -> None:
    a, b = pictures(3), pictures(3, seed=1)
    pixels = 1 - torch.nn.functional.cosine_similarity(a.double().flatten(1), b.double().flatten(1))
    assert torch.allclose(spectral_distance(a, b), pixels, atol=1e-10)
    assert torch.allclose(
        spectral_distance(a, 2 * a), torch.zeros(3, dtype=torch.float64), atol=1e-12
    )


def test_april_is_exact_on_its_own_block_in_float64_and_nothing_on_a_real_one() -> None:
    for model in (vit(), timm_vit()):
        view, truth = make_update(make_april_model(model), dtype=torch.float64)
        recovered, solved = april(view)
        assert psnr(recovered, truth.read["pixel_values"]) > 100
        assert solved.rank == solved.unknowns == 17
        rough, _ = make_update(make_april_model(model))
        assert psnr(april(rough)[0], truth.read["pixel_values"]) < 100  # float32
        real, _ = make_update(model, dtype=torch.float64)
        assert psnr(april(real)[0], truth.read["pixel_values"]) < 15
    assert is_april(view.model)
    assert not is_april(real.model)


@pytest.mark.slow
def test_april_gives_100_db_on_the_modified_vit_b() -> None:
    sizes = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
    }
    view, truth = make_update(
        make_april_model(vit(**sizes, initializer_range=0.02)), dtype=torch.float64
    )
    recovered, solved = april(view)
    assert psnr(recovered, truth.read["pixel_values"]) > 100
    assert solved.condition > 1e4


TINY = {"hidden_size": 24, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}


def test_guessed_gradients_are_the_clients_own_one_by_one_and_side_by_side() -> None:
    for combination in ("none", "mjp=0.5,localize=false"):
        view, truth = make_update(vit(**TINY), combination, dtype=torch.float64)
        mask = None if truth.puzzle is None else truth.puzzle.mask
        x = truth.read["pixel_values"][None]
        with double_backward():
            gradient_fn = make_gradient_fn(view, mask)
            one = gradient_fn(x, truth.labels[None])
            many = gradient_fn(torch.cat([x, 0 * x]), truth.labels.expand(2, 1))
        for name, grad in view.update.tensors.items():
            assert torch.allclose(one[name][0], grad, atol=1e-10), name
            assert torch.allclose(many[name][0], grad, atol=1e-10), name
            assert torch.allclose(
                many[name][1], gradient_fn(0 * x, truth.labels[None])[name][0], atol=1e-10
            )


@pytest.mark.parametrize("attack", [dlg, idlg, inverting_gradients, gradvit, april_descent])
def test_descents_lower_their_objective_and_know_the_truth_when_they_see_it(attack: Any) -> None:
    view, truth = make_update(vit(**TINY))
    how = {
        dlg: DescentConfig(
            objective="euclidean", signed=False, optimize_labels=True, schedule="none"
        ),
        gradvit: DescentConfig(
            objective="layers",
            tv_weight=0.01,
            seam_weight=0.01,
            consensus_weight=0.01,
            restarts=2,
            schedule="cosine",
        ),
        april_descent: DescentConfig(objective="april", signed=False),
    }.get(attack, DescentConfig(tv_weight=0.01))
    recovered = attack(view, replace(how, steps=12))
    assert recovered.images.shape == truth.read["pixel_values"].shape
    assert recovered.curve[-1] < recovered.curve[0]
    again = attack(view, replace(how, steps=12))
    assert torch.equal(recovered.images, again.images)
    if attack is inverting_gradients:
        at = attack(view, replace(how, steps=1), start=truth.read["pixel_values"])
        assert at.objective < 1e-5 < recovered.objective


def test_descents_say_what_they_need() -> None:
    view, _ = make_update(vit(**TINY), batch=None)
    with pytest.raises(UpdateError, match="batch size must be granted"):
        inverting_gradients(view)


def test_the_former_name_of_the_learning_rate_is_accepted() -> None:
    former, present = parse_plan("steps=4,rate=0.05"), parse_plan("steps=4,lr=0.05")
    assert former.steps == present.steps
    assert former.steps is not None
    assert former.steps.lr == 0.05
    with pytest.raises(DefenceError, match="speed"):
        parse_plan("steps=4,speed=0.05")
