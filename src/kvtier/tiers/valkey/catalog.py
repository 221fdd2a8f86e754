"""What a server, or a cluster, keeps below a prefix, for the command line.

Nodes are scanned a page at a time, over plain connections; looking at a key does not count as its
use, where the server can be told so. A scan may show a key twice while the server makes its table
larger or smaller.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import MissingBlockError, TierDeniedError, TierError, TierUnreachableError
from kvtier.tiers.catalog import Description, Found, Page, RemoteBlock, Removed
from kvtier.tiers.descriptions import parse_description
from kvtier.tiers.valkey.keys import (
    HEADER_PART,
    SHORT_DIGITS,
    TRIAL_NAMESPACE,
    Name,
    NameForms,
    Names,
)
from kvtier.tiers.valkey.server import describe_server, nodes_of
from kvtier.tiers.valkey.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.tiers.valkey.address import Node
    from kvtier.tiers.valkey.settings import Endpoint
    from kvtier.tiers.valkey.wire import Reply

_COUNT = "1000"
"""Keys that a server looks at for one page: about a millisecond of its time."""

_BATCH = 250
"""Blocks deleted by one pipeline."""

_USE_ERROR_S = 2.0
"""Servers tell idle times in whole seconds, by a clock that is a little late."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block is: its node, and how many parts it has."""

    node: Node
    num_parts: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """A name of a page with what it says; the first part that there is of its block."""

    name: bytes
    says: Name


class ValkeyCatalog:
    """See the module.

    Args:
        endpoint: of the server.
        setting: path of the tier's settings, for messages.

    Raises:
        ConfigError: the settings do not fit the server.
        TierError: it refuses us, or cannot be reached.
    """

    noun = "key"
    layout = "values"
    time_error_s = _USE_ERROR_S

    def __init__(self, endpoint: Endpoint, setting: str) -> None:
        self.url = endpoint.address.shown
        self._endpoint = endpoint
        self._forms = NameForms(endpoint.prefix)
        self._trial = f"{endpoint.prefix}{TRIAL_NAMESPACE}:{{".encode()
        self._lock = threading.Lock()  # guards what follows
        self._idle: dict[Node, list[Wire]] = {}
        self._described: dict[str, Node] = {}
        self._touches = False
        self._tells_use = True
        with self._named(), self._wire(endpoint.address.node) as wire:
            cluster = describe_server(wire, endpoint, setting).cluster
            self._nodes = nodes_of(wire) if cluster else [endpoint.address.node]

    def pages(self, namespace: str = "") -> Iterator[Page]:
        """Scan every node."""
        pattern = f"{self._endpoint.prefix}{namespace[:SHORT_DIGITS]}*"
        for node in self._nodes:
            cursor = b"0"
            while True:
                scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", _COUNT)
                match _good(self._ask(node, [scan]))[0]:
                    case [bytes(cursor), list(names)]:
                        page = self._page(node, [name for name in names if isinstance(name, bytes)])
                    case reply:
                        raise TierError(f"{self.url}: no answer to SCAN: {reply!r:.100}")
                yield page
                if cursor == b"0":
                    break

    def describe(self, namespace: str) -> Description:
        """What the tier left beside the blocks, if that was listed."""
        with self._lock:
            node = self._described.get(namespace)
        if node is None:
            return Description()
        name = Names(self._endpoint.prefix, namespace).description
        reply = _good(self._ask(node, [("MGET", name)]))[0]
        text = reply[0] if isinstance(reply, list) else None
        content = parse_description(text) if isinstance(text, bytes) else {}
        created_s = content.pop("created_s", None)
        return Description(content, created_s if isinstance(created_s, int | float) else None)

    def read(self, block: RemoteBlock) -> Found:
        """All parts by one command."""
        node, names = self._names_of(block)
        return _found(block, _good(self._ask(node, [("MGET", *names)]))[0])

    def remove_if(self, block: RemoteBlock, is_bad: Callable[[Found], bool]) -> bool:
        """Remove it in a transaction that fails if one of its parts was written meanwhile."""
        node, names = self._names_of(block)
        with self._named(), self._wire(node, fresh=True) as wire:
            _, reply = _good(wire.ask_all([("WATCH", *names), ("MGET", *names)]))
            if not is_bad(_found(block, reply)):
                wire.ask("UNWATCH")
                return False
            replies = wire.ask_all([("MULTI",), ("UNLINK", *names), ("EXEC",)])
            return _good(replies)[2] is not None

    def remove(self, blocks: Sequence[RemoteBlock], unless_used: bool = False) -> Removed:
        """Unlink blocks, a few hundred by one round trip."""
        removed = Removed()
        by_node: dict[Node, list[RemoteBlock]] = {}
        for block in blocks:
            by_node.setdefault(_place(block).node, []).append(block)
        for node, there in by_node.items():
            for start in range(0, len(there), _BATCH):
                removed += self._remove(node, there[start : start + _BATCH], unless_used)
        return removed

    def remove_description(self, namespace: str) -> None:
        """Unlink it, if it was listed."""
        with self._lock:
            node = self._described.get(namespace)
        if node is not None:
            name = Names(self._endpoint.prefix, namespace).description
            _good(self._ask(node, [("UNLINK", name)]))

    def notes(self) -> list[str]:
        """What the server could not do for us."""
        notes = []
        if self._touches:
            notes.append(
                f"{self.url} counts being looked at as a use (it has no CLIENT NO-TOUCH, or not "
                "for this user): what it evicts next, and ages from now on, are of this command"
            )
        if not self._tells_use:
            notes.append(
                f"{self.url} does not tell when blocks were used: its maxmemory-policy is one of "
                "frequency (lfu), or the user may not OBJECT IDLETIME"
            )
        return notes

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            wires = [wire for some in self._idle.values() for wire in some]
            self._idle.clear()
        for wire in wires:
            wire.close()

    def _page(self, node: Node, names: list[bytes]) -> Page:
        page = Page()
        parts: list[_Listed] = []
        for name in names:
            says = self._forms.parse(name)
            if says is None:
                if not name.startswith(self._trial):
                    page.foreign.append(name.decode(errors="backslashreplace"))
            elif says.key is None:
                with self._lock:
                    self._described[says.namespace] = node
                page.described.append(says.namespace)
            else:
                parts.append(_Listed(name, says))
        self._measure(node, self._first_parts(node, parts), page)
        return page

    def _first_parts(self, node: Node, parts: list[_Listed]) -> list[_Listed]:
        """One name of each block: of its header, or of what there is without one."""
        headers = [listed for listed in parts if listed.says.part == HEADER_PART]
        later = [listed for listed in parts if listed.says.part != HEADER_PART]
        asked: list[tuple[str | bytes, ...]] = [
            ("EXISTS", *self._part_names(listed.says, listed.says.part + 1)) for listed in later
        ]
        replies = self._ask(node, asked) if asked else []
        return headers + [one for one, count in zip(later, replies, strict=True) if count == 0]

    def _part_names(self, says: Name, num_parts: int) -> list[bytes]:
        assert says.key is not None, "a block's"
        return Names(self._endpoint.prefix, says.namespace).of(says.key, num_parts)

    def _measure(self, node: Node, parts: list[_Listed], page: Page) -> None:
        """Sizes and last uses of blocks, by the first part of each."""
        names = [self._part_names(listed.says, max(3, listed.says.part + 2)) for listed in parts]
        asked: list[tuple[str | bytes, ...]] = []
        for listed, some in zip(parts, names, strict=True):
            asked.append(("OBJECT", "IDLETIME", listed.name))
            asked += [("STRLEN", name) for name in some]
        replies = iter(self._ask(node, asked) if asked else [])
        for listed, some in zip(parts, names, strict=True):
            idle, lengths = next(replies), [next(replies) for _ in some]
            if idle is None or any(_is_elsewhere(reply) for reply in (idle, *lengths)):
                continue  # gone meanwhile
            if any("WRONGTYPE" in str(reply) for reply in lengths):
                page.foreign.append(listed.name.decode())
                continue
            sizes = _numbers(lengths)
            while sizes[-1]:  # the row goes on
                more = self._part_names(listed.says, len(sizes) + 1)[-1]
                sizes += _numbers(self._ask(node, [("STRLEN", more)]))
            if isinstance(idle, TierError):
                self._tells_use = False
            if any(sizes):
                page.blocks.append(self._block(node, listed.says, sizes, idle))

    def _block(self, node: Node, says: Name, sizes: list[int], idle: Reply) -> RemoteBlock:
        assert says.key is not None, "a block's"
        used_s = time.time() - idle if isinstance(idle, int) else None
        place = _Place(node, max(2, len(sizes) - 1))  # behind the last part there is nothing
        return RemoteBlock(says.namespace, says.key, sum(sizes), used_s=used_s, place=place)

    def _remove(self, node: Node, blocks: list[RemoteBlock], unless_used: bool) -> Removed:
        removed = Removed()
        names = [self._names_of(block)[1] for block in blocks]
        if unless_used:
            idle = self._ask(node, [("OBJECT", "IDLETIME", some[0]) for some in names])
            now = time.time()
            kept = [
                isinstance(idle_s, int)
                and block.used_s is not None
                and now - idle_s > block.used_s + _USE_ERROR_S
                for block, idle_s in zip(blocks, idle, strict=True)
            ]
            removed.kept = sum(kept)
            blocks = [block for block, keep in zip(blocks, kept, strict=True) if not keep]
            names = [some for some, keep in zip(names, kept, strict=True) if not keep]
        replies = self._ask(node, [("UNLINK", *some) for some in names]) if names else []
        for block, reply in zip(blocks, replies, strict=True):
            if reply == 0 or _is_elsewhere(reply):
                removed.kept += 1
            elif isinstance(reply, TierError):
                removed.failures.append((block, str(reply)))
            else:
                removed.blocks += 1
                removed.nbytes += block.nbytes
        return removed

    def _names_of(self, block: RemoteBlock) -> tuple[Node, list[bytes]]:
        place = _place(block)
        names = Names(self._endpoint.prefix, block.namespace)
        return place.node, names.of(block.key, place.num_parts)

    def _ask(self, node: Node, commands: Sequence[Sequence[str | bytes]]) -> list[Reply]:
        """Replies to a pipeline, over a connection that may be older than the server."""
        with self._named():
            try:
                with self._wire(node) as wire:
                    return wire.ask_all(commands)
            except TierUnreachableError:
                with self._wire(node, fresh=True) as wire:
                    return wire.ask_all(commands)

    @contextlib.contextmanager
    def _wire(self, node: Node, fresh: bool = False) -> Iterator[Wire]:
        """A connection for one call."""
        with self._lock:
            idle = self._idle.setdefault(node, [])
            wire = idle.pop() if idle and not fresh else None
        if wire is None:
            wire = Wire(self._endpoint, node)
            try:
                wire.ask("CLIENT", "NO-TOUCH", "ON")
            except TierUnreachableError:
                wire.close()
                raise
            except TierError:
                self._touches = True
        try:
            yield wire
        except BaseException:
            wire.close()  # replies may be on their way
            raise
        with self._lock:
            self._idle.setdefault(node, []).append(wire)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors say whose they are."""
        try:
            yield
        except TierError as error:
            if str(error).startswith(self.url):
                raise
            raise type(error)(f"{self.url}: {error}") from error


def _place(block: RemoteBlock) -> _Place:
    assert isinstance(block.place, _Place), "listed here"
    return block.place


def _found(block: RemoteBlock, reply: Reply) -> Found:
    parts = reply if isinstance(reply, list) else []
    if all(part is None for part in parts):
        raise MissingBlockError(f"no block under {block.key.hex()}")
    header, *rows = [part if isinstance(part, bytes) else None for part in parts]
    row = None if None in rows else b"".join(part for part in rows if part is not None)
    return Found(
        memoryview(header) if header is not None else None,
        memoryview(row) if row is not None else None,
    )


def _is_elsewhere(reply: Reply) -> bool:
    """Whether another node of the cluster has the key now."""
    return isinstance(reply, TierError) and any(
        word in str(reply) for word in (" MOVED ", " ASK ", "TRYAGAIN")
    )


def _good(replies: list[Reply]) -> list[Reply]:
    """Replies none of which is a refusal.

    Raises:
        TierError: the first that is one.
    """
    for reply in replies:
        if isinstance(reply, TierDeniedError):
            raise TierDeniedError(f"{reply}; see the permissions on the tier's page")
        if isinstance(reply, TierError):
            raise type(reply)(str(reply))
    return replies


def _numbers(replies: list[Reply]) -> list[int]:
    """Replies that are whole numbers.

    Raises:
        TierError: one is a refusal.
    """
    return [reply for reply in _good(replies) if isinstance(reply, int)]
