"""A namespace as a tar archive: `namespace.json`, then one member per block, header and row.

A member's name is its block's key in hex. Blocks come in the order of their use, last used first,
so that a directory that is too small for all of them gets those that matter. Every block is
verified on both ways; what is damaged is left out and told.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from kvtier.core.types import BlockKey
from kvtier.envelope import BLOCK_BYTES_MAX, HEADER_BYTES, MAX_KEY_BYTES, verify
from kvtier.errors import ArchiveError, EnvelopeError, MissingBlockError, TierFullError
from kvtier.tiers.descriptions import DESCRIPTION_BYTES_MAX
from kvtier.tiers.fs.catalog_verify import read_verified
from kvtier.tiers.fs.namespace_directory import NAMESPACE_FILE
from kvtier.tiers.fs.page_buffer import PageBuffer
from kvtier.tiers.fs.tar_stream import TarReader, TarWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.tiers.base import Tier
    from kvtier.tiers.fs.catalog_verify import Stored
    from kvtier.tiers.fs.tar_stream import Member

FULL_WAIT_S = 10.0
"""A root that was just opened is counted first, and a full one evicts: both take moments."""

_FULL_PAUSE_S = 0.05
_KEY_NAME = re.compile(rf"(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class Transfer:
    """What an export or an import did.

    Attributes:
        namespace: hex digest.
        blocks: written.
        nbytes: of them, header and row.
        skipped: gone meanwhile (export), or present already (import).
        refused: what was left out, and why: by key, or by the member's name.
        full: the directory took no more; what came behind in the archive is missing.
    """

    namespace: str
    blocks: int = 0
    nbytes: int = 0
    skipped: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    full: bool = False


def list_for_export(stored: Sequence[Stored]) -> list[Stored]:
    """Each key once, last used first."""
    newest: dict[BlockKey, Stored] = {}
    for one in sorted(stored, key=lambda one: one[2].last_use_s, reverse=True):
        newest.setdefault(one[2].key, one)
    return list(newest.values())


def export_namespace(
    description: Mapping[str, object],
    namespace: str,
    stored: Sequence[Stored],
    out: BinaryIO,
    progress: Callable[[int], None],
) -> Transfer:
    """Write a namespace's blocks to a tar archive.

    Args:
        description: content of its `namespace.json`.
        namespace: hex digest.
        stored: the blocks, in the order in which they are written.
        out: where the archive goes; needs no position.
        progress: told the bytes of each block.

    Raises:
        OSError: the archive cannot be written.
    """
    done = Transfer(namespace)
    buffer = PageBuffer()
    tar = TarWriter(out)
    text = json.dumps({**description, "digest": namespace}, indent=2, sort_keys=True) + "\n"
    tar.add(NAMESPACE_FILE, (text.encode(),), time.time())
    for _, layout, entry in stored:
        try:
            data = read_verified(namespace, layout, entry, buffer)
        except MissingBlockError:
            done.skipped += 1
        except EnvelopeError as error:
            done.refused.append((entry.key.hex(), str(error)))
        except OSError as error:
            done.refused.append((entry.key.hex(), error.strerror or str(error)))
        else:
            tar.add(entry.key.hex(), (data,), entry.last_use_s)
            done.blocks += 1
            done.nbytes += data.nbytes
        progress(entry.nbytes)
    tar.finish()
    return done


def import_namespace(
    source: BinaryIO,
    open_tier: Callable[[str, Mapping[str, object]], Tier],
    progress: Callable[[int], None],
    room_bytes: int | None = None,
    full_wait_s: float = FULL_WAIT_S,
) -> Transfer:
    """Read a tar archive that `export_namespace` wrote, and keep its blocks.

    What was kept before an error stays: every block was verified on its own.

    Args:
        source: the archive; may be a pipe.
        open_tier: opens the namespace of a digest and description, to be closed here.
        progress: told the bytes of each member.
        room_bytes: import no more than this: the rest would only evict what came before it.
        full_wait_s: how long to wait for room that others make.

    Raises:
        ArchiveError: no export, or cut off.
        OSError: source or medium failed.
    """
    tar = TarReader(source)
    namespace, description = _read_description(tar)
    done = Transfer(namespace)
    block_bytes = _block_bytes(description)
    buffer = PageBuffer()
    tier = open_tier(namespace, description)
    try:
        while not done.full and (member := tar.next_member()) is not None:
            reason = _not_a_block(member, block_bytes)
            if reason is None:
                data = buffer.view(member.nbytes)
                tar.read(data)
                done.full = room_bytes is not None and done.nbytes + data.nbytes > room_bytes
                if not done.full:
                    key = BlockKey(bytes.fromhex(member.name))
                    reason = _keep(tier, done, key, data, full_wait_s)
            if reason is None:
                block_bytes = member.nbytes
            else:
                done.refused.append((member.name, reason))
            progress(member.nbytes)
    except ArchiveError as error:
        raise ArchiveError(
            f"{error}; {done.blocks} blocks before that were imported and are good: import the "
            f"whole archive again, blocks that are present are skipped"
        ) from None
    finally:
        tier.close()
    return done


def _keep(
    tier: Tier, done: Transfer, key: BlockKey, data: memoryview, full_wait_s: float
) -> str | None:
    """Keep one block. Returns why not, if it is not one."""
    header, row = data[:HEADER_BYTES], data[HEADER_BYTES:]
    try:
        verify(header, done.namespace, key, row)
    except EnvelopeError as error:
        return str(error)
    if tier.exists([key])[0]:
        done.skipped += 1
        return None
    until = time.monotonic() + full_wait_s
    while True:
        try:
            tier.write(key, (header, row))
        except TierFullError:
            if time.monotonic() >= until:
                done.full = True
                return None
            time.sleep(_FULL_PAUSE_S)
        else:
            done.blocks += 1
            done.nbytes += data.nbytes
            return None


def _not_a_block(member: Member, block_bytes: int | None) -> str | None:
    """Why a member can be no block of the namespace, by its header alone."""
    if not member.is_file:
        return "no plain file"
    if not _KEY_NAME.fullmatch(member.name):
        return "its name is no key"
    if not HEADER_BYTES < member.nbytes <= BLOCK_BYTES_MAX:
        return f"{member.nbytes} bytes, which no block has"
    if block_bytes is not None and member.nbytes != block_bytes:
        return f"{member.nbytes} bytes, the blocks of this namespace have {block_bytes}"
    return None


def _read_description(tar: TarReader) -> tuple[str, dict[str, object]]:
    member = tar.next_member()
    if member is None or member.name != NAMESPACE_FILE or not member.is_file:
        raise ArchiveError(f"no export: its first member must be {NAMESPACE_FILE}")
    if member.nbytes > DESCRIPTION_BYTES_MAX:
        raise ArchiveError(f"no export: its {NAMESPACE_FILE} has {member.nbytes} bytes")
    text = bytearray(member.nbytes)
    tar.read(memoryview(text))
    try:
        description = json.loads(text)
    except (ValueError, RecursionError):
        description = None
    digest = description.get("digest") if isinstance(description, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ArchiveError(f"no export: its {NAMESPACE_FILE} names no digest")
    assert isinstance(description, dict), "it has a digest"
    return digest, description


def _block_bytes(description: Mapping[str, object]) -> int | None:
    """Length of the namespace's blocks, if its facts tell it."""
    value: object = description.get("facts")
    for name in ("layout", "row_bytes"):
        value = value.get(name) if isinstance(value, dict) else None
    return value + HEADER_BYTES if isinstance(value, int) and value > 0 else None
