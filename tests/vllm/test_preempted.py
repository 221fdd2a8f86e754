"""A request that is preempted asks again, in virtual time over a simulated tier."""

from __future__ import annotations

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvtier.config import Settings
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, configure_tiers
from kvtier.region import Geometry, Region
from kvtier.testing.engine import key_of
from kvtier.testing.simulated_caches import Clock, SimulatedDriver
from kvtier.testing.simulated_tiers import Hang, Memory, SimulatedTier
from kvtier.vllm.manager import KVTierManager

NUM_SLOTS = 16


def test_a_preempted_request_waits_afresh():
    clock = Clock()
    memory: Memory = [None] * NUM_SLOTS
    tier = SimulatedTier(memory)
    tier.keep(0, [key_of(1)])
    settings = Settings.decode(
        {
            "cpu_bytes_to_use": NUM_SLOTS * 4096,
            "max_wait_ms": 1000,
            "secondary_tiers": [{"type": "memory"}],
        }
    )
    offloader = Offloader(
        settings,
        configure_tiers(settings.secondary_tiers),
        Region.create(Geometry(NUM_SLOTS, 4096, 1)),
        Namespace.of({"test": "preempted"}),
        clock=clock,
        make_driver=lambda *_: SimulatedDriver(tier, clock, lambda _: 0),
    )
    manager = KVTierManager(offloader, {0: 16}, emit_events=False)
    context = ReqContext(req_id="a")

    def step(*, new: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> None:
        manager.on_schedule_end(ScheduleEndContext(new, preempted))
        manager.get_stats()
        clock.now += 1.1

    tier.behave("probe", Hang())
    manager.on_new_request(context)
    for scheduled in ("a",), ():  # the second time it is resumed, which vLLM does not call new
        assert manager.lookup(key_of(1), context) is LookupResult.RETRY
        step()
        assert manager.lookup(key_of(1), context) is LookupResult.MISS, "it has waited long enough"
        step(new=scheduled)
        step(preempted=("a",))
    assert manager.lookup(key_of(1), context) is LookupResult.RETRY
    manager.shutdown()
