"""The training loop, and the training of a model by a recipe.

`descend` is the loop of every training: it takes one optimizer step after the other. Its caller
chooses batches, dtypes and random numbers in `backward`, and changes gradients in `before_step`:

    optimizer = ScheduledOptimizer(model.parameters(), OptimizerConfig("adamw", lr=1e-3, clip=1.0))
    backward = backward_on(model, examples, lambda n: rows[n])
    for step, loss in descend(optimizer, backward, range(len(rows))): ...

`train_model` adds what most trainings need: seeded batches, warm-up and cosine schedule,
augmentation, saved state and exact resumption. It is a function of its parameters alone: batches,
learning rates, augmentation and dropout depend on the seed and the step. An interrupted run resumes
as if it had not stopped, and two runs with one seed use the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from regauge.checkpoints.resume import ResumeState
from regauge.data.augment import augment_images, mix_images
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples, logits_and_extra_loss, loss_of
from regauge.errors import TrainingError
from regauge.testing import strict_float64

Tensor = torch.Tensor
Parameters = Mapping[str, Any]
Evaluate = Callable[[], float]
# Computes the gradients of a micro-batch, by its number, and returns its loss.
Backward = Callable[[int], Tensor | float]


class Stepper(Protocol):
    """Optimizer steps, from gradients that `descend` has computed."""

    def collect_gradients(self) -> None:
        """Take over the gradients of a micro-batch."""

    def step(self, number: int) -> None:
        """Take the step of this number, from 0, and drop the gradients."""


class ScheduledOptimizer:
    """An optimizer of parameters with a schedule of its learning rate and clipped gradients.

    Args:
        parameters: The trained parameters.
        config: The options of the optimizer.
        lr_at: The learning rate of a step; by default that of the config's schedule.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: OptimizerConfig,
        lr_at: Callable[[int], float] | None = None,
    ) -> None:
        self.parameters, self.config = list(parameters), config
        self.lr_at = lr_at or config.lr_at
        self.optimizer = config.build(self.parameters)
        self.optimizer.zero_grad()

    def collect_gradients(self) -> None:
        """Do nothing: torch adds gradients up."""

    def step(self, number: int) -> None:
        """Clip the gradients, take the step of this number, from 0, and drop the gradients."""
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(number)
        self.optimizer.step()
        self.optimizer.zero_grad()


def descend(
    optimizer: Stepper,
    backward: Backward,
    steps: Iterable[int],
    *,
    accumulate: int = 1,
    before_step: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, float]]:
    """Train: take one optimizer step for each number of `steps`.

    Args:
        optimizer: Takes the steps.
        backward: Adds the gradients of a micro-batch to the parameters and returns its loss.
            Micro-batches are numbered from 0, through all steps.
        steps: The numbers of the steps, from 0. A resumed training starts at a later one.
        accumulate: Micro-batches of a step. Their losses and gradients add up: `backward` divides
            them if they are to be averaged.
        before_step: Called with the number of a step between its gradients and the step.

    Yields:
        The number of steps done, and the loss of the last one.
    """
    for step in steps:
        loss = 0.0
        for n in range(step * accumulate, (step + 1) * accumulate):
            loss += float(backward(n))
            optimizer.collect_gradients()
        if before_step is not None:
            before_step(step)
        optimizer.step(step)
        yield step + 1, loss


def backward_on(
    model: torch.nn.Module, examples: Examples, rows_of: Callable[[int], Any]
) -> Backward:
    """Return the `backward` of a model that is trained on examples, in the mode that it is in.

    Args:
        model: The model.
        examples: The training examples. They are moved to the device and the dtype of the model.
        rows_of: The indices of the examples of a batch, by its number.
    """
    like = next(p for p in model.parameters() if p.is_floating_point())

    def backward(n: int) -> Tensor:
        batch = move_batch(examples.batch(rows_of(n)), like.device, like.dtype)
        return compute_gradients(model, examples, *batch)

    return backward


def compute_gradients(
    model: torch.nn.Module, examples: Examples, inputs: Mapping[str, Tensor], labels: Tensor
) -> Tensor:
    """Add the gradients of a batch's loss to the parameters.

    Returns:
        The loss, with the extra loss of a model that is wrapped for training.
    """
    logits, extra = logits_and_extra_loss(model, inputs)
    loss = loss_of(examples, logits, labels)
    loss = loss if extra is None else loss + extra
    loss.backward()
    return loss.detach()


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
        recipe: `optimizer` with its learning rate `rate` (and `more` options of `OptimizerConfig`),
            `batch` (size), `epochs` or `steps`, `dtype`; optionally `schedule` ("cosine", the
            default, or "constant"), `warmup` (fraction of the steps; by default 0.1 of a cosine),
            `clip` (largest gradient norm), `augment` (see `regauge.data.augment`), `autocast` (the
            dtype of matrix products, "bfloat16"; weights keep `dtype`) and `looks` (number of
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
    total = count_steps(recipe, len(examples))
    optimizer = _build_optimizer(model, recipe, total)
    looks = recipe.get("looks", 1)
    due = {round(i * total / looks) for i in range(looks + 1)} if evaluate else set()

    def backward(step: int) -> Tensor:
        inputs, labels = move_batch(_sample_batch(examples, recipe, seed, step), work.device, dtype)
        inputs, labels = _augment_batch(inputs, labels, examples, recipe, seed, step)
        with exact_arithmetic(dtype), _autocast(recipe, work.device):
            return compute_gradients(model, examples, inputs, labels)

    def look(step: int) -> None:
        if evaluate and step in due and (not evaluations or evaluations[-1][0] < step):
            evaluations.append([step, evaluate()])
            model.train()

    with seeded(seed):
        begin, losses, evaluations = _resume(model, optimizer.optimizer, work)
        if begin and on_resume is not None:
            on_resume(begin)
        saved_at = time.monotonic()
        look(begin)
        for step, loss in descend(optimizer, backward, range(begin, total)):
            losses.append(loss)
            if on_step is not None:
                on_step(step, total, loss)
            if time.monotonic() - saved_at >= work.every:
                history = {"losses": losses, "seen": evaluations}
                _save_state(model, optimizer.optimizer, step, history, work)
                saved_at = time.monotonic()
            look(step)
        return losses, evaluations


def train_snapshots(
    model: torch.nn.Module, examples: Examples, snapshot_steps: Iterable[int], seed: int
) -> dict[int, torch.nn.Module]:
    """Return copies of a model after each of these numbers of training steps, with AdamW on random
    batches of 32 examples. The model itself is not changed.
    """
    wanted = set(snapshot_steps)
    trained, snapshots = copy.deepcopy(model).train(), {}
    config = OptimizerConfig("adamw", 1e-3, weight_decay=0.01)
    optimizer = ScheduledOptimizer(trained.parameters(), config)
    rng = np.random.default_rng(seed)
    backward = backward_on(
        trained, examples, lambda _: rng.integers(0, len(examples), min(32, len(examples)))
    )
    for step, _ in descend(optimizer, backward, range(max(wanted, default=0))):
        if step in wanted:
            snapshots[step] = copy.deepcopy(trained).eval()
    return snapshots


def count_steps(recipe: Parameters, examples: int) -> int:
    """Return the number of steps of a recipe: `steps`, or `epochs` over the examples."""
    return (
        int(recipe["steps"])
        if "steps" in recipe
        else max(1, examples // int(recipe["batch"])) * int(recipe["epochs"])
    )


def cosine_factor(step: int, total: int, warmup_steps: int) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then cosine to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = max(1, total - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers, and restore the global state afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def exact_arithmetic(dtype: torch.dtype) -> Any:
    """Return a context in which float64 models compute in float64 throughout; it does nothing for
    other dtypes.
    """
    return strict_float64() if dtype == torch.float64 else contextlib.nullcontext()


def _autocast(recipe: Parameters, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which matrix products have the dtype that a recipe names."""
    if "autocast" not in recipe:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, recipe["autocast"]))


def move_batch(
    batch: tuple[Mapping[str, Tensor], Tensor], device: torch.device | str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Move a batch to a device, and its floating-point inputs to a dtype."""
    inputs, labels = batch
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()
    }, labels.to(device)


def _build_optimizer(model: torch.nn.Module, recipe: Parameters, total: int) -> ScheduledOptimizer:
    """Build the optimizer of a recipe. Weight decay defaults to that of torch's optimizers."""
    options = {"weight_decay": 0.01 if recipe["optimizer"] == "adamw" else 0.0}
    config = OptimizerConfig(
        recipe["optimizer"],
        recipe["rate"],
        clip=recipe.get("clip", 0.0),
        **{**options, **recipe.get("more", {})},
    )
    schedule = recipe.get("schedule", "cosine")
    if schedule not in ("cosine", "constant"):
        raise TrainingError(
            f'schedule must be "cosine" or "constant", got "{schedule}"', hint="or leave it out"
        )
    if schedule == "constant":
        rising = round(recipe.get("warmup", 0.0) * total)
        return ScheduledOptimizer(
            model.parameters(),
            config,
            lambda step: float(recipe["rate"] * min(1.0, (step + 1) / max(1, rising))),
        )
    warmup_steps = max(1, round(recipe.get("warmup", 0.1) * total))
    # not the config's schedule, which rounds otherwise: stored results hold these learning rates
    return ScheduledOptimizer(
        model.parameters(),
        config,
        lambda step: float(recipe["rate"] * cosine_factor(step, total, warmup_steps)),
    )


def _sample_batch(
    examples: Examples, recipe: Parameters, seed: int, step: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the batch of a step; every epoch has its own order."""
    batch = int(recipe["batch"])
    epoch, place = divmod(step, max(1, len(examples) // batch))
    rows = np.random.default_rng([seed, epoch]).permutation(len(examples))[
        place * batch : (place + 1) * batch
    ]
    # Repeated augmentation: the same images several times, each with its own changes.
    repeat = recipe.get("augment", {}).get("repeat", 1)
    return examples.batch(np.resize(rows[: -(-batch // repeat)], len(rows)))


def _augment_batch(
    inputs: dict[str, Tensor],
    labels: Tensor,
    examples: Examples,
    recipe: Parameters,
    seed: int,
    step: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Augment the images of a batch, if the recipe does."""
    augment = recipe.get("augment")
    if not augment:
        return inputs, labels
    rng = np.random.default_rng([seed, step, 1])
    pixels = augment_images(inputs["pixel_values"], augment, rng)
    if {"mixup", "cutmix", "smooth"} & augment.keys():
        pixels, labels = mix_images(pixels, labels, examples.classes, augment, rng)
    return {**inputs, "pixel_values": pixels}, labels


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
