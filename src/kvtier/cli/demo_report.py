"""What the demo found: its phases, whether they are good, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

TIERS: Final = ("device", "dram", "fs")

OWN_TIER: Final[Mapping[str, str | None]] = {
    "cold": None,
    "device": "device",
    "dram": "dram",
    "disk": "fs",
    "restart": "fs",
}
"""The phases in their order, each with the tier that must serve it (None: nothing can)."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One request for the demo's prompt, and where its prefix came from."""

    name: str
    ttft_s: float
    """Time to first token, seconds."""
    recompute_ttft_s: float
    """Time to first token of unseen prompts of the same length: median, seconds."""
    tokens_equal: bool
    """Whether its greedy tokens are those of the device hit."""
    hit_tokens: Mapping[str, int]
    """Prompt tokens that were not computed, by tier that served them."""

    @property
    def ratio(self) -> float:
        """How many times faster than recomputing."""
        return self.recompute_ttft_s / self.ttft_s

    def problem(self) -> str | None:
        """Why this phase is not good, in a sentence; None when it is.

        A cold prefill may differ from a hit in the last bits of its KV, whatever kvtier does, so
        its tokens are shown and not judged.
        """
        tier = OWN_TIER[self.name]
        if tier is None:
            return None
        if not self.tokens_equal:
            return f"phase {self.name}: greedy tokens differ from those of the device hit"
        if not self.hit_tokens.get(tier, 0):
            return f"phase {self.name}: no token was served by {tier}"
        return None


@dataclass(frozen=True, slots=True)
class Report:
    """All phases of one run of the demo."""

    phases: Sequence[Phase]

    @property
    def ok(self) -> bool:
        """Whether every phase was measured, hit its own tier and gave equal tokens."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What is not good, a sentence each."""
        measured = {phase.name for phase in self.phases}
        missing = [f"phase {name} was not measured" for name in OWN_TIER if name not in measured]
        return missing + [problem for phase in self.phases if (problem := phase.problem())]

    def as_json(self) -> str:
        """One line: `{"phases": [{"name", "ttft_s", ..., "hit_tokens"}], "ok"}`."""
        return json.dumps(
            {
                "phases": [
                    {
                        "name": phase.name,
                        "ttft_s": round(phase.ttft_s, 6),
                        "recompute_ttft_s": round(phase.recompute_ttft_s, 6),
                        "ratio": round(phase.ratio, 3),
                        "tokens_equal": phase.tokens_equal,
                        "hit_tokens": dict(phase.hit_tokens),
                    }
                    for phase in self.phases
                ],
                "ok": self.ok,
            }
        )

    def as_table(self) -> Table:
        """The same for people, one row per phase."""
        from rich.table import Table

        table = Table(
            title="One prompt, served from each tier",
            caption="device, dram, fs: prompt tokens served by that tier; "
            "equal: the greedy tokens are those of the device hit",
        )
        table.add_column("phase")
        for column in ("first token", "recompute", "faster", *TIERS):
            table.add_column(column, justify="right")
        table.add_column("equal")
        for phase in self.phases:
            table.add_row(
                phase.name,
                f"{phase.ttft_s:.3f} s",
                f"{phase.recompute_ttft_s:.3f} s",
                f"{phase.ratio:.1f} x",
                *(f"{phase.hit_tokens.get(tier, 0):,}" for tier in TIERS),
                "yes" if phase.tokens_equal else "no",
            )
        return table
