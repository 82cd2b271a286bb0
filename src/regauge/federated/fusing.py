"""Federated fusion: clients that never shared an initialisation are written in one basis before they are averaged.

Two networks that learned the same apart are each one of many equal descriptions of a function; the mean of two descriptions is none. With the
strategy `matched` the weights of a first round have their norms folded, are moved by the elements that `match` finds, and are then averaged; later
rounds are those of `fedavg`. With `fedavg` they are averaged as they stand, which is what it is compared with.

The server needs no data for it: weights alone are matched. It needs every client's weights by themselves, so that secure aggregation does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regauge.federated.aggregating import mean_of
from regauge.federated.clients import plain
from regauge.federated.settings import FederatedError, Settings
from regauge.federated.states import Contribution, State
from regauge.fold import fold_norms
from regauge.matching.many import match_many, moved
from regauge.sources import spec_of
from regauge.spec import Spec

Tensor = torch.Tensor


def average(model: torch.nn.Module, state: State, sent: Sequence[Contribution], settings: Settings) -> dict[str, Tensor]:
    """The mean of weights that were sent whole, by the settings' strategy. What a wrapper for puzzles has learned beside the model begins anew."""
    if any(c.kind != "weights" for c in sent):
        raise FederatedError("some clients sent weights, and some changes of weights")
    inner = plain(model)
    lead = "" if inner is model else "model."
    wrapped = [n for n in state if not n.startswith(lead)]
    ordered = sorted(sent, key=lambda c: c.client)
    missing = next(((c, n) for c in ordered for n in state if n not in c.tensors and n not in wrapped), None)
    if missing is not None:
        raise FederatedError(f'client {missing[0].client} did not send "{missing[1]}", and begins apart', hint="do not withhold from such clients")
    if settings.strategy == "matched" and len(ordered) > 1:
        ordered = _matched(spec_of(inner), ordered, lead)
    mean = mean_of(ordered, settings.weigh)
    return {n: state[n] if n in wrapped else mean[n] for n in state}


def _matched(spec: Spec, sent: Sequence[Contribution], lead: str) -> list[Contribution]:
    states = [{n.removeprefix(lead): t for n, t in c.tensors.items() if n.startswith(lead)} for c in sent]
    folded = [fold_norms(spec, s) for s in states]
    basis, states = folded[0][0], [dict(f[1]) for f in folded]
    found = match_many(basis, states, to="mean")
    out = []
    for c, g, s in zip(sent, found.elements, states, strict=True):
        there = moved(g, s)
        tensors = {lead + n: there[n] for n in there}
        out.append(Contribution(c.client, c.round, c.layout, tensors, c.examples, c.steps, c.batch, c.rate, c.loss, c.kind))
    return out
