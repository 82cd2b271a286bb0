"""Parsers of the texts that options take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import typer


def bad_value(option: str, expected: str, got: object) -> typer.BadParameter:
    """Return the error of an option whose value is not what was expected."""
    return typer.BadParameter(f"must be {expected}, got {got!r}", param_hint=option)


def parse_names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def parse_numbers(text: str | None, option: str) -> list[float] | None:
    """Parse comma-separated numbers; None stays None."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise bad_value(option, "comma-separated numbers", text) from error


def parse_lrs(text: str, option: str) -> tuple[float, ...]:
    """Parse comma-separated learning rates."""
    try:
        lrs = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        lrs = ()
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise bad_value(option, "positive learning rates, as in 3e-4,3e-3", text)
    return lrs


def check_lr(lr: float) -> None:
    """Raise unless a learning rate is positive and finite."""
    if not 0 < lr < math.inf:
        raise bad_value("--lr", "> 0 and finite", lr)


def parse_counts(text: str, option: str, example: str) -> list[int]:
    """Parse comma-separated whole numbers from 1, sorted and without duplicates. An empty text
    gives an empty list.
    """
    counts = _whole_numbers([part for part in text.split(",") if part.strip()])
    if counts is None:
        raise bad_value(option, f"whole numbers from 1, as in {example}", text)
    return sorted(set(counts))


def parse_sizes(text: str, option: str, names: str, example: str) -> list[int]:
    """Parse one whole number from 1 for each of the comma-separated names."""
    numbers = _whole_numbers(text.split(","))
    if numbers is None or len(numbers) != len(names.split(",")):
        raise bad_value(option, f"{names}, as in {example}", text)
    return numbers


def _whole_numbers(parts: Sequence[str]) -> list[int] | None:
    """Return the whole numbers from 1 in some texts; None if one of them is something else."""
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        return None
    return [int(part) for part in parts]


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


def parse_fields(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """Parse NAME=COLUMN pairs. Fields that are not named keep their own names."""
    columns = {}
    for text in pairs or ():
        name, _, columns[name] = text.partition("=")
        if not name or not columns[name]:
            raise bad_value("--field", "NAME=COLUMN", text)
    return columns or None


def parse_weights(pairs: Sequence[str] | None) -> dict[str, float]:
    """Parse NAME=NUMBER weights."""
    weights = {}
    for text in pairs or ():
        name, _, number = text.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = -1.0
        if not name or not 0 <= weights[name] < math.inf:
            raise bad_value("--weight", "NAME=NUMBER with a number >= 0", text)
    return weights


def parse_settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Parse NAME=VALUE parameters of a merge method."""
    import yaml

    settings: dict[str, Any] = {}
    for text in pairs or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise bad_value("--set", "NAME=VALUE", text)
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise bad_value("--set", "a number or a list of numbers", value) from error
    return settings


def parse_size(text: str, option: str) -> int:
    """Parse a size such as 500MB into bytes."""
    from regauge.checkpoints.files import parse_bytes

    size = parse_bytes(text)
    if not size:
        raise bad_value(option, "a size such as 500MB or 2GB", text)
    return size
