"""Finished parts of a search, saved so that an interrupted search repeats none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.checkpoints.element_files import arrays_of, element_of
from regauge.core.element import Element
from regauge.core.members import Member
from regauge.core.spec import Spec

if TYPE_CHECKING:
    from regauge.checkpoints.resume import StateStore

Distances = Mapping[str, tuple[float, float]]
Part = tuple[list[str], Mapping[str, Member], Distances]
# Element files hold double precision. Members that were fitted in single precision are restored
# to it, so that a resumed search computes the same bits.
_SINGLE = {"scale": np.float32, "values": np.float32, "factor": np.complex64}


class SavedParts:
    """The finished parts of a search: spaces in the order of solving, their members, and the
    distances that were measured with these.

    Each part is written once, when it is finished. Without a store nothing is saved.
    """

    def __init__(self, spec: Spec, store: StateStore | None = None) -> None:
        self.spec, self.store = spec, store

    def load(self, key: str) -> Part | None:
        """Return a saved part, or None."""
        outcome = self.store.load(key) if self.store else None
        if outcome is None:
            return None
        arrays = {name: tensor.numpy() for name, tensor in outcome.tensors.items()}
        members = dict(element_of(self.spec, arrays, dict(outcome.values["kinds"])).members)
        for name in outcome.values["single"]:
            members[name] = _to_single(members[name])
        distances = {n: (after, size) for n, after, size in outcome.values["distances"]}
        return list(outcome.values["order"]), members, distances

    def save(
        self,
        key: str,
        order: list[str],
        members: Mapping[str, Member],
        distances: Distances | None = None,
    ) -> Part:
        """Save a part and return it."""
        if self.store is not None:
            import torch

            arrays, kinds = arrays_of(Element(self.spec, members))
            single = [name for name, member in members.items() if _is_single(member)]
            self.store.save(
                key,
                {
                    "order": order,
                    "kinds": list(kinds.items()),
                    "single": single,
                    "distances": [[n, *values] for n, values in (distances or {}).items()],
                },
                {n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in arrays.items()},
            )
        return order, members, distances or {}

    def once(
        self, key: str, g: Element, solve: Callable[[], tuple[list[str], Element]]
    ) -> tuple[list[str], Element]:
        """Return the spaces that `solve` solves, and the element with them.

        Args:
            key: the key of the part.
            g: the element so far.
            solve: solves the part; called unless the part was saved.
        """
        part = self.load(key)
        if part is None:
            order, solved = solve()
            changed = {s: m for s, m in solved.members.items() if m is not g.members.get(s)}
            self.save(key, order, changed)
            return order, solved
        members = {**g.members, **part[1]}
        return part[0], Element(
            self.spec, {s: members[s] for s in self.spec.spaces if s in members}
        )


def _is_single(member: Member) -> bool:
    values: Any = [(getattr(member, name, None), dtype) for name, dtype in _SINGLE.items()]
    return any(value is not None and value.dtype == dtype for value, dtype in values)


def _to_single(member: Member) -> Member:
    values = {name: getattr(member, name, None) for name in _SINGLE}
    changes: Any = {n: v.astype(_SINGLE[n]) for n, v in values.items() if v is not None}
    return replace(member, **changes)
