"""`kvtier bench object`: what the object tier reaches at a URL, beside the bare client."""

from __future__ import annotations

import secrets
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

    from kvtier.tiers.object.settings import ObjectSettings
    from kvtier.tiers.object.store import AnyStore, ObjectStore


def bench_object(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="s3://bucket/prefix, gs://... or az://...")
    ],
    option: TierOptions = None,
    sizes: Sizes = None,
    in_flight: InFlight = None,
    seconds: Seconds = 60.0,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Store and load blocks at a URL, beside the bare client with the same shapes.

    Everything happens below a prefix of its own, whose objects are deleted at the end. Credentials
    come from where the tier takes them.
    """
    messages = messages_console()
    with exit_codes(messages):
        options = tier_options(url, option or [])
        options["url"] = f"{url.rstrip('/')}/kvtier-bench-{secrets.token_hex(6)}"
        plan = plan_of("object", options, sizes, in_flight, seconds, quick=quick)
        with termination_as_interrupt(), messages.status("bench") as status:
            rows = measure_object(plan, status.update)
    print_rows(rows, f"object tier at {url}", json=json)


def measure_object(plan: Plan, doing: Callable[[str], None]) -> list[Row]:
    """Measure, and delete every object below the plan's URL, whatever happens.

    Raises:
        ConfigError: the options cannot work.
        KVTierError: the store failed.
    """
    tier_type = load_tier_type("object", "bench.type")
    settings: ObjectSettings = decode_settings(tier_type, plan.options, "bench")  # type: ignore[assignment]
    tier_type.preflight(settings, "bench")
    from kvtier.tiers.object.store import open_store

    store = open_store(settings, "bench")
    try:
        return measure(plan, _BareObjects(store), doing)
    finally:
        doing("deleting the objects")
        delete_all(store)  # once more: the measurement may have ended anywhere


def delete_all(store: ObjectStore) -> None:
    """Delete every object below the prefix of `store`.

    Raises:
        KVTierError: the store failed.
    """
    import obstore

    def delete(client: AnyStore) -> None:
        for page in list(obstore.list(client, chunk_size=1000)):
            obstore.delete(client, [entry["path"] for entry in page])

    store.ask("deleting", delete)


class _BareObjects:
    """obstore by itself; what it fetches stays in its own memory."""

    overwrites = False

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, name: str, data: memoryview) -> None:
        """One object."""
        import obstore

        path = _path(name)
        self._store.ask(
            "writing", lambda client: obstore.put(client, path, data, use_multipart=False)
        )

    def get(self, name: str, into: memoryview) -> None:  # noqa: ARG002 - the protocol's argument
        """The object's bytes."""
        import obstore

        path = _path(name)
        self._store.ask("reading", lambda client: obstore.get(client, path).bytes())

    def clean(self) -> None:
        """Everything below the prefix."""
        delete_all(self._store)


def _path(name: str) -> str:
    """Like the tier's: directories cost something in servers over a file system."""
    return f"bare/{name[:2]}/{name}"
