"""How the engine asks: the scan of vLLM's offloading connector over one or several cache groups.

A full group is looked up from the left to the first MISS, past whatever is not certain yet. A
window group is looked up from the right until as many blocks as its window needs stand in a row.
Each group may shorten the hit of the others, so the scan repeats until the boundary stands still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.core.types import GROUP_BYTES, BlockKey, Lookup, group_of

Ask = Callable[[BlockKey], Lookup]


def key_of(block: int, group: int = 0) -> BlockKey:
    """The key of a numbered block in a cache group."""
    return BlockKey(block.to_bytes(8, "big") + group.to_bytes(GROUP_BYTES, "big"))


def positions(keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
    """Where keys of a prompt end, in blocks; they are given in order within each group."""
    ends: dict[BlockKey, int] = {}
    counts: Counter[int] = Counter()
    for key in keys:
        group = group_of(key)
        counts[group] += 1
        ends[key] = counts[group]
    return ends


@dataclass(frozen=True, slots=True)
class Groups:
    """The cache groups of a model, all with the same block size.

    Attributes:
        full: groups in which each block needs all blocks before it.
        windows: group -> blocks of its window.
        ahead: groups that speculate: they look one block ahead, and give the last one back.
    """

    full: tuple[int, ...] = (0,)
    windows: Mapping[int, int] | None = None
    ahead: frozenset[int] = frozenset()

    def window(self, group: int) -> int | None:
        """Blocks of a group's window; None for a full group."""
        return self.windows.get(group) if self.windows is not None else None

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which they are looked up."""
        return self.full + tuple(self.windows or ())

    def needed(self, prompt: Sequence[int], hit: int) -> list[BlockKey]:
        """Keys to load for a hit of so many blocks."""
        keys: list[BlockKey] = []
        for group in self.order:
            window = self.window(group)
            first = 0 if window is None else max(0, hit - window)
            keys += [key_of(block, group) for block in prompt[first:hit]]
        return keys


def scan(ask: Ask, prompt: Sequence[int], groups: Groups) -> int | None:
    """Blocks of the prompt that can be loaded now; None: ask again in a later step."""
    end, before = len(prompt), 0
    certain = True
    given_back: set[int] = set()
    todo = groups.order
    while todo:
        again: tuple[int, ...] = ()
        window_seen = False
        for group in todo:
            ahead = int(group in groups.ahead and group not in given_back)
            keys = [key_of(block, group) for block in prompt[: end + ahead]]
            window = groups.window(group)
            if window is None:
                found = _from_left(ask, keys)
            else:
                found = _from_right(ask, keys, window + ahead)
            if found == 0:
                return 0
            if found is None:
                certain = False
            else:
                end = min(end, found - ahead)
                given_back |= {group} if ahead else set()
            if end <= 0:
                return 0
            if end < before:
                if group not in groups.ahead:
                    given_back.clear()
                if not certain:
                    certain, again = True, groups.order
                elif window_seen and not again:
                    again = tuple(groups.windows or ())
            window_seen = window_seen or window is not None
            before = end
        todo = again
    return end if certain else None


def _from_left(ask: Ask, keys: Sequence[BlockKey]) -> int | None:
    found, certain = 0, True
    for key in keys:
        answer = ask(key)
        if answer is Lookup.MISS:
            break
        found += 1
        certain = certain and answer is Lookup.HIT
    return found if certain else None


def _from_right(ask: Ask, keys: Sequence[BlockKey], window: int) -> int | None:
    run, run_certain, certain = 0, True, True
    for first in reversed(range(len(keys))):
        answer = ask(keys[first])
        if answer in {Lookup.HIT, Lookup.PENDING}:
            run += 1
            run_certain = run_certain and answer is Lookup.HIT
        else:
            run, run_certain = 0, True
            certain = certain and answer is Lookup.MISS
        if run == window:
            return first + window if certain and run_certain else None
    return run if certain and run_certain else None
