"""The word check finds what it should, and the enforced files have no hits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", ROOT / "scripts" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "slopes = 1",
        "position_slopes",
        "def told(self)",
        "Whoever has it",
        "is no file",
        "0 are none",
    ],
)
def test_the_dialect_is_found(words: ModuleType, line: str) -> None:
    hits = list(words.check_text(Path("a.py"), f"fine\n{line}\n", words.load_rules()))
    assert [hit.line for hit in hits] == [2]
    assert "write" in str(hits[0])


@pytest.mark.parametrize(
    "line", ["grads = 1", "is no longer needed", "a toldbooth", "is not a file"]
)
def test_plain_english_passes(words: ModuleType, line: str) -> None:
    assert list(words.check_text(Path("a.py"), line, words.load_rules())) == []


def test_gerund_modules_are_found(words: ModuleType) -> None:
    rules = words.load_rules()
    assert [h.text for h in words.check_name(Path("src/regauge/split/keeping.py"), rules)] == [
        "keeping"
    ]
    assert list(words.check_name(Path("src/regauge/matching/__init__.py"), rules)) == []
    assert list(words.check_name(Path("src/regauge/split/messages.py"), rules)) == []


def test_enforced_files_have_no_hits(words: ModuleType) -> None:
    assert words.main([]) == 0
