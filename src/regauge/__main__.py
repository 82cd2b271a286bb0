"""Entry point of `python -m regauge`."""

import sys

from regauge.cli import main

if __name__ == "__main__":
    sys.exit(main())
