"""The sections of docs/experiments/locks.md that explain the findings of `lock/attacks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regauge.results.findings import Finding, Results

HEAD = """# What a lock is worth

A lock transforms the backbone of a model by a secret element; embedding and head stay as they are.
It is **obfuscation, not encryption**: the weights still hold everything that the model knows, in
another basis. This page measures which adversaries undo it (`python -m experiments lock/attacks`).
`regauge audit lock LOCKED --against BASE --data ...` measures it on your own model; rely on those
numbers, not on these.

To protect files at rest, use `regauge seal`. To protect weights from the machine that computes with
them, use a trusted execution environment. A lock only raises the cost of a theft.

*Drift* stands in for fine-tuning: noise in proportion to the standard deviation of each tensor,
added to every tensor of the base. GPT-2 (G) is a small text generator.
"""
TAIL = """## Assumptions

- The adversary knows the architecture, the group of the lock (its record states it) and this
  library, but not the key.
- A key has 32 random bytes, and the element is derived from the key and the model's digest. The
  attacks recover the element; they do not guess the key.
- Not measured: active adversaries who change inputs and watch outputs; timing; several locked
  models of one family at once; learned orders on large models.
"""


def render_lock_report(results: Results) -> str:
    """Render the head of docs/experiments/locks.md."""
    found = {f.id: f for f in results.findings}
    parts = [HEAD, "## By what the adversary has\n"]
    parts.append(_public_base(found.values()))
    if _of(found.values(), "edges"):
        parts.append(_edges(found.values()))
    parts.append(_features(found.values()))
    parts.append(_theft(found.values()))
    return "\n".join([*parts, TAIL, _groups(found.values())])


def _groups(findings: Iterable[Finding]) -> str:
    """State which group to choose, as far as the findings support it."""
    found = list(findings)
    near = [f for f in _of(found, "base") if float(f.id.split("/")[3]) <= 0.1]
    standing = sorted({f.id.split("/")[2] for f in near if (f.value or 0) < 0.99})
    seen = {
        group: [
            f for f in _of(found, "features") if f.id.split("/")[2:] == [group, "unknown inputs"]
        ]
        for group in ("permutation", "signed", "rotation")
    }
    lines = ["## Which group", ""]
    but = f" except {', '.join(standing)}" if standing else ""
    lines += [
        f"With a base at a drift of at most 0.1, the whole key is recovered under every group{but}."
    ]
    shares = "; ".join(f"{group} {_range(fs)}" for group, fs in seen.items() if fs)
    lines += [
        f"The statistics of transformed features reveal this share of the key: {shares}.",
        "",
        (
            "Signed permutations are the default: they cost nothing, unlock bit for bit, and train "
            "with the same optimizers as permutations. The residual stream of a model with "
            "LayerNorm allows permutations only; its heads allow signs. Rotations need folded "
            "norms, unlock only to rounding, and exclude Adam while locked."
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
            "An adversary who has the model that yours was fine-tuned from matches it with the "
            "locked backbone and obtains the key. Share of the key recovered, over models and keys:"
        ),
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
            *_real(_of(findings, "fine-tune")),
            (
                "**A lock is worth nothing against this adversary.** The base cannot be hidden "
                "either: invariants under every key identify it (`regauge fingerprint`, the attack "
                "`lineage`)."
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
    return [f"A real fine-tune ({name}) and its base, share of the key: {shares}.", ""]


def _edges(findings: Iterable[Finding]) -> str:
    found = _of(findings, "edges")
    lines = [
        "### Only the locked file",
        "",
        (
            "Embedding and head are stored unlocked, and training has aligned the backbone with "
            "them. Share of the permutation of the residual stream that an attack finds without "
            "base, "
            "data or labels:"
        ),
        "",
    ]
    rows = [[f.id.split("/")[1], f"{f.floor or 0:.1%}", _range([f])] for f in found]
    lines += _table(["model", "a guess", "found"], rows)
    lost = [f.id.split("/")[1] for f in found if (f.value or 0) >= 0.99]
    said = (
        f"The permutation restores the owner's model: {' and '.join(lost)} are broken."
        if lost
        else "None is found completely."
    )
    said += (
        " The attack was tuned on both seeds of GPT-2 (G). Where it finds nothing, a stronger "
        "search may succeed."
    )
    return "\n".join([*lines, "", said, ""])


def _features(findings: Iterable[Finding]) -> str:
    found = _of(findings, "features")
    lines = [
        "### Features under one key",
        "",
        "The adversary observes the features that enter the locked backbone. Shares recovered:",
        "",
    ]
    rows = []
    for model, group in dict.fromkeys(tuple(f.id.split("/")[1:3]) for f in found):
        by = {f.id.split("/")[3]: f for f in found if f.id.split("/")[1:3] == [model, group]}
        known, seen, text = (by.get(name) for name in ("known inputs", "unknown inputs", "text"))
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
        [
            "model",
            "key",
            "known tokens needed",
            "unknown inputs, public embedding",
            "the text itself",
        ],
        rows,
    )
    return "\n".join(
        [
            *lines,
            "",
            (
                "Reusing one key for many batches gives the adversary statistics. Hidden states of "
                "an open language model reveal the text under any key."
            ),
            "",
        ]
    )


def _theft(findings: Iterable[Finding]) -> str:
    found = _of(findings, "theft")
    lines = [
        "### No related model, but labels",
        "",
        (
            "A thief trains a new embedding and head around the locked backbone, or fine-tunes "
            "all of it. "
            "Accuracy:"
        ),
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
        [
            "lock",
            "labels",
            "best theft",
            "trained on the labels alone",
            "locked, unchanged",
            "owner",
        ],
        rows,
    )
    lines += [
        "",
        "The gain of the best theft over the labels alone is what the lock fails to protect.",
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
            f"Longer training with {labels} labels reaches {best:.3f}; the labels alone reach "
            f"{by['scratch']:.3f}."
        )
    ]
