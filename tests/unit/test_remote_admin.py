"""What the admin commands do with a URL before anything is asked, and how samples are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.core.types import BlockKey
from kvtier.errors import ConfigError
from kvtier.tiers.catalog import Page, RemoteBlock
from kvtier.tiers.catalog_survey import Cut, Survey, choose_cut
from kvtier.tiers.catalog_verify import sampled
from kvtier.tiers.registry import is_url, kind_of_url


def block(i: int, used_s: float | None = None, nbytes: int = 10) -> RemoteBlock:
    return RemoteBlock("ab", BlockKey(i.to_bytes(4, "big")), nbytes, None, used_s)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return " ".join(done.stderr.split())


def test_what_is_a_url() -> None:
    for text, kind in (
        ("s3://b", "object"),
        ("gs://b/p", "object"),
        ("az://b", "object"),
        ("valkey://h", "valkey"),
        ("valkeys://h", "valkey"),
        ("redis://h", "valkey"),
        ("rediss://me:secret@h:1/2", "valkey"),
    ):
        assert is_url(text)
        assert kind_of_url(text) == kind
    for text in ("/var/cache", "s3:/bucket", "a b://c", "", "./x://y"):
        assert not is_url(text)
    with pytest.raises(ConfigError, match="ftp:// leads to no tier") as refusal:
        kind_of_url("ftp://me:secret@h")
    assert "secret" not in str(refusal.value)


def test_places_that_do_not_go_together(tmp_path: Path) -> None:
    assert "give one URL" in refused("ls", "s3://a", "s3://b")
    assert "give one URL" in refused("evict", str(tmp_path), "s3://b", "--to-size", "0")
    for command in (("ls",), ("verify",), ("evict", "--to-size", "0"), ("wipe", "--all")):
        assert "--option is for a URL" in refused(*command, str(tmp_path), "-o", "a=b")


def test_only_directories_are_exported_and_imported(tmp_path: Path) -> None:
    archive = str(tmp_path / "x.tar")
    for url in ("s3://bucket/prefix", "valkey://me:secret@host"):
        for arguments in (("export", url, archive, "--namespace", "a"), ("import", archive, url)):
            message = refused(*arguments)
            assert "only directories of an fs tier can be exported and imported" in message
            assert "secret" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wanted", "population"), [(10, 300), (1, 300), (300, 300), (299, 300)])
def test_a_sample_has_its_size(wanted: int, population: int) -> None:
    blocks = [block(i) for i in range(population)]
    for _ in range(20):
        drawn = list(sampled(blocks, wanted, population))
        assert len(drawn) == len(set(drawn)) == wanted


def test_a_sample_takes_all_alike() -> None:
    counts = Counter(one.key for _ in range(3000) for one in sampled(map(block, range(10)), 3, 10))
    assert all(700 < counts[block(i).key] < 1100 for i in range(10))


def test_a_sample_of_a_listing_that_changed() -> None:
    assert len(list(sampled(map(block, range(5)), 3, 9))) <= 3
    assert len(list(sampled(map(block, range(50)), 3, 9))) == 3
    assert list(sampled([], 3, 9)) == []


def test_the_cut_is_where_enough_is_gone() -> None:
    found = Survey()
    found.add(Page([block(i, used_s=100.0 + i // 2) for i in range(10)], ["ab"], ["x"]))
    assert choose_cut(found, None, 100) is None
    assert choose_cut(found, None, 99) == Cut(None, 100, 1)
    assert choose_cut(found, None, 80) == Cut(None, 100, 20)
    assert choose_cut(found, None, 79) == Cut(None, 101, 21)
    assert choose_cut(found, 101.0, 0) == Cut(101.0, 104, 100)
    assert choose_cut(found, 101.0, None) == Cut(101.0)
    assert (found.blocks, found.nbytes, found.num_foreign, found.foreign) == (10, 100, 1, ["x"])
    assert found.namespaces["ab"].last_use_s == 104.0


def test_memory_does_not_grow_with_what_is_listed() -> None:
    found = Survey()
    for i in range(300):
        page = Page([block(1000 * i + j, used_s=5.0) for j in range(1000)], [], ["x"] * 1000)
        found.add(page)
    assert (found.blocks, found.num_foreign) == (300_000, 300_000)
    assert len(found.namespaces["ab"].by_second) == 1
    assert len(found.foreign) == 1000
