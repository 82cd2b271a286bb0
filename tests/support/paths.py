"""Where assets lie."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parents[1]


ASSETS = HERE.parents[1] / "shared" / "assets"


FETCHED = Path(os.environ.get("REGAUGE_ASSETS", Path.home() / ".cache" / "regauge" / "assets"))
