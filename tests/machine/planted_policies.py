"""The faults that are planted in the eviction policies, one at a time."""

from __future__ import annotations

from mutant import Mutant

POLICY_MUTANTS = [
    Mutant(
        "the most recently used is evicted",
        "policies/lru.py",
        "popitem(last=False)",
        "popitem()",
    ),
    Mutant(
        "a touch does not count",
        "policies/lru.py",
        "            self._order.move_to_end(key)",
        "            pass",
    ),
    Mutant("what is pinned is not forgotten", "pool.py", "self._policy.forget(block.key)", "pass"),
    Mutant(
        "a scan passes through the main queue",
        "policies/s3fifo.py",
        "len(small) > self._small_max or not main",
        "not main",
    ),
    Mutant("used once is used twice", "policies/s3fifo.py", "uses[key] > 1", "uses[key] > 0"),
    Mutant(
        "a pinned key is a victim of the small queue",
        "policies/s3fifo.py",
        "small.popitem(last=False)\n                if key in pinned:",
        "small.popitem(last=False)\n                if False:",
    ),
    Mutant(
        "a pinned key is a victim of the main queue",
        "policies/s3fifo.py",
        "main.popitem(last=False)\n                if key in pinned:",
        "main.popitem(last=False)\n                if False:",
    ),
    Mutant(
        "a pinned key loses its place",
        "policies/s3fifo.py",
        "            if key not in self._small:\n",
        "            if self._small.pop(key, True):\n",
    ),
    Mutant(
        "who was set aside does not come back",
        "policies/s3fifo.py",
        "            if key not in self._small:\n",
        "            if key in self._main:\n",
    ),
    Mutant(
        "a pin is no use for S3-FIFO",
        "policies/s3fifo.py",
        "                self._uses[key] += 1\n            return",
        "                self._uses[key] += 0\n            return",
    ),
    Mutant(
        "ghosts of S3-FIFO are not bounded",
        "policies/s3fifo.py",
        "if len(self._ghosts) > self._ghosts_max:",
        "if False:",
    ),
    Mutant(
        "a forgotten key keeps its pin",
        "policies/s3fifo.py",
        "            self._pinned.discard(key)\n",
        "",
    ),
    Mutant(
        "a key of ARC comes back to the wrong list",
        "policies/arc.py",
        "            self._pinned.remove(key)\n            self._often[key] = None",
        "            self._pinned.remove(key)\n            self._once[key] = None",
    ),
    Mutant("a touch promotes", "policies/arc.py", "self._once.move_to_end(key)", "self.use(key)"),
    Mutant("the target does not rise", "policies/arc.py", "self._target + step)", "0.0)"),
    Mutant("the target does not fall", "policies/arc.py", "self._target - step)", "self._target)"),
    Mutant(
        "ghosts of ARC are not bounded",
        "policies/arc.py",
        "while len(once_ghosts) + len(often_ghosts) > self._capacity:",
        "while False:",
    ),
    Mutant(
        "ghosts of `once` are not bounded",
        "policies/arc.py",
        "while once_ghosts and len(self._once) + len(once_ghosts) > self._capacity:",
        "while False:",
    ),
    Mutant(
        "ARC insists on a list that is in use",
        "policies/arc.py",
        " or not self._often)",
        ")",
    ),
    Mutant(
        "what is there already is used twice when it is owed",
        "manager.py",
        "            self._ledger.cascades.offer_owed(old)  # first: what it pins is used by that "
        "pin\n            self.pool.use([b.key for b in reversed(old)])\n",
        "            self.pool.use([b.key for b in reversed(old)])\n"
        "            self._ledger.cascades.offer_owed(old)\n",
    ),
    Mutant(
        "the end of a request is a use",
        "manager.py",
        "self.pool.touch(reversed(request.used))",
        "self.pool.use(reversed(request.used))",
    ),
]
