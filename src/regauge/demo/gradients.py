"""The fifth chapter: digits that an attacker reads from gradients, and defences that hide them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import digits, make_vit
from regauge.results.findings import Claim, Figure, Finding, Results

UPDATES, PUBLIC = 8, 400
COMBINATIONS = ("rows", "mjp=0.5", "batch=8", "private=1.0", "freeze=embedding,first")
EXACT_PSNR = 40.0  # dB
PRACTICE = 60  # training updates of attacks that learn
SHOWN = 8  # images of the gallery
LABELS = {
    "none": "read from one gradient, no defence",
    "batch=8": "read from an average over 8 gradients",
    "rows": "read from one gradient, tokens shuffled",
}


def show_gradients(context: DemoContext) -> Results:
    """Reconstruct digits from the gradients of a federated client, with and without defences."""
    from regauge.audit.gradient_audit import GradientCase, audit_gradients
    from regauge.audit.gradient_audit.attempts import Budget

    case = GradientCase(
        _make_vit(context.seed + 60),
        digits(0, 200),
        digits(200, 200 + PUBLIC),
        [0.5],
        [0.5],
        updates=UPDATES,
        seed=context.seed,
        name="digits",
    )
    with context.bar("compute gradients, and attack them") as progress:
        audit = audit_gradients(
            case,
            COMBINATIONS,
            budget=Budget(practice=PRACTICE, seed=context.seed),
            progress=progress,
        )
    return replace(
        audit,
        title="Gradients",
        findings=(*_check_claims(audit), *audit.findings),
        tables=audit.tables[:2],
        figures=(_choose_gallery(audit), *audit.figures[1:]),
        facts={"verdict": audit.facts["verdict"]},
        claim=_conclude(audit),
    )


def _conclude(audit: Results) -> Claim:
    by_id = {f.id.removeprefix("digits/"): f for f in audit.findings}
    plain, batch = by_id["none/least squares"], by_id["batch=8/least squares"]
    is_exact = (plain.value or 0.0) > EXACT_PSNR
    is_hidden = (batch.value or 0.0) < (batch.floor or 0.0) + 1
    return Claim(
        "One gradient gives its image away exactly"
        + ("; an average over eight images hides it" if is_hidden else "")
        if is_exact
        else "One gradient gives its image away in part",
        "bad" if is_exact else "mixed",
        f"{plain.value:.0f} dB",
        "PSNR of the image read from one gradient (above 40 dB it looks like the original; a guess "
        f"has {plain.floor:.0f} dB)",
        "A federated client sends gradients instead of images, and the gradient of the embedding "
        "determines the image by least squares. Larger batches and differential privacy hide it; "
        "shuffled tokens do not.",
        "regauge audit gradients VIT --data IMAGES --defence batch=8 --report gradients.html",
    )


def _choose_gallery(audit: Results) -> Figure:
    """Return the images and their reconstructions under some combinations."""
    gallery = next(f for f in audit.figures if f.kind == "images")
    rows = [{"label": "the images", "images": gallery.data["rows"][0]["images"][:SHOWN]}]
    for combination, label in LABELS.items():
        for row in gallery.data["rows"][1:]:
            name, _, score = row["label"].partition(": ")
            if name == combination and " dB" in score:
                score = score.partition(" (")[0]
                rows.append({"label": f"{label} ({score})", "images": row["images"][:SHOWN]})
    return Figure(
        "Images, and what an attacker reads from their gradients",
        "images",
        {"columns": [], "rows": rows},
        gallery.caption,
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
    by_id: dict[str, Any] = {f.id.removeprefix("digits/"): f for f in audit.findings}
    plain, floor = by_id["none/least squares"].value, by_id["none/least squares"].floor

    def claim(name: str, combination: str, statement: str, holds: bool) -> Finding:
        value = by_id[f"{combination}/least squares"].value
        return Finding(
            f"digits/{name}",
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
