"""A result becomes a dict, a file, a page or a cell of a notebook. Hostile text is escaped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from regauge.errors import CheckpointError
from regauge.results.findings import Claim, Figure, Finding, Results, Table, load_results
from regauge.results.views import _COLOURS, ResultView

LINES = {"x": [1, 2, 3], "y": {"accuracy": [0.1, 0.5, 0.9]}, "xlabel": "round", "ylabel": "y"}
RESULTS = Results(
    "A <b>measurement</b>",
    (Finding("law/<i>", "it holds", False, 1.5, 0.5, 2.0, "1.5 is <u>above</u> 0.5"),),
    (Table("Rows & more", ("name", "value"), tuple((f"n{i}", i / 3) for i in range(25))),),
    (Figure("Accuracy", "lines", LINES), Figure("Broken", "lines", {})),
)


@dataclass(frozen=True, eq=False, repr=False)
class View(ResultView):
    shown: Results

    @property
    def results(self) -> Results:
        return self.shown


def test_data_and_file(tmp_path: Path) -> None:
    view = View(RESULTS)
    assert view.to_dict()["findings"][0]["value"] == 1.5
    view.save(tmp_path / "r.json")
    assert load_results(tmp_path / "r.json") == RESULTS
    with pytest.raises(CheckpointError, match=r"r\.json exists already") as refused:
        view.save(tmp_path / "r.json")
    assert refused.value.hint is not None
    assert "new file" in refused.value.hint
    with pytest.raises(CheckpointError, match="cannot be written"):
        view.save(tmp_path / "absent" / "r.json")
    assert repr(view) == "<A <b>measurement</b>>"
    assert "FAILS" in str(view)


def test_results_are_a_result_themselves(tmp_path: Path) -> None:
    """What `verify` and the audits return has the same methods."""
    RESULTS.save(tmp_path / "r.json")
    assert load_results(tmp_path / "r.json") == RESULTS
    assert repr(RESULTS) == repr(View(RESULTS))
    assert str(RESULTS) == str(View(RESULTS))


def test_a_cell_of_a_notebook() -> None:
    view = View(RESULTS)
    cell = view._repr_html_()
    assert not any(tag in cell for tag in ("<b>", "<i>", "<u>", "<script"))
    assert "1 check fails" in cell
    assert "Rows &amp; more" in cell
    assert "and 5 more rows" in cell
    assert "n19" in cell
    assert "n20" not in cell
    assert cell.count("<svg") == 1, "one figure can be drawn, the other is left out"
    assert View(RESULTS)._repr_html_() != cell, "ids of figures differ between cells"


def test_a_page_is_text_or_a_file(tmp_path: Path) -> None:
    view = View(RESULTS)
    view = View(HOLDS)
    write: Callable[[Path], object] = view.to_html
    assert write(tmp_path / "page.html") is None, "a notebook would show the text of the page"
    assert view.to_html() == (tmp_path / "page.html").read_text()


def test_a_cell_has_no_style_for_the_whole_notebook() -> None:
    cell = View(RESULTS)._repr_html_()
    assert "<style" not in cell
    assert "stroke-linejoin:round" in cell


HOLDS = Results("An audit", (Finding("a/b", "it holds", True, 0.1, 0.5, 2.0),))
VERDICT = {"verdict": ["Worth <nothing>.", "A second line."]}


def test_a_cell_shows_all_verdicts_of_an_audit_before_the_checks() -> None:
    cell = View(replace(HOLDS, facts=VERDICT, unchecked=("theft: no <data>",)))._repr_html_()
    places = [
        cell.index(text) for text in ("Worth &lt;nothing&gt;.", "A second line.", "1 check passes")
    ]
    assert places == sorted(places)
    assert "theft: no &lt;data&gt;" in cell
    assert _COLOURS["good"] not in cell
    good = View(replace(HOLDS, claim=Claim("It works.", "good")))._repr_html_()
    assert _COLOURS["good"] in good
    assert "It works." in good
    plain = View(HOLDS)._repr_html_()
    assert _COLOURS["good"] not in plain, "checks alone are no verdict"
    assert "not checked" not in plain


def test_a_cell_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.results.views.find_spec", lambda name: None)
    cell = View(RESULTS)._repr_html_()
    assert "<svg" not in cell
    assert "Rows &amp; more" in cell
