"""`kvtier ls`, `verify`, `evict` and `wipe` of a bucket, where it differs from other places."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")
pytest.importorskip("typer")

import obstore
from object_place import FOREIGN, Bucket
from object_tiers import BUCKET
from remote_place import BLOCK, OTHER, facts, numbers, refusal, told

from kvtier.envelope import seal
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.testing.http_proxy import Answer, Rule
from kvtier.tiers.object.existence import path_of
from kvtier.tiers.object.lease import LEASE_FILE
from kvtier.tiers.object.tier_type import ObjectTierType

if TYPE_CHECKING:
    from kvtier.testing.http_proxy import HttpFaultProxy
    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.settings import ObjectSettings


@pytest.fixture
def bucket(juice: S3Server, s3_credentials: None) -> Bucket:
    return Bucket(juice)


def next_second() -> None:
    before = int(time.time())
    while int(time.time()) == before:
        time.sleep(0.01)


# --- ls


def test_ls_of_many_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.list_in_small_steps(monkeypatch)
    assert len(list(bucket.catalog().pages(NAMESPACE))) == 3


def test_blocks_say_when_they_were_written(bucket: Bucket) -> None:
    found = bucket.json("ls", "--blocks", NAMESPACE[:5])
    assert len(found["blocks"]) == 5
    assert all(abs(block["created_s"] - time.time()) < 60 for block in found["blocks"])


def test_an_empty_prefix(juice: S3Server, s3_credentials: None) -> None:
    options = ("-o", f"endpoint={juice.url}", "-o", "allow_http=true")
    done = told("ls", f"s3://{BUCKET}/nothing/here", *options)
    assert (done.exit_code, "0 namespaces, 0 blocks" in done.stdout) == (0, True)
    done = told("verify", f"s3://{BUCKET}/nothing/here", *options)
    assert (done.exit_code, "0 good blocks" in done.stdout) == (0, True)


# --- verify


def test_a_block_under_another_name_is_damage(bucket: Bucket) -> None:
    good = bytes(obstore.get(bucket.store.client, path_of(NAMESPACE, key_of(0))).bytes())
    obstore.put(bucket.store.client, path_of(NAMESPACE, key_of(50)), good)
    obstore.put(bucket.store.client, path_of(OTHER, key_of(0)), good)
    found = bucket.json("verify", "--repair", code=1)
    assert {one["reason"].split(":")[0] for one in found["damaged"]} == {"key", "namespace"}
    assert bucket.keys() == numbers(*range(5))
    assert bucket.keys(OTHER) == numbers(*range(10, 13))


def test_what_cannot_be_removed_is_told(seaweed: S3Server, s3_credentials, monkeypatch) -> None:
    bucket = Bucket(seaweed)
    bucket.damage()
    before = bucket.names()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mayread")
    found = bucket.json("verify", "--repair", code=1)
    assert all("cannot be removed" in one["reason"] for one in found["damaged"])
    assert not any(one["removed"] for one in found["damaged"])
    found = bucket.json("evict", "--to-size", "0", code=1)
    assert (found["removed"]["blocks"], len(found["removed"]["failures"])) == (0, 8)
    done = bucket.run("wipe", "--all", "--yes")
    assert done.exit_code == 1
    assert "cannot be removed" in done.stderr
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvtierkey")
    assert bucket.names() == before


# --- evict and wipe


def test_evict_by_age(bucket: Bucket) -> None:
    bucket.add_foreign()
    before = bucket.names()
    assert bucket.json("evict", "--older-than", "1h")["chosen"]["blocks"] == 0
    next_second()
    next_second()
    bucket.write(NAMESPACE, range(20, 22))
    before = bucket.names()
    done = bucket.json("evict", "--older-than", "1s", "--namespace", NAMESPACE, "--dry-run")
    assert done["chosen"]["blocks"] == 5
    assert (done["dry_run"], done["removed"]["blocks"]) == (True, 0)
    assert done["of"] == {"blocks": 7, "bytes": 7 * BLOCK}
    assert bucket.names() == before
    text = bucket.run("evict", "--older-than", "1s", "--namespace", NAMESPACE, "--dry-run").stdout
    assert text.startswith("would evict 5 blocks, 340.0 KiB, last written ")
    text = bucket.run("evict", "--older-than", "1s", "--namespace", NAMESPACE).stdout
    assert text.startswith("evicted 5 blocks, 340.0 KiB, last written ")
    gone = {name for i in range(5) for name in bucket.names_of(i)}
    assert bucket.names() == before - gone, "the other namespace and what is foreign stays"


def test_evict_to_a_size_takes_the_oldest(bucket: Bucket) -> None:
    bucket.add_foreign()
    next_second()
    bucket.write(NAMESPACE, range(20, 24))
    before = bucket.names()
    arguments = ("--to-size", str(6 * BLOCK), "--namespace", NAMESPACE)
    done = bucket.json("evict", *arguments, "--dry-run")
    assert (done["chosen"]["blocks"], done["chosen"]["bytes"]) == (3, 3 * BLOCK)
    assert bucket.names() == before
    assert bucket.json("evict", *arguments)["removed"]["blocks"] == 3
    assert bucket.keys() > numbers(*range(20, 24)), "the younger ones are all there"
    assert len(bucket.keys()) == 6
    assert bucket.keys(OTHER) == numbers(*range(10, 13))
    assert "nothing to evict" in bucket.run("evict", *arguments).stdout
    done = bucket.json("evict", "--to-size", "0", "--older-than", "1h")
    assert done["removed"]["blocks"] == 0, "whatever ends first"
    assert bucket.json("evict", "--to-size", "0")["removed"]["blocks"] == 9
    assert {*FOREIGN, LEASE_FILE, f"{OTHER}/namespace.json"} <= bucket.names()


# --- what cannot work


def test_errors_are_one_line_and_change_nothing(bucket: Bucket, monkeypatch) -> None:
    def refused(*more: str, url: str = bucket.url, command: str = "ls") -> str:
        return refusal(command, url, *bucket.options, *more)

    before = bucket.names()
    assert "the bucket does not exist" in refused(url="s3://kvtier-nowhere/x")
    assert "colour is no option of this tier" in refused("-o", "colour=red")
    assert "did you mean 'endpoint'" in refused("-o", "endpiont=x")
    assert "Expected `int" in refused("-o", "threads=many")
    assert "must be NAME=VALUE" in refused("-o", "threads")
    assert "begins no digest" in refused("--blocks", "0" * 64)
    assert NAMESPACE[:16] in refused("--namespace", "0" * 9, command="verify")
    assert "must be 1 to 64 digits" in refused("--namespace", "*", "--yes", command="wipe")
    assert "nothing says what to evict" in refused(command="evict")
    assert "--older-than = '5'" in refused("--older-than", "5", command="evict")
    assert "--sample = 'x'" in refused("--sample", "x", command="verify")
    assert "is_secret" not in refused(url="s3://me:is_secret@bucket/x")
    assert "timeout_s" in refused("-o", "timeout_s=0")
    away = ("-o", "endpoint=http://127.0.0.1:9", "-o", "retries=0")
    assert "connection refused" in refused(*away)
    assert bucket.names() == before
    for digest in ("4" * 64, "4" + "5" * 63):
        obstore.put(bucket.store.client, f"{digest}/namespace.json", b"{}")
    assert "begins several digests" in refused("--blocks", "4")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "is_secret")
    message = refused()
    assert "secret key is not the one" in message
    assert "is_secret" not in message


def test_answers_without_a_code(proxy: HttpFaultProxy, behind: ObjectSettings) -> None:
    options = ("-o", f"endpoint={behind.endpoint}", "-o", "allow_http=true", "-o", "retries=0")
    for status, message in ((404, "listing failed (404)"), (403, "refused"), (503, "fewer")):
        proxy.rules = [Rule(Answer(status), method="GET")]
        done = told("ls", behind.url, *options)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_store_that_fails_in_the_middle(proxy: HttpFaultProxy, behind: ObjectSettings) -> None:
    tier = ObjectTierType().open(behind, NAMESPACE, facts(NAMESPACE, None))
    for i in range(30):
        row = memoryview(block_of(key_of(i)))
        tier.write(key_of(i), (memoryview(seal(NAMESPACE, key_of(i), row, 1)), row))
    tier.close()
    options = ("-o", f"endpoint={behind.endpoint}", "-o", "allow_http=true", "-o", "retries=0")
    in_a_block = f"{NAMESPACE}/"
    proxy.rules = [Rule(Answer(500), method="GET", path=in_a_block, times=3)]
    done = told("verify", behind.url, *options, "--repair", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["blocks"], len(found["damaged"])) == (1, 27, 3)
    assert not any(one["removed"] for one in found["damaged"])
    proxy.rules = [Rule(Answer(500), method="GET", path=in_a_block)]
    done = told("verify", behind.url, *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    proxy.rules = []
    done = told("verify", behind.url, *options)
    assert (done.exit_code, "30 good blocks" in done.stdout) == (0, True)
