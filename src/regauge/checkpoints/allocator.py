"""Memory allocation of the process."""

from __future__ import annotations

import ctypes

# glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX
_TRIM, _PAD, _MAP, _ARENAS = -1, -2, -3, -8
_LARGE = 1 << 25  # the largest threshold that every glibc accepts


def reuse_memory() -> None:
    """Configure glibc to keep freed memory for reuse; without effect on other C libraries.

    A command that computes one tensor after another would otherwise return each to the system, and
    wait until new pages are cleared.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_MAP, _LARGE), (_TRIM, 1 << 30), (_PAD, 1 << 24), (_ARENAS, 1)):
        mallopt(option, value)
