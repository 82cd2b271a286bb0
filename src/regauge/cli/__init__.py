"""The command line: `regauge inspect | verify | move | match | lock | seal | ... | demo`; `regauge --help` lists all commands.

Exit codes: 0 done, 1 error, 2 usage, 3 a law that should hold does not, 130 interrupted. Commands import what they need when they run:
`regauge --help` loads neither numpy nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        from regauge.cli.app import run  # here, so that an interrupt while it is imported ends quietly

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED
