"""Where regauge runs: the versions that compute here, and the folder for what can be made again."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path


def versions(*more: str) -> dict[str, str]:
    """What computes here, as far as it is loaded."""
    from regauge import __version__

    found = {"regauge": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "timm", *more):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found


def default_cache() -> Path:
    """$REGAUGE_CACHE, or the system's usual place for what can be made again."""
    given = os.environ.get("REGAUGE_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return usual / "regauge" / "experiments"
