"""Two cells that all of the paper's tables are made of: train a model in some way, and score it in some way.

Training is a function of its parameters alone: batches, learning rates, shuffles and dropout depend on the seed and the number of the step. So a run
that was interrupted goes on as if it had not been, and two ways of training see the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.augmenting import augmented, mixed
from experiments.cells import Cell, Outcome, Work
from experiments.models import build, plain, used, wrapper
from regauge.data.tasks import Examples, answer_of, chances, logits_of, loss_of, measures, prepare
from regauge.testing import strict_float64

Tensor = torch.Tensor
Parameters = Mapping[str, Any]
SHOWN = 64  # dense examples whose logits are kept for comparison; of the others only the confusion matrix


@dataclass(frozen=True)
class Source:
    """A tokenizer or a pre-trained model: where it lies, and the digest of its files (for the hub, of its name)."""

    uri: str
    digest: str


def source_of(uri: str | Path) -> Source:
    path = Path(uri)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return Source(str(uri), found.hexdigest() if files else f"hub:{uri}")


def train(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """Train in one way; the plain weights, put back where they belong, and the losses.

    A recipe has an `optimizer` with its `rate` (and `more` arguments), `batch`, `epochs` or `steps`, `dtype`, and may have `warmup` (a share of the
    steps), `clip` (the largest norm of a gradient) and `augment` (of images, see `augmenting`; `repeat` has each of them several times in a batch).
    """
    recipe, seed = p["recipe"], int(p["seed"])
    examples = prepare(p["task"], data["train"], uri_of(data, "tokenizer"))
    model = used(build(p["model"], seed, uri_of(data, "source")).to(work.device, getattr(torch, recipe["dtype"])), p["way"], seed)
    losses, _ = descend(model, examples, recipe, seed, work)
    state = {name: t.detach().cpu().clone() for name, t in plain(model).state_dict().items()}
    return Outcome({"losses": losses, "steps": len(losses), "examples": len(examples), "parameters": parameters_of(model)}, state)


Look = Callable[[], float]
Tell = Callable[[int, int, float], None]


def descend(
    model: torch.nn.Module,
    examples: Examples,
    recipe: Parameters,
    seed: int,
    work: Work,
    look: Look | None = None,
    tell: Tell | None = None,
) -> tuple[list[float], list[list[float]]]:
    """Follow a recipe, in place: the loss of every step, and (step, what `look` saw), before the first step and `looks` times after it. `tell` is
    told of every step: its number, how many there are, and its loss."""
    model.train()
    dtype = getattr(torch, recipe["dtype"])
    optimizer = OPTIMIZERS[recipe["optimizer"]](model.parameters(), lr=recipe["rate"], **recipe.get("more", {}))
    batch = int(recipe["batch"])
    per_epoch = max(1, len(examples) // batch)
    total = steps_of(recipe, len(examples))
    due = {round(i * total / recipe.get("looks", 1)) for i in range(recipe.get("looks", 1) + 1)} if look else set()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        step, losses, seen = _resume(model, optimizer, work)
        saved = time.monotonic()
        while True:
            if look and step in due and (not seen or seen[-1][0] < step):
                seen.append([step, look()])
                model.train()
            if step >= total:
                return losses, seen
            epoch, place = divmod(step, per_epoch)
            rows = np.random.default_rng([seed, epoch]).permutation(len(examples))[place * batch : (place + 1) * batch]
            change = recipe.get("augment", {})
            rows = np.resize(rows[: -(-batch // change.get("repeat", 1))], len(rows))  # the same images several times, each changed in its own way
            for group in optimizer.param_groups:
                group["lr"] = recipe["rate"] * schedule(step, total, recipe.get("warmup", 0.1))
            inputs, labels = _to(examples.batch(rows), work.device, dtype)
            if change:
                draw = np.random.default_rng([seed, step, 1])
                inputs["pixel_values"] = augmented(inputs["pixel_values"], change, draw)
                if {"mixup", "cutmix", "smooth"} & change.keys():
                    inputs["pixel_values"], labels = mixed(inputs["pixel_values"], labels, examples.classes, change, draw)
            with _exact(dtype):
                logits, extra = answer_of(model, inputs)
                loss = loss_of(examples, logits, labels) + (0.0 if extra is None else extra)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            if "clip" in recipe:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
            optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
            if tell is not None:
                tell(step, total, losses[-1])
            if time.monotonic() - saved >= work.every:
                _keep(model, optimizer, step, {"losses": losses, "seen": seen}, work)
                saved = time.monotonic()


def steps_of(recipe: Parameters, examples: int) -> int:
    """How many steps a recipe has: `steps`, or `epochs` over the examples."""
    return int(recipe["steps"]) if "steps" in recipe else max(1, examples // int(recipe["batch"])) * int(recipe["epochs"])


def schedule(step: int, total: int, warmup: float) -> float:
    """A linear rise and a cosine down to nothing, as a share of the rate."""
    rise = max(1, round(warmup * total))
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def score(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """Use a model in one way on all test examples: the measures, what a guess gets, and the logits (of texts: the nats of each token)."""
    examples = prepare(p["task"], data["test"], uri_of(data, "tokenizer"))
    dtype = getattr(torch, p["dtype"])
    model = build(p["model"], 0, uri_of(data, "source")).to(work.device, dtype)  # first, so that weights are not rounded on their way in
    if "weights" in data:
        model.load_state_dict(data["weights"].tensors)
    model = used(model, p["way"], int(p["key"])).eval()
    confusion = torch.zeros(examples.classes if not examples.causal else 1, examples.classes if not examples.causal else 1, dtype=torch.int64)
    kept: list[Tensor] = []
    with torch.no_grad(), _exact(dtype):
        for start in range(0, len(examples), p["batch"]):
            rows = np.arange(start, min(start + p["batch"], len(examples)))
            inputs, labels = _to(examples.batch(rows), work.device, dtype)
            logits = logits_of(model, inputs)
            if examples.causal:
                kept.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").cpu())
                continue
            counted = labels != -100
            at = labels[counted] * examples.classes + logits.argmax(1)[counted]
            confusion += torch.bincount(at.cpu(), minlength=examples.classes**2).view_as(confusion)
            if not examples.dense or start < SHOWN:
                kept.append(logits.cpu())
    outputs = torch.cat(kept)
    nats = float(outputs.double().mean()) if examples.causal else 0.0
    values = {"measures": measures(examples, confusion, nats), "chance": chances(examples, confusion), "examples": len(examples)}
    values |= {"parameters": parameters_of(model)}
    return Outcome(values, {"outputs": outputs[:SHOWN].clone() if examples.dense else outputs})


TRAIN = Cell("train", 1, train)
SCORE = Cell("score", 2, score)


def _exact(dtype: torch.dtype) -> Any:
    """In float64 nothing on the way may be rounded to less; in other dtypes the model computes as ever."""
    return strict_float64() if dtype == torch.float64 else contextlib.nullcontext()


def _to(batch: tuple[dict[str, Tensor], Tensor], device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    inputs, labels = batch
    return {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}, labels.to(device)


def uri_of(data: Mapping[str, Any], name: str) -> str | None:
    """Where a cell's tokenizer or pre-trained model lies, if it has such."""
    return data[name].uri if name in data else None


def parameters_of(model: torch.nn.Module) -> int:
    return sum(t.numel() for t in model.parameters())


def loss_on(model: torch.nn.Module, examples: Examples, batch: int, dtype: torch.dtype, device: str) -> float:
    """The mean loss over examples, in evaluation mode."""
    model.eval()
    found = 0.0
    with torch.no_grad(), _exact(dtype):
        for start in range(0, len(examples), batch):
            rows = np.arange(start, min(start + batch, len(examples)))
            inputs, labels = _to(examples.batch(rows), device, dtype)
            found += len(rows) * float(loss_of(examples, logits_of(model, inputs), labels))
    return found / len(examples)


def _keep(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, history: Mapping[str, Any], work: Work) -> None:
    tensors = {f"model/{name}": t.clone() for name, t in model.state_dict().items()} | {"random": torch.get_rng_state()}
    if work.device.startswith("cuda"):
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    for i, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{i}/{name}": torch.as_tensor(value) for name, value in entries.items()}
    work.save({"step": step, **history}, tensors)


def _resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> tuple[int, list[float], list[list[float]]]:
    """Go on where an interrupted run stood: weights, the optimizer's moments, the random state, the number of the step."""
    found = work.load()
    if found is None:
        return 0, [], []
    model.load_state_dict({name.removeprefix("model/"): t for name, t in found.tensors.items() if name.startswith("model/")})
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in found.tensors.items():
        if name.startswith("optimizer/"):
            _, i, key = name.split("/")
            state.setdefault(int(i), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(found.tensors["random"])
    if "random/cuda" in found.tensors:
        torch.cuda.set_rng_state(found.tensors["random/cuda"])
    wrapped = wrapper(model)
    if wrapped is not None:
        wrapped.passes = int(found.values["step"])  # the shuffles of rows go by the number of the pass: one per step
    return int(found.values["step"]), list(found.values["losses"]), list(found.values.get("seen", []))
