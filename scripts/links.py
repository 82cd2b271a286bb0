"""A hook of mkdocs: links out of docs/, to files of the repository that the site does not have,
become plain code; a file that is not there is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    here = (ROOT / "docs" / page.file.src_path).parent

    def plain(found: re.Match[str]) -> str:
        target = (here / found.group(2)).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            raise FileNotFoundError(f"{page.file.src_path}: {found.group(2)} is not there")
        if target.is_relative_to(ROOT / "docs"):
            return found.group()
        return f"{found.group(1)} (`{target.relative_to(ROOT)}`)"

    return OUTSIDE.sub(plain, markdown)
