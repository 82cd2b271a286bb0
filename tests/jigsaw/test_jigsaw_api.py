"""`train`, `evaluate` and `study` from Python: on folders and on live modules."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import regauge
from regauge import jigsaw
from regauge.data.sources import DataSource
from regauge.errors import CheckpointError, JigsawError, QualityWarning
from regauge.jigsaw.api import JigsawTraining
from regauge.jigsaw.folder import load_wrapped

TRAIN = DataSource("digits", split="train", mean=(0.3,), std=(0.38,))
TEST = replace(TRAIN, split="test")
OPTIONS = jigsaw.JigsawOptions(lr=1e-2, per="sample", epochs=2)


def make_vit() -> transformers.ViTForImageClassification:
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            initializer_range=0.2,
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "vit"
    make_vit().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained() -> JigsawTraining:
    return jigsaw.train(make_vit(), TRAIN, 0.5, options=OPTIONS)


def test_the_wrapper_is_at_the_top() -> None:
    assert regauge.MaskedJigsaw is jigsaw.MaskedJigsaw


def test_a_live_module_is_trained_as_a_copy() -> None:
    model = make_vit()
    before = copy.deepcopy(model.state_dict())
    trained = jigsaw.train(model, TRAIN, 0.5, options=OPTIONS)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    after = trained.model.state_dict()
    assert not torch.equal(after["classifier.weight"], before["classifier.weight"])
    summary = trained.summary()
    assert summary["last_loss"] < summary["first_loss"] - 0.1
    assert summary["steps"] == len(trained.losses) == 44
    assert "JP + UNK + DAL" in repr(trained)
    assert trained.to_dict()["facts"]["data"] == "digits"
    assert "The training loss" in trained._repr_html_()


def test_a_training_reports_the_model_before_and_after(trained: JigsawTraining) -> None:
    """On data of its own, with the one evaluation of the library."""
    assert trained.evaluation is not None
    same = replace(TRAIN, samples=1000)
    expected = regauge.evaluate({"start": make_vit(), "end": trained}, same)
    for name, score in trained.evaluation.scores.items():
        assert score.loss == pytest.approx(expected.scores[name].loss, abs=1e-5)
        assert trained.summary()[name]["accuracy"] == score.accuracy
    assert "digits" not in str(trained)
    assert "training images: " in str(trained)
    tested = jigsaw.train(make_vit(), TRAIN, 0.5, options=OPTIONS, test=TEST)
    assert tested.evaluation is not None
    assert "digits: " in str(tested)
    assert len(tested.evaluation.scores["end"]) != len(trained.evaluation.scores["end"])
    assert tested.losses == trained.losses
    with pytest.warns(QualityWarning, match="the model is worse than before training"):
        jigsaw.train(trained.model, TRAIN, 0.5, options=replace(OPTIONS, lr=1.0), test=TEST)


def test_a_folder_and_a_module_train_alike(folder: Path, trained: JigsawTraining) -> None:
    again = jigsaw.train(folder, TRAIN, 0.5, options=OPTIONS)
    assert again.losses == trained.losses
    other = jigsaw.train(folder, TRAIN, 0.5, options=OPTIONS, seed=1)
    assert other.losses != trained.losses


def test_examples_are_data_too(trained: JigsawTraining) -> None:
    examples, _ = TRAIN.read(make_vit(), None)
    assert jigsaw.train(make_vit(), examples, 0.5, options=OPTIONS).losses == trained.losses
    strong = jigsaw.JigsawOptions(strong=True)
    with pytest.raises(JigsawError, match="requires the mean and std"):
        jigsaw.train(make_vit(), examples, options=strong)
    assert strong.recipe({"mean": [0.3], "std": [0.38]})["augment"]["mean"] == [0.3]


def test_what_is_saved_loads_as_it_was(trained: JigsawTraining, tmp_path: Path) -> None:
    trained.save(tmp_path / "out")
    loaded = load_wrapped(tmp_path / "out")
    for name, tensor in trained.wrapped.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    plain = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    expected = trained.model.state_dict()["classifier.weight"]
    assert torch.equal(plain.classifier.weight, expected)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="exists already"):
        trained.save(tmp_path / "out")


def test_a_save_that_is_killed_leaves_all_or_nothing(
    trained: JigsawTraining, tmp_path: Path
) -> None:
    """Killed before each of its flushes, with the last attempt left alone."""
    outcomes = []
    for flushes in range(100):
        out = tmp_path / f"out{flushes}"
        pid = os.fork()
        if not pid:  # the child only writes: no threads are needed
            _kill_at_flush(flushes)
            trained.save(out)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        outcomes.append(out.is_dir())
        if out.is_dir():
            loaded = load_wrapped(out).state_dict()
            expected = trained.wrapped.state_dict()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 4  # config, weights, what was learned, and folders
    assert outcomes[-1]


def _kill_at_flush(count: int) -> None:
    """Kill this process at its fsync after `count` others."""
    calls = itertools.count()
    flush = os.fsync

    def fsync(fd: int) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(fd)

    setattr(os, "fsync", fsync)  # noqa: B010


def test_nothing_is_left_beside_an_output(folder: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    marks: list[tuple[int, int]] = []
    jigsaw.train(
        folder,
        TRAIN,
        out=tmp_path / "out",
        options=OPTIONS,
        on_note=notes.append,
        progress=lambda done, total, message: marks.append((done, total)),
    )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert any("44 steps of 64 images" in note for note in notes)
    assert marks[-1] == (43, 44)
    with pytest.raises(CheckpointError, match="exists already"):
        jigsaw.train(folder, TRAIN, out=tmp_path / "out", options=OPTIONS)


def test_models_are_evaluated_by_path_and_as_modules(folder: Path, trained: JigsawTraining) -> None:
    notes: list[str] = []
    found = jigsaw.evaluate(
        [folder, make_vit(), trained.wrapped],
        TEST,
        ratios=[0.5],
        on_note=notes.append,
    )
    on_disk, live, puzzled = found.evaluations.values()
    assert on_disk == live
    assert puzzled.accuracy > on_disk.accuracy + 0.2
    assert list(found.unwrapped) == [list(found.evaluations)[2]]
    assert "marks shuffled patches" in notes[0]
    assert "top-1" in repr(found)
    headline = found.results.headline
    assert headline.tone == "none", "a measurement has no verdict"
    assert "when 50% of patches are shuffled" in headline.label
    assert found.to_dict()["tables"][0]["title"] == "Puzzles at inference"
    (alone,) = jigsaw.evaluate(folder, TEST, ratios=[0.5]).evaluations.values()
    assert alone == on_disk


def test_a_sample_is_a_part_of_the_images(folder: Path) -> None:
    found = jigsaw.evaluate(folder, replace(TEST, samples=30), ratios=[0.5])
    assert found.facts["images"] == 30
    with pytest.raises(JigsawError, match=r"must be in \[0, 1\)"):
        jigsaw.evaluate(folder, TEST, ratios=[1.0])


def test_positions_are_studied(folder: Path, trained: JigsawTraining) -> None:
    found = jigsaw.study([folder, trained.wrapped])
    assert [table.title for table in found.results.tables] == [
        "Explained variance",
        "Places read off their embeddings",
    ]
    with_images = jigsaw.study(folder, TEST)
    assert with_images.results.figures[-1].title == "Attention of CLS in the last layer"
    assert "Explained variance" in repr(found)
    assert found.results.unchecked == ()
    with pytest.raises(JigsawError, match="corruptions require data"):
        jigsaw.study(folder, corruptions=True)
    with pytest.raises(JigsawError, match="outside requires data"):
        jigsaw.study(folder, outside="digits")


def test_weights_that_are_not_finite_are_named() -> None:
    model = make_vit()
    with torch.no_grad():
        model.classifier.bias[0] = np.inf
    with pytest.raises(JigsawError, match=r'"classifier\.bias" of ViTForImageClassification'):
        jigsaw.train(model, TRAIN, options=OPTIONS)


def test_a_training_without_steps_can_be_shown(trained: JigsawTraining) -> None:
    empty = replace(trained, losses=[], evaluation=None)
    assert repr(empty).endswith(", 0 steps>")
    assert empty.summary()["last_loss"] is None
    assert "<table>" not in empty._repr_html_()
    assert "<table>" in trained._repr_html_()
