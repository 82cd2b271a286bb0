"""Saved state of long computations, so that an interrupted run resumes.

An outcome is JSON values and named tensors in one safetensors file, with a digest of both. Files
are written atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import write_bytes
from regauge.errors import RegaugeError

FORMAT = "1"
SAVE_INTERVAL = 20.0  # seconds between two saved states


class CacheError(RegaugeError):
    """A cache of experiments that cannot be used, or a cell that cannot be cached."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a cell.

    Attributes:
        values: JSON values.
        tensors: Named tensors.
        seconds: The time that it took; not part of the digest.
        versions: The library versions that computed it; not part of the digest.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The SHA-256 of values and tensors."""
        digest = hashlib.sha256(canonical_values(self.values))
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            digest.update(canonical_values([name, str(tensor.dtype), list(tensor.shape)]))
            digest.update(
                tensor.flatten().view(_byte_dtype()).numpy().data if tensor.numel() else b""
            )
        return digest.hexdigest()


@dataclass(frozen=True)
class ResumeState:
    """The saved state of a long computation.

    Attributes:
        path: The file of the state.
        every: Seconds between two saved states.
        device: The device that computes. Not a parameter of the cell: results should not depend
            on it.
        label: Identifies the computation if the path does not.
    """

    path: Path
    every: float = SAVE_INTERVAL
    device: str = "cpu"
    label: str = ""

    def load(self) -> Outcome | None:
        """Return the state of an interrupted run, or None if it is absent or damaged.

        Raises:
            CacheError: The state belongs to another computation.
        """
        state = read_outcome(self.path)
        if state is not None and state.values.get("of", "") != self.label:
            raise CacheError(
                f"{self.path} belongs to another computation that was interrupted",
                hint="finish that one with the command that started it, or remove the file",
            )
        return state

    def save(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Write the state for its owner only, in place of an older one: it holds weights."""
        write_outcome(self.path, Outcome({**values, "of": self.label}, tensors), mode=0o600)


def canonical_values(value: Any) -> bytes:
    """Return the canonical JSON of a value.

    Raises:
        CacheError: The value is not JSON; a hash must not depend on the repr of an object.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_mapping_to_dict
        ).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"parameters and values of a cell must be JSON: {error}",
            hint="pass numbers, strings, lists and dicts",
        ) from error


def _mapping_to_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _byte_dtype() -> Any:
    import torch

    return torch.uint8


def write_outcome(path: Path, outcome: Outcome, mode: int = 0o666) -> None:
    """Write an outcome to a file of this mode, atomically."""
    from safetensors.torch import save

    metadata = {
        "regauge": "cell",
        "version": FORMAT,
        "values": canonical_values(outcome.values).decode(),
        "digest": outcome.digest,
    }
    metadata |= {"seconds": str(outcome.seconds), "made": json.dumps(dict(outcome.versions))}
    write_bytes(
        path,
        save(
            {name: t.detach().cpu().contiguous() for name, t in outcome.tensors.items()}, metadata
        ),
        mode,
    )


def read_outcome(path: Path) -> Outcome | None:
    """Read an outcome; return None if it is absent or damaged.

    A damaged file is replaced when the cell has been computed again.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # the handle is not a mapping
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        outcome = Outcome(
            json.loads(metadata["values"]),
            tensors,
            float(metadata["seconds"]),
            json.loads(metadata["made"]),
        )
        return (
            outcome
            if metadata["version"] == FORMAT and metadata["digest"] == outcome.digest
            else None
        )
    except Exception:  # safetensors raises many types of errors for invalid files
        return None
