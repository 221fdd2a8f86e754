"""`kvtier evict` and `kvtier wipe` of a URL: giving up blocks, beside running engines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli.admin_options import age_text, count_text, size_text
from kvtier.cli.admin_output import (
    DIGITS_SHOWN,
    PROBLEMS,
    confirm,
    deleted_json,
    print_json,
    progress_bar,
    say_failures,
)
from kvtier.cli.admin_places import catalog_at, survey_at
from kvtier.cli.admin_remote import beside_json, digest_of, say_beside
from kvtier.errors import ConfigError
from kvtier.tiers.catalog import Removed
from kvtier.tiers.catalog_survey import Evicted, choose_cut, left_of
from kvtier.tiers.catalog_survey import evict as evict_blocks
from kvtier.tiers.catalog_survey import wipe as wipe_namespaces
from kvtier.tiers.descriptions import label_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvtier.tiers.catalog import RemoteCatalog
    from kvtier.tiers.catalog_survey import Survey


def evict_url(
    url: str,
    option: Sequence[str] | None,
    namespace: str | None,
    age_s: float | None,
    to_bytes: int | None,
    dry_run: bool,
    json: bool,
    messages: Console,
) -> None:
    """Evict blocks of a URL, those whose last use is oldest first; where a place does not know
    that, those that were written first.

    Raises:
        ConfigError: the URL, an option or the namespace is not allowed; or nobody knows ages.
        KVTierError: the place cannot be reached any more.
        typer.Exit: blocks cannot be removed.
    """
    with catalog_at(url, option) as catalog:
        now = time.time()
        found = survey_at(catalog, namespace, messages)
        ageless = sum(totals.ageless for totals in found.namespaces.values())
        if ageless:
            raise ConfigError(
                f"{'--to-size' if age_s is None else '--older-than'} needs to know when blocks "
                f"were used, and {ageless:,} have no age: {'; '.join(catalog.notes())}"
            )
        cut = choose_cut(found, None if age_s is None else now - age_s, to_bytes)
        done = Evicted()
        if cut is not None:
            with progress_bar(messages, "evict", cut.surplus) as progress:
                done = evict_blocks(catalog, found, cut, dry_run, progress)
        if json:
            print_json(_eviction_json(done, dry_run, found))
        else:
            what = "used" if _knows_use(found) else "written"
            _print_eviction(done, dry_run, now, what)
            say_failures(messages, done.removed.failures)
            say_beside(catalog, found, messages)
    if done.removed.failures:
        raise typer.Exit(PROBLEMS)


def _knows_use(found: Survey) -> bool:
    return any(totals.last_use_s is not None for totals in found.namespaces.values())


def _eviction_json(done: Evicted, dry_run: bool, found: Survey) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "chosen": {
            "blocks": done.blocks,
            "bytes": done.nbytes,
            "last_use_s": None if done.first_s is None else [done.first_s, done.last_s],
        },
        "of": {"blocks": found.blocks, "bytes": found.nbytes},
        "removed": deleted_json(done.removed),
    }


def _print_eviction(done: Evicted, dry_run: bool, now: float, what: str) -> None:
    if done.first_s is None or done.last_s is None:
        sys.stdout.write("nothing to evict\n")
        return
    ages = f"last {what} {age_text(now - done.first_s)}"
    if done.blocks > 1:
        ages += f" to {age_text(now - done.last_s)}"
    if dry_run:
        sys.stdout.write(
            f"would evict {count_text(done.blocks, 'block')}, {size_text(done.nbytes)}, "
            f"{ages} ago\n"
        )
        return
    removed = done.removed
    text = f"evicted {count_text(removed.blocks, 'block')}, {size_text(removed.nbytes)}, {ages} ago"
    if removed.kept:
        text += f"; {removed.kept:,} were used or gone meanwhile"
    sys.stdout.write(text + "\n")


def wipe_url(
    url: str,
    option: Sequence[str] | None,
    namespace: str | None,
    yes: bool,
    json: bool,
    messages: Console,
) -> None:
    """Remove whole namespaces of a URL; an engine that has one open goes on with it.

    Raises:
        ConfigError: as `evict_url`; or there is no terminal to ask on.
        KVTierError: the place cannot be reached any more.
        typer.Exit: something cannot be removed, or the answer was no.
    """
    with catalog_at(url, option) as catalog:
        found = survey_at(catalog, namespace, messages)
        digests = {digits: digits for digits in found.namespaces}
        lines = []
        for digits, totals in found.namespaces.items():
            label = None
            if digits in found.described:
                description = catalog.describe(digits)
                digests[digits] = digest_of(digits, description)
                label = label_of(description.content)
            lines.append(
                f"{catalog.url}: {digits[:DIGITS_SHOWN]}{f' ({label})' if label else ''}, "
                f"{count_text(totals.blocks, 'block')}, {size_text(totals.nbytes)}"
            )
        if not yes:
            confirm(lines, messages)
        with progress_bar(messages, "wipe", found.nbytes) as progress:
            wiped = wipe_namespaces(catalog, found, progress)
        left = left_of(catalog, found)
        if json:
            print_json(
                {
                    "namespaces": [
                        {
                            "root": catalog.url,
                            "namespace": digests[digits],
                            "live": None,
                            "gone": digits not in left,
                            **deleted_json(removed),
                        }
                        for digits, removed in wiped.items()
                    ],
                    **beside_json(found),
                }
            )
        else:
            _print_wiped(catalog, wiped, left)
            for removed in wiped.values():
                say_failures(messages, removed.failures)
            say_beside(catalog, found, messages)
    if any(removed.failures for removed in wiped.values()):
        raise typer.Exit(PROBLEMS)


def _print_wiped(catalog: RemoteCatalog, wiped: dict[str, Removed], left: set[str]) -> None:
    total = Removed()
    for removed in wiped.values():
        total += removed
    sys.stdout.write(
        f"removed {count_text(total.blocks, 'block')}, {size_text(total.nbytes)}, of "
        f"{count_text(len(wiped), 'namespace')}\n"
    )
    for digits in sorted(left):
        sys.stdout.write(f"not empty: {catalog.url} {digits[:DIGITS_SHOWN]} (in use?)\n")
