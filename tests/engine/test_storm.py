"""Random traffic against a real engine, and the same tokens as ever: the whole path under pressure.

Every request that ends by itself must have the tokens of an engine without kvtier's tiers in the
way, the books must add up after every move, and nothing may be left in flight.
"""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.engine

MOVES = 250
MOVE_WEIGHTS = {
    "add": 30,
    "step": 40,
    "abort": 8,
    "hold": 5,
    "release": 8,
    "fail": 3,
    "drop device": 3,
    "drop pool": 2,
}


def storm_prompts(prompt) -> list[list[int]]:
    """Some alone, some with common beginnings."""
    stem = prompt(160)
    branch = stem + prompt(100)
    return [
        *(prompt(n) for n in (33, 64, 200, 352)),
        *(stem + prompt(n) for n in (1, 32, 150)),
        *(branch + prompt(n) for n in (5, 60, 124)),
    ]


@pytest.mark.parametrize(
    ("kind", "pool", "blocks", "chunk"),
    [("gqa", "1MiB", 34, 1), ("gqa", "2MiB", 34, 4), ("hybrid", "2MiB", 120, 1)],
)
@pytest.mark.parametrize("seed", [1])
def test_storm(engines, prompt, tmp_path, kind, pool, blocks, chunk, seed) -> None:
    prompts = storm_prompts(prompt)
    small = {"num_gpu_blocks_override": blocks, "max_model_len": 512}
    calm = engines.start(kind, None, engine={"max_model_len": 512})
    for p in prompts:
        calm.generate(p)  # so that what follows are hits of the device
    expected = [calm.generate(p).tokens[0] for p in prompts]
    calm.stop()

    engine = engines.start(
        kind,
        engine=small,
        cpu_bytes_to_use=pool,
        blocks_per_chunk=chunk,
        absent_ttl_ms=50,
        tier_stall_ms=300,
        tier_backoff_ms=10,
        tier_backoff_max_ms=20,
        secondary_tiers=[
            {"type": "scripted_tier:ScriptedTierType", "name": "slow", "root_dir": str(tmp_path)}
        ],
    )
    chance = random.Random(seed)
    alive: dict[str, int] = {}
    finished = 0

    def reap() -> None:
        nonlocal finished
        for name, tokens in engine.call("finished").items():
            which = alive.pop(name, None)
            if which is not None:
                assert tokens == expected[which], f"{name}: prompt {which}"
                finished += 1

    for _ in range(MOVES):
        (move,) = chance.choices(list(MOVE_WEIGHTS), MOVE_WEIGHTS.values())
        operation = chance.choice(["exists", "read", "write"])
        if move == "add" and len(alive) < 12:
            which = chance.randrange(len(prompts))
            alive[engine.call("add", prompt=prompts[which])] = which
        elif move == "step":
            engine.call("step", times=chance.randrange(1, 8))
        elif move == "abort" and alive:
            name = chance.choice(list(alive))
            del alive[name]
            engine.call("abort", names=[name])
        elif move == "hold":
            engine.call("script", method="hold", operation=operation, after=chance.randrange(4))
        elif move == "release":
            engine.call("script", method="release", operation=operation)
        elif move == "fail":
            failing = chance.random() < 0.5
            engine.call("script", method="fail", operation=operation, failing=failing)
        elif move == "drop device":
            engine.call("reset", connector=False)
        elif move == "drop pool":
            engine.call("reset", connector=True)
        assert engine.call("look")["errors"] == 0
        reap()
    for operation in ("exists", "read", "write"):
        engine.call("script", method="fail", operation=operation, failing=False)
        engine.call("script", method="release", operation=operation)
    for name, tokens in engine.call("finish").items():
        assert tokens == expected[alive.pop(name)]
        finished += 1
    assert not alive
    assert finished > 10
    engine.quiet()
    for _ in range(3):  # the storm is over: the tier is tried again, filled, and serves
        engine.drop_pool()
        answers = [engine.generate(p) for p in prompts]
        assert [answer.tokens[0] for answer in answers] == expected
        engine.quiet()
    figures = engine.quiet()
    assert figures["vllm:kvtier_hit_tokens{slow}"] > 0
    look = engine.call("look")
    assert (look["pinned"], look["jobs"], look["requests"]) == (0, 0, 0)
    engine.stop()
