"""The public audits: on live modules and examples, on files, with one kind of report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import regauge
from regauge import generate_key
from regauge.audit import AuditReport, GradientOptions, LockOptions, SplitOptions
from regauge.audit.gradient_audit.attempts import Budget
from regauge.audit.inputs import divide_examples
from regauge.checkpoints.reader import open_checkpoint
from regauge.errors import AttackNameError, FederatedError, LockError
from regauge.locking.locked_checkpoints import plan_lock
from regauge.results.findings import from_json
from support.picos import build, spec_of
from support.updates import examples, vit


def value_of(report: AuditReport, name: str) -> float:
    value = next(f.value for f in report.results.findings if f.id.endswith(name))
    assert value is not None
    return float(value)


def test_gradients_of_a_live_model_are_audited_without_files(tmp_path: Path) -> None:
    model = vit()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    options = GradientOptions(
        attacks=["least squares", "labels"], updates=2, batches=(), budget=Budget(practice=10)
    )
    sizes: list[tuple[str, str]] = []
    report = regauge.audit.gradients(
        model,
        examples(40),
        ["noise=10"],
        options=options,
        fail_above=0.5,
        on_loaded=lambda kind, text: sizes.append((kind, text)),
    )
    assert value_of(report, "none/least squares") > value_of(report, "noise=10/least squares") + 20
    assert [f.holds for f in report.results.findings] == [None, True]
    assert sizes == [
        (
            "images",
            "20 client images, 20 attacker images; 2 updates to attack per combination",
        )
    ]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert report.results.facts["model"] == type(model).__name__
    assert report.verdict == tuple(report.to_dict()["facts"]["verdict"])
    assert repr(report).startswith("<audit of gradients: 2 findings: ")
    assert report.verdict[0] in str(report)
    assert "<table>" in report._repr_html_()
    assert from_json(report.to_json()).findings == report.results.findings
    report.to_html(tmp_path / "page.html")
    assert report.to_html() == (tmp_path / "page.html").read_text()


def test_a_split_model_is_audited_from_a_module() -> None:
    options = SplitOptions(attacks=["least squares"], epochs=1, attacked=6)
    report = regauge.audit.split(vit(), examples(100), ["noise=30"], options=options)
    assert value_of(report, "none/least squares") > value_of(report, "noise=30/least squares") + 0.2
    assert report.results.facts["client's images"] == 50
    with pytest.raises(AttackNameError, match='unknown attack "fog" on images or texts'):
        regauge.audit.split(vit(), examples(100), options=SplitOptions(attacks=["fog"]))
    with pytest.raises(AttackNameError, match='unknown attack "vocabulary" on images'):
        regauge.audit.split(vit(), examples(100), options=SplitOptions(attacks=["vocabulary"]))


def test_a_lock_is_audited_against_a_module_and_only_its_own_base_undoes_it(
    tmp_path: Path,
) -> None:
    model = build("gpt2").float()
    model.save_pretrained(tmp_path / "plain")
    key = generate_key()
    checkpoint = open_checkpoint(tmp_path / "plain")
    plan_lock(checkpoint, spec_of(model), tmp_path / "locked", key).write()
    torch.manual_seed(1)
    stranger = type(model)(model.config)
    options = LockOptions(attacks=["public base"])
    own, other = (
        regauge.audit.lock(tmp_path / "locked", key=key, base=base, options=options, fail_above=0.5)
        for base in (model, stranger)
    )
    assert value_of(own, "lock/public base") == 1.0
    assert own.results.failed
    assert "this lock gives nothing" in own.verdict[0]
    assert repr(own).startswith("<audit of lock: 2 findings, 2 failed: ")
    assert value_of(other, "lock/public base") < 0.5
    assert not other.results.failed
    typo = LockOptions(attacks=["public base", "public bases"])
    with pytest.raises(AttackNameError, match='unknown attack "public bases" on locks'):
        regauge.audit.lock(tmp_path / "locked", key=key, base=model, options=typo)
    with pytest.raises(LockError, match="is not locked"):
        regauge.audit.lock(tmp_path / "plain", base=model)
    with pytest.raises(LockError, match="is locked by the key"):
        regauge.audit.gradients(tmp_path / "locked", examples(8))


def test_what_was_not_recorded_cannot_be_audited(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="is not a run"):
        regauge.audit.recorded(tmp_path)


def test_examples_are_divided_without_overlap() -> None:
    rows = examples(41).batch
    parts = divide_examples(examples(41), (0.5, 0.3), 20, 3)
    assert [len(part) for part in parts] == [10, 6, 4]
    images = torch.cat([p.batch(np.arange(len(p)))[0]["pixel_values"] for p in parts])
    assert len(torch.unique(images.flatten(1), dim=0)) == 20
    everything = rows(np.arange(41))[0]["pixel_values"].flatten(1)
    assert all((everything == image.flatten()).all(1).any() for image in images)
