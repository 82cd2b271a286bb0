"""Puzzles of text, beyond the paper: BERT on sentences, trained plainly and with shuffled spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.paper_002.accuracy import COLUMNS, better, results, row_of, shorter, trials_of
from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from experiments.shared.train_cells import parameters_of, uri_of
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.evaluate import predict
from regauge.data.tasks import Examples, prepare
from regauge.data.train import count_steps, train_model
from regauge.jigsaw.metrics import RATIO, capture_features
from regauge.jigsaw.text import TextJigsaw
from regauge.results.findings import Results, Table

Parameters = Mapping[str, Any]
WARMUP = 20 / 300  # of the steps without puzzles, as for images
TRAINED = 0.3


def train(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train with shuffled spans (of ratio 0: plainly); the wrapped model's state and the losses."""
    recipe, seed = p["recipe"], int(p["seed"])
    examples = prepare(p["task"], data["train"], uri_of(data, "tokenizer"))
    model = build(p["model"], seed, uri_of(data, "source")).to(
        work.device, getattr(torch, recipe["dtype"])
    )
    wrapped = TextJigsaw(
        model, p["ratio"], warmup=round(p["warmup"] * count_steps(recipe, len(examples))), seed=seed
    )
    losses, _ = train_model(wrapped, examples, recipe, seed, work)
    state = {name: t.detach().cpu().clone() for name, t in wrapped.state_dict().items()}
    return Outcome(
        {"losses": losses, "examples": len(examples), "parameters": parameters_of(wrapped)}, state
    )


def score(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Score accuracy, and the effect of shuffled spans; `bare` is the unwrapped model, which does
    not know which tokens are shuffled.
    """
    examples = prepare(p["task"], data["test"], uri_of(data, "tokenizer"))
    wrapped = TextJigsaw(build(p["model"], 0, uri_of(data, "source")), p["ratio"]).to(work.device)
    wrapped.load_state_dict(data["weights"].tensors)
    accuracy, found = evaluate(wrapped, examples, p["shuffled"], p["batch"])
    _, bare = evaluate(TextJigsaw(wrapped.unwrap(), 0.0), examples, p["shuffled"], p["batch"])
    return Outcome(
        {"accuracy": accuracy, "shuffled": [found], "bare": bare, "examples": len(examples)}
    )


def evaluate(
    wrapped: TextJigsaw, examples: Examples, ratio: float, batch: int
) -> tuple[float, dict[str, float]]:
    """Top-1, and top-1, consistency and the norm of the difference under shuffled spans."""
    right, sums = 0, np.zeros(4)
    with torch.no_grad(), capture_features(wrapped.model) as features:
        for rows, inputs, labels, logits in predict(wrapped, examples, batch):
            ids, there, plain = inputs["input_ids"], inputs["attention_mask"], logits.argmax(-1)
            seen = features()
            right += int((plain == labels).sum())
            found = wrapped(
                ids, there, puzzle=puzzles_of(rows, wrapped, ids, there, ratio)
            ).logits.argmax(-1)
            apart = (features() - seen).flatten(1).double().norm(dim=1)
            sums += [
                int((found == labels).sum()),
                int((found == plain).sum()),
                float(apart.sum()),
                float(apart.square().sum()),
            ]
    measures = dict(
        zip(
            ("accuracy", "consistency", "norm", "squared"),
            (sums / len(examples)).tolist(),
            strict=True,
        )
    )
    return right / len(examples), {"ratio": ratio, **measures}


def puzzles_of(
    rows: Any, wrapped: TextJigsaw, ids: torch.Tensor, there: torch.Tensor, ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every text has a puzzle of its own, from its number alone: all models and all batch sizes get
    the same.
    """
    mask, order = (
        torch.zeros(ids.shape, dtype=torch.bool),
        torch.arange(ids.shape[1]).repeat(len(ids), 1),
    )
    for i, (row, length) in enumerate(zip(rows, there.sum(1).tolist(), strict=True)):
        found = wrapped.sample(ids[i : i + 1, :length], None, [0, int(row)], ratio)
        mask[i, :length], order[i, :length] = found[0][0], found[1][0]
    return mask, order


TRAIN = Cell("jigsaw-text-train", 1, train)
SCORE = Cell("jigsaw-text-score", 1, score)


def score_of(lab: Lab, subject: Subject, ratio: float, trial: int) -> Outcome:
    """A training and its test: two cells."""
    assert subject.train is not None
    known = {"model": subject.model, "task": subject.task, "ratio": ratio}
    detail = f"{subject.name}, {f'spans {ratio:g}' if ratio else 'plain'}, seed {trial}"
    train_on, test_on, sources = (
        lab.open(subject.train),
        lab.open(subject.test),
        lab.sources(subject, 0),
    )
    weights = lab.run(
        TRAIN,
        {**known, "recipe": subject.recipe, "seed": trial, "warmup": WARMUP},
        {"train": train_on, **sources},
        f"train {detail}",
    )
    data = {"test": test_on, "weights": weights, **sources}
    found = lab.run(
        SCORE, {**known, "shuffled": RATIO, "batch": subject.batch}, data, f"test {detail}"
    )
    lab.sizes[subject.name] = {
        "parameters": weights.values["parameters"],
        "trained on": f"{weights.values['examples']:,} of {train_on.name}",
        "tested on": f"{found.values['examples']:,} of {test_on.name}",
    }
    return found


def texts(lab: Lab) -> Results:
    """Beyond the paper: puzzles of texts. BERT on sentences, trained plainly and with shuffled
    spans of tokens.
    """
    subject = lab.preset.tables["table4"]["bert"]
    subject = replace(subject, recipe={**(subject.recipe or {}), "dtype": "float32"})
    lab.total = 4 * trials_of(lab)
    lab.ahead(
        _part,
        [(subject, ratio, trial) for trial in range(trials_of(lab)) for ratio in (0.0, TRAINED)],
    )
    base, puzzled = (
        [score_of(lab, subject, ratio, trial).values for trial in range(trials_of(lab))]
        for ratio in (0.0, TRAINED)
    )
    findings = (
        better(
            "texts/consistency",
            f"({subject.name}) trained with shuffled spans",
            puzzled,
            base,
            judged=False,
        ),
        shorter("texts/norm", subject.name, puzzled, base),
    )
    rows = ((subject.name, *row_of(base)), (f"{subject.name} + spans", *row_of(puzzled)))
    note = (
        f"Training ratio {TRAINED:g}, inference ratio {RATIO:g}, spans of up to 3 tokens; the "
        "first and last token keep their places. Means and standard deviations (±) over seeds. "
        "Under puzzles a wrapped model knows which tokens are shuffled, because they carry the "
        'unknown embedding; "unwrapped" is the consistency of the plain checkpoint, which does not '
        "know."
    )
    return results(
        lab,
        "002/texts",
        "Beyond the paper: puzzles of text",
        findings,
        (Table("Sentences", ("model", *COLUMNS), rows, note),),
        (),
    )


def _part(lab: Lab, item: tuple[Subject, float, int]) -> None:
    score_of(lab, *item)
