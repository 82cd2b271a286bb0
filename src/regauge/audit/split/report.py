"""What was measured, told: findings between floor and ceiling, the table, the trade-off, the
gallery, the attackers' own training, and a verdict.

Leaked is told as SSIM: of the mean image (floor), of the attack on this combination (value), of the
same attack without a defence (ceiling).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from regauge.audit.split.attempts import Attack
from regauge.audit.split.scores import METRICS, OTHERS, Case, Row, mean_score, worst_score
from regauge.defences.parser import NONE, split_combination
from regauge.defences.split import DEFENCES
from regauge.results.findings import Figure, Finding, Results, Table

LEAK = "SSIM"
REIDENTIFIED = 0.5  # a server that can tell half of the images from all others has them
CAVEAT = "These are the attacks that were tried. What they do not get, a better one may."
MAX_SIDE = 64  # pixels of an image in the gallery


def build_results(
    title: str, cases: Sequence[Case], attacks: Sequence[Attack], unchecked: Sequence[str] = ()
) -> Results:
    """All of it. Where there are images to show, the gallery is among the figures."""
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
    """The attack that gets most, and what it gets."""
    names = [a.name for a in attacks] if attacks is not None else list(row.by_attack)
    found = {n: row.value(n, LEAK) or 0.0 for n in names if n in row.by_attack}
    name = max(found, key=lambda n: found[n])
    return name, found[name]


def identification_rate(row: Row, attacks: Sequence[Attack]) -> float:
    """The share of images that are told apart: by attacks that say which is which. A best naming
    tells some of any images apart.
    """
    return max(
        (
            mean_score(row.by_attack[a.name].scores, "identified") or 0.0
            for a in attacks
            if a.is_ordered and a.name in row.by_attack
        ),
        default=0.0,
    )


def build_findings(case: Case, attacks: Sequence[Attack]) -> list[Finding]:
    plain, out = case.row(NONE), []
    for row in case.rows:
        for attack in attacks:
            value = row.value(attack.name, LEAK)
            if value is None:
                continue
            got = row.by_attack[attack.name]
            scores = got.scores[LEAK]
            told = (
                f"of one image at most {max(scores):.3f}; "
                f"{_describe_identification(case, attack, mean_score(got.scores, 'identified') or 0.0)}; "
                f"{got.seconds:.0f} s"
            )
            means = got.by_seed(LEAK)
            if len(means) > 1:
                told += f"; spread over {len(means)} seeds"
            out.append(
                Finding(
                    f"{case.name}/{row.combination}/{attack.name}",
                    f'Under "{row.combination}", {attack.title} gives this much of the images.',
                    None,
                    value,
                    case.floor(LEAK),
                    plain.value(attack.name, LEAK)
                    or best_attack(plain)[
                        1
                    ],  # an attack on shuffles has no undefended case of its own
                    told,
                    measure=LEAK,
                    spread=statistics.stdev(means if len(means) > 1 else scores)
                    if len(scores) > 1
                    else None,
                    trials=len(scores),
                )
            )
    return out


def _describe_identification(case: Case, attack: Attack, share: float) -> str:
    if attack.is_ordered:
        return f"{share:.0%} told apart"
    others = mean_score(case.floors[OTHERS], "identified") if OTHERS in case.floors else None
    return f"{share:.0%} told apart by the best naming" + (
        "" if others is None else f", as are {others:.0%} of other images"
    )


def build_table(case: Case, attacks: Sequence[Attack]) -> Table:
    """The one that is read first: accuracy, what is told apart, and SSIM under each attack."""
    used = [a for a in attacks if any(a.name in row.by_attack for row in case.rows)]
    labelled = any(row.labels is not None for row in case.rows)
    heads = (
        "defences",
        "accuracy",
        "best attack",
        "told apart",
        *(("labels",) if labelled else ()),
        *(a.title for a in used),
    )
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        told = (
            row.accuracy,
            best_attack(row, attacks)[1],
            identification_rate(row, attacks),
            *((row.labels,) if labelled else ()),
            *(row.value(a.name, LEAK) for a in used),
        )
        rows.append((row.combination, *(None if v is None else round(v, 3) for v in told)))
    guess = case.rows[0].chance
    free = (
        guess,
        case.floor(LEAK),
        0.0,
        *((guess,) if labelled else ()),
        *(case.floor(LEAK) for _ in used),
    )
    rows.append(("a guess, the mean image", *(None if v is None else round(v, 3) for v in free)))
    mixed = mean_score(case.floors["true patches in a random order"], LEAK)
    note = (
        "Under each attack: the SSIM of its reconstructions, in the mean over the attacked "
        "images; 1 is the image itself, less is better. "
    )
    note += (
        "Told apart: the share of images to which, of all images, their own reconstruction "
        "is nearest, by attacks that say which is which. "
    )
    note += f"The true patches in a random order have an SSIM of {mixed:.3f}."
    if labelled:
        note += (
            " Labels: the share that the server tells from the gradients of the first "
            "steps, if it knows a few."
        )
    return Table(f"Utility and privacy: {case.name}", heads, tuple(rows), note)


class DescribedAttack(Protocol):
    """An attack as it is told."""

    @property
    def title(self) -> str: ...
    @property
    def about(self) -> str: ...


def build_glossary(combinations: Sequence[str], attacks: Sequence[DescribedAttack]) -> Table:
    """What the names in the other tables mean."""
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
        "a+b is both; none is split learning as it is.",
    )


def build_details(case: Case, attacks: Sequence[Attack]) -> Table:
    """Every metric, in the mean and of the image that leaked most, and how the attacker's training
    ended.
    """
    metrics = [m.name for m in METRICS if m.name in case.floors["the mean image"]]
    heads = (
        "defences",
        "attack",
        *metrics,
        *(f"worst {m}" for m in metrics if m != "identified"),
        "epochs",
        "stopped falling",
        "seconds",
    )
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        for attack in attacks:
            got = row.by_attack.get(attack.name)
            if got is not None:
                means = (mean_score(got.scores, m) for m in metrics)
                most = (worst_score(got.scores, m) for m in metrics if m != "identified")
                ended = (len(got.losses), got.has_stopped) if got.losses else (None, None)
                rows.append(
                    (row.combination, attack.title, *means, *most, *ended, round(got.seconds, 1))
                )
    for name, scores in case.floors.items():
        blank = (None, None, None)
        rows.append(
            (
                "floor",
                name,
                *(mean_score(scores, m) for m in metrics),
                *(worst_score(scores, m) for m in metrics if m != "identified"),
                *blank,
            )
        )
    note = (
        "Pixels in 0..1, the span of PSNR and SSIM is 1. F-SIM: the absolute cosine of "
        "AlexNet's last features (weights of LPIPS). "
    )
    return Table(
        f"Every metric: {case.name}",
        heads,
        tuple(rows),
        note + "Worst: of the image that leaked most.",
    )


def series_key(combination: str) -> tuple[str, str]:
    """The curve that a combination is a point of, and the name of the point: ("low-pass, rows",
    "0.1").
    """
    parts = split_combination(combination)
    level = next((p.partition("=")[2] for p in parts if "=" in p and not p.startswith("rows")), "")
    return ", ".join(p.partition("=")[0] for p in parts), level


def tradeoff_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """Accuracy against what leaks: under the paper's decoder, and under the best attack of all."""
    plain = case.row(NONE)
    ways: dict[str, Any] = {"the best of all attacks": lambda row: best_attack(row, attacks)[1]}
    if any("decoder" in row.by_attack for row in case.rows) and len(attacks) > 1:
        ways = {"the paper's decoder alone": lambda row: row.value("decoder", LEAK), **ways}
    out = []
    for title, leaked in ways.items():
        series: dict[str, list[list[Any]]] = {}
        for row in case.rows:
            name, level = series_key(row.combination)
            series.setdefault(name, []).append([leaked(row), row.accuracy, level])
        several = {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}
        data = {
            "series": several,
            "xlabel": "SSIM of the reconstructions: less is more private",
            "ylabel": "accuracy",
        }
        caption = (
            f"Up and to the left is better. The mean image has {case.floor(LEAK):.3f}; "
            f"without a defence it is {leaked(plain):.3f}."
        )
        out.append(Figure(f"{case.name}: accuracy against {title}", "points", data, caption))
    return out


def training_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """The attackers' own training: the loss on pairs that they held out, as a share of the mean
    image's.
    """
    out = []
    for attack in attacks:
        lines = {
            row.combination: row.by_attack[attack.name]
            for row in case.rows
            if attack.name in row.by_attack
        }
        y = {
            name: [round(v / got.floor, 5) for v in got.losses]
            for name, got in lines.items()
            if got.losses and got.floor
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
        falling = [name for name, got in lines.items() if not got.has_stopped]
        caption = "On pairs that the attacker held out. " + (
            f"Still falling when its epochs were over: {', '.join(falling)}."
            if falling
            else "All had stopped falling."
        )
        out.append(Figure(f"{case.name}: how {attack.title} learned", "lines", data, caption))
    return out


def gallery_figures(case: Case, attacks: Sequence[Attack]) -> list[Figure]:
    """For each attack: the images, and what it made of them under each combination."""
    if case.shown is None or not len(case.shown):
        return []
    out = []
    for attack in attacks:
        rows = [{"label": "the images", "images": to_pictures(case.shown)}]
        for row in case.rows:
            got = row.by_attack.get(attack.name)
            if got is not None and got.images is not None:
                rows.append(
                    {
                        "label": f"{row.combination} (SSIM {row.value(attack.name, LEAK):.2f})",
                        "images": to_pictures(got.images),
                    }
                )
        if len(rows) > 1:
            out.append(
                Figure(
                    f"{case.name}: what {attack.title} sees",
                    "images",
                    {"columns": [], "rows": rows},
                    "The first images of the test.",
                )
            )
    return out


def to_pictures(images: torch.Tensor) -> list[Any]:
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


def build_verdict(case: Case, attacks: Sequence[Attack]) -> list[str]:
    """What it comes to, in words."""
    plain, floor = case.row(NONE), case.floor(LEAK) or 0.0
    top = best_attack(plain, attacks)[1]

    def share(value: float) -> float:
        return max(0.0, (value - floor) / max(top - floor, 1e-9))

    having = [row for row in case.rows if identification_rate(row, attacks) >= REIDENTIFIED]
    out = [
        (
            f"{case.name}: the server has the images under {len(having)} of {len(case.rows)} "
            "combinations."
        )
    ]
    out.append(
        f"Without a defence its best attack comes to an SSIM of {top:.2f} (the mean image: "
        f"{floor:.2f}) and tells {identification_rate(plain, attacks):.0%} "
        "of the images apart."
    )
    for row in case.rows:
        base = without_rows(row.combination)
        if base is None or base not in {r.combination for r in case.rows}:
            continue
        before = case.row(base)
        (_, was), (name, now) = best_attack(before, attacks), best_attack(row, attacks)
        where = "Shuffled rows" if base == NONE else f"Shuffled rows on top of {base}"
        said = (
            f"{where}: against the best attack SSIM goes from {was:.2f} to {now:.2f} "
            f"({_attack_title(name, attacks)})"
        )
        if "decoder" in row.by_attack and "decoder" in before.by_attack:
            weak = [r.value("decoder", LEAK) or 0.0 for r in (before, row)]
            said += f"; against the paper's decoder alone from {weak[0]:.2f} to {weak[1]:.2f}"
        out.append(said + ".")
    rest = [row for row in case.rows if row.combination != NONE]
    if rest:
        safe = min(rest, key=lambda r: best_attack(r, attacks)[1])
        out.append(
            f"The least leaks under {safe.combination}: the best attack goes "
            f"{share(best_attack(safe, attacks)[1]):.0%} of the way from the mean image to "
            f"the undefended reconstruction, at an accuracy of {safe.accuracy:.3f} (undefended: "
            f"{plain.accuracy:.3f}, a guess: {plain.chance:.3f})."
        )
    known = [row.labels for row in case.rows if row.labels is not None]
    if known:
        many = (
            f"{min(known):.0%}"
            if round(min(known), 2) == round(max(known), 2)
            else f"{min(known):.0%} to {max(known):.0%}"
        )
        out.append(
            f"Labels are not sent, and the gradients tell them: {many} of them (a guess: "
            f"{plain.chance:.0%})."
        )
    return out


def without_rows(combination: str) -> str | None:
    """The same combination without its row permutation, or None where it has none."""
    parts = split_combination(combination)
    rest = [p for p in parts if p.partition("=")[0] != "rows"]
    return None if len(rest) == len(parts) else "+".join(rest) or NONE


def _attack_title(name: str, attacks: Sequence[Attack]) -> str:
    return next(a.title for a in attacks if a.name == name)
