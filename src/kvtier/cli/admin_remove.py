"""`kvtier evict` and `kvtier wipe`: giving up blocks, beside running engines.

An engine that looks for a block that is gone has a miss and computes it.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.admin import NamespacePrefix, Roots, chosen, listed
from kvtier.cli.admin_options import age_text, count_text, parse_age, size_text
from kvtier.cli.admin_output import (
    PROBLEMS,
    Json,
    deleted_json,
    exit_codes,
    findings_json,
    messages_console,
    print_json,
    progress_bar,
    say,
    say_findings,
    teller,
)
from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_evict import choose_victims
from kvtier.tiers.fs.catalog_evict import evict as evict_blocks
from kvtier.tiers.fs.catalog_findings import Deleted, Findings

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.tiers.fs.catalog import NamespaceEntry
    from kvtier.tiers.fs.catalog_verify import Stored


def evict(
    roots: Roots,
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
    json: Json = False,
) -> None:
    """Evict blocks, those whose last use is oldest first, by age, by size, or both.

    The size is that of all blocks of the directories, or with --namespace of that namespace.
    Exits with 1 when a block cannot be removed.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        if older_than is None and to_size is None:
            raise ConfigError(
                "nothing says what to evict: give --older-than, --to-size or both; `kvtier wipe` "
                "removes everything"
            )
        now = time.time()
        age_s = None if older_than is None else parse_age(older_than, "--older-than")
        to_bytes = None
        if to_size is not None:
            to_bytes = 0 if to_size.strip() == "0" else parse_size(_number(to_size), "--to-size")
        stored = listed(chosen(Catalog(roots, teller(messages)), namespace, findings), findings)
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
        _say_failures(messages, deleted)
        say_findings(messages, findings)
    if deleted.failures or findings.problems:
        raise typer.Exit(PROBLEMS)


def _number(text: str) -> int | str:
    return int(text) if text.strip().isdigit() else text


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


def _say_failures(messages: Console, deleted: Deleted) -> None:
    for entry, reason in deleted.failures[:10]:
        say(messages, f"cannot be removed: {entry.key.hex()} ({reason})")
    if len(deleted.failures) > 10:
        say(messages, f"and {len(deleted.failures) - 10:,} more")


def wipe(
    roots: Roots,
    namespace: NamespacePrefix = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
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
        catalog = Catalog(roots, teller(messages))
        targets = chosen(catalog, namespace, findings)
        if not yes:
            _confirm(targets, messages)
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
        _say_failures(messages, total)
        say_findings(messages, findings)
    if total.failures or findings.problems:
        raise typer.Exit(PROBLEMS)


def _confirm(targets: list[NamespaceEntry], messages: Console) -> None:
    """Ask; ends the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on: give --yes to remove without a question")
    for target in targets:
        state = ", in use by an engine" if target.live else ""
        say(messages, f"  {target.path}{f' ({target.label})' if target.label else ''}{state}")
    if not targets or not typer.confirm(
        f"Remove {count_text(len(targets), 'namespace')}?", err=True
    ):
        say(messages, "Nothing was removed.")
        raise typer.Exit(PROBLEMS)
