"""kvtier's events and tiers in vLLM's words."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.core.types import BlockKey, Event, Removed, Stored, TierId
from kvtier.errors import ConfigError
from kvtier.offloader import ConfiguredTier

log = logging.getLogger(__name__)


class EventTranslator:
    """Events of the core as vLLM's `OffloadingEvent`s; `ownership` is the name of the tier.

    `Cleared` needs no event of its own: the core names every block that a reset removes.
    """

    def __init__(self, tiers: Sequence[ConfiguredTier]) -> None:
        self._tiers = tiers

    def translate(self, events: Iterable[Event]) -> Iterator[OffloadingEvent]:
        """In the order in which they became true."""
        for event in events:
            match event:
                case Stored(tier=tier, keys=keys):
                    yield self._event(tier, keys, removed=False)
                case Removed(tier=tier, keys=keys):
                    yield self._event(tier, keys, removed=True)

    def _event(
        self, tier: TierId | None, keys: Sequence[BlockKey], *, removed: bool
    ) -> OffloadingEvent:
        names = [OffloadKey(key) for key in keys]
        if tier is None:
            # vLLM keeps a block's payload until its removal from the primary.
            return OffloadingEvent(names, Medium.CPU, removed, removal_expected=True)
        configured = self._tiers[tier]
        return OffloadingEvent(
            names, medium_of(configured), removed, locality_of(configured), configured.name
        )


def require_known_places(tiers: Sequence[ConfiguredTier]) -> None:
    """Check that vLLM has words for where every tier keeps its blocks.

    Raises:
        ConfigError: a tier's type declares a medium or locality that vLLM does not know.
    """
    for place, tier in enumerate(tiers):
        kind = tier.tier_type
        for name, value, known in (
            ("medium", kind.medium, Medium),
            ("locality", kind.locality, Locality),
        ):
            if value not in known.__members__:
                raise ConfigError(
                    f"secondary_tiers[{place}].type: its {name} is {value!r}, but this vLLM knows "
                    f"only {', '.join(known.__members__)}; correct the class of the tier's type"
                )


def medium_of(tier: ConfiguredTier) -> Medium:
    """Medium of a tier, as vLLM's events and filters name it."""
    return Medium[tier.tier_type.medium]


def locality_of(tier: ConfiguredTier) -> Locality:
    """Locality of a tier, as vLLM's events and filters name it."""
    return Locality[tier.tier_type.locality]


def hit_source(tier: ConfiguredTier) -> CacheHitSource:
    """Source of a hit, in vLLM's statistics."""
    if medium_of(tier) is Medium.CPU:
        return CacheHitSource.HOST
    if locality_of(tier) is Locality.LOCAL:
        return CacheHitSource.DISK
    return CacheHitSource.EXTERNAL_UNSPECIFIED


def cascade_tiers(tiers: Sequence[ConfiguredTier], req_context: ReqContext) -> set[TierId] | None:
    """Tiers that may get what a request stores (`kv_store_tiers`, in the form of vLLM's
    `kv_load_tiers`, or names of tiers); None: all of them. What cannot be understood is ignored.
    """
    wanted = (req_context.kv_transfer_params or {}).get("kv_store_tiers")
    if wanted is None:
        return None
    if not isinstance(wanted, list) or not all(isinstance(w, str | dict) for w in wanted):
        log.warning("kv_store_tiers of request %s is not a list: ignored", req_context.req_id)
        return None
    return {
        TierId(place)
        for place, tier in enumerate(tiers)
        if any(_matches(tier, one) for one in wanted)
    }


def _matches(tier: ConfiguredTier, wanted: str | Mapping[str, object]) -> bool:
    if isinstance(wanted, str):
        return wanted == tier.name
    kind = tier.tier_type
    known = {"name": tier.name, "medium": kind.medium, "locality": kind.locality}
    return all(known.get(word) == value for word, value in wanted.items())


def allowed_tiers(tiers: Sequence[ConfiguredTier], req_context: ReqContext) -> set[TierId] | None:
    """Tiers that a request may load from (`kv_load_tiers`); None: all of them."""
    chosen = getattr(req_context, "load_tier_filter", None)
    if chosen is None or chosen is type(chosen).ALL:
        return None
    return {
        TierId(place)
        for place, tier in enumerate(tiers)
        if chosen.allows(medium_of(tier), locality_of(tier))
    }
