"""The cut: a routed model is the same model, bit for bit; a locked backbone with moved edges is the
same function; nothing is left behind.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

from regauge.core.action import act, apply
from regauge.core.axes import dual
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.core.groups import Orthogonal, OrthogonalFixingOnes, Permutation
from regauge.core.spec import Space, Spec, stored_tensors
from regauge.errors import CutError, UnknownModelError
from regauge.models.cut import Crossing, Cut, cut
from regauge.models.families import Boundary
from regauge.testing import compute_outputs, strict_float64
from support.models import distance, gradients, lock_backbone
from support.picos import IDS, PICOS, build, config_of, late, spec_of

UNCUT = {
    name for name in PICOS if name.startswith(("deberta-v2-xlarge", "deberta-v2-groups"))
}  # a convolution stands between the blocks
CUT = [name for name in PICOS if name not in UNCUT]
SPEAKERS = pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gemma2", "mixtral", "t5", "t5-gated-unscaled", "bart"]
)


def cut_of(model: torch.nn.Module) -> Cut:
    return cut(model, config_of(model))


def local(c: Crossing) -> torch.Tensor:
    return c.run()


def edges(g: Element):
    return lambda c: c.restore(g, c.transform(g).run())


def attributes(model: torch.nn.Module) -> list[dict]:
    return [dict(m.__dict__) for m in model.modules()]


@pytest.mark.parametrize("name", [late(name) for name in CUT])
def test_a_routed_model_is_the_same_bit_for_bit(name: str) -> None:
    model, inputs = build(name), PICOS[name].inputs
    expected, grads, left = (
        compute_outputs(model, inputs),
        gradients(model, inputs),
        attributes(model),
    )
    recorded: list[str] = []
    with cut_of(model).route(lambda c: (recorded.append(c.boundary.name), c.run())[1]):
        assert list(model.state_dict()) == list(build(name).state_dict())
        got, routed = compute_outputs(model, inputs), gradients(model, inputs)
    assert sorted(set(recorded)) == sorted(b.name for b in cut_of(model).boundaries)
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    assert grads.keys() == routed.keys()
    assert all(torch.equal(routed[k], grads[k]) for k in grads)
    assert [a.keys() for a in attributes(model)] == [a.keys() for a in left]


@pytest.mark.parametrize("name", [late(name) for name in CUT])
def test_a_locked_backbone_works_with_its_key_and_only_with_it(name: str) -> None:
    """Outputs equal; gradients of the edges equal; those of the backbone follow the dual action."""
    model, inputs = build(name), PICOS[name].inputs
    spec = spec_of(model)
    g, wrong = element(spec, 3), element(spec, 4)
    expected, grads = compute_outputs(model, inputs), gradients(model, inputs)
    twin = lock_backbone(model, g)
    assert distance(compute_outputs(twin, inputs), expected) > 1e-3
    with cut_of(twin).route(edges(wrong)):
        assert distance(compute_outputs(twin, inputs), expected) > 1e-3
    with cut_of(twin).route(edges(g)):
        assert distance(compute_outputs(twin, inputs), expected) < 1e-9
        got = gradients(twin, inputs)
    entries = stored_tensors(spec)
    for n, grad in grads.items():
        moves = spec.parts[entries[n].pattern] == "backbone"
        assert (
            distance({n: got[n]}, {n: act(g, grad, dual(entries[n].axes)) if moves else grad})
            < 1e-9
        ), n


@pytest.mark.parametrize("name", ["vit", "gpt2-untied", "llama", "t5", "swin"])
def test_a_backbone_locked_by_a_rotation_works_too(name: str) -> None:
    from support.models import _load, _twin

    model, inputs = build(name), PICOS[name].inputs
    expected = compute_outputs(model, inputs)
    spec, state = fold_norms(spec_of(model), model.state_dict())
    g = element(spec, 3)
    assert any(
        isinstance(spec.spaces[s].group, Orthogonal | OrthogonalFixingOnes)
        for s in g.members
        if s.startswith("stream")
    )
    twin = _twin(model, dict(spec.config))
    _load(twin, apply(g, state, part="backbone"))
    assert (
        distance(
            {"logits": compute_outputs(twin, inputs)["logits"]}, {"logits": expected["logits"]}
        )
        > 1e-3
    )
    with cut_of(twin).route(edges(g)):
        assert (
            distance(
                {"logits": compute_outputs(twin, inputs)["logits"]}, {"logits": expected["logits"]}
            )
            < 1e-9
        )


@SPEAKERS
@pytest.mark.parametrize(
    "how",
    [{"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 8}],
    ids=["greedy", "beam", "sample"],
)
def test_generation_with_a_cache_is_the_same(name: str, how: dict) -> None:
    model = build(name)
    inputs = {k: v for k, v in PICOS[name].inputs.items() if k != "decoder_input_ids"}
    g = element(spec_of(model), 3)
    twin = lock_backbone(model, g)

    def speak(speaker: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        with strict_float64():
            return speaker.generate(
                **inputs, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **how
            )

    expected = speak(model)
    assert not torch.equal(speak(twin), expected)
    steps: list[int] = []
    with cut_of(model).route(lambda c: (steps.append(c.stream.shape[1]), c.run())[1]):
        assert torch.equal(speak(model), expected)
    assert steps.count(1) >= 7  # one token at a time: the cache is used
    with cut_of(twin).route(edges(g)):
        assert torch.equal(speak(twin), expected)


def test_the_decoders_view_of_the_encoder_is_moved_on_entry() -> None:
    model = build("t5")
    g = element(spec_of(model), 3)
    with strict_float64():
        c = cut(model)
        first = c.embed(**PICOS["t5"].inputs)
        second = c.embed(**PICOS["t5"].inputs, results={"encoder": first.run()})
        assert (first.boundary.name, second.boundary.name) == ("encoder", "decoder")
        assert second.axes("encoder_hidden_states") == "_ source stream"
        states = second.inputs["encoder_hidden_states"]
        assert torch.equal(
            second.transform(g).inputs["encoder_hidden_states"], act(g, states, "_ _ stream")
        )


@pytest.mark.parametrize(
    "name", ["vit", "gpt2", "llama", "t5", "swin", "clip", "timm-vit", "timm-swin"]
)
def test_embed_backbone_head_are_the_model(name: str) -> None:
    model, inputs = build(name), PICOS[name].inputs
    expected, grads = compute_outputs(model, inputs), gradients(model, inputs)
    c = cut_of(model)

    def parts(**args: torch.Tensor):
        results: dict[str, torch.Tensor] = {}
        for _ in c.boundaries:
            crossing = c.embed(**args, results=results)
            results[crossing.boundary.name] = c.backbone(crossing)
        return c.head(results, **args)

    with torch.no_grad(), strict_float64():
        got = parts(**inputs)
    got = {"logits": got} if isinstance(got, torch.Tensor) else got
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    model.zero_grad()
    whole = type("Parts", (torch.nn.Module,), {"forward": lambda self, **values: parts(**values)})()
    whole.model = model
    joined = gradients(whole, inputs)
    # The head's own run of embed is not used, so its gradients come from the crossing alone; sums
    # may be in another order.
    assert distance({k.removeprefix("model."): v for k, v in joined.items()}, grads) < 1e-12


# Rows: a preview of token shuffles. Masks and positions move with the rows.


def rows(size: int) -> Element:
    return element(Spec("rows", {"token": Space(size, Permutation())}, {}), 5)


def causal(n: int) -> torch.Tensor:
    return (
        torch.full((n, n), torch.finfo(torch.float64).min, dtype=torch.float64)
        .triu(1)
        .expand(2, 1, n, n)
    )


PADDED = IDS | {"attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("vit", PICOS["vit"].inputs),
        ("bert", PADDED),
        ("distilbert", PADDED),
        ("gpt2", IDS | {"attention_mask": causal(7)}),
        ("llama", IDS | {"attention_mask": causal(7)}),
        ("qwen3", IDS | {"attention_mask": causal(7)}),
    ],
)
def test_rows_move_with_their_masks_and_positions(name: str, inputs: dict) -> None:
    model = build(name)
    expected = compute_outputs(model, inputs)
    n = cut(model).embed(**inputs).stream.shape[1]
    r = rows(n)
    with cut(model).route(edges(r)):
        assert distance(compute_outputs(model, inputs), expected) < 1e-9
    with cut(model).route(lambda c: c.transform(r).run()):
        assert distance(compute_outputs(model, inputs), expected) > 1e-3
    if "attention_mask" in inputs:  # the rows alone do not do it
        with cut(model).route(lambda c: c.restore(r, c.run(hidden_states=c.transform(r).stream))):
            assert distance(compute_outputs(model, inputs), expected) > 1e-3


def test_rows_and_columns_move_together() -> None:
    model, inputs = build("llama"), IDS | {"attention_mask": causal(7)}
    expected = compute_outputs(model, inputs)
    g, r = element(spec_of(model), 3), rows(7)
    twin = lock_backbone(model, g)
    with cut(twin).route(lambda c: c.restore(g, c.restore(r, c.transform(r).transform(g).run()))):
        assert distance(compute_outputs(twin, inputs), expected) < 1e-9


def test_gemmas_two_masks_cross_under_two_names() -> None:
    model = build("gemma2")
    model.set_attn_implementation("eager")
    expected = compute_outputs(model, IDS)
    crossing = cut(model).embed(**IDS)
    full = crossing.inputs["attention_mask@1"]
    assert not torch.equal(crossing.inputs["attention_mask"], full)
    with cut(model).route(edges(rows(7))):
        assert distance(compute_outputs(model, IDS), expected) < 1e-9
    with cut(model).route(lambda c: c.run(attention_mask=c.inputs["attention_mask@1"])):
        assert distance(compute_outputs(model, IDS), expected) > 1e-4


def test_an_implicit_causal_mask_keeps_rows_in_place() -> None:
    crossing = cut(build("gpt2")).embed(**IDS)
    assert crossing.inputs["attention_mask"] is None
    with pytest.raises(
        CutError, match='compute "attention_mask" from the order of their rows'
    ) as error:
        crossing.transform(rows(7))
    assert "4-D mask" in str(error.value.hint)


@pytest.mark.parametrize("name", ["t5-encoder", "t5"])
def test_t5_rows_take_their_position_bias_along(name: str) -> None:
    model, inputs = build(name), PICOS[name].inputs
    model.set_attn_implementation("eager")
    spec = spec_of(model)
    g, r, expected = element(spec, 3), rows(7), compute_outputs(model, inputs)
    with cut(model).route(lambda c: c.restore(r, c.transform(r).run())):
        assert distance(compute_outputs(model, inputs), expected) < 1e-9
    with cut(model).route(lambda c: c.transform(r).run()):
        assert distance(compute_outputs(model, inputs), expected) > 1e-3
    model.load_state_dict(apply(g, model.state_dict(), part="backbone"))
    for both in (
        lambda c: c.transform(g).transform(r),
        lambda c: c.transform(r).transform(g),
    ):  # the bias is made by moved blocks, whichever comes first
        with cut(model).route(lambda c, both=both: c.restore(g, c.restore(r, both(c).run()))):
            assert distance(compute_outputs(model, inputs), expected) < 1e-9


# Housekeeping.


def test_what_crosses_is_named_and_has_axes() -> None:
    crossing = cut(build("llama")).embed(**IDS)
    assert crossing.tensors.keys() == {"hidden_states", "position_ids", "position_embeddings"}
    assert crossing.axes("position_embeddings") == "_ token _"
    assert crossing.axes("past_key_values") is None
    assert isinstance(crossing.transform(rows(7).only()).inputs["position_embeddings"], tuple)


def test_removal_leaves_nothing() -> None:
    model = build("gpt2")
    before = attributes(model)
    route = cut(model).route(local)
    assert any("_compiled_call_impl" in a for a in attributes(model))
    route.remove()
    route.remove()
    assert attributes(model) == before


def test_exceptions_pass_through_and_the_model_is_free_again() -> None:
    model = build("gpt2")
    before, expected = attributes(model), compute_outputs(model, IDS)

    def fail(c: Crossing) -> torch.Tensor:
        raise ZeroDivisionError("in fn")

    def use() -> None:
        with cut(model).route(fail):
            compute_outputs(model, IDS)

    with pytest.raises(ZeroDivisionError, match="in fn"):
        use()
    assert attributes(model) == before
    assert torch.equal(compute_outputs(model, IDS)["logits"], expected["logits"])


def test_a_persistent_route_survives_an_exception() -> None:
    model = build("vit")
    expected = compute_outputs(model, PICOS["vit"].inputs)
    moods = iter([ValueError("once"), None])

    def moody(c: Crossing) -> torch.Tensor:
        mood = next(moods)
        if mood:
            raise mood
        return c.run()

    route = cut(model).route(moody)
    with pytest.raises(ValueError, match="once"):
        compute_outputs(model, PICOS["vit"].inputs)
    assert torch.equal(compute_outputs(model, PICOS["vit"].inputs)["logits"], expected["logits"])
    route.remove()


def test_routes_nest_and_leave_in_order() -> None:
    model = build("gpt2")
    expected, order = compute_outputs(model, IDS), []
    outer = cut(model).route(lambda c: (order.append("first"), c.run())[1])
    inner = cut(model).route(lambda c: (order.append("second"), c.run())[1])
    assert torch.equal(compute_outputs(model, IDS)["logits"], expected["logits"])
    assert order == ["second", "first"]
    with pytest.raises(CutError, match="installed over"):
        outer.remove()
    inner.remove()
    outer.remove()


def test_a_function_may_call_other_routed_models() -> None:
    """Re-entrancy: each model's pass is its own, and so is each call's."""
    a, b = build("gpt2"), build("gpt2", seed=1)
    expected = compute_outputs(a, IDS)
    inside: list[torch.Tensor] = []
    with (
        cut(b).route(local),
        cut(a).route(lambda c: (inside.append(compute_outputs(b, IDS)["logits"]), c.run())[1]),
    ):
        assert torch.equal(compute_outputs(a, IDS)["logits"], expected["logits"])
    assert torch.equal(inside[0], compute_outputs(b, IDS)["logits"])


def test_threads_do_not_see_each_other() -> None:
    model = build("gpt2")
    batches = [
        torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(i)) for i in range(4)
    ]
    with torch.no_grad():
        expected = [model(input_ids=b).logits for b in batches]
        results: dict[int, list[torch.Tensor]] = {}

        def work(i: int) -> None:
            with torch.no_grad():
                results[i] = [model(input_ids=batches[i]).logits for _ in range(5)]

        with cut(model).route(local):
            workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            for w in workers:
                w.start()
            for w in workers:
                w.join()
    assert all(torch.equal(r, expected[i]) for i in range(4) for r in results[i])


def test_copies_of_a_routed_model_are_not_routed() -> None:
    model = build("gpt2")
    expected = compute_outputs(model, IDS)
    with cut(model).route(lambda c: c.run() * 0):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert distance(compute_outputs(model, IDS), expected) > 1e-3
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for c in copies:
        assert torch.equal(compute_outputs(c, IDS)["logits"], expected["logits"])


def test_hooks_run_once_on_the_real_blocks() -> None:
    model = build("llama")
    inner: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda m, a, out: inner.append(out))
    with torch.no_grad():
        plain = model(**IDS, output_hidden_states=True, output_attentions=False)
        with cut(model).route(local):
            routed = model(**IDS, output_hidden_states=True)
    handle.remove()
    assert len(inner) == 2
    assert torch.equal(inner[0], inner[1])
    assert len(plain.hidden_states) == len(routed.hidden_states) == 3
    assert all(
        torch.equal(a, b) for a, b in zip(plain.hidden_states, routed.hidden_states, strict=True)
    )


@pytest.mark.parametrize("name", ["gpt2", "timm-vit"])
def test_torch_compile_sees_the_route(name: str) -> None:
    model, inputs = build(name), PICOS[name].inputs
    with torch.no_grad(), cut_of(model).route(lambda c: c.run() * 0):
        compiled = torch.compile(model, backend="eager")
        plain, fast = model(**inputs), compiled(**inputs)
        plain, fast = (
            (plain, fast) if isinstance(plain, torch.Tensor) else (plain.logits, fast.logits)
        )
        assert torch.equal(plain, fast)


def test_training_goes_the_same_way() -> None:
    """Three steps of Adam on the locked model with moved edges: permutations commute with every
    elementwise optimizer.
    """
    model = build("gpt2")
    spec = spec_of(model)
    g = element(spec, 3, within="permutation")
    twin = lock_backbone(model, g)

    def train(m: torch.nn.Module) -> None:
        adam = torch.optim.Adam(m.parameters(), lr=1e-2)
        for _ in range(3):
            adam.zero_grad()
            with strict_float64():
                m(**IDS, labels=IDS["input_ids"]).loss.backward()
            for n, p in m.named_parameters():
                if n.endswith(
                    "c_attn.bias"
                ):  # keys' biases have no gradient but rounding, which Adam would blow up
                    p.grad.zero_()
            adam.step()

    train(model)
    with cut(twin).route(edges(g)):
        train(twin)
    assert distance(apply(~g, twin.state_dict(), part="backbone"), model.state_dict()) < 1e-9


def test_several_boundaries_are_routed_by_name() -> None:
    model, inputs = build("t5"), PICOS["t5"].inputs
    recorded: list[str] = []
    with cut(model).route({"decoder": lambda c: (recorded.append(c.boundary.name), c.run())[1]}):
        compute_outputs(model, inputs)
    assert recorded == ["decoder"]
    with pytest.raises(CutError, match='no boundary "middle"') as error:
        cut(model).route({"middle": local})
    assert "encoder, decoder" in str(error.value.hint)
    with pytest.raises(CutError, match="several boundaries"):
        cut(model).head(torch.zeros(1))


def test_gradient_checkpointing_is_refused() -> None:
    model = build("gpt2").train()
    model.gradient_checkpointing_enable()
    with cut(model).route(local), pytest.raises(CutError, match="gradient checkpointing"):
        model(**IDS)


def test_layer_dropping_is_refused() -> None:
    model = build("bart")
    model.config.encoder_layerdrop = 0.5
    with cut(model).route(local):
        compute_outputs(model, IDS)
        with pytest.raises(CutError, match="layerdrop"):
            model.train()(**IDS)


def test_mistakes_are_named() -> None:
    model = build("gpt2")
    crossing = cut(model).embed(**IDS)
    with pytest.raises(CutError, match='no argument "mask"') as error:
        crossing.run(mask=None)
    assert "attention_mask" in str(error.value.hint)

    def without_result(crossing: Crossing) -> Any:
        return None

    with cut(model).route(without_result), pytest.raises(CutError, match="got NoneType"):
        model(**IDS)
    with pytest.raises(CutError, match='"stream", which the element'):
        crossing.transform(element(spec_of(build("swin")), 1))
    with pytest.raises(UnknownModelError, match="neither a config"):
        cut(torch.nn.Linear(2, 2))
    with pytest.raises(CutError, match="no blocks at h"):
        cut(torch.nn.Linear(2, 2), boundaries=[Boundary("", "h", {"x": "_ stream"}, "_ stream")])
    for name in sorted(UNCUT):
        with pytest.raises(CutError, match="defines no boundary"):
            cut(build(name))


def test_a_module_of_your_own_is_cut_at_given_boundaries() -> None:
    class Mine(torch.nn.Module):
        between = 1

        def __init__(self) -> None:
            super().__init__()
            self.inn, self.mid, self.out = (
                torch.nn.Linear(3, 4),
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()),
                torch.nn.Linear(4, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inn(x)
            for layer in self.mid:
                h = layer(h) * self.between if self.between != 1 else layer(h)
            return self.out(h)

    boundary = Boundary("", "mid", {"input": "_ stream"}, "_ stream")
    x, mine = torch.randn(5, 3), Mine()
    expected = mine(x)
    with cut(mine, boundaries=[boundary]).route(local):
        assert torch.equal(mine(x), expected)
        mine.between = 2
        with pytest.raises(CutError, match="changes the stream between"):
            mine(x)


@pytest.mark.parametrize("kind", ["qwen2", "bert-decoder"])
def test_rows_refuse_where_any_block_makes_its_own_mask(kind: str) -> None:
    """Only the second layer of this Qwen2, and a BERT as decoder, leave the causal mask to the
    kernel: a silent wrong answer otherwise.
    """
    import transformers as T

    from support.picos import BERT, LLAMA

    if kind == "qwen2":
        mixed = {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        model = (
            T.Qwen2ForCausalLM(T.Qwen2Config(**LLAMA | mixed, attn_implementation="sdpa"))
            .double()
            .eval()
        )
    else:
        model = (
            T.BertLMHeadModel(T.BertConfig(**BERT, is_decoder=True, attn_implementation="sdpa"))
            .double()
            .eval()
        )
    rows = element(Spec("rows", {"token": Space(7, Permutation())}, {}), 1)
    with (
        pytest.raises(CutError, match="attention_mask"),
        cut(model).route(lambda c: c.transform(rows).run()),
    ):
        model(**IDS)


def test_rows_need_a_token_axis() -> None:
    model = build("swin")
    rows = element(Spec("rows", {"token": Space(64, Permutation())}, {}), 1)
    with (
        pytest.raises(CutError, match="has tokens"),
        cut(model).route(lambda c: c.transform(rows).run()),
    ):
        model(**PICOS["swin"].inputs)
