"""What was measured, told: findings between floor and ceiling, tables, the gallery, leakage against
batch size and training, and a verdict.

Leaked is told as PSNR in dB: of the mean image (floor), of the attack under this combination
(value), of the same attack without a defence (ceiling).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from regauge.audit.gradients.attempts import Attack
from regauge.audit.gradients.scores import LEAK, METRICS, Case, Row, average
from regauge.audit.split.report import to_pictures
from regauge.audit.split.scores import OTHERS, mean_score, worst_score
from regauge.defences.parser import NONE
from regauge.results.findings import Figure, Finding, Results, Table

NEGLIGIBLE_DB, CLEAR_DB = 0.5, 3.0  # dB above the mean image: nothing was learned; something was
GUESS_AUC, CERTAIN_AUC = 0.55, 0.9  # AUC of membership: as good as a guess; told
RECOGNISABLE_DB = 20.0  # dB from which a picture is recognised
LEVELS = ("hidden", "in part", "given away")
ADVICE = (
    "What came nearest at no cost in accuracy where we measured it: sums over at least 128 "
    "images and no single update (secure aggregation, "
    "clients=128), with freeze=embedding,first. Sending biases and gains alone "
    "(freeze=matrices) or private hides more, and costs accuracy."
)
CAVEAT = "These are the attacks that were tried. What they do not get, a better one may."


def build_results(
    title: str, cases: Sequence[Case], attacks: Sequence[Attack], unchecked: Sequence[str] = ()
) -> Results:
    findings = tuple(f for case in cases for f in build_findings(case, attacks))
    tables = tuple(
        t
        for case in cases
        for t in (build_overview(case), build_table(case, attacks), build_details(case, attacks))
    )
    figures = tuple(f for case in cases for f in (*gallery_figures(case), *curve_figures(case)))
    verdict = [*(line for case in cases for line in build_verdict(case, attacks)), CAVEAT]
    why = [
        f"{row.combination}, {name}: {text}"
        for case in cases
        for row in case.rows
        for name, text in row.reasons.items()
        if name != "mask"
    ]
    return Results(title, findings, tables, figures, {"verdict": verdict}, (*unchecked, *why))


def build_findings(case: Case, attacks: Sequence[Attack]) -> list[Finding]:
    plain, out = case.row(NONE), []
    titles = {a.name: a.title for a in attacks}
    for row in case.rows:
        for name, got in row.images.items():
            values = got.original[LEAK]
            ceiling = plain.images[name].value() if name in plain.images else plain.best()[1]
            told = (
                f"of one image at most {max(values):.1f} dB; SSIM {got.value('SSIM'):.2f}; "
                f"{got.seconds:.1f} s for an update"
            )
            statement = f'Under "{row.combination}", {titles[name]} gives this much of the images.'
            spread = statistics.stdev(values) if len(values) > 1 else None
            out.append(
                Finding(
                    f"{case.name}/{row.combination}/{name}",
                    statement,
                    None,
                    got.value(),
                    _baseline(case, row),
                    ceiling,
                    told,
                    measure="PSNR",
                    spread=spread,
                    trials=len(values),
                )
            )
        if row.patches:
            statement = (
                f'Under "{row.combination}", it can be told whether a patch was in the batch.'
            )
            low = f"of one update at most {max(row.patches):.3f}"
            out.append(
                Finding(
                    f"{case.name}/{row.combination}/patches",
                    statement,
                    None,
                    average(row.patches),
                    0.5,
                    1.0,
                    low,
                    measure="AUC",
                    trials=len(row.patches),
                )
            )
    return out


def build_overview(case: Case) -> Table:
    """The one that is read first: in words, what each combination hides."""
    has_labels = any(row.labels for row in case.rows)
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        best, low, told = row.best()[1], _baseline(case, row), average(row.patches)
        images = (
            "not tried"
            if best is None
            else LEVELS[0]
            if best <= low + NEGLIGIBLE_DB
            else LEVELS[1]
            if best < max(RECOGNISABLE_DB, low + CLEAR_DB)
            else LEVELS[2]
        )
        patches = (
            "not tried"
            if told is None
            else LEVELS[0]
            if told <= GUESS_AUC
            else "unclear"
            if may_be_chance(row)
            else LEVELS[2 if told >= CERTAIN_AUC else 1]
        )
        share = average(row.labels)
        labels = "not tried" if share is None else f"{share:.0%} told"
        rows.append(
            (row.combination, images, patches, *([labels] if has_labels else []), row.samples)
        )
    heads = (
        "defences",
        "images",
        "patches",
        *(["labels"] if has_labels else []),
        "images in an update",
    )
    note = (
        f"Images: hidden is within {NEGLIGIBLE_DB} dB of the mean image, given away "
        f"{RECOGNISABLE_DB:.0f} dB and "
        "more, where a picture is recognised. Patches: whether "
    )
    note += (
        f"one was in the batch; hidden is an AUC of at most {GUESS_AUC}, given away of "
        f"{CERTAIN_AUC} "
        "and more, unclear where "
    )
    note += "so few updates may do so by chance. By the best attack that was tried."
    return Table(f"Which defence hides what: {case.name}", heads, tuple(rows), note)


def build_table(case: Case, attacks: Sequence[Attack]) -> Table:
    """The numbers: the best attack on images, each attack's PSNR, patches told, mask and labels."""
    used = [
        a for a in attacks if a.kind == "images" and any(a.name in row.images for row in case.rows)
    ]
    has = {
        what: any(getattr(row, what) for row in case.rows) for what in ("patches", "mask", "labels")
    }
    private, tested = (
        any(row.epsilon is not None for row in case.rows),
        any(row.accuracy is not None for row in case.rows),
    )
    heads = [
        "defences",
        *(["accuracy"] if tested else []),
        "images",
        "best PSNR",
        "worst",
        "SSIM",
        "told apart",
        *(a.title for a in used),
    ]
    heads += [
        name
        for what, name in (("patches", "patches (AUC)"), ("mask", "mask"), ("labels", "labels"))
        if has[what]
    ]
    heads += ["epsilon"] if private else []
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        name, best = row.best()
        got = row.images.get(name)
        read = got is not None and (got.value(read=True) or 0) > (got.value() or 0)
        scores = None if got is None else got.read if read else got.original
        told: list[Any] = [
            row.combination,
            *([row.accuracy] if tested else []),
            row.samples,
            best,
            None if scores is None else worst_score(scores, LEAK),
        ]
        told += [None if scores is None else mean_score(scores, m) for m in ("SSIM", "identified")]
        told += [row.images[a.name].value() if a.name in row.images else None for a in used]
        told += [average(getattr(row, what)) for what in has if has[what]]
        rows.append(
            tuple(
                round(v, 3) if isinstance(v, float) else v
                for v in [*told, *([row.epsilon] if private else [])]
            )
        )
    free: list[Any] = [
        "floor: the mean image",
        *([None] if tested else []),
        None,
        case.floor(),
        worst_score(case.floors["the mean image"], LEAK),
    ]
    others = case.floors.get(OTHERS, case.floors["the mean image"])
    free += [
        mean_score(case.floors["the mean image"], "SSIM"),
        mean_score(others, "identified"),
        *(case.floor() for _ in used),
    ]
    free += [{"patches": 0.5}.get(what) for what in has if has[what]] + ([None] if private else [])
    rows.append(tuple(round(v, 3) if isinstance(v, float) else v for v in free))
    note = (
        "PSNR in dB, of pixels in 0..1, mean over the images; worst is of the image that "
        "leaked most. Best PSNR, worst, SSIM and told apart are "
    )
    note += (
        "against the images as they were or as a puzzle left them, whichever is nearer; "
        "each attack's own column is against the images as they "
    )
    note += (
        "were. Images: how many one update was made of. An empty field: the attack had "
        "nothing to work with."
    )
    if OTHERS in case.floors:
        note += (
            " Which image of an update is which nobody says: the best naming counts, and "
            "the floor of told apart is that of other images."
        )
    return Table(f"What updates give away: {case.name}", tuple(heads), tuple(rows), note)


def build_details(case: Case, attacks: Sequence[Attack]) -> Table:
    """Every metric, against the original and against what the model read."""
    metrics = [m.name for m in METRICS if m.name in case.floors["the mean image"]]
    heads = (
        "defences",
        "attack",
        "against",
        *metrics,
        *(f"worst {m}" for m in metrics if m != "identified"),
        "rank",
        "of",
        "condition",
        "seconds",
    )
    rows: list[tuple[Any, ...]] = []
    titles = {a.name: a.title for a in attacks}
    for row in case.rows:
        for name, got in row.images.items():
            sides = [("the original", got.original)] + (
                [("what was read", got.read)] if got.read is not got.original else []
            )
            facts = got.facts[0] if got.facts else {}
            for against, scores in sides:
                values = [
                    *(mean_score(scores, m) for m in metrics),
                    *(worst_score(scores, m) for m in metrics if m != "identified"),
                ]
                about = [
                    facts.get("rank"),
                    facts.get("unknowns"),
                    facts.get("condition"),
                    round(got.seconds, 2),
                ]
                rows.append((row.combination, titles[name], against, *values, *about))
    floor = case.floors["the mean image"]
    values = [
        *(mean_score(floor, m) for m in metrics),
        *(worst_score(floor, m) for m in metrics if m != "identified"),
    ]
    rows.append(("floor", "the mean image", "the original", *values, None, None, None, None))
    note = (
        "FFT2D is 1 less the cosine of the Fourier transforms, which equals that of the "
        "pixels (Parseval). Rank, of as many unknown patches, and "
    )
    note += "condition number of the least squares, of the first update."
    return Table(f"Every metric: {case.name}", heads, tuple(rows), note)


def gallery_figures(case: Case) -> list[Figure]:
    """The images, and what the best attack made of them under each combination."""
    if case.shown is None or not len(case.shown):
        return []
    rows = [{"label": "the images", "images": to_pictures(case.shown)}]
    for row in case.rows:
        name, best = row.best()
        got = row.images.get(name)
        if row.read is not None:
            rows.append(
                {
                    "label": f"{row.combination}: what the model read",
                    "images": to_pictures(row.read),
                }
            )
        if got is not None and got.images is not None:
            rows.append(
                {
                    "label": f"{row.combination}: {best:.0f} dB ({name})",
                    "images": to_pictures(got.images),
                }
            )
    caption = (
        f"The best attack under each combination. The mean image has {case.floor():.1f} "
        "dB; from about 20 dB on a picture is recognised."
    )
    return [
        Figure(
            f"{case.name}: what the server sees", "images", {"columns": [], "rows": rows}, caption
        )
    ]


def curve_figures(case: Case) -> list[Figure]:
    out = []
    if case.batches:
        sizes = sorted(case.batches)
        y: dict[str, Any] = {
            "the best attack": [case.batches[b].best()[1] for b in sizes],
            "the mean image": [case.floor()] * len(sizes),
        }
        data = {"x": sizes, "y": y, "xlabel": "images in an update", "ylabel": "PSNR"}
        out.append(
            Figure(
                f"{case.name}: leakage against batch size",
                "lines",
                data,
                "Without a defence. In the mean over the images of all updates.",
            )
        )
        told = {
            name: [average(getattr(case.batches[b], what)) for b in sizes]
            for what, name in (("patches", "patches, AUC"), ("labels", "labels, share"))
        }
        told = {name: values for name, values in told.items() if all(v is not None for v in values)}
        if told:
            out.append(
                Figure(
                    f"{case.name}: patches and labels against batch size",
                    "lines",
                    {**data, "y": told, "ylabel": "AUC, share"},
                )
            )
    if case.stages:
        names = list(case.stages)
        by = {row.combination: [row.best()[1]] for row in case.rows}
        for rows in case.stages.values():
            for row in rows:
                by[row.combination].append(row.best()[1])
        lines = {
            c: [None if v is None else v for v in values]
            for c, values in by.items()
            if any(v is not None for v in values)
        }
        caption = f"0 is the model as it was given; then: {', '.join(names)}."
        data = {
            "x": list(range(len(names) + 1)),
            "y": lines,
            "xlabel": "stage of training",
            "ylabel": "PSNR of the best attack",
        }
        out.append(Figure(f"{case.name}: leakage against training", "lines", data, caption))
    return out


def build_verdict(case: Case, attacks: Sequence[Attack]) -> list[str]:
    """What it comes to, in words."""
    plain, floor = case.row(NONE), case.floor()
    name, top = plain.best()
    out = []
    if top is None:
        out.append(f"{case.name}: no attack on images could try an undefended update.")
    elif top > floor + CLEAR_DB:
        out.append(
            f"{case.name}: an undefended update gives its images to {top:.0f} dB "
            f"({_attack_title(name, attacks)}; the mean image has {floor:.0f})."
        )
    else:
        out.append(
            f"{case.name}: of an undefended update (images: {plain.samples}) the best attack "
            f"gets {top:.1f} dB; the mean image has {floor:.1f}."
        )
    hidden = [
        row for row in case.rows if row.combination != NONE and is_hidden(row, _baseline(case, row))
    ]
    tried = [row for row in case.rows if row.combination != NONE and row.images]
    images_only = [
        row
        for row in tried
        if row not in hidden and (row.best()[1] or 0) <= _baseline(case, row) + NEGLIGIBLE_DB
    ]
    useless = [
        row
        for row in case.rows
        if row.combination != NONE
        and top is not None
        and top > floor + NEGLIGIBLE_DB
        and (row.best()[1] or 0) >= top - 1
    ]
    if useless:
        out.append(f"Buys nothing against images: {', '.join(r.combination for r in useless)}.")
    for row in case.rows:
        if (
            row.combination != NONE
            and row not in useless
            and (row.best()[1] or 0) > _baseline(case, row) + NEGLIGIBLE_DB
        ):
            gained = (row.best()[1] or 0) - _baseline(case, row)
            out.append(
                f"{row.combination}: leaves {row.best()[1]:.1f} dB "
                f"({_attack_title(row.best()[0], attacks)}), {gained:.1f} above the mean image."
            )
    if images_only:
        still = ", ".join(
            f"{r.combination} (AUC "
            f"{average(r.patches) or 0.5:.2f}{', maybe by chance' if may_be_chance(r) else ''})"
            for r in images_only
        )
        out.append(f"Images are at the floor, patches can still be told: {still}.")
    if hidden:
        out.append(
            f"Within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of the floor: "
            f"{', '.join(r.combination for r in hidden)}."
        )
    elif len(case.rows) > 1:
        out.append(
            f"No combination that was tried is within {NEGLIGIBLE_DB} dB and AUC {GUESS_AUC} of "
            "the floor. "
            f"{ADVICE}"
        )
    untried = [row for row in case.rows if not row.images and row.combination != NONE]
    if untried:
        told = ", ".join(
            r.combination + (f" (patches: AUC {average(r.patches):.2f})" if r.patches else "")
            for r in untried
        )
        out.append(
            f"No attack on images that was chosen has anything to work with: {told}. A descent "
            "might (--attacks inverting)."
        )
    leaked = [r for r in case.rows if r.mask]
    if leaked:
        out.append(
            "MJP's mask is read off the update: "
            f"{', '.join(f'{r.combination} {average(r.mask):.0%}' for r in leaked)}."
        )
    labels = [r for r in case.rows if r.labels]
    if labels:
        shares = [average(r.labels) or 0.0 for r in labels]
        many = (
            f"{min(shares):.0%}"
            if round(min(shares), 2) == round(max(shares), 2)
            else f"{min(shares):.0%} to {max(shares):.0%}"
        )
        out.append(f"Labels are told by the head's gradient: {many} of them.")
    for row in case.rows:
        if row.epsilon is not None:
            out.append(
                f"{row.combination}: epsilon {row.epsilon:.2f} for one update, at delta 1e-5; "
                "every further update of the same sample adds to it."
            )
    return out


def _baseline(case: Case, row: Row) -> float:
    """What the mean image has of a row's images."""
    return case.floor() if row.floor is None else row.floor


def may_be_chance(row: Row) -> bool:
    """Could an AUC above a guess be one? Where the lower end of its 95 % interval over updates is
    below.
    """
    from scipy.stats import t

    count = len(row.patches)
    if count < 2:
        return statistics.fmean(row.patches or [0.5]) < CERTAIN_AUC
    half = float(t.ppf(0.975, count - 1)) * statistics.stdev(row.patches) / count**0.5
    return bool(statistics.fmean(row.patches) - half <= 0.5)


def is_hidden(row: Row, floor: float) -> bool:
    """Is everything that was tried as good as a guess?"""
    return (
        bool(row.images)
        and (row.best()[1] or 0.0) <= floor + NEGLIGIBLE_DB
        and (average(row.patches) or 0.5) <= GUESS_AUC
    )


def _attack_title(name: str, attacks: Sequence[Attack]) -> str:
    return next((a.title for a in attacks if a.name == name), name)
