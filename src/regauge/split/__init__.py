"""Split learning: data, labels, embedding and head stay with a client, the backbone is on a server,
and a few named tensors cross a network.

    host = Host(backbone, Training("adamw", rate=1e-3), folder="kept")    # the server's side
    link = connect(model, InProcess(host), element=g, rows="batch")       # the client's: the model
    is trained as ever

`frames` has the bytes that cross, `passing` what is in them, `host` the server's rules (over
`sessions`, `running`, `generating`, `master_weights`, `rounds` and `keeping`), `log` the client's,
`network` gRPC, `clients` the list of those that may come.
"""

from regauge.split.client.remote_backbone import RemoteBackbone, connect
from regauge.split.protocol.transport import InProcess, Transport, TransportError
from regauge.split.server.host import Host
from regauge.split.server.optimizer_config import OptimizerConfig

__all__ = [
    "Host",
    "InProcess",
    "RemoteBackbone",
    "OptimizerConfig",
    "Transport",
    "TransportError",
    "connect",
]
