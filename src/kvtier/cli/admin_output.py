"""What the admin commands have in common: errors to exit codes, progress, tables, JSON."""

from __future__ import annotations

import errno
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier.cli.admin_options import count_text, size_text
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.descriptions import fact_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.catalog import RemoteBlock, Removed
    from kvtier.tiers.catalog_verify import RemoteDamage
    from kvtier.tiers.fs.catalog_findings import BlockEntry, Deleted, Findings
    from kvtier.tiers.fs.catalog_verify import Damage

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

PATHS_SHOWN = 10
DAMAGES_SHOWN = 20
DIGITS_SHOWN = 16
_PIPE_WIDTH = 1000
_FAILURES_SHOWN = 10

PROBLEMS = 1
USAGE = 2
INTERRUPTED = 130


def messages_console() -> Console:
    """Where everything goes that is no result: the standard error."""
    return Console(stderr=True, highlight=False)


def results_console() -> Console:
    """Where results go: the standard output. A pipe has no width to fit into."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """One message, as it is."""
    console.print(text, markup=False, soft_wrap=True)


def teller(console: Console) -> Callable[[str], None]:
    """Says what something waits for, once per text."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            say(console, text)

    return tell


def print_json(value: object, out: TextIO | None = None) -> None:
    """The result, as one JSON value on one line; to the standard output unless `out` is given."""
    (out or sys.stdout).write(json.dumps(value) + "\n")


@contextmanager
def exit_codes(messages: Console) -> Iterator[None]:
    """Turns errors into a message and an exit code: 2 for misuse, 1 for the rest."""
    try:
        yield
    except KeyboardInterrupt:
        say(messages, "Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except ConfigError as error:
        say(messages, f"kvtier: {error}")
        raise typer.Exit(USAGE) from None
    except KVTierError as error:
        say(messages, f"kvtier: {error}")
        raise typer.Exit(PROBLEMS) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        say(messages, f"kvtier: {error}")
        raise typer.Exit(PROBLEMS) from None


@contextmanager
def progress_bar(
    messages: Console, what: str, total_bytes: int | None
) -> Iterator[Callable[[int], None]]:
    """A bar with throughput while something runs, if a person is watching; yields what to call with
    bytes as they are done, from any thread.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=messages, transient=True, disable=not messages.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def findings_json(findings: Findings, now_s: float) -> dict[str, Any]:
    """What lies beside the blocks."""
    return {
        "foreign": {"count": findings.num_foreign, "paths": findings.foreign_paths},
        "temporary_files": [
            {"path": file.path, "bytes": file.nbytes, "age_s": round(now_s - file.written_s, 1)}
            for file in findings.temporaries
        ],
        "unreadable": [{"path": path, "reason": reason} for path, reason in findings.problems],
    }


def say_findings(messages: Console, findings: Findings) -> None:
    """The same for people."""
    if findings.num_foreign:
        say(messages, f"{count_text(findings.num_foreign, 'foreign file')}, left alone:")
        for path in findings.foreign_paths[:PATHS_SHOWN]:
            say(messages, f"  {path}")
        if findings.num_foreign > PATHS_SHOWN:
            say(messages, f"  and {findings.num_foreign - PATHS_SHOWN} more")
    for path, reason in findings.problems:
        say(messages, f"cannot be read: {path} ({reason})")


def deleted_json(deleted: Deleted | Removed) -> dict[str, Any]:
    """What a deletion did."""
    return {
        "blocks": deleted.blocks,
        "bytes": deleted.nbytes,
        "kept": deleted.kept,
        "failures": [
            {"key": entry.key.hex(), "reason": reason} for entry, reason in deleted.failures
        ],
    }


def good_text(blocks: int, nbytes: int, seconds: float) -> str:
    """How many blocks were verified, for people."""
    rate = size_text(nbytes / seconds) if seconds > 0 else "-"
    return f"{count_text(blocks, 'good block')}, {size_text(nbytes)} in {seconds:.1f} s, {rate}/s"


def write_damages(damages: Sequence[tuple[str, BlockKey, Damage | RemoteDamage]]) -> None:
    """Damaged blocks, for people: the digest of the namespace, the key, and what is wrong."""
    if damages:
        sys.stdout.write(f"{count_text(len(damages), 'damaged block')}:\n")
    for digest, key, damage in damages[:DAMAGES_SHOWN]:
        sys.stdout.write(
            f"  {digest[:DIGITS_SHOWN]} {key.hex()}: "
            f"{damage.reason}{', removed' if damage.removed else ''}\n"
        )
    if len(damages) > DAMAGES_SHOWN:
        sys.stdout.write(f"  and {len(damages) - DAMAGES_SHOWN:,} more; --json has all\n")


def say_failures(
    messages: Console, failures: Sequence[tuple[BlockEntry | RemoteBlock, str]]
) -> None:
    """Blocks that could not be removed, for people."""
    for block, reason in failures[:_FAILURES_SHOWN]:
        say(messages, f"cannot be removed: {block.key.hex()} ({reason})")
    if len(failures) > _FAILURES_SHOWN:
        say(messages, f"and {len(failures) - _FAILURES_SHOWN:,} more")


def confirm(namespaces: Sequence[str], messages: Console) -> None:
    """Ask whether namespaces are to be removed; ends the command unless the answer is yes.

    Args:
        namespaces: a line about each.
        messages: where the lines go.

    Raises:
        ConfigError: there is no terminal to ask on.
        typer.Exit: the answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on: give --yes to remove without a question")
    for line in namespaces:
        say(messages, f"  {line}")
    if not namespaces or not typer.confirm(
        f"Remove {count_text(len(namespaces), 'namespace')}?", err=True
    ):
        say(messages, "Nothing was removed.")
        raise typer.Exit(PROBLEMS)


def model_text(description: Mapping[str, object]) -> str:
    """Architecture and dtype of a namespace, for people."""
    architectures = fact_of(description, "architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "-"
    dtype = fact_of(description, "kv_cache_dtype")
    if dtype in (None, "auto"):
        dtype = fact_of(description, "model_dtype")
    return f"{name} {dtype}" if isinstance(dtype, str) else name
