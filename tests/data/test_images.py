"""Images of any size and colour, read as a model reads them: by the command line and by tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from regauge.cli import main
from regauge.data.datasets import Data, open_data
from regauge.data.tasks import channels_of, prepare, read_examples, size_of, task_of
from regauge.errors import DataError

HALF: dict[str, Any] = {"mean": [0.5], "std": [0.5]}
HOW = ["--mean", "0.5", "--std", "0.5"]


def vit(**more: Any) -> transformers.ViTForImageClassification:
    torch.manual_seed(0)
    size = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
    }
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**size | {"num_labels": 2} | more)
    ).eval()


def photos(folder: Path, *kinds: tuple[str, int, int]) -> Path:
    """A folder of two classes: colour, height and width of each image, in turn in one and the
    other.
    """
    draw = np.random.default_rng(0)
    for i, (mode, height, width) in enumerate(kinds):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(
            0, 256, (height, width, 3) if mode == "RGB" else (height, width), np.uint8
        )
        Image.fromarray(pixels).save(path)
    return folder


MIXED = (("RGB", 8, 8), ("L", 8, 8), ("RGB", 12, 9), ("L", 5, 20))


@pytest.mark.parametrize("channels", [3, 1])
def test_sizes_and_colours_may_differ_on_the_command_line(
    channels: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = photos(tmp_path / "photos", *MIXED)
    vit(num_channels=channels).save_pretrained(tmp_path / "model")
    assert (
        main(
            [
                "jigsaw",
                "train",
                str(tmp_path / "model"),
                "--data",
                str(data),
                *HOW,
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(tmp_path / "out"),
                "--data",
                str(data),
                *HOW,
                "--ratios",
                "0.5",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "barrier",
                str(tmp_path / "model"),
                str(tmp_path / "out"),
                "--data",
                str(data),
                *HOW,
                "--no-calibrate",
            ]
        )
        == 0
    )
    capsys.readouterr()


def test_an_image_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    examples, task = read_examples(vit(), open_data(photos(tmp_path, *MIXED)), **HALF)
    assert task["size"] == 8
    whole = examples.batch(np.arange(4))[0]["pixel_values"]
    assert whole.shape == (4, 3, 8, 8)
    for i in range(4):
        assert torch.equal(examples.batch(np.array([i]))[0]["pixel_values"][0], whole[i])


def test_what_has_one_size_and_colour_is_read_as_before(tmp_path: Path) -> None:
    data = open_data(photos(tmp_path, ("RGB", 16, 16), ("RGB", 16, 16)))
    read = read_examples(vit(), data, **HALF)[0].batch(np.arange(2))[0]["pixel_values"]
    pixels = (
        torch.from_numpy(data["image"].to_array()).permute(0, 3, 1, 2).float() / 255 - 0.5
    ) / 0.5
    assert torch.equal(
        read, torch.nn.functional.interpolate(pixels, (8, 8), mode="bilinear", align_corners=False)
    )
    grey = open_data(photos(tmp_path / "grey", ("L", 8, 8), ("L", 8, 8)))
    read = read_examples(vit(), grey, mean=[0.5] * 3, std=[0.5] * 3)[0].batch(np.arange(2))[0][
        "pixel_values"
    ]
    assert torch.equal(
        read,
        (
            torch.from_numpy(grey["image"].to_array())[:, None].expand(-1, 3, -1, -1).float() / 255
            - 0.5
        )
        / 0.5,
    )


def test_a_model_of_colours_reads_grey(tmp_path: Path) -> None:
    grey = open_data(photos(tmp_path, ("L", 8, 8), ("L", 8, 8)))
    for one in (grey, Data("d", {"image": grey["image"].to_array(), "label": grey["label"]}, "")):
        read = read_examples(vit(), one, **HALF)[0].batch(np.arange(2))[0]["pixel_values"]
        assert torch.equal(
            read,
            (
                torch.from_numpy(grey["image"].to_array())[:, None].expand(-1, 3, -1, -1).float()
                / 255
                - 0.5
            )
            / 0.5,
        )


def test_a_grey_model_reads_colours_of_files_and_of_arrays_alike(tmp_path: Path) -> None:
    data = open_data(photos(tmp_path, ("RGB", 8, 8), ("RGB", 8, 8)))
    array = Data("d", {"image": data["image"].to_array(), "label": data["label"]}, "")
    one, other = (
        read_examples(vit(num_channels=1), d, **HALF)[0].batch(np.arange(2))[0]["pixel_values"]
        for d in (data, array)
    )
    assert one.shape == (2, 1, 8, 8)
    assert float((one - other).abs().max()) < 2.1 / 255 / 0.5  # PIL's sum is of whole numbers


def test_experiments_read_grey_among_colours(tmp_path: Path) -> None:
    task = {
        "kind": "images",
        "classes": 2,
        "size": 8,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    examples = prepare(task, open_data(photos(tmp_path, *MIXED), size=8))
    assert examples.batch(np.arange(4))[0]["pixel_values"].shape == (4, 3, 8, 8)
    assert examples.batch(np.array([1]))[0]["pixel_values"].shape == (1, 3, 8, 8)


def test_a_model_of_any_size_needs_an_explicit_size(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_labels=2)
    model, data = (
        transformers.ResNetForImageClassification(config).eval(),
        open_data(photos(tmp_path / "photos", *MIXED)),
    )
    with pytest.raises(
        DataError, match=r"different sizes \(5 x 20 and 12 x 9\), and the model does not define"
    ) as refused:
        read_examples(model, data, beside=tmp_path, **HALF)
    assert "preprocessor_config.json" in str(refused.value.hint)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 16}}))
    examples, task = read_examples(model, data, beside=tmp_path, **HALF)
    assert examples.batch(np.arange(4))[0]["pixel_values"].shape == (4, 3, 16, 16)
    same = open_data(photos(tmp_path / "same", ("RGB", 9, 9), ("RGB", 9, 9)))
    examples, task = read_examples(model, same, beside=tmp_path, **HALF)
    assert task["size"] is None  # one size is taken as it is
    assert examples.batch(np.arange(2))[0]["pixel_values"].shape == (2, 3, 9, 9)


def test_an_audit_resizes_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = photos(tmp_path / "photos", *MIXED)
    vit().save_pretrained(tmp_path / "model")
    assert main(["audit", "split", str(tmp_path / "model"), "--data", str(data), *HOW]) == 1
    output = capsys.readouterr().err
    assert "all images of photos must be 8 x 8, got 5 x 20" in output
    assert "pass --resize to resize them" in output


@pytest.mark.parametrize(
    "kinds", [MIXED, (("RGB", 48, 48), ("RGB", 48, 48)), (("RGB", 32, 32), ("L", 32, 32))]
)
def test_a_model_need_not_be_square(kinds: Any, tmp_path: Path) -> None:
    model = vit(image_size=[32, 48])
    examples, task = read_examples(model, open_data(photos(tmp_path, *kinds)), **HALF)
    assert task["size"] == [32, 48]
    pixels = examples.batch(np.arange(2))[0]["pixel_values"]
    assert pixels.shape == (2, 3, 32, 48)
    model(pixels)


def test_images_need_not_be_square(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Height counts too: 4 x 8 has the width that the model reads."""
    data = photos(tmp_path / "photos", ("RGB", 4, 8), ("RGB", 4, 8))
    model = vit(image_size=[8, 8])
    examples, task = read_examples(model, open_data(data), **HALF)
    assert task["size"] == 8  # one number for a square: experiments are cached by it
    assert examples.batch(np.arange(2))[0]["pixel_values"].shape == (2, 3, 8, 8)
    vit(image_size=[4, 8]).save_pretrained(tmp_path / "flat")
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(tmp_path / "flat"),
                "--data",
                str(data),
                *HOW,
                "--ratios",
                "0.5",
            ]
        )
        == 0
    )
    model.save_pretrained(tmp_path / "model")
    assert main(["audit", "split", str(tmp_path / "model"), "--data", str(data), *HOW]) == 1
    assert "the images of photos must be 8 x 8, got 4 x 8" in capsys.readouterr().err


def test_images_are_resized_to_the_requested_height_and_width(tmp_path: Path) -> None:
    data = open_data(photos(tmp_path, *MIXED), size=(6, 10))
    assert data["image"].to_array().shape == (4, 6, 10, 3)
    assert data.digest != open_data(tmp_path, size=(10, 6)).digest
    assert size_of(vit(image_size=[32, 48])) == (32, 48)
    assert size_of(vit()) == (8, 8)
    assert size_of(torch.nn.Linear(2, 2)) is None


SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "options"), [("vit_tiny_patch16_224", VIT), ("swin_tiny_patch4_window7_224", SWIN)]
)
def test_a_timm_model_reads_what_it_was_made_for(
    name: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=2, **options).eval()
    assert size_of(model) == (32, 32)
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": name, "num_classes": 2, "model_args": options})
    )
    data = photos(tmp_path / "photos", *MIXED)
    assert (
        main(["barrier", str(tmp_path), str(tmp_path), "--data", str(data), "--no-calibrate"]) == 0
    )
    capsys.readouterr()
    assert size_of(timm.create_model("resnet18")) == (224, 224)  # takes any: what it was trained on


def test_rows_without_a_label_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit().save_pretrained(tmp_path / "model")
    images = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "d.npz", image=images, label=np.array([0, 1, -1, -1]))
    for line in (
        ["train", str(tmp_path / "model"), "-o", str(tmp_path / "out")],
        ["evaluate", str(tmp_path / "model")],
    ):
        assert main(["jigsaw", *line, "--data", str(tmp_path / "d.npz"), *HOW]) == 1
        output = capsys.readouterr().err
        assert "2 of 4 rows of d.npz have the label -1 (no label), the first is row 2" in output
        assert "hint: remove these rows" in output
    for labelled, label in (
        (False, [0, 1, -1, -1]),
        (True, [[1, -1], [-1, 1], [1, 1], [-1, -1]]),
    ):  # unread, or a no
        read_examples(
            vit(),
            Data("d", {"image": images, "label": np.array(label)}, ""),
            labelled=labelled,
            **HALF,
        )


@pytest.mark.parametrize(
    ("mean", "std", "output"),
    [
        (
            "0.5,0.5",
            "0.5",
            "--mean must have one number for each channel (3), or one for all, got 2",
        ),
        (
            "0.5",
            "0.5,0.5",
            "--std must have one number for each channel (3), or one for all, got 2",
        ),
        ("0.5", "0", "--std must be positive, got 0.0"),
        ("0.5", "0.5,-1,0.5", "--std must be positive, got 0.5, -1.0, 0.5"),
        ("0.5", "inf", "--std must be finite, got inf"),
        ("nan", "0.5", "--mean must be finite, got nan"),
    ],
)
def test_mean_and_std_fit_the_channels(
    mean: str, std: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit().save_pretrained(tmp_path / "model")
    data = photos(tmp_path / "photos", ("RGB", 8, 8), ("L", 8, 8))
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(tmp_path / "model"),
                "--data",
                str(data),
                "--mean",
                mean,
                "--std",
                std,
            ]
        )
        == 1
    )
    stderr = capsys.readouterr().err
    assert output in stderr
    assert "bug in regauge" not in stderr


def test_mean_and_std_come_one_by_one(tmp_path: Path) -> None:
    data = open_data(photos(tmp_path / "photos", ("RGB", 8, 8), ("RGB", 8, 8)))
    with pytest.raises(DataError, match=r"normalization of the model.s images is unknown"):
        task_of(vit(), data, beside=tmp_path, mean=[0.3])
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3})
    )
    task, _ = task_of(vit(), data, beside=tmp_path, mean=[0.3])
    assert (task["mean"], task["std"]) == ([0.3] * 3, [0.5] * 3)
    (tmp_path / "scalar").mkdir()
    (tmp_path / "scalar" / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": 0.5, "image_std": 0.25})
    )
    assert task_of(vit(), data, beside=tmp_path / "scalar")[0]["std"] == [0.25]
    with pytest.raises(
        DataError,
        match=r"the image_mean of .*preprocessor_config.json must have one number for each "
        r"channel \(1\), or one for all, got 3(\n|$)",
    ):
        task_of(vit(num_channels=1), data, beside=tmp_path)
    assert task_of(vit(num_channels=1), data, beside=tmp_path, **HALF)[0]["std"] == [0.5]


def test_channels_are_read_off_the_model() -> None:
    assert channels_of(vit(num_channels=1)) == 1
    assert channels_of(torch.nn.Sequential(torch.nn.Conv2d(4, 2, 1), torch.nn.Conv2d(2, 2, 1))) == 4
    assert channels_of(torch.nn.Conv2d(48, 2, 1)) is None  # of what was made of pixels
    assert channels_of(torch.nn.Linear(2, 2)) is None
