"""Documents from elsewhere (JSON, TOML, YAML): how large they may be, and JSON that the rest of the
package can rely on.

The limits are far above what real files have, and low enough that a file within them is read in
seconds. docs/formats.md lists them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import format_bytes, require_file, wrap_read_errors
from regauge.errors import CheckpointError, RegaugeError

CONFIG_BYTES = 8_000_000  # config.json, adapter_config.json, session.json, run.json
INDEX_BYTES = 32_000_000  # model.safetensors.index.json: 200,000 tensors
HEADER_BYTES = 25_000_000  # of a safetensors file: 200,000 tensors; the format itself allows 100 MB
VOCABULARY_BYTES = 128_000_000  # tokenizer.json, vocab.json
RESULTS_BYTES = 64_000_000
SPEC_BYTES = 4_000_000
RECIPE_BYTES = 250_000
DEPTH = 100  # lists and objects inside each other


def read_document(path: Path, limit: int, error: type[RegaugeError] = CheckpointError) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises:
        RegaugeError: the file is larger, is no regular file or cannot be read; of the type `error`
        where it is too large.
    """
    require_file(path)
    with wrap_read_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise error(
            f"{path} must have at most {format_bytes(limit)}, got "
            f"{format_bytes(max(size, len(data)))}",
            hint="is it the right file?",
        )
    return data


def load_json(text: str | bytes) -> Any:
    """Parse JSON. Every fault is a ValueError, nesting that is too deep for the parser included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(
    data: bytes | str,
    where: object,
    error: type[RegaugeError] = CheckpointError,
    hint: str = "fetch the file again",
    *,
    surrogates: bool = False,
) -> Any:
    """Parse JSON. A document that is nested more than `DEPTH` deep, or has text that is not valid
    Unicode, is rejected like one that is not JSON: it could not be written again.

    Args:
        data: the document.
        where: what errors name.
        error, hint: the type of the error, and its way out.
        surrogates: accept text that is not valid Unicode; the caller replaces it.
    """
    try:
        value = load_json(data)
    except ValueError as fault:
        raise error(f"{where} is not JSON: {str(fault)[:200]}", hint=hint) from fault
    text = data if isinstance(data, str) else data.decode("latin-1")  # only ASCII is looked for
    if text.count("[") + text.count("{") > DEPTH and not is_flat(value):
        raise error(f"{where} must be nested at most {DEPTH} deep", hint=hint)
    if not surrogates and ("\\ud" in text or "\\uD" in text or isinstance(data, str)):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise error(
                f"{where} has text that is not valid Unicode: a lone surrogate", hint=hint
            ) from fault
    return value


def is_flat(value: Any) -> bool:
    """Return whether no value lies more than `DEPTH` deep. Level by level, since a recursion would
    end where the parser's did.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        inner = (v for one in level for v in (one.values() if isinstance(one, dict) else one))
        level = [v for v in inner if isinstance(v, dict | list)]
    return not level
