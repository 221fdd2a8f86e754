"""How fast the engine computes prompts, measured from what it offloads.

vLLM tells its offloading manager nothing about speed. But the blocks that a step of prefill makes
are offered in that very step; so their tokens, over the time between the end of scheduling and the
end of the step, are its rate. Steps with few tokens say more about overhead, and are left out.
"""

from __future__ import annotations

import statistics
from collections import deque

_TOKENS_MIN = 256
_SAMPLES = 15


class PrefillMeter:
    """See the module. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._tokens = 0
        self._scheduled_at: float | None = None
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def tokens_per_s(self) -> float | None:
        """Median rate of the latest steps; None until one was seen."""
        return statistics.median(self._samples) if self._samples else None

    def scheduled(self, now: float) -> None:
        """Scheduling of a step ended, and the model runs."""
        self._scheduled_at = now

    def offered(self, tokens: int) -> None:
        """Blocks of that many tokens were offered in this step."""
        self._tokens += tokens

    def step_ended(self, now: float) -> bool:
        """The step ended; returns whether the rate was measured anew."""
        tokens, self._tokens = self._tokens, 0
        started, self._scheduled_at = self._scheduled_at, None
        if started is None or tokens < _TOKENS_MIN or now <= started:
            return False
        self._samples.append(tokens / (now - started))
        return True
