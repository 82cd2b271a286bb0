"""Which symmetry each model family has: one small file each, and this list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from regauge.errors import UnknownModelError
from regauge.families import gpt2, llama, swin, t5, vit
from regauge.families.family import Boundary, Family
from regauge.families.pieces import Config, Names
from regauge.spec import Spec

FAMILIES: tuple[Family, ...] = (vit.FAMILY, gpt2.FAMILY, llama.FAMILY, t5.FAMILY, swin.FAMILY)

__all__ = ["FAMILIES", "Boundary", "Family", "family_of", "spec_from"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
    raise UnknownModelError(
        f"no family describes models of type {kind!r}; known are {known}",
        hint="docs/adding-a-model.md shows how to add one, or how to write a spec file for --spec",
    )


def spec_from(config: Mapping[str, Any], names: Iterable[str]) -> Spec:
    """The spec of the model with this config and these tensor names, stored or live, old naming or new."""
    return family_of(config).spec(Config(config), Names(names))
