"""What every command that measures says of its run, and how it ends."""

from __future__ import annotations

import platform
import shlex
import sys
from typing import Any

FAILED = 3  # the exit code where a law that should hold does not


def facts_of_run() -> dict[str, Any]:
    """The command and the versions: what is needed to repeat a run."""
    from regauge import __version__

    versions = {"regauge": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "timm", "sklearn", "numpy"):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return {"command": shlex.join(["regauge", *sys.argv[1:]]), "versions": versions}
