"""regauge split on the command line: certificates, a server, training and prediction from the other
side, parts and the whole; what goes wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")

from regauge.checkpoints.files import exclusive_folder
from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main, split_client
from regauge.errors import CheckpointError
from regauge.models.load import load_model, load_part
from regauge.split.server import service
from support.cli_runs import Run
from support.picos import build
from support.ports import free_port
from support.split_pairs import distance


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A pico GPT-2 with a tokenizer of numbers, and a text of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = build("gpt2").float()
    made.config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    made.save_pretrained(tmp_path / "MODEL")
    words = Tokenizer(models.WordLevel({str(i): i for i in range(30)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "MODEL" / "tokenizer.json"))
    (tmp_path / "book.txt").write_text(" ".join(str(i * i % 7) for i in range(600)))
    return tmp_path / "MODEL"


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Iterator[str]:
    """A server in a thread, until the end of the block; the address that it listens on. It must end
    well.
    """
    address, stop_requests, codes = f"127.0.0.1:{free_port()}", service.StopRequests(), []

    @contextmanager
    def signals(reload_clients: object = None) -> Iterator[service.StopRequests]:
        yield stop_requests

    with monkeypatch.context() as patched:
        patched.setattr(service, "stop_requests", signals)
        thread = threading.Thread(
            target=lambda: codes.append(
                main(["split", "serve", *map(str, arguments), "--listen", address])
            )
        )
        thread.start()
        try:
            wait_for(lambda: bool(codes) or is_open(address))
            yield address
        finally:
            stop_requests.stop.set()
            thread.join(240)
    assert codes == [0]


def is_open(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex((host, int(port))) == 0


def wait_for(true: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)


def test_three_commands(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates, a server, a training from the other side; then both parts make a whole model,
    which has learned.
    """
    result = run(
        "split", "certs", "--to", tmp_path / "certs", "--client", "ann", "--client", "bob", "--json"
    )
    assert result.code == 0
    assert set(json.loads(result.out)["files"]) == {"server", "ann", "bob"}
    assert (tmp_path / "certs" / "clients.txt").read_text() == "ann\nbob\n"
    assert run("split", "certs", "--to", tmp_path / "certs").code == 1

    server = serve(
        monkeypatch,
        model,
        "--tls",
        tmp_path / "certs",
        "--lr",
        1e-2,
        "--checkpoint",
        tmp_path / "kept",
        "--output",
        tmp_path / "backbone",
        "--threads",
        1,
    )
    how = [
        "--data",
        tmp_path / "book.txt",
        "--length",
        12,
        "--tls",
        tmp_path / "certs",
        "--client-name",
        "ann",
        "--rows",
        "sample",
        "--threads",
        1,
        "--defence",
        "clip=1e3",
    ]
    with server as address:
        before = run("split", "predict", model, "--server", address, *how, "--json")
        result = run(
            "split",
            "train",
            model,
            "--server",
            address,
            *how,
            "--epochs",
            4,
            "--batch-size",
            8,
            "-o",
            tmp_path / "edges",
            "--json",
        )
        assert result.code == 0, result.err
        after = run("split", "predict", tmp_path / "edges", "--server", address, *how, "--json")
    report = json.loads(result.out)
    assert report["steps"] == len(report["losses"]) == 28
    assert "train 28/28: loss" in result.err
    assert "here adamw at 0.01, on the server adamw at 0.01" in result.err
    assert f"wrote embedding and head to {tmp_path / 'edges'} after 28 steps" in result.err
    first, last = (json.loads(one.out) for one in (before, after))
    assert first["examples"] == last["examples"] == 50
    assert last["loss"] < first["loss"] - 0.3
    assert last["perplexity"] == pytest.approx(torch.tensor(last["loss"]).exp().item(), rel=1e-4)
    parts = [
        {n.split(".")[1] for n in open_checkpoint(tmp_path / name).names}
        for name in ("edges", "backbone")
    ]
    assert parts == [{"wte", "wpe", "ln_f"}, {"h"}]
    assert json.loads((tmp_path / "edges" / "split.json").read_text())["part"] == "edges"
    assert (tmp_path / "edges" / "tokenizer.json").exists()
    for name in ("edges", "backbone"):
        with pytest.raises(Exception, match="has no"):
            load_model(tmp_path / name)

    assert (
        run(
            "split", "join", tmp_path / "edges", tmp_path / "backbone", "-o", tmp_path / "whole"
        ).code
        == 0
    )
    joined = load_model(tmp_path / "whole")
    assert not (tmp_path / "whole" / "split.json").exists()
    ids = torch.tensor([[i * i % 7 for i in range(k, k + 12)] for k in range(0, 84, 7)])
    with torch.no_grad():
        here, plain = (
            float(m(input_ids=ids, labels=ids).loss) for m in (joined, load_model(model))
        )
    assert here < plain - 0.3


def test_it_is_the_training_in_one_process(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.data.datasets import open_data
    from regauge.data.tasks import logits_of, loss_of, read_examples
    from regauge.split import OptimizerConfig
    from regauge.split.client.train import Run as Steps
    from regauge.split.client.train import batch_rng

    options = [
        "--optimizer",
        "sgd",
        "--lr",
        0.1,
        "--momentum",
        0.9,
        "--schedule",
        "linear",
        "--steps",
        9,
        "--accumulate",
        2,
        "--threads",
        1,
    ]
    with serve(monkeypatch, model, *options, "--output", tmp_path / "backbone") as address:
        how = ["--data", tmp_path / "book.txt", "--length", 12, "--server", address, "--threads", 1]
        assert (
            run(
                "split",
                "train",
                model,
                *how,
                "--steps",
                5,
                "--batch-size",
                4,
                "-o",
                tmp_path / "edges",
            ).code
            == 0
        )
    assert (
        run(
            "split", "join", tmp_path / "edges", tmp_path / "backbone", "-o", tmp_path / "whole"
        ).code
        == 0
    )
    plain = load_model(model, "float32").train()
    examples, _ = read_examples(plain, open_data(tmp_path / "book.txt"), beside=model, length=12)
    own, steps = (
        OptimizerConfig("sgd", 0.1, momentum=0.9, schedule="linear", steps=9, accumulate=2),
        Steps(5, 4, 0),
    )
    optimizer = own.build(plain.parameters())
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = own.lr_at(step)
        optimizer.zero_grad()
        for n in (2 * step, 2 * step + 1):
            inputs, labels = examples.batch(steps.batch_indices(examples, n))
            with batch_rng(0, n):
                (loss_of(examples, logits_of(plain, inputs), labels) / 2).backward()
        optimizer.step()
    assert (
        distance(dict(load_model(tmp_path / "whole").state_dict()), dict(plain.state_dict())) < 1e-5
    )
    assert distance(dict(load_model(model).state_dict()), dict(plain.state_dict())) > 1e-2


def test_a_locked_backbone_and_its_key(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the locked model and no key; both parts make a locked model, which its key
    unlocks to what plain training gives.
    """
    key, locked = tmp_path / "key", tmp_path / "LOCKED"
    assert run("keygen", "-o", key).code == 0
    assert run("keygen", "-o", tmp_path / "other").code == 0
    assert run("lock", model, "-k", key, "-o", locked).code == 0
    data = ["--data", tmp_path / "book.txt", "--length", 12, "--threads", 1]
    losses = []
    for name, source, more in (("plain", model, []), ("locked", locked, ["--key", key])):
        with serve(
            monkeypatch,
            source,
            "--lr",
            1e-3,
            "--output",
            tmp_path / f"{name}-backbone",
            "--threads",
            1,
        ) as address:
            result = run(
                "split",
                "train",
                source,
                *data,
                "--server",
                address,
                *more,
                "--steps",
                6,
                "-o",
                tmp_path / f"{name}-edges",
                "--json",
            )
            assert result.code == 0, result.err
            losses.append(json.loads(result.out)["losses"])
            if name == "locked":
                for wrong, words in (
                    (["--key", tmp_path / "other"], "locked by the key"),
                    ([], "hint: pass it with --key"),
                ):
                    result = run("split", "predict", locked, *data, "--server", address, *wrong)
                    assert result.code == 1
                    assert words in result.err
                result = run("split", "predict", model, *data, "--server", address)
                assert result.code == 1
                assert "the server's backbone is locked by the key" in result.err
                assert "and this model is not locked" in result.err
                result = run("split", "predict", model, *data, "--server", address, "--key", key)
                assert result.code == 1
                assert "requires a locked model" in result.err
        result = run(
            "split",
            "join",
            tmp_path / f"{name}-edges",
            tmp_path / f"{name}-backbone",
            "-o",
            tmp_path / f"{name}-whole",
        )
        assert result.code == 0, result.err
        assert ("--retrained" in result.err) == (name == "locked")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (
        run(
            "split",
            "join",
            tmp_path / "locked-edges",
            tmp_path / "plain-backbone",
            "-o",
            tmp_path / "mixed",
        ).code
        == 1
    )
    assert (
        run(
            "unlock",
            tmp_path / "locked-whole",
            "-k",
            key,
            "--retrained",
            "-o",
            tmp_path / "unlocked",
        ).code
        == 0
    )
    loaded, expected = (
        dict(load_model(tmp_path / name).state_dict()) for name in ("unlocked", "plain-whole")
    )
    assert distance(loaded, expected) < 1e-3


def test_only_listed_clients_are_admitted(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("certs", "strange"):
        assert (
            run(
                "split", "certs", "--to", tmp_path / folder, "--client", "ann", "--client", "bob"
            ).code
            == 0
        )
    (tmp_path / "list").write_text("ann sessions=1\n")
    monkeypatch.setattr("regauge.split.client.connection.FIRST_CONTACT_SECONDS", 1.0)
    data = ["--data", tmp_path / "book.txt", "--length", 12, "--threads", 1]
    certs = ["--tls", tmp_path / "certs"]
    with serve(
        monkeypatch, model, *certs, "--clients", tmp_path / "list", "--threads", 1
    ) as address:
        ask = ["split", "predict", model, *data, "--server", address, "--samples", 2]
        assert run(*ask, *certs, "--client-name", "ann").code == 0
        for wrong, words in (
            ([*certs, "--client-name", "bob"], "this client is not on the server's list"),
            ([*certs], "got those of ann, bob"),
            ([*certs, "--client-name", "cid"], "cid.pem does not exist"),
            (
                ["--tls", tmp_path / "strange", "--client-name", "ann"],
                "the server's certificate is not of this authority",
            ),
            ([], "the server closed the connection"),
            (["--tls", tmp_path / "nothing"], "tls must be a folder"),
        ):
            result = run(*ask, *wrong)
            assert result.code == 1, wrong
            assert words in result.err, result.err
        other = tmp_path / "other"
        build("gpt2", seed=1).double().save_pretrained(other)
        (other / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
        result = run(
            "split",
            "predict",
            other,
            *data,
            "--server",
            address,
            *certs,
            "--client-name",
            "ann",
            "--dtype",
            "float64",
        )
        assert result.code == 1
        assert "dtype must be float32, as on the server, got float64" in result.err
    result = run(*ask, *certs, "--client-name", "ann")
    assert result.code == 1
    assert f"no reply within 1 s: {address}: nothing listens there" in result.err
    assert "both sides use certificates of one" in result.err


def test_rows_are_rows_by_either_name(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 leaves its causal mask to the kernel, unless rows are permuted."""
    how = ["--data", tmp_path / "book.txt", "--length", 12, "--threads", 1, "--json"]
    found = []
    with serve(monkeypatch, model, "--threads", 1) as address:
        for more in (
            [],
            ["--rows", "batch"],
            ["--defence", "rows"],
            ["--defence", "clip=1e+6+rows=sample"],
            ["--defence", "clip=0.1"],
        ):
            result = run("split", "predict", model, "--server", address, *how, *more)
            assert result.code == 0, result.err
            found.append(json.loads(result.out)["loss"])
    plain, *same, clipped = found
    assert same == pytest.approx([plain] * 3, rel=1e-4)
    assert abs(clipped - plain) > 1e-3 * plain


def test_what_is_refused_before_anything_is_loaded(run: Run, tmp_path: Path, model: Path) -> None:
    there = ["--data", tmp_path / "book.txt", "--server", "127.0.0.1:1"]
    for arguments, words, code in (
        (
            ["serve", model, "--optimizer", "sgd"],
            "requires --lr R, without which nothing is trained",
            2,
        ),
        (["serve", model, "--lr", 0.1, "--schedule", "linear"], "must be more than its warmup", 1),
        (["serve", model, "--listen", "0.0.0.0:0"], "must be a loopback address without TLS", 1),
        (["serve", model, "--listen", "7000"], "must be HOST:PORT", 1),
        (["serve", model, "--clients", tmp_path / "book.txt"], "requires --tls", 2),
        (["serve", model, "--quota", "much"], "a quota must be", 1),
        (
            ["serve", model, "--output", tmp_path / "out"],
            "without training there is nothing to write",
            2,
        ),
        (["serve", model, "--average", 3], "0 without training", 1),
        (["serve", tmp_path / "nothing"], "does not exist", 1),
        (["train", model, *there, "-o", model], "exists already", 1),
        (["train", model, *there, "-o", tmp_path / "o", "--resume"], "requires the --journal", 2),
        (
            ["train", model, *there, "-o", tmp_path / "o", "--resume", "--journal", tmp_path / "j"],
            "contains no run to resume",
            1,
        ),
        (
            ["train", model, *there, "-o", tmp_path / "o", "--epochs", 1, "--steps", 1],
            "--epochs or --steps",
            2,
        ),
        (
            ["train", model, *there, "-o", tmp_path / "o", "--defence", "fog=1"],
            'unknown defence "fog"',
            1,
        ),
        (
            ["predict", model, *there, "--defence", "noise=-1"],
            "noise must be positive and finite, got -1",
            1,
        ),
        (["predict", model, *there, "--defence", "noise=1+fog"], 'unknown defence "fog"', 1),
        (
            ["predict", model, *there, "--rows", "batch", "--defence", "rows"],
            "Rows is given twice",
            1,
        ),
        (["predict", model, *there, "--keep-cls"], "requires --rows", 2),
        (
            ["train", model, *there, "-o", tmp_path / "o", "--keep-cls", "--defence", "rows"],
            "requires --rows",
            2,
        ),
        (["certs", "--to", tmp_path / "c", "--client", "server"], "must consist of letters", 2),
        (["certs", "--to", tmp_path / "c", "--client", "../x"], "must consist of letters", 2),
        (
            ["certs", "--to", tmp_path / "c", "--client", "\u00e9" * 64],
            "must consist of letters",
            2,
        ),
        (
            ["certs", "--to", tmp_path / "c", "--name", "b\u00fccher.example"],
            "must be a host name or address",
            2,
        ),
        (["certs", "--to", tmp_path / "c", "--name", ""], "must be a host name or address", 2),
        (["certs", "--to", tmp_path / "c", "--name", "a b"], "must be a host name or address", 2),
    ):
        result = run("split", *arguments)
        assert (result.code, words in result.err) == (code, True), (arguments, result.err)
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "o").exists()


def test_interruptions_lose_no_step(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has one user; Ctrl-C in the last step does not undo the others; a server that cannot
    keep its state still writes what it was asked to; a run that is stopped and cannot go on leaves
    no session behind.
    """
    saved, journal, hosts = tmp_path / "kept", tmp_path / "journal", []
    how = [
        "--data",
        tmp_path / "book.txt",
        "--length",
        12,
        "--threads",
        1,
        "--batch-size",
        8,
        "--epochs",
        1,
    ]
    stop, at = threading.Event(), 7

    @contextmanager
    def signals() -> Iterator[threading.Event]:
        stop.clear()
        yield stop

    def ticked(done: int, total: int, loss: float | None) -> None:
        if done == at:
            stop.set()

    def failed(host: Any) -> None:
        hosts.append(host)
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(split_client, "_stop_signals", signals)
    monkeypatch.setattr(split_client, "_count_steps", lambda progress: ticked)
    with serve(
        monkeypatch,
        model,
        "--lr",
        1e-2,
        "--quota",
        "sessions=1",
        "--checkpoint",
        saved,
        "--threads",
        1,
    ) as address:
        result = run(
            "split",
            "serve",
            model,
            "--lr",
            1e-2,
            "--checkpoint",
            saved,
            "--listen",
            f"127.0.0.1:{free_port()}",
        )
        assert (result.code, f"another server is using {saved}" in result.err) == (1, True), (
            result.err
        )
        with exclusive_folder(journal, "run"):
            result = run(
                "split",
                "train",
                model,
                "--server",
                address,
                *how,
                "-o",
                tmp_path / "edges",
                "--journal",
                journal,
            )
            assert (result.code, f"another run is using {journal}" in result.err) == (1, True), (
                result.err
            )
        assert list(journal.iterdir()) == []
        at = 3
        result = run("split", "train", model, "--server", address, *how, "-o", tmp_path / "edges")
        assert (
            result.code,
            "stopped after step 3 of 7" in result.err,
            (tmp_path / "edges").exists(),
        ) == (130, True, False), result.err
        at = 7
        (journal / ".000000003.request.partial-0123456789ab").write_bytes(b"half")
        result = run(
            "split",
            "train",
            model,
            "--server",
            address,
            *how,
            "-o",
            tmp_path / "edges",
            "--journal",
            journal,
        )
        assert (result.code, (tmp_path / "edges").exists(), list(journal.iterdir())) == (
            0,
            True,
            [],
        ), result.err
    monkeypatch.setattr("regauge.split.server.host.Host.save", failed)
    with (
        pytest.raises(AssertionError),
        serve(
            monkeypatch,
            model,
            "--lr",
            1e-2,
            "--checkpoint",
            saved,
            "--output",
            tmp_path / "backbone",
        ),
    ):
        pass
    assert hosts[0].step == 10
    assert (tmp_path / "backbone" / "split.json").exists()


@pytest.mark.parametrize("part", ["edges", "backbone"])
@pytest.mark.parametrize("name", ["llama", "bert-classifier", "vit", "t5", "mixtral"])
def test_parts_of_every_kind_make_the_whole_again(
    run: Run, tmp_path: Path, name: str, part: str
) -> None:
    from regauge.split.parts import write_part

    whole = build(name).float()
    whole.save_pretrained(tmp_path / "whole")
    source = open_checkpoint(tmp_path / "whole")
    live = load_part(source, part)  # type: ignore[arg-type]
    assert {t.is_meta for t in live.parameters()} == {True, False}
    write_part(tmp_path / "part", live, source, part)  # type: ignore[arg-type]
    sides = (
        [tmp_path / "part", tmp_path / "whole"]
        if part == "edges"
        else [tmp_path / "whole", tmp_path / "part"]
    )
    assert len(open_checkpoint(tmp_path / "part")) < len(source)
    result = run("split", "join", *sides, "-o", tmp_path / "again")
    assert result.code == 0, result.err
    loaded, expected = (
        dict(load_model(tmp_path / "again").state_dict()),
        dict(load_model(tmp_path / "whole").state_dict()),
    )
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[n], expected[n]) for n in loaded)
    assert run("split", "join", *reversed(sides), "-o", tmp_path / "other").code == 1


def started(*arguments: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "regauge", "split", *map(str, arguments), "--threads", "1"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def ended(process: subprocess.Popen, seconds: float = 300.0) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, err


@pytest.mark.slow
def test_a_server_ends_quietly_and_killed_processes_go_on(tmp_path: Path, model: Path) -> None:
    """A client and a server, each killed in the middle and started again, end with the bits of a
    undisturbed run.
    """
    address = f"127.0.0.1:{free_port()}"
    data = ["--data", tmp_path / "book.txt", "--length", 12, "--batch-size", 4, "--server", address]

    def serve(name: str) -> subprocess.Popen:
        process = started(
            "serve",
            model,
            "--lr",
            1e-2,
            "--listen",
            address,
            "--checkpoint",
            tmp_path / name / "kept",
            "--every",
            3,
            "--output",
            tmp_path / name / "out",
        )
        try:
            wait_for(lambda: is_open(address) or process.poll() is not None)
        except BaseException:
            process.kill()
            raise
        return process

    def train(name: str, *more: Any) -> subprocess.Popen:
        journal = tmp_path / name / "journal"
        return started(
            "train",
            model,
            *data,
            "--steps",
            40,
            "--journal",
            journal,
            "--every",
            4,
            "-o",
            tmp_path / name / "edges",
            *more,
        )

    def disturbed(processes: list[subprocess.Popen]) -> None:
        """The server is killed after its first checkpoint, the client some steps later; both are
        started again.
        """
        journal, saved = tmp_path / "wild" / "journal", tmp_path / "wild" / "kept"
        wait_for(
            lambda: (
                (saved / "split.safetensors").exists()
                and (journal / "client" / "split.safetensors").exists()
            )
        )
        processes[0].kill()
        processes[0].wait()
        processes[0] = serve("wild")
        wait_for(
            lambda: (
                any(int(p.stem) > 40 for p in journal.glob("*.reply"))
                or processes[1].poll() is not None
            )
        )
        processes[1].kill()
        processes[1].wait()
        assert not (tmp_path / "wild" / "edges").exists()
        code, err = ended(train("wild"))
        assert code == 1
        assert "contains an interrupted run" in err
        processes[1] = train("wild", "--resume")

    results = []
    for name in ("calm", "wild"):
        (tmp_path / name).mkdir()
        processes = [serve(name)]
        try:
            processes.append(train(name))
            if name == "wild":
                disturbed(processes)
            code, err = ended(processes[1])
            assert code == 0, err
            assert not list((tmp_path / name / "journal").iterdir())
            processes[0].send_signal(signal.SIGTERM if name == "calm" else signal.SIGINT)
            code, err = ended(processes[0])
            assert code == 0, err
            assert "stopping: no new requests, finishing those under way" in err
            assert "stopped at step 40" in err
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results.append(
            {
                n: t.clone()
                for part in ("edges", "out")
                for n, t in open_checkpoint(tmp_path / name / part).items()
            }
        )
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def signalled(*arguments: Any, during: Callable[[str], None]) -> int:
    """The exit code of a server in this thread, which alone gets signals, while another thread does
    something to it.
    """
    address = f"127.0.0.1:{free_port()}"

    def work() -> None:
        try:
            wait_for(lambda: is_open(address))
            during(address)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return main(["split", "serve", *map(str, arguments), "--listen", address])
    finally:
        thread.join(60)


def test_two_quick_sigterms_still_write_checkpoint_and_backbone(
    model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.split import Host

    keep, requests = Host.save, []

    def slow(host: Host) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # in the middle of the checkpoint
        requests.append(signal.SIGTERM)
        keep(host)
        os.kill(os.getpid(), signal.SIGTERM)  # and before the backbone is written

    monkeypatch.setattr(Host, "save", slow)

    def during(address: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    code = signalled(
        model,
        "--lr",
        "1e-3",
        "--checkpoint",
        tmp_path / "kept",
        "--output",
        tmp_path / "backbone",
        during=during,
    )
    assert (code, requests) == (0, [signal.SIGTERM])
    assert (tmp_path / "kept" / "split.safetensors").is_file()
    assert (tmp_path / "backbone" / "model.safetensors").is_file()


def test_sighup_reads_the_clients_again_and_does_not_kill(
    model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.split.server import client_list
    from regauge.split.server.network import Server

    monkeypatch.setattr(client_list, "POLL_SECONDS", 1000.0)  # SIGHUP alone
    assert (
        run("split", "certs", "--to", tmp_path / "certs", "--client", "ann", "--client", "bob").code
        == 0
    )
    servers: list[Server] = []
    start = Server.__init__
    monkeypatch.setattr(
        Server, "__init__", lambda self, *a, **k: (servers.append(self), start(self, *a, **k))[1]
    )

    def during(address: str) -> None:
        wait_for(lambda: bool(servers) and servers[0].host.clients == {"ann", "bob"})
        (tmp_path / "certs" / "clients.txt").write_text("ann\n")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: servers[0].host.clients == {"ann"}, 20)
        (tmp_path / "certs" / "clients.txt").write_text("ann speed=3\n")
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)

    assert signalled(model, "--tls", tmp_path / "certs", during=during) == 0
    assert servers[0].host.clients == {"ann"}  # a damaged list changes nothing


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_trains_on_both_sides_and_stays_finite(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    from safetensors.torch import load_file

    with serve(
        monkeypatch,
        model,
        "--lr",
        "3e-3",
        "--dtype",
        dtype,
        "--output",
        tmp_path / "backbone",
        "--checkpoint",
        tmp_path / "kept",
    ) as address:
        how = [
            "--data",
            tmp_path / "book.txt",
            "--length",
            12,
            "--server",
            address,
            "--dtype",
            dtype,
            "--threads",
            1,
        ]
        result = run(
            "split",
            "train",
            model,
            *how,
            "--steps",
            12,
            "--batch-size",
            8,
            "-o",
            tmp_path / "edges",
            "--json",
        )
        assert result.code == 0, result.err
    losses = json.loads(result.out)["losses"]
    assert losses[-1] < losses[0] - 0.05
    for path in (
        tmp_path / "backbone" / "model.safetensors",
        tmp_path / "edges" / "model.safetensors",
        tmp_path / "kept" / "split.safetensors",
    ):
        tensors = load_file(path)
        assert all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
    assert any(name.startswith("master/") for name in tensors)
