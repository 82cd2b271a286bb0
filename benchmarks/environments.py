"""Environments of the tools that benchmarks stand beside: each its own, in a cache folder, made
when it is first needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"


def environment(name: str, *wanted: list[str]) -> Path:
    """A virtual environment of this name. torch is installed first and by its version: a looser pin
    would fetch another build. Then each list of arguments of pip.
    """
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regauge" / "benchmarks"
    )
    there = cache / name
    if not (there / "ready").exists():
        print(f"making {there}", file=sys.stderr)
        shutil.rmtree(there, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(there)], check=True)
        for arguments in ([f"torch=={TORCH}"], *wanted):
            subprocess.run(
                [
                    str(there / "bin" / "pip"),
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    *arguments,
                ],
                check=True,
            )
        (there / "ready").touch()
    return there
