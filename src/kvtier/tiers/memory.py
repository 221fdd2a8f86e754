"""Blocks in a dict: the reference that other tiers are compared with, and the tier of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import MissingBlockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers


class MemoryTier:
    """Keeps a copy of every block in this process, without a bound."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, npt.NDArray[np.uint8]] = {}

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is held."""
        return [key in self._blocks for key in keys]

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Copy the block out.

        Raises:
            MissingBlockError: absent, or not exactly as long as `into`.
        """
        block = self._blocks.get(key)
        wanted = sum(view.nbytes for view in into)
        if block is None or block.nbytes != wanted:
            raise MissingBlockError(f"no block of {wanted} bytes under {key.hex()}")
        start = 0
        for view in into:
            # np.copyto, unlike the assignment of a memoryview slice, releases the GIL
            np.copyto(np.frombuffer(view, np.uint8), block[start : start + view.nbytes])
            start += view.nbytes

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Keep a copy of the block, published by one assignment."""
        block = np.empty(sum(view.nbytes for view in data), np.uint8)
        start = 0
        for view in data:
            np.copyto(block[start : start + view.nbytes], np.frombuffer(view, np.uint8))
            start += view.nbytes
        self._blocks[key] = block

    def delete(self, key: BlockKey) -> None:
        """Forget the block; absent is fine."""
        self._blocks.pop(key, None)

    def close(self) -> None:
        """Forget everything."""
        self._blocks.clear()


class MemorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `type: memory`.

    Attributes:
        threads: number of threads that copy blocks.
    """

    threads: Annotated[int, msgspec.Meta(ge=2)] = 2


class MemoryTierType:
    """`type: memory`, for tests: the blocks of one namespace, in the process that opens it."""

    settings_type = MemorySettings
    default_name = "memory"
    medium = "STORAGE"
    locality = "LOCAL"

    def num_threads(self, settings: MemorySettings) -> int:
        """Threads that the driver should give to the tier."""
        return settings.threads

    def preflight(self, settings: MemorySettings, setting: str) -> None:
        """Nothing can be wrong."""

    def open(
        self,
        settings: MemorySettings,  # noqa: ARG002 - the protocol's arguments, nothing depends on them
        namespace: str,  # noqa: ARG002
        facts: Mapping[str, object],  # noqa: ARG002
    ) -> MemoryTier:
        """A new, empty tier."""
        return MemoryTier()
