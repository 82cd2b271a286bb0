"""Studies of position tables with known answers, corruptions that corrupt as much as they say, and
the numbers of robustness by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from regauge.data.tasks import Examples
from regauge.jigsaw import JigsawError, MaskedJigsaw
from regauge.jigsaw.corruptions import CORRUPTIONS, corrupt
from regauge.jigsaw.figures import report_corruptions
from regauge.jigsaw.positions import find_positions
from regauge.jigsaw.robustness import (
    aupr,
    aurra,
    corruption_errors,
    mean_corruption_error,
    mean_error,
    score_predictions,
)
from regauge.jigsaw.studies import (
    accumulated_eigenvalues,
    attention_entropies,
    attention_maps,
    explained_variance,
    position_table,
    project_pca,
    project_umap,
    regress_positions,
    study_positions,
)

DRAW = np.random.default_rng(0)
PLACES = np.stack(np.divmod(np.arange(30), 6), 1).astype(float)  # 5 x 6


def vit() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=(20, 24),
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def test_a_table_that_holds_its_places_is_read_and_noise_is_not() -> None:
    linear = PLACES @ DRAW.normal(size=(2, 16)) + 3.0
    regression = regress_positions(linear, (5, 6))
    assert regression.grid_mae < 1e-9
    assert regression.index_mae < 1e-9  # the index is linear in row and column
    noise = regress_positions(DRAW.normal(size=(30, 16)), (5, 6))
    assert noise.grid_mae > 0.8
    assert noise.index_mae > 4
    assert noise.index_spread > 0


def test_explained_variance_and_eigenvalues_by_hand() -> None:
    table = np.zeros((4, 3))
    table[:, 0], table[:, 1] = [1, -1, 1, -1], [0.5, 0.5, -0.5, -0.5]
    assert explained_variance(table, (1, 2, 3)) == {
        1: pytest.approx(0.8),
        2: pytest.approx(1.0),
        3: pytest.approx(1.0),
    }
    assert accumulated_eigenvalues(table)[:2] == pytest.approx([0.8, 1.0])
    assert explained_variance(table + 7, (1,))[1] == pytest.approx(0.8)  # centred
    assert accumulated_eigenvalues(table + 7)[0] > 0.95  # as it is


def test_projections_lay_a_grid_out_as_a_grid() -> None:
    table = PLACES @ np.linalg.qr(DRAW.normal(size=(16, 2)))[0].T
    projected = project_pca(table)
    assert projected.shape == (30, 2)
    distance, meant = (np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (projected, PLACES))
    assert np.allclose(distance, meant)
    assert np.array_equal(projected, project_pca(table))


@pytest.mark.slow
def test_umap_keeps_neighbours() -> None:
    pytest.importorskip("umap")
    projected = project_umap(PLACES @ DRAW.normal(size=(2, 16)), neighbours=5)
    distance = np.linalg.norm(projected[:, None] - projected[None], axis=-1)
    near = np.abs(PLACES[:, None] - PLACES[None]).sum(-1) == 1
    assert distance[near].mean() < 0.5 * distance[~near].mean()


def test_the_table_is_of_patches_alone() -> None:
    wrapped = MaskedJigsaw(vit(), variant="F")
    with torch.no_grad():
        wrapped.index += 1
    table, grid = position_table(wrapped)
    own = wrapped.model.vit.embeddings.position_embeddings
    assert grid == (5, 6)
    assert np.allclose(table, own[0, 1:].detach().double().numpy() + 1)
    assert set(study_positions(wrapped)) == {
        "explained",
        "eigenvalues",
        "regression",
        "pca",
        "grid",
    }
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic"
    )
    bare = MaskedJigsaw(transformers.ResNetForImageClassification(config), variant="A")
    with pytest.raises(JigsawError, match="no table of absolute positions"):
        position_table(bare)
    with pytest.raises(JigsawError, match="no CLS token that attends to all"):
        attention_maps(bare, torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_positions_that_are_looked_up_are_not_reported_missing(name: str) -> None:
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 16,
        "patch_size": 4,
    }
    config = getattr(transformers, f"{name}Config")(vision_config=size, num_labels=3)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    place = find_positions(model)
    assert place.patch == (4, 4)
    assert "that is supported" in place.note
    assert "embeddings.position_embedding;" in place.note
    bare = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic"
        )
    )
    assert "has no absolute position embedding: of MJP" in find_positions(bare).note
    if name == "CLIP":
        assert attention_maps(
            MaskedJigsaw(model, variant="A"), torch.randn(1, 3, 16, 16)
        ).shape == (1, 2, 4, 4)
    else:
        with pytest.raises(JigsawError, match="no CLS token that attends to all"):
            attention_maps(MaskedJigsaw(model, variant="A"), torch.randn(1, 3, 16, 16))


def test_attention_maps_are_those_of_the_library() -> None:
    model = vit().eval()
    images = torch.randn(2, 3, 20, 24)
    maps = attention_maps(MaskedJigsaw(model), images)
    assert model.config._attn_implementation != "eager"  # put back
    model.set_attn_implementation("eager")
    expected = model(images, output_attentions=True).attentions[-1][:, :, 0, 1:]
    assert maps.shape == (2, 2, 5, 6)
    assert np.allclose(maps.reshape(2, 2, 30), expected.detach().numpy(), atol=1e-6)
    assert (attention_entropies(maps) <= 1 + 1e-9).all()
    assert (
        attention_entropies(np.eye(4).reshape(1, 1, 4, 4)[..., :1, :]).max() < 1e-9
    )  # on one patch alone


def test_attention_maps_of_timm() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_small_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=3,
    )
    maps = attention_maps(MaskedJigsaw(model), torch.randn(2, 3, 16, 16))
    assert maps.shape == (2, 2, 4, 4)
    assert 0 < maps.sum() < 4.01
    assert model.blocks[-1].attn.fused_attn


@pytest.mark.parametrize("registers", [0, 4])
def test_attention_maps_of_other_sizes_and_registers(registers: int) -> None:
    """DINOv2 stretches its positions over images of another size; registers stand between CLS and
    the patches.
    """
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 20,
        "patch_size": 4,
        "num_labels": 3,
    }
    if registers:
        config: Any = transformers.Dinov2WithRegistersConfig(**size, num_register_tokens=registers)
        model: Any = transformers.Dinov2WithRegistersForImageClassification(config)
    else:
        model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**size))
    images = torch.randn(2, 3, 12, 16)
    maps = attention_maps(MaskedJigsaw(model), images)
    model.eval().set_attn_implementation("eager")
    expected = model(images, output_attentions=True).attentions[-1][:, :, 0, 1 + registers :]
    assert maps.shape == (2, 2, 3, 4)
    assert np.allclose(maps.reshape(2, 2, 12), expected.detach().numpy(), atol=1e-6)
    with pytest.raises(JigsawError, match="multiple of the patch"):
        attention_maps(MaskedJigsaw(model), torch.randn(2, 3, 13, 16))


def test_attention_maps_of_timm_without_a_position_of_cls() -> None:
    """DeiT-III adds positions to patches alone. A register is not a CLS token, though it has a row
    in the table.
    """
    timm = pytest.importorskip("timm")
    size = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    }
    model = timm.create_model("deit3_small_patch16_224", **size).eval()
    recorded: list[Any] = []
    model.blocks[-1].attn.attn_drop.register_forward_pre_hook(
        lambda _, args: recorded.append(args[0])
    )
    maps = attention_maps(MaskedJigsaw(model), torch.randn(2, 3, 16, 16))
    assert np.allclose(
        maps.reshape(2, 2, 16), recorded[-1][:, :, 0, 1:].detach().numpy(), atol=1e-6
    )
    bare = timm.create_model(
        "vit_small_patch16_224", **size, class_token=False, reg_tokens=1, global_pool="avg"
    )
    with pytest.raises(JigsawError, match="no CLS token that attends to all"):
        attention_maps(MaskedJigsaw(bare), torch.randn(2, 3, 16, 16))


def pictures(h: int, w: int, channels: int = 3) -> Any:
    """Smooth images with edges: something that every corruption changes."""
    y, x = np.mgrid[:h, :w]
    base = (
        0.5
        + 0.3 * np.sin(x / w * 9) * np.cos(y / h * 7)
        + 0.2 * ((x // max(w // 5, 1) + y // max(h // 5, 1)) % 2)
    )
    return (
        np.stack([np.clip(base * s, 0, 1) for s in (1.0, 0.8, 0.6)[:channels]], -1)[None]
        .repeat(2, 0)
        .__mul__(255)
        .astype(np.uint8)
    )


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_corrupt_more_with_severity_at_any_size(name: str) -> None:
    for size in ((32, 32), (48, 80)):
        images = pictures(*size)
        changes = []
        for severity in (1, 5):
            changed = corrupt(images, name, severity, seed=3)
            assert changed.shape == images.shape
            assert changed.dtype == np.uint8
            changes.append(np.abs(changed.astype(float) - images).mean())
        assert changes[0] > 0.2
        assert changes[1] > changes[0] * (
            0.5 if name == "elastic_transform" else 1.0
        )  # whose severities are of two kinds
        assert np.array_equal(corrupt(images, name, 5, seed=3), changed)
    assert corrupt(pictures(32, 32, 1), name, 3).shape == (2, 32, 32, 1)


def test_corruptions_keep_what_they_should() -> None:
    images = pictures(32, 32)
    assert (
        abs(corrupt(images, "defocus_blur", 3).mean() - images.mean()) < 2
    )  # blurs move light, they do not make it
    assert corrupt(images, "brightness", 3).mean() > images.mean() + 20
    assert (corrupt(images, "contrast", 5).std((1, 2)) < 0.1 * images.std((1, 2))).all()
    noisy = corrupt(np.full((1, 64, 64, 3), 128, np.uint8), "gaussian_noise", 1).astype(float) / 255
    assert noisy.std() == pytest.approx(0.08, rel=0.05)
    spots = corrupt(np.full((1, 64, 64, 3), 128, np.uint8), "impulse_noise", 5)
    assert ((spots == 0) | (spots == 255)).mean() == pytest.approx(0.27, rel=0.05)
    one, other = corrupt(np.repeat(images[:1], 2, 0), "fog", 3)
    assert not np.array_equal(one, other)  # every image its own draw


def test_invalid_corruptions_are_rejected() -> None:
    for options, message in (
        ({"name": "rain", "severity": 1}, "rain"),
        ({"name": "fog", "severity": 6}, "severity must be from 1 to 5, got 6"),
    ):
        with pytest.raises(JigsawError, match=message):
            corrupt(pictures(32, 32), **options)
    with pytest.raises(JigsawError, match="bytes"):
        corrupt(pictures(32, 32) / 255, "fog", 1)


@pytest.mark.parametrize(("length", "sigma", "angle"), [(10, 3, 0.6), (4.5, 2, -2.5), (1, 0.5, 2)])
def test_blur_along_a_line_is_a_mean_of_shifted_copies(
    length: float, sigma: float, angle: float
) -> None:
    from scipy import ndimage

    from regauge.jigsaw.corruptions import _line_blur

    x = np.random.default_rng(0).random((20, 24, 3))
    steps = np.arange(0, length + 1e-9, max(0.5, length / 20))
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    copies = [
        ndimage.shift(x, (t * np.sin(angle), t * np.cos(angle), 0), order=1, mode="nearest")
        for t in steps
    ]
    slow = np.tensordot(weights / weights.sum(), np.stack(copies), 1)
    assert np.allclose(_line_blur(x, length, sigma, angle), slow)
    assert not np.allclose(_line_blur(x, length, sigma, angle + 1), slow)


def test_corruptions_of_a_part_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any size, and in any number of threads."""
    images = np.concatenate([pictures(24, 24), pictures(24, 24)])
    whole = corrupt(images, "impulse_noise", 3)
    assert np.array_equal(corrupt(images[1:], "impulse_noise", 3, first=1), whole[1:])
    assert not np.array_equal(corrupt(images[1:], "impulse_noise", 3), whole[1:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert np.array_equal(corrupt(images, "impulse_noise", 3), whole)
    finally:
        torch.set_num_threads(threads)


def test_errors_are_reported_where_the_reference_has_none() -> None:
    some, none = {"fog": [0.5]}, {"fog": [0.0]}
    (table,), _, missing = report_corruptions({"first": none, "second": some})
    assert [row[0] for row in table.rows] == ["fog", "mean"]
    assert "no error under fog" in missing[0]
    (table,), _, missing = report_corruptions({"first": some, "second": none})
    assert table.rows[-1] == ("mCE, relative to the first", 100.0, 0.0)
    assert not missing


def test_answers_are_of_classifiers_and_of_one_label() -> None:
    examples = Examples(
        2,
        3,
        lambda rows: (
            {"pixel_values": torch.zeros(len(rows), 3, 20, 24)},
            torch.zeros(len(rows), dtype=torch.long),
        ),
    )
    sure, right = score_predictions(vit(), examples)
    assert sure.shape == right.shape == (2,)
    with pytest.raises(JigsawError, match="ViTModel is not an image classifier"):
        score_predictions(vit().vit, examples)
    with pytest.raises(JigsawError, match="several labels each"):
        score_predictions(vit(), replace(examples, multi_label=True))


def test_numbers_of_robustness_by_hand() -> None:
    mine, reference = (
        {"fog": [0.2, 0.4], "snow": [0.5, 0.5]},
        {"fog": [0.4, 0.8], "snow": [0.25, 0.25]},
    )
    assert corruption_errors(mine, reference) == {
        "fog": pytest.approx(0.5),
        "snow": pytest.approx(2.0),
    }
    assert mean_corruption_error(mine, reference) == pytest.approx(1.25)
    assert mean_corruption_error(reference, reference) == pytest.approx(1.0)
    assert mean_error(mine) == pytest.approx(0.4)
    with pytest.raises(JigsawError, match="fog"):
        corruption_errors(mine, {"snow": [1.0, 1.0]})
    with pytest.raises(JigsawError, match="no error under fog: relative errors are undefined"):
        mean_corruption_error(mine, {**reference, "fog": [0.0, 0.0]})
    assert mean_corruption_error(mine, {**reference, "fog": [0.0, 0.3]}) == pytest.approx(
        2.0
    )  # one severity with errors will do
    assert aurra([0.9, 0.8, 0.1], [1, 1, 0]) == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert aurra([0.1, 0.8, 0.9], [1, 1, 0]) == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)
    assert aupr([0.9, 0.8], [0.1, 0.2]) == pytest.approx(1.0)
    assert aupr([0.1, 0.2], [0.8, 0.9]) < 0.5
