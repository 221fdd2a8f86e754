"""`kvtier ls` and `kvtier verify` of a URL: what a tier behind a network keeps, and is it good?

A place may keep any number of blocks: what is printed is written as it comes, and counted.
"""

from __future__ import annotations

import json as json_text
import sys
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.admin_options import age_text, count_text, sample_size, size_text
from kvtier.cli.admin_output import (
    DIGITS_SHOWN,
    PATHS_SHOWN,
    PROBLEMS,
    good_text,
    model_text,
    print_json,
    progress_bar,
    results_console,
    say,
    write_damages,
)
from kvtier.cli.admin_places import catalog_at, survey_at
from kvtier.tiers.catalog_verify import sampled, verify_remote
from kvtier.tiers.descriptions import fact_of, label_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.tiers.catalog import Description, RemoteBlock, RemoteCatalog
    from kvtier.tiers.catalog_survey import Survey, Totals
    from kvtier.tiers.catalog_verify import RemoteDamage, RemoteVerification


def ls_url(
    url: str, option: Sequence[str] | None, blocks: str | None, json: bool, messages: Console
) -> None:
    """List the namespaces of a URL, or the blocks of one.

    Raises:
        ConfigError: the URL, an option or the namespace is not allowed, or nothing can be reached.
        KVTierError: the place failed.
    """
    with catalog_at(url, option) as catalog:
        found = survey_at(catalog, blocks, messages)
        if blocks is None:
            _list_namespaces(catalog, found, json)
        else:
            _list_blocks(catalog, found, json)
        if not json:
            say_beside(catalog, found, messages)


def verify_url(
    url: str,
    option: Sequence[str] | None,
    namespace: str | None,
    sample: str | None,
    repair: bool,
    threads: int,
    json: bool,
    messages: Console,
) -> None:
    """Read the blocks of a URL and verify them.

    Raises:
        ConfigError: as `ls_url`.
        KVTierError: the place cannot be reached any more.
        typer.Exit: blocks are damaged.
    """
    with catalog_at(url, option) as catalog:
        found = survey_at(catalog, namespace, messages)
        wanted = found.blocks
        if sample is not None:
            wanted = sample_size(sample, found.blocks, "--sample")
        share = wanted / found.blocks if found.blocks else 0.0
        stream = blocks_of(catalog, found)
        if wanted < found.blocks:
            stream = sampled(stream, wanted, found.blocks)
        started = time.monotonic()
        with progress_bar(messages, "verify", int(found.nbytes * share)) as progress:
            done = verify_remote(catalog, stream, repair, threads, progress)
        seconds = time.monotonic() - started
        if json:
            print_json(_verification_json(catalog, found, done, seconds))
        else:
            _print_verification(done, seconds)
            say_beside(catalog, found, messages)
    if done.damages:
        raise typer.Exit(PROBLEMS)


def blocks_of(catalog: RemoteCatalog, found: Survey) -> Iterator[RemoteBlock]:
    """Every block of the namespaces that were found, listed once more."""
    prefix = next(iter(found.namespaces)) if len(found.namespaces) == 1 else ""
    for page in catalog.pages(prefix):
        for block in page.blocks:
            if block.namespace in found.namespaces:
                yield block


def digest_of(namespace: str, description: Description) -> str:
    """The whole digest of a namespace, if what it says of itself has it."""
    digest = description.content.get("digest")
    return digest if isinstance(digest, str) and digest.startswith(namespace) else namespace


def beside_json(found: Survey) -> dict[str, Any]:
    """What lies beside the blocks."""
    return {
        "foreign": {"count": found.num_foreign, "paths": found.foreign},
        "temporary_files": [],
        "unreadable": [],
    }


def say_beside(catalog: RemoteCatalog, found: Survey, messages: Console) -> None:
    """The same for people, and what they should know about the answers."""
    if found.num_foreign:
        say(messages, f"{count_text(found.num_foreign, f'foreign {catalog.noun}')}, left alone:")
        for name in found.foreign[:PATHS_SHOWN]:
            say(messages, f"  {name}")
        if found.num_foreign > PATHS_SHOWN:
            say(messages, f"  and {found.num_foreign - PATHS_SHOWN:,} more")
    for note in catalog.notes():
        say(messages, note)


def _list_namespaces(catalog: RemoteCatalog, found: Survey, json: bool) -> None:
    rows = [
        (digits, totals, catalog.describe(digits) if digits in found.described else None)
        for digits, totals in found.namespaces.items()
    ]
    rows.sort(key=lambda row: _latest(row[1]), reverse=True)
    now = time.time()
    total = {"namespaces": len(rows), "blocks": found.blocks, "bytes": found.nbytes}
    if json:
        print_json(
            {
                "roots": [catalog.url],
                "namespaces": [_namespace_json(catalog, *row, now) for row in rows],
                "total": total,
                "capacities": {catalog.url: None},
                **beside_json(found),
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("namespace", "label", "model", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("block", "blocks", "size", "age", "last use"):
        table.add_column(column, justify="right", no_wrap=True)
    for digits, totals, description in rows:
        content = description.content if description is not None else {}
        row_bytes = fact_of(content, "layout", "row_bytes")
        created_s = _created_s(totals, description)
        table.add_row(
            digits[:DIGITS_SHOWN],
            label_of(content) or "-",
            model_text(content),
            catalog.layout,
            size_text(row_bytes) if isinstance(row_bytes, int) else "-",
            f"{totals.blocks:,}",
            size_text(totals.nbytes),
            age_text(None if created_s is None else now - created_s),
            age_text(None if totals.last_use_s is None else now - totals.last_use_s),
        )
    out = results_console()
    out.print(table)
    say(
        out,
        f"{count_text(len(rows), 'namespace')}, {count_text(found.blocks, 'block')}, "
        f"{size_text(found.nbytes)}",
    )


def _latest(totals: Totals) -> float:
    return float(max(totals.by_second, default=0))


def _created_s(totals: Totals, description: Description | None) -> float | None:
    """When the namespace was made: as it says, else when its oldest block was written."""
    if description is not None and description.created_s is not None:
        return description.created_s
    return totals.first_written_s


def _namespace_json(
    catalog: RemoteCatalog,
    digits: str,
    totals: Totals,
    description: Description | None,
    now: float,
) -> dict[str, Any]:
    created_s = _created_s(totals, description)
    content = dict(description.content) if description is not None else {}
    return {
        "root": catalog.url,
        "namespace": digits if description is None else digest_of(digits, description),
        "label": label_of(content),
        "live": None,
        "created_s": created_s,
        "age_s": None if created_s is None else round(now - created_s, 1),
        "last_use_s": totals.last_use_s,
        "blocks": totals.blocks,
        "bytes": totals.nbytes,
        "layouts": {
            catalog.layout: {
                "blocks": totals.blocks,
                "bytes": totals.nbytes,
                "disk_bytes": None,
            }
        },
        "description": content,
    }


def _list_blocks(catalog: RemoteCatalog, found: Survey, json: bool) -> None:
    (digits,) = found.namespaces
    out = sys.stdout
    if json:
        digest = digest_of(digits, catalog.describe(digits))
        out.write(f'{{"namespace": {json_text.dumps(digest)}, "blocks": [')
    else:
        out.write(f"{'last use':>9}  {'created':>9}  {'size':>10}  layout    key\n")
    now = time.time()
    for i, block in enumerate(blocks_of(catalog, found)):
        if json:
            row = {
                "root": catalog.url,
                "key": block.key.hex(),
                "bytes": block.nbytes,
                "layout": catalog.layout,
                "last_use_s": block.used_s,
                "created_s": block.written_s,
            }
            out.write(f"{', ' if i else ''}{json_text.dumps(row)}")
        else:
            used = age_text(None if block.used_s is None else now - block.used_s)
            created = age_text(None if block.written_s is None else now - block.written_s)
            out.write(
                f"{used:>9}  {created:>9}  {size_text(block.nbytes):>10}  {catalog.layout:8}  "
                f"{block.key.hex()}\n"
            )
    if json:
        out.write("]}\n")


def _verification_json(
    catalog: RemoteCatalog, found: Survey, done: RemoteVerification, seconds: float
) -> dict[str, Any]:
    return {
        "blocks": done.blocks,
        "bytes": done.nbytes,
        "seconds": round(seconds, 3),
        "vanished": done.vanished,
        "incomplete": {"count": done.incomplete, "removed": done.removed_incomplete},
        "damaged": [_damage_json(catalog, damage) for damage in done.damages],
        "stale_temporary_files": [],
        **beside_json(found),
        "ok": not done.damages,
    }


def _damage_json(catalog: RemoteCatalog, damage: RemoteDamage) -> dict[str, Any]:
    return {
        "root": catalog.url,
        "namespace": damage.block.namespace,
        "layout": catalog.layout,
        "key": damage.block.key.hex(),
        "reason": damage.reason,
        "removed": damage.removed,
    }


def _print_verification(done: RemoteVerification, seconds: float) -> None:
    text = good_text(done.blocks, done.nbytes, seconds)
    if done.vanished:
        text += f"; {done.vanished:,} were gone or rewritten meanwhile"
    sys.stdout.write(text + "\n")
    if done.incomplete:
        sys.stdout.write(
            f"{count_text(done.incomplete, 'block')} of which a part was evicted, a miss for "
            f"engines, {done.removed_incomplete:,} removed\n"
        )
    write_damages([(one.block.namespace, one.block.key, one) for one in done.damages])
