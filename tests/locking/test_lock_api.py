"""`lock`, `unlock`, `authorize`, `rekey` and `reseal` take whatever holds a model, and give files,
states and live models of one function.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regauge
from regauge.checkpoints.reader import open_checkpoint
from regauge.core.rng import seed_key
from regauge.errors import (
    CheckpointError,
    KeyFileError,
    LockError,
    PassphraseError,
    SpecError,
    TamperedModelError,
    WrongKeyError,
)
from regauge.locking import rekey, reseal
from regauge.locking.keys import Key, save_key
from regauge.locking.lock import record_of
from support.cli_runs import contents
from support.picos import IDS, build

KEY, OTHER = Key(seed_key(1), "lock"), Key(seed_key(2), "lock")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**IDS).logits
    return result


def test_lock_save_authorize_unlock(plain: Path, tmp_path: Path) -> None:
    """The three lines of a notebook, by path: the key as an object and as its file."""
    save_key(KEY, tmp_path / "key")
    expected = logits(regauge.load_model(plain))
    written = regauge.lock(plain, tmp_path / "key").save(tmp_path / "locked")
    assert written.path == tmp_path / "locked"
    assert not torch.allclose(logits(regauge.load_model(tmp_path / "locked")), expected)
    model = regauge.authorize(tmp_path / "locked", KEY)
    assert torch.allclose(logits(model), expected, atol=1e-4)
    regauge.unlock(tmp_path / "locked", tmp_path / "key").save(tmp_path / "back")
    assert contents(tmp_path / "back")["model.safetensors"] == contents(plain)["model.safetensors"]


@pytest.mark.parametrize("kind", ["path", "text", "checkpoint", "module"])
def test_every_source_is_locked_by_the_same_element(plain: Path, tmp_path: Path, kind: str) -> None:
    sources = {
        "path": lambda: plain,
        "text": lambda: str(plain),
        "checkpoint": lambda: open_checkpoint(plain),
        "module": lambda: regauge.load_model(plain),
    }
    expected = regauge.lock(plain, KEY).state()
    locked = regauge.lock(sources[kind](), KEY)
    assert all(torch.equal(t, expected[name]) for name, t in locked.state().items())
    locked.save(tmp_path / "locked")
    stored = open_checkpoint(tmp_path / "locked")
    assert all(torch.equal(stored[name], t) for name, t in expected.items())
    assert logits(regauge.authorize(tmp_path / "locked", KEY)).isfinite().all()


def test_states_in_memory(plain: Path) -> None:
    state, spec = dict(open_checkpoint(plain)), regauge.spec_of(plain)
    locked = regauge.lock(state, KEY, spec=spec).state()
    assert any(not torch.equal(locked[n], t) for n, t in state.items())
    with pytest.raises(SpecError, match="no config, so its family is unknown"):
        regauge.lock(state, KEY)
    with pytest.raises(SpecError, match="a state dict does not name its family"):
        regauge.spec_of(state)
    with pytest.raises(LockError, match="is not locked"):
        regauge.unlock(locked, KEY, spec=spec)


def test_wrong_keys_and_changed_weights_raise(plain: Path, tmp_path: Path) -> None:
    regauge.lock(plain, KEY).save(tmp_path / "locked")
    with pytest.raises(WrongKeyError):
        regauge.unlock(tmp_path / "locked", OTHER)
    with pytest.raises(WrongKeyError):
        regauge.authorize(tmp_path / "locked", OTHER)
    with pytest.raises(LockError, match="is locked already"):
        regauge.lock(tmp_path / "locked", OTHER)
    with pytest.raises(CheckpointError, match="exists already"):
        regauge.unlock(tmp_path / "locked", KEY).save(plain)
    data = bytearray((tmp_path / "locked" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "locked" / "model.safetensors").write_bytes(data)
    with pytest.raises(TamperedModelError, match="its data were changed"):
        regauge.authorize(tmp_path / "locked", KEY)
    with pytest.raises(TamperedModelError, match="its data were changed"):
        regauge.unlock(tmp_path / "locked", KEY).save(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    assert regauge.authorize(tmp_path / "locked", KEY, retrained=True) is not None


def test_rekey_and_reseal(plain: Path, tmp_path: Path) -> None:
    regauge.lock(plain, KEY).save(tmp_path / "locked")
    rekey(tmp_path / "locked", KEY, OTHER).save(tmp_path / "relocked")
    record = record_of(open_checkpoint(tmp_path / "relocked"))
    assert record is not None
    assert record.key == OTHER.id
    with pytest.raises(LockError, match="is locked by the key"):
        rekey(tmp_path / "locked", KEY, KEY).save(tmp_path / "no")
    (tmp_path / "relocked" / "extra.txt").write_text("new")
    with pytest.raises(TamperedModelError):
        regauge.unlock(tmp_path / "relocked", OTHER).save(tmp_path / "no")
    reseal(tmp_path / "relocked", OTHER).renew(dry_run=True)
    with pytest.raises(TamperedModelError):
        regauge.unlock(tmp_path / "relocked", OTHER).save(tmp_path / "no")
    reseal(tmp_path / "relocked", OTHER).renew()
    regauge.unlock(tmp_path / "relocked", OTHER).save(tmp_path / "back")
    assert contents(tmp_path / "back")["model.safetensors"] == contents(plain)["model.safetensors"]


def test_keys_are_keys_or_files(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regauge.locking.keys

    monkeypatch.setattr(regauge.locking.keys, "SCRYPT", {"n": 16, "r": 8, "p": 1})
    with pytest.raises(KeyFileError, match="must be a Key or the path of a key file, got bytes"):
        regauge.lock(plain, bytes(32))  # type: ignore[arg-type]
    save_key(Key(seed_key(1), "seal"), tmp_path / "seal.key")
    with pytest.raises(KeyFileError, match='must be "lock", got "seal"'):
        regauge.lock(plain, tmp_path / "seal.key")
    save_key(KEY, plain / "inside.key")
    with pytest.raises(KeyFileError, match="would be published with it"):
        regauge.lock(plain, plain / "inside.key")
    (plain / "inside.key").unlink()
    save_key(KEY, tmp_path / "wrapped.key", "open sesame")
    monkeypatch.delenv("REGAUGE_PASSPHRASE", raising=False)
    with pytest.raises(PassphraseError, match="is protected by a passphrase"):
        regauge.lock(plain, tmp_path / "wrapped.key")
    monkeypatch.setenv("REGAUGE_PASSPHRASE", "open sesame")
    regauge.lock(plain, tmp_path / "wrapped.key").save(tmp_path / "locked")
    regauge.unlock(tmp_path / "locked", KEY).save(tmp_path / "back")
    size = regauge.seal(plain, tmp_path / "seal.key", tmp_path / "sealed")
    assert size == (tmp_path / "sealed").stat().st_size
    regauge.open_sealed(tmp_path / "sealed", tmp_path / "seal.key", tmp_path / "opened")
    assert contents(tmp_path / "opened") == contents(plain)


def test_results_have_a_short_repr(plain: Path, tmp_path: Path) -> None:
    """A notebook shows them: neither specs nor tensors may be listed."""
    locked = regauge.lock(plain, KEY)
    assert repr(locked) == f"<lock of plain, key {KEY.id}>"
    assert repr(locked.plan(tmp_path / "x")).startswith("<output ")
    locked.save(tmp_path / "locked")
    results = [
        regauge.unlock(tmp_path / "locked", KEY),
        rekey(tmp_path / "locked", KEY, OTHER),
        reseal(tmp_path / "locked", KEY),
        regauge.move(plain, 1).plan(tmp_path / "x"),
    ]
    assert all(len(repr(result)) < 60 + len(str(tmp_path)) for result in results)
    spec = regauge.spec_of(plain)
    spaces, tensors = len(spec.spaces), len(spec.tensors)
    assert repr(spec) == f"<spec of llama: {spaces} spaces, {tensors} tensors>"
