"""Options of `type: valkey`, and what they come to: an `Endpoint`."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from kvtier.errors import ConfigError
from kvtier.tiers.valkey.address import Address, masked, parse_address

DEFAULT_THREADS = 8
"""Calls at once. Four keep one server busy; a cluster takes more."""

DEFAULT_TIMEOUT_MS = 5_000
"""A block takes milliseconds; a server that needs this long hangs."""

_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{0,64}")
_PREFIX_ALLOWED = "0 to 64 characters out of A-Z, a-z, 0-9, `.`, `_`, `:`, `/` and `-`"


class ValkeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `type: valkey`.

    Attributes:
        url: `valkey://[user@]host:port[/database]`, or `valkeys://` with TLS; `redis://` and
            `rediss://` mean the same. Of a cluster, any node.
        password_env: environment variable that holds the password.
        password_file: file that holds the password, in its first line.
        cluster: whether the server is one node of a cluster; `auto` asks it.
        ca_bundle: PEM file of the authorities that may have signed the server's certificate,
            instead of those of the system.
        ttl: seconds after which a block that nobody read or wrote expires; none by default.
        threads: calls at once.
        key_prefix: what every key begins with.
        on_unavailable: whether an engine starts when the server cannot be used.
        request_timeout_ms: after which a call that is not answered has failed.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    password_env: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    password_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    cluster: Literal["auto", "on", "off"] = "auto"
    ca_bundle: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    ttl: Annotated[int, msgspec.Meta(ge=1, le=10 * 365 * 86_400)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=2, le=256)] = DEFAULT_THREADS
    key_prefix: str = "kvtier:"
    on_unavailable: Literal["fail", "degrade"] = "degrade"
    request_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=600_000)] = DEFAULT_TIMEOUT_MS

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = msgspec.structs.asdict(self) | {"url": masked(self.url)}
        return list(shown.items())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"ValkeySettings({fields})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server as it is to be spoken to.

    Attributes:
        address: of it.
        password: if there is one.
        cluster: whether it is part of a cluster; None: ask it.
        authorities: PEM text of `ca_bundle`.
        prefix: what every key begins with.
        ttl_ms: of a key; None: for ever.
        timeout_s: of one call.
    """

    address: Address
    password: str | None = field(repr=False)
    cluster: bool | None
    authorities: bytes | None = field(repr=False)
    prefix: str
    ttl_ms: int | None
    timeout_s: float

    def tls_context(self) -> ssl.SSLContext | None:
        """How connections are encrypted; None if they are not."""
        if not self.address.tls:
            return None
        text = self.authorities.decode() if self.authorities is not None else None
        return ssl.create_default_context(cadata=text)


def endpoint_of(settings: ValkeySettings, setting: str) -> Endpoint:
    """What the options come to.

    Args:
        settings: as decoded.
        setting: path of this tier's settings, e.g. `secondary_tiers[0]`.

    Raises:
        ConfigError: an option cannot be used, or contradicts another one.
    """
    address = parse_address(settings.url, f"{setting}.url")
    if settings.cluster == "on":
        refuse_database(address, f"{setting}.url", f"{setting}.cluster = 'on'")
    if not _PREFIX.fullmatch(settings.key_prefix):
        raise ConfigError(
            f"{setting}.key_prefix = {settings.key_prefix!r} is not allowed: it must be "
            f"{_PREFIX_ALLOWED}; braces in particular would keep all blocks on one node of a "
            "cluster"
        )
    return Endpoint(
        address=address,
        password=_password(settings, address, setting),
        cluster={"auto": None, "on": True, "off": False}[settings.cluster],
        authorities=_authorities(settings, address, setting),
        prefix=settings.key_prefix,
        ttl_ms=settings.ttl * 1000 if settings.ttl is not None else None,
        timeout_s=settings.request_timeout_ms / 1e3,
    )


def refuse_database(address: Address, setting: str, because: str) -> None:
    """A cluster has one database.

    Raises:
        ConfigError: the URL names another one.
    """
    if address.database:
        raise ConfigError(
            f"{setting} = {address.shown!r} names database {address.database}, but {because}, and "
            "a cluster has only database 0: remove the number from the URL and tell tiers apart by "
            "key_prefix"
        )


def _password(settings: ValkeySettings, address: Address, setting: str) -> str | None:
    given = {
        "password_env": settings.password_env,
        "password_file": settings.password_file,
        "a password in url": address.password,
    }
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise ConfigError(
            f"{setting} has {' and '.join(several)}: give the password in one place, best in "
            "password_file"
        )
    password = address.password
    if settings.password_env is not None:
        password = os.environ.get(settings.password_env)
        if not password:
            raise ConfigError(
                f"{setting}.password_env = {settings.password_env!r}, but the environment of the "
                "engine has no such variable, or an empty one: export it where the engine is "
                "started"
            )
    elif settings.password_file is not None:
        text = _content(settings.password_file, f"{setting}.password_file")
        password = text.decode(errors="surrogateescape").split("\n", 1)[0].rstrip("\r")
        if not password:
            raise ConfigError(
                f"{setting}.password_file = {settings.password_file!r} is a file whose first line "
                "is empty: write the password there"
            )
    if address.user and password is None:
        raise ConfigError(
            f"{setting}.url = {address.shown!r} names a user, but there is no password: set "
            f"{setting}.password_file or {setting}.password_env"
        )
    return password


def _authorities(settings: ValkeySettings, address: Address, setting: str) -> bytes | None:
    if settings.ca_bundle is None:
        return None
    if not address.tls:
        raise ConfigError(
            f"{setting}.ca_bundle = {settings.ca_bundle!r} is for TLS, but {setting}.url = "
            f"{address.shown!r} has none: write it with valkeys:// or rediss://"
        )
    text = _content(settings.ca_bundle, f"{setting}.ca_bundle")
    try:
        ssl.create_default_context(cadata=text.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{setting}.ca_bundle = {settings.ca_bundle!r} is no PEM file of certificates ({error})"
        ) from None
    return text


def _content(path: str, setting: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"{setting} = {path!r} cannot be read ({error.strerror}): make it a file that the "
            "engine's user may read"
        ) from error
