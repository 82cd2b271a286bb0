"""Two cells that all of the paper's tables are made of: train a model in some way, and score it in
some way.

Training is a function of its parameters alone: batches, learning rates, shuffles and dropout depend
on the seed and the number of the step. So a run that was interrupted goes on as if it had not been,
and two ways of training see the same batches in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build, plain, used, wrapper
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.evaluate import predict
from regauge.data.tasks import Examples, prepare
from regauge.data.train import exact_arithmetic, train_model

Tensor = torch.Tensor
Parameters = Mapping[str, Any]
# dense examples whose logits are kept for comparison; of the others only the confusion matrix
SHOWN = 64


@dataclass(frozen=True)
class Source:
    """A tokenizer or a pre-trained model: where it lies, and the digest of its files (for the hub,
    of its name).
    """

    uri: str
    digest: str


def source_of(uri: str | Path) -> Source:
    path = Path(uri)
    files = (
        sorted(p for p in path.rglob("*") if p.is_file())
        if path.is_dir()
        else [path]
        if path.is_file()
        else []
    )
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return Source(str(uri), found.hexdigest() if files else f"hub:{uri}")


def train(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train in one way; the plain weights, put back where they belong, and the losses.

    A recipe has an `optimizer` with its `rate` (and `more` arguments), `batch`, `epochs` or
    `steps`, `dtype`, and may have `warmup` (a share of the steps), `clip` (the largest norm of a
    gradient) and `augment` (of images, see `augmenting`; `repeat` has each of them several times in
    a batch).
    """
    recipe, seed = p["recipe"], int(p["seed"])
    examples = prepare(p["task"], data["train"], uri_of(data, "tokenizer"))
    model = used(
        build(p["model"], seed, uri_of(data, "source")).to(
            work.device, getattr(torch, recipe["dtype"])
        ),
        p["way"],
        seed,
    )
    losses, _ = train_model(model, examples, recipe, seed, work, on_resume=count_passes(model))
    state = {name: t.detach().cpu().clone() for name, t in plain(model).state_dict().items()}
    return Outcome(
        {
            "losses": losses,
            "steps": len(losses),
            "examples": len(examples),
            "parameters": parameters_of(model),
        },
        state,
    )


def score(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Score a model in one way of inference: its measures, those of a guess, and the logits (of
    texts the nats of each token).
    """
    examples = prepare(p["task"], data["test"], uri_of(data, "tokenizer"))
    dtype = getattr(torch, p["dtype"])
    model = build(p["model"], 0, uri_of(data, "source")).to(
        work.device, dtype
    )  # first, so that weights are not rounded on their way in
    if "weights" in data:
        model.load_state_dict(data["weights"].tensors)
    model = used(model, p["way"], int(p["key"])).eval()
    confusion = torch.zeros(
        examples.classes if not examples.causal else 1,
        examples.classes if not examples.causal else 1,
        dtype=torch.int64,
    )
    kept: list[Tensor] = []
    with exact_arithmetic(dtype):
        for rows, _, labels, logits in predict(model, examples, p["batch"]):
            if examples.causal:
                kept.append(
                    torch.nn.functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
                    ).cpu()
                )
                continue
            counted = labels != -100
            at = labels[counted] * examples.classes + logits.argmax(1)[counted]
            confusion += torch.bincount(at.cpu(), minlength=examples.classes**2).view_as(confusion)
            if not examples.dense or rows[0] < SHOWN:
                kept.append(logits.cpu())
    outputs = torch.cat(kept)
    nats = float(outputs.double().mean()) if examples.causal else 0.0
    values = {
        "measures": compute_metrics(examples, confusion, nats),
        "chance": chance_metrics(examples, confusion),
        "examples": len(examples),
    }
    values |= {"parameters": parameters_of(model)}
    return Outcome(values, {"outputs": outputs[:SHOWN].clone() if examples.dense else outputs})


TRAIN = Cell("train", 1, train)
SCORE = Cell("score", 2, score)


def uri_of(data: Mapping[str, Any], name: str) -> str | None:
    """Where a cell's tokenizer or pre-trained model lies, if it has such."""
    return data[name].uri if name in data else None


def count_passes(model: torch.nn.Module) -> Callable[[int], None]:
    """Return a function that sets the pass counter of a permuted model, on which its row shuffles
    depend: one pass per step.
    """

    def resume(step: int) -> None:
        wrapped = wrapper(model)
        if wrapped is not None:
            wrapped.passes = step

    return resume


def parameters_of(model: torch.nn.Module) -> int:
    return sum(t.numel() for t in model.parameters())


def compute_metrics(examples: Examples, confusion: Tensor, nats: float) -> dict[str, float]:
    """Compute the metrics of a task, from the confusion matrix [truth, prediction] of all examples
    or pixels, or from the mean nats of a next token.
    """
    if examples.causal:
        return {"perplexity": float(np.exp(min(nats, 700.0))), "nats": nats}
    table = confusion.double()
    correct, truth, predicted = table.diag(), table.sum(1), table.sum(0)
    accuracy = float(correct.sum() / table.sum())
    if not examples.dense:
        return {"accuracy": accuracy}
    present = truth > 0
    return {
        "aAcc": accuracy,
        "mIoU": float((correct / (truth + predicted - correct).clamp(min=1))[present].mean()),
        "mAcc": float((correct / truth.clamp(min=1))[present].mean()),
    }


def chance_metrics(examples: Examples, confusion: Tensor) -> dict[str, float]:
    """Compute the metrics of a guess without input: the most common class for pixels, any class for
    examples, uniform tokens for texts.
    """
    if examples.causal:
        return {"perplexity": float(examples.classes)}
    if not examples.dense:
        return {"accuracy": 1 / examples.classes}
    truth = confusion.double().sum(1)
    most_common, present = float(truth.max() / truth.sum()), int((truth > 0).sum())
    return {"aAcc": most_common, "mIoU": most_common / present, "mAcc": 1 / present}
