"""A client whose crossings are defended, trained and attacked: the cell of `defence_recipes`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.train_cells import parameters_of
from regauge.attacks.inversion import decoder_inversion
from regauge.attacks.linear import ridge_inversion
from regauge.attacks.served import average_views, regroup_tokens
from regauge.attacks.views import PairedImages
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.augment import augment_images
from regauge.data.tasks import Examples, logits_of
from regauge.data.train import train_model
from regauge.defences.split import (
    BatchShuffle,
    Defence,
    KeyedRandom,
    Noise,
    PixelNoise,
    Rows,
    Undo,
    apply_defences,
    parse_defences,
)
from regauge.models.cut import Crossing, cut
from regauge.results.metrics import is_identified, psnr, ssim

Tensor = torch.Tensor
SECRET = bytes(32)  # of an experiment: anybody may repeat it
DRAWN = PixelNoise, Noise  # what is drawn afresh in every pass, and can be averaged away


@dataclass(frozen=True, eq=False)
class Mixed:
    """Some of another sample of the batch in each: noise that looks like the data. It is tried
    here, and not in the registry.
    """

    share: float
    stage = 3

    def apply_to_images(self, images: Tensor, draw: KeyedRandom) -> Tensor:
        return images

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        partner = z[torch.from_numpy(draw.stream("mixed").permutation(len(z)))]
        return crossing.with_inputs(
            **{crossing.boundary.stream: (1 - self.share) * z + self.share * partner}
        ), lambda y: y


class Client:
    """A model whose crossings are defended, pass after pass."""

    def __init__(self, model: torch.nn.Module, defences: Sequence[Defence], blocks: int) -> None:
        self.model, self.cut, self.defences, self.blocks, self.passes = (
            model,
            cut(model),
            tuple(defences),
            blocks,
            0,
        )

    def draw(self) -> KeyedRandom:
        self.passes += 1
        return KeyedRandom(SECRET, str(self.passes))

    def split(self, crossing: Crossing) -> tuple[Crossing, Crossing]:
        """The blocks that the client keeps, and the rest."""
        mine = replace(
            crossing,
            callables=crossing.callables[: self.blocks],
            calls=crossing.calls[: self.blocks],
        )
        return mine, replace(
            crossing,
            callables=crossing.callables[self.blocks :],
            calls=crossing.calls[self.blocks :],
        )

    def sent(
        self, crossing: Crossing, defences: Sequence[Defence], draw: KeyedRandom
    ) -> tuple[Crossing, Undo]:
        mine, rest = self.split(crossing)
        z = mine.run() if self.blocks else crossing.stream
        return apply_defences(defences, rest.with_inputs(**{crossing.boundary.stream: z}), draw)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The model, defended, for the length of a `with` block."""

        def cross(crossing: Crossing) -> Tensor:
            there, back = self.sent(crossing, self.defences, self.draw())
            return back(there.run())

        hook = self.model.register_forward_pre_hook(
            lambda module, args: (self.entered(args[0]), *args[1:])
        )
        try:
            with self.cut.route(cross):
                yield
        finally:
            hook.remove()

    def entered(self, images: Tensor) -> Tensor:
        for defence in self.defences:
            images = defence.apply_to_images(images, self.draw())
        return images

    def features(self, images: Tensor, *, in_order: bool, batch: int = 50) -> Tensor:
        """Return the features that the client sends; with `in_order` those that an attacker
        computes.
        """
        chosen = [d for d in self.defences if not (in_order and isinstance(d, Rows | BatchShuffle))]
        with torch.no_grad():
            return torch.cat(
                [
                    self.sent(self.cut.embed(pixel_values=self.entered(part)), chosen, self.draw())[
                        0
                    ].stream
                    for part in torch.split(images, batch)
                ]
            )


def recipe(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train and test with the defences, and attack the features that the client sends."""
    seed, (trained, held, tested) = int(p["seed"]), p["parts"]
    pixels, labels = pictures_of(data["images"], int(p["side"]))
    order = np.random.default_rng(seed).permutation(len(pixels))
    train, own, test = (
        order[a:b]
        for a, b in (
            (0, trained),
            (trained, trained + held),
            (trained + held, trained + held + tested),
        )
    )
    middle, scale = pixels[train].mean(), pixels[train].std()
    images = (pixels - middle) / scale
    model = build(p["model"], seed).float()
    defences = [*parse_defences(p["defences"]), *([Mixed(p["mixed"])] if p["mixed"] else [])]
    client = Client(model, sorted(defences, key=lambda d: d.stage), int(p["blocks"]))
    classes = int(labels.max()) + 1
    examples = Examples(
        len(train),
        classes,
        lambda rows: ({"pixel_values": images[train[rows]]}, labels[train[rows]]),
    )
    with client.serving():
        losses, _ = train_model(model, examples, p["training"], seed, replace(work, every=math.inf))
        model.eval()
        with torch.no_grad():
            parts = np.array_split(test, max(1, len(test) // 50))
            right = sum(
                int(
                    (
                        logits_of(model, {"pixel_values": images[rows]}).argmax(1) == labels[rows]
                    ).sum()
                )
                for rows in parts
            )
    values = {
        "accuracy": right / len(test),
        "loss": losses[-1],
        "parameters": parameters_of(model),
        "chance": 1 / classes,
    }
    targets = test[: int(p["attack"]["targets"])]
    return Outcome(
        {
            **values,
            **_attacked(client, images[targets], images[own], p, seed, float(middle), float(scale)),
        }
    )


RECIPE = Cell("recipe", 2, recipe)


def pictures_of(data: Any, side: int) -> tuple[Tensor, Tensor]:
    """Images in 0..1, [n, c, side, side], and classes by number."""
    x = torch.from_numpy(np.asarray(data["image"])).float() / 255
    x = x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)
    x = x if x.shape[-1] == side else torch.nn.functional.interpolate(x, (side, side), mode="area")
    return x, torch.from_numpy(
        np.unique(np.asarray(data["label"]), return_inverse=True)[1].astype(np.int64)
    )


def _attacked(
    client: Client,
    true: Tensor,
    own: Tensor,
    p: Mapping[str, Any],
    seed: int,
    middle: float,
    scale: float,
) -> dict[str, Any]:
    """Every attack that fits the recipe: by name [SSIM, of the worst image, PSNR, share identified,
    seconds].
    """
    patch, how = int(p["patch"]), p["attack"]
    pool = torch.cat(
        [
            own,
            *(
                augment_images(own, {"flip": True, "shift": 2}, np.random.default_rng([seed, i]))
                for i in range(2)
            ),
        ]
    )
    rows, mixes = (
        any(isinstance(d, kind) for d in client.defences) for kind in (Rows, BatchShuffle)
    )
    drawn = any(isinstance(d, (*DRAWN, Mixed)) for d in client.defences)
    seen, ordered_pool = client.features(true, in_order=False), client.features(pool, in_order=True)
    view = PairedImages(seen, ordered_pool, pool, patch)
    tried: dict[str, Callable[[], Tensor]] = {}
    if not mixes:
        tried["least squares"] = lambda: ridge_inversion(view, shuffled=rows, seed=seed).images
    shuffled = rows or mixes
    pairs = client.features(pool, in_order=False) if shuffled else ordered_pool
    if shuffled:
        tried["least squares over sets"] = lambda: (
            ridge_inversion(
                PairedImages(seen, pairs, pool, patch), scopes=["set"], seed=seed
            ).images
        )
    if how["decoder"]:
        tried["decoder"] = lambda: (
            decoder_inversion(
                PairedImages(seen, pairs, pool, patch),
                in_order=not shuffled,
                seed=seed,
                **how["decoder"],
            ).images
        )
    if mixes:

        def together() -> Tensor:
            flat = [
                part.flatten(0, 1)[regroup_tokens(replace(view, observed=part), seed=seed)]
                for part in torch.split(seen, 50)
            ]
            skip = view.features.shape[1] - flat[0].shape[1]
            found = ridge_inversion(
                PairedImages(torch.cat(flat), ordered_pool[:, skip:], pool, patch), seed=seed
            ).images
            cost = torch.cdist(
                found.flatten(1), true.flatten(1)
            ).numpy()  # who is who is not said: the best naming counts
            return found[torch.from_numpy(linear_sum_assignment(cost.T)[1])]

        tried["regrouped, least squares"] = together
    if drawn and not mixes:

        def often() -> Tensor:
            draw, views = torch.Generator().manual_seed(seed), [seen]
            for _ in range(int(how["passes"]) - 1):
                views.append(
                    client.features(true, in_order=False)[torch.randperm(len(true), generator=draw)]
                )
            mean = average_views(
                [client.features(pool, in_order=True) for _ in range(int(how["passes"]))],
                link=False,
                match=False,
            )
            return ridge_inversion(
                PairedImages(average_views(views, match=rows), mean, pool, patch),
                shuffled=rows,
                seed=seed,
            ).images

        tried[f"{how['passes']} passes averaged, least squares"] = often
    clear = (true * scale + middle).clamp(0, 1)

    def scored(found: Tensor, seconds: float) -> list[float]:
        guess = (found * scale + middle).clamp(0, 1)
        alike = ssim(guess, clear, 1.0)
        return [
            float(alike.mean()),
            float(alike.max()),
            float(psnr(guess, clear, 1.0).mean()),
            float(is_identified(guess, clear).double().mean()),
            seconds,
        ]

    attacks: dict[str, list[float]] = {}
    for name, attack in tried.items():
        started = time.monotonic()
        attacks[name] = scored(attack(), round(time.monotonic() - started, 1))
    floor = scored(pool.mean(0, keepdim=True).expand_as(true), 0.0)
    return {"attacks": attacks, "floor": floor}
