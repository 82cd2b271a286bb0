"""The gRPC transport: frames in chunks of about 1 MiB over one bidirectional stream per client.

It uses grpc.aio with raw bytes, without protobuf.

    with Server(host, "127.0.0.1:7000"):           # beyond loopback with tls=Tls(...)
        link = connect(model, Grpc("127.0.0.1:7000"))

A peer that hangs is detected by HTTP/2 pings, which are sent between the pieces of a frame, and not
by how long a frame takes. On a slow link pieces are small (`Pace`), so that no ping waits long
behind one. While the server computes, it sends empty chunks as a heartbeat. Any failure raises a
`TransportError`, and the next exchange opens a new stream. Mutual TLS is the default: both sides
present certificates of one authority, and a client is identified by the name in its certificate.
Without TLS a server listens on loopback only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from typing import Any

from regauge.errors import FrameError, Hint, TransportError, need
from regauge.split.protocol.channel import (
    CLIENT_OPTIONS,
    OPTIONS,
    Loop,
    Pace,
    Tls,
    require_private_address,
)
from regauge.split.protocol.frames import Assembler, Bytes, Limits, decode
from regauge.split.protocol.replies import encode_error
from regauge.split.server import health
from regauge.split.server.client_list import ClientFile
from regauge.split.server.connections import raise_open_file_limit, server_options
from regauge.split.server.flow_control import FlowControl, StreamUsage
from regauge.split.server.host import Host
from regauge.split.server.memory import FRAME_SHARE

SERVICE, METHOD = "regauge.Split", "Exchange"
HEARTBEAT_SECONDS = 1.0  # between empty chunks while the server computes
STALL_SECONDS = 60.0  # without data after which a partial frame is dropped
WATCHER_SECONDS = 0.1  # for the last message of health watchers
POLL_SECONDS = 0.02  # between two checks of a stream that has to wait
MAX_STREAMS = 256  # of one client
_log = logging.getLogger("regauge.split")


class Server:
    """A host behind a gRPC port, with gRPC's health service.

    Args:
        host: The backbone.
        address: HOST:PORT to listen on; port 0 chooses a free one, which is then in `port`.
        tls: Certificates; required beyond loopback, unless `insecure`.
        clients: Accepted clients, by the common names of their certificates; by default all that
            the authority has signed. A `ClientFile` is reloaded on change, and clients that are no
            longer in it are disconnected at once.
        insecure: Accept other addresses than loopback without TLS.

    Raises:
        TransportError: The address is invalid, in use, or needs TLS.
    """

    def __init__(
        self,
        host: Host,
        address: str = "127.0.0.1:0",
        *,
        tls: Tls | None = None,
        clients: Collection[str] | ClientFile | None = None,
        insecure: bool = False,
    ) -> None:
        need("grpc", "split")
        need("grpc_health", "split")
        require_private_address(address, tls, insecure)
        self.host, self.address, self.tls = host, address, tls
        self.client_file = clients if isinstance(clients, ClientFile) else None
        self.pool = concurrent.futures.ThreadPoolExecutor(4, "regauge-split-host")
        self.received = self.sent = self.streams = self.active_streams = 0
        self.read_timeouts: dict[asyncio.Timeout, str] = {}  # clients of streams that await data
        share = min(host.limits.payload + host.limits.table, host.budget.client // FRAME_SHARE)
        self.flow_control = FlowControl(share, MAX_STREAMS, host.budget.total // FRAME_SHARE)
        self.is_stopping = False
        self.set_clients(clients.quotas if isinstance(clients, ClientFile) else clients)
        self.health: Any = None
        self.server, self.port = Loop.run(self._start())
        if self.client_file is not None:
            self.client_file.follow(self._reload_clients)

    def set_clients(self, names: Collection[str] | None) -> None:
        """Accept these clients from now on, or all that the authority has signed (None).

        The streams and sessions of all others end.
        """
        self.host.clients = None if names is None else frozenset(names)
        Loop.get().call_soon_threadsafe(self._end_unlisted_streams)
        ended = self.host.end_unlisted()
        if ended:
            _log.warning("disconnected clients that are no longer listed: %s", ", ".join(ended))

    def _reload_clients(self) -> None:
        """Apply a changed list of clients."""
        assert self.client_file is not None
        self.host.quotas.by_client = self.client_file.quotas
        self.set_clients(self.client_file.quotas)
        _log.info("reloaded the list of clients: %d", len(self.client_file.quotas))

    def _end_unlisted_streams(self) -> None:
        """End idle streams of clients that are not listed; busy ones end after their reply."""
        for timeout, peer in self.read_timeouts.items():
            if self.host.clients is not None and peer not in self.host.clients:
                with suppress(RuntimeError):  # it has expired already
                    timeout.reschedule(0.0)

    async def _start(self) -> tuple[Any, int]:
        """Start the gRPC server; return it and its port."""
        import grpc

        server = grpc.aio.server(options=[*OPTIONS, *server_options(raise_open_file_limit())])
        handler = grpc.stream_stream_rpc_method_handler(self._handle_stream)
        self.health, health_handler = await health.make_service(SERVICE)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}), health_handler)
        )
        try:
            if self.tls is None:
                port = server.add_insecure_port(self.address)
            else:
                authority, certificate, key = self.tls.read()
                port = server.add_secure_port(
                    self.address,
                    grpc.ssl_server_credentials(
                        [(key, certificate)], authority, require_client_auth=True
                    ),
                )
            await server.start()
        except RuntimeError as error:
            raise TransportError(
                f"cannot listen on {self.address}",
                hint="check that the port is free and the address belongs to this machine",
            ) from error
        return server, port

    async def _handle_stream(
        self, incoming: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Serve one client's stream, and count its bytes.

        When the server stops, the stream ends after the current request.
        """
        self.streams += 1
        self.active_streams += 1  # except while the stream awaits its client
        try:
            peer = self._require_client(context)
            with self.flow_control.stream(peer) as usage:
                assembler = Assembler(self.host.limits)
                async for piece in self._answer_chunks(
                    self._read_chunks(incoming, assembler, usage, peer), assembler, usage, peer
                ):
                    self.sent += len(piece)
                    yield piece
        except FrameError as error:
            yield encode_error(error)
        finally:
            self.streams -= 1
            self.active_streams -= 1

    def _require_client(self, context: Any) -> str:
        """Return the name of a stream's client; raise FrameError if it is not accepted."""
        peer = _common_name(context)
        # Clients without a name would be one client, and share their sessions.
        if self.tls is not None and not peer:
            raise FrameError("client", "the client's certificate must have a common name, got none")
        self.host.require_listed(peer)
        return peer

    async def _read_chunks(
        self, incoming: AsyncIterator[bytes], assembler: Assembler, usage: StreamUsage, peer: str
    ) -> AsyncIterator[bytes]:
        """Yield the client's chunks.

        While the client is not read, because it has used up its quota or holds too much memory, an
        empty chunk is yielded every second.
        """
        source: AsyncIterator[bytes | None] = aiter(incoming)
        last_heartbeat = time.monotonic()
        while not self.is_stopping:
            self.host.require_listed(peer)
            self.active_streams -= 1
            chunk: bytes | None = b""
            try:
                if not self.flow_control.may_read(usage) or (
                    assembler.is_empty and self.host.quotas.is_exhausted(peer)
                ):
                    await asyncio.sleep(POLL_SECONDS)
                    if time.monotonic() - last_heartbeat < HEARTBEAT_SECONDS:
                        continue
                    last_heartbeat = time.monotonic()
                else:
                    # A partial frame is not held forever.
                    limit = None if assembler.is_empty else STALL_SECONDS
                    async with asyncio.timeout(limit) as timeout:
                        self.read_timeouts[timeout] = peer
                        try:
                            chunk = await anext(source, None)
                        finally:
                            del self.read_timeouts[timeout]
            except TimeoutError:
                self.host.require_listed(peer)
                return
            finally:
                self.active_streams += 1
            if chunk is None:
                return
            if chunk:
                self.received += len(chunk)
                usage.add(len(chunk))
            yield chunk

    async def _answer_chunks(
        self, incoming: AsyncIterator[bytes], assembler: Assembler, usage: StreamUsage, peer: str
    ) -> AsyncIterator[bytes]:
        """Yield the replies in pieces, and empty chunks while a request is computed."""
        loop, pace = asyncio.get_running_loop(), Pace()
        async for chunk in incoming:
            if not chunk:
                yield b""
                continue
            try:
                for data in assembler.split(chunk):
                    work = loop.run_in_executor(self.pool, self._answer_frame, data, peer)
                    while not (await asyncio.wait([work], timeout=HEARTBEAT_SECONDS))[0]:
                        yield b""
                    for piece in pace.pieces([memoryview(work.result())]):
                        yield piece
            except FrameError:
                self.host.quotas.charge(peer, usage.size)  # malformed bytes count as well
                raise
            if assembler.is_empty:
                usage.clear()

    def _answer_frame(self, data: Bytes, peer: str) -> bytes:
        """Decode and answer a frame, in a worker thread: decoding takes time too."""
        return self.host.answer(decode(data, self.host.limits), peer)

    def stop(self, grace: float = 5.0, skip_grace: threading.Event | None = None) -> None:
        """Stop accepting requests, finish the current ones, and write a checkpoint.

        The checkpoint is written even if this is interrupted. A second call does nothing.

        Args:
            grace: Seconds to wait for current requests.
            skip_grace: Ends this wait when it is set.
        """
        if self.is_stopping:
            return
        self.is_stopping = True
        try:
            if self.client_file is not None:
                self.client_file.stop()
            with suppress(concurrent.futures.TimeoutError):
                Loop.run(self._shut_down(grace, skip_grace or threading.Event()), grace + 5)
            self.pool.shutdown()
        finally:
            self.host.save()

    async def _shut_down(self, grace: float, skip_grace: threading.Event) -> None:
        """Wait for the current requests, then stop the gRPC server."""
        deadline = time.monotonic() + grace
        with suppress(TimeoutError):  # a client that does not read cannot hold the server
            await asyncio.wait_for(self.health.enter_graceful_shutdown(), WATCHER_SECONDS)
        await asyncio.sleep(min(grace, WATCHER_SECONDS))  # health watchers get NOT_SERVING
        while self.active_streams and time.monotonic() < deadline and not skip_grace.is_set():
            await asyncio.sleep(0.01)
        await self.server.stop(0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _common_name(context: Any) -> str:
    """Return the common name of the client's verified certificate, or "" without TLS."""
    names = context.auth_context().get("x509_common_name")
    return names[0].decode(errors="replace") if names else ""


class Grpc:
    """A transport to a server's gRPC port.

    Args:
        address: HOST:PORT of the server.
        tls: Certificates; required beyond loopback, unless `insecure`.
        insecure: Connect to other addresses than loopback without TLS.
        silence_timeout: Seconds without any data, heartbeats included, after which an exchange
            fails.
        compute_timeout: Seconds with heartbeats only after which an exchange fails.
        limits: Largest frame to accept.

    Raises:
        TransportError: The address is invalid, or needs TLS.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        silence_timeout: float = 60.0,
        compute_timeout: float = 1800.0,
        limits: Limits | None = None,
    ) -> None:
        need("grpc", "split")
        require_private_address(address, tls, insecure)
        self.address, self.tls, self.limits = address, tls, limits or Limits()
        self.silence_timeout, self.compute_timeout = silence_timeout, compute_timeout
        self.channel: Any = None
        self.stream: Any = None
        self.pace = Pace()
        self.last_activity = 0.0  # when anything was sent or received, heartbeats included
        self.last_data = 0.0  # when bytes of a frame were
        self.lock = threading.Lock()

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        """Send one request, and return the bytes of its reply.

        Raises:
            TransportError: The stream broke, or no reply arrived in time.
        """
        with self.lock:
            self.last_activity = self.last_data = time.monotonic()
            work = asyncio.run_coroutine_threadsafe(self._exchange(request), Loop.get())
            while True:
                try:
                    return work.result(1.0)
                except (concurrent.futures.TimeoutError, TimeoutError):
                    now = time.monotonic()
                    if (
                        now - self.last_activity > self.silence_timeout
                        or now - self.last_data > self.compute_timeout
                    ):
                        self._cancel_stream()  # the pending work fails with it

    async def _exchange(self, request: Sequence[memoryview]) -> Bytes:
        """Send a request and receive its reply; any failure closes the stream."""
        import grpc

        try:
            if self.stream is None or self.stream.done():
                self.stream = self._open_stream()
            stream = self.stream
            if sum(map(len, request)) <= self.pace.size:
                # The cause, or an error frame that arrived first, is read below.
                with suppress(Exception):
                    await self._send(stream, request)
                return await self._receive(stream)
            # An error frame may arrive before all is sent.
            sending = asyncio.ensure_future(self._send(stream, request))
            try:
                return await self._receive(stream)
            finally:
                with suppress(Exception):
                    await sending
        except (
            grpc.RpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
            FrameError,
            OSError,
            TransportError,
        ) as error:
            if self.stream is not None:
                self.stream.cancel()
            self.stream, self.pace = None, Pace()
            reason, hint = (
                _describe_error(error, self.tls is not None)
                if isinstance(error, grpc.aio.AioRpcError)
                else (str(error) or type(error).__name__, None)
            )
            raise TransportError(f"{self.address}: {reason}", hint=hint) from error

    async def _send(self, stream: Any, request: Sequence[memoryview]) -> None:
        """Send a request in pieces."""
        for piece in self.pace.pieces(request):
            await stream.write(piece)
            self.last_activity = self.last_data = time.monotonic()

    async def _receive(self, stream: Any) -> Bytes:
        """Receive exactly one frame."""
        import grpc

        assembler = Assembler(self.limits)
        while True:
            piece = await stream.read()
            if piece is grpc.aio.EOF:
                code = await stream.code()
                raise TransportError(f"the server ended the stream ({code.name.lower()})")
            self.last_activity = time.monotonic()
            if piece:
                self.last_data = self.last_activity
            frames = list(assembler.split(piece))
            if frames:
                if len(frames) > 1 or not assembler.is_empty:
                    raise TransportError("the server must send one reply, got more")
                return frames[0]

    def _open_stream(self) -> Any:
        """Open a stream, and the channel if needed."""
        import grpc

        if self.channel is None:
            if self.tls is None:
                self.channel = grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS)
            else:
                authority, certificate, key = self.tls.read()
                self.channel = grpc.aio.secure_channel(
                    self.address,
                    grpc.ssl_channel_credentials(authority, key, certificate),
                    options=CLIENT_OPTIONS,
                )
        return self.channel.stream_stream(f"/{SERVICE}/{METHOD}")()

    def _cancel_stream(self) -> None:
        """Cancel the current stream."""

        async def drop() -> None:
            if self.stream is not None:
                self.stream.cancel()

        Loop.run(drop(), 5)

    def close(self) -> None:
        """Close the connection. A further exchange connects again."""

        async def close() -> None:
            if self.stream is not None:
                self.stream.cancel()
            if self.channel is not None:
                await self.channel.close()
            self.stream = self.channel = None

        with suppress(concurrent.futures.TimeoutError):
            Loop.run(close(), 5)

    def __enter__(self) -> Grpc:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _describe_error(error: Any, with_tls: bool) -> tuple[str, str | None]:
    """Describe a gRPC error briefly, and return a hint.

    Certificates are mentioned where they may be the cause: gRPC's own text does not suggest it.
    """
    details = (error.details() or "").lower()
    for pattern, (text, hint) in _ERROR_TEXTS.items():
        if pattern in details:
            # Of several addresses gRPC reports only the last: at another one a server may have
            # rejected the certificate.
            if with_tls and pattern == "connection refused":
                return f"{text}, or it does not accept this client's certificate", _LISTEN_OR_TLS
            return text, hint
    status: str = error.code().name.lower().replace("_", " ")
    if with_tls and status == "unavailable":  # a server closes the connection on a bad certificate
        text = f"{status}; if the server is up, it may not accept this client's certificate"
        return text, _LISTEN_OR_TLS
    return status, None


_LISTEN = Hint(
    "check the address, and that regauge.split.serve runs there",
    cli="check the address, and that regauge split serve runs there",
)
_LISTEN_OR_TLS = Hint(
    "check the address, that a server runs there, and that both sides use certificates of one "
    "regauge.split.make_certificates",
    cli="check the address, that a server runs there, and that both sides use certificates of one "
    "regauge split certs",
)
_TLS = Hint(
    "use certificates of one regauge.split.make_certificates on both sides: tls=",
    cli="use certificates of one regauge split certs on both sides: --tls FOLDER",
)
_NAME = Hint(
    "connect by a name in the certificate, or make certificates for this one: "
    "regauge.split.make_certificates(folder, [name], [client])",
    cli="connect by a name in the certificate, or make certificates for this one: regauge split "
    "certs --name NAME",
)
_WRONG = "the server's certificate is not of this authority, has expired, or is for another name"
_CLOSED = (
    "the server closed the connection: it may have stopped, expect TLS, or not accept this "
    "certificate"
)
_ERROR_TEXTS = {  # a part of gRPC's text: ours, and a hint
    "bad_signature": (_WRONG, _TLS),
    "certificate_verify_failed": (_WRONG, _TLS),
    "peer name": ("the server's certificate is for another name", _NAME),
    "ssl": (
        "the TLS handshake failed: only one side uses TLS, or a certificate is not accepted",
        _TLS,
    ),
    "connection refused": ("nothing listens there", _LISTEN),
    "dns resolution failed": ("unknown host name", "check the spelling of the address"),
    "socket closed": (_CLOSED, _LISTEN_OR_TLS),
    "connection reset": (_CLOSED, _LISTEN_OR_TLS),
}
