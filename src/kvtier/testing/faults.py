"""A tier that misbehaves as scripted, around any other one.

faulty = FaultyTier(MemoryTier())
faulty.script("read", Fail(OSError(errno.EIO, "disk")), call=2)
faulty.script("write", Hang(released))
faulty.script("exists", Lie(True))
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtier.tiers.base import Buffers, SupportsDelete, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.types import BlockKey

Operation = Literal["exists", "read", "write", "delete"]


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise instead of doing the operation."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Hang:
    """Wait until `released` is set, then do the operation."""

    released: threading.Event


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip the lowest bit of the byte at `offset` of the block that is read or written."""

    offset: int


@dataclass(frozen=True, slots=True)
class Short:
    """Move only the first `length` bytes and report success."""

    length: int


@dataclass(frozen=True, slots=True)
class Lie:
    """Give the same answer for every key that is asked for."""

    answer: bool


Fault = Fail | Hang | Corrupt | Short | Lie


class FaultyTier:
    """Passes every call to `inner`, after the faults that are scripted for it.

    Attributes:
        calls: how often each operation was called.
    """

    def __init__(self, inner: Tier) -> None:
        self.calls: Counter[Operation] = Counter()
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: list[tuple[Operation, Fault, int | None]] = []

    def script(self, operation: Operation, fault: Fault, call: int | None = None) -> None:
        """Have an operation go wrong.

        Args:
            operation: which one.
            fault: how. `Corrupt` and `Short` are for reads and writes, `Lie` is for `exists`.
            call: only this call of it, counted from 1 since the tier was made; None for all calls.
        """
        with self._lock:
            self._faults.append((operation, fault, call))

    def heal(self) -> None:
        """Forget the script. Calls that hang stay so until their event is set."""
        with self._lock:
            self._faults.clear()

    def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """The inner tier's answer, or a lie."""
        for fault in self._begin("exists"):
            if isinstance(fault, Lie):
                return [fault.answer] * len(keys)
        return self._inner.exists(keys)

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Read, then spoil what was read."""
        faults = self._begin("read")
        block = bytearray(sum(view.nbytes for view in into))
        before = b"".join(into)
        self._inner.read(key, (memoryview(block),))
        for fault in faults:
            if isinstance(fault, Short):
                block[fault.length :] = before[fault.length :]
            elif isinstance(fault, Corrupt):
                block[fault.offset] ^= 1
        start = 0
        for view in into:
            view[:] = block[start : start + view.nbytes]
            start += view.nbytes

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Spoil a copy of what is written, then write it."""
        block = bytearray(b"".join(data))
        for fault in self._begin("write"):
            if isinstance(fault, Short):
                del block[fault.length :]
            elif isinstance(fault, Corrupt):
                block[fault.offset] ^= 1
        self._inner.write(key, (memoryview(block),))

    def delete(self, key: BlockKey) -> None:
        """Delete, if the inner tier can."""
        self._begin("delete")
        if isinstance(self._inner, SupportsDelete):
            self._inner.delete(key)

    def close(self) -> None:
        """Close the inner tier."""
        self._inner.close()

    def _begin(self, operation: Operation) -> list[Fault]:
        """Count a call, fail or hang if it is to; the faults that are left to the caller."""
        with self._lock:
            self.calls[operation] += 1
            number = self.calls[operation]
            faults = [
                fault
                for of, fault, call in self._faults
                if of == operation and call in (None, number)
            ]
        for fault in faults:
            if isinstance(fault, Hang):
                fault.released.wait()
        for fault in faults:
            if isinstance(fault, Fail):
                raise fault.error
        return faults
