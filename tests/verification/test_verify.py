"""Verify: every law on every family, in every dtype; broken models are caught and named; the model
is left as it was.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T

from regauge import verify
from regauge.core.element import element
from regauge.errors import CutError, RegaugeError, SpecError
from regauge.locking.optimizer_guard import PERMUTED
from regauge.locking.permuted import Permuted
from regauge.models.cut import cut
from regauge.models.families import family_of
from regauge.models.families.pieces import Config, Names
from regauge.results.findings import Finding
from regauge.verification import _run_check
from regauge.verification.checks import (
    MARGIN,
    _assess,
    _Comparison,
    _worst,
    prepare,
    transform_copy,
)
from regauge.verification.faults import first_fault
from regauge.verification.inputs import example_inputs
from regauge.verification.subject import Subject, Transform
from support.picos import FAMILIES, PICOS, VARIANTS, build, config_of, of_each_family, spec_of, vit


def tame(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A pico-model with weights of the sizes that trained models have: half precision drowns wilder
    ones in rounding.
    """
    model = build(name)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=draw, dtype=p.dtype)
            if p.dim() < 2:
                p.copy_(
                    0.1 * noise + (1.0 if key.endswith(("weight", "gamma", "lambda1")) else 0.0)
                )
            else:
                table = any(word in key for word in ("embed", "token", "wte", "wpe", "shared"))
                p.copy_(noise if table else noise * p[0].numel() ** -0.5)
    return model.to(dtype)


def run(model: torch.nn.Module, **more: Any) -> Any:
    if hasattr(model, "regauge_config"):  # timm's classes, built without a pretrained_cfg
        config = config_of(model)
        more |= {
            "boundaries": family_of(config).boundaries(Config(config), Names(model.state_dict()))
        }
    return verify(model, spec=spec_of(model), **more)


def faults(results: Any) -> list[str]:
    return [
        f"{f.id}: {f.sentence}"
        for f in results.findings
        if f.holds is False or "inconclusive" in f.sentence
    ]


# Without a cut; and where heads have no inside to permute.
SPECIAL = ("deberta-v2-xlarge", "llama-mha-tied")


@pytest.mark.parametrize("name", [of_each_family(name, *SPECIAL, *VARIANTS) for name in PICOS])
def test_every_law_holds_in_float64(name: str) -> None:
    results = run(build(name))
    assert not faults(results)
    holding = {f.id for f in results.findings if f.holds}
    assert {"spec/fits", "description/forward"} <= holding
    if "xlarge" not in name:
        assert {
            "column/forward",
            "column/weights",
            "column/features",
            "column/trained",
            "column/trained-weights",
        } <= holding
    if "xlarge" not in name and "swin" not in name:
        assert {
            "row/forward",
            "row/weights",
            "row/features",
            "row/trained",
            "both/forward",
            "both/trained-weights",
            "both/embedding",
        } <= holding
    for f in results.findings:
        if f.holds and f.floor is not None and f.measure == "relative error":
            assert f.floor == pytest.approx(1e-9)
            assert f.ceiling >= 1e6 * f.floor


# One model of each mechanism (LayerNorm, RMSNorm with rotary positions, experts, relative
# positions, windows) in one of the dtypes; the others repeat them, and have their laws checked in
# float64 above.
COARSE = {
    torch.float32: ("gpt2", "llama", "swin", "t5"),
    torch.bfloat16: ("vit", "mixtral", "deberta-v3"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in COARSE[dtype] else pytest.mark.slow)
        for name in FAMILIES
        for dtype in COARSE
    ],
    ids=str,
)
def test_every_family_holds_in_coarser_dtypes(name: str, dtype: torch.dtype) -> None:
    results = run(tame(name, dtype))
    assert not faults(results)
    assert ("column/trained" in {f.id for f in results.findings}) == (dtype == torch.float32)
    for f in results.findings:
        if f.holds and f.floor is not None and f.measure == "relative error":
            own = torch.bfloat16 if f.id == "both/mixed" else dtype
            assert f.ceiling >= MARGIN[own] * f.floor
            assert f.floor < (1e-2 if own == torch.float32 else 0.5)


def test_rows_that_cannot_move_say_why() -> None:
    rows = next(f for f in run(build("swin"), steps=0).findings if f.id == "row/forward")
    assert rows.holds is None
    assert "windows of neighbouring tokens" in rows.sentence
    results = run(build("deberta-v2-xlarge"), steps=0)
    assert "defines no boundary" in results.unchecked[0]
    assert next(f for f in results.findings if f.id == "description/forward").holds


def test_the_papers_columns() -> None:
    """Whole heads under rotary positions, heads and their insides elsewhere, none with grouped
    queries.
    """
    heads = {
        n: next(f for f in run(build(n), steps=0).findings if f.id == "column/heads")
        for n in ("vit", "llama-mha-tied", "llama")
    }
    assert heads["vit"].holds
    assert "only whole heads" in heads["llama-mha-tied"].sentence
    assert heads["llama"].holds is None


def test_the_model_is_left_as_it_was() -> None:
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    run(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_key_biases_have_no_gradient_and_are_named() -> None:
    weights = next(
        f for f in run(build("gpt2-untied"), steps=0).findings if f.id == "column/weights"
    )
    bert = next(f for f in run(build("bert"), steps=0).findings if f.id == "column/weights")
    assert "no gradient" not in weights.sentence  # fused with the others
    assert (
        "2 tensors have no gradient (bert.encoder.layer.0.attention.self.key.bias" in bert.sentence
    )


# Broken models.


class PositionalNorm(torch.nn.LayerNorm):
    """A norm that adds something by place: rows are no longer alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Mixed(torch.nn.Module):
    """A projection whose output is mixed by a fixed matrix that no state dict shows."""

    def __init__(self, inner: torch.nn.Module, size: int) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias
        self.matrix = (
            torch.eye(size, dtype=torch.float64).roll(1, 0)
            + 0.1 * torch.arange(size * size, dtype=torch.float64).view(size, size) / size**2
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias) @ self.matrix


class Convolved(torch.nn.Module):
    """A feed-forward with a convolution over the tokens before it."""

    def __init__(self, inner: torch.nn.Module, size: int) -> None:
        super().__init__()
        self.inner = inner
        self.conv = torch.nn.Conv1d(size, size, 3, padding=1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.conv(x.transpose(1, 2)).transpose(1, 2))


def broken(model: torch.nn.Module, path: str, make: Any) -> torch.nn.Module:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))
    return model


def positional(norm: torch.nn.Module) -> torch.nn.Module:
    out = PositionalNorm(norm.normalized_shape, norm.eps, dtype=torch.float64)
    out.load_state_dict(norm.state_dict())
    return out


def finding_of(results: Any, name: str) -> Any:
    return next(f for f in results.findings if f.id == name)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_norm_with_a_positional_bias_is_named(layer: int) -> None:
    path = f"vit.layers.{layer}.layernorm_after"
    results = run(broken(build("vit"), path, positional), steps=0)
    assert finding_of(results, "row/forward").holds is False
    assert finding_of(results, "row/forward").where == f"{path} (PositionalNorm)"
    assert finding_of(
        results, "column/forward"
    ).holds  # it adds the same to every channel of a token


@pytest.mark.parametrize("path", ["vit.layers.0.attention.v_proj", "vit.layers.1.attention.o_proj"])
def test_a_fixed_matrix_in_a_head_is_named(path: str) -> None:
    results = run(broken(build("vit"), path, lambda inner: Mixed(inner, 12)), steps=0)
    assert finding_of(results, "column/forward").holds is False
    assert finding_of(results, "column/forward").where == f"{path} (Mixed)"
    assert finding_of(results, "row/forward").holds


def test_a_convolution_in_the_backbone_is_named() -> None:
    model = build("vit")
    spec = spec_of(model)
    broken(model, "vit.layers.1.mlp", lambda inner: Convolved(inner, 12))
    with pytest.raises(
        SpecError, match=r'"vit.layers.1.mlp.fc1.weight" is in the spec but not in the file'
    ):
        verify(model, spec=spec)  # its tensors have other names

    model = build("vit")
    model.vit.layers[1].mlp.conv = torch.nn.Conv1d(12, 12, 3, padding=1, dtype=torch.float64)
    model.vit.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: (module.conv(args[0].transpose(1, 2)).transpose(1, 2),)
    )
    results = verify(model, spec=spec, steps=0)
    assert finding_of(results, "spec/fits").where == "vit.layers.1.mlp.conv.weight"
    assert finding_of(results, "row/forward").where == "vit.layers.1.mlp.conv (Conv1d)"
    assert finding_of(results, "column/forward").where == "vit.layers.1.mlp.conv (Conv1d)"


def test_gradients_that_are_not_equivariant_are_detected() -> None:
    """A forward that is right and a backward that is not: a hook that changes one gradient by its
    place.
    """
    model = build("vit")
    model.vit.layers[0].mlp.fc1.weight.register_hook(
        lambda g: g * (1 + torch.arange(len(g), dtype=g.dtype)[:, None])
    )
    results = run(model, steps=0)
    assert finding_of(results, "column/forward").holds
    assert finding_of(results, "column/weights").holds is False
    assert finding_of(results, "column/weights").where == "vit.layers.0.mlp.fc1.weight"


def test_nan_fails() -> None:
    model = build("vit")
    with torch.no_grad():
        model.vit.layers[0].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(
        RegaugeError, match=r'"vit.layers.0.mlp.fc1.weight" must be finite, got NaN or Inf'
    ):
        run(model)


KINKS = [
    (1.0, 0, 1, True),
    (1.0, 1, 3, True),
    (1.0, 2, 3, False),
    (1.0, 99, 3, False),
    (1e-3, 1, 1, False),
]


@pytest.mark.parametrize(("ceiling", "good", "draws", "holds"), KINKS)
def test_a_unit_at_its_kink_does_not_break_a_law(
    ceiling: float, good: int, draws: int, holds: bool
) -> None:
    """Rounding decides the gradient of a ReLU whose input is nothing but rounding; a law that is
    broken fails in every draw.
    """
    recorded: list[int] = []

    def check(case: Any) -> list[Finding]:
        recorded.append(case.seed)
        return [Finding("row/weights", "", case.seed >= good, 1e-4, 1e-6, ceiling, "")]

    model = build("vit").float()
    finding = _run_check(
        check, prepare(Subject(model, example_inputs(model), spec_of(model), None), 0, 0, "sgd")
    )[0]
    assert (len(recorded), finding.holds) == (draws, holds)
    assert ("kink" in finding.sentence) == (draws > 1 and holds)


class Ramped(T.ViTForImageClassification):
    """Initialised with a scale that grows with the channel: a description of its own is built into
    its law.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with torch.no_grad():
            self.vit.layers[0].mlp.fc2.weight *= torch.linspace(0.5, 1.5, 20)


def test_an_initialisation_that_knows_its_channels_is_named() -> None:
    law = finding_of(run(build("vit"), steps=0), "column/scratch")
    assert law.holds
    assert law.ceiling > 2 * law.floor
    assert "error" not in law.measure  # which the page would draw on a log axis
    ramped = Ramped(vit()).double()
    ramped.load_state_dict(build("vit").state_dict())
    law = finding_of(verify(ramped, spec=spec_of(build("vit")), steps=0), "column/scratch")
    assert law.holds is False
    assert law.where == "vit.layers.0.mlp.fc2.weight"


class Reordered(torch.nn.LayerNorm):
    """A norm that exchanges two channels, or two tokens, after itself: the numbers are the same, in
    a wrong order.
    """

    axis = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).roll(1, self.axis)


@pytest.mark.parametrize(("axis", "law"), [(1, "row/forward"), (2, "column/forward")])
@pytest.mark.parametrize("name", ["vit.layers.1.layernorm_after", "vit.layers.0.layernorm_before"])
def test_what_only_reorders_is_named_itself(axis: int, law: str, name: str) -> None:
    def reordered(norm: torch.nn.Module) -> torch.nn.Module:
        out = Reordered(norm.normalized_shape, norm.eps, dtype=torch.float64)
        out.load_state_dict(norm.state_dict())
        out.axis = axis
        return out

    failed = finding_of(run(broken(build("vit"), name, reordered), steps=0), law)
    assert failed.holds is False
    assert failed.where == f"{name} (Reordered)"


@pytest.mark.parametrize("name", [of_each_family(n) for n in PICOS if "xlarge" not in n])
def test_a_sound_model_has_no_fault(name: str) -> None:
    """Every order in which a family's modules are given and return their numbers is known: none is
    accused where nothing is wrong.
    """
    model = build(name)
    spec, boundaries = spec_of(model), None
    if hasattr(model, "regauge_config"):
        config = config_of(model)
        boundaries = family_of(config).boundaries(Config(config), Names(model.state_dict()))
    subject = Subject(model, example_inputs(model), spec, cut(model, boundaries=boundaries))
    g = element(spec, 3, within="permutation")
    assert (
        first_fault(
            subject, subject.with_model(transform_copy(model, g)), Transform(columns=g), 1e-9
        )
        is None
    )
    assert (
        first_fault(subject, subject, Transform(columns=g), 1e-9) is not None
    )  # weights that were not moved
    if not subject.rows_fixed_reason:
        assert first_fault(subject, subject, Transform(rows=3), 1e-9) is None


class OneRow(torch.nn.LayerNorm):
    """A norm that treats one token apart, by a little: no shuffle that leaves this token in its
    place can see it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.cat([y[:, :1], y[:, 1:2] + 0.05, y[:, 2:]], 1)


@pytest.mark.parametrize("seed", range(6))
def test_special_treatment_of_a_single_row_is_detected(seed: int) -> None:
    def one_row(norm: torch.nn.Module) -> torch.nn.Module:
        out = OneRow(norm.normalized_shape, norm.eps)
        out.load_state_dict(norm.state_dict())
        return out

    model = broken(tame("vit", torch.float32), "vit.layers.1.layernorm_after", one_row)
    assert finding_of(run(model, steps=0, seed=seed), "row/forward").holds is False


def test_one_wrong_gradient_among_many_is_detected() -> None:
    class Skewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * (1 + 3e-4 * torch.arange(len(g), dtype=g.dtype)[:, None] / len(g))

    class Layer(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.weight, self.bias = inner.weight, inner.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, Skewed.apply(self.weight), self.bias)

    results = run(broken(tame("vit", torch.float32), "vit.layers.0.mlp.fc1", Layer), steps=0)
    assert finding_of(results, "column/weights").holds is False
    assert finding_of(results, "column/weights").where == "vit.layers.0.mlp.fc1.weight"


def test_the_error_of_a_single_wrong_tensor_is_reported() -> None:
    """16 times its own rounding is its share in float32, and four shares are what one tensor may
    have.
    """
    own = {"a": 1e-6, "b": 1e-6}
    finding = _Comparison(1e-6, 16e-6, 1.0, {"a": 1e-4, "b": 0.0}, "", torch.float32, own).finding(
        "x", "", ""
    )
    assert finding.holds is False
    assert (
        finding.sentence
        == "does not hold: a is off by 1.0e-04, 1.6 times what rounding allows one tensor"
    )
    assert (
        _Comparison(1e-6, 16e-6, 1.0, {"a": 6e-5, "b": 0.0}, "", torch.float32, own)
        .finding("x", "", "")
        .holds
    )


def test_a_gradient_of_pure_noise_is_inconclusive() -> None:
    model = tame("vit", torch.float32)
    model.vit.layers[0].mlp.fc1.weight.register_hook(lambda g: g * torch.rand_like(g))
    weights = finding_of(run(model, steps=0), "row/weights")
    assert not weights.holds
    assert "vit.layers.0.mlp.fc1.weight" in weights.sentence


# What models come with.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_head_of_zeros(dtype: torch.dtype) -> None:
    model = tame("vit", dtype)
    for p in model.classifier.parameters():
        torch.nn.init.zeros_(p)
    assert not run(model).failed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", ["", "vit.embeddings", "vit.layers"])
def test_frozen_parameters(frozen: str, dtype: torch.dtype) -> None:
    model = tame("vit", dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    before = [p.requires_grad for p in model.parameters()]
    results = run(model)
    assert not results.failed
    assert finding_of(results, "column/forward").holds
    assert [p.requires_grad for p in model.parameters()] == before


def test_gradients_of_the_user_are_preserved() -> None:
    model = build("vit")
    model(**PICOS["vit"].inputs).logits.sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    run(model, steps=1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_attention_is_chosen_tower_by_tower() -> None:
    model = build("clip")
    model.text_model.config._attn_implementation = "eager"
    run(model, steps=0)
    assert (
        model.text_model.config._attn_implementation,
        model.vision_model.config._attn_implementation,
    ) == ("eager", "sdpa")


def test_a_block_that_stands_twice() -> None:
    model = build("vit")
    model.vit.layers[1] = model.vit.layers[0]
    with pytest.raises(RegaugeError):
        run(model)
    model(**PICOS["vit"].inputs)  # nothing of the route is left


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"input_ids": torch.tensor([[1, 5000]])}, "failed on its inputs"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "GPT2LMHeadModel"),
        ({"input_ids": torch.ones(1, 99, dtype=torch.long)}, "failed on its inputs"),
        ({"pixels": torch.ones(1)}, 'got "pixels"'),
    ],
)
def test_inputs_that_are_not_the_models_own(inputs: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        run(build("gpt2"), inputs=inputs)


def test_where_nothing_can_be_verified() -> None:
    with torch.inference_mode(), pytest.raises(SpecError, match="inference_mode"):
        run(build("vit"))
    with pytest.raises(SpecError, match="meta tensors"):
        run(build("vit").to("meta"), inputs=PICOS["vit"].inputs)
    broad = {"pixel_values": torch.full((1, 3, 8, 8), torch.nan, dtype=torch.float64)}
    with pytest.raises(SpecError, match="must be finite, got NaN or Inf"):
        run(build("vit"), inputs=broad)


# Inputs.


@pytest.mark.parametrize("name", list(PICOS))
def test_inputs_of_the_right_kind(name: str) -> None:
    model = build(name)
    inputs = example_inputs(model, 3)
    assert inputs.keys() >= PICOS[name].inputs.keys() - {"encoder_hidden_states"}
    model(**inputs)
    again = example_inputs(model, 3)
    assert all(torch.equal(v, again[k]) for k, v in inputs.items())


def test_inputs_of_ones_own() -> None:
    model = build("bert")
    ids = torch.randint(3, 30, (1, 5))
    assert not faults(
        run(model, inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids)}, steps=1)
    )


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(SpecError, match='got "adagrad"'):
        run(build("vit"), optimizer="adagrad")


def test_adamw_keeps_permutations_too() -> None:
    assert not faults(run(build("llama"), optimizer="adamw", steps=5))


# Algorithm 1 as a wrapper.


@pytest.mark.parametrize("name", ["vit", "bert", "llama", "t5", "swin"])
def test_permuted_training_ends_at_the_plain_weights(name: str) -> None:
    plain, inputs = build(name), PICOS[name].inputs
    if name != "swin":
        plain.set_attn_implementation("eager")
    wrapped = Permuted(copy.deepcopy(plain), columns=5, rows=name != "swin", key=b"k" * 32)
    assert not torch.equal(_flat(wrapped.model), _flat(plain))
    for model in (plain, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(**inputs).logits.square().mean().backward()
            optimizer.step()
    moved = _flat(wrapped.model)
    assert (_flat(wrapped.unwrap()) - _flat(plain)).abs().max() < 1e-6  # float32 inside the models
    assert (moved - _flat(plain)).abs().max() > 1e-2


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_rows_are_fresh_in_every_pass() -> None:
    recorded = []
    wrapped = Permuted(build("vit"))
    wrapped.model.vit.layers[0].register_forward_pre_hook(
        lambda module, args: recorded.append(args[0])
    )
    for _ in range(2):
        wrapped(**PICOS["vit"].inputs)
    plain = cut(wrapped.model).embed(**PICOS["vit"].inputs).stream
    assert not torch.equal(recorded[0], recorded[1])
    for rows in recorded:
        assert not torch.equal(rows, plain)
        assert torch.equal(rows.sort(dim=1).values, plain.sort(dim=1).values)


def test_generation_with_a_wrapped_model() -> None:
    model = build("gpt2")
    expected = model.generate(**PICOS["gpt2"].inputs, max_new_tokens=4, do_sample=False)
    wrapped = Permuted(model, columns=1, rows=False)
    with wrapped.route():
        assert torch.equal(
            model.generate(**PICOS["gpt2"].inputs, max_new_tokens=4, do_sample=False), expected
        )


def test_a_model_is_wrapped_once() -> None:
    wrapped = Permuted(build("vit"), columns=5)
    with pytest.raises(CutError, match="is wrapped already"):
        Permuted(wrapped.model, columns=6)
    Permuted(wrapped.unwrap(), columns=6)
    with pytest.raises(RegaugeError, match="32 bytes"):
        Permuted(build("vit"), key=b"short")


def test_rows_of_a_windowed_model_are_refused() -> None:
    with pytest.raises(CutError, match="depend on neighbouring positions"):
        Permuted(build("swin"))


@pytest.mark.parametrize(
    ("dtype", "noisy", "holds"),
    [(torch.bfloat16, 1, True), (torch.bfloat16, 2, None), (torch.float32, 1, None)],
)
def test_a_tensor_that_half_precision_drowns_is_named_and_not_judged(
    dtype: torch.dtype, noisy: int, holds: bool | None
) -> None:
    """One in twenty, and in half precision only: in wider dtypes an error of a half is no
    rounding.
    """
    own = {f"t{i}": 0.6 if i < noisy else 0.01 for i in range(20)}
    finding = _assess(
        None, own, dict.fromkeys(own, 0.01), dict.fromkeys(own, 1e6), "", dtype
    ).finding("x", "", "")  # type: ignore[arg-type]
    assert finding.holds is holds
    assert ("not judged: t0 (bfloat16 gets 60% of it wrong)" in finding.sentence) == (holds is True)


def test_the_failing_one_of_two_samples_is_reported() -> None:
    holds, larger, inconclusive, fails = (
        Finding("x", "", h, v)
        for h, v in ((True, 1e-9), (True, 1e-8), (None, None), (False, 1e-10))
    )
    for one, other, worse in (
        (holds, larger, larger),
        (holds, inconclusive, inconclusive),
        (inconclusive, fails, fails),
        (larger, fails, fails),
    ):
        assert _worst(one, other) is worse
        assert _worst(other, one) is worse


def test_a_model_whose_config_names_no_size_of_images() -> None:
    config = T.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    assert example_inputs(T.ResNetForImageClassification(config))["pixel_values"].shape == (
        3,
        3,
        224,
        224,
    )
    config.image_size = 32
    assert example_inputs(T.ResNetForImageClassification(config))["pixel_values"].shape == (
        3,
        3,
        32,
        32,
    )


def test_a_wrapper_that_is_refused_leaves_no_mark() -> None:
    model = build("vit")
    with pytest.raises(RegaugeError):
        Permuted(model, columns=element(spec_of(build("gpt2")), 5))
    assert not hasattr(model, PERMUTED)
    Permuted(model, columns=6)
    assert hasattr(model, PERMUTED)
