"""Is the state machine worth anything? Plant one fault at a time in the core; each must be noticed.

    python tests/machine/mutants.py            all of them
    python tests/machine/mutants.py --machine  by the machine alone, without the unit tests

Prints KILLED or SURVIVED for each and exits with 1 when one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` becomes `new`. `old` occurs exactly once."""

    what: str
    file: str
    old: str
    new: str


MUTANTS = [
    # pool, policy
    Mutant(
        "forget frees a slot under I/O",
        "pool.py",
        "        if block.pins == 0:\n            self._free",
        "        if block.pins >= 0:\n            self._free",
    ),
    Mutant(
        "the last unpin of a condemned block frees nothing",
        "pool.py",
        "            self._condemned.remove(block)\n            self._free.append(block.slot)",
        "            self._condemned.remove(block)",
    ),
    Mutant(
        "a pinned block stays evictable",
        "pool.py",
        "        if block.pins == 0:\n            self._policy.discard(block.key)\n"
        "        block.pins",
        "        block.pins",
    ),
    Mutant(
        "the most recently used is evicted", "policies/lru.py", "popitem(last=False)", "popitem()"
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
    # presence
    Mutant(
        "presence is no news",
        "presence.py",
        "                news.append(key)",
        "                pass",
    ),
    Mutant(
        "a loss is not told",
        "presence.py",
        "                lost.append(key)",
        "                pass",
    ),
    Mutant(
        "a probe hides what is present",
        "presence.py",
        "            if beliefs.get(key) != PRESENT:\n                beliefs[key] = value",
        "            beliefs[key] = value",
    ),
    Mutant(
        "absence is for ever",
        "presence.py",
        "        until = now + self._absent_ttl_s",
        "        until = now + 1e9",
    ),
    # grants
    Mutant(
        "the grant ignores the budget",
        "plans.py",
        "    if whole.budget <= budget_max:",
        "    if True:",
    ),
    Mutant(
        "residents cost nothing",
        "plans.py",
        "            slots += pool.evictable(block)",
        "            slots += 0",
    ),
    Mutant(
        "held residents are not counted against the budget",
        "plans.py",
        "            budget += block.holds == 0",
        "            budget += 0",
    ),
    Mutant(
        "windows are promoted at the wrong boundary",
        "plans.py",
        "head if cut else head + in_windows",
        "head + in_windows",
    ),
    Mutant(
        "no room is left for windows", "plans.py", "budget_max - len(in_windows))", "budget_max)"
    ),
    Mutant(
        "what is cut is not denied", "plans.py", "replace(kept, cut=cut)", "replace(kept, cut=())"
    ),
    # ledger
    Mutant(
        "a cascade does not pin",
        "ledger.py",
        "        for block in fresh:\n            self._pool.pin(block)\n",
        "        for block in fresh:\n            self._pool.evictable(block)\n",
    ),
    Mutant(
        "a failed read is published",
        "ledger.py",
        "if not b.condemned and b.key in ok]",
        "if not b.condemned]",
    ),
    Mutant(
        "a failed read is believed present still",
        "ledger.py",
        "                    self._believe(command.tier, (), bad)",
        "                    pass",
    ),
    Mutant(
        "the promotion budget is not returned",
        "ledger.py",
        "        self.promoting -= block.holds == 0",
        "        self.promoting -= 0",
    ),
    Mutant(
        "the cascade budget is not returned",
        "ledger.py",
        "                self.writing[command.tier] -= len(job.blocks)\n                if current",
        "                if current",
    ),
    Mutant(
        "the cascade budget is ignored",
        "ledger.py",
        "        room = self._limits.writing_max - self.writing[tier]",
        "        room = len(fresh)",
    ),
    Mutant(
        "the hold ignores the budget",
        "ledger.py",
        "                if room == 0:\n                    continue\n",
        "",
    ),
    Mutant(
        "holds do not expire",
        "ledger.py",
        "            if request.held and request.held_until == until:",
        "            if request.held and request.held_until < until:",
    ),
    Mutant(
        "jobs do not expire",
        "ledger.py",
        "            if job.command.job in self._jobs and not job.abandoned:",
        "            if job.command.job not in self._jobs and not job.abandoned:",
    ),
    Mutant(
        "what is given up stays pending",
        "ledger.py",
        "            for block in job.fill.blocks:\n                if not block.condemned:\n"
        "                    self._pool.forget(block)\n",
        "",
    ),
    Mutant(
        "an old epoch's results are believed",
        "ledger.py",
        "        current = command.epoch == self.epoch",
        "        current = True",
    ),
    Mutant(
        "a reset keeps the epoch",
        "ledger.py",
        "            self.epoch += 1",
        "            self.epoch += 0",
    ),
    Mutant(
        "a reset keeps beliefs of tiers",
        "ledger.py",
        "                presence.clear()\n",
        "",
    ),
    Mutant(
        "a cascade that was not sent is sent after a reset",
        "ledger.py",
        "            self._recall(self._jobs.pop(command.job))\n        self._outbox.clear()",
        "            self._jobs[command.job].waiters = {}",
    ),
    Mutant(
        "a recalled job counts twice",
        "ledger.py",
        "        self._live -= not job.abandoned\n        self.writing",
        "        self._live -= 1\n        self.writing",
    ),
    Mutant(
        "who waits for its turn holds",
        "ledger.py",
        "                if not request.queued:  # who",
        "                if True:  # who",
    ),
    Mutant(
        "who waited for a fill does not hold",
        "ledger.py",
        "                    self.hold(request, [b for b in met if b in readable])",
        "                    pass",
    ),
    Mutant(
        "the end of a probe wakes nobody",
        "ledger.py",
        "                for request in job.waiters:\n"
        "                    request.waits.discard(job)\n                if current",
        "                if current",
    ),
    Mutant(
        "an old probe overrules a write",
        "ledger.py",
        "                    bad = self.presence[command.tier].unanswered(bad, job_id)\n",
        "",
    ),
    Mutant(
        "an evicted block is owed",
        "ledger.py",
        "                    owed.pop(key, None)",
        "                    pass",
    ),
    Mutant(
        "evictions are not told", "ledger.py", "        if evicted:\n", "        if not evicted:\n"
    ),
    Mutant(
        "a block offered twice is written twice",
        "ledger.py",
        "for b in dict.fromkeys(blocks) if b.key in owed]",
        "for b in blocks if b.key in owed]",
    ),
    # manager
    Mutant(
        "no deadline for waiting",
        "manager.py",
        "            if request.deadline == deadline and not request.given_up:",
        "            if request.deadline != deadline and not request.given_up:",
    ),
    Mutant(
        "a denied key is asked for again",
        "manager.py",
        "        if request.given_up or key in request.denied:",
        "        if request.given_up:",
    ),
    Mutant(
        "a request given up waits for fills",
        "manager.py",
        "        if request.given_up:\n            return self._miss(request, block.key)\n",
        "",
    ),
    Mutant(
        "only the first group defers",
        "manager.py",
        "            if key == request.firsts.setdefault(group, key):",
        "            if key == request.firsts.setdefault(0, key):",
    ),
    Mutant(
        "half a window is promoted",
        "manager.py",
        "                request.wishes.pop(scan.pop(), None)",
        "                scan = []",
    ),
    Mutant(
        "a settled request waits for its probe",
        "manager.py",
        "            probers.pop(request, None)",
        "            probers.get(request)",
    ),
    Mutant(
        "waiting requests overtake each other",
        "manager.py",
        "            elif blocked and not request.held:",
        "            elif False:",
    ),
    Mutant(
        "who comes later does not hold what it shares",
        "manager.py",
        "            if key in request.wishes:  # since",
        "            if False:  # since",
    ),
    Mutant(
        "who holds is made to wait",
        "manager.py",
        "            if granted.missing and not request.held:\n",
        "            if granted.missing:\n",
    ),
    Mutant(
        "who was told to wait waits for ever",
        "manager.py",
        "is not None and room[0] <= last[0] and room[1] <= last[1]:",
        "is not None:",
    ),
    Mutant(
        "an old refusal is remembered",
        "manager.py",
        "                request.refused = None\n                del self",
        "                del self",
    ),
    Mutant(
        "who waits for its turn plans in each step",
        "manager.py",
        "is not None and room[0] <= last[0] and room[1] <= last[1]:",
        "is not None and room[0] < last[0]:",
    ),
    Mutant(
        "settling keeps the holds",
        "manager.py",
        "        self._ledger.let_go(request, tuple(request.held))",
        "        self._ledger.let_go(request, ())",
    ),
    Mutant(
        "a load does not pin",
        "manager.py",
        "            self.pool.pin(block)\n            blocks.append(block)\n",
        "            self.pool.evictable(block)\n",
    ),
    Mutant(
        "a failed store is published",
        "manager.py",
        "            good = [b for b in mine if b.key not in bad]",
        "            good = list(mine)",
    ),
    Mutant(
        "a store in parts ends blocks that it lost",
        "manager.py",
        "if b.fill is fill and b.key in left]",
        "if b.key in left and not b.condemned]",
    ),
    Mutant(
        "a reset does not fence loads",
        "manager.py",
        "            self._fenced += blocks\n",
        "            self._fenced += ()\n",
    ),
    Mutant(
        "a reset does not fence stores",
        "manager.py",
        "                self._fenced.append(block)\n",
        "                pass\n",
    ),
    Mutant(
        "a reset frees what the device uses",
        "manager.py",
        "        self._ledger.reset(keep_tiers=keep_tiers)\n",
        "        self._ledger.reset(keep_tiers=keep_tiers)\n        self.fence_passed()\n",
    ),
    Mutant(
        "what is there already is used twice when it is owed",
        "manager.py",
        "            self._ledger.offer_owed(old)  # first: what it pins is used by that pin\n"
        "            self.pool.use([b.key for b in reversed(old)])\n",
        "            self.pool.use([b.key for b in reversed(old)])\n"
        "            self._ledger.offer_owed(old)\n",
    ),
    Mutant(
        "the end of a request is a use",
        "manager.py",
        "self.pool.touch(reversed(request.used))",
        "self.pool.use(reversed(request.used))",
    ),
    Mutant(
        "a store takes the tail",
        "manager.py",
        "if position is not None else new)[:room]",
        "if position is not None else new)[-room:]",
    ),
]


def killed(mutant: Mutant, tests: list[str]) -> bool:
    """Whether the tests notice the fault in a temporary copy."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        skip = shutil.ignore_patterns("__pycache__")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src/kvtier/core" / mutant.file
        text = target.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.what}: occurs {text.count(mutant.old)} times"
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "KVTIER_MACHINE_NO_SHRINK": "1",
        }
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode > 1:
            raise RuntimeError(f"{mutant.what}: the tests did not run\n{done.stdout}{done.stderr}")
        return done.returncode == 1


def main() -> int:
    """Run all mutants; 1 when one survives."""
    tests = ["tests/machine/test_machine.py"]
    if "--machine" not in sys.argv[1:]:
        tests = [
            f"tests/unit/test_{n}.py" for n in ("pool", "policies", "presence", "grants", "manager")
        ] + tests
    survivors = 0
    for mutant in MUTANTS:
        start = time.monotonic()
        dead = killed(mutant, tests)
        survivors += not dead
        verdict = "KILLED  " if dead else "SURVIVED"
        print(
            f"{verdict} {time.monotonic() - start:5.1f}s {mutant.file}: {mutant.what}", flush=True
        )
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
