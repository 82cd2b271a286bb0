"""Texts into tokens and back: a tokenizer is a tokenizer.json, or what transformers' AutoTokenizer
knows (a folder, a hub id).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import VOCABULARY_BYTES, parse_json, read_document
from regauge.data.datasets import DataError
from regauge.errors import CustomCodeError, need
from regauge.models.trust import code_disabled

Source = Path | str


def encode(
    tokenizer: Source | None, texts: list[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """The tokens of each text, with or without the tokenizer's special ones."""
    tokenizer = _require_tokenizer(tokenizer)
    if _is_file(tokenizer):
        known = open_tokenizer(tokenizer)
        known.no_padding()  # some files ask for all texts to be filled up or cut to one length
        known.no_truncation()
        with _wrap_errors(tokenizer):
            return [e.ids for e in known.encode_batch(texts, add_special_tokens=add_special_tokens)]
    found = open_tokenizer(tokenizer)
    return [
        list(found(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        for text in texts
    ]


def decode(tokenizer: Source, ids: list[int]) -> str:
    """The text of tokens that `encode` gave, or that a model wrote."""
    if not _is_file(tokenizer):
        return str(open_tokenizer(tokenizer).decode(ids))
    known = open_tokenizer(tokenizer)
    from tokenizers import decoders

    known.decoder = (
        known.decoder or decoders.ByteLevel()
    )  # some files leave out how bytes become text again
    with _wrap_errors(tokenizer):
        return str(known.decode(ids, skip_special_tokens=False))


def surrounding_tokens(tokenizer: Source | None, text: str = "a") -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind a text."""
    plain, marked = (
        encode(tokenizer, [text], add_special_tokens=special)[0] for special in (False, True)
    )
    at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:at], marked[at + len(plain) :]


def special_tokens(tokenizer: Source | None) -> tuple[list[int], list[int], int]:
    """What a tokenizer puts before and behind a text, and its mask."""
    tokenizer = _require_tokenizer(tokenizer)
    before, after = surrounding_tokens(tokenizer)
    if _is_file(tokenizer):
        found = parse_json(read_document(Path(tokenizer), VOCABULARY_BYTES), tokenizer, DataError)
        with _wrap_errors(tokenizer):
            mask = next(
                (
                    int(t["id"])
                    for t in found.get("added_tokens") or []
                    if t["content"].strip("[]<>").lower() == "mask"
                ),
                None,
            )
    else:
        mask = open_tokenizer(tokenizer).mask_token_id
    if mask is None:
        raise DataError(
            f"{tokenizer} has no mask, so that nothing can be hidden",
            hint="give the tokenizer that the masked model was trained with",
        )
    return before, after, mask


def _require_tokenizer(tokenizer: Source | None) -> Source:
    if tokenizer is None:
        raise DataError(
            "texts need a tokenizer", hint="name one: a tokenizer.json, a folder or a hub id"
        )
    return tokenizer


def _is_file(tokenizer: Source) -> bool:
    return str(tokenizer).endswith(".json")


def open_tokenizer(source: Source) -> Any:
    """Open a tokenizer: of the tokenizers library for a .json file, of the transformers library for
    a folder or a hub id.

    No code of a checkpoint is run.

    Raises:
        CustomCodeError: the tokenizer is defined by code of its checkpoint.
        DataError: there is no tokenizer, or it cannot be read.
    """
    return _from_file(source) if _is_file(source) else _from_library(source)


@contextlib.contextmanager
def _wrap_errors(tokenizer: Source) -> Iterator[None]:
    """Turn whatever the tokenizers library runs into, which raises plain Exceptions and panics,
    into one error.
    """
    try:
        yield
    except BaseException as error:
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # Rust's, which is no Exception
            raise
        raise DataError(
            f"{tokenizer} is no tokenizer: {error}", hint="give a tokenizer.json"
        ) from error


def _from_file(tokenizer: Source) -> Any:
    need("transformers", "models")  # which brings it
    from tokenizers import Tokenizer

    with _wrap_errors(tokenizer):
        return Tokenizer.from_file(str(tokenizer))


def _from_library(tokenizer: Source) -> Any:
    need("transformers", "models")
    from transformers import AutoTokenizer

    try:
        with code_disabled():
            return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # whatever the library runs into in files that it did not write
        if "trust_remote_code" in str(error):
            raise CustomCodeError(
                f"the tokenizer {tokenizer} needs custom code, which regauge never runs",
                hint="give a tokenizer.json; or load it in Python, after reading its code, and "
                "pass it or its token ids",
            ) from error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"there is no tokenizer {tokenizer} here: {first}",
            hint="give a folder, or connect to the hub",
        ) from error
