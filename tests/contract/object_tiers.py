"""Object tiers over a server, each below a prefix of its own."""

from __future__ import annotations

import secrets
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of
from kvtier.tiers.object.settings import ObjectSettings

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from kvtier.core.types import BlockKey
    from kvtier.testing.proxy import FaultProxy
    from kvtier.testing.s3_servers import S3Server
    from kvtier.tiers.object.objects import ObjectTier

BUCKET = "kvtier-test"


def settings_for(server: S3Server | FaultProxy, **more: Any) -> ObjectSettings:
    """Settings of a tier below a new prefix."""
    options = {
        "url": f"s3://{BUCKET}/{secrets.token_hex(6)}/kv",
        "endpoint": f"http://{server.address[0]}:{server.address[1]}",
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


def put(tier: ObjectTier, key: BlockKey, content: bytes | None = None) -> None:
    view = memoryview(block_of(key) if content is None else content)
    tier.write(key, (view[:HEADER_BYTES], view[HEADER_BYTES:]))


def get(tier: ObjectTier, key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytes:
    into = memoryview(bytearray(block_bytes))
    tier.read(key, (into[:HEADER_BYTES], into[HEADER_BYTES:]))
    return bytes(into)


def certificate(
    tmp_path: Path, name: str = "127.0.0.1", **times: datetime
) -> tuple[ssl.SSLContext, str]:
    """TLS of a server by an authority of its own, and the file to trust."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    bundle = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(bundle))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, **times).configure_cert(server)
    return server, str(bundle)
