"""The first chapter: a model in another basis has other weights, and computes the same."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from regauge.demo.context import DemoContext
from regauge.demo.digits import PATCH, accuracy, guess_rate, load_images, make_vit, train
from regauge.demo.move import GPT2, LLAMA, describe_spaces, make_checkpoint, try_elements
from regauge.results.findings import Claim, Figure, Finding, Results, Table

if TYPE_CHECKING:
    from regauge.core.members import Monomial

COMPARED_EPOCHS, TOLERANCE = 1, 1e-9  # training amplifies rounding without bound
LOGITS_TOLERANCE = 1e-4  # of float32 logits, relative to the largest one
SHOWN_LOGITS = 200
SHORT = 1000  # digits of the trainings in float64


def show_basis(context: DemoContext) -> Results:
    """Move models to other bases, and compare outputs, gradients and training."""
    from regauge import Permuted, element, spec_of, verify

    moves, findings = _move_checkpoints(context)
    plain = context.models[0]
    key = element(spec_of(plain), context.seed + 1, within="permutation")
    moved = Permuted(copy.deepcopy(plain), columns=key, rows=False)
    accuracies = {
        "original": accuracy(plain, context.test),
        "tokens shuffled": accuracy(Permuted(copy.deepcopy(plain)), context.test),
        "channels permuted": accuracy(moved, context.test),
        "channels permuted, inputs not": accuracy(moved.model, context.test),
    }
    chance = guess_rate(context.test)
    with context.bar("verify") as progress:
        inputs, _ = context.test.batch(range(8))
        verified = verify(
            copy.deepcopy(plain), inputs, seed=context.seed, progress=progress
        ).results
    without_key = accuracies["channels permuted, inputs not"]
    lost = Finding(
        "digits/lost",
        "Backbone and embedding in different bases are no better than a guess.",
        without_key < chance + 0.1,
        without_key,
        chance,
        accuracies["original"],
        f"accuracy {without_key:.1%}; {accuracies['original']:.1%} in one basis, {chance:.1%} for "
        "the most frequent digit",
        measure="accuracy",
    )
    valid = [case for case in moves if case["valid"]]
    largest = max((case["logits"] for case in valid if case["logits"] is not None), default=None)
    wrong = min((c["logits"] for c in moves if not c["valid"] and c["logits"]), default=None)
    changed = min(case["moved"] for case in valid)
    holds = largest is not None and largest <= LOGITS_TOLERANCE
    claim = Claim(
        "A model in another basis has other weights and computes the same function",
        "good" if holds else "bad" if largest is not None else "none",
        "" if largest is None else f"{largest:.0e}".replace("e-0", "e-"),
        f"largest relative difference of the logits, with {changed:.0%} of the weights changed",
        "The channels of two language models are permuted, scaled and rotated, and so are all "
        "weights that read or write them. What remains is the rounding of float32."
        + (
            ""
            if wrong is None
            else f" Rotated wrongly on purpose, the logits differ by {wrong:.1f}."
        ),
        "regauge move VIT --random -o MOVED\nregauge evaluate VIT MOVED --data IMAGES",
    )
    return Results(
        "A model in another basis",
        (*findings, lost, _compare_training(context), *verified.findings),
        (
            _tabulate_moves(moves),
            Table(
                "A ViT on digits",
                ("", "accuracy"),
                tuple(accuracies.items()),
                f"{len(context.test)} test images",
            ),
            describe_spaces(context.folder / "llama"),
            *verified.tables,
        ),
        (*_plot_logits(moves), _plot_images(context.seed)),
        unchecked=verified.unchecked,
        claim=claim,
    )


def _move_checkpoints(context: DemoContext) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Transform checkpoints by valid elements and an invalid one; return cases and findings."""
    moves, findings = [], []
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        folder = make_checkpoint(context.folder / name, config, context.seed)
        cases = [{"model": name, **case} for case in try_elements(folder, context.seed)]
        moves += cases
        wrong = cases[-1]["logits"]
        for case in cases[:-1]:
            restored = "bit for bit" if case["back"] == 0 else "to rounding"
            findings.append(
                Finding(
                    f"moving/{name}/{case['element'].split(',')[0]}",
                    f"A small {name} transformed by {case['element']}: other weights, the same "
                    "logits.",
                    None if case["logits"] is None else case["logits"] <= LOGITS_TOLERANCE < wrong,
                    case["logits"],
                    LOGITS_TOLERANCE,
                    wrong,
                    f"{case['moved']:.0%} of the weights changed; restored {restored}"
                    if case["logits"] is not None
                    else "the logits need transformers",
                )
            )
    return moves, findings


def _tabulate_moves(moves: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            case["model"],
            case["element"],
            f"{case['moved']:.0%}",
            "bit for bit" if case["back"] == 0 else f"to {case['back']:.1e}",
            case["logits"],
        )
        for case in moves
    )
    return Table(
        "Two language models in other bases",
        ("model", "transform", "weights changed", "moved back", "logits differ by"),
        rows,
        "Random weights of the shapes of Llama and GPT-2. The difference is the largest one, "
        "relative to the largest logit. The wrong transform rotates the stream under norms that "
        "are not folded: regauge rejects it, and here it is forced.",
    )


def _plot_logits(moves: list[dict[str, Any]]) -> tuple[Figure, ...]:
    """Plot logits of the moved Llama over those of the original."""
    chosen = {
        "valid change": next(c for c in moves if c["element"] == "full"),
        "invalid, forced": next(c for c in moves if not c["valid"]),
    }
    series = {
        label: list(zip(*(values[:SHOWN_LOGITS] for values in case["pairs"]), strict=True))
        for label, case in chosen.items()
        if case["pairs"] is not None
    }
    if not series:
        return ()
    data = {
        "series": {label: [list(point) for point in points] for label, points in series.items()},
        "xlabel": "logit of the original",
        "ylabel": "logit in another basis",
        "scatter": True,
    }
    caption = (
        "Each point is one logit of a small Llama. On the diagonal both models compute the same."
    )
    return (Figure("Logits before and after a change of basis", "points", data, caption),)


def _compare_training(context: DemoContext) -> Finding:
    """Train a ViT plainly and with permuted tokens and channels, in float64."""
    from regauge import Permuted, element, spec_of

    images, labels = load_images()
    images, labels = images[:SHORT], labels[:SHORT]
    plain = make_vit(context.seed)
    key = element(spec_of(plain), context.seed + 1, within="permutation")
    permuted = Permuted(copy.deepcopy(plain), columns=key, rows=True, key=context.seed + 2)
    losses = []
    for name, model in (("plain", plain), ("permuted", permuted)):
        with context.bar(f"train in float64, {name}") as progress:
            losses.append(train(model, images, labels, context.seed, progress, COMPARED_EPOCHS))
    largest = max(abs(a - b) / losses[0][0] for a, b in zip(*losses, strict=True))
    return Finding(
        "digits/trained",
        "With tokens and channels permuted, AdamW follows the plain loss step by step, in float64.",
        largest <= TOLERANCE,
        largest,
        TOLERANCE,
        1.0,
        f"the losses of {len(losses[0])} steps differ by {largest:.0e} of the first loss",
        "permutation equivariance, Alg. 1",
    )


def _plot_images(seed: int) -> Figure:
    """Plot digits, and their patches in the order of the backbone's inputs."""
    from regauge.locking.permuted import sample_row_permutation

    g = sample_row_permutation((8 // PATCH) ** 2, seed)
    index = cast("Monomial", g.members["token"]).index[0]
    side = 8 // PATCH
    images, _ = load_images()
    pairs = []
    for image in images[-6:]:
        patches = image[0].unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH)
        patches = patches.reshape(-1, PATCH, PATCH)[index]
        shuffled = patches.view(side, side, PATCH, PATCH).permute(0, 2, 1, 3).reshape(8, 8)
        pairs.append([((x + 1) / 2).tolist() for x in (image[0], shuffled)])
    labels = ("original", "tokens shuffled")
    rows = [{"label": label, "images": [p[i] for p in pairs]} for i, label in enumerate(labels)]
    caption = (
        "A shuffle hides the order of the patches, not the patches: this is obfuscation, not "
        "encryption."
    )
    return Figure(
        "Digits, and the order in which a backbone reads their patches",
        "images",
        {"columns": [], "rows": rows},
        caption,
    )
