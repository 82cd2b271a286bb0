"""The pages of results, rendered from the findings in docs/results and nothing else.

python -m experiments.document docs     # writes docs/experiments.md and docs/experiments/*.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.catalog import PAGES, Entry
from experiments.former_words import load_renamed
from experiments.lock_report import render_lock_report
from experiments.paper_recipes import render_recipes
from regauge.checkpoints.files import write_bytes
from regauge.results.findings import Finding, Results, Table
from regauge.results.report import format_number

SHOWN_FINDINGS = 26  # of one result; beyond, only those with a verdict, then only those that fail

HEAD = """# Results

What the papers report and what regauge measures, table by table. Every number on these pages is
read from `docs/results`; `python -m experiments.document docs` writes the pages, and a test checks
that they match.

A *finding* is one measured number with its baseline (a tolerance, or the score of a random guess)
and its control (the plain model, or a case that must fail). A *check* is a finding that has to meet
a tolerance or a goal. "No better than a guess" means at most a fifth of the way from a guess to the
plain model. MJP is training with masked jigsaw puzzles; mCE, the mean corruption error, is lower
for a more robust model. GPT-2 (G) is a small text generator, and *drift* is noise that stands in
for fine-tuning ([locks](experiments/locks.md)).
"""
TAIL = """## Reproduce a table

```
python -m experiments --list
python -m experiments 000/table2                               # minutes on two cores
python -m experiments 000/table2 --report table2.html --json table2.json
python -m experiments 000/table2 --preset paper --estimate     # its time, memory and disk
python -m experiments 000/table2 --preset paper --device cuda  # the paper's models and data
```

- **Presets.** `small` builds ViT, BERT and GPT-2 of the transformers library from small configs and
  trains them on data in `--assets DIR` (or `$REGAUGE_ASSETS`); without image files it uses
  scikit-learn's digits. `paper` uses the paper's models and data: timm's ViT-Base on CIFAR-10, BERT
  and GPT-2 on IMDB, a small BERT on SNLI, GPT-2 on WikiText-2, and ADE20k in the folder
  `ADEChallengeData2016` of the assets. Data of the hub may be given by path: a folder
  `OWNER/NAME` or `NAME` of the assets with parquet files, a dataset saved by the datasets library,
  or the authors' own files (CelebA, IMDB, SNLI, WikiText-2, images by class). An error names any
  missing file. The `paper` preset has not been run for these pages; tests run it on small
  stand-ins of these formats. [Its hyper-parameters and their
  sources](experiments/paper-presets.md).
- **Cache.** Every training and every test is cached in `$REGAUGE_CACHE`
  (`~/.cache/regauge/experiments`) by the hash of its parameters, data and version. An interrupted
  run resumes, also within a training, and gives the same bits on the same number of threads.

## Limits

- **Small models.** `small` fits two cores: accuracies are far below the papers'. Sizes and
  learning rates were chosen by the test accuracy of one seed, so accuracies are slightly
  optimistic. The comparisons do not depend on that choice.
- **Training is compared in float64 without dropout**, where two equivalent trainings agree to
  rounding. The gaps in the paper's tables (such as 97.75 for plain and 97.94 for permuted columns)
  come from rounding and random masks. With dropout the masks differ, and runs agree in
  distribution only.
- **Padding masks.** The permutation-equivariance paper reports that BERT's padding mask breaks
  permuted rows. It does if the mask is not permuted; regauge permutes the mask too.
"""

REFERENCE = re.compile(r"\{(#?)([^{}|:]+(?::[^{}|]*)?)((?:\|\d+){0,2}):([^{}:|]*)\}")


def render_overview(results: Mapping[str, Results]) -> str:
    """Render docs/experiments.md: one row per table or figure."""
    lines = [HEAD]
    for name, page in PAGES.items():
        entries = {key: entry for key, entry in page.entries.items() if key in results}
        if not entries:
            continue
        lines += [f"## [{page.title}](experiments/{name}.md)", ""]
        lines += ["| | claim | paper | regauge | verdict |", "|---|---|---|---|---|"]
        for key, entry in entries.items():
            result = results[key]
            link = f"[{_short(result.title)}](experiments/{name}.md#{_slug(result.title)})"
            cells = (link, entry.claim, fill(entry.paper, result), fill(entry.ours, result))
            lines.append(f"| {' | '.join(cells)} | {_verdict(entry, result)} |")
        lines.append("")
    return "\n".join([*lines, TAIL])


def render_page(name: str, results: Mapping[str, Results]) -> str:
    """Render docs/experiments/NAME.md."""
    page = PAGES[name]
    parts = [f"# {page.title}\n"]
    if page.intro:
        parts.append(f"{page.intro}\n")
    if name == "locks":
        parts = [render_lock_report(results["lock-attacks"])]
    parts += [
        _section(key, entry, results[key]) for key, entry in page.entries.items() if key in results
    ]
    parts.append("[All results](../experiments.md)\n")
    return "\n".join(parts)


def fill(template: str, results: Results) -> str:
    """Replace the references of a template by the numbers of some results.

    Raises:
        KeyError: If a reference names a row or a finding that does not exist.
    """

    def number(match: re.Match[str]) -> str:
        finding, name, places, form = match.groups()
        if finding:
            found = {f.id: f for f in results.findings}[name]
            place = int(places[1:] or 0)
            value: Any = (found.value, found.floor, found.ceiling)[place]
        else:
            column, table = (*(int(p) for p in places.split("|")[1:]), 0)[:2]
            value = _row_of(results.tables[table], name)[column]
        return format(value, form).replace("%", " %")

    return REFERENCE.sub(number, template)


def _row_of(table: Table, name: str) -> tuple[Any, ...]:
    for row in table.rows:
        for count in range(1, len(row) + 1):
            if "/".join(str(cell) for cell in row[:count]) == name:
                return row
    raise KeyError(f"{table.title}: no row {name}")


def _short(title: str) -> str:
    """Return the number of a table or figure, or the whole title if it has none."""
    number, _, _ = title.partition(":")
    return number if number.startswith(("Table", "Figure")) else title


def _slug(title: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _verdict(entry: Entry, results: Results) -> str:
    judged = [f for f in results.findings if f.holds is not None]
    held = sum(bool(f.holds) for f in judged)
    counted = f"{held} of {len(judged)} checks" if judged else ""
    word = "holds" if held == len(judged) else "in part" if held else "**fails**"
    if entry.verdict:
        return f"{entry.verdict} ({counted})" if counted else entry.verdict
    return f"{word} ({counted})" if counted else "measured"


def _section(name: str, entry: Entry, results: Results) -> str:
    verdict = _verdict(entry, results)
    lines = [f"## {results.title}", "", f"**Claim:** {entry.claim} **Verdict:** {verdict}.", ""]
    lines += [entry.about, ""] if entry.about else []
    lines += [f"- {line}" for line in results.facts.get("verdict", ())]
    for table in results.tables:
        if table.title.startswith("Every metric"):
            continue  # in the JSON and in the HTML report
        if table.title != results.title and len(results.tables) > 1:
            lines += ["", f"### {table.title}", ""]
        lines += [*_markdown(table), ""]
        lines += [table.note, ""] if table.note else []
    lines += [*_findings(name, results.findings), _run(results.facts), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _findings(name: str, findings: tuple[Finding, ...]) -> list[str]:
    """Show all findings if they are few; else those with a verdict, else those that fail."""
    judged = [f for f in findings if f.holds is not None]
    failed = [f for f in judged if not f.holds]
    shown = next((list(some) for some in (findings, judged) if len(some) <= SHOWN_FINDINGS), failed)
    if not findings:
        return []
    file = f"[`{name}.json`](../results/{name}.json)"
    if not shown:
        return [f"Findings: {len(findings)}, in {file}.", ""]
    kind = "Failed findings" if shown == failed != judged else "Findings"
    return [
        f"{kind} ({len(shown)} of {len(findings)} in {file}):",
        "",
        "| finding | value | ± | baseline | control | verdict |",
        "|---|---|---|---|---|---|",
        *(_row(f) for f in shown),
        "",
    ]


def _run(facts: Mapping[str, Any]) -> str:
    models = "; ".join(f"{m}: {_describe(about)}" for m, about in facts.get("models", {}).items())
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    counted = facts.get("pairs") or facts["seeds"]
    kind = "pairs" if "pairs" in facts else "seeds"
    trials = (
        ", ".join(f"{what} {n}" for what, n in counted.items())
        if isinstance(counted, dict)
        else counted
    )
    command = facts["command"].replace("regauge reproduce", "python -m experiments")
    cost = f"preset {facts['preset']}; {kind}: {trials}; {facts['minutes of computing']} minutes"
    return f"`{command}` ({cost}). {f'{models}. ' if models else ''}{versions}."


def _describe(details: Any) -> str:
    rest = ", ".join(f"{what} {value}" for what, value in details.items() if what != "parameters")
    rest = re.sub(r"\b(trained on|then on|tested on) ([\d,]+) of ", r"\1 \2 examples of ", rest)
    return f"{details['parameters']:,} parameters, {rest}"


def _markdown(table: Table) -> list[str]:
    rows = [
        list(table.columns),
        ["---"] * len(table.columns),
        *([_cell(c) for c in row] for row in table.rows),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:.{2 if abs(value) >= 1 else 3}f}"
        if isinstance(value, float) and value < 1e4
        else format_number(value)
    )


def _row(f: Finding) -> str:
    verdict = {True: "holds", False: "**fails**", None: f.sentence}[f.holds]
    values = (f.value, f.spread, f.floor, f.ceiling)
    cells = " | ".join("" if v is None else format_number(v) for v in values)
    return f"| {f.id} | {cells} | {verdict} |"


def build_pages(folder: Path) -> dict[str, str]:
    """Render all pages from a folder of results, by their paths below docs/."""
    results = {path.stem: load_renamed(path) for path in sorted(folder.glob("*.json"))}
    pages = {"experiments.md": render_overview(results)}
    for name, page in PAGES.items():
        if results.keys() & page.entries.keys():
            pages[f"experiments/{name}.md"] = render_page(name, results)
    pages["experiments/paper-presets.md"] = render_recipes()
    return pages


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    (docs / "experiments").mkdir(exist_ok=True)
    for place, text in build_pages(docs / "results").items():
        write_bytes(docs / place, text.encode())
