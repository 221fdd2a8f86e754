"""What the demo does for which tiers: its phases in their order, and what is emptied before each.

Tiers are arranged from the fastest to the slowest, however they are given. With one tier:

cold     nothing is cached
device   nothing is emptied
dram     unseen prompts have overflowed the device cache
TIER     the device cache and the pool are emptied; `disk` for fs
restart  another engine is started over the same tier

With several, the first one serves the last two of these, and each slower one has a phase for which
another engine is started, after all faster tiers were emptied. In the life of the last,

promoted the device cache and the pool are emptied; the first tier has the prompt back
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier.errors import ConfigError

DEMO_TIERS: Final = ("fs", "valkey", "object")
"""Tiers that the demo can show, the fastest first."""

DEFAULT_TIERS: Final = "fs"


class Before(Enum):
    """What happens in an engine right before a phase."""

    NOTHING = "nothing"
    OVERFLOW = "overflow"  # unseen prompts push the prompt out of the device cache
    DROP_POOL = "drop_pool"  # the device cache and the pool are emptied


@dataclass(frozen=True, slots=True)
class Step:
    """One phase.

    Attributes:
        name: unique in a plan.
        tier: that must serve it; None: nothing can.
        before: what happens first.
        note: for people, what is emptied before it.
    """

    name: str
    tier: str | None
    before: Before
    note: str


@dataclass(frozen=True, slots=True)
class Life:
    """The phases of one engine.

    Attributes:
        emptied: tiers that lose everything before it starts.
        steps: at least one.
    """

    emptied: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """All of it.

    Attributes:
        tiers: secondary tiers, the fastest first.
        lives: engines one after the other.
    """

    tiers: tuple[str, ...]
    lives: tuple[Life, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every phase in its order."""
        return tuple(step for life in self.lives for step in life.steps)

    @property
    def sources(self) -> tuple[str, ...]:
        """Everything that can serve a token, the fastest first."""
        return ("device", "dram", *self.tiers)


def parse_tiers(text: str) -> tuple[str, ...]:
    """The tiers of a list such as `fs,object`, the fastest first.

    Raises:
        ConfigError: a name is no tier of the demo, or is there twice.
    """
    names = [name.strip() for name in text.split(",")]
    allowed = f"there are {', '.join(DEMO_TIERS)}, one or several with commas between them"
    for name in names:
        if name not in DEMO_TIERS:
            near = difflib.get_close_matches(name.lower(), DEMO_TIERS, n=1)
            advice = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"--tiers = {text!r}: {name!r} is no tier of the demo{advice}: {allowed}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"--tiers = {text!r} has {name!r} twice: name each tier once")
    return tuple(name for name in DEMO_TIERS if name in names)


def plan_for(tiers: tuple[str, ...]) -> DemoPlan:
    """The plan for tiers, as `parse_tiers` arranges them."""
    first = tiers[0]
    lives = [
        Life(
            (),
            (
                Step("cold", None, Before.NOTHING, "nothing is cached anywhere"),
                Step("device", "device", Before.NOTHING, "nothing was emptied"),
                Step("dram", "dram", Before.OVERFLOW, "other prompts overflowed the device cache"),
                Step(
                    "disk" if first == "fs" else first,
                    first,
                    Before.DROP_POOL,
                    "device cache and pool were emptied",
                ),
            ),
        ),
        Life((), (Step("restart", first, Before.NOTHING, "the engine ended, another one began"),)),
    ]
    for place, tier in enumerate(tiers[1:], start=1):
        lost = tiers[:place]
        note = f"the engine ended, {_and(lost)} emptied, another one began"
        steps = [Step(tier, tier, Before.NOTHING, note)]
        if tier == tiers[-1]:
            note = f"device cache and pool were emptied; {first} got it back from {tier}"
            steps.append(Step("promoted", first, Before.DROP_POOL, note))
        lives.append(Life(lost, tuple(steps)))
    return DemoPlan(tiers, tuple(lives))


def _and(names: tuple[str, ...]) -> str:
    return f"{names[0]} was" if len(names) == 1 else f"{' and '.join(names)} were"
