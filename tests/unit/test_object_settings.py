from __future__ import annotations

import re

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.object.settings import ObjectSettings, ca_certificates, place_of
from kvtier.tiers.registry import decode_settings, load_tier_type

HERE = "secondary_tiers[0]"


def place(environment: dict[str, str] | None = None, **options: object):
    return place_of(ObjectSettings(**{"url": "s3://bucket", **options}), HERE, environment or {})


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3://bucket/", ("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b_c=d.e/", ("s3", "my.bucket-1", "a/b_c=d.e")),
        ("gs://bucket/kv", ("gs", "bucket", "kv")),
        ("az://container/kv", ("az", "container", "kv")),
    ],
)
def test_a_url_is_a_bucket_and_a_prefix(url: str, parts: tuple[str, str, str]) -> None:
    found = place(url=url)
    assert (found.scheme, found.bucket, found.prefix) == parts
    assert found.url == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/prefix", "must begin with s3://, gs:// or az://"),
        ("file:///tmp/x", "must begin with s3://, gs:// or az://"),
        ("memory:///", "must begin with s3://, gs:// or az://"),
        ("S3://bucket/x y", "the prefix has 'x y'"),
        ("s3://", "'' is no name of a bucket"),
        ("s3:///prefix", "'' is no name of a bucket"),
        ("s3://ab/prefix", "'ab' is no name of a bucket"),
        ("s3://Bucket/prefix", "'Bucket' is no name of a bucket"),
        ("s3://bucket:9000/prefix", "'bucket:9000' is no name of a bucket"),
        ("s3://bucket/a//b", "the prefix has '' between"),
        ("s3://bucket/a/../b", "the prefix has '..' between"),
        ("s3://bucket/%41", "the prefix has '%41' between"),
        ("s3://bucket/schlüssel", "the prefix has 'schlüssel' between"),
    ],
)
def test_what_is_no_url_of_a_store(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        place(url=url)
    assert str(raised.value).startswith(f"{HERE}.url is {url!r}")


@pytest.mark.parametrize(
    "url", ["s3://key:s3cr3t@bucket/x", "s3://bucket/x?token=s3cr3t", "s3://bucket/x#s3cr3t"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials come from the environment") as raised:
        place(url=url)
    assert "s3cr3t" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        place(endpoint=url.replace("s3:", "https:"))
    assert "s3cr3t" not in str(raised.value)


def test_http_must_be_allowed() -> None:
    with pytest.raises(ConfigError, match=r"endpoint is 'http://h:1'.*allow_http to true"):
        place(endpoint="http://h:1")
    assert place(endpoint="http://h:1/", allow_http=True).endpoint == "http://h:1"
    assert place(endpoint="https://h:1").endpoint == "https://h:1"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_of_the_environment_is_checked_too(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"environment's {variable} is 'http://h'.*allow_http"):
        place({variable: "http://h"})
    assert place({variable: "https://h"}).endpoint == "https://h"
    assert place({variable: "http://h"}, endpoint="https://other").endpoint == "https://other"
    assert place({variable: "http://h"}, url="gs://bucket").endpoint is None


@pytest.mark.parametrize("endpoint", ["h:9000", "ftp://h", "https://", "http//h"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be https://host"):
        place(endpoint=endpoint, allow_http=True)


@pytest.mark.parametrize(
    ("options", "virtual"),
    [
        ({}, True),
        ({"url": "s3://dotted.bucket"}, False),
        ({"endpoint": "https://h"}, False),
        ({"endpoint": "https://h", "addressing": "virtual"}, True),
        ({"addressing": "path"}, False),
    ],
)
def test_where_the_bucket_goes(options: dict[str, str], virtual: bool) -> None:
    assert place(**options).virtual is virtual


@pytest.mark.parametrize(
    ("url", "option", "value", "owner"),
    [
        ("gs://bucket", "region", "eu", "s3"),
        ("az://bucket", "addressing", "path", "s3"),
        ("gs://bucket", "profile", "p", "s3"),
        ("az://bucket", "sign_payload", "always", "s3"),
        ("s3://bucket", "account", "a", "az"),
    ],
)
def test_options_of_another_store_are_errors(url, option, value, owner) -> None:
    with pytest.raises(ConfigError, match=f"{option} is for {owner}:// alone"):
        place(url=url, **{option: value})


def test_a_ca_bundle_must_be_one(tmp_path) -> None:
    missing, junk = tmp_path / "missing", tmp_path / "junk"
    junk.write_text("junk")
    for path, message in ((missing, "cannot be read: No such file"), (junk, "no certificate")):
        settings = ObjectSettings(url="s3://bucket", ca_bundle=str(path))
        with pytest.raises(ConfigError, match=f"ca_bundle is .*{path.name}.*{message}"):
            ca_certificates(settings, HERE)
    assert ca_certificates(ObjectSettings(url="s3://bucket"), HERE) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url"),
        ({"url": "s3://b", "threads": 1}, "threads"),
        ({"url": "s3://b", "timeout_s": 0}, "timeout_s"),
        ({"url": "s3://b", "on_unavailable": "ignore"}, "on_unavailable"),
        ({"url": "s3://b", "access_key": "x"}, "access_key is no option"),
    ],
)
def test_options_are_checked_strictly(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_settings(load_tier_type("object", f"{HERE}.type"), options, HERE)
