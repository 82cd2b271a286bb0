"""mkdocs hook that marks up the HTML of a page for docs/site.css.

Columns of numbers are aligned, an option such as `--data` and a number with its unit stay on one
line, and blocks of text in columns scroll instead of being wrapped.
"""

from __future__ import annotations

import html
import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.S)
ROW = re.compile(r"<tr>.*?</tr>", re.S)
CELL = re.compile(r"<(t[hd])>(.*?)</\1>", re.S)
NUMBER = re.compile(r"[-+−<>≤≥~]? ?\d[\d.,]*(e[-+]?\d+)?( ?[%x])?( ± \d[\d.,]*(e-?\d+)?( ?%)?)?")
MISSING = {"", "-", "–", "—", "nan", "inf"}
BLOCK = re.compile(r'<div class="language-text highlight">(.*?</pre>)', re.S)
GAP = re.compile(r"\S {2,}\S")
VERBATIM = re.compile(r"(<pre.*?</pre>|<code>.*?</code>|<[^>]+>)", re.S)
OPTION = re.compile(r"(?<![^\s>])--?[a-z][\w-]*")
NAME = re.compile(r"<code>[^<\s]{12,}</code>")
BREAK = re.compile(r"(?<=\w[./_(])(?=[\w&\"])|(?<=\w)(?=\[)|(?<=\w\|)(?=\w)")
UNIT = re.compile(r"(?<=\d) (?=(%|dB|MB|GB|points?)(?!\w))")


def _text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup)).strip()


def align_numbers(table: str) -> str:
    """Give the cells of every column of numbers the class `number`, the first column excepted.

    Escaped pipes are shown as pipes.
    """
    rows = [[_text_of(c[2]) for c in CELL.finditer(row)] for row in ROW.findall(table)]
    columns = list(zip(*rows[1:], strict=False)) if len({len(row) for row in rows}) == 1 else []
    numeric = {
        i
        for i, cells in enumerate(columns)
        if i
        and any(NUMBER.fullmatch(cell) for cell in cells)
        and all(cell in MISSING or NUMBER.fullmatch(cell) for cell in cells)
    }

    def mark(row: re.Match[str]) -> str:
        position = iter(range(len(columns)))
        return CELL.sub(
            lambda c: (
                f'<{c[1]} class="number">{c[2]}</{c[1]}>' if next(position, 0) in numeric else c[0]
            ),
            row[0],
        )

    # GitHub needs a backslash before a pipe in a table's code, which Python-Markdown shows
    return ROW.sub(mark, table).replace("\\|", "|")


def mark_columns(block: re.Match[str]) -> str:
    """Give a block of text the class `columns` if two of its lines have gaps, and the other lines
    the class `prose`.
    """
    gaps = [line for line in _text_of(block[1]).splitlines() if GAP.search(line)]
    if len(gaps) < 2:
        return block[0]

    def mark_line(line: str) -> str:
        return line if not line or GAP.search(line) else f'<span class="prose">{line}</span>'

    def mark_prose(code: re.Match[str]) -> str:
        lines = "\n".join(map(mark_line, code[1].split("\n")))
        return f"<code>{lines}</code>"

    marked = re.sub(r"<code>([^<]*)</code>", mark_prose, block[0])
    return marked.replace(' highlight">', ' highlight columns">', 1)


def keep_together(markup: str) -> str:
    """Keep options in inline code, and numbers with their units, on one line. Long names are broken
    after a dot, a slash or an underscore.
    """
    parts = VERBATIM.split(markup)
    for i, part in enumerate(parts):
        if part.startswith("<code>"):
            part = NAME.sub(lambda name: BREAK.sub("<wbr>", name[0]), part)
            parts[i] = OPTION.sub(lambda o: f'<span class="option">{o[0]}</span>', part)
        elif not part.startswith("<"):
            parts[i] = UNIT.sub("\N{NO-BREAK SPACE}", part)
    return "".join(parts)


def on_page_content(markup: str, **_: Any) -> str:
    """Mark up one page (a hook of mkdocs)."""
    markup = TABLE.sub(lambda table: align_numbers(table[0]), markup)
    return keep_together(BLOCK.sub(mark_columns, markup))
