"""Models and images that the demo saves with `--output`, named as in the commands of the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regauge.demo.digits import load_images

# of the test images, which no model of the demo is trained on
IMAGE_COUNT = 300


def save_model(folder: Path, model: Any) -> None:
    """Save a model of digits as a checkpoint, with the normalization of its pixels."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5], "image_std": [0.5]})
    )


def save_pickled(folder: Path, model: Any) -> None:
    """Save a model in the format of old checkpoints, a pickle of tensors."""
    import torch

    folder.mkdir()
    (folder / "config.json").write_text(model.config.to_json_string())
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_images(folder: Path, first: int) -> None:
    """Save digits from the index `first` on, in one folder of PNGs for each class."""
    from PIL import Image

    images, labels = load_images()
    for number, (image, label) in enumerate(
        zip(images[first : first + IMAGE_COUNT], labels[first : first + IMAGE_COUNT], strict=True)
    ):
        class_folder = folder / str(int(label))
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(((image[0] + 1) * 127.5).round().byte().numpy()).save(
            class_folder / f"{number:03}.png"
        )
