"""Tokenizers: texts to tokens and back, and errors for missing or invalid files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from regauge.data.tokenizers import decode, encode, special_tokens
from regauge.errors import DataError
from support.texts import WORDS, words


def test_texts_come_back_from_their_tokens(tmp_path: Path) -> None:
    """By bytes, of a file that says nothing of how they become text again."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    one, other = encode(tmp_path / "tokenizer.json", ["zwei Wörter", "a"])
    assert len(one) == len("zwei Wörter".encode())
    assert (
        decode(tmp_path / "tokenizer.json", one),
        decode(tmp_path / "tokenizer.json", other),
    ) == ("zwei Wörter", "a")


def test_special_tokens_are_distinguished_from_text(tmp_path: Path) -> None:
    file = words(tmp_path)
    (plain,), (marked,) = (
        encode(file, [WORDS[3]]),
        encode(file, [WORDS[3]], add_special_tokens=True),
    )
    assert marked == [1, *plain, 2]
    assert special_tokens(file)[:2] == ([1], [2])


@pytest.mark.parametrize(
    "use", [lambda t: encode(t, ["a"]), lambda t: decode(t, [0]), special_tokens]
)
def test_an_invalid_tokenizer_raises_one_error(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as a tokenizer") as caught:
        use(tmp_path / "tokenizer.json")
    assert caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the tokenizer .*empty cannot be loaded") as caught:
        use(tmp_path / "empty")
    assert caught.value.hint


@pytest.mark.parametrize("use", [lambda: encode(None, ["a"]), lambda: special_tokens(None)])
def test_texts_without_a_tokenizer_are_refused_with_the_way_out(use: Callable[[], object]) -> None:
    with pytest.raises(DataError, match="texts need a tokenizer") as caught:
        use()
    assert "tokenizer.json" in (caught.value.hint or "")
