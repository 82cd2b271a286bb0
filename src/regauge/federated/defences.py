"""What a client does to its contribution before it leaves. The classes are those that `regauge
audit gradients` audits, and the names are the same.

    freeze, withhold    parts that nobody trains, or that are each client's own: trained, kept and
    not sent (embedding, positions, patches, first,
                        head); `withholding` keeps them
    clip                the whole change has at most this norm
    private             the whole change is clipped and gets Gaussian noise: a client's part in a
    round, with an epsilon
    noise               noise of a tensor's own size, without an epsilon
    prune, round        few of its numbers, or few bits of each: compression

They act in this order. Noise is drawn from a secret: on a real node from the system's randomness,
and in a run on one machine from the seed, so that it can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from regauge.defences.accountant import gaussian_epsilon
from regauge.defences.gradients import (
    Clip,
    Freeze,
    Noise,
    Prune,
    Round,
    Withhold,
    clip_global_norm,
    part_parameters,
)
from regauge.defences.parser import DefenceError, parse_combination
from regauge.defences.split import KeyedRandom
from regauge.federated.settings import FederatedError
from regauge.federated.states import Contribution

Tensor = torch.Tensor
DELTA = 1e-5


@dataclass(frozen=True)
class Private:
    """Differential privacy of a client: its change is clipped to `norm` and gets Gaussian noise of
    `multiplier` times `norm`, before it leaves. The guarantee is for all of a client's examples
    together, against whoever sees every one of its contributions; no sampling is assumed to hide
    it.
    """

    multiplier: float
    norm: float = 1.0
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            if not 0 < value < math.inf:
                raise DefenceError(
                    f"{value} is no noise multiplier or norm", hint="both are positive numbers"
                )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        size = self.multiplier * self.norm
        return {
            name: t + size * draw.normal(f"private/{name}", t)
            for name, t in clip_global_norm(tensors, self.norm).items()
        }

    def epsilon(self, rounds: int, delta: float = DELTA) -> float:
        """Of a client that contributed to so many rounds, next to a run without it."""
        return gaussian_epsilon(self.multiplier, rounds, delta, "ADD_OR_REMOVE_ONE")


DEFENCES: Mapping[str, type] = {
    "freeze": Freeze,
    "withhold": Withhold,
    "clip": Clip,
    "private": Private,
    "noise": Noise,
    "prune": Prune,
    "round": Round,
}


def read_defences(texts: Sequence[str]) -> tuple[Any, ...]:
    """Defences as the command line names them, in the order in which they act; none of a kind
    twice.
    """
    made = parse_combination(texts, DEFENCES)
    if {Clip, Private} <= {type(d) for d in made}:
        raise DefenceError(
            "private clips by itself", hint="leave out clip; private=1.0,norm=0.5 says the norm"
        )
    return made


def frozen_names(model: torch.nn.Module, defences: Sequence[Any]) -> set[str]:
    """The parameters that are not trained."""
    return {
        name
        for d in defences
        if isinstance(d, Freeze)
        for part in d.parts
        for name in part_parameters(model, part)
    }


def apply_defences(
    sent: Contribution, model: torch.nn.Module, defences: Sequence[Any], secret: bytes
) -> Contribution:
    """A contribution as it leaves."""
    if not defences:
        return sent
    if sent.kind == "weights":
        raise FederatedError(
            "whole weights of a client that begins apart cannot be defended",
            hint="leave out the defences, or --independent",
        )
    tensors = sent.tensors
    draw = KeyedRandom(secret, f"federated/{sent.round}/{sent.client}")
    for defence in defences:
        tensors = defence.apply_to_update(tensors, model, draw)
    return replace(sent, tensors=tensors)


def client_epsilon(defences: Sequence[Any], rounds: int) -> float | None:
    """What a client has spent after so many contributions; None where nothing is private."""
    found = next((d for d in defences if isinstance(d, Private)), None)
    return None if found is None else found.epsilon(rounds)
