"""Tokenizers: a tokenizer.json, or anything that transformers' AutoTokenizer loads (a folder, a hub
id).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import VOCABULARY_BYTES, parse_json, read_document
from regauge.errors import CustomCodeError, DataError, need
from regauge.models.trust import code_disabled

Source = Path | str


def encode(
    tokenizer: Source | None, texts: list[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """Tokenize each text, with or without the tokenizer's special tokens."""
    tokenizer = _require_tokenizer(tokenizer)
    if _is_file(tokenizer):
        from_file = open_tokenizer(tokenizer)
        from_file.no_padding()  # some files pad or truncate all texts to one length
        from_file.no_truncation()
        with _wrap_errors(tokenizer):
            encodings = from_file.encode_batch(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
    tokenize = open_tokenizer(tokenizer)
    return [
        list(tokenize(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        for text in texts
    ]


def decode(tokenizer: Source, ids: list[int]) -> str:
    """Return the text of tokens."""
    if not _is_file(tokenizer):
        return str(open_tokenizer(tokenizer).decode(ids))
    from_file = open_tokenizer(tokenizer)
    from tokenizers import decoders

    from_file.decoder = from_file.decoder or decoders.ByteLevel()  # some files have no decoder
    with _wrap_errors(tokenizer):
        return str(from_file.decode(ids, skip_special_tokens=False))


def surrounding_tokens(tokenizer: Source | None, text: str = "a") -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    plain, marked = (
        encode(tokenizer, [text], add_special_tokens=special)[0] for special in (False, True)
    )
    at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:at], marked[at + len(plain) :]


def special_tokens(tokenizer: Source | None) -> tuple[list[int], list[int], int]:
    """Return the special tokens that a tokenizer adds before and after a text, and its mask token.

    Raises:
        DataError: The tokenizer has no mask token.
    """
    tokenizer = _require_tokenizer(tokenizer)
    before, after = surrounding_tokens(tokenizer)
    if _is_file(tokenizer):
        document = read_document(Path(tokenizer), VOCABULARY_BYTES)
        parsed = parse_json(document, tokenizer, DataError)
        with _wrap_errors(tokenizer):
            mask = next(
                (
                    int(t["id"])
                    for t in parsed.get("added_tokens") or []
                    if t["content"].strip("[]<>").lower() == "mask"
                ),
                None,
            )
    else:
        mask = open_tokenizer(tokenizer).mask_token_id
    if mask is None:
        raise DataError(
            f"{tokenizer} has no mask token",
            hint="pass the tokenizer that the masked language model was trained with",
        )
    return before, after, mask


def _require_tokenizer(tokenizer: Source | None) -> Source:
    if tokenizer is None:
        raise DataError(
            "texts need a tokenizer", hint="pass a tokenizer.json, a folder or a hub id"
        )
    return tokenizer


def _is_file(tokenizer: Source) -> bool:
    return str(tokenizer).endswith(".json")


def open_tokenizer(source: Source) -> Any:
    """Open a tokenizer, with the tokenizers library for a .json file, with the transformers library
    for a folder or a hub id. No code of a checkpoint is run.

    Raises:
        CustomCodeError: The tokenizer is defined by code of its checkpoint.
        DataError: The tokenizer does not exist or cannot be read.
    """
    return _from_file(source) if _is_file(source) else _from_library(source)


@contextlib.contextmanager
def _wrap_errors(tokenizer: Source) -> Iterator[None]:
    """Turn the errors of the tokenizers library, which raises plain Exceptions and panics, into
    DataErrors.
    """
    try:
        yield
    except BaseException as error:
        # A panic in Rust is raised as a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{tokenizer} cannot be read as a tokenizer: {error}", hint="pass a tokenizer.json"
        ) from error


def _from_file(tokenizer: Source) -> Any:
    need("transformers", "models")  # it installs tokenizers
    from tokenizers import Tokenizer

    with _wrap_errors(tokenizer):
        return Tokenizer.from_file(str(tokenizer))


def _from_library(tokenizer: Source) -> Any:
    need("transformers", "models")
    from transformers import AutoTokenizer

    try:
        with code_disabled():
            return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # the library raises errors of many types for damaged files
        if "trust_remote_code" in str(error):
            raise CustomCodeError(
                f"the tokenizer {tokenizer} needs custom code, which regauge never runs",
                hint="give a tokenizer.json; or load it in Python, after reading its code, and "
                "pass it or its token ids",
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the tokenizer {tokenizer} cannot be loaded: {reason}",
            hint="pass a folder, or connect to the hub",
        ) from error
