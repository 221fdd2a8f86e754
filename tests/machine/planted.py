"""The faults that are planted in the core, one at a time."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = [
    # pool.py
    Mutant(
        "forget frees a slot under I/O",
        "pool.py",
        "        if block.pins == 0:\n"
        "            self._policy.discard(block.key)\n"
        "            self._free",
        "        if block.pins >= 0:\n"
        "            self._policy.touch(block.key)\n"
        "            self._free",
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
    # policies/lru.py
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
        "                for request in job.waiters:\n"
        "                    request.waits.discard(job)\n"
        "                if current",
        "                if current",
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
        "        return self.state is State.HALF_OPEN and self._running == 0",
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
        "        if not self._running or now <",
        "        if self._running or now <",
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
        "        self._failures = self._running = self._moving = 0",
        "        self._failures = 0",
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
        "        if alive:\n            self._progress_at = now\n            self",
        "        if True:\n            self._progress_at = now\n            self",
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
    # lending.py
    Mutant(
        "lending does not pin",
        "lending.py",
        "                self.pool.pin(block)\n",
        "                self.pool.evictable(block)\n",
    ),
    Mutant(
        "more is lent than may be",
        "lending.py",
        "            elif len(blocks) == room:",
        "            elif len(blocks) == room + 1:",
    ),
    Mutant(
        "what is lent is not given back",
        "lending.py",
        "        self.lent -= len(lease.blocks)\n",
        "",
    ),
    Mutant(
        "what fills is lent",
        "lending.py",
        "            if block is None or not block.ready:",
        "            if block is None:",
    ),
    Mutant(
        "the end of a lease frees its slots",
        "lending.py",
        "            if now >= lease.until:\n",
        "            if now >= lease.until:\n                self._give_back(lease)\n",
    ),
    Mutant(
        "leases do not end",
        "lending.py",
        "            if now >= lease.until:",
        "            if now < 0:",
    ),
    Mutant(
        "a lease is renewed for ever",
        "lending.py",
        "min(now + self.lease_s, lease.at_most_until)",
        "now + self.lease_s",
    ),
    Mutant(
        "a renewal that is late counts",
        "lending.py",
        " and now < lease.until:",
        ":",
    ),
    Mutant(
        "what is not lent is not told",
        "lending.py",
        "                missing.append(key)\n            elif",
        "                pass\n            elif",
    ),
    # borrowers.py
    Mutant(
        "a tier is asked for what it wants itself",
        "borrowers.py",
        "if tier != wanted.tier",
        "if True",
    ),
    Mutant(
        "a borrower is answered too early",
        "borrowers.py",
        "            if not self._waits(borrower, wanted):",
        "            if self._waits(borrower, wanted) or True:",
    ),
    Mutant(
        "a borrower keeps what it held",
        "borrowers.py",
        "        self._settle(borrower)\n",
        "        pass\n",
    ),
    Mutant(
        "a gap ends a borrower's window",
        "borrowers.py",
        "by_block=True",
        "by_block=False",
    ),
    Mutant(
        "more is read than may be lent",
        "borrowers.py",
        "islice(dict.fromkeys(wanted.keys), self._lending_max)",
        "islice(dict.fromkeys(wanted.keys), None)",
    ),
    Mutant(
        "borrowers queue without bound",
        "borrowers.py",
        " or len(self._waiting) >= self._lending_max",
        "",
    ),
    # admission.py
    Mutant(
        "who waits for its turn waits for an open tier",
        "admission.py",
        "            self._dismiss()\n",
        "            pass\n",
    ),
    Mutant(
        "waiting requests overtake each other",
        "admission.py",
        "            elif blocked and not request.held:",
        "            elif False:",
    ),
    Mutant(
        "who comes later does not hold what it shares",
        "admission.py",
        "            if key in request.wishes:  # since",
        "            if False:  # since",
    ),
    Mutant(
        "who holds is made to wait",
        "admission.py",
        "            if granted.missing and not request.held:\n",
        "            if granted.missing:\n",
    ),
    Mutant(
        "an old refusal is remembered",
        "admission.py",
        "                request.refused = None\n                del self",
        "                del self",
    ),
    Mutant(
        "who was told to wait waits for ever",
        "admission.py",
        "free[0] == last[0] and free[1] <= last[1]:",
        "True:",
    ),
    Mutant(
        "who waits for its turn plans in each step",
        "admission.py",
        "free[0] == last[0] and free[1] <= last[1]:",
        "free[0] < last[0]:",
    ),
    Mutant(
        "wishes are granted of a tier that is on trial",
        "admission.py",
        "        if not all(reads[tier].allows(now) for tier in set(request.wishes.values())):\n"
        "            return False\n",
        "        reads, now\n",
    ),
    Mutant(
        "reads take more than their share",
        "admission.py",
        "reading[t] + len(keys) <= self._reading_max for",
        "reading[t] <= self._reading_max for",
    ),
    Mutant(
        "hung reads do not count",
        "admission.py",
        "self._reading_max - ledger.stuck[tier]",
        "self._reading_max",
    ),
    Mutant(
        "a slow tier is read all the same",
        "admission.py",
        "            if speeds[tier].expect(len(keys), now) > patience",
        "            if speeds[tier].expect(len(keys), now) < 0",
    ),
    Mutant(
        "the deadline does not matter for a slow tier",
        "admission.py",
        "        patience = request.deadline - now\n",
        "        patience = 1e9\n",
    ),
    Mutant(
        "a slow tier costs all blocks",
        "admission.py",
        "            for key in keys\n        ]",
        "            for key in (k for some in by_tier.values() for k in some)\n        ]",
    ),
    Mutant(
        "groups add up when computing is estimated",
        "admission.py",
        "max(groups.values(), default=0)",
        "sum(groups.values())",
    ),
    Mutant(
        "waits are not shortened",
        "admission.py",
        "            self.hurry(request, computing)",
        "            pass",
    ),
    Mutant(
        "what others fill is computed in no time",
        "admission.py",
        "self.computing_s((*granted.missing, *granted.filling))",
        "self.computing_s(granted.missing)",
    ),
    # manager.py
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
        "a store takes the tail",
        "manager.py",
        "if position is not None else new)[:room]",
        "if position is not None else new)[-room:]",
    ),
    Mutant(
        "a wait may be too short",
        "manager.py",
        "max(seconds, self._limits.wait_min_s)",
        "seconds",
    ),
    Mutant(
        "a later deadline replaces an earlier one",
        "manager.py",
        "        if request.deadline is None or deadline < request.deadline:",
        "        if True:",
    ),
    Mutant(
        "the slowest tier is read",
        "manager.py",
        "sorted(readable, key",
        "sorted(readable[::-1], key",
    ),
    Mutant(
        "speed does not matter",
        "manager.py",
        "key=lambda t: ledger.speeds[t].expect(1, now)",
        "key=lambda t: t",
    ),
    Mutant(
        "an open tier is probed",
        "manager.py",
        "                if self._ledger.reads[tier].allows(self._now):\n",
        "                if True:\n",
    ),
    Mutant(
        "stores take more than their share",
        "manager.py",
        "min(self.pool.available, self._storing_max - self._ledger.storing)",
        "self.pool.available",
    ),
    Mutant(
        "the share of stores is not returned",
        "manager.py",
        "            self._ledger.storing -= len(mine)\n",
        "",
    ),
    Mutant(
        "a reset keeps the share of stores",
        "manager.py",
        "        self._ledger.storing = 0\n",
        "",
    ),
    Mutant(
        "a request's blocks go everywhere",
        "manager.py",
        "            self._ledger.cascades.begin(good, fill.cascade_to)",
        "            self._ledger.cascades.begin(good, None)",
    ),
    Mutant(
        "a borrower stays after a new epoch",
        "manager.py",
        "            self._borrowers.dismiss()\n",
        "            pass\n",
    ),
]
