"""For every family: a random element of every declared group keeps the function; wrong elements are
refused, and break it when forced.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.core.action import act, apply
from regauge.core.axes import dual
from regauge.core.check import check
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.core.groups import GeneralLinear, Orthogonal, Permutation, PlaneSigns, Rotary
from regauge.core.members import Dense, Monomial
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Space, Spec, stored_tensors
from regauge.errors import CutError, ElementError, SpecError, UnknownModelError
from regauge.models.cut import cut
from regauge.models.families import spec_from
from regauge.testing import (
    assert_symmetry,
    compute_outputs,
    select_outputs,
    strict_float64,
    symmetry_error,
)
from support.models import _load, _twin
from support.picos import PICOS, VARIANTS, build, config_of, late, of_each_family, spec_of

ALL = pytest.mark.parametrize("name", PICOS)
BACKBONES = pytest.mark.parametrize("name", [late(name) for name in PICOS])


def moved_by(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in a if a[k].is_floating_point())


@ALL
def test_the_spec_fits_and_covers_every_parameter(name: str) -> None:
    model = build(name)
    spec = spec_of(model)
    assert check(spec, model.state_dict()) == []
    covered = stored_tensors(spec)
    assert {n for n, _ in model.named_parameters()} <= covered.keys()
    parts = {spec.parts[entry.pattern] for entry in covered.values()}
    assert parts - {"head"} == {
        "embed",
        "backbone",
    }  # a post-norm model without a head ends with its last block


@ALL
def test_what_the_model_returns_is_declared_with_its_axes(name: str) -> None:
    """Nothing declared is missing; what is not declared is an inner value, or a loss."""
    model = build(name)
    spec, outs = spec_of(model), compute_outputs(model, PICOS[name].inputs)
    assert select_outputs(spec, outs).keys() == spec.outputs.keys()
    assert outs.keys() - spec.outputs.keys() <= {"encoder_last_hidden_state", "loss"}


@ALL
def test_a_random_element_moves_the_weights_and_keeps_the_function(name: str) -> None:
    check_random_element(name, "full")


@pytest.mark.parametrize("name", [of_each_family(name, *VARIANTS) for name in PICOS])
@pytest.mark.parametrize("kind", ["permutation", "signed", "orthogonal"])
def test_a_random_element_of_a_smaller_group_does_too(name: str, kind: str) -> None:
    check_random_element(name, kind)


def check_random_element(name: str, kind: str) -> None:
    model = build(name)
    spec = spec_of(model)
    g = element(spec, 7, within=kind)
    state = model.state_dict()
    moved = apply(g, state)
    assert moved_by(moved, state) > 0.1
    assert_symmetry(model, spec, g, PICOS[name].inputs)
    back = apply(~g, moved)
    if kind in ("permutation", "signed"):
        assert all(torch.equal(back[k], state[k]) for k in state)
    else:
        assert moved_by(back, state) < 1e-9


@BACKBONES
def test_every_space_moves_alone(name: str) -> None:
    """One space at a time, so that no mistake hides behind another; and every space really acts on
    some tensor.
    """
    model = build(name)
    spec = spec_of(model)
    for space in spec.spaces:
        g = element(spec, 3, spaces=[space])
        if g.members and spec.spaces[space].size > 1:
            assert moved_by(apply(g, model.state_dict()), model.state_dict()) > 0 or not _moves(
                g, space
            ), space
            assert_symmetry(model, spec, g, PICOS[name].inputs)


def _moves(g: Element, space: str) -> bool:
    return not np.allclose(g.members[space].matrix(), np.eye(g.members[space].size))


@BACKBONES
def test_gradients_follow_the_dual_action(name: str) -> None:
    model = build(name)
    spec = spec_of(model)
    g = element(spec, 11)
    before = _gradients(model, spec, PICOS[name].inputs)
    model.load_state_dict(apply(g, model.state_dict()))
    after = _gradients(model, spec, PICOS[name].inputs, g)
    entries = stored_tensors(spec)
    for n, grad in before.items():
        expected = act(g, grad, dual(entries[n].axes))
        scale = max(1.0, float(expected.abs().max()))
        assert float((after[n] - expected).abs().max()) / scale < 1e-9, n


def _gradients(
    model: torch.nn.Module, spec: Spec, inputs: dict[str, torch.Tensor], g: Element | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of all outputs. Where an output is in a moved space, its weights
    move with it, as its dual.
    """
    model.zero_grad()
    model.requires_grad_(True)
    with strict_float64():
        result, loss = model(**inputs), torch.zeros(())
        named = (
            {"logits": result}
            if isinstance(result, torch.Tensor)
            else {n: o for n, o in result.items() if isinstance(o, torch.Tensor)}
        )
        for n, out in select_outputs(spec, named).items():
            weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
            loss = (
                loss
                + (
                    out
                    * (
                        act(g, weights, dual(spec.outputs[n]))
                        if g and n in spec.outputs and spec.visible
                        else weights
                    )
                ).sum()
            )
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@BACKBONES
def test_folding_keeps_the_function_and_enlarges_the_group(name: str) -> None:
    model = build(name)
    spec = spec_of(model)
    expected = select_outputs(spec, compute_outputs(model, PICOS[name].inputs))
    folded_spec, folded = fold_norms(spec, model.state_dict())
    assert check(folded_spec, folded) == []
    twin = _twin(model, folded_spec.config)
    _load(twin, folded)
    got = compute_outputs(twin, PICOS[name].inputs)
    for key in expected:
        assert float((got[key] - expected[key]).abs().max()) < 1e-9 * max(
            1.0, float(expected[key].abs().max())
        ), key
    for kind in ("orthogonal", "full"):
        assert_symmetry(twin, folded_spec, element(folded_spec, 5, within=kind), PICOS[name].inputs)
    for space, was in spec.spaces.items():
        if was.folded is not None and not (spec.visible & {space}):
            assert folded_spec.spaces[space].group == was.folded, space


@BACKBONES
def test_wrong_elements_are_refused_and_break_the_function_when_forced(name: str) -> None:
    model = build(name)
    spec = spec_of(model)
    wrong = [
        (s, m)
        for s, space in spec.spaces.items()
        if (m := _outside(space.group, space.size, spec.count(s))) is not None
    ]
    assert wrong
    for space, member in wrong:
        g = Element(spec, {space: member})
        with pytest.raises(ElementError, match=space):
            apply(g, model.state_dict())
        if "|" in "".join(a for a in spec.tensors.values() if space in a) and isinstance(
            member, Dense
        ):
            continue  # a gain has no way to follow a rotation: it is refused even when forced
        assert symmetry_error(model, spec, g, PICOS[name].inputs, force=True) > 1e-4, space


def _outside(group, size: int, count: int):
    """A member of the next larger kind, which the group must refuse."""
    stream = Stream(seed_key(9), "wrong")
    if size < 3:
        return None
    if isinstance(group, PlaneSigns):
        return Rotary(group.layout).sample(size, count, stream)
    if isinstance(group, Rotary | Permutation):
        return Orthogonal().sample(size, count, stream)
    if isinstance(group, Orthogonal):
        return GeneralLinear().sample(size, count, stream)
    return None


@BACKBONES
def test_heads_move_as_wholes_and_break_when_they_are_mixed(name: str) -> None:
    """Queries, keys, values and outputs together: heads in another order keep the function. The
    same with one rotary plane (or coordinate) left where it was, which mixes heads, breaks it, in
    every layer on its own.
    """
    model = build(name)
    spec = spec_of(model)
    layers = [s.removeprefix("vo.") for s in spec.spaces if s.startswith("vo.")]
    assert layers
    flat = _flatten(spec, layers)
    whole = {s: m for layer in layers for s, m in _shift_members(spec, layer, mix=False).items()}
    heads = {
        spec.spaces[f"vo.{layer}"].over for layer in layers
    }  # tables of relative positions have a column for each head
    whole |= {s: Monomial(np.roll(np.arange(spec.spaces[s].size), 1)[None]) for s in heads}
    assert_symmetry(model, flat, Element(flat, whole), PICOS[name].inputs)
    for layer in layers:
        assert (
            symmetry_error(
                model,
                flat,
                Element(flat, _shift_members(spec, layer, mix=True)),
                PICOS[name].inputs,
            )
            > 1e-4
        ), layer


def _flatten(spec: Spec, layers: list[str]) -> Spec:
    """The same spec with the axes of queries, keys, values and outputs as flat as they are
    stored.
    """
    tensors, spaces = dict(spec.tensors), dict(spec.spaces)
    for layer in layers:
        outer, rep, qk, vo = _sizes(spec, layer)
        over = spec.spaces[f"vo.{layer}"].over
        wide = f"{over} rep.{layer}" if rep > 1 else over
        for new, old, n in (
            (f"k.{layer}", f"({over} qk.{layer}*)", outer * qk),
            (f"q.{layer}", f"({wide} qk.{layer})", outer * rep * qk),
            (f"o.{layer}", f"({wide} vo.{layer})", outer * rep * vo),
            (
                f"v.{layer}",
                f"({over} vo.{layer})",
                outer * vo,
            ),  # without groups of queries the same as o
        ):
            spaces[new] = Space(n, Permutation())
            tensors = {name: axes.replace(old, new) for name, axes in tensors.items()}
    return dataclasses.replace(spec, tensors=tensors, spaces=spaces)


def _sizes(spec: Spec, layer: str) -> tuple[int, int, int, int]:
    """Key-value heads, queries for each, and the sizes of a head in queries and keys, and in
    values.
    """
    over, rep = spec.spaces[f"vo.{layer}"].over, spec.spaces.get(f"rep.{layer}")
    return (
        spec.spaces[over].size,
        rep.size if rep else 1,
        spec.spaces[f"qk.{layer}"].size,
        spec.spaces[f"vo.{layer}"].size,
    )


def _shift_members(spec: Spec, layer: str, mix: bool) -> dict[str, Monomial]:
    """Every head in the place of the one before, and every query within its group; to mix, all but
    the first rotary plane or coordinate of each.
    """
    outer, rep, qk, vo = _sizes(spec, layer)

    def member(rep: int, n: int) -> Monomial:
        index = np.arange(outer * rep * n).reshape(outer, rep, n)
        moved = np.roll(index, (1, 1), (0, 1))
        if mix:
            fixed = [0, n // 2] if isinstance(spec.spaces[f"qk.{layer}"].group, Rotary) else [0]
            moved[:, :, fixed] = index[:, :, fixed]
        return Monomial(moved.reshape(1, -1))

    return {
        f"q.{layer}": member(rep, qk),
        f"k.{layer}": member(1, qk),
        f"v.{layer}": member(1, vo),
        f"o.{layer}": member(rep, vo),
    }


MHA = {"head": "permutation", "qk": "linear over head", "vo": "linear over head"}
GQA = {
    "kv": "permutation",
    "rep": "permutation over kv",
    "qk": "rotary-half over kv",
    "vo": "linear over kv",
}
PRE = MHA | {"ffn": "permutation", "stream": "permutation > orthogonal-ones"}
POST = MHA | {"ffn": "permutation", "stream": "permutation"}
LLAMA = GQA | {"ffn": "monomial", "stream": "signed > orthogonal"}


def sides(table: Mapping[str, str], *names: str) -> dict[str, str]:
    return {f"{kind}.{side}": group for kind, group in table.items() for side in names}


BLOCK = MHA | {"ffn": "permutation"}
BART = sides(BLOCK, "encoder", "decoder") | sides(MHA, "cross") | {"stream": "permutation"}
TEXT = sides(PRE, "text")
VISION = sides(POST, "vision")
T5 = {"stream": "signed > orthogonal"}
T5_ENCODER = T5 | sides(MHA | {"ffn": "monomial+"}, "encoder")
T5_BOTH = T5 | sides(MHA | {"ffn": "monomial+"}, "encoder", "decoder") | sides(MHA, "cross")

# The group of every kind of space, and after ">" what folding makes of it. A family that claims
# less has lost a symmetry, and no other test sees that, since a smaller group keeps the function
# too.
GROUPS = {
    **dict.fromkeys(
        ["vit", "vit-no-qkv-bias", "vit-masked", "deit", "deit-teacher", "dinov2", "dinov2-base"],
        PRE,
    ),
    **dict.fromkeys(
        ["dinov2-registers", "dinov2-registers-base", "timm-vit-avg", "timm-vit-registers"],
        PRE | {"register": "permutation"},
    ),
    **dict.fromkeys(
        [
            "gpt2",
            "gpt2-untied",
            "gpt2-classifier",
            "gpt2-double",
            "gpt2-tokens",
            "gpt2-answers",
            "gpt2-base",
        ],
        PRE,
    ),
    **dict.fromkeys(
        ["timm-vit", "timm-vit-features", "timm-vit-tokens", "timm-deit-distilled"], PRE
    ),
    **dict.fromkeys(["vit-base", "deit-base"], PRE | {"pool": "signed"}),
    **dict.fromkeys(
        ["dinov2-swiglu", "timm-vit-swiglu", "timm-vit-gate-last"], PRE | {"ffn": "monomial"}
    ),
    **dict.fromkeys(["timm-vit-qk-norm", "timm-vit-simple-norm"], PRE | {"qk": "permutation"}),
    "timm-vit-rms": PRE | {"qk": "signed", "stream": "signed > orthogonal"},
    "timm-siglip": PRE
    | sides(BLOCK, "pool")
    | {"latent": "linear", "pool": "permutation > orthogonal-ones"},
    "timm-siglip-rms": PRE
    | sides(BLOCK, "pool")
    | {"latent": "linear"}
    | dict.fromkeys(["stream", "pool"], "signed > orthogonal"),
    **dict.fromkeys(
        [
            "llama",
            "llama-mqa-biases",
            "llama-base",
            "llama-classifier",
            "llama-tokens",
            "llama-answers",
            "mistral",
            "qwen2",
        ],
        LLAMA,
    ),
    "llama-mha-tied": MHA
    | {"qk": "rotary-half over head", "ffn": "monomial", "stream": "signed > orthogonal"},
    "qwen3": LLAMA | {"qk": "signs-half over kv"},
    "gemma2": LLAMA | {"stream": "signed"},
    "mixtral": LLAMA | {"expert": "permutation", "ffn": "monomial over expert"},
    **dict.fromkeys(
        [
            "bert",
            "bert-tokens",
            "bert-answers",
            "roberta",
            "camembert",
            "distilbert",
            "distilbert-base",
        ],
        POST,
    ),
    **dict.fromkeys(
        [
            "deberta-v3",
            "deberta-v3-new-head",
            "deberta-v3-base",
            "deberta-v2-unread",
            "deberta-v2-absolute",
        ],
        POST,
    ),
    **dict.fromkeys(["timm-vit-max", "timm-vit-clip", "timm-vit-post-norm"], POST),
    "bert-untied": POST | {"mlm": "permutation"},
    **dict.fromkeys(
        ["bert-base", "bert-pretraining", "bert-next-sentence", "bert-classifier", "xlm-roberta"],
        POST | {"pool": "signed"},
    ),
    "roberta-choice": POST | {"pool": "signed"},
    "roberta-classifier": POST | {"cls": "signed"},
    "distilbert-classifier": POST | {"pool": "monomial+"},
    "deberta-v3-classifier": POST | {"pool": "permutation"},
    "deberta-v2": POST | {"rel": "permutation > orthogonal-ones"},
    "deberta-v2-no-norm": POST | {"rel": "linear"},
    "deberta-v2-xlarge": POST | {"embed": "permutation"},
    "deberta-v2-xlarge-untied": POST | {"embed": "linear", "mlm": "permutation"},
    "deberta-v2-xlarge-classifier": POST | {"embed": "linear", "pool": "permutation"},
    "deberta-v2-xlarge-groups": POST | {"embed": "linear", "group": "permutation"},
    **dict.fromkeys(["bart", "bart-base", "bart-answers"], BART),
    "bart-untied": sides(POST, "encoder", "decoder") | sides(MHA, "cross"),
    "bart-classifier": BART | {"pool": "signed"},
    "bart-decoder": sides(BLOCK, "decoder") | sides(MHA, "cross") | {"stream": "permutation"},
    "clip": TEXT | VISION | {"proj": "orthogonal"},
    "clip-text": TEXT,
    "clip-text-projection": TEXT | {"proj": "linear"},
    **dict.fromkeys(["clip-classifier", "clip-vision"], VISION),
    "clip-vision-projection": VISION | {"proj": "linear"},
    **dict.fromkeys(
        ["swin", "swin-padded", "swin-mim", "timm-swin", "timm-swin-features", "timm-swin-padded"],
        PRE | {"stream.0": "permutation"},
    ),
    "swin-base": PRE | {"stream.0": "permutation"},
    **dict.fromkeys(["t5", "t5-base"], T5_BOTH),
    **dict.fromkeys(["t5-encoder", "t5-tokens"], T5_ENCODER),
    "t5-classifier": T5_BOTH | {"pool": "signed"},
    "t5-gated-unscaled": T5_BOTH | sides({"ffn": "monomial"}, "encoder", "decoder"),
    "t5-qa": T5_BOTH | sides({"ffn": "permutation"}, "encoder", "decoder"),
}


@ALL
def test_no_group_is_smaller_than_it_was(name: str) -> None:
    spec, expected = spec_of(build(name)), GROUPS[name]
    found: dict[str, set[str]] = {}
    for label, space in spec.spaces.items():
        kind = label if label in expected else re.sub(r"(\.\d+)+$", "", label)
        over = f" over {space.over.split('.')[0]}" if space.over else ""
        found.setdefault(kind, set()).add(
            f"{space.group}{over}" + (f" > {space.folded}" if space.folded else "")
        )
    assert found == {kind: {group} for kind, group in expected.items()}


def test_registers_are_claimed_only_where_their_rows_of_the_position_table_are_known() -> None:
    model = build("timm-vit-registers")
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}

    def tokens(rows: int, **more: object) -> tuple[str, str]:
        config = config_of(model)
        spec = spec_from(
            {**config, "model_args": {**config["model_args"], **more}},
            {**shapes, "pos_embed": (1, rows, 12)},
        )
        return spec.tensors["reg_token"], spec.tensors["pos_embed"]

    assert tokens(16) == (
        "_ register stream",
        "_ _ stream",
    )  # 4 x 4 patches; the class token and three registers have no rows
    assert tokens(20) == ("_ register stream", "_ _1+register+_ stream")
    assert tokens(21) == ("_ _ stream", "_ _ stream")  # no square either way: nothing is claimed
    assert tokens(21, no_embed_class=True) == ("_ register stream", "_ _ stream")
    assert tokens(16, global_pool="") == (
        "_ _ stream",
        "_ _ stream",
    )  # callers see every token at its place


def test_a_packed_gate_on_an_unknown_side_is_not_scaled() -> None:
    model = build("timm-vit-gate-last")
    config = config_of(model)
    spec = spec_from(
        {**config, "model_args": {**config["model_args"], "mlp_layer": None}}, model.state_dict()
    )
    assert str(spec.spaces["ffn.0"].group) == "permutation"
    assert spec.tensors["blocks.0.mlp.fc1.weight"] == "ffn.0+ffn.0 stream*"


def test_a_checkpoint_may_carry_a_head_that_its_class_leaves_out() -> None:
    model = build("bert-pretraining")
    config = config_of(model)
    assert spec_from(config, model.state_dict()).outputs.keys() == {
        "prediction_logits",
        "seq_relationship_logits",
    }
    assert spec_from(
        {**config, "architectures": ["BertForMaskedLM"]}, model.state_dict()
    ).outputs == {"logits": "_ _ _"}


@pytest.mark.parametrize("name", [late(n) for n, pico in PICOS.items() if pico.config is None])
def test_stored_names(name: str, tmp_path: Path) -> None:
    """A checkpoint's own names: moved and folded on disk, it loads with from_pretrained and is what
    the live model becomes. Names differ where transformers converts on loading (DINOv2, Mixtral's
    experts), and tied tensors are stored once.
    """
    model = build(name)
    spec = spec_of(model)
    model.save_pretrained(tmp_path)
    config, state = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    on_disk = spec_from(config, state)
    assert check(on_disk, state) == []
    assert on_disk.spaces == spec.spaces
    assert on_disk.outputs == spec.outputs
    g = element(spec, 13)
    loaded = _reload(model, apply(g.to(on_disk), state), {}, tmp_path)
    expected = apply(g, model.state_dict())
    assert (
        moved_by({k: v for k, v in loaded.state_dict().items() if k in expected}, expected) < 1e-12
    )
    before, after = (
        select_outputs(spec, compute_outputs(model, PICOS[name].inputs)),
        compute_outputs(loaded, PICOS[name].inputs),
    )
    for n, x in before.items():
        assert float(
            (after[n] - (act(g, x, spec.outputs[n]) if spec.visible else x)).abs().max()
        ) < 1e-9 * max(1.0, float(x.abs().max())), n
    folded_spec, folded = fold_norms(on_disk, state)
    after = compute_outputs(
        _reload(model, folded, folded_spec.config, tmp_path), PICOS[name].inputs
    )
    for n, x in before.items():
        assert float((after[n] - x).abs().max()) < 1e-9 * max(1.0, float(x.abs().max())), n


def _reload(
    model: torch.nn.Module, state: dict[str, torch.Tensor], changes: Mapping, folder: Path
) -> torch.nn.Module:
    save_file(
        {k: v.contiguous() for k, v in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = type(model.config).from_dict({**config_of(model), **changes})
    for kind in ("_attn_implementation", "_experts_implementation"):
        setattr(config, kind, getattr(model.config, kind, None))
    return type(model).from_pretrained(folder, config=config, dtype=torch.float64).eval()


def test_experts_that_are_run_in_one_product_are_checked_in_float64_too() -> None:
    """torch's grouped product, the library's default, has no float64."""
    model = build("mixtral").double()
    expected = compute_outputs(model, PICOS["mixtral"].inputs)["logits"]
    model.set_experts_implementation("grouped_mm")
    assert torch.allclose(
        compute_outputs(model, PICOS["mixtral"].inputs)["logits"], expected, rtol=0, atol=1e-12
    )


@BACKBONES
def test_the_moved_backbone_fits_behind_its_boundary(name: str) -> None:
    """The parts and the boundaries agree: with its backbone alone moved, the model breaks; moved at
    the boundary too, it is itself again.
    """
    model = build(name)
    spec, expected = spec_of(model), compute_outputs(model, PICOS[name].inputs)
    if name.startswith("deberta-v2-xlarge"):
        with pytest.raises(CutError, match="defines no boundary"):
            cut(model)
        return
    g = element(spec, 17)
    model.load_state_dict(apply(g, model.state_dict(), part="backbone"))
    assert moved_by(expected, compute_outputs(model, PICOS[name].inputs)) > 1e-3
    with cut(model, config_of(model)).route(lambda c: c.restore(g, c.transform(g).run())):
        assert moved_by(expected, compute_outputs(model, PICOS[name].inputs)) < 1e-9


@pytest.mark.parametrize("name", ["bert", "deberta-v3-classifier", "deberta-v2"])
def test_gamma_and_beta(name: str) -> None:
    """Checkpoints that came from TensorFlow name LayerNorm's parameters gamma and beta."""
    model = build(name)
    spec, state = spec_of(model), model.state_dict()
    old = {
        n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        for n in state
    }
    renamed = {old[n]: v for n, v in state.items()}
    on_disk = spec_from(config_of(model), renamed)
    assert check(on_disk, renamed) == []
    g = element(spec, 13)
    expected, moved = apply(g, state), apply(g.to(on_disk), renamed)
    assert all(torch.equal(expected[n], moved[old[n]]) for n in state)


OLD_NAMES = {  # (pico, v5 to v4)
    "clip-text": lambda n: f"text_model.{n}",
    "clip-vision": lambda n: f"vision_model.{n}",
    "timm-swin": lambda n: n.replace("layers.1.downsample", "layers.0.downsample").replace(
        "head.fc.", "head."
    ),
    "bart": lambda n: n,  # all three repeats of the table stored
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names(name: str) -> None:
    model, old = build(name), OLD_NAMES[name]
    spec, state = spec_of(model), model.state_dict()
    renamed = {old(n): v for n, v in state.items()}
    on_disk = spec_from(config_of(model), renamed)
    assert check(on_disk, renamed) == []
    assert on_disk.spaces == spec.spaces
    g = element(spec, 13)
    expected, moved = apply(g, state), apply(g.to(on_disk), renamed)
    assert all(torch.equal(expected[n], moved[old(n)]) for n in state)


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin"])
def test_timm_needs_shapes(name: str) -> None:
    model = build(name)
    shapes = {n: tuple(x.shape) for n, x in model.state_dict().items()}
    assert spec_from(config_of(model), shapes) == spec_of(model)
    with pytest.raises(SpecError, match="shape of") as error:
        spec_from(config_of(model), shapes.keys())
    assert "names to shapes" in str(error.value.hint)


@pytest.mark.filterwarnings("ignore:Mapping deprecated")
def test_timm_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of heads that a timm architecture's name and width stand for, against timm's own
    list.
    """
    from timm.models import deit, vision_transformer

    from regauge.models.families.pieces import Config
    from regauge.models.families.timm_vit import number_of_heads

    made: dict[str, dict] = {}
    for module, creator in (
        (vision_transformer, "_create_vision_transformer"),
        (deit, "_create_deit"),
    ):
        monkeypatch.setattr(module, creator, lambda variant, **more: made.setdefault(variant, more))
        for entry in [
            f
            for n, f in vars(module).items()
            if n.startswith(("vit_", "deit_", "deit3_", "flexivit_", "eva_large_"))
        ]:
            entry()
    assert len(made) > 100
    for name, arguments in made.items():
        width, heads = arguments.get("embed_dim", 768), arguments.get("num_heads", 12)
        assert number_of_heads(Config({"architecture": name}), width) == heads, name
    for other in ("blocks.0.attn.rel_pos.mlp.fc1.weight", "blocks.0.mlp.fc1_g.weight"):
        with pytest.raises(UnknownModelError, match='"vit_other_small" is one of timm'):
            spec_from(
                {"architecture": "vit_other_small"},
                {"blocks.0.attn.qkv.weight": torch.zeros(6, 2), other: torch.zeros(2, 2)},
            )
    with pytest.raises(SpecError, match="20 wide") as error:
        number_of_heads(Config({"architecture": "vit_own"}), 20)
    assert "num_heads" in str(error.value.hint)


def test_the_papers_element_is_one_special_element() -> None:
    """W -> P^-1 W P of permutation equivariance with one head-restricted P on both sides: P = (head
    permutation) x (one inner permutation), stream and heads tied.
    """
    model = build("vit")
    spec = spec_of(model)
    rng = np.random.default_rng(3)
    pi, inner = rng.permutation(3), rng.permutation(4)
    flat = (pi[:, None] * 4 + inner[None, :]).reshape(-1)
    members = {"stream": Monomial(flat[None])}
    for i in range(2):
        for s, m in (
            (f"head.{i}", Monomial(pi[None])),
            (f"qk.{i}", Monomial(np.tile(inner, (3, 1)))),
            (f"vo.{i}", Monomial(np.tile(inner, (3, 1)))),
        ):
            members[s] = m
    g = Element(spec, members)
    moved = apply(g, model.state_dict())
    p = torch.from_numpy(flat)
    for i in range(2):
        for x in "qkvo":
            w = model.state_dict()[f"vit.layers.{i}.attention.{x}_proj.weight"]
            assert torch.equal(moved[f"vit.layers.{i}.attention.{x}_proj.weight"], w[p][:, p])
    assert_symmetry(model, spec, g, PICOS["vit"].inputs)
