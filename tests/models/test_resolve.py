"""From a live module, a checkpoint or a config to the same spec."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers as T

import regauge
from regauge.errors import RegaugeError, SpecError, UnknownModelError
from regauge.models.load import reinitialize
from regauge.models.resolve import spec_of
from regauge.testing import assert_symmetry
from support.picos import IMAGES, LLAMA, build, config_of, gpt2


def test_module_checkpoint_and_config_agree(tmp_path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    live = spec_of(model)
    assert spec_of(tmp_path) == live
    assert spec_of(str(tmp_path)) == live
    assert spec_of(config_of(model)) == live
    config = T.LlamaConfig(**LLAMA)
    config.architectures = ["LlamaForCausalLM"]
    assert spec_of(config) == live


def test_a_config_without_a_class_is_the_base_model() -> None:
    assert spec_of(gpt2()).visible == {"stream"}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_live_timm_models_bring_their_own_config(name: str) -> None:
    model = (
        timm.create_model(
            name, embed_dim=12, depth=2, num_heads=3, img_size=8, patch_size=4, num_classes=5
        )
        .double()
        .eval()
    )
    spec = spec_of(model)
    assert spec.spaces["head.0"].size == 3
    assert_symmetry(model, spec, regauge.element(spec, 1), {"x": IMAGES["pixel_values"]})


def test_unresolvable_models_are_named(tmp_path) -> None:
    with pytest.raises(UnknownModelError, match="Linear has neither"):
        spec_of(torch.nn.Linear(2, 2))
    model = build("llama")
    with pytest.raises(UnknownModelError, match="'rwkv'"):
        spec_of(model, config={"model_type": "rwkv"})
    with pytest.raises(SpecError, match="is not a valid llama config"):
        spec_of(model, config={**config_of(model), "num_hidden_layers": "two"})
    with pytest.raises(UnknownModelError, match="neither a model_type"):
        spec_of(model, config={"hidden_size": 16})
    with pytest.raises(SpecError, match="hidden_size"):
        spec_of(model, config={"model_type": "llama", "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({}, "names neither a model_type nor an architecture"),
        (
            {"model_type": None, "architecture": None},
            "names neither a model_type nor an architecture",
        ),
        ({"model_type": "zzz"}, "models of type 'zzz'; known are"),
        ({"model_type": ["llama"]}, "models of type"),
        ({"architecture": "vit_base_patch16_224"}, "a timm config does not determine"),
        (
            {"model_type": "llama", "num_hidden_layers": 10**9},
            '"num_hidden_layers" in config.json must be at most',
        ),
        ({"model_type": "llama", "num_hidden_layers": "two"}, "cannot build a llama"),
        ({"model_type": "llama", "num_attention_heads": 0}, "cannot build a llama"),
        ({"model_type": "llama", "architectures": 5}, "cannot build a llama"),
        ({"model_type": "llama", "architectures": ["logging"]}, "cannot build a llama"),
        (None, "cannot read a spec from None"),
        (7, "cannot read a spec from 7"),
        (T.LlamaConfig, "cannot read a spec from <class"),
    ],
)
def test_paths_without_a_model(source: object, says: str) -> None:
    with pytest.raises(RegaugeError) as caught:
        spec_of(source)
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_module_with_a_config_of_another_kind() -> None:
    module = torch.nn.Linear(2, 2)
    module.config = 5
    with pytest.raises(UnknownModelError, match="cannot read a spec from 5"):
        spec_of(module)


def test_weights_are_reinitialized_from_a_seed() -> None:
    model = build("vit")
    torch.manual_seed(5)
    plain = type(model)(model.config).state_dict()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    new = reinitialize(model, 5)
    assert torch.equal(torch.rand(3), expected), "the process's own random numbers stay"
    assert type(new) is type(model)
    assert new.config is not model.config
    state = new.state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[n], plain[n]) for n in plain)
    other = reinitialize(model, 6).state_dict()
    assert not all(torch.equal(state[n], other[n]) for n in plain)
    with pytest.raises(UnknownModelError, match="Linear has no config"):
        reinitialize(torch.nn.Linear(2, 2), 5)
