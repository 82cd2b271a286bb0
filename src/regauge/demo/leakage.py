"""A chapter on the server of split learning: digits that it reconstructs from their features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import BATCH, load_images, make_vit
from regauge.errors import need
from regauge.results.findings import Finding, Results

TRAIN, PUBLIC, EPOCHS, ATTACKED = 900, 500, 6, 40
DECODER_EPOCHS = 25  # the most epochs of the attacker's decoder
COMBINATIONS = ("none", "rows", "noise=1+rows")
ATTACKS = ("decoder", "public embedding", "least squares")
NO_DEFENCE, SHUFFLED, NOISY = COMBINATIONS
MAX_DIFFERENCE = 0.02  # of SSIM, between runs with and without shuffled rows


def show_leakage(context: DemoContext) -> Results:
    """Reconstruct digits from the features that a split server receives, with defences."""
    for library, extra in (
        ("transformers", "experiments"),
        ("sklearn", "experiments"),
        ("torchmetrics", "audit"),
    ):
        need(library, extra)
    from regauge.audit.engine import select_attacks
    from regauge.audit.split_audit import SplitCase, audit_split
    from regauge.audit.split_audit.attempts import ATTACKS as SPLIT_ATTACKS
    from regauge.audit.split_audit.attempts import Budget
    from regauge.data.tasks import Examples
    from regauge.models.summary import format_columns
    from regauge.split import OptimizerConfig
    from regauge.split.client.train import Run

    images, labels = load_images()
    images = images.float()

    def part(first: int, last: int) -> Examples:
        return Examples(
            last - first,
            10,
            lambda i: ({"pixel_values": images[first:last][i]}, labels[first:last][i]),
        )

    steps = EPOCHS * TRAIN // BATCH
    case = SplitCase(
        _make_vit(context.seed + 40),
        part(0, TRAIN),
        part(TRAIN, TRAIN + PUBLIC),
        part(TRAIN + PUBLIC, len(images)),
        [0.5],
        [0.5],
        OptimizerConfig("adamw", 2e-3, schedule="cosine", warmup=steps // 10, steps=steps + 1),
        Run(steps, BATCH, context.seed),
        ATTACKED,
        "watched",
    )
    budget = Budget(hidden=48, depth=1, epochs=DECODER_EPOCHS, patience=4, rate=3e-3, batch=50)
    with context.bar("train split, and attack") as progress:
        audit = audit_split(
            case,
            COMBINATIONS,
            attacks=select_attacks(ATTACKS, SPLIT_ATTACKS),
            budget=budget,
            progress=progress,
        )
    table = audit.tables[0]
    rows = [table.columns]
    rows += [
        tuple("" if c is None else c if isinstance(c, str) else f"{c:.2f}" for c in row)
        for row in table.rows
    ]
    context.echo(format_columns(rows, right=tuple(range(1, len(rows[0])))) + "\n")
    context.echo("\n".join(audit.facts["verdict"]))
    results = replace(
        audit,
        findings=(*_check_claims(audit), *audit.findings),
        facts={"what the server learns": audit.facts["verdict"]},
    )
    return replace(
        results,
        figures=tuple(f for f in audit.figures if f.kind != "lines"),
        tables=audit.tables[:2],
    )


def _make_vit(seed: int) -> Any:
    """Create the ViT of the other chapters with two layers, initialized to train in few epochs."""
    from regauge.models.load import reinitialize

    model = make_vit(seed).float()
    model.config.num_hidden_layers = 2
    model.config.initializer_range = 0.1
    return reinitialize(model, seed)


def _check_claims(audit: Results) -> tuple[Finding, ...]:
    by_id: dict[str, Any] = {f.id.removeprefix("watched/"): f for f in audit.findings}
    weak = [by_id[f"{c}/decoder"].value for c in (NO_DEFENCE, SHUFFLED)]
    strong = [by_id[f"{c}/public embedding"].value for c in (NO_DEFENCE, SHUFFLED)]
    best = {
        c: max(f.value for i, f in by_id.items() if i.startswith(f"{c}/")) for c in COMBINATIONS
    }
    floor = by_id[f"{NO_DEFENCE}/decoder"].floor
    return (
        Finding(
            "watched/decoder",
            "The effect of shuffled rows on a decoder that expects tokens in order, once it is "
            "trained.",
            None,
            weak[1],
            floor,
            weak[0],
            f"SSIM {weak[0]:.2f} without, {weak[1]:.2f} with: it learns to sort tokens by their "
            "position embeddings",
            "000 Tab. 6",
            "SSIM",
        ),
        Finding(
            "watched/adaptive",
            "Shuffled rows do not stop an adaptive attacker that has the embedding: tokens contain "
            "their positions.",
            abs(strong[1] - strong[0]) <= MAX_DIFFERENCE and strong[1] > 0.95,
            strong[1],
            floor,
            strong[0],
            f"SSIM {strong[0]:.2f} without, {strong[1]:.2f} with",
            measure="SSIM",
        ),
        Finding(
            "watched/noise",
            "Noise weakens every attack, and costs accuracy.",
            best[NOISY] < best[SHUFFLED] - MAX_DIFFERENCE,
            best[NOISY],
            floor,
            best[SHUFFLED],
            f"the best attack: SSIM {best[SHUFFLED]:.2f} with rows alone, {best[NOISY]:.2f} "
            "with noise as large as the stream",
            measure="SSIM",
        ),
    )
