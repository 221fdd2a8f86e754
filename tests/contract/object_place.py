"""Two namespaces in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore")

import obstore
from object_tiers import settings_for
from remote_place import RemotePlace

from kvtier.envelope import HEADER_BYTES
from kvtier.testing.blocks import NAMESPACE, key_of
from kvtier.tiers.object import catalog as module
from kvtier.tiers.object.catalog import ObjectCatalog
from kvtier.tiers.object.existence import path_of
from kvtier.tiers.object.lease import LEASE_FILE
from kvtier.tiers.object.store import open_store
from kvtier.tiers.object.tier_type import ObjectTierType

if TYPE_CHECKING:
    from kvtier.core.types import BlockKey
    from kvtier.testing.s3_servers import S3Server

FOREIGN = [
    "README",
    f"{NAMESPACE}/ab/notes.txt",
    f"{NAMESPACE}/zz/" + "ab" * 36,
    f"{NAMESPACE}/ab/" + "cd" * 36,
    f"{NAMESPACE}/more/ab/" + "ab" * 36,
    "dataset/ab/" + "ab" * 36,
]


class Bucket(RemotePlace):
    tier_type = ObjectTierType()
    layout = "objects"
    foreign_noun = "objects"
    tells_uses = False

    def __init__(self, server: S3Server) -> None:
        self.settings = settings_for(server)
        self.url = self.root = self.settings.url
        self.options = ("-o", f"endpoint={server.url}", "-o", "allow_http=true")
        self.foreign_shown = {*FOREIGN[:-1], "dataset/"}
        self.store = open_store(self.settings)
        self.fill()

    def add_foreign(self) -> set[str]:
        for path in FOREIGN:
            obstore.put(self.store.client, path, b"not ours")
        obstore.put(self.store.client, LEASE_FILE, b"{}")
        obstore.put(self.store.client, ".kvtier-try-1", b"x")
        return {*FOREIGN, LEASE_FILE, ".kvtier-try-1"}

    def catalog(self) -> ObjectCatalog:
        return ObjectCatalog(self.settings, "x")

    def names(self) -> set[str]:
        return {entry["path"] for entry in obstore.list(self.store.client).collect()}

    def names_of(self, i: int, namespace: str = NAMESPACE) -> set[str]:
        return {path_of(namespace, key_of(i))}

    def is_of(self, name: str, namespace: str) -> bool:
        return name.startswith(namespace)

    def damage(self) -> tuple[BlockKey, BlockKey]:
        flipped, cut = key_of(1), key_of(3)
        path = path_of(NAMESPACE, flipped)
        data = bytearray(bytes(obstore.get(self.store.client, path).bytes()))
        data[HEADER_BYTES + 777] ^= 1
        obstore.put(self.store.client, path, bytes(data))
        path = path_of(NAMESPACE, cut)
        whole = bytes(obstore.get(self.store.client, path).bytes())
        obstore.put(self.store.client, path, whole[:-100])
        return flipped, cut

    def list_in_small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PAGE_KEYS", 2)
