"""The client's side of a round: train the server's state on local examples.

Batches, dropout and puzzles depend only on the run's seed, the round, the client and the step, so
that a repeated round gives the same contribution on every engine.
"""

from __future__ import annotations

import math
from collections.abc import Set

import numpy as np
import torch

from regauge.data.tasks import Examples, logits_and_extra_loss, loss_of
from regauge.data.train import ScheduledOptimizer, descend, move_batch
from regauge.errors import FederatedError
from regauge.federated.settings import Settings
from regauge.federated.states import Contribution, State, digest_of, layout_of, load_state, state_of
from regauge.jigsaw import MaskedJigsaw, TextJigsaw
from regauge.models.load import reinitialize
from regauge.split.client.train import batch_rng

Model = torch.nn.Module


def prepare_model(model: Model, settings: Settings) -> Model:
    """Return the model that both sides train, wrapped for puzzles if the settings have them.

    Args:
        model: The model, without a wrapper.
        settings: The settings of the run.

    Returns:
        The model, or its wrapper.

    Raises:
        JigsawError: The model cannot be trained with puzzles.

    Example:
        >>> settings = regauge.federated.Settings(clients=2, rounds=1, jigsaw=0.3)
        >>> type(regauge.federated.prepare_model(vit, settings)).__name__
        'MaskedJigsaw'
    """
    if settings.jigsaw == 0:
        return model
    kind = MaskedJigsaw if takes_images(model) else TextJigsaw
    return kind(model, settings.jigsaw, probability=settings.probability, seed=settings.seed)


def takes_images(model: Model) -> bool:
    """Return whether a model reads images; models without a config do."""
    import inspect

    return (
        getattr(model, "config", None) is None
        or "pixel_values" in inspect.signature(model.forward).parameters
    )


def unwrap(model: Model) -> Model:
    """Return the model without the wrapper for puzzles."""
    return model.unwrap() if isinstance(model, MaskedJigsaw | TextJigsaw) else model


def contribute(
    model: Model,
    state: State,
    examples: Examples,
    settings: Settings,
    number: int,
    client: int,
    *,
    frozen: Set[str] = frozenset(),
    local: State | None = None,
) -> Contribution:
    """Train one client in one round, and return its contribution.

    Args:
        model: A model to train in; its weights are overwritten.
        state: The server's state.
        examples: The examples of the client.
        settings: The settings of the run.
        number: The round, from 0.
        client: The client.
        frozen: Names of parameters that are not trained.
        local: Tensors of the client that replace the server's.

    Returns:
        The contribution.

    Raises:
        FederatedError: The client has no examples, the state is another model's, or everything is
            frozen.

    Example:
        >>> settings = regauge.federated.Settings(clients=1, rounds=1, steps=2)
        >>> state = regauge.federated.state_of(vit)
        >>> sent = regauge.federated.contribute(vit, state, images, settings, 0, 0)
        >>> sent.steps, sent.examples
        (2, 100)
    """
    load_state(model, {**state, **(local or {})})
    if not len(examples):
        raise FederatedError(
            f"client {client} has no examples: its part is empty",
            hint="it does not take part; use a larger alpha, or fewer clients",
        )
    is_whole = settings.independent and number == 0
    if is_whole:
        seed = int(np.random.default_rng([settings.seed, client, 106]).integers(1 << 31))
        inner = unwrap(model)
        inner.load_state_dict(reinitialize(inner, seed).state_dict())
    before = state_of(model)
    losses, rows = _train(model, examples, settings, number, client, frozen)
    after = state_of(model)
    trained = {
        name for name, p in model.named_parameters() if p.requires_grad and name not in frozen
    } | (after.keys() - dict(model.named_parameters()).keys())
    tensors = {
        name: after[name] if is_whole else after[name] - before[name] for name in sorted(trained)
    }
    loss = float(np.mean(losses))
    layout, kind = digest_of(layout_of(before)), "weights" if is_whole else "change"
    batch = min(settings.batch, len(examples))
    return Contribution(
        client,
        number,
        layout,
        tensors,
        len(examples),
        len(losses),
        batch,
        settings.learning_rate,
        loss,
        kind,  # type: ignore[arg-type]
        rows,
    )


def max_steps(count: int, settings: Settings) -> int:
    """Return the local steps of a client with `count` examples, before jitter."""
    return settings.steps or settings.epochs * math.ceil(count / settings.batch)


def local_steps(count: int, settings: Settings, number: int, client: int) -> int:
    """Return the local steps of a client with `count` examples in a round, after jitter."""
    steps = max_steps(count, settings)
    if settings.step_jitter:
        share = (
            1
            - settings.step_jitter
            * np.random.default_rng([settings.seed, 103, number, client]).random()
        )
        steps = max(1, round(share * steps))
    return steps


def sample_rows(
    count: int, settings: Settings, number: int, client: int
) -> tuple[tuple[int, ...], ...]:
    """Return the example indices of each local step, within the client's part."""
    steps_per_epoch = math.ceil(count / settings.batch)
    rows = []
    for step in range(local_steps(count, settings, number, client)):
        epoch, position = divmod(step, steps_per_epoch)
        order = np.random.default_rng([settings.seed, 104, number, client, epoch]).permutation(
            count
        )
        rows.append(tuple(int(i) for i in order[position * settings.batch :][: settings.batch]))
    return tuple(rows)


def _train(
    model: Model, examples: Examples, settings: Settings, number: int, client: int, frozen: Set[str]
) -> tuple[list[float], tuple[tuple[int, ...], ...]]:
    trained = {
        name: p for name, p in model.named_parameters() if p.requires_grad and name not in frozen
    }
    if not trained:
        raise FederatedError("a model must have a parameter that is not frozen", hint="freeze less")
    parameter = next(p for p in trained.values() if p.is_floating_point())
    start = {name: p.detach().clone() for name, p in trained.items()} if settings.proximal else {}
    rows = sample_rows(len(examples), settings, number, client)
    set_puzzle_seed(model, settings, number, client)

    def backward(step: int) -> torch.Tensor:
        batch = examples.batch(np.asarray(rows[step]))
        inputs, labels = move_batch(batch, parameter.device, parameter.dtype)
        with batch_rng(settings.seed, ((number * settings.clients + client) << 24) + step):
            logits, extra = logits_and_extra_loss(model, inputs)
            loss = loss_of(examples, logits, labels)
            (loss if extra is None else loss + extra).backward()
        return loss.detach()  # the extra loss of puzzles is not reported

    @torch.no_grad()
    def add_proximal_term(step: int) -> None:
        for name, p in trained.items():
            if settings.proximal and p.grad is not None:
                p.grad += settings.proximal * (p - start[name])

    model.train()
    optimizer = ScheduledOptimizer(trained.values(), settings.training)
    steps = descend(optimizer, backward, range(len(rows)), before_step=add_proximal_term)
    losses = [loss for _, loss in steps]
    model.eval()
    return losses, rows


def set_puzzle_seed(model: Model, settings: Settings, number: int, client: int) -> None:
    """Set the puzzle seed of a wrapped model for one client and round."""
    if isinstance(model, MaskedJigsaw | TextJigsaw):
        model.seed, model.passes = (
            int(np.random.default_rng([settings.seed, 105, client]).integers(1 << 31)),
            number << 20,
        )
