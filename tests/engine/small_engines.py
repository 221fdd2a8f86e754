"""Small engines and what they are made of: models, prompts, settings, files."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine_client import ONE_PROCESS, TWO_RANKS, Engine, Forker, spawn

from kvtier.testing import models as makers
from kvtier.tiers.fs.catalog import Catalog
from kvtier.tiers.fs.catalog_findings import Findings
from kvtier.tiers.fs.namespace_directory import FAN_OUT_DIGITS

BLOCK = 32
"""Tokens per GPU block."""
DEADLINE_S = 60.0
"""What anything may take to become so."""

_SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("make_gqa_model", {"layers": 3, "hidden": 128, "heads": 4, "kv_heads": 2}),
    "hybrid": ("make_hybrid_model", {"hidden": 128, "heads": 4, "kv_heads": 2, "window": 64}),
    "mla": ("make_mla_model", {"layers": 2, "hidden": 128, "heads": 4}),
}


def make_model(kind: str, path: Path, **options: Any) -> Path:
    """One of the small models. Made in a process of its own, since that takes torch."""
    maker, shape = _SHAPES[kind]
    arguments = {"path": path, "vocab": 512, "dtype": "float32", **shape, **options}
    process = multiprocessing.get_context("spawn").Process(
        target=getattr(makers, maker), kwargs=arguments
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    return path


class Engines:
    """Makes engines, and stops those that it made."""

    def __init__(self, forker: Forker, model: Callable[[str], Path], logs: Path) -> None:
        self._forker = forker
        self._model = model
        self._logs = logs
        self._made: list[Engine] = []
        self._numbers = itertools.count()

    def process(self, environment: Mapping[str, str] = ONE_PROCESS, fresh: bool = False) -> Engine:
        """A process without an engine yet."""
        log = self._logs / f"engine-{next(self._numbers)}.log"
        engine = spawn(environment, log) if fresh else self._forker.fork(environment, log)
        self._made.append(engine)
        return engine

    def start(
        self,
        kind: str = "gqa",
        root: Path | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        engine: Mapping[str, Any] | None = None,
        **connector: Any,
    ) -> Engine:
        """A running engine.

        Args:
            kind: of model.
            root: directory of the fs tier; no tier if None.
            environment: of the process.
            fresh: not a fork.
            engine: changes to vLLM's arguments.
            connector: changes to kvtier's settings; None takes one away.
        """
        blocks = {"num_gpu_blocks_override": 192} if kind == "hybrid" else {}  # for three groups
        arguments = engine_arguments(self._model(kind), {**blocks, **(engine or {})})
        if environment is None:
            environment = TWO_RANKS if arguments["tensor_parallel_size"] == 2 else ONE_PROCESS
        made = self.process(environment, fresh)
        made.call("start", engine=arguments, connector=connector_settings(root, connector))
        return made

    def stop(self) -> None:
        for engine in self._made:
            engine.stop()


def engine_arguments(model: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `LLM` for a small engine with 95 GPU blocks to use."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 96,
        "kv_cache_memory_bytes": 64 << 20,
        "tensor_parallel_size": 1,
        "max_num_seqs": 8,
        **(changes or {}),
    }


def connector_settings(root: Path | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_connector_extra_config` for kvtier with one fs tier."""
    settings: dict[str, Any] = {
        "spec_name": "KVTierSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "64MiB",
        "prefill_tokens_per_s": "unknown",  # a tiny model computes faster than anything reads
        "weights_epoch": "test",
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}] if root else [],
        **changes,
    }
    return {name: value for name, value in settings.items() if value is not None}


class Prompts:
    """Prompts that no other test has used."""

    def __init__(self) -> None:
        self._random = random.Random(20)

    def __call__(self, length: int) -> list[int]:
        return [self._random.randrange(1, 512) for _ in range(length)]


def stored_blocks(root: Path) -> int:
    """Blocks below the root of an fs tier, in whichever layout."""
    found = Findings()
    namespaces = Catalog([root]).namespaces(found)
    return sum(1 for each in namespaces for _ in each.blocks(found))


def block_files(root: Path) -> list[Path]:
    """Files of blocks below the root of an fs tier."""
    return sorted(
        p for p in root.glob(f"*/{'?' * FAN_OUT_DIGITS}/*") if not p.name.endswith(".tmp")
    )


def until(reached: Callable[[], object]) -> None:
    """Look again until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def comes_back(engine: Engine, asked: list[int], expected: list[list[int]], tier: str) -> None:
    """Ask again until a tier serves all of a prompt; the tokens are right all the while."""
    whole = {tier: (len(asked) - 1) // BLOCK * BLOCK}
    deadline = time.monotonic() + DEADLINE_S
    while True:
        engine.drop_pool()
        answer = engine.generate(asked)
        assert answer.tokens == expected
        if answer.tiers == whole:
            return
        assert time.monotonic() < deadline, (answer.tiers, engine.call("look"))
        time.sleep(0.1)
