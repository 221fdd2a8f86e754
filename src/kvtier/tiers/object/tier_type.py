"""`type: object`: its settings are tried at start, its namespaces opened where its tier runs."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.tiers.object.preflight import try_in_a_process
from kvtier.tiers.object.settings import (
    CALLING_THREADS_MAX,
    ObjectSettings,
    ca_certificates,
    capacity_of,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.tiers.object.catalog import ObjectCatalog
    from kvtier.tiers.object.objects import ObjectTier

logger = logging.getLogger(__name__)


class ObjectTierType:
    """Opens the object tier."""

    settings_type = ObjectSettings
    default_name = "object"
    medium = "STORAGE"
    locality = "REMOTE"

    def num_threads(self, settings: ObjectSettings) -> int:
        """Threads that the driver should give to the tier."""
        return min(settings.threads, CALLING_THREADS_MAX)

    def preflight(self, settings: ObjectSettings, setting: str) -> None:
        """Check the settings, then try the store from a process of its own, for a bounded time.

        Raises:
            ConfigError: the settings can never work, or the store cannot be reached and
                `on_unavailable` is `fail`.
        """
        _require_client(setting)
        place_of(settings, setting)
        ca_certificates(settings, setting)
        capacity_of(settings, setting)
        verdict = try_in_a_process(settings, setting)
        if verdict.kind == "never" or (
            verdict.kind == "not_now" and settings.on_unavailable == "fail"
        ):
            raise ConfigError(verdict.message)
        if verdict.kind == "not_now":
            logger.warning(
                "%s. The engine starts without this tier, which joins when it can; set "
                "%s.on_unavailable to 'fail' for an error instead",
                verdict.message,
                setting,
            )

    def open(
        self, settings: ObjectSettings, namespace: str, facts: Mapping[str, object]
    ) -> ObjectTier:
        """Open the namespace below the prefix, and describe it there.

        Raises:
            KVTierError: the store cannot be reached, or refuses.
        """
        # the client's library stays out of processes that fork
        from kvtier.tiers.object.objects import ObjectTier  # noqa: PLC0415
        from kvtier.tiers.object.store import open_store  # noqa: PLC0415

        return ObjectTier(open_store(settings), namespace, facts, settings)

    def open_catalog(self, settings: ObjectSettings, setting: str) -> ObjectCatalog:
        """What lies below the prefix, for the command line.

        Raises:
            ConfigError: the settings can never work.
            KVTierError: the store cannot be reached, or refuses.
        """
        _require_client(setting)
        place_of(settings, setting)
        from kvtier.tiers.object.catalog import ObjectCatalog  # noqa: PLC0415 - as above

        return ObjectCatalog(settings, setting)


def _require_client(setting: str) -> None:
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"{setting}: type 'object' needs pip install 'kvtier[object]'")
