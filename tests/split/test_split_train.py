"""Split training is local training: the same losses and the same weights, with the columns moved
and the rows shuffled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from regauge.core.element import element
from regauge.errors import CutError, RefusedError, RegaugeError
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.testing import strict_float64
from support.picos import PICOS, build, config_of, spec_of
from support.split_pairs import (
    ADAMW,
    NAMES,
    assemble_state,
    batch,
    columns,
    distance,
    lock_backbone,
    make_model,
    optimizer_of,
    same,
    train,
)

STEPS = range(20)


@pytest.mark.parametrize(
    ("dtype", "near", "rows"),
    [
        (torch.float64, 1e-9, "batch"),
        (torch.float64, 1e-9, "sample"),
        (torch.float32, 3e-5, "batch"),
    ],
    ids=["float64-batch", "float64-sample", "float32-batch"],
)
@pytest.mark.parametrize("name", NAMES)
def test_split_training_is_local_training(
    name: str, dtype: torch.dtype, near: float, rows: str
) -> None:
    plain, mine = make_model(name, dtype), make_model(name, dtype)
    expected = train(name, plain, optimizer_of(plain), STEPS)
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    before = host.backbone()
    with connect(mine, InProcess(host), element=g, rows=rows, secret=5):
        losses = train(name, mine, optimizer_of(mine), STEPS)
    assert host.step == len(STEPS)
    assert all(
        distance({k: v}, {k: before[k]}) > 1e-3 for k, v in host.backbone().items() if v.dim() > 1
    )  # the server learns
    assert losses == pytest.approx(expected, rel=near)
    assert losses[-1] < losses[0]
    assert distance(assemble_state(mine, host, g), plain.state_dict()) < near
    assert (
        distance(assemble_state(mine, host, None), plain.state_dict()) > 0.1
    )  # what the server holds is locked


def test_the_blocks_of_the_client_may_be_gone_and_the_edges_of_the_server_too() -> None:
    mine = make_model("gpt2")
    plain, served = make_model("gpt2"), make_model("gpt2")
    expected = train("gpt2", plain, optimizer_of(plain), range(3))
    served.transformer.wte.to("meta")
    served.transformer.ln_f.to("meta")
    mine.transformer.h.to("meta")
    host = Host(served, ADAMW)
    with connect(mine, InProcess(host)):
        losses = train("gpt2", mine, optimizer_of(mine), range(3))
    assert losses == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RegaugeError, match="meta"):
        Host(mine, ADAMW)


def test_only_edges_are_trained_here_and_the_model_is_given_back() -> None:
    mine = make_model("llama")
    before = {n: p.requires_grad for n, p in mine.named_parameters()}
    blocks = copy.deepcopy(mine.model.layers.state_dict())
    link = connect(mine, InProcess(Host(make_model("llama"), ADAMW)))
    assert not any(p.requires_grad for p in mine.model.layers.parameters())
    train("llama", mine, optimizer_of(mine), range(2))
    assert same(dict(mine.model.layers.state_dict()), dict(blocks))
    link.end()
    assert {n: p.requires_grad for n, p in mine.named_parameters()} == before
    mine(**batch("llama", 0))


def test_a_server_that_only_serves_predicts_and_refuses_nothing_else() -> None:
    plain, mine = make_model("vit").eval(), make_model("vit").eval()
    g = columns(mine)
    host = Host(lock_backbone(mine, g))
    inputs = {"pixel_values": batch("vit", 0)["pixel_values"]}
    with connect(mine, InProcess(host), element=g, rows="sample", keep_cls=True), torch.no_grad():
        assert torch.allclose(mine(**inputs).logits, plain(**inputs).logits, atol=1e-6)
    assert host.step == 0
    assert all(s.done == 0 for s in host.sessions.values())


@pytest.mark.parametrize("codec", ["BF16", "F16", "Q8"])
def test_features_cross_in_fewer_bytes_and_masks_as_they_are(codec: str) -> None:
    plain, mine = make_model("gpt2", torch.float32).eval(), make_model("gpt2", torch.float32).eval()
    inputs = {k: v for k, v in batch("gpt2", 0).items() if k != "labels"}
    with torch.no_grad():
        expected = plain(**inputs).logits
        with connect(mine, InProcess(Host(make_model("gpt2", torch.float32))), codec=codec):
            got = mine(**inputs).logits
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.05


def test_gradients_are_accumulated_clipped_and_scheduled_as_locally() -> None:
    options = OptimizerConfig(
        "sgd", lr=0.1, momentum=0.9, schedule="cosine", warmup=2, steps=6, accumulate=2
    )
    mine, plain = make_model("bert-classifier"), make_model("bert-classifier")
    host = Host(make_model("bert-classifier"), options)
    mine_optimizer, optimizer = (
        optimizer_of(mine, OptimizerConfig("sgd", lr=0.0)),
        optimizer_of(plain, options),
    )
    edges = [p for n, p in plain.named_parameters() if ".layer." not in n]
    with connect(mine, InProcess(host)):
        for step in range(6):
            for group in optimizer.param_groups:
                group["lr"] = options.lr_at(step // 2)
            for model in (mine, plain):
                model(**batch("bert-classifier", step)).loss.backward()
            mine_optimizer.zero_grad()
            if step % 2:
                for p in edges:
                    p.grad = None
                optimizer.step()
                optimizer.zero_grad()
    assert host.step == 3
    assert distance(host.backbone(), {n: plain.state_dict()[n] for n in host.backbone()}) < 1e-6


def test_passes_without_a_backward_pass_are_let_go() -> None:
    mine = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW, max_open_passes=3)
    with connect(mine, InProcess(host)):
        for step in range(6):
            mine(**batch("gpt2", step))
        losses = [mine(**batch("gpt2", step)).loss for step in range(3)]
        with pytest.raises(RefusedError, match="has reached its limit of 3 open forward passes"):
            mine(**batch("gpt2", 3))
        sum(losses).backward()
        assert host.step == 1
        assert not any(s.pending for s in host.sessions.values())
        logged = mine(**batch("gpt2", 4)).loss  # a pass without a backward blocks no other
        train("gpt2", mine, optimizer_of(mine), range(3))
        assert (host.step, logged.requires_grad) == (4, True)


def test_clients_do_not_wait_for_each_other() -> None:
    """A pass that is open while another client's step changes the weights goes back through the new
    ones.
    """
    ann, bob = make_model("gpt2"), make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW)
    with connect(ann, InProcess(host, "ann")), connect(bob, InProcess(host, "bob")):
        loss = ann(**batch("gpt2", 0)).loss
        train("gpt2", bob, optimizer_of(bob), range(1))
        changed = host.backbone()
        loss.backward()
    assert host.step == 2
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all())
        for p in ann.transformer.wte.parameters()
    )
    assert not same(changed, host.backbone())


@pytest.mark.parametrize(
    "name",
    [
        "t5",
        "bart",
        "clip",
        "swin",
        "dinov2",
        "deberta-v3",
        "gemma2",
        "mixtral",
        "distilbert",
        "timm-vit",
    ],
)
def test_every_kind_of_family_crosses(name: str) -> None:
    """Outputs, and gradients of the edges, are those of the whole model."""
    plain, mine = build(name), build(name)
    g = element(spec_of(mine), 3)
    with connect(
        mine,
        InProcess(Host(lock_backbone(mine, g), config=config_of(mine))),
        element=g,
        config=config_of(mine),
    ):
        for model in (plain, mine):
            with strict_float64():
                outputs = model(**PICOS[name].inputs)
                outs = (
                    [outputs]
                    if isinstance(outputs, torch.Tensor)
                    else [outputs[k] for k in ("logits", "logits_per_image") if k in outputs]
                )
                (
                    outs[0] * torch.linspace(-1, 1, outs[0].numel()).view(outs[0].shape)
                ).sum().backward()
    grads = {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}
    assert len(grads) > 1
    assert distance(grads, {n: p.grad for n, p in plain.named_parameters() if n in grads}) < 1e-7


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generation_has_its_cache_on_the_server(name: str, how: dict) -> None:
    plain, mine = build(name), build(name)
    inputs = {
        "input_ids": 3 + PICOS[name].inputs["input_ids"] % 27,
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    inputs["attention_mask"][0, :2] = 0
    g = columns(mine)
    host = Host(lock_backbone(mine, g), max_sessions=2)
    sizes: list[int] = []
    with connect(mine, Counting(InProcess(host), sizes), element=g):
        got = mine.generate(**inputs, max_new_tokens=6, do_sample=False, **how)
    assert (
        got.tolist() == plain.generate(**inputs, max_new_tokens=6, do_sample=False, **how).tolist()
    )
    assert sizes[2] < sizes[1]  # one token crosses, and not all of them


def test_generation_with_rows_sends_all_tokens_again() -> None:
    plain, mine = make_model("gpt2").eval(), make_model("gpt2").eval()
    inputs = {
        "input_ids": PICOS["gpt2"].inputs["input_ids"],
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    with connect(mine, InProcess(Host(make_model("gpt2"))), rows="batch"):
        with pytest.raises(CutError, match="cannot be used with a cache"):
            mine.generate(**inputs, max_new_tokens=4, do_sample=False)
        got = mine.generate(**inputs, max_new_tokens=4, do_sample=False, use_cache=False)
    assert got.tolist() == plain.generate(**inputs, max_new_tokens=4, do_sample=False).tolist()


class Counting:
    """How many bytes each request has."""

    def __init__(self, inner: InProcess, sizes: list[int]) -> None:
        self.inner, self.sizes = inner, sizes

    def exchange(self, request: Sequence[memoryview]) -> bytes:
        self.sizes.append(sum(map(len, request)))
        return self.inner.exchange(request)


def test_rows_of_models_that_look_at_neighbours_are_refused() -> None:
    for name, words in (("swin", "neighbouring rows"), ("t5", "position_bias")):
        with pytest.raises(CutError, match=words):
            connect(build(name), InProcess(Host(build(name))), rows="batch")


def test_an_element_that_the_servers_optimizer_does_not_keep_is_refused() -> None:
    mine = make_model("gpt2")
    g = element(spec_of(mine), 3)  # heads are turned by general linear maps
    with connect(mine, InProcess(Host(lock_backbone(mine, g), ADAMW)), element=g):
        with pytest.raises(CutError, match="which does not commute"):
            mine(**batch("gpt2", 0))
        with torch.no_grad():
            mine(**batch("gpt2", 0))
