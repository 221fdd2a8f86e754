"""The words of transcripts: numbers of blocks, times, settings, and the core's values as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields

from kvtier.core.health import Patience
from kvtier.core.limits import Limits
from kvtier.core.types import (
    BlockKey,
    Cleared,
    Command,
    Completion,
    Done,
    Dropped,
    Event,
    Fault,
    JobId,
    Lend,
    Lookup,
    Probe,
    Read,
    Removed,
    Renewed,
    Stored,
    Wanted,
    Write,
    group_of,
)
from kvtier.testing.engine import key_of
from kvtier.testing.simulated_tiers import (
    Behaviour,
    Fail,
    Hang,
    Lie,
    Operation,
    Raise,
    Short,
)

_FLOATS = {"job": "job_deadline_s", "wait": "wait_max_s", "wait_min": "wait_min_s"}
_NAMES = {
    **_FLOATS,
    "hold": "hold_s",
    "lease": "lease_s",
    "lease_max": "lease_max_s",
    "absent": "absent_ttl_s",
    "promoting": "promoting_max",
    "writing": "writing_max",
    "reading": "reading_max",
    "storing": "storing_max",
    "lending": "lending_max",
    "known": "known_max",
    "second_touch": "second_touch",
    "failures": "failures_max",
    "stall": "stall_s",
    "backoff": "backoff_s",
    "backoff_max": "backoff_max_s",
}
"""Words of `pool` -> fields of `Limits` and `Patience`."""

OPERATIONS: dict[str, Operation] = {"probe": "probe", "read": "read", "write": "write"}
"""What a tier can be told to do badly."""


def keys_of(words: Iterable[str]) -> list[BlockKey]:
    """Keys of `1..5 8 g1:3..5`, in that order."""
    keys: list[BlockKey] = []
    group = 0
    for word in words:
        blocks = word
        if match := re.fullmatch(r"g(\d+):(.*)", word):
            group, blocks = int(match[1]), match[2]
        first, _, last = blocks.partition("..")
        keys += [key_of(block, group) for block in range(int(first), int(last or first) + 1)]
    return keys


def words_of(keys: Iterable[BlockKey]) -> str:
    """The shortest text for keys, in their order."""
    runs: list[tuple[int, int, int]] = []  # group, first, last: up or down
    for key in keys:
        group, block = group_of(key), int.from_bytes(key[:8], "big")
        if runs and runs[-1][0] == group:
            _, first, last = runs[-1]
            step = block - last
            if (abs(step) == 1) and (first == last or (last > first) == (step > 0)):
                runs[-1] = (group, first, block)
                continue
        runs.append((group, block, block))
    words, before = [], 0
    for group, first, last in runs:
        prefix = f"g{group}:" if group != before else ""
        words.append(prefix + (str(first) if first == last else f"{first}..{last}"))
        before = group
    return " ".join(words) or "nothing"


def seconds_of(word: str) -> float:
    """Seconds of `10ms` or `2s`."""
    match = re.fullmatch(r"([\d.]+)(ms|s)", word)
    if match is None:
        raise ValueError(f"{word!r} is no time: 10ms, 2s")
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0)


def options_of(words: Iterable[str]) -> dict[str, str]:
    """The words that are `name=value`."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def limits_of(options: Mapping[str, str], num_slots: int) -> Limits:
    """Bounds from the words of `pool`; shares are the whole pool where nothing is said."""
    values: dict[str, dict[str, object]] = {"limits": {}, "patience": {}}
    patience_fields = {field.name for field in fields(Patience)}
    for word, value in options.items():
        name = _NAMES[word]
        whose = "patience" if name in patience_fields else "limits"
        if name.endswith("_s"):
            values[whose][name] = seconds_of(value)
        else:
            values[whose][name] = value == "yes" if name == "second_touch" else int(value)
    limits: dict[str, object] = {"promoting_max": num_slots, "writing_max": num_slots}
    limits.update(values["limits"], patience=Patience(**values["patience"]))  # type: ignore[arg-type]
    return Limits(**limits)  # type: ignore[arg-type]


def behaviour_of(verb: str, options: Mapping[str, str]) -> Behaviour:
    """What a tier does, of a word such as `fail`."""
    match verb:
        case "fail":
            return Fail(Fault(options.get("fault", "error")))
        case "short":
            return Short(int(options["keys"]))
        case "hang":
            return Hang()
        case "lie":
            return Lie()
        case "raise":
            return Raise()
    raise ValueError(f"a tier cannot {verb}")


def answers_in_words(answers: list[tuple[Lookup, BlockKey]]) -> str:
    """Answers to one scan, in the order of the questions."""
    runs: list[tuple[Lookup, list[BlockKey]]] = []
    for answer, key in answers:
        if runs and runs[-1][0] is answer:
            runs[-1][1].append(key)
        else:
            runs.append((answer, [key]))
    return ", ".join(f"{answer.name} {words_of(keys)}" for answer, keys in runs) or "nothing asked"


def command_in_words(command: Command) -> str:
    """One command, without its slots."""
    match command:
        case Lend(tier=tier, ticket=ticket, keys=keys, missing=missing):
            return f"lend tier{tier} ticket {ticket}: {words_of(keys)}; missing {words_of(missing)}"
        case Probe() | Read() | Write():
            verb = type(command).__name__.lower()
            return f"{verb} tier{command.tier} {words_of(command.keys)}"


def completion_in_words(completion: Completion, running: Mapping[JobId, Command]) -> str:
    """One completion, told by the command that it ends."""
    match completion:
        case Done(job, ok, fault):
            command = running.get(job)
            if command is None:
                return "done: a job that is not known any more"
            good = [key for key in command.keys if key in ok]
            verb = type(command).__name__.lower()
            text = f"done: {verb} tier{command.tier}"
            if isinstance(command, Lend):
                return f"{text} ticket {command.ticket}"
            return f"{text} ok {words_of(good)}" + (f", {fault.value}" if fault else "")
        case Dropped(tier, keys, reason):
            return f"dropped: tier{tier} {words_of(keys)}, {reason.value}"
        case Wanted(tier, ticket, keys, promote):
            also = ", promoted first" if promote else ""
            return f"wanted: tier{tier} ticket {ticket}: {words_of(keys)}{also}"
        case Renewed():
            return "renewed"


def event_in_words(event: Event) -> str:
    """One event: + where something became readable, - where it stopped being so."""
    where = "primary" if event.tier is None else f"tier{event.tier}"
    match event:
        case Stored(_, keys):
            return f"  + {where} {words_of(keys)}"
        case Removed(_, keys, reason):
            return f"  - {where} {words_of(keys)}, {reason.value}"
        case Cleared():
            return f"  - {where} cleared"
