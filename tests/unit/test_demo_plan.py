"""Which tiers the demo takes, and which phases it makes of them."""

from __future__ import annotations

import itertools

import pytest

from kvtier.cli.demo_plan import DEMO_TIERS, Before, DemoPlan, parse_tiers, plan_for
from kvtier.errors import ConfigError

EVERY_CHOICE = [
    chosen
    for count in range(1, len(DEMO_TIERS) + 1)
    for chosen in itertools.combinations(DEMO_TIERS, count)
]


def served_by(plan: DemoPlan) -> list[tuple[str, str | None]]:
    return [(step.name, step.tier) for step in plan.steps]


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("fs", ("fs",)),
        ("object", ("object",)),
        ("object,fs", ("fs", "object")),
        (" object , valkey ", ("valkey", "object")),
        ("object,valkey,fs", ("fs", "valkey", "object")),
    ],
)
def test_tiers_are_arranged_from_the_fastest(text: str, tiers: tuple[str, ...]) -> None:
    assert parse_tiers(text) == tiers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objct", "'objct' is no tier of the demo (did you mean 'object'?): there are fs, valkey"),
        ("fs,Valkey", "'Valkey' is no tier of the demo (did you mean 'valkey'?)"),
        ("xyz", "--tiers = 'xyz': 'xyz' is no tier of the demo: there are fs, valkey, object"),
        ("", "'' is no tier of the demo: there are"),
        ("fs,", "--tiers = 'fs,': '' is no tier of the demo"),
        ("fs,object,fs", "--tiers = 'fs,object,fs' has 'fs' twice: name each tier once"),
    ],
)
def test_what_is_no_list_of_tiers_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tiers(text)
    assert message in str(refused.value)


def test_fs_alone_has_the_phases_that_it_always_had() -> None:
    assert served_by(plan_for(("fs",))) == [
        ("cold", None),
        ("device", "device"),
        ("dram", "dram"),
        ("disk", "fs"),
        ("restart", "fs"),
    ]


@pytest.mark.parametrize("tier", ["object", "valkey"])
def test_another_tier_alone_takes_the_place_of_disk(tier: str) -> None:
    plan = plan_for((tier,))
    assert served_by(plan)[2:] == [("dram", "dram"), (tier, tier), ("restart", tier)]
    assert plan.sources == ("device", "dram", tier)
    assert [life.emptied for life in plan.lives] == [(), ()]


def test_two_tiers() -> None:
    plan = plan_for(("fs", "object"))
    assert served_by(plan)[3:] == [
        ("disk", "fs"),
        ("restart", "fs"),
        ("object", "object"),
        ("promoted", "fs"),
    ]
    assert [life.emptied for life in plan.lives] == [(), (), ("fs",)]
    assert [step.before for step in plan.lives[-1].steps] == [Before.NOTHING, Before.DROP_POOL]
    assert plan.steps[-2].note == "the engine ended, fs was emptied, another one began"
    assert plan.steps[-1].note.endswith("fs got it back from object")


def test_three_tiers() -> None:
    plan = plan_for(("fs", "valkey", "object"))
    assert served_by(plan)[4:] == [
        ("restart", "fs"),
        ("valkey", "valkey"),
        ("object", "object"),
        ("promoted", "fs"),
    ]
    assert [life.emptied for life in plan.lives] == [(), (), ("fs",), ("fs", "valkey")]
    assert "fs and valkey were emptied" in plan.steps[-2].note


@pytest.mark.parametrize("tiers", EVERY_CHOICE)
def test_every_plan_can_be_what_it_says(tiers: tuple[str, ...]) -> None:
    """Played with sets: what serves a phase has the prompt, and nothing faster does."""
    plan = plan_for(tiers)
    assert len({step.name for step in plan.steps}) == len(plan.steps)
    assert set(tiers) <= {step.tier for step in plan.steps}
    has: set[str] = set()
    for life in plan.lives:
        has -= {"device", "dram", *life.emptied}
        for step in life.steps:
            if step.before is Before.OVERFLOW:
                has.discard("device")
            if step.before is Before.DROP_POOL:
                has -= {"device", "dram"}
            fastest = next((source for source in plan.sources if source in has), None)
            assert fastest == step.tier, step
            faster = plan.sources[: plan.sources.index(fastest)] if fastest else plan.sources
            has |= set(faster)
    assert not any(tiers[-1] in life.emptied for life in plan.lives)
