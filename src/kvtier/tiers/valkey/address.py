"""Where the server is and who we are there, out of a URL.

    valkey://[user[:password]@]host[:port][/database]      also valkeys://, redis://, rediss://

The text of a URL is never shown: only `Address.shown`, which has no password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from kvtier.errors import ConfigError

DEFAULT_PORT = 6379

_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_ALLOWED = "valkey:// or redis://, or valkeys:// or rediss:// for TLS"
_FORM = "valkey://[user@]host:port[/database]"
_DATABASE = re.compile(r"/?|/([0-9]{1,5})")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


class Node(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says.

    Attributes:
        node: the server, or any one of a cluster.
        tls: whether the connection is encrypted, and the server's certificate checked.
        user: of the access list; the default user if empty.
        password: as it stood in the URL, if one did.
        database: by its number.
        scheme: as it was written.
    """

    node: Node
    tls: bool
    user: str = ""
    password: str | None = field(default=None, repr=False)
    database: int = 0
    scheme: str = "valkey"

    @property
    def shown(self) -> str:
        """The address without its password, for people."""
        user = f"{self.user}@" if self.user else ""
        database = f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{user}{self.node}{database}"


def parse_address(url: str, setting: str) -> Address:
    """What a URL says.

    Args:
        url: of the server.
        setting: path of the setting, for the message.

    Raises:
        ConfigError: it is no such URL; the message holds no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        reason = str(error) if "@" not in url else "the host or the port is malformed"
        raise _refused(setting, masked(url), reason) from None
    shown = masked(url)
    if parts.scheme not in _SCHEMES:
        raise _refused(setting, shown, _advice(parts))
    if not parts.hostname:
        raise _refused(setting, shown, "it names no host")
    if "," in parts.netloc:
        raise _refused(setting, shown, "give one host: a client finds the rest of a cluster itself")
    if not _HOST.fullmatch(parts.hostname):
        raise _refused(setting, shown, "the host is malformed")
    if parts.query or parts.fragment:
        raise _refused(setting, shown, "options are set beside the URL, not behind a `?` or `#`")
    database = _DATABASE.fullmatch(parts.path)
    if database is None:
        raise _refused(setting, shown, "what follows the host is the number of a database")
    return Address(
        node=Node(parts.hostname, DEFAULT_PORT if port is None else port),
        tls=_SCHEMES[parts.scheme],
        user=unquote(parts.username or ""),
        password=unquote(parts.password) if parts.password else None,
        database=int(database[1] or 0),
        scheme=parts.scheme,
    )


def masked(url: str) -> str:
    """A text that may be a URL, without what may be a password. Whatever stands between the scheme
    and the last `@` is taken for one: a password may hold any sign.
    """
    scheme = _SCHEME.match(url)
    head = scheme[0] if scheme is not None else ""
    rest = url[len(head) :]
    return f"{head}***@{rest.rpartition('@')[2]}" if "@" in rest else url


def _advice(parts: SplitResult) -> str:
    if "sentinel" in parts.scheme:
        return (
            "the client library has no Sentinel: name the primary itself, by an address that "
            "follows it (a service, a virtual IP or a DNS name), or use a cluster"
        )
    if parts.scheme in {"http", "https"}:
        return f"that is the address of a web server; the schemes are {_ALLOWED}"
    if not parts.scheme:
        return f"it has no scheme; the schemes are {_ALLOWED}"
    return f"there is no scheme {parts.scheme!r}; the schemes are {_ALLOWED}"


def _refused(setting: str, shown: str, reason: str) -> ConfigError:
    return ConfigError(f"{setting} = {shown!r} is not allowed: {reason}; write it as {_FORM}")
