"""What the demo leaves behind with `--output`: its models and images, by the names that the
README's commands use, so that each runs as it stands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regauge.demo.digits import load_images

# of the digits that no model of the demo has learned from: those after the first 1,500, less a few
IMAGE_COUNT = 300


def save_model(folder: Path, model: Any) -> None:
    """A model of digits as a checkpoint, with how its pixels are normalised."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5], "image_std": [0.5]})
    )


def save_pickled(folder: Path, model: Any) -> None:
    """The same as old checkpoints are: a pickle of tensors."""
    import torch

    folder.mkdir()
    (folder / "config.json").write_text(model.config.to_json_string())
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_images(folder: Path, first: int) -> None:
    """The digits from `first` on, as a folder of PNGs for each."""
    from PIL import Image

    images, labels = load_images()
    for number, (image, label) in enumerate(
        zip(images[first : first + IMAGE_COUNT], labels[first : first + IMAGE_COUNT], strict=True)
    ):
        place = folder / str(int(label))
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(((image[0] + 1) * 127.5).round().byte().numpy()).save(
            place / f"{number:03}.png"
        )
