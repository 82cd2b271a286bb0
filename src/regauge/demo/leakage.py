"""The fourth chapter: digits that the server of split learning rebuilds from their features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import BATCH, digits, make_vit
from regauge.demo.split import check_split_training
from regauge.results.findings import Claim, Figure, Finding, Results

TRAIN, PUBLIC, EPOCHS, ATTACKED = 900, 500, 6, 40
DECODER_EPOCHS = 10  # the most epochs of the attacker's decoder
COMBINATIONS = ("none", "rows", "noise=1+rows")
ATTACKS = ("decoder", "public embedding", "least squares")
NO_DEFENCE, SHUFFLED, NOISY = COMBINATIONS
MAX_DIFFERENCE = 0.02  # of SSIM, between runs with and without shuffled rows
SHOWN = 8  # images of the gallery
LABELS = {
    NO_DEFENCE: "rebuilt by the server, no defence",
    SHUFFLED: "rebuilt, tokens shuffled",
    NOISY: "rebuilt, tokens shuffled and noise added",
}


def show_split(context: DemoContext) -> Results:
    """Reconstruct digits from the features that a split server receives, with defences."""
    from regauge.audit.engine import select_attacks
    from regauge.audit.split_audit import SplitCase, audit_split
    from regauge.audit.split_audit.attempts import ATTACKS as SPLIT_ATTACKS
    from regauge.audit.split_audit.attempts import Budget
    from regauge.split import OptimizerConfig
    from regauge.split.client.train import Run

    checks, table = check_split_training(context)
    steps = EPOCHS * TRAIN // BATCH
    case = SplitCase(
        _make_vit(context.seed + 40),
        digits(0, TRAIN),
        digits(TRAIN, TRAIN + PUBLIC),
        digits(TRAIN + PUBLIC),
        [0.5],
        [0.5],
        OptimizerConfig("adamw", 2e-3, schedule="cosine", warmup=steps // 10, steps=steps + 1),
        Run(steps, BATCH, context.seed),
        ATTACKED,
        "digits",
    )
    budget = Budget(hidden=48, depth=1, epochs=DECODER_EPOCHS, patience=4, rate=3e-3, batch=50)
    with context.bar("train split, and attack the server's features") as progress:
        audit = audit_split(
            case,
            COMBINATIONS,
            attacks=select_attacks(ATTACKS, SPLIT_ATTACKS),
            budget=budget,
            progress=progress,
        )
    return replace(
        audit,
        title="Split learning",
        findings=(*_check_claims(audit), *checks, *audit.findings),
        tables=(*audit.tables[:2], table),
        figures=(_choose_gallery(audit), *(f for f in audit.figures if f.kind == "points")),
        facts={"verdict": audit.facts["verdict"]},
        claim=_conclude(audit),
    )


def _conclude(audit: Results) -> Claim:
    columns, rows = audit.tables[0].columns, {row[0]: row for row in audit.tables[0].rows}
    at, accuracy = columns.index("re-identified"), columns.index("accuracy")
    share = float(rows[SHUFFLED][at] or 0.0)
    lost = [float(rows[c][accuracy] or 0.0) for c in (SHUFFLED, NOISY)]
    return Claim(
        "The server of split learning can see the images, even if their tokens are shuffled"
        if share > 0.5
        else "Shuffled tokens hide the images from the server of split learning",
        "bad" if share > 0.5 else "good",
        f"{share:.0%}",
        f"of the images re-identified from shuffled features (a guess: {1 / ATTACKED:.1%})",
        "The server holds the backbone and receives features, never images; an attacker that knows "
        "the embedding inverts them. Noise as large as the features hides little more, and costs "
        f"accuracy: {lost[0]:.0%} becomes {lost[1]:.0%}.",
        "regauge audit split VIT --data IMAGES --defence rows --report split.html",
    )


def _choose_gallery(audit: Results) -> Figure:
    """Return the images and their best reconstruction under each combination."""
    by_label: dict[str, tuple[float, list[Any]]] = {}
    galleries = [f for f in audit.figures if f.kind == "images"]
    for gallery in galleries:
        for row in gallery.data["rows"][1:]:
            combination, _, score = row["label"].partition(" (SSIM ")
            by_label[combination] = max(
                by_label.get(combination, (-1.0, [])),
                (float(score.rstrip(")")), row["images"]),
                key=lambda entry: entry[0],
            )
    rows = [{"label": "the images", "images": galleries[0].data["rows"][0]["images"][:SHOWN]}]
    for combination, label in LABELS.items():
        score, images = by_label[combination]
        rows.append({"label": f"{label} (SSIM {score:.2f})", "images": images[:SHOWN]})
    caption = (
        "The best of three attacks on the features that the server receives. SSIM measures "
        "similarity: 1 is the image itself. An image is re-identified if its reconstruction is "
        "nearer to it than to any other image."
    )
    return Figure(
        "Images, and what the server rebuilds of them",
        "images",
        {"columns": [], "rows": rows},
        caption,
    )


def _make_vit(seed: int) -> Any:
    """Create the ViT of the other chapters with two layers, initialized to train in few epochs."""
    from regauge.models.load import reinitialize

    model = make_vit(seed).float()
    model.config.num_hidden_layers = 2
    model.config.initializer_range = 0.1
    return reinitialize(model, seed)


def _check_claims(audit: Results) -> tuple[Finding, ...]:
    by_id: dict[str, Any] = {f.id.removeprefix("digits/"): f for f in audit.findings}
    weak = [by_id[f"{c}/decoder"].value for c in (NO_DEFENCE, SHUFFLED)]
    strong = [by_id[f"{c}/public embedding"].value for c in (NO_DEFENCE, SHUFFLED)]
    best = {
        c: max(f.value for i, f in by_id.items() if i.startswith(f"{c}/")) for c in COMBINATIONS
    }
    floor = by_id[f"{NO_DEFENCE}/decoder"].floor
    return (
        Finding(
            "digits/decoder",
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
            "digits/adaptive",
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
            "digits/noise",
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
