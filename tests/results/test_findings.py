"""Results are data: what was written is read back, whatever the numbers; what is none is refused by
name.
"""

import json
import math

import pytest

from regauge.errors import FindingsError
from regauge.results.findings import (
    Figure,
    Finding,
    Results,
    Table,
    from_json,
    load_results,
    spread_of,
    to_json,
)

RESULTS = Results(
    "a title",
    (
        Finding("row/forward", "it holds", True, 1e-7, 1e-6, math.inf),
        Finding("row/backward", "it does not", False),
        Finding("n", "not here", None),
    ),
    (Table("t", ("a", "b"), (("x", 1.5), ("y", None))),),
    (Figure("f", "lines", {"x": [1, 2], "y": {"loss": [0.5, 0.25]}}),),
    {"seed": 0, "command": "regauge verify ü"},
    ("nothing else",),
)


def test_round_trip():
    assert from_json(to_json(RESULTS)) == RESULTS
    assert RESULTS.failed == (RESULTS.findings[1],)


def test_nan_is_written_as_its_name():
    text = to_json(Results("t", (Finding("a", "b", False, math.nan),)))
    assert json.loads(text)["findings"][0]["value"] == "nan"
    assert math.isnan(from_json(text).findings[0].value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a results file"),
        ('{"regauge": "results", "version": 99}', "has version 99"),
        ('{"regauge": "results", "version": 1}', "is damaged: KeyError"),
        (
            to_json(RESULTS).replace('"measure"', '"measured"', 1),
            'unknown field "measured" of a Finding',
        ),
        (to_json(RESULTS).replace("1e-07", '"seven"', 1), "is damaged"),
    ],
)
def test_files_without_results_are_rejected(text, says):
    with pytest.raises(FindingsError, match="the text") as raised:
        from_json(text)
    assert says in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FindingsError, match="cannot be read: No such file"):
        load_results(tmp_path / "none.json")


def test_one_trial_has_no_spread():
    assert spread_of([1.0, 3.0]) == pytest.approx(
        math.sqrt(2)
    )  # of a sample, not of a population: that would be 1
    assert spread_of([1.0, 1.0]) == 0.0
    assert spread_of([1.0]) is None
