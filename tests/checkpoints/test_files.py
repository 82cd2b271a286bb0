"""JSON from files: nesting beyond the parser's depth is a typed error wherever a file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.checkpoints.documents import load_json
from regauge.checkpoints.spec_files import parse_spec
from regauge.checkpoints.tensor_files import write_tensors
from regauge.checkpoints.vocabulary import read_vocabulary
from regauge.data import tasks
from regauge.data.datasets import open_data
from regauge.errors import RegaugeError
from regauge.federated import recorder as recorded
from regauge.federated import state_store as federated
from regauge.models.discovery import cache as discovered
from regauge.results.findings import from_json
from regauge.split.client.journal import FolderJournal
from regauge.split.server import checkpoint as split

DEEP = "[" * 100_000


def test_load_json() -> None:
    assert load_json('{"a": [1]}') == {"a": [1]}
    for text in (DEEP, '{"a":' * 100_000, "{"):
        with pytest.raises(ValueError):
            load_json(text)


def _text(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(DEEP)

    return write


def _tensors(name: str, kind: str, version: int, **metadata: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_tensors(
            folder / name,
            {"a": torch.ones(1)},
            {"regauge": kind, "version": str(version), **metadata},
        )

    return write


def _check_folder(folder: Path) -> None:
    for name, kind in (("before", "federated seen"), ("client-00000", "federated update")):
        _tensors(f"seen/round-00000/{name}.safetensors", kind, recorded.VERSION, about=DEEP)(folder)


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "vocabulary": (_text("vocab.json"), read_vocabulary),
    "split checkpoint": (_tensors(split.FILE, "split", split.VERSION, about=DEEP), split.load),
    "split journal": (_text("session.json"), FolderJournal),
    "federated run": (_text(federated.RUN_FILE), federated.load_about),
    "federated state": (
        _tensors(
            federated.STATE_FILE, "federated state", federated.VERSION, rounds="1", history=DEEP
        ),
        federated.load,
    ),
    "recorded update": (_check_folder, lambda folder: recorded.load_update(folder, 0, 0)),
    "recorded rows": (
        _text("kept/round-00000/client-00000.json"),
        lambda folder: recorded.load_rows(folder, 0, 0),
    ),
    "preprocessor": (
        _text("preprocessor_config.json"),
        lambda folder: tasks._load_normalization(folder, None, None, torch.nn.Linear(1, 1)),
    ),
    "rows": (_text("a.jsonl"), lambda folder: open_data(folder / "a.jsonl")),
    "results": (_text("a.json"), lambda folder: from_json((folder / "a.json").read_text())),
    "spec": (_text("a.toml"), lambda folder: parse_spec("a = " + (folder / "a.toml").read_text())),
}


@pytest.mark.parametrize("what", READERS)
def test_deep_nesting_is_a_typed_error(tmp_path: Path, what: str) -> None:
    write, read = READERS[what]
    write(tmp_path)
    with pytest.raises(RegaugeError):
        read(tmp_path)


def test_a_damaged_discovery_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "key.json").write_text(DEEP)
    assert discovered.load(tmp_path, "key") is None
