"""How much of what a request wishes it gets. Pure arithmetic over a scan.

A request holds nothing until all that it is granted fits, and is never made to wait while it
holds something: so there is no hold-and-wait. What is beyond the budget is cut off at once, so a
prefix longer than the pool is served as its longest head that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.core.pool import BlockPool
from kvtier.core.types import BlockKey, TierId, group_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What granting a scan would take.

    Attributes:
        missing: keys to promote, in the order asked.
        resident: readable keys to pin, in the order asked.
        filling: keys that another request or the device fills, in the order asked.
        slots: slots it takes from what is available now: promoted ones and evictable residents.
        budget: what it adds to the promotion budget.
        cut: keys beyond the budget: to be denied.
    """

    missing: tuple[BlockKey, ...]
    resident: tuple[BlockKey, ...]
    filling: tuple[BlockKey, ...]
    slots: int
    budget: int
    cut: tuple[BlockKey, ...] = ()


def plan(
    scan: Sequence[BlockKey],
    wishes: Mapping[BlockKey, TierId],
    pool: BlockPool,
    budget_max: int,
    windows: frozenset[int],
    rooms: Mapping[TierId, int] | None = None,
) -> Plan:
    """Plan a grant for one scan.

    Args:
        scan: keys in the order in which the engine asked for them.
        wishes: keys of the scan that only a tier holds.
        pool: the primary tier.
        budget_max: slots that one grant may take at most.
        windows: cache groups that are looked up from the right.
        rooms: keys that may be read from a tier at most; no bound where none is named.
    """
    whole = _measure(scan, wishes, pool)
    tiers = Counter([wishes[key] for key in whole.missing])
    over = {t: rooms[t] for t, n in tiers.items() if n > rooms.get(t, n)} if rooms else {}
    if whole.budget <= budget_max and not over:
        return whole
    reads = {t: [k for k in whole.missing if wishes[k] == t] for t in over}
    head, in_windows, tail = _cut(scan, budget_max, windows, [(reads[t], over[t]) for t in over])
    cut = tuple(key for key in tail if key in wishes)
    # A cut moves the boundary of the windows: the engine asks for them when it has the head.
    kept = _measure(head if cut else head + in_windows, wishes, pool)
    return replace(kept, cut=cut)


def _measure(scan: Sequence[BlockKey], wishes: Mapping[BlockKey, TierId], pool: BlockPool) -> Plan:
    missing: dict[BlockKey, None] = {}
    resident: dict[BlockKey, None] = {}
    filling: dict[BlockKey, None] = {}
    slots = budget = 0
    for key in scan:
        block = pool.blocks.get(key)
        if block is None:
            if key in wishes and key not in missing:
                missing[key] = None
                slots += 1
                budget += 1
        elif not block.ready:
            filling[key] = None
        elif key not in resident:
            resident[key] = None
            slots += pool.evictable(block)
            budget += block.holds == 0
    return Plan(tuple(missing), tuple(resident), tuple(filling), slots, budget)


def _cut(
    scan: Sequence[BlockKey],
    budget_max: int,
    windows: frozenset[int],
    reads: Sequence[tuple[Sequence[BlockKey], int]],
) -> tuple[list[BlockKey], list[BlockKey], list[BlockKey]]:
    """Split a scan: heads of the full groups, all at about the same boundary; windows; the rest.

    Room is left for the windows as a whole: a part of a window is worth nothing. `reads` are the
    keys of one tier each, and how many of them may be read.
    """
    groups: dict[int, list[BlockKey]] = {}
    for key in dict.fromkeys(scan):
        groups.setdefault(group_of(key), []).append(key)
    in_windows = [k for group, keys in groups.items() if group in windows for k in keys]
    in_full = sum(len(keys) for group, keys in groups.items() if group not in windows)
    room = max(0, min(in_full, budget_max - len(in_windows)))
    for keys, most in reads:
        room = min(room, _room_until(keys, most, groups, windows, in_full))
    head: list[BlockKey] = []
    tail: list[BlockKey] = []
    for group, keys in groups.items():
        if group not in windows:
            # Every full group ends at the same share of its keys: the same token boundary.
            keep = min(len(keys), len(keys) * room // in_full)
            head += keys[:keep]
            tail += keys[keep:]
    if len(in_windows) > budget_max or room < 0 or (in_full and not room):
        return [], [], tail + in_windows
    return head, in_windows, tail


def _room_until(
    keys: Sequence[BlockKey],
    most: int,
    groups: Mapping[int, Sequence[BlockKey]],
    windows: frozenset[int],
    in_full: int,
) -> int:
    """The room with which heads hold no more than `most` of these keys; -1 if none does."""
    of_tier = set(keys)
    most -= sum(group_of(key) in windows for key in keys)
    if most < 0:
        return -1
    # A head holds its key at place i when the room is at least this much.
    needs = [
        -(-(place + 1) * in_full // len(asked))
        for group, asked in groups.items()
        if group not in windows
        for place, key in enumerate(asked)
        if key in of_tier
    ]
    return sorted(needs)[most] - 1 if most < len(needs) else in_full
