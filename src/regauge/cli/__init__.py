"""The command line: `regauge inspect | verify | move | match | lock | seal | ... | demo`; `regauge
--help` lists all commands.

Exit codes: 0 done, 1 error, 2 usage, 3 a law that should hold does not, 130 interrupted. Commands
import what they need when they run: `regauge --help` loads neither numpy nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
# How long torch's threads spin before they sleep. The library's own 300,000 makes small models
# crawl where another process has a core: measured on two cores 546 ms a step, and 42 with this; on
# a machine of one's own 3 ms with either.
SPIN_COUNT = "3000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        from regauge.cli.app import (
            run,
        )  # here, so that an interrupt while it is imported ends quietly

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED
