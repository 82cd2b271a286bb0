"""Updates of real weights on real images: modules of no library give their images away as those of
libraries do. Needs the assets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regauge.attacks.embeddings import embedding_least_squares
from regauge.attacks.updates import Granted, SentUpdate
from regauge.audit.gradient_audit.clients import contribute
from regauge.checkpoints.reader import open_checkpoint
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan
from regauge.errors import UpdateError
from support.own_modules import Cifar, Mnist
from support.updates import psnr, replace_tensors

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
pytestmark = pytest.mark.skipif(
    not (ASSETS / "vit_cifar10_postln.safetensors").exists(),
    reason=f"no {ASSETS / 'vit_cifar10_postln.safetensors'}",
)
MODELS: dict[str, Any] = {
    "vit_cifar10_postln": (
        Cifar,
        "cifar10_test.npz",
        "X",
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
        "patch_embed.proj.weight",
    ),
    "vit_mnist_preln": (Mnist, "mnist.npz", "X_test", (0.1307,), (0.3081,), ""),
}


def load_case(name: str) -> tuple[Any, torch.Tensor]:
    kind, file, field, mean, std, _ = MODELS[name]
    model = kind()
    checkpoint = open_checkpoint(ASSETS / f"{name}.safetensors")
    model.load_state_dict({n: checkpoint[n].float() for n in checkpoint})
    pixels = torch.from_numpy(np.load(ASSETS / file)[field][:4]).float() / 255
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return model.eval(), (pixels - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(std).view(
        1, -1, 1, 1
    )


def test_a_trained_module_of_no_library_gives_a_real_image_away() -> None:
    model, images = load_case("vit_cifar10_postln")
    data = Examples(4, 10, lambda i: ({"pixel_values": images[i]}, torch.tensor([3, 8, 8, 0])[i]))
    inputs, labels = data.batch([1])
    update, truth = contribute(model, parse_plan("none"), data, inputs, labels)
    view = SentUpdate(model, update, (3, 32, 32), Granted(batch=1))
    recovered, solved = embedding_least_squares(view, plain=True)
    assert solved.rank == 64
    assert psnr(recovered, truth.read["pixel_values"], 4.0) > 40
    assert psnr(recovered, images[:1], 4.0) < 20  # and no other
    with pytest.raises(UpdateError, match=r'must contain "patch_embed\.proj\.weight"'):
        embedding_least_squares(replace_tensors(view, patch_embed__proj__weight=None))


def test_a_module_with_another_patch_embedding_is_reported() -> None:
    model, images = load_case("vit_mnist_preln")
    data = Examples(4, 10, lambda i: ({"pixel_values": images[i]}, torch.tensor([7, 2, 1, 0])[i]))
    inputs, labels = data.batch([0])
    update, _ = contribute(model, parse_plan("none"), data, inputs, labels)
    with pytest.raises(UpdateError, match="Mnist has no patch embedding"):
        embedding_least_squares(SentUpdate(model, update, (1, 28, 28), Granted(batch=1)))
