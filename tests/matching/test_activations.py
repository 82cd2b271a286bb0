"""Matching by what models are seen to do: what was planted is found, and hooks leave nothing
behind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import support.picos as picos
from regauge import apply, element
from regauge.core.fold import fold_norms
from regauge.errors import RecordError, RegaugeError
from regauge.matching import MatchError, match_states
from regauge.matching.activations import generate_text, record, sample_noise
from regauge.testing import strict_float64


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "vit", "bert", "deberta-v3", "t5", "swin", "clip", "dinov2", "mixtral"],
)
def test_a_planted_element_is_found_by_what_the_models_do(name: str, folded: bool) -> None:
    model = picos.build(name)
    spec, a = picos.spec_of(model), {n: t.detach().clone() for n, t in model.state_dict().items()}
    if folded:
        spec, a = fold_norms(spec, a)
    b = apply(element(spec, 3), a)
    with strict_float64():
        activations = tuple(
            record(model, state, spec, [picos.PICOS[name].inputs]) for state in (a, b)
        )
    assert activations[0].streams
    result = match_states(spec, a, b, activations=activations, sweeps=1)  # type: ignore[arg-type]
    moved = apply(result.element, a)
    scale = max(float(t.abs().max()) for t in b.values() if t.is_floating_point())
    rows: dict[str, int] = {}
    for place, text in activations[0].axes.items():
        rows[text.split()[-1]] = (
            rows.get(text.split()[-1], 0) + activations[0].streams[place].shape[0]
        )
    if not folded or all(
        n >= 2 * spec.spaces[s].size for s, n in rows.items()
    ):  # fewer rows than coordinates do not tell a rotation
        assert (
            max(float((moved[n] - b[n]).abs().max()) for n in b if b[n].is_floating_point())
            < 1e-3 * scale
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_write_text_by_themselves() -> None:
    models = [picos.build("gpt2", seed).float() for seed in (0, 1)]
    one, other = (generate_text(models, count=6, length=8, seed=4) for _ in range(2))
    assert [tuple(b["input_ids"].shape) for b in one] == [(3, 8), (3, 8)]
    assert all(torch.equal(x["input_ids"], y["input_ids"]) for x, y in zip(one, other, strict=True))
    with pytest.raises(RecordError, match="cannot generate text"):
        generate_text([picos.build("vit")])


def test_noise_is_sampled_for_models_that_generate_no_text() -> None:
    vit, bert = picos.build("vit"), picos.build("bert")
    one, other, strange = (
        torch.cat([b["pixel_values"] for b in sample_noise(vit, count=70, seed=s, batch_size=32)])
        for s in (0, 0, 1)
    )
    side, channels = vit.config.image_size, vit.config.num_channels  # type: ignore[union-attr]
    assert one.shape == (70, channels, side, side)
    assert torch.equal(one, other)
    assert not torch.equal(one, strange)
    assert float(one.mean()) == pytest.approx(0, abs=1e-3)
    assert float(one.std()) == pytest.approx(1, abs=1e-3)
    steps = (one[..., 1:] - one[..., :-1]).square().mean()
    assert float(steps) < 1.5  # of white noise: 2
    ids = sample_noise(bert, count=5, length=4)[0]
    assert ids["input_ids"].shape == ids["attention_mask"].shape == (5, 4)
    assert int(ids["input_ids"].max()) < bert.config.vocab_size  # type: ignore[union-attr,operator]
    with pytest.raises(RecordError, match="inputs of a Linear are unknown"):
        sample_noise(torch.nn.Linear(2, 2))


def test_activations_of_different_inputs_are_rejected() -> None:
    model = picos.build("gpt2")
    spec, a = picos.spec_of(model), dict(model.state_dict())
    with pytest.raises(RecordError, match="no block of this GPT2LMHeadModel was reached"):
        record(model, None, spec, [])
    inputs = picos.PICOS["gpt2"].inputs
    one, other = record(model, None, spec, [inputs]), record(model, None, spec, [inputs, inputs])
    b = {n: t + 1 for n, t in a.items()}
    with pytest.raises(MatchError, match="different inputs"):
        match_states(spec, a, b, activations=(one, other))
    assert issubclass(RecordError, RegaugeError)


def test_blocks_whose_stream_is_not_described_are_not_watched() -> None:
    model = picos.build("gpt2")
    spec = picos.spec_of(model)
    renamed = {n: text.replace("stream", "other") for n, text in spec.tensors.items()}
    aside = replace(
        spec,
        spaces={("other" if n == "stream" else n): s for n, s in spec.spaces.items()},
        tensors=renamed,
    )
    with pytest.raises(RecordError, match="no block of this GPT2LMHeadModel was reached"):
        record(model, None, aside, [picos.PICOS["gpt2"].inputs])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert record(model, None, spec, [picos.PICOS["gpt2"].inputs]).streams


def test_sweeps_continue_from_activations_to_the_nearest_weights() -> None:
    """Two models that are alike only in part: what they do shows where to start, and weights say
    where it ends; `nearest` off keeps what was seen.
    """
    model = picos.build("gpt2")
    spec, a = fold_norms(
        picos.spec_of(model), {n: t.detach().clone() for n, t in model.state_dict().items()}
    )
    noise = torch.Generator().manual_seed(1)
    b = {
        n: t + 0.1 * t.std() * torch.randn(t.shape, generator=noise, dtype=t.dtype)
        for n, t in apply(element(spec, 3), a).items()
    }
    vocabulary, _ = model.get_input_embeddings().weight.shape
    ids = torch.randint(0, vocabulary, (16, 8), generator=noise)
    with strict_float64():
        activations = tuple(record(model, s, spec, [{"input_ids": ids}]) for s in (a, b))
    first, by_activations, swept = (
        match_states(spec, a, b, activations=activations, **how)  # type: ignore[arg-type]
        for how in ({"sweeps": 0}, {"sweeps": 5, "nearest": False}, {"sweeps": 5})
    )
    streams = [m.element.members["stream"].matrix() for m in (first, by_activations, swept)]
    assert (streams[0] == streams[1]).all()
    assert abs(streams[0] - streams[2]).max() > 1e-3
    assert swept.distance < by_activations.distance <= first.distance
