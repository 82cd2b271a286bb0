"""A server's weights and checkpoint under faulty numbers, faulty clients and damaged files."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.errors import CheckpointError, RefusedError
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.split.master_weights import MasterOptimizer, are_finite, are_usable
from regauge.split.protocol.frames import Frame, Kind, decode, encode
from regauge.split.server import checkpoint
from support.split_pairs import ADAMW, batch, make_model, optimizer_of, same, train

HALF = [torch.float16, torch.bfloat16]
SESSION = "0" * 32


def tensors_of(host: Host) -> list[torch.Tensor]:
    learner = host.main
    moments = [
        t for _, entries in sorted(learner.moments().items()) for _, t in sorted(entries.items())
    ]
    return [*learner.parameters.values(), *learner.masters.values(), *moments]


def snapshot_of(host: Host) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors_of(host)]


def is_unchanged(host: Host, before: list[torch.Tensor]) -> bool:
    now = tensors_of(host)
    return len(now) == len(before) and all(map(torch.equal, now, before))


# Half precision


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_half_precision_backbone_trains_near_float32(
    tmp_path: Path, dtype: torch.dtype, optimizer: str
) -> None:
    """Steps are smaller than the spacing of the half-precision weights, and must add up all the
    same.
    """
    options = OptimizerConfig(optimizer, lr=1e-4 if optimizer != "sgd" else 1e-3)
    moved: list[dict[str, torch.Tensor]] = []
    for kind in (dtype, torch.float32):
        start = make_model("gpt2").to(dtype).to(kind)  # both from the same numbers
        host = Host(start, options, folder=tmp_path / str(kind))
        first = {n: m.detach().clone() for n, m in host.main.masters.items()}
        mine = make_model("gpt2").to(dtype).to(kind)
        with connect(mine, InProcess(host)):
            for step in range(8):  # of the server alone: the client's parts stay as they are
                mine(**batch("gpt2", step, kind)).loss.backward()
        host.save()
        assert host.step == 8
        assert are_finite(tensors_of(host))
        assert all(m.dtype == torch.float32 for m in host.main.masters.values())
        assert all(t.dtype == kind for t in host.backbone().values())
        moved.append({n: m.detach() - first[n] for n, m in host.main.masters.items()})
        again = Host(make_model("gpt2").to(kind), options, folder=tmp_path / str(kind))
        assert is_unchanged(again, snapshot_of(host))
    half, full = (
        torch.cat([t.flatten() for n, t in sorted(m.items()) if "c_attn.bias" not in n])
        for m in moved
    )
    assert float((half - full).norm() / full.norm()) < (0.05 if dtype is torch.float16 else 0.3)


def test_a_plain_optimizer_in_float16_is_the_negative_control() -> None:
    """Without master weights one step of AdamW leaves NaN: eps is zero in float16."""
    mine = make_model("gpt2").half()
    mine(**batch("gpt2", 0, torch.float16)).loss.backward()
    torch.optim.AdamW(mine.parameters(), 1e-3).step()
    assert not are_finite(mine.parameters())


def test_float32_and_float64_have_no_copies_and_step_as_torch_does() -> None:
    for dtype in (torch.float32, torch.float64):
        a, b = make_model("gpt2", dtype), make_model("gpt2", dtype)
        options = OptimizerConfig(
            "adamw", 1e-2, clip=0.1, weight_decay=0.1, schedule="linear", steps=9
        )
        own, plain = (
            MasterOptimizer(options, dict(a.named_parameters())),
            options.build(b.parameters()),
        )
        assert all(own.masters[n] is p for n, p in a.named_parameters())
        for step in range(3):
            for model in (a, b):
                model(**batch("gpt2", step, dtype)).loss.backward()
            own.step(step)
            torch.nn.utils.clip_grad_norm_(b.parameters(), 0.1)
            plain.param_groups[0]["lr"] = options.lr_at(step)
            plain.step()
            plain.zero_grad()
        assert same(a.state_dict(), b.state_dict())


# Steps that are not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_that_is_not_finite_is_undone_exactly(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights would leave the range of their dtype."""
    host = Host(
        make_model("gpt2", dtype),
        OptimizerConfig("sgd", lr=3e38 if dtype is torch.float32 else 1e8, momentum=0.9),
        folder=tmp_path,
        save_every=1,
    )
    mine = make_model("gpt2", dtype)
    with connect(mine, InProcess(host)) as link:
        before, path = snapshot_of(host), tmp_path / "split.safetensors"
        with (
            caplog.at_level(logging.WARNING, "regauge.split"),
            pytest.raises(RefusedError, match="must leave finite weights") as error,
        ):
            (mine(**batch("gpt2", 0, dtype)).loss * 1e3).backward()
        assert error.value.code == "nonfinite"
        assert error.value.hint
        assert "a step was rolled back" in caplog.text
        assert is_unchanged(host, before)
        assert (host.step, host.main.step, host.main.losses_since_step, host.main.gradients()) == (
            0,
            0,
            0,
            {},
        )
        assert not path.exists()
        host.training = host.main.training = host.main.optimizer.training = OptimizerConfig(
            "sgd", lr=1e-3, momentum=0.9
        )  # type: ignore[union-attr]
        mine(**batch("gpt2", 1, dtype)).loss.backward()  # the session goes on
        assert link.log.handshake()["done"] == 3  # two forward passes and a backward pass
    assert host.step == 1
    assert not is_unchanged(host, before)
    assert are_finite(tensors_of(host))


def test_gradients_that_wait_for_a_step_are_dropped_with_it_also_after_a_restart(
    tmp_path: Path,
) -> None:
    """One client's huge gradient does not block the steps of all others."""
    options = OptimizerConfig("sgd", lr=100.0, accumulate=2)
    host = Host(make_model("gpt2", torch.float16), options, folder=tmp_path, save_every=1000)
    models = [make_model("gpt2", torch.float16) for _ in range(2)]
    links = [
        connect(m, InProcess(host, peer))
        for m, peer in zip(models, ("mallory", "ann"), strict=True)
    ]
    before = snapshot_of(host)
    (models[0](**batch("gpt2", 0, torch.float16)).loss * 1.5e4).backward()
    assert host.main.gradients()
    with pytest.raises(RefusedError, match="must leave finite weights"):
        models[1](**batch("gpt2", 1, torch.float16)).loss.backward()
    for server in (host, Host(make_model("gpt2", torch.float16), options, folder=tmp_path)):
        assert (server.main.gradients(), server.main.losses_since_step, server.step) == ({}, 0, 0)
        assert is_unchanged(server, before)
    models[1](**batch("gpt2", 2, torch.float16)).loss.backward()
    models[1](**batch("gpt2", 3, torch.float16)).loss.backward()
    assert host.step == 1  # negative control: honest gradients are taken
    for link in links:
        link.close()


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("a kernel failed")])
def test_a_step_that_fails_half_way_is_undone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    host = Host(make_model("gpt2"), ADAMW)
    mine, calm, other = make_model("gpt2"), make_model("gpt2"), Host(make_model("gpt2"), ADAMW)
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
        assert is_unchanged(host, before)
        for model in (mine, calm):
            model(**batch("gpt2", 3)).loss.backward()
    assert host.step == other.step == 3
    assert same(host.backbone(), other.backbone())


def test_nothing_that_is_not_finite_is_written(tmp_path: Path) -> None:
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    host.save()
    good = (tmp_path / "split.safetensors").read_bytes()
    with torch.no_grad():
        next(iter(host.main.parameters.values())).view(-1)[0] = math.nan
    with pytest.raises(CheckpointError, match="must be finite"):
        host.save()
    with pytest.raises(CheckpointError, match="must be finite"):
        host.backbone()
    assert (tmp_path / "split.safetensors").read_bytes() == good
    broken = make_model("gpt2")
    with torch.no_grad():
        broken.transformer.h[0].ln_1.weight[0] = math.inf
    with pytest.raises(CheckpointError, match="must be finite"):
        Host(broken, ADAMW)


def test_the_finiteness_check_is_exact() -> None:
    big = torch.full((4000,), 3e38)  # its norm overflows, and it is finite
    assert are_finite(
        [
            big,
            torch.zeros(0),
            torch.ones(2, dtype=torch.int64),
            torch.full((9,), 6e4, dtype=torch.float16),
        ]
    )
    assert not are_usable([big])
    assert are_usable([torch.full((4000,), 1.8e19)])
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            tensor = torch.zeros(1000, dtype=dtype)
            tensor[777] = bad
            assert not are_finite([big, tensor])
            assert not are_usable([tensor])


# Invalid steps


def exchange(host: Host, frame: Frame, peer: str = "") -> Frame:
    return decode(b"".join([InProcess(host, peer).exchange(encode(frame))]))


def test_a_step_without_gradients_does_not_count(tmp_path: Path) -> None:
    options = OptimizerConfig("adamw", 1e-2, schedule="linear", steps=10)
    host, mine = (
        Host(make_model("gpt2"), options, folder=tmp_path, save_every=1),
        make_model("gpt2"),
    )
    with connect(mine, InProcess(host)) as link:
        session = str(link.server_info["session"])
        for _ in range(20):
            reply = exchange(host, Frame(Kind.STEP, 1, {"session": session}))
            assert (reply.kind, reply.values["code"]) == (Kind.ERROR, "empty")
        assert (
            host.step,
            host.main.step,
            host.main.losses_since_step,
            host.sessions[session].done,
        ) == (
            0,
            0,
            0,
            0,
        )
        assert not (tmp_path / "split.safetensors").exists()
        train("gpt2", mine, optimizer_of(mine), range(1))
        assert exchange(host, Frame(Kind.STEP, 3, {"session": session})).values["code"] == "empty"
        assert host.step == 1
        losses = [
            mine(**batch("gpt2", step)).loss for step in (1, 2, 3)
        ]  # one stays open: the client ends with STEP
        torch.autograd.backward(losses[:2])
        assert host.requests["step", "ok"] == 1
        assert host.step == 2


def test_a_step_is_not_taken_with_another_clients_gradients() -> None:
    host = Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1, accumulate=2))
    mine = make_model("gpt2")
    with (
        connect(mine, InProcess(host, "ann")),
        connect(make_model("gpt2"), InProcess(host, "mallory")) as other,
    ):
        mine(**batch("gpt2", 0)).loss.backward()
        before = snapshot_of(host)
        reply = exchange(
            host, Frame(Kind.STEP, 1, {"session": other.server_info["session"]}), "mallory"
        )
        assert reply.values["code"] == "empty"
        assert (host.step, host.main.losses_since_step) == (0, 1)
        assert is_unchanged(host, before)


def test_whose_gradients_went_with_anothers_step_is_answered_and_not_counted() -> None:
    """Ann has gone back through one of two passes when bob's step takes her gradient along: her own
    STEP is honest, and has nothing left to do.
    """
    host = Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1))
    ann, bob = make_model("gpt2"), make_model("gpt2")
    with connect(ann, InProcess(host, "ann")) as link, connect(bob, InProcess(host, "bob")):
        losses = [ann(**batch("gpt2", step)).loss for step in (0, 1)]
        link._send_step = lambda: None  # type: ignore[method-assign]  # sent by hand below
        losses[0].backward()
        bob(**batch("gpt2", 2)).loss.backward()
        assert host.step == 1
        frame = Frame(Kind.STEP, 4, {"session": link.server_info["session"]})
        replies = [exchange(host, frame, "ann") for _ in range(2)]
        assert [r.kind for r in replies] == [Kind.ACKNOWLEDGE] * 2
        assert (host.step, host.main.step) == (1, 1)


# Clients that are revoked


def test_a_revoked_client_is_cut_off_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("grpc")
    from regauge.split.protocol.certificates import make_certificates
    from regauge.split.server import client_list
    from regauge.split.server.network import Grpc, Server

    monkeypatch.setattr(client_list, "POLL_SECONDS", 0.02)
    tls = make_certificates(tmp_path / "certs", clients=("ann", "bob"))
    path = tmp_path / "clients.txt"
    path.write_text("ann\nbob sessions=3\n")
    listed = client_list.ClientFile(path)
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path / "kept", save_every=1000)
    models = {name: make_model("gpt2") for name in ("ann", "bob")}
    with (
        caplog.at_level(logging.WARNING, "regauge.split"),
        Server(host, tls=tls["server"], clients=listed) as server,
        Grpc(f"localhost:{server.port}", tls=tls["ann"]) as ann,
        Grpc(f"localhost:{server.port}", tls=tls["bob"]) as bob,
        connect(models["ann"], ann),
        connect(models["bob"], bob, patience=20.0),
    ):
        for name in models:
            train("gpt2", models[name], optimizer_of(models[name]), range(1))
        assert (host.step, server.streams, listed.quotas["bob"].sessions) == (2, 2, 3)
        loss = models["bob"](**batch("gpt2", 1)).loss  # a pass is open
        for bad in (b"\xff\xfe", b"", b"ann\nann\n", b"ann speed=9\n"):
            path.write_bytes(bad)
            wait_for(lambda: caplog.text.count("was not reloaded") > 0)
            caplog.clear()
        path.unlink()
        wait_for(lambda: caplog.text.count("was not reloaded") > 0)
        assert sorted(s.peer for s in host.sessions.values()) == ["ann", "bob"]
        path.write_text("ann requests=900\n")
        wait_for(lambda: "no longer listed: bob" in caplog.text and server.streams == 1)
        assert [s.peer for s in host.sessions.values()] == ["ann"]
        assert host.quotas.for_client("ann").requests == 900
        with pytest.raises(RefusedError, match="not on the server's list") as error:
            loss.backward()
        assert error.value.code == "client"
        train("gpt2", models["ann"], optimizer_of(models["ann"]), range(1, 2))
        assert host.step == 3
        path.write_text("ann\nbob\n")  # listed again: a new session, and the old one stays ended
        wait_for(lambda: host.clients == {"ann", "bob"})
        with pytest.raises(RefusedError, match="session has ended"):
            train("gpt2", models["bob"], optimizer_of(models["bob"]), range(1))
        with connect(make_model("gpt2"), bob) as again:
            assert again.server_info["done"] == 0
    assert [
        s.peer for s in Host(make_model("gpt2"), ADAMW, folder=tmp_path / "kept").sessions.values()
    ].count("bob") == 1


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_request_that_waited_while_its_client_was_revoked_is_refused() -> None:
    host, mine = Host(make_model("gpt2"), ADAMW, average=2), make_model("gpt2")
    with (
        connect(mine, InProcess(host, "mallory")) as link,
        connect(make_model("gpt2"), InProcess(host, "ann")) as other,
    ):
        train("gpt2", mine, optimizer_of(mine), range(1))
        before = host.backbone()
        host.clients = frozenset({"ann"})
        assert host.end_unlisted() == ["mallory"]
        for frame in (
            Frame(Kind.HELLO, 0, link.log.hello),
            Frame(Kind.STEP, 3, {"session": link.server_info["session"]}),
        ):
            assert exchange(host, frame, "mallory").values["code"] == "client"
        assert exchange(host, Frame(Kind.HELLO, 0, other.log.hello), "ann").kind is Kind.WELCOME
        assert not host.rounds.departed  # what it trained in this round is not averaged
        assert not same(host.backbone(), before)
        assert same(host.backbone(), Host(make_model("gpt2"), ADAMW).backbone())


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    from regauge.errors import KeyFileError
    from regauge.split.protocol.certificates import make_certificates

    tls = make_certificates(tmp_path)
    for name in ("server", "client"):
        tls[name].read()
        for mode in (0o644, 0o640, 0o604):
            tls[name].key.chmod(mode)
            with pytest.raises(
                KeyFileError, match=f"can be read by others \\(mode {mode:04o}\\)"
            ) as error:
                tls[name].read()
            assert "chmod 600" in (error.value.hint or "")
        tls[name].key.chmod(0o400)
        tls[name].read()


# Settings, replays and memory of sessions


def test_a_handshake_does_not_change_how_the_server_trains() -> None:
    host, mine, calm, other = (
        Host(make_model("gpt2"), ADAMW),
        make_model("gpt2"),
        make_model("gpt2"),
        Host(make_model("gpt2"), ADAMW),
    )
    with connect(mine, InProcess(host)) as link, connect(calm, InProcess(other)):
        train("gpt2", mine, optimizer_of(mine), range(1))
        hostile = {
            "rate": 1e9,
            "optimizer": "sgd",
            "accumulate": 0,
            "clip": 0.0,
            "steps": 1,
            "trains": False,
            "step": 10**9,
            "done": 99,
        }
        reply = exchange(host, Frame(Kind.HELLO, 0, {**link.log.hello, **hostile}))
        assert reply.kind is Kind.WELCOME
        assert {k: reply.values[k] for k in ADAMW.to_dict()} == ADAMW.to_dict()
        train("gpt2", mine, optimizer_of(mine), range(1, 3))
        train("gpt2", calm, optimizer_of(calm), range(1))
        train("gpt2", calm, optimizer_of(calm), range(1, 3))
    assert same(host.backbone(), other.backbone())


def test_clients_cannot_evict_the_ended_sessions_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise requests of that session, sent again, would be applied a second time."""
    from regauge.split.server import host as module

    monkeypatch.setattr(module, "_MAX_ENDED_SESSIONS", 4)
    host, mine = Host(make_model("gpt2"), ADAMW, max_sessions=2), make_model("gpt2")
    link = connect(mine, InProcess(host, "ann"))
    with link:
        train("gpt2", mine, optimizer_of(mine), range(1))
        link.end()
    for _ in range(8):
        model = make_model("gpt2")
        with connect(model, InProcess(host, "mallory")) as hostile:
            train("gpt2", model, optimizer_of(model), range(1))
            hostile.end()
    assert len(host.ended_sessions) == 4
    assert exchange(host, Frame(Kind.HELLO, 0, link.log.hello), "ann").values["code"] == "ended"


# Damaged checkpoints


def trained_folder(folder: Path, **more: Any) -> Path:
    """A checkpoint with moments, waiting gradients, an open pass and an ended session."""
    host = Host(
        make_model("gpt2"), OptimizerConfig("adamw", 1e-2, accumulate=2), folder=folder, **more
    )
    mine, gone = make_model("gpt2"), make_model("gpt2")
    with connect(gone, InProcess(host, "bob")) as link:
        train("gpt2", gone, optimizer_of(gone), range(2))
        link.end()
    with connect(mine, InProcess(host, "ann")):
        train("gpt2", mine, optimizer_of(mine), range(3))
        mine(**batch("gpt2", 9))
        loss = mine(**batch("gpt2", 9)).loss
        host.save()
        del loss
    return folder / "split.safetensors"


OPTIONS = OptimizerConfig("adamw", 1e-2, accumulate=2)
WEIGHT = "weight/transformer.h.0.ln_1.weight"
MOMENT = "optimizer/transformer.h.0.ln_1.weight/exp_avg_sq"


def _about(
    change: Callable[[dict[str, Any]], object],
) -> Callable[[dict[str, torch.Tensor], dict[str, str]], object]:
    def apply(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        about = json.loads(metadata["about"])
        change(about)
        metadata["about"] = json.dumps(about)

    return apply


def _first(about: dict[str, Any]) -> dict[str, Any]:
    return next(iter(about["sessions"].values()))


DAMAGE: dict[str, Callable[[dict[str, torch.Tensor], dict[str, str]], object]] = {
    "a weight is missing": lambda t, m: t.pop(WEIGHT),
    "a weight is broadcast": lambda t, m: t.update({WEIGHT: torch.ones(1, dtype=torch.float64)}),
    "a weight has another dtype": lambda t, m: t.update({WEIGHT: t[WEIGHT].float()}),
    "a weight is NaN": lambda t, m: t[WEIGHT].fill_(math.nan),
    "an unexpected weight": lambda t, m: t.update({"weight/stranger": t[WEIGHT]}),
    "an unexpected kind": lambda t, m: t.update({"stranger/x": t[WEIGHT]}),
    "a moment without a parameter": lambda t, m: t.update({"optimizer/x/exp_avg": t[WEIGHT]}),
    "a moment is missing": lambda t, m: t.pop(MOMENT),
    "a moment is negative": lambda t, m: t[MOMENT].fill_(-1.0),
    "a moment is Inf": lambda t, m: t[MOMENT].fill_(math.inf),
    "a moment has another shape": lambda t, m: t.update({MOMENT: t[MOMENT][:2]}),
    "a gradient has another shape": lambda t, m: t.update(
        {"gradient/transformer.h.0.ln_1.weight": torch.ones(3)}
    ),
    "a frame is cut": lambda t, m: t.update(
        {k: v[:-1].clone() for k, v in t.items() if k.endswith("/reply")}
    ),
    "a frame that is not bytes": lambda t, m: t.update(
        {k: v.double() for k, v in t.items() if k.startswith("frame/")}
    ),
    "a frame without a session": lambda t, m: t.update(
        {"frame/x/1": torch.zeros(4, dtype=torch.uint8)}
    ),
    "a copy without a client": _about(lambda a: a["copies"].update(x=[1, 1, 1])),
    "a step is negative": _about(lambda a: a.update(step=-1)),
    "a step is a text": _about(lambda a: a.update(step="1")),
    "steps are too few": _about(lambda a: a.update(main=[1, 1])),
    "sessions are a list": _about(lambda a: a.update(sessions=[])),
    "a session is a list": _about(lambda a: a["sessions"].update({"0" * 32: []})),
    "a session's name": _about(lambda a: a["sessions"].update({"../x": _first(a)})),
    "a session's codec": _about(lambda a: _first(a).update(codec="zip")),
    "a session's limits": _about(lambda a: _first(a).update(limits=[1, 2])),
    "a session's number": _about(lambda a: _first(a).update(done=1.5)),
    "a session's flag": _about(lambda a: _first(a).update(has_gradients="no")),
    "gone is a number": _about(lambda a: a.update(gone=3)),
    "the digest is missing": _about(lambda a: a.pop("digest")),
    "about that is not JSON": lambda t, m: m.update(about="{"),
    "about is too deep": lambda t, m: m.update(about="[" * 100_000),
    "about is a list": lambda t, m: m.update(about="[]"),
    "about is missing": lambda t, m: m.pop("about"),
}


@pytest.fixture(scope="module")
def save_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_a_typed_error(save_host: Path, tmp_path: Path, how: str) -> None:
    """Damage with a valid checksum, as a faulty writer would leave it."""
    tensors, metadata = read_tensors(save_host, "split", 2)
    write_tensors(tmp_path / "split.safetensors", tensors, metadata)
    assert Host(make_model("gpt2"), OPTIONS, folder=tmp_path).step == 2  # negative control
    DAMAGE[how](tensors, metadata)
    write_tensors(tmp_path / "split.safetensors", tensors, metadata)
    data, model = (tmp_path / "split.safetensors").read_bytes(), make_model("gpt2")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        Host(model, OPTIONS, folder=tmp_path)
    assert error.value.hint
    assert same(model.state_dict(), before)
    assert (tmp_path / "split.safetensors").read_bytes() == data


@pytest.mark.parametrize("at", [0.001, 0.3, 0.6, 0.999])
def test_a_flipped_bit_or_a_cut_file_is_found(save_host: Path, tmp_path: Path, at: float) -> None:
    data = bytearray(save_host.read_bytes())
    (tmp_path / "split.safetensors").write_bytes(data[: int(at * len(data))])
    with pytest.raises(CheckpointError):
        Host(make_model("gpt2"), OPTIONS, folder=tmp_path)
    data[int(at * len(data))] ^= 1
    (tmp_path / "split.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        Host(make_model("gpt2"), OPTIONS, folder=tmp_path)


def test_a_server_that_only_serves_for_a_while_loses_no_training_state(
    save_host: Path, tmp_path: Path
) -> None:
    (tmp_path / "split.safetensors").write_bytes(save_host.read_bytes())
    Host(make_model("gpt2"), folder=tmp_path).save()
    a, b = (
        Host(make_model("gpt2"), OPTIONS, folder=folder) for folder in (save_host.parent, tmp_path)
    )
    assert a.main.moments()
    assert is_unchanged(b, snapshot_of(a))
    assert same(a.main.gradients(), b.main.gradients())
    with pytest.raises(CheckpointError, match="was trained with adamw"):
        Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1), folder=tmp_path)


def test_a_learner_that_is_copied_has_its_masters(tmp_path: Path) -> None:
    """Copies of a half-precision backbone start from the masters, not from their rounded weights,
    and are saved and averaged in float32.
    """
    host = Host(
        make_model("gpt2", torch.float16), OptimizerConfig("sgd", 1e-3), average=2, folder=tmp_path
    )
    with torch.no_grad():
        for master in host.main.masters.values():
            master.mul_(1 + 1e-5)  # too little for float16
    copy = host.main.copy()
    assert same(
        {n: m.detach() for n, m in copy.masters.items()},
        {n: m.detach() for n, m in host.main.masters.items()},
    )
    mine = make_model("gpt2", torch.float16)
    with connect(mine, InProcess(host)):
        for step in range(3):
            mine(**batch("gpt2", step, torch.float16)).loss.backward()
        host.save()
    again = Host(
        make_model("gpt2", torch.float16), OptimizerConfig("sgd", 1e-3), average=2, folder=tmp_path
    )
    (one,), (other,) = ([s.backbone for s in h.sessions.values()] for h in (host, again))
    assert one is not None
    assert other is not None
    assert same(
        {n: m.detach() for n, m in one.masters.items()},
        {n: m.detach() for n, m in other.masters.items()},
    )
    assert all(t.dtype == torch.float16 for t in again.backbone().values())


def test_a_checkpoint_with_frames_of_the_version_before_is_refused_by_version(
    tmp_path: Path,
) -> None:
    host, mine = Host(make_model("gpt2"), ADAMW, folder=tmp_path), make_model("gpt2")
    with connect(mine, InProcess(host)):
        train("gpt2", mine, optimizer_of(mine), range(2))
        host.save()
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    (reply,) = saved.frames
    old = saved.frames[reply][:4] + b"\x02" + saved.frames[reply][5:]
    checkpoint.save(tmp_path, replace(saved, frames={reply: old}))
    with pytest.raises(CheckpointError, match="another version of regauge") as caught:
        Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    assert "version must be 3, got 2" in str(caught.value)
    checkpoint.save(tmp_path, saved)
    assert Host(make_model("gpt2"), ADAMW, folder=tmp_path).step == 2
