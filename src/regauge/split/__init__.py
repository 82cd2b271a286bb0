"""Split learning: data, labels, embedding and head stay on a client, the backbone runs on a server.

    regauge.split.make_certificates("certs", ["server.example"], ["ann"])
    regauge.split.serve("MODEL", address="0.0.0.0:7000", tls="certs")             # server
    remote = regauge.split.connect("MODEL", "server.example:7000", tls="certs")   # client
    remote(**inputs).loss.backward()
    regauge.split.train("MODEL", "server.example:7000", "book.txt", out="edges")  # or all of it

After `connect` the client's model is trained like any other; only named tensors cross the network.
In one process, `connect(model, InProcess(Host(model, OptimizerConfig("adamw", lr=1e-3))))`.

- `protocol/`: `frames` (bytes to named tensors), `messages` (their meaning, validated), `channel`
  and `certificates` (gRPC options and TLS), `transport` (the network as one method).
- `server/`: `service` (`serve`), `host` (the rules of a session) over `sessions`, `executor`,
  `generation`, `rounds` and `checkpoint`; `memory`, `costs`, `quotas` and `flow_control` bound what
  clients use; `network` serves it all over gRPC.
- `client/`: `connection` (`connect`), `run` (`train` and `predict`), `remote_backbone` (the model's
  blocks, run by the server), `request_log` and `journal` (every request executed exactly once),
  `train` (the training loop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.data.optimizer_config import OptimizerConfig as OptimizerConfig
    from regauge.errors import TransportError as TransportError
    from regauge.split.client.connection import ConnectOptions as ConnectOptions
    from regauge.split.client.connection import connect as connect
    from regauge.split.client.remote_backbone import RemoteBackbone as RemoteBackbone
    from regauge.split.client.run import Prediction as Prediction
    from regauge.split.client.run import TrainOptions as TrainOptions
    from regauge.split.client.run import TrainResult as TrainResult
    from regauge.split.client.run import predict as predict
    from regauge.split.client.run import train as train
    from regauge.split.parts import join as join
    from regauge.split.parts import write_part as write_part
    from regauge.split.protocol.certificates import make_certificates as make_certificates
    from regauge.split.protocol.transport import InProcess as InProcess
    from regauge.split.protocol.transport import Transport as Transport
    from regauge.split.server.host import Host as Host
    from regauge.split.server.service import ServerOptions as ServerOptions
    from regauge.split.server.service import SplitServer as SplitServer
    from regauge.split.server.service import serve as serve

_HOME = {
    "ConnectOptions": "split.client.connection",
    "Host": "split.server.host",
    "InProcess": "split.protocol.transport",
    "OptimizerConfig": "data.optimizer_config",
    "Prediction": "split.client.run",
    "RemoteBackbone": "split.client.remote_backbone",
    "ServerOptions": "split.server.service",
    "SplitServer": "split.server.service",
    "TrainOptions": "split.client.run",
    "TrainResult": "split.client.run",
    "Transport": "split.protocol.transport",
    "TransportError": "errors",
    "connect": "split.client.connection",
    "join": "split.parts",
    "make_certificates": "split.protocol.certificates",
    "predict": "split.client.run",
    "serve": "split.server.service",
    "train": "split.client.run",
    "write_part": "split.parts",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
