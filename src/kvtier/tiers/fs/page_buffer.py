"""Memory for reads that bypass the page cache."""

from __future__ import annotations

import mmap


class PageBuffer:
    """A page aligned buffer that grows to what it is asked for. Of one thread."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the buffer, writable. What an earlier view held is lost."""
        if self._view.nbytes < nbytes:
            self._view = memoryview(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        return self._view[:nbytes]
