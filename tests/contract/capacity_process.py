"""A process that uses a root: `capacity_process.py ROOT CAPACITY MIN_FREE`. It obeys lines:

write FIRST COUNT    write blocks; answers how many were written
read FIRST COUNT     read blocks; answers how many were there, and right
churn SEED           write random blocks until the next line; answers how many were written
figures              answers with JSON
lock                 keep the ledger locked until the next line
"""

from __future__ import annotations

import json
import random
import select
import sys
from pathlib import Path

from kvtier.errors import MissingBlockError, TierFullError
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of
from kvtier.tiers.fs.capacity import Capacity
from kvtier.tiers.fs.files import FilesTier
from kvtier.tiers.fs.term import SweepSettings

KEYS = 1000
"""Blocks among which `churn` chooses: many times the capacity, but few directories to list."""

QUICK = SweepSettings(interval_s=0.02, scan_s=0.2, takeover_s=2.0)


def write(tier: FilesTier, i: int) -> bool:
    key = key_of(i)
    try:
        tier.write(key, (memoryview(block_of(key)),))
    except TierFullError:
        return False
    return True


def read(tier: FilesTier, i: int) -> bool:
    key = key_of(i)
    into = bytearray(BLOCK_BYTES)
    try:
        tier.read(key, (memoryview(into),))
    except MissingBlockError:
        return False
    assert into == block_of(key), "these are not the bytes of the block"
    return True


def churn(tier: FilesTier, seed: int) -> int:
    written = 0
    choice = random.Random(seed)
    while not select.select([sys.stdin], [], [], 0)[0]:
        written += write(tier, choice.randrange(KEYS))
        read(tier, choice.randrange(KEYS))
    sys.stdin.readline()
    return written


def main() -> None:
    root, capacity_bytes, min_free_bytes = sys.argv[1:]
    capacity = Capacity(Path(root), int(capacity_bytes), int(min_free_bytes), settings=QUICK)
    tier = FilesTier(Path(root), NAMESPACE, {}, capacity.space)
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        match line.split():
            case ["write", first, count]:
                answer = str(sum(write(tier, int(first) + i) for i in range(int(count))))
            case ["read", first, count]:
                answer = str(sum(read(tier, int(first) + i) for i in range(int(count))))
            case ["churn", seed]:
                answer = str(churn(tier, int(seed)))
            case ["figures"]:
                answer = json.dumps(dict(capacity.figures()))
            case ["lock"]:
                with capacity.space.ledger.change(5.0):
                    print("locked", flush=True)
                    sys.stdin.readline()
                answer = "unlocked"
            case _:
                break
        print(answer, flush=True)
    tier.close()
    capacity.close()


if __name__ == "__main__":
    main()
