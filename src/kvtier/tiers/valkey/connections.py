"""Connections of the client library, one for each call that runs.

One connection carries one call at a time: on a shared one, a long block would hold up short ones.
They are made when they are first needed and kept; the library reconnects them by itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

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

from kvtier.errors import KVTierError, TierUnreachableError
from kvtier.tiers.valkey.faults import failure
from kvtier.tiers.valkey.wire import CONNECT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tiers.valkey.settings import Endpoint

Client = GlideClient | GlideClusterClient

T = TypeVar("T")


class Connections:
    """See the module. Thread safe.

    Args:
        endpoint: of the server.
        cluster: whether it is part of a cluster.
        explain: why the server is not reached, if that is known otherwise: the library waits in
            vain, without a reason, for a server that loads its data or changed its password.

    Attributes:
        calls: how many calls were made.
        cluster: as given.
    """

    def __init__(
        self, endpoint: Endpoint, explain: Callable[[], KVTierError | None], *, cluster: bool
    ) -> None:
        # what it has to say is raised as well, and told once per cause by the driver
        Logger.init(LogLevel.OFF)
        self.calls = 0
        self._endpoint = endpoint
        self._explain = explain
        self.cluster = cluster
        self._lock = threading.Lock()  # guards what is above and below
        self._idle: list[Client] = []
        self._closed = False

    def run(self, call: Callable[[Client], T]) -> T:
        """Give a connection to a call.

        Raises:
            KVTierError: what the call raised, in the words of `kvtier.errors`. It keeps nothing of
                the call alive, see below.
        """
        with self._lock:
            if self._closed:
                raise TierUnreachableError("the tier is closed")
            self.calls += 1
            client = self._idle.pop() if self._idle else None
        failed: KVTierError | None = None
        try:
            if client is None:
                client = self._connect()
            return call(client)
        except Exception as error:  # noqa: BLE001 - translated, whatever it is
            failed = failure(error).with_traceback(None)
        finally:
            if client is not None:
                self._put_back(client)
        # The library's frames hold views of blocks, and C pointers made from these. Were they kept
        # by an exception that is part of a reference cycle, the collector would clear a view before
        # its pointer, which crashes CPython (seen with 3.11). So this is raised outside the
        # handler, has no cause, and is not left in a variable of its own traceback. Out here the
        # explanation has no context either.
        if isinstance(failed, TierUnreachableError):
            failed = self._explain() or failed
        try:
            raise failed
        finally:
            del failed

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
        if self.cluster:
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
