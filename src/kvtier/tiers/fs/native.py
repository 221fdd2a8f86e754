"""The compiled part of the `files` layout, where it was built: one call for the files of many
blocks, with the interpreter released throughout.

Small blocks need it. Call by call from Python, each of the seven calls per block gives the
interpreter away and waits for it again, behind the other threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tiers.base import Buffers


class NativeFiles(Protocol):
    """What was compiled. It does what is ordinary; whatever else it meets it leaves as it was, to
    be done call by call.
    """

    def write_files(
        self,
        temps: Sequence[bytes],
        paths: Sequence[bytes],
        data: Sequence[Buffers],
        flags: int,
        mode: int,
    ) -> list[bool]:
        """Write each block to its temporary path, which must not exist, and rename it.

        Args:
            temps: where to write.
            paths: what to rename it to, unless something is there.
            data: the blocks.
            flags: of `open`.
            mode: that the files get, whatever the umask.

        Returns:
            Whether a block was written, in order. If not, its temporary file is gone.
        """
        ...

    def read_files(
        self, paths: Sequence[bytes], into: Sequence[Buffers], flags: int, touch_age_s: float
    ) -> list[bool]:
        """Fill each of `into` from its file, and set the file's times if its last use is more than
        `touch_age_s` away.

        Returns:
            Whether a block was read, in order: the file is regular and exactly as long. What `into`
            holds otherwise is undefined.
        """
        ...

    def find_files(self, directory: int, names: Sequence[str]) -> list[bool]:
        """Whether each name is there, below the directory of a descriptor.

        Raises:
            OSError: the medium failed; that is not the same as absent.
        """
        ...


@dataclass(frozen=True, slots=True)
class NativeProbe:
    """Whether this installation has the compiled part.

    Attributes:
        files: the part; None if it is missing, or not wanted.
        reason: why it is; for the log.
    """

    files: NativeFiles | None
    reason: str = ""


def probe_native() -> NativeProbe:
    """The compiled part, if it was built when kvtier was installed. Raises nothing."""
    try:
        from kvtier.tiers.fs import native_files  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        return NativeProbe(None, f"not built when kvtier was installed: {error}")
    return NativeProbe(native_files)
