"""The faults that are planted in what jobs do to tiers, one at a time."""

from __future__ import annotations

from mutant import Mutant

JOB_MUTANTS = [
    # ledger.py
    Mutant(
        "a failed read is published",
        "ledger.py",
        "if not b.condemned and b.key in ok]",
        "if not b.condemned]",
    ),
    Mutant(
        "a failed read is believed present still",
        "ledger.py",
        "                    self._believe(tier, (), bad)\n",
        "                    pass\n",
    ),
    Mutant(
        "the promotion budget is not returned",
        "ledger.py",
        "        self.promoting -= block.holds == 0",
        "        self.promoting -= 0",
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
        "            if command.job in self._jobs and not job.abandoned:",
        "            if command.job not in self._jobs and not job.abandoned:",
    ),
    Mutant(
        "what is given up stays pending",
        "ledger.py",
        "            for block in job.fill.blocks:\n"
        "                if not block.condemned:\n"
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
        "        self.epoch += not keep_tiers",
        "        self.epoch += 0",
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
        "            else:\n"
        "                self._recall(self._jobs.pop(command.job))\n"
        "        if not keep",
        "            else:\n                self._outbox.append(command)\n        if not keep",
    ),
    Mutant(
        "a recalled job counts twice",
        "ledger.py",
        "        self._live -= not job.abandoned\n"
        "        self.jobs_in_flight[command.tier] -= 1\n"
        "        if not job",
        "        self._live -= 1\n"
        "        self.jobs_in_flight[command.tier] -= 1\n"
        "        if not job",
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
        "                    request.waits.discard(job)\n"
        "                    self._hurry_past(request, tier)\n",
        "                    self._hurry_past(request, tier)\n",
    ),
    Mutant(
        "a request waits for tiers whose answer it does not need",
        "ledger.py",
        "                    request.waits.discard(job)\n"
        "                    self._hurry_past(request, tier)\n",
        "                    request.waits.discard(job)\n",
    ),
    Mutant(
        "an old probe overrules a write",
        "ledger.py",
        "                    bad = self.presence[tier].unanswered(bad, job_id)\n",
        "",
    ),
    Mutant(
        "evictions are not told",
        "ledger.py",
        "        if evicted:\n",
        "        if not evicted:\n",
    ),
    Mutant(
        "a read that ends frees nothing",
        "ledger.py",
        "                self.freed += 1\n",
        "                pass\n",
    ),
    Mutant(
        "reads that are given up stay in the queue",
        "ledger.py",
        "            self.speeds[command.tier].given_up(len(job.blocks))\n",
        "",
    ),
    Mutant(
        "who waits for an open tier waits on",
        "ledger.py",
        "        if opened:\n            self._abandon_all(tier,",
        "        if opened is None:\n            self._abandon_all(tier,",
    ),
    Mutant(
        "misses are not told to the circuit",
        "ledger.py",
        "                opened = self._circuit_of(command).missed(now, moves=job.moves)",
        "                opened = False",
    ),
    Mutant(
        "writes that fail without a reason are no failures",
        "ledger.py",
        "            problem = Fault.ERROR\n",
        "            problem = None\n",
    ),
    Mutant(
        "a part that failed is a failure of the tier",
        "ledger.py",
        "fault if fault in REPEATING or not good else None",
        "fault",
    ),
    Mutant(
        "stuck reads are not counted",
        "ledger.py",
        "            self.stuck[command.tier] += len(job.blocks)\n",
        "",
    ),
    Mutant(
        "an unsent write is sent to an open tier",
        "ledger.py",
        "            if job is not None and job.abandoned:\n",
        "            if job is not None and job.deadline < 0:\n",
    ),
    Mutant(
        "a reset sends an old answer",
        "ledger.py",
        "self._outbox.append(self.lending.recall(command, self.epoch))",
        "self._outbox.append(command)",
    ),
    Mutant(
        "old leases are renewed under a new epoch",
        "ledger.py",
        "            self.lending.end_all()\n",
        "            pass\n",
    ),
    Mutant(
        "a failed write is not repaired",
        "ledger.py",
        "                    self.cascades.owe(tier, bad)\n",
        "                    pass\n",
    ),
    Mutant(
        "a write given up is not repaired",
        "ledger.py",
        "                self.cascades.owe(command.tier, keys)\n",
        "                pass\n",
    ),
    Mutant(
        "a lost block is not repaired",
        "ledger.py",
        "        self.cascades.owe(tier, gone)\n",
        "        pass\n",
    ),
    Mutant(
        "a probe given up is owed",
        "ledger.py",
        "            if isinstance(command, Write):\n                self.cascades.owe",
        "            if True:\n                self.cascades.owe",
    ),
    # health.py
    Mutant(
        "an open tier is asked",
        "health.py",
        "        return self.state is State.HALF_OPEN and not any(self._running)",
        "        return self.state is State.HALF_OPEN",
    ),
    Mutant(
        "an open circuit is never tried",
        "health.py",
        "        if self.state is State.OPEN and now >= self._retry_at:",
        "        if self.state is State.OPEN and now < 0:",
    ),
    Mutant(
        "it is tried at once",
        "health.py",
        "self._retry_at = now + self._backoff_s",
        "self._retry_at = now",
    ),
    Mutant(
        "the backoff does not grow",
        "health.py",
        "min(2 * self._backoff_s, self._patience.backoff_max_s)",
        "self._backoff_s",
    ),
    Mutant(
        "the backoff is not reset",
        "health.py",
        "            self._backoff_s = self._patience.backoff_s\n            self.state",
        "            self.state",
    ),
    Mutant(
        "a trial may be big",
        "health.py",
        "return blocks if self.state is State.CLOSED else min(blocks, self._patience.trial_max)",
        "return blocks",
    ),
    Mutant(
        "a stall is not noticed",
        "health.py",
        "            if self._running[moves] and now >=",
        "            if not self._running[moves] and now >=",
    ),
    Mutant(
        "failures are not counted",
        "health.py",
        "        self._failures += 1\n        self._moves",
        "        self._moves",
    ),
    Mutant(
        "a success forgives nothing",
        "health.py",
        "            self._failures = 0\n            self._backoff",
        "            self._backoff",
    ),
    Mutant(
        "answered probes excuse failing reads",
        "health.py",
        "        if moved or not self._moves_fail:",
        "        if True:",
    ),
    Mutant(
        "faults that repeat are tried again",
        "health.py",
        "at_once=fault in REPEATING",
        "at_once=False",
    ),
    Mutant(
        "old jobs stall a circuit",
        "health.py",
        "        self._running = [0, 0]\n        self._retry_at",
        "        self._retry_at",
    ),
    Mutant(
        "a missed trial stays out",
        "health.py",
        "        if not (trial or at_once or",
        "        if not (at_once or",
    ),
    Mutant(
        "a late failure brings the trial forward",
        "health.py",
        "        if alive:\n            self._progress_at = [now, now]\n            self",
        "        if True:\n            self._progress_at = [now, now]\n            self",
    ),
    Mutant(
        "a late success does not count",
        "health.py",
        "            self._retry_at = min(self._retry_at, now)",
        "            pass",
    ),
    Mutant(
        "fast failures make a tier fast",
        "health.py",
        "        if brought:\n",
        "        if True:\n            brought = max(brought, 1)\n",
    ),
    Mutant(
        "slowness is for ever",
        "health.py",
        "        if self.queued:\n            return known\n",
        "        if True:\n            return known\n",
    ),
    Mutant(
        "the queue does not count",
        "health.py",
        "(self.queued + blocks) * self",
        "blocks * self",
    ),
    # cascades.py
    Mutant(
        "a cascade does not pin",
        "cascades.py",
        "        for block in fresh:\n            self._pool.pin(block)\n",
        "        for block in fresh:\n            self._pool.evictable(block)\n",
    ),
    Mutant(
        "the cascade budget is not returned",
        "cascades.py",
        "        self.writing[tier] -= len(blocks)\n        for",
        "        for",
    ),
    Mutant(
        "the cascade budget is ignored",
        "cascades.py",
        "takes(tier, self._writing_max - self.writing[tier])",
        "takes(tier, len(fresh))",
    ),
    Mutant(
        "an evicted block is owed",
        "cascades.py",
        "                    owed.pop(key, None)",
        "                    pass",
    ),
    Mutant(
        "a block offered twice is written twice",
        "cascades.py",
        "for b in dict.fromkeys(blocks) if b.key in owed]",
        "for b in blocks if b.key in owed]",
    ),
    Mutant(
        "the first touch is written",
        "cascades.py",
        "        known = [b for b in blocks if b.key in self._touched]",
        "        known = list(blocks)",
    ),
    Mutant(
        "the second touch is not written",
        "cascades.py",
        "        self._touched.update(dict.fromkeys(new))",
        "        self._touched.update({})",
    ),
    Mutant(
        "the first touch is not owed",
        "cascades.py",
        "                self.owe(TierId(place), new)",
        "                self.owe(TierId(place), ())",
    ),
    Mutant(
        "what was met is remembered without bound",
        "cascades.py",
        "len(self._touched) - self._touched_max",
        "0",
    ),
    Mutant(
        "a block held back is owed to all",
        "cascades.py",
        "            if tiers is None or place in tiers:\n                self.owe",
        "            if True:\n                self.owe",
    ),
    Mutant(
        "what is over budget is not owed",
        "cascades.py",
        "            self.owe(tier, [b.key for b in fresh[room:]])\n",
        "",
    ),
    Mutant(
        "a tier gets what it holds",
        "cascades.py",
        "[b for b in blocks if beliefs.get(b.key) != PRESENT]",
        "list(blocks)",
    ),
]
