"""What the scheduler's process and an I/O process say to each other.

    | length: 4 bytes, little endian | msgpack array: tag, fields in order |

over a stream socket; one small message per job each way. The I/O process trusts what it is told.
The other direction is checked: a frame that is damaged or too long is a `WireError`, and what it
says is compared with what was asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from kvtier.core.types import BlockKey
from kvtier.drivers.base import TOTALS, TierCounters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROTOCOL = 1
"""Both sides come from one installation, unless it was replaced under a running engine."""

REPORT_BYTES_MAX = 8 << 20
"""A longer frame from an I/O process is nonsense."""

DROPPED_MAX = 10_000
"""Keys of one report."""

LOGS_MAX = 100
"""Log records of one report."""

TEXT_MAX = 8_000
"""Characters of one log record."""

_LENGTH_BYTES = 4
_KeyBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class WireError(Exception):
    """What arrived is no message of ours. Ends the process that sent it."""


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages."""


class Start(_Message, frozen=True, tag=0):
    """First message to a process.

    Attributes:
        protocol: `PROTOCOL` of the sender.
        path: `sys.path` of the sender, so that the same modules are found.
        tier_type: `type` of the tier's settings.
        options: the tier's own options.
        name: of the tier.
        log_level: below it no record is sent.
        geometry: slots, bytes per slot, ranks of the region.
        tier: position of the tier.
    """

    protocol: int
    path: list[str]
    tier_type: str
    options: dict[str, object]
    name: str
    log_level: int
    geometry: tuple[int, int, int]
    tier: int


class Named(_Message, frozen=True, tag=1):
    """A namespace, in front of its first job: jobs call it by its index from now on."""

    index: int
    digest: str
    facts: dict[str, object]


class Job(_Message, frozen=True, tag=2):
    """One job. `operation` is an index into `OPERATIONS`; a lookup has no slots."""

    operation: int
    job_id: int
    namespace: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class Close(_Message, frozen=True, tag=3):
    """End within so many seconds; running blocks may end before."""

    timeout_s: float


class Ready(_Message, frozen=True, tag=4):
    """The start was understood, and the tier's type is there."""


class Refused(_Message, frozen=True, tag=5):
    """There will be no tier, for this reason; the process ends."""

    reason: str


class Ended(_Message, frozen=True, tag=6):
    """A job ended. Bit i of `ok` tells about key i; `fault` is a `Fault` or empty."""

    job_id: int
    ok: bytes
    fault: str


class LogRecord(_Message, frozen=True, tag=7):
    """Something to log on the scheduler's side."""

    logger: str
    level: Annotated[int, msgspec.Meta(ge=0, le=100)]
    text: str


class Report(_Message, frozen=True, tag=8):
    """What happened since the last report.

    Attributes:
        ended: jobs.
        dropped: keys that the tier gave up.
        totals: running totals, those jobs included: `TierCounters` in the order of `TOTALS`.
        faults: failures by cause, if there are new ones.
        figures: of the tier, if they changed.
        oldest_s: age of the oldest running task, in seconds.
        logs: see `LogRecord`.
    """

    ended: list[Ended]
    dropped: Annotated[list[_KeyBytes], msgspec.Meta(max_length=DROPPED_MAX)]
    totals: tuple[int | float, ...]
    faults: dict[str, int] | None
    figures: dict[str, float] | None
    oldest_s: float
    logs: Annotated[list[LogRecord], msgspec.Meta(max_length=LOGS_MAX)]


ToProcess = Start | Named | Job | Close
FromProcess = Ready | Refused | Report

OPERATIONS = ("lookup", "load", "store")

_encoder = msgspec.msgpack.Encoder()
_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


def frame_of(message: ToProcess | FromProcess) -> bytes:
    """A message as it goes over the wire."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Inbox:
    """Cuts what arrives into frames; true while there is something in it.

    Args:
        frame_bytes_max: a longer frame is an error; None trusts the other side.
    """

    def __init__(self, frame_bytes_max: int | None = None) -> None:
        self._bytes = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Append what was received."""
        self._bytes += data

    def frames(self, count_max: int | None = None) -> Iterator[bytes]:
        """Take out complete frames, at most so many of them.

        Raises:
            WireError: the next one is too long.
        """
        start = 0
        count = 0
        try:
            while len(self._bytes) - start >= _LENGTH_BYTES and count != count_max:
                body = start + _LENGTH_BYTES
                length = int.from_bytes(self._bytes[start:body], "little")
                if self._frame_bytes_max is not None and length > self._frame_bytes_max:
                    raise WireError(f"a frame of {length} bytes")
                if len(self._bytes) - body < length:
                    return
                start = body + length
                count += 1
                yield bytes(self._bytes[body:start])
        finally:
            del self._bytes[:start]


def to_process(frame: bytes) -> ToProcess:
    """A message to an I/O process."""
    return _to_process.decode(frame)


def from_process(frame: bytes) -> FromProcess:
    """A message from an I/O process.

    Raises:
        WireError: it is none.
    """
    try:
        return _from_process.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error


def totals_of(counters: TierCounters) -> tuple[int | float, ...]:
    """The numbers of a report."""
    return tuple(getattr(counters, name) for name in TOTALS)


def counters_of(
    totals: tuple[int | float, ...], faults: dict[str, int], figures: dict[str, float]
) -> TierCounters:
    """What the reports of a process add up to."""
    counters = TierCounters(faults=faults, figures=figures)
    for name, total in zip(TOTALS, totals, strict=True):
        setattr(counters, name, total)
    return counters


def bits_of(keys: Sequence[BlockKey], ok: frozenset[BlockKey]) -> bytes:
    """Which of `keys` are in `ok`: bit i of the little-endian number is key i."""
    if len(ok) == len(keys):
        bits = (1 << len(keys)) - 1
    else:
        bits = sum(1 << i for i, key in enumerate(keys) if key in ok) if ok else 0
    return bits.to_bytes(-(-len(keys) // 8), "little")


def keys_of(keys: Sequence[BlockKey], bits: bytes) -> frozenset[BlockKey]:
    """The keys that `bits_of` told of.

    Raises:
        WireError: as many bits as keys are expected.
    """
    number = int.from_bytes(bits, "little")
    if len(bits) != -(-len(keys) // 8) or number >> len(keys):
        raise WireError(f"{len(bits)} bytes of bits for {len(keys)} keys")
    if number == (1 << len(keys)) - 1:
        return frozenset(keys)
    if not number:
        return frozenset()
    return frozenset(key for i, key in enumerate(keys) if number >> i & 1)
