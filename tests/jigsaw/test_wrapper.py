"""MaskedJigsaw: exactly the plain model where it should be, unknown positions exactly where the
mask says, and the ways in which people train.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from regauge.data.tasks import Examples
from regauge.jigsaw import VARIANTS, JigsawError, MaskedJigsaw, reference_weight, sample_puzzle
from regauge.jigsaw.masks import Puzzle
from regauge.jigsaw.metrics import capture_features, evaluate, evaluation_puzzles
from regauge.jigsaw.positions import find_positions
from regauge.jigsaw.wrapper import ramp, stop_after
from support import forks
from support.own_modules import Cifar, Mnist
from support.ports import free_port

HERE = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def vit(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "num_labels": 5,
        "initializer_range": 0.3,
    }
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**SMALL, **sizes, **more})
    )


def deit() -> Any:
    torch.manual_seed(0)
    config = transformers.DeiTConfig(
        **SMALL, image_size=16, patch_size=4, num_labels=5, initializer_range=0.3
    )
    return transformers.DeiTForImageClassification(config)


def swin(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
        **more,
    )
    return transformers.SwinForImageClassification(config)


def resnet() -> Any:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def timm_model(name: str, **more: Any) -> Any:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=5, **more)


def tiny(name: str) -> Any:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm_model(name, **sizes)


def timm_swin() -> Any:
    return timm_model(
        "swin_tiny_patch4_window7_224",
        img_size=16,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
    )


WITH_TABLE = {
    "ViT": vit,
    "DeiT": deit,
    "Swin": lambda: swin(use_absolute_embeddings=True),
    "timm ViT": lambda: tiny("vit_small_patch16_224"),
    "timm DeiT": lambda: tiny("deit_small_patch16_224"),
    "timm DeiT, distilled": lambda: tiny("deit_small_distilled_patch16_224"),
}
WITHOUT = {
    "Swin": swin,
    "timm Swin": timm_swin,
    "ResNet": resnet,
    "timm ResNet": lambda: timm_model("resnet10t"),
}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 3, 1])


def logits_of(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    outputs = model(images)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def make_wrapped(name: str) -> Any:
    """A model with positions that are felt: fresh ones are nothing, or almost."""
    model = WITH_TABLE[name]()
    with torch.no_grad():
        model.get_parameter(find_positions(model).table).normal_(
            generator=torch.Generator().manual_seed(5)
        )
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", WITH_TABLE)
def test_with_ratio_0_and_no_regression_it_is_the_plain_model(name: str) -> None:
    plain = make_wrapped(name).train()
    wrapped = MaskedJigsaw(copy.deepcopy(plain), 0.0, variant="G").train()
    torch.manual_seed(2)
    expected = torch.nn.functional.cross_entropy(logits_of(plain, IMAGES), LABELS)
    torch.manual_seed(2)
    out = wrapped(IMAGES, LABELS)
    assert torch.equal(out.loss, expected)
    assert out.extra == 0
    expected.backward()
    out.loss.backward()
    own, theirs = gradients(plain), gradients(wrapped.model)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[k], theirs[k]) for k in own)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_without_a_puzzle_the_trained_wrapper_is_its_plain_model(name: str) -> None:
    wrapped = MaskedJigsaw(make_wrapped(name), 0.5, probability=1.0).train()
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    wrapped(IMAGES, LABELS).loss.backward()
    optimizer.step()
    wrapped.eval()
    out = wrapped(IMAGES)
    assert out.extra is None
    plain = wrapped.unwrap()
    assert torch.equal(out.logits, logits_of(plain, IMAGES))
    assert not torch.allclose(
        wrapped(IMAGES, puzzle=sample_puzzle(3, wrapped.layout.grid, 0.9, 0)).logits, out.logits
    )


@pytest.mark.parametrize("name", WITH_TABLE)
@pytest.mark.parametrize("rows", [1, 3])
def test_only_masked_patches_carry_the_unknown_embedding(name: str, rows: int) -> None:
    """Read off the gradient: masked places of the table have none, the tokens before the patches
    always have one.
    """
    wrapped = MaskedJigsaw(make_wrapped(name), 0.5).eval()
    place = wrapped.layout
    table = wrapped.model.get_parameter(place.table)
    puzzle = sample_puzzle(rows, place.grid, 0.5, 4)
    positions = wrapped.positions(puzzle.mask)
    assert positions.shape == (rows, *table.shape[1:])
    assert torch.equal(positions[:, : place.prefix], table[:, : place.prefix].expand(rows, -1, -1))
    assert torch.equal(
        positions[:, place.prefix :][puzzle.mask],
        wrapped.unknown.expand(int(puzzle.mask.sum()), -1),
    )
    assert torch.equal(
        positions[:, place.prefix :][~puzzle.mask],
        table[:, place.prefix :].expand(rows, -1, -1)[~puzzle.mask],
    )
    wrapped(IMAGES, puzzle=puzzle).logits.square().sum().backward()
    felt = table.grad[0].abs().sum(1) > 0
    visible = (~puzzle.mask).any(0)
    assert torch.equal(felt[place.prefix :], visible)
    assert felt[: place.prefix].all()
    assert wrapped.unknown.grad.abs().sum() > 0
    assert puzzle.mask.any(0).any()


def test_a_shuffle_under_the_unknown_embedding_moves_no_more_than_attention_sees() -> None:
    """Only their content distinguishes masked patches: two shuffles of one mask give
    the same answer, and without it they do not.
    """
    puzzle = sample_puzzle(1, (4, 4), 0.5, 0)
    other = sample_puzzle(1, (4, 4), 0.5, 0)
    at = puzzle.mask[0].nonzero()[:, 0]
    other.order[0, at] = at.flip(0)
    assert not torch.equal(puzzle.order, other.order)
    with torch.no_grad():
        known, unknown = (MaskedJigsaw(vit(), 0.5, variant=v).eval() for v in "EG")
        same = [unknown(IMAGES, puzzle=p).logits for p in (puzzle, other)]
        separate = [known(IMAGES, puzzle=p).logits for p in (puzzle, other)]
    assert torch.allclose(*same, atol=1e-5)
    assert not torch.allclose(*separate, atol=1e-2)


def examples(count: int = 40) -> Examples:
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return Examples(
        count,
        5,
        lambda rows: ({"pixel_values": images[rows]}, torch.zeros(len(rows), dtype=torch.long)),
    )


@pytest.mark.parametrize("name", ["ViT", "DeiT", "timm ViT", "timm DeiT"])
def test_without_positions_consistency_is_100_percent(name: str) -> None:
    bare = MaskedJigsaw(make_wrapped(name), variant="B")
    scores = evaluate(bare, examples(), (0.5, 0.9))
    assert [s.consistency for s in scores.shuffled] == [1.0, 1.0]
    assert max(s.norm for s in scores.shuffled) < 1e-4
    assert not any(
        p.requires_grad for n, p in bare.model.named_parameters() if n == bare.layout.table
    )
    plain = evaluate(MaskedJigsaw(make_wrapped(name), variant="A"), examples(), (0.5, 0.9))
    assert plain.shuffled[1].norm > 100 * max(s.norm for s in scores.shuffled)
    assert plain.shuffled[1].squared != plain.shuffled[1].norm


def test_measures_are_what_they_say() -> None:
    wrapped = MaskedJigsaw(vit(), variant="A").eval()
    scores = evaluate(wrapped, examples(12), (0.5,), batch=5)
    again = evaluate(wrapped, examples(12), (0.5,), batch=12)
    for field, one in scores.shuffled[0].to_dict().items():  # batches do not matter
        assert one == pytest.approx(again.shuffled[0].to_dict()[field], rel=1e-5)
    images = examples(12).batch(range(12))[0]["pixel_values"]
    puzzle = evaluation_puzzles(list(range(12)), wrapped, images, 0.5, 0)
    with torch.no_grad():
        states = [
            wrapped.model(x, output_hidden_states=True) for x in (images, puzzle.apply(images))
        ]
        cls = [wrapped.model.vit.layernorm(s.hidden_states[-1])[:, 0] for s in states]
    norms = (cls[0] - cls[1]).norm(dim=1)
    assert scores.shuffled[0].norm == pytest.approx(float(norms.mean()), rel=1e-4)
    assert scores.shuffled[0].squared == pytest.approx(float(norms.square().mean()), rel=1e-4)
    assert scores.shuffled[0].consistency == pytest.approx(
        float((states[0].logits.argmax(1) == states[1].logits.argmax(1)).float().mean())
    )


@pytest.mark.parametrize("letter", VARIANTS)
def test_every_variant_trains_and_unwraps(letter: str) -> None:
    wrapped = MaskedJigsaw(vit(), 0.5, variant=letter, probability=1.0, per="sample").train()
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for _ in range(2):
        out = wrapped(IMAGES, LABELS)
        assert (out.extra > 0) == (VARIANTS[letter].localize is not None)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    learnt = {
        n
        for n, p in wrapped.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0 and not n.startswith("model.")
    }
    assert ("unknown" in learnt) == VARIANTS[letter].unknown
    assert ("index" in learnt) == VARIANTS[letter].index
    assert bool({n for n in learnt if n.startswith("localizer")}) == (
        VARIANTS[letter].localize in ("linear", "mlp")
    )
    assert all(torch.isfinite(p).all() for p in wrapped.parameters())
    wrapped.eval()
    before = wrapped(IMAGES).logits
    assert torch.allclose(wrapped.unwrap()(IMAGES).logits, before, atol=1e-6)
    assert torch.allclose(wrapped(IMAGES).logits, before, atol=1e-6)


def test_the_regression_is_on_the_unmasked_positions() -> None:
    """A table that says its places is without loss, wherever it is kept; a wrong one costs only
    where it is kept.
    """
    wrapped = MaskedJigsaw(vit(), 0.5, variant="I").train()
    localizer = wrapped.localizer
    table = torch.zeros(16, 16)
    table[:, :2] = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float()
    with torch.no_grad():
        localizer.project.weight.zero_()
        localizer.project.weight[0, 0] = localizer.project.weight[1, 1] = 1
        localizer.project.bias.zero_()
    visible = torch.ones(1, 16, dtype=torch.bool)
    assert localizer(table, visible) == 0
    table[5, 0] += 2
    assert localizer(table, visible).item() == pytest.approx(2 / 2 / 16)
    visible[0, 5] = False
    assert localizer(table, visible) == 0


def test_warm_up_probability_and_schedules() -> None:
    wrapped = MaskedJigsaw(
        vit(), 0.5, warmup=5, probability=0.5, weight=reference_weight(5, 15), schedule=ramp(15)
    )
    shuffled, weights = [], []
    for _ in range(205):
        puzzle, weight = wrapped._next_puzzle(3, (4, 4), IMAGES)
        shuffled.append(puzzle is not None)
        weights.append(float(weight))
    assert not any(shuffled[:5])
    assert 70 < sum(shuffled) < 130
    assert weights[0] == 0
    assert weights[5] == pytest.approx(0.01)
    assert weights[-1] == pytest.approx(0.005)
    always, never = (MaskedJigsaw(vit(), 0.5, probability=p) for p in (1.0, 0.0))
    assert all(always._next_puzzle(3, (4, 4), IMAGES)[0] is not None for _ in range(5))
    assert all(never._next_puzzle(3, (4, 4), IMAGES)[0] is None for _ in range(5))
    ending = MaskedJigsaw(vit(), 0.5, probability=1.0, schedule=stop_after(8, 0.75))
    assert [ending._next_puzzle(3, (4, 4), IMAGES)[0] is not None for _ in range(8)] == [
        True
    ] * 6 + [False] * 2


def test_the_puzzle_of_a_pass_is_known_by_its_number() -> None:
    """A query changes nothing, and a pass uses the returned puzzle: its puzzle's images, and its
    regression.
    """
    wrapped = MaskedJigsaw(
        vit(), 0.5, probability=0.7, warmup=2, weight=lambda number: 0.1 * number, seed=3
    ).train()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    puzzles = [
        wrapped.puzzle_at(number, len(images), wrapped.grid_of(images)) for number in range(8)
    ]
    assert wrapped.passes == 0
    assert [p is None for p in puzzles[:2]] == [True, True]
    assert {p is None for p in puzzles[2:]} == {True, False}
    for number, puzzle in enumerate(puzzles):
        out = wrapped(images)
        given = wrapped.eval()(images, puzzle=puzzle).logits
        wrapped.train()
        assert torch.equal(out.logits, given)
        mask = torch.zeros(1, 16, dtype=torch.bool) if puzzle is None else puzzle.mask
        assert torch.allclose(out.extra, wrapped.weight_at(number) * wrapped.regression(mask))


def test_state_dict_round_trip_goes_on_with_the_same_puzzles(tmp_path: Path) -> None:
    one = MaskedJigsaw(vit(), 0.5, per="sample", seed=3).train()
    for _ in range(4):
        one(IMAGES, LABELS).loss.backward()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    two = MaskedJigsaw(vit(initializer_range=0.1), 0.5, per="sample", seed=3).train()
    two.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert two.passes == 4
    losses = [[m(IMAGES, LABELS).loss.item() for _ in range(4)] for m in (one, two)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1


@pytest.mark.parametrize("name", WITHOUT)
def test_without_absolute_positions_only_the_shuffle_remains_with_a_warning(name: str) -> None:
    with pytest.warns(
        UserWarning,
        match=r"no absolute position embedding: of MJP only the shuffle of patches applies "
        r"\(variant E\)",
    ):
        wrapped = MaskedJigsaw(
            WITHOUT[name](), 0.5, probability=1.0, patch=None if "Swin" in name else 4
        )
    assert wrapped.variant == VARIANTS["E"]
    out = (
        wrapped.train()(IMAGES.repeat(1, 1, 2, 2), LABELS)
        if "timm R" in name
        else wrapped.train()(IMAGES, LABELS)
    )
    out.loss.backward()
    assert out.logits.shape == (3, 5)
    for letter in "BFGJ":
        with pytest.raises(JigsawError, match="no absolute position embedding"):
            MaskedJigsaw(WITHOUT[name](), 0.5, variant=letter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MaskedJigsaw(WITHOUT[name](), 0.5, variant="E")


def test_grids_that_are_not_square_and_other_patches() -> None:
    wide = vit(image_size=(8, 24), patch_size=4)
    wrapped = MaskedJigsaw(wide, 0.5, probability=1.0).train()
    assert wrapped.layout.grid == (2, 6)
    out = wrapped(torch.randn(2, 3, 8, 24), torch.tensor([0, 1]))
    out.loss.backward()
    assert wrapped.unknown.grad.abs().sum() > 0
    timm = timm_model(
        "vit_small_patch16_224", img_size=(16, 32), patch_size=8, embed_dim=16, depth=1, num_heads=2
    )
    assert MaskedJigsaw(timm, 0.5).layout.grid == (2, 4)
    with pytest.raises(JigsawError, match="multiple of the patch, 4 x 4, got 18 x 16"):
        MaskedJigsaw(vit(), 0.5)(torch.zeros(1, 3, 18, 16))
    with pytest.raises(JigsawError, match="has 8 x 4 patches, but the position table has 4 x 4"):
        MaskedJigsaw(vit(), 0.5)(torch.zeros(1, 3, 32, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.0}, "ratio must be in .*got 1"),
        ({"ratio": -0.5}, "got -0.5"),
        ({"variant": "K"}, 'unknown variant "K"'),
        ({"per": "pixel"}, "per"),
        ({"probability": 2.0}, "probability"),
        ({"table": "nowhere"}, "no parameter"),
        ({"patch": 8}, "patches must be of 4 x 4 pixels.*got 8 x 8"),
        ({"grid": (9, 9)}, "17 rows"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JigsawError, match=message):
        MaskedJigsaw(vit(), **options)
    with pytest.raises(JigsawError, match="wrapped already"):
        MaskedJigsaw(MaskedJigsaw(vit()))


def dinov2(**more: Any) -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "num_labels": 5,
    }
    torch.manual_seed(0)
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, **more))


STRETCHING = {
    "DINOv2": (dinov2, {}),
    "ViT": (lambda: vit(image_size=24, patch_size=4), {"interpolate_pos_encoding": True}),
}


@pytest.mark.parametrize("name", STRETCHING)
def test_positions_that_a_model_stretches_are_stretched_alike(name: str) -> None:
    make, inputs = STRETCHING[name]
    model = make()
    wrapped = MaskedJigsaw(model, 0.5, probability=1.0, per="sample").eval()
    with torch.no_grad():
        model.get_parameter(wrapped.layout.table).normal_(
            generator=torch.Generator().manual_seed(5)
        )
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    none = Puzzle(torch.zeros(1, 16, dtype=torch.bool), torch.arange(16)[None], (4, 4))
    plain = wrapped(images, **inputs).logits
    torch.testing.assert_close(
        wrapped(images, puzzle=none, **inputs).logits, plain, rtol=0, atol=1e-6
    )
    assert not torch.allclose(
        wrapped(images, puzzle=sample_puzzle(2, (4, 4), 0.5, 0), **inputs).logits, plain, atol=1e-4
    )
    wrapped.train()(images, torch.tensor([1, 2]), **inputs).loss.backward()
    assert wrapped.unknown.grad.abs().sum() > 0
    assert model.get_parameter(wrapped.layout.table).grad.abs().sum() > 0
    with pytest.raises(JigsawError, match="has 4 x 8 patches, but the position table has 6 x 6"):
        wrapped(torch.zeros(1, 3, 16, 32), **inputs)


@pytest.mark.slow
def test_a_real_dinov2_at_another_size_than_its_own() -> None:
    path = Path(os.environ.get("REGAUGE_ASSETS", "nowhere")) / "dinov2-small"
    if not path.exists():
        pytest.skip("make real fetches dinov2-small")
    model = transformers.Dinov2ForImageClassification.from_pretrained(path, num_labels=4)
    wrapped = MaskedJigsaw(model, 0.3, probability=1.0)
    assert wrapped.layout.grid == (37, 37)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(wrapped.eval()(images).logits, model(images).logits)
    wrapped.train()(images, torch.tensor([1, 2])).loss.backward()
    assert wrapped.unknown.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "kind", "side", "patch"),
    [("vit_cifar10_postln", Cifar, 32, None), ("vit_mnist_preln", Mnist, 28, 7)],
)
def test_real_checkpoints_of_no_library(name: str, kind: Any, side: int, patch: int | None) -> None:
    from safetensors.torch import load_file

    path = HERE.parents[1] / "shared" / "assets" / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"{path.name} is absent")
    model = kind()
    model.load_state_dict(load_file(path))
    wrapped = MaskedJigsaw(model, 0.1, patch=patch).eval()
    images = torch.randn(2, 3 if kind is Cifar else 1, side, side)
    assert torch.equal(wrapped(images).logits, model(images))
    shuffled = wrapped(images, puzzle=sample_puzzle(2, wrapped.layout.grid, 0.5, 0)).logits
    assert not torch.allclose(shuffled, model(images), atol=1e-2)
    wrapped.train()(images, torch.tensor([1, 2])).loss.backward()


def test_mixed_precision_and_half_models() -> None:
    wrapped = MaskedJigsaw(vit(), 0.5, probability=1.0, per="sample").train()
    with torch.autocast("cpu", torch.bfloat16):
        out = wrapped(IMAGES, LABELS)
    assert out.logits.dtype == torch.bfloat16
    assert out.extra.dtype == torch.float32
    out.loss.backward()
    assert wrapped.unknown.grad.abs().sum() > 0
    half = MaskedJigsaw(vit().bfloat16(), 0.5, probability=1.0).train()
    assert half.unknown.dtype == torch.bfloat16
    half(IMAGES.bfloat16(), LABELS).loss.backward()
    assert half.unknown.grad.abs().sum() > 0


def test_soft_labels() -> None:
    soft = torch.softmax(torch.randn(3, 5), 1)
    wrapped = MaskedJigsaw(vit(), 0.5, variant="A").train()
    out = wrapped(IMAGES, soft)
    assert torch.equal(out.loss, torch.nn.functional.cross_entropy(out.logits, soft))


def test_compiled_it_computes_the_same() -> None:
    plain = MaskedJigsaw(vit(), 0.5, per="sample").train()
    fast = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    for _ in range(4):
        one, other = plain(IMAGES, LABELS), fast(IMAGES, LABELS)
        assert torch.allclose(one.loss, other["loss"], atol=1e-5)
        assert torch.allclose(one.extra, other["extra"], atol=1e-6)
    assert plain.passes == fast.passes == 4


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 5} for i in range(16)]
    wrapped = MaskedJigsaw(vit(), 0.5)
    before = wrapped.unknown.detach().clone()
    arguments = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        report_to=[],
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = transformers.Trainer(wrapped, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert wrapped.passes == 8
    assert not torch.equal(before, wrapped.unknown)
    assert trainer.predict(data).predictions.shape == (16, 5)
    again = MaskedJigsaw(vit(), 0.5)
    from safetensors.torch import load_file

    again.load_state_dict(
        load_file(
            max(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name[11:])) / "model.safetensors"
        )
    )
    assert torch.equal(again.unknown, wrapped.unknown)
    assert again.passes == 8


@pytest.mark.parametrize(
    "more",
    [{"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}],
    ids=["checkpointing", "smoothing"],
)
def test_what_trainer_asks_of_a_model_is_passed_on(more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 5} for i in range(8)]
    wrapped = MaskedJigsaw(vit(), 0.5)
    arguments = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **more,
    )
    transformers.Trainer(wrapped, arguments, train_dataset=data).train()
    assert wrapped.passes == 2
    assert wrapped.is_gradient_checkpointing == ("gradient_checkpointing" in more)
    assert wrapped.config is wrapped.model.config
    with pytest.raises(AttributeError, match="nonsense"):
        wrapped.nonsense  # noqa: B018
    bare = MaskedJigsaw(Mnist(), 0.5, patch=7)
    assert not hasattr(bare, "config")
    assert copy.deepcopy(wrapped).config is not wrapped.config


def test_two_processes_learn_one_model(tmp_path: Path) -> None:
    """DDP, with the variables that torchrun sets: every process has its own puzzles, and all have
    the same weights in the end.
    """
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from support.own_modules import Cifar\n"
        "from regauge.jigsaw import MaskedJigsaw\n"
        "torch.set_num_threads(1)\n"
        "torch.manual_seed(0)\n"
        "dist.init_process_group('gloo')\n"
        "wrapped = MaskedJigsaw(Cifar(), 0.5).train()\n"
        "images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])\n"
        "model = torch.nn.parallel.DistributedDataParallel(wrapped)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "masks = []\n"
        "drawn = wrapped._next_puzzle\n"
        "wrapped._next_puzzle = lambda *a: masks.append(drawn(*a)) or masks[-1]\n"
        "for _ in range(6):\n"
        "    optimizer.zero_grad(); model(images, labels).loss.backward(); optimizer.step()\n"
        "state = torch.cat([p.detach().flatten() for p in model.parameters()])\n"
        "states = [torch.empty_like(state) for _ in range(2)]\n"
        "dist.all_gather(states, state)\n"
        "assert torch.equal(*states) and torch.isfinite(state).all()\n"
        "flags = torch.tensor([float(p is not None) + sum(0.01 * i for i in "
        "(p.order[0].tolist() if p else [])[:3]) for p, _ in masks])\n"
        "both = [torch.empty_like(flags) for _ in range(2)]\n"
        "dist.all_gather(both, flags)\n"
        "assert not torch.equal(*both)\n"
        "open(f'{sys.argv[1]}/done-{dist.get_rank()}', 'w').close()\n"
        # the first to leave would take the other's connection away
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    both = [
        forks.Program(code, tmp_path, env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    errors = [program.stderr.read() for program in both]
    for program in both:
        program.kill()
    # Judged by what both wrote after their last check: how gloo's threads end with the process is
    # not ours, and now and then they abort.
    assert sorted(f.name for f in tmp_path.glob("done-*")) == ["done-0", "done-1"], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_small_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224"]
)
def test_whole_models_of_timm(name: str) -> None:
    model = timm_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = MaskedJigsaw(model, 0.1, probability=1.0).train()
    wrapped(torch.randn(2, 3, 224, 224), torch.tensor([0, 1])).loss.backward()
    assert wrapped.layout.patch == ((4, 4) if "swin" in name else (16, 16))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Swin"])
def test_whole_models_of_transformers(kind: str) -> None:
    small = {
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    }
    more = {"use_absolute_embeddings": True} if kind == "Swin" else small
    config = getattr(transformers, f"{kind}Config")(num_labels=5, **more)
    wrapped = MaskedJigsaw(
        getattr(transformers, f"{kind}ForImageClassification")(config), 0.1, probability=1.0
    ).train()
    wrapped(torch.randn(2, 3, 224, 224), torch.tensor([0, 1])).loss.backward()
    assert wrapped.unknown.grad.abs().sum() > 0
    assert wrapped.layout.grid == ((56, 56) if kind == "Swin" else (14, 14))


def test_features_are_what_the_head_is_given() -> None:
    model = vit().eval()
    with torch.no_grad(), capture_features(model) as features:
        logits = model(IMAGES).logits
        assert torch.allclose(model.classifier(features()), logits)


def test_a_score_tells_the_wrapped_model_from_the_unwrapped(tmp_path: Path) -> None:
    """Under puzzles the wrapped model receives what was shuffled; a plain one, and the same one
    unwrapped, are not.
    """
    from experiments.paper_002.jigsaw_cells import how, score_of, subjects_of
    from experiments.shared.runner import Lab

    lab = Lab("pico", cache=tmp_path)
    found = {
        letter: score_of(lab, subjects_of("pico")["vit"], how(letter, 0.5), 0).values
        for letter in "AJ"
    }
    at_half = {
        letter: next(s for s in v["shuffled"] if s["ratio"] == 0.5) for letter, v in found.items()
    }
    assert found["A"]["bare"] == at_half["A"]
    assert found["J"]["bare"]["norm"] != pytest.approx(at_half["J"]["norm"], rel=1e-3)


def test_a_recipe_has_steps_or_epochs_and_positions_may_be_larger() -> None:
    from experiments.paper_002.jigsaw_cells import subjects_of
    from experiments.shared.models import build
    from regauge.data.train import count_steps

    assert count_steps({"batch": 50, "epochs": 3}, 1020) == 60
    assert count_steps({"batch": 50, "steps": 7}, 1020) == 7
    about = subjects_of("pico")["vit"].model
    (plain, larger), name = (
        (build({**about, **more}, 0) for more in ({}, {"positions": 3.0})),
        "vit.embeddings.position_embeddings",
    )
    assert torch.equal(larger.get_parameter(name), 3 * plain.get_parameter(name))
    assert all(
        torch.equal(larger.state_dict()[n], t) for n, t in plain.state_dict().items() if n != name
    )
