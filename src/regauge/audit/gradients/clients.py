"""The client's side: a batch becomes an update, and the truth stays.

    update, truth = contribute(model, plan_of("mjp=0.5"), examples, inputs, labels, seed=0)

The server is given the update; whoever scores an attack is given the truth. What a client draws
(puzzles, noise, shuffles) is a function of the seed.
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
    """What a client keeps: its inputs as they were and as the model read them (after a puzzle),
    labels, and the puzzle.
    """

    original: Inputs
    read: Inputs
    labels: Tensor
    puzzle: Puzzle | None = None


def prepare_model(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """The model that both sides have under a plan: a copy, wrapped for MJP or without positions. A
    wrapped model stays as it is.
    """
    found = copy.deepcopy(model)
    if isinstance(plan.model, Mjp) and not isinstance(found, MaskedJigsaw):
        parts = Variant(
            "audit",
            shuffle="patches",
            unknown=plan.model.unknown,
            localize="mlp" if plan.model.localize else None,
        )
        found = MaskedJigsaw(found, plan.model.ratio, variant=parts)
    if isinstance(plan.model, NoPositions):
        table = find_positions(unwrap_model(found)[0]).table
        if table is None:
            raise UpdateError(f"{type(found).__name__} has no table of positions to do without")
        with torch.no_grad():
            unwrap_model(found)[0].get_parameter(table).zero_()
    return found


def contribute(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    seed: int = 0,
) -> tuple[Update, Truth]:
    """One update, of all `inputs`: they are shared out among the plan's clients. `examples` says
    what the loss is of (`tasks.loss_of`).
    """
    expected = plan.samples * plan.clients
    if len(labels) != expected:
        raise UpdateError(
            f'an update under "{plan.text}" is made of {expected} samples, and {len(labels)} '
            "were given"
        )
    sent, truths = [], []
    for client in range(plan.clients):
        at = slice(client * plan.samples, (client + 1) * plan.samples)
        own = {name: t[at] for name, t in inputs.items()}
        one, truth = _contribute_one(model, plan, examples, own, labels[at], f"{seed}/{client}")
        sent.append(one)
        truths.append(truth)
    update = sent[0] if len(sent) == 1 else average_updates(sent)
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
    """What the server has: model and update, and of the truth what the threat grants and no
    more.
    """
    if len(truth.labels) != plan.samples * plan.clients:
        raise UpdateError(
            f'an update under "{plan.text}" is made of {plan.samples * plan.clients} samples, '
            f"and the truth has {len(truth.labels)}"
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
    """The same, of an update that was made by no plan: one that was recorded."""
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


def rehearse(
    model: torch.nn.Module, plan: Plan, own: Examples, count: int, seed: int
) -> list[Rehearsal]:
    """Updates that an adversary makes of its own samples with the client's code: as many as it has
    samples for, at most `count`.
    """
    size = plan.samples * plan.clients
    out = []
    for n in range(min(count, len(own) // size)):
        inputs, labels = own.batch(np.arange(n * size, (n + 1) * size))
        update, truth = contribute(
            model,
            plan,
            own,
            cast_inputs(model, inputs),
            labels.to(next(model.parameters()).device),
            seed + n,
        )
        out.append(to_rehearsal(update, truth))
    return out


def sample_rehearsals(
    model: torch.nn.Module, plan: Plan, own: Examples, count: int, seed: int
) -> Iterator[Rehearsal]:
    """As many rehearsals as are asked for, one after the other: batches are drawn anew each time,
    so that few samples serve.
    """
    size, draw = plan.samples * plan.clients, np.random.default_rng(seed)
    order = np.concatenate(
        [draw.permutation(len(own)) for _ in range(-(-count * size // len(own)))]
    )
    for n in range(count if size <= len(own) else 0):
        inputs, labels = own.batch(order[n * size : (n + 1) * size])
        update, truth = contribute(
            model,
            plan,
            own,
            cast_inputs(model, inputs),
            labels.to(next(model.parameters()).device),
            seed + n,
        )
        yield to_rehearsal(update, truth)


def to_rehearsal(update: Update, truth: Truth) -> Rehearsal:
    """An update of the adversary's own, with what it was made of."""
    return Rehearsal(
        update,
        truth.read["pixel_values"],
        None if truth.puzzle is None else truth.puzzle.mask,
        truth.original["pixel_values"],
    )


def cast_inputs(model: torch.nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Inputs in the model's dtype, on its device."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    return {
        k: v.to(like) if v.is_floating_point() else v.to(like.device) for k, v in inputs.items()
    }


def _contribute_one(
    model: torch.nn.Module,
    plan: Plan,
    examples: Examples,
    inputs: Inputs,
    labels: Tensor,
    label: str,
) -> tuple[Update, Truth]:
    own = copy.deepcopy(model).train()
    unwrap_model(own)[0].train(plan.dropout)
    frozen = {name for part in plan.frozen for name in part_parameters(model, part)}
    parameters = {name: p for name, p in own.named_parameters() if p.requires_grad}
    count = int(plan.steps.count) if plan.steps is not None else 1
    fresh = plan.steps is not None and plan.steps.fresh
    puzzle, read = None, inputs
    started = {name: p.detach().clone() for name, p in parameters.items()}
    slopes: dict[str, Tensor] = {}
    for step in range(count):
        at = slice(step * plan.batch, (step + 1) * plan.batch) if fresh else slice(None)
        here, answers = {name: t[at] for name, t in inputs.items()}, labels[at]
        drawn = make_puzzle(own, plan, here, f"{label}/{step}")
        if step == 0:
            puzzle = drawn
            read = (
                inputs
                if drawn is None
                else {**inputs, "pixel_values": drawn.apply(inputs["pixel_values"])}
            )
        slopes = _compute_grads(
            own, plan, examples, here, answers, drawn, parameters, f"{label}/{step}"
        )
        if count > 1:
            assert plan.steps is not None
            with torch.no_grad():
                for name, p in parameters.items():
                    if name in slopes and name not in frozen:
                        p.sub_(plan.steps.rate * slopes[name])
    if count > 1 and plan.steps is not None:
        update = {
            name: p.detach() - started[name] for name, p in parameters.items() if name not in frozen
        }
    else:
        update = slopes
    if isinstance(plan.model, NoPositions) and not plan.model.sent:
        update = {
            name: t for name, t in update.items() if name not in part_parameters(model, "positions")
        }
    draw = KeyedRandom(seed_key(0), f"update/{label}")
    for defence in plan.update_defences:
        more: dict[str, Any] = {"count": plan.batch} if defence is plan.private else {}
        update = defence.apply_to_update(update, model, draw, **more)
    made = (
        Update(update)
        if count == 1 or plan.steps is None
        else Update(update, "change", count, plan.steps.rate)
    )
    return made, Truth(inputs, read, labels, puzzle)


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
    """Gradients of the mean loss; of each sample, clipped, in the mean, where the plan is
    private.
    """
    if plan.private is None or len(labels) == 1:
        found = batch_grads(
            model,
            examples,
            inputs,
            labels,
            parameters,
            puzzle=puzzle,
            rows=label if plan.rows else None,
        )
        return found if plan.private is None else clip_global_norm(found, plan.private.norm)
    total: dict[str, Tensor] = {}
    for i in range(len(labels)):
        one = {name: t[i : i + 1] for name, t in inputs.items()}
        part = None if puzzle is None else puzzle.rows(slice(i, i + 1))
        found = batch_grads(
            model,
            examples,
            one,
            labels[i : i + 1],
            parameters,
            puzzle=part,
            rows=label if plan.rows else None,
        )
        for name, t in clip_global_norm(found, plan.private.norm).items():
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
    """The gradients of one batch's mean loss by the parameters that it depends on."""
    with _shuffled_rows(model, rows):
        if isinstance(model, MaskedJigsaw):
            out = (
                model(inputs["pixel_values"], puzzle=puzzle)
                if puzzle is not None
                else _forward_plain(model, inputs["pixel_values"])
            )
            loss = (
                loss_of(examples, out, labels)
                if isinstance(out, Tensor)
                else loss_of(examples, out.logits, labels)
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
    found = torch.autograd.grad(loss, [parameters[n] for n in names], allow_unused=True)
    return {n: g.detach() for n, g in zip(names, found, strict=True) if g is not None}


def _forward_plain(model: MaskedJigsaw, pixels: Tensor) -> Tensor:
    """A pass of MJP's model without a puzzle, its unknown embedding unused."""
    return logits_of(model.model, {"pixel_values": pixels})


def make_puzzle(model: torch.nn.Module, plan: Plan, inputs: Inputs, label: str) -> Puzzle | None:
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
    """Passes in which tokens change places after the position embedding."""
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
    """What several clients kept, one below the other."""
    original, read = (
        concat_inputs([getattr(t, name) for t in truths]) for name in ("original", "read")
    )
    return Truth(original, read, torch.cat([t.labels for t in truths]), truths[0].puzzle)


def concat_inputs(parts: Sequence[Inputs]) -> dict[str, Tensor]:
    """Batches one below the other; texts are padded to the longest."""
    out = {}
    for name in parts[0]:
        tensors = [p[name] for p in parts]
        if tensors[0].ndim == 2:
            longest = max(t.shape[1] for t in tensors)
            tensors = [torch.nn.functional.pad(t, (0, longest - t.shape[1])) for t in tensors]
        out[name] = torch.cat(tensors)
    return out
