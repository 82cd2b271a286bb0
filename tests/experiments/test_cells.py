"""Cells: what is finished is not computed again, what is interrupted goes on to the same end, what
is damaged is found out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.shared import train_cells
from experiments.shared.cells import Cell, key_of, run
from regauge.checkpoints.environment import default_cache
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data import train as loop
from regauge.errors import CacheError, RegaugeError
from support import forks

CALLS: list[Mapping[str, Any]] = []


def double(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    CALLS.append(p)
    return Outcome(
        {"twice": 2 * p["x"]}, {"w": torch.arange(3.0) * p["x"], "empty": torch.zeros(0)}
    )


CELL = Cell("double", 1, double)


class Blob:
    def __init__(self, digest: str) -> None:
        self.digest = digest


@pytest.fixture(autouse=True)
def _count() -> None:
    CALLS.clear()


def test_a_cell_is_computed_once(tmp_path: Path) -> None:
    first, again = run(CELL, {"x": 2, "y": [1]}, tmp_path), run(CELL, {"y": [1], "x": 2}, tmp_path)
    assert len(CALLS) == 1
    assert first.values == again.values == {"twice": 4}
    assert first.digest == again.digest
    assert again.tensors["w"].tolist() == [0, 2, 4]
    assert again.versions["torch"] == torch.__version__


@pytest.mark.parametrize("change", ["parameter", "version", "name", "data"])
def test_whatever_changes_makes_another_cell(tmp_path: Path, change: str) -> None:
    run(CELL, {"x": 2}, tmp_path, {"d": Blob("a")})
    other = {"version": replace(CELL, version=2), "name": replace(CELL, name="triple")}.get(
        change, CELL
    )
    run(
        other,
        {"x": 3 if change == "parameter" else 2},
        tmp_path,
        {"d": Blob("b" if change == "data" else "a")},
    )
    assert len(CALLS) == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("damage", ["a tensor's byte", "a value", "cut off", "empty"])
def test_a_damaged_outcome_is_computed_again(tmp_path: Path, damage: str) -> None:
    whole = run(CELL, {"x": 2}, tmp_path).digest
    (path,) = tmp_path.glob("*.safetensors")
    raw = path.read_bytes()
    torn = {
        "a tensor's byte": raw[:-1] + bytes([raw[-1] ^ 1]),
        "a value": raw.replace(b'twice\\":4', b'twice\\":5'),
        "cut off": raw[:-4],
        "empty": b"",
    }[damage]
    assert torn != raw
    path.write_bytes(torn)
    assert run(CELL, {"x": 2}, tmp_path).digest == whole
    assert len(CALLS) == 2
    assert path.read_bytes()[-16:] == raw[-16:]
    run(CELL, {"x": 2}, tmp_path)
    assert len(CALLS) == 2


@pytest.mark.parametrize("bad", [math.nan, {1, 2}, torch.zeros(1), Path("x")])
def test_parameters_are_plain_json(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(CacheError, match="must be JSON"):
        run(CELL, {"x": bad}, tmp_path)
    assert not CALLS


def test_a_cell_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(p: Any, data: Any, work: ResumeState) -> Outcome:
        raise OSError(28, "from the cell itself")

    with pytest.raises(OSError, match="from the cell itself"):
        run(Cell("fails", 1, fails), {}, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegaugeError, match="file cannot be written"):
        run(CELL, {"x": 1}, tmp_path / "file")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", "here")
    assert default_cache() == Path("here")
    monkeypatch.delenv("REGAUGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert default_cache() == Path("/there/regauge/experiments")


SLOW = """
    import sys, time
    from pathlib import Path
    from regauge.checkpoints.resume import Outcome
    from experiments.shared.cells import Cell, run

    def slow(p, data, work):
        with Path(sys.argv[2]).open("a") as log:
            log.write("computed\\n")
        time.sleep(1)
        return Outcome({"x": 1})

    Path(sys.argv[3]).touch()
    print(run(Cell("slow", 1, slow), {}, Path(sys.argv[1])).digest)
"""


def test_two_processes_compute_a_cell_once(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    code = textwrap.dedent(SLOW)
    runs = [
        forks.Program(code, tmp_path / "cache", tmp_path / "log", tmp_path / f"up{i}")
        for i in range(2)
    ]
    found = {r.stdout.read() for r in runs}
    assert [r.wait(120) for r in runs] == [0, 0]
    assert len(found) == 1
    assert (tmp_path / "log").read_text() == "computed\n"


# A training with everything that has a state of its own: Adam's moments, dropout's random numbers,
# fresh rows in every pass, moved columns.
TASK = {"kind": "images", "classes": 10, "mean": [0.3], "std": [0.4]}
CONFIG = {
    "model_type": "vit",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 4,
}
MODEL = {
    "class": "ViTForImageClassification",
    "config": {**CONFIG, "num_channels": 1, "num_labels": 10, "hidden_dropout_prob": 0.2},
}
RECIPE = {"optimizer": "adam", "rate": 1e-2, "batch": 32, "epochs": 3, "dtype": "float64"}
LONG = {"model": MODEL, "task": TASK, "recipe": RECIPE, "seed": 3, "way": "both"}
KILLED = f"""
    import os, signal, sys
    from pathlib import Path
    from regauge.data.datasets import open_data
    from experiments.shared import cells
    from experiments.shared import train_cells
    from regauge.checkpoints import resume

    cells.SAVE_INTERVAL = 0
    original_save = resume.ResumeState.save
    def save(self, values, tensors):
        original_save(self, values, tensors)
        if values["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    resume.ResumeState.save = save
    data = {{"train": open_data("digits").take(128)}}
    cells.run(train_cells.TRAIN, {LONG!r}, Path(sys.argv[1]), data)
"""


def digits() -> Any:
    from regauge.data.datasets import open_data

    return {"train": open_data("digits").take(128)}


def test_a_killed_training_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)  # sums are the same bits only on the same number of threads
    whole = run(train_cells.TRAIN, LONG, tmp_path / "whole", digits())
    cache = tmp_path / "killed"
    assert forks.run(textwrap.dedent(KILLED), cache)[0] == -9
    assert not list(cache.glob("*.safetensors"))
    assert len(list(cache.glob("*.working"))) == 1
    steps = []
    forward = loop.logits_and_extra_loss
    monkeypatch.setattr(loop, "logits_and_extra_loss", lambda *a: steps.append(1) or forward(*a))
    resumed = run(train_cells.TRAIN, LONG, cache, digits())
    assert whole.values["steps"] == 12
    assert len(steps) == 12 - 5
    assert resumed.values["losses"] == whole.values["losses"]
    assert resumed.digest == whole.digest
    assert not list(cache.glob("*.working"))


def test_a_damaged_state_of_work_is_begun_again(tmp_path: Path) -> None:
    whole = run(train_cells.TRAIN, LONG, tmp_path / "whole", digits())
    path = tmp_path / "torn" / f"train-{key_of(train_cells.TRAIN, LONG, digits())[:40]}.working"
    path.parent.mkdir()
    path.write_bytes(b"torn")
    assert run(train_cells.TRAIN, LONG, tmp_path / "torn", digits()).digest == whole.digest
