"""A chapter on federated learning: how much one gradient of a ViT reveals of its digit, and which
defences hide it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import load_images, make_vit
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
PRACTICE = 60  # training updates of attacks that learn


def show_gradients(context: DemoContext) -> Results:
    """Reconstruct digits from the gradients of a federated client, with and without defences."""
    for library, extra in (
        ("transformers", "experiments"),
        ("sklearn", "experiments"),
        ("torchmetrics", "audit"),
        ("dp_accounting", "privacy"),
    ):
        need(library, extra)
    from regauge.audit.gradient_audit import GradientCase, audit_gradients
    from regauge.audit.gradient_audit.attempts import Budget
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
        _make_vit(context.seed + 60),
        part(0, 200),
        part(200, 200 + PUBLIC),
        [0.5],
        [0.5],
        updates=UPDATES,
        seed=context.seed,
        name="given",
    )
    with context.bar("compute updates, and attack them") as progress:
        audit = audit_gradients(
            case,
            COMBINATIONS,
            budget=Budget(practice=PRACTICE, seed=context.seed),
            progress=progress,
        )
    table = audit.tables[0]
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
    context.echo(format_columns(rows, right=tuple(range(1, len(rows[0])))) + "\n")
    context.echo("\n".join(audit.facts["verdict"]))
    return replace(
        audit,
        findings=(*_check_claims(audit), *audit.findings),
        tables=audit.tables[:2],
        facts={"what gradients give away": audit.facts["verdict"]},
    )


def _make_vit(seed: int) -> Any:
    """Create the ViT of the other chapters with two layers, wide enough for its patches."""
    from regauge.models.load import reinitialize

    model = make_vit(seed).float()
    model.config.num_hidden_layers, model.config.hidden_size, model.config.initializer_range = (
        2,
        64,
        0.05,
    )
    return reinitialize(model, seed)


def _check_claims(audit: Results) -> tuple[Finding, ...]:
    by_id: dict[str, Any] = {f.id.removeprefix("given/"): f for f in audit.findings}
    plain, floor = by_id["none/least squares"].value, by_id["none/least squares"].floor

    def claim(name: str, combination: str, statement: str, holds: bool) -> Finding:
        value = by_id[f"{combination}/least squares"].value
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
            "One gradient of an unmodified ViT reveals its image exactly, in closed form.",
            plain > EXACT_PSNR,
        ),
        claim(
            "rows",
            "rows",
            "Shuffling tokens after the position embedding does not prevent it.",
            by_id["rows/least squares"].value > EXACT_PSNR,
        ),
        claim(
            "batch",
            "batch=8",
            "From a batch of eight images the closed form recovers little beyond their mean.",
            by_id["batch=8/least squares"].value < plain - 10,
        ),
    )
