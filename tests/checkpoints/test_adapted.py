"""A model with its adapter as one checkpoint: what PEFT computes with the two, in weights; in
recipes as model+adapter; and moved with its model.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.adapted import open_adapted
from regauge.checkpoints.element_files import save_element
from regauge.core.element import element
from regauge.errors import RegaugeError
from regauge.models.load import load_model
from regauge.models.resolve import spec_of
from regauge.testing import compute_outputs
from support.cli_runs import Run
from support.lora import ALPHA, CASES, RANK, adapter_tensors, add_adapters
from support.merges import reader
from support.models import distance
from support.picos import PICOS, build


def write_adapter(folder: Path, name: str, adapter: dict[str, torch.Tensor], **config: Any) -> str:
    """The pico's folder, and its adapter's beside it: "model+adapter"."""
    model = build(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "model")
    state = {
        n: t
        for n, t in model.state_dict().items()
        if not (name == "gpt2" and n == "lm_head.weight")
    }  # which is tied
    save_file(state, folder / "model" / "model.safetensors", {"format": "pt"})
    (folder / "adapter").mkdir()
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "fan_in_fan_out": name == "gpt2",
        **config,
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return f"{folder / 'model'}+{folder / 'adapter'}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"dora": True}], ids=["lora", "bias", "dora"]
)
def test_the_sum_computes_what_the_two_compute(
    name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    if options.get("bias") and name == "llama":
        pytest.skip("its layers have no bias to add to")
    model = add_adapters(build(name), *(t for t in CASES[name] if t != "wte"), **options)
    checkpoint = open_adapted(write_adapter(tmp_path, name, adapter_tensors(model)))
    plain = build(name)
    plain.load_state_dict({n: checkpoint[n].double() for n in checkpoint}, strict=False)
    assert (
        distance(
            compute_outputs(plain, PICOS[name].inputs), compute_outputs(model, PICOS[name].inputs)
        )
        < 1e-9
    )
    assert (
        distance(
            compute_outputs(build(name), PICOS[name].inputs),
            compute_outputs(model, PICOS[name].inputs),
        )
        > 1e-3
    )


def test_an_embedding_and_whole_tensors(tmp_path: Path) -> None:
    model = add_adapters(build("gpt2"), "wte")
    whole = torch.randn(build("gpt2").transformer.ln_f.bias.shape, dtype=torch.float64)
    checkpoint = open_adapted(
        write_adapter(
            tmp_path,
            "gpt2",
            {
                **adapter_tensors(model),
                "base_model.model.transformer.ln_f.modules_to_save.default.bias": whole,
            },
        )
    )
    table = model.transformer.wte
    sum_of = table.base_layer.weight + (
        table.lora_embedding_B["default"] @ table.lora_embedding_A["default"]
    ).T * (ALPHA / RANK)
    assert torch.allclose(checkpoint["transformer.wte.weight"].double(), sum_of, atol=1e-6)
    assert torch.equal(
        checkpoint["transformer.ln_f.bias"].double(),
        whole.to(checkpoint["transformer.ln_f.bias"].dtype).double(),
    )


def test_an_embedding_with_magnitudes_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    live = peft.get_peft_model(
        build("gpt2"),
        peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["wte"], use_dora=True),
    )
    with torch.no_grad():
        for name, p in live.named_parameters():
            if "lora_" in name:
                p.copy_(torch.rand_like(p) + 0.5)
    adapter = {n: t.double() for n, t in peft.get_peft_model_state_dict(live).items()}
    assert any("magnitude" in n for n in adapter)
    checkpoint = open_adapted(write_adapter(tmp_path, "gpt2", adapter))["transformer.wte.weight"]
    (tmp_path / "plain").mkdir()
    without = open_adapted(
        write_adapter(
            tmp_path / "plain", "gpt2", {n: t for n, t in adapter.items() if "magnitude" not in n}
        )
    )["transformer.wte.weight"]
    wanted = live.merge_and_unload().transformer.wte.weight
    assert torch.allclose(checkpoint, wanted, atol=1e-5)
    assert not torch.allclose(without, wanted, atol=0.1)


def test_scales(tmp_path: Path) -> None:
    adapter = adapter_tensors(add_adapters(build("llama"), "q_proj"))
    plain = build("llama").state_dict()
    for i, (config, first, second) in enumerate(
        (
            ({"use_rslora": True}, ALPHA / RANK**0.5, ALPHA / RANK**0.5),
            ({"alpha_pattern": {"layers.1.self_attn.q_proj": 9}}, ALPHA / RANK, 9 / RANK),
            (
                {"alpha_pattern": {"proj": 9}},
                ALPHA / RANK,
                ALPHA / RANK,
            ),  # a pattern is a whole word of the name
        )
    ):
        (tmp_path / str(i)).mkdir()
        checkpoint = open_adapted(write_adapter(tmp_path / str(i), "llama", adapter, **config))
        for layer, scale in enumerate((first, second)):
            name = f"model.layers.{layer}.self_attn.q_proj"
            stem = f"base_model.model.{name}"
            wanted = (
                plain[f"{name}.weight"]
                + scale * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            )
            assert torch.allclose(checkpoint[f"{name}.weight"].double(), wanted, atol=1e-6)


def test_it_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    checkpoint = open_adapted(
        write_adapter(tmp_path, "llama", adapter_tensors(add_adapters(build("llama"), "q_proj")))
    )
    again = pickle.loads(pickle.dumps(checkpoint))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(again[name], checkpoint[name])
    assert (checkpoint.bits[name] == checkpoint[name].view(torch.uint64).numpy()).all()
    assert not torch.equal(checkpoint[name], checkpoint.model[name])
    assert checkpoint[name].dtype == checkpoint.model[name].dtype


def test_it_is_loaded_with_its_adapter(tmp_path: Path) -> None:
    checkpoint = open_adapted(
        write_adapter(tmp_path, "llama", adapter_tensors(add_adapters(build("llama"), "q_proj")))
    )
    live, alone = load_model(checkpoint).state_dict(), load_model(checkpoint.path).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(live[name], checkpoint[name])
    assert not torch.equal(live[name], alone[name])
    assert torch.equal(live["model.norm.weight"], alone["model.norm.weight"])


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_statistics_of_a_merge_are_those_of_the_sum(method: str, run: Run, tmp_path: Path) -> None:
    """A merge with model+adapter is the merge with the two written out as one model."""
    source = write_adapter(
        tmp_path,
        "llama",
        {
            n: 0.1 * t
            for n, t in adapter_tensors(add_adapters(build("llama"), *CASES["llama"])).items()
        },
    )
    model, whole = reader(tmp_path / "model", build("llama").config.vocab_size), tmp_path / "whole"
    shutil.copytree(model, whole)
    checkpoint = open_adapted(source)
    save_file({n: checkpoint[n] for n in checkpoint}, whole / "model.safetensors", {"format": "pt"})
    (tmp_path / "text.txt").write_text(" ".join(f"t{i * i % 23}" for i in range(200)))
    how = ["--method", method, "--data", tmp_path / "text.txt", "--samples", 6, "--length", 16]
    for other, out in ((source, "out"), (whole, "wanted")):
        result = run("merge", model, other, *how, "-o", tmp_path / out)
        assert result.code == 0, result.err
    out, wanted, plain = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "wanted", "model")
    )
    assert all(torch.allclose(out[n], wanted[n], atol=1e-6) for n in wanted)
    assert not all(
        torch.allclose(out[n], (plain[n] + checkpoint[n]) / 2, atol=1e-4) for n in plain
    )  # it was weighed


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda state, config: state.pop(next(n for n in state if "lora_A" in n)),
            "only one of lora_A and lora_B",
        ),
        (lambda state, config: config.pop("lora_alpha"), '"lora_alpha"'),
        (
            lambda state, config: config.update(lora_alpha=None),
            'gives no number for "model.layers.0.mlp.up_proj"',
        ),
        (
            lambda state, config: config.update(alpha_pattern={"(": 3}),
            'gives no number for "model.layers.0.mlp.up_proj"',
        ),
        (lambda state, config: config.update(alpha_pattern=["up_proj"]), "gives no number"),
        (lambda state, config: config.update(fan_in_fan_out=True), "changes"),
        (
            lambda state, config: state.update(
                {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(3, 3)}
            ),
            "no such layer",
        ),
        (lambda state, config: config.update(peft_type="LOHA"), "LOHA"),
    ],
)
def test_what_does_not_fit_is_refused(spoil: Any, says: str, tmp_path: Path) -> None:
    source = write_adapter(tmp_path, "llama", {})
    state = adapter_tensors(add_adapters(build("llama"), "up_proj"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    spoil(state, config)
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RegaugeError) as error:
        open_adapted(source)
    assert says in str(error.value)


def test_a_lone_bias_is_refused(tmp_path: Path) -> None:
    state = adapter_tensors(add_adapters(build("bert-classifier"), "query", bias=True))
    layer = next(n for n in state if n.endswith("lora_B.bias")).removesuffix(".lora_B.bias")
    source = write_adapter(
        tmp_path,
        "bert-classifier",
        {n: t for n, t in state.items() if not n.startswith(layer) or n.endswith("bias")},
    )
    with pytest.raises(
        RegaugeError, match=r'"base_model.*query.lora_B.bias", but no A and B of that layer'
    ):
        open_adapted(source)


def test_in_a_recipe(run: Run, tmp_path: Path) -> None:
    """As a model of its own, and with model and adapter moved secretly, by rotations too: align
    finds both back.
    """
    adapter = adapter_tensors(add_adapters(build("llama"), *CASES["llama"]))
    source = write_adapter(tmp_path, "llama", {n: 0.1 * t for n, t in adapter.items()})
    model = tmp_path / "model"
    save_element(element(spec_of(build("llama")), 3), tmp_path / "g")
    assert run("move", model, "-g", tmp_path / "g", "-o", tmp_path / "moved").code == 0
    assert (
        run(
            "move",
            model,
            "-g",
            tmp_path / "g",
            "--adapter",
            tmp_path / "adapter",
            "-o",
            tmp_path / "moved-adapter",
        ).code
        == 0
    )
    assert run("merge", model, source, "-o", tmp_path / "out").code == 0
    out, plain = (load_file(p / "model.safetensors") for p in (tmp_path / "out", model))
    checkpoint = open_adapted(source)
    assert all(torch.allclose(out[n], (plain[n] + checkpoint[n]) / 2, atol=1e-6) for n in plain)
    moved = f"{tmp_path / 'moved'}+{tmp_path / 'moved-adapter'}"
    assert run("merge", source, moved, "-o", tmp_path / "no").code == 1
    result = run("merge", source, moved, "--align", "-o", tmp_path / "again")
    assert result.code == 0, result.err
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.allclose(back[n], checkpoint[n], atol=1e-4) for n in plain)
    inside = run("merge", model, source, "-o", tmp_path / "adapter" / "out")
    assert inside.code == 1
    assert "lies inside the input" in inside.err
