"""LoRA adapters in PEFT's names: the moved adapter on the moved model is the same function, and
comes back bit for bit.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.adapters import adapter_spec, move_adapter
from regauge.checkpoints.element_files import save_element
from regauge.cli.app import run
from regauge.core.action import apply
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.errors import ElementError, SpecError
from regauge.locking.authorize import authorize_with_element
from regauge.testing import compute_outputs, strict_float64
from support.lora import CASES, RANK, adapter_tensors, add_adapters
from support.models import distance, lock_backbone
from support.picos import IDS, PICOS, build, spec_of


def load_adapter(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.copy_(state["base_model.model." + n.replace(".default", "")])
    return model


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("part", ["backbone", None])
def test_a_moved_adapter_on_a_moved_model_is_the_same_function(name: str, part: str | None) -> None:
    model, inputs = build(name), PICOS[name].inputs
    g = element(spec_of(model), 3)
    plain = add_adapters(model, *CASES[name], bias=name == "llama")
    expected, adapter = compute_outputs(plain, inputs), adapter_tensors(plain)
    if part is None:
        moved = copy.deepcopy(model)
        moved.load_state_dict(apply(g, model.state_dict()))
    else:
        moved = authorize_with_element(lock_backbone(model, g), g)
    twin = add_adapters(moved, *CASES[name], seed=6, bias=name == "llama")
    there = move_adapter(g, adapter, part)
    assert distance(compute_outputs(load_adapter(twin, there), inputs), expected) < 1e-9
    assert distance(compute_outputs(load_adapter(twin, adapter), inputs), expected) > 1e-3
    assert distance(move_adapter(~g, there, part), adapter) < 1e-12


def test_permutations_bring_an_adapter_back_bit_for_bit() -> None:
    model = build("gpt2")
    g = element(spec_of(model), 3, within="permutation")
    adapter = {
        n: t.to(torch.bfloat16)
        for n, t in adapter_tensors(add_adapters(model, *CASES["gpt2"])).items()
    }
    there = move_adapter(g, adapter, "backbone")
    back = move_adapter(~g, there, "backbone")
    assert all(torch.equal(back[n], t) for n, t in adapter.items())
    assert (
        sum(not torch.equal(there[n], t) for n, t in adapter.items()) == 2 * 4 * 2
    )  # A and B of four layers in two blocks: all but the table
    assert all(t.dtype == torch.bfloat16 for t in there.values())


def test_an_adapter_trained_on_the_locked_model_serves_the_plain_one() -> None:
    model = build("llama")
    g = element(spec_of(model), 3, within="signed")
    twin = add_adapters(authorize_with_element(lock_backbone(model, g), g), "q_proj", "v_proj")
    trained = [p for n, p in twin.named_parameters() if "lora_" in n]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    before = adapter_tensors(twin)
    for _ in range(5):
        optimizer.zero_grad()
        with strict_float64():
            twin(**IDS, labels=IDS["input_ids"]).loss.backward()
        optimizer.step()
    assert distance(adapter_tensors(twin), before) > 1e-3
    plain = load_adapter(
        add_adapters(model, "q_proj", "v_proj"), move_adapter(~g, adapter_tensors(twin), "backbone")
    )
    assert distance(compute_outputs(plain, IDS), compute_outputs(twin, IDS)) < 1e-9


def test_rotations_move_adapters_too() -> None:
    model = build("llama")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    model.load_state_dict(state)
    g = element(spec, 3)
    plain = add_adapters(model, *CASES["llama"])
    twin = add_adapters(authorize_with_element(lock_backbone(model, g), g), *CASES["llama"])
    load_adapter(twin, move_adapter(g, adapter_tensors(plain), "backbone"))
    assert distance(compute_outputs(twin, IDS), compute_outputs(plain, IDS)) < 1e-9


def test_magnitudes_of_dora_follow_signed_permutations() -> None:
    model = build("gpt2")
    spec = spec_of(model)
    g = element(spec, 3, within="signed")
    plain = add_adapters(model, "c_attn", "c_fc", dora=True)
    twin = add_adapters(
        authorize_with_element(lock_backbone(model, g), g), "c_attn", "c_fc", dora=True
    )
    load_adapter(twin, move_adapter(g, adapter_tensors(plain), "backbone"))
    assert distance(compute_outputs(twin, IDS), compute_outputs(plain, IDS)) < 1e-9
    with pytest.raises(
        ElementError, match=r"lora_magnitude_vector.*output follow signed permutations only"
    ):
        move_adapter(element(spec, 3), adapter_tensors(plain))
    llama = build("llama")
    stretched = element(spec_of(llama), 3, spaces=["ffn"])
    with pytest.raises(ElementError, match="input follow rotations only"):
        move_adapter(stretched, adapter_tensors(add_adapters(llama, "down_proj", dora=True)))


def test_magnitudes_of_an_embedding_are_those_of_its_width() -> None:
    model = build("gpt2")
    spec = spec_of(model)
    g = element(spec, 3, within="signed")
    plain = add_adapters(model, "wte", dora=True)
    moved = copy.deepcopy(model)
    moved.load_state_dict(apply(g, model.state_dict()))
    twin = add_adapters(moved, "wte", seed=6, dora=True)
    load_adapter(twin, move_adapter(g, adapter_tensors(plain)))
    assert distance(compute_outputs(twin, IDS), compute_outputs(plain, IDS)) < 1e-9
    assert (
        distance(
            compute_outputs(load_adapter(twin, adapter_tensors(plain)), IDS),
            compute_outputs(plain, IDS),
        )
        > 1e-3
    )
    folded, _ = fold_norms(spec, model.state_dict())
    with pytest.raises(
        ElementError, match=r"lora_magnitude_vector.*output follow signed permutations only"
    ):
        move_adapter(element(folded, 3), adapter_tensors(plain))


def test_names_may_be_those_of_a_live_model_or_without_prefix() -> None:
    model = build("gpt2")
    g = element(spec_of(model), 3)
    plain = add_adapters(model, "c_proj")
    live = {f"base_model.model.{n}": p for n, p in plain.state_dict().items()}
    bare = {
        n.removeprefix("base_model.model.").removeprefix("transformer."): p
        for n, p in adapter_tensors(plain).items()
    }
    base = {
        n.removeprefix("transformer."): p
        for n, p in model.state_dict().items()
        if n != "lm_head.weight"
    }
    moved, expected = move_adapter(g, live), move_adapter(g, adapter_tensors(plain))
    h = element(spec_of_base(), 3)
    for n, t in move_adapter(h, bare).items():
        assert torch.equal(t, expected[f"base_model.model.transformer.{n}"])
        assert torch.equal(
            t, moved[f"base_model.model.transformer.{n}".replace(".weight", ".default.weight")]
        )
    whole = apply(g, model.state_dict())
    assert torch.equal(
        moved["base_model.model.transformer.h.0.mlp.c_proj.base_layer.weight"],
        whole["transformer.h.0.mlp.c_proj.weight"],
    )
    saved_modules = {
        "base_model.model.transformer.ln_f.modules_to_save.default.bias": base["ln_f.bias"]
    }
    assert torch.equal(
        next(iter(move_adapter(g, saved_modules).values())), whole["transformer.ln_f.bias"]
    )


def spec_of_base():
    return spec_of(build("gpt2-base"))


def test_experts_on_disk_move_as_a_stack() -> None:
    from regauge.models.families import spec_from
    from support.picos import config_of

    model = build("mixtral")
    names = [n for n in model.state_dict() if ".mlp." not in n]
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe."
        names += [
            at + "gate.weight",
            *(f"{at}experts.{e}.w{k}.weight" for e in range(3) for k in (1, 2, 3)),
        ]
    g = element(spec_from(config_of(model), names), 3, within="permutation")
    at = "base_model.model.model.layers.1.block_sparse_moe.experts."
    adapter = {f"{at}{e}.w1.lora_B.weight": torch.randn(20, RANK) for e in range(3)}
    spec = adapter_spec(g.spec, adapter)
    assert spec.tensors == {f"{at}{{expert.1}}.w1.lora_B.weight": "expert.1 |ffn.1| _"}
    moved = move_adapter(g, adapter)
    order = g.members["expert.1"].index[0]
    for e in range(3):
        source = adapter[f"{at}{order[e]}.w1.lora_B.weight"]
        assert torch.equal(
            moved[f"{at}{e}.w1.lora_B.weight"], source[g.members["ffn.1"].index[order[e]]]
        )
    with pytest.raises(SpecError, match="is in the spec but not in the file"):
        move_adapter(g, {n: t for n, t in adapter.items() if ".1.w1" not in n and ".0.w1" not in n})


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        (
            "base_model.model.transformer.h.0.attn.c_attn.lora_E",
            (3, 1),
            "neither a tensor of the model nor",
        ),
        (
            "base_model.model.transformer.h.9.attn.c_attn.lora_A.weight",
            (3, 12),
            "a layer that the model does not have",
        ),
        ("base_model.model.transformer.h.0.ln_1.lora_A.weight", (3, 12), "no input and output"),
        (
            "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",
            (3, 13),
            "axis 1 .* has size 13, expected 12",
        ),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_A.bias", (3,), "can be transformed"),
        ("base_model.model.transformer.h.0.attn.c_attn.ia3_l", (36,), "neither a tensor"),
    ],
)
def test_unsupported_adapters_raise_an_error_that_names_the_cause(
    name: str, shape: tuple[int, ...], says: str
) -> None:
    g = element(spec_of(build("gpt2")), 3)
    with pytest.raises(SpecError, match=says) as error:
        move_adapter(g, {name: torch.zeros(shape)})
    assert name in str(error.value)
    assert "LoRA" in str(error.value.hint)


# The command line.


def folder(tmp_path: Path) -> tuple[torch.nn.Module, Element, dict[str, torch.Tensor]]:
    model = build("gpt2")
    g = element(spec_of(model), 3, within="permutation")
    model.save_pretrained(tmp_path / "model")
    save_element(g, tmp_path / "g.element")
    adapter = adapter_tensors(add_adapters(model, "c_attn", "c_proj"))
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "fan_in_fan_out": True})
    )
    return model, g, adapter


def test_move_adapter_and_back(tmp_path: Path, capsys) -> None:
    _, g, adapter = folder(tmp_path)
    base = [
        "move",
        str(tmp_path / "model"),
        "-g",
        str(tmp_path / "g.element"),
        "--part",
        "backbone",
    ]
    assert (
        run(
            [*base, "--adapter", str(tmp_path / "adapter"), "-o", str(tmp_path / "there"), "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["adapter"] == str(tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    there = load_file(tmp_path / "there" / "adapter_model.safetensors")
    expected = move_adapter(g, adapter, "backbone")
    assert all(torch.equal(there[n], t) for n, t in expected.items())
    assert (
        run([*base, "--invert", "--adapter", str(tmp_path / "there"), "-o", str(tmp_path / "back")])
        == 0
    )
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert all(torch.equal(back[n], t) for n, t in adapter.items())


def test_move_adapter_refuses(tmp_path: Path, capsys) -> None:
    folder(tmp_path)
    base = [
        "move",
        str(tmp_path / "model"),
        "--adapter",
        str(tmp_path / "adapter"),
        "-o",
        str(tmp_path / "out"),
    ]
    assert run([*base, "--random"]) == 2
    assert "requires the element of its model" in capsys.readouterr().err
    config = tmp_path / "adapter" / "adapter_config.json"
    for text, says in (
        (' {"peft_type": "LOHA"}', "describes a LOHA adapter"),
        ('{"layer_replication": [[0, 1]]}', '"layer_replication"'),
    ):
        config.write_text(text)
        assert run([*base, "-g", str(tmp_path / "g.element")]) == 1
        assert says in capsys.readouterr().err
    config.unlink()
    save_file(
        {"x.lora_A.weight": torch.zeros(3, 12)}, tmp_path / "adapter" / "adapter_model.safetensors"
    )
    assert run([*base, "-g", str(tmp_path / "g.element")]) == 1
    assert "a layer that the model does not have" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
