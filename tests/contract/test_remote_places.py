"""`kvtier ls`, `verify` and `wipe` over what a remote tier itself wrote, wherever that is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")

from remote_place import BLOCK, OTHER, RemotePlace, facts, numbers

from kvtier.testing.blocks import NAMESPACE, key_of

if TYPE_CHECKING:
    from object_place import Bucket
    from valkey_place import Keyspace


def bucket(request: pytest.FixtureRequest, server: str) -> Bucket:
    pytest.importorskip("obstore")
    from object_place import Bucket

    request.getfixturevalue("s3_credentials")
    return Bucket(request.getfixturevalue(server))


def keyspace(request: pytest.FixtureRequest) -> Keyspace:
    pytest.importorskip("glide_sync")
    from valkey_place import Keyspace

    if request.param == "cluster":
        return Keyspace(*request.getfixturevalue("valkey_nodes"))
    return Keyspace(request.getfixturevalue("valkey_server"))


def place_of(request: pytest.FixtureRequest) -> RemotePlace:
    if request.param in ("valkey", "cluster"):
        return keyspace(request)
    return bucket(request, request.param)


@pytest.fixture(params=["juice", "valkey"])
def place(request: pytest.FixtureRequest) -> RemotePlace:
    return place_of(request)


@pytest.fixture(params=["juice", "seaweed", "valkey", "cluster"])
def any_place(request: pytest.FixtureRequest) -> RemotePlace:
    return place_of(request)


# --- ls


def test_ls_counts_what_the_tier_wrote(any_place: RemotePlace) -> None:
    any_place.add_foreign()
    found = any_place.json("ls")
    assert found["total"] == {"namespaces": 2, "blocks": 8, "bytes": 8 * BLOCK}
    assert sorted(found["foreign"]["paths"]) == sorted(any_place.foreign_shown)
    assert found["foreign"]["count"] == len(any_place.foreign_shown)
    rows = {row["namespace"]: row for row in found["namespaces"]}
    first, second = rows[NAMESPACE], rows[OTHER]
    assert (first["blocks"], first["bytes"]) == (5, 5 * BLOCK)
    assert (second["blocks"], second["bytes"]) == (3, 3 * BLOCK)
    assert first["layouts"][any_place.layout]["blocks"] == 5
    assert first["description"] == facts(NAMESPACE, "prod")
    assert (first["label"], first["live"]) == ("prod", None)
    assert abs(first["created_s"] - time.time()) < 60
    if any_place.tells_uses:
        assert abs(first["last_use_s"] - time.time()) < 60
    else:
        assert first["last_use_s"] is None
    assert found["roots"] == [first["root"]] == [any_place.root]


def test_ls_for_people(place: RemotePlace) -> None:
    place.add_foreign()
    done = place.run("ls")
    assert done.exit_code == 0
    for words in (NAMESPACE[:16], OTHER[:16], "prod", "TinyForCausalLM bfloat16", "64.0 KiB"):
        assert words in done.stdout
    assert "2 namespaces, 8 blocks, 544.0 KiB" in done.stdout
    count = len(place.foreign_shown)
    assert f"{count} foreign {place.foreign_noun}, left alone:" in done.stderr
    assert min(place.foreign_shown) in done.stderr
    assert "count" not in done.stderr, "no advice: the server is new enough"


def test_ls_in_small_steps(place: RemotePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.list_in_small_steps(monkeypatch)
    assert place.json("ls")["total"] == {"namespaces": 2, "blocks": 8, "bytes": 8 * BLOCK}


def test_ls_of_blocks(place: RemotePlace) -> None:
    found = place.json("ls", "--blocks", NAMESPACE[:5])
    assert found["namespace"] == NAMESPACE
    assert {bytes.fromhex(block["key"]) for block in found["blocks"]} == numbers(*range(5))
    assert {block["bytes"] for block in found["blocks"]} == {BLOCK}
    assert place.json("ls", "--blocks", NAMESPACE)["namespace"] == NAMESPACE
    lines = place.run("ls", "--blocks", NAMESPACE[:5]).stdout.splitlines()
    assert {line.split()[-1] for line in lines[1:]} == {key_of(i).hex() for i in range(5)}


# --- verify


def test_verify_finds_damage_and_repairs_it(any_place: RemotePlace) -> None:
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
    assert any_place.names() == before - any_place.names_of(1) - any_place.names_of(3)
    done = any_place.run("verify")
    assert (done.exit_code, "6 good blocks" in done.stdout) == (0, True)


def test_verify_of_one_namespace_and_of_samples(place: RemotePlace) -> None:
    place.damage()
    assert place.json("verify", "--namespace", OTHER[:8])["blocks"] == 3
    found = place.json("verify", "--namespace", NAMESPACE[:8], code=1)
    assert (found["blocks"], len(found["damaged"])) == (3, 2)
    for sample, count in (("2", 2), ("100", 3), ("34%", 1), ("100%", 3)):
        found = place.json("verify", "--namespace", OTHER, "--sample", sample)
        assert found["blocks"] == count, sample


def test_a_block_that_is_written_again_meanwhile_is_not_removed(any_place: RemotePlace) -> None:
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


# --- wipe


def test_wipe_of_one_and_of_all(any_place: RemotePlace) -> None:
    foreign = any_place.add_foreign()
    any_place.lose_a_part(12, OTHER)  # half a block goes as well
    before = any_place.names()
    done = any_place.run("wipe", "--all")
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert any_place.run("wipe", "--yes").exit_code == 2
    assert any_place.names() == before
    found = any_place.json("wipe", "--namespace", OTHER[:6], "--yes")
    assert [(row["namespace"], row["gone"], row["blocks"]) for row in found["namespaces"]] == [
        (OTHER, True, 3)
    ]
    assert any_place.names() == {name for name in before if not any_place.is_of(name, OTHER)}
    done = any_place.run("wipe", "--all", "--yes")
    assert (done.exit_code, done.stdout) == (0, "removed 5 blocks, 340.0 KiB, of 1 namespace\n")
    assert f"{len(any_place.foreign_shown)} foreign {any_place.foreign_noun}" in done.stderr
    assert any_place.names() == foreign
