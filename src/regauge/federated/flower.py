"""The Flower engine: messages, a ClientApp, a ServerApp, mods, and the simulation.

    simulate(source, settings, folder)  # Ray, on this machine
    client_app(), server_app()  # the apps of a bundle for SuperNodes and SuperLink (`deployment`)

Only this module and `flower_secure` import flwr. The rounds are regauge's (`rounds.run`), with a
`GridEngine` in place of `InProcess`: checks, aggregation, checkpoints and logs are the same on
every engine. Telemetry of Flower and Ray and the check for updates are switched off before flwr is
imported, unless the environment sets them.

A node accepts only weights and settings from the server. Model, data and the minimum of defences
are in the node's configuration, and a message cannot name a file.
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
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.supercore import telemetry  # noqa: E402

from regauge.core.rng import seed_key  # noqa: E402
from regauge.data.tasks import Examples  # noqa: E402
from regauge.defences.gradients import Withhold  # noqa: E402
from regauge.defences.parser import split_combination  # noqa: E402
from regauge.defences.split import KeyedRandom  # noqa: E402
from regauge.errors import FederatedError  # noqa: E402
from regauge.federated.client import contribute  # noqa: E402
from regauge.federated.defences import apply_defences, frozen_names, read_defences  # noqa: E402
from regauge.federated.flower_secure import ask_securely, secure_mod  # noqa: E402
from regauge.federated.local_state import LocalState, next_local, withheld_names  # noqa: E402
from regauge.federated.outputs import FederatedRun  # noqa: E402
from regauge.federated.partitions import partition_examples  # noqa: E402
from regauge.federated.rounds import completed_rounds  # noqa: E402
from regauge.federated.runs import LOCAL_FOLDER, Source, run_federated  # noqa: E402
from regauge.federated.settings import VERSION, Settings, read_settings  # noqa: E402
from regauge.federated.state_store import Round  # noqa: E402
from regauge.federated.states import Absence, Contribution, State  # noqa: E402

# flwr may have been imported before, with its default.
telemetry.FLWR_TELEMETRY_ENABLED = os.environ["FLWR_TELEMETRY_ENABLED"]

PINNED = "1.41"  # the minor version that this module is tested with
REPLY_TIMEOUT = 600.0  # seconds that a round waits for its clients
CLIENT_NAME = re.compile(r"client-(\d+)")
CONNECT_TIMEOUT = 60.0  # seconds that a round waits for clients that are not connected
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def check_flower() -> None:
    """Raise if Flower has another minor version: transport and API change between them."""
    version = str(flwr.__version__)
    if version.rpartition(".")[0] != PINNED:
        raise FederatedError(
            f"Flower must have the version {PINNED}, got {version}",
            hint=f"pip install 'flwr[simulation]~={PINNED}.0'",
        )


# Messages


def to_arrays(state: State) -> ArrayRecord:
    """Convert tensors to Flower's arrays."""
    return ArrayRecord(
        {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in state.items()}
    )


def from_arrays(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Convert Flower's arrays to tensors."""
    return {str(name): torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def to_reply(sent: Contribution) -> RecordDict:
    """Convert a contribution to the content of a reply."""
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
    """Parse the reply of a node; return an absence with the reason if it cannot be used.

    Never raises, whatever the node sends.
    """
    if reply.has_error():
        return Absence(
            client, f"it failed: {reply.error.reason or f'Flower error {reply.error.code}'}"
        )
    try:
        about = reply.content["about"]
        if "refused" in about:
            return Absence(client, str(about["refused"]))
        if about["regauge"] != VERSION:
            return Absence(client, f"the message version must be {VERSION}, got {about['regauge']}")
        metrics = reply.content["metrics"]
        examples, steps, batch = (int(metrics[name]) for name in ("num-examples", "steps", "batch"))
        lr, loss = float(metrics["rate"]), float(metrics["loss"])
        layout, number = str(about["layout"]), int(about["round"])
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
            lr,
            loss,
            kind,  # type: ignore[arg-type]
        )
    # A reply is untrusted: keys may be missing, types wrong, arrays unreadable for numpy.
    except Exception as error:
        return Absence(
            client, f"its reply cannot be read: {type(error).__name__}: {str(error)[:200]}"
        )


# The server


class GridEngine:
    """Clients behind a Flower grid.

    A node states its client when it connects. Clients that do not reply within `wait` seconds are
    absent.

    Args:
        grid: Flower's grid.
        settings: The settings of the run.
        wait: Seconds that a round waits for its clients.
        gather: Seconds that a round waits for clients that are not connected.
        name: The name of the run.
    """

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        wait: float = REPLY_TIMEOUT,
        gather: float = CONNECT_TIMEOUT,
        name: str = "",
    ) -> None:
        self.grid, self.settings, self.name = grid, settings, name
        self.wait, self.gather = wait, gather
        self.clients_by_node: dict[int, int] = {}

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        """Train a state on some clients, see `rounds.Engine`."""
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
        clients_of = {node: client for client, node in nodes.items()}
        for node, reply in self._exchange(messages, self.wait):
            yield from_reply(reply, clients_of[node])

    def _exchange(
        self, messages: Sequence[Message], seconds: float
    ) -> Iterable[tuple[int, Message]]:
        """Send messages, and return the replies with the node of each.

        The SuperLink replies for lost nodes, with its own id.
        """
        replies = list(self.grid.send_and_receive(messages, timeout=seconds)) if messages else []
        # A grid sets the ids of messages when it sends them.
        destinations = {
            message.metadata.message_id: int(message.metadata.dst_node_id) for message in messages
        }
        return [
            (destinations[reply.metadata.reply_to_message_id], reply)
            for reply in replies
            if reply.metadata.reply_to_message_id in destinations
        ]

    def _nodes(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the node of each connected client; wait `gather` seconds for these clients."""
        deadline = time.monotonic() + self.gather
        while True:
            present = set(self.grid.get_node_ids())
            self._read_names(present - self.clients_by_node.keys())
            self._query_nodes(present - self.clients_by_node.keys(), present)
            nodes = {
                client: node for node, client in self.clients_by_node.items() if node in present
            }
            if nodes.keys() >= set(clients) or time.monotonic() >= deadline:
                return nodes
            time.sleep(0.5)

    def _read_names(self, nodes: set[int]) -> None:
        """Map nodes that are registered as client-N to client N.

        They need no query, which would start a process on the node.
        """
        for info in self.grid.get_nodes() if nodes else ():
            match = CLIENT_NAME.fullmatch(str(getattr(info, "name", "")))
            if match and int(info.node_id) in nodes:
                # A registered name overrides a claim.
                claims = {
                    node: client
                    for node, client in self.clients_by_node.items()
                    if client != int(match[1])
                }
                self.clients_by_node = {**claims, int(info.node_id): int(match[1])}

    def _query_nodes(self, nodes: Iterable[int], present: set[int]) -> None:
        """Query nodes without a registered name for their client.

        The client of a connected node cannot be claimed by another node.
        """
        queries = [
            Message(
                RecordDict({"config": ConfigRecord({"regauge": VERSION})}),
                node,
                "query",
                ttl=self.gather,
            )
            for node in sorted(nodes)
        ]
        for node, reply in self._exchange(queries, self.gather):
            # Nodes without a client are ignored.
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
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
) -> FederatedRun:
    """Run all rounds on a grid.

    Args:
        grid: Flower's grid.
        source: The model and data of the server.
        settings: The settings of the run.
        folder: The folder of the run; an interrupted run is resumed.
        on_round: Callback after each round.
        **options: `wait` and `gather` of `GridEngine`, and further arguments of `run_federated`.
    """
    timeouts = {name: options.pop(name) for name in ("wait", "gather") if name in options}
    return run_federated(
        source,
        settings,
        folder,
        engine=lambda name: GridEngine(grid, settings, name=name, **timeouts),
        on_round=on_round,
        **options,
    )


# The client


def client_app(
    source: Source | None = None, mods: Sequence[Mod] = (), local_folder: Path | None = None
) -> ClientApp:
    """Return a ClientApp.

    Args:
        source: The model and data; None: from the node's configuration (model=PATH data=URI
            partition-id=N).
        mods: Further mods.
        local_folder: The folder of withheld tensors; None: from the node's configuration
            (keep=PATH).
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
                    f"the message version must be {VERSION}, got {config['regauge']}"
                )
            settings = read_settings(json.loads(str(config["settings"])))
            model, part = load_part(
                source or parse_source(context.node_config),
                settings,
                client,
                "data" in context.node_config,
            )
            defences = merge_defences(settings, context)
            state = from_arrays(message.content["arrays"])
            frozen, withheld = frozen_names(model, defences), withheld_names(model, defences)
            local_state = (
                LocalState(
                    local_folder
                    or local_state_folder(context.node_config, str(config.get("run", "")))
                )
                if withheld
                else LocalState()
            )
            local = local_state.load_before(client, number)
            contribution = contribute(
                model, state, part, settings, number, client, frozen=frozen, local=local
            )
            if withheld:
                local_state.save(client, number, next_local(contribution, state, local, withheld))
            return Message(to_reply(contribution), reply_to=message)
        except RegaugeError as error:
            return _refuse(message, client, number, error)

    return app


def _refuse(message: Message, client: int, number: int, error: RegaugeError) -> Message:
    """Return the reply of a client that cannot contribute, with the reason."""
    about = ConfigRecord(
        {"regauge": VERSION, "client": client, "round": number, "refused": str(error)}
    )
    return Message(RecordDict({"about": about}), reply_to=message)


def defence_mod(source: Source | None = None) -> Mod:
    """Return the mod that applies all defences to the replies of regauge's ClientApp.

    These are the defences of the settings and of the node (`defences="clip=1.0+round=8"` in its
    configuration). A reply that cannot be defended is not sent. The noise of a node is from the
    system's randomness; in a simulation, which has a `source`, it is from the seed.
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
            defences = merge_defences(settings, context)
            if not defences:
                return reply
            sent = from_reply(reply, client)
            assert isinstance(sent, Contribution)  # made by regauge's own client
            model, _ = load_part(
                source or parse_source(context.node_config),
                settings,
                client,
                "data" in context.node_config,
            )
            secret = seed_key(settings.seed) if source else os.urandom(32)
            reply.content["arrays"] = to_arrays(
                apply_defences(sent, model, defences, secret).tensors
            )
            return reply
        except RegaugeError as error:
            return _refuse(message, client, int(message.content["config"]["round"]), error)

    return mod


def merge_defences(settings: Settings, context: Context) -> tuple[Any, ...]:
    """Return the defences of the run and of the node.

    The node's replace those of the run of the same kind: a server cannot weaken them.
    """
    own = [text for text in split_combination(str(context.node_config.get("defences", ""))) if text]
    kinds = {text.partition("=")[0] for text in own}
    return read_defences(
        [*own, *(text for text in settings.defences if text.partition("=")[0] not in kinds)]
    )


def make_mod(text: str, secret: bytes | None = None) -> Mod:
    """Return a defence as a mod for any ClientApp whose train function returns whole weights.

    Args:
        text: "clip=1.0", "private=1.0,norm=0.5", "noise=0.1", "prune=0.9" or "round=8".
        secret: The secret of the noise; None: from the system's randomness.

    Raises:
        FederatedError: The defence (freeze, withhold) depends on the parts of the model.
    """
    (defence,) = read_defences([text])
    if isinstance(defence, Withhold):
        raise FederatedError(
            f'a mod must not depend on the parts of the model, got "{text}"',
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
            random = KeyedRandom(secret or os.urandom(32), f"mod/{key}")
            change = defence.apply_to_update(
                {n: t - before[n] for n, t in after.items()}, torch.nn.Module(), random
            )
            reply.content[key] = to_arrays({n: before[n] + t for n, t in change.items()})
        return reply

    return mod


def client_number(context: Context) -> int:
    """Return the client of a node, from its configuration."""
    return int(context.node_config["partition-id"])


def local_state_folder(config: Mapping[str, Any], name: str) -> Path:
    """Return the folder of a node for withheld tensors of a run.

    The name of the run is from a message and is validated, so that it cannot be a path.
    """
    if "keep" not in config:
        raise FederatedError(
            'the node configuration must set "keep", the folder of withheld tensors',
            hint="flower-supernode --node-config 'keep=\"FOLDER\" ...'",
        )
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise FederatedError(
            f"the name of the run must be 16 hexadecimal digits, got {name!r:.40}",
            hint="the server may have an older regauge",
        )
    return Path(str(config["keep"])) / name


def parse_source(config: Mapping[str, Any]) -> Source:
    """Parse the model and data of a node's configuration.

    `shared-data` is partitioned among all nodes; `data` belongs to this node alone.
    """
    if "model" not in config or not ("data" in config or "shared-data" in config):
        raise FederatedError(
            "the node configuration must set model, and data or shared-data",
            hint='flower-supernode --node-config \'model="..." data="..."\'',
        )
    texts = {
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
        **texts,  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
        **length,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def load_part(
    source: Source, settings: Settings, client: int, is_own: bool
) -> tuple[torch.nn.Module, Examples]:
    """Return the model and the examples of a client; with `is_own`, all data are the client's."""
    model, shared, parts = _load_cached(
        json.dumps(source.to_dict(), sort_keys=True),
        json.dumps(settings.to_dict(), sort_keys=True),
        is_own,
    )
    if not is_own and client >= settings.clients:
        raise FederatedError(
            f"the client of a node must be < {settings.clients}, got {client}",
            hint="set another partition-id in its configuration",
        )
    return model, shared if is_own else parts[client]


@lru_cache(maxsize=2)  # a worker answers many messages
def _load_cached(
    source: str, settings: str, is_own: bool
) -> tuple[torch.nn.Module, Examples, list[Examples]]:
    parsed_source, parsed_settings = (
        Source(**json.loads(source)),
        read_settings(json.loads(settings)),
    )
    model = parsed_source.build_model(parsed_settings)
    shared = parsed_source.load_examples(model)[0]
    return model, shared, [] if is_own else partition_examples(shared, parsed_settings)


# The engines


def simulate(
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    on_round: Callable[[Round], None] | None = None,
    workers: int | None = None,
    **options: Any,
) -> FederatedRun:
    """Run all clients on this machine, as Ray workers.

    Args:
        source: The model and data.
        settings: The settings of the run.
        folder: The folder of the run; an interrupted run is resumed.
        on_round: Callback after each round.
        workers: The number of workers; None: one for each core.
        **options: Further arguments of `serve`.
    """
    check_flower()
    need("ray", "federated")
    from flwr.simulation import run_simulation

    # All clients exist, but may be slow to start.
    options["gather"] = max(
        options.get("gather", CONNECT_TIMEOUT), options.get("wait", REPLY_TIMEOUT)
    )
    results: list[FederatedRun] = []
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        results.append(serve(grid, source, settings, folder, on_round=on_round, **options))

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
    if not results:
        raise FederatedError(
            "the simulation ended before its last round",
            hint="see Flower's messages above; the same command resumes the run",
        )
    return results[0]


def server_app() -> ServerApp:
    """Return the ServerApp of a bundle, configured by the run configuration (`deployment`)."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        check_flower()
        config = context.run_config
        settings = read_settings(json.loads(str(config["settings"])))
        source = Source(**json.loads(str(config["source"])))
        timeouts = {name: float(config[name]) for name in ("wait", "gather")}

        def on_round(finished: Any) -> None:
            absent = "".join(
                f"; absent: {client}, {reason}" for client, reason in finished.absent.items()
            )
            print(  # noqa: T201
                f"round {finished.number + 1}/{settings.rounds}: {len(finished.contributed)} "
                f"contributed{absent}",
                flush=True,
            )

        result = serve(
            grid,
            source,
            settings,
            Path(str(config["folder"])),
            on_round=on_round,
            record=bool(config["record"]),
            **timeouts,
        )
        count = len(completed_rounds(result.history))
        print(f"{result}\n{count} rounds are done", flush=True)  # noqa: T201

    return app
