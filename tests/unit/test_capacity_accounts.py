from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtier.tiers.fs import accounts as books
from kvtier.tiers.fs.accounts import UNBOUNDED, Accounts, Entry, Mark, Report

LIMIT = 40
DIRECTORIES = 3


@dataclass
class Process:
    """What a member knows of itself. Truth, not books."""

    spare: int = 0
    returned: int = 0
    flying: list[int] = field(default_factory=list)  # sizes taken, not on disk yet
    taken: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Comparison:
    mark: Mark
    evicted_before: int
    found: int = 0
    next_directory: int = 0
    evicted_at_end: int = 0
    awaited: dict[str, int] | None = None


class Truth(RuleBasedStateMachine):
    """Members write, delete, report and die while a slow inventory is made, in units of one byte.

    What lies on disk and what living members may still write never passes what was granted, so it
    never passes the limit. And when all is quiet, one inventory makes the books exact.
    """

    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts(known=True)
        self.processes: dict[str, Process] = {}
        self.disk: dict[int, tuple[int, int]] = {}  # file -> directory, size
        self.seen: dict[int, int] = {}  # the sweeper's inventory: file -> size
        self.numbers = iter(range(10**9))
        self.evicted = 0
        self.comparison: Comparison | None = None

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        for _ in range(count):
            self.join()

    @rule()
    @precondition(lambda self: len(self.processes) < 4)
    def join(self) -> None:
        name = f"m{next(self.numbers)}"
        self.processes[name] = Process()
        self.accounts.members[name] = Entry(capacity=LIMIT)
        books.set_limit(self.accounts, UNBOUNDED)

    def tell(self, name: str) -> Report:
        process = self.processes[name]
        told = Report(process.spare, sum(process.taken), process.returned, 0)
        process.returned = 0
        books.report(self.accounts, name, told)
        books.set_limit(self.accounts, UNBOUNDED)
        return told

    @rule(data=st.data(), size=st.integers(1, 6), chunk=st.integers(1, 12))
    @precondition(lambda self: self.processes)
    def take(self, data: st.DataObject, size: int, chunk: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[name]
        if process.spare < size:
            self.tell(name)
            process.spare += books.grant(self.accounts, name, size - process.spare, chunk)
        if process.spare >= size:
            process.spare -= size
            process.flying.append(size)
            process.taken[0] += size

    @rule(target=files, data=st.data(), directory=st.integers(0, DIRECTORIES - 1))
    @precondition(lambda self: any(p.flying for p in self.processes.values()))
    def land(self, data: st.DataObject, directory: int) -> int:
        names = sorted(name for name, p in self.processes.items() if p.flying)
        process = self.processes[data.draw(st.sampled_from(names))]
        size = process.flying.pop(0)
        file = next(self.numbers)
        self.disk[file] = (directory, size)
        return file

    @rule(data=st.data())
    @precondition(lambda self: self.processes)
    def time_passes(self, data: st.DataObject) -> None:
        # only what has landed leaves the window of recent takes
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        if not process.flying:
            process.taken = [0, process.taken[0]]

    @rule(data=st.data())
    @precondition(lambda self: any(p.flying for p in self.processes.values()))
    def a_write_fails(self, data: st.DataObject) -> None:
        names = sorted(name for name, p in self.processes.items() if p.flying)
        process = self.processes[data.draw(st.sampled_from(names))]
        process.returned += process.flying.pop()

    @rule(file=consumes(files), data=st.data())
    @precondition(lambda self: self.processes)
    def delete(self, file: int, data: st.DataObject) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        if file in self.disk:
            process.returned += self.disk.pop(file)[1]

    @rule(file=consumes(files))
    def remove_by_hand(self, file: int) -> None:
        self.disk.pop(file, None)

    @rule(data=st.data())
    @precondition(lambda self: self.processes)
    def report(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.sampled_from(sorted(self.processes))))

    @rule(data=st.data(), directory=st.integers(0, DIRECTORIES - 1))
    @precondition(lambda self: len(self.processes) > 1)
    def die(self, data: st.DataObject, directory: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        for size in self.processes.pop(name).flying:  # temporary files
            self.disk[next(self.numbers)] = (directory, size)

    @rule()
    def bury(self) -> None:
        for name in self.accounts.members.keys() - self.processes.keys():
            del self.accounts.members[name]
        books.set_limit(self.accounts, UNBOUNDED)

    @rule()
    @precondition(lambda self: self.comparison is None)
    def begin_scan(self) -> None:
        self.comparison = Comparison(books.mark(self.accounts), self.evicted)

    @rule()
    @precondition(lambda self: self.comparison and self.comparison.next_directory < DIRECTORIES)
    def scan_directory(self) -> None:
        comparison = self.comparison
        assert comparison
        here = {file: size for file, (d, size) in self.disk.items()
                if d == comparison.next_directory}  # fmt: skip
        gone = {f for f in self.seen if f not in self.disk}
        self.seen = {f: s for f, s in self.seen.items() if f not in gone} | here
        comparison.next_directory += 1
        comparison.found += sum(here.values())
        if comparison.next_directory == DIRECTORIES:
            comparison.evicted_at_end = self.evicted
            comparison.awaited = books.reports_of(self.accounts)

    @rule()
    @precondition(lambda self: self.comparison and self.comparison.awaited is not None)
    def settle(self) -> None:
        comparison = self.comparison
        assert comparison
        assert comparison.awaited is not None
        # the dead say nothing, nor will they ever
        if books.unheard(self.accounts, comparison.awaited) & self.processes.keys():
            return
        found = comparison.found - (self.evicted - comparison.evicted_at_end)
        removed = self.evicted - comparison.evicted_before
        books.reconcile(self.accounts, comparison.mark, found, removed)
        self.comparison = None

    @rule(data=st.data())
    @precondition(lambda self: self.seen and (not self.comparison or self.comparison.awaited))
    def evict(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(self.seen)))
        self.seen.pop(file)
        if file in self.disk:
            size = self.disk.pop(file)[1]
            books.give_back(self.accounts, size)
            self.evicted += size

    def truth(self) -> int:
        """Bytes that lie on disk, are on their way, or may be written without asking."""
        on_disk = sum(size for _, size in self.disk.values())
        return on_disk + sum(p.spare + sum(p.flying) for p in self.processes.values())

    @invariant()
    def nothing_passes_the_limit(self) -> None:
        self.accounts.check()
        assert self.truth() <= self.accounts.granted <= LIMIT

    def teardown(self) -> None:
        """All becomes quiet: then the books become exact."""
        for name, process in self.processes.items():
            for size in process.flying:
                self.disk[next(self.numbers)] = (0, size)
            process.flying, process.taken = [], [0, 0]
            self.tell(name)
        self.bury()
        mark = books.mark(self.accounts)
        books.reconcile(self.accounts, mark, sum(size for _, size in self.disk.values()))
        assert self.accounts.granted == self.truth()


Truth.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestTruth = Truth.TestCase


def test_a_write_in_flight_survives_an_inventory_that_misses_it() -> None:
    truth = Truth()
    truth.start(1)
    (process,) = truth.processes.values()
    process.spare = books.grant(truth.accounts, "m0", 5, 5)
    process.spare, process.flying, process.taken = 0, [5], [5, 0]
    truth.tell("m0")
    truth.begin_scan()
    for _ in range(DIRECTORIES):
        truth.scan_directory()
    truth.tell("m0")
    truth.settle()
    truth.nothing_passes_the_limit()


def test_a_deletion_that_was_not_told_yet_is_not_taken_off_twice() -> None:
    truth = Truth()
    truth.start(2)
    truth.disk = {100: (0, 5), 101: (1, 5)}
    truth.accounts.granted = 10
    truth.begin_scan()
    truth.processes["m1"].returned = truth.disk.pop(100)[1]
    for _ in range(DIRECTORIES):
        truth.scan_directory()
    truth.tell("m0")
    truth.settle()
    assert truth.comparison is not None, "m1 has not been heard"
    truth.tell("m1")
    truth.settle()
    assert truth.comparison is None
    assert truth.accounts.granted == 5
    truth.nothing_passes_the_limit()


def test_a_file_that_was_found_and_deleted_since_does_not_come_back_on_the_books() -> None:
    truth = Truth()
    truth.start(1)
    truth.disk = {100: (0, 5)}
    truth.accounts.granted = 5
    truth.begin_scan()
    for _ in range(DIRECTORIES):
        truth.scan_directory()
    truth.processes["m0"].returned = truth.disk.pop(100)[1]
    truth.tell("m0")
    truth.settle()
    assert truth.accounts.granted == 0


def accounts_of(*entries: Entry, **fields: int) -> Accounts:
    members = {f"m{i}": entry for i, entry in enumerate(entries)}
    return Accounts(known=True, members=members, **fields)


def test_nothing_is_granted_before_an_inventory() -> None:
    accounts = Accounts(limit=100, members={"a": Entry()})
    assert books.grant(accounts, "a", 1, 1) == 0
    books.reconcile(accounts, books.mark(accounts), 60)
    assert (accounts.known, accounts.granted) == (True, 60)
    assert books.grant(accounts, "a", 40, 40) == 40
    assert books.grant(accounts, "a", 1, 1) == 0


def test_the_smallest_capacity_and_the_largest_min_free_count() -> None:
    accounts = accounts_of(Entry(capacity=100), Entry(capacity=70, min_free=50), Entry())
    books.set_limit(accounts, 1000)
    assert accounts.limit == 70
    books.set_limit(accounts, 80)
    assert accounts.limit == 30
    books.set_limit(accounts, 10)
    assert accounts.limit == 0


def test_min_free_counts_what_is_still_to_be_written() -> None:
    accounts = accounts_of(Entry(min_free=100, spare=30), granted=230)
    books.set_limit(accounts, 150)
    # 50 bytes may come: 30 are promised
    assert accounts.limit == 250


def test_less_than_a_chunk_is_granted_where_a_chunk_does_not_fit() -> None:
    accounts = accounts_of(Entry(), limit=10)
    assert books.grant(accounts, "m0", 3, 8) == 8
    assert books.grant(accounts, "m0", 2, 8) == 2
    assert books.grant(accounts, "m0", 1, 8) == 0
    assert accounts.members["m0"].asked == 1


def test_files_that_others_put_there_are_noticed() -> None:
    accounts = accounts_of(Entry(spare=5), granted=25, limit=100)
    assert books.reconcile(accounts, books.mark(accounts), 60) == 40
    assert accounts.granted == 65


def test_eviction_waits_for_the_high_watermark_and_goes_on_to_the_low_one() -> None:
    accounts = accounts_of(Entry(), limit=100, granted=95)
    assert books.bytes_to_free(accounts, 0.95, 0.90) == 0
    accounts.granted = 96
    assert books.bytes_to_free(accounts, 0.95, 0.90) == 6
    accounts.granted = 90
    accounts.members["m0"].asked = 10
    assert books.bytes_to_free(accounts, 0.95, 0.90) == 0, "what is wanted fits"
    accounts.members["m0"].asked = 30
    assert books.bytes_to_free(accounts, 0.95, 0.90) == 20


def test_whoever_owns_more_than_its_share_owes_while_others_wait() -> None:
    accounts = accounts_of(Entry(owned=90), Entry(owned=10), limit=100, granted=100)
    assert books.debts(accounts) == {}
    accounts.members["m1"].asked = 20
    assert books.debts(accounts) == {"m0": 20}
    accounts.members["m1"].asked = 200
    assert books.debts(accounts) == {"m0": 40}


def test_whoever_owes_is_not_given_what_others_wait_for() -> None:
    accounts = accounts_of(Entry(owned=80), Entry(owned=10, asked=20), limit=100, granted=90)
    assert books.grant(accounts, "m0", 10, 0) == 0
    assert books.grant(accounts, "m1", 10, 0) == 10


def test_when_the_limit_falls_everybody_above_the_level_owes() -> None:
    accounts = accounts_of(Entry(owned=60), Entry(owned=30), Entry(owned=10), limit=60, granted=100)
    assert books.debts(accounts) == {"m0": 35, "m1": 5}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 1000), max_size=8),
    st.integers(0, 3000),
)
def test_fair_shares(demands: dict[str, int], total: int) -> None:
    shares = books.fair_shares(demands, total)
    assert shares.keys() == demands.keys()
    assert all(0 <= shares[name] <= demands[name] for name in demands)
    assert sum(shares.values()) <= total
    short = [shares[name] for name in demands if shares[name] < demands[name]]
    if short:
        assert total - sum(shares.values()) < len(demands), "nothing is withheld"
        assert max(shares.values()) <= min(short) + len(demands), "nobody has more than the short"


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (4096, 1), (4097, 2)])
def test_space_is_counted_in_pages(nbytes: int, pages: int) -> None:
    assert books.rounded(nbytes) == pages * 4096
