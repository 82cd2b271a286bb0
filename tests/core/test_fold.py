"""Folding: precision, untying, and what cannot be folded. That it keeps the function of every
family is in test_families.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regauge
from regauge.checkpoints.headers import Entry
from regauge.core.check import check
from regauge.core.fold import fold_lazily, fold_norms
from regauge.core.groups import Orthogonal, OrthogonalFixingOnes, Permutation, SignedPermutation
from regauge.core.spec import Norm, Scale, Space, Spec
from regauge.errors import SpecError
from regauge.testing import compute_outputs
from support.picos import PICOS, build, spec_of


def test_rms_models_get_all_rotations_and_layer_norm_models_those_that_fix_ones() -> None:
    for name, group in (
        ("llama", Orthogonal()),
        ("gpt2", OrthogonalFixingOnes()),
        ("vit", OrthogonalFixingOnes()),
    ):
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
    state = {
        k: v for k, v in model.state_dict().items() if k != "lm_head.weight"
    }  # as it is stored
    spec, folded = fold_norms(spec_of(model), state)
    assert spec.config == {"tie_word_embeddings": False}
    assert spec.ties == {}
    torch.testing.assert_close(
        folded["lm_head.weight"], state["transformer.wte.weight"] * state["transformer.ln_f.weight"]
    )
    assert torch.equal(folded["transformer.wte.weight"], state["transformer.wte.weight"])


def test_biases_go_into_the_readers_where_they_have_one() -> None:
    model = build("gpt2")
    state = model.state_dict()
    _, folded = fold_norms(spec_of(model), state)
    assert not folded["transformer.h.0.ln_1.bias"].any()
    expected = (
        state["transformer.h.0.attn.c_attn.bias"]
        + state["transformer.h.0.ln_1.bias"] @ state["transformer.h.0.attn.c_attn.weight"]
    )
    torch.testing.assert_close(folded["transformer.h.0.attn.c_attn.bias"], expected)
    # the language head has none: the bias stays, divided by the gain
    torch.testing.assert_close(
        folded["transformer.ln_f.bias"],
        state["transformer.ln_f.bias"] / state["transformer.ln_f.weight"],
    )


def test_a_zero_gain_with_a_bias_that_cannot_be_folded_is_rejected() -> None:
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


def test_float32_is_rounded_once() -> None:
    """The folded tensors are those of float64, rounded; so the function differs by rounding and
    nothing else.
    """
    model = build("gpt2-untied").to(torch.float32)
    state = {name: w.clone() for name, w in model.state_dict().items()}
    _, folded = fold_norms(spec_of(model), state)
    _, exact = fold_norms(spec_of(model), {name: w.double() for name, w in state.items()})
    assert all(
        w.dtype == torch.float32 and torch.equal(w, exact[name].float())
        for name, w in folded.items()
    )
    before = compute_outputs(model.double(), PICOS["gpt2-untied"].inputs)["logits"]
    model.load_state_dict(folded)
    after = compute_outputs(model, PICOS["gpt2-untied"].inputs)["logits"]
    assert (
        0
        < float((after - before).abs().max())
        < 4 * torch.finfo(torch.float32).eps * float(before.abs().max())
    )


@pytest.mark.parametrize(("neutral", "stored"), [(1.0, [2.0, 3.0, 0.5]), (0.0, [1.0, 2.0, -0.5])])
def test_a_gain_that_is_stored_as_its_distance_from_one_folds_to_the_same(
    neutral: float, stored: list[float]
) -> None:
    """Gemma's norms multiply by 1 + w: the readers take that, and 0 is what is left."""
    norm = Norm("g", "b", (("w", "a"),), neutral=neutral)
    spec = Spec(
        "toy",
        {"s": Space(3, SignedPermutation(), folded=Orthogonal())},
        {"g": "|s|", "b": "s", "w": "_ s*", "a": "_"},
        norms=(norm,),
    )
    w, b = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 0.0, -1.0])
    new, folded = fold_norms(spec, {"g": torch.tensor(stored), "b": b, "w": w, "a": torch.zeros(2)})
    torch.testing.assert_close(folded["w"], w * torch.tensor([2.0, 3.0, 0.5]))
    torch.testing.assert_close(folded["a"], w @ b)
    assert folded["g"].tolist() == [neutral] * 3
    assert new.fixed == {"g": neutral}
    assert check(new, folded) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_norms_and_readers_that_are_no_real_numbers_are_refused(dtype: torch.dtype) -> None:
    model = build("dinov2")
    state, spec = dict(model.state_dict()), spec_of(model)
    names = [
        spec.norms[0].gain,
        spec.norms[1].bias,
        spec.norms[0].readers[0][0],
        spec.scales[0].gain,
        spec.scales[0].writers[0][1],
    ]
    for name in names:
        state[name] = torch.zeros_like(state[name]).to(dtype)
    with pytest.raises(SpecError, match="does not fit the spec") as refused:
        fold_norms(spec, state)
    lines_ = [
        f'  "{name}" must have a floating-point dtype, got {str(dtype)[6:]}' for name in names
    ]
    assert sorted(str(refused.value).splitlines()[1:]) == sorted(lines_)


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
    assert torch.equal(
        folded[name + "attention.q_proj.bias"], model.state_dict()[name + "attention.q_proj.bias"]
    )
    assert folded[name + "layernorm_before.bias"].any()
    assert not folded[name + "layernorm_after.bias"].any()


def test_a_reader_that_another_tensor_repeats_is_refused() -> None:
    """It would hand the gain on to the embedding. Turned around, the same tie is untied (above)."""
    model = build("gpt2")
    spec = spec_of(model)
    turned = replace(spec, ties={target: alias for alias, target in spec.ties.items()})
    with pytest.raises(
        SpecError,
        match=r'cannot be folded into "lm_head.weight", which "transformer.wte.weight" repeats',
    ):
        fold_norms(turned, model.state_dict())


class Convolved(torch.nn.Module):
    """A norm that a convolution reads, with zeros at the edges or without."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.up, self.norm, self.conv = (
            torch.nn.Linear(6, 8),
            torch.nn.LayerNorm(8),
            torch.nn.Conv1d(8, 5, 3, padding=padding),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(self.up(x)).mT)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_convolution_takes_up_what_it_reads_at_every_place(padding: int) -> None:
    """Its kernel adds the norm's bias up, unless it reaches over the edge: then the bias stays with
    the norm.
    """
    torch.manual_seed(0)
    model, x = Convolved(padding).double(), torch.randn(2, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    spec, state = regauge.discover(model, x), dict(model.state_dict())
    (norm,) = spec.norms
    assert (norm.readers, norm.padded) == ((("conv.weight", "conv.bias"),), bool(padding))
    expected = compute_outputs(model, {"x": x})["logits"]

    def error(config: Spec) -> float:
        model.load_state_dict(fold_norms(config, state)[1])
        return float((compute_outputs(model, {"x": x})["logits"] - expected).abs().max())

    assert error(spec) < 1e-12
    assert (error(replace(spec, norms=(replace(norm, padded=False),))) > 0.1) == bool(padding)


def test_a_bias_that_cannot_take_the_norms_up_is_named() -> None:
    spec = Spec(
        "strange",
        {"stream": Space(4, SignedPermutation(), folded=Orthogonal())},
        {
            "norm.weight": "|stream|",
            "norm.bias": "stream",
            "conv.weight": "_3 stream* _2",
            "conv.bias": "_4",
        },
        norms=(Norm("norm.weight", "norm.bias", (("conv.weight", "conv.bias"),)),),
    )
    state = {
        "norm.weight": torch.ones(4),
        "norm.bias": torch.ones(4),
        "conv.weight": torch.ones(3, 4, 2),
        "conv.bias": torch.ones(4),
    }
    with pytest.raises(SpecError, match=r'"conv.weight" of shape \[3, 4, 2\] reads a norm'):
        fold_norms(spec, state)


def test_experts_that_are_stored_one_by_one_take_up_what_each_reads() -> None:
    """With biases, and with a LayerScale behind them: each folds into its own."""
    spaces = {
        "stream": Space(4, SignedPermutation(), folded=Orthogonal()),
        "expert": Space(2, Permutation()),
    }
    tensors = {"norm.weight": "|stream|", "norm.bias": "stream", "scale": "|stream|"}
    tensors |= {"e.{expert}.up.weight": "expert _ stream*", "e.{expert}.up.bias": "expert _"}
    tensors |= {
        "e.{expert}.down.weight": "expert stream _",
        "e.{expert}.down.bias": "expert stream",
    }
    norm = Norm("norm.weight", "norm.bias", (("e.{expert}.up.weight", "e.{expert}.up.bias"),))
    spec = Spec(
        "experts",
        spaces,
        tensors,
        norms=(norm,),
        scales=(Scale("scale", (("e.{expert}.down.weight", "e.{expert}.down.bias"),)),),
    )
    draw = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": (4,), "norm.bias": (4,), "scale": (4,)}
    for i in range(2):
        shapes |= {
            f"e.{i}.up.weight": (3, 4),
            f"e.{i}.up.bias": (3,),
            f"e.{i}.down.weight": (4, 3),
            f"e.{i}.down.bias": (4,),
        }
    state = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)

    def run(s: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        z = (x * s["norm.weight"] + s["norm.bias"]) @ s[f"e.{i}.up.weight"].T + s[f"e.{i}.up.bias"]
        return (z @ s[f"e.{i}.down.weight"].T + s[f"e.{i}.down.bias"]) * s["scale"]

    _, folded = fold_norms(spec, state)
    assert all(torch.allclose(run(folded, i), run(state, i)) for i in range(2))
    assert bool((folded["scale"] == 1).all())
    assert not folded["norm.bias"].any()
    assert not torch.allclose(folded["e.1.up.bias"], state["e.1.up.bias"])


def test_a_folded_spec_is_checked_against_shapes_alone() -> None:
    model = build("llama")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    shapes = {n: Entry("F64", tuple(t.shape), 0, 0) for n, t in state.items()}
    assert check(spec, shapes) == []
    assert check(spec, {n: e for n, e in shapes.items() if n != "lm_head.weight"})
    assert check(
        spec, {**state, "model.norm.weight": 2 * state["model.norm.weight"]}
    )  # values, where they are there
