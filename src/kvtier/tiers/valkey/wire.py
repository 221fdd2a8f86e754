"""A plain connection to one server: questions at start, and its messages later.

Blocks go through the client library (`connections`). This is for what that cannot do, or would have
to be started for: to say before the engine starts what is wrong, and to listen to every single node
of a cluster.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

from kvtier.errors import (
    TierDeniedError,
    TierError,
    TierTimeoutError,
    TierUnreachableError,
)
from kvtier.tiers.valkey.faults import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.tiers.valkey.address import Node
    from kvtier.tiers.valkey.settings import Endpoint

CONNECT_S = 2.0
"""What a connection may take at most, and what is left of a shorter request timeout."""

_RECEIVE_BYTES = 1 << 16

Reply = bytes | int | TierError | None | list["Reply"]


class Replies:
    """Takes bytes as they come, gives replies as they are complete (RESP2)."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Reply]:
        """More bytes; the replies that they complete.

        Raises:
            TierUnreachableError: this is not what a server says.
        """
        self._data += data
        while (found := self._parse(0)) is not None:
            reply, end = found
            del self._data[:end]
            yield reply

    def _parse(self, start: int) -> tuple[Reply, int] | None:
        """One reply and where it ends; None while it is incomplete."""
        line_end = self._data.find(b"\r\n", start)
        if line_end < 0:
            return None
        kind = self._data[start : start + 1]
        line = bytes(self._data[start + 1 : line_end])
        end = line_end + 2
        try:
            match kind:
                case b"+":
                    return line, end
                case b"-":
                    return refusal(line.decode(errors="replace")), end
                case b":":
                    return int(line), end
                case b"$":
                    return self._bulk(int(line), end)
                case b"*":
                    return self._array(int(line), end)
        except ValueError:
            pass
        raise TierUnreachableError("what answers there is no Valkey or Redis server")

    def _bulk(self, length: int, start: int) -> tuple[Reply, int] | None:
        if length < 0:
            return None, start
        end = start + length
        if len(self._data) < end + 2:
            return None
        return bytes(self._data[start:end]), end + 2

    def _array(self, count: int, start: int) -> tuple[Reply, int] | None:
        if count < 0:
            return None, start
        items: list[Reply] = []
        for _ in range(count):
            found = self._parse(start)
            if found is None:
                return None
            item, start = found
            items.append(item)
        return items, start


class Wire:
    """An authenticated connection. Not thread safe.

    Args:
        endpoint: how to connect, and who we are.
        node: where to.

    Raises:
        TierUnreachableError: nothing answers there, or not in time, or its certificate is refused.
        TierDeniedError: user or password are refused.
        TierError: the database does not exist, or the server refuses for another reason.
    """

    def __init__(self, endpoint: Endpoint, node: Node) -> None:
        self.node = node
        self._replies = Replies()
        self._waiting: list[Reply] = []
        timeout_s = min(CONNECT_S, endpoint.timeout_s)
        try:
            self.socket = socket.create_connection(node, timeout_s)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            raise _unreachable(f"{node} cannot be reached: {error}", error) from error
        try:
            if (context := endpoint.tls_context()) is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname=node.host)
            self._log_in(endpoint)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise TierDeniedError(
                f"the certificate of {node} is refused: {error.verify_message}; is ca_bundle that "
                "of its authority, and the host the one that it names?"
            ) from error
        except OSError as error:
            self.close()
            raise _unreachable(f"{node} does not answer: {error}", error) from error
        except BaseException:
            self.close()
            raise

    def ask(self, *words: str | bytes) -> bytes | int | list[Reply] | None:
        """Send a command and wait for its reply.

        Raises:
            TierError: the reply is a refusal, or none comes.
        """
        (reply,) = self.ask_all([words])
        if isinstance(reply, TierError):
            raise reply
        return reply

    def ask_all(self, commands: Sequence[Sequence[str | bytes]]) -> list[Reply]:
        """Send commands together and wait for all replies, in order; refusals are among them.

        Raises:
            TierUnreachableError: they do not come.
        """
        try:
            self.socket.sendall(b"".join(command(*words) for words in commands))
            while len(self._waiting) < len(commands):
                self._waiting += self.receive()
        except OSError as error:
            raise _unreachable(f"{self.node} does not answer: {error}", error) from error
        replies = self._waiting[: len(commands)]
        del self._waiting[: len(commands)]
        return replies

    def receive(self) -> list[Reply]:
        """What has come, complete or not; waits for something.

        Raises:
            OSError: the connection has ended.
        """
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server ended the connection")
        return list(self._replies.feed(data))

    def hang_up(self) -> None:
        """End the connection under another thread that waits for it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def _log_in(self, endpoint: Endpoint) -> None:
        address = endpoint.address
        if endpoint.password is not None:
            user = (address.user,) if address.user else ()
            self.ask("AUTH", *user, endpoint.password)
        if address.database:
            self.ask("SELECT", str(address.database))
        self.ask("PING")


def _unreachable(message: str, error: OSError) -> TierUnreachableError:
    kind = TierTimeoutError if isinstance(error, TimeoutError) else TierUnreachableError
    return kind(message)


def command(*words: str | bytes) -> bytes:
    """A command as it is sent."""
    encoded = [w.encode(errors="surrogateescape") if isinstance(w, str) else w for w in words]
    parts = (b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
    return b"".join((b"*%d\r\n" % len(encoded), *parts))
