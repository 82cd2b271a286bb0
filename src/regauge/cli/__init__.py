"""The command line: `regauge inspect | verify | move | match | lock | seal | ... | demo`. `regauge
--help` lists all commands.

`EXIT_CODES` lists the exit codes, as docs/cli.md does.
Commands import what they need when they run: `regauge --help` loads neither numpy nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
EXIT_CODES = {
    0: "Success. Every check that ran holds.",
    1: "Error: an `error:` line states it, a `hint:` line suggests a fix. `doctor`: a required "
    "library is missing, too old or vulnerable.",
    2: "Usage error: an unknown command or option, or a value that an option does not accept.",
    3: "The command ran, and a check failed: a symmetry that should hold does not "
    "(`verify`, `barrier`, `demo`), an attack exceeds `--fail-above` or may do so (`audit`), or "
    "training made the model worse (`federate`).",
    INTERRUPTED: "Interrupted by Ctrl-C or SIGTERM. The last line states what is saved and how to "
    "continue.",
}
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
