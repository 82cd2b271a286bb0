"""Localization by PCA: exact, without a draw, and as near the reference's randomised one as that is
to itself.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from regauge.jigsaw import JigsawError, MaskedJigsaw
from regauge.jigsaw.localizer import Localizer

MASK = torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) < 0.7


def table() -> torch.Tensor:
    """Positions with two strong directions and some noise, off the origin."""
    draw = torch.Generator().manual_seed(0)
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float() * torch.tensor(
        [2.0, 1.0]
    )
    return (
        places @ torch.linalg.qr(torch.randn(12, 2, generator=draw)).Q.T
        + 0.05 * torch.randn(16, 12, generator=draw)
        + 0.3
    )


def randomize_positions(embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The reference's directions."""
    share = (mask.float() / mask.sum(1, keepdim=True)).mean(0)
    share = share / share.sum()
    centred = (embeddings - share @ embeddings) * share.sqrt()[:, None]
    return torch.pca_lowrank(centred, q=2, center=False, niter=5)[2]


def directions(embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = (mask.float() / mask.sum(1, keepdim=True)).mean(0)
    return Localizer("pca", 12, (4, 4))._directions(embeddings, weights)


def test_pca_draws_nothing_and_is_the_same_twice() -> None:
    localizer, noise = (
        Localizer("pca", 12, (4, 4)),
        torch.randn(16, 12, generator=torch.Generator().manual_seed(2)),
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    output = localizer(noise, MASK)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(localizer(noise, MASK), output)
    torch.manual_seed(3)
    one = randomize_positions(noise, MASK)
    torch.manual_seed(4)
    assert not torch.equal(randomize_positions(noise, MASK).abs(), one.abs()), (
        "the randomised one is not"
    )


def test_pca_has_the_references_directions_up_to_their_signs() -> None:
    x = table()
    ours, theirs = directions(x, MASK), randomize_positions(x, MASK)
    assert torch.allclose((ours * theirs).sum(0).abs(), torch.ones(2), atol=1e-4)
    assert (ours.gather(0, ours.abs().argmax(0, keepdim=True)) > 0).all()
    signed = theirs * (ours * theirs).sum(0).sign()
    weights = (MASK.float() / MASK.sum(1, keepdim=True)).mean(0)
    localizer = Localizer("pca", 12, (4, 4))
    by_hand = ((x @ signed - localizer.targets).abs().mean(1) * weights).sum()
    assert localizer(x, MASK).item() == pytest.approx(by_hand.item(), rel=1e-3)
    off = torch.ones_like(MASK)
    assert not torch.allclose(directions(x, off), ours, atol=1e-4), "it is of what is kept"


def test_no_gradient_goes_through_the_directions() -> None:
    x = table().requires_grad_()
    localizer = Localizer("pca", 12, (4, 4))
    localizer(x, MASK).backward()
    weights = (MASK.float() / MASK.sum(1, keepdim=True)).mean(0)
    normals = directions(x.detach(), MASK)
    grad = ((x.detach() @ normals - localizer.targets).sign() * weights[:, None] / 2) @ normals.T
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert torch.allclose(x.grad, grad, atol=1e-6)


def test_a_blank_table_has_a_finite_loss() -> None:
    x = torch.zeros(16, 12, requires_grad=True)
    loss = Localizer("pca", 12, (4, 4))(x, MASK)
    loss.backward()
    assert torch.isfinite(loss)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_one_position_has_no_two_directions() -> None:
    for width, grid in ((12, (1, 1)), (1, (4, 4))):
        with pytest.raises(
            JigsawError,
            match=f"got {grid[0] * grid[1]} positions of width {width}",
        ):
            Localizer("pca", width, grid)
        Localizer("linear", width, grid)


def test_a_pass_of_variant_h_is_the_same_after_a_round_trip() -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    plain = transformers.ViTForImageClassification(config)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    one = MaskedJigsaw(copy.deepcopy(plain), 0.3, variant="H", probability=1.0, seed=5).train()
    one(images, labels)
    torch.manual_seed(1)
    other = MaskedJigsaw(
        transformers.ViTForImageClassification(config), 0.3, variant="H", probability=1.0, seed=5
    ).train()
    other.load_state_dict(one.state_dict())
    torch.manual_seed(2)
    outputs = one(images, labels)
    torch.manual_seed(3)
    again = other(images, labels)
    assert torch.equal(outputs.loss, again.loss)
    assert torch.equal(outputs.extra, again.extra)
    later = one(images, labels)
    assert not torch.equal(later.extra, outputs.extra), "the next puzzle is another"
