from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import BlockKey
from kvtier.envelope import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_METADATA_BYTES,
    Envelope,
    open_envelope,
    seal,
    verify,
)
from kvtier.errors import EnvelopeError

NAMESPACE = "ab" * 32
KEY = BlockKey(b"\x00key\xff" * 7 + b"\0")
PAYLOAD = bytes(range(256)) * 4

keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES).map(BlockKey)
namespaces = st.binary(min_size=32, max_size=32).map(bytes.hex)


def header_of(
    payload: bytes = PAYLOAD, key: BlockKey = KEY, namespace: str = NAMESPACE, metadata: bytes = b""
) -> bytes:
    return seal(namespace, key, memoryview(payload), 17, metadata)


def check(header: bytes, payload: bytes = PAYLOAD) -> Envelope:
    return verify(header, NAMESPACE, KEY, memoryview(payload))


def resealed(header: bytes, offset: int, field: bytes) -> bytes:
    """Another value in a field, under a checksum that fits: what a foreign writer might make."""
    summed = header[:offset] + field + header[offset + len(field) : HEADER_BYTES - 8]
    return summed + struct.pack("<Q", xxhash.xxh3_64_intdigest(summed))


@given(
    namespaces,
    keys,
    st.binary(max_size=2000),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=MAX_METADATA_BYTES),
)
def test_says_what_was_sealed(
    namespace: str, key: BlockKey, payload: bytes, created_ns: int, metadata: bytes
) -> None:
    header = seal(namespace, key, memoryview(payload), created_ns, metadata)
    assert len(header) == HEADER_BYTES
    envelope = verify(bytearray(header), namespace, key, memoryview(payload))
    assert envelope == open_envelope(memoryview(header))
    assert envelope == Envelope(
        namespace, key, len(payload), xxhash.xxh3_128_digest(payload), created_ns, metadata
    )


@pytest.mark.parametrize("metadata", [b"", b"x" * MAX_METADATA_BYTES])
def test_every_flipped_bit_of_a_header_is_detected(metadata: bytes) -> None:
    header = header_of(metadata=metadata)
    check(header)
    damaged = bytearray(header)
    for bit in range(8 * HEADER_BYTES):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EnvelopeError):
            open_envelope(damaged)
        damaged[bit // 8] ^= 1 << bit % 8
    assert damaged == header


def test_every_flipped_bit_of_a_payload_is_detected() -> None:
    header = header_of()
    damaged = bytearray(PAYLOAD)
    for bit in range(8 * len(PAYLOAD)):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EnvelopeError, match="payload checksum"):
            check(header, damaged)
        damaged[bit // 8] ^= 1 << bit % 8


@settings(max_examples=300)
@given(st.data(), st.binary(min_size=1, max_size=300_000))
def test_a_flipped_bit_in_a_large_payload_is_detected(data: st.DataObject, payload: bytes) -> None:
    header = header_of(payload)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(EnvelopeError, match="payload checksum"):
        check(header, damaged)


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_truncated_header_is_detected(length: int) -> None:
    with pytest.raises(EnvelopeError, match="header length"):
        check(header_of()[:length])


@pytest.mark.parametrize("payload", [b"", PAYLOAD[:-1], PAYLOAD + b"\0"])
def test_a_payload_of_another_length_is_detected(payload: bytes) -> None:
    with pytest.raises(EnvelopeError, match=r"^length"):
        check(header_of(), payload)


@given(keys.filter(lambda key: key != KEY))
def test_another_key_is_detected(key: BlockKey) -> None:
    with pytest.raises(EnvelopeError, match=r"^key"):
        check(header_of(key=key))


def test_a_key_that_is_longer_by_a_zero_is_another_key() -> None:
    """The field is padded with zeros."""
    with pytest.raises(EnvelopeError, match=r"^key"):
        check(header_of(key=BlockKey(KEY + b"\0")))
    with pytest.raises(EnvelopeError, match=r"^key"):
        check(header_of(key=BlockKey(KEY[:-1])))


@given(namespaces.filter(lambda namespace: namespace != NAMESPACE))
def test_another_namespace_is_detected(namespace: str) -> None:
    with pytest.raises(EnvelopeError, match=r"^namespace"):
        check(header_of(namespace=namespace))


@pytest.mark.parametrize(
    ("offset", "field", "message"),
    [
        (0, b"GARBAGE!", "^magic"),
        (8, struct.pack("<H", FORMAT_VERSION + 1), "^version"),
        (10, struct.pack("<H", 8192), "^header length"),
        (12, struct.pack("<H", 0), "^length"),
        (12, struct.pack("<H", MAX_KEY_BYTES + 1), "^length"),
        (14, struct.pack("<H", MAX_METADATA_BYTES + 1), "^length"),
        (200, b"\1", None),
    ],
)
def test_the_message_says_what_is_wrong(offset: int, field: bytes, message: str | None) -> None:
    header = resealed(header_of(), offset, field)
    if message is None:
        check(header)  # padding; shows that `resealed` makes good checksums
    else:
        with pytest.raises(EnvelopeError, match=message):
            check(header)


def test_damage_behind_the_fields_is_the_header_checksum() -> None:
    with pytest.raises(EnvelopeError, match=r"^header checksum"):
        check(header_of()[:-1] + b"\0")


def test_the_format_is_frozen() -> None:
    """Blocks outlive releases: a change of these bytes needs a new version."""
    header = header_of(metadata=b"m")
    assert header[:8] == b"KVTIER\r\n"
    assert xxhash.xxh3_64_hexdigest(header) == "8b4246d01533cacf"


@pytest.mark.parametrize("namespace", ["", "ab" * 31, "AB" * 32, "zz" * 32, "ab " * 32])
def test_a_namespace_is_a_digest(namespace: str) -> None:
    with pytest.raises(EnvelopeError, match=r"^namespace"):
        header_of(namespace=namespace)


@pytest.mark.parametrize("key_bytes", [0, MAX_KEY_BYTES + 1])
def test_a_key_must_fit(key_bytes: int) -> None:
    with pytest.raises(EnvelopeError, match="key"):
        header_of(key=BlockKey(b"k" * key_bytes))


def test_metadata_must_fit() -> None:
    with pytest.raises(EnvelopeError, match=str(MAX_METADATA_BYTES)):
        header_of(metadata=b"m" * (MAX_METADATA_BYTES + 1))
