"""Requests that end early, and engines under pressure: right tokens, and nothing is left pinned."""

from __future__ import annotations

import pytest

from kvtier.tiers.fs.marker import mark

pytestmark = pytest.mark.engine


def scripted(root):
    return [{"type": "scripted_tier:ScriptedTierType", "name": "slow", "root_dir": str(root)}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("requests")
    mark(root, "files")  # as the scripted tier keeps blocks
    return root


@pytest.fixture(scope="module")
def writer(engines, root):
    """Another engine, whose blocks the one under test finds in the directory."""
    return engines.start("gqa", root)


@pytest.fixture(scope="module")
def engine(engines, root):
    engine = engines.start("gqa", secondary_tiers=scripted(root))
    engine.call("gate_copies")
    return engine


@pytest.fixture
def asked(engine, writer, prompt):
    """A prompt whose blocks only the tier has, and its tokens."""
    asked = prompt(500)
    expected = writer.reference(asked)
    writer.quiet()
    yield asked, expected
    for operation in ("exists", "read", "write"):
        engine.call("script", method="release", operation=operation)
        engine.call("script", method="fail", operation=operation, failing=False)
    engine.call("open_copies")
    engine.call("finish")
    engine.quiet()
    look = engine.call("look")
    assert (look["pinned"], look["jobs"], look["busy"], look["errors"]) == (0, 0, False, 0)
    assert look["requests"] == 0, "a request is remembered after its end"


@pytest.mark.parametrize("operation", ["exists", "read"])
def test_abort_while_deferred(engine, asked, operation) -> None:
    prompt, expected = asked
    engine.call("script", method="hold", operation=operation)
    name = engine.call("add", prompt=prompt)
    engine.call("step_until_waiting", operation=operation)
    assert engine.call("states") == {name: "WAITING"}
    engine.call("step", times=3)
    engine.call("abort", names=[name])
    engine.call("step", times=3)
    assert engine.call("states") == {}
    engine.call("script", method="release", operation=operation)
    engine.quiet()
    assert engine.call("look")["pinned"] == 0
    answer = engine.generate(prompt)
    assert answer.tokens == expected
    assert answer.host + answer.disk == 480, "what was read for the aborted one is used"


@pytest.mark.parametrize("operation", ["exists", "read"])
def test_others_run_while_one_is_deferred(engine, asked, prompt, operation) -> None:
    deferred, expected = asked
    engine.call("script", method="hold", operation=operation)
    name = engine.call("add", prompt=deferred)
    engine.call("step_until_waiting", operation=operation)
    other = engine.call("add", prompt=prompt(20))  # less than a block: asks no tier
    engine.call("step", times=10)
    assert engine.call("states") == {name: "WAITING"}
    engine.call("script", method="release", operation=operation)
    tokens = engine.call("finish")
    assert tokens[name] == expected[0]
    assert len(tokens[other]) == 8


def test_abort_while_loading(engine, asked) -> None:
    prompt, expected = asked
    engine.call("close_copies")
    name = engine.call("add", prompt=prompt)
    engine.call("step_until_copying")
    assert engine.call("states") == {name: "WAITING_FOR_REMOTE_KVS"}
    engine.call("abort", names=[name])
    engine.call("step", times=3)
    look = engine.call("look")
    assert look["pinned"] >= 15, "the copy still reads these blocks"
    engine.call("open_copies")
    engine.quiet()
    answer = engine.generate(prompt)
    assert answer.tokens == expected
    assert answer.cached == 480


def test_abort_while_storing(engine, asked, prompt) -> None:
    another = prompt(500)
    engine.call("close_copies")
    name = engine.call("add", prompt=another, max_tokens=50)
    engine.call("step_until_copying")
    assert engine.call("states") == {name: "RUNNING"}
    engine.call("abort", names=[name])
    engine.call("step", times=3)
    engine.call("open_copies")
    engine.quiet()
    expected = engine.generate(another, salt="computed again").tokens
    engine.drop_device()
    answer = engine.generate(another)
    assert answer.host == 480
    assert answer.tokens == expected


def test_abort_before_anything_was_scheduled(engine, asked) -> None:
    prompt, expected = asked
    name = engine.call("add", prompt=prompt)
    engine.call("abort", names=[name])
    engine.quiet()
    assert engine.generate(prompt).tokens == expected


def test_reset_while_deferred_and_while_loading(engine, asked) -> None:
    prompt, expected = asked
    engine.call("script", method="hold", operation="read")
    name = engine.call("add", prompt=prompt)
    engine.call("step_until_waiting", operation="read")
    engine.call("reset", connector=True)
    engine.call("step", times=3)
    engine.call("script", method="release", operation="read")
    assert engine.call("finish")[name] == expected[0]
    engine.drop_pool()
    assert engine.generate(prompt).tokens == expected


@pytest.mark.parametrize("operation", ["exists", "read", "write"])
def test_a_tier_that_fails_costs_its_hits_only(engine, asked, prompt, operation) -> None:
    known, expected = asked
    engine.call("script", method="fail", operation=operation, failing=True)
    answer = engine.generate(known)
    assert answer.tokens == expected
    assert answer.disk == (480 if operation == "write" else 0)
    another = prompt(300)
    engine.reference(another)
    engine.call("script", method="fail", operation=operation, failing=False)


def test_a_store_that_fails_is_never_served(engine, asked, prompt) -> None:
    another = prompt(500)
    expected = engine.generate(another, salt="computed").tokens
    engine.call("fail_copies", failing=True)
    engine.generate(another)
    engine.drop_device()
    engine.call("fail_copies", failing=False)
    answer = engine.generate(another)
    assert answer.tokens == expected
    assert answer.cached == 0, "nothing had been stored"
    engine.drop_device()
    answer = engine.generate(another)
    assert answer.tokens == expected
    assert answer.host == 480, "now it has"


def test_a_block_is_not_reused_before_its_store_has_read_it(engines, prompt) -> None:
    """Slow copies, and a device so small that every prompt takes the blocks of the last one."""
    engine = engines.start("gqa", engine={"num_gpu_blocks_override": 34})
    prompts = [prompt(900) for _ in range(3)]
    expected = [engine.reference(p)[0] for p in prompts]
    engine.drop_pool()
    engine.call("gate_copies", slow_s=0.3)
    for p in prompts:
        engine.generate(p, max_tokens=1)
    assert engine.call("open_copies") > 0, "the engine had to wait for a store"
    engine.quiet()
    engine.call("reset", connector=False)
    for p, tokens in zip(prompts, expected, strict=True):
        answer = engine.generate(p)
        assert answer.host == 896
        assert answer.tokens == [tokens]
    engine.stop()


def test_preemption_under_pressure(engines, prompt, tmp_path) -> None:
    """Four sequences grow until the device cannot hold them, with a pool that is too small too."""
    engine = engines.start(
        "gqa",
        tmp_path,
        engine={"num_gpu_blocks_override": 34, "max_model_len": 512},
        cpu_bytes_to_use="2MiB",
    )
    prompts = [prompt(220 + 7 * i) for i in range(4)]
    expected = [engine.reference(p, max_tokens=120)[0] for p in prompts]
    for _ in range(3):
        engine.drop_pool()
        names = [engine.call("add", prompt=p, max_tokens=120) for p in prompts]
        tokens = engine.call("finish")
        assert [tokens[name] for name in names] == expected
    figures = engine.quiet()
    assert figures["vllm:num_preemptions"] > 0
    assert figures["vllm:kvtier_used_slots{primary}"] <= figures["vllm:kvtier_total_slots{primary}"]
    engine.stop()


def test_a_generation_that_ends_with_a_block(engines, prompt, tmp_path) -> None:
    """With blocks of the answer stored too: the last token of a generation is in no KV yet."""
    engine = engines.start("gqa", tmp_path, offload_prompt_only=False)
    for length, new in [(40, 24), (33, 31), (64, 32), (50, 14), (50, 15), (50, 13), (96, 64)]:
        start = prompt(length)
        (answered,) = engine.generate(start, max_tokens=new).tokens
        whole = start + answered + prompt(20)
        engine.quiet()
        (expected,) = engine.generate(whole, salt="computed").tokens
        (hit,) = engine.generate(whole, salt="computed").tokens
        assert hit == expected
        engine.drop_device()
        answer = engine.generate(whole)
        assert answer.tokens == [expected], (length, new)
        assert answer.host >= (length + new - 1) // 32 * 32
        engine.drop_pool()
        answer = engine.generate(whole)
        assert answer.tokens == [expected], (length, new)
        assert answer.disk >= (length + new - 1) // 32 * 32
    engine.stop()


def test_a_prompt_longer_than_the_pool(engines, prompt, tmp_path) -> None:
    engine = engines.start("gqa", tmp_path, cpu_bytes_to_use="1MiB")
    slots = engine.call("look")["slots"]
    asked = prompt(900)
    assert slots < 28, "the pool is smaller than the prompt"
    expected = engine.reference(asked)
    for _ in range(3):
        engine.generate(asked, salt="fills the pool with something else")
        engine.drop_device()
        answer = engine.generate(asked)
        assert answer.tokens == expected
    engine.drop_pool()
    answer = engine.generate(asked)
    assert answer.tokens == expected
    assert 0 < answer.disk <= slots * 32
    engine.stop()
