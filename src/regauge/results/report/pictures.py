"""Galleries of images: PNGs inside the page."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from typing import Any

from regauge.results.findings import Figure
from regauge.results.report.svg import as_numbers

_COMPACT_ROWS, _COMPACT_IMAGES, _COMPACT_WIDTH = 3, 4, 48


def draw_images(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    """Draw rows of images; a compact gallery has the first images of the first rows."""
    import numpy as np

    heads, skipped, parts = [str(c) for c in figure.data.get("columns", ())], 0, []
    for row in figure.data["rows"][: _COMPACT_ROWS if compact else None]:
        label = str(row.get("label", ""))
        parts.append(f'<div class="strip"><p class="strip-label">{html.escape(label)}</p><div>')
        for i, values in enumerate(row["images"][: _COMPACT_IMAGES if compact else None]):
            pixels, missing = as_numbers(values)
            skipped += missing
            pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
            if (
                pixels.ndim not in (2, 3)
                or (pixels.ndim == 3 and pixels.shape[2] != 3)
                or not pixels.size
            ):
                raise ValueError(
                    "an image must have the shape [height, width] or [height, width, 3], got "
                    f"{pixels.shape}"
                )
            data = _png(np.rint(np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8))
            head = heads[i] if i < len(heads) else ""
            alt = ", ".join(filter(None, (figure.title, label, head or f"image {i + 1}")))
            is_small = pixels.shape[1] <= 48
            width = _COMPACT_WIDTH if compact else 84 if is_small else 152
            style = ' class="small"' if is_small and not compact else ""
            caption = f"<figcaption>{html.escape(head)}</figcaption>" if head else ""
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            parts.append(
                f'<figure{style} style="width:{width}px"><img src="{source}" '
                f'alt="{html.escape(alt)}" width="{width}">{caption}</figure>'
            )
        parts.append("</div></div>")
    return "".join(parts), skipped


def _png(pixels: Any) -> bytes:
    """Encode bytes [height, width] or [height, width, 3] as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(
        ">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0
    )
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
