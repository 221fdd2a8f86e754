"""What the object tier makes of a store that misbehaves, in front of a real one."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

from object_tiers import BUCKET, certificate, get, open_tier, put, settings_for

from kvtier.core.types import Fault
from kvtier.drivers.faults import Cause, cause_of, fault_of
from kvtier.errors import (
    KVTierError,
    MissingBlockError,
    TierDeniedError,
    TierError,
    TierFullError,
    TierThrottledError,
    TierTimeoutError,
    TierUnreachableError,
)
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.http_proxy import Answer, HttpFaultProxy, Rule
from kvtier.testing.proxy import Behaviour, FaultProxy
from kvtier.testing.s3_servers import JuiceServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.objects import ObjectTier
    from kvtier.tiers.object.settings import ObjectSettings


@pytest.fixture
def tier(behind: ObjectSettings) -> Iterator[ObjectTier]:
    tier = open_tier(behind)
    put(tier, key_of(1))
    yield tier
    tier.close()


def answer(status: int, code: str = "", more: str = "") -> Answer:
    body = f"<Error><Code>{code}</Code><Message>words</Message>{more}</Error>" if code else ""
    return Answer(status, (("Retry-After", "1"),), body.encode())


OPERATIONS: dict[str, Callable[[ObjectTier], object]] = {
    "read": lambda tier: get(tier, key_of(1)),
    "write": lambda tier: put(tier, key_of(1)),
    "exists": lambda tier: tier.exists([key_of(2)]),
    "exists_of_many": lambda tier: tier.exists([key_of(i) for i in range(10, 50)]),
    "delete": lambda tier: tier.delete(key_of(1)),
    "open": lambda tier: open_tier(tier.settings, "ab" * 32),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("fault", "expected", "state"),
    [
        (answer(429), TierThrottledError, Fault.THROTTLED),
        (answer(503), TierThrottledError, Fault.THROTTLED),
        (answer(503, "SlowDown"), TierThrottledError, Fault.THROTTLED),
        (answer(500, "InternalError"), TierError, Fault.ERROR),
        (answer(502), TierUnreachableError, Fault.UNREACHABLE),
        (answer(504), TierUnreachableError, Fault.UNREACHABLE),
        (answer(401), TierDeniedError, Fault.DENIED),
        (answer(403, "AccessDenied"), TierDeniedError, Fault.DENIED),
        (answer(301), TierError, Fault.ERROR),
        (answer(507), TierFullError, Fault.FULL),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Answer) else "",
)
def test_states(proxy, tier, behind, operation, fault, expected, state) -> None:
    tier.settings = behind
    proxy.rules = [Rule(fault)]
    with pytest.raises(KVTierError) as raised:
        OPERATIONS[operation](tier)
    assert type(raised.value) is expected
    assert fault_of(raised.value) is state
    assert f"s3://{BUCKET}/" in str(raised.value)
    proxy.rules = []
    OPERATIONS[operation](tier)


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        (answer(403, "RequestTimeTooSkewed"), TierDeniedError, "clock is wrong"),
        (answer(400, "ExpiredToken"), TierDeniedError, "have expired"),
        (answer(403, "SignatureDoesNotMatch"), TierDeniedError, "secret key is not the one"),
        (answer(403, "QuotaExceeded"), TierFullError, "no room"),
        (answer(301), TierError, "another region: set region to the bucket's own"),
        (
            answer(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"),
            TierError,
            "set region to eu-west-3",
        ),
        (answer(404, "NoSuchBucket"), TierError, "the bucket does not exist"),
    ],
)
def test_causes_are_told_apart(proxy, tier, fault, expected, message) -> None:
    proxy.rules = [Rule(fault)]
    with pytest.raises(expected, match=message) as raised:
        put(tier, key_of(1))
    assert type(raised.value) is expected


@pytest.mark.parametrize("code", ["", "NoSuchKey"])
def test_a_put_that_finds_nothing_is_no_missing_block(proxy, tier, code) -> None:
    proxy.rules = [Rule(answer(404, code))]
    with pytest.raises(TierError, match="is the bucket there"):
        put(tier, key_of(1))
    proxy.rules = [Rule(answer(404, code), times=1)]
    put(tier, key_of(1))


def test_a_condition_that_the_server_does_not_know_is_left_out(proxy, behind, juice) -> None:
    proxy.rules = [Rule(answer(501, "NotImplemented"), method="PUT", times=1)]
    open_tier(behind).close()
    prefix = behind.url.removeprefix("s3:/")
    assert juice.request("GET", f"{prefix}/{NAMESPACE}/namespace.json")[0] == 200
    proxy.rules = [Rule(answer(409, "ConditionalRequestConflict"), method="PUT")]
    open_tier(behind).close()


def test_secrets_that_a_server_repeats_go_nowhere(proxy, tier) -> None:
    words = "<StringToSign>MARK3D</StringToSign><AWSAccessKeyId>MARK3D</AWSAccessKeyId>"
    for status, code in ((403, "SignatureDoesNotMatch"), (500, "X"), (503, "Y"), (404, "Z")):
        proxy.rules = [Rule(answer(status, code, words))]
        for operation in ("read", "write", "exists", "exists_of_many"):
            try:
                OPERATIONS[operation](tier)
            except KVTierError as error:
                shown = f"{error!r} {error.__cause__!r} {error.__context__!r}"
                assert "MARK3D" not in shown


def test_a_request_is_tried_again(proxy, behind) -> None:
    patient = settings_for(proxy, retries=2)
    tier = open_tier(patient)
    for fault in (answer(503, "SlowDown"), answer(500)):
        proxy.rules = [Rule(fault, times=2)]
        put(tier, key_of(1))
        proxy.rules = [Rule(fault, times=2)]
        assert get(tier, key_of(1)) == block_of(key_of(1))
        proxy.rules = [Rule(fault, times=3)]
        with pytest.raises(TierError):
            get(tier, key_of(1))
    tier.close()


@pytest.mark.parametrize("by_reset", [False, True])
def test_an_answer_that_is_cut_short(proxy, tier, by_reset) -> None:
    for operation in ("read", "exists", "exists_of_many"):
        proxy.behaviour = Behaviour(cut_after=100, cut_by_reset=by_reset)
        with pytest.raises(TierUnreachableError):
            OPERATIONS[operation](tier)
    proxy.behaviour = Behaviour()
    assert get(tier, key_of(1)) == block_of(key_of(1))


def test_a_body_that_is_cut_short(proxy, tier) -> None:
    proxy.behaviour = Behaviour(cut_after=BLOCK_BYTES // 2)
    with pytest.raises(TierUnreachableError, match=r"reading a block failed .*cut short"):
        get(tier, key_of(1))


@pytest.mark.parametrize("operation", ["read", "write", "exists"])
def test_a_silent_server_costs_the_timeout(proxy, tier, operation) -> None:
    proxy.behaviour = Behaviour(silent=True)
    with pytest.raises(TierTimeoutError, match="no answer in time") as raised:
        OPERATIONS[operation](tier)
    assert cause_of(raised.value) is Cause.TIMEOUT
    proxy.behaviour = Behaviour()
    OPERATIONS[operation](tier)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_server_that_is_gone_and_comes_back(proxy, tier, behind, operation) -> None:
    tier.settings = behind
    proxy.stop_listening()
    with pytest.raises(TierUnreachableError, match=r"refused|reset"):
        OPERATIONS[operation](tier)
    proxy.listen_again()
    OPERATIONS[operation](tier)


def test_a_host_that_does_not_exist(s3_credentials) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        os.environ.pop(name, None)
    settings = settings_for(FakeAddress(), timeout_s=2.0, retries=0)
    with pytest.raises(TierUnreachableError, match="cannot be resolved"):
        open_tier(settings)


class FakeAddress:
    address = ("kvtier.invalid", 80)


def test_a_killed_server_that_comes_back_empty(s3_credentials, tmp_path: Path) -> None:
    if not JuiceServer.is_installed():
        pytest.skip("needs pip install 'kvtier[servers]'")
    first = JuiceServer(tmp_path / "first")
    with first:
        first.make_bucket(BUCKET)
        tier = open_tier(settings_for(first, timeout_s=2.0, retries=0))
        put(tier, key_of(1))
        first.kill()
        with pytest.raises(TierUnreachableError):
            get(tier, key_of(1))
        second = JuiceServer(tmp_path / "second")
        second.take_the_place_of(first)
        with second:
            second.make_bucket(BUCKET)
            assert tier.exists([key_of(1)]) == [True], "it is believed"
            with pytest.raises(MissingBlockError):
                get(tier, key_of(1))
            assert tier.exists([key_of(1)]) == [False], "one read was the price"
            put(tier, key_of(1))
            assert get(tier, key_of(1)) == block_of(key_of(1))
    tier.close()


# --- TLS


def tls_settings(proxy: FaultProxy, **more) -> ObjectSettings:
    host, port = proxy.address
    options = {"endpoint": f"https://{host}:{port}", "allow_http": False, "retries": 0, **more}
    return settings_for(proxy, **options)


def test_tls_by_an_authority_of_ones_own(juice: S3Server, s3_credentials, tmp_path) -> None:
    server, bundle = certificate(tmp_path)
    with FaultProxy(juice.address, server) as proxy:
        tier = open_tier(tls_settings(proxy, ca_bundle=bundle))
        put(tier, key_of(1))
        assert get(tier, key_of(1)) == block_of(key_of(1))
        assert tier.exists([key_of(i) for i in range(40)]) == [i == 1 for i in range(40)]
        tier.close()


def test_certificates_that_are_not_trusted(juice, s3_credentials, tmp_path) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=20)
    expired = {"not_before": long_ago, "not_after": long_ago + timedelta(days=1)}
    for name, times, trusted, message in (
        ("127.0.0.1", {}, False, "unknown authority: set ca_bundle"),
        ("127.0.0.1", expired, True, "has expired"),
        ("other.example", {}, True, "for another host name"),
    ):
        server, bundle = certificate(tmp_path, name, **times)
        with FaultProxy(juice.address, server) as proxy:
            settings = tls_settings(proxy, ca_bundle=bundle if trusted else None)
            with pytest.raises(TierDeniedError, match=message):
                open_tier(settings)


# --- behind our back


def test_a_block_that_somebody_deleted_costs_one_read(tier, behind, juice) -> None:
    name = key_of(1).hex()
    path = f"{behind.url.removeprefix('s3:/')}/{NAMESPACE}/{name[:2]}/{name}"
    assert juice.request("GET", path) == (200, block_of(key_of(1)))
    assert juice.request("DELETE", path)[0] == 204
    assert tier.exists([key_of(1)]) == [True]
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert tier.exists([key_of(1)]) == [False]


@pytest.mark.parametrize("content", [b"", b"x", block_of(key_of(1)) + b"x"])
def test_a_block_of_another_length_is_removed(tier, behind, juice, content) -> None:
    name = key_of(1).hex()
    path = f"{behind.url.removeprefix('s3:/')}/{NAMESPACE}/{name[:2]}/{name}"
    assert juice.request("PUT", path, content)[0] == 200
    with pytest.raises(MissingBlockError):
        get(tier, key_of(1))
    assert tier.exists([key_of(1)]) == [False]
    if content:
        assert juice.request("GET", path)[0] == 404


def test_the_namespace_is_described_once(seaweed, s3_credentials) -> None:
    settings = settings_for(seaweed)
    from kvtier.tiers.object.objects import ObjectTier
    from kvtier.tiers.object.store import open_store

    for model in ("first", "second"):
        ObjectTier(open_store(settings), NAMESPACE, {"model": model}, settings).close()
    path = f"{settings.url.removeprefix('s3:/')}/{NAMESPACE}/namespace.json"
    assert seaweed.request("GET", path) == (200, b'{\n  "model": "first"\n}\n')


def test_batches_fail_block_by_block(proxy: HttpFaultProxy, tier: ObjectTier) -> None:
    keys = [key_of(i) for i in range(20, 40)]
    contents = [memoryview(block_of(key)) for key in keys]
    bad = keys[7].hex()
    proxy.rules = [Rule(answer(507), path=bad)]
    written = tier.write_batch(keys, [(view[:9], view[9:]) for view in contents])
    assert [type(error) for error in written] == [
        TierFullError if key.hex() == bad else type(None) for key in keys
    ]
    proxy.rules = []
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    read = tier.read_batch(keys, [(view[:9], view[9:]) for view in into])
    assert [type(error) for error in read] == [
        MissingBlockError if key.hex() == bad else type(None) for key in keys
    ]
    assert all(
        view == content
        for key, view, content in zip(keys, into, contents, strict=True)
        if key.hex() != bad
    )


def test_batches_go_side_by_side(proxy: HttpFaultProxy, behind: ObjectSettings) -> None:
    tier = open_tier(behind)  # 8 threads
    before = proxy.num_connections
    proxy.behaviour = Behaviour(silent=True)
    keys = [key_of(i) for i in range(8)]
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.extend(
            tier.write_batch(keys, [(memoryview(block_of(key)),) for key in keys])
        )
    )
    thread.start()
    waiting = threading.Event()
    for _ in range(2000):
        if proxy.num_connections - before >= 7:
            break
        waiting.wait(0.001)
    seen = proxy.num_connections - before
    proxy.behaviour = Behaviour()
    thread.join()
    assert seen >= 7, "one connection each, the first may be an old one"
    assert results == [None] * 8
    tier.close()
