"""`serve`, `connect`, `train`, `predict`, `make_certificates` and `join` from Python, without the
command line.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")

import regauge.split
from regauge.checkpoints.reader import open_checkpoint
from regauge.data.tasks import Examples
from regauge.errors import (
    CheckpointError,
    JournalError,
    LockError,
    StoppedError,
    TrainingError,
    TransportError,
)
from regauge.models.load import load_model
from regauge.split import (
    ConnectOptions,
    Host,
    InProcess,
    OptimizerConfig,
    ServerOptions,
    TrainOptions,
    connect,
    serve,
)
from regauge.split.server import service
from support.picos import build
from support.ports import free_port
from support.split_pairs import batch, distance, make_model, optimizer_of, train

SGD = OptimizerConfig("sgd", lr=0.1)
ANY = "127.0.0.1:0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A pico GPT-2 in a folder, without dropout."""
    made = build("gpt2").float()
    made.config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    made.save_pretrained(tmp_path / "MODEL")
    return tmp_path / "MODEL"


def tokens(count: int = 12) -> Examples:
    ids = torch.arange(count * 10).reshape(count, 10) ** 2 % 7

    def read(rows: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        chosen = ids[torch.as_tensor(rows)]
        return {"input_ids": chosen}, chosen

    return Examples(count, 30, read, causal=True)


def test_a_server_in_the_background_and_a_model_that_uses_it(tmp_path: Path, model: Path) -> None:
    """The model is called like any other, and what both sides train is what one process trains."""
    ids = torch.arange(40).reshape(4, 10) % 7
    plain = load_model(model, "float32")
    with serve(
        model, address=ANY, training=SGD, out=tmp_path / "backbone", background=True
    ) as server:
        with connect(model, server.address) as remote:
            assert all(p.is_meta for b in remote.model.transformer.h for p in b.parameters())
            torch.testing.assert_close(
                remote(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5
            )
            assert remote.generate(ids, max_new_tokens=2, do_sample=False).shape == (4, 12)
            with pytest.raises(AttributeError, match="no_such_thing"):
                _ = remote.no_such_thing
            assert server.address in repr(remote)
            remote(input_ids=ids, labels=ids).loss.backward()
            remote.end()
        assert (server.host.step, server.host.sessions) == (1, {})
    plain(input_ids=ids, labels=ids).loss.backward()
    for p in plain.transformer.h.parameters():
        p.data -= 0.1 * p.grad
    written = dict(open_checkpoint(tmp_path / "backbone").items())
    assert distance(written, {n: t for n, t in plain.state_dict().items() if n in written}) < 1e-5
    assert server.to_dict()["steps"] == 1
    assert server.to_dict()["out"] == str(tmp_path / "backbone")
    server.stop()  # a second one does nothing
    with pytest.raises(TransportError, match="nothing listens there"):
        connect(make_model("gpt2", torch.float32), server.address, patience=0.1)


def test_certificates_a_list_of_clients_and_metrics(tmp_path: Path, model: Path) -> None:
    certs = tmp_path / "certs"
    files = regauge.split.make_certificates(certs, clients=["ann", "bob"])
    assert set(files) == {"server", "ann", "bob"}
    assert {p.stat().st_mode & 0o077 for p in (certs, *certs.iterdir())} == {0}
    (certs / "clients.txt").write_text("ann\n")
    options = ServerOptions(metrics=f"127.0.0.1:{free_port()}")
    with serve(model, address=ANY, tls=certs, options=options, background=True) as server:
        with connect(model, server.address, tls=certs, client_name="ann") as remote:
            with urllib.request.urlopen(f"http://{options.metrics}/metrics", timeout=20) as reply:
                assert "regauge_split_sessions 1.0\n" in reply.read().decode()
            remote.end()
        for refused, error, message in (
            ({"tls": files["bob"]}, Exception, "not on the server's list"),
            ({"tls": certs}, CheckpointError, "got those of ann, bob"),
            ({"patience": 0.2}, TransportError, "the server closed the connection"),
        ):
            with pytest.raises(error, match=message):
                connect(model, server.address, **refused)
    with pytest.raises(CheckpointError, match="must be new or empty"):
        regauge.split.make_certificates(certs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": ["../x"]}, "must consist of letters"),
        ({"clients": ["server"]}, "not be server"),
        ({"clients": ["ann", "ann"]}, "must be unique"),
        ({"names": ["a b"]}, "must be a host name or address"),
    ],
)
def test_invalid_certificates_leave_nothing(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        regauge.split.make_certificates(tmp_path / "certs", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_a_server_refuses_before_it_loads(tmp_path: Path, model: Path) -> None:
    for options, error, message in (
        ({"out": tmp_path / "out"}, TrainingError, "out requires training"),
        ({"out": model, "training": SGD}, CheckpointError, "exists already"),
        ({"address": "0.0.0.0:0"}, TransportError, "must be a loopback address"),
        ({"options": ServerOptions(clients="list")}, TransportError, "requires TLS"),
        ({"tls": tmp_path / "nothing"}, CheckpointError, "tls must be a folder"),
    ):
        with pytest.raises(error, match=message):
            serve(model, **{"address": ANY, **options}, background=True)


def test_a_server_that_cannot_listen_frees_its_folder(tmp_path: Path, model: Path) -> None:
    with serve(model, address=ANY, background=True) as server:
        for _ in range(2):
            with pytest.raises(TransportError, match="cannot listen"):
                serve(
                    model,
                    address=server.address,
                    training=SGD,
                    checkpoint=tmp_path / "kept",
                    background=True,
                )
    kept: dict[str, Any] = {"address": ANY, "training": SGD, "checkpoint": tmp_path / "kept"}
    with (
        serve(model, **kept, background=True),
        pytest.raises(CheckpointError, match="another server is using"),
    ):
        serve(model, **kept, background=True)


def test_a_server_blocks_until_it_is_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, polled = service.StopRequests(), []
    monkeypatch.setattr(service, "POLL_SECONDS", 0.01)

    def poll(server: service.SplitServer) -> None:
        polled.append(server.network is not None)
        if len(polled) == 3:
            requests.stop.set()

    class Fixed:
        def __enter__(self) -> service.StopRequests:
            return requests

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(service, "stop_requests", lambda reload: Fixed())
    with caplog.at_level(logging.INFO, "regauge.split"):
        server = serve(model, address=ANY, on_poll=poll)
    assert polled == [True] * 3
    assert server.network is not None
    assert server.network.is_stopping
    texts = [r.getMessage() for r in caplog.records if r.name == "regauge.split.run"]
    assert texts[0] == f"loading {model}"
    assert any(f"listening on {server.address}, without TLS" in text for text in texts)
    assert texts[-1].startswith("stopped at step 0 after 0 requests")


def test_training_and_prediction_are_one_call_each(tmp_path: Path, model: Path) -> None:
    host = Host(load_model(model, "float32"), SGD)
    before = regauge.split.predict(model, InProcess(host), tokens())
    seen: list[tuple[int, int, float]] = []
    result = regauge.split.train(
        model,
        InProcess(host),
        tokens(),
        out=tmp_path / "edges",
        options=TrainOptions(epochs=3, batch_size=4),
        on_step=lambda *step: seen.append(step),
    )
    assert [s[:2] for s in seen] == [(i + 1, 9) for i in range(9)]
    assert result.losses == [s[2] for s in seen]
    assert (result.steps, result.out, host.step) == (9, tmp_path / "edges", 9)
    after = regauge.split.predict(tmp_path / "edges", InProcess(host), tokens(), samples=5)
    assert (before.metrics["examples"], after.metrics["examples"]) == (12, 5)
    assert after.metrics["loss"] < before.metrics["loss"] - 0.1
    assert "perplexity" in str(after)
    assert "perplexity" in after._repr_html_()
    (figure,) = json.loads(result.to_json())["figures"]
    assert figure["data"]["y"]["loss"] == pytest.approx(result.losses)
    assert figure["data"]["x"] == list(range(1, 10))
    assert "last loss" in repr(result)
    assert host.sessions == {}


def test_a_live_module_is_trained_in_place(tmp_path: Path, model: Path) -> None:
    """The result is that of the same run from the folder."""
    states, losses = [], []
    for source in (model, load_model(model, "float32").train()):
        host = Host(load_model(model, "float32"), SGD)
        result = regauge.split.train(
            source,
            InProcess(host),
            tokens(),
            out=tmp_path / f"edges-{len(states)}",
            options=TrainOptions(steps=3, batch_size=4),
        )
        losses.append(result.losses)
        states.append(dict(open_checkpoint(tmp_path / f"edges-{len(states)}").items()))
    assert losses[0] == losses[1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_a_stopped_run_resumes_from_its_journal(tmp_path: Path, model: Path) -> None:
    calm, options = Host(load_model(model, "float32"), SGD), TrainOptions(steps=6, batch_size=4)
    whole = regauge.split.train(model, InProcess(calm), tokens(), options=options)
    host, journal = Host(load_model(model, "float32"), SGD), tmp_path / "journal"
    stop = threading.Event()

    def run(**more: Any) -> regauge.split.TrainResult:
        return regauge.split.train(
            model, InProcess(host), tokens(), journal=journal, options=options, **more
        )

    with pytest.raises(JournalError, match="contains no run to resume"):
        run(resume=True)
    with pytest.raises(StoppedError, match="stopped after step 2 of 6; the same command"):
        run(on_step=lambda step, *_: stop.set() if step == 2 else None, stop=stop.is_set)
    with pytest.raises(JournalError, match="contains an interrupted run"):
        run()
    rest = run(resume=True)
    assert rest.losses == whole.losses[2:]
    assert json.loads(rest.to_json())["figures"][0]["data"]["x"] == [3, 4, 5, 6]
    assert list(journal.iterdir()) == []
    assert all(torch.equal(t, calm.backbone()[n]) for n, t in host.backbone().items())


def test_a_run_that_fails_without_a_journal_frees_its_session(model: Path) -> None:
    host = Host(load_model(model, "float32"), SGD)
    with pytest.raises(StoppedError, match="nothing is saved"):
        regauge.split.train(
            model,
            InProcess(host),
            tokens(),
            options=TrainOptions(steps=3),
            stop=lambda: True,
        )
    assert host.sessions == {}


def test_the_lock_of_both_sides_is_compared(tmp_path: Path, model: Path) -> None:
    key = regauge.generate_key("lock")
    host = Host(load_model(model, "float32"), key="beef")
    with pytest.raises(LockError, match="locked by the key beef, and this model is not locked"):
        connect(model, InProcess(host))
    with pytest.raises(LockError, match="a key requires a locked model"):
        connect(model, InProcess(host), key=key)
    with pytest.raises(LockError, match="got a module"):
        connect(make_model("gpt2"), InProcess(host), key=key)
    with connect(make_model("gpt2", torch.float32), InProcess(host), key_id="beef") as remote:
        assert remote.server_info["key"] == "beef"


def test_options_of_both_kinds_at_once_are_refused() -> None:
    with pytest.raises(TrainingError, match="either epochs or steps"):
        TrainOptions(epochs=1, steps=1)


def test_a_clients_options_override_the_servers() -> None:
    server = {"trains": True, **OptimizerConfig("adamw", 1e-3, warmup=2, accumulate=2).to_dict()}
    inherited = TrainOptions().optimizer_config(server, 10)
    assert inherited == OptimizerConfig("adamw", 1e-3, warmup=2, accumulate=2)
    own = TrainOptions(lr=0.5, optimizer="sgd", schedule="linear").optimizer_config(server, 10)
    assert (own.optimizer, own.lr, own.schedule, own.steps) == ("sgd", 0.5, "linear", 10)
    assert (own.warmup, own.accumulate) == (2, 2)
    alone = TrainOptions(lr=0.5).optimizer_config({"trains": False, "rate": 9.0}, 10)
    assert alone == OptimizerConfig(lr=0.5)


def test_names_are_loaded_on_demand() -> None:
    assert set(regauge.split.__all__) >= {"serve", "connect", "train", "predict", "join"}
    for name in regauge.split.__all__:
        assert getattr(regauge.split, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = regauge.split.no_such_name


def test_defences_and_codecs_of_the_connection_are_used(model: Path) -> None:
    host = Host(load_model(model, "float32"))
    plain, clipped = (
        regauge.split.predict(
            model, InProcess(host), tokens(), connection=ConnectOptions(defences=defences)
        ).metrics["loss"]
        for defences in ((), ("clip=0.1",))
    )
    assert abs(clipped - plain) > 1e-3 * plain


def test_connect_takes_a_module_and_a_transport_as_before() -> None:
    mine, host = make_model("gpt2"), Host(make_model("gpt2"), SGD)
    with connect(mine, InProcess(host)) as remote:
        assert remote.model is mine
        train("gpt2", mine, optimizer_of(mine), range(1))
        assert remote(**batch("gpt2", 1)).loss.requires_grad
    assert host.step == 1
    assert all(p.requires_grad for p in mine.parameters())
