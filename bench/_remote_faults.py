"""The faults of `remote_faults.py`: how each comes and goes, and what a tier should make of it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from _remote_place import BUCKET, TIMEOUT_S, Place, set_password
from _step_rig import DENIED, ERROR, FULL, HUNG, LOST, THROTTLED, Trouble

from kvtier.testing.s3_servers import JuiceServer
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.valkey.wire import command

UNREACHABLE = frozenset({"unreachable"})
TIMEOUT = frozenset({"timeout"})
DENIED_CAUSE = frozenset({"denied"})
THROTTLED_CAUSE = frozenset({"throttled"})
LATE = TIMEOUT | UNREACHABLE
GONE_S = 2 * TIMEOUT_S + 1.0  # by then what is not answered has been noticed, and a start is over
LOADING_S = 60.0
# several calls of a job that wait in vain may take longer than the core waits for a sign of life
REFUSED = (DENIED | HUNG, DENIED | HUNG, DENIED_CAUSE, GONE_S)

Make = Callable[[Place], Trouble]


def through_proxy(**behaviour: object) -> Make:
    """Nothing that fails: answers only come late."""
    return lambda at: Trouble(lambda: at.proxy.behave(**behaviour), at.proxy.behave)


def answered(status: int, code: str = "", **more: object) -> Make:
    """Every request gets an error. `more` is what the tier makes of it."""
    both = {"reads": more["fault"], "writes": more["fault"], "causes": more["causes"]}
    return lambda at: Trouble(
        lambda: at.proxy.answer_all(status, code, 1), at.proxy.answer_all, **both
    )


def resets(at: Place) -> Trouble:
    def come() -> None:
        at.proxy.behave(refuse=True)
        at.proxy.reset_connections()

    return Trouble(come, at.proxy.behave, HUNG, HUNG, UNREACHABLE, GONE_S)


def truncated(at: Place) -> Trouble:
    """No connection brings more than a part of a row; an answer to a write is shorter."""

    def come() -> None:
        at.proxy.behave(cut_after=9_000)

    return Trouble(come, at.proxy.behave, LOST, None, LATE, GONE_S)


def silence(at: Place) -> Trouble:
    def come() -> None:
        at.proxy.behave(silent=True)

    return Trouble(come, at.proxy.behave, HUNG, HUNG, TIMEOUT, GONE_S)


def expired_certificate(at: Place) -> Trouble:
    def come() -> None:
        at.proxy.show(at.papers["expired"])

    return Trouble(come, lambda: at.proxy.show(at.papers["good"]), *REFUSED)


def other_authority(at: Place) -> Trouble:
    """The proxy shows it when the engine starts."""

    def go() -> None:
        at.proxy.show(at.papers["good"])

    return Trouble(lambda: None, go, None, DENIED, DENIED_CAUSE, GONE_S)


def not_there(at: Place) -> Trouble:
    """Nobody listens when the engine starts."""
    return Trouble(lambda: None, at.proxy.listen_again, None, LOST, UNREACHABLE, GONE_S)


def killed(at: Place) -> Trouble:
    """What it kept is there again."""

    def come() -> None:
        if isinstance(at.server, ValkeyServer):
            at.server.ask("SAVE")
        at.server.kill()

    return Trouble(come, at.server.start, HUNG, HUNG, UNREACHABLE, GONE_S)


def restarted_empty(at: Place) -> Trouble:
    """Blocks that are believed there are missing; that is no failure of the tier."""
    server = at.server

    def come() -> None:
        server.kill()
        if isinstance(server, ValkeyServer):
            (at.scratch / "server" / "dump.rdb").unlink(missing_ok=True)
        else:
            server.directory = at.scratch / "second"
            server.directory.mkdir()
        server.start()
        if isinstance(server, JuiceServer):
            server.make_bucket(BUCKET)

    # the connections that were open failed once
    return Trouble(come, lambda: None, None, None, None)


def out_of_memory(at: Place) -> Trouble:
    def limit(maxmemory: str) -> None:
        at.server.ask("CONFIG", "SET", "maxmemory", maxmemory)

    return Trouble(lambda: limit("1mb"), lambda: limit("0"), frozenset(), FULL, frozenset({"full"}))


def wrong_password(at: Place) -> Trouble:
    """The server forgets it while connections are open, and ends them."""

    def come() -> None:
        set_password(at, "another")
        at.server.ask("CLIENT", "KILL", "USER", "engine")

    return Trouble(come, lambda: set_password(at, "sesame"), *REFUSED)


def wrong_password_at_start(at: Place) -> Trouble:
    return Trouble(
        lambda: None, lambda: set_password(at, "sesame"), None, DENIED, DENIED_CAUSE, GONE_S
    )


def permission(at: Place) -> Trouble:
    """The user may not write any more."""

    def allow(rule: str) -> None:
        at.server.ask("ACL", "SETUSER", "engine", rule)

    return Trouble(
        lambda: allow("-mset"), lambda: allow("+mset"), frozenset(), DENIED, DENIED_CAUSE
    )


def loading(at: Place) -> Trouble:
    """Restarted with so much data that it takes a while."""
    server = at.server

    def come() -> None:
        server.ask("SAVE")
        delay_us = LOADING_S * 1e6 / int(server.ask("DBSIZE"))
        server.kill()
        server._options |= {"key-load-delay": f"{delay_us:.0f}"}
        server._options |= {"loading-process-events-interval-bytes": "1024"}
        server.start(until="LOADING")

    def go() -> None:
        # the one command of these that is carried out meanwhile
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(command("CONFIG", "SET", "key-load-delay", "0"))
            connection.recv(100)

    return Trouble(come, go, THROTTLED | LOST, THROTTLED | LOST, LATE | {"throttled"}, GONE_S)


SLOW: dict[str, Make] = {
    "delay_50ms": through_proxy(delay_s=0.05),
    "delay_500ms": through_proxy(delay_s=0.5),
    "resets": resets,
    "truncated": truncated,
    "silence": silence,
}

FAULTS: dict[str, dict[str, Make]] = {
    "object": {
        **SLOW,
        "http_500": answered(500, "InternalError", fault=ERROR, causes=frozenset({"other"})),
        "http_503": answered(503, "SlowDown", fault=THROTTLED, causes=THROTTLED_CAUSE),
        "http_429": answered(429, fault=THROTTLED, causes=THROTTLED_CAUSE),
        "expired_credentials": answered(403, "ExpiredToken", fault=DENIED, causes=DENIED_CAUSE),
        "killed": killed,
        "restarted_empty": restarted_empty,
    },
    "valkey": {
        **SLOW,
        "out_of_memory": out_of_memory,
        "permission_lost": permission,
        "wrong_password": wrong_password,
        "killed": killed,
        "loading": loading,
        "restarted_empty": restarted_empty,
    },
}

OVER_TLS: dict[str, Make] = {"expired_certificate": expired_certificate}

# what is wrong with a store for good is an error at start: only the rest is started with
AT_START: dict[str, dict[str, Make]] = {
    "object": {"not_there_at_start": not_there},
    "valkey": {
        "not_there_at_start": not_there,
        "other_authority_at_start": other_authority,
        "wrong_password_at_start": wrong_password_at_start,
    },
}
