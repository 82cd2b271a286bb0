"""The runtime environment: versions of the loaded libraries, and the cache folder."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def versions(*modules: str) -> dict[str, str]:
    """Return the versions of regauge, Python and the loaded libraries, and of further `modules`."""
    from regauge import __version__

    result = {"regauge": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "timm", *modules):
        if name in sys.modules:
            result[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return result


def default_cache() -> Path:
    """Return $REGAUGE_CACHE, or a folder in the cache directory of the platform."""
    override = os.environ.get("REGAUGE_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "regauge" / "experiments"
