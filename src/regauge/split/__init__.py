"""Split learning: data, labels, embedding and head stay on a client, the backbone runs on a server.

    host = Host(model, OptimizerConfig("adamw", lr=1e-3), folder="checkpoint")    # server
    link = connect(client_model, InProcess(host), element=g, rows="batch")        # client

After `connect` the client's model is trained like any other; only named tensors cross the network.

- `protocol/`: `frames` (bytes to named tensors), `messages` (their meaning, validated), `channel`
  and `certificates` (gRPC options and TLS), `transport` (the network as one method).
- `server/`: `host` (the rules of a session) over `sessions`, `executor`, `generation`, `rounds`
  and `checkpoint`; `memory`, `costs`, `quotas` and `flow_control` bound what clients use;
  `network` serves it all over gRPC.
- `client/`: `remote_backbone` (the model's blocks, run by the server), `request_log` and `journal`
  (every request executed exactly once), `train` (the training loop).
"""

from regauge.data.optimizer_config import OptimizerConfig
from regauge.errors import TransportError
from regauge.split.client.remote_backbone import RemoteBackbone, connect
from regauge.split.protocol.transport import InProcess, Transport
from regauge.split.server.host import Host

__all__ = [
    "Host",
    "InProcess",
    "RemoteBackbone",
    "OptimizerConfig",
    "Transport",
    "TransportError",
    "connect",
]
