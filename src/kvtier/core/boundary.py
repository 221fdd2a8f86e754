"""Where the groups of one request meet: the prompt is reused up to one boundary, in all of them.

The unit of loss is the request's hit. What one group holds beyond what another one has is worth
nothing to this request, and is not read. While full groups are not all readable, the engine does
not know the boundary yet, and a window that lies beyond it is the wrong one: it is not read, since
the engine asks for the right one later. After that it knows what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.core.requests import Position
from kvtier.core.types import GROUP_BYTES, BlockKey, group_of


def align(
    scan: Sequence[BlockKey],
    windows: frozenset[int],
    position: Position | None,
    readable: Callable[[BlockKey], bool],
) -> tuple[Sequence[BlockKey], list[BlockKey]]:
    """Cut a scan at the boundary that its groups have in common.

    Args:
        scan: keys found by one scan: heads of full groups, from the left; of each window group,
            the run that its lookup ended with, from the right.
        windows: groups that are looked up from the right.
        position: end of a key's tokens; None if unknown.
        readable: whether a key can be read in the primary now.

    Returns:
        What is worth having now, and what lies beyond the boundary in full groups. Each of them
        keeps one block more than the boundary needs: a speculating group looks one ahead.
    """
    if position is None or (not windows and _one_group(scan)):
        return scan, []
    groups: dict[int, list[BlockKey]] = {}
    for key in dict.fromkeys(scan):
        groups.setdefault(group_of(key), []).append(key)
    ends: dict[int, int] = {}
    for group, keys in groups.items():
        end = position(keys[0] if group in windows else keys[-1])
        if end is None:
            return scan, []
        ends[group] = end
    full = [end for group, end in ends.items() if group not in windows]
    boundary = min(full, default=max(ends.values(), default=0))
    wrong = {group for group, end in ends.items() if group in windows and end > boundary}
    if wrong and all(readable(key) for key in scan if group_of(key) not in windows):
        wrong = set()
    # A window group that found nothing leaves nothing to load; the engine will see that itself.
    if windows <= groups.keys() and not wrong:
        boundary = min(ends.values())
    beyond: list[BlockKey] = []
    for group, keys in groups.items():
        if group not in windows:
            over = [key for key in keys if (position(key) or 0) > boundary]
            beyond += over[1:]
    out = set(beyond)
    kept = [key for key in scan if key not in out and group_of(key) not in wrong]
    return kept, beyond


def _one_group(scan: Sequence[BlockKey]) -> bool:
    """Whether all keys are of one group: most models have but one, so this has to be quick."""
    group = scan[0][-GROUP_BYTES:] if scan else b""
    return all(key.endswith(group) for key in scan)
