"""What the demo found: its phases, whether they are good, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.cli.demo_plan import DEFAULT_TIERS, DemoPlan, parse_tiers, plan_for
from kvtier.config import PRIMARY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

DEFAULT_PLAN: Final = plan_for(parse_tiers(DEFAULT_TIERS))

UNATTRIBUTED: Final = "unattributed"
"""Source of tokens that vLLM counts as cached, and kvtier does not count for any tier."""


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

    def problem(self, tier: str | None) -> str | None:
        """Why this phase is not good, in a sentence; None when it is.

        A cold prefill may differ from a hit in the last bits of its KV, whatever kvtier does, so
        its tokens are shown and not judged.

        Args:
            tier: that must serve it; None: nothing can.
        """
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
    plan: DemoPlan = DEFAULT_PLAN

    @property
    def ok(self) -> bool:
        """Whether every phase was measured, hit its own tier and gave equal tokens."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What is not good, a sentence each."""
        own = {step.name: step.tier for step in self.plan.steps}
        measured = {phase.name for phase in self.phases}
        missing = [f"phase {name} was not measured" for name in own if name not in measured]
        found = (phase.problem(own[phase.name]) for phase in self.phases)
        return missing + [problem for problem in found if problem]

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
        """The same for people, one row per phase.

        Other tiers than fs alone need more columns, and phases that explain themselves.
        """
        from rich.table import Table

        table = Table(
            title="One prompt, served from each tier",
            caption=f"{', '.join(self.plan.sources)}: prompt tokens served by that tier; "
            "equal: the greedy tokens are those of the device hit",
        )
        narrow = self.plan.tiers != DEFAULT_PLAN.tiers
        first_token, recompute = "first token", "recompute"
        if narrow:
            self._make_narrow(table)
            first_token, recompute = "first\ntoken", "recom-\npute"
        table.add_column("phase")
        for column in (first_token, recompute, "faster", *self.plan.sources):
            table.add_column(column, justify="right")
        table.add_column("equal")
        for phase in self.phases:
            table.add_row(
                phase.name,
                f"{phase.ttft_s:.{_places(phase.ttft_s, 3, narrow)}f} s",
                f"{phase.recompute_ttft_s:.{_places(phase.recompute_ttft_s, 3, narrow)}f} s",
                f"{phase.ratio:.{_places(phase.ratio, 1, narrow)}f} x",
                *(f"{phase.hit_tokens.get(tier, 0):,}" for tier in self.plan.sources),
                "yes" if phase.tokens_equal else "no",
            )
        return table

    def _make_narrow(self, table: Table) -> None:
        """Three tiers fit a terminal of 80 columns; below are the notes of the phases."""
        from rich.box import SIMPLE_HEAD

        table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
        width = max(len(step.name) for step in self.plan.steps)
        notes = "\n".join(f"{step.name:{width}}  {step.note}" for step in self.plan.steps)
        table.caption, table.caption_justify = f"\n{notes}\n\n{table.caption}", "left"


def _places(value: float, most: int, narrow: bool) -> int:
    """Decimal places: in a narrow table none that would make it longer than 9.99 would be."""
    return max(0, most - len(f"{value:.0f}") + 1) if narrow else most


def hit_tokens_of(
    by_source: Mapping[str, int], by_tier: Mapping[str, int], plan: DemoPlan
) -> dict[str, int]:
    """Prompt tokens by what served them: all sources of the plan, and `UNATTRIBUTED` if there are.

    Args:
        by_source: vLLM's count; it knows the device, and kinds of tiers.
        by_tier: kvtier's count, by name of the tier.
        plan: names the sources.
    """
    by_tier = {"dram" if tier == PRIMARY_NAME else tier: n for tier, n in by_tier.items()}
    hits = {"device": by_source.get("device", 0)}
    hits.update({tier: by_tier.get(tier, 0) for tier in plan.sources[1:]})
    if rest := sum(by_source.values()) - sum(hits.values()):
        hits[UNATTRIBUTED] = rest
    return hits
