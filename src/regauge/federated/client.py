"""The client's side of a round: from the server's state and one's own examples to a contribution. A
function of its arguments alone.

Examples, dropout and puzzles are drawn from the run's seed, the round, the client and the step, so
that a round that is repeated, on this engine or another, sends the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Set

import numpy as np
import torch

from regauge.data.tasks import Examples, logits_and_extra_loss, loss_of
from regauge.federated.settings import FederatedError, Settings
from regauge.federated.states import Contribution, State, digest_of, layout_of, load_state, state_of
from regauge.jigsaw import MaskedJigsaw, TextJigsaw
from regauge.split.client.train import batch_rng

Model = torch.nn.Module


def prepare_model(model: Model, settings: Settings) -> Model:
    """The model that both sides train: wrapped for puzzles where the settings have them."""
    if settings.jigsaw == 0:
        return model
    kind = MaskedJigsaw if takes_images(model) else TextJigsaw
    return kind(model, settings.jigsaw, probability=settings.probability, seed=settings.seed)


def takes_images(model: Model) -> bool:
    import inspect

    return (
        getattr(model, "config", None) is None
        or "pixel_values" in inspect.signature(model.forward).parameters
    )


def unwrap(model: Model) -> Model:
    """The model without its puzzles."""
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
    """One client's part of a round, on a model that is used up by it: its weights are set, trained,
    and left as they are.

    `still` are parameters that are not trained; `own` are the client's in place of the server's. An
    empty part is refused by name, as is a state of another model.
    """
    load_state(model, {**state, **(local or {})})
    if not len(examples):
        raise FederatedError(
            f"client {client} has no examples: its part is empty",
            hint="it takes no part; use a larger alpha, or fewer clients",
        )
    whole = settings.independent and number == 0
    if whole:
        _reinitialize(model, [settings.seed, client])
    before = state_of(model)
    losses, rows = _train(model, examples, settings, number, client, frozen)
    after = state_of(model)
    trained = {
        name for name, p in model.named_parameters() if p.requires_grad and name not in frozen
    } | (after.keys() - dict(model.named_parameters()).keys())
    tensors = {
        name: after[name] if whole else after[name] - before[name] for name in sorted(trained)
    }
    loss = float(np.mean(losses))
    layout, kind = digest_of(layout_of(before)), "weights" if whole else "change"
    batch = min(settings.batch, len(examples))
    return Contribution(
        client,
        number,
        layout,
        tensors,
        len(examples),
        len(losses),
        batch,
        settings.lr,
        loss,
        kind,  # type: ignore[arg-type]
        rows,
    )


def max_steps(count: int, settings: Settings) -> int:
    """Return the local steps of a client with so many examples, before `uneven` takes some away."""
    return settings.steps or settings.epochs * math.ceil(count / settings.batch)


def local_steps(count: int, settings: Settings, number: int, client: int) -> int:
    """How many local steps a client with so many examples takes."""
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
    """The examples of every local step, by their numbers in the client's part."""
    each = math.ceil(count / settings.batch)
    out = []
    for step in range(local_steps(count, settings, number, client)):
        epoch, place = divmod(step, each)
        order = np.random.default_rng([settings.seed, 104, number, client, epoch]).permutation(
            count
        )
        out.append(tuple(int(i) for i in order[place * settings.batch :][: settings.batch]))
    return tuple(out)


def _train(
    model: Model, examples: Examples, settings: Settings, number: int, client: int, still: Set[str]
) -> tuple[list[float], tuple[tuple[int, ...], ...]]:
    trained = {
        name: p for name, p in model.named_parameters() if p.requires_grad and name not in still
    }
    if not trained:
        raise FederatedError(
            "all of the model is frozen, so that there is nothing to train", hint="freeze less"
        )
    like = next(p for p in trained.values() if p.is_floating_point())
    optimizer = settings.training.build(trained.values())
    start = {name: p.detach().clone() for name, p in trained.items()} if settings.proximal else {}
    rows = sample_rows(len(examples), settings, number, client)
    set_puzzle_seed(model, settings, number, client)
    losses = []
    model.train()
    for step, chosen in enumerate(rows):
        inputs, labels = examples.batch(np.asarray(chosen))
        moved = {
            k: v.to(like) if v.is_floating_point() else v.to(like.device) for k, v in inputs.items()
        }
        optimizer.zero_grad(set_to_none=True)
        with batch_rng(settings.seed, ((number * settings.clients + client) << 24) + step):
            logits, extra = logits_and_extra_loss(model, moved)
            loss = loss_of(examples, logits, labels.to(like.device))
            (loss if extra is None else loss + extra).backward()  # type: ignore[no-untyped-call]
        if settings.proximal:
            with torch.no_grad():
                for name, p in trained.items():
                    if p.grad is not None:
                        p.grad += settings.proximal * (p - start[name])
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(trained.values(), settings.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses, rows


def set_puzzle_seed(model: Model, settings: Settings, number: int, client: int) -> None:
    """Set a wrapped model to the puzzles of one client's part of a round."""
    if isinstance(model, MaskedJigsaw | TextJigsaw):
        model.seed, model.passes = (
            int(np.random.default_rng([settings.seed, 105, client]).integers(1 << 31)),
            number << 20,
        )


def _reinitialize(model: Model, seeds: list[int]) -> None:
    """Weights of the client's own: drawn as the model's class draws them."""
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None:
        raise FederatedError(
            f"{type(inner).__name__} has no config to draw weights of its own from",
            hint="use a model of transformers",
        )
    with torch.random.fork_rng():
        torch.manual_seed(int(np.random.default_rng([*seeds, 106]).integers(1 << 31)))
        fresh = type(inner)(config)
    inner.load_state_dict(fresh.state_dict())
