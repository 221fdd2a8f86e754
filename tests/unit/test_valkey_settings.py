"""Options of the valkey tier: what is refused and how, and that no password is ever shown."""

from __future__ import annotations

import itertools
import logging
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("glide_sync")

from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import (
    ConfigError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)
from kvtier.tiers.registry import decode_settings, load_tier_type
from kvtier.tiers.valkey.address import Node, masked, parse_address
from kvtier.tiers.valkey.faults import failure, refusal
from kvtier.tiers.valkey.keys import Names, Parts
from kvtier.tiers.valkey.server import Facts
from kvtier.tiers.valkey.settings import Endpoint, ValkeySettings, endpoint_of
from kvtier.tiers.valkey.wire import Replies, command

SETTING = "secondary_tiers[1]"
MARKER = "hunter2-%41:/@?#marker"
QUOTED = "hunter2-%2541%3A%2F%40%3F%23marker"


def endpoint(**options: Any) -> Endpoint:
    tier_type = load_tier_type("valkey", f"{SETTING}.type")
    settings = decode_settings(tier_type, {"url": "valkey://h", **options}, SETTING)
    assert isinstance(settings, ValkeySettings)
    return endpoint_of(settings, SETTING)


@pytest.mark.parametrize(
    ("url", "node", "tls", "user", "database"),
    [
        ("valkey://h", Node("h", 6379), False, "", 0),
        ("valkey://h/", Node("h", 6379), False, "", 0),
        ("redis://h:1/2", Node("h", 1), False, "", 2),
        ("rediss://me@h:1", Node("h", 1), True, "me", 0),
        ("valkeys://m%40e:x@10.0.0.1:7000/15", Node("10.0.0.1", 7000), True, "m@e", 15),
        ("valkey://[::1]:7000", Node("::1", 7000), False, "", 0),
    ],
)
def test_urls(url: str, node: Node, tls: bool, user: str, database: int) -> None:
    address = parse_address(url, "url")
    assert (address.node, address.tls, address.user, address.database) == (
        *(node, tls, user),
        database,
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h:6379", "has no scheme|no scheme 'h'"),
        ("", "at least 1|length >= 1"),
        ("http://h", "address of a web server"),
        ("https://h", "address of a web server"),
        ("s3://bucket", "no scheme 's3'.*valkey:// or redis://"),
        ("sentinel://h", "no Sentinel.*primary itself"),
        ("redis+sentinel://h", "no Sentinel"),
        ("valkey://", "names no host"),
        ("valkey://:6379", "names no host"),
        ("valkey://h:x", "[Pp]ort"),
        ("valkey://h:99999", "[Pp]ort"),
        ("valkey://h/x", "number of a database"),
        ("valkey://h/-1", "number of a database"),
        ("valkey://h/1/2", "number of a database"),
        ("valkey://h?db=1", "beside the URL"),
        ("valkey://h#1", "beside the URL"),
        ("valkey://a,b", "one host"),
        ("valkey://a b", "host is malformed|[Pp]ort|invalid"),
    ],
)
def test_wrong_urls(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        endpoint(url=url)
    assert str(refused.value).startswith(SETTING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_prefix": "{x}"}, r"secondary_tiers\[1\]\.key_prefix = '\{x\}'.*A-Z"),
        ({"key_prefix": "a b"}, "key_prefix"),
        ({"key_prefix": "ä"}, "key_prefix"),
        ({"key_prefix": "x" * 65}, "0 to 64"),
        ({"key_prefix": "a\n"}, "key_prefix"),
        (
            {"cluster": "on", "url": "valkey://h/3"},
            r"url = 'valkey://h:6379/3' names database 3.*on",
        ),
        ({"cluster": "yes"}, "cluster"),
        ({"ttl": 0}, "ttl"),
        ({"threads": 1}, "threads"),
        ({"request_timeout_ms": 1}, "request_timeout_ms"),
        ({"on_unavailable": "wait"}, "on_unavailable"),
        ({"password": "x"}, r"secondary_tiers\[1\]\.password is no option"),
        ({"password_env": "KVTIER_NO_SUCH"}, "password_env = 'KVTIER_NO_SUCH'.*export"),
        ({"password_file": "/no/such"}, "password_file = '/no/such' cannot be read"),
        ({"url": "valkey://u:p@h", "password_env": "X"}, "password_env and a password in url"),
        ({"url": "valkey://u@h"}, "names a user, but there is no password"),
        ({"ca_bundle": "/x"}, "is for TLS.*valkeys://"),
        ({"ca_bundle": "/no/such", "url": "valkeys://h"}, "ca_bundle = '/no/such' cannot be read"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        endpoint(**options)


def test_files_that_hold_nothing_useful(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="first line is empty"):
        endpoint(password_file=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no PEM file"):
        endpoint(url="valkeys://h", ca_bundle=str(tmp_path / "empty"))


def test_where_passwords_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_bytes(b"a b\xff\r\nmore")
    monkeypatch.setenv("KVTIER_PASSWORD", "c")
    assert endpoint(password_file=str(tmp_path / "password")).password == "a b\udcff"
    assert endpoint(password_env="KVTIER_PASSWORD").password == "c"
    assert endpoint(url=f"valkey://:{QUOTED}@h").password == MARKER
    assert endpoint().password is None


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://me:{QUOTED}@127.0.0.1:1",
        f"http://me:{QUOTED}@h",
        f"valkey://me:{MARKER}@h",
        f"valkey://me:{QUOTED}@h:port",
        f"valkey://me:{QUOTED}@h/x",
        f"valkey://me:{QUOTED}@h?x=1",
        f"me:{QUOTED}@h",
    ],
)
@pytest.mark.parametrize("more", [{}, {"threads": "x"}, {"cluster": "on"}, {"key_prefix": "{"}])
def test_no_password_is_ever_shown(
    url: str, more: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tier_type = load_tier_type("valkey", "type")
    texts = [masked(url)]
    try:
        settings = decode_settings(tier_type, {"url": url, **more}, SETTING)
        texts += [repr(settings), str(settings), repr(list(settings.__rich_repr__()))]  # type: ignore[attr-defined]
        texts.append(repr(endpoint_of(settings, SETTING)))  # type: ignore[arg-type]
        tier_type.preflight(settings, SETTING)
        texts.append(endpoint_of(settings, SETTING).address.shown)  # type: ignore[arg-type]
        tier_type.open(settings, "0" * 64, {})
    except (ConfigError, TierError) as error:
        texts.append(shown(error))
    texts += [record.getMessage() for record in caplog.records]
    for text in texts:
        assert "hunter2" not in text
        assert "marker" not in text


@given(st.text(max_size=30), st.text(max_size=30))
def test_whatever_a_url_is_like_it_is_masked(before: str, after: str) -> None:
    assert "S3CRET" not in masked(f"{before}://u:S3CRET@{after}")
    assert "S3CRET" not in masked(f"u:S3CRET@{before}://{after}")


def test_an_unavailable_server_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        url = f"valkey://127.0.0.1:{bound.getsockname()[1]}"
        tier_type = load_tier_type("valkey", "type")
        settings = ValkeySettings(url=url)
        tier_type.preflight(settings, SETTING)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "starts without it" in record.getMessage()
        assert f"{SETTING}.on_unavailable" in record.getMessage()
        with pytest.raises(ConfigError, match=r"cannot be used: .*cannot be reached.*'degrade'"):
            tier_type.preflight(ValkeySettings(url=url, on_unavailable="fail"), SETTING)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", TierFullError),
        ("OOM: command not allowed when used memory > 'maxmemory'.", TierFullError),
        ("MISCONF Valkey is configured to save RDB snapshots", TierFullError),
        ("An error was signalled by the server: - ReadOnly: You can't write", TierFullError),
        ("LOADING Valkey is loading the dataset in memory", TierThrottledError),
        ("BUSY Valkey is busy running a script.", TierThrottledError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", TierThrottledError),
        ("NOAUTH Authentication required.", TierDeniedError),
        ("WRONGPASS invalid username-password pair or user is disabled.", TierDeniedError),
        ("NOPERM User x has no permissions to run the 'get' command", TierDeniedError),
        ("An error was signalled by the server: - PermissionDenied: No", TierDeniedError),
        ("Received error for address `h:1`: WRONGPASS: invalid", TierDeniedError),
        ("CLUSTERDOWN Hash slot not served", TierUnreachableError),
        ("MASTERDOWN Link with MASTER is down", TierUnreachableError),
        ("ERR unknown command", TierError),
    ],
)
def test_refusals(text: str, kind: type[TierError]) -> None:
    assert type(refusal(text)) is kind
    assert type(failure(RuntimeError(text))) is kind


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("TimeoutError", "timed out", TierTimeoutError),
        ("ConnectionError", "Received connection error", TierUnreachableError),
        ("ClosingError", "Failed", TierUnreachableError),
        ("RequestError", "Timed out", TierTimeoutError),
    ],
)
def test_failures_of_the_connection(name: str, text: str, kind: type[TierError]) -> None:
    assert type(failure(type(name, (Exception,), {})(text))) is kind


def facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {
        "version": "valkey 9",
        "cluster": False,
        "maxmemory": 1 << 30,
        "policy": "allkeys-lru",
        "notifies": True,
        "part_max": 1 << 29,
    }
    return Facts(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "ttl", "words"),
    [
        ({}, False, []),
        ({"maxmemory": None, "policy": "", "notifies": None}, False, []),
        ({"maxmemory": 0, "policy": "noeviction"}, False, ["no maxmemory"]),
        ({"policy": "noeviction"}, True, ["is noeviction"]),
        ({"policy": "volatile-lru"}, False, ["volatile-lru"]),
        ({"policy": "volatile-lru"}, True, []),
        ({"policy": "allkeys-random"}, True, ["allkeys-random"]),
        ({"notifies": False}, True, ["notify-keyspace-events Egxe"]),
    ],
)
def test_advice(changes: dict[str, Any], ttl: bool, words: list[str]) -> None:
    told = list(facts(**changes).advice(ttl=ttl))
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


KEY = st.binary(min_size=1, max_size=128)


@given(KEY, st.integers(2, 5))
def test_names_lead_back(key: Any, num_parts: int) -> None:
    names = Names("kvtier:", "ab" * 32)
    parts = names.of(key, num_parts)
    assert len(set(parts)) == num_parts
    for part in parts:
        assert names.block_of(part) == key
        assert part.count(b"{") == part.count(b"}") == 1
        assert part[part.index(b"{") + 1 : part.index(b"}")] == key.hex().encode()
    assert Names("kvtier:", "cd" * 32).block_of(parts[0]) is None


@pytest.mark.parametrize("name", [b"", b"x", b"kvtier:abababababababab:{zz}h", b"\xff"])
def test_other_names_are_nobodys(name: bytes) -> None:
    assert Names("kvtier:", "ab" * 32).block_of(name) is None


@given(st.binary(max_size=9000), st.lists(st.integers(0, 9000), max_size=4), st.integers(1, 5000))
def test_parts_are_the_block(content: bytes, cuts: list[int], part_max: int) -> None:
    """However it is cut, in and out."""

    def cut(memory: memoryview) -> list[memoryview]:
        places = [0, *sorted(min(c, len(content)) for c in cuts), len(content)]
        return [memory[a:b] for a, b in itertools.pairwise(places)]

    parts = Parts(cut(memoryview(content)), part_max).fill()
    assert b"".join(parts.views) == content
    assert all(view.nbytes <= part_max for view in parts.views[1:])
    into = memoryview(bytearray(len(content)))
    target = Parts(cut(into), part_max)
    for mine, theirs in zip(target.views, parts.views, strict=True):
        mine[:] = theirs
    assert target.whole([view.nbytes for view in parts.views])
    target.deliver()
    assert bytes(into) == content


REPLY = st.recursive(
    st.one_of(st.none(), st.integers(-(2**62), 2**62), st.binary(max_size=30)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def encoded(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n%s" % (len(reply), b"".join(map(encoded, reply)))


@given(st.lists(REPLY, max_size=5), st.integers(1, 40))
def test_replies_in_any_pieces(replies: list[Any], piece: int) -> None:
    data = b"".join(map(encoded, replies))
    parser = Replies()
    found = [r for i in range(0, len(data), piece) for r in parser.feed(data[i : i + piece])]
    assert found == replies


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"$x\r\n", b":1.5\r\n", b"\r\n"])
def test_nonsense_is_no_server(data: bytes) -> None:
    with pytest.raises(TierUnreachableError, match="no Valkey or Redis"):
        list(Replies().feed(data))


def test_commands() -> None:
    assert command("SET", b"\xff\r\n", "") == b"*3\r\n$3\r\nSET\r\n$3\r\n\xff\r\n\r\n$0\r\n\r\n"
    (error,) = Replies().feed(b"-NOAUTH first\r\n")
    assert isinstance(error, TierDeniedError)
