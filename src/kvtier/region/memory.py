"""Shared memory for the scheduler, all workers and the I/O of one engine.

    | header page | marks: one byte per rank and slot | rows: num_slots x row_bytes |

The memory is an anonymous file (`memfd`): it has no name that could be left behind, so the kernel
frees it with the last process that maps it, however that process ends; nothing has to be swept.
Its size is sealed, so no process can truncate it under another one. It is not part of the /dev/shm
mount, whose small default size in containers is therefore no limit; the memory limit is.

A *mark* says what one rank last did to one slot. It is how a worker tells the scheduler that a
store was incomplete, through a connector that only knows success.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.core.types import Slot
from kvtier.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

_MAGIC = b"KVTIER\x00\x01"
_HEADER = struct.Struct("<8sQQQ")
_PAGE = mmap.PAGESIZE
_GIB = 1 << 30
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_POPULATE_STEP = 64 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL


class Mark(IntEnum):
    """What a rank last did to a slot."""

    UNTOUCHED = 0
    COMPLETE = 1  # every GPU block of the block was copied, or this rank had none to copy
    PARTIAL = 2  # the engine gave fewer GPU blocks than the block has
    FAILED = 3  # the copy raised


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a region.

    Attributes:
        num_slots: rows.
        row_bytes: bytes per row, a multiple of the page size.
        num_ranks: workers that share it.
    """

    num_slots: int
    row_bytes: int
    num_ranks: int

    @property
    def rows_offset(self) -> int:
        """Bytes in front of the first row."""
        marks = self.num_slots * self.num_ranks
        return _PAGE + -(-marks // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        """Size of the whole region."""
        return self.rows_offset + self.num_slots * self.row_bytes


class Region:
    """One mapping of the shared memory.

    Attributes:
        geometry: its shape.
        fd: descriptor of the memory, to be passed on; closed by `close`.
        rows: uint8 array, shape (num_slots, row_bytes).
        marks: uint8 array, shape (num_ranks, num_slots), of `Mark`.
    """

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self.fd = fd
        self._map = mmap.mmap(fd, geometry.total_bytes)
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        marks = geometry.num_slots * geometry.num_ranks
        self.marks = whole[_PAGE : _PAGE + marks].reshape(geometry.num_ranks, geometry.num_slots)
        self.rows = whole[geometry.rows_offset :].reshape(geometry.num_slots, geometry.row_bytes)
        self._view = memoryview(self._map)
        self._base = int(whole.ctypes.data)

    @classmethod
    def create(cls, geometry: Geometry) -> Region:
        """Make a region, not yet backed by memory: see `populate`.

        Raises:
            RegionError: no room, with figures.
        """
        if geometry.num_slots <= 0 or geometry.row_bytes <= 0 or geometry.row_bytes % _PAGE:
            raise RegionError(
                f"a region of {geometry.num_slots} slots of {geometry.row_bytes} bytes is "
                f"impossible: slots must be positive and a multiple of {_PAGE} bytes"
            )
        free = available_memory()
        if geometry.total_bytes > free:
            raise RegionError(
                f"the CPU pool needs {geometry.total_bytes:,} bytes "
                f"({geometry.num_slots:,} slots of {geometry.row_bytes:,}), but only {free:,} "
                "bytes of memory are available here; lower cpu_bytes_to_use, or raise the memory "
                "limit of this container"
            )
        fd = -1
        try:
            fd = os.memfd_create("kvtier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, geometry.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            header = _HEADER.pack(
                _MAGIC, geometry.num_slots, geometry.row_bytes, geometry.num_ranks
            )
            os.pwrite(fd, header, 0)
            return cls(fd, geometry)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise RegionError(
                f"the CPU pool of {geometry.total_bytes:,} bytes cannot be made: {error}; "
                "lower cpu_bytes_to_use"
            ) from error

    @classmethod
    def from_fd(cls, fd: int) -> Region:
        """Map a region that another process made. Owns `fd` from now on.

        Raises:
            RegionError: not a region of this version, or not of the size that it claims.
        """
        try:
            magic, num_slots, row_bytes, num_ranks = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            geometry = Geometry(num_slots, row_bytes, num_ranks)
            if magic != _MAGIC:
                raise RegionError("the shared memory that was passed is not a kvtier region")
            if os.fstat(fd).st_size != geometry.total_bytes:
                raise RegionError("the shared memory that was passed has another size than it says")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RegionError("the size of the shared memory that was passed is not sealed")
            return cls(fd, geometry)
        except (OSError, struct.error) as error:
            os.close(fd)
            raise RegionError(
                f"the shared memory that was passed cannot be used: {error}"
            ) from error
        except RegionError:
            os.close(fd)
            raise

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        return self.geometry.row_bytes

    @property
    def rows_address(self) -> int:
        """Address of the first row in this process."""
        return self._base + self.geometry.rows_offset

    def slot(self, slot: Slot) -> memoryview:
        """Writable view of one slot."""
        start = self.geometry.rows_offset + slot * self.geometry.row_bytes
        return self._view[start : start + self.geometry.row_bytes]

    def populate(self) -> threading.Thread:
        """Back the whole region with memory, on a thread of its own; in huge pages as far as the
        kernel has them for shared memory.

        Without it the first store into each page would pay for the fault.
        """
        thread = threading.Thread(target=self._populate, name="kvtier-populate", daemon=True)
        thread.start()
        return thread

    def _populate(self) -> None:
        total = self.geometry.total_bytes
        view = self._view  # keeps the mapping alive while its address is in use
        _libc.madvise(ctypes.c_void_p(self._base), ctypes.c_size_t(total), _MADV_HUGEPAGE)
        for start in range(0, total, _POPULATE_STEP):
            size = min(_POPULATE_STEP, total - start)
            address = ctypes.c_void_p(self._base + start)
            if _libc.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                error = os.strerror(ctypes.get_errno())
                log.info("The CPU pool is filled with memory on first use: %s", error)
                return
        huge = self.huge_bytes()
        if huge:
            log.info(
                "%.1f of %.1f GiB of the CPU pool are in huge pages", huge / _GIB, total / _GIB
            )
        else:
            log.info(
                "The CPU pool is in small pages, which may make tiers and copies slower; "
                "`echo advise > %s` before the start gives it huge ones",
                _SHMEM_ENABLED,
            )
        del view

    def huge_bytes(self) -> int:
        """How much of this mapping is in huge pages now; 0 also where the kernel does not tell."""
        try:
            with open("/proc/self/smaps") as smaps:
                return _huge_bytes_at(self._base, smaps)
        except OSError:
            return 0

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def total_memory() -> int:
    """Bytes that this process could ever use: the same for all workers, whoever came first."""
    return max(_limits(_meminfo("MemTotal"), busy=False), 0)


def available_memory() -> int:
    """Bytes that this process may still use: of the machine and of its control group."""
    return max(_limits(_meminfo("MemAvailable"), busy=True), 0)


def _huge_bytes_at(address: int, smaps: Iterable[str]) -> int:
    """Of the mapping that begins at an address, in the format of /proc/self/smaps."""
    start = f"{address:08x}-"
    found = False
    for line in smaps:
        if not line[0].isupper():  # the head of a mapping; its fields have names
            found = line.startswith(start)
        elif found and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


def _meminfo(field: str) -> int:
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields[field].split()[0]) << 10


def _limits(size: int, *, busy: bool) -> int:
    """`size`, or what the control group allows if that is less; `busy`: without what it uses."""
    group = Path("/sys/fs/cgroup")
    try:  # version 2, as the container sees itself
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return size
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        return min(size, int(limit) - (used if busy else 0))
    except (OSError, ValueError, KeyError):
        return size
