"""A server's weights and checkpoint under faulty numbers, faulty clients and damaged files."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from regauge.errors import CheckpointError
from regauge.split import Host, InProcess, Training, connect
from regauge.split.frames import Frame, Kind, RefusedError, decode, encode
from regauge.split.master_weights import MasterOptimizer, are_finite, are_usable
from splits import ADAMW, batch, made, optimizer_of, same, train

HALF = [torch.float16, torch.bfloat16]
SESSION = "0" * 32


def tensors_of(host: Host) -> list[torch.Tensor]:
    learner = host.main
    moments = [t for _, entries in sorted(learner.moments().items()) for _, t in sorted(entries.items())]
    return [*learner.names.values(), *learner.masters.values(), *moments]


def snapshot_of(host: Host) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors_of(host)]


def unchanged(host: Host, before: list[torch.Tensor]) -> bool:
    now = tensors_of(host)
    return len(now) == len(before) and all(map(torch.equal, now, before))


# Half precision


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_half_precision_backbone_trains_near_float32(tmp_path: Path, dtype: torch.dtype, optimizer: str) -> None:
    """Steps are smaller than the spacing of the half-precision weights, and must add up all the same."""
    options = Training(optimizer, rate=1e-4 if optimizer != "sgd" else 1e-3)
    moved: list[dict[str, torch.Tensor]] = []
    for kind in (dtype, torch.float32):
        start = made("gpt2").to(dtype).to(kind)  # both from the same numbers
        host = Host(start, options, folder=tmp_path / str(kind))
        first = {n: m.detach().clone() for n, m in host.main.masters.items()}
        mine = made("gpt2").to(dtype).to(kind)
        with connect(mine, InProcess(host)):
            for step in range(8):  # of the server alone: the client's parts stay as they are
                mine(**batch("gpt2", step, kind)).loss.backward()
        host.keep()
        assert host.step == 8
        assert are_finite(tensors_of(host))
        assert all(m.dtype == torch.float32 for m in host.main.masters.values())
        assert all(t.dtype == kind for t in host.backbone().values())
        moved.append({n: m.detach() - first[n] for n, m in host.main.masters.items()})
        again = Host(made("gpt2").to(kind), options, folder=tmp_path / str(kind))
        assert unchanged(again, snapshot_of(host))
    half, full = (torch.cat([t.flatten() for n, t in sorted(m.items()) if "c_attn.bias" not in n]) for m in moved)
    assert float((half - full).norm() / full.norm()) < (0.05 if dtype is torch.float16 else 0.3)


def test_a_plain_optimizer_in_float16_is_the_negative_control() -> None:
    """Without master weights one step of AdamW leaves NaN: eps is zero in float16."""
    mine = made("gpt2").half()
    mine(**batch("gpt2", 0, torch.float16)).loss.backward()
    torch.optim.AdamW(mine.parameters(), 1e-3).step()
    assert not are_finite(mine.parameters())


def test_float32_and_float64_have_no_copies_and_step_as_torch_does() -> None:
    for dtype in (torch.float32, torch.float64):
        a, b = made("gpt2", dtype), made("gpt2", dtype)
        options = Training("adamw", 1e-2, clip=0.1, decay=0.1, schedule="linear", steps=9)
        own, plain = MasterOptimizer(options, dict(a.named_parameters())), options.build(b.parameters())
        assert all(own.masters[n] is p for n, p in a.named_parameters())
        for step in range(3):
            for model in (a, b):
                model(**batch("gpt2", step, dtype)).loss.backward()
            own.step(step)
            torch.nn.utils.clip_grad_norm_(b.parameters(), 0.1)
            plain.param_groups[0]["lr"] = options.rate_at(step)
            plain.step()
            plain.zero_grad()
        assert same(a.state_dict(), b.state_dict())


# Steps that are not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_that_is_not_finite_is_undone_exactly(tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """The weights would leave the range of their dtype."""
    host = Host(made("gpt2", dtype), Training("sgd", rate=3e38 if dtype is torch.float32 else 1e8, momentum=0.9), folder=tmp_path, every=1)
    mine = made("gpt2", dtype)
    with connect(mine, InProcess(host)) as link:
        before, path = snapshot_of(host), tmp_path / "split.safetensors"
        with caplog.at_level(logging.WARNING, "regauge.split"), pytest.raises(RefusedError, match="must leave finite weights") as error:
            (mine(**batch("gpt2", 0, dtype)).loss * 1e3).backward()
        assert error.value.code == "nonfinite"
        assert error.value.hint
        assert "a step was undone" in caplog.text
        assert unchanged(host, before)
        assert (host.step, host.main.step, host.main.waiting, host.main.gradients()) == (0, 0, 0, {})
        assert not path.exists()
        host.training = host.main.training = host.main.optimizer.training = Training("sgd", rate=1e-3, momentum=0.9)  # type: ignore[union-attr]
        mine(**batch("gpt2", 1, dtype)).loss.backward()  # the session goes on
        assert link.log.greet()["done"] == 3  # two forward passes and a backward pass
    assert host.step == 1
    assert not unchanged(host, before)
    assert are_finite(tensors_of(host))


def test_gradients_that_wait_for_a_step_are_dropped_with_it_also_after_a_restart(tmp_path: Path) -> None:
    """One client's huge gradient does not block the steps of all others."""
    options = Training("sgd", rate=100.0, accumulate=2)
    host = Host(made("gpt2", torch.float16), options, folder=tmp_path, every=1000)
    models = [made("gpt2", torch.float16) for _ in range(2)]
    links = [connect(m, InProcess(host, peer)) for m, peer in zip(models, ("mallory", "ann"), strict=True)]
    before = snapshot_of(host)
    (models[0](**batch("gpt2", 0, torch.float16)).loss * 1.5e4).backward()
    assert host.main.gradients()
    with pytest.raises(RefusedError, match="must leave finite weights"):
        models[1](**batch("gpt2", 1, torch.float16)).loss.backward()
    for server in (host, Host(made("gpt2", torch.float16), options, folder=tmp_path)):
        assert (server.main.gradients(), server.main.waiting, server.step) == ({}, 0, 0)
        assert unchanged(server, before)
    models[1](**batch("gpt2", 2, torch.float16)).loss.backward()
    models[1](**batch("gpt2", 3, torch.float16)).loss.backward()
    assert host.step == 1  # negative control: honest gradients are taken
    for link in links:
        link.close()


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("a kernel failed")])
def test_a_step_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    host = Host(made("gpt2"), ADAMW)
    mine, calm, other = made("gpt2"), made("gpt2"), Host(made("gpt2"), ADAMW)
    with connect(mine, InProcess(host)), connect(calm, InProcess(other)):
        train("gpt2", mine, optimizer_of(mine), range(2))
        train("gpt2", calm, optimizer_of(calm), range(2))
        before, optimizer = snapshot_of(host), host.main.optimizer
        assert optimizer is not None

        def broken() -> None:
            with torch.no_grad():
                next(iter(host.main.masters.values())).add_(1.0)
            next(iter(optimizer.optimizer.state.values()))["exp_avg"].add_(1.0)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(optimizer.optimizer, "step", broken)
            with pytest.raises(RefusedError, match="could not compute"):
                mine(**batch("gpt2", 2)).loss.backward()
        assert unchanged(host, before)
        for model in (mine, calm):
            model(**batch("gpt2", 3)).loss.backward()
    assert host.step == other.step == 3
    assert same(host.backbone(), other.backbone())


def test_nothing_that_is_not_finite_is_written(tmp_path: Path) -> None:
    host = Host(made("gpt2"), ADAMW, folder=tmp_path)
    host.keep()
    good = (tmp_path / "split.safetensors").read_bytes()
    with torch.no_grad():
        next(iter(host.main.names.values())).view(-1)[0] = math.nan
    with pytest.raises(CheckpointError, match="hold NaN or Inf"):
        host.keep()
    with pytest.raises(CheckpointError, match="hold NaN or Inf"):
        host.backbone()
    assert (tmp_path / "split.safetensors").read_bytes() == good
    broken = made("gpt2")
    with torch.no_grad():
        broken.transformer.h[0].ln_1.weight[0] = math.inf
    with pytest.raises(CheckpointError, match="hold NaN or Inf"):
        Host(broken, ADAMW)


def test_the_finiteness_check_is_exact() -> None:
    big = torch.full((4000,), 3e38)  # its norm overflows, and it is finite
    assert are_finite([big, torch.zeros(0), torch.ones(2, dtype=torch.int64), torch.full((9,), 6e4, dtype=torch.float16)])
    assert not are_usable([big])
    assert are_usable([torch.full((4000,), 1.8e19)])
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            tensor = torch.zeros(1000, dtype=dtype)
            tensor[777] = bad
            assert not are_finite([big, tensor])
            assert not are_usable([tensor])


# Steps that are none


def asked(host: Host, frame: Frame, peer: str = "") -> Frame:
    return decode(b"".join([InProcess(host, peer).exchange(encode(frame))]))


def test_a_step_without_gradients_does_not_count(tmp_path: Path) -> None:
    options = Training("adamw", 1e-2, schedule="linear", steps=10)
    host, mine = Host(made("gpt2"), options, folder=tmp_path, every=1), made("gpt2")
    with connect(mine, InProcess(host)) as link:
        session = str(link.told["session"])
        for _ in range(20):
            reply = asked(host, Frame(Kind.STEP, 1, {"session": session}))
            assert (reply.kind, reply.values["code"]) == (Kind.ERROR, "empty")
        assert (host.step, host.main.step, host.main.waiting, host.sessions[session].done) == (0, 0, 0, 0)
        assert not (tmp_path / "split.safetensors").exists()
        train("gpt2", mine, optimizer_of(mine), range(1))
        assert asked(host, Frame(Kind.STEP, 3, {"session": session})).values["code"] == "empty"
        assert host.step == 1
        losses = [mine(**batch("gpt2", step)).loss for step in (1, 2, 3)]  # one stays open: the client ends with STEP
        torch.autograd.backward(losses[:2])
        assert host.requests["step", "ok"] == 1
        assert host.step == 2


def test_a_step_is_not_taken_with_another_clients_gradients() -> None:
    host = Host(made("gpt2"), Training("sgd", 0.1, accumulate=2))
    mine = made("gpt2")
    with connect(mine, InProcess(host, "ann")), connect(made("gpt2"), InProcess(host, "mallory")) as other:
        mine(**batch("gpt2", 0)).loss.backward()
        before = snapshot_of(host)
        reply = asked(host, Frame(Kind.STEP, 1, {"session": other.told["session"]}), "mallory")
        assert reply.values["code"] == "empty"
        assert (host.step, host.main.waiting) == (0, 1)
        assert unchanged(host, before)


def test_whose_gradients_went_with_anothers_step_is_answered_and_not_counted() -> None:
    """Ann has gone back through one of two passes when bob's step takes her gradient along: her own STEP is honest, and has nothing left to do."""
    host = Host(made("gpt2"), Training("sgd", 0.1))
    ann, bob = made("gpt2"), made("gpt2")
    with connect(ann, InProcess(host, "ann")) as link, connect(bob, InProcess(host, "bob")):
        losses = [ann(**batch("gpt2", step)).loss for step in (0, 1)]
        link._stepped = lambda: None  # type: ignore[method-assign]  # sent by hand below
        losses[0].backward()
        bob(**batch("gpt2", 2)).loss.backward()
        assert host.step == 1
        frame = Frame(Kind.STEP, 4, {"session": link.told["session"]})
        replies = [asked(host, frame, "ann") for _ in range(2)]
        assert [r.kind for r in replies] == [Kind.ACKNOWLEDGE] * 2
        assert (host.step, host.main.step) == (1, 1)
