"""Check of the line length, 100 columns, in Python files: `python scripts/long_lines.py`.

Ruff's E501 does not count a trailing `# noqa` or `# type: ignore`; this check does. Exit code 1 if
a line is too long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "examples", "scripts", "soak", "src", "tests")
SKIPPED = ("tests/experiments",)
COLUMNS = 100


def long_lines(path: Path) -> Iterator[int]:
    """Yield the numbers of the lines over the limit."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > COLUMNS:
            yield number


def main() -> int:
    """Print every line that is too long."""
    paths = sorted(p.relative_to(ROOT) for f in FOLDERS for p in (ROOT / f).rglob("*.py"))
    checked = [p for p in paths if not any(p.is_relative_to(skip) for skip in SKIPPED)]
    hits = [f"{path}:{n}" for path in checked for n in long_lines(ROOT / path)]
    for hit in hits:
        print(f"{hit}: more than {COLUMNS} columns")
    print(f"{len(hits)} long lines in {len(checked)} files", file=sys.stderr)
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
