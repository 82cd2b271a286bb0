"""The variants of the paper's Table 2, by letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regauge.errors import JigsawError
from regauge.jigsaw.localizer import Kind

Shuffle = Literal["patches", "pixels"]


@dataclass(frozen=True)
class Variant:
    """A variant of training.

    Attributes:
        name: The name in the paper.
        positions: Whether the model has its position embeddings.
        shuffle: Whether masked patches are shuffled, or all patches and their pixels, or none.
        unknown: Whether shuffled patches share one unknown position embedding.
        index: Whether a second table of positions is added, which the shuffle does not change.
        localize: The regression of positions, if there is one.

    Example:
        >>> regauge.jigsaw.VARIANTS["A"].shuffle is None
        True
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


def resolve_variant(variant: str | Variant) -> Variant:
    """Return a variant, by its letter or as it is."""
    if isinstance(variant, Variant):
        return variant
    if variant not in VARIANTS:
        raise JigsawError(
            f'unknown variant "{variant}"',
            hint=", ".join(f"{letter}: {v.name}" for letter, v in VARIANTS.items()),
        )
    return VARIANTS[variant]
