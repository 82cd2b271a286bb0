"""A chapter on the server's side of split learning: what it makes of the features of digits that it
was sent, shuffled and not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.digits import BATCH, load_images, make_vit
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Finding, Results

TRAIN, PUBLIC, EPOCHS, ATTACKED = 900, 500, 6, 40
DECODER_EPOCHS = 25  # epochs that the attacker's decoder has at most
COMBINATIONS = ("none", "rows", "noise=1+rows")
ATTACKS = ("decoder", "public embedding", "least squares")
NO_DEFENCE, SHUFFLED, NOISY = COMBINATIONS
MAX_DIFFERENCE = 0.02  # of SSIM: what shuffles do not change


def show_leakage(stage: DemoContext) -> Results:
    """What the server of the last chapter sees: the digits themselves. What shuffled rows buy, and
    what they do not.
    """
    for library, extra in (
        ("transformers", "experiments"),
        ("sklearn", "experiments"),
        ("torchmetrics", "audit"),
    ):
        need(library, extra)
    from regauge.audit.split import SplitCase, audit_split
    from regauge.audit.split.attempts import Budget, select_attacks
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
        _make_vit(stage.seed + 40),
        part(0, TRAIN),
        part(TRAIN, TRAIN + PUBLIC),
        part(TRAIN + PUBLIC, len(images)),
        [0.5],
        [0.5],
        OptimizerConfig("adamw", 2e-3, schedule="cosine", warmup=steps // 10, steps=steps + 1),
        Run(steps, BATCH, stage.seed),
        ATTACKED,
        "watched",
    )
    budget = Budget(hidden=48, depth=1, epochs=DECODER_EPOCHS, patience=4, rate=3e-3, batch=50)
    with stage.bar("train split, and attack") as tick:
        found = audit_split(
            case, COMBINATIONS, attacks=select_attacks(ATTACKS), budget=budget, progress=tick
        )
    table = found.tables[0]
    rows = [table.columns]
    rows += [
        tuple("" if c is None else c if isinstance(c, str) else f"{c:.2f}" for c in row)
        for row in table.rows
    ]
    stage.echo(format_columns(rows, right=tuple(range(1, len(rows[0])))) + "\n")
    stage.echo("\n".join(found.facts["verdict"]))
    results = replace(
        found,
        findings=(*_check_claims(found), *found.findings),
        facts={"what the server learns": found.facts["verdict"]},
    )
    return replace(
        results,
        figures=tuple(f for f in found.figures if f.kind != "lines"),
        tables=found.tables[:2],
    )


def _make_vit(seed: int) -> Any:
    """The ViT of the other chapters with half of its layers, and weights to begin with that learn
    in a few epochs.
    """
    from regauge.models.load import reinitialize

    model = make_vit(seed).float()
    model.config.num_hidden_layers = 2
    model.config.initializer_range = 0.1
    return reinitialize(model, seed)


def _check_claims(found: Results) -> tuple[Finding, ...]:
    by: dict[str, Any] = {f.id.removeprefix("watched/"): f for f in found.findings}
    weak = [by[f"{c}/decoder"].value for c in (NO_DEFENCE, SHUFFLED)]
    strong = [by[f"{c}/public embedding"].value for c in (NO_DEFENCE, SHUFFLED)]
    best = {c: max(f.value for i, f in by.items() if i.startswith(f"{c}/")) for c in COMBINATIONS}
    floor = by[f"{NO_DEFENCE}/decoder"].floor
    return (
        Finding(
            "watched/decoder",
            "What shuffled rows take from a decoder that expects tokens in order, once it is "
            "trained.",
            None,
            weak[1],
            floor,
            weak[0],
            f"SSIM {weak[0]:.2f} without, {weak[1]:.2f} with: it learns to sort tokens by the "
            "positions that are in them",
            "000 Tab. 6",
            "SSIM",
        ),
        Finding(
            "watched/adaptive",
            "They are nothing to an attacker who expects them and knows the embedding: "
            "positions are in the tokens.",
            abs(strong[1] - strong[0]) <= MAX_DIFFERENCE and strong[1] > 0.95,
            strong[1],
            floor,
            strong[0],
            f"SSIM {strong[0]:.2f} without, {strong[1]:.2f} with",
            measure="SSIM",
        ),
        Finding(
            "watched/noise",
            "Noise takes something from every attack, and costs accuracy.",
            best[NOISY] < best[SHUFFLED] - MAX_DIFFERENCE,
            best[NOISY],
            floor,
            best[SHUFFLED],
            f"the best attack: SSIM {best[SHUFFLED]:.2f} with rows alone, {best[NOISY]:.2f} "
            "with noise as large as the stream",
            measure="SSIM",
        ),
    )
