"""Fixing gauges: the function is unchanged in every family, and the gauge freedom is gone."""

from __future__ import annotations

import pytest
import torch

from regauge.core.action import apply
from regauge.core.element import element
from regauge.errors import SpecError
from regauge.matching import match_states
from regauge.matching.costs import Costs
from regauge.matching.gauges import balance, fix_gauges
from regauge.testing import compute_outputs
from support.picos import PICOS, build, late, spec_of


def run(
    model: torch.nn.Module, state: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    model.load_state_dict(state, strict=False)
    return compute_outputs(model, inputs)


@pytest.mark.parametrize("name", [late(name) for name in PICOS])
def test_the_function_is_unchanged(name: str) -> None:
    model, inputs = build(name), PICOS[name].inputs
    before = compute_outputs(model, inputs)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    fixed = fix_gauges(spec_of(model), state)
    assert fixed.keys() == state.keys()
    after = run(model, fixed, inputs)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-9, atol=1e-9)


def test_key_and_value_biases_are_gone_where_they_are_unseen() -> None:
    model = build("gpt2")
    state = dict(model.state_dict())
    fixed = fix_gauges(spec_of(model), state, ["keys", "values"])
    q, k, v = fixed["transformer.h.0.attn.c_attn.bias"].chunk(3)
    assert not k.any()
    assert not v.any()
    assert torch.equal(q, state["transformer.h.0.attn.c_attn.bias"].chunk(3)[0])
    expected = (
        state["transformer.h.0.attn.c_proj.bias"]
        + state["transformer.h.0.attn.c_attn.bias"].chunk(3)[2]
        @ state["transformer.h.0.attn.c_proj.weight"]
    )
    torch.testing.assert_close(fixed["transformer.h.0.attn.c_proj.bias"], expected)
    assert torch.equal(
        fixed["transformer.h.0.attn.c_attn.weight"], state["transformer.h.0.attn.c_attn.weight"]
    )


def test_activations_are_unchanged() -> None:
    """DeBERTa's keys meet relative positions; Qwen2's keys are turned, and its values' bias has
    nowhere to go.
    """
    for name, bias in (
        ("deberta-v3", "key_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
    ):
        model = build(name)
        state = dict(model.state_dict())
        fixed = fix_gauges(spec_of(model), state, ["keys", "values"])
        names = [n for n in state if n.endswith(bias)]
        assert names
        assert all(torch.equal(fixed[n], state[n]) for n in names)


def test_grouped_values_go_once_for_each_query_that_reads_them() -> None:
    model = build("llama-mqa-biases")
    state = dict(model.state_dict())
    fixed = fix_gauges(spec_of(model), state, ["values"])
    at = "model.layers.0.self_attn."
    values = state[at + "v_proj.bias"].repeat(4)
    torch.testing.assert_close(
        fixed[at + "o_proj.bias"], state[at + "o_proj.bias"] + state[at + "o_proj.weight"] @ values
    )
    assert not fixed[at + "v_proj.bias"].any()


def test_a_balanced_head_has_one_gram_matrix_on_both_sides() -> None:
    model = build("gpt2")
    fixed = fix_gauges(spec_of(model), dict(model.state_dict()), ["keys", "balance"])
    weight = torch.cat(
        [
            fixed["transformer.h.1.attn.c_attn.weight"],
            fixed["transformer.h.1.attn.c_attn.bias"][None],
        ]
    )
    q, k, _ = (x.reshape(13, 3, 4) for x in weight.chunk(3, dim=1))
    torch.testing.assert_close(
        torch.einsum("ihd,ihe->hde", q, q), torch.einsum("ihd,ihe->hde", k, k)
    )


def test_a_balanced_plane_and_a_balanced_neuron_have_one_norm_on_both_sides() -> None:
    model = build("llama")
    fixed = fix_gauges(spec_of(model), dict(model.state_dict()), ["balance"])
    at = "model.layers.0."
    q, k = (
        fixed[f"{at}self_attn.{n}_proj.weight"].square().sum(1).view(2, -1, 2, 2).sum((1, 2))
        for n in "qk"
    )  # [kv, plane]
    torch.testing.assert_close(q, k)
    torch.testing.assert_close(
        fixed[at + "mlp.up_proj.weight"].norm(dim=1), fixed[at + "mlp.down_proj.weight"].norm(dim=0)
    )


def test_fixing_twice_changes_nothing_more() -> None:
    model = build("bert")
    spec = spec_of(model)
    once = fix_gauges(spec, dict(model.state_dict()))
    twice = fix_gauges(spec, once)
    norm = {s: m.matrix() for s, m in balance(spec, once).members.items()}
    assert all(
        torch.dist(twice[n], once[n]) < 1e-9 * (1 + once[n].norm()) or "self" in n or "output" in n
        for n in once
    )
    for m in (
        norm.values()
    ):  # what is left is a rotation: balanced sides are balanced in any orthogonal basis
        torch.testing.assert_close(
            torch.from_numpy(m @ m.swapaxes(1, 2)),
            torch.eye(m.shape[1], dtype=torch.float64).expand(m.shape),
            rtol=0,
            atol=1e-8,
        )


def test_rotations_find_a_general_linear_change_once_both_are_balanced() -> None:
    model = build("gpt2")
    spec, a = spec_of(model), dict(model.state_dict())
    b = apply(element(spec, 3, spaces=["qk", "vo", "head"]), a)
    plain = match_states(spec, a, b, within="orthogonal")
    one, other = (fix_gauges(spec, s) for s in (a, b))
    fixed = match_states(spec, one, other, within="orthogonal")
    assert plain.relative_distance > 0.1
    assert fixed.relative_distance < 1e-7
    left = Costs(spec, one, other).distances(fixed.element)
    assert max(d for d, _ in left.values()) < 1e-12


def test_an_unknown_gauge_is_named() -> None:
    with pytest.raises(SpecError, match='among keys, values, balance, got "norm"'):
        fix_gauges(spec_of(build("vit")), build("vit").state_dict(), ["norm"])


def test_half_precision_keeps_its_dtype() -> None:
    model = build("vit").to(torch.bfloat16)
    fixed = fix_gauges(spec_of(model), dict(model.state_dict()))
    assert {v.dtype for v in fixed.values()} == {torch.bfloat16}
