"""Checks of the arguments of public functions: types, bounds, choices and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from regauge.errors import DeviceError, Hint, RegaugeError

T = TypeVar("T")


def require_type(value: Any, cls: type | tuple[type, ...], name: str) -> None:
    """Raise a RegaugeError unless a value is an instance of a class, or of one of several."""
    if not isinstance(value, cls):
        names = " or ".join(c.__name__ for c in (cls if isinstance(cls, tuple) else (cls,)))
        raise RegaugeError(
            f"{name} must be of type {names}, got {type(value).__name__}",
            hint=f"pass {name} as {names}",
        )


def resolve_options(options: T | None, default: T) -> T:
    """Return options, or their default for None.

    Raises:
        RegaugeError: The options are of another class than their default.
    """
    if options is None:
        return default
    require_type(options, type(default), "options")
    return options


def require_at_least(error: type[RegaugeError], low: int, **values: Any) -> None:
    """Raise an error that lists every value below a bound; None is the default, and not checked."""
    faults = []
    for name, value in values.items():
        if value is None:
            continue
        try:
            valid = bool(value >= low)
        except TypeError:
            valid = False
        if not valid:
            faults.append(f"{name} must be >= {low}, got {value!r}")
    if faults:
        raise error("\n".join(faults))


def require_choice(
    error: type[RegaugeError], name: str, value: Any, choices: Sequence[str]
) -> None:
    """Raise an error unless a value is one of several."""
    if value not in choices:
        raise error(f'{name} must be one of {", ".join(choices)}, got "{value}"')


def require_device(name: Any) -> None:
    """Raise a DeviceError if torch cannot compute on a device, before anything is loaded."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    # torch built without it, a missing device, an unknown name, not a name
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(
            f'cannot compute on the device "{name}": {first}',
            hint=Hint(
                "use cpu, or torch.accelerator.current_accelerator()",
                cli="use cpu, or a device that regauge doctor lists",
            ),
        ) from error
