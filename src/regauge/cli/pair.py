"""Two models on the command line: parsers of their options, and what their outputs report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from regauge.cli.console import info

if TYPE_CHECKING:
    from regauge.models.discovery import Discovery


def report_discoveries(discoveries: Iterable[Discovery]) -> None:
    """Report the models whose symmetry was inferred."""
    for discovery in discoveries:
        info(
            "no family describes this model: its symmetry was inferred from its graph, and "
            f"verified to {discovery.error:.1e} on {discovery.verified_on}"
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
