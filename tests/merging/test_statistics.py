"""Merging with data: Fisher, RegMean and transport, against formulas that share no code with them;
and the order of moving and looking.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regauge.core.action import act, apply
from regauge.core.element import Element, element, identity
from regauge.core.fold import fold_norms
from regauge.core.members import Monomial, Soft
from regauge.errors import MergeError, SoftTransportError, StatisticsError
from regauge.merging import merge_states, merge_tensors
from regauge.merging.statistics import Gram, activations, fisher, grams
from regauge.merging.transport import fit_transport, transport_map
from support.picos import PICOS, build, spec_of

Tensor = torch.Tensor
MODELS = ["vit", "gpt2", "llama", "bert", "mixtral", "t5", "swin", "timm-vit", "bert-classifier"]
ALL = {"fisher": fisher, "gram": grams, "activations": activations}


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(name: str) -> dict[str, Tensor]:
    return {
        "pixel_values" if key == "x" else key: value for key, value in PICOS[name].inputs.items()
    }


def two(name: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    module = build(name)
    return module, *(
        {n: t.clone() for n, t in build(name, seed).state_dict().items()} for seed in (0, 1)
    )


def relative_distance(a: Any, b: Any) -> float:
    """The largest difference of two states, as a share of the largest value."""
    return max(
        float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-30))
        for n in b
        if b[n].is_floating_point()
    )


# the methods


def test_fisher_weighs_every_value() -> None:
    x, y, f, h = (random_tensor(7, 9, seed=s) for s in range(4))
    f, h = f.square(), h.square()
    merged_tensor = merge_tensors("fisher", [x, y], statistics=[f, h], weight=[1, 0.3], floor=0)
    assert torch.allclose(merged_tensor, (f * x + 0.3 * h * y) / (f + 0.3 * h), rtol=1e-12)
    assert torch.allclose(
        merge_tensors("fisher", [x, y], statistics=[f, f]), (x + y) / 2, rtol=1e-12
    )
    assert torch.allclose(
        merge_tensors("fisher", [x, y], statistics=[0 * f, 0 * f]), (x + y) / 2
    )  # what matters nowhere is averaged
    assert torch.allclose(
        merge_tensors("fisher", [x, y], statistics=[f, None], weight=[3, 1]), (3 * x + y) / 4
    )  # and what is not known
    scaled = merge_tensors(
        "fisher", [x, y], statistics=[1e-30 * f, 1e-30 * h]
    )  # no scale of Fishers is too small to count
    assert torch.allclose(scaled, merge_tensors("fisher", [x, y], statistics=[f, h]), rtol=1e-9)


def test_the_floor_of_a_fisher() -> None:
    x, y = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 6.0]).double()
    f, h = torch.tensor([4.0, 0.0]).double(), torch.tensor([0.0, 0.0]).double()  # their mean is 1
    merged_tensor = merge_tensors("fisher", [x, y], statistics=[f, h], floor=0.5)
    assert torch.allclose(merged_tensor, torch.tensor([(4 * 1 + 0.5 * 3) / 4.5, 4.0]).double())


@pytest.mark.parametrize("dim", [0, 1])
def test_regmean_solves_the_least_squares_problem(dim: int) -> None:
    """With the whole Gram matrix, no other weight does better on sum |X_i W - X_i W_i|^2: the same
    as one regression on all inputs.
    """
    inputs = [
        random_tensor(40, 6, seed=1),
        3 * random_tensor(30, 6, seed=2) @ random_tensor(6, 6, seed=3),
    ]
    maps = [random_tensor(6, 4, seed=4), random_tensor(6, 4, seed=5)]
    known = [Gram(x.T @ x, dim) for x in inputs]
    stored = [w.T.contiguous() if dim else w for w in maps]
    merged_tensor = merge_tensors("regmean", stored, statistics=known, alpha=1)
    wanted = torch.linalg.lstsq(
        torch.cat(inputs), torch.cat([x @ w for x, w in zip(inputs, maps, strict=True)])
    ).solution
    assert torch.allclose(merged_tensor.T if dim else merged_tensor, wanted, rtol=1e-9)
    half = merge_tensors("regmean", stored, statistics=known, alpha=0.1, weight=[1, 0.5])
    a, b = (0.1 * k.values + 0.9 * torch.diag(k.values.diag()) for k in known)
    wanted = torch.linalg.inv(a + 0.5 * b) @ (a @ maps[0] + 0.5 * b @ maps[1])
    assert torch.allclose(half.T if dim else half, wanted, rtol=1e-9)
    alike = merge_tensors("regmean", stored, statistics=[known[0], known[0]], alpha=0.7)
    assert torch.allclose(alike, (stored[0] + stored[1]) / 2, rtol=1e-9)


def test_what_the_inputs_of_regmean_leave_open_is_averaged() -> None:
    x, maps = (
        random_tensor(30, 6, seed=1),
        [random_tensor(4, 6, seed=4), random_tensor(4, 6, seed=5)],
    )
    x[:, 2] = 0  # an input that never comes
    y = x.clone()
    y[:, 3] = y[:, 1]  # and two that always come together
    for alpha, twin in ((0.9, x), (1.0, y)):
        known = [Gram(v.T @ v, 1) for v in (twin, 2 * twin)]
        merged_tensor = merge_tensors("regmean", maps, statistics=known, alpha=alpha)
        assert torch.allclose(merged_tensor, (maps[0] + 4 * maps[1]) / 5, rtol=1e-8) is False
        assert torch.allclose(merged_tensor[:, 2], (maps[0] + maps[1])[:, 2] / 2, rtol=1e-8)
        assert torch.allclose(
            twin @ merged_tensor.T, twin @ ((maps[0] + 4 * maps[1]) / 5).T, rtol=1e-7
        )


def test_invalid_statistics_are_rejected() -> None:
    x = random_tensor(3, 4)
    with pytest.raises(MergeError, match=r"got \[1.0, -1.0\]"):
        merge_tensors("fisher", [x, x], statistics=[x.square(), x.square()], weight=[1, -1])
    with pytest.raises(MergeError, match="needs 2 statistics, one for each model, got 0"):
        merge_tensors("regmean", [x, x])
    with pytest.raises(MergeError, match="must be finite"):
        merge_tensors("fisher", [x, x], statistics=[x.square() / 0, x.square()])
    with pytest.raises(MergeError, match="must be finite"):
        merge_tensors(
            "regmean", [x, x], statistics=[Gram(torch.full((4, 4), torch.nan).double(), 1)] * 2
        )
    for method, what in (("fisher", "fisher"), ("regmean", "gram"), ("ot_acts", "activations")):
        with pytest.raises(MergeError, match=f"needs statistics \\({what}\\) of 2 states, got 0"):
            merge_states([{"x": x}, {"x": x}], method)
    with pytest.raises(MergeError, match="needs the spec"):
        merge_states([{"x": x}, {"x": x}], "ot_wts")


# the statistics


def test_the_fisher_of_a_logistic_regression() -> None:
    """Against its closed form: sum over classes of p (delta - p)^2 x^2."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 3)).double()
    call = module.forward
    module.forward = lambda pixel_values: call(pixel_values)  # type: ignore[method-assign]
    x, state = random_tensor(8, 5), {n: t.detach().clone() for n, t in build_linear(3, 5).items()}
    fisher_values = fisher(module, state, [{"pixel_values": x[:3]}, {"pixel_values": x[3:]}])
    p = (x @ state["0.weight"].T + state["0.bias"]).softmax(-1)
    variance = p * (1 - p)
    assert torch.allclose(fisher_values["0.bias"], variance.mean(0))
    assert torch.allclose(
        fisher_values["0.weight"], torch.einsum("nc,ni->ci", variance, x.square()) / 8
    )
    labels = torch.arange(8) % 3
    empirical = fisher(module, state, [{"pixel_values": x}], [labels])
    wrong = (F.one_hot(labels, 3) - p).square()
    assert torch.allclose(empirical["0.weight"], torch.einsum("nc,ni->ci", wrong, x.square()) / 8)


def build_linear(out: int, into: int) -> dict[str, Tensor]:
    return {"0.weight": random_tensor(out, into, seed=7), "0.bias": random_tensor(out, seed=8)}


def test_sampled_labels_give_the_same_fisher_in_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, a, _ = two("bert-classifier")
    batch = {k: v.repeat(200, 1) for k, v in inputs("bert-classifier").items()}
    exact = fisher(module, a, [inputs("bert-classifier")])
    monkeypatch.setattr("regauge.merging.statistics.MAX_EXACT_CLASSES", 1)
    fisher_values = fisher(module, a, [batch])
    name = "classifier.weight"
    assert torch.allclose(
        fisher_values[name], exact[name], rtol=0.3, atol=0.1 * float(exact[name].max())
    )
    assert not torch.equal(fisher_values[name], exact[name])


def test_a_language_models_labels() -> None:
    """Drawn for each token; or given, of the next token."""
    module, a, _ = two("gpt2")
    batch = inputs("gpt2")
    ids = batch["input_ids"]
    assert all(bool((f > 0).any()) for f in fisher(module, a, [batch]).values())
    one, same, other = (
        fisher(module, a, [batch], seed=s)["transformer.wte.weight"] for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    fisher_values = fisher(module, a, [batch], [ids], causal=True)[
        "transformer.h.0.mlp.c_fc.weight"
    ]
    wanted = torch.zeros_like(fisher_values)
    for row in ids:
        module.load_state_dict(a)
        module.zero_grad()
        F.cross_entropy(
            module(input_ids=row[None]).logits[0, :-1], row[1:], reduction="sum"
        ).backward()
        wanted += module.transformer.h[0].mlp.c_fc.weight.grad.square() / len(ids)
    assert torch.allclose(fisher_values, wanted, rtol=1e-9)


@pytest.mark.parametrize("kind", list(ALL))
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-encoder"])
def test_padding_counts_nowhere(name: str, kind: str) -> None:
    if name == "t5-encoder" and kind == "fisher":
        pytest.skip("it predicts nothing")
    module, a, _ = two(name)
    ids = inputs(name)["input_ids"][:1, :5]
    padded = torch.cat([ids, torch.full((1, 3), 9)], 1)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    compute: Any = ALL[kind]
    short, long = (
        compute(module, a, [{"input_ids": ids, "attention_mask": mask[:, :5]}]),
        compute(module, a, [{"input_ids": padded, "attention_mask": mask}]),
    )
    for key, value in short.items():
        x, y = (v.values if isinstance(v, Gram) else v for v in (value, long[key]))
        if not any(part in key for part in ("position", "wpe", "relative")):
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-9 * float(x.abs().max()) + 1e-25), key


def test_grams_are_what_the_layers_read() -> None:
    module, a, _ = two("vit")
    module.load_state_dict(a)
    batch = inputs("vit")
    gram_values = grams(
        module, a, [{k: v[:1] for k, v in batch.items()}, {k: v[1:] for k, v in batch.items()}]
    )
    images = batch["pixel_values"]
    patches = torch.stack(
        [
            images[n, :, i : i + 4, j : j + 4].reshape(-1)
            for n in range(2)
            for i in (0, 4)
            for j in (0, 4)
        ]
    )
    assert torch.allclose(
        gram_values["vit.embeddings.patch_embeddings.projection.weight"].values, patches.T @ patches
    )
    read = (
        module.vit.layers[1]
        .layernorm_before(module(**batch, output_hidden_states=True).hidden_states[1])
        .reshape(-1, 12)
        .detach()
    )
    assert torch.allclose(gram_values["vit.layers.1.attention.v_proj.weight"].values, read.T @ read)
    assert not any("layernorm" in name or name.endswith("bias") for name in gram_values)


@pytest.mark.parametrize("name", MODELS)
def test_every_statistic_of_every_kind_of_model(name: str) -> None:
    module, a, b = two(name)
    batch = inputs(name)
    for method, kind in (
        ("fisher", "fisher"),
        ("regmean", "gram"),
        ("ot_wts", ""),
        ("ot_acts", "activations"),
        ("ot_acts_emd", "activations"),
    ):
        if name in ("t5",) and kind == "fisher":
            continue
        compute = ALL[kind] if kind else None
        known = [compute(module, s, [batch]) for s in (a, b)] if compute else None
        merged_state = merge_states([a, b], method, statistics=known, spec=spec_of(module))
        assert merged_state.keys() == a.keys()
        assert all(bool(t.isfinite().all()) for t in merged_state.values() if t.is_floating_point())
        mean = merge_states([a, b], weight=1)
        assert relative_distance(merged_state, mean) > 1e-3, method
        module.load_state_dict(merged_state)


@pytest.mark.parametrize("kind", list(ALL))
def test_a_state_whose_ties_were_undone(kind: str) -> None:
    """Folding gives a tied head values of its own: on the tied module it is the same model as on
    one that is not tied.
    """
    module, a, _ = two("gpt2")
    _, state = fold_norms(spec_of(module), a)
    assert not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    compute: Any = ALL[kind]
    batch = [inputs("gpt2")]
    found, wanted = compute(module, state, batch), compute(build("gpt2-untied"), state, batch)
    for name, value in wanted.items():
        x, y = (v.values if isinstance(v, Gram) else v for v in (found[name], value))
        assert torch.allclose(x, y, rtol=1e-9), name


def test_what_predicts_nothing_has_no_fisher() -> None:
    module, a, _ = two("bert-base")
    with pytest.raises(StatisticsError, match="gives no logits"):
        fisher(module, a, [inputs("bert-base")])
    with pytest.raises(StatisticsError, match="was reached"):
        grams(module, a, [])
    with pytest.raises(StatisticsError, match='the state lacks "embeddings'):
        grams(module, {}, [inputs("bert-base")])


# the order: first the models are moved, then they are looked at


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert", "llama"])
@pytest.mark.parametrize("kind", ["fisher", "gram"])
def test_statistics_of_a_moved_model_are_the_moved_statistics(name: str, kind: str) -> None:
    """Of a permuted model, computed after the move or moved by the element, they are the same;
    those from before the move are not.
    """
    module, a, _ = two(name)
    spec, batch = spec_of(module), inputs(name)
    g = element(spec, 3, within="permutation")
    moved = apply(g, a)
    before, after = (ALL[kind](module, s, [batch]) for s in (a, moved))  # type: ignore[operator]
    if kind == "fisher":
        carried: dict[str, Tensor] = {
            n: act(g, f, spec.tensors[n]) for n, f in before.items() if n in spec.tensors
        }
    else:
        carried = {
            n: _transform_statistics(g, before[n], spec.tensors[n])
            for n in before
            if n in spec.tensors and n not in spec.ties
        }
    values = {n: v.values if isinstance(v, Gram) else v for n, v in after.items()}
    stale = {n: v.values if isinstance(v, Gram) else v for n, v in before.items()}
    scale = {n: float(v.abs().max()) for n, v in values.items() if float(v.abs().max()) > 1e-12}
    assert len(carried) > 7
    assert max(
        float((carried[n] - values[n]).abs().max()) / scale[n] for n in carried if n in scale
    ) < (1e-4 if name == "llama" else 1e-6)  # its norms are float32
    assert (
        max(float((stale[n] - values[n]).abs().max()) / scale[n] for n in carried if n in scale)
        > 0.1
    )


def _transform_statistics(g: Element, gram: Gram, axes: str) -> Tensor:
    """A Gram matrix, moved along both axes as activations are: the term that the layer reads,
    without its star.
    """
    if axes.count("_") > 1:
        return gram.values  # pixels: nothing acts
    read = axes.split(" ")
    depth, terms, word = 0, [], ""
    for part in read:  # terms, brackets kept together
        word, depth = f"{word} {part}".strip(), depth + part.count("(") - part.count(")")
        if not depth:
            terms.append(word)
            word = ""
    term = terms[1 if gram.dim else 0].removesuffix("*")
    return act(g, gram.values, f"{term} {term}")


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_the_wrong_order_changes_the_result(method: str) -> None:
    """B is a permuted relative of A. Moved back first and looked at then, the merge is that of the
    relatives; with statistics from before the move, which the code of rotation symmetry
    applies to matched weights, it is another model.
    """
    module, a, b = two("vit")
    b = {n: a[n] + 0.1 * b[n] for n in a}  # a relative of a, in its basis
    spec, batch = spec_of(module), inputs("vit")
    g = element(spec, 5, within="permutation")
    hidden = apply(g, b)
    compute = fisher if method == "fisher" else grams
    known: Any = compute(module, a, [batch])
    wanted = merge_states([a, b], method, statistics=[known, compute(module, b, [batch])])
    back = apply(~g, hidden)
    right = merge_states([a, back], method, statistics=[known, compute(module, back, [batch])])
    wrong = merge_states([a, back], method, statistics=[known, compute(module, hidden, [batch])])
    assert relative_distance(right, wanted) < 1e-6
    assert relative_distance(wrong, wanted) > 1e-2


# transport


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["ot_wts", "ot_acts", "ot_acts_emd"])
def test_transport_undoes_a_permutation(name: str, method: str) -> None:
    """A merge of a model with a permuted copy is the model again."""
    module, a, _ = two(name)
    spec, batch = spec_of(module), inputs(name)
    more = {} if method == "ot_acts_emd" else {"regularization": 0}
    hidden = apply(element(spec, 3, within="permutation", spaces=movable(name, method, spec)), a)
    known = [activations(module, s, [batch]) for s in (a, hidden)] if method != "ot_wts" else None
    merged_state = merge_states([a, hidden], method, statistics=known, spec=spec, **more)
    assert relative_distance(merged_state, a) < 1e-5
    assert relative_distance(merge_states([a, hidden], weight=1), a) > 0.1


def movable(name: str, method: str, spec: Any) -> list[str] | None:
    """What activations show: experts write nothing that a hook sees, and so stay."""
    return (
        [s for s in spec.spaces if not s.startswith(("expert", "ffn"))]
        if name == "mixtral" and method != "ot_wts"
        else None
    )


def test_exact_plans_are_permutations_and_soft_ones_are_not() -> None:
    module, a, b = two("vit")
    spec = spec_of(module)
    known = [activations(module, s, [inputs("vit")]) for s in (a, b)]
    hard, soft = (
        fit_transport(spec, a, b, regularization=s, activations=(known[0], known[1]))
        for s in (None, 0.2)
    )
    for space, member in hard.members.items():
        assert isinstance(member, Monomial) is (space != "stream"), (
            space
        )  # a mean of permutations that do not agree
    assert isinstance(soft.members["ffn.0"], Soft)
    assert isinstance(soft.members["head.0"], Monomial)
    matrix = soft.members["ffn.0"].matrix()[0]
    assert matrix.sum(0) == pytest.approx(np.ones(20), abs=1e-3)
    assert matrix.sum(1) == pytest.approx(np.ones(20), abs=1e-3)
    with torch.no_grad():
        unchanged, changed = (
            _logits(module, apply(g, a, force=True)) for g in (hard.without("stream"), soft)
        )
        wanted = _logits(module, a)
    assert torch.allclose(
        unchanged, wanted, rtol=1e-6
    )  # exact plans are elements: the moved model is the same function
    assert float((changed - wanted).abs().max()) > 0.1  # soft plans are not


def _logits(module: Any, state: dict[str, Tensor]) -> Tensor:
    module.load_state_dict(state)
    logits: Tensor = module(**inputs("vit")).logits
    return logits


def test_a_plan_between_rows_that_are_all_alike() -> None:
    assert (transport_map(np.zeros((3, 2)), np.zeros((3, 2)), 0.1) == np.eye(3)).all()


def test_transport_needs_the_same_inputs() -> None:
    module, a, b = two("vit")
    batch = inputs("vit")
    one, other = (
        activations(module, a, [batch]),
        activations(module, b, [{k: v[:1] for k, v in batch.items()}]),
    )
    with pytest.raises(SoftTransportError, match="must be of the same inputs"):
        fit_transport(spec_of(module), a, b, activations=(one, other))
    with pytest.raises(SoftTransportError, match="must have at least one layer"):
        fit_transport(spec_of(module), a, b, activations=({}, {}))
    assert identity(spec_of(module)).members == {}
