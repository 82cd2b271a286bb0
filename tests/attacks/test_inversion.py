"""Attacks on the features of images, against ground truth: exact where they must be, at the floor
where nothing is to be had.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regauge.attacks.inversion import (
    decoder_inversion,
    link_samples,
    position_probe,
    public_patches,
    restore_order,
    to_images,
    to_patches,
)
from regauge.attacks.linear import ridge_inversion
from regauge.attacks.views import PairedImages
from regauge.errors import MetricError
from regauge.results.metrics import Lpips, feature_similarity, is_identified, mse, psnr, ssim
from support.features import PATCH, TOKENS, VALUES, Embedding, pictures, shuffle_tokens


def test_patches_and_back() -> None:
    x = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    y = to_patches(x, 4)
    assert y.shape == (2, 4, 48)
    assert torch.equal(y[0, 1].view(3, 4, 4), x[0, :, :4, 4:])
    assert torch.equal(to_images(y, 4, 3), x)


@pytest.mark.parametrize("width", [VALUES, 3 * VALUES], ids=["square", "wide"])
def test_a_public_embedding_gives_the_images_back_exactly(width: int) -> None:
    """In order or shuffled, where W is square too: there every place fits every token, and what a
    patch looks like decides.
    """
    embed, true = Embedding(width), pictures(6, 2)
    for observed in (embed(true), shuffle_tokens(embed(true))[0]):
        recovered = public_patches(embed.view(observed))
        assert float(mse(recovered, true).max()) < 1e-8


def test_the_first_token_is_distinguished_from_patches() -> None:
    embed, true = Embedding(2 * VALUES), pictures(4, 2)
    first = torch.full((2 * VALUES,), 0.3)
    observed = shuffle_tokens(torch.cat([first.expand(4, 1, -1), embed(true)], 1))[0]
    assert float(mse(public_patches(replace(embed.view(observed), first=first)), true).max()) < 1e-8


def test_noise_is_a_defence_of_a_public_embedding() -> None:
    embed, true = Embedding(VALUES), pictures(6, 2)
    z = embed(true)
    recovered = [
        float(
            mse(
                public_patches(
                    replace(
                        embed.view(shuffle_tokens(z + s * z.std() * torch.randn_like(z))[0]),
                        tolerance=1.0,
                    )
                ),
                true,
            ).mean()
        )
        for s in (0.01, 0.3, 3.0)
    ]
    assert recovered[0] < 0.01 < recovered[1] < recovered[2]


def test_positions_are_read_off_shuffled_tokens() -> None:
    embed, true = Embedding(2 * VALUES), pictures(20, 2)
    observed, order = shuffle_tokens(embed(true))
    scores = position_probe(
        PairedImages(observed, embed(pictures(300, 1)), pictures(300, 1), PATCH)
    )
    assert float((scores == order).float().mean()) > 0.97
    assert torch.allclose(restore_order(observed, order), embed(true))
    blind = Embedding(
        2 * VALUES, positions=0.0
    )  # no positions in the tokens: what is left is what patches of a place look like
    observed, order = shuffle_tokens(blind(true))
    scores = position_probe(
        PairedImages(observed, blind(pictures(300, 1)), pictures(300, 1), PATCH)
    )
    assert float((scores == order).float().mean()) < 0.3


def test_a_decoder_that_asks_all_tokens_does_not_mind_their_order() -> None:
    """The paper's decoder and ours, on shuffled rows, with the same few epochs: ours has the
    images, the paper's has not begun. (It gets there: its attention can sort tokens too.) From
    noise there is nothing to be had.
    """
    embed, true, own = Embedding(2 * VALUES), pictures(24, 2), pictures(300, 1)

    def error(observed: torch.Tensor, features: torch.Tensor, ordered: bool) -> float:
        view = PairedImages(observed, features, own, PATCH)
        recovered = decoder_inversion(
            view, in_order=ordered, hidden=64, depth=1, epochs=10, patience=4, batch=32, lr=3e-3
        )
        assert len(recovered.losses) <= 10
        return float(mse(recovered.images, true).mean())

    torch.manual_seed(0)
    floor = float(mse(own.mean(0, keepdim=True).expand_as(true), true).mean())
    mixed, others = shuffle_tokens(embed(true))[0], shuffle_tokens(embed(own), 6)[0]
    assert error(embed(true), embed(own), True) < 0.2 * floor
    assert error(mixed, others, False) < 0.2 * floor
    assert error(mixed, others, True) > 0.7 * floor
    assert error(torch.randn_like(mixed), torch.randn_like(others), False) > 0.9 * floor


def test_least_squares_fit_in_memory_at_224_pixels() -> None:
    """All tokens to all pixels: the matrix between them would take 182 GB."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.rand(4, 3, 224, 224, generator=draw)
    images = torch.einsum("nk,kchw->nchw", torch.randn(14, 4, generator=draw), basis)
    embed = torch.randn(768, 768, generator=draw) / 768**0.5
    features = to_patches(images, 16) @ embed
    features = torch.cat([torch.zeros(14, 1, 768), features], 1)
    order = torch.randperm(197, generator=draw)  # which the scope of one token cannot undo
    found = ridge_inversion(
        PairedImages(features[12:, order], features[:12, order], images[:12], 16),
        scopes=("image", "both"),
    )
    assert float(mse(found.images, images[12:]).max()) < 1e-6 * float(images.var())
    noise = torch.randn(2, 197, 768, generator=draw)
    nothing = ridge_inversion(
        PairedImages(noise, features[:12, order], images[:12], 16), scopes=("image",)
    )
    assert float(mse(nothing.images, images[12:]).min()) > 0.1 * float(images.var())


def test_least_squares_are_exact_without_a_defence_and_a_filter_against_noise() -> None:
    embed, true, own = Embedding(VALUES), pictures(24, 2), pictures(300, 1)
    draw = torch.Generator().manual_seed(0)

    def noisy(z: torch.Tensor, scale: float) -> torch.Tensor:
        return z + scale * z.std() * torch.randn(z.shape, generator=draw)

    floor = float(mse(own.mean(0, keepdim=True).expand_as(true), true).mean())
    clear = ridge_inversion(
        PairedImages(shuffle_tokens(embed(true))[0], embed(own), own, PATCH), shuffled=True
    )
    assert float(mse(clear.images, true).max()) < 1e-9
    first = (
        torch.cat([torch.ones(24, 1, VALUES), embed(true)], 1),
        torch.cat([torch.ones(300, 1, VALUES), embed(own)], 1),
    )
    assert float(mse(ridge_inversion(PairedImages(*first, own, PATCH)).images, true).max()) < 1e-9
    errors = {}
    for scope in ("token", "image", "both"):
        recovered = ridge_inversion(
            PairedImages(noisy(embed(true), 0.5), noisy(embed(own), 0.5), own, PATCH),
            scopes=[scope],
        )  # type: ignore[list-item]
        errors[scope] = float(mse(recovered.images, true).mean())
    assert errors["image"] < errors["token"] < 0.6 * floor, (
        "what noise took from a token, its neighbours know"
    )
    mixed, others = (
        shuffle_tokens(embed(true))[0],
        shuffle_tokens(embed(own), 6)[0],
    )  # neither side in order
    assert (
        float(
            mse(
                ridge_inversion(PairedImages(mixed, others, own, PATCH), scopes=["set"]).images,
                true,
            ).mean()
        )
        < 0.4 * floor
    )
    assert (
        float(
            mse(
                ridge_inversion(PairedImages(mixed, others, own, PATCH), scopes=["image"]).images,
                true,
            ).mean()
        )
        > 0.7 * floor
    )
    nothing = ridge_inversion(
        PairedImages(torch.randn(24, TOKENS, VALUES), torch.randn(300, TOKENS, VALUES), own, PATCH)
    )
    assert float(mse(nothing.images, true).mean()) > 0.9 * floor


def test_samples_are_linked_over_fresh_shuffles() -> None:
    embed, true = Embedding(2 * VALUES), pictures(12, 2)
    clients = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    second = shuffle_tokens(embed(true)[clients], 8)[0]
    links = link_samples(shuffle_tokens(embed(true), 7)[0], second)
    assert torch.equal(clients[links], torch.arange(12))


def test_metrics_are_of_each_image_and_of_a_declared_range() -> None:
    true = pictures(5, 3)
    near, far = (
        true + 0.01 * torch.randn(true.shape, generator=torch.Generator().manual_seed(0)),
        1 - true,
    )
    assert torch.allclose(psnr(near, true, 1.0), 10 * torch.log10(1 / mse(near, true)))
    assert torch.allclose(psnr(2 * near, 2 * true, 2.0), psnr(near, true, 1.0)), (
        "the range says the same in other units"
    )
    assert ssim(near, true, 1.0).min() > 0.9 > ssim(far, true, 1.0).max()
    assert ssim(true, true, 1.0).tolist() == pytest.approx([1.0] * 5)
    assert is_identified(near, true).all()
    assert not is_identified(true.mean(0, keepdim=True).expand_as(true), true).any(), (
        "the mean image identifies no person"
    )
    assert feature_similarity(near, true, lambda x: x).min() > 0.99
    for wrong in (true[:3], true * float("nan")):
        with pytest.raises(MetricError):
            mse(wrong, true)


def test_lpips_by_real_weights() -> None:
    """By the AlexNet of the assets, on real images: nothing is 0, more noise is farther, another
    image is farther still; grey is taken for colour.
    """
    path = Path(__file__).parents[3] / "shared" / "assets"
    if not path.exists():
        pytest.skip("the assets are absent")
    metric = Lpips(path / "lpips_alex.safetensors")
    with np.load(path / "olivetti_faces.npz") as archive:
        faces = torch.from_numpy(
            next(archive[k] for k in archive if archive[k].ndim == 3)[:40:10]
        ).float()[:, None]
    faces = faces / faces.max()
    noise = torch.randn(faces.shape, generator=torch.Generator().manual_seed(0))
    found = [metric(faces + s * noise, faces, 0.0, 1.0) for s in (0.0, 0.05, 0.2)]
    assert float(found[0].abs().max()) == 0.0
    assert bool((found[1] < found[2]).all())
    assert torch.allclose(
        metric(255 * faces, 255 * faces.roll(1, 0), 0.0, 255.0),
        metric(faces, faces.roll(1, 0), 0.0, 1.0),
        atol=1e-4,
    )
    assert float(metric(faces, faces.roll(1, 0), 0.0, 1.0).min()) > 0.1
    with pytest.raises(MetricError, match="at least 32 x 32"):
        metric(faces[..., :16, :16], faces[..., :16, :16], 0.0, 1.0)
