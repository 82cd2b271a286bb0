"""mkdocs hook that turns links from docs/ to other files of the repository into inline code.

A link to a missing file is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the links of one page."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / match.group(2)).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            raise FileNotFoundError(f"{page.file.src_path}: {match.group(2)} does not exist")
        if target.is_relative_to(ROOT / "docs"):
            return match.group()
        return f"{match.group(1)} (`{target.relative_to(ROOT)}`)"

    return OUTSIDE.sub(replace, markdown)
