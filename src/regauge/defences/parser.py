"""The parser of defence specifications, the same for split learning, federated learning and audits.

A specification is a name with values, "noise=0.5" or "rows=sample,keep_cls". Several are joined
by "+" to a combination, "noise=0.5+rows". Each kind of training has its own table of defences (name
to class): `defences.split`, `defences.gradients`, `federated.defences`. Defences act in the order
of their stages, in whatever order they are given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regauge.core.names import items_of
from regauge.errors import DefenceError

NONE = "none"  # the combination without a defence
FORMER_OPTIONS = {"rate": "lr"}  # accepted in place of the present names


def require(condition: bool, message: str, hint: str) -> None:
    """Raise a DefenceError unless a condition holds."""
    if not condition:
        raise DefenceError(message, hint=hint)


def require_positive(name: str, value: float, hint: str) -> None:
    """Raise a DefenceError unless a value is positive and finite."""
    require(0 < value < math.inf, f"{name} must be positive and finite, got {value:g}", hint)


def require_integer(name: str, value: float, low: int, high: float = math.inf) -> None:
    """Raise a DefenceError unless a value is an integer from `low` to `high`."""
    is_valid = low <= value <= high and math.isfinite(value) and value == int(value)
    bounds = f">= {low}" if high == math.inf else f"from {low} to {high:g}"
    require(is_valid, f"{name} must be an integer, got {value:g}", f"give an integer {bounds}")


def parse_combination(
    defences: Iterable[Any], table: Mapping[str, type], repeatable: type | None = None
) -> tuple[Any, ...]:
    """Return defences in the order in which they act.

    Args:
        defences: Specifications or combinations of them, and defences that are parsed already; a
            string is one of them.
        table: The class of each name.
        repeatable: The only class that may appear more than once.

    Raises:
        DefenceError: A name is unknown, a value is invalid, or a defence appears twice.
    """
    parsed: list[Any] = []
    for defence in items_of(defences):
        if isinstance(defence, str):
            parsed += [parse_from_table(text, table) for text in split_combination(defence)]
        else:
            parsed.append(defence)
    return sort_by_stage(parsed, repeatable)


def split_combination(combination: str) -> list[str]:
    """Split a combination into its defences: "noise=0.5+rows" is two, "noise=1e+1" one."""
    return re.split(r"\+(?=[a-z])", combination)


def parse_from_table(text: str, table: Mapping[str, type]) -> Any:
    """Construct one defence from its specification, by a table of classes."""
    name, _, rest = text.partition("=")
    if name not in table:
        raise DefenceError(f'unknown defence "{name}"', hint=f"choose from {', '.join(table)}")
    values: list[Any] = []
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if equals:
            options[FORMER_OPTIONS.get(key, key)] = _parse_value(value)
        elif part in ("keep_cls",):
            options[part] = True
        else:
            values.append(_parse_value(part))
    try:
        return table[name](*values, **options)
    except TypeError as error:
        word = next((v for v in (*values, *options.values()) if isinstance(v, str)), None)
        is_word = word is not None and "not supported between" in str(error)
        reason = f'"{word}" is not a number' if is_word else error
        raise DefenceError(
            f'"{text}" cannot be parsed: {reason}', hint=_first_sentence(table[name])
        ) from error


def sort_by_stage(defences: Sequence[Any], repeatable: type | None = None) -> tuple[Any, ...]:
    """Sort defences of any table by stage, and reject duplicates of any class but `repeatable`."""
    kinds = [type(d) for d in defences]
    twice = next((k.__name__ for k in kinds if kinds.count(k) > 1 and k is not repeatable), None)
    require(twice is None, f"{twice} is given twice", "give each defence once")
    return tuple(sorted(defences, key=lambda defence: defence.stage))


def _parse_value(text: str) -> Any:
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _first_sentence(kind: type) -> str:
    return re.split(r"\.(?=\s|$)", " ".join((kind.__doc__ or "").split()))[0]
