"""Transcripts: what the core is told, and what it answers, as readable text.

A transcript is a comment that says what happens and what must be seen, then commands, each with the
answer that it got:

    > pool 8 tiers=1 promoting=4
    > tier0 has 1..6
    > ask a 1..6
    a: RETRY 1..6: deferred
    > step
    probe tier0 1..6
    ...

`run` carries out the commands and returns the text with today's answers. A blank line is kept.

Commands:
    pool N [tiers=N] [windows=1:2] [promote_to=1:0 (from tier1 to tier0)] [any bound of
        Limits or Patience, e.g. promoting=4 wait=2s]
    tierN has|loses BLOCKS; tierN drops BLOCKS (and tells); tierN latency=10ms speed=100 (blocks/s)
    tierN fail|hang|short|lie|raise OPERATION [times=N] [fault=full] [keys=N]; tierN heal
    tierN wants TICKET BLOCKS [promote]; tierN renews|returns TICKET
    ask NAME BLOCKS; load NAME; loaded NAME; runs NAME; finish NAME
    store NAME BLOCKS (at once); prepare NAME BLOCKS; stored NAME [bad=BLOCKS]
    step [10ms] [times=N]; reset [keep]; fence; prefill 10ms (per block); show
BLOCKS are numbers and ranges: `1..5 8 g1:3..5`, the last ones in cache group 1.
"""

from __future__ import annotations

import re

from kvtier.core.health import State
from kvtier.core.manager import TieringManager
from kvtier.core.policies.lru import LRU
from kvtier.core.pool import BlockPool
from kvtier.core.requests import Request
from kvtier.core.types import (
    BlockKey,
    Command,
    Completion,
    Done,
    Dropped,
    Fault,
    JobId,
    Lend,
    Lookup,
    Probe,
    Read,
    Renewed,
    Slot,
    TierId,
    Wanted,
    Write,
    group_of,
)
from kvtier.testing.engine import Groups, positions, scan
from kvtier.testing.simulated_tiers import (
    Content,
    Memory,
    SimulatedTier,
    SimulatedTierError,
)
from kvtier.testing.transcript_words import (
    OPERATIONS,
    answers_in_words,
    behaviour_of,
    command_in_words,
    completion_in_words,
    event_in_words,
    keys_of,
    limits_of,
    options_of,
    seconds_of,
    words_of,
)


def run(text: str) -> str:
    """The transcript with the answers of today's core.

    Raises:
        ValueError: a command is not understood; the message names the line.
    """
    world: TranscribedCore | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            lines.append(line)
        if not line.startswith("> "):
            continue
        lines.append(line)
        words = line[2:].split()
        try:
            if words[0] == "pool":
                world = TranscribedCore(words[1:])
            elif world is None:
                raise ValueError("the first command is `pool`")
            else:
                lines += world.do(words)
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"line {number}: {line!r}: {error!r}") from error
    return "\n".join(lines).rstrip("\n") + "\n"


class TranscribedCore:
    """One core and its tiers, driven by the words of a transcript."""

    def __init__(self, words: list[str]) -> None:
        options = options_of(words)
        num_tiers = int(options.pop("tiers", "1"))
        windows = {}
        for window in filter(None, options.pop("windows", "").split(",")):
            group, _, blocks = window.partition(":")
            windows[int(group)] = int(blocks)
        raised: list[set[TierId]] = [set() for _ in range(num_tiers)]
        for pair in filter(None, options.pop("promote_to", "").split(",")):
            source, _, target = pair.partition(":")
            raised[int(source)].add(TierId(int(target)))
        num_slots = int(words[0])
        self._windows = windows
        self._memory: Memory = [None] * num_slots
        self._tiers = [SimulatedTier(self._memory) for _ in range(num_tiers)]
        self._core = TieringManager(
            BlockPool(num_slots, LRU(num_slots)),
            num_tiers,
            0.0,
            limits_of(options, num_slots),
            frozenset(windows),
            raised,
        )
        self._core.begin_step(0.0)
        self._now = 0.0
        self._epoch = 0
        self._requests: dict[str, Request] = {}
        self._hits: dict[str, list[BlockKey]] = {}
        self._loads: dict[str, dict[BlockKey, Slot]] = {}
        self._stores: dict[str, tuple[int, dict[BlockKey, Slot]]] = {}
        self._inbox: list[Completion] = []
        self._told: list[str] = []
        self._leases: dict[int, JobId] = {}
        self._states: dict[str, State] = {}

    def do(self, words: list[str]) -> list[str]:
        """Carry out one command; returns what it showed."""
        verb, rest = words[0], words[1:]
        shown: list[str] | None
        if tier := re.fullmatch(r"tier(\d+)", verb):
            self._do_tier(int(tier[1]), rest)
            shown = []
        else:
            commands = {
                "ask": self._ask,
                "load": self._load,
                "loaded": self._loaded,
                "runs": self._runs,
                "finish": self._finish,
                "store": self._store,
                "prepare": self._prepare,
                "stored": self._stored,
                "step": self._steps,
                "reset": self._reset,
                "fence": self._fence,
                "prefill": self._prefill,
                "show": self._show,
            }
            shown = commands[verb](rest)
        self._core.check()
        self._check_bytes()
        return shown + [event_in_words(event) for event in self._core.take_events()]

    # -- the engine -------------------------------------------------------

    def _ask(self, words: list[str]) -> list[str]:
        name, keys = words[0], keys_of(words[1:])
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = self._core.open_request(name)
        request.position = positions(keys).get
        answers: list[tuple[Lookup, BlockKey]] = []

        def ask(key: BlockKey) -> Lookup:
            answers.append((self._core.lookup(request, key), key))
            return answers[-1][0]

        groups = sorted({group_of(key) for key in keys} | set(self._windows))
        full = tuple(group for group in groups if group not in self._windows)
        model = Groups(full, self._windows)
        prompt = [int.from_bytes(k[:8], "big") for k in keys if group_of(k) == group_of(keys[0])]
        hit = scan(ask, prompt, model)
        self._hits[name] = model.needed(prompt, hit or 0)
        result = "deferred" if hit is None else f"hit {hit} of {len(prompt)}"
        return [f"{name}: {answers_in_words(answers)}: {result}"]

    def _load(self, words: list[str]) -> list[str]:
        name = words[0]
        keys = self._hits.pop(name)
        slots = self._core.prepare_load(name, keys)
        found = {k: s for k, s in zip(keys, slots, strict=True) if s is not None}
        assert len(found) == len(keys), "a hit that is gone"
        self._loads[name] = found
        return [f"{name} loads {words_of(keys)}"]

    def _loaded(self, words: list[str]) -> list[str]:
        for key, slot in self._loads.pop(words[0]).items():
            assert self._memory[slot] == (self._epoch, key), "wrong bytes"
        self._core.complete_load(words[0])
        return []

    def _runs(self, words: list[str]) -> list[str]:
        self._core.settle_request(words[0])
        return []

    def _finish(self, words: list[str]) -> list[str]:
        self._requests.pop(words[0], None)
        self._core.finish_request(words[0])
        return []

    def _prepare(self, words: list[str]) -> list[str]:
        name, keys = words[0], keys_of(words[1:])
        if name not in self._requests:
            self._requests[name] = self._core.open_request(name)
        slots = self._core.prepare_store(name, keys)
        for slot in slots.values():
            self._memory[slot] = None
        self._stores[name] = (self._epoch, slots)
        return [f"{name} stores {words_of(slots)}"]

    def _stored(self, words: list[str]) -> list[str]:
        name = words[0]
        epoch, slots = self._stores.pop(name)
        bad = set(keys_of(options_of(words[1:]).get("bad", "").split()))
        for key, slot in slots.items():
            content: Content | None = (epoch, key)
            self._memory[slot] = None if key in bad else content
        self._core.complete_store(slots, bad)
        return []

    def _store(self, words: list[str]) -> list[str]:
        return self._prepare(words) + self._stored(words[:1])

    def _reset(self, words: list[str]) -> list[str]:
        self._epoch += words != ["keep"]
        self._core.reset(keep_tiers=words == ["keep"])
        self._loads.clear()
        self._stores.clear()
        return []

    def _fence(self, words: list[str]) -> list[str]:  # noqa: ARG002 - takes no words
        self._core.fence_passed()
        return []

    def _prefill(self, words: list[str]) -> list[str]:
        self._core.set_prefill_rate(seconds_of(words[0]))
        return []

    # -- the step ---------------------------------------------------------

    def _steps(self, words: list[str]) -> list[str]:
        times = int(options_of(words).get("times", "1"))
        seconds = next((seconds_of(word) for word in words if "=" not in word), 0.01)
        shown: list[str] = []
        for _ in range(times):
            shown += self._step(seconds)
        return shown

    def _step(self, seconds: float) -> list[str]:
        """End the step, let time pass, begin the next one."""
        shown = []
        for command in self._core.end_step():
            shown.append(command_in_words(command))
            try:
                self._submit(command)
            except SimulatedTierError:
                self._inbox.append(Done(command.job, fault=Fault.ERROR))
        shown += [event_in_words(event) for event in self._core.take_events()]
        self._now = round(self._now + seconds, 6)
        completions, self._inbox = self._inbox, []
        for tier in self._tiers:
            completions += tier.finished(self._now)
        running = self._jobs()
        shown += [completion_in_words(completion, running) for completion in completions]
        self._core.begin_step(self._now, completions)
        shown += [event_in_words(event) for event in self._core.take_events()]
        return shown + self._changed_circuits()

    def _jobs(self) -> dict[JobId, Command]:
        ledger = self._core.ledger
        lent = {job: lease.command for job, lease in ledger.lending.leases.items()}
        return {**{job: entry.command for job, entry in ledger._jobs.items()}, **lent}

    def _submit(self, command: Command) -> None:
        tier = self._tiers[command.tier]
        match command:
            case Probe(job=job, keys=keys, epoch=epoch):
                tier.submit(self._now, "probe", job, keys, space=epoch)
            case Read(job=job, keys=keys, slots=slots, epoch=epoch):
                tier.submit(self._now, "read", job, keys, slots, epoch)
            case Write(job=job, keys=keys, slots=slots, epoch=epoch):
                tier.submit(self._now, "write", job, keys, slots, epoch)
            case Lend(job=job, ticket=ticket):
                self._leases[ticket] = job

    def _changed_circuits(self) -> list[str]:
        ledger, shown = self._core.ledger, []
        for direction, circuits in (("reads", ledger.reads), ("writes", ledger.writes)):
            for place, circuit in enumerate(circuits):
                name = f"tier{place} {direction}"
                if circuit.state is not self._states.get(name, State.CLOSED):
                    fault = circuit.fault if circuit.state is State.OPEN else None
                    why = f", {fault.value}" if fault is not None else ""
                    shown.append(f"{name}: {circuit.state.value}{why}")
                self._states[name] = circuit.state
        return shown

    def _show(self, words: list[str]) -> list[str]:  # noqa: ARG002 - takes no words
        pool, ledger = self._core.pool, self._core.ledger
        ready = sorted(key for key, block in pool.blocks.items() if block.ready)
        ready.sort(key=group_of)
        filling = [key for key, block in pool.blocks.items() if not block.ready]
        cascading = "+".join(map(str, ledger.cascades.writing))
        budgets = (
            f"promoting {ledger.promoting}, storing {ledger.storing}, cascading {cascading}, "
            f"lent {ledger.lending.lent}"
        )
        shown = [
            f"at {self._now:g}s: {pool.num_slots} slots, {pool.pinned} pinned: {budgets}",
            f"readable {words_of(ready)}; filling {words_of(filling)}",
        ]
        for place, owed in enumerate(ledger.cascades.owed):
            if owed:
                shown.append(f"owed to tier{place}: {words_of(owed)}")
        waiting = [name for name, request in self._requests.items() if request.waiting]
        return [*shown, f"waiting: {' '.join(waiting)}"] if waiting else shown

    # -- the tiers --------------------------------------------------------

    def _do_tier(self, place: int, words: list[str]) -> None:
        tier, verb, rest = self._tiers[place], words[0], words[1:]
        options = options_of(rest)
        match verb:
            case "has":
                tier.keep(self._epoch, keys_of(rest))
            case "loses":
                tier.lose(self._epoch, keys_of(rest))
            case "drops":
                tier.lose(self._epoch, keys_of(rest))
                self._inbox.append(Dropped(TierId(place), tuple(keys_of(rest))))
            case "heal":
                tier.heal(self._now)
            case "wants":
                promote = rest[-1] == "promote"
                keys = tuple(keys_of(rest[1 : -1 if promote else None]))
                self._inbox.append(Wanted(TierId(place), int(rest[0]), keys, promote))
            case "renews":
                self._inbox.append(Renewed(self._leases[int(rest[0])]))
            case "returns":
                self._inbox.append(Done(self._leases.pop(int(rest[0]))))
            case _ if "=" in verb:
                options = options_of(words)
                tier.latency_s = seconds_of(options.get("latency", "0s"))
                tier.block_s = 1 / float(options["speed"]) if "speed" in options else 0.0
            case _:
                behaviour = behaviour_of(verb, options)
                tier.behave(OPERATIONS[rest[0]], behaviour, float(options.get("times", "inf")))

    def _check_bytes(self) -> None:
        for key, block in self._core.pool.blocks.items():
            if block.ready:
                assert self._memory[block.slot] == (self._epoch, key), "readable, wrong bytes"
