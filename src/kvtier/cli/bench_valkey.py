"""`kvtier bench valkey`: what the valkey tier reaches at a server, beside the bare client.

As `bench_remote`, but every round writes the keys of the one before: a server that keeps blocks in
memory holds one round, and not all of them.
"""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.admin_output import Json, exit_codes, messages_console
from kvtier.cli.bench_plan import InFlight, Quick, Seconds, Sizes, plan_of
from kvtier.cli.bench_remote import Plan, measure
from kvtier.cli.bench_report import Row, print_rows
from kvtier.cli.tier_options import TierOptions, tier_options
from kvtier.interrupts import termination_as_interrupt
from kvtier.tiers.registry import decode_settings, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.valkey.connections import Connections
    from kvtier.tiers.valkey.settings import Endpoint, ValkeySettings


_SCAN = "1000"


def bench_valkey(
    url: Annotated[str, typer.Argument(metavar="URL", help="valkey://user@host:port/database")],
    option: TierOptions = None,
    sizes: Sizes = None,
    in_flight: InFlight = None,
    seconds: Seconds = 60.0,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Store and load blocks at a server, beside the bare client with the same shapes.

    The keys have a prefix of their own and are removed at the end. The server needs room for twice
    the largest size times the most blocks at once.
    """
    messages = messages_console()
    with exit_codes(messages):
        options = tier_options(url, option or [])
        options["key_prefix"] = f"kvtier-bench-{secrets.token_hex(6)}:"
        options["on_unavailable"] = "fail"
        plan = plan_of("valkey", options, sizes, in_flight, seconds, quick=quick)
        with termination_as_interrupt(), messages.status("bench") as status:
            rows = measure_valkey(plan, status.update)
    from kvtier.tiers.valkey.address import masked

    print_rows(rows, f"valkey tier at {masked(url)}", json=json)


def measure_valkey(plan: Plan, doing: Callable[[str], None]) -> list[Row]:
    """Measure, and remove every key of the plan's prefix, whatever happens.

    Raises:
        ConfigError: the options cannot work, or the server cannot be used.
        KVTierError: the server failed.
    """
    tier_type = load_tier_type("valkey", "bench.type")
    settings: ValkeySettings = decode_settings(tier_type, plan.options, "bench")  # type: ignore[assignment]
    tier_type.preflight(settings, "bench")
    from kvtier.tiers.valkey.connections import Connections
    from kvtier.tiers.valkey.server import examine
    from kvtier.tiers.valkey.settings import endpoint_of

    endpoint = endpoint_of(settings, "bench")
    cluster = examine(endpoint, "bench").cluster
    connections = Connections(endpoint, lambda: None, cluster=cluster)
    try:
        return measure(plan, _BareValues(connections, endpoint, cluster=cluster), doing)
    finally:
        connections.close()
        doing("removing the keys")
        remove_all(endpoint, cluster=cluster)  # once more: the measurement may have ended anywhere


def remove_all(endpoint: Endpoint, *, cluster: bool) -> None:
    """Unlink every key of the endpoint's prefix, on every node.

    Raises:
        KVTierError: the server failed.
    """
    from kvtier.tiers.valkey.server import nodes_of
    from kvtier.tiers.valkey.wire import Wire

    nodes = [endpoint.address.node]
    if cluster:
        with closing(Wire(endpoint, nodes[0])) as wire:
            nodes = nodes_of(wire)
    for node in nodes:
        with closing(Wire(endpoint, node)) as wire:
            cursor = b"0"
            while True:
                match wire.ask("SCAN", cursor, "MATCH", f"{endpoint.prefix}*", "COUNT", _SCAN):
                    case [bytes(cursor), list(names)]:
                        # one by one: in a cluster they lie in different hash slots
                        for name in names:
                            assert isinstance(name, bytes), "a key"
                            wire.ask("UNLINK", name)
                    case reply:
                        raise AssertionError(f"no answer to SCAN: {reply!r}")
                if cursor == b"0":
                    break


class _BareValues:
    """The client library by itself, one connection per call that runs."""

    overwrites = True

    def __init__(self, connections: Connections, endpoint: Endpoint, *, cluster: bool) -> None:
        self._connections = connections
        self._endpoint = endpoint
        self._cluster = cluster

    def put(self, name: str, data: memoryview) -> None:
        """One value."""
        self._connections.run(lambda client: client.set(f"{self._endpoint.prefix}{name}", data))

    def get(self, name: str, into: memoryview) -> None:
        """The value, into its buffer."""
        self._connections.run(
            lambda client: client.get(f"{self._endpoint.prefix}{name}", buffer=into)
        )

    def clean(self) -> None:
        """Every key of the prefix."""
        remove_all(self._endpoint, cluster=self._cluster)
