"""TLS in front of a plain server on loopback, with a certificate of an authority of its own."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading


class TlsFront:
    """Decrypts what comes to a port of 127.0.0.1 and passes it to another one, and back.

    Args:
        target: port of the plain server.
        context: of a server, with its certificate.

    Attributes:
        port: where it listens.
    """

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = {self._listener}
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            outside = self._context.wrap_socket(raw, server_side=True)
            inside = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._sockets |= {outside, inside}
            stack.callback(outside.close)
            stack.callback(inside.close)
            # a TLS connection may not be read and written by two threads at once with its
            # blocking calls, so one thread does both
            _pump(outside, inside)


def _pump(outside: ssl.SSLSocket, inside: socket.socket) -> None:
    """Pass bytes on, both ways, until an end is closed."""
    import select

    outside.setblocking(False)
    waiting: dict[socket.socket, bytearray] = {outside: bytearray(), inside: bytearray()}
    other: dict[socket.socket, socket.socket] = {outside: inside, inside: outside}
    inside.setblocking(False)
    while True:
        readable = [each for each in other if len(waiting[other[each]]) < 1 << 22]
        writable = [each for each, data in waiting.items() if data]
        timeout = 0.0 if outside.pending() else 5.0
        select.select(readable, writable, [], timeout)
        for each in readable:
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                data = each.recv(1 << 18)
                if not data:
                    return
                waiting[other[each]] += data
        for each, data in waiting.items():
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                while data:
                    sent = each.send(memoryview(data)[: 1 << 18])
                    del data[:sent]
