"""Check of names and prose against scripts/words.toml: `python scripts/words.py [--all] [FILE]`.

Exit code 1 if an enforced file uses a word of the list, or a module is named by a gerund.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".html", ".ipynb"}


@dataclass(frozen=True)
class Hit:
    """One use of a word of the list."""

    path: Path
    line: int
    text: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: write {self.use}"


def load_rules(path: Path = ROOT / "scripts" / "words.toml") -> dict[str, Any]:
    """Read the list."""
    return tomllib.loads(path.read_text())


def patterns(rules: dict[str, Any]) -> list[tuple[re.Pattern[str], str]]:
    """Compile the phrases; letters on either side prevent a match, underscores do not."""
    phrases = rules["phrase"]
    return [
        (re.compile(rf"(?<![a-z])(?:{p['pattern']})(?![a-z])", re.I), p["use"]) for p in phrases
    ]


def check_text(path: Path, text: str, rules: dict[str, Any]) -> Iterator[Hit]:
    """Yield the hits of one file, line by line."""
    compiled = patterns(rules)
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, use in compiled:
            for match in pattern.finditer(line):
                yield Hit(path, number, match.group(0), use)


def check_name(path: Path, rules: dict[str, Any]) -> Iterator[Hit]:
    """Yield a hit if a module is named by a gerund that is not on the list."""
    name = path.parent.name if path.name == "__init__.py" else path.stem
    if path.suffix == ".py" and name.endswith("ing") and name not in rules["modules"]:
        yield Hit(path, 1, name, "a noun (state_store, messages, report)")


def files_of(rules: dict[str, Any], places: Sequence[str]) -> list[Path]:
    """List the files below some places, relative to the repository."""
    paths: list[Path] = []
    for place in places:
        start = ROOT / place
        paths += [start] if start.is_file() else [p for p in start.rglob("*") if p.is_file()]
    relative = sorted(p.relative_to(ROOT) for p in paths if p.suffix in SUFFIXES)
    return [p for p in relative if not any(p.is_relative_to(skip) for skip in rules["skipped"])]


def main(argv: Sequence[str] | None = None) -> int:
    """Print every hit in the enforced files, or with --all in all checked ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="check these instead of the enforced files")
    parser.add_argument(
        "--all", action="store_true", help="check experiments too; only enforced files fail"
    )
    args = parser.parse_args(argv)
    rules = load_rules()
    paths = files_of(rules, args.files or rules["checked" if args.all else "enforced"])
    failed = 0
    for path in paths:
        hits = [*check_name(path, rules), *check_text(path, (ROOT / path).read_text(), rules)]
        for hit in hits:
            print(hit)
        enforced = bool(args.files) or any(path.is_relative_to(e) for e in rules["enforced"])
        failed += len(hits) if enforced else 0
    print(f"{failed} hits in {len(paths)} files", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
