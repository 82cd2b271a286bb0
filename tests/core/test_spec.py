"""Specs: every misfit at once, and specs that contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as T

from regauge.checkpoints.headers import Entry
from regauge.core.action import act, apply
from regauge.core.axes import parse
from regauge.core.check import check, check_spec, require
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.groups import GeneralLinear, Orthogonal, Permutation
from regauge.core.spec import Scale, Space, Spec, stored_tensors
from regauge.errors import AxesError, SpecError
from regauge.models.families import spec_from
from support.picos import build, config_of, spec_of, vit


def texts(spec: Spec, state: dict) -> list[str]:
    return [str(f) for f in check(spec, state)]


def test_every_misfit_at_once() -> None:
    model = build("llama")
    spec, state = spec_of(model), dict(model.state_dict())
    name = "model.layers.0.self_attn.q_proj.weight"
    state[name] = state[name][:8]
    state["model.norm.weight"] = torch.ones(2, 2)
    state["extra"] = torch.ones(1)
    del state["model.layers.1.mlp.up_proj.weight"]
    axes = texts(spec, state)
    assert f'axis 0 (kv.0 rep.0 qk.0) of "{name}" has size 8, expected 16' in axes
    assert '"model.norm.weight" has 2 axes [2, 2], expected 1: |stream|' in axes
    assert '"extra" is in the file but not in the spec' in axes
    assert '"model.layers.1.mlp.up_proj.weight" is in the spec but not in the file' in axes
    assert len(axes) == 4
    with pytest.raises(SpecError, match="extra"):
        require(check(spec, state), "it does not fit")


def test_a_config_that_contradicts_the_weights() -> None:
    model = build("llama")
    config = {**model.config.to_dict(), "hidden_size": 32, "num_hidden_layers": 3}
    axes = texts(spec_from(config, model.state_dict()), model.state_dict())
    assert any("layers.2" in f and "not in the file" in f for f in axes)
    assert any("has size 16, expected 32" in f for f in axes)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "intermediate_size", "hidden_size", "head_dim"]
)
@pytest.mark.parametrize("value", [10**12, "16", [16], {}, 16.0, -1, 0])
def test_absurd_configs_are_refused_at_once(field: str, value: object) -> None:
    from regauge.errors import RegaugeError
    from regauge.models.resolve import spec_of as described

    model = build("llama")
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], field: value}
    try:
        spec = described(model, config=config)
    except RegaugeError:
        return
    assert check(spec, model.state_dict())


OPEN = {  # sizes that the config fixes, and not a space
    "gpt2": ("vocab_size", "n_positions"),
    "llama": ("vocab_size",),
    "gemma2": ("vocab_size",),
    "mixtral": ("vocab_size",),
    "qwen3": ("vocab_size",),
    "bert": ("vocab_size", "max_position_embeddings", "type_vocab_size"),
    "distilbert": ("vocab_size", "max_position_embeddings"),
    "deberta-v2": ("vocab_size", "max_position_embeddings", "type_vocab_size"),
    "bart": ("vocab_size", "max_position_embeddings"),
    "t5": ("vocab_size", "relative_attention_num_buckets"),
    "vit": ("image_size", "patch_size", "num_channels"),
    "deit": ("image_size", "patch_size", "num_channels"),
    "dinov2": ("image_size", "patch_size", "num_channels"),
    "swin": ("patch_size", "num_channels"),
    "clip-text": ("vocab_size", "max_position_embeddings"),
    "clip-vision": ("image_size", "patch_size", "num_channels"),
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in OPEN.items() for field in fields]
)
def test_sizes_that_no_space_has_are_compared_with_the_config(name: str, field: str) -> None:
    model = build(name)
    config, state = config_of(model), model.state_dict()
    assert check(spec_from(config, state), state) == []
    wrong = spec_from({**config, field: 4 * config[field]}, state)
    assert any("expected" in str(f) for f in check(wrong, state))
    assert check(spec_from({n: v for n, v in config.items() if n != field}, state), state) == []
    with pytest.raises(SpecError, match=field):
        spec_from({**config, field: -config[field]}, state)


def test_images_and_patches_that_are_not_square() -> None:
    model = T.ViTModel(vit(image_size=[8, 12], patch_size=[4, 2]))
    spec = spec_from({**model.config.to_dict(), "architectures": ["ViTModel"]}, model.state_dict())
    assert spec.tensors["embeddings.position_embeddings"] == "_1 _13 stream"
    assert spec.tensors["embeddings.patch_embeddings.projection.weight"] == "stream _3 _4 _2"
    assert check(spec, model.state_dict()) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", {"num_local_experts": 10**9}),
        ("swin", {"depths": [10**9, -(10**9)]}),
        ("clip", {"text_config": {"num_hidden_layers": 10**9}}),
        ("clip", {"vision_config": {"num_hidden_layers": 10**9}}),
    ],
)
def test_counts_that_would_take_forever_are_refused(name: str, change: dict) -> None:
    model = build(name)
    with pytest.raises(SpecError, match="must be at most 1000, got 1000000000"):
        spec_from({**config_of(model), **change}, model.state_dict())


def test_queries_that_cannot_share_their_keys() -> None:
    model = build("llama")
    with pytest.raises(SpecError, match="must be a multiple of 2 key-value heads, got 5"):
        spec_from({**config_of(model), "num_attention_heads": 5}, model.state_dict())


def test_tied_tensors_may_be_stored_once_or_twice() -> None:
    model = build("gpt2")
    spec, state = spec_of(model), dict(model.state_dict())
    assert texts(spec, state) == []
    del state["lm_head.weight"]
    assert texts(spec, state) == []
    del state["transformer.wte.weight"]
    assert sorted(texts(spec, state)) == [
        '"lm_head.weight" is in the spec but not in the file',
        '"transformer.wte.weight" is in the spec but not in the file',
    ]


def test_a_tied_table_needs_an_orthogonal_stream() -> None:
    spec = spec_of(build("gpt2"))
    wrong = replace(
        spec,
        spaces={**spec.spaces, "stream": Space(12, GeneralLinear())},
        tensors={k: v for k, v in spec.tensors.items() if "|" not in v},
    )
    assert any("must be orthogonal" in str(f) for f in check_spec(wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"spaces": {k: v for k, v in s.spaces.items() if k != "ffn.0"}},
            '"ffn.0" is not a space',
        ),
        (lambda s: {"tensors": {**s.tensors, "x": "(stream"}}, "expected ')'"),
        (
            lambda s: {"spaces": {**s.spaces, "qk.0": replace(s.spaces["qk.0"], over="nowhere")}},
            "which is not a space",
        ),
        (
            lambda s: {"spaces": {**s.spaces, "vo.0": replace(s.spaces["vo.0"], over="qk.0")}},
            "must be a space of permutations",
        ),
        (
            lambda s: {"spaces": {**s.spaces, "stream": Space(12, Orthogonal())}},
            "follows the permutation part",
        ),
        (lambda s: {"spaces": {**s.spaces, "stream": Space(0, Permutation())}}, "number, got 0"),
        (
            lambda s: {"spaces": {**s.spaces, "stream": Space(12.0, Permutation())}},
            "number, got 12.0",
        ),
        (
            lambda s: {"ties": {"lm_head.weight": "transformer.h.0.ln_1.bias"}},
            "got _30 stream*",
        ),
        (lambda s: {"norms": (replace(s.norms[0], gain="gone"),)}, 'folds with "gone"'),
        (
            lambda s: {"norms": (replace(s.norms[0], readers=(("lost", None),)),)},
            'folds with "lost"',
        ),
        (lambda s: {"parts": {**s.parts, "transformer.wte.weight": "tail"}}, 'got "tail"'),
        (lambda s: {"parts": {**s.parts, "nothing": "head"}}, "not a tensor of the spec"),
        (lambda s: {"ties": {"a": "b"}}, "both must be tensors"),
        (lambda s: {"fixed": {"nothing": 1.0}}, "must be constant"),
        (lambda s: {"tensors": {**s.tensors, "x": "qk.0"}}, "which must be an axis too"),
        (
            lambda s: {"tensors": {**s.tensors, "e.{head.0}": "stream head.0"}},
            'must be "head.0", got "stream"',
        ),
        (lambda s: {"outputs": {"y": "_ lost"}}, '"lost" is not a space'),
        (lambda s: {"tensors": {**s.tensors, "e.{head.0}": ""}}, 'must be "head.0", got ""'),
        (lambda s: {"tensors": {**s.tensors, "e.{gone}": "gone"}}, '"gone" is not a space'),
        (
            lambda s: {"tensors": {**s.tensors, "e.{head.0}": "head.0", "e.1": "stream"}},
            '"e.1" is described 2 times',
        ),
        (
            lambda s: {"tensors": {**s.tensors, "e.{head.0}": "head.0", "e.{head.1}": "head.1"}},
            '"e.2" is described 2 times',
        ),
        (
            lambda s: {
                "tensors": {**s.tensors, "e.{big}": "big"},
                "spaces": {**s.spaces, "big": Space(10**9, Permutation())},
            },
            "at most 10000 tensors, got 1000000000",
        ),
        (
            lambda s: {"spaces": {**s.spaces, "big": Space(10**12, Permutation())}},
            'space "big" is on no axis',
        ),
        (
            lambda s: {"norms": (*s.norms, s.norms[0])},
            '"transformer.h.0.ln_1.weight" must be listed once',
        ),
        (
            lambda s: {"scales": (Scale(s.norms[0].gain, s.norms[0].readers),)},
            '"transformer.h.0.ln_1.weight" must be listed once',
        ),
        (
            lambda s: {"norms": (replace(s.norms[0], readers=()),)},
            "at least one layer to fold into",
        ),
        (
            lambda s: {"scales": (Scale("transformer.ln_f.weight", ()),)},
            "at least one layer to fold into",
        ),
    ],
)
def test_specs_that_contradict_themselves(change, message: str) -> None:
    spec = spec_of(build("gpt2"))
    assert check_spec(spec) == []
    wrong = replace(spec, **change(spec))
    faults = [str(f) for f in check_spec(wrong)]
    assert any(message in f for f in faults), faults
    assert check(wrong, {}) == check_spec(wrong)


def test_folded_gains_are_checked_for_their_value() -> None:
    model = build("llama")
    spec, state = fold_norms(spec_of(model), model.state_dict())
    assert texts(spec, state) == []
    state["model.norm.weight"][0] = 1.5
    assert texts(spec, state) == [
        '"model.norm.weight" was folded and must be 1 everywhere, but is not'
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_what_moves_has_floats(dtype: torch.dtype) -> None:
    model = build("clip")
    state = {**model.state_dict()}
    spec, norm, weight = (
        spec_of(model),
        "text_model.final_layer_norm.weight",
        "text_projection.weight",
    )
    still = "logit_scale"
    state |= {n: state[n].to(dtype) for n in (norm, weight, still)}
    axes = texts(spec, state)
    assert sorted(axes) == sorted(
        f'"{n}" must have a floating-point dtype, got {str(dtype)[6:]}' for n in (norm, weight)
    )
    header = {
        n: Entry("I32" if n == weight else "BF16", tuple(x.shape), 0, 0) for n, x in state.items()
    }
    assert texts(spec, header) == [f'"{weight}" must have a floating-point dtype, got I32']


def test_stacks_unroll_to_the_stored_names() -> None:
    spec = Spec(
        "toy",
        {"expert.0": Space(2, Permutation()), "d": Space(3, Permutation())},
        {"e.{expert.0}.w": "expert.0 d _"},
    )
    assert {name: entry.axes for name, entry in stored_tensors(spec).items()} == {
        "e.0.w": "d _",
        "e.1.w": "d _",
    }
    assert check(spec, {"e.0.w": torch.ones(3, 9), "e.1.w": torch.ones(3, 9)}) == []
    assert len(check(spec, {"e.0.w": torch.ones(4, 9)})) == 2


def test_sums_and_products_with_an_open_part() -> None:
    spec = Spec("toy", {"a": Space(2, Permutation())}, {"x": "a+_ (a _)"})
    assert check(spec, {"x": torch.ones(7, 8)}) == []
    assert len(check(spec, {"x": torch.ones(1, 9)})) == 2
    sized = Spec("toy", {"a": Space(2, Permutation())}, {"x": "a+_5 (a _4)* _3"})
    assert str(parse(sized.tensors["x"])) == "a+_5 (a _4)* _3"
    assert check(sized, {"x": torch.ones(7, 8, 3)}) == []
    assert texts(sized, {"x": torch.ones(8, 8, 4)}) == [
        'axis 0 a+_5 of "x" has size 8, expected 7',
        'axis 2 _3 of "x" has size 4, expected 3',
    ]
    g = element(sized, 1)
    x = torch.randn(7, 8, 3)
    assert torch.equal(apply(g, {"x": x})["x"], act(g, x, "a+_ (a _)* _"))
    for text in ("_0", "_5*", "_5a", "_" + "9" * 19):
        with pytest.raises(AxesError, match="unexpected"):
            parse(text)
