"""`python -m regauge.cli`."""

import sys

from regauge.cli import main

sys.exit(main())
