"""The edge: a locked model with its element is the plain model, in use and in training; without it,
it is not; nothing of it is saved.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch

from regauge.core.action import act, apply
from regauge.core.axes import dual
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.core.spec import stored_tensors
from regauge.errors import AuthorizeError, CutError, SpecError
from regauge.locking.authorize import authorize_with_element, deauthorize, edge_of, is_authorized
from regauge.locking.permuted import Permuted
from regauge.models.families import Boundary
from regauge.testing import compute_outputs, strict_float64
from regauge.verification.claims import RECIPES
from support.models import distance, gradients, lock_backbone
from support.picos import IDS, PICOS, build, config_of, spec_of

NAMES = (
    "gpt2 llama gemma2 mixtral vit dinov2 bert distilbert deberta-v3 deberta-v2 t5 "
    "bart-untied bart-decoder clip swin timm-vit timm-swin"
)
FAMILIES = pytest.mark.parametrize("name", NAMES.split())


def pair(
    name: str, within: str = "full", seed: int = 3
) -> tuple[torch.nn.Module, torch.nn.Module, Element]:
    """A plain model, its locked twin, and the element between them."""
    model = build(name)
    g = element(spec_of(model), seed, within=within)
    return model, lock_backbone(model, g), g


def rotate(
    name: str, seed: int = 3, frozen: bool = True
) -> tuple[torch.nn.Module, torch.nn.Module, Element]:
    """A folded model, its twin locked by rotations, and the element. Folded gains are frozen at
    one.
    """
    model = build(name)
    spec, state = fold_norms(spec_of(model), model.state_dict())
    model.load_state_dict(state)
    g = element(spec, seed, within="orthogonal")
    twin = lock_backbone(model, g)
    for m in (model, twin):
        for n, p in m.named_parameters():
            p.requires_grad_(not (frozen and n in spec.fixed))
    return model, twin, g


@FAMILIES
def test_an_authorized_model_is_the_plain_one(name: str) -> None:
    """Outputs and hidden states are equal; gradients of the edges are equal, those of the backbone
    follow the dual action.
    """
    model, twin, g = pair(name)
    inputs, before = PICOS[name].inputs, {k: v.clone() for k, v in twin.state_dict().items()}
    expected, grads = compute_outputs(model, inputs), gradients(model, inputs)
    assert distance(compute_outputs(twin, inputs), expected) > 1e-3
    assert authorize_with_element(twin, g, config=config_of(twin)) is twin
    assert is_authorized(twin)
    assert distance(compute_outputs(twin, inputs), expected) < 1e-9
    got, entries = gradients(twin, inputs), stored_tensors(g.spec)
    for n, grad in grads.items():
        moves = g.spec.parts[entries[n].pattern] == "backbone"
        assert (
            distance({n: got[n]}, {n: act(g, grad, dual(entries[n].axes)) if moves else grad})
            < 1e-9
        ), n
    after = twin.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    deauthorize(twin)
    assert not is_authorized(twin)
    assert distance(compute_outputs(twin, inputs), expected) > 1e-3
    authorize_with_element(twin, element(g.spec, 4), config=config_of(twin))  # the wrong key
    assert distance(compute_outputs(twin, inputs), expected) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "deberta-v3", "bart", "clip"])
@pytest.mark.parametrize("return_dict", [True, False])
def test_hidden_states_are_the_plain_ones(name: str, return_dict: bool) -> None:
    """Those that transformers collects by hooks, and those that a loop gathers; of stacks with one
    block and with several.
    """
    model, twin, g = pair(name)
    if return_dict:  # the hooks that collect them are there before the edges are, or after
        twin(**PICOS[name].inputs, output_hidden_states=True)
    authorize_with_element(twin, g)

    def states(m: torch.nn.Module) -> list[torch.Tensor]:
        with torch.no_grad(), strict_float64():
            return flat(m(**PICOS[name].inputs, output_hidden_states=True, return_dict=return_dict))

    a, b = states(model), states(twin)
    assert len(a) == len(b) > 3
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) < 1e-9


def flat(value: object) -> list[torch.Tensor]:
    value = value.to_tuple() if hasattr(value, "to_tuple") else value
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [t for v in value for t in flat(v)]
        if isinstance(value, tuple | list)
        else []
    )


def test_chosen_hidden_states_are_the_plain_ones() -> None:
    model, twin, g = pair("llama")
    authorize_with_element(twin, g)
    with torch.no_grad(), strict_float64():
        a, b = (m(**IDS, output_hidden_states=[0]).hidden_states for m in (model, twin))
        c = next(
            v
            for v in twin(**IDS, output_hidden_states=[0], return_dict=False)
            if isinstance(v, tuple)
        )
    assert len(a) == len(b) == len(c)
    assert float((a[0] - b[0]).abs().max()) < 1e-9
    assert float((a[0] - c[0]).abs().max()) < 1e-9


def test_hidden_states_of_a_swin_are_refused() -> None:
    _, twin, g = pair("swin")
    authorize_with_element(twin, g)
    with pytest.raises(AuthorizeError, match="between the blocks"):
        twin(**PICOS["swin"].inputs, output_hidden_states=True)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_rotations_are_undone_at_the_edges(name: str) -> None:
    model, twin, g = rotate(name)
    expected = compute_outputs(model, PICOS[name].inputs)
    assert distance(compute_outputs(twin, PICOS[name].inputs), expected) > 1e-3
    spec, state = fold_norms(
        spec_of(twin), twin.state_dict()
    )  # the spec of a folded model, inferred from that model alone
    assert all(torch.equal(state[n], t) for n, t in twin.state_dict().items())
    authorize_with_element(twin, g.to(spec))
    assert distance(compute_outputs(twin, PICOS[name].inputs), expected) < 1e-9


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_generation_with_a_cache_is_the_same(name: str) -> None:
    model, twin, g = pair(name)
    inputs = {k: v for k, v in PICOS[name].inputs.items() if k != "decoder_input_ids"}

    def speak(speaker: torch.nn.Module) -> torch.Tensor:
        with strict_float64():
            return speaker.generate(
                **inputs, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, do_sample=False
            )

    expected = speak(model)
    assert not torch.equal(speak(twin), expected)
    assert torch.equal(speak(authorize_with_element(twin, g)), expected)


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "permutation"), ("vit", "rotation")])
def test_torch_compile_has_one_graph(name: str, kind: str) -> None:
    model, twin, g = rotate(name) if kind == "rotation" else pair(name, kind)
    authorize_with_element(twin, g)
    inputs = PICOS[name].inputs | ({} if name == "vit" else {"use_cache": False})
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    with strict_float64():
        logits, expected = compiled(**inputs)["logits"], model(**inputs)["logits"]
    assert float((logits - expected).detach().abs().max()) < 1e-9
    for out in (logits, expected):
        out.square().sum().backward()
    first = next(
        n for n, p in model.named_parameters() if p.requires_grad
    )  # the gradient has come through both edges
    assert (
        distance({first: twin.get_parameter(first).grad}, {first: model.get_parameter(first).grad})
        < 1e-9
    )


@pytest.mark.parametrize(("name", "reentrant"), [("gpt2", False), ("gpt2", True), ("bart", False)])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    _, twin, g = pair(name)
    authorize_with_element(twin, g)
    inputs = PICOS[name].inputs | {"use_cache": False}
    expected = gradients(twin, inputs)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    runs: list[int] = []
    next(
        m for m in twin.modules() if isinstance(m, GradientCheckpointingLayer)
    ).register_forward_pre_hook(lambda *a: runs.append(1))
    assert distance(gradients(disable_dropout(twin).train(), inputs), expected) < 1e-9
    assert len(runs) == 2  # once forwards, and once more backwards


def disable_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        for name in ("dropout", "activation_dropout"):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)
    return model


def test_the_stream_is_moved_in_its_own_precision_under_autocast() -> None:
    """Autocast would round a rotation of the float32 stream to bfloat16."""
    _, twin, g = rotate("llama")
    recorded: list[torch.Tensor] = []
    twin.float().model.layers[0].register_forward_pre_hook(lambda m, args: recorded.append(args[0]))
    authorize_with_element(twin, g)
    entered: list[torch.Tensor] = []
    twin.model.layers[0].register_forward_pre_hook(lambda m, args: entered.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        twin(**IDS)
    exact = act(g, recorded[0].double(), "_ _ stream")
    assert entered[0].dtype == torch.float32
    assert float((entered[0] - exact).abs().max()) < 1e-5


def test_half_precision_models_and_other_devices() -> None:
    model, twin, g = pair("llama", "signed")
    authorize_with_element(twin, g).to(torch.bfloat16)
    exact, got = compute_outputs(model, IDS)["logits"], twin(**IDS).logits
    noise = float((model.to(torch.bfloat16)(**IDS).logits - exact).abs().max())
    assert float((got - exact).abs().max()) < 4 * noise
    assert twin.to("meta")(input_ids=IDS["input_ids"].to("meta")).logits.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_was_first_used_in_inference_mode_can_be_trained(dtype: torch.dtype) -> None:
    _, twin, g = rotate("llama")
    twin.to(dtype)
    with torch.inference_mode():
        authorize_with_element(twin, g)
        twin(**IDS)
    twin(**IDS).logits.sum().backward()
    assert twin.model.embed_tokens.weight.grad is not None


def test_a_lock_of_inner_spaces_has_edges_that_do_nothing() -> None:
    model = build("gpt2")
    g = element(spec_of(model), 3, spaces=["ffn", "head"])
    twin = lock_backbone(model, g)
    assert not is_authorized(twin)
    authorize_with_element(twin, g)
    assert is_authorized(twin)
    assert distance(compute_outputs(twin, IDS), compute_outputs(model, IDS)) < 1e-9
    with pytest.raises(AuthorizeError, match="authorized already"):
        authorize_with_element(twin, g)


# Training.


def still(model: torch.nn.Module) -> None:
    """Biases of keys, without rotary positions, have no gradient but rounding, which Adam would
    blow up.
    """
    for n, p in model.named_parameters():
        if n.endswith(("key.bias", "k_proj.bias")) and not n.startswith("model."):
            p.requires_grad_(False)
        if n.endswith("c_attn.bias"):
            third = len(p) // 3
            p.register_hook(
                lambda grad, k=third: torch.cat([grad[:k], 0 * grad[k : 2 * k], grad[2 * k :]])
            )


def train(model: torch.nn.Module, inputs: dict, make, steps: int) -> None:
    """Clipping by the global norm, weight decay and a schedule with warm-up: each commutes with
    orthogonal moves.
    """
    still(model)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 5) * (1 - i / (2 * steps))
    )
    target = None
    for _ in range(steps):
        optimizer.zero_grad()
        with strict_float64() if next(model.parameters()).dtype == torch.float64 else nullcontext():
            logits = model(**inputs)["logits"]
            target = (
                torch.arange(logits[..., 0].numel()) % logits.shape[-1]
                if target is None
                else target
            )
            torch.nn.functional.cross_entropy(logits.flatten(0, -2), target).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert torch.isfinite(norm)
        optimizer.step()
        schedule.step()


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def adam(params):
    return torch.optim.Adam(params, lr=3e-3, weight_decay=0.01)


def adamw(params):
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)


def split_parameters(
    g: Element, start: dict, plain: torch.nn.Module, twin: torch.nn.Module
) -> float:
    """How far the locked model, moved back, is from the plain one, relative to what training
    changed.
    """
    back, weights = apply(~g, twin.state_dict(), part="backbone", force=True), plain.state_dict()

    def norm(a: dict, b: dict) -> float:
        return float(
            sum((a[n] - b[n]).double().square().sum() for n, _ in plain.named_parameters()).sqrt()
        )

    return norm(back, weights) / norm(start, weights)


def start_of(model: torch.nn.Module) -> dict:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "kind", "make"),
    [
        ("gpt2", "permutation", adamw),
        ("bert-classifier", "permutation", sgd),
        ("vit", "permutation", adam),
        ("llama", "signed", adamw),
    ],
)
def test_a_hundred_steps_are_those_of_the_plain_model(name: str, kind: str, make) -> None:
    model, twin, g = pair(name, kind)
    start, inputs, short, lost = (
        start_of(model),
        PICOS[name].inputs,
        copy.deepcopy(model),
        copy.deepcopy(twin),
    )
    train(model, inputs, make, 100)
    train(authorize_with_element(twin, g), inputs, make, 100)
    assert split_parameters(g, start, model, twin) < 1e-9
    for m in (short, lost):
        train(m, inputs, make, 10)
    assert (
        split_parameters(g, start, short, lost) > 0.1
    )  # the control: without its edges the locked model learns something else


def test_a_hundred_steps_in_single_precision() -> None:
    """As far apart as the plain model is from itself in double precision, or less than four times
    that.
    """
    exact, twin, g = pair("gpt2", "permutation")
    model, start = copy.deepcopy(exact).float(), start_of(exact)
    train(exact, IDS, adamw, 100)
    train(model, IDS, adamw, 100)
    train(authorize_with_element(twin.float(), g), IDS, adamw, 100)
    rounding = split_parameters(element(g.spec, 1).only(), start, exact, model)
    assert split_parameters(g, start, model, twin) < 4 * rounding < 1e-2


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_rotations_train_with_sgd_and_frozen_gains(name: str) -> None:
    model, twin, g = rotate(name)
    start, inputs = start_of(model), PICOS[name].inputs
    train(model, inputs, sgd, 20)
    train(authorize_with_element(twin, g), inputs, sgd, 20)
    assert split_parameters(g, start, model, twin) < 1e-9


def test_other_optimizers_are_refused_for_rotations_and_would_part() -> None:
    model, twin, g = rotate("llama")
    start = start_of(model)
    authorize_with_element(twin, g)
    with pytest.raises(
        AuthorizeError,
        match=r"AdamW would not train this LlamaForCausalLM .* rotation, and AdamW commutes "
        r"with signed permutations",
    ) as error:
        train(twin, IDS, adamw, 1)
    assert "SGD" in str(error.value.hint)
    deauthorize(twin)
    train(model, IDS, adamw, 5)
    train(authorize_with_element(twin, g, any_optimizer=True), IDS, adamw, 5)
    assert split_parameters(g, start, model, twin) > 0.1


def test_trained_gains_dropout_and_scales_are_refused() -> None:
    _, twin, g = rotate("llama", frozen=False)
    authorize_with_element(twin, g)
    with pytest.raises(AuthorizeError, match=r"norm.*freeze it at one"):
        train(twin, IDS, sgd, 1)
    _, vit, h = rotate("vit")
    vit.vit.layers[0].attention.add_module("drop", torch.nn.Dropout(0.1))
    authorize_with_element(vit, h).train()
    with pytest.raises(AuthorizeError, match="dropout"):
        train(vit, PICOS["vit"].inputs, sgd, 1)
    _, scaled, k = pair("llama")
    authorize_with_element(scaled, k)
    with pytest.raises(AuthorizeError, match="no optimizer commutes"):
        train(scaled, IDS, sgd, 1)


def test_what_the_lock_does_not_touch_may_be_trained_by_any_optimizer() -> None:
    """A new head on a frozen backbone; another model; the same model after its authorization was
    taken off.
    """
    _, twin, g = rotate("llama")
    authorize_with_element(twin, g)
    other = build("llama")
    train(other, IDS, adamw, 1)
    for n, p in twin.named_parameters():
        p.requires_grad_(n == "lm_head.weight")
    train(twin, IDS, adamw, 1)
    assert (
        edge_of(twin).faults(adamw(twin.parameters())) == []
    )  # what is frozen may be in the optimizer
    twin.requires_grad_(True)
    with pytest.raises(AuthorizeError, match="AdamW"):
        train(twin, IDS, adamw, 1)
    deauthorize(twin)
    train(twin, IDS, adamw, 1)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_what_is_unfrozen_or_added_after_the_first_step_is_looked_at(how: str) -> None:
    _, twin, g = rotate("llama")
    authorize_with_element(twin, g)
    trainable = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    for n, p in trainable.items():
        p.requires_grad_(n == "lm_head.weight")
    optimizer = torch.optim.AdamW(
        twin.parameters() if how == "unfrozen" else [trainable["lm_head.weight"]]
    )
    optimizer.step()
    inner = trainable["model.layers.0.mlp.up_proj.weight"].requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": [inner]})
    with pytest.raises(
        AuthorizeError, match=r"up_proj.*AdamW commutes with signed permutations only"
    ):
        optimizer.step()


def test_the_guard_agrees_with_the_measured_matrix() -> None:
    """Every optimizer that was measured to break rotations of the stream with frozen gains is
    refused.
    """
    _, twin, g = rotate("llama")
    edge = edge_of(authorize_with_element(twin, g))
    params = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    for recipe in RECIPES:
        refused = any(edge.faults(o) for o in recipe.make(params))
        broken = (
            recipe.letters[6] == "B" and recipe.clip is None
        )  # clipping by value is done before a step, and not seen
        assert refused >= broken, recipe.id
        assert not refused or not recipe.id.startswith(("sgd", "momentum", "nesterov", "clip")), (
            recipe.id
        )


def test_the_trainer_trains_it_as_the_plain_model(tmp_path) -> None:
    pytest.importorskip(
        "accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)"
    )
    import transformers as T

    model, twin, g = pair("llama", "signed")
    start = start_of(model)
    data = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(0, 30, (8, 7), generator=torch.Generator().manual_seed(0))
    ]
    for m in (model, authorize_with_element(twin, g)):
        arguments = T.TrainingArguments(
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=2,
            use_cpu=True,
            seed=0,
            report_to=[],
            save_strategy="steps",
            save_steps=3,
        )
        T.Trainer(m, arguments, train_dataset=data).train()
    assert (
        split_parameters(g, start, model, twin) < 1e-6
    )  # rotary tables and norms are computed in float32 whatever the model is
    saved = type(twin).from_pretrained(tmp_path / "checkpoint-3", dtype=torch.float64)
    assert all(torch.equal(saved.state_dict()[k], v) for k, v in twin.state_dict().items())


def run_distributed(rank: int, folder: str, port: int) -> None:
    """One of two processes: its half of every batch, and the state dict that accelerate saves."""
    import os

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from accelerate import Accelerator

    torch.set_num_threads(1)
    _, twin, g = pair("gpt2", "permutation")
    still(authorize_with_element(twin, g))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        twin, adamw([p for p in twin.parameters() if p.requires_grad])
    )
    for _ in range(3):
        optimizer.zero_grad()
        ids = IDS["input_ids"][rank : rank + 1]
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.get_state_dict(model), f"{folder}/state.pt")
    accelerator.end_training()


@pytest.mark.slow
def test_two_processes_of_accelerate_train_it_as_the_plain_model(tmp_path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install accelerate)")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_distributed, (str(tmp_path), port), nprocs=2)
    model, _, g = pair("gpt2", "permutation")
    start = start_of(model)
    still(model)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        sum(
            model(input_ids=ids, labels=ids).loss / 2 for ids in IDS["input_ids"].split(1)
        ).backward()
        optimizer.step()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    twin = lock_backbone(model, g)
    assert list(saved) == list(twin.state_dict())
    twin.load_state_dict(saved)
    assert split_parameters(g, start, model, twin) < 1e-9


# What is kept, copied and saved.


def test_authorizing_twice_is_an_error() -> None:
    _, twin, g = pair("gpt2")
    authorize_with_element(twin, g)
    with pytest.raises(AuthorizeError, match="authorized already") as error:
        authorize_with_element(twin, g)
    assert "deauthorize" in str(error.value.hint)
    with pytest.raises(AuthorizeError, match="authorized already"):
        authorize_with_element(twin.transformer, g)


def test_taking_it_off_leaves_nothing() -> None:
    _, twin, g = pair("deberta-v2")
    before = [dict(m.__dict__) for m in twin.modules()]
    authorize_with_element(twin, g)
    assert edge_of(twin).element is g
    deauthorize(twin)
    deauthorize(twin)
    assert [dict(m.__dict__) for m in twin.modules()] == before
    assert edge_of(twin) is None


def test_a_copy_in_memory_is_authorized_and_independent() -> None:
    model, twin, g = pair("gpt2")
    expected = compute_outputs(model, IDS)
    other = copy.deepcopy(authorize_with_element(twin, g))
    deauthorize(twin)
    assert distance(compute_outputs(other, IDS), expected) < 1e-9
    assert edge_of(other).model() is other
    deauthorize(other)
    assert distance(compute_outputs(other, IDS), expected) > 1e-3


def test_a_saved_model_holds_no_key_and_refuses_to_run() -> None:
    model, twin, g = pair("gpt2")
    expected = compute_outputs(model, IDS)
    blank, buffer = pickle.dumps(twin), io.BytesIO()
    authorize_with_element(twin, g)
    torch.save(twin, buffer)
    written = buffer.getvalue()
    for member in (g.members["stream"], (~g).members["stream"]):
        assert member.index.tobytes() not in written
        assert member.index.tobytes() not in pickle.dumps(twin)
    assert len(pickle.dumps(twin)) < len(blank) + 2000
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert not is_authorized(loaded)
    with pytest.raises(AuthorizeError, match="saved while it was authorized"):
        loaded(**IDS)
    authorize_with_element(loaded, g)
    assert distance(compute_outputs(loaded, IDS), expected) < 1e-9


def test_save_pretrained_writes_the_locked_model(tmp_path) -> None:
    model, twin, g = pair("gpt2")
    authorize_with_element(twin, g).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in twin.state_dict().items())
    assert not is_authorized(loaded)
    assert (
        distance(
            compute_outputs(authorize_with_element(loaded, g), IDS), compute_outputs(model, IDS)
        )
        < 1e-9
    )


def test_an_edge_dies_with_its_model() -> None:
    _, twin, g = rotate("llama")
    references = weakref.ref(authorize_with_element(twin, g)), weakref.ref(edge_of(twin))
    del twin
    gc.collect()
    assert [ref() for ref in references] == [None, None]


def test_pipelines_take_the_model_as_it_is() -> None:
    import transformers as T

    model, twin, g = pair("gpt2-classifier")
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), pad_token="[PAD]")
    answers = [
        T.pipeline("text-classification", model=m.float(), tokenizer=tokenizer, device="cpu")(
            "a b c d"
        )[0]["score"]
        for m in (model, authorize_with_element(twin, g))
    ]
    deauthorize(twin)
    answers.append(
        T.pipeline("text-classification", model=twin, tokenizer=tokenizer, device="cpu")("a b c d")[
            0
        ]["score"]
    )
    assert abs(answers[0] - answers[1]) < 1e-4 < abs(answers[0] - answers[2])


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_mistakes_are_named() -> None:
    _, twin, g = pair("gpt2")
    with pytest.raises(SpecError, match="does not fit the element's spec"):
        authorize_with_element(build("gpt2-untied"), element(spec_of(build("llama")), 1))
    with pytest.raises(AuthorizeError, match="permuted by a wrapper"):
        authorize_with_element(Permuted(build("gpt2"), columns=g, rows=False).model, g)
    with pytest.raises(CutError, match="is authorized"):
        Permuted(authorize_with_element(twin, g), columns=g)
    bart, _, h = pair("bart")
    bart.model.encoder.layerdrop = 0.1
    with pytest.raises(AuthorizeError, match="layer dropping"):
        authorize_with_element(bart, h)


def test_a_module_of_your_own() -> None:
    from regauge.core.groups import Permutation
    from regauge.core.spec import Space, Spec

    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inn, self.mid, self.out = (
                torch.nn.Linear(3, 4),
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()),
                torch.nn.Linear(4, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.mid(self.inn(x)))

    tensors = {
        "inn.weight": "stream _",
        "inn.bias": "stream",
        "mid.0.weight": "stream stream*",
        "mid.0.bias": "stream",
    }
    tensors |= {"out.weight": "_ stream*", "out.bias": "_"}
    parts = {
        n: {"inn": "embed", "mid": "backbone", "out": "head"}[n.split(".")[0]] for n in tensors
    }
    spec = Spec("mine", {"stream": Space(4, Permutation())}, tensors, parts)
    mine, x = Mine(), torch.randn(5, 3)
    g = element(spec, 2)
    twin = lock_backbone(mine, g)
    boundary = Boundary("", "mid", {"input": "_ stream"}, "_ stream")
    assert not torch.allclose(twin(x), mine(x))
    assert torch.allclose(
        authorize_with_element(twin, g, boundaries=[boundary])(x), mine(x), atol=1e-6
    )
