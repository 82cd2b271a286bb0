"""gRPC: the same frames, in chunks of about 1 MiB, over one bidirectional stream for each client
(grpc.aio, raw bytes, no protobuf).

    with Server(host, "127.0.0.1:7000"):                                    # with tls=Tls(...)
    anywhere but on loopback
        link = connect(model, Grpc("127.0.0.1:7000"))

A peer that hangs is found by HTTP/2 pings, which go between the pieces of a frame, and not by how
long a frame takes on a slow link: there pieces are small (`Pace`), so that no ping waits long
behind one. While the server computes it sends empty chunks, so that a client can tell work from
silence. Whatever breaks is a `TransportError`; the next exchange opens a new stream. Mutual TLS is
the rule: both sides show certificates of one authority, and a client's name is its certificate's.
Without it a server listens on loopback only.
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

from regauge.errors import need
from regauge.split.protocol.channel import (
    CLIENT_OPTIONS,
    OPTIONS,
    Loop,
    Pace,
    Tls,
    require_private_address,
)
from regauge.split.protocol.frames import Assembler, Bytes, FrameError, Limits, decode
from regauge.split.protocol.replies import encode_error
from regauge.split.protocol.transport import TransportError
from regauge.split.server import health
from regauge.split.server.client_list import ClientFile
from regauge.split.server.connections import raise_open_file_limit, server_options
from regauge.split.server.flow_control import FlowControl, StreamUsage
from regauge.split.server.host import Host
from regauge.split.server.memory import FRAME_SHARE

SERVICE, METHOD = "regauge.Split", "Exchange"
HEARTBEAT_SECONDS = 1.0  # seconds between empty chunks while the server computes
STALL_SECONDS = 60.0  # seconds in which nothing may come of a frame that has begun
POLL_SECONDS = 0.02  # seconds until a stream that has to wait looks again
MAX_STREAMS = 256  # of one client at once
_log = logging.getLogger("regauge.split")


class Server:
    """A host behind a port, and gRPC's health service. `port` is the one it was given, if the
    address asked for any (":0"). `clients` names those that may come, by the common names of their
    certificates; without it, everyone whom the authority has signed. A `ClientFile` is followed: a
    client that is no longer in it is cut off at once (`set_clients`).
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
        require_private_address(address, tls, insecure)
        self.host, self.address, self.tls = host, address, tls
        self.client_file = clients if isinstance(clients, ClientFile) else None
        self.pool = concurrent.futures.ThreadPoolExecutor(4, "regauge-split-host")
        self.received = self.sent = self.streams = self.active_streams = (
            0  # bytes, and what is open
        )
        self.read_timeouts: dict[asyncio.Timeout, str] = {}  # of streams that wait for their client
        share = min(host.limits.payload + host.limits.table, host.budget.client // FRAME_SHARE)
        self.flow_control = FlowControl(share, MAX_STREAMS, host.budget.total // FRAME_SHARE)
        self.is_stopping = False
        self.set_clients(clients.quotas if isinstance(clients, ClientFile) else clients)
        self.server, self.port = Loop.run(self._start())
        if self.client_file is not None:
            self.client_file.follow(self._reload_clients)

    def set_clients(self, names: Collection[str] | None) -> None:
        """Accept these clients from now on, or everyone of the authority (None). The streams and
        sessions of all others end.
        """
        self.host.clients = None if names is None else frozenset(names)
        Loop.get().call_soon_threadsafe(self._end_unlisted_streams)
        ended = self.host.end_unlisted()
        if ended:
            _log.warning("no longer listed, and cut off: %s", ", ".join(ended))

    def _reload_clients(self) -> None:
        assert self.client_file is not None
        self.host.quotas.by_client = self.client_file.quotas
        self.set_clients(self.client_file.quotas)
        _log.info("the list of clients was read again: %d", len(self.client_file.quotas))

    def _end_unlisted_streams(self) -> None:
        """End streams that wait for a client that is not listed. Those that are being answered end
        by themselves.
        """
        for wait, peer in self.read_timeouts.items():
            if self.host.clients is not None and peer not in self.host.clients:
                with suppress(RuntimeError):  # it ends already
                    wait.reschedule(0.0)

    async def _start(self) -> tuple[Any, int]:
        import grpc

        server = grpc.aio.server(options=[*OPTIONS, *server_options(raise_open_file_limit())])
        handler = grpc.stream_stream_rpc_method_handler(self._handle_stream)
        healthy = health.make_handler(lambda: not self.is_stopping, SERVICE)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}), healthy)
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
                f"{self.address} cannot be listened on",
                hint="is another server there, or is the address another machine's?",
            ) from error
        return server, port

    async def _handle_stream(
        self, incoming: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """One client's stream, with what crosses counted. A server that stops lets a stream go when
        it has answered what is under way.
        """
        self.streams += 1
        self.active_streams += 1  # but for the times in which the stream waits for its client
        try:
            peer = self._require_client(context)
            with self.flow_control.stream(peer) as held:
                assembler = Assembler(self.host.limits)
                async for piece in self._answer_chunks(
                    self._read_chunks(incoming, assembler, held, peer), assembler, held, peer
                ):
                    self.sent += len(piece)
                    yield piece
        except FrameError as error:
            yield encode_error(error)
        finally:
            self.streams -= 1
            self.active_streams -= 1

    def _require_client(self, context: Any) -> str:
        peer = _common_name(context)
        if (
            self.tls is not None and not peer
        ):  # all of them would be one, with each other's sessions
            raise FrameError(
                "client",
                "your certificate has no common name, by which this server knows its clients",
            )
        self.host.require_listed(peer)
        return peer

    async def _read_chunks(
        self, incoming: AsyncIterator[bytes], assembler: Assembler, held: StreamUsage, peer: str
    ) -> AsyncIterator[bytes]:
        """What the client sends, and an empty chunk for every second in which it is not read: it
        has used what it may, or holds too much.
        """
        source: AsyncIterator[bytes | None] = aiter(incoming)
        beat = time.monotonic()
        while not self.is_stopping:
            self.host.require_listed(peer)
            self.active_streams -= 1
            chunk: bytes | None = b""
            try:
                if not self.flow_control.may_read(held) or (
                    assembler.is_empty and self.host.quotas.is_exhausted(peer)
                ):
                    await asyncio.sleep(POLL_SECONDS)
                    if time.monotonic() - beat < HEARTBEAT_SECONDS:
                        continue
                    beat = time.monotonic()
                else:
                    async with asyncio.timeout(
                        None if assembler.is_empty else STALL_SECONDS
                    ) as wait:  # half a frame is not held for ever
                        self.read_timeouts[wait] = peer
                        try:
                            chunk = await anext(source, None)
                        finally:
                            del self.read_timeouts[wait]
            except TimeoutError:
                self.host.require_listed(peer)
                return
            finally:
                self.active_streams += 1
            if chunk is None:
                return
            if chunk:
                self.received += len(chunk)
                held.add(len(chunk))
            yield chunk

    async def _answer_chunks(
        self, incoming: AsyncIterator[bytes], assembler: Assembler, held: StreamUsage, peer: str
    ) -> AsyncIterator[bytes]:
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
                self.host.quotas.charge(
                    peer, held.size
                )  # what is no request has crossed all the same
                raise
            if assembler.is_empty:
                held.clear()

    def _answer_frame(self, data: Bytes, peer: str) -> bytes:
        """In a thread of its own: reading a frame takes time too, in which others are to be
        heard.
        """
        return self.host.answer(decode(data, self.host.limits), peer)

    def stop(self, grace: float = 5.0, skip_grace: threading.Event | None = None) -> None:
        """Take no more, let what is under way end, and keep what is to be kept, also if this is
        interrupted. A second call does nothing.

        `hurry` ends the wait for clients before `grace` seconds are over.
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

    async def _shut_down(self, grace: float, hurry: threading.Event) -> None:
        until = time.monotonic() + grace
        await asyncio.sleep(min(grace, 2 * health.POLL_SECONDS))  # so that those who watch are told
        while self.active_streams and time.monotonic() < until and not hurry.is_set():
            await asyncio.sleep(0.01)
        await self.server.stop(0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _common_name(context: Any) -> str:
    """The common name of the client's certificate, which the handshake has verified; "" without
    TLS.
    """
    found = context.auth_context().get("x509_common_name")
    return found[0].decode(errors="replace") if found else ""


class Grpc:
    """A transport to a server's port. `silence` is for how many seconds nothing at all may come
    while a reply is due, and `computing` for how many a server may say that it computes.
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
        self.pace, self.last_activity, self.last_data = (
            Pace(),
            0.0,
            0.0,
        )  # when anything came or went, and when bytes of a frame did
        self.lock = threading.Lock()

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
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
                        self._cancel_stream()  # ends the stream, and with it what waits for it

    async def _exchange(self, request: Sequence[memoryview]) -> Bytes:
        import grpc

        try:
            if self.stream is None or self.stream.done():
                self.stream = self._open_stream()
            stream = self.stream
            if sum(map(len, request)) <= self.pace.size:
                with suppress(
                    Exception
                ):  # what broke it, or a refusal that came before, is read below
                    await self._send(stream, request)
                return await self._receive(stream)
            sending = asyncio.ensure_future(
                self._send(stream, request)
            )  # a refusal may come before all is sent
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
            what = (
                _describe_error(error, self.tls is not None)
                if isinstance(error, grpc.aio.AioRpcError)
                else str(error) or type(error).__name__
            )
            raise TransportError(f"{self.address}: {what}") from error

    async def _send(self, stream: Any, request: Sequence[memoryview]) -> None:
        for piece in self.pace.pieces(request):
            await stream.write(piece)
            self.last_activity = self.last_data = time.monotonic()

    async def _receive(self, stream: Any) -> Bytes:
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
            found = list(assembler.split(piece))
            if found:
                if len(found) > 1 or not assembler.is_empty:
                    raise TransportError("more came than a reply")
                return found[0]

    def _open_stream(self) -> Any:
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
        async def drop() -> None:
            if self.stream is not None:
                self.stream.cancel()

        Loop.run(drop(), 5)

    def close(self) -> None:
        """Hang up. Another exchange would connect again."""

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


def _describe_error(error: Any, with_tls: bool) -> str:
    """What gRPC says of a broken stream, in few words. Certificates that may not fit are named:
    nothing else would lead there.
    """
    details = (error.details() or "").lower()
    for sign, words in _ERROR_TEXTS.items():
        if sign in details:
            # Of several addresses gRPC tells what became of the last: at another one a server may
            # have hung up on the certificate.
            return (
                f"{words}, or it does not accept this client's certificate"
                if with_tls and sign == "connection refused"
                else words
            )
    what: str = error.code().name.lower().replace("_", " ")
    if with_tls and what == "unavailable":  # a server that refuses a certificate just hangs up
        return f"{what}; if the server is up, it may not accept this client's certificate"
    return what


_ERROR_TEXTS = {
    "bad_signature": "the server's certificate is not of this authority, has expired, or is for "
    "another name",
    "certificate_verify_failed": "the server's certificate is not of this authority, has "
    "expired, or is for another name",
    "peer name": "the server's certificate is for another name",
    "ssl": "there is no TLS with it: one side speaks TLS and the other does not, or does not "
    "know the other's certificate",
    "connection refused": "nothing listens there",
    "dns resolution failed": "there is no such name",
    "socket closed": "it hung up: it may have stopped, or speak TLS, or not know this certificate",
    "connection reset": "it hung up: it may have stopped, or speak TLS, or not know this "
    "certificate",
}
