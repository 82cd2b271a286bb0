"""Which symmetry each model family has: one small file each, and this list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regauge.core.spec import Shaped, Spec
from regauge.errors import SpecError, UnknownModelError
from regauge.models.families import (
    bart,
    bert,
    clip,
    deberta,
    dinov2,
    gemma2,
    gpt2,
    llama,
    mixtral,
    swin,
    t5,
    timm_swin,
    timm_vit,
    vit,
)
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import Config, Names

FAMILIES: tuple[Family, ...] = (
    vit.FAMILY,
    dinov2.FAMILY,
    bert.FAMILY,
    deberta.FAMILY,
    gpt2.FAMILY,
    llama.FAMILY,
    gemma2.FAMILY,
    mixtral.FAMILY,
    bart.FAMILY,
    t5.FAMILY,
    swin.FAMILY,
    clip.FAMILY,
    timm_vit.FAMILY,
    timm_swin.FAMILY,
)

# What a family goes through one by one; a model has at least one tensor for each.
_COUNTS = (
    "num_local_experts",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "depths",
)

__all__ = ["FAMILIES", "Boundary", "Family", "check_counts", "family_of", "spec_from"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to."""
    kind, architecture = config.get("model_type"), str(config.get("architecture") or "")
    if not kind and not architecture:
        raise UnknownModelError(
            "the config names neither a model_type nor an architecture, so the model's family "
            "is not known",
            hint="take the model's original config.json, or write a spec file "
            "(docs/adding-a-model.md)",
        )
    for family in FAMILIES:
        if kind in family.model_types or (
            kind is None and architecture.startswith(family.architectures)
        ):
            return family
    known = ", ".join(
        sorted(
            [
                *(t for f in FAMILIES for t in f.model_types),
                *(f"timm {a}*" for f in FAMILIES for a in f.architectures),
            ]
        )
    )
    raise UnknownModelError(
        f"no family describes models of type {kind or architecture!r}; known are {known}",
        hint="docs/adding-a-model.md shows how to add one, or how to write a spec file for --spec",
    )


def spec_from(
    config: Mapping[str, Any], names: Iterable[str] | Mapping[str, Shaped | Sequence[int]]
) -> Spec:
    """The spec of the model with this config and these tensor names (or names with shapes, which
    timm's need), stored or live, old naming or new.
    """
    family, known = family_of(config), Names(names)
    check_counts(config, max(1000, len(known.names)))
    return family.spec(Config(config), known)


def check_counts(config: Mapping[str, Any], limit: int = 1000) -> None:
    """Refuse a config, or one inside it, that speaks of more layers or experts than a model can
    have tensors: listing them would take forever.
    """
    for one in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        for key in _COUNTS:
            counts = one.get(key)
            for n in counts if isinstance(counts, list | tuple) else [counts]:
                if isinstance(n, int) and n > limit:
                    raise SpecError(
                        f'config.json says "{key}" is {n}; with these tensors it is at most '
                        f"{limit}",
                        hint="is it this model's config?",
                    )
