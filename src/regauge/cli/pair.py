"""Two models on the command line: opened and checked, and the parsers of their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regauge.cli.model import open_source

if TYPE_CHECKING:
    from regauge.matching.pairs import Pair


def open_pair(
    a: str,
    b: str,
    spec: Path | None,
    *,
    fold: bool = False,
    fix: Sequence[str] = (),
    shared_tokens: bool = False,
) -> Pair:
    """Open two models and check that they fit each other."""
    from regauge.matching.pairs import make_pair

    return make_pair(
        open_source(a, spec),
        open_source(b, spec),
        fold=fold,
        fix=fix,
        shared_tokens=shared_tokens,
    )


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layers and ranges: 3, 0-5, 0,2,7-9."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise typer.BadParameter(
                f"layers must be numbers or ranges, as in 0-5,11, got {part!r}"
            )
        layers += range(int(first), int(last or first) + 1)
    return layers


def parse_weights(pairs: Sequence[str] | None) -> dict[str, float]:
    """Parse NAME=NUMBER weights."""
    weights = {}
    for text in pairs or ():
        name, _, number = text.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = -1.0
        if not name or not 0 <= weights[name] < float("inf"):
            raise typer.BadParameter(
                f"must be NAME=NUMBER with a number >= 0, got {text!r}",
                param_hint="--weight",
            )
    return weights


def parse_names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names; None stays None."""
    return None if text is None else [s.strip() for s in text.split(",") if s.strip()]
