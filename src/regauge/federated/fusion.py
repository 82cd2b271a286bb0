"""Federated fusion: clients that never shared an initialisation are written in one basis before
they are averaged.

Two networks that learned the same apart are each one of many equal descriptions of a function; the
mean of two descriptions is none. With the strategy `matched` the weights of a first round have
their norms folded. Then one client after the other is brought next to the mean of those before:
`match` finds an element by what both are seen to do on some inputs, and `refine` improves it on the
same, towards a mean that answers as the two do. Later rounds are those of `fedavg`. With `fedavg`
they are averaged as they stand, which is what it is compared with.

The inputs are the server's own, without labels; where it has none, noise of the kind that the model
reads. It needs every client's weights by themselves, so that secure aggregation does not fit.
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
from regauge.federated.aggregation import weighted_mean
from regauge.federated.client import unwrap
from regauge.federated.settings import FederatedError, Settings
from regauge.federated.states import Contribution, State
from regauge.matching import match
from regauge.matching.activations import RecordError, record, sample_noise
from regauge.matching.many import apply_to_state
from regauge.matching.refine import refine
from regauge.models.resolve import spec_of

Tensor = torch.Tensor
Inputs = Sequence[Mapping[str, Tensor]]
REFINE_STEPS = 200  # of refinement, for each client after the first; on noise twice as many
MAX_EXAMPLES, BATCH = 256, 32  # of the server's examples that are looked at
WINDOW = (
    0.1  # how far from the mean that is wanted refinement looks, along the line between the two
)


def split_test(test: Examples) -> tuple[Examples, Inputs]:
    """A server's examples: one half to measure on, and of the other the inputs to match by."""
    order = np.random.default_rng(110).permutation(len(test))
    looked = np.sort(order[: min(len(test) // 2, MAX_EXAMPLES)])
    inputs = [test.batch(looked[i : i + BATCH])[0] for i in range(0, len(looked), BATCH)]
    return test.only(np.sort(order[len(looked) :])), inputs


def average_weights(
    model: torch.nn.Module,
    state: State,
    sent: Sequence[Contribution],
    settings: Settings,
    *,
    inputs: Inputs = (),
    steps: int | None = None,
) -> dict[str, Tensor]:
    """The mean of weights that were sent whole, by the settings' strategy. What a wrapper for
    puzzles has learned beside the model begins anew.
    """
    if any(c.kind != "weights" for c in sent):
        raise FederatedError("some clients sent weights, and some changes of weights")
    inner = unwrap(model)
    lead = "" if inner is model else "model."
    wrapped = [n for n in state if not n.startswith(lead)]
    ordered = sorted(sent, key=lambda c: c.client)
    missing = next(
        ((c, n) for c in ordered for n in state if n not in c.tensors and n not in wrapped), None
    )
    if missing is not None:
        raise FederatedError(
            f'client {missing[0].client} did not send "{missing[1]}", and begins apart',
            hint="do not withhold from such clients",
        )
    if settings.strategy == "matched" and len(ordered) > 1:
        ordered = _align(inner, ordered, lead, settings, inputs, steps)
    mean = weighted_mean(ordered, settings.weigh)
    return {n: state[n] if n in wrapped else mean[n] for n in state}


def _align(
    model: torch.nn.Module,
    sent: Sequence[Contribution],
    lead: str,
    settings: Settings,
    inputs: Inputs,
    steps: int | None,
) -> list[Contribution]:
    spec = spec_of(model)
    folded = [
        fold_norms(
            spec, {n.removeprefix(lead): t for n, t in c.tensors.items() if n.startswith(lead)}
        )
        for c in sent
    ]
    basis, states = folded[0][0], [dict(f[1]) for f in folded]
    device = next(iter(states[0].values())).device
    shown = [
        {k: x.to(device) for k, x in one.items()}
        for one in inputs or sample_noise(model, count=512, seed=settings.seed)
    ]
    taken = (REFINE_STEPS if inputs else 2 * REFINE_STEPS) if steps is None else steps
    weights = [c.examples if settings.weigh == "examples" else 1 for c in sent]
    middle, there = states[0], [states[0]]
    for i in range(1, len(sent)):
        share = sum(weights[:i]) / sum(
            weights[: i + 1]
        )  # of those before, in the mean that is wanted
        g = _find_element(basis, states[i], middle, model, shown, share, taken, settings.seed)
        lazy = apply_to_state(g, states[i])
        there.append({n: lazy[n] for n in states[i]})
        middle = {
            n: share * t + (1 - share) * there[i][n] if t.is_floating_point() else t
            for n, t in middle.items()
        }
    return [
        replace(c, tensors={lead + n: t for n, t in one.items()})
        for c, one in zip(sent, there, strict=True)
    ]


def _find_element(
    spec: Spec,
    state: State,
    middle: State,
    model: torch.nn.Module,
    inputs: Inputs,
    share: float,
    steps: int,
    seed: int,
) -> Element:
    """The element that brings a client next to the mean of others. A model that cannot be watched
    is matched by its weights alone.
    """
    try:
        seen = record(model, state, spec, inputs), record(model, middle, spec, inputs)
    except RecordError:
        return match(spec, state, middle).element
    g = match(spec, state, middle, activations=seen).element
    between = max(share - WINDOW, 0.0), min(share + WINDOW, 1.0)
    return (
        refine(spec, state, middle, g, model, inputs, steps=steps, t_range=between, seed=seed).g
        if steps
        else g
    )
