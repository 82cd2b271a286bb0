"""The report: a page is a function of the results' JSON, says all of it, trusts none of it, and
fits the screen.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from regauge.cli import main
from regauge.errors import FindingsError, MissingExtraError
from regauge.results.findings import Claim, Figure, Finding, Results, Table, from_json, to_json
from regauge.results.report import format_amount, format_number, page
from regauge.results.report.panels import build_panels

GREY = [[0.0, 0.5], [1.0, 0.25]]
FIGURES = {
    "lines": {
        "x": [1, 2, 3],
        "y": {"plain": [1.0, 0.1, 0.0], "moved": [1.0, math.nan, 0.02]},
        "xlabel": "step",
        "ylabel": "loss",
        "log": True,
    },
    "bars": {
        "labels": ["a", "b"],
        "y": {"weights": [0.9, 0.1], "_all": [1.0, math.inf]},
        "ylabel": "share",
    },
    "images": {
        "columns": ["first", "second"],
        "rows": [
            {"label": "grey", "images": [GREY, [[True, False]]]},
            {"label": "rgb", "images": [[[[1, 0, 0]]]]},
        ],
    },
    "plane": {
        "x": [0, 1, 2],
        "y": [0, 1],
        "values": [[1, 2, 3], [2, 3, math.nan]],
        "points": {"A": [0, 0], "B": [2, 1]},
        "joined": [["A", "B"]],
    },
    "matrix": {
        "rows": ["r", "s"],
        "columns": ["stream", "ffn"],
        "values": [[1e-7, 1.0], [0.5, math.nan]],
        "log": True,
    },
}
RESULTS = Results(
    "Symmetries of a model",
    (
        Finding(
            "row/forward",
            "the output stays",
            True,
            2.13e-7,
            1e-6,
            0.83,
            "It agrees to rounding.",
            "docs/concepts.md",
            spread=3e-8,
            trials=5,
        ),
        Finding("row/exact", "the bits stay", True, 0.0, 1e-6, 1.0),
        Finding(
            "row/rotary",
            "positions stay",
            False,
            math.nan,
            1e-6,
            math.inf,
            "It holds NaN.",
            where="layers.0.q_proj",
        ),
        Finding(
            "attack/match", "matching is a guess", True, 0.0312, 0.05, 0.97, measure="accuracy"
        ),
        Finding("row/scale", "scales are free", None, sentence="The model has no ReLU."),
    ),
    (
        Table(
            "Sizes",
            ("model", "parameters", "error"),
            (("a", 260_032, 1.3e-7), ("b", 7, None), ("c", 8, math.nan)),
            "a note",
        ),
    ),
    tuple(Figure(f"The {kind}", kind, data, f"about {kind}") for kind, data in FIGURES.items()),
    {
        "command": "regauge verify 'a model'",
        "model": "stories",
        "dtype": "float32",
        "seed": 12345,
        "versions": {"torch": "2.13.0"},
        "flags": ["x", 1],
    },
    ("quantised weights",),
)


def text_of(html: str) -> str:
    """What a reader sees, on one line."""
    recorded: list[str] = []

    class Reader(HTMLParser):
        hidden = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.hidden = tag == "style"

        def handle_data(self, data: str) -> None:
            recorded.append("" if self.hidden else data)

    Reader().feed(html)
    return re.sub(r"\s+", " ", " ".join(recorded))


def test_the_page_is_a_function_of_the_json() -> None:
    first = page(RESULTS)
    assert page(RESULTS) == first
    assert page(from_json(to_json(RESULTS))) == first
    assert page(replace(RESULTS, title="another")) != first


def test_another_process_with_another_matplotlibrc_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(to_json(RESULTS))
    (tmp_path / "matplotlibrc").write_text(
        "axes.labelpad: 40\ngrid.linestyle: --\nfont.family: serif\n"
    )
    script = (
        "from regauge.results.findings import load_results as load; from "
        "regauge.results.report import page; open('p.html', 'w').write(page(load('r.json')))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "p.html").read_text() == page(RESULTS)


def test_charts_leave_matplotlib_as_it_was() -> None:
    script = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy(); from "
        "regauge.results.findings import *; from regauge.results.report import page; "
        "page(Results('t', figures=(Figure('f', 'lines', {'x': [1], 'y': {'a': [1]}}),))); "
        "assert matplotlib.rcParams.copy() == before; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_importing_regauge_or_its_help_loads_neither_jinja_nor_matplotlib() -> None:
    script = (
        "import sys, regauge.results.report.plots; from regauge.cli import main; "
        "main(['--help']); assert not {'jinja2', 'matplotlib'} & {*sys.modules}"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("holds", "says", "tone"),
    [
        ((True, True, None), "○ t", "none"),
        ((True, False, None), "✕ 1 of 2 checks fails", "bad"),
        ((False, False), "✕ 2 of 2 checks fail", "bad"),
        ((), "○ t", "none"),
    ],
)
def test_the_headline_without_a_claim_is_a_failure_or_the_title(
    holds: tuple[bool | None, ...], says: str, tone: str
) -> None:
    html = page(Results("t", tuple(Finding(f"s/{i}", "it is so", h) for i, h in enumerate(holds))))
    assert banner_of(html) == (tone, says)


def banner_of(html: str) -> tuple[str, str]:
    """The tone and the headline of a page."""
    banner = re.search(r'<section class="banner (\w+)".*?<h[12]>(.*?)</h[12]>', html, re.S)
    assert banner is not None
    return banner[1], text_of(banner[2]).strip()


HOLDS, FAILS = Finding("s/0", "it is so", True), Finding("s/1", "it is so, too", False)
NOTHING = Claim("This lock gives nothing.", "bad", "100 %", "of the key", "The base is public.")


@pytest.mark.parametrize(
    ("findings", "claim", "banner"),
    [
        ((HOLDS,), NOTHING, ("bad", "✕ This lock gives nothing.")),
        ((FAILS,), NOTHING, ("bad", "✕ This lock gives nothing.")),
        ((HOLDS,), Claim("It works.", "good"), ("good", "✓ It works.")),
        ((HOLDS,), Claim("It works in part.", "mixed"), ("mixed", "◐ It works in part.")),
        ((HOLDS, FAILS), Claim("It works.", "good"), ("bad", "✕ 1 of 2 checks fails")),
    ],
)
def test_the_worst_verdict_is_the_headline(
    findings: tuple[Finding, ...], claim: Claim, banner: tuple[str, str]
) -> None:
    results = Results("t", findings, claim=claim)
    html = page(results)
    assert banner_of(html) == banner
    assert f"<title>t: {results.headline.text}</title>" in html
    assert claim.text in text_of(html), "a claim that checks contradict is still shown"
    passes = re.search(r"Checks and controls: \d (of \d )?checks? \w+", text_of(html))
    assert passes is not None, "the count is in the details"


def test_the_number_and_the_sentence_of_a_claim_are_shown() -> None:
    text = text_of(page(Results("t", claim=NOTHING)))
    assert "This lock gives nothing. 100 % of the key The base is public." in text
    with pytest.raises(FindingsError, match='must be one of good, bad, mixed, none, got "green"'):
        Claim("It works.", "green")


def test_inconclusive_findings_are_no_good_news() -> None:
    inconclusive = replace(
        HOLDS, holds=None, sentence="inconclusive in bfloat16: the control is too small"
    )

    def headline(*findings: Finding, claim: Claim | None = None) -> tuple[str, str]:
        found = Results("t", findings, claim=claim).headline
        return found.tone, found.text

    assert headline(HOLDS, inconclusive) == ("none", "t")
    text = text_of(page(Results("t", (HOLDS, inconclusive))))
    assert "Checks and controls: 1 check passes; 1 inconclusive" in text
    assert headline(FAILS, inconclusive) == ("bad", "1 check fails; 1 inconclusive")
    assert headline(HOLDS, inconclusive, claim=Claim("It works.", "good")) == ("none", "It works.")
    older = replace(inconclusive, sentence="cannot be told in bfloat16: the control is too small")
    assert Results("t", (older,)).inconclusive == (older,)


STORY = Results(
    "A demonstration",
    chapters=(
        Results(
            "A lock",
            (HOLDS,),
            figures=(
                Figure("accuracy", "bars", {"labels": ["a"], "y": {"b": [0.5]}, "percent": True}),
            ),
            claim=replace(NOTHING, command="regauge audit lock LOCKED --against BASE"),
            unchecked=("theft: no labels",),
        ),
        Results(
            "A basis",
            (HOLDS,),
            figures=(
                Figure("points", "points", {"series": {"a": [[0, 0], [1, 1]]}, "scatter": True}),
            ),
            claim=Claim("It works.", "good", "2e-7", "largest difference"),
        ),
    ),
    claim=Claim("Two claims", sentence="Measured here."),
    facts={"command": "regauge demo"},
)


def test_a_story_is_a_summary_and_a_section_for_each_claim() -> None:
    html = page(STORY)
    cards, *sections = re.split(r'<section class="chapter', html)
    assert re.findall(r'class="card (\w+)"', cards) == ["bad", "good"]
    assert [s.split('"')[0].strip() for s in sections] == ["bad", "good"]
    for shown in (cards, sections[0]):
        assert "This lock gives nothing. 100 % of the key" in text_of(shown)
        assert "50.0 %" in text_of(shown), "the picture"
    assert "regauge audit lock LOCKED --against BASE" in text_of(sections[0])
    before, details = sections[0].split("<details>", 1)
    assert "1 check passes" not in before
    assert "1 check passes" in details
    assert "theft: no labels" in details
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', html)) <= set(ids)
    assert "banner" not in html.split("<body>")[1]
    assert from_json(to_json(STORY)) == STORY


def test_a_story_begins_with_checks_that_fail() -> None:
    failing = replace(STORY, chapters=(replace(STORY.chapters[1], findings=(FAILS,)),))
    assert failing.failed == (FAILS,)
    html = page(failing)
    assert banner_of(html) == ("bad", "✕ 1 check fails")
    assert html.index("it is so, too") < html.index('class="cards"')
    assert 'class="card bad"' in html, "the claim of the chapter is not good news either"


def test_details_have_no_heading_without_contents() -> None:
    assert "<h2>Details</h2>" not in page(Results("t", tables=RESULTS.tables))
    assert "<h2>Details</h2>" in page(Results("t", tables=RESULTS.tables * 2))


def test_galleries_come_before_charts() -> None:
    text = text_of(page(RESULTS))
    assert text.index("about images") < text.index("about lines") < text.index("about bars")


def test_details_are_folded_unless_a_check_fails() -> None:
    assert re.search(r'<details id="checks"><summary>', page(Results("t", (HOLDS, HOLDS))))
    assert re.search(r'<details id="checks" open><summary>', page(Results("t", (FAILS,))))
    assert re.search(r"<details><summary>Not checked", page(RESULTS))


def test_every_table_of_results_scrolls_in_its_own_box() -> None:
    html = page(replace(RESULTS, chapters=(RESULTS,)))
    assert html.count('<table class="data">') == 2
    boxed = re.findall(r'<div class="scroll"[^>]*>\s*<table class="data">', html)
    assert len(boxed) == 2
    style = html.split("</style>")[0]
    assert re.search(r"^\.scroll[^{]*\{[^}]*overflow-x: auto", style, re.M)


def test_tables_and_columns_without_values_are_not_shown() -> None:
    rows = (("a", None, 0.0), ("b", None, None))
    tables = (Table("Bare", ("x",), ()), Table("Half", ("name", "matched", "found"), rows))
    html = page(Results("t", tables=tables))
    assert "Bare" not in html
    assert re.findall(r"<th scope[^>]*>(\w+)", html) == ["name", "found"]


def test_long_names_in_tables_may_be_broken_and_stay_escaped() -> None:
    rows = (("layer.0.attention<b>.key", 1), ("short.one", 2))
    html = page(Results("t", tables=(Table("T", ("name", "n"), rows),)))
    assert "layer.<wbr>0.<wbr>attention&lt;b&gt;.key" in html
    assert "short.one" in html


def test_a_legend_fits_its_chart() -> None:
    from regauge.results.report.plots import draw_figure

    lines = {"x": [0, 1], "y": {"fine-tuned plainly": [0, 1], "with jigsaw puzzles": [1, 0]}}
    markup, _ = draw_figure(Figure("f", "lines", lines), "p-", compact=True)
    starts = [
        float(re.findall(r' x="([\d.]+)"', markup[: markup.index(f">{name}<")])[-1])
        for name in lines["y"]
    ]
    assert starts[0] == starts[1] < 60, "one column"


def test_shares_have_no_axis_beyond_one() -> None:
    lines = {"x": [0, 1], "y": {"a": [1.0, 1.0]}, "percent": True}
    ticks = re.findall(r">(\d+) %<", page(Results("t", figures=(Figure("f", "lines", lines),))))
    assert "100" in ticks
    assert max(map(int, ticks)) == 100


def test_both_colour_schemes_define_every_colour() -> None:
    style = page(RESULTS).split("</style>")[0]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)
    assert "prefers-color-scheme: dark" in style
    names = set(re.findall(r"--[\w-]+(?=:)", light))
    assert names == set(re.findall(r"--[\w-]+(?=:)", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", page(RESULTS))) <= names | {"--tone", "--wash"}


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours by WCAG."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_are_readable_in_both_schemes() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    style = page(RESULTS).split("</style>")[0]
    for scheme in re.findall(r":root \{(.*?)\}", style, re.S):
        colours = dict(re.findall(r"--([\w-]+): (#\w+)", scheme))
        colours = {
            k: v if len(v) == 7 else "#" + "".join(2 * c for c in v[1:]) for k, v in colours.items()
        }
        for tone in ("good", "bad", "mixed", "none"):
            assert contrast(colours[tone], colours[f"{tone}-wash"]) >= 4.5, tone
            assert contrast(colours[tone], colours["card"]) >= 4.5, tone
        assert contrast(colours["soft"], colours["card"]) >= 4.5
        for i in range(6):
            assert contrast(colours[f"s{i}"], colours["paper"]) >= 3, i


def test_everything_in_the_results_is_on_the_page() -> None:
    html = page(RESULTS)
    text = text_of(html)
    for words in (
        "positions stay , at layers.0.q_proj : It holds NaN. model stories dtype float32",
        "✓ passes the output stays It agrees to rounding.",
        "5 trials · docs/concepts.md 2.1e-7 ± 3.0e-8 1.0e-6 0.83",
        "✕ fails positions stay",
        "nan 1.0e-6 inf",
        "matching is a guess attack/match · accuracy 0.0312 0.05 0.97",
        "○ scales are free The model has no ReLU.",
        "a 260,032 1.3e-7 b 7 – c 8 nan",
        "about lines 2 values are nan, inf or not on this axis, and not drawn.",
        "about bars 1 value is nan",
        "Not checked 1 quantised weights",
        "How to repeat this regauge verify 'a model'",
        "seed 12345 versions torch 2.13.0 flags x, 1",
    ):
        assert words in text, words
    order = [
        "Symmetries of a model",
        "checks fail",
        "The lines",
        "Sizes",
        "Checks and controls",
        "At a glance",
        "Not checked",
        "How to repeat",
    ]
    body = text[text.index("Symmetries of a model", 40) :]
    assert [body.index(words) for words in order] == sorted(body.index(words) for words in order)
    assert (
        len(re.findall(r"(https?:)?//(?!www\.w3\.org)", re.sub(r"base64,[^\"]*", "", html))) == 0
    )  # nothing comes from a network
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def test_the_summary_stays_short() -> None:
    text = text_of(
        page(Results("t", tuple(Finding(f"s/{i}", f"statement {i}", False) for i in range(30))))
    )
    assert "and 22 more, below" in text
    assert "statement 7 : fails." in text
    assert text.count("statement 7") == 2
    assert text.count("statement 8") == 1


def test_panels() -> None:
    errors, guesses = build_panels(RESULTS.findings)
    assert (errors.section, errors.measure, len(errors.dots)) == ("row", "relative error", 3)
    forward, exact, rotary = errors.dots
    ticks = {text: at for at, text in errors.ticks}
    assert ticks["0"] < forward.value < forward.floor == ticks["1e-6"]
    assert ticks["1e-2"] < forward.ceiling < ticks["1"]
    assert ticks["1"] - ticks["1e-2"] == pytest.approx(
        ticks["1e-2"] - ticks["1e-4"], abs=0.02
    )  # a log axis
    assert exact.value == ticks["0"]
    assert rotary.value == rotary.ceiling == ticks["∞"] > ticks["1"]
    ticks = {text: at for at, text in guesses.ticks}
    assert list(ticks) == ["0", "0.25", "0.5", "0.75", "1"]
    assert guesses.dots[0].value == pytest.approx(
        ticks["0"] + 0.0312 * (ticks["1"] - ticks["0"]), abs=0.02
    )  # a linear one
    assert build_panels([replace(RESULTS.findings[0], floor=None, ceiling=None)]) == []


@pytest.mark.parametrize("measure", ["relative error", "accuracy"])
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 5e-324, 1.7e308, -1.7e308, -3.0, math.nan, math.inf, -math.inf, 0.3]
)
def test_no_number_breaks_the_panels(value: float, measure: str) -> None:
    for other in (value, 1.0, -1e308, None):
        for dot in build_panels([Finding("a/b", "c", True, value, other, value, measure=measure)])[
            0
        ].dots:
            assert dot.value is not None
            assert math.isfinite(dot.value)
    assert "At a glance" in page(
        Results("t", (Finding("a/b", "c", True, value, value, value, measure=measure),))
    )


@pytest.mark.parametrize(
    ("value", "cell", "error"),
    [
        (2.134e-7, "2.1e-7", "2.1e-7"),
        (0.0, "0", "0"),
        (0.98123, "0.9812", "0.98"),
        (0.0312, "0.0312", "3.1e-2"),
        (12345.6, "12,346", "12,346"),
        (1.5e12, "1.5e12", "1.5e12"),
        (math.nan, "nan", "nan"),
        (-math.inf, "-inf", "-inf"),
        (None, "–", "–"),
    ],
)
def test_numbers(value: float | None, cell: str, error: str) -> None:
    assert format_number(value) == cell
    assert format_amount(value, RESULTS.findings[0]) == error


def poisoned(value: Any, poison: str) -> Any:
    """The same JSON with the poison at the end of every text, keys of data included."""
    if isinstance(value, dict):
        fixed = {
            "id",
            "statement",
            "sentence",
            "source",
            "where",
            "measure",
            "title",
            "note",
            "caption",
            "label",
            "xlabel",
            "ylabel",
        }
        allowed = fixed | {
            "rows",
            "columns",
            "images",
            "values",
            "x",
            "y",
            "labels",
            "log",
            "data",
            "kind",
            "facts",
            "command",
            "model",
            "dtype",
        }
        allowed |= {
            "findings",
            "tables",
            "figures",
            "unchecked",
            "regauge",
            "version",
            "holds",
            "value",
            "floor",
            "ceiling",
            "spread",
            "trials",
            "interval",
            "beats_floor",
        }
        return {
            k if k in allowed else k + poison: v
            if k in ("kind", "regauge")
            else poisoned(v, poison)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [poisoned(v, poison) for v in value]
    return value + poison if isinstance(value, str) and value not in ("nan", "inf") else value


@pytest.mark.parametrize(
    "poison",
    [
        "</title></style></svg><script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "$\\frac{1}$",
        "{{ 7 * 7 }}",
        "\0\x1b\ud800",
    ],
)
def test_no_text_is_trusted(poison: str) -> None:
    html = page(from_json(json.dumps(poisoned(json.loads(to_json(RESULTS)), poison))))
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

    Tags().feed(html)
    assert {tag for tag, _ in tags} & {"script", "iframe", "object", "foreignobject"} == set()
    assert not [a for _, attrs in tags for a in attrs if a.startswith("on")]
    assert all(
        (attrs["src"] or "").startswith("data:image/png;base64,")
        for tag, attrs in tags
        if tag == "img"
    )
    assert "49" not in text_of(html).replace("seed 12345", "")
    html.encode()
    if poison.startswith("$"):
        assert "stream$" in html  # no formula is made of it
    if "script" in poison:
        svg = html[html.index('id="f0-desc"') : html.rindex("about lines")]
        assert "plain&lt;/title&gt;" in svg.replace("</tspan>", "")  # in the text of a chart, too


def pixels(html: str) -> list[list[list[int]]]:
    """The rows of bytes of each image on the page."""
    found = []
    for data in re.findall(r'<img src="data:image/png;base64,([^"]*)"', html):
        png = base64.b64decode(data)
        at = png.index(b"IDAT")
        width, colours = int.from_bytes(png[16:20]), 3 if png[25] == 2 else 1
        raw = zlib.decompress(png[at + 4 : at + 4 + int.from_bytes(png[at - 4 : at])])
        size = 1 + width * colours
        found.append([list(raw[i + 1 : i + size]) for i in range(0, len(raw), size)])
    return found


def test_images_are_what_they_were() -> None:
    html = page(RESULTS)
    assert pixels(html) == [[[0, 128], [255, 64]], [[255, 0]], [[255, 0, 0]]]
    assert 'alt="The images, grey, first"' in html
    one = Figure("f", "images", {"rows": [{"images": [[[2.0, -1.0, math.nan]]]}]})
    html = page(Results("t", figures=(one,)))
    assert pixels(html) == [[[255, 0, 0]]]
    assert "1 value is nan" in text_of(html)


def test_charts_say_what_they_show() -> None:
    text = text_of(page(RESULTS))
    for words in (
        "step",
        "loss",
        "plain",
        "moved",
        "0.9",
        "share",
        "weights",
        "_all",
        "stream",
        "1.0e-7",
        "0.5",
    ):
        assert words in text, words
    html = page(RESULTS)
    assert 'role="img" aria-labelledby="f0-title"' in html
    assert "#0101" not in html  # every stand-in has become a colour of the page
    big = Figure(
        "big",
        "matrix",
        {
            "rows": [str(i) for i in range(60)],
            "columns": [f"unit {i}" for i in range(60)],
            "values": [[0.5] * 60] * 60,
        },
    )
    assert "unit 0" in page(Results("t", figures=(big,)))


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        ("pie", {}, "unknown kind 'pie'"),
        ("lines", {"x": [1]}, '"y" is missing'),
        ("lines", {"x": [1], "y": {"a": [1, 2]}}, "cannot be drawn"),
        ("points", {"series": {"a": [[1, 2]]}}, "cannot be drawn"),
        ("points", {"points": {}}, '"series" is missing'),
        ("lines", {"x": ["one"], "y": {"a": [1]}}, "could not convert string to float"),
        ("lines", {"x": [1], "y": [1]}, "cannot be drawn"),
        ("bars", {"labels": ["a"], "y": {"a": [1, 2, 3]}}, "cannot be drawn"),
        (
            "matrix",
            {"rows": ["a"], "columns": ["b"], "values": [[1, 2]]},
            "the values are 1 x 2, the labels 1 x 1",
        ),
        ("matrix", {"rows": [], "columns": [], "values": []}, "cannot be drawn"),
        (
            "plane",
            {"x": [0, 1], "y": [0, 1], "values": [[1, 2, 3]]},
            "the values are 1 x 3, the grid 2 x 2",
        ),
        (
            "plane",
            {"x": [0, 1], "y": [0, 1], "values": [[1, 2], [3, 4]], "joined": [["A", "B"]]},
            '"A" is missing',
        ),
        ("images", {"rows": [{"images": [[1.0]]}]}, r"must have the shape .*, got \(1,\)"),
        (
            "images",
            {"rows": [{"images": [[[[1, 1]]]]}]},
            r"must have the shape .*, got \(1, 1, 2\)",
        ),
    ],
)
def test_invalid_figures_are_rejected(kind: str, data: dict[str, Any], says: str) -> None:
    with pytest.raises(FindingsError, match=says) as raised:
        page(Results("t", figures=(Figure("my figure", kind, data),)))
    assert '"my figure"' in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("lines", {"x": [], "y": {}}),
        ("lines", {"x": [], "y": {"a": []}, "log": True}),
        ("lines", {"x": [1, 2], "y": {"a": [0.0, -1.0], "b": [math.nan, math.inf]}, "log": True}),
        ("lines", {"x": [1, 2], "y": {"a": [5e-324, 1.7e308]}}),
        ("lines", {"x": [1, 1], "y": {f"_{i}": [i, i] for i in range(9)}}),
        ("bars", {"labels": [], "y": {}}),
        ("bars", {"labels": ["a", "a"], "y": {"": [-1, None]}}),
        ("matrix", {"rows": ["a"], "columns": ["b"], "values": [[-1.0]]}),
        (
            "plane",
            {"x": [0, 1], "y": [0, 1], "values": [[1.0, 1.0], [1.0, 1.0]], "points": {"A": [0, 0]}},
        ),
        ("plane", {"x": [0, 1], "y": [0, 1], "values": [[1.0, "nan"], ["inf", 2.0]]}),
        ("plane", {"x": [0, 1], "y": [0, 1], "values": [["nan", "nan"], ["nan", "nan"]]}),
        ("matrix", {"rows": ["a"], "columns": ["b", "c"], "values": [[0, "nan"]], "log": True}),
        (
            "matrix",
            {
                "rows": ["a"],
                "columns": list(range(20)),
                "values": [[10.0**-k for k in range(20)]],
                "log": True,
            },
        ),
        (
            "matrix",
            {"rows": ["a"], "columns": list(range(20)), "values": [[0.0] * 20], "log": True},
        ),
    ],
)
def test_unusual_charts_are_rendered(kind: str, data: dict[str, Any]) -> None:
    assert 'aria-labelledby="f0-title"' in page(Results("t", figures=(Figure("f", kind, data),)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"holds": "no"}, "holds must be true, false or null, got 'no'"),
        ({"holds": 1}, "holds must be true, false or null, got 1"),
        ({"statement": None, "where": 3}, "statement, where must be text"),
        ({"trials": "5"}, "trials"),
    ],
)
def test_invalid_findings_are_rejected(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FindingsError, match="finding 'row/forward'") as raised:
        page(Results("t", (replace(RESULTS.findings[0], **change),)))
    assert says in str(raised.value)


def test_results_that_are_no_plain_data_are_refused() -> None:
    with pytest.raises(FindingsError, match="the results are not plain data"):
        page(Results("t", facts={"path": Path()}))


def test_a_large_page_stays_small() -> None:
    findings = tuple(
        Finding(
            f"s{i % 5}/{i}",
            f"statement {i}",
            True,
            1e-7,
            1e-6,
            0.5,
            "A sentence of usual length.",
            "a source",
        )
        for i in range(200)
    )
    long = {"x": list(range(5000)), "y": {"noise": [(i * 7919 % 1009) / 1009 for i in range(5000)]}}
    figures = (*RESULTS.figures, Figure("long", "lines", long)) * 4
    assert len(page(Results("t", findings, figures=figures)).encode()) < 2_000_000


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find_spec(name, *rest),
    )
    with pytest.raises(
        MissingExtraError, match=f"{missing} is required but not installed"
    ) as raised:
        page(RESULTS)
    assert raised.value.hint == "pip install 'regauge[report]'"
    if missing == "matplotlib":
        page(replace(RESULTS, figures=()))  # which needs no charts


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "r.json", tmp_path / "page.html"
    source.write_text(to_json(RESULTS))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["report", *map(str, arguments)])
        return (code, *capsys.readouterr())

    assert run(source, "-o", out) == (
        0,
        "",
        f"regauge: wrote {out}: 1 of 4 checks fails; {out.stat().st_size / 1e3:,.1f} kB\n",
    )
    assert out.read_text("utf-8") == page(RESULTS)
    before = out.read_bytes()
    taken = (
        "regauge: error: the output {} exists already\nregauge: hint: pass another file with "
        "-o, or remove this one first\n"
    )
    assert run(source, "-o", out) == (1, "", taken.format(out))
    assert run(source, "-o", source) == (1, "", taken.format(source))
    assert run(out, "-o", tmp_path / "b.html")[2].startswith(f"regauge: error: {out} is not JSON")
    assert "No such file" in run(source, "-o", tmp_path / "none" / "b.html")[2]
    assert "cannot be read" in run(tmp_path / "none.json", "-o", tmp_path / "b.html")[2]
    assert run(source)[0] == 2
    assert out.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "page.html"}


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def browse(html: str, folder: Path) -> tuple[list[int], list[str]]:
    """How wide the page's contents are where it is shown 360 and 1280 pixels wide, and what the
    browser's console says.
    """
    script = """onload = () => document.body.append("widths=" +
        [...document.querySelectorAll("iframe")].map(f => f.contentDocument).map(d =>
        [d.documentElement.scrollWidth, d.body.scrollWidth].sort((a, b) => b - a)[0]))"""
    frames = "".join(
        f'<iframe style="width:{w}px;height:600px;border:0"></iframe>' for w in (360, 1280)
    )
    fill = (
        "document.querySelectorAll('iframe').forEach(f => f.srcdoc = "
        f"{json.dumps(html).replace('<', chr(92) + 'u003c')})"
    )
    (folder / "frames.html").write_text(
        f"<!doctype html><body>{frames}<script>{fill};{script}</script>"
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    widths = re.search(r"widths=([\d,]+)", done.stdout[done.stdout.rindex("</script>") :])
    assert widths, done.stderr
    return [int(w) for w in widths[1].split(",")], [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH to look at the page with")
def test_in_a_browser(tmp_path: Path) -> None:
    long = "model.layers.0.self_attn.q_proj.weight" * 4
    wide = Table(
        long, tuple(f"a column {i}" for i in range(20)), (tuple(float(i) for i in range(20)),), long
    )
    findings = (
        *RESULTS.findings,
        Finding(f"{long}/{long}", long, False, 1.0, 1e-6, 2.0, long, long, where=long),
        Finding("n", long, None, sentence=long),
    )
    grid = Figure(
        long,
        "matrix",
        {"rows": [long] * 30, "columns": [long] * 30, "values": [[0.5] * 30] * 30},
        long,
    )
    facts = {**RESULTS.facts, "command": long, long: {long: {long: [long]}}}
    html = page(
        Results(long, findings, (*RESULTS.tables, wide), (*RESULTS.figures, grid), facts, (long,))
    )
    assert browse(html, tmp_path) == ([360, 1280], [])
    widths, console = browse(
        html.replace("<main>", '<main><div style="width:2000px">x</div><script>1</script>'),
        tmp_path,
    )  # the test can fail
    assert min(widths) >= 2000
    assert any("Content Security Policy" in line for line in console)
