"""The table of attacks on what a server sees: which view each is given, and what it makes of it.
Adding one is a line.

An attack gets its view, a budget, and which defences there are (they are no secret). What is scored
against the truth happens elsewhere (`scoring`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from regauge.attacks.inversion import (
    InversionResult,
    decoder_inversion,
    position_probe,
    public_patches,
    restore_order,
)
from regauge.attacks.linear import ridge_inversion
from regauge.attacks.served import average_views, regroup_tokens
from regauge.attacks.views import PairedImages, PublicPatches
from regauge.audit.split.victims import (
    Pair,
    defend_images,
    drop_shuffles,
    is_shuffled,
    make_split_pair,
    parse_combination,
    split_batches,
)
from regauge.defences.parser import NONE
from regauge.defences.split import BatchShuffle, Noise, PixelNoise, Private
from regauge.jigsaw.layers import patch_embedding

Tensor = torch.Tensor
PASSES = 20  # epochs over which a server averages noise away


@dataclass(frozen=True)
class Budget:
    """How large an attacker's decoder is, and how long it is trained at most: it ends when its loss
    on held-out pairs has stopped falling.
    """

    hidden: int = 128
    depth: int = 2
    epochs: int = 200
    patience: int = 8
    rate: float = 1e-3
    batch: int = 64

    def to_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("hidden", "depth", "epochs", "patience", "rate", "batch")
        }

    def decoder_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `decoder_inversion`."""
        return {"lr" if name == "rate" else name: value for name, value in self.to_dict().items()}


@dataclass(frozen=True)
class Setting:
    """What an attacker knows and has beside its view."""

    combination: str = NONE
    budget: Budget = field(default_factory=Budget)
    batch: int = 50
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Views:
    """What attackers of one victim have. `paired` are features as the client sends them, with those
    of the attacker's own images; `placed` the same, with its own in order; `public` knows the
    embedding, and is None where it is not one of patches; `often` is what comes of many passes of
    the same images, whose noise was drawn afresh: their mean, made when it is asked for.
    """

    paired: PairedImages
    placed: PairedImages
    public: PublicPatches | None
    often: Callable[[], PairedImages] | None = None


@dataclass(frozen=True)
class Attack:
    """`name` is its id, `title` how it is told, `about` what it does in a line; `view` which of the
    views it is given.
    """

    name: str
    title: str
    about: str
    view: Literal["paired", "placed", "public", "often"]
    run: Callable[[Any, Setting], InversionResult]
    fits: Callable[[str], bool] = lambda combination: True
    is_ordered: bool = (
        True  # does it say which image is which? Where it does not, the best naming counts
    )


def _decode_ordered(view: PairedImages, setting: Setting) -> InversionResult:
    return decoder_inversion(
        view, in_order=True, seed=setting.seed, **setting.budget.decoder_options()
    )


def _decode_any_order(view: PairedImages, setting: Setting) -> InversionResult:
    return decoder_inversion(
        view, in_order=False, seed=setting.seed, **setting.budget.decoder_options()
    )


def _decode_placed(view: PairedImages, setting: Setting) -> InversionResult:
    found = position_probe(view, seed=setting.seed)
    return decoder_inversion(
        replace(view, observed=restore_order(view.observed, found)),
        in_order=True,
        seed=setting.seed,
        **setting.budget.decoder_options(),
    )


def _invert_public_embedding(view: PublicPatches, setting: Setting) -> InversionResult:
    return InversionResult(public_patches(view), (), 0.0)


def _solve_least_squares(view: PairedImages, setting: Setting) -> InversionResult:
    return replace(
        ridge_inversion(view, shuffled=is_shuffled(setting.combination), seed=setting.seed),
        losses=(),
    )


def _regress_sets(view: PairedImages, setting: Setting) -> InversionResult:
    return replace(ridge_inversion(view, scopes=("set",), seed=setting.seed), losses=())


def _regroup_and_solve(view: PairedImages, setting: Setting) -> InversionResult:
    """Batches put together again, as the server had them; then least squares."""
    parts = split_batches(view.observed, setting.batch)
    flat = [
        part.flatten(0, 1)[regroup_tokens(replace(view, observed=part), seed=setting.seed)]
        for part in parts
    ]
    skip = view.features.shape[1] - flat[0].shape[1]
    found = ridge_inversion(
        PairedImages(torch.cat(flat), view.features[:, skip:], view.images, view.patch),
        seed=setting.seed,
    )
    return replace(found, losses=())


def _has_batch_shuffle(combination: str) -> bool:
    return any(isinstance(d, BatchShuffle) for d in parse_combination(combination))


def _has_fresh_noise(combination: str) -> bool:
    """Is there noise that is another one in every pass, on tokens that can be found again?"""
    return any(
        isinstance(d, Noise | PixelNoise | Private) for d in parse_combination(combination)
    ) and not _has_batch_shuffle(combination)


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "decoder",
        "the paper's decoder",
        "a Transformer that was trained to draw images from features, on images of the "
        "attacker's own, each token at its place",
        "paired",
        _decode_ordered,
    ),
    Attack(
        "any order",
        "any-order decoder",
        "the same, but each place of the image asks all tokens, in whatever order they come",
        "paired",
        _decode_any_order,
    ),
    Attack(
        "public embedding",
        "public embedding",
        "knows the client's embedding: inverts each token, and puts the patches in order by "
        "position and by their edges",
        "public",
        _invert_public_embedding,
    ),
    Attack(
        "places",
        "places, then decoder",
        "reads the place of each token off the token, puts them in order, and uses the paper's "
        "decoder",
        "placed",
        _decode_placed,
        is_shuffled,
    ),
    Attack(
        "least squares",
        "least squares",
        "the best affine map from features to images, in closed form; of shuffled tokens the "
        "places are read off first",
        "placed",
        _solve_least_squares,
        lambda combination: not _has_batch_shuffle(combination),
    ),
    Attack(
        "sets",
        "least squares over sets",
        "regression on means over a sample's tokens, which no order changes; its answer need "
        "not be affine",
        "paired",
        _regress_sets,
        is_shuffled,
    ),
    Attack(
        "regrouped",
        "regrouped, least squares",
        "puts the tokens of a shuffled batch together again, by place and by what goes "
        "together, then least squares",
        "placed",
        _regroup_and_solve,
        _has_batch_shuffle,
        is_ordered=False,
    ),
    Attack(
        "averaged",
        f"{PASSES} passes averaged, least squares",
        f"links the same images over {PASSES} passes, as epochs are, takes the mean of their "
        "noise away, then least squares",
        "often",
        _solve_least_squares,
        _has_fresh_noise,
    ),
)


def select_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    return tuple(a for a in ATTACKS if a.name in names)


@dataclass(frozen=True, eq=False)
class Attempt:
    """What one attack made of the features: images, how its own training went, and what it cost."""

    attack: str
    images: Tensor
    losses: tuple[float, ...]
    floor: float
    seconds: float


def attempt(attack: Attack, views: Views, setting: Setting) -> Attempt | None:
    """Run an attack, or None where it has no view."""
    view = getattr(views, attack.view)
    if view is None:
        return None
    started = time.monotonic()
    with torch.random.fork_rng():
        found = attack.run(view() if callable(view) else view, setting)
    return Attempt(
        attack.name,
        found.images.detach().float(),
        found.losses,
        found.floor,
        time.monotonic() - started,
    )


def collect_views(pair: Pair, own: Tensor, images: Tensor, batch: int, seed: int) -> Views:
    """What an attacker has who sees these images' features, and has other images of its own and a
    client like this one.
    """
    seen, features = (
        pair.record_features(images, batch, "seen"),
        pair.record_features(own, batch, "own"),
    )
    patch = patch_size(pair.model, images)
    placed = features
    again = (
        [seen, *(pair.record_features(images, batch, f"seen {n}") for n in range(1, PASSES))]
        if _has_fresh_noise(pair.combination)
        else []
    )
    beside = pair
    if is_shuffled(pair.combination):
        pair.link.close()
        beside = make_split_pair(pair.model, drop_shuffles(pair.combination), seed=seed + 1)
        placed = beside.record_features(own, batch, "own")
    mine = (
        [placed, *(beside.record_features(own, batch, f"own {n}") for n in range(1, PASSES))]
        if again
        else []
    )
    if beside is not pair:
        beside.link.close()

    def often() -> PairedImages:
        draw = torch.Generator().manual_seed(seed)
        mixed = [
            again[0],
            *(one[torch.randperm(len(one), generator=draw)] for one in again[1:]),
        ]  # epochs have orders of their own
        mean = average_views(mixed, match=is_shuffled(pair.combination))
        return PairedImages(mean, average_views(mine, link=False, match=False), own, patch)

    public = _build_public_view(pair.model, seen, own, pair.combination, batch)
    return Views(
        PairedImages(seen, features, own, patch),
        PairedImages(seen, placed, own, patch),
        public,
        often if again else None,
    )


def _patch_layer(model: torch.nn.Module) -> torch.nn.Conv2d | None:
    name = patch_embedding(model)
    found = None if name is None else model.get_submodule(name)
    return found if isinstance(found, torch.nn.Conv2d) else None


def patch_size(model: torch.nn.Module, images: Tensor) -> int:
    """The side of a model's patches."""
    from regauge.audit.split.scores import LeakageError

    layer = _patch_layer(model)
    if (
        layer is None
        or layer.kernel_size[0] != layer.kernel_size[1]
        or images.shape[-1] % int(layer.kernel_size[0])
    ):
        raise LeakageError(
            f"a {type(model).__name__} has no embedding of square patches",
            hint="the audit of images is for ViT, DeiT and the like",
        )
    return int(layer.kernel_size[0])


def _build_public_view(
    model: torch.nn.Module, seen: Tensor, own: Tensor, combination: str, batch: int
) -> PublicPatches | None:
    """The embedding as its owner has it: a convolution, a table of positions, perhaps a first
    token. None where it is not that alone.
    """
    layer = _patch_layer(model)
    if layer is None:
        return None
    named = {name.rpartition(".")[2]: p.detach() for name, p in model.named_parameters()}
    table = next((named[n] for n in ("position_embeddings", "pos_embed") if n in named), None)
    patches = (own.shape[-1] // int(layer.kernel_size[0])) ** 2
    if table is None or table.shape[1] - patches not in (0, 1) or seen.shape[1] != table.shape[1]:
        return None
    bias = layer.bias.detach() if layer.bias is not None else torch.zeros(layer.out_channels)
    first = named["cls_token"][0, 0] + table[0, 0] if seen.shape[1] > patches else None
    images = own if combination == NONE else defend_images(combination, own, batch)
    size = int(layer.kernel_size[0])
    return PublicPatches(
        seen, layer.weight.detach(), bias, table[0, table.shape[1] - patches :], images, size, first
    )
