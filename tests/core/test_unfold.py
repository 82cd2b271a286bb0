"""Unfolding: a folded and rotated model, written with the norms of another one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import regauge
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.unfold import norms_of, unfold_lazily, unfolded_spec
from regauge.testing import compute_outputs, select_outputs
from support.models import _load, _twin
from support.picos import PICOS, build, spec_of

# One of each kind: biases that readers absorb, and those that they do not; RMSNorm; tied heads,
# with a factor too; LayerScale; padding between norm and readers; two streams; towers; experts.
NAMES = (
    "gpt2",
    "llama-mha-tied",
    "qwen3",
    "mixtral",
    "vit",
    "dinov2",
    "swin",
    "t5",
    "clip",
    "timm-vit-rms",
)

State = dict[str, torch.Tensor]


def run(model: Any, spec: regauge.Spec, state: State, name: str) -> State:
    """Return what a twin of the model, without ties that the spec lacks, computes."""
    twin = _twin(model, spec.config)
    _load(twin, state)
    return select_outputs(spec, compute_outputs(twin, PICOS[name].inputs))


def written(spec: regauge.Spec, a: State, b: State, seed: int = 5) -> tuple[State, State, State]:
    """Return a with the norms of b in another basis, and the folded pair in that basis."""
    (folded, folded_a), (_, folded_b) = fold_norms(spec, a), fold_norms(spec, b)
    g = element(folded, seed, within="orthogonal").without(*folded.visible)
    moved = regauge.apply(g, folded_a)
    norms, notes = norms_of(spec, b, {n: a[n].dtype for n in a})
    assert not notes
    out = {n: make() for n, make in unfold_lazily(spec, moved, norms).items()}
    return out, moved, folded_b


def average(x: State, y: State) -> State:
    """Return the average; what only the first has is tied in the second."""
    return {n: (v + y[n]) / 2 if v.is_floating_point() else v for n, v in x.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_average_is_that_of_the_folded_models(name: str) -> None:
    model, other = build(name, 0), build(name, 1)
    spec = spec_of(model)
    a, b = ({n: v.clone() for n, v in m.state_dict().items()} for m in (model, other))
    out, moved, folded_b = written(spec, a, b)
    target = unfolded_spec(spec)
    assert regauge.check(target, out) == []
    for entry in (*spec.norms, *spec.scales):
        assert torch.equal(out[entry.gain], b[entry.gain]), "the output has the norms of B"
    expected = run(model, spec, a, name)
    for key, value in run(model, target, out, name).items():
        assert (value - expected[key]).abs().max() < 1e-8 * max(
            1.0, float(expected[key].abs().max())
        )
    tied = {alias: spec.untied.get(alias, 1.0) for alias in spec.ties if alias not in target.ties}
    plain_b = b | {alias: b[spec.ties[alias]] * factor for alias, factor in tied.items()}
    folded, _ = fold_norms(spec, a)
    of_pair = run(model, folded, average(moved, folded_b), name)
    of_out = run(model, target, average(out, plain_b), name)
    for key, value in of_pair.items():
        error = (value - of_out[key]).abs().max()
        assert error < 1e-6 * max(1.0, float(value.abs().max())), key
    if name in ("gpt2", "vit"):  # the control: with its own norms, A averages to something else
        stale, _, _ = written(spec, a, a)
        of_stale = run(model, target, average(stale, plain_b), name)
        assert max(float((v - of_stale[k]).abs().max()) for k, v in of_pair.items()) > 1e-3


@pytest.mark.parametrize(("name", "gain"), [("gpt2", "transformer.h.0.ln_1.weight"),
                                            ("llama", "model.norm.weight")])  # fmt: skip
def test_gains_that_nothing_can_be_divided_by_are_replaced(name: str, gain: str) -> None:
    model, other = build(name, 0), build(name, 1)
    spec = spec_of(model)
    a, b = ({n: v.clone() for n, v in m.state_dict().items()} for m in (model, other))
    b[gain][2], b[gain][3] = 0.0, -1e-9
    folded, folded_a = fold_norms(spec, a)
    moved = regauge.apply(element(folded, 5), folded_a)
    norms, (note,) = norms_of(spec, b, {n: a[n].dtype for n in a})
    assert f'"{gain}"' in note
    assert "2 of " in note
    assert norms[gain][3] < 0 < norms[gain][2]
    assert torch.equal(norms[gain][4:], b[gain][4:])
    out = {n: make() for n, make in unfold_lazily(spec, moved, norms).items()}
    expected = run(model, spec, a, name)
    for key, value in run(model, unfolded_spec(spec), out, name).items():
        assert (value - expected[key]).abs().max() < 1e-6 * max(
            1.0, float(expected[key].abs().max())
        )
    b[gain][:] = 0.0
    norms, _ = norms_of(spec, b, {n: a[n].dtype for n in a})
    assert bool((norms[gain] > 0.9).all()), "a norm without any gain is written with ones"


def test_a_gain_that_its_bias_drowns_in_half_precision_is_replaced() -> None:
    spec = spec_of(build("gpt2"))
    b = copy.deepcopy(build("gpt2").state_dict())
    gain, bias = "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias"
    b[gain][2], b[bias][2] = 0.01, 1.0
    half = dict.fromkeys(b, torch.bfloat16)
    values, (note,) = norms_of(spec, b, half)
    assert gain in note
    assert values[gain].dtype == torch.bfloat16
    assert 0.03 < float(values[gain][2]) < 0.05
    assert not norms_of(spec, b, dict.fromkeys(b, torch.float32))[1], "float32 has the digits"
