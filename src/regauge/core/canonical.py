"""Serialise values to JSON in one canonical form, so that equal values have equal bytes."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys, no spaces and ASCII only: the form that is hashed and
    authenticated.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
