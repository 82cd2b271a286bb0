"""The report of audits of gradients: findings, tables, gallery, curves, and a verdict.

Leakage of images is measured by PSNR in dB: of the mean image (floor), of the attack under this
combination (value), and of the same attack without a defence (ceiling). Leakage of texts is
measured by ROUGE-L.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from regauge.audit.engine import CAVEAT, Attack, titles_of
from regauge.audit.scores import (
    MEAN_IMAGE,
    OTHERS,
    AttackScores,
    Case,
    Row,
    mean_score,
    worst_score,
)
from regauge.audit.tables import (
    build_details,
    build_findings,
    build_text_table,
    format_range,
    gallery,
    line_figure,
    round_rows,
)
from regauge.defences.parser import NONE
from regauge.results.findings import Figure, Finding, Results, Table

LEAK = "PSNR"
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
    note = (
        "FFT2D is 1 less the cosine of the Fourier transforms, which equals that of the pixels "
        "(Parseval). Rank, of as many unknown patches, and condition number of the least squares, "
        "of the first update."
    )
    system = {
        column: lambda r, key=key: r.facts[0].get(key) if r.facts else None
        for column, key in (("rank", "rank"), ("of", "unknowns"), ("condition", "condition"))
    }
    columns = {**system, "seconds": lambda r: round(r.seconds, 2)}
    tables = tuple(
        t
        for case in cases
        for t in (
            build_overview(case),
            build_table(case, attacks),
            build_details(case, attacks, columns, note),
        )
    )
    figures = tuple(f for case in cases for f in (*gallery_figures(case), *curve_figures(case)))
    verdict = [*(line for case in cases for line in build_verdict(case, attacks)), CAVEAT]
    reasons = [text for case in cases for text in _reasons(case) if ", mask: " not in text]
    return Results(title, findings, tables, figures, {"verdict": verdict}, (*unchecked, *reasons))


def build_text_results(case: Case, attacks: Sequence[Attack]) -> Results:
    """Return the results of a case of texts."""
    titles, leak = titles_of(attacks), case.metric
    table = build_text_table(
        case,
        attacks,
        {"texts": lambda row: row.samples},
        {"labels": lambda row: row.share("labels")},
        ("floor: another text", None),
        f"Texts: {case.name}",
        "Texts: the number of texts in an update. Words by zero rows gives a bag: its order is the "
        "vocabulary's.",
    )

    def describe(row: Row, result: AttackScores) -> str:
        return f"{result.value('exact'):.0%} of the texts exactly"

    verdict = []
    for row in case.rows:
        name, best = row.best(leak)
        if best is not None:
            verdict.append(
                f"{row.combination}: {leak} {best:.2f} by {titles[name]} (another text: "
                f"{case.floor(leak):.2f}), {row.value(name, 'exact'):.0%} of the texts exactly; "
                f"{row.best('words')[1]:.0%} of the words."
            )
    return Results(
        "What updates give away",
        tuple(build_findings(case, attacks, describe)),
        (table,),
        facts={"verdict": [*verdict, *label_verdict(case), CAVEAT]},
        unchecked=tuple(_reasons(case)),
    )


def _reasons(case: Case) -> list[str]:
    return [f"{r.combination}, {name}: {why}" for r in case.rows for name, why in r.reasons.items()]


def image_findings(case: Case, attacks: Sequence[Attack]) -> list[Finding]:
    """Return one finding for each combination and attack on images, and for patch membership."""

    def describe(row: Row, result: AttackScores) -> str:
        return (
            f"of one image at most {max(result.scores[LEAK]):.1f} dB; SSIM "
            f"{result.value('SSIM'):.2f}; {result.seconds:.1f} s for an update"
        )

    def patches(row: Row) -> list[Finding]:
        aucs = row.shares.get("patches", ())
        if not aucs:
            return []
        return [
            Finding(
                f"{case.name}/{row.combination}/patches",
                f'Under "{row.combination}", updates reveal whether a patch was in the batch.',
                None,
                row.share("patches"),
                0.5,
                1.0,
                f"of one update at most {max(aucs):.3f}",
                measure="AUC",
                trials=len(aucs),
            )
        ]

    return build_findings(case, attacks, describe, patches)


def build_overview(case: Case) -> Table:
    """Return the first table: what each combination hides, in words."""
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        best, baseline = row.best(LEAK)[1], case.floor(LEAK, row)
        membership, labels = row.share("patches"), row.share("labels")
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
        revealed = "not tried" if labels is None else f"{labels:.0%} revealed"
        cells = (row.combination, images, patches, *((revealed,) if case.has("labels") else ()))
        rows.append((*cells, row.samples))
    labels_column = ("labels",) if case.has("labels") else ()
    columns = ("defences", "images", "patches", *labels_column, "images in an update")
    note = (
        f"Images: hidden is within {NEGLIGIBLE_DB} dB of the mean image, given away "
        f"{RECOGNISABLE_DB:.0f} dB and more, where a picture is recognised. Patches: whether "
        f"one was in the batch; hidden is an AUC of at most {GUESS_AUC}, given away of "
        f"{CERTAIN_AUC} and more, unclear if so few updates may reach it by chance. By the best "
        "attack that was tried."
    )
    return Table(f"Which defence hides what: {case.name}", columns, tuple(rows), note)


def build_table(case: Case, attacks: Sequence[Attack]) -> Table:
    """Return the main table: PSNR of each attack, patch membership, mask and labels."""
    used = [a for a in attacks if any(a.name in row.by_attack for row in case.rows)]
    kinds = {"patches": "patches (AUC)", "mask": "mask", "labels": "labels"}
    kinds = {kind: title for kind, title in kinds.items() if case.has(kind)}
    has_epsilon = any(row.epsilon is not None for row in case.rows)
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        name, best = row.best(LEAK)
        scores = row.by_attack[name].nearer(LEAK) if name else {}
        rows.append(
            (
                row.combination,
                row.samples,
                best,
                worst_score(scores, LEAK),
                *(mean_score(scores, m) for m in ("SSIM", "identified")),
                *(row.value(a.name, LEAK) for a in used),
                *(row.share(kind) for kind in kinds),
                *((row.epsilon,) if has_epsilon else ()),
            )
        )
    mean_image = case.floors[MEAN_IMAGE]
    rows.append(
        (
            "floor: the mean image",
            None,
            case.floor(LEAK),
            worst_score(mean_image, LEAK),
            mean_score(mean_image, "SSIM"),
            mean_score(case.floors.get(OTHERS, mean_image), "identified"),
            *(case.floor(LEAK) for _ in used),
            *(0.5 if kind == "patches" else None for kind in kinds),
            *((None,) if has_epsilon else ()),
        )
    )
    columns = (
        "defences",
        "images",
        "best PSNR",
        "worst",
        "SSIM",
        "re-identified",
        *(a.title for a in used),
        *kinds.values(),
        *(("epsilon",) if has_epsilon else ()),
    )
    note = (
        "PSNR in dB, of pixels in 0..1, mean over the images; worst is of the image that leaked "
        "most. Best PSNR, worst, SSIM and re-identification are against the original images or "
        "the puzzled ones, whichever are nearer; the column of each attack is against the original "
        "images. Images: the number of images in an update. An empty field: the attack does not "
        "apply."
    )
    if OTHERS in case.floors:
        note += (
            " The images of an update have no order: the best assignment counts, and the floor "
            "of re-identification is that of other images."
        )
    return Table(f"What updates give away: {case.name}", columns, round_rows(rows), note)


def gallery_figures(case: Case) -> list[Figure]:
    """Return the images and the best reconstructions under each combination."""
    rows = [("the images", case.shown)]
    for row in case.rows:
        name, best = row.best(LEAK)
        rows.append((f"{row.combination}: the model's input", row.inputs))
        if name:
            images = row.by_attack[name].images
            rows.append((f"{row.combination}: {best:.0f} dB ({name})", images))
    caption = (
        f"The best attack under each combination. The mean image has {case.floor(LEAK):.1f} "
        f"dB; from about {RECOGNISABLE_DB:.0f} dB on, a picture is recognised."
    )
    return gallery(f"{case.name}: what the server recovers", rows, caption)


def curve_figures(case: Case) -> list[Figure]:
    """Return leakage against batch size and against training."""
    figures = []
    if case.batches:
        sizes = sorted(case.batches)
        rows = [case.batches[size] for size in sizes]
        y: dict[str, list[float | None]] = {
            "the best attack": [row.best(LEAK)[1] for row in rows],
            "the mean image": [case.floor(LEAK)] * len(sizes),
        }
        title, xlabel = f"{case.name}: leakage against batch size", "images in an update"
        caption = "Without a defence. In the mean over the images of all updates."
        figures.append(line_figure(title, sizes, y, xlabel, "PSNR", caption))
        recovered = {
            name: values
            for kind, name in (("patches", "patches, AUC"), ("labels", "labels, share"))
            if None not in (values := [row.share(kind) for row in rows])
        }
        if recovered:
            title = f"{case.name}: patches and labels against batch size"
            figures.append(line_figure(title, sizes, recovered, xlabel, "AUC, share"))
    if case.stages:
        stages = [case.rows, *case.stages.values()]
        curves = {
            row.combination: [stage[i].best(LEAK)[1] for stage in stages]
            for i, row in enumerate(case.rows)
        }
        figures.append(
            line_figure(
                f"{case.name}: leakage against training",
                range(len(stages)),
                {c: values for c, values in curves.items() if any(v is not None for v in values)},
                "stage of training",
                "PSNR of the best attack",
                f"0 is the given model; then: {', '.join(case.stages)}.",
            )
        )
    return figures


def build_verdict(case: Case, attacks: Sequence[Attack]) -> list[str]:
    """Return the conclusions of a case of images, one sentence each."""
    undefended, floor, titles = case.rows[0], case.floor(LEAK), titles_of(attacks)
    name, ceiling = undefended.best(LEAK)

    def gain(row: Row) -> float:
        return (row.best(LEAK)[1] or 0.0) - case.floor(LEAK, row)

    sentences = []
    if ceiling is None:
        sentences.append(f"{case.name}: no attack on images applies to an undefended update.")
    elif ceiling > floor + CLEAR_DB:
        sentences.append(
            f"{case.name}: an undefended update reveals its images to {ceiling:.0f} dB "
            f"({titles[name]}; the mean image has {floor:.0f})."
        )
    else:
        sentences.append(
            f"{case.name}: of an undefended update (images: {undefended.samples}) the best attack "
            f"gets {ceiling:.1f} dB; the mean image has {floor:.1f}."
        )
    defended = [row for row in case.rows if row.combination != NONE]
    attacked = [row for row in defended if row.by_attack]
    leaking = [row for row in attacked if gain(row) > NEGLIGIBLE_DB]
    useless = [
        row
        for row in attacked
        if ceiling is not None
        and ceiling > floor + NEGLIGIBLE_DB
        and (row.best(LEAK)[1] or 0) >= ceiling - 1
    ]
    hidden = [
        row for row in attacked if row not in leaking and (row.share("patches") or 0.5) <= GUESS_AUC
    ]
    images_only = [row for row in attacked if row not in leaking and row not in hidden]
    if useless:
        sentences.append(
            f"Buys nothing against images: {', '.join(r.combination for r in useless)}."
        )
    for row in leaking:
        if row not in useless:
            best, value = row.best(LEAK)
            sentences.append(
                f"{row.combination}: leaves {value:.1f} dB ({titles[best]}), {gain(row):.1f} "
                "above the mean image."
            )
    if images_only:
        remaining = ", ".join(
            f"{r.combination} (AUC "
            f"{r.share('patches') or 0.5:.2f}{', maybe by chance' if may_be_chance(r) else ''})"
            for r in images_only
        )
        sentences.append(f"Images are at the floor, patches are still revealed: {remaining}.")
    if hidden:
        sentences.append(
            f"Within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of the floor: "
            f"{', '.join(r.combination for r in hidden)}."
        )
    elif defended:
        sentences.append(
            f"No combination that was tried is within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of "
            f"the floor. {ADVICE}"
        )
    untried = [row for row in defended if not row.by_attack]
    if untried:
        names = ", ".join(
            r.combination
            + (f" (patches: AUC {r.share('patches'):.2f})" if r.shares.get("patches") else "")
            for r in untried
        )
        sentences.append(
            f"None of the selected attacks on images applies: {names}. A descent might "
            "(--attacks inverting)."
        )
    masks = [f"{r.combination} {share:.0%}" for r in case.rows if (share := r.share("mask"))]
    if masks:
        sentences.append(f"The update reveals MJP's mask: {', '.join(masks)}.")
    sentences += label_verdict(case)
    for row in case.rows:
        if row.epsilon is not None:
            sentences.append(
                f"{row.combination}: epsilon {row.epsilon:.2f} for one update, at delta 1e-5; "
                "every further update of the same sample adds to it."
            )
    return sentences


def label_verdict(case: Case) -> list[str]:
    """Return what the gradient of the head reveals of the labels."""
    shares = [share for row in case.rows if (share := row.share("labels")) is not None]
    if not shares:
        return []
    return [f"The gradient of the head reveals {format_range(shares)} of the labels."]


def may_be_chance(row: Row) -> bool:
    """Return whether the 95 % interval of the AUC over updates contains a guess."""
    from scipy.stats import t

    aucs = row.shares.get("patches") or [0.5]
    mean, count = statistics.fmean(aucs), len(aucs)
    if count < 2:
        return mean < CERTAIN_AUC
    margin = float(t.ppf(0.975, count - 1)) * statistics.stdev(aucs) / count**0.5
    return bool(mean - margin <= 0.5)
