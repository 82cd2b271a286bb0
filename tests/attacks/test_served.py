"""What a server puts together from what it sees, against the truth: rows and columns, samples over
passes, noise, shuffled batches.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regauge.attacks.features import GROUPS
from regauge.attacks.linear import ridge_inversion
from regauge.attacks.served import (
    average_views,
    known_streams,
    regroup_tokens,
    relink_samples,
    reused_key,
)
from regauge.attacks.views import KnownStreams, PairedImages, ServerPass
from regauge.core.groups import Kind
from regauge.core.members import Member
from regauge.core.rng import Stream, seed_key
from regauge.results.metrics import mse
from support.features import PATCH, TOKENS, VALUES, Embedding, pictures, shuffle_tokens

EMBED = Embedding(2 * VALUES)
KINDS: list[Kind] = ["permutation", "signed", "orthogonal"]


def undo_member(member: Member, stream: torch.Tensor) -> torch.Tensor:
    """Apply the inverse of a member to the stream."""
    return stream @ torch.from_numpy(np.linalg.inv(member.matrix()[0])).to(stream).T


def member(kind: Kind, seed: int = 4) -> Member:
    return GROUPS[kind].sample(2 * VALUES, 1, Stream(seed_key(seed), "test"))


def apply_member(x: torch.Tensor, m: Member) -> torch.Tensor:
    return x @ torch.from_numpy(m.matrix()[0]).to(x).T


def noisy(x: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
    return x + scale * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_known_samples_give_columns_and_rows(kind: Kind) -> None:
    plain = EMBED(pictures(6, 2)).double()
    rows, order = shuffle_tokens(plain)
    recovered, places = known_streams(KnownStreams(plain, apply_member(rows, member(kind)), kind))
    np.testing.assert_allclose(recovered.matrix(), member(kind).matrix(), atol=1e-6)
    assert torch.equal(places, order)
    noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).double()
    blind, _ = known_streams(KnownStreams(noise, apply_member(rows, member(kind)), kind))
    assert np.abs(blind.matrix() - member(kind).matrix()).max() > 0.1


def test_one_key_over_many_shuffled_passes_gives_it_away_and_then_the_images() -> None:
    m, true, own = member("permutation"), pictures(24, 2), pictures(600, 1)
    passes = [
        ServerPass(apply_member(shuffle_tokens(EMBED(pictures(100, 10 + i)), i)[0], m), {})
        for i in range(6)
    ]
    recovered = reused_key(passes, EMBED(own))
    right = float((recovered.matrix() == m.matrix()).all(-1).mean())
    assert right > 0.9
    observed = shuffle_tokens(EMBED(true))[0]
    back = ridge_inversion(
        PairedImages(
            undo_member(recovered, apply_member(observed, m)), EMBED(own[:150]), own[:150], PATCH
        ),
        shuffled=True,
    )
    blind = ridge_inversion(
        PairedImages(apply_member(observed, m), EMBED(own[:150]), own[:150], PATCH), shuffled=True
    )
    assert float(mse(back.images, true).mean()) < 0.1 * float(mse(blind.images, true).mean())


def link_accuracy(scale: float, drift: float, samples: int = 40) -> float:
    """Two passes, each shuffled, with noise and with an embedding that has moved between them: the
    share of samples that are linked.
    """
    true, later = pictures(samples, 2), Embedding(2 * VALUES)
    draw = torch.Generator().manual_seed(6)
    for w in (later.weight, later.positions, later.bias):
        w += drift * w.std() * torch.randn(w.shape, generator=draw)
    clients = torch.randperm(samples, generator=draw)
    first, second = (
        shuffle_tokens(noisy(EMBED(true), scale, 1), 7)[0],
        shuffle_tokens(noisy(later(true)[clients], scale, 2), 8)[0],
    )
    return float((clients[relink_samples(first, second)] == torch.arange(samples)).double().mean())


def test_samples_are_linked_over_noise_and_training() -> None:
    assert link_accuracy(0.0, 0.0) == 1.0
    assert link_accuracy(0.5, 0.0) > 0.9
    assert link_accuracy(0.0, 0.5) > 0.9
    assert link_accuracy(0.3, 0.3) > 0.9
    assert link_accuracy(20.0, 0.0) < 0.2, "noise that drowns all"


def test_noise_does_not_survive_epochs() -> None:
    true = EMBED(pictures(30, 2))
    draw = torch.Generator().manual_seed(3)
    views, orders = [], []
    for epoch in range(9):
        orders.append(torch.randperm(30, generator=draw) if epoch else torch.arange(30))
        views.append(shuffle_tokens(noisy(true[orders[-1]], 0.5, 20 + epoch), epoch)[0])
    first = shuffle_tokens(true, 0)[0]
    once, often = (
        float((v - first).square().mean().sqrt() / true.std())
        for v in (views[0], average_views(views))
    )
    assert once == pytest.approx(0.5, rel=0.05)
    assert often < 0.25, "about a third of it is left"
    reshuffled = views[0][
        :, torch.randperm(TOKENS, generator=draw)
    ]  # the same noise again: nothing is gained
    assert float(
        (average_views([views[0], reshuffled]) - first).square().mean().sqrt() / true.std()
    ) == pytest.approx(once, rel=0.01)


def mix_tokens(count: int, seed: int, scale: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose tokens changed places between samples, and for each token where it came
    from.
    """
    z = noisy(EMBED(pictures(count, 2)), scale, 5) if scale else EMBED(pictures(count, 2))
    order = torch.randperm(count * TOKENS, generator=torch.Generator().manual_seed(seed))
    return z.flatten(0, 1)[order].view_as(z), order


def together(found: torch.Tensor, order: torch.Tensor) -> tuple[float, float]:
    """The share of tokens that stand with the image that most of their group are of; and that stand
    at their place.
    """
    origin = order[found]
    own = (origin // TOKENS == (origin // TOKENS).mode(1).values[:, None]).double().mean()
    return float(own), float((origin % TOKENS == torch.arange(TOKENS)).double().mean())


def test_a_shuffled_batch_is_put_together_again() -> None:
    own = pictures(400, 1)
    observed, order = mix_tokens(10, 3)
    recovered = regroup_tokens(PairedImages(observed, EMBED(own), own, PATCH))
    assert sorted(recovered.flatten().tolist()) == list(range(10 * TOKENS)), "every token once"
    group, place = together(recovered, order)
    assert group > 0.9
    assert place > 0.95
    back = observed.flatten(0, 1)[recovered]
    images = ridge_inversion(PairedImages(back, EMBED(own), own, PATCH)).images
    true = pictures(10, 2)
    nearest = (
        torch.cdist(images.flatten(1), true.flatten(1)).min(1).values.square() / true[0].numel()
    )
    assert float(nearest.median()) < 1e-6
    blind = torch.randn(observed.shape, generator=torch.Generator().manual_seed(1))
    group, _ = together(
        regroup_tokens(PairedImages(blind, torch.randn(EMBED(own).shape), own, PATCH)), order
    )
    assert group < 0.4, "from noise no more than a guess"
