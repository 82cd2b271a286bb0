"""The models of the demo: trained once, saved by the names of the README, used by all chapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.demo.context import OpenProgressBar
from regauge.demo.digits import SPLIT, load_images, make_vit, train
from regauge.demo.output import save_images, save_model, save_pickled


def train_pair(folder: Path, seed: int, bar: OpenProgressBar) -> tuple[Any, Any]:
    """Train two ViTs from different seeds on the digits, and save them and test images."""
    images, labels = load_images()
    images = images.float()
    models = []
    for number, name in enumerate(("VIT", "OTHER")):
        model = make_vit(seed + 10 + number).float()
        with bar(f"train {name}") as progress:
            train(model, images[:SPLIT], labels[:SPLIT], seed + 10 + number, progress)
        save_model(folder / name, model)
        models.append(model)
    save_pickled(folder / "PICKLED", models[0])
    save_images(folder / "IMAGES", SPLIT)
    return models[0], models[1]
