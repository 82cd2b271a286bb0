"""Saved state of long computations, so that an interrupted run resumes.

An outcome is JSON values and named tensors in one safetensors file, with a digest of both. Files
are written atomically. `ResumeState` is one such file, replaced as a computation proceeds;
`StateStore` is a folder with one file for each finished part, which later parts never rewrite.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import OWNER, make_folder, write_bytes
from regauge.errors import CacheError

FORMAT = "1"
SAVE_INTERVAL = 20.0  # seconds between two saved states


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
        if state is not None and not isinstance(state.values, dict):
            return None
        if state is not None and state.values.get("of", "") != self.label:
            raise CacheError(
                f"{self.path} belongs to another computation that was interrupted",
                hint="finish that one with the command that started it, or remove the file",
            )
        return state

    def save(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Write the state for its owner only, in place of an older one: it holds weights."""
        write_outcome(self.path, Outcome({**values, "of": self.label}, tensors), mode=0o600)


class StateStore:
    """Finished parts of a long computation, saved beside its output until that is written.

    Each part is a file of its own: saving one never rewrites the others. Parts of other inputs are
    ignored, and replaced when they are computed again.

    Args:
        folder: The folder of the parts. It is created by the first `save`, for its owner only.
        label: Everything that determines the parts: inputs, options, versions.

    Example:
        >>> # store = StateStore.beside(out, label)
        >>> # part = store.load("layer.3") or store.save("layer.3", *compute(3))
        >>> # store.delete()                  # once the output is in place
    """

    def __init__(self, folder: Path, label: bytes) -> None:
        self.folder, self.label = folder, hashlib.sha256(label).hexdigest()

    @classmethod
    def beside(cls, out: Path, label: bytes) -> StateStore:
        """Return the store of an output: the hidden folder `.NAME.state` beside it."""
        return cls(out.with_name(f".{out.name}.state"), label)

    def path(self, key: str) -> Path:
        """Return the file of a part."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"

    def load(self, key: str) -> Outcome | None:
        """Return a saved part; None if it is absent, damaged, or of other inputs."""
        outcome = read_outcome(self.path(key))
        values = None if outcome is None else self._values_of(outcome.values, key)
        return None if outcome is None or values is None else replace(outcome, values=values)

    def _values_of(self, marked: Any, key: str) -> dict[str, Any] | None:
        """Return the values of a saved part; None if they are not those of this key."""
        values = marked.get("values") if isinstance(marked, dict) else None
        is_own = isinstance(values, dict) and marked.get("of") == [self.label, key]
        return values if is_own else None

    def open(self, key: str) -> Outcome | None:
        """Return a saved part like `load`, but read each tensor on access and check no digest.

        For parts that do not fit in memory at once.
        """
        from safetensors import SafetensorError, safe_open

        from regauge.checkpoints.reader import LazyState

        path = self.path(key)

        def read(name: str) -> Any:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)

        try:
            with safe_open(path, framework="pt") as file:
                marked, names = json.loads((file.metadata() or {})["values"]), list(file.keys())
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        values = self._values_of(marked, key)
        return None if values is None else Outcome(values, LazyState(names, read))

    def nested(self, key: str) -> StateStore:
        """Return a store for the parts of one part, which `delete` deletes too."""
        return StateStore(self.path(key).with_suffix(""), f"{self.label} {key}".encode())

    def save(
        self, key: str, values: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Save a part, in place of an older one of the same key, and return it."""
        make_folder(self.folder, OWNER)
        outcome = Outcome(values, tensors or {})
        marked = {"of": [self.label, key], "values": values}
        try:
            write_outcome(self.path(key), Outcome(marked, outcome.tensors), mode=0o600)
        except BaseException:  # Ctrl-C, too: no empty folder is left
            with suppress(OSError):
                self.folder.rmdir()
            raise
        return outcome

    def delete(self) -> None:
        """Delete all parts, and the partial files that a killed process has left.

        Other files stay, and so does a folder that holds any.
        """
        _, own, folders = self._scan()
        for path in own:
            with suppress(OSError):
                path.unlink()
        for folder in folders:
            with suppress(OSError):  # it holds other files
                folder.rmdir()

    @property
    def foreign(self) -> list[Path]:
        """The files and folders in the folder of the parts that are not parts."""
        return self._scan()[0]

    def _scan(self) -> tuple[list[Path], list[Path], list[Path]]:
        """Return what is not a part, the files of parts, and their folders, inner ones first."""
        foreign: list[Path] = []
        own: list[Path] = []
        folders: list[Path] = []

        def scan(folder: Path) -> None:
            for path in sorted(folder.iterdir()):
                is_link = path.is_symlink()
                if path.is_dir() and not is_link and _FOLDER.fullmatch(path.name):
                    scan(path)
                elif path.is_file() and not is_link and _is_part(path):
                    own.append(path)
                else:
                    foreign.append(path)
            folders.append(folder)

        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            foreign.append(self.folder)
        elif self.folder.is_dir():
            scan(self.folder)
        return foreign, own, folders


_FOLDER = re.compile(r"[0-9a-f]{24}")
_FILE = re.compile(r"[0-9a-f]{24}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{24}\.safetensors\.partial-.*")


def _is_part(path: Path) -> bool:
    """Return whether a file is a part, maybe a damaged one, by its name and metadata."""
    from safetensors import SafetensorError, safe_open

    if not _FILE.fullmatch(path.name):
        return _PARTIAL.fullmatch(path.name) is not None
    try:
        with safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("regauge") == "cell")
    except (OSError, SafetensorError):
        return True


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
