"""What an admin command works on: directories of an fs tier, or the URL of another tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.tier_options import tier_options
from kvtier.errors import ConfigError
from kvtier.tiers.catalog import open_catalog
from kvtier.tiers.catalog_survey import survey
from kvtier.tiers.registry import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.console import Console

    from kvtier.tiers.catalog import RemoteCatalog
    from kvtier.tiers.catalog_survey import Survey

Places = Annotated[
    list[str],
    typer.Argument(
        metavar="DIR...|URL",
        help="Directories of an fs tier: root_dir(s). Or the URL of another tier, such as "
        "s3://bucket/prefix or valkey://host:port.",
    ),
]


def url_in(places: Sequence[str], option: Sequence[str] | None) -> str | None:
    """The URL that a command is to work on; None if it is to work on directories.

    Raises:
        ConfigError: URLs and directories together, several URLs, or options without a URL.
    """
    urls = [place for place in places if is_url(place)]
    if not urls:
        if option:
            raise ConfigError("--option is for a URL: directories have no options, leave it out")
        return None
    if len(places) > 1:
        raise ConfigError("give one URL, or any number of directories")
    return urls[0]


def refuse_url(place: Path) -> None:
    """Take a directory alone.

    Raises:
        ConfigError: it is meant to be a URL.
    """
    text = str(place).replace(":/", "://", 1)  # a path has no two slashes in a row
    if is_url(text):
        raise ConfigError(
            f"{text.partition('://')[0]}:// is a URL: only directories of an fs tier can be "
            "exported and imported"
        )


def catalog_at(url: str, option: Sequence[str] | None) -> AbstractContextManager[RemoteCatalog]:
    """What lies at a URL, for the time of a command.

    Raises:
        ConfigError: the URL or an option is not allowed, or nothing can be reached there.
    """
    return closing(open_catalog(url, tier_options(url, list(option or ()))))


def survey_at(catalog: RemoteCatalog, prefix: str | None, messages: Console) -> Survey:
    """Count what is there, or the one namespace that a prefix names; a person sees how far it is.

    Raises:
        ConfigError: as `survey`.
    """
    with messages.status("listing") as status:
        return survey(
            catalog, prefix, lambda found: status.update(f"listing: {found.blocks:,} blocks")
        )
