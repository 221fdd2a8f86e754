"""A proxy on the loopback that misbehaves as told, in front of a real server.

    with FaultProxy(("127.0.0.1", 6379)) as proxy:
        client = connect(*proxy.address)
        proxy.behaviour = Behaviour(delay_s=0.02)     # from now on, also on open connections
        proxy.reset_connections()

Every connection is two streams of bytes; what a behaviour says holds for the bytes from server to
client. `kvtier.testing.http_proxy` answers single HTTP requests besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

_CHUNK_BYTES = 256 * 1024
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() sends RST instead of FIN


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a proxy does with the answers of its server.

    Attributes:
        delay_s: seconds that every byte of an answer arrives late; throughput is not changed.
        silent: nothing is answered, and nothing closed: a hung server. What the server says
            meanwhile is delivered when the silence ends.
        refuse: a new connection is reset at once.
        cut_after: a connection ends after so many more bytes of answers; None never.
        cut_by_reset: it ends by a reset instead of an orderly end.
    """

    delay_s: float = 0.0
    silent: bool = False
    refuse: bool = False
    cut_after: int | None = None
    cut_by_reset: bool = False


class FaultProxy:
    """Passes TCP connections on to `target`. Runs on a thread of its own until `close`.

    Args:
        target: host and port of the server.
        tls: if given, clients speak TLS to the proxy, which speaks plainly to the server.

    Attributes:
        behaviour: may be set at any time, from any thread; each setting starts a new count of
            `cut_after` on every connection.
        tls: as given; another one holds when it listens again.
        address: host and port to connect to.
        num_connections: accepted so far.
    """

    def __init__(self, target: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = Behaviour()
        self.num_connections = 0
        self._target = target
        self.tls = tls
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        self.address: tuple[str, int] = (host, port)
        self._thread = threading.Thread(target=self._run, name="kvtier-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._call(self._listen(listener))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_connections(self) -> None:
        """End every open connection by a reset."""
        self._call(self._reset_all())

    def stop_listening(self) -> None:
        """Reset every connection and refuse new ones, as a host without the server does."""
        self._call(self._unlisten())

    def listen_again(self) -> None:
        """Take connections again at the same address."""
        self._call(self._listen(socket.create_server(self.address)))

    def close(self) -> None:
        """End everything. Called once."""
        self._call(self._unlisten())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def answer(self, connection: Connection) -> None:
        """Serve the client's side of one connection: pass on what it says until it stops."""
        while data := await connection.client.read(_CHUNK_BYTES):
            await connection.to_server(data)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listener, ssl=self.tls)

    async def _unlisten(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._reset_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reset_all(self) -> None:
        for connection in list(self._connections):
            connection.end(by_reset=True)

    async def _serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio serves in a task"
        self._tasks.add(task)
        self.num_connections += 1
        connection = Connection(self, self._target, client, writer)
        self._connections.add(connection)
        try:
            if self.behaviour.refuse:
                connection.end(by_reset=True)
            else:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await self.answer(connection)
        except asyncio.CancelledError:
            pass  # the proxy closes
        finally:
            connection.end()
            self._connections.discard(connection)
            self._tasks.discard(task)


class Connection:
    """One client's connection and, once it is needed, the proxy's own to the server.

    Attributes:
        client: what the client says.
        answered: something was said to the client; for subclasses of the proxy to reset.
    """

    def __init__(
        self,
        proxy: FaultProxy,
        target: tuple[str, int],
        client: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.client = client
        self.answered = True
        self._proxy = proxy
        self._target = target
        self._writer = writer
        self._server_writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        self._counted = proxy.behaviour
        self._passed = 0

    async def to_server(self, data: bytes) -> None:
        """Pass bytes of the client on."""
        if self._server_writer is None:
            server, self._server_writer = await asyncio.open_connection(*self._target)
            self._tasks = [
                asyncio.create_task(self._receive(server)),
                asyncio.create_task(self._deliver()),
            ]
        self._server_writer.write(data)
        await self._server_writer.drain()

    async def to_client(self, data: bytes) -> None:
        """Pass bytes to the client as the proxy's behaviour has it."""
        while self._proxy.behaviour.silent:
            await asyncio.sleep(0.01)
        behaviour = self._proxy.behaviour
        if behaviour is not self._counted:
            self._counted, self._passed = behaviour, 0
        self.answered = True
        if behaviour.cut_after is not None and self._passed + len(data) > behaviour.cut_after:
            self._writer.write(data[: behaviour.cut_after - self._passed])
            with contextlib.suppress(OSError):
                await self._writer.drain()
            self.end(behaviour.cut_by_reset)
            return
        self._passed += len(data)
        self._writer.write(data)
        await self._writer.drain()

    def end(self, by_reset: bool = False) -> None:
        """Close both sides; the client sees an end, or a reset."""
        if by_reset and not self._writer.is_closing():
            raw = self._writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._writer.transport.abort()
        self._writer.close()
        if self._server_writer is not None:
            self._server_writer.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _receive(self, server: asyncio.StreamReader) -> None:
        """Put what the server says on the way to the client."""
        with contextlib.suppress(OSError):
            while data := await server.read(_CHUNK_BYTES):
                await self._late.put((time.monotonic(), data))
        await self._late.put((time.monotonic(), b""))

    async def _deliver(self) -> None:
        """Hand over each piece when its delay has passed; an empty one is the end."""
        with contextlib.suppress(OSError):
            while True:
                said_at, data = await self._late.get()
                wait_s = said_at + self._proxy.behaviour.delay_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    break
                await self.to_client(data)
        self.end()
