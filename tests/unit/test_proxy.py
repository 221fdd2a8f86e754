from __future__ import annotations

import http.client
import http.server
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.testing.proxy import Behaviour, FaultProxy
from kvtier.testing.resp_proxy import RespFaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0


class EchoingHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[tuple[str, int]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EchoingHandler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that says what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(proxy.address, PATIENCE_S)


def hear(client: socket.socket, length: int) -> bytes:
    heard = b""
    while len(heard) < length and (data := client.recv(length - len(heard))):
        heard += data
    return heard


def test_bytes_pass_both_ways(proxy: FaultProxy) -> None:
    said = bytes(range(256)) * 8192
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(said,))
        sender.start()
        assert hear(client, len(said)) == said
        sender.join()
    assert proxy.num_connections == 1


def test_a_delay_is_added_to_a_round_trip_not_to_every_piece(proxy: FaultProxy) -> None:
    proxy.behaviour = Behaviour(delay_s=0.2)
    with connect(proxy) as client:
        started = time.monotonic()
        for _ in range(20):
            client.sendall(b"x" * 1000)
        assert hear(client, 20_000) == b"x" * 20_000
        assert time.monotonic() - started >= 0.2


def test_silence_ends_with_all_that_was_said(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"one")
        assert hear(client, 3) == b"one"
        proxy.behaviour = Behaviour(silent=True)
        client.sendall(b"two")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.behaviour = Behaviour()
        client.settimeout(PATIENCE_S)
        assert hear(client, 3) == b"two"


def test_open_connections_are_reset(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"one")
        hear(client, 3)
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


@pytest.mark.parametrize("by_reset", [False, True])
def test_a_cut_comes_after_so_many_bytes(proxy: FaultProxy, by_reset: bool) -> None:
    with connect(proxy) as client:
        client.sendall(b"x" * 50)
        hear(client, 50)
        proxy.behaviour = Behaviour(cut_after=70, cut_by_reset=by_reset)
        client.sendall(b"y" * 60)
        assert hear(client, 60) == b"y" * 60
        client.sendall(b"z" * 60)
        if by_reset:
            with pytest.raises(ConnectionResetError):
                hear(client, 60)
        else:
            assert hear(client, 60) == b"z" * 10


def test_it_refuses_and_stops_listening(proxy: FaultProxy) -> None:
    proxy.behaviour = Behaviour(refuse=True)
    with pytest.raises(ConnectionResetError), connect(proxy) as client:
        client.recv(1)  # or the connection ends even before this
    proxy.behaviour = Behaviour()
    proxy.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.listen_again()
    with connect(proxy) as client:
        client.sendall(b"back")
        assert hear(client, 4) == b"back"


def put(client: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    client.request("PUT", path, body)
    response = client.getresponse()
    return response.status, response.read()


def test_chosen_requests_are_answered_by_the_proxy(web: tuple[str, int]) -> None:
    with HttpFaultProxy(web) as proxy:
        client = http.client.HTTPConnection(*proxy.address, timeout=PATIENCE_S)
        slow_down = Answer(503, (("Retry-After", "7"),), b"slow down")
        proxy.rules = [Rule(slow_down, method="PUT", path="/a", times=2)]
        body = b"body" * 100_000
        assert put(client, "/b", body) == (200, body)
        assert put(client, "/a", body) == (503, b"slow down")
        client.request("PUT", "/a", body)
        response = client.getresponse()
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        response.read()
        assert put(client, "/a", body) == (200, body)
        assert proxy.requests == {"PUT": 4}
        assert proxy.num_connections == 1, "one connection served all, in frame"
        client.close()


def test_round_trips_are_counted_by_their_first_command(echo: tuple[str, int]) -> None:
    """What is said before an answer belongs to the same one."""
    get, ping = b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n", b"*1\r\n$4\r\nping\r\n"
    with RespFaultProxy(echo) as proxy, socket.create_connection(proxy.address) as client:

        def say(*pieces: bytes) -> None:
            for piece in pieces:
                client.sendall(piece)
            left = sum(map(len, pieces))
            while left:
                left -= len(client.recv(left))

        say(get + ping)
        say(ping)
        proxy.behaviour = Behaviour(delay_s=0.2)
        say(get, get, ping)
        with socket.create_connection(proxy.address) as other:
            other.sendall(ping)
            assert other.recv(100) == ping
        assert proxy.requests == {"GET": 2, "PING": 2}
