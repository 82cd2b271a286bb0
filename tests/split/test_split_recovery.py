"""Exactly once: whatever is lost, repeated, reordered or cut off, the weights are those of an
undisturbed run, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from regauge.errors import CheckpointError, FrameError, JournalError, RefusedError
from regauge.split import Host, InProcess, OptimizerConfig, RemoteBackbone, TransportError, connect
from regauge.split.client.journal import FolderJournal, MemoryJournal
from regauge.split.protocol.frames import Frame, Kind, decode, encode, frame_identity
from support.split_pairs import (
    ADAMW,
    KINDS,
    Faulty,
    assemble_state,
    batch,
    columns,
    lock_backbone,
    make_model,
    optimizer_of,
    same,
    train,
)

STEPS = range(8)


def reference_run(
    name: str = "gpt2", options: OptimizerConfig = ADAMW, dropout: float = 0.0
) -> dict[str, torch.Tensor]:
    """The weights after all steps, with a session of a known name: it seeds dropout."""
    mine = make_model(name, dropout=dropout)
    g = columns(mine)
    host = Host(lock_backbone(mine, g), options)
    with connect(mine, InProcess(host), element=g, rows="batch", secret=5, journal=known_state()):
        torch.manual_seed(0)
        train(name, mine, optimizer_of(mine), STEPS)
    return assemble_state(mine, host, g)


def known_state(journal: MemoryJournal | None = None) -> MemoryJournal:
    journal = journal or MemoryJournal()
    journal.session = "0" * 32
    return journal


@pytest.mark.parametrize("seed", range(3))
def test_a_network_that_loses_repeats_reorders_and_garbles_changes_nothing(seed: int) -> None:
    mine = make_model("gpt2", dropout=0.1)
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    network = Faulty(lambda: host, seed, rate=0.6)
    with connect(mine, network, element=g, rows="batch", secret=5, journal=known_state()) as link:
        link.log.sleep = lambda _: None
        torch.manual_seed(0)
        train("gpt2", mine, optimizer_of(mine), STEPS)
    assert len(network.faults) > len(KINDS) // 2  # of all kinds, most
    assert host.step == len(STEPS)
    assert same(assemble_state(mine, host, g), reference_run(dropout=0.1))


def test_a_line_that_garbles_nine_requests_in_ten_is_a_bad_line_and_no_reason_to_end() -> None:
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    network = Faulty(lambda: host, 0, rate=0.0, kinds=("garbled",))
    with connect(mine, network, element=g, rows="batch", secret=5, journal=known_state()) as link:
        link.log.sleep = lambda _: None
        network.rate = 0.9
        train("gpt2", mine, optimizer_of(mine), STEPS)
        network.rate = 0.0
    assert network.faults["garbled"] > 50
    assert same(assemble_state(mine, host, g), reference_run())


@pytest.mark.parametrize(
    "options",
    [
        ADAMW,
        OptimizerConfig("sgd", lr=0.1, momentum=0.9, accumulate=3, schedule="linear", steps=20),
    ],
    ids=["adamw", "sgd"],
)
def test_a_restarted_server_receives_its_missing_steps(
    tmp_path: Path, options: OptimizerConfig
) -> None:
    mine = make_model("gpt2", dropout=0.1)
    g = columns(mine)
    start = lock_backbone(mine, g)

    def started() -> Host:
        return Host(
            lock_backbone(start, None),
            options,
            folder=tmp_path,
            save_every=1 if options.accumulate > 1 else 3,
        )

    hosts = [started()]
    network = Faulty(lambda: hosts[-1], 0, rate=0.0)

    def after(step: int) -> None:
        if step in (1, 4, 5):  # before the first checkpoint, after it, and at once again
            hosts.append(started())

    with connect(mine, network, element=g, rows="batch", secret=5, journal=known_state()) as link:
        torch.manual_seed(0)
        train("gpt2", mine, optimizer_of(mine), STEPS, after)
        assert link.log.saved > 0
        assert all(
            n > link.log.saved for n in link.log.journal.requests
        )  # what is kept there is not kept here
        hosts.append(started())  # between a forward pass and its backward pass
        loss = mine(**batch("gpt2", 0)).loss
        hosts.append(started())
        loss.backward()
    assert len(hosts) == 6
    calm = make_model("gpt2", dropout=0.1)
    host = Host(lock_backbone(calm, g), options)
    with connect(calm, InProcess(host), element=g, rows="batch", secret=5, journal=known_state()):
        torch.manual_seed(0)
        train("gpt2", calm, optimizer_of(calm), STEPS)
        calm(**batch("gpt2", 0)).loss.backward()
    assert same(assemble_state(mine, hosts[-1], g), assemble_state(calm, host, g))


def test_a_checkpoint_has_the_passes_that_are_open(tmp_path: Path) -> None:
    mine = make_model("gpt2", dropout=0.1)
    hosts = [Host(make_model("gpt2", dropout=0.1), ADAMW, folder=tmp_path)]
    recorded: list[int] = []

    class RecordingFaulty(Faulty):
        def exchange(self, request: list[memoryview]) -> bytes:
            recorded.append(frame_identity(request[0])[0])
            return super().exchange(request)

    with connect(mine, RecordingFaulty(lambda: hosts[-1], 0, rate=0.0), journal=known_state()):
        torch.manual_seed(0)
        loss = mine(**batch("gpt2", 0)).loss
        hosts[0].save()
        hosts.append(Host(make_model("gpt2"), ADAMW, folder=tmp_path))
        for block, other in zip(hosts[0].blocks, hosts[1].blocks, strict=True):
            for a, b in zip(block.modules(), other.modules(), strict=True):
                if isinstance(a, torch.nn.Dropout):
                    b.p = a.p
        loss.backward()
    assert recorded == [0, 1, 2]  # HELLO, FORWARD, BACKWARD: nothing was sent again
    calm = make_model("gpt2", dropout=0.1)
    host = Host(make_model("gpt2", dropout=0.1), ADAMW)
    with connect(calm, InProcess(host), journal=known_state()):
        torch.manual_seed(0)
        calm(**batch("gpt2", 0)).loss.backward()
    assert same(hosts[1].backbone(), host.backbone())
    assert torch.equal(mine.transformer.wpe.weight.grad, calm.transformer.wpe.weight.grad)


class KilledError(BaseException):
    pass


class Killing:
    """Kills the client at its n-th exchange, before the request is sent or after the reply came."""

    def __init__(self, host: Host, at: int, late: bool) -> None:
        self.inner, self.left, self.late = InProcess(host), at, late

    def exchange(self, request: list[memoryview]) -> bytes:
        self.left -= 1
        if self.left == 0 and not self.late:
            raise KilledError
        reply = self.inner.exchange(request)
        if self.left == 0:
            raise KilledError
        return reply


@pytest.mark.parametrize(("at", "late"), [(6, False), (7, True), (10, True), (13, False)])
def test_a_client_that_was_killed_goes_on_from_its_own_checkpoint(
    tmp_path: Path, at: int, late: bool
) -> None:
    first = make_model("gpt2")
    g = columns(first)
    host = Host(lock_backbone(first, g), ADAMW, folder=tmp_path / "server", save_every=2)
    checkpoint: dict = {}

    def run(
        model: torch.nn.Module, link: RemoteBackbone, optimizer: torch.optim.Optimizer, steps: range
    ) -> None:
        def after(step: int) -> None:
            if step % 2 == 1:
                checkpoint.update(
                    step=step + 1,
                    model=clone(model.state_dict()),
                    optimizer=clone(optimizer.state_dict()),
                    link=link.state_dict(),
                )
                link.mark_saved()

        train("gpt2", model, optimizer, steps, after)

    with pytest.raises(KilledError):
        run(
            first,
            link := connect(
                first,
                Killing(host, at, late),
                element=g,
                rows="batch",
                journal=tmp_path / "journal",
            ),
            optimizer_of(first),
            STEPS,
        )
    link.close()
    second = make_model("gpt2")
    with connect(
        second, InProcess(host), element=g, rows="batch", journal=tmp_path / "journal"
    ) as link:
        optimizer = optimizer_of(second)
        if checkpoint:
            second.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            link.load_state_dict(checkpoint["link"])
        run(second, link, optimizer, range(checkpoint.get("step", 0), len(STEPS)))
        secret = link.secret
    assert host.step == len(STEPS)
    assert (
        len(list((tmp_path / "journal").glob("*.reply"))) < 4
    )  # no more than since the last checkpoint
    calm = make_model("gpt2")
    other = Host(lock_backbone(calm, g), ADAMW)
    with connect(calm, InProcess(other), element=g, rows="batch", secret=secret):
        train("gpt2", calm, optimizer_of(calm), STEPS)
    assert same(assemble_state(second, host, g), assemble_state(calm, other, g))


def clone(value: object) -> object:
    import copy

    return copy.deepcopy(value)


def test_a_client_that_catches_up_needs_no_network(tmp_path: Path) -> None:
    first = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW)
    with connect(first, InProcess(host), journal=tmp_path):
        losses = train("gpt2", first, optimizer_of(first), range(3))

    class Absent:
        def exchange(self, request: object) -> bytes:
            raise TransportError("no network")

    second = make_model("gpt2")
    with connect(second, Absent(), journal=tmp_path, patience=0.01) as link:
        optimizer = optimizer_of(second)
        assert train("gpt2", second, optimizer, range(3)) == losses
        with pytest.raises(TransportError, match="no network"):
            train("gpt2", second, optimizer, range(3, 4))
        assert link.log.number == 6
    third = make_model("gpt2")
    with (
        connect(third, InProcess(host), journal=tmp_path),
        pytest.raises(JournalError, match="request 1 must be the one"),
    ):
        train("gpt2", third, optimizer_of(third), range(5, 6))


def test_invalid_requests_are_rejected_and_the_session_continues() -> None:
    mine = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW, max_length=64)
    link = connect(mine, InProcess(host), journal=known_state())
    sent: list[Frame] = []
    exchange = link.log.transport.exchange

    def watch(request: list[memoryview]) -> bytes:
        sent.append(decode(b"".join(request)))
        return exchange(request)

    link.log.transport.exchange = watch
    loss = mine(**batch("gpt2", 0)).loss
    good = sent[-1]
    z = good.tensors["hidden_states"]

    def asked(
        code: str,
        number: int = 2,
        kind: Kind = Kind.FORWARD,
        values: dict | None = None,
        tensors: dict | None = None,
    ) -> None:
        frame = Frame(
            kind,
            number,
            {**good.values, **(values or {})},
            {**good.tensors, **(tensors or {})} if kind is Kind.FORWARD else tensors,
        )
        reply = decode(exchange(encode(frame)))
        assert (reply.kind, reply.values["code"]) == (Kind.ERROR, code), reply.values
        assert host.sessions["0" * 32].done == 1

    asked("gap", number=3)
    asked("conflict", number=1, values={"training": False})
    asked("shape", tensors={"hidden_states": z[..., :-1]})
    asked("shape", tensors={"hidden_states": z[0]})
    asked("shape", tensors={"position_ids": torch.zeros(1, 3, dtype=torch.long)})
    asked("limit", tensors={"hidden_states": torch.zeros(1, 65, 12, dtype=torch.float64)})
    asked("dtype", tensors={"hidden_states": z.float()})
    asked("nonfinite", tensors={"hidden_states": z * float("nan")})
    asked("nonfinite", tensors={"attention_mask": good.tensors["attention_mask"] * float("nan")})
    asked("boundary", values={"boundary": "decoder"})
    asked("layout", values={"order": [0]})
    asked("layout", values={"order": [0, 9]})
    asked("layout", values={"plain": [["use_cache", "yes"]]})
    asked("layout", tensors={"stranger": z})
    asked(
        "arguments",
        values={
            "layouts": [[["hidden_states", "hidden_states"], ["__class__", "__class__"]]],
            "order": [0, 0],
        },
    )
    asked("arguments", values={"layouts": [[["position_ids", "hidden_states"]]], "order": [0, 0]})
    asked("layout", values={"wants": ["position_ids"]})
    asked("graph", kind=Kind.BACKWARD, values={"of": 7}, tensors={"stream": z})
    asked("shape", kind=Kind.BACKWARD, values={"of": 1}, tensors={"stream": z[:1]})
    asked("nonfinite", kind=Kind.BACKWARD, values={"of": 1}, tensors={"stream": z / 0})
    asked("session", values={"session": "1" * 32})
    asked("kind", kind=Kind.OUTPUT, tensors={})
    loss.backward()
    with pytest.raises(RefusedError, match="NaN or Inf") as error:
        (mine(**batch("gpt2", 1)).loss * float("nan")).backward()
    assert error.value.code == "nonfinite"
    train("gpt2", mine, optimizer_of(mine), range(2))
    assert host.step == 3
    asked_past = decode(exchange(encode(Frame(Kind.BACKWARD, 2, good.values, {}))))
    assert asked_past.values["code"] == "past"


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("version", {"protocol": 99}),
        ("model", {"digest": "0"}),
        ("model", {"dtype": "float32"}),
        ("model", {"depth": [3]}),
        ("key", {"key": "cafe"}),
        ("codec", {"codec": "zip"}),
        ("limit", {"limits": []}),
        ("session", {"session": "../../etc"}),
        ("session", {"session": 5}),
    ],
)
def test_a_handshake_compares_all_that_must_agree(code: str, change: dict) -> None:
    host = Host(make_model("gpt2"), ADAMW, key="beef")
    link = connect(make_model("gpt2"), InProcess(host), key_id="beef")
    reply = decode(
        InProcess(host).exchange(encode(Frame(Kind.HELLO, 0, {**link.log.hello, **change})))
    )
    assert (reply.kind, reply.values["code"]) == (Kind.ERROR, code)


def test_another_model_is_refused_when_connecting() -> None:
    host = Host(make_model("gpt2"), ADAMW)
    for other in (make_model("llama"), make_model("gpt2", torch.float32)):
        with pytest.raises(RefusedError, match="as on the server"):
            connect(other, InProcess(host))
        assert all(p.requires_grad for p in other.parameters())


def test_a_session_is_its_owners_and_sessions_are_counted() -> None:
    host = Host(make_model("gpt2"), ADAMW, max_sessions=1)
    link = connect(make_model("gpt2"), InProcess(host, "ann"))
    with pytest.raises(RefusedError, match="belongs to another client"):
        connect(make_model("gpt2"), InProcess(host, "bob"), journal=link.log.journal)
    with pytest.raises(RefusedError, match="has reached its limit of 1 sessions"):
        connect(make_model("gpt2"), InProcess(host, "bob"))
    link.end()
    connect(make_model("gpt2"), InProcess(host, "bob"))


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    mine = make_model("gpt2")
    hosts = [Host(make_model("gpt2"), ADAMW, folder=tmp_path / "a", save_every=1)]
    with connect(mine, Faulty(lambda: hosts[-1], 0, rate=0.0)):
        train("gpt2", mine, optimizer_of(mine), range(3))
        hosts.append(Host(make_model("gpt2"), ADAMW, folder=tmp_path / "b", save_every=1))
        with pytest.raises(FrameError, match="has lost request 1"):
            train("gpt2", mine, optimizer_of(mine), range(1))
    with pytest.raises(CheckpointError, match="got another model's"):
        Host(make_model("llama"), ADAMW, folder=tmp_path / "a")
    (tmp_path / "a" / "split.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Host(make_model("gpt2"), ADAMW, folder=tmp_path / "a")


def test_a_journal_is_for_its_owner(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path / "j")
    journal.put_request(1, [b"x"])
    assert (tmp_path / "j").stat().st_mode & 0o077 == 0
    assert all(f.stat().st_mode & 0o077 == 0 for f in (tmp_path / "j").iterdir())
    assert FolderJournal(tmp_path / "j").session == journal.session
    saved = (tmp_path / "j" / "session.json").read_text()
    (tmp_path / "j" / "session.json").write_text(saved.replace('"version": 2', '"version": 1'))
    with pytest.raises(JournalError, match="must be a split journal of version 2"):
        FolderJournal(tmp_path / "j")
    (tmp_path / "j" / "session.json").write_text("{}")
    with pytest.raises(JournalError, match=r"session\.json"):
        FolderJournal(tmp_path / "j")


def test_mutated_requests_are_answered_and_the_session_goes_on() -> None:
    mine = make_model("llama")
    host = Host(make_model("llama"), ADAMW, max_length=64, max_open_passes=500)
    frames: list[Frame] = []

    class RecordingInProcess(InProcess):
        def exchange(self, request: list[memoryview]) -> bytes:
            frames.append(decode(b"".join(request)))
            return super().exchange(request)

    network = RecordingInProcess(host)
    with connect(mine, network, journal=known_state()) as link:
        train("llama", mine, optimizer_of(mine), range(1))
        pool = [frame for frame in frames if frame.number]
        dice = random.Random(0)
        codes: dict[object, int] = {}
        for _ in range(400):
            done = host.sessions["0" * 32].done
            frame = mutated(dice.choice(pool), dice, done)
            reply = decode(InProcess(host).exchange(encode(frame)))
            codes[reply.values.get("code")] = codes.get(reply.values.get("code"), 0) + 1
            now = host.sessions["0" * 32].done
            assert now == done or (
                now == done + 1 and frame.number == now and reply.kind is not Kind.ERROR
            )
        assert len(codes) > 6
        assert all(bool(torch.isfinite(t).all()) for t in host.backbone().values())
        link.log.number = host.sessions["0" * 32].done  # as if all had been this client's own
        link.log.journal.requests.clear()
        link.abandoned = sorted(host.sessions["0" * 32].pending)
        train("llama", mine, optimizer_of(mine), range(2))


def mutated(frame: Frame, dice: random.Random, done: int) -> Frame:
    """A request with something of it changed, removed or added."""
    values, tensors = dict(frame.values), dict(frame.tensors)
    what = dice.randrange(6)
    if what == 0 and values:
        values[dice.choice(sorted(values))] = dice.choice(
            [
                None,
                -1,
                10**12,
                "x",
                [],
                [[]],
                [["a", "b"]],
                True,
                0.5,
                [None] * 3,
                ["hidden_states"],
            ]
        )
    if what == 1 and values:
        name = dice.choice(sorted(values))
        found = values[name]
        values[name] = [*found[:-1], found[0]] if isinstance(found, list) and found else "y"
    if what == 2 and tensors:
        tensors.pop(dice.choice(sorted(tensors)))
    if what == 3 and tensors:
        name = dice.choice(sorted(tensors))
        t = tensors[name]
        tensors[name] = dice.choice(
            [
                t[:0],
                t.float(),
                t.long(),
                t[..., :1],
                t.flatten(),
                t * float("inf"),
                t.unsqueeze(0),
                t.bool(),
            ]
        )
    if what == 4 and tensors:
        tensors[
            dice.choice(
                [
                    "stream",
                    "attention_mask",
                    "position_embeddings.7",
                    "a.b",
                    "",
                    "past_key_values",
                    "hidden_states@1",
                ]
            )
        ] = next(iter(tensors.values()))
    number = done + 1 if dice.random() < 0.8 else dice.choice([0, 1, done, done + 2, 2**63])
    return Frame(
        dice.choice([Kind.FORWARD, Kind.BACKWARD, frame.kind, frame.kind]), number, values, tensors
    )
