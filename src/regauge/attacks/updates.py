"""Views of a federated-learning server: its model, an update, and what it is granted.

    view = SentUpdate(model, update, (3, 224, 224), Granted(batch=1))

An attack takes a `SentUpdate` and nothing else. The images, labels and random choices behind the
update stay with the client (`regauge.audit.gradient_audit.clients`); guesses are scored elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from regauge.errors import UpdateError

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends, by parameter name.

    The tensors are gradients of one batch's mean loss, or the change of the weights after `steps`
    local steps of SGD with learning rate `lr`. Tensors that are not sent are absent.
    """

    tensors: Mapping[str, Tensor]
    kind: Literal["gradient", "change"] = "gradient"
    steps: int = 1
    lr: float = 0.0

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradients as sent, or their mean over the local steps behind a change of weights."""
        if self.kind == "gradient":
            return dict(self.tensors)
        return {name: t / (-self.lr * self.steps) for name, t in self.tensors.items()}


@dataclass(frozen=True)
class Threat:
    """What an adversary is granted beyond model and update.

    Attributes:
        batch: The number of samples behind the update.
        labels: Their labels.
        mask: The positions that a puzzle masked.
        images: Other images of the kind, for their statistics, and their updates by the client's
            code.
        length: The length of the texts.
    """

    batch: bool = True
    labels: bool = False
    mask: bool = False
    images: bool = False
    length: bool = False

    def describe(self) -> str:
        """Return what is granted as text."""
        names = [
            name for name in ("batch", "labels", "mask", "images", "length") if getattr(self, name)
        ]
        return (
            ", ".join(
                {"batch": "batch size", "images": "other images of the kind"}.get(n, n)
                for n in names
            )
            or "nothing more"
        )


@dataclass(frozen=True, eq=False)
class Granted:
    """The values that a threat grants; None if not granted. `images` are in the model's units."""

    batch: int | None = None
    labels: Tensor | None = None
    mask: Tensor | None = None
    images: Tensor | None = None
    length: int | None = None
    rehearsals: tuple[Rehearsal, ...] = ()


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """An update that the adversary computed from its own images.

    It uses the client's code and the same defences, which are public. `inputs` are the images as
    the model read them, `mask` the positions that a puzzle masked, `original` the images before the
    puzzle.
    """

    update: Update
    inputs: Tensor
    mask: Tensor | None = None
    original: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """An honest-but-curious server: its model, the update, and what it is granted.

    The model includes the weights and the code that the client runs. `shape` is that of one input,
    [channels, height, width]; empty for texts.
    """

    model: torch.nn.Module
    update: Update
    shape: tuple[int, ...] = ()
    granted: Granted = field(default_factory=Granted)

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradients of the update."""
        return self.update.grads

    def grad(self, name: str, what: str) -> Tensor:
        """Return one gradient; raise UpdateError with its description `what` if it is missing."""
        grads = self.grads
        if name not in grads:
            raise UpdateError(
                f'the update must contain "{name}" ({what}), got none',
                hint="the tensor was withheld or frozen; other attacks use other tensors",
            )
        return grads[name]


def check_update(model: torch.nn.Module, update: Update) -> None:
    """Check that an update belongs to this model, is finite and is not zero.

    Raises:
        UpdateError: The update is empty, zero or not finite, or a name, shape, kind, step count or
            learning rate is invalid.
    """
    parameters = dict(model.named_parameters())
    if not update.tensors:
        raise UpdateError(
            "the update must contain at least one gradient, got none",
            hint="pass gradients by parameter name",
        )
    for name, tensor in update.tensors.items():
        if name not in parameters:
            raise UpdateError(
                f'names of the update must be parameters of {type(model).__name__}, got "{name}"',
                hint="use the names of model.named_parameters()",
            )
        if tensor.shape != parameters[name].shape:
            raise UpdateError(
                f'"{name}" must have shape {list(parameters[name].shape)}, '
                f"got {list(tensor.shape)}",
                hint="check that the update was made with this model",
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise UpdateError(
                f'"{name}" must hold finite real numbers, got NaN, Inf or another dtype',
                hint="check whether the client's loss diverged",
            )
    if update.kind not in ("gradient", "change"):
        raise UpdateError(f'kind must be "gradient" or "change", got "{update.kind}"')
    if update.kind == "change" and not (0 < update.lr < math.inf and update.steps >= 1):
        raise UpdateError(
            f"steps must be >= 1 and lr > 0 and finite, got steps={update.steps}, lr={update.lr:g}",
            hint="a change of weights gives gradients only with its steps and learning rate",
        )
    if not any(bool(tensor.any()) for tensor in update.tensors.values()):
        raise UpdateError(
            "the update must not be zero everywhere",
            hint="check that the model was trained on this batch",
        )


def average_updates(updates: Sequence[Update]) -> Update:
    """Return the mean of several updates.

    This is what a server sees of several clients under secure aggregation: no single update.
    """
    first = updates[0]
    names = [n for n in first.tensors if all(n in u.tensors for u in updates)]
    mean = {n: torch.stack([u.tensors[n] for u in updates]).mean(0) for n in names}
    return Update(mean, first.kind, first.steps, first.lr)
