"""Tensors and some text in one safetensors file that appears whole or not at all: what runs keep of
themselves.

The metadata hold a SHA-256 of everything else, so that a flipped bit is found. Files without one,
of older versions, are read too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from regauge.checkpoints.files import fsync_folder, require_file, temp_sibling, wrap_write_errors
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
    """Write a file, in place of an older one of that name. `mode` is for what only its owner may
    read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = temp_sibling(path)
        try:
            if mode is not None:
                partial.touch(mode=mode)
            plain = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
            save_file(plain, partial, {**metadata, CHECKSUM: checksum(plain, metadata)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except SafetensorError as error:  # what the system said is in its text only
            raise CheckpointError(
                f"{path} cannot be written: {error}",
                hint="is the disk full? What was there before is as it was",
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        fsync_folder(path.parent)


def read_tensors(path: Path, what: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata, if they say that it is `what` it should be, of this
    version.
    """
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # not a dict
            tensors: dict[str, Tensor] = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
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
    if metadata.get("regauge") != what or metadata.get("version") != str(version):
        raise CheckpointError(
            f'{path} is no file of "{what}" of version {version}',
            hint="name another folder, or upgrade",
        )
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None and expected != checksum(tensors, metadata):
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match its content",
            hint="restore it from a copy",
        )
    return tensors, metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, dtypes, shapes, bytes and metadata. It finds damage; it is no
    signature.
    """
    made = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        made.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return made.hexdigest()


def remove_partials(path: Path) -> None:
    """Remove what a kill has left half-written of this file. For its owner only: another's write
    may be under way.
    """
    for partial in path.parent.glob(f".{path.name}.partial-*"):
        partial.unlink(missing_ok=True)
