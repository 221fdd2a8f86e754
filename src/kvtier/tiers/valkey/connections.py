"""Connections of the client library, one for each call that runs.

One connection carries one call at a time: on a shared one, a long block would hold up short ones.
They are made when they are first needed and kept; the library reconnects them by itself.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from glide_sync import (
    AdvancedGlideClientConfiguration,
    AdvancedGlideClusterClientConfiguration,
    GlideClient,
    GlideClientConfiguration,
    GlideClusterClient,
    GlideClusterClientConfiguration,
    Logger,
    LogLevel,
    NodeAddress,
    ServerCredentials,
    TlsAdvancedConfiguration,
)

from kvtier.errors import TierUnreachableError
from kvtier.tiers.valkey.faults import failure
from kvtier.tiers.valkey.wire import CONNECT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.tiers.valkey.settings import Endpoint

Client = GlideClient | GlideClusterClient


class Connections:
    """See the module. Thread safe.

    Args:
        endpoint: of the server.
        cluster: whether it is part of a cluster.

    Attributes:
        calls: how many calls were made.
    """

    def __init__(self, endpoint: Endpoint, *, cluster: bool) -> None:
        # what it has to say is raised as well, and told once per cause by the driver
        Logger.init(LogLevel.OFF)
        self.calls = 0
        self._endpoint = endpoint
        self._cluster = cluster
        self._lock = threading.Lock()  # guards what is above and below
        self._idle: list[Client] = []
        self._closed = False

    @contextlib.contextmanager
    def call(self) -> Iterator[Client]:
        """A connection for one call.

        Raises:
            KVTierError: what the call raised, in the words of `kvtier.errors`.
        """
        with self._lock:
            if self._closed:
                raise TierUnreachableError("the tier is closed")
            self.calls += 1
            client = self._idle.pop() if self._idle else None
        try:
            if client is None:
                client = self._connect()
            yield client
        except Exception as error:
            raise failure(error) from error
        finally:
            if client is not None:
                self._put_back(client)

    def close(self) -> None:
        """Close those that are not in use now; the others when their call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()

    def _put_back(self, client: Client) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(client)
                return
        client.close()

    def _connect(self) -> Client:
        endpoint = self._endpoint
        address = endpoint.address
        addresses = [NodeAddress(*address.node)]
        timeout_ms = int(endpoint.timeout_s * 1e3)
        connect_ms = int(min(CONNECT_S, endpoint.timeout_s) * 1e3)
        credentials = None
        if endpoint.password is not None:
            credentials = ServerCredentials(endpoint.password, address.user or None)
        tls = None
        if address.tls:
            tls = TlsAdvancedConfiguration(root_pem_cacerts=endpoint.authorities)
        if self._cluster:
            return GlideClusterClient.create(
                GlideClusterClientConfiguration(
                    addresses,
                    use_tls=address.tls,
                    credentials=credentials,
                    request_timeout=timeout_ms,
                    advanced_config=AdvancedGlideClusterClientConfiguration(connect_ms, tls),
                )
            )
        return GlideClient.create(
            GlideClientConfiguration(
                addresses,
                use_tls=address.tls,
                credentials=credentials,
                request_timeout=timeout_ms,
                database_id=address.database or None,
                advanced_config=AdvancedGlideClientConfiguration(connect_ms, tls),
            )
        )
