"""Servers for the tests of the remote tiers: one of each kind for the whole session, as every test
keeps to a prefix of its own. A test that breaks a server starts its own one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from object_tiers import BUCKET, settings_for

from kvtier.testing.http_proxy import HttpFaultProxy
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, JuiceServer, S3Server, SeaweedServer
from kvtier.testing.valkey_servers import ValkeyServer, cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.tiers.object.settings import ObjectSettings

IDENTITIES = {
    "mayread": (f"Read:{BUCKET}", f"List:{BUCKET}"),
    "maywrite": (f"Write:{BUCKET}", f"List:{BUCKET}"),
    "maynotlist": (f"Read:{BUCKET}", f"Write:{BUCKET}"),
    "mayall": (f"Read:{BUCKET}", f"Write:{BUCKET}", f"List:{BUCKET}"),
}

NEED_SERVERS = ("test_object_", "test_bench_object", "test_remote_", "test_valkey_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith(NEED_SERVERS):
            item.add_marker(pytest.mark.servers)


def started(server: S3Server) -> Iterator[S3Server]:
    if not server.is_installed():
        pytest.skip("needs pip install 'kvtier[object,servers]'")
    with server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def juice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from started(JuiceServer(tmp_path_factory.mktemp("juice")))


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from started(SeaweedServer(tmp_path_factory.mktemp("seaweed"), IDENTITIES))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A Valkey server of the test's own, to be broken."""
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
    """The nodes of a cluster."""
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of an engine that may do everything, and nothing else of AWS in it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture
def proxy(juice: S3Server, s3_credentials: None) -> Iterator[HttpFaultProxy]:
    """A proxy in front of the fast server."""
    with HttpFaultProxy(juice.address) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: HttpFaultProxy) -> ObjectSettings:
    """Settings of a tier behind `proxy`, below a new prefix, without retries."""
    return settings_for(proxy, timeout_s=2.0, connect_timeout_s=1.0, retries=0)
