"""What a server says of itself at start, and what its operator should know about that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.core.types import BlockKey
from kvtier.errors import ConfigError, TierDeniedError, TierError, TierUnreachableError
from kvtier.tiers.valkey.address import Node
from kvtier.tiers.valkey.keys import BULK_BYTES_MAX, TRIAL_NAMESPACE, Names
from kvtier.tiers.valkey.settings import refuse_database
from kvtier.tiers.valkey.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.tiers.valkey.settings import Endpoint

_SAMPLE = BlockKey(bytes(32))  # no block has this key
_SAMPLE_MS = "10000"


@dataclass(frozen=True, slots=True)
class Facts:
    """One server, as it described itself.

    Attributes:
        version: with its name.
        cluster: whether it is a node of a cluster.
        maxmemory: bytes that it may take; 0: no bound; None: it does not say.
        policy: what it evicts then, `maxmemory-policy`; empty if it does not say.
        notifies: whether it tells of removed keys; None: it does not say.
        part_max: the longest value that it takes, bytes.
    """

    version: str
    cluster: bool
    maxmemory: int | None
    policy: str
    notifies: bool | None
    part_max: int

    def advice(self, ttl: bool) -> Iterator[str]:
        """What is worth a change, as sentences for the log."""
        if self.maxmemory == 0:
            yield (
                "the server has no maxmemory, so it takes memory until the machine has none left: "
                "set maxmemory, and maxmemory-policy allkeys-lru"
            )
        elif self.policy == "noeviction":
            yield (
                "maxmemory-policy is noeviction, so the server refuses blocks once it is full: set "
                "maxmemory-policy allkeys-lru"
            )
        elif self.policy.startswith("volatile") and not ttl:
            yield (
                f"maxmemory-policy is {self.policy}, which evicts only keys that expire, and "
                "blocks do not without ttl: set maxmemory-policy allkeys-lru, or ttl"
            )
        elif self.policy == "allkeys-random":
            yield (
                "maxmemory-policy is allkeys-random, which evicts parts of blocks that are in use: "
                "set maxmemory-policy allkeys-lru"
            )
        if self.notifies is False:
            yield (
                "the server does not tell which blocks it evicts, so a block may be looked for in "
                "vain: turn it on with CONFIG SET notify-keyspace-events Egxe (AEgxe keeps others)"
            )


def examine(endpoint: Endpoint, setting: str) -> Facts:
    """Ask the server what it is, and whether we may do there what we have to.

    Args:
        endpoint: of the server.
        setting: path of the tier's settings, for messages.

    Raises:
        ConfigError: the server is there, but these settings can never work with it.
        TierUnreachableError: it cannot be reached, or is not ready.
        TierDeniedError: it refuses us, or one of the commands that we need.
    """
    wire = Wire(endpoint, endpoint.address.node)
    try:
        facts = describe_server(wire, endpoint, setting)
        _try_commands(wire, endpoint)
    finally:
        wire.close()
    return facts


def nodes_of(wire: Wire) -> list[Node]:
    """The nodes of a cluster that keep blocks, as one of them knows them.

    Raises:
        TierError: it does not tell.
    """
    found = []
    for line in _text(wire.ask("CLUSTER", "NODES")).splitlines():
        words = line.split()
        flags = set(words[2].split(",")) if len(words) > 2 else set()
        if "master" not in flags or flags & {"fail", "noaddr", "handshake"}:
            continue
        host, _, port = words[1].partition("@")[0].rpartition(":")
        found.append(Node(host or wire.node.host, int(port)))
    return found


def figures_in(info: str) -> dict[str, int]:
    """The whole numbers of an `INFO` by name."""
    pairs = (line.partition(":") for line in info.splitlines())
    return {name: int(value) for name, _, value in pairs if value.strip().isdecimal()}


def describe_server(wire: Wire, endpoint: Endpoint, setting: str) -> Facts:
    """What the server says of itself; changes nothing there.

    Raises:
        ConfigError: these settings can never work with it.
        TierUnreachableError: it does not answer.
    """
    info = _try_info(wire)
    mode = info.get("redis_mode", info.get("server_mode", ""))
    if mode == "sentinel":
        raise ConfigError(
            f"{setting}.url = {endpoint.address.shown!r} is a Sentinel, which the client library "
            "cannot ask: name the primary itself, by an address that follows it (a service, a "
            "virtual IP or a DNS name), or use a cluster"
        )
    cluster = mode == "cluster" if endpoint.cluster is None else endpoint.cluster
    if cluster:
        refuse_database(endpoint.address, f"{setting}.url", "the server is part of a cluster")
    if mode and endpoint.cluster is not None and endpoint.cluster != (mode == "cluster"):
        raise ConfigError(
            f"{setting}.cluster = {'on' if endpoint.cluster else 'off'!r}, but the server at "
            f"{endpoint.address.shown!r} says that its mode is {mode}: set {setting}.cluster to "
            "'auto'"
        )
    name = "valkey" if "valkey_version" in info else "redis"
    events = _try_config(wire, "notify-keyspace-events")
    longest = _try_config(wire, "proto-max-bulk-len")
    maxmemory = info.get("maxmemory", "")
    return Facts(
        version=f"{name} {info.get(f'{name}_version', '(unknown version)')}",
        cluster=cluster,
        maxmemory=int(maxmemory) if maxmemory.isdecimal() else None,
        policy=info.get("maxmemory_policy", ""),
        notifies=None if events is None else _tells_removals(events),
        part_max=int(longest) if longest is not None and longest.isdecimal() else BULK_BYTES_MAX,
    )


def _tells_removals(flags: str) -> bool:
    """Whether `notify-keyspace-events` covers removals, named by their event."""
    return "E" in flags and ("A" in flags or set("gxe") <= set(flags))


def _try_info(wire: Wire) -> dict[str, str]:
    """What the server says of itself; nothing if that is not for us."""
    try:
        text = _text(wire.ask("INFO"))
    except TierDeniedError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _try_config(wire: Wire, option: str) -> str | None:
    """One of the server's options; None if that is not for us, as with many hosted servers."""
    try:
        reply = wire.ask("CONFIG", "GET", option)
    except TierUnreachableError:
        raise
    except TierError:
        return None
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes):
        return reply[1].decode()
    return None


def _try_commands(wire: Wire, endpoint: Endpoint) -> None:
    """Run every command that blocks need, on a key that no block has."""
    name = Names(endpoint.prefix, TRIAL_NAMESPACE).of(_SAMPLE)[0]
    refused = []
    commands: list[tuple[str | bytes, ...]] = [
        ("EXISTS", name, name),
        ("MGET", name),
        ("MSET", name, b""),
        ("PEXPIRE", name, _SAMPLE_MS),
        ("UNLINK", name),
    ]
    for words in commands:
        try:
            wire.ask(*words)
        except TierDeniedError as error:
            refused.append(f"{words[0]!s} ({error})")
        except TierUnreachableError:
            raise
        except TierError:
            # also a cluster's hint at another node: it is given to those who are allowed
            continue
    if refused:
        raise TierDeniedError(
            f"the user may not do what the tier needs with keys that begin with "
            f"{endpoint.prefix!r}: {'; '.join(refused)}"
        )


def _text(reply: object) -> str:
    return reply.decode(errors="replace") if isinstance(reply, bytes) else ""
