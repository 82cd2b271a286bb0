"""The model families: one file each, and the list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regauge.core.spec import Shaped, Spec
from regauge.errors import Hint, SpecError, UnknownModelError
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

# Counts of a config over which families loop; a model has at least one tensor for each.
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
    """Return the family that a config.json belongs to.

    Raises:
        UnknownModelError: no family describes the model.
    """
    model_type, architecture = config.get("model_type"), str(config.get("architecture") or "")
    if not model_type and not architecture:
        raise UnknownModelError(
            "the config names neither a model_type nor an architecture, so the model's family "
            "is unknown",
            hint="take the model's original config.json, or write a spec file "
            "(docs/guides/adding-a-model.md)",
        )
    for family in FAMILIES:
        if model_type in family.model_types or (
            model_type is None and architecture.startswith(family.architectures)
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
        f"no family describes models of type {model_type or architecture!r}; known are {known}",
        hint=Hint(
            "regauge.discover(module, inputs) infers its symmetry; or pass a spec "
            "file with spec= (docs/guides/adding-a-model.md)",
            cli="pass a spec file with --spec (docs/guides/adding-a-model.md)",
        ),
    )


def spec_from(
    config: Mapping[str, Any], names: Iterable[str] | Mapping[str, Shaped | Sequence[int]]
) -> Spec:
    """Build the spec of a model from its config and tensor names.

    Args:
        config: the contents of config.json.
        names: the tensor names, stored or live, or a mapping to tensors or shapes, which timm
            models need.

    Raises:
        UnknownModelError: no family describes the model.
        SpecError: the config lacks a field or contradicts the tensors.
    """
    family, tensor_names = family_of(config), Names(names)
    check_counts(config, max(1000, len(tensor_names.names)))
    return family.spec(Config(config), tensor_names)


def check_counts(config: Mapping[str, Any], limit: int = 1000) -> None:
    """Raise if a config, or one nested in it, has more layers or experts than the model has
    tensors.

    Building a spec loops over them, and a hostile config would make that take forever.

    Raises:
        SpecError: a count exceeds the limit.
    """
    for section in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        for key in _COUNTS:
            counts = section.get(key)
            for n in counts if isinstance(counts, list | tuple) else [counts]:
                if isinstance(n, int) and n > limit:
                    raise SpecError(
                        f'"{key}" in config.json must be at most {limit}, got {n}',
                        hint="use the config that belongs to the model",
                    )
