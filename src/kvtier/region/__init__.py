"""The shared memory of the primary tier."""

from kvtier.region.memory import Geometry, Mark, Region, available_memory, total_memory
from kvtier.region.rendezvous import Offer, join, share

__all__ = [
    "Geometry",
    "Mark",
    "Offer",
    "Region",
    "available_memory",
    "join",
    "share",
    "total_memory",
]
