"""Secure aggregation by Flower's SecAgg+: the server learns only the mean of the contributions.

SecAgg+ of Flower 1.41 uses the older interface (FitIns, a LegacyContext), which is translated here
on both sides. Changes are quantized to 22 bits between -1 and 1, so that the mean is exact to about
1e-6; a client with a change that is not finite, or larger, drops out. Clients that drop out after
the key exchange are recovered from, as long as two thirds reply. Single contributions cannot be
inspected, so none can be rejected by its values: one client can spoil a mean. The mean counts as
the contribution of every client, here and in recorded runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey

from regauge.federated.settings import VERSION
from regauge.federated.states import Absence, Contribution, State

CLIP_RANGE = 1.0  # largest absolute value of a change
MIN_SHARE = 2 / 3  # of the clients that must reply
MAX_WEIGHT = 4096  # of a client in the mean: its number of examples
MIN_CLIENTS = 3  # a sum of two reveals to each client the contribution of the other
Next = Callable[[Message, Context], Message]


class _CaptureStrategy:
    """A strategy of Flower's older interface for one round: it stores the results."""

    def __init__(self, nodes: Sequence[int], ins: FitIns) -> None:
        self.nodes, self.ins = nodes, ins
        self.results: list[tuple[Any, FitRes]] = []

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), self.ins) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        self.results = results
        return None, {}


def ask_securely(
    grid: Any,
    settings: Any,
    wait: float,
    number: int,
    nodes: dict[int, int],
    state: State,
    name: str = "",
) -> Iterable[Contribution | Absence]:
    """Run one round of SecAgg+, and yield the mean as the contribution of each client.

    Args:
        grid: Flower's grid.
        settings: The settings of the run.
        wait: Seconds that the round waits for its clients.
        number: The round, from 0.
        nodes: The node of each client.
        state: The server's state.
        name: The name of the run.
    """
    if len(nodes) < MIN_CLIENTS:
        yield from (
            Absence(c, f"a secure sum must have >= {MIN_CLIENTS} clients, got {len(nodes)}")
            for c in nodes
        )
        return
    names = sorted(state)
    parameters = ndarrays_to_parameters([state[n].detach().cpu().numpy() for n in names])
    config = {
        "regauge": VERSION,
        "run": name,
        "round": number,
        "settings": json.dumps(settings.to_dict()),
        "names": json.dumps(names),
    }
    strategy = _CaptureStrategy(sorted(nodes.values()), FitIns(parameters, config))
    context = LegacyContext(
        Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=strategy,
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord(
        {WorkflowKey.CURRENT_ROUND: number}
    )
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        parameters, True
    )
    weight = 1.0 if settings.weigh == "clients" else float(MAX_WEIGHT)
    SecAggPlusWorkflow(1.0, MIN_SHARE, max_weight=weight, clipping_range=CLIP_RANGE, timeout=wait)(
        grid, context
    )
    clients = {node: client for client, node in nodes.items()}
    for proxy, result in strategy.results:
        yield _parse_result(clients[proxy.node_id], names, result, state)
    answered = {clients[proxy.node_id] for proxy, _ in strategy.results}
    yield from (
        Absence(c, "it dropped out of the secure sum, or the sum failed")
        for c in nodes
        if c not in answered
    )


def _parse_result(
    client: int, names: Sequence[str], result: FitRes, state: State
) -> Contribution | Absence:
    """Parse the result of a client; return an absence with the reason if it cannot be used."""
    try:
        metrics = {
            k: result.metrics[k]
            for k in ("round", "layout", "examples", "steps", "batch", "rate", "loss")
        }
        arrays = parameters_to_ndarrays(result.parameters)
        tensors = {
            n: torch.from_numpy(np.asarray(a)).to(state[n].dtype).reshape(state[n].shape)
            for n, a in zip(names, arrays, strict=True)
        }
        examples, steps, batch = (int(metrics[k]) for k in ("examples", "steps", "batch"))
        return Contribution(
            client,
            int(metrics["round"]),
            str(metrics["layout"]),
            tensors,
            examples,
            steps,
            batch,
            float(metrics["rate"]),
            float(metrics["loss"]),
        )
    except Exception as error:  # untrusted
        return Absence(
            client, f"its reply cannot be read: {type(error).__name__}: {str(error)[:200]}"
        )


def secure_mod(message: Message, context: Context, call_next: Next) -> Message:
    """Handle secure sums on a client, as a mod.

    A node with `secure=true` in its configuration rejects everything else.
    """
    if message.metadata.message_type != "train":
        return call_next(message, context)
    if RECORD_KEY_CONFIGS in message.content.config_records:
        return secaggplus_mod(message, context, lambda m, c: _translate(m, c, call_next))
    if context.node_config.get("secure"):
        raise RuntimeError("this node contributes only to secure sums")
    return call_next(message, context)


def _translate(message: Message, context: Context, call_next: Next) -> Message:
    """Translate a message of Flower's older interface, and the reply back."""
    ins = compat.recorddict_to_fitins(message.content, True)
    names = json.loads(str(ins.config["names"]))
    before = parameters_to_ndarrays(ins.parameters)
    arrays = ArrayRecord({n: Array(a) for n, a in zip(names, before, strict=True)})
    config = ConfigRecord({k: ins.config[k] for k in ("regauge", "run", "round", "settings")})
    message.content = RecordDict({"arrays": arrays, "config": config})
    reply = call_next(message, context)
    about = reply.content["about"]
    if "refused" in about:
        raise RuntimeError(str(about["refused"]))
    tensors = {str(n): a.numpy() for n, a in reply.content["arrays"].items()}
    changes = [tensors.get(n, np.zeros_like(a)) for n, a in zip(names, before, strict=True)]
    if not all(np.isfinite(a).all() and (np.abs(a) <= CLIP_RANGE).all() for a in changes):
        raise RuntimeError(
            f"a change in a secure sum must be finite and between -{CLIP_RANGE} and {CLIP_RANGE}"
        )
    metrics = reply.content["metrics"]
    weigh = json.loads(str(config["settings"]))["weigh"]
    result_metrics = {
        "round": about["round"],
        "layout": about["layout"],
        "examples": metrics["num-examples"],
    }
    result_metrics |= {k: metrics[k] for k in ("steps", "batch", "rate", "loss")}
    weight = 1 if weigh == "clients" else int(metrics["num-examples"])
    if weight > MAX_WEIGHT:
        raise RuntimeError(
            f"the examples of a client in a secure sum must be <= {MAX_WEIGHT}, got {weight}: set "
            "--weigh clients"
        )
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(changes), weight, result_metrics)
    return Message(compat.fitres_to_recorddict(result, False), reply_to=message)
