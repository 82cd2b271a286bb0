"""Flower's secure aggregation (SecAgg+) under our rounds: the server learns the mean of the
contributions and no single one.

SecAgg+ of Flower 1.41 speaks its older interface (FitIns, a LegacyContext); it is translated here,
on both sides, and nothing else knows of it. Changes are quantised to 22 bits between -1 and 1, so
that the mean is exact to about 1e-6; a client whose change is not finite, or larger, drops out.
Whoever drops out after keys were shared is recovered from, as long as two thirds answer. Since no
contribution can be looked at, none can be refused for what is in it: one client can spoil a mean.
What each client is told to have sent is the mean, here and in what the spy keeps.
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

CLIP_RANGE, MIN_SHARE, MAX_WEIGHT = (
    1.0,
    2 / 3,
    4096,
)  # of a change; of clients that must answer; examples that a client can weigh
MIN_CLIENTS = 3  # a sum of two tells each of them the other's
Next = Callable[[Message, Context], Message]


class _CaptureStrategy:
    """A strategy of Flower's older kind, for one round: it asks who it is told to, and keeps what
    comes.
    """

    def __init__(self, nodes: Sequence[int], ins: FitIns) -> None:
        self.nodes, self.ins, self.results = nodes, ins, []  # type: Sequence[int], FitIns, list[tuple[Any, FitRes]]

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
    """One round of SecAgg+ with the nodes of these clients: every client that took part is given
    the mean for its contribution.
    """
    if len(nodes) < MIN_CLIENTS:
        yield from (
            Absence(c, f"only {len(nodes)} are there, and a secure sum needs {MIN_CLIENTS}")
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
    caught = _CaptureStrategy(sorted(nodes.values()), FitIns(parameters, config))
    context = LegacyContext(
        Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=caught,
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
    who = {node: client for client, node in nodes.items()}
    for proxy, result in caught.results:
        yield _parse_result(who[proxy.node_id], names, result, state)
    answered = {who[proxy.node_id] for proxy, _ in caught.results}
    yield from (
        Absence(c, "it dropped out of the secure sum, or the sum failed")
        for c in nodes
        if c not in answered
    )


def _parse_result(
    client: int, names: Sequence[str], result: FitRes, state: State
) -> Contribution | Absence:
    try:
        told = {
            k: result.metrics[k]
            for k in ("round", "layout", "examples", "steps", "batch", "rate", "loss")
        }
        arrays = parameters_to_ndarrays(result.parameters)
        tensors = {
            n: torch.from_numpy(np.asarray(a)).to(state[n].dtype).reshape(state[n].shape)
            for n, a in zip(names, arrays, strict=True)
        }
        examples, steps, batch = (int(told[k]) for k in ("examples", "steps", "batch"))
        return Contribution(
            client,
            int(told["round"]),
            str(told["layout"]),
            tensors,
            examples,
            steps,
            batch,
            float(told["rate"]),
            float(told["loss"]),
        )
    except Exception as error:  # it came from outside
        return Absence(
            client, f"its answer cannot be read: {type(error).__name__}: {str(error)[:200]}"
        )


def secure_mod(message: Message, context: Context, call_next: Next) -> Message:
    """The client's mod. A node with `secure=true` in its configuration answers nothing but secure
    sums.
    """
    if message.metadata.message_type != "train":
        return call_next(message, context)
    if RECORD_KEY_CONFIGS in message.content.config_records:
        return secaggplus_mod(message, context, lambda m, c: _translate(m, c, call_next))
    if context.node_config.get("secure"):
        raise RuntimeError("this node contributes to secure sums only")
    return call_next(message, context)


def _translate(message: Message, context: Context, call_next: Next) -> Message:
    """From Flower's older messages to ours, and back."""
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
    sent = {str(n): a.numpy() for n, a in reply.content["arrays"].items()}
    changes = [sent.get(n, np.zeros_like(a)) for n, a in zip(names, before, strict=True)]
    if not all(np.isfinite(a).all() and (np.abs(a) <= CLIP_RANGE).all() for a in changes):
        raise RuntimeError(
            f"a change is not finite, or larger than {CLIP_RANGE}: it cannot be in a secure sum"
        )
    metrics = reply.content["metrics"]
    weigh = json.loads(str(config["settings"]))["weigh"]
    told = {"round": about["round"], "layout": about["layout"], "examples": metrics["num-examples"]}
    told |= {k: metrics[k] for k in ("steps", "batch", "rate", "loss")}
    count = 1 if weigh == "clients" else int(metrics["num-examples"])
    if count > MAX_WEIGHT:
        raise RuntimeError(
            f"{count} examples weigh more than a secure sum can count: set --weigh clients"
        )
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(changes), count, told)
    return Message(compat.fitres_to_recorddict(result, False), reply_to=message)
