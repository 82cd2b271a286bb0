"""A bad network in user space: a TCP proxy on loopback that delays, slows down, stalls, parts and
resets what goes through it.

    with Proxy(server.port, delay=0.05) as way:
        network = Grpc(f"127.0.0.1:{way.port}")
        way.reset_after(100_000)     # the connection is reset in the middle of whatever crosses
        then
        way.part(3.0)                # nothing crosses for so long, and no connection is made

It sees bytes only, so that TLS goes through it as anything else does.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


class Proxy:
    def __init__(
        self, target: int, *, delay: float = 0.0, rate: float | None = None, buffer: int = 1 << 16
    ) -> None:
        """`delay` in seconds for each way, `rate` in bytes per second for each way. `buffer` is
        what lies on the way at most, in the proxy.
        """
        self.target, self.delay, self.rate, self.buffer = target, delay, rate, buffer
        self.left: int | None = None  # bytes until the connection that they cross is reset
        self.resets = self.connections = 0
        self.crossed = [0, 0]  # bytes up and down
        self.loop = asyncio.new_event_loop()
        self.flows = asyncio.Event()
        self.flows.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self.loop.run_forever, name="proxy", daemon=True)
        self.thread.start()
        self.server: asyncio.Server = self._run(self._start())
        self.port = int(self.server.sockets[0].getsockname()[1])

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=self.buffer)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        async def stop() -> None:
            self.server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        self._run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def reset_after(self, count: int) -> None:
        """Reset the connection over which the byte of this number crosses, counted from now."""
        self.left = count

    def part(self, seconds: float) -> None:
        """Let nothing through for so long, either way. Returns at once."""
        self.loop.call_soon_threadsafe(self.flows.clear)
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, self.flows.set)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            await self.flows.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target, limit=self.buffer)
        except OSError:
            writer.transport.abort()
            self.tasks.discard(task)
            return
        both = (writer, back)
        pumps = [
            asyncio.ensure_future(self._pump(reader, back, both, 0)),
            asyncio.ensure_future(self._pump(there, writer, both, 1)),
        ]
        try:
            with suppress(asyncio.CancelledError):  # the proxy is closed
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for one in both:
                one.transport.abort()
            self.tasks.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
        way: int,
    ) -> None:
        on_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(
            max(1, self.buffer // 4096) if self.delay else 1
        )
        reading = asyncio.ensure_future(self._read(reader, on_way))
        try:
            with suppress(OSError):
                while True:
                    due, data = await on_way.get()
                    if not data:
                        return
                    await asyncio.sleep(max(0.0, due - self.loop.time()))
                    await self.flows.wait()
                    if self.rate:
                        await asyncio.sleep(len(data) / self.rate)
                    self.crossed[way] += len(data)
                    if self._is_over(len(data)):
                        writer.write(data[: len(data) // 2])
                        for one in both:
                            one.get_extra_info("socket").setsockopt(
                                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                            )
                            one.transport.abort()
                        self.resets += 1
                        return
                    writer.write(data)
                    await writer.drain()
        finally:
            reading.cancel()

    async def _read(
        self, reader: asyncio.StreamReader, on_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        data = b"x"
        while data:
            try:
                data = await reader.read(4096 if self.rate else self.buffer)
            except OSError:
                data = b""
            await on_way.put((self.loop.time() + self.delay, data))

    def _is_over(self, count: int) -> bool:
        if self.left is None:
            return False
        self.left -= count
        if self.left > 0:
            return False
        self.left = None
        return True
