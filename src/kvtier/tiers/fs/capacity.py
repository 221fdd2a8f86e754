"""A root's capacity as one object: this process's space, and its sweeper.

One per root and process is enough, whatever the number of namespaces that are open in it: the
sweeper can then tell all of them what it evicts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.tiers.fs.shared_space import SharedSpace
from kvtier.tiers.fs.sweeper import Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.term import SweepSettings


logger = logging.getLogger(__name__)


class Capacity:
    """Joins a root, and sweeps it while it is this process's turn. Thread safe.

    Args:
        root: an existing directory.
        capacity_bytes: see `SharedSpace`.
        min_free_bytes: see `SharedSpace`.
        owning: see `SharedSpace`.
        settings: of the sweeper.

    Raises:
        OSError: as `SharedSpace`.
        TierError: as `SharedSpace`.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int | None,
        min_free_bytes: int,
        *,
        owning: bool = False,
        settings: SweepSettings | None = None,
    ) -> None:
        self.space = SharedSpace(root, capacity_bytes, min_free_bytes, owning=owning)
        self.sweeper = Sweeper(self.space, settings)
        self.sweeper.start()

    def listen(self, namespace: str, on_evicted: Callable[[str, Sequence[BlockKey]], None]) -> None:
        """See `Sweeper.listen`."""
        self.sweeper.listen(namespace, on_evicted)

    def ignore(self, namespace: str, on_evicted: Callable[[str, Sequence[BlockKey]], None]) -> None:
        """See `Sweeper.ignore`."""
        self.sweeper.ignore(namespace, on_evicted)

    def figures(self) -> Mapping[str, float]:
        """Levels and totals by name."""
        return self.sweeper.figures()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop sweeping, give back what was not used, and leave."""
        if self.sweeper.close(timeout_s):
            self.space.close()
        else:
            logger.warning("The sweeper of %s hangs; others will clean up", self.space.root)
