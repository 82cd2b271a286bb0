"""Folding: precision, untying, and what cannot be folded. That it keeps the function of every family is in test_families."""

from __future__ import annotations

import pytest
import torch

from picos import build, spec_of
from regauge.errors import SpecError
from regauge.fold import fold_lazily, fold_norms
from regauge.groups import Orthogonal, OrthogonalFixingOnes, SignedPermutation
from regauge.spec import check


def test_rms_models_get_all_rotations_and_layer_norm_models_those_that_fix_ones() -> None:
    for name, group in (("llama", Orthogonal()), ("gpt2", OrthogonalFixingOnes()), ("vit", OrthogonalFixingOnes())):
        model = build(name)
        spec, state = fold_norms(spec_of(model), model.state_dict())
        assert spec.spaces["stream"].group == group
        assert all(bool((state[n] == 1).all()) for n in spec.fixed)
        assert spec.norms == ()
        assert spec.fixed


def test_folding_twice_changes_nothing() -> None:
    model = build("llama")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    again, same = fold_norms(spec, state)
    assert again == spec
    assert all(torch.equal(same[k], state[k]) for k in state)


def test_a_tied_head_is_untied() -> None:
    model = build("gpt2")
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # as it is stored
    spec, folded = fold_norms(spec_of(model), state)
    assert spec.config == {"tie_word_embeddings": False}
    assert spec.ties == {}
    torch.testing.assert_close(folded["lm_head.weight"], state["transformer.wte.weight"] * state["transformer.ln_f.weight"])
    assert torch.equal(folded["transformer.wte.weight"], state["transformer.wte.weight"])


def test_biases_go_into_the_readers_where_they_have_one() -> None:
    model = build("gpt2")
    state = model.state_dict()
    _, folded = fold_norms(spec_of(model), state)
    assert not folded["transformer.h.0.ln_1.bias"].any()
    expected = state["transformer.h.0.attn.c_attn.bias"] + state["transformer.h.0.ln_1.bias"] @ state["transformer.h.0.attn.c_attn.weight"]
    torch.testing.assert_close(folded["transformer.h.0.attn.c_attn.bias"], expected)
    # the language head has none: the bias stays, divided by the gain
    torch.testing.assert_close(folded["transformer.ln_f.bias"], state["transformer.ln_f.bias"] / state["transformer.ln_f.weight"])


def test_a_zero_gain_whose_bias_nobody_can_take_is_refused() -> None:
    model = build("gpt2")
    state = dict(model.state_dict())
    state["transformer.ln_f.weight"] = state["transformer.ln_f.weight"].clone()
    state["transformer.ln_f.weight"][3] = 0
    with pytest.raises(SpecError, match=r"ln_f\.weight.*cannot be folded: 1 zero gains"):
        fold_norms(spec_of(model), state)


def test_half_precision_is_rounded_once() -> None:
    model = build("llama").to(torch.bfloat16)
    state = model.state_dict()
    _, folded = fold_norms(spec_of(model), state)
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = state[name].float() * state["model.layers.0.input_layernorm.weight"].float()
    assert torch.equal(folded[name], exact.to(torch.bfloat16))
    assert folded[name].dtype == torch.bfloat16


def test_post_norm_models_have_nothing_to_fold() -> None:
    model = build("bert")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    assert spec.spaces["stream"].group == spec_of(model).spaces["stream"].group
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_a_visible_norm_is_left_alone() -> None:
    """A headless model shows its final norm: the gain stays, and with it the stream's group."""
    model = build("gpt2-base")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    assert spec.spaces["stream"].group == spec_of(model).spaces["stream"].group
    assert torch.equal(state["ln_f.weight"], model.state_dict()["ln_f.weight"])
    assert bool((state["h.0.ln_1.weight"] == 1).all())


def test_a_state_that_does_not_fit_is_refused_before_anything_is_done() -> None:
    model = build("llama")
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(SpecError, match=r"model\.norm\.weight"):
        fold_lazily(spec_of(model), state)


def test_signed_permutations_survive_where_rotations_do_not() -> None:
    model = build("gemma2")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    assert spec.spaces["stream"].group == SignedPermutation()
    assert check(spec, state) == []


@pytest.mark.parametrize("name", ["gpt2", "llama-mha-tied"])
def test_a_tied_table_that_is_stored_under_the_heads_name(name: str) -> None:
    """safetensors.torch.save_model keeps one of two tied names, and not always the same."""
    model = build(name)
    spec, state = spec_of(model), dict(model.state_dict())
    whole = fold_norms(spec, state)[1]
    del state[spec.ties["lm_head.weight"]]
    folded_spec, folded = fold_norms(spec, state)
    assert check(folded_spec, folded) == []
    assert folded.keys() == whole.keys()
    assert all(torch.equal(folded[k], whole[k]) for k in whole)


def test_padding_keeps_the_bias_before_it() -> None:
    """Swin fills its windows up with zeros between norm and attention: W b would reach them too."""
    model = build("swin-padded")
    _, folded = fold_norms(spec_of(model), model.state_dict())
    name = "swin.encoder.layers.0.blocks.0."
    assert torch.equal(folded[name + "attention.q_proj.bias"], model.state_dict()[name + "attention.q_proj.bias"])
    assert folded[name + "layernorm_before.bias"].any()
    assert not folded[name + "layernorm_after.bias"].any()
