"""Policies by name: kvtier's own, and the operator's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from policy_traces import Key

from kvtier.config import Settings
from kvtier.core import pool as pool_module
from kvtier.core.policies import POLICIES
from kvtier.core.policies.lru import LRU
from kvtier.errors import ConfigError
from kvtier.offloader import Offloader
from kvtier.policies import METHODS, load_policy
from kvtier.region import Geometry, Region


class Newest:
    """A policy of somebody's own: the newest goes first."""

    def __init__(self, capacity: int) -> None:
        self.keys: list[Key] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def add(self, key: Key) -> None:
        self.keys.append(key)

    def discard(self, key: Key) -> None:
        self.keys.remove(key)

    def forget(self, key: Key) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def touch(self, key: Key) -> None:
        pass

    def use(self, key: Key) -> None:
        pass

    def victim(self) -> Key:
        return self.keys.pop()


OWN = """
class Lacking:
    def __init__(self, capacity): pass
    def add(self, key): pass
    def __len__(self): return 0

class Needy:
    def __init__(self, capacity, more): pass

class Outer:
    from kvtier.core.policies.lru import LRU as Inner

THING = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the operator's."""
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("raise AttributeError('no such thing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_policies", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_policies"


class TestByName:
    @pytest.mark.parametrize("name", POLICIES)
    def test_ours(self, name: str) -> None:
        assert load_policy(name) is POLICIES[name]

    def test_of_the_operators_own(self, own: str) -> None:
        assert isinstance(load_policy(f"{own}:Outer.Inner")(4), LRU)

    def test_what_has_to_be_there_is_what_the_protocol_has(self) -> None:
        protocol = vars(pool_module.Policy)
        methods = {name for name in protocol if not name.startswith("_")}
        assert set(METHODS) == methods | {"__len__", "__contains__"}

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("own_absent:Policy", "cannot be imported"),
            (":Policy", "cannot be imported"),
            ("own_broken:Policy", "cannot be imported"),
            ("own_policies:Absent", "has no 'Absent'"),
            ("own_policies:", "has no ''"),
            ("own_policies:THING", "has no 'THING' that can be called"),
            ("own_policies:Needy", "must take the number of slots"),
            ("own_policies:Lacking", "lacks __contains__, discard, forget, touch, use, victim"),
        ],
    )
    def test_refusals(self, own: str, name: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told) as refusal:
            load_policy(name)
        assert str(refusal.value).startswith(f"eviction_policy = {name!r}")

    @pytest.mark.parametrize(
        ("name", "kind"), [*POLICIES.items(), (f"{__name__}:Newest", Newest)], ids=str
    )
    def test_the_offloader_takes_the_one_that_is_set(self, name: str, kind: type) -> None:
        chosen = Settings.decode({"cpu_bytes_to_use": 3 * 4096, "eviction_policy": name})
        offloader = Offloader(chosen, (), Region.create(Geometry(3, 4096, 1)), None)
        try:
            assert type(offloader.core.pool._policy).__name__ == kind.__name__
        finally:
            offloader.close()
