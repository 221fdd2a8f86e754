"""What a user may write for `type: object`, and what is wrong with it before any request."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kvtier.config import parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Scheme = Literal["s3", "gs", "az"]

DEFAULT_THREADS = 32
"""Requests in flight: an object store answers each in tens of milliseconds, many at once."""

DEFAULT_LOOKUPS_IN_FLIGHT = 128

CALLING_THREADS_MAX = 8
"""Threads of the driver; each hands a run of blocks to the tier, which moves `threads` at once.
More of them only take turns at the interpreter."""

_SCHEMES: tuple[Scheme, ...] = ("s3", "gs", "az")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_PREFIX_PART = re.compile(r"[A-Za-z0-9._=-]+")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class ObjectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `type: object`. Credentials are none of them: see `credentials`.

    Attributes:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        endpoint: of a server that is not the cloud's own, `https://host:port`.
        region: of the bucket; for S3 only. None takes `AWS_REGION`, else `us-east-1`.
        addressing: for S3: the bucket is in the path, or in the host name (`virtual`). `auto` is
            `path` with an endpoint or a dot in the bucket's name, else `virtual`.
        account: storage account, for Azure only. None takes `AZURE_STORAGE_ACCOUNT_NAME`.
        profile: section of the shared AWS credentials file, see `credentials`.
        ca_bundle: file of PEM certificates to trust besides the system's.
        allow_http: whether the endpoint may be `http://`: blocks and answers can then be read
            and changed on the way.
        skip_signature: send no credentials, for a bucket that everybody may write.
        sign_payload: whether the signature of a put covers its bytes, for S3 only. `auto` does so
            over http alone; over https it would cost a SHA-256 per block for nothing.
        connect_timeout_s: until a connection stands.
        timeout_s: of one request, from its start to its last byte.
        retries: further attempts of one request after timeouts, broken connections, 429 and 5xx,
            none of them later than `timeout_s` after its start.
        capacity: what blocks below the prefix may take, in bytes or as text with a unit; kept by
            one elected process, see `sweeper`. None if a lifecycle rule of the bucket does that.
        threads: blocks moved at once.
        lookups_in_flight: requests at once that ask which blocks exist.
        present_ttl_s: how long a block that was seen is believed to be there.
        absent_ttl_s: how long a block that was not there is believed to be absent.
        on_unavailable: what a start does while the store cannot be reached: `degrade` starts the
            engine without the tier, which joins when it can; `fail` is an error.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    account: str | None = None
    profile: str | None = None
    ca_bundle: str | None = None
    allow_http: bool = False
    skip_signature: bool = False
    sign_payload: Literal["auto", "always", "never"] = "auto"
    capacity: int | str | None = None
    connect_timeout_s: _Seconds = 2.0
    timeout_s: _Seconds = 10.0
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 2
    threads: Annotated[int, msgspec.Meta(ge=2, le=1024)] = DEFAULT_THREADS
    lookups_in_flight: Annotated[int, msgspec.Meta(ge=1, le=1024)] = DEFAULT_LOOKUPS_IN_FLIGHT
    present_ttl_s: _Seconds = 600.0
    absent_ttl_s: _Seconds = 5.0
    on_unavailable: Literal["fail", "degrade"] = "degrade"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the objects are.

    Attributes:
        scheme: which kind of store.
        bucket: or container.
        prefix: of every object's key, without slashes at its ends; may be empty.
        endpoint: None for the cloud's own.
        virtual: the bucket is in the host name.
    """

    scheme: Scheme
    bucket: str
    prefix: str
    endpoint: str | None
    virtual: bool

    @property
    def url(self) -> str:
        """The place as the user wrote it."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def place_of(
    settings: ObjectSettings, setting: str, environment: Mapping[str, str] = os.environ
) -> Place:
    """Where `settings` point to.

    Args:
        settings: the tier's.
        setting: path of the tier's settings, e.g. `secondary_tiers[0]`.
        environment: may name an endpoint, as the AWS tools have it.

    Raises:
        ConfigError: the URL or the endpoint can never work. No message repeats a URL that may hold
            a password.
    """
    split = urlsplit(settings.url)
    if "@" in split.netloc or split.query or split.fragment:
        raise ConfigError(
            f"{setting}.url holds more than a bucket and a prefix (a user, a password, a '?' or a "
            f"'#'): credentials come from the environment, see the tier's page"
        )
    given = f"{setting}.url is {settings.url!r}"
    scheme = next((known for known in _SCHEMES if known == split.scheme), None)
    if scheme is None:
        raise ConfigError(f"{given}: it must begin with s3://, gs:// or az://")
    if not _BUCKET.fullmatch(split.netloc):
        raise ConfigError(
            f"{given}: {split.netloc!r} is no name of a bucket: 3 to 63 of a-z, 0-9, '-', '.', "
            f"'_', beginning and ending with a letter or digit"
        )
    prefix = split.path.strip("/")
    for part in prefix.split("/") if prefix else ():
        if not _PREFIX_PART.fullmatch(part) or part in (".", ".."):
            raise ConfigError(
                f"{given}: the prefix has {part!r} between two slashes; allowed are letters, "
                f"digits, '.', '_', '=' and '-', and neither '.', '..' nor nothing"
            )
    _check_scheme_options(settings, scheme, setting)
    endpoint = _endpoint(settings, scheme, setting, environment)
    if settings.addressing == "auto":
        virtual = endpoint is None and "." not in split.netloc
    else:
        virtual = settings.addressing == "virtual"
    return Place(scheme, split.netloc, prefix, endpoint, virtual)


def capacity_of(settings: ObjectSettings, setting: str) -> int | None:
    """The capacity in bytes.

    Raises:
        ConfigError: it is no size.
    """
    if settings.capacity is None:
        return None
    return parse_size(settings.capacity, f"{setting}.capacity")


def ca_certificates(settings: ObjectSettings, setting: str) -> bytes | None:
    """The certificates of `ca_bundle`.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    if settings.ca_bundle is None:
        return None
    given = f"{setting}.ca_bundle is {settings.ca_bundle!r}"
    try:
        certificates = Path(settings.ca_bundle).read_bytes()
    except OSError as error:
        raise ConfigError(f"{given}, which cannot be read: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise ConfigError(f"{given}, which holds no certificate in PEM form")
    return certificates


def _check_scheme_options(settings: ObjectSettings, scheme: Scheme, setting: str) -> None:
    only_for: dict[Scheme, dict[str, bool]] = {
        "s3": {
            "region": settings.region is not None,
            "addressing": settings.addressing != "auto",
            "profile": settings.profile is not None,
            "sign_payload": settings.sign_payload != "auto",
        },
        "az": {"account": settings.account is not None},
    }
    for owner, options in only_for.items():
        for option, is_set in options.items():
            if is_set and owner != scheme:
                raise ConfigError(f"{setting}.{option} is for {owner}:// alone: leave it out")


def _endpoint(
    settings: ObjectSettings, scheme: Scheme, setting: str, environment: Mapping[str, str]
) -> str | None:
    endpoint, source = settings.endpoint, f"{setting}.endpoint"
    if endpoint is None and scheme == "s3":
        for variable in _ENDPOINT_VARIABLES:
            if environment.get(variable):
                endpoint, source = environment[variable], f"the environment's {variable}"
                break
    if endpoint is None:
        return None
    split = urlsplit(endpoint)
    if "@" in split.netloc or split.query or split.fragment:
        raise ConfigError(f"{source} holds more than a host and a port: credentials do not go here")
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ConfigError(f"{source} is {endpoint!r}: it must be https://host or https://host:port")
    if split.scheme == "http" and not settings.allow_http:
        raise ConfigError(
            f"{source} is {endpoint!r}, without encryption: use https://, or set "
            f"{setting}.allow_http to true if nobody else is on that network"
        )
    return endpoint.rstrip("/")
