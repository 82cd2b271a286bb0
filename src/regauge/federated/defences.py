"""Defences that a client applies to its contribution before it is sent.

The classes and names are those that `regauge audit gradients` audits. They act in this order:

- freeze, withhold: parts (embedding, positions, patches, first, head) that are not trained, or that
  each client trains and does not send (`local_state`)
- clip: bound the norm of the whole change
- private: clip the whole change and add Gaussian noise; differential privacy of a client, with an
  epsilon
- noise: add noise relative to the size of each tensor, without an epsilon
- prune, round: compression, by few values or few bits

Noise depends on a secret: on a real node it is from the system's randomness, in a run on one
machine from the seed, for repeatability.
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
from regauge.defences.parser import parse_combination
from regauge.defences.split import KeyedRandom
from regauge.errors import DefenceError, FederatedError, Hint
from regauge.federated.states import Contribution

Tensor = torch.Tensor
DELTA = 1e-5


@dataclass(frozen=True)
class Private:
    """Differential privacy of a client.

    Its change is clipped to `norm` and gets Gaussian noise of `multiplier` times `norm`. The
    guarantee holds for all of a client's examples together, against an observer of all of its
    contributions; amplification by sampling is not assumed.
    """

    multiplier: float
    norm: float = 1.0
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            if not 0 < value < math.inf:
                raise DefenceError(
                    f"noise multiplier and norm must be > 0 and finite, got {value}",
                    hint="write private=1.0 or private=1.0,norm=0.5",
                )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, random: KeyedRandom
    ) -> dict[str, Tensor]:
        scale = self.multiplier * self.norm
        return {
            name: t + scale * random.normal(f"private/{name}", t)
            for name, t in clip_global_norm(tensors, self.norm).items()
        }

    def epsilon(self, rounds: int, delta: float = DELTA) -> float:
        """Return the privacy loss of a client that contributed to so many rounds."""
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
    """Parse defences, and sort them by the order in which they act.

    Raises:
        DefenceError: A text cannot be parsed, a kind occurs twice, or clip is given with private.
    """
    made = parse_combination(texts, DEFENCES)
    if {Clip, Private} <= {type(d) for d in made}:
        raise DefenceError(
            "defences must not have both clip and private, which clips itself",
            hint="leave out clip; set the norm by private=1.0,norm=0.5",
        )
    return made


def frozen_names(model: torch.nn.Module, defences: Sequence[Any]) -> set[str]:
    """Return the names of the parameters that are not trained."""
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
    """Return a contribution after all defences."""
    if not defences:
        return sent
    if sent.kind == "weights":
        raise FederatedError(
            "a contribution with defences must be a change of weights, got whole weights",
            hint=Hint(
                "leave out the defences, or independent=True",
                cli="leave out the defences, or --independent",
            ),
        )
    tensors = sent.tensors
    random = KeyedRandom(secret, f"federated/{sent.round}/{sent.client}")
    for defence in defences:
        tensors = defence.apply_to_update(tensors, model, random)
    return replace(sent, tensors=tensors)


def client_epsilon(defences: Sequence[Any], rounds: int) -> float | None:
    """Return the privacy loss of a client after so many contributions; None without `private`."""
    private = next((d for d in defences if isinstance(d, Private)), None)
    return None if private is None else private.epsilon(rounds)
