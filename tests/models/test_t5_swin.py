"""What T5 and Swin have beyond the laws: names on disk, the scale of a tied head, shared heads,
stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

from regauge.core.action import apply
from regauge.core.check import check
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.groups import Orthogonal, OrthogonalFixingOnes, Permutation
from regauge.core.members import Monomial
from regauge.models.families import spec_from
from regauge.testing import compute_outputs
from support.picos import PICOS, build, config_of, spec_of


def save_again(folder: Path, state: dict[str, torch.Tensor], changes: dict) -> None:
    import json

    save_file(
        {k: v.contiguous() for k, v in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def stored_spec(folder: Path) -> tuple:
    import json

    state = load_file(folder / "model.safetensors")
    return spec_from(json.loads((folder / "config.json").read_text()), state), state


@pytest.mark.parametrize("name", ["t5", "t5-gated-unscaled", "t5-classifier", "swin", "swin-mim"])
def test_a_checkpoint_on_disk_is_moved_and_folded(name: str, tmp_path: Path) -> None:
    """Through save_pretrained and from_pretrained: stored names, tied tensors left out, and the
    config that an untied head needs.
    """
    model = build(name)
    expected = compute_outputs(model, PICOS[name].inputs)
    model.save_pretrained(tmp_path)
    spec, state = stored_spec(tmp_path)
    assert check(spec, state) == []
    assert spec.spaces.keys() == spec_of(model).spaces.keys()
    save_again(tmp_path, apply(element(spec, 5), state), {})
    same(model, tmp_path, expected, spec.outputs, name)
    spec, folded = fold_norms(spec, state)
    assert Orthogonal() in [s.group for s in spec.spaces.values()] or OrthogonalFixingOnes() in [
        s.group for s in spec.spaces.values()
    ]
    save_again(tmp_path, apply(element(spec, 6), folded), dict(spec.config))
    same(model, tmp_path, expected, spec.outputs, name)


def same(model, folder: Path, expected: dict, names, pico: str) -> None:
    loaded = type(model).from_pretrained(folder, dtype=torch.float64).eval()
    got = compute_outputs(loaded, PICOS[pico].inputs)
    for key in names:
        assert float((got[key] - expected[key]).abs().max()) < 1e-9 * max(
            1.0, float(expected[key].abs().max())
        ), key


def test_the_scale_of_a_tied_head_goes_into_the_untied_one() -> None:
    model = build("t5")
    spec, folded = fold_norms(spec_of(model), model.state_dict())
    gain = model.decoder.final_layer_norm.weight
    assert torch.allclose(
        folded["lm_head.weight"], model.shared.weight * gain * 12**-0.5, atol=1e-14
    )
    assert torch.equal(folded["shared.weight"], model.shared.weight)
    assert spec.config == {"tie_word_embeddings": False, "scale_decoder_outputs": False}


def test_swin_stage_zero_keeps_permutations() -> None:
    model = build("swin")
    spec, _ = fold_norms(spec_of(model), model.state_dict())
    assert type(spec.spaces["stream.0"].group) is Permutation
    assert spec.spaces["stream.1"].group == OrthogonalFixingOnes()


def test_heads_of_one_t5_layer_alone_are_no_symmetry() -> None:
    """The relative bias is shared by the stack: moving the heads of block 1 without those of block
    0 breaks the function.
    """
    model = build("t5")
    spec = spec_of(model)
    g = element(spec, 3, spaces=["head.encoder"])
    assert isinstance(g.members["head.encoder"], Monomial)
    state, moved = model.state_dict(), apply(g, model.state_dict())
    before = compute_outputs(model, PICOS["t5"].inputs)["logits"]
    model.load_state_dict({k: moved[k] if "block.1" in k else state[k] for k in state})
    assert float((compute_outputs(model, PICOS["t5"].inputs)["logits"] - before).abs().max()) > 1e-4
    model.load_state_dict(moved)
    assert float((compute_outputs(model, PICOS["t5"].inputs)["logits"] - before).abs().max()) < 1e-9


def test_swins_old_names_give_the_same_spaces() -> None:
    model = build("swin")
    live = spec_of(model)
    renamed = {}
    for name, value in model.state_dict().items():
        for new, old in (
            ("attention.q_proj", "attention.self.query"),
            ("attention.k_proj", "attention.self.key"),
            ("attention.v_proj", "attention.self.value"),
        ):
            name = name.replace(new, old)
        name = name.replace(
            "attention.relative_position_bias.relative", "attention.self.relative"
        ).replace("attention.o_proj", "attention.output.dense")
        renamed[
            name.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")
        ] = value
    renamed["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = torch.zeros(
        4, 4
    )
    old = spec_from(config_of(model), renamed)
    assert check(old, renamed) == []
    assert old.spaces == live.spaces
    assert "swin.encoder.layers.0.blocks.1.intermediate.dense.weight" in old.tensors


def test_old_t5_checkpoints_carry_an_unused_table() -> None:
    model = build("t5")
    state = model.state_dict() | {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(8, 3)
    }
    assert check(spec_from(config_of(model), state), state) == []


def test_t5_v1_1_has_a_head_of_its_own() -> None:
    """Its config.json says tie_word_embeddings false; transformers 5 then switches the scale off
    and keeps the two tables apart.
    """
    config = {
        **T.T5Config().to_dict(),
        "tie_word_embeddings": False,
        "architectures": ["T5ForConditionalGeneration"],
    }
    config.pop("scale_decoder_outputs")
    names = dict.fromkeys(
        ["shared.weight", "lm_head.weight", "encoder.x", "decoder.x"], torch.zeros(1)
    )
    spec = spec_from(config, names)
    assert "lm_head.weight" not in spec.ties
    assert not spec.untied
