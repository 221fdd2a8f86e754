"""How a layout asks for room in a directory that has a capacity."""

from __future__ import annotations

from typing import Protocol


class Space(Protocol):
    """The bytes of one root directory, as one process sees them. Thread safe, and quick: no method
    waits for an eviction.

    Every process that uses the directory, on any host, takes from the same capacity.
    """

    def take(self, nbytes: int) -> bool:
        """Reserve bytes before they are written; False if there are none now.

        Whoever is refused counts as waiting for space until it is granted some.
        """
        ...

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken: not used after all, or deleted since."""
        ...

    def owed(self) -> int:
        """Bytes that this process should delete and give back soon: others wait for them, or the
        mount runs short of `min_free`. 0 most of the time.

        Only a layout whose blocks belong to one process (`segments`) needs to ask.
        """
        ...


class Unbounded:
    """A `Space` without a capacity."""

    def take(self, nbytes: int) -> bool:  # noqa: ARG002 - the protocol's argument
        """Always."""
        return True

    def give_back(self, nbytes: int) -> None:
        """Nothing is counted."""

    def owed(self) -> int:
        """Never anything."""
        return 0
