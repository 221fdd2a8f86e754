"""A tier in the engine's own process that its test can hold, fail, and make lie.

Blocks are kept by the real `FilesTier`; only what the script says is changed. `type` in the tier's
settings is `scripted_tier:ScriptedTierType`, its only option is `root_dir`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.core.types import BlockKey, group_of
from kvtier.envelope import seal
from kvtier.tiers.base import Buffers
from kvtier.tiers.fs.checks import check_root
from kvtier.tiers.fs.files import FilesTier

OPERATIONS = ("exists", "read", "write")


class Script:
    """What the tiers of this process do; shared by all of them.

    Attributes:
        calls: calls that have begun, by operation.
        waiting: calls that wait at a closed gate, by operation.
        read_keys: keys that were read, in order.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.read_keys: list[BlockKey] = []
        self._lock = threading.Lock()
        self._gates = {name: threading.Event() for name in OPERATIONS}
        self._failing: set[str] = set()
        self._let_through: Counter[str] = Counter()
        self._flip: tuple[int, int] | None = None
        for gate in self._gates.values():
            gate.set()

    def hold(self, operation: str, after: int = 0) -> None:
        """Close the gate of an operation, once `after` more calls have passed."""
        with self._lock:
            self._let_through[operation] = after
        self._gates[operation].clear()

    def release(self, operation: str) -> None:
        """Open the gate again, for those who wait as well."""
        self._gates[operation].set()

    def fail(self, operation: str, failing: bool) -> None:
        """Have an operation raise, or not any more."""
        (self._failing.add if failing else self._failing.discard)(operation)

    def flip(self, offset: int | None, mask: int = 0x40) -> None:
        """Change one byte of every payload that is read, and seal it as if it were right."""
        self._flip = None if offset is None else (offset, mask)

    def describe(self) -> dict[str, object]:
        """What happened, as plain data; reads also by group."""
        with self._lock:
            by_group = Counter(str(group_of(key)) for key in self.read_keys)
            distinct = Counter(str(group_of(key)) for key in set(self.read_keys))
            return {
                "calls": dict(self.calls),
                "waiting": dict(self.waiting),
                "reads_by_group": dict(by_group),
                "blocks_by_group": dict(distinct),
            }

    def forget(self) -> None:
        """Start counting afresh."""
        with self._lock:
            self.calls.clear()
            self.read_keys.clear()

    def enter(self, operation: str, keys: Sequence[BlockKey] = ()) -> None:
        """A call begins; returns when its gate is open."""
        with self._lock:
            self.calls[operation] += 1
            if operation == "read":
                self.read_keys += keys
            gate = self._gates[operation]
            if not gate.is_set() and self._let_through[operation] > 0:
                self._let_through[operation] -= 1
                passes = True
            else:
                passes = gate.is_set()
                self.waiting[operation] += not passes
        if not passes:
            gate.wait()
            with self._lock:
                self.waiting[operation] -= 1
        if operation in self._failing:
            raise OSError(f"{operation} fails as scripted")

    def spoil(self, namespace: str, key: BlockKey, into: Buffers) -> None:
        """Change what was read, so that no check of the driver can notice."""
        if self._flip is None:
            return
        header, payload = into
        offset, mask = self._flip
        payload[offset] ^= mask
        header[:] = seal(namespace, key, payload, time.time_ns())


SCRIPT = Script()


class ScriptedTier:
    """`FilesTier` behind the script."""

    def __init__(self, inner: FilesTier, namespace: str) -> None:
        self._inner = inner
        self._namespace = namespace

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        SCRIPT.enter("exists")
        return self._inner.exists(keys)

    def read(self, key: BlockKey, into: Buffers) -> None:
        SCRIPT.enter("read", [key])
        self._inner.read(key, into)
        SCRIPT.spoil(self._namespace, key, into)

    def write(self, key: BlockKey, data: Buffers) -> None:
        SCRIPT.enter("write")
        self._inner.write(key, data)

    def delete(self, key: BlockKey) -> None:
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


class ScriptedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the scripted tier."""

    root_dir: str


class ScriptedTierType:
    """Opens scripted tiers. Events and hit sources see it as a disk."""

    settings_type = ScriptedSettings
    default_name = "scripted"
    medium = "STORAGE"
    locality = "LOCAL"
    in_process = True  # its test talks to it by variables

    def num_threads(self, settings: ScriptedSettings) -> int:
        return 4

    def preflight(self, settings: ScriptedSettings, setting: str) -> None:
        check_root(Path(settings.root_dir), f"{setting}.root_dir")

    def open(
        self, settings: ScriptedSettings, namespace: str, facts: Mapping[str, object]
    ) -> ScriptedTier:
        return ScriptedTier(FilesTier(Path(settings.root_dir), namespace, facts), namespace)
