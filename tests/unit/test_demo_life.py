"""The demo's engine process: what it answers, and that nothing of it is left behind.

A package named `vllm` stands in for the engine; processes, sockets and signals are real.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvtier.cli.demo_life import DemoError, engine_life
from kvtier.cli.demo_lines import Start

ENGINE = """
import os, subprocess, sys
from types import SimpleNamespace as Namespace

class SamplingParams:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens

class LLM:
    hits = 0
    def __init__(self, model, **options):
        print("chatter about", model, flush=True)
        if model == "broken":
            raise RuntimeError("no memory")
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["PIDS"], "w") as pids:
            pids.write(f"{os.getpid()} {self.child.pid}")
    def generate(self, prompt, parameters, use_tqdm):
        if prompt["prompt_token_ids"] == [666]:
            os._exit(3)
        LLM.hits += 32
        outputs = [Namespace(token_ids=[7] * parameters.max_tokens)]
        return [Namespace(outputs=outputs, metrics=Namespace(first_token_latency=0.5))]
    def get_metrics(self):
        name = "vllm:prompt_tokens_cached_by_source"
        ours = "vllm:kvtier_hit_tokens"
        return [
            Namespace(name=name, labels={"source": "host"}, value=LLM.hits),
            Namespace(name=ours, labels={"tier": "primary"}, value=LLM.hits / 2),
            Namespace(name=ours, labels={"tier": "object"}, value=LLM.hits / 2),
        ]
    def reset_prefix_cache(self, reset_connector):
        return False
    def __del__(self):
        if hasattr(self, "child"):
            self.child.kill()
            self.child.wait()
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(ENGINE)
    (package / "config.py").write_text("def KVTransferConfig(**options): return options\n")
    (package / "inputs.py").write_text("TokensPrompt = dict\n")
    paths = [str(tmp_path), str(Path(__file__).parents[2] / "src")]
    return {"PYTHONPATH": os.pathsep.join(paths), "PIDS": str(tmp_path / "pids")}


def start(model: str = "model") -> Start:
    return Start(
        model=model,
        max_len=64,
        tokens_per_block=32,
        device_blocks=4,
        tensor_parallel=1,
        dtype="auto",
        connector={},
    )


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(environment: dict[str, str]) -> None:
    pids = [int(pid) for pid in Path(environment["PIDS"]).read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.01)


def test_a_life_in_order(tmp_path, environment) -> None:
    with engine_life(start(), tmp_path / "log", environment) as engine:
        served = engine.generate([1, 2, 3], 4)
        assert served.tokens == [7, 7, 7, 7]
        assert served.ttft_s == 0.5
        assert served.hit_tokens == {"host": 32}  # the difference, not the counter
        assert served.tier_tokens == {"primary": 16, "object": 16}
        assert engine.generate([1, 2, 3], 1).hit_tokens == {"host": 32}
    wait_until_gone(environment)
    assert "chatter about model" in (tmp_path / "log").read_text()


def test_an_engine_that_does_not_start_is_shown_with_its_log(tmp_path, environment) -> None:
    with (
        pytest.raises(DemoError, match="no memory") as raised,
        engine_life(start("broken"), tmp_path / "log", environment),
    ):
        pass
    assert "chatter about broken" in str(raised.value)


def test_an_engine_that_dies_is_a_failure(tmp_path, environment) -> None:
    with (
        pytest.raises(DemoError, match="the engine process ended"),
        engine_life(start(), tmp_path / "log", environment) as engine,
    ):
        engine.generate([666], 1)
    wait_until_gone(environment)


def test_an_interrupted_demo_leaves_no_process(tmp_path, environment) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        engine_life(start(), tmp_path / "log", environment),
    ):
        raise KeyboardInterrupt
    wait_until_gone(environment)


def test_a_metric_that_is_not_there_is_named(tmp_path, environment) -> None:
    with (
        pytest.raises(DemoError, match="does not report vllm:kvtier_pinned_slots"),
        engine_life(start(), tmp_path / "log", environment) as engine,
    ):
        engine.settle(5.0)


def test_waiting_for_a_reset_has_an_end(tmp_path, environment) -> None:
    with (
        pytest.raises(DemoError, match="did not reset its caches within 0 s"),
        engine_life(start(), tmp_path / "log", environment) as engine,
    ):
        engine.drop_pool(0.2)
