"""The table of attacks on the passes of a server: the view of each, and how it is run.

Adding an attack is one line. An attack gets its view, a budget, and the names of the defences,
which are public. Scores against the truth are computed elsewhere (`scores`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from regauge.audit import engine
from regauge.audit.engine import Attack, Attempt
from regauge.audit.split_audit.victims import (
    Pair,
    defend_images,
    drop_shuffles,
    has_batch_shuffle,
    is_shuffled,
    make_split_pair,
    parse_combination,
    split_batches,
)
from regauge.core.progress import Progress
from regauge.defences.parser import NONE
from regauge.defences.split import Noise, PixelNoise, Private
from regauge.jigsaw.layers import patch_embedding

Tensor = torch.Tensor
PASSES = 20  # epochs over which a server averages the noise


@dataclass(frozen=True)
class Budget:
    """The size of an attacker's decoder, and its maximum training time.

    Training stops early when the loss on held-out pairs no longer falls.
    """

    hidden: int = 128
    depth: int = 2
    epochs: int = 200
    patience: int = 8
    rate: float = 1e-3
    batch: int = 64

    def to_dict(self) -> dict[str, Any]:
        """Return the budget under its stored keys."""
        return {
            name: getattr(self, name)
            for name in ("hidden", "depth", "epochs", "patience", "rate", "batch")
        }

    def decoder_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `decoder_inversion`."""
        return {"lr" if name == "rate" else name: value for name, value in self.to_dict().items()}


@dataclass(frozen=True)
class Setting:
    """The attacker's knowledge and resources besides its view."""

    combination: str = NONE
    budget: Budget = field(default_factory=Budget)
    batch: int = 50
    seed: int = 0
    progress: Progress | None = None
    device: str | torch.device = "cpu"  # that decoders are trained on


@dataclass(frozen=True, eq=False)
class Views:
    """The views of the attackers of one victim.

    Attributes:
        paired: Features as sent, and features of the attacker's own images, defended likewise.
        placed: The same, with the tokens of the attacker's own images in order.
        public: The same with the client's embedding; None if it is not a patch embedding.
        repeated: Return the mean over many passes of the same images, each with fresh noise. None
            if the noise is not fresh.
    """

    paired: PairedImages
    placed: PairedImages
    public: PublicPatches | None
    repeated: Callable[[], PairedImages] | None = None


def _decode(view: PairedImages, setting: Setting, in_order: bool = True) -> InversionResult:
    return decoder_inversion(
        view,
        in_order=in_order,
        seed=setting.seed,
        device=setting.device,
        progress=setting.progress,
        **setting.budget.decoder_options(),
    )


def _decode_placed(view: PairedImages, setting: Setting) -> InversionResult:
    positions = position_probe(view, seed=setting.seed)
    return _decode(replace(view, observed=restore_order(view.observed, positions)), setting)


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
    """Regroup the tokens of each batch by image, then solve least squares."""
    batches = split_batches(view.observed, setting.batch)
    flat = [
        batch.flatten(0, 1)[regroup_tokens(replace(view, observed=batch), seed=setting.seed)]
        for batch in batches
    ]
    skip = view.features.shape[1] - flat[0].shape[1]
    result = ridge_inversion(
        PairedImages(torch.cat(flat), view.features[:, skip:], view.images, view.patch),
        seed=setting.seed,
    )
    return replace(result, losses=())


def _has_fresh_noise(combination: str) -> bool:
    """Return whether noise is fresh in every pass, on tokens that can be matched across passes."""
    return any(
        isinstance(d, Noise | PixelNoise | Private) for d in parse_combination(combination)
    ) and not has_batch_shuffle(combination)


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "decoder",
        "the paper's decoder",
        "a Transformer trained on the attacker's own images to reconstruct images from features, "
        "each token at its position",
        _decode,
        view="paired",
    ),
    Attack(
        "any order",
        "any-order decoder",
        "the same, but each position of the image attends to all tokens, in any order",
        partial(_decode, in_order=False),
        view="paired",
    ),
    Attack(
        "public embedding",
        "public embedding",
        "has the client's embedding: inverts each token, and orders the patches by position "
        "and by their edges",
        _invert_public_embedding,
        view="public",
    ),
    Attack(
        "places",
        "positions, then decoder",
        "predicts the position of each token, restores the order, and uses the paper's decoder",
        _decode_placed,
        view="placed",
        fits=is_shuffled,
    ),
    Attack(
        "least squares",
        "least squares",
        "the best affine map from features to images, in closed form; for shuffled tokens, "
        "positions are predicted first",
        _solve_least_squares,
        view="placed",
        fits=lambda combination: not has_batch_shuffle(combination),
    ),
    Attack(
        "sets",
        "least squares over sets",
        "regression on means over a sample's tokens, which do not depend on their order; not "
        "necessarily affine",
        _regress_sets,
        view="paired",
        fits=is_shuffled,
    ),
    Attack(
        "regrouped",
        "regrouped, least squares",
        "regroups the tokens of a shuffled batch by position and by similarity, then least squares",
        _regroup_and_solve,
        view="placed",
        fits=has_batch_shuffle,
        is_ordered=False,
    ),
    Attack(
        "averaged",
        f"{PASSES} passes averaged, least squares",
        f"links the same images over {PASSES} passes (epochs), averages the noise, then least "
        "squares",
        _solve_least_squares,
        view="repeated",
        fits=_has_fresh_noise,
    ),
)


def attempt(attack: Attack, views: Views, setting: Setting) -> Attempt | None:
    """Run an attack; return None if its view does not exist.

    The output is the reconstructed images, the facts are the losses of its training and the loss of
    the mean image.
    """
    view = getattr(views, attack.view)
    if view is None:
        return None

    def run() -> tuple[Tensor, dict[str, Any]]:
        result = attack.run(view() if callable(view) else view, setting)
        return result.images.float(), {"losses": result.losses, "floor": result.floor}

    return engine.attempt(run)


def collect_views(pair: Pair, own: Tensor, images: Tensor, batch: int, seed: int) -> Views:
    """Return the views of an attacker with images of its own and a copy of the client.

    Args:
        pair: The victim; shuffled victims are closed.
        own: The attacker's images.
        images: The attacked images.
        batch: The batch size.
        seed: The random seed.
    """
    observed = pair.record_features(images, batch, "seen")
    features = pair.record_features(own, batch, "own")
    patch = patch_size(pair.model, images)
    placed = features
    repeated = (
        [observed, *(pair.record_features(images, batch, f"seen {n}") for n in range(1, PASSES))]
        if _has_fresh_noise(pair.combination)
        else []
    )
    unshuffled = pair
    if is_shuffled(pair.combination):
        pair.link.close()
        unshuffled = make_split_pair(pair.model, drop_shuffles(pair.combination), seed=seed + 1)
        placed = unshuffled.record_features(own, batch, "own")
    own_repeated = (
        [placed, *(unshuffled.record_features(own, batch, f"own {n}") for n in range(1, PASSES))]
        if repeated
        else []
    )
    if unshuffled is not pair:
        unshuffled.link.close()

    def average_passes() -> PairedImages:
        generator = torch.Generator().manual_seed(seed)
        shuffled = [
            repeated[0],
            # every epoch has its own order
            *(
                one_pass[torch.randperm(len(one_pass), generator=generator)]
                for one_pass in repeated[1:]
            ),
        ]
        mean = average_views(shuffled, match=is_shuffled(pair.combination))
        return PairedImages(mean, average_views(own_repeated, link=False, match=False), own, patch)

    public = _build_public_view(pair.model, observed, own, pair.combination, batch)
    return Views(
        PairedImages(observed, features, own, patch),
        PairedImages(observed, placed, own, patch),
        public,
        average_passes if repeated else None,
    )


def _patch_layer(model: torch.nn.Module) -> torch.nn.Conv2d | None:
    name = patch_embedding(model)
    layer = None if name is None else model.get_submodule(name)
    return layer if isinstance(layer, torch.nn.Conv2d) else None


def patch_size(model: torch.nn.Module, images: Tensor) -> int:
    """Return the side of a model's square patches.

    Raises:
        AuditError: The model has no embedding of square patches that fit the images.
    """
    from regauge.errors import AuditError

    layer = _patch_layer(model)
    if (
        layer is None
        or layer.kernel_size[0] != layer.kernel_size[1]
        or images.shape[-1] % int(layer.kernel_size[0])
    ):
        raise AuditError(
            f"the model must embed square patches, got a {type(model).__name__}",
            hint="use ViT, DeiT or a similar model for the image audit",
        )
    return int(layer.kernel_size[0])


def _build_public_view(
    model: torch.nn.Module, observed: Tensor, own: Tensor, combination: str, batch: int
) -> PublicPatches | None:
    """Return the view with the public embedding; None if the embedding has other parts.

    Supported are a convolution, a position table, and optionally a class token.
    """
    layer = _patch_layer(model)
    if layer is None:
        return None
    parameters = {name.rpartition(".")[2]: p.detach().cpu() for name, p in model.named_parameters()}
    table = next(
        (parameters[n] for n in ("position_embeddings", "pos_embed") if n in parameters), None
    )
    patches = (own.shape[-1] // int(layer.kernel_size[0])) ** 2
    if (
        table is None
        or table.shape[1] - patches not in (0, 1)
        or observed.shape[1] != table.shape[1]
    ):
        return None
    weight, bias = layer.weight.detach().cpu(), torch.zeros(layer.out_channels)
    if layer.bias is not None:
        bias = layer.bias.detach().cpu()
    class_token = (
        parameters["cls_token"][0, 0] + table[0, 0] if observed.shape[1] > patches else None
    )
    images = own if combination == NONE else defend_images(combination, own, batch)
    size = int(layer.kernel_size[0])
    return PublicPatches(
        observed,
        weight,
        bias,
        table[0, table.shape[1] - patches :],
        images,
        size,
        class_token,
    )
