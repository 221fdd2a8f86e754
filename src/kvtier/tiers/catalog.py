"""What lies behind a network, seen from outside: what every such tier shows to the command line.

For the command line and other tools, never for an engine's I/O. Any number of engines may use the
same place meanwhile:

1. Whatever is listed may vanish or be rewritten before it is looked at. That is no error.
2. What has not the form of our own is never touched. It is counted, and told.
3. Listings are streamed, a page at a time: there may be any number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvtier.errors import ConfigError, TierError
from kvtier.tiers.deletion import Deletion
from kvtier.tiers.registry import decode_settings, kind_of_url, load_tier_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtier.core.types import BlockKey


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """One stored block, as it was listed.

    Attributes:
        namespace: digits of its digest, as many as the place keeps with the block.
        key: its key.
        nbytes: what it takes.
        written_s: seconds since the epoch; None where nobody knows.
        used_s: last use, likewise.
        place: where, for the catalog itself.
    """

    namespace: str
    key: BlockKey
    nbytes: int
    written_s: float | None = None
    used_s: float | None = None
    place: object = None

    @property
    def last_s(self) -> float | None:
        """Last use, or where that is not known, when it was written."""
        return self.written_s if self.used_s is None else self.used_s


@dataclass(slots=True)
class Page:
    """A part of a listing.

    Attributes:
        blocks: in no order.
        described: namespaces whose description was met.
        foreign: names of what is not ours.
    """

    blocks: list[RemoteBlock] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Description:
    """What a namespace says of itself.

    Attributes:
        content: empty if it says nothing.
        created_s: seconds since the epoch; None if that is not known.
    """

    content: Mapping[str, object] = field(default_factory=dict)
    created_s: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A block as it is stored, not verified.

    Attributes:
        header: None if that part is missing.
        row: likewise.
    """

    header: memoryview | None
    row: memoryview | None


Removed = Deletion[RemoteBlock]
"""What a deletion did there."""


class RemoteCatalog(Protocol):
    """The blocks of one place. `read` and `remove_if` are called from several threads at once.

    Attributes:
        url: of the place, without anything secret.
        noun: what a thing there is called, e.g. `object`.
        layout: how blocks are kept, e.g. `objects`.
        time_error_s: by how much times of the same block differ between two listings.
    """

    url: str
    noun: str
    layout: str
    time_error_s: float

    def pages(self, namespace: str = "") -> Iterator[Page]:
        """Everything, or what belongs to namespaces whose digest begins with some digits.

        Args:
            namespace: digits of a digest; more than the place keeps are left out.

        Raises:
            TierError: the place refuses, or cannot be reached.
        """
        ...

    def describe(self, namespace: str) -> Description:
        """What a namespace says of itself, by its digits as they were listed."""
        ...

    def read(self, block: RemoteBlock) -> Found:
        """A block as it is stored now.

        Raises:
            MissingBlockError: gone since it was listed.
            TierError: the place refuses, or cannot be reached.
        """
        ...

    def remove_if(self, block: RemoteBlock, is_bad: Callable[[Found], bool]) -> bool:
        """Read a block once more and remove it if it is bad, and still the one that was read.

        Raises:
            MissingBlockError: gone since it was listed.
            TierError: the place refuses, or cannot be reached.
        """
        ...

    def remove(self, blocks: Sequence[RemoteBlock], unless_used: bool = False) -> Removed:
        """Remove blocks.

        Args:
            blocks: as they were listed.
            unless_used: leave alone what was used since, where that is known.

        Raises:
            TierError: the place cannot be reached any more.
        """
        ...

    def remove_description(self, namespace: str) -> None:
        """Remove what a namespace says of itself.

        Raises:
            TierError: the place refuses, or cannot be reached.
        """
        ...

    def notes(self) -> list[str]:
        """What the operator should know about the answers, as sentences."""
        ...

    def close(self) -> None:
        """End threads and connections."""
        ...


@runtime_checkable
class SupportsCatalog(Protocol):
    """Optional ability of a `TierType`: what it keeps can be looked at by a URL."""

    def open_catalog(self, settings: Any, setting: str) -> RemoteCatalog:
        """What lies where the settings point to. Changes nothing there.

        Args:
            settings: of the type's `settings_type`.
            setting: path of the settings, for messages.

        Raises:
            ConfigError: the settings can never work.
            TierError: the place cannot be reached, or refuses.
        """
        ...


def open_catalog(url: str, options: Mapping[str, object]) -> RemoteCatalog:
    """What lies at a URL.

    Args:
        url: as a tier's `url` is written.
        options: the tier's other ones.

    Raises:
        ConfigError: no kind of tier has such a URL or such options, or the place cannot be reached
            or refuses us.
    """
    kind = kind_of_url(url)
    tier_type = load_tier_type(kind, "the kind of tier of this URL")
    settings = decode_settings(tier_type, {**options, "url": url}, kind)
    assert isinstance(tier_type, SupportsCatalog), "kinds with URLs have it"
    try:
        return tier_type.open_catalog(settings, kind)
    except TierError as error:
        raise ConfigError(str(error)) from None
