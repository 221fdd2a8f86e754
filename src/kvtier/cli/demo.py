"""`kvtier demo`: one prompt, served by each tier of a real vLLM on this machine.

cold     the prompt is computed for the first time and goes device -> DRAM -> disk
device   it comes from vLLM's own cache
         unseen prompts of the same length overflow that cache: what computing costs
dram     it comes from the DRAM pool
         the pool and the device cache are emptied
disk     it comes from the fs tier
         the engine ends; another one starts over the same directory
restart  it comes from the fs tier again
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.cli.demo_life import engine_life
from kvtier.cli.demo_lines import Start
from kvtier.cli.demo_report import OWN_TIER, TIERS, Phase, Report
from kvtier.errors import ConfigError
from kvtier.testing.models import make_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from kvtier.cli.demo_life import EngineLife
    from kvtier.cli.demo_lines import Generated

PROMPT_TOKENS: Final = 6_000
CONTINUATION_TOKENS: Final = 16
TOKENS_PER_BLOCK: Final = 32  # vLLM's CPU attention wants a multiple of 32
RECOMPUTED_PROMPTS: Final = 3
SETTLE_TIMEOUT_S: Final = 60.0
TIER_DIRECTORY: Final = "tier"

_TIER_OF_SOURCE: Final = {"device": "device", "host": "dram", "disk": "fs"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says."""

    keep: Path | None = None
    """Where model, tier and logs stay; None: a temporary directory that is removed."""
    model: Path | None = None
    """A model on disk; None: one with random weights."""
    tensor_parallel: int = 1


def run_demo(options: DemoOptions, messages: Console) -> Report:
    """Runs all phases; progress goes to `messages`.

    Raises:
        ConfigError: The machine has too few cores for the ranks, or the model is not one.
        DemoError: An engine failed; its log is in the message.
    """
    environment = _engine_environment(options.tensor_parallel)
    with _directory(options.keep) as directory:
        model = options.model or make_demo_model(directory / "model")
        (directory / TIER_DIRECTORY).mkdir(exist_ok=True)
        return _Demo(options, messages, directory, model, environment).run()


class _Demo:
    def __init__(
        self,
        options: DemoOptions,
        messages: Console,
        directory: Path,
        model: Path,
        environment: dict[str, str],
    ) -> None:
        self._messages = messages
        self._directory = directory
        self._environment = environment
        shape = _model_shape(model)
        longest = PROMPT_TOKENS + CONTINUATION_TOKENS
        self._max_len = min(longest, shape["max_position_embeddings"])
        self._prompt_tokens = self._max_len - CONTINUATION_TOKENS
        self._vocab = shape["vocab_size"]
        # Fresh in every run: a kept tier must not know the prompts that are to be cold.
        self._random = secrets.SystemRandom()
        self._start = Start(
            model=str(model),
            max_len=self._max_len,
            tokens_per_block=TOKENS_PER_BLOCK,
            # Room for one request and a third, so that the next prompt evicts the one before.
            device_blocks=self._max_len * 4 // 3 // TOKENS_PER_BLOCK + 2,
            tensor_parallel=options.tensor_parallel,
            dtype="auto" if options.model else "float32",
            connector=connector_config(directory / TIER_DIRECTORY),
        )

    def run(self) -> Report:
        prompt = self._unseen(self._prompt_tokens)
        served: dict[str, Generated] = {}
        with self._engine(1) as engine:
            served["cold"] = self._generate(engine, "cold", prompt)
            served["device"] = self._generate(engine, "device", prompt)
            recomputed = [
                self._generate(engine, "recompute", self._unseen(self._prompt_tokens)).ttft_s
                for _ in range(RECOMPUTED_PROMPTS)
            ]
            self._settle(engine)
            served["dram"] = self._generate(engine, "dram", prompt)
            self._settle(engine)
            engine.drop_pool(SETTLE_TIMEOUT_S)
            served["disk"] = self._generate(engine, "disk", prompt)
        with self._engine(2) as engine:
            served["restart"] = self._generate(engine, "restart", prompt)
        return Report(
            [
                Phase(
                    name=name,
                    ttft_s=served[name].ttft_s,
                    recompute_ttft_s=statistics.median(recomputed),
                    tokens_equal=served[name].tokens == served["device"].tokens,
                    hit_tokens=hit_tokens_by_tier(served[name].hit_tokens),
                )
                for name in OWN_TIER
            ]
        )

    @contextmanager
    def _engine(self, life: int) -> Iterator[EngineLife]:
        log = self._directory / f"engine-{life}.log"
        with ExitStack() as until_done:
            with self._messages.status(f"Starting vLLM ({life} of 2), its log is {log}"):
                engine = until_done.enter_context(engine_life(self._start, log, self._environment))
            with self._messages.status("Warming up"):
                # The first long prefill pays for memory and threads; no phase should.
                engine.generate(self._unseen(self._prompt_tokens // 2), CONTINUATION_TOKENS)
            yield engine

    def _generate(self, engine: EngineLife, name: str, prompt: list[int]) -> Generated:
        with self._messages.status(f"{name}: a prompt of {len(prompt):,} tokens"):
            served = engine.generate(prompt, CONTINUATION_TOKENS)
        hits = {tier: n for tier, n in hit_tokens_by_tier(served.hit_tokens).items() if n}
        sources = ", ".join(f"{n:,} tokens from {tier}" for tier, n in hits.items())
        self._messages.print(f"{name}: {served.ttft_s:.3f} s, {sources or 'nothing cached'}")
        return served

    def _settle(self, engine: EngineLife) -> None:
        with self._messages.status("Waiting until everything is on disk"):
            engine.settle(SETTLE_TIMEOUT_S)

    def _unseen(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab), k=tokens)


def connector_config(tier: Path) -> dict[str, Any]:
    """The connector's extra configuration: kvtier with a DRAM pool and one fs tier."""
    return {
        "spec_name": "KVTierSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1GiB",
        # The weights stay the same over a reset, so what is on disk stays valid.
        "weights_epoch": "demo",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tier)}],
    }


def hit_tokens_by_tier(by_source: dict[str, int]) -> dict[str, int]:
    """Renames the sources of hits to the demo's tiers; a source that is none keeps its name."""
    hits = dict.fromkeys(TIERS, 0)
    for source, tokens in by_source.items():
        if source in _TIER_OF_SOURCE or tokens:
            hits[_TIER_OF_SOURCE.get(source, source)] = tokens
    return hits


def _engine_environment(tensor_parallel: int) -> dict[str, str]:
    """What the engine processes need in their environment."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if tensor_parallel > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // tensor_parallel
        if not share:
            raise ConfigError(
                f"tp = {tensor_parallel}, but this machine has {len(cores)} cores for it: "
                f"each rank needs one, use --tp {len(cores)} or less"
            )
        # Without NUMA nodes vLLM's CPU backend does not divide the cores among ranks itself.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(str(core) for core in cores[rank * share : (rank + 1) * share])
            for rank in range(tensor_parallel)
        )
    return environment


def _model_shape(model: Path) -> dict[str, int]:
    config = model / "config.json"
    try:
        found = json.loads(config.read_text())
        found = found.get("text_config", found)
        return {name: int(found[name]) for name in ("vocab_size", "max_position_embeddings")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model = {str(model)!r} must be a directory whose config.json has vocab_size and "
            f"max_position_embeddings ({error!r}): name another model"
        ) from None


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory:
        yield Path(directory)
