"""An interrupted audit resumes: its findings equal those of an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge
from regauge.attacks.theft import Budget as Theft
from regauge.audit import GradientOptions, LockOptions, SplitOptions
from regauge.audit.engine import Steps
from regauge.audit.gradient_audit.attempts import Budget
from regauge.audit.resume import digest_files, open_store
from regauge.checkpoints.resume import StateStore
from regauge.cli import main
from regauge.core.progress import Progress
from regauge.errors import AuditError, CheckpointError
from support.updates import examples, vit


class StopError(Exception):
    """The interrupt of a test."""


def stop_after(steps: int) -> tuple[Progress, list[str]]:
    """A callback that interrupts before a step, and the steps that began."""
    begun: list[str] = []

    def report(done: int, total: int, message: str) -> None:
        if done == steps:
            raise StopError
        begun.append(message)

    return report, begun


def plain(report: Any) -> dict[str, Any]:
    """A report without its times."""
    document = report.to_dict()
    document["facts"].pop("seconds")
    for table in document["tables"]:
        if "seconds" in table["columns"]:
            at = table["columns"].index("seconds")
            table["rows"] = [row[:at] + row[at + 1 :] for row in table["rows"]]
    for finding in document["findings"]:
        finding["sentence"] = finding["sentence"].rpartition(";")[0]
    return document  # type: ignore[no-any-return]


GRADIENTS = GradientOptions(
    attacks=["least squares", "regression", "labels"],
    updates=2,
    batches=(),
    budget=Budget(practice=10),
    gallery=2,
)
SPLIT = SplitOptions(attacks=["least squares", "public embedding"], epochs=1, attacked=6)


def gradients(**more: Any) -> Any:
    return regauge.audit.gradients(vit(), examples(40), ["mjp=0.5"], options=GRADIENTS, **more)


def split(**more: Any) -> Any:
    return regauge.audit.split(vit(), examples(80), ["rows"], options=SPLIT, **more)


@pytest.mark.parametrize(("audit", "steps"), [(gradients, 4), (split, 4)])
def test_findings_equal_those_of_an_undisturbed_run(
    audit: Callable[..., Any], steps: int, tmp_path: Path
) -> None:
    undisturbed = plain(audit())
    state = tmp_path / "state"
    callback, begun = stop_after(steps)
    with pytest.raises(StopError):
        audit(state=state, progress=callback)
    assert len(list(state.glob("*.safetensors"))) == steps
    resumed: list[str] = []
    report = audit(
        state=state, resume=True, progress=lambda done, total, message: resumed.append(message)
    )
    assert plain(report) == undisturbed
    assert not set(begun) & set(resumed), "finished steps are not computed again"
    assert state.exists(), "the saved steps stay until the report is written"
    report.delete_state()
    assert not state.exists()


def test_a_lock_resumes_and_other_inputs_do_not(tmp_path: Path) -> None:
    model = vit()
    model.save_pretrained(tmp_path / "model")
    key = regauge.Key(bytes(32), "lock")
    regauge.lock(tmp_path / "model", key).save(tmp_path / "locked")
    options = LockOptions(labels=[8], budget=Theft(2, 4, (1e-3,)), samples=16)
    state = tmp_path / "state"

    def audit(**more: Any) -> Any:
        return regauge.audit.lock(
            tmp_path / "locked", base=tmp_path / "model", data=examples(40), options=options, **more
        )

    callback, begun = stop_after(3)
    with pytest.raises(StopError):
        audit(state=state, progress=callback)
    again: list[str] = []
    report = audit(state=state, resume=True, progress=lambda d, t, message: again.append(message))
    assert again
    assert not set(begun) & set(again)
    values = {f.id: f.value for f in audit().results.findings}
    assert {f.id: f.value for f in report.results.findings} == values
    with pytest.raises(StopError):
        audit(state=state, progress=stop_after(3)[0])
    other, started = stop_after(1)
    with pytest.raises(StopError):
        audit(state=state, resume=True, seed=1, progress=other)
    assert started == begun[:1], "another seed starts anew"


def test_a_folder_with_other_files_is_rejected_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(AuditError, match=r"state must be a new folder.*notes\.txt"):
            gradients(state=tmp_path, resume=resume)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def label(*inputs: Any) -> str:
    store = open_store("unused", True, *inputs)
    assert store is not None
    return store.label


def test_steps_of_other_examples_models_or_files_are_not_used(tmp_path: Path) -> None:
    data, model = examples(500), vit()
    assert label(data, model) == label(examples(500), vit())
    batch = data.batch
    for row in (3, 499):  # any one of them

        def corrected(rows: Any, row: int = row) -> Any:
            inputs, labels = batch(rows)
            return inputs, labels + (torch.as_tensor(rows) == row).long()

        assert label(replace(data, batch=corrected)) != label(data)
    other = vit()
    other.config.layer_norm_eps = 0.1
    assert label(other) != label(model)
    path = tmp_path / "seen" / "round-00000" / "client-00000.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    before = digest_files([path]), label(path)
    path.write_bytes(b"2")
    assert (digest_files([path]), label(path)) != before
    assert digest_files([path]) != before[0]


def test_the_steps_stay_if_an_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.audit import api

    vit().save_pretrained(tmp_path / "vit")
    monkeypatch.setattr(api, "load_examples", lambda *args, **more: (examples(40), TASK))
    command = ["audit", "gradients", str(tmp_path / "vit"), "--data", "digits", "--updates", "1"]
    command += ["--attacks", "labels", "--batches", "", "--json", str(tmp_path / "r.json")]

    def full(*args: Any, **more: Any) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("regauge.cli.run.write_bytes", full)
    assert main(command) == 1
    assert list((tmp_path / ".r.json.state").glob("*.safetensors"))


def test_the_time_left_is_estimated_from_steps_of_the_same_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr("regauge.audit.engine.time.monotonic", lambda: now[0])
    messages: list[str] = []
    steps = Steps(
        ["train", "attack", "train", "attack"],
        lambda done, total, message: messages.append(f"{done}/{total} {message}"),
        StateStore(tmp_path / "state", b""),
    )

    def work(seconds: float) -> Callable[[Progress], Any]:
        def compute(within: Progress) -> Any:
            now[0] += seconds / 2
            within(1, 2, "epochs")
            now[0] += seconds / 2
            return float("nan"), {"x": torch.ones(1)}

        return compute

    steps.run("a", "train none", work(600))
    steps.run("b", "attack none", work(60))
    saved = steps.run("c", "train rows", work(600))
    assert saved.values != saved.values, "nan survives"
    assert messages == [
        "0/4 train none",
        "0/4 train none, 1/2 epochs, about 35 min left",
        "1/4 attack none, about 30 min left",
        "1/4 attack none, 1/2 epochs, about 12 min left",
        "2/4 train rows, about 11 min left",
        "2/4 train rows, 1/2 epochs, about 6 min left",
    ]
    steps.finish()
    assert messages[-1] == "4/4 "


def test_an_interrupted_command_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from regauge.audit import api

    vit().save_pretrained(tmp_path / "vit")
    monkeypatch.setattr(api, "load_examples", lambda *args, **more: (examples(40), TASK))
    out = tmp_path / "r.json"
    command = ["audit", "gradients", str(tmp_path / "vit"), "--data", "digits", "--updates", "1"]
    command += ["--attacks", "least squares,labels", "--batches", "", "--defence", "rows"]
    run, count = Steps.run, [0]

    def interrupted(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(Steps, "run", interrupted)
    assert main([*command, "--json", str(out)]) == 130
    err = " ".join(capsys.readouterr().err.split())
    assert f"interrupted; 2 finished steps are saved in {tmp_path / '.r.json.state'}" in err
    assert "repeat the command with --resume" in err
    assert not out.exists()
    monkeypatch.setattr(Steps, "run", run)
    assert main([*command, "--json", str(out), "--resume"]) == 0
    err = capsys.readouterr().err
    assert "audit 3/4: rows: embedding least squares" in err
    assert "audit 1/4" not in err
    assert json.loads(out.read_text())["facts"]["verdict"]
    assert not (tmp_path / ".r.json.state").exists()


TASK = {"kind": "images", "mean": (0.5,) * 3, "std": (0.5,) * 3}
