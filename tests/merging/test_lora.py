"""`extract_lora` against PEFT, against numpy's singular values, and against models that are a base
plus an adapter of known rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
import support.picos as picos
from regauge.checkpoints.adapted import open_adapted
from regauge.cli import main
from regauge.errors import LockError, MergeError, RegaugeError
from regauge.merging.lora import LoraExtraction, decompose
from support.merges import State, finetune, state_of

PICOS = ("gpt2", "llama")
ALL_BUT_NORMS = {"gpt2": ("c_attn", "c_proj", "c_fc"), "llama": ("_proj", "lm_head")}
Pair = tuple[str, Path, Path]


@pytest.fixture(scope="module", params=PICOS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The name of a pico, the base, and a copy with noise on every weight."""
    root = tmp_path_factory.mktemp(request.param)
    picos.build(request.param).float().save_pretrained(root / "base")
    return request.param, root / "base", finetune(root / "base", root / "tuned", 1)


def layers_of(name: str, state: State) -> list[str]:
    """The weights of the linear layers, by their names."""
    suffixes = tuple(f"{s}.weight" for s in ALL_BUT_NORMS[name])
    return [n for n in state if n.endswith(suffixes)]


def change(base: Path, out: Path, change_: Callable[[State], None]) -> Path:
    shutil.copytree(base, out)
    state = load_file(base / "model.safetensors")
    change_(state)
    save_file(
        {n: t.contiguous() for n, t in state.items()}, out / "model.safetensors", {"format": "pt"}
    )
    return out


def add_low_rank(base: Path, out: Path, name: str, rank: int) -> Path:
    """The base plus a product of that rank on two linear layers."""

    def add(state: State) -> None:
        g = torch.Generator().manual_seed(3)
        for weight in layers_of(name, state)[:2]:
            n, m = state[weight].shape
            state[weight] += (
                0.05 * torch.randn(n, rank, generator=g) @ torch.randn(rank, m, generator=g)
            )

    return change(base, out, add)


def merge_with_peft(base: Path, adapter: Path) -> Any:
    peft = pytest.importorskip("peft")
    model = regauge.load_model(base, "float32")
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def worst(actual: Any, wanted: State, names: list[str]) -> float:
    return max(float((actual[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in names)


def test_a_full_rank_reproduces_the_linear_weights_in_peft_and_here(
    pair: Pair, tmp_path: Path
) -> None:
    name, base, tuned = pair
    regauge.extract_lora(tuned, base, rank=1000).save(tmp_path / "full")
    regauge.extract_lora(tuned, base, rank=1).save(tmp_path / "one")
    wanted, plain = state_of(tuned), state_of(base)
    layers = layers_of(name, wanted)
    assert len(layers) >= 8
    for merged in (
        merge_with_peft(base, tmp_path / "full"),
        open_adapted(f"{base}+{tmp_path}/full"),
    ):
        assert worst(merged, wanted, layers) < 1e-5
        rest = [n for n in wanted if n not in layers]
        assert worst(merged, plain, rest) == 0
    for merged in (merge_with_peft(base, tmp_path / "one"), open_adapted(f"{base}+{tmp_path}/one")):
        assert worst(merged, wanted, layers) > 1e-3  # control


def test_saved_modules_restore_what_peft_can_hold(pair: Pair, tmp_path: Path) -> None:
    name, base, tuned = pair
    result = regauge.extract_lora(tuned, base, rank=1000, save_modules=True)
    result.save(tmp_path / "adapter")
    wanted = state_of(tuned)
    lost = {other.name for other in result.lost}
    held = [n for n in wanted if n not in lost]
    # GPT-2's lm_head is its wte, which PEFT would untie
    assert lost == ({"transformer.wte.weight"} if name == "gpt2" else set())
    assert worst(merge_with_peft(base, tmp_path / "adapter"), wanted, held) < 1e-5
    assert worst(open_adapted(f"{base}+{tmp_path}/adapter"), wanted, held) < 1e-5


def test_a_known_adapter_is_recovered_at_its_rank_and_not_below(pair: Pair, tmp_path: Path) -> None:
    name, base, _ = pair
    tuned = add_low_rank(base, tmp_path / "tuned", name, 3)
    at, below = (regauge.extract_lora(tuned, base, rank=r) for r in (3, 2))
    assert len(at.layers) == 2  # the others do not differ
    assert not at.others
    assert at.error < 1e-5
    assert min(layer.error for layer in below.layers) > 0.05
    at.save(tmp_path / "adapter")
    wanted = state_of(tuned)
    assert worst(merge_with_peft(base, tmp_path / "adapter"), wanted, list(wanted)) < 1e-5
    by_energy = regauge.extract_lora(tuned, base, energy=0.99999)
    assert [layer.rank for layer in by_energy.layers] == [3, 3]


def test_errors_are_the_tails_of_the_singular_values(pair: Pair) -> None:
    _, base, tuned = pair
    result = regauge.extract_lora(tuned, base, rank=4)
    a, b = state_of(tuned), state_of(base)
    residual = total = norm = 0.0
    for layer in result.layers:
        delta = (a[f"{layer.name}.weight"] - b[f"{layer.name}.weight"]).double().numpy()
        s = np.linalg.svd(delta, compute_uv=False)
        tail = np.sqrt((s[4:] ** 2).sum() / (s**2).sum())
        assert layer.error == pytest.approx(tail, rel=1e-4)
        assert layer.energy == pytest.approx(1 - tail**2, rel=1e-4)
        residual += float((s[4:] ** 2).sum())
    approximated = {f"{layer.name}.weight" for layer in result.layers}
    for name, value in a.items():
        square = float((value - b[name]).double().square().sum())
        total, norm = total + square, norm + float(value.double().square().sum())
        residual += 0 if name in approximated else square
    assert result.error == pytest.approx((residual / total) ** 0.5, rel=1e-4)
    assert result.weight_error == pytest.approx((residual / norm) ** 0.5, rel=1e-4)


def test_energy_and_small_layers_give_ranks_of_their_own(pair: Pair, tmp_path: Path) -> None:
    _, base, tuned = pair
    result = regauge.extract_lora(tuned, base, energy=0.9)
    a, b = state_of(tuned), state_of(base)
    for layer in result.layers:
        delta = (a[f"{layer.name}.weight"] - b[f"{layer.name}.weight"]).double().numpy()
        s = np.linalg.svd(delta, compute_uv=False) ** 2
        assert layer.rank == 1 + int((s.cumsum() / s.sum() < 0.9).sum())
    assert len({layer.rank for layer in result.layers}) > 1
    result.save(tmp_path / "adapter")
    merged = merge_with_peft(base, tmp_path / "adapter")
    own = open_adapted(f"{base}+{tmp_path}/adapter")
    assert worst(merged, {n: own[n] for n in own}, list(own)) < 1e-6


def test_targets_are_the_only_layers(pair: Pair) -> None:
    name, base, tuned = pair
    target = {"gpt2": "attn.c_proj", "llama": "q_proj"}[name]
    result = regauge.extract_lora(tuned, base, rank=2, target=[target])
    assert {layer.name[-len(target) :] for layer in result.layers} == {target}
    assert any(other.reason == "not a target" for other in result.lost)
    with pytest.raises(MergeError, match=r'got "no_proj"'):
        regauge.extract_lora(tuned, base, target=["no_proj"])


def test_a_bare_models_names_get_the_prefix_of_its_modules(tmp_path: Path) -> None:
    """Many files on the hub lack it, GPT-2's among them."""
    picos.build("gpt2").float().save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    state = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    save_file(state, path, {"format": "pt"})
    tuned = add_low_rank(tmp_path / "base", tmp_path / "tuned", "gpt2", 2)
    regauge.extract_lora(tuned, tmp_path / "base", rank=2).save(tmp_path / "adapter")
    wanted = {f"transformer.{n}": t for n, t in state_of(tuned).items()}
    merged = merge_with_peft(tmp_path / "base", tmp_path / "adapter")
    assert worst(merged, wanted, list(wanted)) < 1e-5
    own = open_adapted(f"{tmp_path}/base+{tmp_path}/adapter")
    assert worst(own, state_of(tuned), list(own)) < 1e-5


def test_large_matrices_are_decomposed_with_a_fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    delta = torch.randn(150, 3, generator=g) @ torch.randn(3, 120, generator=g)
    delta += 1e-3 * torch.randn(150, 120, generator=g)
    exact = decompose(delta, 3, None)
    monkeypatch.setattr("regauge.merging.lora.FULL_SVD_SIZE", 100)
    before = torch.get_rng_state()
    one, other = decompose(delta, 3, None), decompose(delta, 3, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one[0], other[0])
    assert torch.allclose(one[0] @ one[1], exact[0] @ exact[1], atol=1e-3)
    assert one[2] == pytest.approx(exact[2], abs=1e-6)
    s = np.linalg.svd(delta.double().numpy(), compute_uv=False) ** 2
    energy = float(s[:2].sum() / s.sum()) + 1e-3  # two values do not suffice
    assert len(decompose(delta, None, energy)[1]) == 3


def test_modules_and_states_are_accepted_and_results_are_shown(pair: Pair, tmp_path: Path) -> None:
    _, base, tuned = pair
    modules = [regauge.load_model(folder, "float32") for folder in (tuned, base)]
    spec = regauge.spec_of(modules[1])
    wanted = regauge.extract_lora(tuned, base, rank=2)
    for result in (
        regauge.extract_lora(*modules, rank=2),
        regauge.extract_lora(modules[0].state_dict(), modules[1].state_dict(), rank=2, spec=spec),
    ):
        assert result.tensors.keys() == wanted.tensors.keys()
        assert result.error == pytest.approx(wanted.error, rel=1e-5)
    assert json.loads(wanted.to_json()) == wanted.to_dict()
    assert "relative error" in wanted._repr_html_()
    wanted.to_html(tmp_path / "page.html")
    assert wanted.layers[0].name in (tmp_path / "page.html").read_text()


Bad = tuple[Path, Path, dict[str, Any], type[RegaugeError], str]


def bad_inputs(base: Path, tuned: Path, tmp_path: Path) -> dict[str, Bad]:
    def shape(state: State) -> None:
        name = next(n for n in state if n.endswith(("norm.weight", "ln_f.weight")))
        state[name] = torch.ones(5)

    def nan(state: State) -> None:
        next(t for t in state.values() if t.ndim == 2).fill_(float("nan"))

    regauge.lock(base, regauge.generate_key()).save(tmp_path / "locked")
    regauge.move(tuned, 1).save(tmp_path / "moved")
    resized = change(base, tmp_path / "resized", shape)
    return {
        "shapes": (resized, base, {}, MergeError, "must have the shape of"),
        "locked": (tuned, tmp_path / "locked", {}, LockError, "is locked by the key"),
        "basis": (tmp_path / "moved", base, {}, MergeError, "match first: "),
        "equal": (base, base, {}, MergeError, "must differ from"),
        "NaN": (change(base, tmp_path / "nan", nan), base, {"force": True}, MergeError, "finite"),
        "rank": (tuned, base, {"rank": 0}, MergeError, "rank must be >= 1, got 0"),
        "energy": (tuned, base, {"energy": 1.5}, MergeError, "energy must be above 0"),
        "target": (tuned, base, {"target": "q_proj"}, MergeError, "must be a list"),
    }


def test_bad_inputs_raise_one_error_and_write_nothing(pair: Pair, tmp_path: Path) -> None:
    _, base, tuned = pair
    for name, (model, origin, options, kind, words) in bad_inputs(base, tuned, tmp_path).items():
        before = sorted(tmp_path.iterdir())
        with pytest.raises(kind) as caught:
            regauge.extract_lora(model, origin, out=tmp_path / "out", **options)
        assert words in f"{caught.value} {caught.value.hint}", name
        assert sorted(tmp_path.iterdir()) == before
    forced = regauge.extract_lora(tmp_path / "moved", base, rank=1000, force=True)
    assert isinstance(forced, LoraExtraction)
    assert max(layer.error for layer in forced.layers) < 1e-5


def test_the_command_writes_what_the_function_does(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, base, tuned = pair
    out = tmp_path / "adapter"
    arguments = ["extract-lora", str(tuned), str(base), "-o", str(out), "--rank", "2"]
    assert main([*arguments, "--json", "-"]) == 0
    captured = capsys.readouterr()
    wanted = regauge.extract_lora(tuned, base, rank=2)
    assert json.loads(captured.out)["facts"]["error"] == wanted.error
    assert "tensors are not in the adapter" in captured.err
    saved = load_file(out / "adapter_model.safetensors")
    assert saved.keys() == wanted.tensors.keys()
    assert all(torch.equal(saved[n], t) for n, t in wanted.tensors.items())
    assert main(arguments) == 1  # it exists
    assert "exists already" in capsys.readouterr().err
    assert main(["extract-lora", str(tuned), str(base), "-o", str(tuned / "in")]) == 1
    assert not (tuned / "in").exists()
