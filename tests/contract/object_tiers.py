"""Object tiers over a server, each below a prefix of its own."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from kvtier.testing.blocks import NAMESPACE
from kvtier.tiers.object.settings import ObjectSettings

if TYPE_CHECKING:
    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.objects import ObjectTier

BUCKET = "kvtier-test"


def settings_for(server: S3Server, **more: Any) -> ObjectSettings:
    """Settings of a tier below a new prefix."""
    options = {
        "url": f"s3://{BUCKET}/{secrets.token_hex(6)}/kv",
        "endpoint": server.url,
        "allow_http": True,
        "threads": 8,
        "lookups_in_flight": 16,
        **more,
    }
    return ObjectSettings(**options)


def open_tier(settings: ObjectSettings, namespace: str = NAMESPACE) -> ObjectTier:
    from kvtier.tiers.object.objects import ObjectTier
    from kvtier.tiers.object.store import open_store

    return ObjectTier(open_store(settings), namespace, {"model": "tiny"}, settings)
