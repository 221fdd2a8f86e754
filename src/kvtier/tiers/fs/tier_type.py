"""`type: fs`, blocks in a file system: checks its settings and opens its roots."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, TierError
from kvtier.tiers.fs.checks import check_bounds, check_capacity, check_roots
from kvtier.tiers.fs.home import Home, direct_of, native_of, prepare
from kvtier.tiers.fs.probe import threads_of
from kvtier.tiers.fs.roots import Root
from kvtier.tiers.fs.settings import FsSettings
from kvtier.tiers.fs.striped import StripedTier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtier.tiers.base import Tier

THREADS_MAX = 64
"""Of several roots together, where the number is measured."""


class FsTierType:
    """Opens the fs tier in the layout that its settings, or its directories, name."""

    settings_type = FsSettings
    default_name = "fs"
    medium = "STORAGE"
    locality = "LOCAL"

    def __init__(self) -> None:
        self._homes: dict[Path, Home] = {}

    def num_threads(self, settings: FsSettings) -> int:
        """Threads that the driver should give to the tier: as set, or measured on its roots."""
        given = settings.threads_given()
        if given is not None:
            return given
        measured = sum(threads_of(root, direct_of(root, settings).works) for root in settings.roots)
        return min(THREADS_MAX, measured)

    def preflight(self, settings: FsSettings, setting: str) -> None:
        """Check directories and sizes before the engine starts, and mark the directories as ours.

        Raises:
            ConfigError: blocks cannot be kept there, or not that many.
        """
        roots = settings.roots
        check_roots(roots, lambda index: settings.setting_of(index, setting))
        settings.segment_size(setting)
        if settings.native == "on" and not (native := native_of(settings)).files:
            raise ConfigError(
                f"{setting}.native is 'on', but the compiled part is missing ({native.reason}): "
                "install kvtier again where there is a C compiler, or set it to 'auto' or 'off'"
            )
        for index, root in enumerate(roots):
            name = settings.setting_of(index, setting)
            try:
                bounds = settings.bounds_of(root, setting)
                # bytes are of all roots together, and so are held against a mount that they share
                together = roots if isinstance(settings.capacity, int) else [root]
                given = str(settings.capacity or "")
                check_bounds(together, bounds.capacity, bounds.min_free, setting, given)
                prepare(root, settings)
            except OSError as error:
                raise ConfigError(
                    f"{name} = {str(root)!r} cannot be asked for its size, or written ({error}): "
                    f"mount it again, or set {name} to another directory"
                ) from error
            except TierError as error:
                raise ConfigError(f"{name} = {str(root)!r}: {error}") from error
            if settings.direct == "on" and not (direct := direct_of(root, settings)).works:
                raise ConfigError(
                    f"{setting}.direct is 'on', but {str(root)!r} takes no direct I/O "
                    f"({direct.reason}): set it to 'auto' or 'off', or {name} to another directory"
                )

    def check_block(self, settings: FsSettings, setting: str, block_bytes: int) -> None:
        """Check what can be checked once the size of a block is known, header included.

        Raises:
            ConfigError: the capacity of a root cannot hold a block.
        """
        for root in settings.roots:
            try:
                capacity = settings.bounds_of(root, setting).capacity
            except OSError:
                continue  # it answered a moment ago; from here on that is a state of the tier
            if capacity is not None:
                check_capacity(capacity, block_bytes, setting)

    def open(self, settings: FsSettings, namespace: str, facts: Mapping[str, object]) -> Tier:
        """Open the namespace below all roots that can be opened; `preflight` was called for them.

        Raises:
            TierError: no root can be opened.
            OSError: the only root cannot be written.
        """
        homes = [self._homes.setdefault(root, Home(root, settings)) for root in settings.roots]
        if len(homes) == 1:
            return homes[0].open(namespace, facts)
        return StripedTier(
            [
                Root(os.path.abspath(root), partial(home.open, namespace, facts))
                for root, home in zip(settings.roots, homes, strict=True)
            ]
        )
