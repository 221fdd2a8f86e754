"""What the client is told."""

from __future__ import annotations

import pytest

pytest.importorskip("obstore")

from kvtier.tiers.object.settings import ObjectSettings
from kvtier.tiers.object.store import open_store


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def client(**options: object):
    return open_store(ObjectSettings(**{"url": "s3://bucket/a/b", **options})).client


def config(**options: object) -> dict[str, object]:
    return dict(client(**options).config)


@pytest.mark.parametrize(
    ("options", "unsigned"),
    [
        ({}, True),
        ({"endpoint": "https://h"}, True),
        ({"endpoint": "http://h", "allow_http": True}, False),
        ({"sign_payload": "always"}, False),
        ({"endpoint": "http://h", "allow_http": True, "sign_payload": "never"}, True),
    ],
)
def test_payloads_are_signed_where_nothing_else_protects_them(options, unsigned) -> None:
    assert config(**options)["unsigned_payload"] == str(unsigned).lower()


def test_a_virtual_host_has_the_bucket_in_its_name() -> None:
    found = config(endpoint="https://h:9000", addressing="virtual")
    assert found["virtual_hosted_style_request"] == "true"
    assert found["endpoint"] == "https://bucket.h:9000"
    assert config(endpoint="https://h:9000")["endpoint"] == "https://h:9000"
    assert config()["virtual_hosted_style_request"] == "true"
    assert "endpoint" not in config()


def test_the_endpoint_of_the_settings_is_stronger_than_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://elsewhere")
    assert config(endpoint="https://h")["endpoint_url_s3"] == "https://h"


def test_http_and_bad_certificates_are_off_whatever_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ALLOW_INVALID_CERTIFICATES", "true")
    options = client().client_options
    assert options["allow_http"] == "false"
    assert options["allow_invalid_certificates"] == "false"


@pytest.mark.parametrize("url", ["s3://bucket/a/b", "gs://bucket/a/b", "az://bucket/a/b"])
def test_every_store_has_the_prefix_and_the_limits(url: str) -> None:
    account = {"account": "someone"} if url.startswith("az") else {}
    found = client(url=url, timeout_s=7.0, connect_timeout_s=3.0, retries=4, **account)
    assert found.prefix == "a/b"
    assert found.retry_config["max_retries"] == 4
    assert found.retry_config["retry_timeout"].total_seconds() == 7.0
    assert {"timeout", "connect_timeout"} <= found.client_options.keys()


def test_endpoints_of_gcs_and_azure() -> None:
    assert config(url="gs://bucket", endpoint="https://h")["base_url"] == "https://h"
    found = config(url="az://bucket", endpoint="https://h", account="someone", skip_signature=True)
    assert found["endpoint"] == "https://h"
    assert found["account_name"] == "someone"
    assert found["skip_signature"] == "true"
