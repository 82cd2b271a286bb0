"""The report of the image audit: findings, tables, trade-off, gallery, training curves, verdict.

Leakage is measured by SSIM: of the mean image (floor), of the attack on this combination (value),
and of the same attack without a defence (ceiling).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from regauge.audit.engine import CAVEAT, Attack
from regauge.audit.scores import (
    METRICS,
    OTHERS,
    Case,
    Row,
    mean_score,
    metric_cells,
    metric_columns,
)
from regauge.defences.parser import NONE, split_combination
from regauge.defences.split import DEFENCES
from regauge.results.findings import Figure, Finding, Results, Table

LEAK = "SSIM"
REIDENTIFIED = 0.5  # a server that re-identifies half of the images has them
MAX_SIDE = 64  # pixels of an image in the gallery, at most


def build_results(
    title: str, cases: Sequence[Case[Row]], attacks: Sequence[Attack], unchecked: Sequence[str] = ()
) -> Results:
    """Return the results of some cases: findings, tables, figures and the verdict.

    Args:
        title: The title of the results.
        cases: The measurements.
        attacks: The attacks of the report.
        unchecked: What was not tried, and why.
    """
    findings = tuple(f for case in cases for f in build_findings(case, attacks))
    tables = (
        *(build_table(case, attacks) for case in cases),
        build_glossary([row.combination for case in cases for row in case.rows], attacks),
        *(build_details(case, attacks) for case in cases),
    )
    figures = tuple(
        f
        for case in cases
        for f in (
            *tradeoff_figures(case, attacks),
            *gallery_figures(case, attacks),
            *training_figures(case, attacks),
        )
    )
    verdict = [*(line for case in cases for line in build_verdict(case, attacks)), CAVEAT]
    return Results(title, findings, tables, figures, {"verdict": verdict}, tuple(unchecked))


def best_attack(row: Row, attacks: Sequence[Attack] | None = None) -> tuple[str, float]:
    """Return the name of the strongest attack on a row, and its SSIM."""
    names = [a.name for a in attacks] if attacks is not None else list(row.by_attack)
    scores = {n: row.value(n, LEAK) or 0.0 for n in names if n in row.by_attack}
    name = max(scores, key=lambda n: scores[n])
    return name, scores[name]


def identification_rate(row: Row, attacks: Sequence[Attack]) -> float:
    """Return the share of re-identified images, by the best attack whose images have an order.

    Others are left out: the best assignment re-identifies some of any images.
    """
    return max(
        (
            mean_score(row.by_attack[a.name].scores, "identified") or 0.0
            for a in attacks
            if a.is_ordered and a.name in row.by_attack
        ),
        default=0.0,
    )


def build_findings(case: Case[Row], attacks: Sequence[Attack]) -> list[Finding]:
    """Return one finding for each combination and attack."""
    undefended, findings = case.row(NONE), []
    for row in case.rows:
        for attack in attacks:
            value = row.value(attack.name, LEAK)
            if value is None:
                continue
            result = row.by_attack[attack.name]
            scores = result.scores[LEAK]
            identified = mean_score(result.scores, "identified") or 0.0
            sentence = (
                f"of one image at most {max(scores):.3f}; "
                f"{_describe_identification(case, attack, identified)}; {result.seconds:.0f} s"
            )
            means = result.by_seed(LEAK)
            if len(means) > 1:
                sentence += f"; spread over {len(means)} seeds"
            findings.append(
                Finding(
                    f"{case.name}/{row.combination}/{attack.name}",
                    f'Under "{row.combination}", {attack.title} gives this much of the images.',
                    None,
                    value,
                    case.floor(LEAK),
                    undefended.value(attack.name, LEAK)
                    # an attack on shuffles has no undefended case
                    or best_attack(undefended)[1],
                    sentence,
                    measure=LEAK,
                    spread=statistics.stdev(means if len(means) > 1 else scores)
                    if len(scores) > 1
                    else None,
                    trials=len(scores),
                )
            )
    return findings


def _describe_identification(case: Case[Row], attack: Attack, share: float) -> str:
    if attack.is_ordered:
        return f"{share:.0%} re-identified"
    baseline = mean_score(case.floors[OTHERS], "identified") if OTHERS in case.floors else None
    return f"{share:.0%} re-identified by the best assignment" + (
        "" if baseline is None else f", as are {baseline:.0%} of other images"
    )


def build_table(case: Case[Row], attacks: Sequence[Attack]) -> Table:
    """Return the main table: accuracy, re-identified images, and SSIM under each attack."""
    used = [a for a in attacks if any(a.name in row.by_attack for row in case.rows)]
    has_labels = any(row.labels is not None for row in case.rows)
    columns = (
        "defences",
        "accuracy",
        "best attack",
        "re-identified",
        *(("labels",) if has_labels else ()),
        *(a.title for a in used),
    )
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        values = (
            row.accuracy,
            best_attack(row, attacks)[1],
            identification_rate(row, attacks),
            *((row.labels,) if has_labels else ()),
            *(row.value(a.name, LEAK) for a in used),
        )
        rows.append((row.combination, *(None if v is None else round(v, 3) for v in values)))
    chance = case.rows[0].chance
    baseline = (
        chance,
        case.floor(LEAK),
        0.0,
        *((chance,) if has_labels else ()),
        *(case.floor(LEAK) for _ in used),
    )
    rows.append(
        ("a guess, the mean image", *(None if v is None else round(v, 3) for v in baseline))
    )
    shuffled = mean_score(case.floors["true patches in a random order"], LEAK)
    note = (
        "Under each attack: the SSIM of its reconstructions, in the mean over the attacked "
        "images; 1 is the image itself, less is better. "
    )
    note += (
        "Re-identified (the fourth column) are images that are nearest to their own "
        "reconstruction, by attacks whose images have an order. "
    )
    note += f"The true patches in a random order have an SSIM of {shuffled:.3f}."
    if has_labels:
        note += (
            " Labels: the share that the gradients of the first steps reveal to a server that "
            "knows a few."
        )
    return Table(f"Utility and privacy: {case.name}", columns, tuple(rows), note)


def build_glossary(combinations: Sequence[str], attacks: Sequence[Attack]) -> Table:
    """Return a table that describes the defences and attacks of the other tables."""
    parts = dict.fromkeys(
        p.partition("=")[0] for combination in combinations for p in split_combination(combination)
    )
    rows = [
        (name, " ".join((DEFENCES[name].__doc__ or "").split("\n\n")[0].split()))
        for name in parts
        if name != NONE
    ]
    rows += [(a.title, a.about) for a in attacks]
    return Table(
        "What was tried: defences, then attacks",
        ("name", "what it is"),
        tuple(rows),
        "a+b is both; none is split learning without a defence.",
    )


def build_details(case: Case[Row], attacks: Sequence[Attack]) -> Table:
    """Return every metric, in the mean and of the worst image, and how the training ended."""
    metrics = metric_columns(case.floors, METRICS)
    columns = ("defences", "attack", *metrics, "epochs", "stopped falling", "seconds")
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        for attack in attacks:
            result = row.by_attack.get(attack.name)
            if result is not None:
                cells = metric_cells(result.scores, metrics)
                training = (
                    (len(result.losses), result.has_stopped) if result.losses else (None, None)
                )
                seconds = round(result.seconds, 1)
                rows.append((row.combination, attack.title, *cells, *training, seconds))
    rows += [
        ("floor", name, *metric_cells(scores, metrics), None, None, None)
        for name, scores in case.floors.items()
    ]
    note = (
        "Pixels in 0..1, the data range of PSNR and SSIM is 1. F-SIM: the absolute cosine of "
        "AlexNet's last features (weights of LPIPS). "
    )
    return Table(
        f"Every metric: {case.name}",
        columns,
        tuple(rows),
        note + "Worst: of the image that leaked most.",
    )


def series_key(combination: str) -> tuple[str, str]:
    """Return the curve of a combination and the label of its point: ("low-pass, rows", "0.1")."""
    parts = split_combination(combination)
    level = next((p.partition("=")[2] for p in parts if "=" in p and not p.startswith("rows")), "")
    return ", ".join(p.partition("=")[0] for p in parts), level


def tradeoff_figures(case: Case[Row], attacks: Sequence[Attack]) -> list[Figure]:
    """Return accuracy against leakage, under the paper's decoder and under the best attack."""
    undefended = case.row(NONE)
    measures: dict[str, Any] = {"the best of all attacks": lambda row: best_attack(row, attacks)[1]}
    if any("decoder" in row.by_attack for row in case.rows) and len(attacks) > 1:
        measures = {"the paper's decoder alone": lambda row: row.value("decoder", LEAK), **measures}
    figures = []
    for title, leaked in measures.items():
        series: dict[str, list[list[Any]]] = {}
        for row in case.rows:
            name, level = series_key(row.combination)
            series.setdefault(name, []).append([leaked(row), row.accuracy, level])
        curves = {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}
        data = {
            "series": curves,
            "xlabel": "SSIM of the reconstructions: less is more private",
            "ylabel": "accuracy",
        }
        caption = (
            f"Up and to the left is better. The mean image has {case.floor(LEAK):.3f}; "
            f"without a defence it is {leaked(undefended):.3f}."
        )
        figures.append(Figure(f"{case.name}: accuracy against {title}", "points", data, caption))
    return figures


def training_figures(case: Case[Row], attacks: Sequence[Attack]) -> list[Figure]:
    """Return the held-out loss of each attacker's training, relative to the mean image's."""
    figures = []
    for attack in attacks:
        by_combination = {
            row.combination: row.by_attack[attack.name]
            for row in case.rows
            if attack.name in row.by_attack
        }
        y = {
            name: [round(v / result.floor, 5) for v in result.losses]
            for name, result in by_combination.items()
            if result.losses and result.floor
        }
        if not y:
            continue
        data = {
            "x": list(range(1, max(map(len, y.values())) + 1)),
            "y": y,
            "xlabel": "epoch",
            "ylabel": "loss, share of the mean image's",
            "log": True,
        }
        falling = [name for name, result in by_combination.items() if not result.has_stopped]
        caption = "On held-out pairs of the attacker. " + (
            f"Still falling at the last epoch: {', '.join(falling)}."
            if falling
            else "All had stopped falling."
        )
        figures.append(Figure(f"{case.name}: how {attack.title} learned", "lines", data, caption))
    return figures


def gallery_figures(case: Case[Row], attacks: Sequence[Attack]) -> list[Figure]:
    """Return one gallery for each attack: the images and their reconstructions."""
    if case.shown is None or not len(case.shown):
        return []
    figures = []
    for attack in attacks:
        rows = [{"label": "the images", "images": to_pictures(case.shown)}]
        for row in case.rows:
            result = row.by_attack.get(attack.name)
            if result is not None and result.images is not None:
                rows.append(
                    {
                        "label": f"{row.combination} (SSIM {row.value(attack.name, LEAK):.2f})",
                        "images": to_pictures(result.images),
                    }
                )
        if len(rows) > 1:
            figures.append(
                Figure(
                    f"{case.name}: what {attack.title} sees",
                    "images",
                    {"columns": [], "rows": rows},
                    "The first images of the test.",
                )
            )
    return figures


def to_pictures(images: torch.Tensor) -> list[Any]:
    """Return images as nested lists for a figure, at most `MAX_SIDE` pixels wide."""
    if images.shape[-1] > MAX_SIDE:
        images = torch.nn.functional.interpolate(images, (MAX_SIDE, MAX_SIDE), mode="area")
    return [
        [
            [round(float(v), 2) for v in line] if images.shape[1] == 1 else line.tolist()
            for line in image
        ]
        for image in _channels_last(images)
    ]


def _channels_last(images: torch.Tensor) -> Any:
    return (
        images[:, 0] if images.shape[1] == 1 else (images.permute(0, 2, 3, 1) * 100).round() / 100
    )


def build_verdict(case: Case[Row], attacks: Sequence[Attack]) -> list[str]:
    """Return the conclusions of a case, one sentence each."""
    undefended, floor = case.row(NONE), case.floor(LEAK)
    ceiling = best_attack(undefended, attacks)[1]

    def share(value: float) -> float:
        return max(0.0, (value - floor) / max(ceiling - floor, 1e-9))

    leaking = [row for row in case.rows if identification_rate(row, attacks) >= REIDENTIFIED]
    sentences = [
        (
            f"{case.name}: the server has the images under {len(leaking)} of {len(case.rows)} "
            "combinations."
        )
    ]
    sentences.append(
        f"Without a defence its best attack comes to an SSIM of {ceiling:.2f} (the mean image: "
        f"{floor:.2f}) and re-identifies {identification_rate(undefended, attacks):.0%} "
        "of the images."
    )
    for row in case.rows:
        base = without_rows(row.combination)
        if base is None or base not in {r.combination for r in case.rows}:
            continue
        before = case.row(base)
        (_, value_before), (name, value) = best_attack(before, attacks), best_attack(row, attacks)
        subject = "Shuffled rows" if base == NONE else f"Shuffled rows on top of {base}"
        sentence = (
            f"{subject}: against the best attack SSIM goes from {value_before:.2f} to {value:.2f} "
            f"({_attack_title(name, attacks)})"
        )
        if "decoder" in row.by_attack and "decoder" in before.by_attack:
            by_decoder = [r.value("decoder", LEAK) or 0.0 for r in (before, row)]
            sentence += (
                f"; against the paper's decoder alone from {by_decoder[0]:.2f} to "
                f"{by_decoder[1]:.2f}"
            )
        sentences.append(sentence + ".")
    defended = [row for row in case.rows if row.combination != NONE]
    if defended:
        safest = min(defended, key=lambda r: best_attack(r, attacks)[1])
        sentences.append(
            f"The least leaks under {safest.combination}: the best attack goes "
            f"{share(best_attack(safest, attacks)[1]):.0%} of the way from the mean image to "
            f"the undefended reconstruction, at an accuracy of {safest.accuracy:.3f} (undefended: "
            f"{undefended.accuracy:.3f}, a guess: {undefended.chance:.3f})."
        )
    label_shares = [row.labels for row in case.rows if row.labels is not None]
    if label_shares:
        share_text = (
            f"{min(label_shares):.0%}"
            if round(min(label_shares), 2) == round(max(label_shares), 2)
            else f"{min(label_shares):.0%} to {max(label_shares):.0%}"
        )
        sentences.append(
            f"Labels are not sent, but the gradients reveal {share_text} of them (a guess: "
            f"{undefended.chance:.0%})."
        )
    return sentences


def without_rows(combination: str) -> str | None:
    """Return a combination without its row permutation; None if it has none."""
    parts = split_combination(combination)
    others = [p for p in parts if p.partition("=")[0] != "rows"]
    return None if len(others) == len(parts) else "+".join(others) or NONE


def _attack_title(name: str, attacks: Sequence[Attack]) -> str:
    return next(a.title for a in attacks if a.name == name)
