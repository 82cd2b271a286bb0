"""The report of split learning: findings, tables, trade-off, gallery, training curves, verdict.

Leakage of images is measured by SSIM: of the mean image (floor), of the attack on this combination
(value), and of the same attack without a defence (ceiling). Leakage of texts is measured by
ROUGE-L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regauge.audit.engine import CAVEAT, Attack, titles_of
from regauge.audit.scores import OTHERS, SHUFFLED_PATCHES, AttackScores, Case, Row, mean_score
from regauge.audit.tables import (
    build_details,
    build_findings,
    build_text_table,
    gallery,
    line_figure,
    round_rows,
)
from regauge.audit.verdicts import Quantity, Verdict, with_verdicts, write_verdicts
from regauge.defences.parser import NONE, split_combination
from regauge.defences.split import DEFENCES
from regauge.results.findings import Figure, Results, Table

LEAK = "SSIM"
TITLE = "What a split server recovers"
IMAGES = Quantity("images", "SSIM", 0.05, 0.6)
TEXTS = Quantity("texts", "ROUGE-L", 0.05, 0.5, units="texts")
LABELS = Quantity("labels", "", 0.05, 0.9, "%", "labels")


def build_results(
    title: str, cases: Sequence[Case], attacks: Sequence[Attack], unchecked: Sequence[str] = ()
) -> Results:
    """Return the results of some cases of images.

    Args:
        title: The title of the results.
        cases: The measurements.
        attacks: The attacks of the report.
        unchecked: What was not tried, and why.
    """
    findings = tuple(f for case in cases for f in image_findings(case, attacks))
    details_note = (
        "Pixels in 0..1, the data range of PSNR and SSIM is 1. F-SIM: the absolute cosine of "
        "AlexNet's last features (weights of LPIPS). Worst: of the image that leaked most."
    )
    training = {
        "epochs": lambda r: len(r.losses) or None,
        "stopped falling": lambda r: r.has_stopped if r.losses else None,
        "seconds": lambda r: round(r.seconds, 1),
    }
    tables = (
        *(build_table(case, attacks) for case in cases),
        build_glossary([row.combination for case in cases for row in case.rows], attacks),
        *(build_details(case, attacks, training, details_note) for case in cases),
    )
    figures = tuple(
        f
        for case in cases
        for build in (tradeoff_figures, gallery_figures, training_figures)
        for f in build(case, attacks)
    )
    results = Results(title, findings, tables, figures, unchecked=tuple(unchecked))
    verdicts = [verdict for case in cases for verdict in build_verdict(case, attacks)]
    return with_verdicts(results, [*verdicts, Verdict(CAVEAT)])


def build_text_results(case: Case, attacks: Sequence[Attack]) -> Results:
    """Return the results of a case of texts."""
    chance = case.rows[0].chance
    labels = {"labels": lambda row: row.share("labels")} if case.has("labels") else {}
    table = build_text_table(
        case,
        attacks,
        {"accuracy": lambda row: row.accuracy, **labels},
        {},
        ("a guess, another text", chance or None, *(None for _ in labels)),
        f"Utility and privacy: {case.name}",
        "",
    )

    def describe(row: Row, result: AttackScores) -> str:
        words, places = (result.value(name) or 0.0 for name in ("words", "in place"))
        return f"{words:.0%} of the tokens, {places:.0%} in their places"

    glossary = build_glossary([r.combination for r in case.rows], attacks)
    findings = tuple(build_findings(case, attacks, TEXTS, describe))
    results = Results(TITLE, findings, (table, glossary))
    return with_verdicts(results, [*build_verdict(case, attacks), Verdict(CAVEAT)])


def identification_rate(row: Row, attacks: Sequence[Attack]) -> float:
    """Return the share of re-identified images, by the best attack whose images have an order.

    Others are left out: the best assignment re-identifies some of any images.
    """
    ordered = (a.name for a in attacks if a.is_ordered)
    return max((row.value(name, "identified") or 0.0 for name in ordered), default=0.0)


def image_findings(case: Case, attacks: Sequence[Attack]) -> list[Any]:
    """Return one finding for each combination and attack on images."""
    ordered = {a.name: a.is_ordered for a in attacks}

    def describe(row: Row, result: AttackScores) -> str:
        share = f"{result.value('identified') or 0.0:.0%} re-identified"
        if not ordered[result.attack]:
            share += " by the best assignment"
            if OTHERS in case.floors:
                others = mean_score(case.floors[OTHERS], "identified")
                share += f", as are {others:.0%} of other images"
        seeds = f"; spread over {result.seeds} seeds" if result.seeds > 1 else ""
        most = max(result.scores[LEAK])
        return f"of one image at most {most:.3f}; {share}; {result.seconds:.0f} s{seeds}"

    return build_findings(case, attacks, IMAGES, describe)


def build_table(case: Case, attacks: Sequence[Attack]) -> Table:
    """Return the main table: accuracy, re-identified images, and SSIM under each attack."""
    used = [a for a in attacks if any(a.name in row.by_attack for row in case.rows)]
    has_labels = case.has("labels")
    columns = (
        "defences",
        "accuracy",
        "best attack",
        "re-identified",
        *(("labels",) if has_labels else ()),
        *(a.title for a in used),
    )
    rows: list[tuple[Any, ...]] = [
        (
            row.combination,
            row.accuracy,
            row.best(LEAK)[1],
            identification_rate(row, attacks) if row.by_attack else None,
            *((row.share("labels"),) if has_labels else ()),
            *(row.value(a.name, LEAK) for a in used),
        )
        for row in case.rows
    ]
    chance, floor = case.rows[0].chance, case.floor(LEAK)
    labels = (chance,) if has_labels else ()
    rows.append(("a guess, the mean image", chance, floor, 0.0, *labels, *(floor for _ in used)))
    shuffled = mean_score(case.floors[SHUFFLED_PATCHES], LEAK)
    note = (
        "Columns of attacks: the mean SSIM of the reconstructions over the attacked images; 1 is "
        "the image itself, less is better. Re-identified: the share of images that are nearest to "
        "their own reconstruction. The true patches in a random order have an SSIM of "
        f"{shuffled:.3f}."
    )
    if has_labels:
        note += (
            " Labels: the share that the gradients of the first steps reveal to a server that "
            "knows a few."
        )
    return Table(f"Utility and privacy: {case.name}", columns, round_rows(rows), note)


def build_glossary(combinations: Sequence[str], attacks: Sequence[Attack]) -> Table:
    """Return a table that describes the defences and attacks of the other tables."""
    names = dict.fromkeys(
        part.partition("=")[0] for c in combinations for part in split_combination(c)
    )
    rows = [
        (name, " ".join((DEFENCES[name].__doc__ or "").split("\n\n")[0].split()))
        for name in names
        if name != NONE
    ]
    rows += [(a.title, a.about) for a in attacks]
    return Table(
        "Defences and attacks",
        ("name", "description"),
        tuple(rows),
        "a+b combines both; none is split learning without a defence.",
    )


def series_key(combination: str) -> tuple[str, str]:
    """Return the curve of a combination and the label of its point: ("low-pass, rows", "0.1")."""
    parts = split_combination(combination)
    level = next((p.partition("=")[2] for p in parts if "=" in p and not p.startswith("rows")), "")
    return ", ".join(p.partition("=")[0] for p in parts), level


def tradeoff_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """Return accuracy against leakage, under the paper's decoder and under the best attack."""
    measures: dict[str, Any] = {"the best of all attacks": lambda row: row.best(LEAK)[1]}
    if any("decoder" in row.by_attack for row in case.rows) and len(attacks) > 1:
        measures = {"the paper's decoder alone": lambda row: row.value("decoder", LEAK), **measures}
    figures = []
    for title, leaked in measures.items():
        tried = [row for row in case.rows if leaked(row) is not None]
        if case.rows[0] not in tried:
            continue
        series: dict[str, list[list[Any]]] = {}
        for row in tried:
            name, level = series_key(row.combination)
            series.setdefault(name, []).append([leaked(row), row.accuracy, level])
        data = {
            "series": {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()},
            "xlabel": "SSIM of the reconstructions: less is more private",
            "ylabel": "accuracy",
            "percent": True,
        }
        caption = (
            f"Up and to the left is better. The mean image has {case.floor(LEAK):.3f}; "
            f"without a defence it is {leaked(case.rows[0]):.3f}."
        )
        figures.append(Figure(f"{case.name}: accuracy against {title}", "points", data, caption))
    return figures


def gallery_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """Return one gallery for each attack: the images and their reconstructions."""
    figures = []
    for attack in attacks:
        rows = [("the images", case.shown)]
        for row in case.rows:
            result = row.by_attack.get(attack.name)
            if result is not None:
                label = f"{row.combination} (SSIM {result.value(LEAK):.2f})"
                rows.append((label, result.images))
        title = f"{case.name}: what {attack.title} recovers"
        figures += gallery(title, rows, "The first images of the test.")
    return figures


def training_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """Return the held-out loss of each attacker's training, relative to the mean image's."""
    figures = []
    for attack in attacks:
        trained = {
            row.combination: result
            for row in case.rows
            if (result := row.by_attack.get(attack.name)) and result.losses and result.floor
        }
        y = {name: [round(v / r.floor, 5) for v in r.losses] for name, r in trained.items()}
        if not y:
            continue
        falling = [name for name, result in trained.items() if not result.has_stopped]
        caption = "On held-out pairs of the attacker. " + (
            f"Still falling at the last epoch: {', '.join(falling)}."
            if falling
            else "All had stopped falling."
        )
        figures.append(
            line_figure(
                f"{case.name}: how {attack.title} learned",
                range(1, max(map(len, y.values())) + 1),
                y,
                "epoch",
                "loss, share of the mean image's",
                caption,
                log=True,
            )
        )
    return figures


def build_verdict(case: Case, attacks: Sequence[Attack]) -> list[Verdict]:
    """Return the conclusions of a case, of images or of texts."""
    leak, undefended = case.metric, case.rows[0]
    titles = titles_of(attacks)
    quantity = IMAGES if case.subject == "images" else TEXTS
    found = [(name, e, titles[attack]) for name, e, attack in case.best_evidence()]
    verdicts = [
        *write_verdicts(quantity, found),
        *write_verdicts(LABELS, case.share_evidence("labels")),
    ]

    def best(row: Row) -> float:
        return row.best(leak)[1] or 0.0

    attacked = {row.combination: row for row in case.rows if row.by_attack}
    untried = [row.combination for row in case.rows if not row.by_attack]
    if untried:
        text = (
            f"No verdict on {case.subject} under {', '.join(untried)}: none of the selected "
            "attacks applies."
        )
        verdicts.append(Verdict(text, "unclear"))
    for row in attacked.values():
        before = attacked.get(without_rows(row.combination) or "")
        if before is None:
            continue
        base = before.combination
        subject = "Shuffled rows" if base == NONE else f"Shuffled rows on top of {base}"
        sentence = (
            f"{subject}: the best attack ({titles[row.best(leak)[0]]}) reaches {leak} "
            f"{best(row):.2f} with them and {best(before):.2f} without"
        )
        if "decoder" in row.by_attack and "decoder" in before.by_attack:
            old, new = (r.value("decoder", leak) or 0.0 for r in (before, row))
            sentence += f"; the paper's decoder alone {new:.2f} and {old:.2f}"
        verdicts.append(Verdict(f"{sentence}."))
    defended = [row for row in attacked.values() if row is not undefended]
    if defended and undefended.by_attack:
        safest = min(defended, key=best)
        floor, ceiling = case.floor(leak), best(undefended)
        share = max(0.0, (best(safest) - floor) / max(ceiling - floor, 1e-9))
        chance = f", a guess: {undefended.chance:.3f}" if undefended.chance else ""
        verdicts.append(
            Verdict(
                f"The strongest defence is {safest.combination}: the best attack goes {share:.0%} "
                "of the way from a guess to the undefended reconstruction, at an accuracy of "
                f"{safest.accuracy:.3f} (undefended: {undefended.accuracy:.3f}{chance})."
            )
        )
    return verdicts


def without_rows(combination: str) -> str | None:
    """Return a combination without its row permutation; None if it has none."""
    parts = split_combination(combination)
    others = [p for p in parts if p.partition("=")[0] != "rows"]
    return None if len(others) == len(parts) else "+".join(others) or NONE
