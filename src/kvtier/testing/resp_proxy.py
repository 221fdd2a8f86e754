"""A `FaultProxy` in front of a Valkey or Redis server that counts round trips.

A round trip begins when a client speaks that has been answered since it last spoke: a pipeline is
one. Answers that overtake the rest of a long pipeline split it in two; a delay of a few
milliseconds keeps them behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from kvtier.testing.proxy import Connection, FaultProxy

if TYPE_CHECKING:
    import ssl

_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n")
_CHUNK_BYTES = 1 << 20


class RespFaultProxy(FaultProxy):
    """See the module.

    Attributes:
        requests: round trips, by the first command of each, in capitals.
    """

    def __init__(self, target: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.requests: Counter[str] = Counter()
        super().__init__(target, tls)

    async def answer(self, connection: Connection) -> None:
        """Pass on what the client says until it stops."""
        while data := await connection.client.read(_CHUNK_BYTES):
            if connection.answered:
                connection.answered = False
                command = _COMMAND.match(data)
                self.requests[command[1].decode().upper() if command else ""] += 1
            await connection.to_server(data)
