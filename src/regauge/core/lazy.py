"""Public names of a package, imported on first use, so that importing the package loads neither
torch nor optional libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: the name of the package.
        homes: the public names, and the module of regauge that defines each.
        subpackages: packages that can be reached as attributes too.

    Example:
        >>> getattr_, dir_ = lazy_names("regauge", {"parse": "core.axes"})
        >>> getattr_("parse").__name__, dir_()
        ('parse', ['parse'])
    """

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name in homes:
            return getattr(import_module(f"regauge.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted([*homes, *subpackages])
