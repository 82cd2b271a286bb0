"""Saved parts of long computations: appended, never rewritten, ignored for other inputs."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from regauge.checkpoints.plan import check_new
from regauge.checkpoints.resume import Outcome, ResumeState, StateStore, write_outcome
from regauge.errors import CheckpointError


def store_of(tmp_path: Path, label: bytes = b"inputs") -> StateStore:
    return StateStore.beside(tmp_path / "out", label)


def test_a_part_comes_back_with_its_values_and_tensors(tmp_path: Path) -> None:
    store_of(tmp_path).save("layer.3", {"note": [1, "x"]}, {"w": torch.arange(3)})
    part = store_of(tmp_path).load("layer.3")
    assert part is not None
    assert part.values == {"note": [1, "x"]}
    assert part.tensors["w"].tolist() == [0, 1, 2]
    assert store_of(tmp_path).load("layer.4") is None


def test_saving_a_part_leaves_the_others_unchanged(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save("a", {"n": 1})
    before = store.path("a").stat()
    store.save("b", {"n": 2})
    after = store.path("a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert len(list(store.folder.iterdir())) == 2


def test_parts_of_other_inputs_are_ignored(tmp_path: Path) -> None:
    store_of(tmp_path).save("a", {"n": 1})
    other = store_of(tmp_path, b"other inputs")
    assert other.load("a") is None
    other.save("a", {"n": 2})
    assert store_of(tmp_path).load("a") is None


def test_a_damaged_part_is_ignored(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save("a", {}, {"w": torch.zeros(4)})
    data = bytearray(store.path("a").read_bytes())
    data[-1] ^= 1
    store.path("a").write_bytes(data)
    assert store.load("a") is None
    store.path("b").write_bytes(store.path("a").read_bytes()[:20])
    assert store.load("b") is None


def test_a_part_under_another_name_is_ignored(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save("a", {})
    store.path("a").rename(store.path("b"))
    assert store.load("b") is None


def test_parts_are_for_the_owner_only_until_they_are_deleted(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save("a", {})
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.path("a").stat().st_mode) == 0o600
    store.delete()
    store.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_check_of_the_output_leaves_the_state(tmp_path: Path) -> None:
    """Whatever has come to stand at the output, hours of work beside it are not deleted."""
    store = store_of(tmp_path)
    store.save("a", {"n": 1})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="exists already"):
        check_new(tmp_path / "out")
    assert store.load("a") is not None


def test_only_parts_are_deleted(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "mine", b"label")
    store.save("a", {"n": 1})
    store.nested("a").save("b", {"n": 2})
    others = [store.folder / "notes.txt", store.nested("x").folder / "weights.safetensors"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    named = store.folder / f"{'0' * 24}.safetensors"  # content-addressed, by another program
    save_file({"w": torch.ones(1)}, named)
    (store.folder / f".{'1' * 24}.safetensors.partial-12").write_bytes(b"")
    assert sorted(store.foreign) == sorted([*others, named])
    store.delete()
    left = sorted(path for path in store.folder.rglob("*") if path.is_file())
    assert left == sorted([*others, named])
    for path in left:
        path.unlink()
    store.delete()
    assert not store.folder.exists()


@pytest.mark.parametrize("values", [[1, 2], {"of": []}, {"values": 1}, "text"])
def test_a_part_of_another_form_is_absent(tmp_path: Path, values: Any) -> None:
    store = store_of(tmp_path)
    store.save("a", {"n": 1})
    if isinstance(values, dict):
        values = {"of": [store.label, "a"], **values}
    write_outcome(store.path("a"), Outcome(values))
    assert store.load("a") is None
    assert store.open("a") is None
    if not isinstance(values, dict):
        assert ResumeState(store.path("a")).load() is None
