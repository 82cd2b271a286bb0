"""A client's connection: its model loaded without blocks, and joined to a server's backbone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from regauge.checkpoints.reader import Checkpoint
from regauge.core.element import Element
from regauge.core.names import items_of
from regauge.core.options import require_device
from regauge.defences.split import Defence, Rows, parse_defences
from regauge.errors import Hint, LockError, RegaugeError, SplitError, TransportError
from regauge.locking.keys import Key, resolve_key
from regauge.locking.lock import locked_element, record_of
from regauge.models.families import Boundary
from regauge.models.load import load_part
from regauge.models.resolve import spec_of
from regauge.models.sources import open_source
from regauge.split.client.journal import FolderJournal, Journal, MemoryJournal
from regauge.split.client.remote_backbone import RemoteBackbone
from regauge.split.protocol.channel import Tls, load_tls
from regauge.split.protocol.frames import Bytes, Limits
from regauge.split.protocol.transport import Transport
from regauge.split.server.network import Grpc

if TYPE_CHECKING:
    from regauge.models.sources import Source

FIRST_CONTACT_SECONDS = 10.0  # the first contact must succeed within
_log = logging.getLogger("regauge.split.run")


@dataclass(frozen=True)
class ConnectOptions:
    """How a client connects: the options of `connect` that `train` and `predict` pass on.

    Attributes:
        tls: Certificates: a folder of `make_certificates`, three files
            "authority,certificate,key", or a `Tls`.
        client_name: Client whose certificate in the folder to use. Default: its only one.
        insecure: Connect to other addresses than loopback without TLS.
        key: Key, or its file, that locks the model and the server's backbone.
        defences: Defences for outgoing features, as in "noise=0.5+rows".
        codec: Lossy compression of features: "" (none), "BF16", "F16" or "Q8".
        patience: Seconds to retry while the server does not answer.
        dtype: Dtype of the weights in memory; it must equal the server's.
        device: Device of embedding and head.

    Example:
        >>> server = regauge.split.InProcess(regauge.split.Host(regauge.load_model("vit")))
        >>> connection = regauge.split.ConnectOptions(defences=["noise=0.5"], codec="BF16")
        >>> prediction = regauge.split.predict(vit, server, images, connection=connection)
    """

    tls: Tls | Path | str | None = None
    client_name: str | None = None
    insecure: bool = False
    key: Key | Path | str | None = None
    defences: Sequence[Defence | str] = ()
    codec: str = ""
    patience: float = 120.0
    dtype: str = "float32"
    device: str = "cpu"


def connect(
    client: Source,
    server: str | Transport,
    *,
    tls: Tls | Path | str | None = None,
    client_name: str | None = None,
    insecure: bool = False,
    key: Key | Path | str | None = None,
    defences: Sequence[Defence | str] = (),
    rows: Literal["batch", "sample"] | None = None,
    keep_cls: bool = False,
    codec: str = "",
    journal: Journal | Path | str | None = None,
    patience: float = 120.0,
    dtype: str = "float32",
    device: str = "cpu",
    element: Element | None = None,
    key_id: str = "",
    secret: bytes | int | None = None,
    config: Mapping[str, Any] | None = None,
    boundaries: Sequence[Boundary] | None = None,
    limits: Limits | None = None,
) -> RemoteBackbone:
    """Run a model's backbone on a server until the returned link is closed.

    The model is used, trained and saved as before: the result is called like it.

    Args:
        client: The model, of which embedding and head are used: a path, a hub id, a checkpoint, or
            a module whose family has a cut (any module with `boundaries`).
        server: HOST:PORT of a server, or another transport, such as `InProcess`.
        tls: Certificates: a folder of `make_certificates`, three files
            "authority,certificate,key", or a `Tls`.
        client_name: Client whose certificate in the folder to use. Default: its only one.
        insecure: Connect to other addresses than loopback without TLS.
        key: Key, or its file, that locks both the model and the server's backbone.
        defences: Defences for outgoing features; "noise=0.5" stands for `Noise(0.5)`.
        rows: Permute the tokens, with a fresh permutation for every "batch" or every "sample".
        keep_cls: Leave the first token in its place.
        codec: Lossy compression of features: "" (none), "BF16", "F16" or "Q8".
        journal: Folder of a run that can be resumed after the client was killed.
        patience: Seconds without a reply after which an exchange fails.
        dtype: Dtype of a loaded model; it must equal the server's.
        device: Device of a loaded model.
        element: Element that the backbone is locked with, for a module.
        key_id: Id of the lock's key, to compare it with the server's, for a module.
        secret: Seed of the permutations; by default it is random.
        config: The model's config, if it does not carry one.
        boundaries: Where the model is cut, if its family does not define it.
        limits: Largest frame to accept from the server.

    Returns:
        The model with its remote backbone, a context manager that closes itself.

    Raises:
        CutError: The model cannot be cut, or is authorized or permuted locally.
        LockError: Model, key and server do not have the same lock.
        RefusedError: The server rejects the model, the key or the session.
        TransportError: The server cannot be reached.

    Example:
        >>> ids = torch.arange(6)[None]
        >>> with regauge.split.serve("model", address="127.0.0.1:0", background=True) as server:
        ...     with regauge.split.connect("model", server.address) as remote:
        ...         loss = remote(input_ids=ids, labels=ids).loss
    """
    all_defences = parse_defences(
        [*items_of(defences), *([] if rows is None else [Rows(rows, keep_cls)])]
    )
    require_device(device)
    options = ConnectOptions(
        tls, client_name, insecure, key, all_defences, codec, patience, dtype, device
    )
    if isinstance(client, torch.nn.Module):
        if key is not None:
            raise LockError(
                "key requires a locked checkpoint, got a module",
                hint="pass the folder of the locked model, or element=",
            )
        loaded = ClientModel(client, config, element, key_id)
    else:
        loaded = load_client(client, options)
    return join_server(
        loaded, server, options, journal, secret=secret, boundaries=boundaries, limits=limits
    )


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model without blocks, and the element of its lock.

    Attributes:
        module: The model.
        config: Its config, if the module does not carry one.
        element: The element that the server's backbone is locked with.
        key_id: Id of the lock's key.
        checkpoint: The checkpoint that it was loaded from; None for a live module, whose lock is
            unknown.
    """

    module: torch.nn.Module
    config: Mapping[str, Any] | None = None
    element: Element | None = None
    key_id: str = ""
    checkpoint: Checkpoint | None = None


def load_client(client: Source, options: ConnectOptions) -> ClientModel:
    """Load embedding and head of a model, and derive the element of its lock from the key.

    Raises:
        LockError: The model is locked and no key was passed, or the reverse.
    """
    if isinstance(client, torch.nn.Module):
        return ClientModel(client)
    require_device(options.device)
    checkpoint, _ = open_source(client)
    record, name = record_of(checkpoint), checkpoint.path
    key = None if options.key is None else resolve_key(options.key, "lock")
    if record is None and key is not None:
        raise LockError(
            f"a key requires a locked model, and {name} is not locked",
            hint="pass the locked model, whose embedding and head are plain; the server has the "
            "same one",
        )
    if record is not None and key is None:
        raise LockError(
            f"{name} is locked by the key {record.key}",
            hint=Hint("pass ConnectOptions(key=...)", cli="pass it with --key"),
        )
    _log.info("loading embedding and head of %s", name)
    module = load_part(checkpoint, "edges", options.dtype, options.device)
    element = None
    if record is not None and key is not None:
        element = locked_element(spec_of(module, config=checkpoint.config), record, key)
    if (config := getattr(module, "config", None)) is not None:
        config.use_cache = False
    has_rows = any(isinstance(d, Rows) for d in parse_defences(options.defences))
    if has_rows and hasattr(module, "set_attn_implementation"):
        # masks that a fused kernel builds do not follow the shuffled rows
        module.set_attn_implementation("eager")  # type: ignore[operator]
    key_id = "" if record is None else record.key
    return ClientModel(module, checkpoint.config, element, key_id, checkpoint)


def join_server(
    client: ClientModel,
    server: str | Transport,
    options: ConnectOptions,
    journal: Journal | Path | str | None = None,
    *,
    secret: bytes | int | None = None,
    boundaries: Sequence[Boundary] | None = None,
    limits: Limits | None = None,
) -> RemoteBackbone:
    """Connect a loaded model to a server, and check that both have the same lock."""
    network, transport, patience = None, server, options.patience
    if isinstance(server, str):
        tls = load_tls(options.tls, options.client_name)
        _log.info("connecting to %s%s", server, "" if tls else ", without TLS")
        network = Grpc(server, tls=tls, insecure=options.insecure)
        transport = _LoggingTransport(network, server, patience)
        patience = min(FIRST_CONTACT_SECONDS, patience)
    if isinstance(transport, str) or not callable(getattr(transport, "exchange", None)):
        raise SplitError(
            f"server must be HOST:PORT or a transport, got {transport!r}",
            hint="pass the address of a server, or regauge.split.InProcess(host)",
        )
    opened = FolderJournal(journal) if isinstance(journal, str | Path) else journal
    try:
        link = RemoteBackbone(
            client.module,
            transport,
            opened or MemoryJournal(),
            client.element,
            parse_defences(options.defences),
            options.codec,
            secret,
            client.key_id,
            client.config,
            boundaries,
            limits,
            patience,
        )
        link.network, link.log.patience = network, options.patience
        if client.checkpoint is not None:
            _require_same_lock(link, client.key_id)
    except BaseException:
        if network is not None:
            network.close()
        raise
    return link


def _require_same_lock(link: RemoteBackbone, key_id: str) -> None:
    """Raise unless the server's backbone is locked as the client's model is."""
    server_key = str(link.server_info.get("key") or "")
    if server_key != key_id:
        link.close()
        states = [f"locked by the key {k}" if k else "not locked" for k in (server_key, key_id)]
        raise LockError(
            f"the server's backbone is {states[0]}, and this model is {states[1]}",
            hint="both sides need the same model, locked or plain",
        )


class _LoggingTransport:
    """A transport that logs when the server stops answering, and when it answers again."""

    def __init__(self, inner: Transport, server: str, patience: float) -> None:
        self.inner, self.server, self.patience = inner, server, patience
        self.was_reached = self.is_lost = False

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        """Send a request and return the reply."""
        try:
            reply = self.inner.exchange(request)
        except TransportError as error:
            if self.was_reached and not self.is_lost:
                _log.warning("no answer (%s); retrying for up to %g s", error, self.patience)
                self.is_lost = True
            raise
        if self.is_lost:
            _log.info("%s answers again", self.server)
        self.was_reached, self.is_lost = True, False
        return reply


def abandon(link: RemoteBackbone, error: RegaugeError) -> None:
    """Free the place of a failed session on the server, unless its journal can resume it."""
    if not link.log.journal.is_persistent and not isinstance(error, TransportError):
        link.log.patience = 0.5
        link.log.abandon_session()
