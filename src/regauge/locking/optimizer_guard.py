"""Training a locked model: which optimizers take the steps that they would take on the plain one.
The others are refused at their first step.

Gradients of a locked weight follow the dual action; an optimizer keeps that for signed permutations
if it works element by element, and for rotations if it is plain gradient descent. A step that would
part from the plain model's is refused with the reason (`Edge.faults`).
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
from regauge.errors import EdgeError

Module = torch.nn.Module
Fault = tuple[str, str]
PERMUTED = "_regauge_permuted"  # the attribute of a model whose backbone a wrapper keeps permuted


class Edge:
    """The record of an authorisation, kept on the model: the element, and what it means for
    optimizers. Never pickled.

    `any_optimizer` lets steps pass that part from the plain model's.
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
        # torch makes the module before it copies its attributes, so the copy of the model is known
        # by now.
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
        """Every trained parameter that this optimizer would take elsewhere than the plain model's,
        and why.
        """
        model = self.model()
        if model is None:
            return []
        held = {
            id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        mine = {name: p for name, p in model.named_parameters() if id(p) in held}
        turned = any(self.kinds.get(space, "signed") != "signed" for space in self.stream_spaces)
        spec, entries = self.element.spec, stored_tensors(self.element.spec)
        gains = (
            {*spec.fixed, *(n.gain for n in spec.norms), *(s.gain for s in spec.scales)}
            if turned
            else set()
        )
        inside = {
            name: entries[name]
            for name in mine
            if name in entries and spec.parts.get(entries[name].pattern) == "backbone"
        }
        out: list[Fault] = []
        for name, entry in inside.items():
            if name in gains:
                out.append(
                    (
                        name,
                        (
                            "the stream is rotated, and a gain that is trained is not diagonal in "
                            "the rotated basis: freeze it at one"
                        ),
                    )
                )
                continue
            for space in sorted(ax.spaces(entry.axes) & self.kinds.keys()):
                reason = _reason(self.kinds[space], optimizer)
                if reason:
                    out.append((name, f'it is locked on "{space}" {reason}'))
                    break
        if out or not turned or not inside:
            return out
        dropping = [
            n
            for n, m in model.named_modules()
            if m.training and isinstance(m, torch.nn.Dropout) and m.p > 0 and self._is_inside(n)
        ]
        return (
            [
                (
                    dropping[0],
                    (
                        "dropout zeroes channels of the rotated stream, which are not the plain "
                        "model's: set it to zero"
                    ),
                )
            ]
            if dropping
            else []
        )

    def _is_inside(self, name: str) -> bool:
        """Does a module of this name hold to the backbone: is there a tensor of it beside?"""
        parts = self.element.spec.parts
        stem = name.rpartition(".")[0] + "."
        return any(part == "backbone" and tensor.startswith(stem) for tensor, part in parts.items())


def _nothing() -> None:
    return None


MemberKind = Literal["signed", "orthogonal", "linear"]


def member_kind(member: Member) -> MemberKind:
    """What a member is to an optimizer: signs and places, a rotation, or neither."""
    if SignedPermutation().fault(member) is None:
        return "signed"
    matrix = member.matrix()
    near = np.abs(matrix @ matrix.transpose(0, 2, 1) - np.eye(member.size)).max() < 1e-6
    return "orthogonal" if near else "linear"


# Which optimizers keep rotations is measured in verification/optimizers.py; of those that keep them
# all, torch has one.
_ROTATION_EQUIVARIANT = (torch.optim.SGD,)


def _reason(kind: MemberKind, optimizer: torch.optim.Optimizer) -> str | None:
    if kind == "linear":
        return "by scales or a general linear map, which no optimizer keeps"
    if kind == "orthogonal" and type(optimizer) not in _ROTATION_EQUIVARIANT:
        return f"by a rotation, and {type(optimizer).__name__} keeps signed permutations only"
    return None


_GUARDED: weakref.WeakSet[Edge] = weakref.WeakSet()
_HANDLES: list[Any] = []


def release(edge: Edge) -> None:
    """Look at no step on account of this one any more."""
    _GUARDED.discard(edge)


def _guard(edge: Edge) -> None:
    """Look at every optimizer's first step from now on, and at the next one after it was given more
    to train.
    """
    _GUARDED.add(edge)
    if not _HANDLES:
        _HANDLES.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = sum(
        p.requires_grad for group in optimizer.param_groups for p in group["params"]
    )  # layers may be added, or unfrozen, later
    for edge in list(_GUARDED):
        if edge.checked.get(optimizer) == count:
            continue
        faults = edge.faults(optimizer)
        if faults:
            model = edge.model()
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise EdgeError(
                f"{type(optimizer).__name__} would not train this {type(model).__name__} as it "
                f'trains the plain one: "{faults[0][0]}": '
                f"{faults[0][1]}{more}",
                hint="lock by (signed) permutations to train with any optimizer; by rotations, "
                "with torch.optim.SGD and frozen unit gains",
            )
        edge.checked[optimizer] = count
