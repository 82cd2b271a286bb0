"""The pages of results, rendered from the findings in docs/results and nothing else.

python -m experiments.document docs     # writes docs/experiments.md and the folder docs/experiments

The overview has one row for each table or figure, a page of a topic its claims and figures, a page
in `details` all numbers of one result. Results of another preset than `small` are stored beside the
first, as `000-table2.pretrained.json`.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.catalog import PAGES, Entry
from experiments.figure_catalog import FIGURES
from experiments.figures import figure_of, render_svg, row_of
from experiments.former_words import load_renamed
from experiments.lock_report import render_lock_report
from experiments.paper_recipes import render_recipes
from experiments.stored_verdicts import rejudge
from regauge.checkpoints.files import write_bytes
from regauge.results.findings import INCONCLUSIVE, Finding, Results, Table
from regauge.results.report import format_number

SHOWN_FINDINGS = 26  # of one result; beyond, only those with a verdict, then only those that fail

HEAD = """# Results

What three papers report and what regauge measures: one row for each table or figure, with a link to
its claim and its plots. Every number on these pages is read from `docs/results`;
`python -m experiments.document docs` writes the pages, and a test checks that they match.

**small** are models of 0.05 to 5 million parameters, trained on two cores; **pretrained** are
public pre-trained models. Compare directions and differences with the paper's, not absolute
numbers.

**A verdict needs a margin.** A comparison holds or fails only if two means differ by more than the
standard deviation over seeds (the larger of the two), from three seeds or pairs of models on.
Everything else is inconclusive. Equalities are checked against a tolerance and need no seeds. A
*check* is a measured number with such a verdict. "No better than a guess" means at most a fifth of
the way from a guess to the plain model.

MJP is training with masked jigsaw puzzles; *drift* is noise that stands in for fine-tuning; GPT-2
(G) is a small text generator.

## Summary
"""
TAIL = """## Reproduce a table

```
python -m experiments --list
python -m experiments 000/table2                               # minutes on two cores
python -m experiments 000/table2 --report table2.html --json table2.json
python -m experiments 000/table4 --preset pretrained           # public pre-trained models
python -m experiments 000/table2 --preset paper --estimate     # its time, memory and disk
python -m experiments 000/table2 --preset paper --device cuda  # the paper's models and data
python -m experiments.stale docs/results                       # results older than their code
```

- **Presets.** `small` builds ViT, BERT and GPT-2 of the transformers library from small configs and
  trains them on data in `--assets DIR` (or `$REGAUGE_ASSETS`); without image files it uses
  scikit-learn's digits. `paper` uses the paper's models and data: timm's ViT-Base on CIFAR-10, BERT
  and GPT-2 on IMDB, a small BERT on SNLI, GPT-2 on WikiText-2, and ADE20k in the folder
  `ADEChallengeData2016` of the assets. Data of the hub may be given by path: a folder
  `OWNER/NAME` or `NAME` of the assets with parquet files, a dataset saved by the datasets library,
  or the authors' own files (CelebA, IMDB, SNLI, WikiText-2, images by class). An error names any
  missing file. `pretrained` reads public
  models from the assets, and so far has the experiments of the column *pretrained*. The `paper`
  preset has not been run for these pages; tests run it on small
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


@dataclass(frozen=True)
class Stored:
    """Stored results by name: those of preset small, and those of preset pretrained."""

    small: Mapping[str, Results]
    pretrained: Mapping[str, Results] = field(default_factory=dict)


def load_stored(folder: Path) -> Stored:
    """Load the results of a folder, with present words and verdicts."""
    found: dict[str, dict[str, Results]] = {"": {}, "pretrained": {}}
    for path in sorted(folder.glob("*.json")):
        name, _, preset = path.stem.partition(".")
        found[preset][name] = rejudge(name, load_renamed(path))
    return Stored(found[""], found["pretrained"])


def render_overview(stored: Stored) -> str:
    """Render docs/experiments.md: one table, with a row for each table or figure."""
    lines = [HEAD, "| claim | verdict | paper | small | pretrained |", "|---|---|---|---|---|"]
    for name, page in PAGES.items():
        entries = {key: entry for key, entry in page.entries.items() if key in stored.small}
        if not entries:
            continue
        lines.append(f"| **[{page.title}](experiments/{name}.md)** | | | | |")
        for key, entry in entries.items():
            result, pretrained = stored.small[key], stored.pretrained.get(key)
            link = f"[{_short(result.title)}](experiments/{name}.md#{_slug(result.title)})"
            cells = (
                f"{link}: {entry.claim}",
                _verdict(entry, result),
                fill(entry.paper, result),
                fill(entry.ours, result),
                "" if pretrained is None else fill(entry.pretrained, pretrained),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", TAIL])


def render_page(name: str, stored: Stored) -> str:
    """Render docs/experiments/NAME.md: the claims of a topic, with their figures."""
    page = PAGES[name]
    parts = [f"# {page.title}\n"]
    if page.intro:
        parts.append(f"{page.intro}\n")
    if name == "locks":
        parts = [render_lock_report(stored.small["lock-attacks"])]
    parts += [
        _section(key, entry, stored) for key, entry in page.entries.items() if key in stored.small
    ]
    parts.append("[All results](../experiments.md)\n")
    return "\n".join(parts)


def render_details(name: str, topic: str, entry: Entry, stored: Stored) -> str:
    """Render docs/experiments/details/NAME.md: all numbers of one result."""
    results = stored.small[name]
    lines = [f"# {results.title}: all numbers", "", f"**Claim:** {entry.claim}", ""]
    about = re.sub(r"\]\((?=[\w-]+\.md)", "](../", entry.about)  # links of the folder above
    lines += [about, ""] if about else []
    lines += _numbers(name, results)
    if name in stored.pretrained:
        lines += ["## On pre-trained models", ""]
        lines += _numbers(f"{name}.pretrained", stored.pretrained[name])
    lines += [f"[{PAGES[topic].title}](../{topic}.md)", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def fill(template: str, results: Results) -> str:
    """Replace the references of a template by the numbers of some results.

    The row `*` is the mean over the rows without an empty cell.

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
            source = results.tables[table]
            value = (_mean_of(source) if name == "*" else row_of(source, name))[column]
        return format(value, form).replace("%", " %")

    return REFERENCE.sub(number, template)


def _mean_of(table: Table) -> tuple[Any, ...]:
    """Return the means of the columns of numbers over the rows that have a number in each."""
    rows = [row for row in table.rows if None not in row]
    columns = zip(*rows, strict=True)
    return tuple(
        statistics.fmean(column) if all(isinstance(v, float | int) for v in column) else None
        for column in columns
    )


def _short(title: str) -> str:
    """Return the number of a table or figure, or the whole title if it has none."""
    number, _, _ = title.partition(":")
    return number if number.startswith(("Table", "Figure")) else title


def _slug(title: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _verdict(entry: Entry, results: Results) -> str:
    """Return the verdict of an entry in one sentence, with the number of its checks."""
    judged = [f for f in results.findings if f.holds is not None]
    held = sum(bool(f.holds) for f in judged)
    open_ = sum(f.sentence.startswith(INCONCLUSIVE) for f in results.findings if f.holds is None)
    counts = [f"{held} of {len(judged)} checks hold"] if judged else []
    counts += [f"{open_} inconclusive"] if open_ else []
    if entry.verdict:
        said = fill(entry.verdict, results)
        return f"{said} ({', '.join(counts)})" if counts else said
    if not judged:
        return f"inconclusive: {open_} comparisons without a verdict" if open_ else "measured"
    word = f"all {held}" if held == len(judged) else f"{held} of {len(judged)}"
    said = f"holds in {word} checks" if held else f"**fails** in all {len(judged)} checks"
    return f"{said}; {open_} inconclusive" if open_ else said


def _section(name: str, entry: Entry, stored: Stored) -> str:
    """Render a claim: the verdict, the numbers of the overview, and its figures."""
    results, pretrained = stored.small[name], stored.pretrained.get(name)
    verdict = _verdict(entry, results)
    lines = [f"## {results.title}", "", f"**Claim:** {entry.claim}", ""]
    lines += [f"**Verdict:** {verdict}.", ""]
    lines += [f"- **Paper:** {fill(entry.paper, results)}"] if entry.paper else []
    lines += [f"- **small:** {fill(entry.ours, results)}"]
    if pretrained is not None:
        lines += [f"- **pretrained:** {fill(entry.pretrained, pretrained)}"]
    lines += ["", fill(entry.about, results), ""] if entry.about else [""]
    for position, drawn in enumerate(FIGURES.get(name, ())):
        file = f"figures/{name}-{position}.svg"
        caption = fill(drawn.caption, results)
        lines += [f"![{drawn.title}]({file})", "", f"*{drawn.title}.* {caption}", ""]
    lines += [f"[All numbers](details/{name}.md)", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _numbers(name: str, results: Results) -> list[str]:
    """Render the tables and findings of a result, and the facts of its run."""
    lines = [f"- {line}" for line in results.facts.get("verdict", ())]
    for table in results.tables:
        if table.title.startswith("Every metric"):
            continue  # in the JSON and in the HTML report
        if table.title != results.title and len(results.tables) > 1:
            lines += ["", f"### {table.title}"]
        lines += ["", *_markdown(table), ""]
        lines += [table.note, ""] if table.note else []
    return [*lines, *_findings(name, results.findings), _run(results.facts), ""]


def _findings(name: str, findings: tuple[Finding, ...]) -> list[str]:
    """Show all findings if they are few; else those with a verdict, else those that fail."""
    judged = [f for f in findings if f.holds is not None]
    failed = [f for f in judged if not f.holds]
    shown = next((list(some) for some in (findings, judged) if len(some) <= SHOWN_FINDINGS), failed)
    if not findings:
        return []
    file = f"[`{name}.json`](../../results/{name}.json)"
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
    command = re.sub("^regauge (reproduce )?", "python -m experiments ", facts["command"])
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
    """Render all pages and figures from a folder of results, by their paths below docs/."""
    stored = load_stored(folder)
    pages = {"experiments.md": render_overview(stored)}
    for name, page in PAGES.items():
        entries = {key: entry for key, entry in page.entries.items() if key in stored.small}
        if not entries:
            continue
        pages[f"experiments/{name}.md"] = render_page(name, stored)
        for key, entry in entries.items():
            pages[f"experiments/details/{key}.md"] = render_details(key, name, entry, stored)
            for position, drawn in enumerate(FIGURES.get(key, ())):
                figure = figure_of(drawn, stored.small[key])
                place = f"experiments/figures/{key}-{position}.svg"
                pages[place] = render_svg(figure, f"{key}-{position}")
    pages["experiments/paper-presets.md"] = render_recipes()
    return pages


def write_pages(docs: Path) -> None:
    """Write the pages of the results in docs/results, and remove those that no longer exist."""
    pages = build_pages(docs / "results")
    for place, text in pages.items():
        (docs / place).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(docs / place, text.encode())
    for path in (docs / "experiments").rglob("*.*"):
        if path.is_file() and path.relative_to(docs).as_posix() not in pages:
            path.unlink()


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
