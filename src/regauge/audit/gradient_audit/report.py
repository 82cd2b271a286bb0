"""The report of the image audit: findings, tables, gallery, curves, and a verdict.

Leakage is measured by PSNR in dB: of the mean image (floor), of the attack under this combination
(value), and of the same attack without a defence (ceiling).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from regauge.audit.engine import CAVEAT, Attack, titles_of
from regauge.audit.gradient_audit.scores import LEAK, METRICS, Row, average
from regauge.audit.scores import (
    MEAN_IMAGE,
    OTHERS,
    Case,
    mean_score,
    metric_cells,
    metric_columns,
    worst_score,
)
from regauge.audit.split_audit.report import to_pictures
from regauge.defences.parser import NONE
from regauge.results.findings import Figure, Finding, Results, Table

NEGLIGIBLE_DB, CLEAR_DB = 0.5, 3.0  # dB above the mean image: up to chance; clearly more
GUESS_AUC, CERTAIN_AUC = 0.55, 0.9  # AUC of membership: as good as a guess; certain
RECOGNISABLE_DB = 20.0  # dB from which a picture is recognised
LEVELS = ("hidden", "in part", "given away")
ADVICE = (
    "The best defence without a loss of accuracy in our experiments: sums over at least 128 "
    "images and no single update (secure aggregation, clients=128), with freeze=embedding,first. "
    "Sending biases and gains alone (freeze=matrices) or private hides more, and costs accuracy."
)


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
    tables = tuple(
        t
        for case in cases
        for t in (build_overview(case), build_table(case, attacks), build_details(case, attacks))
    )
    figures = tuple(f for case in cases for f in (*gallery_figures(case), *curve_figures(case)))
    verdict = [*(line for case in cases for line in build_verdict(case, attacks)), CAVEAT]
    reasons = [
        f"{row.combination}, {name}: {text}"
        for case in cases
        for row in case.rows
        for name, text in row.reasons.items()
        if name != "mask"
    ]
    return Results(title, findings, tables, figures, {"verdict": verdict}, (*unchecked, *reasons))


def build_findings(case: Case[Row], attacks: Sequence[Attack]) -> list[Finding]:
    """Return one finding for each combination and attack on images, and for patch membership."""
    undefended, findings = case.row(NONE), []
    titles = titles_of(attacks)
    for row in case.rows:
        for name, result in row.images.items():
            values = result.scores[LEAK]
            ceiling = (
                undefended.images[name].value(LEAK)
                if name in undefended.images
                else undefended.best()[1]
            )
            sentence = (
                f"of one image at most {max(values):.1f} dB; SSIM {result.value('SSIM'):.2f}; "
                f"{result.seconds:.1f} s for an update"
            )
            statement = f'Under "{row.combination}", {titles[name]} gives this much of the images.'
            spread = statistics.stdev(values) if len(values) > 1 else None
            findings.append(
                Finding(
                    f"{case.name}/{row.combination}/{name}",
                    statement,
                    None,
                    result.value(LEAK),
                    _baseline(case, row),
                    ceiling,
                    sentence,
                    measure="PSNR",
                    spread=spread,
                    trials=len(values),
                )
            )
        if row.patches:
            statement = (
                f'Under "{row.combination}", updates reveal whether a patch was in the batch.'
            )
            patches_sentence = f"of one update at most {max(row.patches):.3f}"
            findings.append(
                Finding(
                    f"{case.name}/{row.combination}/patches",
                    statement,
                    None,
                    average(row.patches),
                    0.5,
                    1.0,
                    patches_sentence,
                    measure="AUC",
                    trials=len(row.patches),
                )
            )
    return findings


def build_overview(case: Case[Row]) -> Table:
    """Return the first table: what each combination hides, in words."""
    has_labels = any(row.labels for row in case.rows)
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        best, baseline, membership = row.best()[1], _baseline(case, row), average(row.patches)
        images = (
            "not tried"
            if best is None
            else LEVELS[0]
            if best <= baseline + NEGLIGIBLE_DB
            else LEVELS[1]
            if best < max(RECOGNISABLE_DB, baseline + CLEAR_DB)
            else LEVELS[2]
        )
        patches = (
            "not tried"
            if membership is None
            else LEVELS[0]
            if membership <= GUESS_AUC
            else "unclear"
            if may_be_chance(row)
            else LEVELS[2 if membership >= CERTAIN_AUC else 1]
        )
        label_share = average(row.labels)
        labels = "not tried" if label_share is None else f"{label_share:.0%} revealed"
        rows.append(
            (row.combination, images, patches, *([labels] if has_labels else []), row.samples)
        )
    columns = (
        "defences",
        "images",
        "patches",
        *(["labels"] if has_labels else []),
        "images in an update",
    )
    note = (
        f"Images: hidden is within {NEGLIGIBLE_DB} dB of the mean image, given away "
        f"{RECOGNISABLE_DB:.0f} dB and more, where a picture is recognised. Patches: whether "
    )
    note += (
        f"one was in the batch; hidden is an AUC of at most {GUESS_AUC}, given away of "
        f"{CERTAIN_AUC} and more, unclear if "
    )
    note += "so few updates may reach it by chance. By the best attack that was tried."
    return Table(f"Which defence hides what: {case.name}", columns, tuple(rows), note)


def build_table(case: Case[Row], attacks: Sequence[Attack]) -> Table:
    """Return the main table: PSNR of each attack, patch membership, mask and labels."""
    used = [
        a for a in attacks if a.kind == "images" and any(a.name in row.images for row in case.rows)
    ]
    shown = {
        field: any(getattr(row, field) for row in case.rows)
        for field in ("patches", "mask", "labels")
    }
    has_epsilon, has_accuracy = (
        any(row.epsilon is not None for row in case.rows),
        any(row.accuracy is not None for row in case.rows),
    )
    columns = [
        "defences",
        *(["accuracy"] if has_accuracy else []),
        "images",
        "best PSNR",
        "worst",
        "SSIM",
        "re-identified",
        *(a.title for a in used),
    ]
    columns += [
        name
        for field, name in (("patches", "patches (AUC)"), ("mask", "mask"), ("labels", "labels"))
        if shown[field]
    ]
    columns += ["epsilon"] if has_epsilon else []
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        name, best = row.best()
        result = row.images.get(name)
        is_read = result is not None and (result.value(LEAK, read=True) or 0) > (
            result.value(LEAK) or 0
        )
        scores = None if result is None else result.read if is_read else result.scores
        values: list[Any] = [
            row.combination,
            *([row.accuracy] if has_accuracy else []),
            row.samples,
            best,
            None if scores is None else worst_score(scores, LEAK),
        ]
        values += [
            None if scores is None else mean_score(scores, m) for m in ("SSIM", "identified")
        ]
        values += [row.images[a.name].value(LEAK) if a.name in row.images else None for a in used]
        values += [average(getattr(row, field)) for field in shown if shown[field]]
        rows.append(
            tuple(
                round(v, 3) if isinstance(v, float) else v
                for v in [*values, *([row.epsilon] if has_epsilon else [])]
            )
        )
    baseline: list[Any] = [
        "floor: the mean image",
        *([None] if has_accuracy else []),
        None,
        case.floor(LEAK),
        worst_score(case.floors[MEAN_IMAGE], LEAK),
    ]
    others = case.floors.get(OTHERS, case.floors[MEAN_IMAGE])
    baseline += [
        mean_score(case.floors[MEAN_IMAGE], "SSIM"),
        mean_score(others, "identified"),
        *(case.floor(LEAK) for _ in used),
    ]
    baseline += [{"patches": 0.5}.get(field) for field in shown if shown[field]] + (
        [None] if has_epsilon else []
    )
    rows.append(tuple(round(v, 3) if isinstance(v, float) else v for v in baseline))
    note = (
        "PSNR in dB, of pixels in 0..1, mean over the images; worst is of the image that "
        "leaked most. Best PSNR, worst, SSIM and re-identification are "
    )
    note += (
        "against the original images or the puzzled ones, whichever are nearer; the column of "
        "each attack is against the original "
    )
    note += (
        "images. Images: the number of images in an update. An empty field: the attack does not "
        "apply."
    )
    if OTHERS in case.floors:
        note += (
            " The images of an update have no order: the best assignment counts, and the floor "
            "of re-identification is that of other images."
        )
    return Table(f"What updates give away: {case.name}", tuple(columns), tuple(rows), note)


def build_details(case: Case[Row], attacks: Sequence[Attack]) -> Table:
    """Return every metric, against the originals and against the model's inputs."""
    metrics = metric_columns(case.floors, METRICS)
    about = ("rank", "unknowns", "condition")
    columns = (
        "defences",
        "attack",
        "against",
        *metrics,
        "rank",
        "of",
        "condition",
        "seconds",
    )
    rows: list[tuple[Any, ...]] = []
    titles = titles_of(attacks)
    for row in case.rows:
        for name, result in row.images.items():
            sides = [("the original", result.scores)] + (
                [] if result.read is None else [("what was read", result.read)]
            )
            facts = result.facts[0] if result.facts else {}
            end = [*(facts.get(key) for key in about), round(result.seconds, 2)]
            for against, scores in sides:
                cells = metric_cells(scores, metrics)
                rows.append((row.combination, titles[name], against, *cells, *end))
    floor = metric_cells(case.floors[MEAN_IMAGE], metrics)
    rows.append(("floor", "the mean image", "the original", *floor, None, None, None, None))
    note = (
        "FFT2D is 1 less the cosine of the Fourier transforms, which equals that of the "
        "pixels (Parseval). Rank, of as many unknown patches, and "
    )
    note += "condition number of the least squares, of the first update."
    return Table(f"Every metric: {case.name}", columns, tuple(rows), note)


def gallery_figures(case: Case[Row]) -> list[Figure]:
    """Return the images and the best reconstructions under each combination."""
    if case.shown is None or not len(case.shown):
        return []
    rows = [{"label": "the images", "images": to_pictures(case.shown)}]
    for row in case.rows:
        name, best = row.best()
        result = row.images.get(name)
        if row.read is not None:
            rows.append(
                {
                    "label": f"{row.combination}: what the model read",
                    "images": to_pictures(row.read),
                }
            )
        if result is not None and result.images is not None:
            rows.append(
                {
                    "label": f"{row.combination}: {best:.0f} dB ({name})",
                    "images": to_pictures(result.images),
                }
            )
    caption = (
        f"The best attack under each combination. The mean image has {case.floor(LEAK):.1f} "
        "dB; from about 20 dB on, a picture is recognised."
    )
    return [
        Figure(
            f"{case.name}: what the server sees", "images", {"columns": [], "rows": rows}, caption
        )
    ]


def curve_figures(case: Case[Row]) -> list[Figure]:
    """Return leakage against batch size and against training."""
    figures = []
    if case.batches:
        sizes = sorted(case.batches)
        y: dict[str, Any] = {
            "the best attack": [case.batches[b].best()[1] for b in sizes],
            "the mean image": [case.floor(LEAK)] * len(sizes),
        }
        data = {"x": sizes, "y": y, "xlabel": "images in an update", "ylabel": "PSNR"}
        figures.append(
            Figure(
                f"{case.name}: leakage against batch size",
                "lines",
                data,
                "Without a defence. In the mean over the images of all updates.",
            )
        )
        recovered = {
            name: [average(getattr(case.batches[b], field)) for b in sizes]
            for field, name in (("patches", "patches, AUC"), ("labels", "labels, share"))
        }
        recovered = {
            name: values for name, values in recovered.items() if all(v is not None for v in values)
        }
        if recovered:
            figures.append(
                Figure(
                    f"{case.name}: patches and labels against batch size",
                    "lines",
                    {**data, "y": recovered, "ylabel": "AUC, share"},
                )
            )
    if case.stages:
        names = list(case.stages)
        by_combination = {row.combination: [row.best()[1]] for row in case.rows}
        for rows in case.stages.values():
            for row in rows:
                by_combination[row.combination].append(row.best()[1])
        lines = {
            c: [None if v is None else v for v in values]
            for c, values in by_combination.items()
            if any(v is not None for v in values)
        }
        caption = f"0 is the given model; then: {', '.join(names)}."
        data = {
            "x": list(range(len(names) + 1)),
            "y": lines,
            "xlabel": "stage of training",
            "ylabel": "PSNR of the best attack",
        }
        figures.append(Figure(f"{case.name}: leakage against training", "lines", data, caption))
    return figures


def build_verdict(case: Case[Row], attacks: Sequence[Attack]) -> list[str]:
    """Return the conclusions of a case, one sentence each."""
    undefended, floor = case.row(NONE), case.floor(LEAK)
    name, ceiling = undefended.best()
    sentences = []
    if ceiling is None:
        sentences.append(f"{case.name}: no attack on images applies to an undefended update.")
    elif ceiling > floor + CLEAR_DB:
        sentences.append(
            f"{case.name}: an undefended update reveals its images to {ceiling:.0f} dB "
            f"({_attack_title(name, attacks)}; the mean image has {floor:.0f})."
        )
    else:
        sentences.append(
            f"{case.name}: of an undefended update (images: {undefended.samples}) the best attack "
            f"gets {ceiling:.1f} dB; the mean image has {floor:.1f}."
        )
    hidden = [
        row for row in case.rows if row.combination != NONE and is_hidden(row, _baseline(case, row))
    ]
    attacked = [row for row in case.rows if row.combination != NONE and row.images]
    images_only = [
        row
        for row in attacked
        if row not in hidden and (row.best()[1] or 0) <= _baseline(case, row) + NEGLIGIBLE_DB
    ]
    useless = [
        row
        for row in case.rows
        if row.combination != NONE
        and ceiling is not None
        and ceiling > floor + NEGLIGIBLE_DB
        and (row.best()[1] or 0) >= ceiling - 1
    ]
    if useless:
        sentences.append(
            f"Buys nothing against images: {', '.join(r.combination for r in useless)}."
        )
    for row in case.rows:
        if (
            row.combination != NONE
            and row not in useless
            and (row.best()[1] or 0) > _baseline(case, row) + NEGLIGIBLE_DB
        ):
            gained = (row.best()[1] or 0) - _baseline(case, row)
            sentences.append(
                f"{row.combination}: leaves {row.best()[1]:.1f} dB "
                f"({_attack_title(row.best()[0], attacks)}), {gained:.1f} above the mean image."
            )
    if images_only:
        remaining = ", ".join(
            f"{r.combination} (AUC "
            f"{average(r.patches) or 0.5:.2f}{', maybe by chance' if may_be_chance(r) else ''})"
            for r in images_only
        )
        sentences.append(f"Images are at the floor, patches are still revealed: {remaining}.")
    if hidden:
        sentences.append(
            f"Within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of the floor: "
            f"{', '.join(r.combination for r in hidden)}."
        )
    elif len(case.rows) > 1:
        sentences.append(
            f"No combination that was tried is within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of "
            f"the floor. {ADVICE}"
        )
    untried = [row for row in case.rows if not row.images and row.combination != NONE]
    if untried:
        names = ", ".join(
            r.combination + (f" (patches: AUC {average(r.patches):.2f})" if r.patches else "")
            for r in untried
        )
        sentences.append(
            f"None of the selected attacks on images applies: {names}. A descent might "
            "(--attacks inverting)."
        )
    leaked = [r for r in case.rows if r.mask]
    if leaked:
        sentences.append(
            "The update reveals MJP's mask: "
            f"{', '.join(f'{r.combination} {average(r.mask):.0%}' for r in leaked)}."
        )
    labelled = [r for r in case.rows if r.labels]
    if labelled:
        shares = [average(r.labels) or 0.0 for r in labelled]
        share_text = (
            f"{min(shares):.0%}"
            if round(min(shares), 2) == round(max(shares), 2)
            else f"{min(shares):.0%} to {max(shares):.0%}"
        )
        sentences.append(f"The gradient of the head reveals {share_text} of the labels.")
    for row in case.rows:
        if row.epsilon is not None:
            sentences.append(
                f"{row.combination}: epsilon {row.epsilon:.2f} for one update, at delta 1e-5; "
                "every further update of the same sample adds to it."
            )
    return sentences


def _baseline(case: Case[Row], row: Row) -> float:
    """Return the score of the mean image on the images of a row."""
    return case.floor(LEAK) if row.floor is None else row.floor


def may_be_chance(row: Row) -> bool:
    """Return whether the 95 % interval of the AUC over updates contains a guess."""
    from scipy.stats import t

    count = len(row.patches)
    if count < 2:
        return statistics.fmean(row.patches or [0.5]) < CERTAIN_AUC
    margin = float(t.ppf(0.975, count - 1)) * statistics.stdev(row.patches) / count**0.5
    return bool(statistics.fmean(row.patches) - margin <= 0.5)


def is_hidden(row: Row, floor: float) -> bool:
    """Return whether every attack is as good as a guess."""
    return (
        bool(row.images)
        and (row.best()[1] or 0.0) <= floor + NEGLIGIBLE_DB
        and (average(row.patches) or 0.5) <= GUESS_AUC
    )


def _attack_title(name: str, attacks: Sequence[Attack]) -> str:
    return next((a.title for a in attacks if a.name == name), name)
