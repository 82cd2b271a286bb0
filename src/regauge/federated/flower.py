"""Flower, and all that regauge knows of it: messages, a ClientApp, a ServerApp, mods, a simulation.
Nothing else imports flwr.

    simulate(source, settings, folder)            # Ray, in this machine's memory
    app = client_app(), server_app()              # what a bundle has for SuperLink and SuperNodes
    (`deploying`)

The rounds are ours (`rounds.run`), with a `GridEngine` in place of `InProcess`: what is checked,
averaged, kept and told is the same on every engine. Telemetry (of Flower, and of Ray) and the check
for updates are switched off before flwr is imported, unless the environment says otherwise.

A node trusts the server with weights and settings, and with nothing else: model, data and what it
must do to its updates at least (`defences`) are its own configuration, and a message cannot name a
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from regauge.errors import RegaugeError, need
from regauge.federated.deployment import QUIET_ENV

need("flwr", "federated")
for _name, _value in QUIET_ENV.items():
    os.environ.setdefault(_name, _value)  # read when flwr and ray are imported

import flwr  # noqa: E402
import torch  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.supercore import telemetry  # noqa: E402

from regauge.core.rng import seed_key  # noqa: E402
from regauge.data.tasks import Examples  # noqa: E402
from regauge.defences.gradients import Withhold  # noqa: E402
from regauge.defences.parser import split_combination  # noqa: E402
from regauge.defences.split import KeyedRandom  # noqa: E402
from regauge.federated.client import contribute  # noqa: E402
from regauge.federated.defences import apply_defences, frozen_names, read_defences  # noqa: E402
from regauge.federated.flower_secure import ask_securely, secure_mod  # noqa: E402
from regauge.federated.local_state import LocalState, next_local, withheld_names  # noqa: E402
from regauge.federated.partitions import partition_examples  # noqa: E402
from regauge.federated.rounds import completed_rounds  # noqa: E402
from regauge.federated.runs import LOCAL_FOLDER, RunResult, Source, run_federated  # noqa: E402
from regauge.federated.settings import VERSION, FederatedError, Settings, read_settings  # noqa: E402
from regauge.federated.state_store import Round  # noqa: E402
from regauge.federated.states import Absence, Contribution, State  # noqa: E402

telemetry.FLWR_TELEMETRY_ENABLED = os.environ[
    "FLWR_TELEMETRY_ENABLED"
]  # where somebody imported flwr first, it has read its default
# the minor version whose messages, grid and simulation this was written and tested against
PINNED = "1.41"
REPLY_TIMEOUT = 600.0  # seconds that a round waits for its clients
CLIENT_NAME = re.compile(r"client-(\d+)")
CONNECT_TIMEOUT = 60.0  # seconds that a round waits for clients that are not connected
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def check_flower() -> None:
    """Refuse another minor version of Flower: its transport and its API have changed between
    them.
    """
    found = str(flwr.__version__)
    if found.rpartition(".")[0] != PINNED:
        raise FederatedError(
            f"this regauge works with Flower {PINNED}, and {found} is installed",
            hint=f"pip install 'flwr[simulation]~={PINNED}.0'",
        )


# Messages


def to_arrays(state: State) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in state.items()}
    )


def from_arrays(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {str(name): torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def to_reply(sent: Contribution) -> RecordDict:
    about = ConfigRecord(
        {
            "regauge": VERSION,
            "client": sent.client,
            "round": sent.round,
            "layout": sent.layout,
            "kind": sent.kind,
        }
    )
    metrics = MetricRecord(
        {
            "num-examples": sent.examples,
            "steps": sent.steps,
            "batch": sent.batch,
            "rate": sent.lr,
            "loss": sent.loss,
        }
    )
    return RecordDict({"arrays": to_arrays(sent.tensors), "metrics": metrics, "about": about})


def from_reply(reply: Message, client: int) -> Contribution | Absence:
    """What a node sent, or why it cannot be used. Nothing that a node sends raises here."""
    if reply.has_error():
        return Absence(
            client, f"it failed: {reply.error.reason or f'Flower error {reply.error.code}'}"
        )
    try:
        about = reply.content["about"]
        if "refused" in about:
            return Absence(client, str(about["refused"]))
        if about["regauge"] != VERSION:
            return Absence(
                client, f"its regauge speaks version {about['regauge']}, this one {VERSION}"
            )
        metrics = reply.content["metrics"]
        examples, steps, batch = (int(metrics[name]) for name in ("num-examples", "steps", "batch"))
        rate, loss, layout, number = (
            float(metrics["rate"]),
            float(metrics["loss"]),
            str(about["layout"]),
            int(about["round"]),
        )
        tensors, kind = (
            from_arrays(reply.content["arrays"]),
            "weights" if about["kind"] == "weights" else "change",
        )
        return Contribution(
            client,
            number,
            layout,
            tensors,
            examples,
            steps,
            batch,
            rate,
            loss,
            kind,  # type: ignore[arg-type]
        )
    except Exception as error:  # keys, types, arrays that numpy cannot read: it came from outside
        return Absence(
            client, f"its answer cannot be read: {type(error).__name__}: {str(error)[:200]}"
        )


# The server


class GridEngine:
    """Clients behind a Flower grid. A node says which client it is when it is first met; those that
    do not answer in `wait` seconds are absent.
    """

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        wait: float = REPLY_TIMEOUT,
        gather: float = CONNECT_TIMEOUT,
        name: str = "",
    ) -> None:
        self.grid, self.settings, self.wait, self.gather, self.name = (
            grid,
            settings,
            wait,
            gather,
            name,
        )
        self.clients_by_node: dict[int, int] = {}  # the client of each node

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        nodes = {client: node for client, node in self._nodes(clients).items() if client in clients}
        if self.settings.secure:
            yield from (
                Absence(client, "no node is connected for it")
                for client in clients
                if client not in nodes
            )
            yield from ask_securely(
                self.grid, self.settings, self.wait, number, nodes, state, self.name
            )
            return
        config = ConfigRecord(
            {
                "regauge": VERSION,
                "run": self.name,
                "round": number,
                "settings": json.dumps(self.settings.to_dict()),
            }
        )
        arrays = to_arrays(state)
        messages = []
        for client in clients:
            if client in nodes:
                content = RecordDict({"arrays": arrays, "config": config})
                messages.append(
                    Message(content, nodes[client], "train", group_id=str(number), ttl=self.wait)
                )
            else:
                yield Absence(client, "no node is connected for it")
        who = {node: client for client, node in nodes.items()}
        for node, reply in self._exchange(messages, self.wait):
            yield from_reply(reply, who[node])

    def _exchange(
        self, messages: Sequence[Message], seconds: float
    ) -> Iterable[tuple[int, Message]]:
        """Replies, and the node that each is of. Where a node is lost the SuperLink answers for it,
        under its own number.
        """
        replies = list(self.grid.send_and_receive(messages, timeout=seconds)) if messages else []
        to = {
            m.metadata.message_id: int(m.metadata.dst_node_id) for m in messages
        }  # a grid numbers messages when it sends them
        return [
            (to[r.metadata.reply_to_message_id], r)
            for r in replies
            if r.metadata.reply_to_message_id in to
        ]

    def _nodes(self, clients: Sequence[int]) -> dict[int, int]:
        """The node of each client that is there. Waits for those that are asked, but not
        forever.
        """
        until = time.monotonic() + self.gather
        while True:
            present = set(self.grid.get_node_ids())
            self._read_names(present - self.clients_by_node.keys())
            self._query_nodes(present - self.clients_by_node.keys(), present)
            found = {
                client: node for node, client in self.clients_by_node.items() if node in present
            }
            if found.keys() >= set(clients) or time.monotonic() >= until:
                return found
            time.sleep(0.5)

    def _read_names(self, nodes: set[int]) -> None:
        """A node that was registered under the name client-N is client N, and need not be asked,
        which takes it a process.
        """
        for info in self.grid.get_nodes() if nodes else ():
            found = CLIENT_NAME.fullmatch(str(getattr(info, "name", "")))
            if found and int(info.node_id) in nodes:
                claims = {
                    node: client
                    for node, client in self.clients_by_node.items()
                    if client != int(found[1])
                }  # a registered name is more than a claim
                self.clients_by_node = {**claims, int(info.node_id): int(found[1])}

    def _query_nodes(self, nodes: Iterable[int], present: set[int]) -> None:
        """Query nodes without a registered name. A client that a connected node already has cannot
        be claimed by another.
        """
        asked = [
            Message(
                RecordDict({"config": ConfigRecord({"regauge": VERSION})}),
                node,
                "query",
                ttl=self.gather,
            )
            for node in sorted(nodes)
        ]
        for node, reply in self._exchange(asked, self.gather):
            with contextlib.suppress(
                KeyError, TypeError, ValueError, OverflowError
            ):  # a node that names no client has no part in the run
                claimed = int(reply.content["about"]["client"]) if reply.has_content() else None
                taken = {
                    client for other, client in self.clients_by_node.items() if other in present
                }
                if claimed is not None and claimed not in taken:
                    self.clients_by_node[node] = claimed


def serve(
    grid: Grid,
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    on_round: Callable[[Round], None] | None = None,
    **options: Any,
) -> RunResult:
    """All rounds on a grid. A folder that holds this run goes on where it stood."""
    waits = {name: options.pop(name) for name in ("wait", "gather") if name in options}
    return run_federated(
        source,
        settings,
        folder,
        engine=lambda name: GridEngine(grid, settings, name=name, **waits),
        on_round=on_round,
        **options,
    )


# The client


def client_app(
    source: Source | None = None, mods: Sequence[Mod] = (), local_folder: Path | None = None
) -> ClientApp:
    """A client for classification. Without a source, the node's configuration has it: model=PATH
    data=URI partition-id=N. What is withheld is kept in `own` or, on a node, in the folder that it
    names (keep=PATH).
    """
    app = ClientApp(mods=[secure_mod, *mods, defence_mod(source)])

    @app.query()  # type: ignore[untyped-decorator]
    def query(message: Message, context: Context) -> Message:
        return Message(
            RecordDict(
                {"about": ConfigRecord({"regauge": VERSION, "client": client_number(context)})}
            ),
            reply_to=message,
        )

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        client, config = client_number(context), message.content["config"]
        number = int(config.get("round", -1))
        try:
            if config["regauge"] != VERSION:
                raise FederatedError(
                    f"the server's regauge speaks version {config['regauge']}, this one {VERSION}"
                )
            settings = read_settings(json.loads(str(config["settings"])))
            model, part = load_part(
                source or parse_source(context.node_config),
                settings,
                client,
                "data" in context.node_config,
            )
            chosen, state = (
                merge_defences(settings, context),
                from_arrays(message.content["arrays"]),
            )
            still, hidden = frozen_names(model, chosen), withheld_names(model, chosen)
            place = (
                LocalState(
                    local_folder
                    or local_state_folder(context.node_config, str(config.get("run", "")))
                )
                if hidden
                else LocalState()
            )
            mine = place.load_before(client, number)
            made = contribute(
                model, state, part, settings, number, client, frozen=still, local=mine
            )
            if hidden:
                place.save(client, number, next_local(made, state, mine, hidden))
            return Message(to_reply(made), reply_to=message)
        except RegaugeError as error:
            about = ConfigRecord(
                {"regauge": VERSION, "client": client, "round": number, "refused": str(error)}
            )
            return Message(RecordDict({"about": about}), reply_to=message)

    return app


def defence_mod(source: Source | None = None) -> Mod:
    """The mod of our client: every defence of the run's settings, and those that the node asks for
    itself (`defences="clip=1.0+round=8"` in its configuration), on what leaves it. What cannot be
    defended does not leave. A node's noise is from the system's randomness; in a simulation, which
    has a `source`, it is from the seed.
    """

    def mod(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        reply = call_next(message, context)
        if (
            message.metadata.message_type != "train"
            or reply.has_error()
            or "arrays" not in reply.content
        ):
            return reply
        client = client_number(context)
        settings = read_settings(json.loads(str(message.content["config"]["settings"])))
        try:
            chosen = merge_defences(settings, context)
            if not chosen:
                return reply
            sent = from_reply(reply, client)
            assert isinstance(sent, Contribution)  # our own client made it
            model, _ = load_part(
                source or parse_source(context.node_config),
                settings,
                client,
                "data" in context.node_config,
            )
            secret = seed_key(settings.seed) if source else os.urandom(32)
            reply.content["arrays"] = to_arrays(apply_defences(sent, model, chosen, secret).tensors)
            return reply
        except RegaugeError as error:
            number = int(message.content["config"]["round"])
            about = ConfigRecord(
                {"regauge": VERSION, "client": client, "round": number, "refused": str(error)}
            )
            return Message(RecordDict({"about": about}), reply_to=message)

    return mod


def merge_defences(settings: Settings, context: Context) -> tuple[Any, ...]:
    """The run's defences, and the node's own. The node's come in place of the run's of the same
    kind: a server cannot weaken them.
    """
    own = [text for text in split_combination(str(context.node_config.get("defences", ""))) if text]
    kinds = {text.partition("=")[0] for text in own}
    return read_defences(
        [*own, *(text for text in settings.defences if text.partition("=")[0] not in kinds)]
    )


def make_mod(text: str, secret: bytes | None = None) -> Mod:
    """A defence as a mod for any ClientApp of Flower's whose train function answers with whole
    weights: "clip=1.0", "private=1.0,norm=0.5", "noise=0.1", "prune=0.9", "round=8". Parts of a
    model (freeze, withhold) need its class, and so our own client.
    """
    (defence,) = read_defences([text])
    if isinstance(defence, Withhold):
        raise FederatedError(
            f'"{text}" needs to know the model',
            hint="use regauge's own ClientApp, or leave the tensors out of your reply",
        )

    def mod(
        message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type.partition(".")[0] != "train" or reply.has_error():
            return reply
        for key, arrays in list(reply.content.array_records.items()):
            before, after = from_arrays(message.content[key]), from_arrays(arrays)
            draw = KeyedRandom(secret or os.urandom(32), f"mod/{key}")
            change = defence.apply_to_update(
                {n: t - before[n] for n, t in after.items()}, torch.nn.Module(), draw
            )
            reply.content[key] = to_arrays({n: before[n] + t for n, t in change.items()})
        return reply

    return mod


def client_number(context: Context) -> int:
    """Which client a node is, by its configuration."""
    return int(context.node_config["partition-id"])


def local_state_folder(config: Mapping[str, Any], name: str) -> Path:
    """Where a node keeps what it withholds from a run. The run's name came in a message: it is a
    name and no path.
    """
    if "keep" not in config:
        raise FederatedError(
            "this node has no folder for what it withholds",
            hint="flower-supernode --node-config 'keep=\"FOLDER\" ...'",
        )
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise FederatedError(
            "the server does not say which run this is, so that nothing can be kept for it",
            hint="is its regauge older?",
        )
    return Path(str(config["keep"])) / name


def parse_source(config: Mapping[str, Any]) -> Source:
    """A node's own model and data. `shared-data` is what all nodes have and share out among
    themselves; `data` is this node's alone.
    """
    if "model" not in config or not ("data" in config or "shared-data" in config):
        raise FederatedError(
            "this node does not say where its model and its data are",
            hint='flower-supernode --node-config \'model="..." data="..."\'',
        )
    given = {
        k: str(config[k])
        for k in ("split", "tokenizer", "test", "test_split", "device")
        if k in config
    }
    numbers = {
        k: [float(x) for x in str(config[k]).split(",")] for k in ("mean", "std") if k in config
    }
    length = {"length": int(config["length"])} if "length" in config else {}
    fields = (
        {"fields": dict(pair.split("=", 1) for pair in str(config["fields"]).split(","))}
        if "fields" in config
        else {}
    )
    return Source(
        str(config["model"]),
        str(config.get("data", config.get("shared-data"))),
        **given,  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
        **length,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def load_part(
    source: Source, settings: Settings, client: int, alone: bool
) -> tuple[torch.nn.Module, Examples]:
    model, shared, parts = _load_cached(
        json.dumps(source.to_dict(), sort_keys=True),
        json.dumps(settings.to_dict(), sort_keys=True),
        alone,
    )
    if not alone and client >= settings.clients:
        raise FederatedError(f"this node is client {client}, and the run has {settings.clients}")
    return model, shared if alone else parts[client]


@lru_cache(maxsize=2)  # of a worker that answers many messages
def _load_cached(
    source: str, settings: str, alone: bool
) -> tuple[torch.nn.Module, Examples, list[Examples]]:
    told, chosen = Source(**json.loads(source)), read_settings(json.loads(settings))
    model = told.build_model(chosen)
    shared = told.load_examples(model)[0]
    return model, shared, [] if alone else partition_examples(shared, chosen)


# The engines


def simulate(
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    on_round: Callable[[Round], None] | None = None,
    workers: int | None = None,
    **options: Any,
) -> RunResult:
    """All clients on this machine, as Ray's workers. `workers` train at the same time; by default
    one per core.
    """
    check_flower()
    need("ray", "federated")
    from flwr.simulation import run_simulation

    options["gather"] = max(
        options.get("gather", CONNECT_TIMEOUT), options.get("wait", REPLY_TIMEOUT)
    )  # all are there, and may be slow to start
    found: list[RunResult] = []
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        found.append(serve(grid, source, settings, folder, on_round=on_round, **options))

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers or os.cpu_count() or 1, "log_to_driver": False},
    }
    run_simulation(
        app,
        client_app(source, local_folder=folder.absolute() / LOCAL_FOLDER),
        settings.clients,
        backend_config=backend,
    )
    if not found:
        raise FederatedError(
            "the simulation ended before its rounds were done",
            hint="what Flower says is above; the same command goes on",
        )
    return found[0]


def server_app() -> ServerApp:
    """The server of a bundle: settings, source and folder are in the run's configuration
    (`deploying`).
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        check_flower()
        config = context.run_config
        settings, source = (
            read_settings(json.loads(str(config["settings"]))),
            Source(**json.loads(str(config["source"]))),
        )
        waits = {name: float(config[name]) for name in ("wait", "gather")}

        def on_round(one: Any) -> None:
            absent = "".join(f"; absent: {client}, {why}" for client, why in one.absent.items())
            print(  # noqa: T201
                f"round {one.number + 1}/{settings.rounds}: {len(one.contributed)} "
                f"contributed{absent}",
                flush=True,
            )

        found = serve(
            grid,
            source,
            settings,
            Path(str(config["folder"])),
            on_round=on_round,
            record=bool(config["spy"]),
            **waits,
        )
        print(  # noqa: T201
            "\n".join(
                [*found.lines, f"{len(completed_rounds(found.run_state.history))} rounds are done"]
            ),
            flush=True,
        )

    return app
