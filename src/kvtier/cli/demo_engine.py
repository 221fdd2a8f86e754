"""One engine's life for the demo: `python -m kvtier.cli.demo_engine SOCKET`.

Takes orders and writes answers (`demo_lines`) on the connected socket whose descriptor it is given;
what vLLM prints goes wherever standard output and error go. Ends when the orders end.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.cli.demo_lines import (
    Answer,
    Done,
    DropPool,
    Failed,
    Generate,
    Generated,
    Order,
    Settle,
    Start,
)
from kvtier.metrics import HIT_TOKENS, JOBS_IN_FLIGHT, PINNED_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator

HITS: Final = ("vllm:prompt_tokens_cached_by_source", "source")
TIER_HITS: Final = (HIT_TOKENS.name, "tier")
"""Counters of cached prompt tokens by vLLM and by kvtier, each with the label that says whose."""

IN_FLIGHT: Final = (PINNED_SLOTS.name, JOBS_IN_FLIGHT.name)
"""Gauges that are zero when nothing is on its way from the device to the pool, or to a tier."""

_POLL_S: Final = 0.02

# The pool is sized in GPU blocks; vLLM wants bytes as well, and does not measure memory then.
_DEVICE_BYTES: Final = 1 << 30


class Engine:
    """vLLM with kvtier, started by an order."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            start.model,
            skip_tokenizer_init=True,
            dtype=start.dtype,
            max_model_len=start.max_len,
            block_size=start.tokens_per_block,
            num_gpu_blocks_override=start.device_blocks,
            kv_cache_memory_bytes=_DEVICE_BYTES,
            tensor_parallel_size=start.tensor_parallel,
            enable_prefix_caching=True,
            enforce_eager=True,  # compiling takes longer than the demo
            max_num_seqs=4,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config=start.connector,
            ),
        )
        # Shorter than a block: an unseen prompt that is never cached and only makes a step happen.
        self._nudges = (
            [first, second] for first, second in itertools.product(range(256), repeat=2)
        )

    def generate(self, order: Generate) -> Generated:
        """Continues the prompt, and says where its prefix came from."""
        counts = (HITS, TIER_HITS)
        before = [self._count(*count) for count in counts]
        request = self._run(order.prompt, order.tokens)
        after = [self._count(*count) for count in counts]
        hit_tokens, tier_tokens = (
            {label: later[label] - earlier[label] for label in later}
            for earlier, later in zip(before, after, strict=True)
        )
        return Generated(
            tokens=list(request.outputs[0].token_ids),
            ttft_s=request.metrics.first_token_latency,
            hit_tokens=hit_tokens,
            tier_tokens=tier_tokens,
        )

    def settle(self, order: Settle) -> Answer:
        """Waits until nothing is on its way from the device to the pool or from it to a tier."""
        for _ in self._steps(order.timeout_s):
            levels = self._levels()
            if missing := [name for name, level in levels.items() if level is None]:
                return Failed(f"the engine does not report {' and '.join(missing)}")
            if not any(levels.values()):
                return Done()
        return Failed(f"blocks were still on their way after {order.timeout_s:.0f} s: {levels}")

    def drop_pool(self, order: DropPool) -> Answer:
        """Empties the device cache and the pool, as soon as no request's block is in use."""
        for _ in self._steps(order.timeout_s):
            if self._llm.reset_prefix_cache(reset_connector=True):
                return Done()
        return Failed(f"vLLM did not reset its caches within {order.timeout_s:.0f} s")

    def _steps(self, timeout_s: float) -> Iterator[None]:
        """One engine step each, since an engine without requests reports nothing."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._run(next(self._nudges), tokens=1)
            yield
            time.sleep(_POLL_S)

    def _run(self, prompt: list[int], tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        return self._llm.generate(TokensPrompt(prompt_token_ids=prompt), greedy, use_tqdm=False)[0]

    def _levels(self) -> dict[str, float | None]:
        """Sums of the gauges over tiers, by name; None for one that nobody has reported."""
        found = self._llm.get_metrics()
        by_name = {name: [m.value for m in found if m.name == name] for name in IN_FLIGHT}
        return {name: sum(values) if values else None for name, values in by_name.items()}

    def _count(self, name: str, label: str) -> defaultdict[str, int]:
        """A counter's values, by one of its labels."""
        by_label: defaultdict[str, int] = defaultdict(int)
        for metric in self._llm.get_metrics():
            if metric.name == name:
                by_label[metric.labels[label]] += int(metric.value)
        return by_label


def _answer(engine: Engine, order: Order) -> Answer:
    match order:
        case Generate():
            return engine.generate(order)
        case Settle():
            return engine.settle(order)
        case DropPool():
            return engine.drop_pool(order)
        case Start():
            return Failed("the engine has been started already")


def serve(connection: socket.socket) -> int:
    """Answers every order; returns the exit code."""

    def reply(answer: Answer) -> None:
        connection.sendall(msgspec.json.encode(answer) + b"\n")

    decode = msgspec.json.Decoder(Order).decode
    orders = connection.makefile("rb")
    try:
        start = decode(next(orders))
        assert isinstance(start, Start), "the first order starts the engine"
        engine = Engine(start)
        reply(Done())
        for line in orders:
            answer = _answer(engine, decode(line))
            reply(answer)
            if isinstance(answer, Failed):
                return 1
    except Exception as error:
        reply(Failed(f"{type(error).__name__}: {error}"))
        raise
    return 0


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # the engine's own children must not keep it open
    sys.exit(serve(socket.socket(fileno=descriptor)))
