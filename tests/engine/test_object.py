"""Engines over an object store that is another program, which is killed and comes back."""

from __future__ import annotations

import pytest
from remote_tiers import BUCKET, IMPATIENT, object_environment, object_tier
from small_engines import comes_back

pytest.importorskip("obstore")

from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.testing.proxy import Behaviour
from kvtier.testing.s3_servers import JuiceServer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not JuiceServer.is_installed():
        pytest.skip("needs pip install 'kvtier[servers]'")
    with JuiceServer(tmp_path_factory.mktemp("juice")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def proxy(server):
    with HttpFaultProxy(server.address) as proxy:
        yield proxy


def start(engines, *tiers, **more):
    return engines.start(
        "gqa", environment=object_environment(), secondary_tiers=list(tiers), **more
    )


def test_two_engines_share_a_bucket_and_tenants_do_not(engines, proxy, prompt) -> None:
    first = start(engines, object_tier(proxy, "shared"))
    prompts = [prompt(500), prompt(300)]
    expected = first.reference(*prompts)
    assert first.generate(prompts[0], salt="tenant").cached == 0
    first.drop_pool()
    answer = first.generate(*prompts)
    assert answer.tokens == expected
    assert answer.tiers == {"object": 480 + 288}
    second = start(engines, object_tier(proxy, "shared"))
    answer = second.generate(*prompts)
    assert answer.tokens == expected
    assert answer.tiers == {"object": 480 + 288}
    assert second.generate(prompts[0], salt="other").cached == 0
    answer = second.generate(prompts[0], salt="tenant")
    assert (answer.tiers, answer.tokens) == ({"object": 480}, expected[:1])
    second.stop()
    first.stop()


def test_a_store_that_fails_in_every_way_costs_its_hits_alone(engines, proxy, prompt) -> None:
    engine = start(
        engines,
        object_tier(proxy, "faults", **IMPATIENT),
        tier_failures_max=2,
        tier_backoff_ms=200,
        max_wait_ms=5000,
    )
    asked = prompt(500)
    expected = engine.reference(asked)
    faults = [
        {"rules": [Rule(Answer(503, (("Retry-After", "1"),)))]},
        {"rules": [Rule(Answer(403))]},
        {"rules": [Rule(Answer(500))]},
        {"behaviour": Behaviour(silent=True)},
        {"behaviour": Behaviour(cut_after=1000)},
        {"behaviour": Behaviour(refuse=True)},
    ]
    for fault in faults:
        for name, value in fault.items():
            setattr(proxy, name, value)
        proxy.reset_connections()
        engine.drop_pool()
        answer = engine.generate(asked)
        assert answer.tokens == expected, fault
        assert answer.cached == 0, fault
        proxy.rules, proxy.behaviour = [], Behaviour()
        comes_back(engine, asked, expected, "object")
    engine.stop()


def test_a_killed_server_comes_back(engines, server, proxy, prompt, tmp_path) -> None:
    files = {"type": "fs", "root_dir": str(tmp_path)}
    engine = start(engines, files, object_tier(proxy, "killed", **IMPATIENT), tier_backoff_ms=200)
    asked = prompt(500)
    expected = engine.reference(asked)
    server.kill()
    proxy.reset_connections()
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert answer.tiers == {"fs": 480}
    later = prompt(300)
    later_expected = engine.reference(later)
    server.start()
    engine.stop()
    again = start(engines, object_tier(proxy, "killed"))
    answer = again.generate(asked)
    assert (answer.tokens, answer.tiers) == (expected, {"object": 480})
    assert again.generate(later).tokens == later_expected
    again.stop()
