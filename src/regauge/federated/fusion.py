"""Federated fusion: align clients with different initializations before averaging.

Two networks that were trained separately may be equal up to a change of basis; their mean is not.
The strategy `matched` folds the norms of the weights of a first round, then aligns one client after
the other with the mean of those before: `match` finds an element by the activations of both on some
inputs, and `refine` improves it on the same inputs, towards a mean with the same outputs. Later
rounds are those of `fedavg`. The baseline, `fedavg`, averages the weights without alignment.

The inputs are the server's, without labels; if it has none, random inputs of the right form. Fusion
needs the weights of each client, so it excludes secure aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from regauge.core.element import Element
from regauge.core.fold import fold_norms
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.errors import FederatedError, Hint, RecordError
from regauge.federated.aggregation import weighted_mean
from regauge.federated.client import unwrap
from regauge.federated.settings import Settings
from regauge.federated.states import Contribution, State
from regauge.matching import match_states
from regauge.matching.activations import record, sample_noise
from regauge.matching.many import apply_to_state
from regauge.matching.refine import refine
from regauge.models.resolve import spec_of

Tensor = torch.Tensor
Inputs = Sequence[Mapping[str, Tensor]]
REFINE_STEPS = 200  # for each client after the first; twice as many on random inputs
MAX_EXAMPLES, BATCH = 256, 32  # of the server's examples, for activations
WINDOW = 0.1  # refinement covers the target mean plus or minus this, on the line between the two


def split_test(test: Examples) -> tuple[Examples, Inputs]:
    """Split a server's examples: half to evaluate on, and inputs of the other half to match by."""
    order = np.random.default_rng(110).permutation(len(test))
    chosen = np.sort(order[: min(len(test) // 2, MAX_EXAMPLES)])
    inputs = [test.batch(chosen[i : i + BATCH])[0] for i in range(0, len(chosen), BATCH)]
    return test.only(np.sort(order[len(chosen) :])), inputs


def average_weights(
    model: torch.nn.Module,
    state: State,
    sent: Sequence[Contribution],
    settings: Settings,
    *,
    inputs: Inputs = (),
    steps: int | None = None,
) -> dict[str, Tensor]:
    """Average whole weights, by the strategy of the settings.

    Parameters of a wrapper for puzzles keep the values of `state`.

    Args:
        model: A model to evaluate; may be wrapped.
        state: The server's state.
        sent: The contributions.
        settings: The settings of the run.
        inputs: Inputs to match by; empty: random ones.
        steps: The refinement steps of each client.

    Raises:
        FederatedError: Contributions are of different kinds, or lack a tensor.
    """
    if any(c.kind != "weights" for c in sent):
        raise FederatedError("contributions must all be whole weights, got changes of weights too")
    inner = unwrap(model)
    prefix = "" if inner is model else "model."
    wrapper_names = [n for n in state if not n.startswith(prefix)]
    ordered = sorted(sent, key=lambda c: c.client)
    missing = next(
        ((c, n) for c in ordered for n in state if n not in c.tensors and n not in wrapper_names),
        None,
    )
    if missing is not None:
        raise FederatedError(
            f'client {missing[0].client} did not send "{missing[1]}", but whole weights must have '
            "every tensor",
            hint=Hint(
                "withhold nothing, or leave out independent=True",
                cli="withhold nothing, or leave out --independent",
            ),
        )
    if settings.strategy == "matched" and len(ordered) > 1:
        ordered = _align(inner, ordered, prefix, settings, inputs, steps)
    mean = weighted_mean(ordered, settings.weigh)
    return {n: state[n] if n in wrapper_names else mean[n] for n in state}


def _align(
    model: torch.nn.Module,
    sent: Sequence[Contribution],
    prefix: str,
    settings: Settings,
    inputs: Inputs,
    steps: int | None,
) -> list[Contribution]:
    """Return the contributions in the basis of the first one."""
    spec = spec_of(model)
    folded = [
        fold_norms(
            spec, {n.removeprefix(prefix): t for n, t in c.tensors.items() if n.startswith(prefix)}
        )
        for c in sent
    ]
    basis, states = folded[0][0], [dict(f[1]) for f in folded]
    device = next(iter(states[0].values())).device
    batches = [
        {k: x.to(device) for k, x in batch.items()}
        for batch in inputs or sample_noise(model, count=512, seed=settings.seed)
    ]
    if steps is None:
        steps = REFINE_STEPS if inputs else 2 * REFINE_STEPS
    weights = [c.examples if settings.weigh == "examples" else 1 for c in sent]
    mean, aligned = states[0], [states[0]]
    for i in range(1, len(sent)):
        # The weight of the clients before, in the mean with this one.
        share = sum(weights[:i]) / sum(weights[: i + 1])
        g = _find_element(basis, states[i], mean, model, batches, share, steps, settings.seed)
        transformed = apply_to_state(g, states[i])
        aligned.append({n: transformed[n] for n in states[i]})
        mean = {
            n: share * t + (1 - share) * aligned[i][n] if t.is_floating_point() else t
            for n, t in mean.items()
        }
    return [
        replace(c, tensors={prefix + n: t for n, t in tensors.items()})
        for c, tensors in zip(sent, aligned, strict=True)
    ]


def _find_element(
    spec: Spec,
    state: State,
    mean: State,
    model: torch.nn.Module,
    inputs: Inputs,
    share: float,
    steps: int,
    seed: int,
) -> Element:
    """Return the element that aligns a client with the mean of others.

    A model whose activations cannot be recorded is matched by its weights alone.
    """
    try:
        activations = record(model, state, spec, inputs), record(model, mean, spec, inputs)
    except RecordError:
        return match_states(spec, state, mean).element
    g = match_states(spec, state, mean, activations=activations).element
    t_range = max(share - WINDOW, 0.0), min(share + WINDOW, 1.0)
    return (
        refine(spec, state, mean, g, model, inputs, steps=steps, t_range=t_range, seed=seed).g
        if steps
        else g
    )
