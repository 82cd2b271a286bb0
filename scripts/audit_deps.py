"""Check of installed libraries against regauge's list of known vulnerabilities.

`python scripts/audit_deps.py FOLDER...` checks site-packages folders, and exits with code 1 if a
library is vulnerable. The list (src/regauge/results/advisories.py) is maintained by hand and covers
libraries that regauge loads; it does not replace a vulnerability database. pip-audit
needs one: where a package index does not serve PyPI's JSON API, pip-audit skips every package,
prints "No known vulnerabilities found" and exits with 0.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from regauge.results.advisories import ADVISORIES, find_vulnerable


def main(folders: list[str]) -> int:
    """Check every folder, print what is vulnerable, and return the exit code."""
    hits, checked = [], set()
    for folder in folders:
        if not Path(folder).is_dir():
            sys.stderr.write(f"{folder} does not exist\n")
            return 2
        installed = [(d.name, d.version) for d in metadata.distributions(path=[folder])]
        checked |= set(installed)
        hits += find_vulnerable(installed)
    counts = (
        f"{len(checked)} distributions checked against {len(ADVISORIES)} advisories, "
        f"{len(set(hits))} vulnerable"
    )
    sys.stdout.write("".join(f"{line}\n" for line in [*dict.fromkeys(map(str, hits)), counts]))
    return 1 if hits or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
