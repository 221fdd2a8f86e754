"""The faults that are planted in what is known of blocks, one at a time."""

from __future__ import annotations

from mutant import Mutant

BLOCK_MUTANTS = [
    # pool.py
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
        "        if block.pins == 0:\n"
        "            self._policy.discard(block.key)\n"
        "        block.pins",
        "        block.pins",
    ),
    # presence.py
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
    # plans.py
    Mutant(
        "the grant ignores the budget",
        "plans.py",
        "    if whole.budget <= budget_max and not over:",
        "    if not over:",
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
        "no room is left for windows",
        "plans.py",
        "budget_max - len(in_windows))",
        "budget_max)",
    ),
    Mutant(
        "what is cut is not denied",
        "plans.py",
        "replace(kept, cut=cut)",
        "replace(kept, cut=())",
    ),
    Mutant(
        "a share of reads is ignored in a plan",
        "plans.py",
        "    if whole.budget <= budget_max and not over:",
        "    if whole.budget <= budget_max:",
    ),
    Mutant(
        "windows do not count in a share of reads",
        "plans.py",
        "    most -= sum(group_of(key) in windows for key in keys)\n",
        "",
    ),
    # boundary.py
    Mutant(
        "a group is read past the others",
        "boundary.py",
        "            beyond += over[1:]",
        "            beyond += []",
    ),
    Mutant(
        "a window beyond the boundary is read",
        "boundary.py",
        "if group in windows and end > boundary}",
        "if group in windows and end < 0}",
    ),
    Mutant(
        "a window does not bound the others",
        "boundary.py",
        "        boundary = min(ends.values())",
        "        boundary += 0",
    ),
    Mutant(
        "no look ahead",
        "boundary.py",
        "            beyond += over[1:]",
        "            beyond += over",
    ),
    Mutant(
        "answered probes excuse hung reads",
        "health.py",
        "        self._progress_at[moves] = now\n        if fault",
        "        self._progress_at = [now, now]\n        if fault",
    ),
    # what is raised
    Mutant(
        "nothing is raised",
        "ledger.py",
        "        self.cascades.raise_to(good, fill.cascade_to or ())\n",
        "",
    ),
    Mutant(
        "what could not be read is raised",
        "ledger.py",
        "        self.cascades.raise_to(good, fill.cascade_to or ())\n",
        "        self.cascades.raise_to(\n"
        "            [b for b in fill.blocks if not b.condemned], fill.cascade_to or ()\n"
        "        )\n",
    ),
    Mutant(
        "a request's blocks are raised everywhere",
        "ledger.py",
        "            raised &= request.cascade_to\n",
        "            pass\n",
    ),
    Mutant(
        "every tier raises to the same ones",
        "ledger.py",
        "        raised = self._promote_to[tier]",
        "        raised = self._promote_to[-1]",
    ),
    Mutant(
        "raised to all but those that are to get it",
        "cascades.py",
        "            if place in tiers:\n                self.offer(TierId(place), blocks)",
        "            if place not in tiers:\n                self.offer(TierId(place), blocks)",
    ),
    Mutant(
        "what is raised is filtered by its touches",
        "cascades.py",
        "            if place in tiers:\n                self.offer(TierId(place), blocks)",
        "            if place in tiers:\n                self.begin(blocks, tiers)",
    ),
    Mutant(
        "what a peer wants is raised",
        "borrowers.py",
        "        borrower = Request(name, arrival, others, frozenset(), by_block=True)",
        "        borrower = Request(name, arrival, others, by_block=True)",
    ),
    Mutant(
        "what is raised is not asked for its targets",
        "manager.py",
        "        raised = [frozenset(tiers) for tiers in promote_to] or [frozenset()] * num_tiers",
        "        raised = [frozenset[TierId]()] * num_tiers",
    ),
    Mutant(
        "a job has no bound",
        "ledger.py",
        "tuple(keys[start : start + self._limits.job_max]), request)",
        "tuple(keys), request)\n            break",
    ),
]
