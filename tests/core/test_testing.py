"""The law checker itself can fail: at every precision, for NaN, and for outputs that no test
compares.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regauge.core.element import Element, element
from regauge.core.groups import GROUPS
from regauge.core.rng import Stream
from regauge.errors import SpecError
from regauge.testing import assert_symmetry, symmetry_error
from support.picos import IDS, build, spec_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_broken_symmetry_raises(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    spec = spec_of(model)
    assert_symmetry(model, spec, element(spec, 1, within="permutation"), IDS)
    # A spec that claims too much: any order of the neurons of the up side, with the gate left in
    # its own.
    overclaimed = {n: a.replace("|ffn.0|", "_") for n, a in spec.tensors.items()}
    wrong = replace(spec, tensors=overclaimed)
    with pytest.raises(
        AssertionError, match=r"LlamaForCausalLM changed by .* under an element on ffn\.0"
    ):
        assert_symmetry(
            model, wrong, element(wrong, 1, within="permutation", spaces=["ffn.0"]), IDS
        )


def test_nan_is_never_a_pass() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    spec = spec_of(model)
    with pytest.raises(AssertionError):
        assert_symmetry(model, spec, element(spec, 1, spaces=["ffn"]), IDS)


def test_outputs_that_are_not_there_are_no_pass() -> None:
    model = build("llama")
    spec = replace(spec_of(model), outputs={"answer": "_"})
    with pytest.raises(SpecError, match=r"an output of the spec \(answer\)"):
        symmetry_error(model, spec, element(spec, 1), IDS)


def test_outputs_with_other_axes_are_no_pass() -> None:
    model = build("llama-classifier")
    spec = spec_of(model)
    assert_symmetry(model, spec, element(spec, 1), IDS)
    wrong = replace(spec, outputs={"logits": "_ _ _"})
    with pytest.raises(
        SpecError, match=r'"logits" must have the axes _ _ _, got shape \[2, 2\]'
    ) as caught:
        symmetry_error(model, wrong, element(wrong, 1), IDS)
    assert "outputs" in str(caught.value.hint)


def test_a_rotation_under_gains_breaks_the_function() -> None:
    """Refused even when forced, for a gain cannot follow it; with the gains fixed, it is
    applied, and breaks.
    """
    model = build("llama")
    spec = spec_of(model)
    turned = {"stream": GROUPS["orthogonal"].sample(16, 1, Stream(bytes(32), "x"))}
    unbarred = replace(
        spec, tensors={n: a.replace("|stream|", "_") for n, a in spec.tensors.items()}
    )
    assert symmetry_error(model, unbarred, Element(unbarred, turned), IDS, force=True) > 1e-2
