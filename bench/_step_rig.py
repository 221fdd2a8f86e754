"""An engine's step above one tier, in its I/O process, while the medium is broken and mended.

The engine stores prompts and asks for older ones that have left the pool. A step is timed as the
scheduler's thread has it: polls, answers and commands; not the pause between steps. Every block is
filled with a function of its key and compared as a whole when it is loaded.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from _report import Row

from kvtier.config import Settings
from kvtier.core.health import Circuit, State
from kvtier.core.requests import Request
from kvtier.core.types import BlockKey, Fault
from kvtier.drivers.base import TierCounters
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Region
from kvtier.testing.engine import Groups, key_of, scan

ROW_BYTES = 16 * 1024
NUM_SLOTS = 256
PROMPT_BLOCKS = 8
PAUSE_S = 0.002  # the model's part of a step, here
REQUESTS_MAX = 8
RECOVERY_MAX_S = 30.0
WARM_UP_MAX_S = 20.0
WARM_UP_BLOCKS = 300
BACKOFF_MAX_S = 1.0

LOST = frozenset({Fault.UNREACHABLE})
HUNG = frozenset({Fault.STALLED, Fault.UNREACHABLE})
FULL = frozenset({Fault.FULL})
DENIED = frozenset({Fault.DENIED})
THROTTLED = frozenset({Fault.THROTTLED})
ERROR = frozenset({Fault.ERROR})

SETTINGS = {
    "cpu_bytes_to_use": NUM_SLOTS * ROW_BYTES,
    "max_wait_ms": 2_000,
    "hold_ms": 1_000,
    "job_deadline_ms": 1_000,
    "tier_stall_ms": 500,
    "tier_backoff_ms": 100,
    "tier_backoff_max_ms": int(BACKOFF_MAX_S * 1e3),
    "absent_ttl_ms": 100,
    "prefill_tokens_per_s": "unknown",
}


class Engine:
    """Stores a prompt now and then, and asks for older ones that have left the pool.

    Args:
        tier: the entry of `secondary_tiers`.
        settings: what differs from `SETTINGS`.

    Attributes:
        idle: steps neither store nor ask.
        loaded_blocks: how many blocks were compared.
        wrong_reads: how many of them were not what they should be.
    """

    def __init__(self, tier: Mapping[str, object], **settings: object) -> None:
        decoded = Settings.decode({**SETTINGS, **settings, "secondary_tiers": [dict(tier)]})
        tiers = configure_tiers(decoded.secondary_tiers)
        self.region = Region.create(Geometry(NUM_SLOTS, ROW_BYTES, 1))
        namespace = Namespace.of({"weights": "of the benchmark"})
        self.offloader = Offloader(decoded, tiers, self.region, namespace)
        self.idle = False
        self.loaded_blocks = 0
        self.wrong_reads = 0
        self._step_s: list[float] = []
        self._waits = 0
        self._random = random.Random(1)
        self._steps = 0
        self._prompts = 0
        self._asking: dict[str, tuple[Request, list[int]]] = {}

    @property
    def counters(self) -> TierCounters:
        return self.offloader.drivers[0].counters()

    @property
    def reads(self) -> Circuit:
        return self.offloader.core.ledger.reads[0]

    @property
    def writes(self) -> Circuit:
        return self.offloader.core.ledger.writes[0]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Step until something is so, or for so long. Returns the seconds it took."""
        began = time.monotonic()
        while time.monotonic() - began < seconds and not until():
            self._steps += 1
            waited, started = waits(), time.perf_counter()
            self._step()
            self._step_s.append(time.perf_counter() - started)
            self._waits += waits() != waited
            time.sleep(PAUSE_S)
        return time.monotonic() - began

    def warm_up(self) -> None:
        """Step until blocks come back from the tier; forget the times."""
        self.run(WARM_UP_MAX_S, lambda: self.counters.read_blocks > WARM_UP_BLOCKS)
        self.take_step_s()

    def take_step_s(self) -> list[float]:
        """Times of the steps since the last call."""
        taken, self._step_s = self._step_s, []
        return taken

    def take_waits(self) -> int:
        """Steps in which the thread gave up its core of its own accord, since the last call."""
        taken, self._waits = self._waits, 0
        return taken

    def _step(self) -> None:
        self.offloader.begin()
        if not self.idle:
            if self._steps % 16 == 0:
                self._store()
            if self._steps % 4 == 0 and len(self._asking) < REQUESTS_MAX and self._prompts > 64:
                name = f"request {self._steps}"
                number = self._random.randrange(max(0, self._prompts - 512), self._prompts - 40)
                request = self.offloader.core.open_request(name)
                self._asking[name] = (request, self._prompt(number))
            for name, (request, prompt) in list(self._asking.items()):
                self._ask(name, request, prompt)
        self.offloader.end()

    def _store(self) -> None:
        core = self.offloader.core
        prompt = self._prompt(self._prompts)
        self._prompts += 1
        slots = core.prepare_store("store", [key_of(block) for block in prompt])
        for key, slot in slots.items():
            self.region.slot(slot)[:] = row_of(key)
        core.complete_store(slots)

    def _ask(self, name: str, request: Request, prompt: list[int]) -> None:
        core = self.offloader.core
        hit = scan(lambda key: core.lookup(request, key), prompt, Groups())
        if hit is None:
            return
        keys = [key_of(block) for block in prompt[:hit]]
        for key, slot in zip(keys, core.prepare_load(name, keys), strict=True):
            self.loaded_blocks += 1
            self.wrong_reads += slot is None or bytes(self.region.slot(slot)) != row_of(key)
        core.complete_load(name)
        core.finish_request(name)
        del self._asking[name]

    @staticmethod
    def _prompt(number: int) -> list[int]:
        return list(range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))

    def close(self) -> None:
        self.offloader.close()


def waits() -> int:
    """How often this thread has waited for something; being preempted is not counted."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def row_of(key: BlockKey) -> bytes:
    """What a block of this key holds."""
    return (key * (ROW_BYTES // len(key) + 1))[:ROW_BYTES]


@dataclass(frozen=True)
class Trouble:
    """One fault: how it comes and goes, and what the tier should make of it.

    Attributes:
        come: break the medium.
        go: mend it.
        reads: faults that may open the reads; empty if they must go on; None: either is right.
        writes: the same for writes.
        causes: labels under which failures may be counted, and one of them must be; None: any.
        least_s: seconds that it stays at least.
    """

    come: Callable[[], object]
    go: Callable[[], object]
    reads: frozenset[Fault] | None = frozenset()
    writes: frozenset[Fault] | None = frozenset()
    causes: frozenset[str] | None = None
    least_s: float = 0.0


@dataclass(frozen=True)
class Suffered:
    """What one fault did.

    Attributes:
        whole_s: times of the steps without the fault.
        broken_s: with it.
        whole_waits: steps without the fault in which the thread waited for something.
        broken_waits: steps with it.
        opened: `reads` and `writes`, if they were left alone, and for which fault.
        came: counters when the fault came.
        went: counters when it went.
        recovery_s: until blocks moved both ways again.
    """

    whole_s: list[float]
    broken_s: list[float]
    whole_waits: int
    broken_waits: int
    opened: dict[str, Fault | None]
    came: TierCounters
    went: TierCounters
    recovery_s: float

    @property
    def counted(self) -> dict[str, int]:
        """Failures that were counted meanwhile, by cause."""
        more = {name: count - self.came.faults.get(name, 0) for name, count in self._faults()}
        return {name: count for name, count in more.items() if count}

    def _faults(self) -> list[tuple[str, int]]:
        return [(str(name), count) for name, count in self.went.faults.items()]


def suffer(engine: Engine, name: str, trouble: Trouble, seconds: float) -> Suffered:
    """Run without a fault, with it for at least twice as long, and after it until it is over."""
    engine.take_step_s()
    engine.take_waits()
    engine.run(seconds)
    whole_s, whole_waits, came = engine.take_step_s(), engine.take_waits(), engine.counters
    trouble.come()
    opened = look_on(engine, max(2 * seconds, trouble.least_s))
    broken_s, broken_waits, went = engine.take_step_s(), engine.take_waits(), engine.counters
    trouble.go()
    recovery_s = recover(engine, name)
    return Suffered(whole_s, broken_s, whole_waits, broken_waits, opened, came, went, recovery_s)


def suffer_from_start(engine: Engine, name: str, trouble: Trouble, seconds: float) -> Suffered:
    """The same for an engine that starts with the fault: the run without it is the one after."""
    came = TierCounters()
    opened = look_on(engine, max(2 * seconds, trouble.least_s))
    broken_s, broken_waits, went = engine.take_step_s(), engine.take_waits(), engine.counters
    trouble.go()
    recovery_s = recover(engine, name)
    engine.warm_up()
    engine.take_waits()
    engine.run(seconds)
    whole_s, whole_waits = engine.take_step_s(), engine.take_waits()
    return Suffered(whole_s, broken_s, whole_waits, broken_waits, opened, came, went, recovery_s)


def look_on(engine: Engine, seconds: float) -> dict[str, Fault | None]:
    """Step for so long. Returns what was left alone meanwhile, and why."""
    opened: dict[str, Fault | None] = {}

    def look() -> bool:
        for word, circuit in (("reads", engine.reads), ("writes", engine.writes)):
            if circuit.state is not State.CLOSED:
                opened[word] = circuit.fault
        return False

    engine.run(seconds, look)
    return opened


def recover(engine: Engine, name: str) -> float:
    """Step until blocks move both ways again, and no wrong one has come. Returns the seconds."""
    mended = engine.counters

    def moves_again() -> bool:
        now = engine.counters
        closed = engine.reads.state is State.CLOSED and engine.writes.state is State.CLOSED
        read, written = now.read_blocks, now.write_blocks
        return closed and read > mended.read_blocks and written > mended.write_blocks

    recovery_s = engine.run(RECOVERY_MAX_S, moves_again)
    assert moves_again(), f"{name}: no recovery within {RECOVERY_MAX_S:g} s"
    assert engine.wrong_reads == 0, f"{name}: wrong blocks were served"
    return recovery_s


def left_alone(trouble: Trouble, opened: Mapping[str, Fault | None]) -> bool:
    """Whether what fails was left alone, for the right fault, and what need not fail was not."""
    for word, faults in (("reads", trouble.reads), ("writes", trouble.writes)):
        if faults is not None and (opened.get(word) not in faults if faults else word in opened):
            return False
    return True


def counted_rightly(trouble: Trouble, suffered: Suffered) -> bool:
    """Whether failures were counted under the causes that they have."""
    counted = set(suffered.counted)
    causes = trouble.causes
    return causes is None or (counted <= causes and bool(counted) == bool(causes))


def step_rows(name: str, suffered: Suffered) -> list[Row]:
    """Median, tail and worst of the steps, in microseconds."""
    rows = []
    for word, place in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        broken, whole = (
            at_place(each, place) * 1e6 for each in (suffered.broken_s, suffered.whole_s)
        )
        rows.append(Row(f"{name}_step_{word}", broken, "us", whole, "without the fault", "lower"))
    return rows


def at_place(times: list[float], place: float) -> float:
    """The time below which this share of the times is."""
    return sorted(times)[min(int(place * len(times)), len(times) - 1)]
