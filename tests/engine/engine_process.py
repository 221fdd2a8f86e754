"""The process that a test's engine lives in.

    engine_process.py FD            serves one engine on the connected socket FD
    engine_process.py --forker FD   imports vLLM once, then forks such a process for each message

Importing vLLM takes ten seconds, starting a small engine two. So most engines are forks of one
process that has imported it and done nothing else: it has one thread, and has touched no device.

A call is a line `{"call": method, "arguments": {...}}`, its answer `{"result": ...}` or
`{"error": text}`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import scripted_tier

STEP_SECONDS_MAX = 60.0


class Server:
    """An engine and the calls that tests make. Without multiprocessing the scheduler, and so the
    whole of kvtier's scheduler side, can be looked into.
    """

    def __init__(self) -> None:
        self._llm: Any = None
        self._ids = itertools.count()
        self._outputs: dict[str, Any] = {}
        self._copies: CopyGate | None = None
        self._subscriber: Any = None
        self._nudges = ([1, i, j] for i in range(256) for j in range(256))

    # -- life ----------------------------------------------------------------

    def start(self, engine: dict[str, Any], connector: dict[str, Any]) -> dict[str, Any]:
        """Start the engine. `connector` is `kv_connector_extra_config`."""
        from vllm.config import KVEventsConfig, KVTransferConfig

        from vllm import LLM

        started = time.monotonic()
        if "kv_events_config" in engine:
            engine["kv_events_config"] = KVEventsConfig(**engine["kv_events_config"])
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=connector,
            ),
            **engine,
        )
        return {"seconds": time.monotonic() - started, "pid": os.getpid()}

    # -- whole generations ---------------------------------------------------

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salt: str | None = None
    ) -> dict[str, Any]:
        """Continue prompts greedily; hit tokens are those of all of them together."""
        before = self._hit_tokens()
        outputs = self._llm.generate(
            [self._prompt(ids, salt) for ids in prompts], self._greedy(max_tokens), use_tqdm=False
        )
        after = self._hit_tokens()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "hits": {name: after[name] - before.get(name, 0) for name in after},
        }

    def reset(self, connector: bool) -> bool:
        """Empty the device's prefix cache, and with `connector` kvtier's pool as well."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """What vLLM reports, kvtier's metrics included, by `name{label}`."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            label = metric.labels.get("tier") or metric.labels.get("source") or ""
            name = f"{metric.name}{{{label}}}" if label else metric.name
            if hasattr(metric, "value"):
                found[name] = found.get(name, 0) + metric.value
        return found

    def nudge(self) -> None:
        """Run a prompt that is never cached, so that a step happens."""
        self._llm.generate(
            [self._prompt(next(self._nudges), None)], self._greedy(1), use_tqdm=False
        )

    def _hit_tokens(self) -> dict[str, float]:
        names = {
            "vllm:prompt_tokens_cached_by_source{": "source:",
            "vllm:kvtier_hit_tokens{": "tier:",
        }
        return {
            label + name[len(prefix) : -1]: value
            for name, value in self.metrics().items()
            for prefix, label in names.items()
            if name.startswith(prefix)
        }

    # -- single steps ---------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> str:
        """Add a request; returns its name."""
        name = f"request-{next(self._ids)}"
        engine = self._llm.llm_engine
        engine.add_request(name, self._prompt(prompt, salt), self._greedy(max_tokens))
        return name

    def step(self, times: int = 1) -> None:
        """Step the engine; an engine without work does nothing."""
        for _ in range(times):
            for output in self._llm.llm_engine.step():
                if output.finished:
                    self._outputs[output.request_id] = output

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self._llm.llm_engine.abort_request(names)

    def states(self) -> dict[str, str]:
        """Requests that the scheduler knows, with their states."""
        return {
            request.request_id.rpartition("-")[0]: request.status.name
            for request in self._scheduler().requests.values()
        }

    def finish(self) -> dict[str, list[int]]:
        """Step until no request is left; the tokens of those that ended since the last call."""
        self._step_until(lambda: not self._llm.llm_engine.has_unfinished_requests())
        return self.finished()

    def finished(self) -> dict[str, list[int]]:
        """The tokens of the requests that ended since the last call."""
        outputs, self._outputs = self._outputs, {}
        return {name: list(o.outputs[0].token_ids) for name, o in outputs.items()}

    def step_until_waiting(self, operation: str, count: int = 1) -> None:
        """Step until so many calls of the scripted tier wait at the gate."""
        self._step_until(lambda: scripted_tier.SCRIPT.waiting[operation] >= count)

    def step_until_copying(self) -> None:
        """Step until the worker's copy thread waits at the gate."""
        assert self._copies is not None
        self._step_until(lambda: self._copies.waiting > 0)

    def quiet(self) -> dict[str, float]:
        """Step as vLLM's own loop does until it would sleep; kvtier's figures are those of metrics.

        Returns:
            The gauges of kvtier, and counters, after the last step.
        """
        scheduler = self._scheduler()
        self._step_until(lambda: not scheduler.has_requests())
        self._core().check()
        return self.metrics()

    def _step_until(self, reached: Any) -> None:
        deadline = time.monotonic() + STEP_SECONDS_MAX
        while not reached():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {STEP_SECONDS_MAX} s: {self.states()} {self.look()}")

    # -- looking in -----------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """The books of kvtier's core, checked."""
        core = self._core()
        core.check()
        return {
            "used": core.pool.used,
            "pinned": core.pool.pinned,
            "slots": core.pool.num_slots,
            "jobs": sum(core.ledger.jobs_in_flight),
            "busy": core.busy,
            "errors": self._manager()._errors,
            "requests": len(core._requests),
            "row_bytes": self._manager()._offloader.region.geometry.row_bytes,
            "windows": sorted(core.windows),
        }

    def script(self, method: str, **arguments: Any) -> Any:
        """Call the script of the tiers."""
        return getattr(scripted_tier.SCRIPT, method)(**arguments)

    def flip_pool(self, offset: int, mask: int, whole: bool = False) -> int:
        """Change one byte, or every fourth one, of each block in the pool; returns how many."""
        manager = self._manager()
        region = manager._offloader.region
        slots = [block.slot for block in manager._core.pool.blocks.values() if block.ready]
        for slot in slots:
            if whole:
                region.rows[slot][offset::4] ^= mask
            else:
                region.rows[slot][offset] ^= mask
        return len(slots)

    def gate_copies(self, slow_s: float = 0.0) -> None:
        """Have every copy between device and pool wait at a gate, which `wait` of the worker opens
        as well: the engine says there that it needs the copies done.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        self._copies = CopyGate(worker._executor, slow_s)

    def close_copies(self) -> None:
        """Close the gate of the copies."""
        assert self._copies is not None
        self._copies.open.clear()

    def fail_copies(self, failing: bool) -> None:
        """Have copies raise, or not any more."""
        assert self._copies is not None
        self._copies.failing = failing

    def open_copies(self) -> int:
        """Open it; returns how often the engine had to wait for copies."""
        assert self._copies is not None
        self._copies.open.set()
        return self._copies.waits

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _manager(self) -> Any:
        return self._scheduler().connector.connector_scheduler.manager

    def _core(self) -> Any:
        return self._manager()._core

    # -- events ---------------------------------------------------------------

    def subscribe(self, endpoint: str) -> None:
        """Subscribe to KV events, and wait until some arrive."""
        import zmq

        self._subscriber = zmq.Context.instance().socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber.connect(endpoint)
        deadline = time.monotonic() + STEP_SECONDS_MAX
        while not self._subscriber.poll(50):
            self._llm.generate(
                [self._prompt([2, *next(self._nudges)] * 16, None)],
                self._greedy(1),
                use_tqdm=False,
            )
            assert time.monotonic() < deadline, "no event arrives"
        self.quiet()
        self.events()

    def events(self) -> list[dict[str, Any]]:
        """Events that arrived since the last call; none arrives for half a second then."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        found = []
        while self._subscriber.poll(500):
            _, _, payload = self._subscriber.recv_multipart()
            for event in decoder.decode(payload).events:
                found.append(
                    {
                        "kind": type(event).__name__,
                        "medium": getattr(event, "medium", None),
                        "ownership": getattr(event, "ownership", None),
                        "locality": getattr(event, "locality", None),
                        "hashes": [str(h) for h in getattr(event, "block_hashes", ())],
                    }
                )
        return found

    # -- without an engine ----------------------------------------------------

    def make_spec(self, connector: dict[str, Any], pages: list[int]) -> str:
        """Make kvtier's side of a worker without an engine.

        Args:
            connector: `kv_connector_extra_config`.
            pages: shape of the only KV tensor.

        Returns:
            Name and text of what it raised; empty if nothing.
        """
        import torch
        from vllm.v1.kv_offload import base, config

        from kvtier.vllm import KVTierSpec

        offloading = config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=pages[1],
            enable_kv_cache_events=False,
            extra_config=connector,
            engine_id=f"no-engine-{os.getpid()}",
            model=config.OffloadingModelConfig("model", "float32"),
            cache=config.OffloadingCacheConfig(32, 1),
            parallel=config.OffloadingParallelConfig(
                **{
                    name: 0 if name.endswith(("rank", "index")) else 1
                    for name in config.OffloadingParallelConfig.__dataclass_fields__
                }
            ),
        )
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(torch.zeros(pages, dtype=torch.int8), pages[1])],
            [[base.CanonicalKVCacheRef(0, pages[1], None)]],
        )
        try:
            KVTierSpec(offloading).get_worker(caches).shutdown()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # -- inputs ---------------------------------------------------------------

    @staticmethod
    def _prompt(ids: list[int], salt: str | None) -> Any:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=ids)
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt

    @staticmethod
    def _greedy(max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
        )


class CopyGate:
    """Stands before the copies of a worker's executor. The copies themselves are untouched.

    Attributes:
        open: whether copies may pass.
        waiting: copies that wait.
        waits: calls of `wait` that found copies unfinished.
        failing: copies raise.
    """

    def __init__(self, executor: Any, slow_s: float) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0
        self.waits = 0
        self.failing = False
        copy, wait = executor._copy, executor.wait

        def gated_copy(*arrays: Any) -> None:
            self.waiting += 1
            self.open.wait()
            self.waiting -= 1
            if self.failing:
                raise OSError("copies fail as scripted")
            time.sleep(slow_s)  # a slow device: who does not wait for it overtakes it
            copy(*arrays)

        def gated_wait(job_ids: Any) -> None:
            self.waits += not executor._running.isdisjoint(job_ids)
            self.open.set()
            wait(job_ids)

        executor._copy, executor.wait = gated_copy, gated_wait


def serve(connection: socket.socket) -> None:
    """Answer calls until the other side is gone; then end at once, as a kill would."""
    server = Server()
    with connection.makefile("rwb") as lines:
        for line in lines:
            message = json.loads(line)
            try:
                answer = {"result": getattr(server, message["call"])(**message["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()


def forker(control: socket.socket) -> None:
    """Fork a serving process per message; the message brings its socket, log and environment."""
    import importlib

    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # Threads do not survive a fork, and what they hold would stay held.
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped by the kernel
    control.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.dup2(fds[1], 1)
            os.dup2(fds[1], 2)
            os.close(fds[1])
            os.environ.update(json.loads(message))
            run(socket.socket(fileno=fds[0]))
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "kvtier.vllm",
)


def run(connection: socket.socket) -> None:
    """Serve, then end without waiting for anything: engines must not need a goodbye."""
    os.set_inheritable(connection.fileno(), False)
    try:
        serve(connection)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.modules["engine_process"] = sys.modules["__main__"]
    if sys.argv[1] == "--forker":
        forker(socket.socket(fileno=int(sys.argv[2])))
    else:
        run(socket.socket(fileno=int(sys.argv[1])))
