"""Every exception kvtier raises on purpose, under one root.

They are raised at start-up or on tier threads. Nothing here ever crosses a method that vLLM's
scheduler calls: operating outcomes are values there (see `kvtier.core.types`).
"""

from __future__ import annotations


class KVTierError(Exception):
    """The root. Catch this to catch everything kvtier raises on purpose."""


class ConfigError(KVTierError):
    """A setting is unknown, malformed, out of range, or contradicts another one.

    The message names the setting's path (`secondary_tiers[0].root_dir`), its value, what is
    allowed, and what to do.
    """


class VersionError(KVTierError):
    """This vLLM lacks something kvtier needs, or has changed it. Raised at start."""


class RegionError(KVTierError):
    """The shared memory of the primary tier cannot be created, joined or agreed on."""


class LayoutError(KVTierError):
    """The engine's KV cache has a layout that kvtier cannot map to canonical bytes."""


class NamespaceError(KVTierError):
    """Something that decides whether blocks may be shared cannot be known safely."""


class EnvelopeError(KVTierError):
    """A stored block is not what its key says: damaged, truncated, or another block."""


class ArchiveError(KVTierError):
    """An archive is not an export of a namespace, or is cut off."""


class MissingBlockError(KVTierError):
    """A tier does not hold this block (any more). An ordinary outcome of a read."""


class TierError(KVTierError):
    """A tier cannot be opened, or refuses an operation for a reason that will repeat."""


class TierFullError(TierError):
    """No room: writes will fail until some is made. Reads go on."""


class TierThrottledError(TierError):
    """The tier asks to be left alone for a while."""


class TierUnreachableError(TierError):
    """Whatever keeps the blocks cannot be reached."""


class TierTimeoutError(TierUnreachableError):
    """Whatever keeps the blocks did not answer in time."""


class TierDeniedError(TierError):
    """Credentials or permissions are refused."""
