"""A tensor that is made piece by piece, so that it need not be in memory as a whole, and a piece is
used while the cache still holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """The shape and dtype of a tensor, and what makes it: flat numpy arrays of its bits, in order.
    The next may take the place of the last.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Iterator[Any]]

    def tensor(self) -> Tensor:
        """All of it."""
        import torch

        out = torch.empty(self.shape, dtype=self.dtype)
        bits, at = bits_of(out).reshape(-1), 0
        for piece in self.make():
            bits[at : at + piece.size] = piece
            at += piece.size
        return out


def materialize(made: Tensor | Blocks) -> Tensor:
    return made.tensor() if isinstance(made, Blocks) else made


def bits_of(tensor: Tensor) -> Any:
    """A tensor's bits as a numpy array of whole numbers: no copy, unless it is elsewhere or not
    contiguous.
    """
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().cpu().resolve_neg().contiguous().view(whole).numpy()
