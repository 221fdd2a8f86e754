"""Tiers of engines over servers that are other programs."""

from __future__ import annotations

from typing import Any

from engine_client import ONE_PROCESS

from kvtier.testing.http_proxy import HttpFaultProxy
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, S3Server

BUCKET = "kvtier-test"

IMPATIENT = {"timeout_s": 1.0, "retries": 0}
"""Options of an object tier whose server is to fail."""


def object_environment() -> dict[str, str]:
    """Of an engine with an object tier."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return {**ONE_PROCESS, **keys}


def object_tier(store: HttpFaultProxy | S3Server, prefix: str, **options: Any) -> dict[str, Any]:
    """An object tier below a prefix; with patience, since tests share their cores."""
    return {
        "type": "object",
        "url": f"s3://{BUCKET}/{prefix}",
        "endpoint": f"http://{store.address[0]}:{store.address[1]}",
        "allow_http": True,
        "timeout_s": 20.0,
        **options,
    }


def valkey_tier(url: str, **options: Any) -> dict[str, Any]:
    """A valkey tier."""
    return {"type": "valkey", "url": url, **options}
