"""docs/threat-model.md, made from the findings of `lock/attacks` and of Table 6, and from nothing
else: every number on the page was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regauge.results.findings import Finding, Results

HEAD = """# Threat model: what a lock is worth

A lock moves the backbone of a model by a secret element; embedding and head stay as they are. It is
**obfuscation, not encryption**: everything that the model knows is still in the weights, in another
order. This page says who undoes it, from measurements (`python -m experiments lock/attacks`; all
numbers in [experiments](experiments.md)). It is made from those findings and from nothing else. Run
`regauge audit lock LOCKED --against BASE --data ...` for your own model: its numbers are the ones
that count for you.

For files at rest use `regauge seal`. Against a machine that must compute with the weights and must
not have them, use a trusted execution environment; a lock raises a cost, and below is how little.
"""
TAIL = """## What is assumed

- The adversary knows the architecture, the group of the lock (its record says it) and this library.
  It has not got the key.
- Keys are 32 random bytes, and an element is drawn from the key and the model's digest: keys are
  not guessed. All attacks go around them.
- Drift is noise of a share of each tensor's spread, on every tensor. It stands in for fine-tuning.
- Not measured: adversaries who change what they are given and watch the answers; timing; several
  locked models of one family at once; learned orders on large models.
"""


def threat_model(results: Results, split: Results | None = None) -> str:
    """The page. `split` is Table 6 of 000, if it was measured."""
    found = {f.id: f for f in results.findings}
    parts = [HEAD, "## Who has what, and what it gives\n"]
    parts.append(_public_base(found.values()))
    if _of(found.values(), "edges"):
        parts.append(_edges(found.values()))
    parts.append(_features(found.values()))
    parts.append(_theft(found.values()))
    parts += [TAIL, _groups(found.values())]
    if split is not None:
        parts.append(_split(split))
    return "\n".join(parts)


def _groups(findings: Iterable[Finding]) -> str:
    """What of the groups is left to choose, as far as the findings bear it out."""
    found = list(findings)
    near = [f for f in _of(found, "base") if float(f.id.split("/")[3]) <= 0.1]
    standing = sorted({f.id.split("/")[2] for f in near if (f.value or 0) < 0.99})
    seen = {
        group: [
            f for f in _of(found, "features") if f.id.split("/")[2:] == [group, "seen features"]
        ]
        for group in ("permutation", "signed", "rotation")
    }
    lines = ["## Which group", ""]
    but = f" but: {', '.join(standing)}" if standing else ""
    lines += [
        f"Of a base at a drift of at most 0.1, all of the key is found under every group{but}."
    ]
    told = "; ".join(f"{group} {_range(fs)}" for group, fs in seen.items() if fs)
    lines += [
        f"Of what the statistics of moved features tell of the key, over models: {told}.",
        "",
        (
            "Signs cost nothing: they unlock bit for bit and train with the same optimizers as "
            "permutations, so that they are the default. A LayerNorm's"
        ),
        (
            "stream takes permutations only; its heads take signs. Rotations need folded norms, "
            "come back to rounding only and forbid Adam while locked."
        ),
        "",
    ]
    return "\n".join(lines)


def _of(findings: Iterable[Finding], *beginning: str) -> list[Finding]:
    return [f for f in findings if f.id.split("/")[: len(beginning)] == list(beginning)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _range(found: Iterable[Finding]) -> str:
    values = [f.value for f in found if f.value is not None]
    low, high = min(values), max(values)
    return f"{low:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"


def _public_base(findings: Iterable[Finding]) -> str:
    found = _of(findings, "base")
    groups = list(dict.fromkeys(f.id.split("/")[2] for f in found))
    drifts = list(dict.fromkeys(f.id.split("/")[3] for f in found))
    lines = [
        "### The base is public",
        "",
        (
            "Whoever has the model that yours was tuned from matches it with the locked backbone, "
            "and reads the key off. Share of the key, over"
        ),
        "models and keys:",
        "",
    ]
    rows = [
        [
            group,
            *(
                _range(f for f in found if f.id.split("/")[2:] == [group, drift])
                for drift in drifts
            ),
        ]
        for group in groups
    ]
    lines += _table(["lock", *(f"drift {d}" for d in drifts)], rows)
    return "\n".join(
        [
            *lines,
            "",
            *_real(_of(findings, "real")),
            (
                "**This lock gives nothing** there. And the base cannot be hidden: what no key "
                "changes tells it (`regauge fingerprint`, `lineage`)."
            ),
            "",
        ]
    )


def _real(found: Sequence[Finding]) -> list[str]:
    if not found:
        return []
    name, shares = (
        found[0].id.split("/")[1],
        ", ".join(f"{f.id.split('/')[2]} {f.value or 0:.1%}" for f in found),
    )
    return [f"Of a real fine-tune, {name}, with the base that it was tuned from: {shares}.", ""]


def _edges(findings: Iterable[Finding]) -> str:
    found = _of(findings, "edges")
    lines = [
        "### There is nothing but the locked file",
        "",
        (
            "Embedding and head are in plain, and training has aligned the backbone with them. Of "
            "the order of a stream that was permuted, with no base,"
        ),
        "no data and no labels:",
        "",
    ]
    rows = [[f.id.split("/")[1], f"{f.floor or 0:.1%}", _range([f])] for f in found]
    lines += _table(["model", "a guess", "found"], rows)
    lost = [f.id.split("/")[1] for f in found if (f.value or 0) >= 0.99]
    said = (
        "With the order of the stream the model is the owner's again: so it is for "
        f"{' and '.join(lost)}."
        if lost
        else "None is found in whole."
    )
    said += (
        " The attack was tuned on both seeds of GPT-2 (G); where it finds nothing, that is "
        "no proof: a better search may."
    )
    return "\n".join([*lines, "", said, ""])


def _features(findings: Iterable[Finding]) -> str:
    found = _of(findings, "features")
    lines = [
        "### Features under one key are seen",
        "",
        "Whoever sees what enters the locked backbone:",
        "",
    ]
    rows = []
    for model, group in dict.fromkeys(tuple(f.id.split("/")[1:3]) for f in found):
        by = {f.id.split("/")[3]: f for f in found if f.id.split("/")[1:3] == [model, group]}
        known, seen, text = (
            by.get(name) for name in ("known inputs", "seen features", "vocabulary")
        )
        rows.append(
            [
                model,
                group,
                known.sentence if known else "",
                _range([seen]) if seen else "",
                _range([text]) if text else "",
            ]
        )
    lines += _table(
        ["model", "key", "known inputs", "unknown inputs, public embedding", "the text itself"],
        rows,
    )
    return "\n".join(
        [
            *lines,
            "",
            (
                "One key for many batches is one key for an adversary with statistics. Hidden "
                "states of an open language model give the text,"
            ),
            "whatever the key.",
            "",
        ]
    )


def _theft(findings: Iterable[Finding]) -> str:
    found = _of(findings, "theft")
    lines = [
        "### No relative is known, and there are labels",
        "",
        "The backbone is intact; a thief trains what stands around it, or all of it:",
        "",
    ]
    rows = []
    for group in dict.fromkeys(f.id.split("/")[1] for f in found):
        mine = [f for f in found if f.id.split("/")[1] == group]
        for labels in sorted({f.id.rsplit(" ", 1)[1] for f in mine}, key=int):
            by = {
                f.id.split("/")[2].rsplit(" ", 1)[0]: f for f in mine if f.id.endswith(f" {labels}")
            }
            best = max(
                (f for way, f in by.items() if way != "scratch"), key=lambda f: f.value or 0.0
            )
            cells = [best.value, by["scratch"].value, best.floor, best.ceiling]
            rows.append([group, labels, *("" if c is None else f"{c:.3f}" for c in cells)])
    lines += _table(
        ["lock", "labels", "best theft", "the labels alone", "locked, as it stands", "the owner's"],
        rows,
    )
    lines += [
        "",
        "Accuracies. What the theft has over the labels alone is what the lock has lost.",
        *_patience(_of(findings, "patience")),
        "",
    ]
    return "\n".join(lines)


def _patience(found: Sequence[Finding]) -> list[str]:
    if not found:
        return []
    by = {f.id.split("/")[2].rsplit(" ", 1)[0]: f.value or 0.0 for f in found}
    best = max(value for way, value in by.items() if way != "scratch")
    labels = found[0].id.rsplit(" ", 1)[1]
    return [
        (
            f"A longer training with {labels} labels gives {best:.3f}, and {by['scratch']:.3f} to "
            "the labels alone."
        )
    ]


def _split(results: Results) -> str:
    """What a server of split learning sees, from the tables that are named "Utility and
    privacy".
    """
    lines = ["## What a server of split learning sees", ""]
    lines += [
        (
            "From the features that a client sends, images are drawn again. SSIM of the best of "
            "the "
            "attacks that were tried (1 is the image itself), and"
        )
    ]
    lines += [
        (
            "the share of images that it re-identifies; accuracy is the task's ([Table "
            "6](experiments.md), `regauge audit split` for your own):"
        ),
        "",
    ]
    rows = []
    for table in (t for t in results.tables if t.title.startswith("Utility and privacy: ")):
        # Stored results have the column's former name.
        place = {
            "re-identified" if head == "told apart" else head: i
            for i, head in enumerate(table.columns)
        }
        for row in table.rows:
            cells = [
                row[place[head]]
                for head in ("accuracy", "the paper's decoder", "best attack", "re-identified")
            ]
            shown = ["" if not isinstance(c, int | float) else f"{c:.3f}" for c in cells]
            rows.append([table.title.removeprefix("Utility and privacy: "), str(row[0]), *shown])
    lines += _table(
        ["data", "defences", "accuracy", "the paper's decoder", "best attack", "re-identified"],
        rows,
    )
    return "\n".join([*lines, "", *(f"- {line}" for line in results.facts["verdict"]), ""])
