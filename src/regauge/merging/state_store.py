"""Saved state of an interrupted merge, beside its output."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from regauge.checkpoints.element_files import load_element, save_element
from regauge.checkpoints.files import write_bytes
from regauge.checkpoints.reader import read_json
from regauge.core.element import Element
from regauge.core.spec import Spec
from regauge.errors import RegaugeError


class MergeStateStore:
    """Verdicts, elements and statistics of a merge, saved beside its output until that is written.

    A merge that was killed does not search again. State of other inputs is ignored.
    """

    def __init__(self, out: Path, inputs: bytes) -> None:
        self.digest, self.out = hashlib.sha256(inputs).hexdigest(), out
        self.index_path = out.with_name(f".{out.name}.align.json")

    def _path(self, key: str) -> Path:
        """Return the path of a model's element."""
        return self.out.with_name(
            f".{self.out.name}.align-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        )

    def _read_index(self) -> dict[str, Any]:
        """Return the index; an empty one if it is missing, damaged or of other inputs."""
        try:
            index = read_json(self.index_path) if self.index_path.exists() else {}
        except RegaugeError:
            index = {}
        return (
            index
            if index.get("of") == self.digest
            else {"of": self.digest, "notes": {}, "verdicts": {}}
        )

    def _record(self, section: str, key: str, value: Any) -> None:
        """Add an entry to the index."""
        index = self._read_index()
        index.setdefault(section, {})[key] = value
        write_bytes(self.index_path, json.dumps(index).encode(), mode=0o600)

    def load_verdict(self, key: str) -> dict[str, Any] | None:
        """Return the saved verdict of a model."""
        verdict: dict[str, Any] | None = self._read_index()["verdicts"].get(key)
        return verdict

    def save_verdict(self, key: str, verdict: dict[str, Any]) -> None:
        """Save the verdict of a model."""
        self._record("verdicts", key, verdict)

    def save(self, key: str, g: Element, note: str) -> None:
        """Save the element of a model with a note on its alignment."""
        save_element(g, self._path(key))
        self._record("notes", key, note)

    def load(self, key: str, spec: Spec) -> Element | None:
        """Return the saved element of a model."""
        is_saved = key in self._read_index()["notes"] and self._path(key).is_file()
        return load_element(self._path(key), spec) if is_saved else None

    def load_note(self, key: str) -> str:
        """Return the saved note on the alignment of a model."""
        return str(self._read_index()["notes"].get(key, ""))

    def statistics_path(self, key: str) -> Path:
        """Return the path of the statistics of a model."""
        path = self._path(key)
        return path.with_name(f"{path.name}.statistics")

    def saved_statistics(self, key: str) -> Path | None:
        """Return the path of the statistics of a model if they are complete."""
        path = self.statistics_path(key)
        return path if key in self._read_index().get("looked", {}) and path.is_file() else None

    def mark_statistics(self, key: str) -> None:
        """Mark the statistics of a model as complete."""
        self._record("looked", key, True)

    def delete(self) -> None:
        """Delete all saved state, and the partial files that a kill left."""
        name = glob.escape(self.out.name)
        for pattern in (f".{name}.align-*", f"..{name}.align*.partial-*", f".{name}.live-*"):
            for path in self.out.absolute().parent.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.index_path.unlink(missing_ok=True)
