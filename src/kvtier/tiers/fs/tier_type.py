"""`type: fs`, blocks in a file system: its settings, and which layout serves them."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from kvtier.tiers.fs.files import FilesTier, check_root

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 16
"""Enough blocks in flight for network file systems; a local disk is busy with four."""

_Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class FsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `type: fs`.

    Attributes:
        root_dir: an existing directory that this user may write.
        layout: `files` keeps one file per block; `auto` chooses.
        threads: blocks moved at once. Instead of it, the two names below are taken as vLLM's own
            fs tier has them; every thread here serves both directions, so they add up.
        n_read_threads: see `threads`.
        n_write_threads: see `threads`.
    """

    root_dir: Annotated[str, msgspec.Meta(min_length=1)]
    layout: Literal["auto", "files"] = "auto"
    threads: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None
    n_read_threads: _Threads | None = None
    n_write_threads: _Threads | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and (self.n_read_threads or self.n_write_threads):
            raise ValueError("set either `threads` or `n_read_threads` and `n_write_threads`")


class FsTierType:
    """Opens the fs tier in the layout that its settings name."""

    settings_type = FsSettings
    default_name = "fs"
    medium = "STORAGE"
    locality = "LOCAL"

    def num_threads(self, settings: FsSettings) -> int:
        """Threads that the driver should give to the tier."""
        if settings.threads is not None:
            return settings.threads
        if settings.n_read_threads is None and settings.n_write_threads is None:
            return DEFAULT_THREADS
        return (settings.n_read_threads or 1) + (settings.n_write_threads or 1)

    def preflight(self, settings: FsSettings, setting: str) -> None:
        """Check the directory before the engine starts.

        Raises:
            ConfigError: blocks cannot be kept there.
        """
        check_root(Path(settings.root_dir), f"{setting}.root_dir")

    def open(self, settings: FsSettings, namespace: str, facts: Mapping[str, object]) -> FilesTier:
        """Open the namespace below the root, and clear away what killed writers left in it.

        Raises:
            OSError: the namespace directory cannot be written.
        """
        tier = FilesTier(Path(settings.root_dir), namespace, facts)
        # the walk takes minutes on a large shared directory: the first job must not wait for it
        threading.Thread(target=_sweep, args=(tier,), name="kvtier-fs-sweep", daemon=True).start()
        return tier


def _sweep(tier: FilesTier) -> None:
    try:
        removed = tier.sweep(now=time.time())
    except OSError as error:
        logger.warning("Sweeping temporary files of the fs tier failed: %s", error)
    else:
        if removed:
            logger.info("Removed %d temporary files of writers that were killed", removed)
