"""An extension of griffe: lines of a docstring that begin with `>>>` are shown as code, and not as
what Markdown makes of them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fences around doctest lines and what they print."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"((?:^>>> .*\n?(?:^(?!>>>)\S.*\n?)*)+)", _fenced, obj.docstring.value, flags=re.M
            )


def _fenced(found: re.Match[str]) -> str:
    body = re.sub(
        r"^>>> # (?=\w)", ">>> ", found.group().rstrip(), flags=re.M
    )  # a comment only because a doctest could not run it
    return f"```python\n{body}\n```\n"
