"""The contract with Flower: its messages carry ours, its strategies agree with ours, and a run over
its messages is a run in this process.

Flower has an environment of its own (Makefile), in which these tests are run; elsewhere they are
skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.user_config import UserConfig
from flwr.serverapp import strategy as theirs

import support.federations as fed
from regauge.federated import (
    FederatedError,
    Settings,
    aggregate,
    flower,
    load_state,
    partition_examples,
    state_of,
)
from regauge.federated.aggregation import Memory
from regauge.federated.local_state import LocalState
from regauge.federated.runs import Source, run_federated
from regauge.federated.states import Absence, Contribution, digest_of, layout_of

SETTINGS = Settings(clients=4, rounds=2, batch=16, steps=2)
Answer = Callable[[Message, Message], Message | None]  # what becomes of a node's reply to a message


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages need the run in which they are made."""
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("flower") / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return Source(str(folder), "digits", mean=[0.3], std=[0.38], test="digits")


class Nodes:
    """A grid of nodes in this process, behind Flower's own messages. `bend` says what becomes of a
    client's replies.
    """

    def __init__(
        self, source: Source, count: int = 4, bend: dict[int, Answer] | None = None
    ) -> None:
        self.app, self.bend = flower.client_app(source), bend or {}
        self.nodes = {1000 + 7 * i: i for i in range(count)}
        self.contexts = {node: self.context(node) for node in self.nodes}
        self.sent: list[Message] = []  # what nodes answered, as a server would see it

    def context(self, node: int) -> Context:
        config = UserConfig({"partition-id": self.nodes[node], "num-partitions": len(self.nodes)})
        return Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=UserConfig()
        )

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[Any]:
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message {i}"
            client = self.nodes[message.metadata.dst_node_id]
            try:
                reply: Message | None = self.app(
                    copy.deepcopy(message), self.contexts[message.metadata.dst_node_id]
                )
            except RuntimeError as error:
                reply = Message(Error(code=2, reason=str(error)), reply_to=message)
            assert reply is not None
            self.sent.append(reply)
            if client in self.bend and message.metadata.message_type == "train":
                reply = self.bend[client](message, reply)
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = (
                    1 if reply.has_error() else message.metadata.dst_node_id
                )  # the SuperLink's own answers
                replies.append(reply)
        return replies[::-1]  # the last client replies first


def serve(
    source: Source, folder: Path, settings: Settings = SETTINGS, **more: Any
) -> flower.FederatedRun:
    return flower.serve(
        Nodes(source, settings.clients, **more), source, settings, folder, gather=0.0
    )  # type: ignore[arg-type]


def test_the_pinned_version_is_here_and_nothing_is_sent_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.supercore import telemetry

    flower.check_flower()
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    monkeypatch.setattr(flower.flwr, "__version__", "1.42.0")
    with pytest.raises(FederatedError, match=r"must have the version 1\.41, got 1\.42\.0"):
        flower.check_flower()


def test_a_run_over_flowers_messages_is_a_run_in_this_process(
    source: Source, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, strategy="fedadam", partition="dirichlet", jigsaw=0.3)
    here, there = (
        run_federated(source, settings, tmp_path / "here"),
        serve(source, tmp_path / "there", settings),
    )
    assert [r.contributed for r in there.run_state.history] == [(0, 1, 2, 3)] * 2
    assert all(
        torch.equal(here.run_state.state[n], there.run_state.state[n]) for n in here.run_state.state
    )
    other = run_federated(source, replace(settings, seed=1), tmp_path / "other")
    assert any(
        not torch.equal(here.run_state.state[n], other.run_state.state[n])
        for n in here.run_state.state
    )


def test_a_run_continues_after_a_server_crash_without_counting_a_round_twice(
    source: Source, tmp_path: Path
) -> None:
    whole = serve(source, tmp_path / "whole", replace(SETTINGS, rounds=3))
    serve(source, tmp_path / "run")
    again = serve(source, tmp_path / "run", replace(SETTINGS, rounds=3))
    assert [r.number for r in again.run_state.history] == [0, 1, 2]
    assert all(
        torch.equal(whole.run_state.state[n], again.run_state.state[n])
        for n in whole.run_state.state
    )


def fail(message: Message, reply: Message) -> Message:
    return Message(Error(code=1, reason="out of memory"), reply_to=message)


def empty(message: Message, reply: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def silent(message: Message, reply: Message) -> None:
    return None


def poison(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["classifier.bias"] = Array(np.full(10, np.nan, np.float32))
    return reply


def stale(message: Message, reply: Message) -> Message:
    reply.content["about"]["layout"] = "another"
    return reply


def newer(message: Message, reply: Message) -> Message:
    reply.content["about"]["regauge"] = 99
    return reply


def misshapen(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["classifier.bias"] = Array(np.zeros(11, np.float32))
    return reply


def foreign(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["another.bias"] = Array(np.zeros(1, np.float32))
    return reply


def lossless(message: Message, reply: Message) -> Message:
    reply.content["metrics"]["loss"] = float("nan")
    return reply


def garble(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["classifier.bias"] = Array(
        "float32", (10,), "numpy.ndarray", b"nothing"
    )
    return reply


def double_reply(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["classifier.bias"] = Array(np.zeros(10, np.float64))
    return reply


def boasting(message: Message, reply: Message) -> Message:
    reply.content["metrics"]["num-examples"] = 10**12
    return reply


def exploding(message: Message, reply: Message) -> Message:
    reply.content["arrays"]["classifier.bias"] = Array(np.full(10, 3e38, np.float32))
    return reply


def amplify(message: Message, reply: Message) -> Message:
    for name, array in reply.content["arrays"].items():
        reply.content["arrays"][name] = Array(-20 * array.numpy())
    return reply


def whole(message: Message, reply: Message) -> Message:
    reply.content["about"]["kind"] = "weights"
    return reply


def chatty(message: Message, reply: Message) -> Message:
    reply.content["about"]["refused"] = "escaped \x1b[31m " + 10**6 * "x"
    return reply


@pytest.mark.parametrize(
    ("bend", "why"),
    [
        (fail, "it failed: out of memory"),
        (empty, "its reply cannot be read"),
        (silent, "it did not answer"),
        (poison, '"classifier.bias" must be finite'),
        (stale, "another version of the model"),
        (newer, "the message version must be 1, got 99"),
        (misshapen, '"classifier.bias" must have the shape [10], got [11]'),
        (foreign, "tensors must be the model's, got 'another.bias'"),
        (lossless, "loss must be a finite float32 number, got nan"),
        (double_reply, '"classifier.bias" must be a dense float32 tensor, got float64'),
        (boasting, "examples must be between 1 and 360, got 1000000000000"),
        (exploding, "the norm must be at most 1.845e+19"),
        (amplify, "the median of the round"),
        (whole, "must be of the kind change, got 'weights'"),
        (chatty, "escaped \\x1b[31m "),
        (garble, "its reply cannot be read"),
    ],
)
def test_an_incompatible_node_is_reported_and_the_run_continues(
    bend: Answer, why: str, source: Source, tmp_path: Path
) -> None:
    run_result = serve(source, tmp_path / "run", replace(SETTINGS, rounds=1), bend={2: bend})
    (entry,) = run_result.run_state.history
    assert entry.contributed == (0, 1, 3)
    assert why in entry.absent["2"]
    assert len(entry.absent["2"]) < 1100


def test_a_node_of_another_model_says_so(source: Source, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fed.vit(num_labels=11).save_pretrained(other)  # type: ignore[operator]
    nodes = Nodes(replace(source, model=str(other)))
    engine = flower.GridEngine(nodes, SETTINGS, gather=0.0)  # type: ignore[arg-type]
    answers = list(engine.ask(0, [0, 1], state_of(fed.vit(num_labels=10))))
    assert all(
        isinstance(a, Absence)
        and "two versions of a model differ" in a.reason
        and "classifier.bias" in a.reason
        for a in answers
    )


def test_an_empty_part_takes_no_part(source: Source, tmp_path: Path) -> None:
    settings = replace(SETTINGS, clients=20, rounds=1, partition="dirichlet", alpha=0.02)
    model = source.build_model(settings)
    sizes = [len(part) for part in partition_examples(source.load_examples(model)[0], settings)]
    (entry,) = serve(source, tmp_path / "run", settings).run_state.history
    empty = {str(client) for client, size in enumerate(sizes) if size == 0}
    assert (
        empty
        == {client for client, why in entry.absent.items() if "its part is empty" in why}
        == entry.absent.keys()
    )
    assert 0 < len(empty) < 20


def test_without_nodes_a_run_stops_by_name_and_goes_on_when_they_come(
    source: Source, tmp_path: Path
) -> None:
    whole = serve(source, tmp_path / "whole")
    serve(source, tmp_path / "run", replace(SETTINGS, rounds=1))
    without_nodes: Any = Nodes(source, 0)
    with pytest.raises(
        FederatedError, match=r"round 2 had too few contributions 3 times.*no node is connected"
    ):
        flower.serve(without_nodes, source, SETTINGS, tmp_path / "run", gather=0.0)
    again = serve(source, tmp_path / "run")
    assert [(r.number, r.void) for r in again.run_state.history] == [
        (0, False),
        (1, True),
        (1, True),
        (1, True),
        (1, False),
    ]
    assert all(
        torch.equal(whole.run_state.state[n], again.run_state.state[n])
        for n in whole.run_state.state
    )


def test_a_node_that_does_not_say_which_client_it_is_is_passed_over(source: Source) -> None:
    class Strangers(Nodes):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            for reply in super().send_and_receive(messages, timeout=timeout):
                if "about" in reply.content and reply.metadata.src_node_id == 1007:
                    reply.content["about"].pop("client")
                yield reply

    answers = {
        a.client: a
        for a in flower.GridEngine(Strangers(source, 2), SETTINGS, gather=0.0).ask(
            0, [0, 1], state_of(fed.vit(num_labels=10))
        )
    }  # type: ignore[arg-type]
    assert isinstance(answers[0], Contribution)
    assert answers[1] == Absence(1, "no node is connected for it")


def test_a_node_cannot_claim_a_client_that_another_has(source: Source) -> None:
    class Impostor(Nodes):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            for reply in list(super().send_and_receive(messages, timeout=timeout)):
                if reply.content.config_records["about"].keys() == {"regauge", "client"}:
                    reply.content["about"]["client"] = 0
                yield reply

        def get_nodes(self) -> Iterable[Any]:
            return [SimpleNamespace(node_id=1000, name="client-0")]

    engine = flower.GridEngine(Impostor(source, 2), SETTINGS, gather=0.0)  # type: ignore[arg-type]
    answers = list(engine.ask(0, [0], state_of(fed.vit(num_labels=10))))
    assert engine.clients_by_node == {1000: 0}
    assert [type(a) for a in answers] == [Contribution]


def test_clients_without_a_node_are_absent(source: Source) -> None:
    engine = flower.GridEngine(Nodes(source, 2), SETTINGS, gather=0.0)  # type: ignore[arg-type]
    answers = {a.client: a for a in engine.ask(0, [0, 1, 2], state_of(fed.vit(num_labels=10)))}
    assert isinstance(answers[0], Contribution)
    assert answers[2] == Absence(2, "no node is connected for it")


def test_a_node_says_where_its_model_and_data_are_and_a_message_cannot() -> None:
    with pytest.raises(FederatedError, match="must set model, and data"):
        flower.parse_source({"partition-id": 0})
    made = flower.parse_source(
        {"model": "M", "data": "D", "mean": "0.3,0.4", "fields": "image=x,label=y"}
    )
    assert made == Source("M", "D", mean=[0.3, 0.4], fields={"image": "x", "label": "y"})


# Defences as mods


def test_defences_act_on_flowers_messages_as_in_this_process(
    source: Source, tmp_path: Path
) -> None:
    settings = replace(
        SETTINGS, rounds=1, defences=("freeze=embedding", "private=0.5,norm=0.1", "round=8")
    )
    here, there = (
        run_federated(source, settings, tmp_path / "here"),
        serve(source, tmp_path / "there", settings),
    )
    assert all(
        torch.equal(here.run_state.state[n], there.run_state.state[n]) for n in here.run_state.state
    )
    plain = serve(source, tmp_path / "plain", replace(SETTINGS, rounds=1))
    assert any(
        not torch.equal(plain.run_state.state[n], there.run_state.state[n])
        for n in plain.run_state.state
    )


def test_a_server_cannot_weaken_what_a_node_insists_on() -> None:
    def chosen(config: dict[str, Any], *texts: str) -> list[str]:
        context = Context(
            run_id=1,
            node_id=1,
            node_config=UserConfig(config),
            state=RecordDict(),
            run_config=UserConfig(),
        )
        return [repr(d) for d in flower.merge_defences(replace(SETTINGS, defences=texts), context)]

    assert chosen({"defences": "clip=0.1+round=8"}, "clip=100") == [
        "Clip(norm=0.1)",
        "Round(bits=8.0)",
    ]
    assert chosen({"defences": "clip=1e+1+round=8"}) == ["Clip(norm=10.0)", "Round(bits=8.0)"]
    assert chosen({}, "clip=100") == ["Clip(norm=100.0)"]


def test_a_defence_is_a_mod_for_any_app_that_answers_with_weights() -> None:
    before = {"w": torch.zeros(4)}
    message = Message(RecordDict({"arrays": flower.to_arrays(before)}), 1, "train")
    context = Context(
        run_id=1, node_id=1, node_config=UserConfig(), state=RecordDict(), run_config=UserConfig()
    )

    def app(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({"arrays": flower.to_arrays({"w": torch.full((4,), 5.0)})}), reply_to=message
        )

    reply = flower.make_mod("clip=1.0")(message, context, app)
    assert flower.from_arrays(reply.content["arrays"])["w"].norm() == pytest.approx(1.0)
    assert flower.from_arrays(app(message, context).content["arrays"])["w"].norm() == pytest.approx(
        10.0
    )
    with pytest.raises(FederatedError, match="must not depend on the parts"):
        flower.make_mod("withhold=head")


def test_withheld_tensors_stay_in_the_nodes_folder_and_equal_the_in_process_run(
    source: Source, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, defences=("withhold=embedding",))
    here = run_federated(source, settings, tmp_path / "here")
    nodes: Any = Nodes(source)
    nodes.app = flower.client_app(source, local_folder=tmp_path / "own")
    there = flower.serve(nodes, source, settings, tmp_path / "there", gather=0.0)
    assert all(
        torch.equal(here.run_state.state[n], there.run_state.state[n]) for n in here.run_state.state
    )
    one, two = LocalState(tmp_path / "here" / "own"), LocalState(tmp_path / "own")
    assert one.clients() == two.clients() == [0, 1, 2, 3]
    assert all(torch.equal(t, two.latest(2)[n]) for n, t in one.latest(2).items())
    (reason, _) = (
        a.reason
        for a in flower.GridEngine(Nodes(source), settings, gather=0.0).ask(
            0, [0, 1], state_of(fed.vit(num_labels=10))
        )
    )  # type: ignore
    assert "the folder of withheld tensors" in reason


def test_a_message_names_a_run_and_no_file() -> None:
    assert (
        flower.local_state_folder({"keep": "K"}, "0123456789abcdef")
        == Path("K") / "0123456789abcdef"
    )
    for name in ("", "../../elsewhere", "0123456789abcdeg"):
        with pytest.raises(FederatedError, match="must be 16 hexadecimal digits"):
            flower.local_state_folder({"keep": "K"}, name)


# Secure aggregation


def test_a_secure_sum_is_the_mean_and_reveals_no_contribution(
    source: Source, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, rounds=2, secure=True)
    nodes: Any = Nodes(source)
    secure = flower.serve(nodes, source, settings, tmp_path / "secure", gather=0.0, record=True)
    plain = run_federated(source, replace(settings, secure=False), tmp_path / "plain")
    assert [r.contributed for r in secure.run_state.history] == [(0, 1, 2, 3)] * 2
    worst = max(
        float((secure.run_state.state[n] - plain.run_state.state[n]).abs().max())
        for n in plain.run_state.state
    )
    assert 0 < worst < 1e-4
    from regauge.federated.recorder import load_update

    first, second = (load_update(tmp_path / "secure", 0, c).tensors for c in (0, 1))
    assert all(
        torch.equal(first[n], second[n]) for n in first
    )  # all that the server has is the mean
    trained = [m for m in nodes.sent if m.has_content() and m.content.array_records]
    assert all(
        not record for m in trained for record in m.content.array_records.values()
    )  # nothing went in the clear


def test_a_secure_sum_goes_on_without_one_and_refuses_two(source: Source, tmp_path: Path) -> None:
    settings = replace(SETTINGS, rounds=1, secure=True)
    late = {
        3: lambda message, reply: (
            None if "fitins.parameters" in message.content or "arrays" in message.content else reply
        )
    }
    run_result = serve(source, tmp_path / "run", settings, bend=late)
    assert run_result.run_state.history[0].contributed == (0, 1, 2)
    assert "dropped out of the secure sum" in run_result.run_state.history[0].absent["3"]
    engine = flower.GridEngine(Nodes(source, 2), settings, gather=0.0)  # type: ignore[arg-type]
    answers = list(engine.ask(0, [0, 1], state_of(fed.vit(num_labels=10))))
    assert all(isinstance(a, Absence) and "must have >= 3 clients" in a.reason for a in answers)
    with pytest.raises(FederatedError, match="clients must be >= 3"):
        Settings(clients=2, rounds=1, secure=True)
    with pytest.raises(FederatedError, match="secure sums must run on Flower"):
        run_federated(source, settings, tmp_path / "here")


# Flower's strategies


def replies(sent: list[Contribution], state: Any) -> list[Message]:
    """The same contributions as Flower's own apps send them: whole weights, and how many examples
    they are of.
    """
    out = []
    for c in sent:
        content = RecordDict(
            {
                "arrays": flower.to_arrays({n: state[n] + t for n, t in c.tensors.items()}),
                "metrics": MetricRecord({"num-examples": c.examples}),
            }
        )
        out.append(Message(content, reply_to=Message(RecordDict(), 1, "train")))
    return out


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam"])
def test_flowers_strategies_agree_with_ours(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    settings = Settings(
        clients=3,
        rounds=1,
        strategy=name,
        proximal=0.1,
        server_lr=0.1 if name == "fedadam" else None,
    )
    made = {
        "fedavg": theirs.FedAvg,
        "fedprox": theirs.FedProx,
        "fedadam": lambda: theirs.FedAdam(eta=0.1),
    }[name]()
    ours, memory = dict(state), Memory()
    current = flower.to_arrays(state)
    for number in range(1, 4):
        before = flower.from_arrays(current)
        sent = [
            Contribution(
                i,
                0,
                digest_of(layout_of(ours)),
                {n: 0.1 * torch.randn(t.shape, generator=draw) for n, t in ours.items()},
                5 + i,
                1,
                1,
                0.1,
                0.0,
            )
            for i in range(3)
        ]
        if name == "fedadam":
            made.current_arrays = {k: a.numpy() for k, a in current.items()}
        found, _ = made.aggregate_train(number, replies(sent, before))
        assert isinstance(found, ArrayRecord)
        current = found
        ours, memory = aggregate(ours, sent, memory, settings)
        for n, t in flower.from_arrays(current).items():
            assert torch.allclose(t.float(), ours[n], atol=1e-6), (n, number)
    assert not torch.allclose(ours["w"], state["w"], atol=1e-3)


# The real thing


def test_a_bert_over_flowers_messages_is_a_bert_in_this_process(tmp_path: Path) -> None:
    texts = fed.reader(tmp_path)
    settings = replace(SETTINGS, jigsaw=0.3)
    here, there = (
        run_federated(texts, settings, tmp_path / "here"),
        serve(texts, tmp_path / "there", settings),
    )
    assert all(
        torch.equal(here.run_state.state[n], there.run_state.state[n]) for n in here.run_state.state
    )
    assert any(
        not torch.equal(t, there.run_state.state[n])
        for n, t in state_of(texts.build_model(settings)).items()
    )


@pytest.mark.slow
def test_a_simulation_of_berts_is_a_run_in_this_process(tmp_path: Path) -> None:
    texts = fed.reader(tmp_path)
    here, there = (
        run_federated(texts, SETTINGS, tmp_path / "here"),
        flower.simulate(texts, SETTINGS, tmp_path / "there"),
    )
    assert [len(r.contributed) for r in there.run_state.history] == [4] * 2
    assert (
        max(
            float((here.run_state.state[n] - there.run_state.state[n]).abs().max())
            for n in here.run_state.state
        )
        <= 1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("clients", [4, 20])
def test_a_simulation_is_a_run_in_this_process(
    clients: int, source: Source, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, clients=clients)
    here, there = (
        run_federated(source, settings, tmp_path / "here"),
        flower.simulate(source, settings, tmp_path / "there"),
    )
    assert [len(r.contributed) for r in there.run_state.history] == [clients] * 2
    worst = max(
        float((here.run_state.state[n] - there.run_state.state[n]).abs().max())
        for n in here.run_state.state
    )
    assert worst <= 1e-6
    load_state(fed.vit(num_labels=10), there.run_state.state)
