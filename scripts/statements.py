"""Count the statements of the package, by package and file: `python scripts/statements.py [cli]`.

A statement is a node of the syntax tree; docstrings count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "regauge"


def count(path: Path) -> int:
    """Count the statements of a file."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))


def main(names: list[str]) -> None:
    """Print the counts of all packages, or of the files of those named."""
    counts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        counts["/".join(parts) if parts[0] in names else parts[0]] += count(path)
    shown = {n: c for n, c in counts.items() if not names or n.split("/")[0] in names}
    for name, n in sorted(shown.items(), key=lambda item: -item[1]):
        print(f"{n:7,}  {name}")
    library = sum(n for name, n in counts.items() if name.split("/")[0] not in ("cli", "demo"))
    print(f"{library:7,}  without cli and demo")


if __name__ == "__main__":
    main(sys.argv[1:])
