"""The tier: blocks of one namespace in a server, moved by one command per few of them."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from glide_sync import Batch, ClusterBatch, GlideClusterClient, TEncodable

from kvtier.errors import KVTierError, MissingBlockError, TierError
from kvtier.tiers.valkey.faults import failure
from kvtier.tiers.valkey.keys import Names, Parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.base import Buffers
    from kvtier.tiers.valkey.connections import Client, Connections
    from kvtier.tiers.valkey.watch import Watch

CALL_BYTES_MAX = 2 << 20
"""Blocks go together into a command up to this many bytes: longer ones are not faster, and keep the
server from everybody else."""

DESCRIPTION_TTL_MS = 30 * 86_400_000
"""With a time to live for blocks, descriptions live as long, but at least this after a start."""

ASKED_TOGETHER = 16
"""Blocks whose parts are counted by one command, which costs a third of one for each. Present
blocks are mostly followed by present ones and absent by absent, since prompts are found by their
beginning."""

_TOO_LONG = "Value size exceeds buffer capacity"

Outcome = BaseException | None


class ValkeyTier:
    """Keeps blocks as values of a server; any number of engines may share it.

    Args:
        connections: to the server; closed with the tier.
        names: of the namespace's keys.
        part_max: the longest value that the server takes, bytes.
        ttl_ms: after which a block that is not used expires; None: never.
        watch: listens to what the server removes; closed with the tier.
    """

    def __init__(
        self,
        connections: Connections,
        names: Names,
        part_max: int,
        ttl_ms: int | None,
        watch: Watch,
    ) -> None:
        self._connections = connections
        self._names = names
        self._part_max = part_max
        self._ttl_ms = ttl_ms
        self._watch = watch

    def describe(self, facts: Mapping[str, object]) -> None:
        """Have the server keep what the namespace stands for, and since when, unless it does.

        Raises:
            TierError: the server refuses, or cannot be reached.
        """
        name = self._names.description
        text = json.dumps({**facts, "created_s": round(time.time(), 3)}, sort_keys=True)

        def tell(client: Client) -> None:
            if client.mget([name])[0] is None:
                client.mset({name: text})  # two at once tell the same
            if self._ttl_ms is not None:
                client.pexpire(name, max(self._ttl_ms, DESCRIPTION_TTL_MS))

        self._connections.run(tell)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether header and row of each key are there: one pipeline, and a second one for blocks
        beside which others are missing.

        Raises:
            TierError: the server refuses, or cannot be reached.
        """
        names = [self._names.of(key) for key in keys]
        # in a cluster the library would cut the command up again, since blocks lie apart
        length = 1 if self._connections.cluster else ASKED_TOGETHER
        runs = [names[i : i + length] for i in range(0, len(names), length)]
        answers: list[bool] = []
        unclear: list[int] = []
        for run, there in zip(runs, self._are_there(runs), strict=True):
            if there is None:
                unclear += range(len(answers), len(answers) + len(run))
            answers += [there is True] * len(run)
        for i, there in zip(unclear, self._are_there([[names[i]] for i in unclear]), strict=True):
            answers[i] = there is True
        return answers

    def read(self, key: BlockKey, into: Buffers) -> None:
        """Read a block into its buffers. One of another length is removed.

        Raises:
            MissingBlockError: absent, incomplete, or not exactly as long as `into`.
            TierError: the server refuses, or cannot be reached.
        """
        (outcome,) = self.read_batch([key], [into])
        if outcome is not None:
            try:
                raise outcome
            finally:
                del outcome  # an exception that is a variable of its traceback is a cycle

    def write(self, key: BlockKey, data: Buffers) -> None:
        """Write a block: all of its parts by one command.

        Raises:
            TierError: the server refuses, or cannot be reached.
        """
        (outcome,) = self.write_batch([key], [data])
        if outcome is not None:
            try:
                raise outcome
            finally:
                del outcome  # an exception that is a variable of its traceback is a cycle

    def read_batch(self, keys: Sequence[BlockKey], into: Sequence[Buffers]) -> list[Outcome]:
        """Read blocks: one command per `CALL_BYTES_MAX`. What the server refuses as a whole, it
        refused for each of a command's blocks.
        """
        outcomes: list[Outcome] = []
        for start, end, parts in self._calls(into):
            outcomes += self._read(keys[start:end], parts)
        if self._ttl_ms is not None:
            self._renew([key for key, o in zip(keys, outcomes, strict=True) if o is None], into[0])
        return outcomes

    def write_batch(self, keys: Sequence[BlockKey], data: Sequence[Buffers]) -> list[Outcome]:
        """Write blocks: one command per `CALL_BYTES_MAX`."""
        outcomes: list[Outcome] = []
        for start, end, parts in self._calls(data):
            try:
                outcomes += self._write(keys[start:end], parts)
            except KVTierError as error:
                outcomes += [error.with_traceback(None)] * (end - start)
        return outcomes

    def delete(self, key: BlockKey) -> None:
        """Forget a block; the server frees its memory later.

        Raises:
            TierError: the server refuses, or cannot be reached.
        """
        self._connections.run(lambda client: client.unlink(list(self._names.of(key))))

    def take_dropped(self) -> list[BlockKey]:
        """Blocks that the server removed since the last call, if it tells."""
        return self._watch.take()

    def figures(self) -> Mapping[str, float]:
        """What the server last said of its memory, and the round trips of this tier."""
        return {**self._watch.figures(), "round_trips": float(self._connections.calls)}

    def close(self) -> None:
        """End the connections; blocks stay where they are."""
        self._watch.close()
        self._connections.close()

    def _are_there(self, runs: Sequence[Sequence[Sequence[bytes]]]) -> list[bool | None]:
        """Whether all of the blocks of each run are there; None if some of their parts are."""
        flat: list[list[TEncodable]] = [[part for names in run for part in names] for run in runs]

        def ask(client: Client) -> list[object]:
            batch = _pipeline(client)
            for parts in flat:
                batch.exists(parts)
            return _run(client, batch)

        counts = self._connections.run(ask) if runs else []
        for count in counts:
            if isinstance(count, Exception):
                raise failure(count)
        return [
            count == len(parts) if count in (0, len(parts)) else None
            for count, parts in zip(counts, flat, strict=True)
        ]

    def _calls(self, blocks: Sequence[Buffers]) -> Iterator[tuple[int, int, list[Parts]]]:
        """Runs of blocks for one command each: start, end, parts."""
        start, nbytes, parts = 0, 0, list[Parts]()
        for i, buffers in enumerate(blocks):
            block = Parts(buffers, self._part_max)
            if parts and nbytes + block.nbytes > CALL_BYTES_MAX:
                yield start, i, parts
                start, nbytes, parts = i, 0, []
            parts.append(block)
            nbytes += block.nbytes
        if parts:
            yield start, start + len(parts), parts

    def _read(self, keys: Sequence[BlockKey], parts: Sequence[Parts]) -> list[Outcome]:
        names = [self._names.of(k, len(p.views)) for k, p in zip(keys, parts, strict=True)]
        buffers = [view for each in parts for view in each.views]
        flat: list[TEncodable] = [name for some in names for name in some]
        try:
            lengths = self._connections.run(lambda client: client.mget(flat, buffers))
        except KVTierError as error:
            if _TOO_LONG not in str(error):
                return [error.with_traceback(None)] * len(keys)
            if len(keys) > 1:  # which one is it?
                return [o for k, p in zip(keys, parts, strict=True) for o in self._read([k], [p])]
            return [self._misfit(keys[0], parts[0])]
        outcomes: list[Outcome] = []
        place = 0
        for key, block in zip(keys, parts, strict=True):
            found = lengths[place : place + len(block.views)]
            place += len(block.views)
            if all(length is None for length in found):
                outcomes.append(MissingBlockError(f"no block under {key.hex()}"))
            elif block.whole([None if length is None else int(length) for length in found]):
                block.deliver()
                outcomes.append(None)
            else:
                outcomes.append(self._misfit(key, block))
        return outcomes

    def _misfit(self, key: BlockKey, block: Parts) -> MissingBlockError:
        """A block of another length, or a part of one: have it out of the way."""
        with contextlib.suppress(KVTierError):
            self.delete(key)
        return MissingBlockError(f"{key.hex()} is no block of {block.nbytes} bytes: removed")

    def _write(self, keys: Sequence[BlockKey], parts: Sequence[Parts]) -> Sequence[Outcome]:
        blocks: list[dict[TEncodable, TEncodable]] = [
            dict(zip(self._names.of(key, len(block.views)), block.fill().views, strict=True))
            for key, block in zip(keys, parts, strict=True)
        ]

        def send(client: Client) -> Sequence[Outcome]:
            if isinstance(client, GlideClusterClient):
                return self._write_to_cluster(client, blocks)
            together = {name: view for some in blocks for name, view in some.items()}
            if self._ttl_ms is None:
                client.mset(together)
            else:
                batch = Batch(is_atomic=True)
                batch.mset(together)
                for name in together:
                    batch.pexpire(name, self._ttl_ms)
                client.exec(batch, raise_on_error=True)
            return [None] * len(blocks)

        return self._connections.run(send)

    def _write_to_cluster(
        self, client: GlideClusterClient, blocks: Sequence[dict[TEncodable, TEncodable]]
    ) -> list[Outcome]:
        """Each block to its node, in one pipeline per node."""
        batch = ClusterBatch(is_atomic=False)
        places = []
        for some in blocks:
            places.append(len(batch.commands))
            batch.mset(some)
            if self._ttl_ms is not None:
                for name in some:
                    batch.pexpire(name, self._ttl_ms)
        replies = _run(client, batch)
        told = [replies[place] for place in places]
        return [failure(reply) if isinstance(reply, Exception) else None for reply in told]

    def _renew(self, keys: Sequence[BlockKey], like: Buffers) -> None:
        """Let the time to live of blocks that were read begin anew. A hint: it may fail."""
        ttl_ms = self._ttl_ms
        if not keys or ttl_ms is None:
            return
        num_parts = len(Parts(like, self._part_max).views)

        def send(client: Client) -> None:
            batch = _pipeline(client)
            for key in keys:
                for name in self._names.of(key, num_parts):
                    batch.pexpire(name, ttl_ms)
            _run(client, batch)

        with contextlib.suppress(KVTierError):
            self._connections.run(send)


def _pipeline(client: Client) -> Batch | ClusterBatch:
    if isinstance(client, GlideClusterClient):
        return ClusterBatch(is_atomic=False)
    return Batch(is_atomic=False)


def _run(client: Client, batch: Batch | ClusterBatch) -> list[object]:
    """One reply per command; a refusal as an exception in its place."""
    if isinstance(client, GlideClusterClient):
        assert isinstance(batch, ClusterBatch), "made for this client"
        replies = client.exec(batch, raise_on_error=False)
    else:
        assert isinstance(batch, Batch), "made for this client"
        replies = client.exec(batch, raise_on_error=False)
    if replies is None or len(replies) != len(batch.commands):
        raise TierError("the server did not answer each command of a pipeline")
    return list(replies)
