"""Audits of locks: attacks scored by the truth, verdicts in words, the command, and a locked model
in use.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge import apply, authorize, element, generate_key, save_key
from regauge.attacks.theft import Budget
from regauge.audit import lock_audit as audit
from regauge.audit.lock_audit import (
    LockCase,
    _key_share,
    audit_lock,
    build_verdict,
    gain_interval,
)
from regauge.audit.verdicts import Verdict
from regauge.checkpoints.reader import LOCK_FIELD, open_checkpoint
from regauge.cli import main
from regauge.core.members import Dense, Monomial
from regauge.data.tasks import Examples
from regauge.errors import (
    AuditError,
    AuthorizeError,
    CheckpointError,
    LockError,
    TamperedModelError,
    WrongKeyError,
)
from regauge.locking import lock as locking
from regauge.locking import lock_state, unlock_state
from regauge.locking.authorize import is_authorized, save_trained
from regauge.locking.locked_checkpoints import plan_lock, plan_unlock, reseal
from regauge.matching.fingerprint import fingerprint_state
from regauge.models.resolve import spec_of as stored_spec
from regauge.results.findings import Finding, apply_threshold, load_results
from support.locked_models import add_drift, model_of
from support.picos import build, spec_of
from support.texts import readings, spoken, words


def test_an_audit_scores_each_attack_by_the_truth() -> None:
    spec, base = model_of("gpt2")
    model = build("gpt2")
    plain = add_drift(spec, base, 0.01)
    g = element(spec, 5, within="permutation")
    locked = apply(g, plain, "backbone")
    model.load_state_dict(plain)
    text = readings(spoken(model))  # what the owner's model is sure of
    model.load_state_dict(locked)
    case = LockCase(spec, locked, "permutation", truth=g, base=base, model=model.float(), test=text)
    findings = {f.id: f for f in audit_lock(case, fail_above=0.5).findings}
    assert findings["lock/public base"].value == 1.0
    assert findings["lock/public base"].holds is False
    assert findings["lock/norm vectors"].value == 1.0
    assert findings["lock/public edges"].floor == pytest.approx(1 / 12)
    assert (
        findings["lock/public edges"].value or 0
    ) < 0.5  # these weights are random: nothing has aligned them
    assert findings["lock/vocabulary"].value == 1.0
    assert "nearest in invariants of the weights is the base" in findings["lock/lineage"].sentence
    used = findings["lock/public base, used"]
    assert used.value == pytest.approx(used.ceiling, abs=1e-3)
    assert used.floor is not None
    assert used.value is not None
    assert used.floor < used.value - 0.1
    stranger = LockCase(
        spec, locked, "permutation", truth=g, base={n: torch.randn_like(v) for n, v in base.items()}
    )
    findings = {f.id: f for f in audit_lock(stranger, fail_above=0.5).findings}
    assert findings["lock/public base"].holds is True
    assert (findings["lock/public base"].value or 0) < 0.5


def test_without_anything_to_try_an_audit_is_refused() -> None:
    spec, state = model_of("gpt2")
    with pytest.raises(AuditError, match="no attack is applicable"):
        audit_lock(LockCase(spec, state, "permutation"))
    g = element(spec, 5, within="permutation")
    only = audit_lock(
        LockCase(spec, apply(g, state, "backbone"), "permutation", truth=g),
        attacks=["public edges"],
    )
    assert [f.id for f in only.findings] == ["lock/public edges"]


def test_one_example_is_too_few_to_split() -> None:
    spec, state = model_of("gpt2")
    model = build("gpt2").float()
    g = element(spec, 5, within="permutation")
    case = LockCase(
        spec,
        apply(g, state, "backbone"),
        "permutation",
        truth=g,
        model=model,
        test=readings(spoken(model)).only(np.arange(1)),
    )
    results = audit_lock(case)
    assert {
        n
        for n in ("known inputs", "seen features", "vocabulary")
        if f"{n}: fewer than two examples were given" in results.unchecked
    } == {
        "known inputs",
        "seen features",
        "vocabulary",
    }
    assert not any(
        "fewer" in line
        for line in audit_lock(
            replace(case, test=readings(spoken(model)).only(np.arange(2)))
        ).unchecked
    )


def test_a_thief_is_measured_between_the_locked_model_and_the_owners() -> None:
    model = build("vit").float()
    spec, plain = spec_of(model), {n: v.clone() for n, v in model.state_dict().items()}
    pixels = torch.randn(120, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.classifier.weight *= 5
        plain["classifier.weight"] = model.classifier.weight.clone()
        labels = model(pixels).logits.argmax(1)
    every = Examples(120, 5, lambda rows: ({"pixel_values": pixels[rows]}, labels[rows]))
    g = element(spec, 3, within="permutation")
    locked = apply(g, plain, "backbone")
    model.load_state_dict(locked)
    case = LockCase(
        spec,
        locked,
        "permutation",
        truth=g,
        model=model,
        train=every.only(np.arange(80)),
        test=every.only(np.arange(80, 120)),
    )
    results = audit_lock(case, labels=(10, 40, 500), budget=Budget(steps=4, batch=8))
    findings = {f.id: f for f in results.findings}
    assert {i for i in findings if "theft" in i} == {
        f"lock/theft/{way} {n}" for way in ("new edges", "tuned", "scratch") for n in (10, 40)
    }
    assert all(f.ceiling == 1.0 for i, f in findings.items() if "theft" in i)
    assert "theft with 500 labels: there are 80 examples" in results.unchecked
    assert any("40 labels reaches" in line for line in results.facts["verdict"])
    assert any("No base was tried" in line for line in results.facts["verdict"])
    slow, quick, both = (
        {
            f.id: f.value
            for f in audit_lock(case, labels=(40,), budget=Budget(8, 8, rates)).findings
            if "theft" in f.id
        }
        for rates in ((1e-9,), (1e-2,), (1e-9, 1e-2))
    )
    assert slow != quick
    assert both == {i: max(slow[i] or 0.0, quick[i] or 0.0) for i in slow}


def texts(*findings: Finding) -> list[str]:
    return [verdict.text for verdict in build_verdict(findings)]


def test_verdicts() -> None:
    verdict = texts(Finding("lock/public base", "", None, 1.0, 0.0, 1.0))
    assert verdict == [
        "The base is public: this lock gives nothing. Anyone with the base undoes the lock."
    ]
    edges = [Finding("lock/public edges", "", None, share, 0.004, 1.0) for share in (1.0, 0.3)]
    assert "The file alone undoes this lock" in texts(edges[0])[0]
    assert not any("The file alone" in line for line in texts(edges[1]))
    assert (
        "reveals 30% of the key." in texts(Finding("lock/public base", "", None, 0.3, 0.0, 1.0))[0]
    )
    assert "about as a guess" in texts(Finding("lock/public base", "", None, 0.02, 0.0, 1.0))[0]
    scored = [Finding("lock/theft/tuned 40", "", None, value, 0.1, 0.9) for value in (0.3, 0.6)]
    scored = [
        scored[0],
        replace(scored[1], id="lock/theft/new edges 40"),
        replace(scored[0], id="lock/theft/scratch 40", value=0.2),
    ]
    assert (
        texts(*scored)[1]
        == "Without a related model: an attacker with 40 labels reaches 0.60 of 0.90; the labels "
        "alone give 0.20."
    )
    best, scratch = "lock/theft/new edges 40", "lock/theft/scratch 40"

    def judge(right: list[bool], guessed: list[bool]) -> Verdict:
        found = build_verdict(scored, {best: right, scratch: guessed})
        return next(v for v in found if "40 labels" in v.text)

    wrong = [False]
    helps = judge([True] * 60 + wrong * 40, [True] * 20 + wrong * 80)
    assert helps.level == "partial"
    unclear = judge([True] * 7 + wrong * 3, [True] * 3 + wrong * 7)
    assert unclear.level == "unclear"
    assert "10 test examples are too few to decide if the locked weights help" in unclear.text
    assert judge([True] * 10, [True] * 10).level == "unclear", "equal, and few"
    same = judge([True] * 900 + wrong * 100, [True] * 900 + wrong * 100)
    assert same.level == "none"
    assert "at 99 % confidence the locked weights add at most 0.00" in same.text
    guessed = [True] * 880 + wrong * 120  # 2 points of 1000, paired
    assert gain_interval([True] * 900 + wrong * 100, guessed)[0] > 0
    assert gain_interval(wrong * 100 + [True] * 900, guessed)[0] < 0
    assert gain_interval([True] * 60, wrong * 60, 3)[0] < gain_interval([True] * 60, wrong * 60)[0]


def test_what_counts_is_the_way_from_the_floor_to_the_ceiling() -> None:
    finding = Finding("lock/theft/tuned 40", "", None, 0.6, 0.5, 1.0)
    assert apply_threshold(finding, 0.3).holds is True
    assert apply_threshold(finding, 0.1).holds is False
    assert apply_threshold(finding, None).holds is None
    assert apply_threshold(replace(finding, holds=True), 0.1).holds is True, (
        "what holds or not by itself is not judged again"
    )


def test_a_guess_with_the_wrong_sign_or_at_another_place_is_wrong() -> None:
    index = np.arange(4)[None]
    truth = {"stream": Monomial(index, np.array([[1.0, 1.0, -1.0, -1.0]]))}
    assert _key_share(truth, truth) == 1.0
    assert _key_share({"stream": Monomial(index)}, truth) == 0.5
    assert (
        _key_share({"stream": Monomial(index[:, [1, 0, 2, 3]], truth["stream"].scale)}, truth)
        == 0.5
    )
    assert _key_share({"stream": Dense(truth["stream"].matrix())}, truth) == 1.0
    assert _key_share({"stream": Dense(-truth["stream"].matrix())}, truth) == 0.0
    assert _key_share({}, truth) == 0.0


def test_a_lock_that_refuses_nothing_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, state = model_of("gpt2")
    key = generate_key()
    locked = lock_state(spec, state, key)
    case = LockCase(locked.spec, locked.state, "permutation", record=locked.record, key=key)
    assert all(f.holds for f in audit_lock(case).findings)
    monkeypatch.setattr(locking, "verify_tags", lambda *a: None)
    monkeypatch.setattr(locking, "locked_element", lambda *a: None)
    failed = {f.id.removeprefix("lock/handling/") for f in audit_lock(case).failed}
    assert failed == {"wrong key", "changed bit", "lost tensor"}


def test_observed_and_reference_features_share_no_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were they the same, the attack by statistics would be the one with known inputs."""
    recorded: list[set[int]] = []

    def entering(case: LockCase, rows: Any, seed: int) -> torch.Tensor:
        recorded.append(set(rows.tolist()))
        return torch.zeros(2, 4)

    spec, state = model_of("gpt2")
    monkeypatch.setattr(audit, "_embed_tokens", entering)
    audit._sample_features(
        LockCase(spec, state, "permutation", test=Examples(21, 2, lambda rows: ({}, rows))), 0
    )
    assert not recorded[0] & recorded[1]
    assert recorded[0] | recorded[1] == set(range(21))


def test_an_unrelated_model_is_not_reported_as_a_leak() -> None:
    """Any model explains some of another's weights: its gains are near one."""
    spec, state = model_of("gpt2")
    locked = apply(element(spec, 5, within="permutation"), state, "backbone")
    stranger = {
        n: 0.1 * v.std() * torch.randn_like(v) if v.dim() > 1 else v for n, v in state.items()
    }
    results = audit_lock(LockCase(spec, locked, "permutation", base=stranger))
    assert results.findings[0].measure == "share explained"
    assert 0.01 < (results.findings[0].value or 0) < 0.99
    assert "of the weights (shuffled weights: " in results.headline.text
    assert results.headline.tone == "none"
    assert not any("of the lock away" in line for line in results.facts["verdict"])
    assert (results.findings[0].floor or 0) > 0.01  # nor does the floor forget it
    own = audit_lock(LockCase(spec, locked, "permutation", base=state), fail_above=0.5).findings[0]
    assert (own.floor or 0) < 0.9 < (own.value or 0)
    assert own.holds is False
    assert (
        audit_lock(LockCase(spec, locked, "permutation", base=stranger), fail_above=0.5)
        .findings[0]
        .holds
    )


def test_what_is_not_finite_is_named() -> None:
    spec, state = model_of("gpt2")
    broken = {
        **state,
        "transformer.h.0.ln_1.weight": state["transformer.h.0.ln_1.weight"] * float("nan"),
    }
    fault = r'the locked model must be finite, got NaN or Inf in "transformer\.h\.0\.ln_1\.weight"'
    with pytest.raises(AuditError, match=fault):
        audit_lock(LockCase(spec, broken, "permutation", base=state))
    with pytest.raises(AuditError, match="the base must be finite"):
        audit_lock(LockCase(spec, state, "permutation", base=broken))
    for name in ("transformer.h.0.ln_1.weight", "transformer.h.0.mlp.c_fc.weight"):
        with pytest.raises(CheckpointError, match=f'finite values, but "{name}" has NaN or Inf'):
            fingerprint_state(spec, {**state, name: state[name] * float("inf")})


def test_progress_names_only_the_attacks_that_run() -> None:
    spec, state = model_of("gpt2")
    messages: list[str] = []
    audit_lock(
        LockCase(spec, state, "permutation", base=state),
        progress=lambda i, n, name: messages.append(name),
    )
    assert messages == ["public base", "lineage"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = build("gpt2").float()
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for p in base.parameters():
            p.add_(0.01 * p.std() * torch.randn_like(p))
    base.save_pretrained(tmp_path / "plain")
    words(tmp_path / "plain")
    (tmp_path / "said.txt").write_text(" ".join(f"w{3 + i * i % 26}" for i in range(600)))
    key = generate_key()
    save_key(key, tmp_path / "key")
    checkpoint = open_checkpoint(tmp_path / "plain")
    plan_lock(checkpoint, spec_of(base), tmp_path / "locked", key).write()
    locked, other = str(tmp_path / "locked"), str(tmp_path / "base")
    options = ["--data", str(tmp_path / "said.txt"), "--length", "12", "--samples", "16"]
    report = ["--json", str(tmp_path / "a.json"), "--report", str(tmp_path / "a.html")]
    assert (
        main(
            [
                "audit",
                "lock",
                locked,
                "-k",
                str(tmp_path / "key"),
                "--against",
                other,
                *options,
                *report,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "The base is public: this lock gives nothing" in out
    results = load_results(tmp_path / "a.json")
    assert {f.id: f.value for f in results.findings}["lock/public base"] == 1.0
    assert {
        f.id.rsplit("/", 1)[1]: f.holds for f in results.findings if "/handling/" in f.id
    } == dict.fromkeys(("wrong key", "changed bit", "lost tensor", "key reuse"), True)
    assert key.derive("x").hex() not in (tmp_path / "a.json").read_text()
    assert "What this lock is worth" in (tmp_path / "a.html").read_text()
    assert main(["audit", "lock", locked, "--against", other, "--fail-above", "0.5"]) == 3
    assert "FAILS  public base" in capsys.readouterr().out
    assert main(["audit", "lock", other, "--against", other]) == 1
    assert "is not locked" in capsys.readouterr().err
    assert main(["audit", "lock", locked]) == 1
    assert "no attack is applicable" in capsys.readouterr().err
    for labels in ("x", "0,5", "\u00b2", ",", ""):
        assert main(["audit", "lock", locked, "--labels", labels]) == 2
        assert "as in 50,200" in capsys.readouterr().err
    assert main(["audit", "lock", locked, "--rates", "1e-3,fast"]) == 2
    build("llama").float().save_pretrained(tmp_path / "llama")
    assert main(["audit", "lock", locked, "--against", str(tmp_path / "llama")]) == 1
    assert "the base must be of the same family and size" in capsys.readouterr().err
    assert main(["match", locked, other, "-o", str(tmp_path / "matched")]) == 1
    assert "is locked by the key" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["permutation", "rotation"])
def test_a_locked_folder_is_authorised_by_its_key_trained_and_saved(
    tmp_path: Path, group: str
) -> None:
    model = build("vit").float()
    model.save_pretrained(tmp_path / "plain")
    key = generate_key()
    plan_lock(
        open_checkpoint(tmp_path / "plain"),
        stored_spec(tmp_path / "plain"),
        tmp_path / "locked",
        key,
        group=group,
    ).write()
    locked = type(model).from_pretrained(tmp_path / "locked")
    pixels = torch.randn(4, 3, 8, 8)
    expected, garbage = model(pixels).logits, locked(pixels).logits
    assert not torch.allclose(garbage, expected, atol=0.1)
    with pytest.raises(WrongKeyError):
        authorize(locked, generate_key())
    with pytest.raises(LockError, match="is not locked"):
        authorize(model, key)
    changed = shutil.copytree(tmp_path / "locked", tmp_path / "changed")
    data = load_file(changed / "model.safetensors")
    data["classifier.weight"][0, 0] += 1
    save_file(data, changed / "model.safetensors", {"format": "pt"})
    with pytest.raises(TamperedModelError, match="its data were changed"):
        authorize(type(model).from_pretrained(changed), key, files=changed)
    reseal(open_checkpoint(changed), stored_spec(changed), key)
    with pytest.raises(AuthorizeError, match="differs from that of"):
        authorize(locked, key, files=changed)
    assert not is_authorized(locked)
    authorize(locked, key, files=tmp_path / "locked")
    torch.testing.assert_close(locked(pixels).logits, expected, atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.SGD(
        [p for n, p in locked.named_parameters() if "norm" not in n], lr=0.01
    )
    locked(pixels).logits.square().sum().backward()
    optimizer.step()
    after = locked(pixels).logits
    with pytest.raises(WrongKeyError):
        save_trained(locked, tmp_path / "stolen", generate_key())
    assert not (tmp_path / "stolen").exists()
    locked.save_pretrained(tmp_path / "unsealed")
    save_trained(locked, tmp_path / "trained", key)
    assert (
        json.loads((tmp_path / "trained" / "config.json").read_text())[LOCK_FIELD]["key"] == key.id
    )
    with pytest.raises(TamperedModelError, match="its data were changed"):
        plan_unlock(
            open_checkpoint(tmp_path / "unsealed"),
            stored_spec(tmp_path / "unsealed"),
            tmp_path / "no",
            key,
        )
    plan_unlock(
        open_checkpoint(tmp_path / "trained"),
        stored_spec(tmp_path / "trained"),
        tmp_path / "new",
        key,
    ).write()
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path / "new")(pixels).logits, after, atol=1e-4, rtol=1e-4
    )


def test_states_are_locked_and_unlocked_alike() -> None:
    spec, state = model_of("llama")
    key = generate_key()
    locked = lock_state(spec, state, key)
    again = unlock_state(locked.spec, locked.state, locked.record, key)
    assert all(torch.equal(again[n], state[n]) for n in state)
