"""`kvtier ls`, `verify`, `evict` and `wipe` of a bucket, over what the tier itself wrote."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("typer")

import obstore
from object_tiers import BUCKET, settings_for
from typer.testing import CliRunner, Result

from kvtier.cli.app import app
from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES, seal
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.http_proxy import Answer, Rule
from kvtier.tiers.object import catalog as module
from kvtier.tiers.object.catalog import ObjectCatalog
from kvtier.tiers.object.existence import path_of
from kvtier.tiers.object.lease import LEASE_FILE
from kvtier.tiers.object.store import open_store
from kvtier.tiers.object.tier_type import ObjectTierType

if TYPE_CHECKING:
    from kvtier.testing.http_proxy import HttpFaultProxy
    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.settings import ObjectSettings

OTHER = hashlib.sha256(b"another").hexdigest()
BLOCK = HEADER_BYTES + BLOCK_BYTES
FOREIGN = [
    "README",
    f"{NAMESPACE}/ab/notes.txt",
    f"{NAMESPACE}/zz/" + "ab" * 36,
    f"{NAMESPACE}/ab/" + "cd" * 36,
    f"{NAMESPACE}/more/ab/" + "ab" * 36,
    "dataset/ab/" + "ab" * 36,
]
FOREIGN_SHOWN = [*FOREIGN[:-1], "dataset/"]


def facts(namespace: str, label: str | None) -> dict[str, Any]:
    described = {"architectures": ["TinyForCausalLM"], "model_dtype": "bfloat16"}
    described |= {"layout": {"row_bytes": BLOCK_BYTES}}  # type: ignore[dict-item]
    return {"digest": namespace, "label": label, "facts": described}


class Bucket:
    """Two namespaces of the tier's own, of 5 and 3 blocks."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.settings = settings_for(server)
        self.store = open_store(self.settings)
        for namespace, numbers in ((NAMESPACE, range(5)), (OTHER, range(10, 13))):
            self.write(namespace, numbers)

    def write(self, namespace: str, numbers: range) -> None:
        label = "prod" if namespace == NAMESPACE else None
        tier = ObjectTierType().open(self.settings, namespace, facts(namespace, label))
        for i in numbers:
            row = memoryview(block_of(key_of(i)))
            header = seal(namespace, key_of(i), row, time.time_ns())
            tier.write(key_of(i), (memoryview(header), row))
        tier.close()

    def add_foreign(self) -> None:
        for path in FOREIGN:
            obstore.put(self.store.client, path, b"not ours")
        obstore.put(self.store.client, LEASE_FILE, b"{}")
        obstore.put(self.store.client, ".kvtier-try-1", b"x")

    def run(self, command: str, *arguments: str, stdin: str | None = None) -> Result:
        options = ("-o", f"endpoint={self.server.url}", "-o", "allow_http=true")
        return CliRunner().invoke(
            app, [command, self.settings.url, *options, *arguments], input=stdin
        )

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        done = self.run(command, *arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def paths(self) -> set[str]:
        return {entry["path"] for entry in obstore.list(self.store.client).collect()}

    def keys(self, namespace: str = NAMESPACE) -> set[BlockKey]:
        every = {key_of(i) for i in range(100)}
        paths = self.paths()
        return {key for key in every if path_of(namespace, key) in paths}

    def damage(self) -> tuple[BlockKey, BlockKey]:
        """Flip a byte of a block, cut another one."""
        flipped, cut = key_of(1), key_of(3)
        path = path_of(NAMESPACE, flipped)
        data = bytearray(bytes(obstore.get(self.store.client, path).bytes()))
        data[HEADER_BYTES + 777] ^= 1
        obstore.put(self.store.client, path, bytes(data))
        path = path_of(NAMESPACE, cut)
        whole = bytes(obstore.get(self.store.client, path).bytes())
        obstore.put(self.store.client, path, whole[:-100])
        return flipped, cut


@pytest.fixture
def bucket(juice: S3Server, s3_credentials: None) -> Bucket:
    return Bucket(juice)


@pytest.fixture(params=["juice", "seaweed"])
def any_bucket(request: pytest.FixtureRequest, s3_credentials: None) -> Bucket:
    return Bucket(request.getfixturevalue(request.param))


def next_second() -> None:
    before = int(time.time())
    while int(time.time()) == before:
        time.sleep(0.01)


def numbers(*which: int) -> set[BlockKey]:
    return {key_of(i) for i in which}


# --- ls


def test_ls_counts_what_the_tier_wrote(any_bucket: Bucket) -> None:
    any_bucket.add_foreign()
    found = any_bucket.json("ls")
    assert found["total"] == {"namespaces": 2, "blocks": 8, "bytes": 8 * BLOCK}
    assert sorted(found["foreign"]["paths"]) == sorted(FOREIGN_SHOWN)
    assert found["foreign"]["count"] == 6
    rows = {row["namespace"]: row for row in found["namespaces"]}
    first, second = rows[NAMESPACE], rows[OTHER]
    assert (first["blocks"], first["bytes"]) == (5, 5 * BLOCK)
    assert (second["blocks"], second["bytes"]) == (3, 3 * BLOCK)
    assert first["layouts"]["objects"]["blocks"] == 5
    assert first["description"] == facts(NAMESPACE, "prod")
    assert (first["label"], first["live"], first["last_use_s"]) == ("prod", None, None)
    assert abs(first["created_s"] - time.time()) < 60
    assert found["roots"] == [first["root"]] == [any_bucket.settings.url]


def test_ls_for_people(bucket: Bucket) -> None:
    bucket.add_foreign()
    done = bucket.run("ls")
    assert done.exit_code == 0
    for words in (NAMESPACE[:16], OTHER[:16], "prod", "TinyForCausalLM bfloat16", "64.0 KiB"):
        assert words in done.stdout
    assert "2 namespaces, 8 blocks, 544.0 KiB" in done.stdout
    assert "6 foreign objects, left alone:" in done.stderr
    assert "dataset/" in done.stderr


def test_ls_of_many_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_KEYS", 2)
    assert bucket.json("ls")["total"]["blocks"] == 8
    assert len(list(ObjectCatalog(bucket.settings, "x").pages(NAMESPACE))) == 3


def test_ls_of_blocks(bucket: Bucket) -> None:
    found = bucket.json("ls", "--blocks", NAMESPACE[:5])
    assert found["namespace"] == NAMESPACE
    assert {bytes.fromhex(block["key"]) for block in found["blocks"]} == numbers(*range(5))
    assert {block["bytes"] for block in found["blocks"]} == {BLOCK}
    assert all(abs(block["created_s"] - time.time()) < 60 for block in found["blocks"])
    lines = bucket.run("ls", "--blocks", NAMESPACE[:5]).stdout.splitlines()
    assert {line.split()[-1] for line in lines[1:]} == {key_of(i).hex() for i in range(5)}


def test_an_empty_prefix(juice: S3Server, s3_credentials: None) -> None:
    options = ("-o", f"endpoint={juice.url}", "-o", "allow_http=true")
    done = CliRunner().invoke(app, ["ls", f"s3://{BUCKET}/nothing/here", *options])
    assert (done.exit_code, "0 namespaces, 0 blocks" in done.stdout) == (0, True)
    done = CliRunner().invoke(app, ["verify", f"s3://{BUCKET}/nothing/here", *options])
    assert (done.exit_code, "0 good blocks" in done.stdout) == (0, True)


# --- verify


def test_verify_finds_damage_and_repairs_it(any_bucket: Bucket) -> None:
    assert any_bucket.json("verify")["blocks"] == 8
    any_bucket.add_foreign()
    before = any_bucket.paths()
    flipped, cut = any_bucket.damage()
    for _ in range(2):  # looking changes nothing
        found = any_bucket.json("verify", code=1)
        assert (found["blocks"], found["ok"], found["vanished"]) == (6, False, 0)
        reasons = {bytes.fromhex(one["key"]): one for one in found["damaged"]}
        assert set(reasons) == {flipped, cut}
        assert reasons[flipped]["reason"].startswith("payload checksum")
        assert reasons[cut]["reason"].startswith("length")
        assert not any(one["removed"] for one in found["damaged"])
        assert any_bucket.paths() == before
    found = any_bucket.json("verify", "--repair", code=1)
    assert all(one["removed"] for one in found["damaged"])
    gone = {path_of(NAMESPACE, key) for key in (flipped, cut)}
    assert any_bucket.paths() == before - gone
    done = any_bucket.run("verify")
    assert (done.exit_code, "6 good blocks" in done.stdout) == (0, True)


def test_a_block_under_another_name_is_damage(bucket: Bucket) -> None:
    good = bytes(obstore.get(bucket.store.client, path_of(NAMESPACE, key_of(0))).bytes())
    obstore.put(bucket.store.client, path_of(NAMESPACE, key_of(50)), good)
    obstore.put(bucket.store.client, path_of(OTHER, key_of(0)), good)
    found = bucket.json("verify", "--repair", code=1)
    assert {one["reason"].split(":")[0] for one in found["damaged"]} == {"key", "namespace"}
    assert bucket.keys() == numbers(*range(5))
    assert bucket.keys(OTHER) == numbers(*range(10, 13))


def test_verify_of_one_namespace_and_of_samples(bucket: Bucket) -> None:
    bucket.damage()
    assert bucket.json("verify", "--namespace", OTHER[:8])["blocks"] == 3
    found = bucket.json("verify", "--namespace", NAMESPACE[:8], code=1)
    assert (found["blocks"], len(found["damaged"])) == (3, 2)
    for sample, count in (("2", 2), ("100", 3), ("34%", 1), ("100%", 3)):
        found = bucket.json("verify", "--namespace", OTHER, "--sample", sample)
        assert found["blocks"] == count, sample


def test_a_block_that_is_written_again_meanwhile_is_not_removed(bucket: Bucket) -> None:
    bucket.damage()
    catalog = ObjectCatalog(bucket.settings, "x")
    blocks = {block.key: block for page in catalog.pages(NAMESPACE) for block in page.blocks}

    def rewritten_while_it_is_judged(_: object) -> bool:
        bucket.write(NAMESPACE, range(1, 2))
        return True

    assert not catalog.remove_if(blocks[key_of(1)], rewritten_while_it_is_judged)
    assert not catalog.remove_if(blocks[key_of(0)], lambda _: False)
    assert bucket.keys() == numbers(*range(5))
    assert catalog.remove_if(blocks[key_of(3)], lambda _: True)
    assert bucket.keys() == numbers(0, 1, 2, 4)
    catalog.close()


def test_what_cannot_be_removed_is_told(seaweed: S3Server, s3_credentials, monkeypatch) -> None:
    bucket = Bucket(seaweed)
    bucket.damage()
    before = bucket.paths()
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
    assert bucket.paths() == before


# --- evict and wipe


def test_evict_by_age(bucket: Bucket) -> None:
    bucket.add_foreign()
    before = bucket.paths()
    assert bucket.json("evict", "--older-than", "1h")["chosen"]["blocks"] == 0
    next_second()
    next_second()
    bucket.write(NAMESPACE, range(20, 22))
    before = bucket.paths()
    done = bucket.json("evict", "--older-than", "1s", "--namespace", NAMESPACE, "--dry-run")
    assert done["chosen"]["blocks"] == 5
    assert (done["dry_run"], done["removed"]["blocks"]) == (True, 0)
    assert done["of"] == {"blocks": 7, "bytes": 7 * BLOCK}
    assert bucket.paths() == before
    text = bucket.run("evict", "--older-than", "1s", "--namespace", NAMESPACE, "--dry-run").stdout
    assert text.startswith("would evict 5 blocks, 340.0 KiB, last written ")
    text = bucket.run("evict", "--older-than", "1s", "--namespace", NAMESPACE).stdout
    assert text.startswith("evicted 5 blocks, 340.0 KiB, last written ")
    gone = {path_of(NAMESPACE, key_of(i)) for i in range(5)}
    assert bucket.paths() == before - gone, "the other namespace and what is foreign stays"


def test_evict_to_a_size_takes_the_oldest(bucket: Bucket) -> None:
    bucket.add_foreign()
    next_second()
    bucket.write(NAMESPACE, range(20, 24))
    before = bucket.paths()
    arguments = ("--to-size", str(6 * BLOCK), "--namespace", NAMESPACE)
    done = bucket.json("evict", *arguments, "--dry-run")
    assert (done["chosen"]["blocks"], done["chosen"]["bytes"]) == (3, 3 * BLOCK)
    assert bucket.paths() == before
    assert bucket.json("evict", *arguments)["removed"]["blocks"] == 3
    assert bucket.keys() > numbers(*range(20, 24)), "the younger ones are all there"
    assert len(bucket.keys()) == 6
    assert bucket.keys(OTHER) == numbers(*range(10, 13))
    assert "nothing to evict" in bucket.run("evict", *arguments).stdout
    done = bucket.json("evict", "--to-size", "0", "--older-than", "1h")
    assert done["removed"]["blocks"] == 0, "whatever ends first"
    assert bucket.json("evict", "--to-size", "0")["removed"]["blocks"] == 9
    assert {*FOREIGN, LEASE_FILE, f"{OTHER}/namespace.json"} <= bucket.paths()


def test_wipe_of_one_and_of_all(any_bucket: Bucket) -> None:
    any_bucket.add_foreign()
    before = any_bucket.paths()
    done = any_bucket.run("wipe", "--all")
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert any_bucket.run("wipe", "--yes").exit_code == 2
    assert any_bucket.paths() == before
    found = any_bucket.json("wipe", "--namespace", OTHER[:6], "--yes")
    assert [(row["namespace"], row["gone"], row["blocks"]) for row in found["namespaces"]] == [
        (OTHER, True, 3)
    ]
    assert any_bucket.paths() == {path for path in before if not path.startswith(OTHER)}
    done = any_bucket.run("wipe", "--all", "--yes")
    assert (done.exit_code, done.stdout) == (0, "removed 5 blocks, 340.0 KiB, of 1 namespace\n")
    assert "6 foreign objects" in done.stderr
    assert any_bucket.paths() == {*FOREIGN, LEASE_FILE, ".kvtier-try-1"}


# --- what cannot work


def test_errors_are_one_line_and_change_nothing(bucket: Bucket, monkeypatch) -> None:
    def told(url: str, *more: str, command: str = "ls") -> str:
        options = ("-o", f"endpoint={bucket.server.url}", "-o", "allow_http=true")
        done = CliRunner().invoke(app, [command, url, *options, *more])
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr.startswith("kvtier: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr

    url = bucket.settings.url
    assert "the bucket does not exist" in told("s3://kvtier-nowhere/x")
    assert "colour is no option of this tier" in told(url, "-o", "colour=red")
    assert "did you mean 'endpoint'" in told(url, "-o", "endpiont=x")
    assert "Expected `int" in told(url, "-o", "threads=many")
    assert "must be NAME=VALUE" in told(url, "-o", "threads")
    assert "begins no digest" in told(url, "--blocks", "0" * 64)
    assert NAMESPACE[:16] in told(url, "--namespace", "0" * 9, command="verify")
    assert "begins several digests" in told(bucket_with_a_shared_digit(bucket), "--blocks", "4")
    assert "must be 1 to 64 digits" in told(url, "--namespace", "*", "--yes", command="wipe")
    assert "nothing says what to evict" in told(url, command="evict")
    assert "--older-than = '5'" in told(url, "--older-than", "5", command="evict")
    assert "--sample = 'x'" in told(url, "--sample", "x", command="verify")
    assert "is_secret" not in told("s3://me:is_secret@bucket/x")
    assert "timeout_s" in told(url, "-o", "timeout_s=0")
    away = ("-o", "endpoint=http://127.0.0.1:9", "-o", "retries=0")
    assert "connection refused" in told(url, *away)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "is_secret")
    message = told(url)
    assert "secret key is not the one" in message
    assert "is_secret" not in message


def test_answers_without_a_code(proxy: HttpFaultProxy, behind: ObjectSettings) -> None:
    options = ("-o", f"endpoint={behind.endpoint}", "-o", "allow_http=true", "-o", "retries=0")
    for status, message in ((404, "listing failed (404)"), (403, "refused"), (503, "fewer")):
        proxy.rules = [Rule(Answer(status), method="GET")]
        done = CliRunner().invoke(app, ["ls", behind.url, *options])
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
    done = CliRunner().invoke(app, ["verify", behind.url, *options, "--repair", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["blocks"], len(found["damaged"])) == (1, 27, 3)
    assert not any(one["removed"] for one in found["damaged"])
    proxy.rules = [Rule(Answer(500), method="GET", path=in_a_block)]
    done = CliRunner().invoke(app, ["verify", behind.url, *options])
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    proxy.rules = []
    done = CliRunner().invoke(app, ["verify", behind.url, *options])
    assert (done.exit_code, "30 good blocks" in done.stdout) == (0, True)


def bucket_with_a_shared_digit(bucket: Bucket) -> str:
    for digest in ("4" * 64, "4" + "5" * 63):
        obstore.put(bucket.store.client, f"{digest}/namespace.json", b"{}")
    return bucket.settings.url
