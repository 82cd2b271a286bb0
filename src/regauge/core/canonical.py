"""Canonical JSON: equal values have equal bytes."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Serialize a value to JSON with sorted keys, no spaces and ASCII only, to hash or authenticate
    it.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
