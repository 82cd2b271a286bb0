"""The tokens of a model and the rows of its tables that they have, read from its tokenizer's
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import VOCABULARY_BYTES, parse_json, read_document
from regauge.errors import CheckpointError


def read_vocabulary(folder: Path, hint: str | None = None) -> dict[str, int]:
    """The tokens of a model and their rows, from its tokenizer.json (those that were added to it
    too) or vocab.json.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if path.is_file():
            found: Any = parse_json(read_document(path, VOCABULARY_BYTES), path)
            try:
                added = found.get("added_tokens") or [] if name == "tokenizer.json" else []
                found = found["model"]["vocab"] if name == "tokenizer.json" else found
                if isinstance(found, list):  # unigram models list [token, score]
                    found = {token: i for i, (token, _) in enumerate(found)}
                out = {str(token): int(i) for token, i in found.items()}
                return out | {str(one["content"]): int(one["id"]) for one in added}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as a vocabulary: {error}", hint="fetch the file again"
                ) from error
    raise CheckpointError(
        f"{folder} has no tokenizer.json or vocab.json, so its tokens are not known", hint=hint
    )
