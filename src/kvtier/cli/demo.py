"""`kvtier demo`: one prompt, served by each tier of a real vLLM on this machine.

The prompt is computed for the first time and goes device -> DRAM -> tiers. Then it is asked for
again and again, after what served it was emptied: see `demo_plan`. What computing costs is measured
by unseen prompts of the same length, which overflow the device cache on the way.
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
from kvtier.cli.demo_plan import Before
from kvtier.cli.demo_report import DEFAULT_PLAN, Phase, Report, hit_tokens_of
from kvtier.cli.demo_tiers import open_places
from kvtier.errors import ConfigError
from kvtier.testing.models import make_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from kvtier.cli.demo_life import EngineLife
    from kvtier.cli.demo_lines import Generated
    from kvtier.cli.demo_plan import DemoPlan
    from kvtier.cli.demo_tiers import Place

PROMPT_TOKENS: Final = 6_000
CONTINUATION_TOKENS: Final = 16
TOKENS_PER_BLOCK: Final = 32  # vLLM's CPU attention wants a multiple of 32
RECOMPUTED_PROMPTS: Final = 3
SETTLE_TIMEOUT_S: Final = 60.0
PATIENCE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says."""

    keep: Path | None = None
    """Where model, tiers and logs stay; None: a temporary directory that is removed."""
    model: Path | None = None
    """A model on disk; None: one with random weights."""
    tensor_parallel: int = 1
    plan: DemoPlan = DEFAULT_PLAN


def run_demo(options: DemoOptions, messages: Console) -> Report:
    """Runs all phases; progress goes to `messages`.

    Raises:
        ConfigError: The machine has too few cores for the ranks, or the model is not one.
        DemoError: An engine failed; its log is in the message. Or a server did not start.
    """
    environment = _engine_environment(options.tensor_parallel)
    with _directory(options.keep) as directory, ExitStack() as until_done:
        model = options.model or make_demo_model(directory / "model")
        with messages.status(f"Preparing {' and '.join(options.plan.tiers)}"):
            places = until_done.enter_context(open_places(options.plan.tiers, directory))
        for place in places.values():
            environment.update(place.environment)
        return _Demo(options, messages, directory, model, environment, places).run()


class _Demo:
    def __init__(
        self,
        options: DemoOptions,
        messages: Console,
        directory: Path,
        model: Path,
        environment: dict[str, str],
        places: Mapping[str, Place],
    ) -> None:
        self._plan = options.plan
        self._places = places
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
            connector=connector_config([dict(place.settings) for place in places.values()]),
        )
        self._recomputed: list[float] = []

    def run(self) -> Report:
        prompt = self._unseen(self._prompt_tokens)
        served: dict[str, Generated] = {}
        for number, life in enumerate(self._plan.lives, start=1):
            for tier in life.emptied:
                self._empty(tier)
            with self._engine(number) as engine:
                for step in life.steps:
                    self._prepare(engine, step.before)
                    served[step.name] = self._generate(engine, step.name, prompt)
        return Report(
            [
                Phase(
                    name=name,
                    ttft_s=each.ttft_s,
                    recompute_ttft_s=statistics.median(self._recomputed),
                    tokens_equal=each.tokens == served["device"].tokens,
                    hit_tokens=self._hit_tokens(each),
                )
                for name, each in served.items()
            ],
            self._plan,
        )

    def _empty(self, tier: str) -> None:
        empty = self._places[tier].empty
        assert empty is not None, f"no plan empties {tier}"
        empty()
        self._messages.print(f"{tier} was emptied")

    def _prepare(self, engine: EngineLife, before: Before) -> None:
        match before:
            case Before.NOTHING:
                pass
            case Before.OVERFLOW:
                for _ in range(RECOMPUTED_PROMPTS):
                    unseen = self._unseen(self._prompt_tokens)
                    self._recomputed.append(self._generate(engine, "recompute", unseen).ttft_s)
                self._settle(engine)
            case Before.DROP_POOL:
                self._settle(engine)
                engine.drop_pool(SETTLE_TIMEOUT_S)

    @contextmanager
    def _engine(self, life: int) -> Iterator[EngineLife]:
        log = self._directory / f"engine-{life}.log"
        with ExitStack() as until_done:
            with self._messages.status(
                f"Starting vLLM ({life} of {len(self._plan.lives)}), its log is {log}"
            ):
                engine = until_done.enter_context(engine_life(self._start, log, self._environment))
            with self._messages.status("Warming up"):
                # The first long prefill pays for memory and threads; no phase should.
                engine.generate(self._unseen(self._prompt_tokens // 2), CONTINUATION_TOKENS)
            yield engine

    def _generate(self, engine: EngineLife, name: str, prompt: list[int]) -> Generated:
        with self._messages.status(f"{name}: a prompt of {len(prompt):,} tokens"):
            served = engine.generate(prompt, CONTINUATION_TOKENS)
        hits = {tier: n for tier, n in self._hit_tokens(served).items() if n}
        sources = ", ".join(f"{n:,} tokens from {tier}" for tier, n in hits.items())
        self._messages.print(f"{name}: {served.ttft_s:.3f} s, {sources or 'nothing cached'}")
        return served

    def _hit_tokens(self, served: Generated) -> dict[str, int]:
        return hit_tokens_of(served.hit_tokens, served.tier_tokens, self._plan)

    def _settle(self, engine: EngineLife) -> None:
        with self._messages.status(f"Waiting for writes to {' and '.join(self._plan.tiers)}"):
            engine.settle(SETTLE_TIMEOUT_S)

    def _unseen(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab), k=tokens)


def connector_config(tiers: list[dict[str, Any]]) -> dict[str, Any]:
    """The connector's extra configuration: kvtier with a DRAM pool and these tiers."""
    # Tiers divide what writes may pin of the pool: let a share still hold a whole prompt.
    more: dict[str, Any] = {}
    if len(tiers) > 1:
        more |= {"cascade_share": 0.45, "promotion_share": 0.45}
    if any(tier["type"] != "fs" for tier in tiers):
        # A server that has to wait for the engine's cores is slow, and not to be left alone.
        more |= {"tier_stall_ms": PATIENCE_MS, "job_deadline_ms": PATIENCE_MS}
    return {
        **more,
        "spec_name": "KVTierSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": "1GiB",
        # The weights stay the same over a reset, so what the tiers hold stays valid.
        "weights_epoch": "demo",
        "secondary_tiers": tiers,
    }


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
