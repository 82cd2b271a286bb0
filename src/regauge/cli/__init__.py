"""The command line: `regauge inspect | verify | move | match | lock | seal | ... | demo`. `regauge
--help` lists all commands.

Exit codes: 0 success, 1 error, 2 usage, 3 a law that should hold does not, 130 interrupted.
Commands import what they need when they run: `regauge --help` loads neither numpy nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
# Iterations that libgomp's threads spin before they sleep. Its default of 300,000 slows small
# models down while another process uses a core: on two cores 546 ms per step, and 42 ms with this
# value; on an idle machine 3 ms with either.
SPIN_COUNT = "3000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        # inside the try, so that an interrupt during the import ends quietly
        from regauge.cli.app import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED
