"""The training loop: seeded batches, warm-up and cosine schedule, augmentation, saved state and
exact resumption.

Training is a function of its parameters alone: batches, learning rates, augmentation and dropout
depend on the seed and the step. An interrupted run resumes as if it had not stopped, and two runs
with one seed use the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.resume import ResumeState
from regauge.data.augment import augment_images, mix_images
from regauge.data.tasks import Examples, logits_and_extra_loss, logits_of, loss_of
from regauge.testing import strict_float64

Tensor = torch.Tensor
Parameters = Mapping[str, Any]
Evaluate = Callable[[], float]


def train_model(
    model: torch.nn.Module,
    examples: Examples,
    recipe: Parameters,
    seed: int,
    work: ResumeState,
    evaluate: Evaluate | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    on_resume: Callable[[int], None] | None = None,
) -> tuple[list[float], list[list[float]]]:
    """Train a model in place by a recipe.

    Args:
        model: The model.
        examples: The training examples.
        recipe: `optimizer` with its learning rate `rate` (and `more` arguments), `batch` (size),
            `epochs` or `steps`, `dtype`; optionally `warmup` (fraction of the steps), `clip`
            (largest gradient norm), `augment` (see `regauge.data.augment`) and `looks` (number of
            evaluations).
        seed: The seed of batches, augmentation and dropout.
        work: The store of an interrupted run's state, and the device.
        evaluate: Called before the first step and `looks` times after it.
        on_step: Called after every step with its number, the number of steps and the loss.
        on_resume: Called with the step from which a saved run resumes.

    Returns:
        The loss of every step, and a list of [step, value of `evaluate`].
    """
    model.train()
    dtype = getattr(torch, recipe["dtype"])
    optimizer = OPTIMIZERS[recipe["optimizer"]](
        model.parameters(), lr=recipe["rate"], **recipe.get("more", {})
    )
    batch = int(recipe["batch"])
    per_epoch = max(1, len(examples) // batch)
    total = count_steps(recipe, len(examples))
    due = (
        {round(i * total / recipe.get("looks", 1)) for i in range(recipe.get("looks", 1) + 1)}
        if evaluate
        else set()
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        step, losses, evaluations = _resume(model, optimizer, work)
        if step and on_resume is not None:
            on_resume(step)
        saved_at = time.monotonic()
        while True:
            if evaluate and step in due and (not evaluations or evaluations[-1][0] < step):
                evaluations.append([step, evaluate()])
                model.train()
            if step >= total:
                return losses, evaluations
            epoch, place = divmod(step, per_epoch)
            rows = np.random.default_rng([seed, epoch]).permutation(len(examples))[
                place * batch : (place + 1) * batch
            ]
            augment = recipe.get("augment", {})
            # Repeated augmentation: the same images several times, each with its own changes.
            rows = np.resize(rows[: -(-batch // augment.get("repeat", 1))], len(rows))
            for group in optimizer.param_groups:
                group["lr"] = recipe["rate"] * schedule(step, total, recipe.get("warmup", 0.1))
            inputs, labels = move_batch(examples.batch(rows), work.device, dtype)
            if augment:
                rng = np.random.default_rng([seed, step, 1])
                inputs["pixel_values"] = augment_images(inputs["pixel_values"], augment, rng)
                if {"mixup", "cutmix", "smooth"} & augment.keys():
                    inputs["pixel_values"], labels = mix_images(
                        inputs["pixel_values"], labels, examples.classes, augment, rng
                    )
            with exact_arithmetic(dtype):
                logits, extra = logits_and_extra_loss(model, inputs)
                loss = loss_of(examples, logits, labels) + (0.0 if extra is None else extra)
                optimizer.zero_grad()
                loss.backward()
            if "clip" in recipe:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
            optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
            if on_step is not None:
                on_step(step, total, losses[-1])
            if time.monotonic() - saved_at >= work.every:
                _save_state(model, optimizer, step, {"losses": losses, "seen": evaluations}, work)
                saved_at = time.monotonic()


def count_steps(recipe: Parameters, examples: int) -> int:
    """Return the number of steps of a recipe: `steps`, or `epochs` over the examples."""
    return (
        int(recipe["steps"])
        if "steps" in recipe
        else max(1, examples // int(recipe["batch"])) * int(recipe["epochs"])
    )


def schedule(step: int, total: int, warmup: float) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then cosine to zero."""
    warmup_steps = max(1, round(warmup * total))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = max(1, total - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps))


OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def exact_arithmetic(dtype: torch.dtype) -> Any:
    """Return a context in which float64 models compute in float64 throughout; it does nothing for
    other dtypes.
    """
    return strict_float64() if dtype == torch.float64 else contextlib.nullcontext()


def move_batch(
    batch: tuple[dict[str, Tensor], Tensor], device: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Move a batch to a device, and its floating-point inputs to a dtype."""
    inputs, labels = batch
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()
    }, labels.to(device)


def mean_loss(
    model: torch.nn.Module, examples: Examples, batch: int, dtype: torch.dtype, device: str
) -> float:
    """Compute the mean loss over examples, in evaluation mode."""
    model.eval()
    total = 0.0
    with torch.no_grad(), exact_arithmetic(dtype):
        for start in range(0, len(examples), batch):
            rows = np.arange(start, min(start + batch, len(examples)))
            inputs, labels = move_batch(examples.batch(rows), device, dtype)
            total += len(rows) * float(loss_of(examples, logits_of(model, inputs), labels))
    return total / len(examples)


def _save_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    history: Mapping[str, Any],
    work: ResumeState,
) -> None:
    """Save the weights, the optimizer's moments, the random state and the history."""
    tensors = {f"model/{name}": t.clone() for name, t in model.state_dict().items()} | {
        "random": torch.get_rng_state()
    }
    if work.device.startswith("cuda"):
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    for i, entries in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer/{i}/{name}": torch.as_tensor(value) for name, value in entries.items()
        }
    work.save({"step": step, **history}, tensors)


def _resume(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: ResumeState
) -> tuple[int, list[float], list[list[float]]]:
    """Restore a saved run: weights, the optimizer's moments, the random state.

    Returns:
        The number of steps done, their losses, and the evaluations so far.
    """
    saved = work.load()
    if saved is None:
        return 0, [], []
    model.load_state_dict(
        {
            name.removeprefix("model/"): t
            for name, t in saved.tensors.items()
            if name.startswith("model/")
        }
    )
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith("optimizer/"):
            _, i, key = name.split("/")
            state.setdefault(int(i), {})[key] = tensor
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    torch.set_rng_state(saved.tensors["random"])
    if "random/cuda" in saved.tensors:
        torch.cuda.set_rng_state(saved.tensors["random/cuda"])
    return (
        int(saved.values["step"]),
        list(saved.values["losses"]),
        list(saved.values.get("seen", [])),
    )
