"""Size limits for untrusted documents (JSON, TOML, YAML), and a strict JSON parser.

The limits are far above the sizes of real files, and low enough that any file within them parses in
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

    Args:
        path: The file.
        limit: The largest size in bytes.
        error: The type of the error for a file that is too large.

    Raises:
        RegaugeError: The file is too large, not a regular file, or cannot be read.
    """
    require_file(path)
    with wrap_read_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise error(
            f"{path} must have at most {format_bytes(limit)}, "
            f"got {format_bytes(max(size, len(data)))}",
            hint="check that it is the right file",
        )
    return data


def load_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError for every fault, including too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json(
    data: bytes | str,
    where: object,
    error: type[RegaugeError] = CheckpointError,
    hint: str = "fetch the file again",
    *,
    surrogates: bool = False,
) -> Any:
    """Parse JSON of bounded depth and valid Unicode, so that it can be written again.

    Args:
        data: The document.
        where: The name of the document in errors.
        error: The type of the error.
        hint: The hint of the error.
        surrogates: Accept text that is not valid Unicode; the caller replaces it.

    Raises:
        RegaugeError: Of type `error`: the document is not JSON, is nested more than `DEPTH` deep,
            or has a lone surrogate.
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
    """Return whether containers are nested at most `DEPTH` deep.

    Works level by level: a recursive check would overflow where the parser did.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        inner = (v for node in level for v in (node.values() if isinstance(node, dict) else node))
        level = [v for v in inner if isinstance(v, dict | list)]
    return not level
