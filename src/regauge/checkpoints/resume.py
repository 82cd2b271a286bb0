"""Save the state of long work beside its output, so that an interrupted run resumes where it
stopped.

An outcome is JSON values and named tensors in one safetensors file with a digest of both. Files
appear whole or not at all.
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
    """A cache of experiments that cannot be used, or a cell that cannot be kept in one."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a cell found. `made` are the versions that it was computed with, `seconds` what it took;
    neither is part of the digest.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        found = hashlib.sha256(canonical_values(self.values))
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            found.update(canonical_values([name, str(tensor.dtype), list(tensor.shape)]))
            found.update(
                tensor.flatten().view(_byte_dtype()).numpy().data if tensor.numel() else b""
            )
        return found.hexdigest()


@dataclass(frozen=True)
class ResumeState:
    """Where a long cell keeps its state while it works. `device` is where it computes: no
    parameter, since it should not matter. `of` says what work it is, where the path does not.
    """

    path: Path
    every: float = SAVE_INTERVAL
    device: str = "cpu"
    label: str = ""

    def load(self) -> Outcome | None:
        """The state that an interrupted run left, if there is one and it is whole. That of other
        work is refused: it would be gone on with.
        """
        found = read_outcome(self.path)
        if found is not None and found.values.get("of", "") != self.label:
            raise CacheError(
                f"{self.path} is of other work that was interrupted",
                hint="finish that by the command it was begun with, or remove the file",
            )
        return found

    def save(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        write_outcome(self.path, Outcome({**values, "of": self.label}, tensors))


def canonical_values(value: Any) -> bytes:
    """JSON in one spelling. What JSON has no word for is refused: a hash must not depend on how an
    object prints.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_mapping_to_dict
        ).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"a cell's parameters and values are plain JSON: {error}",
            hint="give numbers, texts, lists and dicts",
        ) from error


def _mapping_to_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not")


def _byte_dtype() -> Any:
    import torch

    return torch.uint8


def write_outcome(path: Path, outcome: Outcome) -> None:
    from safetensors.torch import save

    about = {
        "regauge": "cell",
        "version": FORMAT,
        "values": canonical_values(outcome.values).decode(),
        "digest": outcome.digest,
    }
    about |= {"seconds": str(outcome.seconds), "made": json.dumps(dict(outcome.versions))}
    write_bytes(
        path,
        save({name: t.detach().cpu().contiguous() for name, t in outcome.tensors.items()}, about),
    )


def read_outcome(path: Path) -> Outcome | None:
    """A whole outcome, or None for one that is absent or damaged. A damaged one is replaced when
    the cell has been computed again.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # the handle is no mapping
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = Outcome(
            json.loads(about["values"]), tensors, float(about["seconds"]), json.loads(about["made"])
        )
        return found if about["version"] == FORMAT and about["digest"] == found.digest else None
    except Exception:  # safetensors raises errors of many kinds for files that are none of its own
        return None
