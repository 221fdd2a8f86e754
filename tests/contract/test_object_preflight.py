"""What a start says about a store that cannot serve."""

from __future__ import annotations

import http.server
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

from object_tiers import certificate, get, open_tier, put, settings_for

from kvtier.drivers.threaded import ThreadedDriver
from kvtier.errors import ConfigError, KVTierError
from kvtier.testing.blocks import block_of, key_of
from kvtier.testing.contract import DriverContract
from kvtier.testing.http_proxy import Answer, Rule
from kvtier.testing.proxy import Behaviour
from kvtier.testing.s3_servers import SECRET_KEY
from kvtier.tiers.object.credentials import profile_of, shared_file_credentials
from kvtier.tiers.object.preflight import try_in_a_process, try_store
from kvtier.tiers.object.tier_type import ObjectTierType
from kvtier.tiers.registry import load_tier_type

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.testing.http_proxy import HttpFaultProxy
    from kvtier.tiers.object.settings import ObjectSettings

HERE = "secondary_tiers[0]"

drive = DriverContract()


def preflight(settings: ObjectSettings) -> None:
    ObjectTierType().preflight(settings, HERE)


def test_it_is_a_type() -> None:
    assert isinstance(load_tier_type("object", "type"), ObjectTierType)


def test_a_store_that_serves(seaweed, s3_credentials) -> None:
    settings = settings_for(seaweed)
    preflight(settings)
    tier = ObjectTierType().open(settings, "ab" * 32, {})
    put(tier, key_of(1))
    assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()


def test_nothing_is_left_of_the_try(juice, s3_credentials, behind, proxy) -> None:
    preflight(behind)
    import obstore

    from kvtier.tiers.object.store import open_store

    assert obstore.list(open_store(behind).client).collect() == []
    assert proxy.requests.keys() >= {"PUT", "GET", "DELETE"}


@pytest.mark.parametrize(
    ("access_key", "doing", "permission"),
    [
        ("mayread", "writing", "s3:PutObject"),
        ("maywrite", "reading", "s3:GetObject"),
        ("maynotlist", "listing", "s3:ListBucket"),
    ],
)
def test_a_missing_permission_is_named(
    seaweed, s3_credentials, monkeypatch, access_key, doing, permission
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
    message = rf"secondary_tiers\[0\]: s3://.*{doing} failed \(403.*{doing} needs {permission}"
    with pytest.raises(ConfigError, match=message):
        preflight(settings_for(seaweed))


def test_deleting_is_a_permission_too(proxy, behind) -> None:
    proxy.rules = [Rule(Answer(403), method="DELETE")]
    with pytest.raises(ConfigError, match="deleting needs s3:DeleteObject"):
        preflight(behind)


def test_permissions_for_one_bucket_are_enough(seaweed, s3_credentials, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mayall")
    preflight(settings_for(seaweed))


@pytest.mark.parametrize("server", ["seaweed", "juice"])
def test_a_missing_bucket(server, s3_credentials, request) -> None:
    settings = settings_for(request.getfixturevalue(server), url="s3://kvtier-nowhere/kv")
    with pytest.raises(ConfigError, match=r"s3://kvtier-nowhere/kv: .*create it, or correct"):
        preflight(settings)


@pytest.mark.parametrize("server", ["seaweed", "juice"])
def test_a_wrong_secret(server, s3_credentials, monkeypatch, request) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match="secret key is not the one"):
        preflight(settings_for(request.getfixturevalue(server)))


def test_no_credentials_at_all(seaweed, s3_credentials, monkeypatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="no credentials could be had"):
        preflight(settings_for(seaweed))
    with pytest.raises(ConfigError, match="refused"):
        preflight(settings_for(seaweed, skip_signature=True))


def test_what_is_wrong_before_any_request(s3_credentials) -> None:
    for options, message in (
        ({"url": "ftp://bucket"}, r"secondary_tiers\[0\].url is 'ftp://bucket'"),
        ({"ca_bundle": "/nowhere"}, r"secondary_tiers\[0\].ca_bundle is '/nowhere'"),
        ({"profile": "nobody"}, "profile 'nobody' is not in"),
    ):
        with pytest.raises(ConfigError, match=message):
            preflight(settings_for(NOBODY, **options))


class Nobody:
    address = ("127.0.0.1", 9)


NOBODY = Nobody()


@pytest.mark.parametrize("broken", ["refused", "silent", "throttled"])
def test_a_store_that_is_away_is_a_choice(proxy, behind, broken, caplog) -> None:
    if broken == "refused":
        proxy.stop_listening()
    elif broken == "silent":
        proxy.behaviour = Behaviour(silent=True)
    else:
        proxy.rules = [Rule(Answer(503, (("Retry-After", "1"),)))]
    with caplog.at_level(logging.WARNING):
        preflight(behind)
    (record,) = caplog.records
    assert re.search(
        r"secondary_tiers\[0\]: s3://.*starts without this tier, which joins when it can; set "
        r"secondary_tiers\[0\].on_unavailable to 'fail'",
        record.getMessage(),
    )
    import msgspec

    with pytest.raises(ConfigError, match="listing failed"):
        preflight(msgspec.structs.replace(behind, on_unavailable="fail"))


def test_a_try_is_bounded(s3_credentials) -> None:
    """A server that takes connections and never answers, with patient settings."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = type("Silent", (), {"address": listener.getsockname()})
        settings = settings_for(silent, timeout_s=3600.0, retries=20)
        started = time.monotonic()
        verdict = try_in_a_process(settings, HERE, limit_s=1.5)
        assert verdict.kind == "not_now"
        assert "did not answer in" in verdict.message
        assert time.monotonic() - started < 30


def test_the_tier_joins_when_the_store_does(proxy: HttpFaultProxy, behind) -> None:
    proxy.stop_listening()
    preflight(behind)
    now = [0.0]
    kind = ObjectTierType()
    driver = ThreadedDriver(
        "object",
        lambda namespace: kind.open(behind, namespace, {}),
        num_threads=4,
        clock=lambda: now[0],
    )
    assert drive.store(driver, 1, [key_of(1)]) == frozenset()
    proxy.listen_again()
    now[0] += 61.0  # past the driver's longest pause
    assert drive.store(driver, 2, [key_of(1)]) == {key_of(1)}
    assert drive.load(driver, 3, [key_of(1)]) == {key_of(1)}
    assert driver.close()


def test_the_engine_may_fork_after_the_try(behind) -> None:
    """The client's threads do not survive a fork: whoever has used it hangs in the child."""
    code = """
import os, sys, msgspec
from kvtier.tiers.object.settings import ObjectSettings
from kvtier.tiers.object.tier_type import ObjectTierType
settings = msgspec.json.decode(sys.argv[1], type=ObjectSettings)
ObjectTierType().preflight(settings, "x")
assert "obstore" not in sys.modules
if os.fork() == 0:
    tier = ObjectTierType().open(settings, "ab" * 32, {})
    os._exit(not tier.exists([bytes(36)]) == [False])
print(os.wait()[1])
"""
    import msgspec

    text = msgspec.json.encode(behind).decode()
    done = subprocess.run(
        [sys.executable, "-c", code, text], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["0"]


# --- credentials


def credentials_file(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "credentials"
    path.write_text(text)
    return {"AWS_SHARED_CREDENTIALS_FILE": str(path)}


def test_a_profile_of_the_shared_file(juice, s3_credentials, monkeypatch, tmp_path) -> None:
    text = f"[kv]\naws_access_key_id = kvtierkey\naws_secret_access_key = {SECRET_KEY}\n"
    for name, value in credentials_file(tmp_path, text).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    preflight(settings_for(juice, profile="kv"))
    monkeypatch.setenv("AWS_PROFILE", "kv")
    preflight(settings_for(juice))
    assert profile_of(None, {"AWS_PROFILE": "kv", "AWS_ACCESS_KEY_ID": "x"}) is None
    assert profile_of("own", {"AWS_PROFILE": "kv", "AWS_ACCESS_KEY_ID": "x"}) == "own"


def test_keys_that_were_rotated_are_read_again(tmp_path) -> None:
    text = "[kv]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = t\n"
    environment = credentials_file(tmp_path, text.format("old"))
    read = shared_file_credentials("kv", environment)
    credentials_file(tmp_path, text.format("new"))
    found = read()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("new", "s", "t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[other]\n", "profile 'kv' is not in"),
        ("[kv]\nsso_session = x\nMARK3D = y\n", "has no static keys"),
        ("MARK3D\n[kv]\n", "is not a credentials file"),
    ],
)
def test_files_without_the_keys(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        shared_file_credentials("kv", credentials_file(tmp_path, text))
    assert "MARK3D" not in repr(raised.value)


def test_secrets_are_nowhere(
    juice, proxy, behind, s3_credentials, monkeypatch, caplog, capfd, tmp_path
) -> None:
    """A marker in the environment; then everything that an operator may see, and all objects."""
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "MARK3D")
    seen: list[object] = []
    with caplog.at_level(logging.DEBUG):
        for use in (
            lambda: preflight(behind),
            lambda: open_tier(behind),
            lambda: seen.append(try_store(behind, HERE)),
        ):
            try:
                use()
            except KVTierError as error:
                seen += [repr(error), repr(error.__cause__), repr(error.__context__)]
        monkeypatch.delenv("AWS_SESSION_TOKEN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        kind = ObjectTierType()
        driver = ThreadedDriver("object", lambda ns: kind.open(behind, ns, {"model": "m"}), 4)
        drive.store(driver, 1, [key_of(1)])
        proxy.rules = [Rule(Answer(403))]
        drive.load(driver, 2, [key_of(1)])
        driver.close()
    proxy.rules = []
    from kvtier.tiers.object.store import open_store

    store = open_store(behind)
    seen += [repr(store), store.client.config, store.client.client_options]
    import obstore

    for entry in obstore.list(store.client).collect():
        content = bytes(obstore.get(store.client, entry["path"]).bytes())
        assert SECRET_KEY.encode() not in content
        seen.append(entry["path"])
    seen += [record.getMessage() for record in caplog.records]
    seen += [repr(behind), *capfd.readouterr()]
    assert len(seen) > 8
    for text in map(str, seen):
        assert "MARK3D" not in text
        assert SECRET_KEY not in text


class RoleHandler(http.server.BaseHTTPRequestHandler):
    """Hands out credentials as a machine's metadata service and as a token service do."""

    def do_PUT(self) -> None:
        self.answer("a token")  # of the metadata service

    def do_GET(self) -> None:
        if self.path.endswith("/security-credentials/"):
            self.answer("role")
            return
        keys = {"AccessKeyId": "kvtierkey", "SecretAccessKey": SECRET_KEY, "Token": "t"}
        times = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2020-01-01T00:00:00Z"}
        self.answer(json.dumps({"Code": "Success", "Type": "AWS-HMAC", **keys, **times}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        names = ("AssumeRoleWithWebIdentityResponse", "AssumeRoleWithWebIdentityResult")
        names += ("Credentials",)
        keys = f"<AccessKeyId>kvtierkey</AccessKeyId><SecretAccessKey>{SECRET_KEY}"
        keys += "</SecretAccessKey><SessionToken>t</SessionToken>"
        keys += "<Expiration>2099-01-01T00:00:00Z</Expiration>"
        opened, closed = (f"<{n}>" for n in names), (f"</{n}>" for n in reversed(names))
        self.answer("".join((*opened, keys, *closed)))

    def answer(self, text: str) -> None:
        self.server.asked.append(f"{self.command} {self.path.split('?')[0]}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("source", ["instance role", "web identity"])
def test_credentials_of_a_role(juice, s3_credentials, monkeypatch, tmp_path, source) -> None:
    """The server does not know session tokens, so that it refuses is the proof of one."""
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    roles = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RoleHandler)
    roles.asked = []
    more = {}
    if source == "web identity":  # asked over TLS alone
        server, bundle = certificate(tmp_path)
        roles.socket = server.wrap_socket(roles.socket, server_side=True)
        more = {"ca_bundle": bundle}
    thread = threading.Thread(target=roles.serve_forever)
    thread.start()
    url = f"http{'s' if more else ''}://127.0.0.1:{roles.server_address[1]}"
    try:
        if source == "instance role":
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        else:
            (tmp_path / "token").write_text("identity")
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/kv")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        with pytest.raises(ConfigError, match=r"listing failed \(403 InvalidTokenId\)"):
            preflight(settings_for(juice, **more))
    finally:
        roles.shutdown()
        thread.join()
        roles.server_close()
    assert roles.asked
