"""One engine's cache, assembled: region, core and the drivers of its tiers.

Knows no engine. Its host calls `begin` when a step starts, `end` when it ends, and asks the core in
between; nothing here blocks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvtier.config import Settings, TierSettings
from kvtier.core.health import Patience, State
from kvtier.core.limits import Limits
from kvtier.core.manager import TieringManager
from kvtier.core.pool import BlockPool
from kvtier.core.types import Command, Completion, Lend, Probe, Read, TierId, Write
from kvtier.drivers.base import JobMetadata, SecondaryTierManager, SlotViews
from kvtier.drivers.guard import GuardedDriver
from kvtier.drivers.process.driver import ProcessDriver
from kvtier.drivers.process.process import Launch
from kvtier.drivers.threaded import ThreadedDriver
from kvtier.envelope import HEADER_BYTES
from kvtier.namespace import Namespace
from kvtier.policies import load_policy
from kvtier.region import Region
from kvtier.tiers.registry import ChecksBlock, TierType, decode_settings, load_tier_type

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
"""vLLM kills its engine a few seconds after it asked for the end."""

_HANG_DEADLINES = 2
"""A tier that is still at a job after so many deadlines of it will not come back by itself."""


@dataclass(frozen=True)
class ConfiguredTier:
    """A tier as configured and checked, not opened yet.

    Attributes:
        name: of the tier.
        tier_type: how it is opened.
        options: its own options, decoded.
        type_name: the `type` that named it.
        plain_options: its own options as they were written; may hold credentials.
        promote_to: names of the tiers that get what is found in this one; None: the faster ones.
    """

    name: str
    tier_type: TierType
    options: msgspec.Struct
    type_name: str
    plain_options: Mapping[str, object] = field(repr=False)
    promote_to: tuple[str, ...] | None = None

    def preflight(self, setting: str) -> None:
        """Check what can be checked before anything is made. Raises ConfigError."""
        self.tier_type.preflight(self.options, setting)


def configure_tiers(tiers: Sequence[TierSettings]) -> tuple[ConfiguredTier, ...]:
    """Decode and check every tier's own options.

    Raises:
        ConfigError: naming the option; nothing has been created then.
    """
    configured = []
    for place, tier in enumerate(tiers):
        setting = f"secondary_tiers[{place}]"
        tier_type = load_tier_type(tier.type, f"{setting}.type")
        plain = tier.plain_options()
        options = decode_settings(tier_type, plain, setting)
        configured.append(
            ConfiguredTier(tier.name, tier_type, options, tier.type, plain, tier.promote_to)
        )
        configured[-1].preflight(setting)
    return tuple(configured)


def check_blocks(tiers: Sequence[ConfiguredTier], row_bytes: int) -> None:
    """Check that each tier can keep a block, once its size is known.

    Raises:
        ConfigError: naming the setting.
    """
    for place, tier in enumerate(tiers):
        if isinstance(tier.tier_type, ChecksBlock):
            setting = f"secondary_tiers[{place}]"
            tier.tier_type.check_block(tier.options, setting, HEADER_BYTES + row_bytes)


@dataclass(frozen=True)
class Assignment:
    """What the driver of a tier is made from.

    Attributes:
        tier: as configured.
        tier_id: its position.
        region: where its slots are.
        facts_of: what a namespace's digest stands for, JSON-able, without secrets.
        hang_s: how long it may take for anything before it is killed, if it can be.
    """

    tier: ConfiguredTier
    tier_id: TierId
    region: Region
    facts_of: Callable[[str], Mapping[str, object]]
    hang_s: float


MakeDriver = Callable[[Assignment], SecondaryTierManager]


def make_driver_for(assignment: Assignment) -> SecondaryTierManager:
    """A process of its own, unless the tier's type asks to run in this one."""
    if getattr(assignment.tier.tier_type, "in_process", False):
        return on_threads(assignment)
    return in_a_process(assignment)


def in_a_process(assignment: Assignment) -> SecondaryTierManager:
    """Run a tier in a process of its own."""
    tier = assignment.tier
    launch = Launch(tier.name, tier.type_name, tier.plain_options, assignment.tier_id)
    return ProcessDriver(launch, assignment.region, assignment.facts_of, assignment.hang_s)


def on_threads(assignment: Assignment) -> SecondaryTierManager:
    """Run a tier on threads of this process."""
    tier = assignment.tier
    return ThreadedDriver(
        tier.name,
        lambda digest: tier.tier_type.open(tier.options, digest, assignment.facts_of(digest)),
        tier.tier_type.num_threads(tier.options),
        assignment.tier_id,
    )


class Offloader:
    """See the module.

    Args:
        settings: of the engine.
        tiers: configured ones, in order.
        region: the primary region; owned from now on.
        namespace: under which blocks are shared; None only when there are no tiers.
        windows: cache groups that are looked up from the right.
        clock: seconds, monotonic.
        make_driver: runs a tier.

    Attributes:
        core: decides; asked by the host.
        drivers: one per tier, in order.
    """

    def __init__(
        self,
        settings: Settings,
        tiers: Sequence[ConfiguredTier],
        region: Region,
        namespace: Namespace | None,
        windows: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        make_driver: MakeDriver = make_driver_for,
    ) -> None:
        assert namespace is not None or not tiers, "a tier needs a namespace"
        num_slots = region.geometry.num_slots
        self.tiers = tuple(tiers)
        self.region = region
        self._keep_tiers = settings.weights_epoch is not None
        self._clock = clock
        self._down: set[tuple[str, str]] = set()  # what is left alone now
        self._namespaces = [namespace] if namespace is not None else []
        self.core = TieringManager(
            BlockPool(num_slots, load_policy(settings.eviction_policy)(num_slots)),
            len(tiers),
            clock(),
            limits_of(settings, num_slots, len(tiers)),
            windows,
            targets_of(tiers),
        )
        hang_s = _HANG_DEADLINES * settings.job_deadline_ms / 1e3
        self.drivers = tuple(
            GuardedDriver(
                tier.name,
                make_driver(Assignment(tier, TierId(place), region, self._facts_of, hang_s)),
            )
            for place, tier in enumerate(tiers)
        )

    def begin(self) -> None:
        """A step begins: tell the core what the tiers finished."""
        completions: list[Completion] = []
        for driver in self.drivers:
            completions += driver.get_finished()
        self.core.begin_step(self._clock(), completions)
        self._tell_health()

    def end(self) -> None:
        """A step ends: hand the core's commands to the tiers."""
        for command in self.core.end_step():
            self._submit(command)

    def _tell_health(self) -> None:
        """Log when a tier begins to be left alone, and when it is in use again; not each trial."""
        ledger = self.core.ledger
        for place, tier in enumerate(self.tiers):
            for circuit, doing in (
                (ledger.reads[place], "reads from"),
                (ledger.writes[place], "writes to"),
            ):
                down = circuit.state is not State.CLOSED
                if down == ((tier.name, doing) in self._down):
                    continue
                if down:
                    self._down.add((tier.name, doing))
                    fault = circuit.fault.value if circuit.fault is not None else "unknown"
                    log.warning("No %s tier %s for a while: %s", doing, tier.name, fault)
                else:
                    self._down.discard((tier.name, doing))
                    log.warning("Again %s tier %s", doing, tier.name)

    def reset(self) -> None:
        """Forget the primary at once. The tiers' blocks stay valid only if the operator named the
        state of the weights; else a fresh epoch hides them from now on.
        """
        if not self._keep_tiers and self._namespaces:
            self._namespaces.append(self._namespaces[0].with_epoch(secrets.token_hex(16)))
        self.core.reset(keep_tiers=self._keep_tiers)

    def close(self) -> None:
        """Stop the drivers, as far as they stop soon; never wait for a tier that hangs."""
        for tier, driver in zip(self.tiers, self.drivers, strict=True):
            if not driver.close(_CLOSE_TIMEOUT_S):
                log.warning("Tier %s is still busy; left alone", tier.name)
        self.region.close()

    def _submit(self, command: Command) -> None:
        driver = self.drivers[command.tier]
        namespace = self._namespaces[command.epoch].digest
        match command:
            case Probe(job=job, keys=keys):
                driver.submit_lookup(JobMetadata(job, keys, (), namespace))
            case Read(job=job, keys=keys, slots=slots):
                views = SlotViews(self.region, slots, readonly=False)
                driver.submit_load(JobMetadata(job, keys, views, namespace))
            case Write(job=job, keys=keys, slots=slots):
                views = SlotViews(self.region, slots, readonly=True)
                driver.submit_store(JobMetadata(job, keys, views, namespace))
            case Lend(job=job, ticket=ticket, keys=keys, slots=slots, missing=missing):
                views = SlotViews(self.region, slots, readonly=True)
                driver.submit_lend(ticket, JobMetadata(job, keys, views, namespace), missing)

    def _facts_of(self, digest: str) -> Mapping[str, object]:
        return next(each.describe() for each in self._namespaces if each.digest == digest)


def targets_of(tiers: Sequence[ConfiguredTier]) -> list[frozenset[TierId]]:
    """Per tier, those that get what is found in it: as configured, else every faster one. Local
    tiers count as faster than remote ones; among tiers alike, the order is that of the operator.
    """
    remote = [tier.tier_type.locality != "LOCAL" for tier in tiers]
    targets = []
    for place, tier in enumerate(tiers):
        if tier.promote_to is None:
            faster = [t for t in range(len(tiers)) if (remote[t], t) < (remote[place], place)]
        else:
            faster = [t for t in range(len(tiers)) if tiers[t].name in tier.promote_to]
        targets.append(frozenset(map(TierId, faster)))
    return targets


def limits_of(settings: Settings, num_slots: int, num_tiers: int) -> Limits:
    """The bounds of one engine: shares of the pool, turned into slots."""
    tiers = max(num_tiers, 1)
    promoting_max = max(1, int(num_slots * settings.promotion_share))
    writing_max = max(1, int(num_slots * settings.cascade_share) // tiers)
    lending_max = int(num_slots * settings.lending_share)
    # What promotions always get: a tenth, or their share if that is less; nothing without tiers.
    kept = max(1, min(num_slots // 10, promoting_max)) + writing_max * tiers if num_tiers else 0
    return Limits(
        promoting_max=promoting_max,
        writing_max=writing_max,
        # With several tiers, one that hangs leaves half to the others.
        reading_max=promoting_max if tiers == 1 else max(1, promoting_max // 2),
        storing_max=max(1, num_slots - kept - lending_max),
        lending_max=lending_max,
        job_deadline_s=settings.job_deadline_ms / 1e3,
        wait_max_s=settings.max_wait_ms / 1e3,
        hold_s=settings.hold_ms / 1e3,
        absent_ttl_s=settings.absent_ttl_ms / 1e3,
        second_touch=settings.store_filter == "second_touch",
        patience=Patience(
            failures_max=settings.tier_failures_max,
            stall_s=settings.tier_stall_ms / 1e3,
            backoff_s=settings.tier_backoff_ms / 1e3,
            backoff_max_s=settings.tier_backoff_max_ms / 1e3,
        ),
    )
