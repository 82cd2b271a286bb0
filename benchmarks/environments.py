"""Virtual environments of the tools that regauge is compared with, created on first use in a cache
folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"


def environment(name: str, *installs: list[str]) -> Path:
    """Return the virtual environment of this name, created if it does not exist.

    torch is installed first and by its exact version, since a looser pin would fetch another build.
    Then pip runs with each list of arguments in `installs`.
    """
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regauge" / "benchmarks"
    )
    path = cache / name
    if not (path / "ready").exists():
        print(f"creating {path}", file=sys.stderr)
        shutil.rmtree(path, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        for arguments in ([f"torch=={TORCH}"], *installs):
            subprocess.run(
                [
                    str(path / "bin" / "pip"),
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    *arguments,
                ],
                check=True,
            )
        (path / "ready").touch()
    return path
