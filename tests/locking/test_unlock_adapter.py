"""An adapter that PEFT trained on a locked model, brought to the plain model and loaded by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import regauge
from regauge.errors import SpecError, WrongKeyError
from support.cli_runs import Run
from support.picos import build
from support.texts import readings

peft = pytest.importorskip("peft")

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
IDS = torch.arange(12).view(2, 6)


class Case(NamedTuple):
    """A model, locked, and an adapter that was trained on the locked one.

    Attributes:
        folder: Has "plain", "locked", "KEY" and "adapter".
        key: The key.
        logits: Those of the authorized model with the adapter.
    """

    folder: Path
    key: regauge.Key
    logits: torch.Tensor


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def train_adapter(folder: Path, name: str, group: str) -> Case:
    build(name).double().save_pretrained(folder / "plain")
    key = regauge.generate_key()
    regauge.save_key(key, folder / "KEY")
    regauge.lock(folder / "plain", key, group=group).save(folder / "locked")
    model = regauge.authorize(folder / "locked", key, dtype="float64")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config).double().train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(IDS, labels=IDS).loss.backward()
        optimizer.step()
    adapted.save_pretrained(folder / "adapter")
    return Case(folder, key, logits_of(adapted))


@pytest.fixture(scope="module", params=["llama", "gpt2", "llama rotation"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, _, group = request.param.partition(" ")
    return train_adapter(tmp_path_factory.mktemp(name), name, group or "signed")


def load_adapted(model: Path, adapter: Path) -> Any:
    base = regauge.load_model(model, "float64")
    return peft.PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)


@pytest.fixture(scope="module")
def plain(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the "model" and its "adapter", both unlocked."""
    folder = tmp_path_factory.mktemp("plain")
    locked = case.folder / "locked"
    regauge.unlock(locked, case.key).save(folder / "model")
    regauge.unlock(locked, case.key, adapter=case.folder / "adapter").save(folder / "adapter")
    return folder


def test_the_adapter_fits_the_plain_model(case: Case, plain: Path) -> None:
    adapted = load_adapted(plain / "model", plain / "adapter")
    # RMSNorm of transformers computes in float32, and the key is another one in every run
    torch.testing.assert_close(logits_of(adapted), case.logits, rtol=0, atol=5e-5)
    moved = load_adapted(plain / "model", case.folder / "adapter")  # still that of the locked one
    assert float((logits_of(moved) - case.logits).abs().max()) > 1e-2


def test_both_pairs_have_the_same_loss(case: Case, plain: Path) -> None:
    """The plain model with its adapter, and the locked model with its own and the key."""
    pairs = {
        "plain": f"{plain / 'model'}+{plain / 'adapter'}",
        "locked": f"{case.folder / 'locked'}+{case.folder / 'adapter'}",
        "mixed": f"{plain / 'model'}+{case.folder / 'adapter'}",
    }
    scores = regauge.evaluate(pairs, readings(IDS), key=case.key, retrained=True).scores
    assert scores["plain"].loss == pytest.approx(scores["locked"].loss, abs=1e-4)
    assert abs(scores["mixed"].loss - scores["plain"].loss) > 1e-2


def test_merged_weights_are_the_unlocked_merged_weights(
    case: Case, plain: Path, tmp_path: Path
) -> None:
    """Merging and then unlocking gives the weights of unlocking both and then merging."""
    merged = load_adapted(case.folder / "locked", case.folder / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    first = regauge.unlock(tmp_path / "merged", case.key, retrained=True).state()
    second = load_adapted(plain / "model", plain / "adapter").merge_and_unload().state_dict()
    before = regauge.load_model(plain / "model", "float64").state_dict()
    assert first.keys() <= second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-9)
    assert any(not torch.equal(second[name], before[name]) for name in first)


def test_a_wrong_key_and_a_foreign_adapter_are_rejected(case: Case, tmp_path: Path) -> None:
    other = regauge.generate_key()
    with pytest.raises(WrongKeyError, match="was locked by the key"):
        regauge.unlock(case.folder / "locked", other, adapter=case.folder / "adapter")
    build("bert").save_pretrained(tmp_path / "bert")
    regauge.lock(tmp_path / "bert", case.key).save(tmp_path / "locked")
    with pytest.raises(SpecError, match="adapter does not fit"):
        regauge.unlock(tmp_path / "locked", case.key, adapter=case.folder / "adapter")


def test_the_command(case: Case, tmp_path: Path, run: Run) -> None:
    arguments = ("unlock", case.folder / "locked", "-k", case.folder / "KEY")
    arguments += ("--adapter", case.folder / "adapter", "-o", tmp_path / "out")
    dry = run(*arguments, "--dry-run")
    assert dry.code == 0
    assert not (tmp_path / "out").exists()
    code, out, err = run(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["command"] == "unlock --adapter"
    assert "backbone only" in err
    expected = regauge.unlock(case.folder / "locked", case.key, adapter=case.folder / "adapter")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, tensor in expected.state().items():
        assert torch.equal(written[name], tensor)
    assert (tmp_path / "out" / "adapter_config.json").exists()
    regauge.save_key(regauge.generate_key(), tmp_path / "OTHER")
    arguments = ("unlock", case.folder / "locked", "-k", tmp_path / "OTHER")
    arguments += ("--adapter", case.folder / "adapter", "-o", tmp_path / "wrong")
    wrong = run(*arguments)
    assert wrong.code == 1
    assert "was locked by the key" in wrong.err
    assert not (tmp_path / "wrong").exists()
    assert run(*arguments, "--retrained").code == 2
