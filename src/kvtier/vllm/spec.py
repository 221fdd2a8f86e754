"""`KVTierSpec`: what vLLM's stock `OffloadingConnector` loads.

vLLM makes one in every worker and one in the scheduler. The first worker creates the shared region;
the scheduler joins it last, and learns from it what only workers know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import Settings, check_pool
from kvtier.errors import NamespaceError
from kvtier.layout import CANONICAL_FORMAT, RowLayout
from kvtier.metrics import METRICS, Kind
from kvtier.namespace import Namespace
from kvtier.offloader import Offloader, check_blocks, configure_tiers
from kvtier.policies import load_policy
from kvtier.region import Geometry, Offer, join, share, total_memory
from kvtier.vllm.compat import current_engine_config, require_supported
from kvtier.vllm.engine_facts import engine_facts, require_known
from kvtier.vllm.events import require_known_places
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.worker import KVTierWorker, row_layout
from kvtier.weights import weights_fingerprint

log = logging.getLogger(__name__)


class KVTierSpec(OffloadingSpec):
    """See the module."""

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 - vLLM's signature
    ) -> dict[str, OffloadingMetricMetadata]:
        """Definitions of kvtier's metrics for vLLM's Prometheus endpoint."""
        kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
        return {
            name: kinds[metric.kind](metric.documentation, metric.labels)
            for name, metric in METRICS.items()
        }

    def __init__(self, config: OffloadingConfig) -> None:
        """Check everything that can be checked before anything is made.

        Raises:
            VersionError: this vLLM lacks something.
            ConfigError: a setting is wrong.
        """
        require_supported()
        super().__init__(config)
        self.settings = Settings.decode(config.extra_config)
        load_policy(self.settings.eviction_policy)  # refused here rather than when it is needed
        self._tiers = configure_tiers(self.settings.secondary_tiers)
        require_known_places(self._tiers)
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The device side of this process.

        Raises:
            ConfigError: the pool is smaller than a block, or larger than memory.
            RegionError: the region cannot be made or shared.
            LayoutError: the KV cache cannot be mapped.
        """
        if self._worker is None:
            parallel = self.config.parallel
            layout = row_layout(
                kv_caches, self.blocks_per_chunk, parallel.rank, parallel.world_size
            )
            num_slots = check_pool(
                self.settings.cpu_bytes_to_use,
                layout.row_bytes,
                total_memory(),  # what is free is checked by the one that makes the region
                "cpu_bytes_to_use",
            )
            device_type = kv_caches.tensors[0].tensor.device.type
            facts = {
                "engine": engine_facts(current_engine_config(), self._layers(), device_type),
                "layout": self._layout_facts(layout),
            }
            geometry = Geometry(num_slots, layout.row_bytes, parallel.world_size)
            region = share(self.config.engine_id, Offer(geometry, facts, parallel.rank))
            if parallel.rank == 0:
                region.populate()
            self._worker = KVTierWorker(kv_caches, layout, region, parallel.rank)
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side of this process.

        Raises:
            ConfigError: a tier's capacity cannot hold one block.
            RegionError: not all workers share memory with this process.
            NamespaceError: blocks of this engine cannot be shared safely.
        """
        if self._manager is None:
            region, facts = join(self.config.engine_id)
            try:
                check_blocks(self._tiers, region.geometry.row_bytes)
                offloader = Offloader(
                    self.settings,
                    self._tiers,
                    region,
                    self._namespace(facts) if self._tiers else None,
                    self._windows(facts),
                )
            except BaseException:
                region.close()
                raise
            self._manager = KVTierManager(
                offloader,
                tokens_per_chunk={
                    group.group_id: group.tokens_per_block * self.blocks_per_chunk
                    for group in self.config.groups
                },
                emit_events=self.kv_events_config.enable_kv_cache_events,
                prefill_tokens_per_s=self.settings.prefill_tokens_per_s,
            )
            log.info(
                "kvtier: %d slots of %d bytes in DRAM, tiers %s",
                region.geometry.num_slots,
                region.geometry.row_bytes,
                ", ".join(tier.name for tier in self._tiers) or "none",
            )
        return self._manager

    def _layout_facts(self, layout: RowLayout) -> dict[str, Any]:
        """What of the layout is identity, the same on all ranks."""
        facts: dict[str, Any] = {
            "format": CANONICAL_FORMAT,
            "kv_cache_layout": self.config.kv_cache_layout,
            "row_bytes": layout.row_bytes,
            "blocks_per_chunk": layout.blocks_per_chunk,
            "page_bytes": layout.describe(),
            "portable": layout.portable,
            "groups": [
                {
                    "id": group.group_id,
                    "tokens_per_block": group.tokens_per_block,
                    # Ranks of a pipeline have other layers each, which the topology stands for.
                    "layers": list(group.layer_names) if layout.portable else len(pages),
                }
                for group, pages in zip(self.config.groups, layout.groups, strict=True)
            ],
        }
        if not layout.portable:
            parallel = self.config.parallel
            facts["topology"] = {
                "world": parallel.world_size,
                "tensor": parallel.tp_size,
                "pipeline": parallel.pp_size,
                "prefill_context": parallel.pcp_size,
                "decode_context": parallel.dcp_size,
            }
        return facts

    def _namespace(self, facts: Mapping[str, Any]) -> Namespace:
        engine = facts["engine"]
        require_known(engine)
        model = engine["model"]
        weights: object = self.settings.weights_fingerprint
        if weights is None:
            if engine["identity"]["load_format"] == "dummy":
                raise NamespaceError(
                    "the weights are made up (load_format dummy), so the files do not identify "
                    "them; set weights_fingerprint"
                )
            weights = weights_fingerprint(model["name"], model["revision"], model["cache_dir"])
        identity = {
            "weights": weights,
            "tokens_per_hash": self.tokens_per_hash,
            "layout": facts["layout"],
            **engine["identity"],
        }
        return Namespace.of(identity, self.settings.namespace, self.settings.weights_epoch)

    def _windows(self, facts: Mapping[str, Any]) -> frozenset[int]:
        """Groups that vLLM looks up from the right. Wrong here costs time, never bytes."""
        return frozenset(facts["engine"]["windows"]) | {
            group.group_id
            for group in self.config.groups
            if getattr(group, "sliding_window_size_in_chunks", None) is not None
        }

    def _layers(self) -> dict[int, tuple[str, ...]]:
        return {group.group_id: group.layer_names for group in self.config.groups}
