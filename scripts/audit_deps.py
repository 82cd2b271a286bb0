"""Check the libraries in some site-packages folders against regauge's list of known
vulnerabilities: `python scripts/audit_deps.py FOLDER...`.

Exit code 1 if one is vulnerable. The list (src/regauge/advisories.py) is maintained by hand and
covers libraries that regauge loads; it is no replacement for a vulnerability database. pip-audit
needs one: where a package index does not serve PyPI's JSON API, pip-audit skips every package,
prints "No known vulnerabilities found" and exits with 0.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from regauge.cli.advisories import ADVISORIES, find_vulnerable


def main(folders: list[str]) -> int:
    found, seen = [], set()
    for folder in folders:
        if not Path(folder).is_dir():
            sys.stderr.write(f"{folder} does not exist\n")
            return 2
        installed = [(d.name, d.version) for d in metadata.distributions(path=[folder])]
        seen |= set(installed)
        found += find_vulnerable(installed)
    counts = (
        f"{len(seen)} distributions checked against {len(ADVISORIES)} advisories, "
        f"{len(set(found))} vulnerable"
    )
    sys.stdout.write("".join(f"{line}\n" for line in [*dict.fromkeys(map(str, found)), counts]))
    return 1 if found or not seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
