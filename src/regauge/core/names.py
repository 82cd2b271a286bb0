"""Lists of names as users pass them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def items_of(items: Iterable[T]) -> list[T] | list[str]:
    """Return the items; a string is one item, not its letters.

    Example:
        >>> items_of("noise=0.5"), items_of(("rows", "noise=0.5"))
        (['noise=0.5'], ['rows', 'noise=0.5'])
    """
    return [items] if isinstance(items, str) else list(items)
