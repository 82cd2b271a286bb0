"""Progress without a terminal: sparse lines, with the time left; and in a terminal, one bar."""

from __future__ import annotations

import io
import sys

import pytest

from regauge import progress_bar
from regauge.results.progress import SparseLines, format_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(total: int, seconds: float, message: str = "loss 1") -> list[str]:
    """Return the lines about a run whose steps take some seconds each."""
    printed: list[str] = []
    now = [0.0]
    lines = SparseLines("train", printed.append, lambda: now[0])
    for done in range(total):
        lines.report(done, total, message)
        now[0] += seconds
    return printed


def test_about_twenty_lines_about_fast_steps() -> None:
    printed = lines_of(1000, 0.001)
    assert 20 <= len(printed) <= 22
    assert printed[0] == "train 1/1000: loss 1"
    assert printed[-1] == "train 1000/1000: loss 1"


def test_a_line_per_slow_step_with_the_time_left() -> None:
    printed = lines_of(40, 30)
    assert len(printed) == 40
    assert printed[10] == "train 11/40: loss 1, about 15 min left"


def test_few_steps_have_a_line_each_and_empty_messages_none() -> None:
    assert len(lines_of(5, 0.001)) == 5
    assert lines_of(5, 0.001, "") == []


def test_an_estimate_of_the_function_itself_stays() -> None:
    assert lines_of(5, 60, "attack, about 3 h left")[3] == "train 4/5: attack, about 3 h left"


def test_durations() -> None:
    assert [format_seconds(s) for s in (40, 600, 12600)] == ["40 s", "10 min", "3.5 h"]


def test_without_a_terminal_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("match") as progress:
        progress(0, 2, "layer 1")
    with progress_bar("writing", unit="bytes") as progress:
        progress(10, 20, "file")
    assert capsys.readouterr() == ("", "match 1/2: layer 1\n")


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_terminal_shows_one_bar_that_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("match") as progress:
        for done in range(4):
            progress(done, 3, "a long message [not markup] " * 5 if done < 3 else "")
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "match" in drawn
    assert "3/3" in drawn
    assert drawn.count("\n") <= 2
