"""What a merge that was interrupted had found, kept beside its output."""

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
    """What a merge has found about its models, verdicts and elements, kept beside its output until
    that is written: a merge that was killed does not search again.
    """

    def __init__(self, out: Path, inputs: bytes) -> None:
        self.digest, self.out = hashlib.sha256(inputs).hexdigest(), out
        self.index_path = out.with_name(f".{out.name}.align.json")

    def _path(self, key: str) -> Path:
        return self.out.with_name(
            f".{self.out.name}.align-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        )

    def _read_index(self) -> dict[str, Any]:
        try:
            about = read_json(self.index_path) if self.index_path.exists() else {}
        except RegaugeError:
            about = {}
        return (
            about
            if about.get("of") == self.digest
            else {"of": self.digest, "notes": {}, "verdicts": {}}
        )

    def _record(self, what: str, key: str, value: Any) -> None:
        about = self._read_index()
        about.setdefault(what, {})[key] = value
        write_bytes(self.index_path, json.dumps(about).encode(), mode=0o600)

    def load_verdict(self, key: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._read_index()["verdicts"].get(key)
        return found

    def save_verdict(self, key: str, verdict: dict[str, Any]) -> None:
        self._record("verdicts", key, verdict)

    def save(self, key: str, g: Element, note: str) -> None:
        save_element(g, self._path(key))
        self._record("notes", key, note)

    def load(self, key: str, spec: Spec) -> Element | None:
        known = key in self._read_index()["notes"] and self._path(key).is_file()
        return load_element(self._path(key), spec) if known else None

    def load_note(self, key: str) -> str:
        return str(self._read_index()["notes"].get(key, ""))

    def statistics_path(self, key: str) -> Path:
        """Where the statistics of a model are kept."""
        path = self._path(key)
        return path.with_name(f"{path.name}.statistics")

    def saved_statistics(self, key: str) -> Path | None:
        """The statistics of a model that this merge has computed already."""
        path = self.statistics_path(key)
        return path if key in self._read_index().get("looked", {}) and path.is_file() else None

    def mark_statistics(self, key: str) -> None:
        self._record("looked", key, True)

    def delete(self) -> None:
        name = glob.escape(self.out.name)
        for pattern in (
            f".{name}.align-*",
            f"..{name}.align*.partial-*",
            f".{name}.live-*",
        ):  # and what a kill left half-written
            for path in self.out.absolute().parent.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.index_path.unlink(missing_ok=True)
