"""Permuted training and inference (Algorithm 1 of the paper): a wrapper around a model of your own.

The backbone's columns are moved once, by a secret element; its rows are shuffled anew in every
pass. Embedding and head stay as they are and see nothing of it: features are permuted where they
enter the backbone and put back where they leave it. The wrapped model computes what the plain one
computes and trains to the same weights, moved.

    permuted = Permuted(model, columns=element(spec_of(model), key, within="permutation"))
    optimizer = AdamW(permuted.parameters())         # train as ever
    model = permuted.unwrap()                        # the plain model, trained
"""

from __future__ import annotations

from typing import Any

import torch

from regauge.core.element import Element, element
from regauge.core.groups import Permutation
from regauge.core.live import apply_
from regauge.core.rng import Stream, secret_of
from regauge.core.spec import Space, Spec
from regauge.errors import CutError
from regauge.locking.authorize import is_authorized
from regauge.locking.optimizer_guard import PERMUTED
from regauge.models.cut import Crossing, Route, cut
from regauge.models.resolve import spec_of


def sample_row_permutation(n: int, key: bytes | int, label: str = "rows") -> Element:
    """A permutation of n tokens, as an element that moves rows, masks, position ids and rotary
    tables together.
    """
    secret = secret_of(key)
    return Element(
        Spec("rows", {"token": Space(n, Permutation())}, {}),
        {"token": Permutation().sample(n, 1, Stream(secret, f"{label}/token"))},
    )


def run_permuted(
    crossing: Crossing, *, columns: Element | None = None, shuffle: Element | None = None
) -> torch.Tensor:
    """One pass through a backbone: in by columns and rows, and back again."""
    there = crossing
    for g in (columns, shuffle):
        there = (
            there if g is None else there.transform(g)
        )  # what lies between is given up before the blocks run
    z = there.run()
    for g in (shuffle, columns):
        z = z if g is None else crossing.restore(g, z)
    return z


class Permuted(torch.nn.Module):
    """A model whose backbone only ever sees permuted features.

    `columns` is an element of the model's spec (a permutation, to train under any optimizer), or a
    key to draw one; None leaves the columns alone. With `rows` the tokens of every pass are
    shuffled by a fresh permutation from `key`. The model is moved in place; `unwrap` moves it back.
    Rows of models that leave a causal mask to the kernel need
    `model.set_attn_implementation("eager")`, or a 4-D mask.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        columns: Element | bytes | int | None = None,
        rows: bool = True,
        key: bytes | int = 0,
    ) -> None:
        super().__init__()
        self._cut = cut(model)
        if rows and not any("token" in b.leave for b in self._cut.boundaries):
            raise CutError(
                f"the rows of a {type(model).__name__} cannot move: its blocks look at neighbours",
                hint="pass rows=False",
            )
        given = columns
        self._columns = (
            given
            if given is None or isinstance(given, Element)
            else element(spec_of(model), given, within="permutation")
        )
        self._rows, self._key, self.passes = (
            rows,
            secret_of(key),
            0,
        )  # a run that is resumed sets `passes` to what it was
        if getattr(model, PERMUTED, False):
            raise CutError(
                f"this {type(model).__name__} is wrapped already",
                hint="unwrap it first: its backbone is moved, and would be moved twice",
            )
        if is_authorized(model):
            raise CutError(
                f"this {type(model).__name__} is authorised: its backbone is locked",
                hint="unlock it first, or deauthorize it",
            )
        if self._columns is not None:
            apply_(self._columns, model, part="backbone")
        setattr(model, PERMUTED, True)
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.route():
            return self.model(*args, **kwargs)

    def route(self) -> Route:
        """A context in which the inner model itself is used as ever: `with permuted.routed():
        permuted.model.generate(...)`.
        """
        return self._cut.route(self._cross)

    def unwrap(self) -> torch.nn.Module:
        """The plain model, with its columns where they were. The wrapper is of no use after it."""
        if self._columns is not None:
            apply_(~self._columns, self.model, part="backbone")
        self._columns, self._rows = None, False
        if hasattr(self.model, PERMUTED):
            delattr(self.model, PERMUTED)
        return self.model

    def _cross(self, crossing: Crossing) -> torch.Tensor:
        shuffle = (
            sample_row_permutation(
                crossing.stream.shape[1], self._key, f"rows/{self.passes}/{crossing.boundary.name}"
            )
            if self._rows
            else None
        )
        self.passes += 1
        return run_permuted(crossing, columns=self._columns, shuffle=shuffle)
