"""The report of audits of gradients: findings, tables, gallery, curves, and a verdict.

Leakage of images is measured by PSNR in dB: of the mean image (floor), of the attack under this
combination (value), and of the same attack without a defence (ceiling). Leakage of texts is
measured by ROUGE-L.
"""

from __future__ import annotations

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
    gallery,
    line_figure,
    round_rows,
)
from regauge.audit.verdicts import (
    WORDS,
    Level,
    Quantity,
    Verdict,
    with_verdicts,
    write_verdicts,
)
from regauge.defences.parser import NONE
from regauge.results.findings import Figure, Finding, Results, Table

LEAK = "PSNR"
TITLE = "What updates reveal"
IMAGES = Quantity("images", "PSNR", 0.5, 20.0, "dB", "updates", 1)
TEXTS = Quantity("texts", "ROUGE-L", 0.05, 0.5, units="updates")
SHARES = {  # what else is recovered; of texts, the distinct words
    "patches": Quantity("patches of the batch", "AUC", 0.05, 0.9, units="updates"),
    "mask": Quantity("masked positions", "", 0.05, 0.9, "%", "positions"),
    "labels": Quantity("labels", "", 0.05, 0.9, "%", "labels"),
    "texts": Quantity("words", "F1", 0.05, 0.9, units="updates"),
}
ADVICE = (
    "The best defence without a loss of accuracy in our experiments: sums over at least 128 "
    "images and no single update (secure aggregation, clients=128), with freeze=embedding,first. "
    "Sending biases and gains alone (freeze=matrices) or private hides more, and costs accuracy."
)


def build_results(case: Case, attacks: Sequence[Attack], unchecked: Sequence[str]) -> Results:
    """Return the results of a case of images.

    Args:
        case: The measurements.
        attacks: The attacks of the report.
        unchecked: What was not tried, and why.
    """
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
    reasons = [text for text in _reasons(case) if ", mask: " not in text]
    results = Results(
        TITLE,
        tuple(image_findings(case, attacks)),
        (
            build_overview(case),
            build_table(case, attacks),
            build_details(case, attacks, columns, note),
        ),
        (*gallery_figures(case), *curve_figures(case)),
        unchecked=(*unchecked, *reasons),
    )
    return with_verdicts(results, [*build_verdict(case, attacks), Verdict(CAVEAT)])


def build_text_results(case: Case, attacks: Sequence[Attack]) -> Results:
    """Return the results of a case of texts."""
    table = build_text_table(
        case,
        attacks,
        {"texts": lambda row: row.samples},
        {"labels": lambda row: row.share("labels")},
        ("baseline: another text", None),
        f"Texts: {case.name}",
        "Texts: the number of texts in an update. Words by zero rows gives a bag: its order is the "
        "vocabulary's.",
    )

    def describe(row: Row, result: AttackScores) -> str:
        return f"{result.value('exact'):.0%} of the texts exactly"

    findings = tuple(build_findings(case, attacks, TEXTS, describe))
    results = Results(TITLE, findings, (table,), unchecked=tuple(_reasons(case)))
    return with_verdicts(results, [*build_verdict(case, attacks), Verdict(CAVEAT)])


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
        aucs, evidence = row.shares.get("patches", ()), row.evidence("patches")
        if evidence is None:
            return []
        return [
            Finding(
                f"{case.name}/{row.combination}/patches",
                f'Under "{row.combination}", updates do not reveal if a patch was in the batch.',
                None,
                row.share("patches"),
                evidence.guess,
                1.0,
                f"of one update at most {max(aucs):.3f}",
                measure="AUC",
                trials=len(aucs),
                interval=evidence.interval,
                beats_floor=SHARES["patches"].beats_guess(evidence),
            )
        ]

    return build_findings(case, attacks, IMAGES, describe, patches)


def build_overview(case: Case) -> Table:
    """Return the first table: what each combination hides, in words."""
    has_labels = case.has("labels")
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        membership, quantity = row.evidence("patches"), SHARES["patches"]
        images = level(case, row)
        patches = membership and quantity.level(membership)
        cells = [WORDS[name] if name else "not tried" for name in (images, patches)]
        if has_labels:
            share = row.share("labels")
            cells.append("not tried" if share is None else f"{share:.0%}")
        rows.append((row.combination, *cells, row.samples))
    labels = ("labels revealed",) if has_labels else ()
    columns = ("defences", "images", "patches", *labels, "images in an update")
    note = (
        f"By the best attack that was tried. Images: revealed from {IMAGES.certain:.0f} dB on, "
        f"where a picture is recognized; not revealed within {IMAGES.margin} dB of the mean image. "
        f"Patches: whether one was in the batch; revealed from an AUC of "
        f"{SHARES['patches'].certain} on, not revealed up to {0.5 + SHARES['patches'].margin}. "
        "Inconclusive: too few updates to distinguish the attack from a guess at 99 % confidence."
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
            "baseline: the mean image",
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
            " The images of an update have no order: the best assignment counts, and the "
            "baseline of re-identification is that of other images."
        )
    return Table(f"{TITLE}: {case.name}", columns, round_rows(rows), note)


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
        f"dB; from about {IMAGES.certain:.0f} dB on, a picture is recognized."
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
        figures.append(line_figure(title, sizes, y, xlabel, "PSNR, dB", caption))
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
                "PSNR of the best attack, dB",
                f"0 is the given model; then: {', '.join(case.stages)}.",
            )
        )
    return figures


def build_verdict(case: Case, attacks: Sequence[Attack]) -> list[Verdict]:
    """Return the conclusions of a case, of images or of texts."""
    titles, is_text = titles_of(attacks), case.subject == "texts"
    found = [(name, e, titles[attack]) for name, e, attack in case.best_evidence()]
    verdicts = write_verdicts(TEXTS if is_text else IMAGES, found)
    for kind, quantity in SHARES.items():
        verdicts += write_verdicts(quantity, case.share_evidence(kind))
    defended = [row for row in case.rows if row.combination != NONE]
    untried = [row.combination for row in case.rows if not row.by_attack]
    if untried:
        descent = "tag" if is_text else "inverting"
        verdicts.append(
            Verdict(
                f"No verdict on {case.subject} under {', '.join(untried)}: none of the selected "
                f"attacks applies. A descent might (--attacks {descent}).",
                "unclear",
            )
        )
    is_hidden = any(level(case, row) == "none" for row in defended)
    if defended and not is_hidden and not is_text:
        verdicts.append(Verdict(f"No combination that was tried hides the images. {ADVICE}"))
    verdicts += [
        Verdict(
            f"{row.combination}: epsilon {row.epsilon:.2f} for one update, at delta 1e-5; every "
            "further update of the same sample adds to it."
        )
        for row in case.rows
        if row.epsilon is not None
    ]
    return verdicts


def level(case: Case, row: Row) -> Level | None:
    """Return the level of the best attack on images; None if none was tried."""
    name, _ = row.best(case.metric)
    evidence = case.evidence(row, name, inputs=True) if name else None
    return None if evidence is None else IMAGES.level(evidence)
