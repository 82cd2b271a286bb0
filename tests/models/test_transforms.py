"""`move`, `fold_norms`, `inspect` and `convert` of paths, modules and states; and checkpoints that
lack an optional part.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
from regauge.checkpoints.convert import convert
from regauge.checkpoints.reader import open_checkpoint
from regauge.core.fold import fold_norms
from regauge.core.rng import seed_key
from regauge.errors import ElementError, LockError, RegaugeError, SpecError
from regauge.locking.keys import Key
from regauge.models.summary import inspect
from support.cli_runs import contents
from support.picos import IDS, build

KEY = Key(seed_key(1), "lock")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_move_and_move_back(plain: Path, tmp_path: Path) -> None:
    moved = regauge.move(plain)
    moved.save(tmp_path / "moved", element=tmp_path / "g")
    before, after = (
        contents(folder)["model.safetensors"] for folder in (plain, tmp_path / "moved")
    )
    assert before != after
    model, other = regauge.load_model(plain), regauge.load_model(tmp_path / "moved")
    with torch.no_grad():
        assert torch.allclose(model(**IDS).logits, other(**IDS).logits, atol=1e-5)
    regauge.move(tmp_path / "moved", tmp_path / "g", invert=True).save(tmp_path / "back")
    assert contents(tmp_path / "back")["model.safetensors"] == before
    assert (tmp_path / "g").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folded_and_rotated_model_in_half_precision_is_rounded_once(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build("llama").to(dtype)
    model.save_pretrained(tmp_path / "half")
    g = regauge.move(tmp_path / "half", 1, fold=True, group="orthogonal")
    spec, exact = fold_norms(regauge.spec_of(model), model.double().state_dict())
    wanted = regauge.apply(g.element.to(spec), exact)
    twice = regauge.apply(g.element.to(spec), {n: t.to(dtype) for n, t in exact.items()})
    errors = {"once": 0.0, "twice": 0.0}
    for name, tensor in g.state().items():
        assert tensor.dtype == dtype
        spacing = torch.finfo(dtype).eps * wanted[name].abs().clamp(min=1e-3)
        for which, value in (("once", tensor), ("twice", twice[name])):
            error = ((value.double() - wanted[name]).abs() / spacing).max()
            errors[which] = max(errors[which], float(error))
    assert errors["once"] < 0.51, "half a unit in the last place, but for the digits of float32"
    assert errors["twice"] > 0.6, "the control: folded weights are rounded before the rotation"


def test_sources_and_states_agree(plain: Path) -> None:
    by_path = regauge.move(plain, 1).state()
    module = regauge.load_model(plain)
    by_module = regauge.move(module, 1).state()
    by_state = regauge.move(dict(open_checkpoint(plain)), 1, spec=regauge.spec_of(plain)).state()
    other = regauge.move(plain, 2).state()
    for name, tensor in by_path.items():
        assert torch.equal(tensor, by_module[name])
        assert torch.equal(tensor, by_state[name])
    assert any(not torch.equal(tensor, other[name]) for name, tensor in by_path.items())


def test_fold_norms_of_a_path_is_that_of_its_state(plain: Path, tmp_path: Path) -> None:
    folded = regauge.fold_norms(plain)
    spec, expected = fold_norms(regauge.spec_of(plain), dict(open_checkpoint(plain)))
    assert folded.spec == spec
    assert all(torch.equal(t, expected[name]) for name, t in folded.state().items())
    folded.save(tmp_path / "folded")
    stored = open_checkpoint(tmp_path / "folded")
    assert all(torch.equal(stored[name], t) for name, t in expected.items())
    assert bool((stored["model.norm.weight"] == 1).all())
    assert not bool((open_checkpoint(plain)["model.norm.weight"] == 1).all())


def test_invariants_are_those_of_every_basis(plain: Path, tmp_path: Path) -> None:
    regauge.move(plain, 1, group="full").save(tmp_path / "moved")
    build("llama", seed=5).save_pretrained(tmp_path / "other")
    here, there, strange = (
        regauge.invariants(folder) for folder in (plain, tmp_path / "moved", tmp_path / "other")
    )
    assert here
    assert all(np.allclose(values, there[name], rtol=1e-4) for name, values in here.items())
    assert not all(np.allclose(values, strange[name], rtol=1e-4) for name, values in here.items())


def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    regauge.lock(plain, KEY).save(tmp_path / "locked")
    for transform in (regauge.move, regauge.fold_norms):
        with pytest.raises(LockError, match="is locked by the key"):
            transform(tmp_path / "locked")
    moved = regauge.move(plain, 1)
    with pytest.raises(ElementError, match="would be published with it"):
        moved.save(tmp_path / "out", element=tmp_path / "out" / "g")
    (tmp_path / "g").write_bytes(b"precious")
    with pytest.raises(ElementError, match="exists already"):
        moved.save(tmp_path / "out", element=tmp_path / "g")
    with pytest.raises(RegaugeError, match="lies inside the input"):
        moved.save(plain / "out")
    assert (tmp_path / "g").read_bytes() == b"precious"
    assert not (tmp_path / "out").exists()


def test_an_element_goes_with_a_failed_output(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(28, os.strerror(28))

    moved = regauge.move(plain, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RegaugeError, match="no space left"):
            moved.save(tmp_path / "out", element=tmp_path / "g")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain"]


def test_convert(plain: Path, tmp_path: Path) -> None:
    state = load_file(plain / "model.safetensors")
    torch.save({**state, "step": 3}, tmp_path / "old.pt")
    conversion = convert(tmp_path / "old.pt")
    assert conversion.plan(tmp_path / "new.safetensors").warnings == (
        '"step" is not a tensor and is left out',
    )
    conversion.save(tmp_path / "new.safetensors")
    new = load_file(tmp_path / "new.safetensors")
    assert new.keys() == state.keys()
    assert all(torch.equal(new[name], t) for name, t in state.items())


def test_inspect(plain: Path) -> None:
    inspection = inspect(plain)
    assert inspection.to_dict()["family"] == "llama"
    assert "stream" in str(inspection)
    assert "<pre>" in inspection._repr_html_()
    with pytest.raises(SpecError, match="that of its family, without reasons"):
        inspection.explain("stream")
    assert inspect(regauge.load_model(plain)).to_dict()["bits"] == inspection.to_dict()["bits"]


def test_a_checkpoint_without_its_pooler_works_where_the_pooler_is_not_used(
    tmp_path: Path,
) -> None:
    """Sentence encoders ship without it. A weight of the backbone is still required."""
    folders = {}
    for name, seed in (("a", 0), ("b", 1)):
        folder = folders[name] = tmp_path / name
        build("bert-base", seed=seed).float().save_pretrained(folder)
        whole = load_file(folder / "model.safetensors")
        kept = {n: t for n, t in whole.items() if not n.startswith("pooler.")}
        assert len(kept) == len(whole) - 2
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    a, b = folders["a"], folders["b"]
    assert "pool" not in inspect(a).model.spec.spaces
    inspect(a).require_fit()
    assert regauge.match(a, b).distance <= regauge.match(a, b).distance_before
    assert regauge.compare(a, b).verdict == "unrelated"
    regauge.move(a, 1).save(tmp_path / "moved")
    regauge.lock(a, KEY).save(tmp_path / "locked")
    with pytest.warns(regauge.errors.RegaugeWarning, match="built without this optional part"):
        regauge.authorize(tmp_path / "locked", KEY)
    regauge.unlock(tmp_path / "locked", KEY).save(tmp_path / "back")
    with pytest.warns(regauge.errors.RegaugeWarning, match='has no "pooler.dense.bias" and 1 more'):
        verification = regauge.verify(a, steps=0)
    assert verification.failed == ()
    lost = load_file(a / "model.safetensors")
    del lost["encoder.layer.0.output.dense.weight"]
    save_file(lost, a / "model.safetensors", {"format": "pt"})
    for use in (regauge.move, regauge.verify, lambda m: regauge.lock(m, KEY).save(tmp_path / "no")):
        with pytest.raises(RegaugeError, match=r"encoder\.layer\.0\.output\.dense\.weight"):
            use(a)
