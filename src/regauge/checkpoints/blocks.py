"""Tensors that are computed block by block.

The full tensor need not fit in memory, and a block is used while it is still in the CPU cache.
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
    """A tensor computed on demand.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        make: Returns an iterator over flat numpy arrays of the tensor's bits, in order. The next
            array may reuse the memory of the last.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Iterator[Any]]

    def tensor(self) -> Tensor:
        """Return the full tensor."""
        import torch

        tensor = torch.empty(self.shape, dtype=self.dtype)
        bits, at = bits_of(tensor).reshape(-1), 0
        for block in self.make():
            bits[at : at + block.size] = block
            at += block.size
        return tensor


def materialize(value: Tensor | Blocks) -> Tensor:
    """Return blocks as one tensor, and a tensor unchanged."""
    return value.tensor() if isinstance(value, Blocks) else value


def bits_of(tensor: Tensor) -> Any:
    """Return the bits of a tensor as a numpy array of integers.

    Copies only if the tensor is on another device or not contiguous.
    """
    import torch

    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().cpu().resolve_neg().contiguous().view(dtype).numpy()
