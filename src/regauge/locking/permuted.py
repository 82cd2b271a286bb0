"""Permuted training and inference (Algorithm 1 of the paper): a wrapper around a model.

A secret element permutes the columns of the backbone once; a fresh permutation shuffles the rows in
every pass. Embedding and head are unchanged: features are permuted at the input of the backbone and
restored at its output. The wrapped model computes the function of the plain model, and trains to
the same weights, permuted.

    permuted = Permuted(model, columns=element(spec_of(model), key, within="permutation"))
    optimizer = AdamW(permuted.parameters())         # train as usual
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
    """Sample a permutation of n tokens.

    Args:
        n: The number of tokens.
        key: The secret.
        label: The label of the random stream.

    Returns:
        An element that permutes rows, masks, position ids and rotary tables together.
    """
    secret = secret_of(key)
    return Element(
        Spec("rows", {"token": Space(n, Permutation())}, {}),
        {"token": Permutation().sample(n, 1, Stream(secret, f"{label}/token"))},
    )


def run_permuted(
    crossing: Crossing, *, columns: Element | None = None, shuffle: Element | None = None
) -> torch.Tensor:
    """Run a backbone on permuted features and restore the output.

    Args:
        crossing: The inputs of the backbone.
        columns: The element of the columns, or None.
        shuffle: The element of the rows, or None.
    """
    permuted = crossing
    for g in (columns, shuffle):
        # Intermediate tensors are released before the blocks run.
        permuted = permuted if g is None else permuted.transform(g)
    z = permuted.run()
    for g in (shuffle, columns):
        z = z if g is None else crossing.restore(g, z)
    return z


class Permuted(torch.nn.Module):
    """A model whose backbone receives only permuted features.

    The model is transformed in place; `unwrap` undoes it. To shuffle the rows of a model that
    leaves the causal mask to the attention kernel, call `model.set_attn_implementation("eager")` or
    pass a 4-D mask.

    Args:
        model: The model.
        columns: An element of the model's spec (a permutation, to train with any optimizer), or a
            key to sample one. None leaves the columns unchanged.
        rows: Shuffle the tokens of every pass by a fresh permutation.
        key: The secret of the row permutations.

    Raises:
        CutError: The model cannot be cut, its rows cannot be permuted, or it is wrapped or
            authorized already.

    Example:
        >>> model.set_attn_implementation("eager")
        >>> permuted = regauge.Permuted(model, columns=0, key=1)
        >>> logits = permuted(input_ids=torch.arange(6)[None]).logits
        >>> model = permuted.unwrap()
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
                f"the rows of a {type(model).__name__} cannot be permuted: its blocks depend on "
                "neighbouring positions",
                hint="pass rows=False",
            )
        self._columns = (
            columns
            if columns is None or isinstance(columns, Element)
            else element(spec_of(model), columns, within="permutation")
        )
        self._rows, self._key = rows, secret_of(key)
        self.passes = 0  # a resumed run restores the number of passes
        if getattr(model, PERMUTED, False):
            raise CutError(
                f"this {type(model).__name__} is wrapped already",
                hint="unwrap it first: its backbone would be permuted twice",
            )
        if is_authorized(model):
            raise CutError(
                f"this {type(model).__name__} is authorized: its backbone is locked",
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
        """Return a context in which the inner model runs permuted.

        Example:
            with permuted.route():
                permuted.model.generate(...)
        """
        return self._cut.route(self._cross)

    def unwrap(self) -> torch.nn.Module:
        """Restore the columns and return the plain model; the wrapper is unusable afterwards."""
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
