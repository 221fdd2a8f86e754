"""A proxy in a process of its own, so that its work takes nothing from the threads that are timed.

`ProxyProcess` starts this file as a program and tells it what to do, in lines of JSON. A proxy of
`http` counts requests by their method, one of `resp` round trips by their first command.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from typing import Any, Literal, Self

from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.testing.proxy import Behaviour, FaultProxy
from kvtier.testing.resp_proxy import RespFaultProxy

KINDS = {"http": HttpFaultProxy, "resp": RespFaultProxy}


class ProxyProcess:
    """The proxy as its user has it.

    Args:
        target: host and port of the server.
        speaks: what the proxy understands of it.
        certificate: PEM file of key and chain; clients speak TLS to the proxy if it is given.

    Attributes:
        address: host and port to connect to.
    """

    def __init__(
        self, target: tuple[str, int], speaks: Literal["http", "resp"], certificate: str = ""
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, target[0], str(target[1]), speaks, certificate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._talk, self._answers = self._process.stdin, self._process.stdout
        self.address: tuple[str, int] = ("127.0.0.1", json.loads(self._answers.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._talk.close()
        self._process.wait()

    def behave(self, **behaviour: object) -> None:
        """From now on, as `kvtier.testing.proxy.Behaviour` says."""
        self._tell(behave=behaviour)

    def reset_connections(self) -> None:
        """End every open connection by a reset."""
        self._tell(reset=True)

    def stop_listening(self) -> None:
        """Refuse connections."""
        self._tell(listen=False)

    def listen_again(self) -> None:
        """Take them again."""
        self._tell(listen=True)

    def answer_all(self, status: int = 0, code: str = "", retry_after_s: int | None = None) -> None:
        """Answer every HTTP request with an error; with status 0, let the server do it."""
        self._tell(answer=[status, code, retry_after_s])

    def show(self, certificate: str) -> None:
        """End every connection; new ones see this certificate."""
        self._tell(certificate=certificate)

    def counts(self) -> dict[str, int]:
        """Requests or round trips so far."""
        return dict(self._tell(counts=True))

    def _tell(self, **what: object) -> Any:
        self._talk.write(json.dumps(what) + "\n")
        self._talk.flush()
        return json.loads(self._answers.readline())


def main() -> None:
    host, port, speaks, certificate = sys.argv[1:]
    tls = context_of(certificate) if certificate else None
    with KINDS[speaks]((host, int(port)), tls) as proxy:
        print(json.dumps(proxy.address[1]), flush=True)
        for line in sys.stdin:
            answers = [obey(proxy, *order) for order in json.loads(line).items()]
            print(json.dumps(answers[0]), flush=True)


def obey(proxy: FaultProxy, order: str, value: Any) -> object:
    match order:
        case "behave":
            proxy.behaviour = Behaviour(**value)
        case "reset":
            proxy.reset_connections()
        case "listen":
            (proxy.listen_again if value else proxy.stop_listening)()
        case "answer":
            assert isinstance(proxy, HttpFaultProxy)
            proxy.rules = [Rule(answer_of(*value))] if value[0] else []
        case "certificate":
            proxy.stop_listening()
            proxy.tls = context_of(value)
            proxy.listen_again()
        case "counts":
            assert isinstance(proxy, HttpFaultProxy | RespFaultProxy)
            return dict(proxy.requests)
    return None


def answer_of(status: int, code: str, retry_after_s: int | None) -> Answer:
    headers = (("Retry-After", str(retry_after_s)),) if retry_after_s is not None else ()
    body = f"<Error><Code>{code}</Code><Message>words</Message></Error>" if code else ""
    return Answer(status, headers, body.encode())


def context_of(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


if __name__ == "__main__":
    main()
