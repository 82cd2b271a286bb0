"""Extension of griffe that renders the `>>>` lines of docstrings as code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fences around doctest lines and their output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put every doctest of a docstring between fences."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"(?:^ *>>> .*\n?(?:^ *(?!>>>)\S.*\n?)*)+", _fence, obj.docstring.value, flags=re.M
            )


def _fence(match: re.Match[str]) -> str:
    # Lines that a doctest cannot run are commented out in the source.
    body = re.sub(r"^( *)>>> # (?=\w)", r"\1>>> ", match.group().rstrip(), flags=re.M)
    indent = body[: len(body) - len(body.lstrip())]
    return f"{indent}```python\n{body}\n{indent}```\n"
