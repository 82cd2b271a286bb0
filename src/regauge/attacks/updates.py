"""Views of a server of federated learning: the model that it sent out, the update that came back,
and what it is granted beside the two.

    view = SentUpdate(model, update, (3, 224, 224), Granted(batch=1))

An attack is given a `SentUpdate` and nothing else; the images, labels and draws that made the
update are the client's (`regauge.audit.gradients.clients`), and whether a guess was right is said
elsewhere.
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
    """What a client sends: by name of the parameter, the gradients of one batch's mean loss, or the
    change of the weights after `steps` local steps of SGD at `rate`. What is not sent is not there.
    """

    tensors: Mapping[str, Tensor]
    kind: Literal["gradient", "change"] = "gradient"
    steps: int = 1
    rate: float = 0.0

    @property
    def slopes(self) -> dict[str, Tensor]:
        """Gradients: as they were sent, or the mean over the local steps that the change of the
        weights tells.
        """
        if self.kind == "gradient":
            return dict(self.tensors)
        return {name: t / (-self.rate * self.steps) for name, t in self.tensors.items()}


@dataclass(frozen=True)
class Threat:
    """What an adversary is granted beside model and update. `batch`: how many samples made it;
    `labels`: theirs; `mask`: which places a puzzle took; `images`: others of the kind, for their
    statistics, and what the client's code makes of them; `length`: of texts.
    """

    batch: bool = True
    labels: bool = False
    mask: bool = False
    images: bool = False
    length: bool = False

    def told(self) -> str:
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
    """The values of what a threat grants; None is not granted. `images` are in the model's
    units.
    """

    batch: int | None = None
    labels: Tensor | None = None
    mask: Tensor | None = None
    images: Tensor | None = None
    length: int | None = None
    rehearsals: tuple[Rehearsal, ...] = ()


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """An update that the adversary made itself, of images of its own, with the client's code and
    the same defences (which are no secret): what the model read, which places a puzzle took, and
    the images before it.
    """

    update: Update
    read: Tensor
    mask: Tensor | None = None
    original: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """An honest server that looks: its model (weights, and the code that the client runs), the
    update, the shape of one input ([channels, height, width]; of texts none), and what it is
    granted.
    """

    model: torch.nn.Module
    update: Update
    shape: tuple[int, ...] = ()
    granted: Granted = field(default_factory=Granted)

    @property
    def slopes(self) -> dict[str, Tensor]:
        return self.update.slopes

    def slope(self, name: str, what: str) -> Tensor:
        """One gradient, or the error that says what is missing."""
        found = self.slopes
        if name not in found:
            raise UpdateError(
                f'the update has no "{name}", {what}',
                hint="it was withheld or frozen; other attacks need other tensors",
            )
        return found[name]


def check_update(model: torch.nn.Module, update: Update) -> None:
    """Refuse an update that is not of this model, is not finite, or says nothing: every fault by
    name.
    """
    own = dict(model.named_parameters())
    if not update.tensors:
        raise UpdateError(
            "the update is empty",
            hint="an update has at least one gradient, by the name of its parameter",
        )
    for name, t in update.tensors.items():
        if name not in own:
            raise UpdateError(
                f'the update has "{name}", which {type(model).__name__} has not',
                hint="names are those of model.named_parameters()",
            )
        if t.shape != own[name].shape:
            raise UpdateError(
                f'"{name}" is {list(t.shape)} in the update and {list(own[name].shape)} in the '
                "model",
                hint="is it this model's?",
            )
        if not t.is_floating_point() or not bool(torch.isfinite(t).all()):
            raise UpdateError(
                f'"{name}" holds NaN, Inf or no real numbers in the update',
                hint="did the client's loss diverge?",
            )
    if update.kind not in ("gradient", "change"):
        raise UpdateError(f'an update is a "gradient" or a "change", not "{update.kind}"')
    if update.kind == "change" and not (0 < update.rate < math.inf and update.steps >= 1):
        raise UpdateError(
            f"a change after {update.steps} steps at a rate of {update.rate:g} tells no gradient",
            hint="give steps and rate",
        )
    if not any(bool(t.any()) for t in update.tensors.values()):
        raise UpdateError(
            "the update is zero everywhere: it says nothing of any input",
            hint="was the model trained on this batch at all?",
        )


def added(updates: Sequence[Update]) -> Update:
    """What a server sees of several clients under secure aggregation: the mean of their updates and
    no single one.
    """
    first = updates[0]
    names = [n for n in first.tensors if all(n in u.tensors for u in updates)]
    mean = {n: torch.stack([u.tensors[n] for u in updates]).mean(0) for n in names}
    return Update(mean, first.kind, first.steps, first.rate)
