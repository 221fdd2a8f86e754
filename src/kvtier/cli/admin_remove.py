"""`kvtier evict` and `kvtier wipe`: giving up blocks, beside running engines.

An engine that looks for a block that is gone has a miss and computes it.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.admin import NamespacePrefix, chosen, listed
from kvtier.cli.admin_options import age_text, count_text, eviction_bounds, size_text
from kvtier.cli.admin_output import (
    PROBLEMS,
    Json,
    confirm,
    deleted_json,
    exit_codes,
    findings_json,
    messages_console,
    print_json,
    progress_bar,
    say_failures,
    say_findings,
    teller,
)
from kvtier.cli.admin_places import Places, url_in
from kvtier.cli.admin_remote_remove import evict_url, wipe_url
from kvtier.cli.tier_options import TierOptions
from kvtier.errors import ConfigError
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_evict import choose_victims
from kvtier.tiers.fs.catalog_evict import evict as evict_blocks
from kvtier.tiers.fs.catalog_findings import Deleted, Findings

if TYPE_CHECKING:
    from kvtier.tiers.fs.catalog import NamespaceEntry
    from kvtier.tiers.fs.catalog_verify import Stored


def evict(
    places: Places,
    namespace: NamespacePrefix = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Only blocks not used for so long: 90s, 30m, 12h, 7d, 2w."
        ),
    ] = None,
    to_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="No more than needed to have this size left: 100GiB."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be evicted.")
    ] = False,
    option: TierOptions = None,
    json: Json = False,
) -> None:
    """Evict blocks, those whose last use is oldest first, by age, by size, or both.

    The size is that of all blocks of the directories, or with --namespace of that namespace.
    Exits with 1 when a block cannot be removed.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        url = url_in(places, option)
        age_s, to_bytes = eviction_bounds(older_than, to_size)
        if url is not None:
            evict_url(url, option, namespace, age_s, to_bytes, dry_run, json, messages)
            return
        now = time.time()
        stored = listed(chosen(Catalog(places, teller(messages)), namespace, findings), findings)
        victims = choose_victims(stored, None if age_s is None else now - age_s, to_bytes)
        deleted = Deleted()
        nbytes = sum(entry.nbytes for _, _, entry in victims)
        if not dry_run:
            with progress_bar(messages, "evict", nbytes) as progress:
                deleted = evict_blocks(victims, progress)
    if json:
        print_json(_eviction_json(victims, nbytes, deleted, dry_run, stored))
    else:
        _print_eviction(victims, nbytes, deleted, dry_run, now)
        say_failures(messages, deleted.failures)
        say_findings(messages, findings)
    if deleted.failures or findings.problems:
        raise typer.Exit(PROBLEMS)


def _eviction_json(
    victims: list[Stored], nbytes: int, deleted: Deleted, dry_run: bool, stored: list[Stored]
) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "chosen": {
            "blocks": len(victims),
            "bytes": nbytes,
            "last_use_s": [victims[0][2].last_use_s, victims[-1][2].last_use_s]
            if victims
            else None,
        },
        "of": {
            "blocks": len(stored),
            "bytes": sum(entry.nbytes for _, _, entry in stored),
        },
        "removed": deleted_json(deleted),
    }


def _print_eviction(
    victims: list[Stored], nbytes: int, deleted: Deleted, dry_run: bool, now: float
) -> None:
    if not victims:
        sys.stdout.write("nothing to evict\n")
        return
    ages = f"last used {age_text(now - victims[0][2].last_use_s)}"
    if len(victims) > 1:
        ages += f" to {age_text(now - victims[-1][2].last_use_s)}"
    if dry_run:
        sys.stdout.write(
            f"would evict {count_text(len(victims), 'block')}, {size_text(nbytes)}, {ages} ago\n"
        )
        return
    text = f"evicted {count_text(deleted.blocks, 'block')}, {size_text(deleted.nbytes)}, {ages} ago"
    if deleted.kept:
        text += f"; {deleted.kept:,} were used or gone meanwhile"
    sys.stdout.write(text + "\n")


def wipe(
    places: Places,
    namespace: NamespacePrefix = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    option: TierOptions = None,
    json: Json = False,
) -> None:
    """Remove whole namespaces; one that an engine has open is emptied, and goes on empty.

    Asks before, unless --yes is given; without a terminal --yes is required. Foreign files stay.
    Exits with 1 when something cannot be removed.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        if (namespace is None) == (not everything):
            raise ConfigError("give either --namespace PREFIX or --all")
        url = url_in(places, option)
        if url is not None:
            wipe_url(url, option, namespace, yes, json, messages)
            return
        catalog = Catalog(places, teller(messages))
        targets = chosen(catalog, namespace, findings)
        if not yes:
            confirm([_named(target) for target in targets], messages)
        wiped = [(target, target.wipe(findings)) for target in targets]
        left = {(entry.root, entry.digest) for entry in catalog.namespaces()}
    total = Deleted()
    for _, deleted in wiped:
        total += deleted
    if json:
        print_json(
            {
                "namespaces": [
                    {
                        "root": target.root,
                        "namespace": target.digest,
                        "live": target.live,
                        "gone": (target.root, target.digest) not in left,
                        **deleted_json(deleted),
                    }
                    for target, deleted in wiped
                ],
                **findings_json(findings, time.time()),
            }
        )
    else:
        sys.stdout.write(
            f"removed {count_text(total.blocks, 'block')}, {size_text(total.nbytes)}, of "
            f"{count_text(len(wiped), 'namespace')}\n"
        )
        for target, _ in wiped:
            if (target.root, target.digest) in left:
                why = "in use" if target.live else "something that is not ours lies in it"
                sys.stdout.write(f"emptied, not removed: {target.path} ({why})\n")
        say_failures(messages, total.failures)
        say_findings(messages, findings)
    if total.failures or findings.problems:
        raise typer.Exit(PROBLEMS)


def _named(target: NamespaceEntry) -> str:
    """A namespace for the question."""
    state = ", in use by an engine" if target.live else ""
    return f"{target.path}{f' ({target.label})' if target.label else ''}{state}"
