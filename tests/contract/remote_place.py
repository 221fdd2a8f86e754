"""What `kvtier ls`, `verify`, `evict` and `wipe` are tried on: two namespaces of a remote tier.

`object_place` and `valkey_place` say what differs between a bucket and a server.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner, Result

from kvtier.cli.app import app
from kvtier.envelope import HEADER_BYTES, seal
from kvtier.testing.blocks import BLOCK_BYTES, NAMESPACE, block_of, key_of

if TYPE_CHECKING:
    import pytest

    from kvtier.core.types import BlockKey
    from kvtier.tiers.catalog import RemoteCatalog

OTHER = hashlib.sha256(b"another").hexdigest()
BLOCK = HEADER_BYTES + BLOCK_BYTES


def facts(namespace: str, label: str | None) -> dict[str, Any]:
    """The description of a namespace."""
    described: dict[str, Any] = {"architectures": ["TinyForCausalLM"], "model_dtype": "bfloat16"}
    described |= {"layout": {"row_bytes": BLOCK_BYTES}}
    return {"digest": namespace, "label": label, "facts": described}


def numbers(*which: int) -> set[BlockKey]:
    """The keys of blocks."""
    return {key_of(i) for i in which}


def told(command: str, url: str, *more: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [command, url, *more])


def refusal(command: str, url: str, *more: str) -> str:
    """The one line with which a command is refused."""
    done = told(command, url, *more)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("kvtier: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


class RemotePlace:
    """Two namespaces of the tier's own, of 5 and 3 blocks, below a prefix of its own.

    Attributes:
        settings: of the tier.
        url: its place.
        options: what else a command has to be told.
        root: how the place is shown.
        layout: what the form of its blocks is called.
        foreign_noun: what is called foreign there.
        foreign_shown: how the foreign is shown, after `add_foreign`.
        tells_uses: whether the store knows when a block was last used.
    """

    tier_type: Any
    settings: Any
    url: str
    options: tuple[str, ...]
    root: str
    layout: str
    foreign_noun: str
    foreign_shown: set[str]
    tells_uses: bool

    def fill(self) -> None:
        """Write the blocks."""
        for namespace, which in ((NAMESPACE, range(5)), (OTHER, range(10, 13))):
            self.write(namespace, which)

    def write(self, namespace: str, which: range, row_bytes: int = BLOCK_BYTES) -> None:
        """Write blocks as an engine does."""
        label = "prod" if namespace == NAMESPACE else None
        tier = self.tier_type.open(self.settings, namespace, facts(namespace, label))
        for i in which:
            row = memoryview(block_of(key_of(i), row_bytes))
            header = seal(namespace, key_of(i), row, time.time_ns())
            tier.write(key_of(i), (memoryview(header), row))
        tier.close()

    def run(self, command: str, *arguments: str) -> Result:
        """Run a command over the place."""
        return told(command, self.url, *self.options, *arguments)

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        """What a command says to programs."""
        done = self.run(command, *arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def keys(self, namespace: str = NAMESPACE) -> set[BlockKey]:
        """The blocks that are whole, as to their names."""
        names = self.names()
        return {key_of(i) for i in range(100) if self.names_of(i, namespace) <= names}

    def catalog(self) -> RemoteCatalog:
        """What the commands look into."""
        raise NotImplementedError

    def names(self) -> set[Any]:
        """Everything that is there, looked at past the tier."""
        raise NotImplementedError

    def names_of(self, i: int, namespace: str = NAMESPACE) -> set[Any]:
        """Under which a block lies."""
        raise NotImplementedError

    def is_of(self, name: Any, namespace: str) -> bool:
        """Whether a name, foreign or not, lies in a namespace."""
        raise NotImplementedError

    def add_foreign(self) -> set[Any]:
        """Add what the tier did not write, and no command may touch: its names."""
        raise NotImplementedError

    def damage(self) -> tuple[BlockKey, BlockKey]:
        """Flip a byte of block 1, cut block 3."""
        raise NotImplementedError

    def lose_a_part(self, i: int, namespace: str) -> None:
        """Have the store evict one name of a block, if it has several."""

    def list_in_small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the store answer with few names at a time."""
        raise NotImplementedError
