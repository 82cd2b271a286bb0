"""A guard for the training of locked models: optimizers must be equivariant under the lock.

Gradients of a locked weight follow the dual action. An elementwise optimizer commutes with signed
permutations; plain gradient descent commutes with rotations too. Any other optimizer would leave
the trajectory of the plain model, and raises at its first step with the reason (`Edge.faults`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from regauge.core import axes as ax
from regauge.core.element import Element
from regauge.core.groups import SignedPermutation
from regauge.core.members import Member
from regauge.core.spec import stored_tensors
from regauge.errors import AuthorizeError

Module = torch.nn.Module
Fault = tuple[str, str]
PERMUTED = "_regauge_permuted"  # attribute of a model with a backbone permuted by a wrapper


class Edge:
    """The authorization of a model, stored as its attribute and never pickled.

    Attributes:
        model: Weak reference to the model.
        element: The element of the lock.
        any_optimizer: Allow steps that differ from those on the plain model.
        stream_spaces: The spaces of the stream at the edges of the backbone.
        kinds: The kind of each member (`member_kind`).
        checked: Optimizers that were checked, with their number of trained parameters.
    """

    def __init__(
        self,
        model: Module,
        element: Element,
        *,
        any_optimizer: bool = False,
        stream_spaces: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.element, self.any_optimizer, self.stream_spaces = (
            weakref.ref(model),
            element,
            any_optimizer,
            stream_spaces,
        )
        self.kinds = {name: member_kind(member) for name, member in element.members.items()}
        self.checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        if not any_optimizer and any(kind != "signed" for kind in self.kinds.values()):
            _guard(self)

    def __repr__(self) -> str:
        return f"Edge({self.element!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Edge | None:
        # torch creates the module before it copies its attributes, so the copy is in the memo.
        copy = memo.get(id(self.model()))
        return (
            None
            if copy is None
            else Edge(
                copy,
                self.element,
                any_optimizer=self.any_optimizer,
                stream_spaces=self.stream_spaces,
            )
        )

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()

    def faults(self, optimizer: torch.optim.Optimizer) -> list[Fault]:
        """Return the trained parameters that an optimizer would update differently, and why."""
        model = self.model()
        if model is None:
            return []
        trained = {
            id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        parameters = {name: p for name, p in model.named_parameters() if id(p) in trained}
        rotated = any(self.kinds.get(space, "signed") != "signed" for space in self.stream_spaces)
        spec, entries = self.element.spec, stored_tensors(self.element.spec)
        gains = (
            {*spec.fixed, *(n.gain for n in spec.norms), *(s.gain for s in spec.scales)}
            if rotated
            else set()
        )
        backbone = {
            name: entries[name]
            for name in parameters
            if name in entries and spec.parts.get(entries[name].pattern) == "backbone"
        }
        faults: list[Fault] = []
        for name, entry in backbone.items():
            if name in gains:
                faults.append(
                    (
                        name,
                        (
                            "the stream is rotated, and a trained gain is not diagonal in the "
                            "rotated basis: freeze it at one"
                        ),
                    )
                )
                continue
            for space in sorted(ax.spaces(entry.axes) & self.kinds.keys()):
                reason = _reason(self.kinds[space], optimizer)
                if reason:
                    faults.append((name, f'it is locked on "{space}" {reason}'))
                    break
        if faults or not rotated or not backbone:
            return faults
        dropouts = [
            n
            for n, m in model.named_modules()
            if m.training and isinstance(m, torch.nn.Dropout) and m.p > 0 and self._is_inside(n)
        ]
        return (
            [
                (
                    dropouts[0],
                    (
                        "dropout zeroes channels of the rotated stream, which are not the plain "
                        "model's: set it to zero"
                    ),
                )
            ]
            if dropouts
            else []
        )

    def _is_inside(self, name: str) -> bool:
        """Return whether a module belongs to the backbone: a sibling has a tensor of it."""
        parts = self.element.spec.parts
        parent = name.rpartition(".")[0] + "."
        return any(
            part == "backbone" and tensor.startswith(parent) for tensor, part in parts.items()
        )


def _nothing() -> None:
    """Unpickle an edge as None; pickles refer to this function by name."""


MemberKind = Literal["signed", "orthogonal", "linear"]


def member_kind(member: Member) -> MemberKind:
    """Classify a member for optimizers: a signed permutation, a rotation, or neither."""
    if SignedPermutation().fault(member) is None:
        return "signed"
    matrix = member.matrix()
    error = np.abs(matrix @ matrix.transpose(0, 2, 1) - np.eye(member.size)).max()
    return "orthogonal" if error < 1e-6 else "linear"


# verification/optimizers.py measures which optimizers commute with rotations; in torch it is one.
_ROTATION_EQUIVARIANT = (torch.optim.SGD,)


def _reason(kind: MemberKind, optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer does not commute with a kind of member, or None if it does."""
    if kind == "linear":
        return "by scales or a general linear map, with which no optimizer commutes"
    if kind == "orthogonal" and type(optimizer) not in _ROTATION_EQUIVARIANT:
        name = type(optimizer).__name__
        return f"by a rotation, and {name} commutes with signed permutations only"
    return None


_GUARDED: weakref.WeakSet[Edge] = weakref.WeakSet()
_HANDLES: list[Any] = []


def release(edge: Edge) -> None:
    """Stop checking optimizers for an edge."""
    _GUARDED.discard(edge)


def _guard(edge: Edge) -> None:
    """Check every optimizer at its first step, and again when its number of parameters changes."""
    _GUARDED.add(edge)
    if not _HANDLES:
        _HANDLES.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Layers may be added, or unfrozen, later.
    count = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    for edge in list(_GUARDED):
        if edge.checked.get(optimizer) == count:
            continue
        faults = edge.faults(optimizer)
        if faults:
            model = edge.model()
            others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise AuthorizeError(
                f"{type(optimizer).__name__} would not train this {type(model).__name__} like "
                f'the plain model: "{faults[0][0]}": {faults[0][1]}{others}',
                hint="lock by (signed) permutations to train with any optimizer; by rotations, "
                "with torch.optim.SGD and frozen unit gains",
            )
        edge.checked[optimizer] = count
