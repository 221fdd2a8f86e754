"""`kvtier ls` and `kvtier verify`: what a tier keeps, and is it good?

Directories of an fs tier are seen to here, URLs of others by `admin_remote`.
Exit codes of every admin command: 0 good, 1 problems were found, 2 misuse, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.admin_options import age_text, count_text, sample_size, size_text
from kvtier.cli.admin_output import (
    DIGITS_SHOWN,
    PROBLEMS,
    Json,
    exit_codes,
    findings_json,
    good_text,
    messages_console,
    model_text,
    print_json,
    progress_bar,
    results_console,
    say,
    say_findings,
    teller,
    write_damages,
)
from kvtier.cli.admin_places import Places, url_in
from kvtier.cli.admin_remote import ls_url, verify_url
from kvtier.cli.tier_options import TierOptions
from kvtier.errors import EnvelopeError, MissingBlockError
from kvtier.tiers.fs.catalog import Catalog, NamespaceEntry, Summary
from kvtier.tiers.fs.catalog_capacity import capacity_of
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.catalog_verify import envelope_of, verify_blocks
from kvtier.tiers.fs.page_buffer import PageBuffer

if TYPE_CHECKING:
    from kvtier.tiers.fs.catalog_capacity import Capacity
    from kvtier.tiers.fs.catalog_findings import TemporaryFile
    from kvtier.tiers.fs.catalog_verify import Damage, Stored, Verification

NamespacePrefix = Annotated[
    str | None,
    typer.Option(
        "--namespace", metavar="PREFIX", help="Only this one: first digits of its digest."
    ),
]


def listed(namespaces: list[NamespaceEntry], findings: Findings) -> list[Stored]:
    """Every block of the namespaces, and where it is."""
    return [(ns, layout, entry) for ns in namespaces for layout, entry in ns.blocks(findings)]


def chosen(catalog: Catalog, prefix: str | None, findings: Findings) -> list[NamespaceEntry]:
    """The namespace that a prefix names, or all. Raises ConfigError: it names none or several."""
    return catalog.namespaces(findings) if prefix is None else catalog.find(prefix)


def ls(
    places: Places,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="List the blocks of this namespace instead."),
    ] = None,
    option: TierOptions = None,
    json: Json = False,
) -> None:
    """List namespaces: model, layout, blocks, bytes, age, last use, and whether one is in use.

    Exits with 1 when something cannot be read.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        url = url_in(places, option)
        if url is not None:
            ls_url(url, option, blocks, json, messages)
            return
        catalog = Catalog(places)
        if blocks is not None:
            _list_blocks(catalog.find(blocks), findings, json)
        else:
            _list_namespaces(catalog, findings, json)
            if not json:
                say_findings(messages, findings)
    if findings.problems:
        raise typer.Exit(PROBLEMS)


@dataclass(frozen=True, slots=True)
class _Listed:
    namespace: NamespaceEntry
    total: Summary
    layouts: dict[str, Summary]
    disk_bytes: dict[str, int]

    @property
    def total_disk_bytes(self) -> int:
        return sum(self.disk_bytes.get(name, part.nbytes) for name, part in self.layouts.items())


def _list_namespaces(catalog: Catalog, findings: Findings, json: bool) -> None:
    rows = []
    for namespace in catalog.namespaces(findings):
        row = _Listed(namespace, Summary(), {}, {})
        for layout, entry in namespace.blocks(findings):
            row.total.add(entry)
            row.layouts.setdefault(layout.layout, Summary()).add(entry)
        for layout in namespace.layouts:
            disk_bytes = layout.disk_bytes()
            if disk_bytes is not None:
                row.layouts.setdefault(layout.layout, Summary())
                row.disk_bytes[layout.layout] = disk_bytes
        rows.append(row)
    rows.sort(key=lambda row: row.total.last_use_s or 0.0, reverse=True)
    now = time.time()
    capacities = {root: capacity_of(root) for root in catalog.roots}
    total = {
        "namespaces": len(rows),
        "blocks": sum(row.total.blocks for row in rows),
        "bytes": sum(row.total.nbytes for row in rows),
    }
    if json:
        print_json(
            {
                "roots": catalog.roots,
                "namespaces": [_namespace_json(row, now) for row in rows],
                "total": total,
                "capacities": {root: _capacity_json(found) for root, found in capacities.items()},
                **findings_json(findings, now),
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    several = len(catalog.roots) > 1
    for column in (*(["root"] if several else []), "namespace", "label", "model", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("block", "blocks", "size", "on disk", "age", "last use"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state")
    for row in rows:
        namespace, summary = row.namespace, row.total
        row_bytes = namespace.fact("layout", "row_bytes")
        table.add_row(
            *([namespace.root] if several else []),
            namespace.digest[:DIGITS_SHOWN],
            namespace.label or "-",
            model_text(namespace.description),
            "+".join(sorted(row.layouts)) or "-",
            size_text(row_bytes) if isinstance(row_bytes, int) else "-",
            f"{summary.blocks:,}",
            size_text(summary.nbytes),
            size_text(row.total_disk_bytes),
            age_text(now - namespace.created_s),
            age_text(None if summary.last_use_s is None else now - summary.last_use_s),
            "live" if namespace.live else "idle",
        )
    out = results_console()
    out.print(table)
    say(
        out,
        f"{count_text(total['namespaces'], 'namespace')}, {count_text(total['blocks'], 'block')}, "
        f"{size_text(total['bytes'])}",
    )
    for root, capacity in capacities.items():
        if capacity is not None:
            say(
                out,
                f"{root}: {size_text(capacity.granted_bytes)} of {size_text(capacity.limit_bytes)} "
                f"in use by {count_text(len(capacity.members), 'process', 'processes')}",
            )


def _capacity_json(capacity: Capacity | None) -> dict[str, Any] | None:
    if capacity is None:
        return None
    return {
        "limit_bytes": capacity.limit_bytes,
        "granted_bytes": capacity.granted_bytes,
        "members": [
            {"host": member.host, "pid": member.pid, "layout": member.layout}
            for member in capacity.members.values()
        ],
    }


def _namespace_json(row: _Listed, now: float) -> dict[str, Any]:
    namespace, summary = row.namespace, row.total
    return {
        "root": namespace.root,
        "namespace": namespace.digest,
        "label": namespace.label,
        "live": namespace.live,
        "created_s": namespace.created_s,
        "age_s": round(now - namespace.created_s, 1),
        "last_use_s": summary.last_use_s,
        "blocks": summary.blocks,
        "bytes": summary.nbytes,
        "layouts": {
            layout: {
                "blocks": part.blocks,
                "bytes": part.nbytes,
                "disk_bytes": row.disk_bytes.get(layout, part.nbytes),
            }
            for layout, part in row.layouts.items()
        },
        "description": dict(namespace.description),
    }


def _list_blocks(namespaces: list[NamespaceEntry], findings: Findings, json: bool) -> None:
    stored = listed(namespaces, findings)
    stored.sort(key=lambda one: one[2].last_use_s, reverse=True)
    buffer = PageBuffer()
    now = time.time()
    if not json:
        sys.stdout.write(f"{'last use':>9}  {'created':>9}  {'size':>10}  layout    key\n")
    rows = []
    for namespace, layout, entry in stored:
        created_s = None
        with suppress(MissingBlockError, EnvelopeError, OSError):  # `verify` tells those
            created_s = envelope_of(layout, entry, buffer).created_ns / 1e9
        if json:
            rows.append(
                {
                    "root": namespace.root,
                    "key": entry.key.hex(),
                    "bytes": entry.nbytes,
                    "layout": layout.layout,
                    "last_use_s": entry.last_use_s,
                    "created_s": created_s,
                }
            )
        else:
            created = age_text(None if created_s is None else now - created_s)
            sys.stdout.write(
                f"{age_text(now - entry.last_use_s):>9}  {created:>9}  "
                f"{size_text(entry.nbytes):>10}  {layout.layout:8}  {entry.key.hex()}\n"
            )
    if json:
        print_json({"namespace": namespaces[0].digest, "blocks": rows})


def verify(
    places: Places,
    namespace: NamespacePrefix = None,
    sample: Annotated[
        str | None,
        typer.Option(metavar="N|P%", help="Only so many blocks, or such a share, at random."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove damaged blocks and files of writers long dead."),
    ] = False,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Blocks at once.")] = 8,
    option: TierOptions = None,
    json: Json = False,
) -> None:
    """Read blocks and verify their checksums, beside running engines.

    Exits with 1 when a block is damaged or something cannot be read, also when it was repaired.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        url = url_in(places, option)
        if url is not None:
            verify_url(url, option, namespace, sample, repair, threads, json, messages)
            return
        stored = listed(chosen(Catalog(places, teller(messages)), namespace, findings), findings)
        if sample is not None:
            size = sample_size(sample, len(stored), "--sample")
            stored = random.sample(stored, size)
        started = time.monotonic()
        with progress_bar(messages, "verify", sum(one[2].nbytes for one in stored)) as progress:
            found = verify_blocks(stored, repair, threads, progress)
        seconds = time.monotonic() - started
        stale = _stale(findings, repair)
    if json:
        print_json(_verification_json(found, findings, stale, seconds))
    else:
        _print_verification(found, findings, stale, seconds, messages)
    if found.damages or findings.problems:
        raise typer.Exit(PROBLEMS)


def _stale(findings: Findings, repair: bool) -> list[tuple[TemporaryFile, bool]]:
    """Files of writers that were killed, and whether each was removed."""
    stale = []
    for file in findings.temporaries:
        if file.stale:
            if repair:
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
            stale.append((file, repair))
    return stale


def _verification_json(
    found: Verification,
    findings: Findings,
    stale: list[tuple[TemporaryFile, bool]],
    seconds: float,
) -> dict[str, Any]:
    return {
        "blocks": found.blocks,
        "bytes": found.nbytes,
        "seconds": round(seconds, 3),
        "vanished": found.vanished,
        "damaged": [_damage_json(damage) for damage in found.damages],
        "stale_temporary_files": [
            {"path": file.path, "bytes": file.nbytes, "removed": removed} for file, removed in stale
        ],
        **findings_json(findings, time.time()),
        "ok": not found.damages and not findings.problems,
    }


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {
        "root": damage.namespace.root,
        "namespace": damage.namespace.digest,
        "layout": damage.layout,
        "key": damage.entry.key.hex(),
        "reason": damage.reason,
        "removed": damage.removed,
    }


def _print_verification(
    found: Verification,
    findings: Findings,
    stale: list[tuple[TemporaryFile, bool]],
    seconds: float,
    messages: Console,
) -> None:
    text = good_text(found.blocks, found.nbytes, seconds)
    if found.vanished:
        text += f"; {found.vanished:,} were gone meanwhile"
    sys.stdout.write(text + "\n")
    write_damages([(one.namespace.digest, one.entry.key, one) for one in found.damages])
    if stale:
        removed = sum(removed for _, removed in stale)
        sys.stdout.write(
            f"{count_text(len(stale), 'file')} of writers that were killed, "
            f"{size_text(sum(file.nbytes for file, _ in stale))}, {removed:,} removed\n"
        )
    say_findings(messages, findings)
