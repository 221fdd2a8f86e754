"""`kvtier export` and `kvtier import`: a namespace to a tar archive, and back."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from kvtier.cli.admin import chosen, listed
from kvtier.cli.admin_options import count_text, size_text
from kvtier.cli.admin_output import (
    PROBLEMS,
    Json,
    exit_codes,
    messages_console,
    print_json,
    progress_bar,
    say,
)
from kvtier.cli.admin_places import refuse_url
from kvtier.errors import ConfigError
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_archive import export_namespace, import_namespace, list_for_export
from kvtier.tiers.fs.catalog_capacity import capacity_of
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.checks import check_root
from kvtier.tiers.registry import decode_settings, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtier.tiers.base import Tier
    from kvtier.tiers.fs.catalog_archive import Transfer

_REFUSED_SHOWN = 10
_ROOM_SHARE = 0.9  # of the capacity: below the watermark to which tiers evict
_STREAM = Path("-")
_COPY_BYTES = 1 << 20

LayoutOption = Literal["auto", "files", "segments"]


def export(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an fs tier.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE.tar|-", help="A new file; - is the standard output.")
    ],
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="PREFIX", help="First digits of its digest.")
    ],
    json: Json = False,
) -> None:
    """Write a namespace to a tar archive: namespace.json, then its blocks, last used first.

    Every block is verified; damaged ones are left out, and the exit code is 1. With - the report
    goes to the standard error.
    """
    messages = messages_console()
    findings = Findings()
    with exit_codes(messages):
        refuse_url(root)
        (entry,) = chosen(Catalog([root]), namespace, findings)
        stored = list_for_export(listed([entry], findings))
        nbytes = sum(one[2].nbytes for one in stored)
        with (
            _destination(file) as out,
            progress_bar(messages, "export", nbytes) as progress,
        ):
            done = export_namespace(entry.description, entry.digest, stored, out, progress)
    _report("exported", "gone meanwhile", done, json, to_stderr=file == _STREAM)
    if done.refused or findings.problems:
        raise typer.Exit(PROBLEMS)


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.tar|-", help="What `kvtier export` wrote; - is the input."),
    ],
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an fs tier.")],
    layout: Annotated[
        LayoutOption, typer.Option(help="How blocks are kept; auto: as the directory's others are.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Bring the blocks of an archive into a directory, beside running engines.

    Every block is verified. Blocks that are present are skipped, so an import that was interrupted
    goes on when it is run again. Exits with 1 when something was refused or did not fit.
    """
    messages = messages_console()
    with exit_codes(messages):
        refuse_url(root)
        check_root(root, "DIR")
        with (
            _source(file) as source,
            progress_bar(messages, "import", _length(source)) as progress,
        ):
            capacity = capacity_of(os.path.realpath(root))
            room_bytes = None if capacity is None else int(capacity.limit_bytes * _ROOM_SHARE)
            done = import_namespace(source, _opener(root, layout), progress, room_bytes)
    _report("imported", "present already", done, json, to_stderr=False)
    if done.full:
        say(messages, f"{root} takes no more: what comes behind in the archive was not imported")
    if done.refused or done.full:
        raise typer.Exit(PROBLEMS)


def _opener(root: Path, layout: LayoutOption) -> Callable[[str, Mapping[str, object]], Tier]:
    tier_type = load_tier_type("fs", "type")
    settings = decode_settings(tier_type, {"root_dir": str(root), "layout": layout}, "import")
    tier_type.preflight(settings, "import")

    def open_tier(digest: str, description: Mapping[str, object]) -> Tier:
        return tier_type.open(settings, digest, description)

    return open_tier


@contextmanager
def _destination(file: Path) -> Iterator[BinaryIO]:
    """Where an archive goes: a file appears under its name when it is complete."""
    if file == _STREAM:
        if sys.stdout.isatty():
            raise ConfigError("FILE = - would write an archive to the terminal: redirect it")
        yield sys.stdout.buffer
        return
    if os.path.lexists(file):
        raise ConfigError(f"FILE = {str(file)!r} exists: remove it or name another file")
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            yield out
        os.link(part, file)  # unlike a rename, never over somebody else's file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


@contextmanager
def _source(file: Path) -> Iterator[BinaryIO]:
    if file == _STREAM:
        if sys.stdin.isatty():
            raise ConfigError("FILE = - would read an archive from the terminal: redirect it")
        yield sys.stdin.buffer
        return
    try:
        source = open(file, "rb", buffering=_COPY_BYTES)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(
            f"FILE = {str(file)!r} cannot be read ({error.strerror}): name an archive that "
            f"`kvtier export` wrote"
        ) from None
    with source:
        yield source


def _length(source: BinaryIO) -> int | None:
    try:
        return os.fstat(source.fileno()).st_size or None
    except OSError:
        return None


def _report(verb: str, skipped: str, done: Transfer, json: bool, to_stderr: bool) -> None:
    out = sys.stderr if to_stderr else sys.stdout
    if json:
        print_json(
            {
                "namespace": done.namespace,
                "blocks": done.blocks,
                "bytes": done.nbytes,
                "skipped": done.skipped,
                "refused": [{"name": name, "reason": why} for name, why in done.refused],
                "full": done.full,
            },
            out,
        )
        return
    text = (
        f"{verb} {count_text(done.blocks, 'block')}, {size_text(done.nbytes)}, of {done.namespace}"
    )
    if done.skipped:
        text += f"; {done.skipped:,} were {skipped}"
    out.write(text + "\n")
    for name, why in done.refused[:_REFUSED_SHOWN]:
        out.write(f"  left out: {name}: {why}\n")
    if len(done.refused) > _REFUSED_SHOWN:
        out.write(f"  and {len(done.refused) - _REFUSED_SHOWN:,} more; --json has all\n")
