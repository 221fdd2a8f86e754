"""Eviction policies of the primary tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvtier.core.policies.arc import ARC
from kvtier.core.policies.lru import LRU
from kvtier.core.policies.s3fifo import S3FIFO
from kvtier.core.pool import Policy

MakePolicy = Callable[[int], Policy]
"""A policy for a pool of so many slots."""

POLICIES: Mapping[str, MakePolicy] = MappingProxyType({"arc": ARC, "lru": LRU, "s3fifo": S3FIFO})
"""Those of our own, by the name that `eviction_policy` gives them."""
