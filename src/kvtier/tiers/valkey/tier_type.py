"""`type: valkey`: its settings checked, the server examined, and a namespace opened there."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, KVTierError, TierError
from kvtier.tiers.valkey.keys import Names
from kvtier.tiers.valkey.server import examine
from kvtier.tiers.valkey.settings import ValkeySettings, endpoint_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.tiers.valkey.catalog import ValkeyCatalog
    from kvtier.tiers.valkey.tier import ValkeyTier

if importlib.util.find_spec("glide_sync") is None:
    raise ImportError("no module named 'glide_sync'")

logger = logging.getLogger(__name__)

_SETTING = "the valkey tier"  # where the tier's place among others is not known any more


class ValkeyTierType:
    """Opens the valkey tier."""

    settings_type = ValkeySettings
    default_name = "valkey"
    medium = "STORAGE"
    locality = "REMOTE"

    def num_threads(self, settings: ValkeySettings) -> int:
        """Threads that the driver should give to the tier."""
        return settings.threads

    def preflight(self, settings: ValkeySettings, setting: str) -> None:
        """Check the options, and ask the server, with plain sockets: the client library starts
        threads that do not belong into this process.

        Raises:
            ConfigError: an option cannot be used; or the server cannot, and `on_unavailable` says
                that this matters.
        """
        endpoint = endpoint_of(settings, setting)
        try:
            examine(endpoint, setting)
        except TierError as error:
            shown = endpoint.address.shown
            if settings.on_unavailable == "fail":
                raise ConfigError(
                    f"{setting}.url = {shown!r} cannot be used: {error}. Mend that, or set "
                    f"{setting}.on_unavailable to 'degrade' to start without the tier"
                ) from error
            logger.warning(
                "%s at %s cannot be used now: %s. The engine starts without it and tries again "
                "later (%s.on_unavailable = 'degrade')",
                *(setting, shown, error, setting),
            )

    def open(
        self,
        settings: ValkeySettings,
        namespace: str,
        facts: Mapping[str, object],
    ) -> ValkeyTier:
        """Connect, describe the namespace, and begin to listen.

        Raises:
            ConfigError: the settings do not fit the server.
            TierError: the server refuses us, or cannot be reached.
        """
        # not before: the client library is for the process that moves blocks
        from kvtier.tiers.valkey.connections import Connections  # noqa: PLC0415
        from kvtier.tiers.valkey.tier import ValkeyTier  # noqa: PLC0415
        from kvtier.tiers.valkey.watch import Watch  # noqa: PLC0415

        endpoint = endpoint_of(settings, _SETTING)
        server = examine(endpoint, _SETTING)
        logger.info(
            "The valkey tier uses %s (%s%s)",
            *(endpoint.address.shown, server.version, ", cluster" if server.cluster else ""),
        )
        for advice in server.advice(ttl=endpoint.ttl_ms is not None):
            logger.warning("The valkey tier at %s: %s", endpoint.address.shown, advice)
        names = Names(endpoint.prefix, namespace)
        listen = server.notifies is not False
        watch = Watch(endpoint, names, cluster=server.cluster, listen=listen)
        connections = Connections(endpoint, watch.trouble, cluster=server.cluster)
        tier = ValkeyTier(connections, names, server.part_max, endpoint.ttl_ms, watch)
        try:
            # what is wrong is told here, and not by the first block
            connections.run(lambda client: client.ping())
        except BaseException:
            tier.close()
            raise
        try:
            tier.describe(facts)
        except KVTierError as error:  # of use to people alone
            logger.debug("The valkey tier cannot describe its namespace: %s", error)
        return tier

    def open_catalog(self, settings: ValkeySettings, setting: str) -> ValkeyCatalog:
        """What lies there, for the command line.

        Raises:
            ConfigError: an option cannot be used.
            TierError: the server refuses us, or cannot be reached.
        """
        from kvtier.tiers.valkey.catalog import ValkeyCatalog  # noqa: PLC0415 - as above

        return ValkeyCatalog(endpoint_of(settings, setting), setting)
