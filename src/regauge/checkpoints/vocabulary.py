"""The tokens of a model and their rows in its embedding, from the files of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import VOCABULARY_BYTES, parse_json, read_document
from regauge.errors import CheckpointError


def read_vocabulary(folder: Path, hint: str | None = None) -> dict[str, int]:
    """Read the tokens of a model and their rows, from tokenizer.json or vocab.json.

    Args:
        folder: The folder of the tokenizer.
        hint: The hint of the error if both files are missing.

    Returns:
        Token -> row, including the added tokens of tokenizer.json.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if path.is_file():
            content: Any = parse_json(read_document(path, VOCABULARY_BYTES), path)
            try:
                added = content.get("added_tokens") or [] if name == "tokenizer.json" else []
                tokens = content["model"]["vocab"] if name == "tokenizer.json" else content
                if isinstance(tokens, list):  # unigram models list [token, score]
                    tokens = {token: i for i, (token, _) in enumerate(tokens)}
                rows = {str(token): int(i) for token, i in tokens.items()}
                return rows | {str(token["content"]): int(token["id"]) for token in added}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as a vocabulary: {error}", hint="fetch the file again"
                ) from error
    raise CheckpointError(
        f"{folder} has no tokenizer.json or vocab.json, so its tokens are unknown", hint=hint
    )
