"""How the process gets its memory."""

from __future__ import annotations

import ctypes

_TRIM, _PAD, _MAP, _ARENAS = (
    -1,
    -2,
    -3,
    -8,
)  # glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX
_LARGE = 1 << 25  # the largest threshold that every glibc takes


def reuse_memory() -> None:
    """Keep freed memory for what comes next, where the C library is glibc: a command that makes one
    tensor after the other would else hand every one back to the system and wait for new pages to be
    cleared. Nothing happens elsewhere.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_MAP, _LARGE), (_TRIM, 1 << 30), (_PAD, 1 << 24), (_ARENAS, 1)):
        mallopt(option, value)
