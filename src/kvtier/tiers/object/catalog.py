"""What a store keeps below a prefix, for the command line.

The first level is listed at once: namespaces, and what is foreign; a foreign directory is told by
its name and not listed. Each namespace is streamed, a page at a time. Stores know when an object
was written, and not when it was read.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import obstore

from kvtier.envelope import BLOCK_BYTES_MAX, HEADER_BYTES, MAX_KEY_BYTES
from kvtier.errors import (
    KVTierError,
    MissingBlockError,
    TierError,
    TierThrottledError,
    TierUnreachableError,
)
from kvtier.tiers.catalog import Description, Found, Page, RemoteBlock, Removed
from kvtier.tiers.descriptions import DESCRIPTION_BYTES_MAX, parse_description
from kvtier.tiers.object.existence import PAGE_KEYS, key_of, path_of
from kvtier.tiers.object.faults import CLIENT_ERRORS, fault_of_client
from kvtier.tiers.object.lease import LEASE_FILE
from kvtier.tiers.object.objects import NAMESPACE_FILE
from kvtier.tiers.object.parallel import Parallel
from kvtier.tiers.object.settings import place_of
from kvtier.tiers.object.store import ObjectStore, open_store
from kvtier.tiers.object.sweeper import TRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore import ObjectMeta

    from kvtier.tiers.object.settings import ObjectSettings
    from kvtier.tiers.object.store import AnyStore

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK = re.compile(rf"[0-9a-f]{{64}}/[0-9a-f]{{2}}/(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}")
_TOO_LONG = Found(memoryview(b""), memoryview(b""))


class ObjectCatalog:
    """See the module.

    Args:
        settings: of the tier.
        setting: their path, for messages.

    Raises:
        ConfigError: they can never work.
        TierError: what the client does not like about them.
    """

    noun = "object"
    layout = "objects"
    time_error_s = 0.0

    def __init__(self, settings: ObjectSettings, setting: str) -> None:
        place = place_of(settings, setting)
        self.url = place.url
        self._store = _opened(settings, setting)
        self._parallel = Parallel(settings.threads, "kvtier-object-remove")

    def pages(self, namespace: str = "") -> Iterator[Page]:
        """List the first level, then every namespace that is meant."""
        if _DIGEST.fullmatch(namespace):
            namespaces = [namespace]
        else:
            page, namespaces = self._first_level()
            if not namespace:
                yield page
        for digest in namespaces:
            if digest.startswith(namespace):
                yield from self._namespace_pages(digest)

    def describe(self, namespace: str) -> Description:
        """Get its `namespace.json`."""

        def get(client: AnyStore) -> Description:
            found = obstore.get(client, f"{namespace}/{NAMESPACE_FILE}")
            created_s = found.meta["last_modified"].timestamp()
            if found.meta["size"] > DESCRIPTION_BYTES_MAX:
                return Description(created_s=created_s)
            return Description(parse_description(bytes(found.bytes())), created_s)

        try:
            return self._store.ask("reading a description", get)
        except MissingBlockError:
            return Description()

    def read(self, block: RemoteBlock) -> Found:
        """Get the object."""
        return self._get(block)[0]

    def remove_if(self, block: RemoteBlock, is_bad: Callable[[Found], bool]) -> bool:
        """Delete it unless another one is in its place. No store deletes on a condition, so a block
        that is written between the last look and the deletion, milliseconds, is lost.
        """
        found, version = self._get(block)
        if not is_bad(found):
            return False
        path = path_of(block.namespace, block.key)
        now = self._store.ask("asking for a block", lambda client: obstore.head(client, path))
        if _version(now) != version:
            return False
        self._delete(path)
        return True

    def remove(
        self,
        blocks: Sequence[RemoteBlock],
        unless_used: bool = False,  # noqa: ARG002 - a store does not know
    ) -> Removed:
        """Delete objects side by side; not every store has a request that deletes many."""
        removed = Removed()
        paths = [path_of(block.namespace, block.key) for block in blocks]
        outcomes = self._parallel.run(self._delete, paths)
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, MissingBlockError):
                removed.kept += 1
            elif isinstance(outcome, KVTierError):
                removed.failures.append((block, str(outcome)))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                removed.blocks += 1
                removed.nbytes += block.nbytes
        last = outcomes[-1] if outcomes else None
        if isinstance(last, TierUnreachableError | TierThrottledError) and not removed.blocks:
            raise last
        return removed

    def remove_description(self, namespace: str) -> None:
        """Delete its `namespace.json`."""
        with contextlib.suppress(MissingBlockError):
            self._delete(f"{namespace}/{NAMESPACE_FILE}")

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def close(self) -> None:
        """End the threads."""
        self._parallel.close()

    def _first_level(self) -> tuple[Page, list[str]]:
        listed = self._store.ask("listing", obstore.list_with_delimiter)
        directories = sorted(listed["common_prefixes"])
        namespaces = [name for name in directories if _DIGEST.fullmatch(name)]
        page = Page(foreign=[f"{name}/" for name in directories if name not in set(namespaces)])
        for entry in listed["objects"]:
            path = entry["path"]
            if path != LEASE_FILE and not path.startswith(TRY_PREFIX):
                page.foreign.append(path)
        return page, namespaces

    def _namespace_pages(self, digest: str) -> Iterator[Page]:
        def following(_: AnyStore) -> Sequence[ObjectMeta] | None:
            return next(stream, None)

        stream = self._store.ask(
            "listing blocks", lambda client: obstore.list(client, digest, chunk_size=PAGE_KEYS)
        )
        while (listed := self._store.ask("listing blocks", following)) is not None:
            page = Page()
            for entry in listed:
                path = entry["path"]
                key = key_of(path) if _BLOCK.fullmatch(path) else None
                if key is not None:
                    written_s = entry["last_modified"].timestamp()
                    page.blocks.append(RemoteBlock(digest, key, entry["size"], written_s))
                elif path == f"{digest}/{NAMESPACE_FILE}":
                    page.described.append(digest)
                else:
                    page.foreign.append(path)
            yield page

    def _get(self, block: RemoteBlock) -> tuple[Found, object]:
        """The object, and what tells it from one that takes its place."""
        path = path_of(block.namespace, block.key)

        def get(client: AnyStore) -> tuple[Found, object]:
            answer = obstore.get(client, path)
            if answer.meta["size"] > BLOCK_BYTES_MAX:
                return _TOO_LONG, _version(answer.meta)
            data = memoryview(answer.bytes())
            return Found(data[:HEADER_BYTES], data[HEADER_BYTES:]), _version(answer.meta)

        return self._store.ask("reading a block", get)

    def _delete(self, path: str) -> None:
        self._store.ask("deleting", lambda client: obstore.delete(client, path))


def _version(meta: ObjectMeta) -> object:
    # some answers have fractions of the second in which it was written, and others have not
    return meta["e_tag"], meta["version"], int(meta["last_modified"].timestamp())


def _opened(settings: ObjectSettings, setting: str) -> ObjectStore:
    try:
        return open_store(settings, setting)
    except CLIENT_ERRORS as error:
        fault = fault_of_client(error, place_of(settings, setting), "opening")
    raise TierError(str(fault))
