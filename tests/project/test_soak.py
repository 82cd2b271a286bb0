"""The soak gate on a small scale: every kind of file, and a harness that counts what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import soak.files
from regauge.errors import RegaugeError
from soak.__main__ import SCENARIOS, main
from soak.documents import RAW, header_mutants, json_mutants
from soak.files import KINDS, Kind, fuzz
from soak.harness import Counter, Outcome, mutants, table

QUICK = {
    "config.json, discovered": 2,
    "config.json, loaded": 6,
    "results file": 14,
    "merge recipe": 30,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", KINDS)
def test_mutated_files_are_rejected_by_a_typed_error_or_read_right(name: str) -> None:
    outcome = fuzz(name, QUICK.get(name, 60), seed=2)
    assert outcome.passed, outcome.notes
    assert outcome.rejected > 0
    assert outcome.accepted + outcome.rejected == outcome.trials


def parser(data: bytes) -> bool:
    """A parser with one fault of each kind."""
    if len(data) % 2:
        raise RegaugeError("the length must be even")
    if data.count(b"\xff"):
        raise IndexError("an untyped error")
    return b"9" not in data


def test_a_broken_parser_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    good = b'{"a": [1, 2, 3], "b": "text"}'
    monkeypatch.setitem(KINDS, "broken", lambda folder: [Kind(good + b" ", parser)])
    outcome = fuzz("broken", 300)
    assert outcome.untyped > 0
    assert outcome.lost > 0
    assert outcome.rejected > 0
    assert not outcome.passed
    assert any("IndexError" in note for note in outcome.notes)

    def broken(scale: float) -> Iterator[Outcome]:
        yield outcome

    monkeypatch.setitem(SCENARIOS, "broken", broken)
    assert main(["broken"]) == 1


def test_output_left_by_a_rejected_file_counts_as_lost(tmp_path: Path) -> None:
    def read(data: bytes) -> bool:
        (tmp_path / "partial").touch()
        raise RegaugeError("rejected")

    assert not Kind(b"", read, folder=tmp_path).trial(b"")


def test_a_hang_is_counted_and_ends() -> None:
    count = Counter("hang", hang_seconds=0.05)

    def run() -> bool:
        while True:
            pass

    count.trial(run)
    count.trial(lambda: True)
    assert (count.outcome().hangs, count.outcome().accepted, count.outcome().passed) == (
        1,
        1,
        False,
    )


def test_memory_over_the_budget_fails() -> None:
    assert Outcome("a", 1, accepted=1, peak_mb=300, budget_mb=100).passed
    assert not Outcome("a", 1, accepted=1, peak_mb=301, budget_mb=100).passed
    assert "FAILED" in table([Outcome("a", 1, accepted=1, peak_mb=301, budget_mb=100)])


def test_main_runs_scenarios_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak.files, "KINDS", {"key file": KINDS["key file"]})
    assert main(["files", "--scale", "0.002", "--json", str(tmp_path / "out.json")]) == 0
    assert "| key file | 20 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())[0]["passed"] is True


def test_mutants_are_many_and_repeatable() -> None:
    document = {"a": 1, "b": [1.5, "x"], "c": {"d": '{"e": [1]}'}}
    good = json.dumps(document).encode()
    structured = list(json_mutants(document, 1, 300))
    assert structured == list(json_mutants(document, 1, 300))
    assert len(set(structured)) > 150
    assert any(RAW[1].encode() in m for m in structured)
    assert any(b"\\ud800" in m for m in structured)
    assert sum(_parses(m) for m in structured) > 200
    plain = list(mutants(good, 1, 300))
    assert len(set(plain)) > 150
    for file in header_mutants(len(good).to_bytes(8, "little") + good + b"body", 1, 20):
        assert file.endswith(b"body")
        assert int.from_bytes(file[:8], "little") == len(file) - 12


def _parses(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
