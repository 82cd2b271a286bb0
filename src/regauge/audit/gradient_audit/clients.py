"""The client's side: make an update of a batch, and keep the truth for scoring.

    update, truth = contribute(model, parse_plan("mjp=0.5"), examples, inputs, labels, seed=0)

The server gets the update, the scores get the truth. Puzzles, noise and shuffles of a client are
functions of the seed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.attacks.updates import (
    Granted,
    Rehearsal,
    SentUpdate,
    Threat,
    Update,
    average_updates,
    check_update,
)
from regauge.audit.inputs import cast_inputs
from regauge.core.rng import seed_key
from regauge.data.tasks import Examples, logits_of, loss_of
from regauge.defences.gradients import Mjp, NoPositions, Plan, clip_global_norm, part_parameters
from regauge.defences.split import KeyedRandom
from regauge.errors import UpdateError
from regauge.jigsaw.layers import unwrap_model
from regauge.jigsaw.masks import Puzzle, sample_puzzle
from regauge.jigsaw.positions import find_positions
from regauge.jigsaw.variants import Variant
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Truth:
    """The secret of a client.

    Attributes:
        original: The inputs.
        read: The inputs of the model, after a puzzle.
        labels: The labels.
        puzzle: The puzzle of the first step.
    """

    original: Inputs
    read: Inputs
    labels: Tensor
    puzzle: Puzzle | None = None


def prepare_model(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Return the model of both sides under a plan: a copy, wrapped for MJP or without positions."""
    wrapped = copy.deepcopy(model)
    if isinstance(plan.model, Mjp) and not isinstance(wrapped, MaskedJigsaw):
        variant = Variant(
            "audit",
            shuffle="patches",
            unknown=plan.model.unknown,
            localize="mlp" if plan.model.localize else None,
        )
        wrapped = MaskedJigsaw(wrapped, plan.model.ratio, variant=variant)
    if isinstance(plan.model, NoPositions):
        table = find_positions(unwrap_model(wrapped)[0]).table
        if table is None:
            raise UpdateError(f"the model must have a position table, got {type(wrapped).__name__}")
        with torch.no_grad():
            unwrap_model(wrapped)[0].get_parameter(table).zero_()
    return wrapped


def contribute(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    seed: int = 0,
) -> tuple[Update, Truth]:
    """Make one update of all inputs, which are divided among the clients of the plan.

    Args:
        model: The model before the update.
        plan: The defences, batch size and local steps.
        examples: Examples of the task, which determine the loss (`tasks.loss_of`).
        inputs: The inputs of all clients.
        labels: Their labels.
        seed: The random seed of puzzles, noise and shuffles.

    Returns:
        The update as the server gets it, and the truth.

    Raises:
        UpdateError: The number of samples does not fit the plan.
    """
    expected = plan.samples * plan.clients
    if len(labels) != expected:
        raise UpdateError(
            f'an update under "{plan.text}" must be made of {expected} samples, got {len(labels)}'
        )
    updates, truths = [], []
    for client in range(plan.clients):
        rows = slice(client * plan.samples, (client + 1) * plan.samples)
        client_inputs = {name: t[rows] for name, t in inputs.items()}
        client_update, truth = _contribute_one(
            model, plan, examples, client_inputs, labels[rows], f"{seed}/{client}"
        )
        updates.append(client_update)
        truths.append(truth)
    update = updates[0] if len(updates) == 1 else average_updates(updates)
    check_update(model, update)
    return update, truths[0] if len(truths) == 1 else concat_truths(truths)


def build_view(
    model: torch.nn.Module,
    plan: Plan,
    update: Update,
    truth: Truth,
    threat: Threat,
    images: Tensor | None = None,
    rehearsals: Sequence[Rehearsal] = (),
) -> SentUpdate:
    """Return the view of the server: model, update, and what the threat grants of the truth.

    Raises:
        UpdateError: The number of samples does not fit the plan.
    """
    if len(truth.labels) != plan.samples * plan.clients:
        raise UpdateError(
            f'an update under "{plan.text}" must be made of {plan.samples * plan.clients} samples, '
            f"got a truth of {len(truth.labels)}"
        )
    return build_recorded_view(model, update, truth, threat, images, rehearsals)


def build_recorded_view(
    model: torch.nn.Module,
    update: Update,
    truth: Truth,
    threat: Threat,
    images: Tensor | None = None,
    rehearsals: Sequence[Rehearsal] = (),
) -> SentUpdate:
    """Return the view of an update without a plan, such as a recorded one."""
    pixels = truth.read.get("pixel_values")
    granted = Granted(
        batch=len(truth.labels) if threat.batch else None,
        labels=truth.labels if threat.labels else None,
        mask=truth.puzzle.mask if threat.mask and truth.puzzle is not None else None,
        images=images if threat.images else None,
        length=int(truth.read["input_ids"].shape[1])
        if threat.length and "input_ids" in truth.read
        else None,
        rehearsals=tuple(rehearsals) if threat.images else (),
    )
    return SentUpdate(model, update, () if pixels is None else tuple(pixels.shape[1:]), granted)


def contribute_rows(
    model: torch.nn.Module, plan: Plan, examples: Examples, rows: Any, seed: int
) -> tuple[Update, Truth]:
    """Make one update of some rows of the examples, see `contribute`."""
    inputs, labels = examples.batch(rows)
    labels = labels.to(next(model.parameters()).device)
    return contribute(model, plan, examples, cast_inputs(model, inputs), labels, seed)


def rehearse(
    model: torch.nn.Module, plan: Plan, own: Examples, count: int, seed: int
) -> list[Rehearsal]:
    """Make updates of the adversary's own samples with the client's code.

    Each sample is used once, so there may be fewer than `count`.
    """
    count = min(count, len(own) // (plan.samples * plan.clients))
    return list(_rehearse_rows(model, plan, own, np.arange(len(own)), count, seed))


def sample_rehearsals(
    model: torch.nn.Module, plan: Plan, own: Examples, count: int, seed: int
) -> Iterator[Rehearsal]:
    """Yield `count` rehearsals; batches are resampled, so that a few samples are enough."""
    size, rng = plan.samples * plan.clients, np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(own)) for _ in range(-(-count * size // len(own)))])
    return _rehearse_rows(model, plan, own, order, count if size <= len(own) else 0, seed)


def _rehearse_rows(
    model: torch.nn.Module, plan: Plan, own: Examples, order: Any, count: int, seed: int
) -> Iterator[Rehearsal]:
    size = plan.samples * plan.clients
    for n in range(count):
        rows = order[n * size : (n + 1) * size]
        yield to_rehearsal(*contribute_rows(model, plan, own, rows, seed + n))


def to_rehearsal(update: Update, truth: Truth) -> Rehearsal:
    """Return a rehearsal: an update of the adversary's own, with its inputs."""
    return Rehearsal(
        update,
        truth.read["pixel_values"],
        None if truth.puzzle is None else truth.puzzle.mask,
        truth.original["pixel_values"],
    )


def _contribute_one(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    label: str,
) -> tuple[Update, Truth]:
    """Make the update of one client; puzzles, noise and shuffles depend on the label."""
    client_model = copy.deepcopy(model).train()
    unwrap_model(client_model)[0].train(plan.dropout)
    frozen = {name for part in plan.frozen for name in part_parameters(model, part)}
    parameters = {name: p for name, p in client_model.named_parameters() if p.requires_grad}
    count = int(plan.steps.count) if plan.steps is not None else 1
    fresh = plan.steps is not None and plan.steps.fresh
    puzzle, read = None, inputs
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    grads: dict[str, Tensor] = {}
    for step in range(count):
        rows = slice(step * plan.batch, (step + 1) * plan.batch) if fresh else slice(None)
        batch, answers = {name: t[rows] for name, t in inputs.items()}, labels[rows]
        sampled = make_puzzle(client_model, plan, batch, f"{label}/{step}")
        if step == 0:
            puzzle = sampled
            read = (
                inputs
                if sampled is None
                else {**inputs, "pixel_values": sampled.apply(inputs["pixel_values"])}
            )
        grads = _compute_grads(
            client_model, plan, examples, batch, answers, sampled, parameters, f"{label}/{step}"
        )
        if count > 1:
            assert plan.steps is not None
            with torch.no_grad():
                for name, p in parameters.items():
                    if name in grads and name not in frozen:
                        p.sub_(plan.steps.lr * grads[name])
    if count > 1 and plan.steps is not None:
        update = {
            name: p.detach() - initial[name] for name, p in parameters.items() if name not in frozen
        }
    else:
        update = grads
    if isinstance(plan.model, NoPositions) and not plan.model.sent:
        update = {
            name: t for name, t in update.items() if name not in part_parameters(model, "positions")
        }
    random = KeyedRandom(seed_key(0), f"update/{label}")
    for defence in plan.update_defences:
        options: dict[str, Any] = {"count": plan.batch} if defence is plan.private else {}
        update = defence.apply_to_update(update, model, random, **options)
    sent = (
        Update(update)
        if count == 1 or plan.steps is None
        else Update(update, "change", count, plan.steps.lr)
    )
    return sent, Truth(inputs, read, labels, puzzle)


def _compute_grads(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    puzzle: Puzzle | None,
    parameters: Mapping[str, torch.nn.Parameter],
    label: str,
) -> dict[str, Tensor]:
    """Return the gradients of the mean loss; if the plan is private, clipped for each sample."""
    if plan.private is None or len(labels) == 1:
        grads = batch_grads(
            model,
            examples,
            inputs,
            labels,
            parameters,
            puzzle=puzzle,
            rows=label if plan.rows else None,
        )
        return grads if plan.private is None else clip_global_norm(grads, plan.private.norm)
    total: dict[str, Tensor] = {}
    for i in range(len(labels)):
        sample = {name: t[i : i + 1] for name, t in inputs.items()}
        own_puzzle = None if puzzle is None else puzzle.rows(slice(i, i + 1))
        grads = batch_grads(
            model,
            examples,
            sample,
            labels[i : i + 1],
            parameters,
            puzzle=own_puzzle,
            rows=label if plan.rows else None,
        )
        for name, t in clip_global_norm(grads, plan.private.norm).items():
            total[name] = total.get(name, 0) + t / len(labels)
    return total


def batch_grads(
    model: torch.nn.Module,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    puzzle: Puzzle | None = None,
    rows: str | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of a batch's mean loss for the parameters that it depends on."""
    with _shuffled_rows(model, rows):
        if isinstance(model, MaskedJigsaw):
            output = (
                model(inputs["pixel_values"], puzzle=puzzle)
                if puzzle is not None
                else _forward_plain(model, inputs["pixel_values"])
            )
            loss = (
                loss_of(examples, output, labels)
                if isinstance(output, Tensor)
                else loss_of(examples, output.logits, labels)
            )
            if model.localizer is not None:  # the regression of positions is in every step of MJP
                grid = model.layout.grid
                assert grid is not None
                mask = (
                    torch.zeros(1, grid[0] * grid[1], dtype=torch.bool)
                    if puzzle is None
                    else puzzle.mask
                )
                loss = loss + model.weight_at(0) * model.regression(mask.to(loss.device))
        else:
            loss = loss_of(examples, logits_of(model, inputs), labels)
    names = list(parameters)
    grads = torch.autograd.grad(loss, [parameters[n] for n in names], allow_unused=True)
    return {n: g.detach() for n, g in zip(names, grads, strict=True) if g is not None}


def _forward_plain(model: MaskedJigsaw, pixels: Tensor) -> Tensor:
    """Run MJP's model without a puzzle, its unknown embedding unused."""
    return logits_of(model.model, {"pixel_values": pixels})


def make_puzzle(model: torch.nn.Module, plan: Plan, inputs: Inputs, label: str) -> Puzzle | None:
    """Return the puzzle of a batch, sampled by a label; None if the plan has none."""
    if (
        not isinstance(plan.model, Mjp)
        or not plan.model.shuffle
        or not isinstance(model, MaskedJigsaw)
    ):
        return None
    seed = [int(w) for w in KeyedRandom(seed_key(0), label).stream("puzzle").words(2)]
    return sample_puzzle(1, model.grid_of(inputs["pixel_values"]), plan.model.ratio, seed)


@contextlib.contextmanager
def _shuffled_rows(model: torch.nn.Module, label: str | None) -> Iterator[None]:
    """Shuffle tokens after the position embedding, in passes within the context."""
    if label is None:
        yield
        return
    from regauge.locking.permuted import run_permuted, sample_row_permutation
    from regauge.models.cut import cut

    with cut(unwrap_model(model)[0]).route(
        lambda c: run_permuted(
            c, shuffle=sample_row_permutation(c.stream.shape[1], seed_key(0), label)
        )
    ):
        yield


def concat_truths(truths: Sequence[Truth]) -> Truth:
    """Concatenate the truths of several clients."""
    original, read = (
        concat_inputs([getattr(t, name) for t in truths]) for name in ("original", "read")
    )
    return Truth(original, read, torch.cat([t.labels for t in truths]), truths[0].puzzle)


def concat_inputs(parts: Sequence[Inputs]) -> dict[str, Tensor]:
    """Concatenate batches; texts are padded to the longest."""
    concatenated = {}
    for name in parts[0]:
        tensors = [p[name] for p in parts]
        if tensors[0].ndim == 2:
            longest = max(t.shape[1] for t in tensors)
            tensors = [torch.nn.functional.pad(t, (0, longest - t.shape[1])) for t in tensors]
        concatenated[name] = torch.cat(tensors)
    return concatenated
