"""State files of runs: tensors and metadata in one safetensors file, written atomically.

The metadata hold a SHA-256 of everything else, so that a flipped bit is detected. Files of older
versions have none and are read too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from regauge.checkpoints.files import require_file, staged_file, wrap_write_errors
from regauge.errors import CheckpointError

Tensor = torch.Tensor
CHECKSUM = "checksum"


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    mode: int | None = None,
) -> None:
    """Write a file atomically, in place of an existing one.

    Args:
        path: The file; missing parent folders are created.
        tensors: Its tensors.
        metadata: Its metadata.
        mode: Its mode, for content that only the owner may read. Default: that of the umask.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    try:
        with staged_file(path, 0o666 if mode is None else mode) as partial:
            save_file(copies, partial, {**metadata, CHECKSUM: checksum(copies, metadata)})
    except SafetensorError as error:  # the system's error is in its text only
        raise CheckpointError(
            f"{path} cannot be written: {error}",
            hint="check that the disk is not full; an existing file is unchanged",
        ) from error


def read_tensors(
    path: Path, kind: str, version: int, *older: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a file.

    Args:
        path: The file.
        kind: The kind of file that its metadata must name.
        version: The version that its metadata must name.
        older: Older versions that it may name instead.

    Raises:
        CheckpointError: The file is damaged, or of another kind or version.
    """
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            names: list[str] = file.keys()  # not a dict
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:  # the latter: dtypes unknown to this torch
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint="restore it from a copy"
        ) from error
    known = [str(number) for number in (version, *older)]
    if metadata.get("regauge") != kind or metadata.get("version") not in known:
        raise CheckpointError(
            f'{path} is not a "{kind}" file of version {version}',
            hint="pass another folder, or upgrade regauge",
        )
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None and expected != checksum(tensors, metadata):
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match its content",
            hint="restore it from a copy",
        )
    return tensors, metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, dtypes, shapes, bytes and metadata.

    It detects damage; it is not a signature.
    """
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def remove_partials(path: Path) -> None:
    """Remove incomplete copies of a file that a killed process has left.

    Call this only from the single writer of the file: another write may be in progress.
    """
    for partial in path.parent.glob(f".{path.name}.partial-*"):
        partial.unlink(missing_ok=True)
