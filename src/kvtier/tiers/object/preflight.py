"""Tries a store at start: writes, reads, lists and deletes one small object below the prefix.

The client's threads do not survive a fork, and engines fork. So this runs as a program:
settings as JSON on stdin, a verdict as JSON on stdout.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

import msgspec

from kvtier.errors import (
    ConfigError,
    KVTierError,
    MissingBlockError,
    TierDeniedError,
    TierFullError,
    TierThrottledError,
    TierUnreachableError,
)
from kvtier.tiers.object.settings import ObjectSettings, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 15.0
"""What a start waits at most."""

_REQUEST_S = 5.0

_PERMISSIONS = {
    "writing": {
        "s3": "s3:PutObject",
        "gs": "storage.objects.create and storage.objects.delete",
        "az": "the role Storage Blob Data Contributor",
    },
    "reading": {
        "s3": "s3:GetObject",
        "gs": "storage.objects.get",
        "az": "the role Storage Blob Data Reader",
    },
    "listing": {
        "s3": "s3:ListBucket",
        "gs": "storage.objects.list",
        "az": "the role Storage Blob Data Reader",
    },
    "deleting": {
        "s3": "s3:DeleteObject",
        "gs": "storage.objects.delete",
        "az": "the role Storage Blob Data Contributor",
    },
}


class Verdict(msgspec.Struct, frozen=True):
    """What a try found.

    Attributes:
        kind: `ok`; `never`: it cannot work with these settings; `not_now`: the store is not
            reachable, or refuses for a while.
        message: why, for people.
    """

    kind: Literal["ok", "never", "not_now"]
    message: str = ""


def try_in_a_process(settings: ObjectSettings, setting: str, limit_s: float = LIMIT_S) -> Verdict:
    """Try the store from another process.

    Args:
        settings: the tier's.
        setting: path of the tier's settings, for messages.
        limit_s: when the process is killed.
    """
    command = [sys.executable, "-m", "kvtier.tiers.object.preflight", setting]
    try:
        ended = subprocess.run(  # noqa: S603 - our own program
            command,
            input=msgspec.json.encode(settings),
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict("not_now", f"{setting}: {settings.url} did not answer in {limit_s:.0f} s")
    try:
        return msgspec.json.decode(ended.stdout, type=Verdict)
    except msgspec.DecodeError:
        return Verdict(
            "not_now", f"{setting}: trying {settings.url} ended with exit status {ended.returncode}"
        )


def try_store(settings: ObjectSettings, setting: str) -> Verdict:
    """Try the store from this process."""
    import obstore  # noqa: PLC0415 - see the module

    from kvtier.tiers.object.faults import fault_of_client  # noqa: PLC0415
    from kvtier.tiers.object.store import open_store  # noqa: PLC0415

    hasty = msgspec.structs.replace(
        settings, timeout_s=min(settings.timeout_s, _REQUEST_S), retries=min(settings.retries, 1)
    )
    try:
        store = open_store(hasty, setting)
    except ConfigError as error:
        return Verdict("never", str(error))
    except Exception as error:  # noqa: BLE001 - whatever the client does not like
        fault = fault_of_client(error, place_of(hasty, setting), "opening")
        return Verdict("never", f"{setting}: {fault}")
    client, path = store.client, f".kvtier-try-{secrets.token_hex(8)}"
    steps: list[tuple[str, Callable[[], object]]] = [
        ("listing", lambda: next(obstore.list(client, path, chunk_size=1), None)),
        ("writing", lambda: obstore.put(client, path, b"kvtier", use_multipart=False)),
        ("reading", lambda: obstore.get_range(client, path, start=0, length=1)),
        ("deleting", lambda: obstore.delete(client, path)),
    ]
    for doing, step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - sorted by `_verdict`
            if doing == "reading":
                with contextlib.suppress(Exception):
                    obstore.delete(client, path)
            fault = fault_of_client(error, store.place, doing)
            return _verdict(fault, doing, store.place.scheme, setting)
    return Verdict("ok")


def _verdict(fault: KVTierError, doing: str, scheme: str, setting: str) -> Verdict:
    if isinstance(fault, TierUnreachableError | TierThrottledError | TierFullError):
        return Verdict("not_now", f"{setting}: {fault}")
    if isinstance(fault, TierDeniedError):
        permission = _PERMISSIONS[doing][scheme]
        return Verdict("never", f"{setting}: {fault}; {doing} needs {permission}")
    if isinstance(fault, MissingBlockError):
        return Verdict("never", f"{setting}: {fault}: is the bucket there?")
    return Verdict("never", f"{setting}: {fault}")


def main() -> None:
    """Read settings, print a verdict."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ObjectSettings)
    sys.stdout.buffer.write(msgspec.json.encode(try_store(settings, sys.argv[1])))


if __name__ == "__main__":
    main()
