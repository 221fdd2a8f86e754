"""A `FaultProxy` that knows where an HTTP/1.1 request begins and ends, and answers some itself.

proxy.rules = [Rule(Answer(503, (("Retry-After", "1"),)), method="PUT", times=2)]
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvtier.testing.proxy import Connection, FaultProxy

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Answer:
    """What the proxy says instead of the server.

    Attributes:
        status: of the answer.
        headers: beside the length, e.g. `(("Retry-After", "1"),)`.
        body: usually empty.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which requests get an answer of the proxy's own.

    Attributes:
        answer: what they get.
        method: of the request; empty for any.
        path: occurs in the request's target.
        times: how many requests the rule is for; None for all.
    """

    answer: Answer
    method: str = ""
    path: str = ""
    times: int | None = None


class HttpFaultProxy(FaultProxy):
    """See the module. Bodies of requests must have a `Content-Length`.

    Attributes:
        rules: the first that fits a request answers it; may be set at any time. `times` counts from
            the setting.
        requests: how many there were, by method, those answered here included.
    """

    def __init__(self, target: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._used: list[int] = []
        self.requests: Counter[str] = Counter()
        super().__init__(target, tls)

    @property
    def rules(self) -> list[Rule]:
        """See the class."""
        return list(self._rules)

    @rules.setter
    def rules(self, rules: list[Rule]) -> None:
        with self._lock:
            self._rules = list(rules)
            self._used = [0] * len(rules)

    async def answer(self, connection: Connection) -> None:
        """Serve requests one after the other until the client stops."""
        while True:
            try:
                head = await connection.client.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            first, *lines = head.decode("latin-1").split("\r\n")
            method, path, _ = first.split(" ", 2)
            fields = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines if line)
            }
            answer = self._own_answer(method, path)
            if answer is None:
                await connection.to_server(head)
            if fields.get("expect", "").lower() == "100-continue" and answer is not None:
                await connection.to_client(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._pass_body(connection, fields, answer is None)
            if answer is not None:
                await connection.to_client(_encode(answer, method))

    def _own_answer(self, method: str, path: str) -> Answer | None:
        with self._lock:
            self.requests[method] += 1
            for i, rule in enumerate(self._rules):
                fits = rule.method in ("", method) and rule.path in path
                if fits and (rule.times is None or self._used[i] < rule.times):
                    self._used[i] += 1
                    return rule.answer
        return None

    @staticmethod
    async def _pass_body(connection: Connection, fields: dict[str, str], on: bool) -> None:
        """Read one body, and send it to the server if it goes `on`."""
        left = int(fields.get("content-length", "0"))
        while left:
            data = await connection.client.read(min(left, 256 * 1024))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            if on:
                await connection.to_server(data)


def _encode(answer: Answer, method: str) -> bytes:
    head = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    head += [f"{name}: {value}" for name, value in answer.headers]
    head += [f"Content-Length: {len(answer.body)}", "", ""]
    return "\r\n".join(head).encode() + (b"" if method == "HEAD" else answer.body)
