"""The header in front of every block outside the primary tier.

One fixed page, so that the payload behind it stays page aligned. All integers are little endian;
what is not used is zero.

    offset  bytes  field
    0       8      magic
    8       2      format version
    10      2      length of a header
    12      2      length of the key, 1..128
    14      2      length of the metadata
    16      8      length of the payload
    24      8      creation time, nanoseconds since the epoch
    32      32     namespace digest
    64      16     xxh3_128 of the payload
    80      128    key
    208     3880   metadata: opaque bytes
    4088    8      xxh3_64 of the 4,088 bytes before
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvtier.core.types import BlockKey
from kvtier.errors import EnvelopeError

HEADER_BYTES = 4096
"""Length of every header."""

BLOCK_BYTES_MAX = 1 << 30
"""Header and payload; no block of any model comes near, so what is longer is none."""

FORMAT_VERSION = 1

MAX_KEY_BYTES = 128

NAMESPACE_BYTES = 32

_MAGIC = b"KVTIER\r\n"  # the line end shows a transfer in text mode
_FIELDS = struct.Struct(f"<8sHHHHQQ{NAMESPACE_BYTES}s16s{MAX_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_SUMMED_BYTES = HEADER_BYTES - _CHECKSUM.size

MAX_METADATA_BYTES = _SUMMED_BYTES - _FIELDS.size
"""What fits behind the other fields, whatever the length of the key."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a header says about the block behind it.

    Attributes:
        namespace: hex digest, 64 characters.
        key: the block's key, 1 to `MAX_KEY_BYTES` bytes.
        payload_bytes: length of the block.
        checksum: xxh3_128 of the block, 16 bytes.
        created_ns: nanoseconds since the epoch, by the clock of the writer.
        metadata: opaque here, at most `MAX_METADATA_BYTES` bytes.
    """

    namespace: str
    key: BlockKey
    payload_bytes: int
    checksum: bytes
    created_ns: int
    metadata: bytes = b""


def seal(
    namespace: str,
    key: BlockKey,
    payload: memoryview,
    created_ns: int,
    metadata: bytes = b"",
) -> bytes:
    """The header of a block, `HEADER_BYTES` long. Releases the GIL while it reads `payload`.

    Raises:
        EnvelopeError: the namespace is no digest, or key or metadata do not fit.
    """
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise EnvelopeError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(key)}")
    if len(metadata) > MAX_METADATA_BYTES:
        raise EnvelopeError(
            f"metadata may have {MAX_METADATA_BYTES} bytes, this has {len(metadata)}"
        )
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        len(key),
        len(metadata),
        payload.nbytes,
        created_ns,
        _digest(namespace),
        xxhash.xxh3_128_digest(payload),
        key,
    )
    summed = (fields + metadata).ljust(_SUMMED_BYTES, b"\0")
    return summed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(summed))


def open_envelope(header: bytes | bytearray | memoryview) -> Envelope:
    """What a header says, once it is known to be whole. Says nothing about a payload.

    Raises:
        EnvelopeError: `header` is not `HEADER_BYTES` long, not ours, of another version, or
            damaged.
    """
    data = bytes(header)
    if len(data) != HEADER_BYTES:
        raise EnvelopeError(f"header length: {len(data)} bytes instead of {HEADER_BYTES}")
    (
        magic,
        version,
        header_bytes,
        key_bytes,
        metadata_bytes,
        payload_bytes,
        created_ns,
        namespace,
        checksum,
        key,
    ) = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise EnvelopeError(f"magic: {magic!r} instead of {_MAGIC!r}, this is no block of kvtier")
    if version != FORMAT_VERSION:
        raise EnvelopeError(f"version: {version}, this release reads {FORMAT_VERSION}")
    if header_bytes != HEADER_BYTES:
        raise EnvelopeError(f"header length: it says {header_bytes} instead of {HEADER_BYTES}")
    (header_checksum,) = _CHECKSUM.unpack_from(data, _SUMMED_BYTES)
    if header_checksum != xxhash.xxh3_64_intdigest(memoryview(data)[:_SUMMED_BYTES]):
        raise EnvelopeError("header checksum: the header is damaged")
    # a good checksum over bad lengths was made by somebody else's writer
    if not 1 <= key_bytes <= MAX_KEY_BYTES or metadata_bytes > MAX_METADATA_BYTES:
        raise EnvelopeError(f"length: a key of {key_bytes} and metadata of {metadata_bytes} bytes")
    return Envelope(
        namespace=namespace.hex(),
        key=BlockKey(key[:key_bytes]),
        payload_bytes=payload_bytes,
        checksum=checksum,
        created_ns=created_ns,
        metadata=data[_FIELDS.size : _FIELDS.size + metadata_bytes],
    )


def verify(
    header: bytes | bytearray | memoryview,
    namespace: str,
    key: BlockKey,
    payload: memoryview,
) -> Envelope:
    """The header, once it is known to belong to exactly this payload, key and namespace.

    Releases the GIL while it reads `payload`.

    Raises:
        EnvelopeError: they do not belong together; the message begins with what is wrong: magic,
            version, header length, header checksum, length, namespace, key, or payload checksum.
    """
    envelope = open_envelope(header)
    if envelope.namespace != namespace:
        raise EnvelopeError(f"namespace: {envelope.namespace} instead of {namespace}")
    if envelope.key != key:
        raise EnvelopeError(f"key: {envelope.key.hex()} instead of {key.hex()}")
    if envelope.payload_bytes != payload.nbytes:
        raise EnvelopeError(
            f"length: the payload has {payload.nbytes} bytes instead of {envelope.payload_bytes}"
        )
    if envelope.checksum != xxhash.xxh3_128_digest(payload):
        raise EnvelopeError("payload checksum: the payload is damaged")
    return envelope


def _digest(namespace: str) -> bytes:
    """The bytes of a namespace's hex digest."""
    try:
        digest = bytes.fromhex(namespace)
    except ValueError:
        digest = b""
    if len(digest) != NAMESPACE_BYTES or namespace != digest.hex():
        raise EnvelopeError(
            f"namespace: {namespace!r} is not {2 * NAMESPACE_BYTES} hex digits in lower case"
        )
    return digest
