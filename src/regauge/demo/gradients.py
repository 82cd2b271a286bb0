"""A chapter on federated training: what one gradient of a ViT gives away of the digit that it was
made of, and what keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.digits import load_images, make_vit
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Finding, Results

UPDATES, PUBLIC = 8, 400
COMBINATIONS = (
    "rows",
    "mjp=0.5,shuffle=false",
    "mjp=0.5",
    "batch=8",
    "private=1.0",
    "freeze=embedding,first",
)
EXACT_PSNR = 40.0  # dB
PRACTICE = 60  # updates that attacks which learn make of their own


def show_gradients(stage: DemoContext) -> Results:
    """What a client of federated training gives away: one gradient is one digit, exactly; what
    hides it and what does not.
    """
    for library, extra in (
        ("transformers", "experiments"),
        ("sklearn", "experiments"),
        ("torchmetrics", "audit"),
        ("dp_accounting", "privacy"),
    ):
        need(library, extra)
    from regauge.audit.gradients import GradientCase, audit_gradients
    from regauge.audit.gradients.attempts import Budget
    from regauge.data.tasks import Examples
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()

    def part(first: int, last: int) -> Examples:
        return Examples(
            last - first,
            10,
            lambda i: ({"pixel_values": images[first:last][i]}, labels[first:last][i]),
        )

    case = GradientCase(
        _make_vit(stage.seed + 60),
        part(0, 200),
        part(200, 200 + PUBLIC),
        [0.5],
        [0.5],
        updates=UPDATES,
        seed=stage.seed,
        name="given",
    )
    with stage.bar("make updates, and attack them") as tick:
        found = audit_gradients(
            case, COMBINATIONS, budget=Budget(practice=PRACTICE, seed=stage.seed), progress=tick
        )
    table = found.tables[0]
    rows = [table.columns]
    rows += [
        tuple(
            ""
            if c is None
            else c
            if isinstance(c, str)
            else f"{c:.2f}"
            if isinstance(c, float)
            else str(c)
            for c in row
        )
        for row in table.rows
    ]
    stage.echo(format_columns(rows, right=tuple(range(1, len(rows[0])))) + "\n")
    stage.echo("\n".join(found.facts["verdict"]))
    return replace(
        found,
        findings=(*_check_claims(found), *found.findings),
        tables=found.tables[:2],
        facts={"what gradients give away": found.facts["verdict"]},
    )


def _make_vit(seed: int) -> Any:
    """The ViT of the other chapters with two layers, wide enough for its patches, as real ones
    are.
    """
    from regauge.models.load import reinitialize

    model = make_vit(seed).float()
    model.config.num_hidden_layers, model.config.hidden_size, model.config.initializer_range = (
        2,
        64,
        0.05,
    )
    return reinitialize(model, seed)


def _check_claims(found: Results) -> tuple[Finding, ...]:
    by: dict[str, Any] = {f.id.removeprefix("given/"): f for f in found.findings}
    plain, floor = by["none/least squares"].value, by["none/least squares"].floor

    def claim(name: str, combination: str, statement: str, holds: bool) -> Finding:
        value = by[f"{combination}/least squares"].value
        return Finding(
            f"given/{name}",
            statement,
            holds,
            value,
            floor,
            plain,
            f"{value:.1f} dB; the mean image has {floor:.1f}",
            measure="PSNR",
        )

    return (
        claim(
            "one",
            "none",
            "One gradient of an unmodified ViT is the image that it was made of, in closed form.",
            plain > EXACT_PSNR,
        ),
        claim(
            "rows",
            "rows",
            "Tokens shuffled after the position embedding change nothing of it.",
            by["rows/least squares"].value > EXACT_PSNR,
        ),
        claim(
            "batch",
            "batch=8",
            "Of eight images at once the closed form gets next to nothing but their mean.",
            by["batch=8/least squares"].value < plain - 10,
        ),
    )
