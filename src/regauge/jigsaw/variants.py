"""The variants of the paper's Table 2, by letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regauge.jigsaw.localizer import Kind
from regauge.jigsaw.masks import JigsawError

Shuffle = Literal["patches", "pixels"]


@dataclass(frozen=True)
class Variant:
    """What is done to a model in training. `positions` are its own; `unknown` takes their place
    where patches were shuffled; `index` is a second table by place that no shuffle takes away;
    `localize` regresses positions. `shuffle` is of masked patches, or of all patches and their
    pixels.
    """

    name: str
    positions: bool = True
    shuffle: Shuffle | None = None
    unknown: bool = False
    index: bool = False
    localize: Kind | None = None


VARIANTS = {
    "A": Variant("plain"),
    "B": Variant("no positions", positions=False),
    "C": Variant("SPP", shuffle="pixels"),
    "D": Variant("DAL (NLN)", localize="mlp"),
    "E": Variant("JP", shuffle="patches"),
    "F": Variant("JP + IDX", shuffle="patches", index=True),
    "G": Variant("JP + UNK", shuffle="patches", unknown=True),
    "H": Variant("JP + UNK + DAL (PCA)", shuffle="patches", unknown=True, localize="pca"),
    "I": Variant("JP + UNK + DAL (LN)", shuffle="patches", unknown=True, localize="linear"),
    "J": Variant("JP + UNK + DAL (NLN)", shuffle="patches", unknown=True, localize="mlp"),
}


def resolve_variant(given: str | Variant) -> Variant:
    if isinstance(given, Variant):
        return given
    if given not in VARIANTS:
        raise JigsawError(
            f'there is no variant "{given}"',
            hint=", ".join(f"{letter}: {v.name}" for letter, v in VARIANTS.items()),
        )
    return VARIANTS[given]
