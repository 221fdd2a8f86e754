"""The bytes of a store's log: one header, then records, all `RECORD_BYTES` long, little endian.

    header                          record
    offset bytes                    offset bytes
    0      8     magic              0      8     xxh3_64 of what follows, seeded with the store
    8      2     format version     8      1     kind
    10     2     length of a record 9      1     length of the key, 0..128
    12     4     next segment       12     4     segment
    16     8     store              16     4     slot
    24     32    namespace digest   24     8     length of the block
    168    8     xxh3_64 of         32     8     created, nanoseconds since the epoch
                 what is before     40     8     last use, likewise
                                    48     128   key

A record that fails its checksum is as good as absent. Losing one is harmless: a lost `PUT` loses
its block; a lost `EVICT` is made up for by the next `PUT` into the slot, and if that never came the
block's own envelope tells whether its bytes are still there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvtier.core.types import BlockKey
from kvtier.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_KEY_BYTES = 128

FORMAT_VERSION = 1

PUT: Final = 1
"""The block lies complete in this slot; whatever lay there before is gone."""

EVICT: Final = 2
"""The block in this slot is gone, if it is still that key's."""

TOUCH: Final = 3
"""The block in this slot was used."""

EVICT_ALL: Final = 4
"""Requests only: every block of the store."""

_MAGIC = b"KVTSEG\r\n"
_FIELDS = struct.Struct(f"<QBBxxIIxxxxQQQ{MAX_KEY_BYTES}s")
_BODY = struct.Struct(f"<BBxxIIxxxxQQQ{MAX_KEY_BYTES}s")
_SUM = struct.Struct("<Q")
_HEADER = struct.Struct("<8sHHIQ32s")

RECORD_BYTES = _FIELDS.size
assert _SUM.size + _BODY.size == RECORD_BYTES

HEADER_BYTES = RECORD_BYTES
_SUMMED_HEADER_BYTES = HEADER_BYTES - _SUM.size


class Record(NamedTuple):
    """One entry of a log. Times are nanoseconds since the epoch."""

    kind: int
    key: BlockKey
    segment: int = 0
    slot: int = 0
    length: int = 0
    created_ns: int = 0
    used_ns: int = 0


class Header(NamedTuple):
    """What a log says about itself. `next_segment` is a number that no segment has had."""

    store: int
    namespace: str
    next_segment: int


class DamagedHeaderError(TierError):
    """The log's header is torn or was overwritten: nothing in the log can be trusted."""


class OtherVersionError(TierError):
    """The log was written by a release with another format. It is left alone."""


def encode(record: Record, store: int) -> bytes:
    """The bytes of a record in the log of `store`."""
    body = _BODY.pack(
        record.kind,
        len(record.key),
        record.segment,
        record.slot,
        record.length,
        record.created_ns,
        record.used_ns,
        record.key,
    )
    return _SUM.pack(xxhash.xxh3_64_intdigest(body, store)) + body


def decode(data: bytes, store: int) -> Iterator[tuple[int, Record]]:
    """The whole records in `data`, which begins at a record; damaged ones are passed over.

    Yields:
        Each record, and the offset in `data` behind it.
    """
    view = memoryview(data)
    for start in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        end = start + RECORD_BYTES
        checksum, kind, key_bytes, segment, slot, length, created_ns, used_ns, key = (
            _FIELDS.unpack_from(data, start)
        )
        if checksum == xxhash.xxh3_64_intdigest(view[start + _SUM.size : end], store):
            yield (
                end,
                Record(kind, BlockKey(key[:key_bytes]), segment, slot, length, created_ns, used_ns),
            )


def encode_header(header: Header) -> bytes:
    """The first bytes of a log."""
    fields = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        RECORD_BYTES,
        header.next_segment,
        header.store,
        bytes.fromhex(header.namespace),
    ).ljust(_SUMMED_HEADER_BYTES, b"\0")
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(data: bytes) -> Header:
    """What the first bytes of a log say.

    Raises:
        DamagedHeaderError: torn, damaged, or no log.
        OtherVersionError: whole, but of another format.
    """
    if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise DamagedHeaderError("this is no log of a store")
    summed = data[:_SUMMED_HEADER_BYTES]
    if _SUM.unpack_from(data, _SUMMED_HEADER_BYTES)[0] != xxhash.xxh3_64_intdigest(summed):
        raise DamagedHeaderError("the header of the log is damaged")
    _, version, record_bytes, next_segment, store, namespace = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION or record_bytes != RECORD_BYTES:
        raise OtherVersionError(
            f"the log has format {version} with records of {record_bytes} bytes; this release "
            f"reads format {FORMAT_VERSION} with {RECORD_BYTES}"
        )
    return Header(store, namespace.hex(), next_segment)
