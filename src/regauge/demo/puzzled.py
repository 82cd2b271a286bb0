"""A chapter on masked jigsaw puzzles: a ViT that learns from shuffled digits minds less where their pieces are."""

from __future__ import annotations

from regauge.demo.averaging import SPLIT
from regauge.demo.digits import accuracy, load, train, vit
from regauge.demo.stage import Stage
from regauge.errors import need
from regauge.findings import Figure, Finding, Results, Table

EPOCHS, RATIO = 6, 0.5
KNOWS = 0.6  # of the digits, before a mind can be changed


def puzzled(stage: Stage) -> Results:
    """A ViT that learns from digits whose pieces are shuffled: under a puzzle it changes its mind less often."""
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge.facts import columns
    from regauge.jigsaw import MaskedJigsaw
    from regauge.jigsaw.metrics import evaluate, puzzles_of
    from regauge.tasks import Examples

    images, labels = load()
    images = images.float()
    test, answers = images[SPLIT:], labels[SPLIT:]
    examples = Examples(len(test), 10, lambda rows: ({"pixel_values": test[rows]}, answers[rows]))
    ways = {"plain": "A", "with puzzles": "G"}
    found = {}
    for name, variant in ways.items():
        wrapped = MaskedJigsaw(vit(stage.seed + 40).float(), RATIO, variant=variant, per="sample", seed=stage.seed)
        with stage.bar(f"train, {name}") as tick:
            train(wrapped, images[:SPLIT], labels[:SPLIT], stage.seed + 41, tick, epochs=EPOCHS)
        measured = evaluate(wrapped, examples, (RATIO,))
        found[name] = (accuracy(wrapped.unwrap(), test, answers), measured.at_half.accuracy, measured.at_half.consistency)
    heads = ("digits", "as they are", "half shuffled", "the same answer")
    stage.say(columns([heads, *((name, *(f"{100 * v:.1f} %" for v in values)) for name, values in found.items())], right=(1, 2, 3)))
    plain, mine = found["plain"], found["with puzzles"]
    finding = Finding(
        "puzzles/consistency",
        "A ViT that was trained with puzzles gives the same answer to a shuffled digit more often.",
        mine[2] > plain[2] if plain[0] > KNOWS else None,
        mine[2],
        plain[2],
        1.0,
        f"{100 * mine[2]:.1f} % of answers stay, plainly {100 * plain[2]:.1f} %; right as they are: {100 * mine[0]:.1f} and {100 * plain[0]:.1f} %",
        "002 Tab. 1",
        measure="consistency",
    )
    shown = puzzles_of(range(6), wrapped, test[:6], RATIO, 0).apply(test[:6])
    rows = [
        {"label": label, "images": ((x[:, 0] + 1) / 2).tolist()} for label, x in (("as they are", test[:6]), ("half of the pieces shuffled", shown))
    ]
    note = f"{EPOCHS} epochs each, one seed; half of the 16 pieces of 2 x 2 pixels are shuffled. docs/jigsaw.md says what is measured."
    note += " So many puzzles in so short a training cost accuracy: the paper shuffles a tenth, for 300 epochs."
    table = Table("Masked jigsaw puzzles", heads, tuple((name, *(100 * v for v in values)) for name, values in found.items()), note)
    return Results("puzzles", (finding,), (table,), (Figure("Digits and puzzles", "images", {"columns": [""] * 6, "rows": rows}),), {}, ())
