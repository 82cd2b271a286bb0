"""A model in memory as a checkpoint, so that every function that takes a checkpoint takes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import EVERYONE
from regauge.checkpoints.headers import DTYPE_NAMES, Entry, Shard, unsigned_dtype
from regauge.checkpoints.reader import WEIGHTS, Checkpoint
from regauge.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


class StateCheckpoint(Checkpoint):
    """The tensors of a state dict, which are not copied, and the config of their model.

    Written out, they become one safetensors file, with config.json if there is a config. A tensor
    that was changed in place since is not read: the result would be of no one model.
    """

    as_stored = False

    def __init__(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any] | None, name: str
    ) -> None:
        """Wrap a state dict.

        Args:
            state: the tensors by name.
            config: the content of config.json, or None.
            name: the name of the model, for messages.

        Raises:
            CheckpointError: a value is not a tensor, or has a dtype that safetensors lacks.
        """
        self.state = {n: _require_tensor(n, tensor).detach() for n, tensor in state.items()}
        self._versions = {n: _version_of(tensor) for n, tensor in self.state.items()}
        path = Path(name)
        super().__init__(path, [_describe_shard(path / WEIGHTS, self.state)], config, None)

    def __reduce__(self) -> Any:
        return StateCheckpoint, (self.state, self.config, str(self.path))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.state[name]
        if _version_of(tensor) != self._versions[name]:
            raise CheckpointError(
                f'"{name}" of {self.path} has changed since the model was passed',
                hint="call the function again, or take its state() before changing the model",
            )
        return tensor

    @property
    def is_folder(self) -> bool:
        return False

    @property
    def sources(self) -> tuple[Path, ...]:
        return ()

    @property
    def mode(self) -> int:
        return EVERYONE

    @property
    def stamps(self) -> list[tuple[str, int, Any]]:
        return [(WEIGHTS, shard.size, self._digest) for shard in self.files.values()]

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name in self.entries:
            digest.update(name.encode() + self._read_bits(name).tobytes())
        return digest.hexdigest()

    def _read_bits(self, name: str) -> Any:
        tensor = self[name].cpu().contiguous()
        return tensor.view(unsigned_dtype(self.entries[name].dtype)).numpy()


def _version_of(tensor: Tensor) -> int:
    """Return the number of changes in place; 0 in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _require_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor that safetensors can store."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f'"{name}" must be a tensor, got {type(value).__name__}',
            hint="pass a state dict: tensors by name",
        )
    if str(value.dtype).removeprefix("torch.") not in DTYPE_NAMES or value.is_meta:
        what = "a meta tensor without values" if value.is_meta else str(value.dtype)
        raise CheckpointError(
            f'"{name}" is {what}, which cannot be stored',
            hint=f"load its values, and convert it to one of {', '.join(DTYPE_NAMES)}",
        )
    return value


def _describe_shard(path: Path, state: Mapping[str, Tensor]) -> Shard:
    """Return the safetensors file that the tensors would be."""
    entries: dict[str, Entry] = {}
    at = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        dtype = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = Entry(dtype, tuple(tensor.shape), at, at + size)
        at += size
    return Shard(path, entries, {"format": "pt"}, at)
