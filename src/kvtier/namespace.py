"""The identity under which bytes are shared: facts, their digest, and where facts come from.

Two engines may exchange blocks only if every fact is equal. So a fact that changes needlessly costs
a miss, and a fact that is missing costs wrong output: what cannot be known safely is a
`NamespaceError`, and no fact depends on the host (no modification times, inodes or places).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from kvtier.errors import NamespaceError

FORMAT_VERSION = 1
"""Version of what a namespace means; part of every digest."""

Fact: TypeAlias = bool | int | float | str | Sequence["Fact"] | Mapping[str, "Fact"] | None
"""Plain data with exactly one JSON form."""

Facts: TypeAlias = Mapping[str, Fact]
"""Identity facts by name, in the order in which a reader wants to see them."""

_USER_INFO = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/?#\s]*@")
_LOOSE_USER_INFO = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^?#\s]*:[^?#\s]*@")
_QUERY = re.compile(r"(?i)([a-z][a-z0-9+.-]*://[^?#\s]*)\?[^#\s]+")


@dataclass(frozen=True, slots=True)
class Namespace:
    """An identity under which blocks may mix. Made by `of`.

    Attributes:
        digest: 64 hex digits over the format version, the facts, the label and the epoch.
        facts: read-only copy of what was given, without the credentials of URLs.
        label: the operator's label.
        epoch: state of the weights, for weights that change while the engine runs.
    """

    digest: str
    facts: Facts = field(compare=False)
    label: str | None = None
    epoch: str | None = None

    @classmethod
    def of(cls, facts: Facts, label: str | None = None, epoch: str | None = None) -> Namespace:
        """The namespace of these facts. Their order does not matter.

        Raises:
            NamespaceError: a fact has no single JSON form (NaN, a key that is not text, an object).
        """
        kept = _plain_mapping(facts, "facts")
        identity: Facts = {"format": FORMAT_VERSION, "facts": kept, "label": label, "epoch": epoch}
        digest = hashlib.sha256(_canonical_json(identity)).hexdigest()
        return cls(digest, MappingProxyType(kept), label, epoch)

    def with_epoch(self, epoch: str | None) -> Namespace:
        """The same facts and label under another state of the weights."""
        return Namespace.of(self.facts, self.label, epoch)

    def describe(self) -> dict[str, object]:
        """What `namespace.json` says: plain data in the order of the facts, without credentials."""
        return {
            "format": FORMAT_VERSION,
            "digest": self.digest,
            "label": self.label,
            "epoch": self.epoch,
            "facts": _plain_mapping(self.facts, "facts", _shown),
        }


def _without_user_info(text: str) -> str:
    """A rotated password is no other identity, and must not be guessable from a digest."""
    return _USER_INFO.sub(r"\1", text)


def _shown(text: str) -> str:
    """Without anything of a URL that may be a credential: signed queries, a password with a `/`."""
    return _QUERY.sub(r"\1?...", _LOOSE_USER_INFO.sub(r"\1...@", text))


def without_credentials(text: str) -> str:
    """Text that may be shown: no user info and no query in its URLs."""
    return _shown(_without_user_info(text))


def _plain(value: Fact, path: str, text: Callable[[str], str] = _without_user_info) -> Fact:
    """A copy made of dictionaries, lists and scalars, its strings passed through `text`."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise NamespaceError(f"fact {path} = {value} is not a finite number")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, text)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", text) for i, item in enumerate(value)]
    raise NamespaceError(f"fact {path} is a {type(value).__name__}; facts are plain JSON data")


def _plain_mapping(
    value: Mapping[str, Fact], path: str, text: Callable[[str], str] = _without_user_info
) -> dict[str, Fact]:
    if not all(isinstance(key, str) for key in value):
        raise NamespaceError(f"fact {path} has a key that is not text: {list(value)!r}")
    return {key: _plain(item, f"{path}.{key}", text) for key, item in value.items()}


def _canonical_json(value: Fact) -> bytes:
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NamespaceError(f"a fact holds text that is not valid Unicode: {error}") from None


_ROPE_NAME = re.compile(
    r"(?<![a-z])m?rope|rotary|^original_max_position|^position_embedding_type|^dual_chunk"
)
_LIMIT_NAME = re.compile(r"^max_position_embeddings$")
_LENGTH_FREE_ROPE = frozenset({"default", "linear", "llama3"})


def rope_facts(hf_config: Mapping[str, object], max_model_len: int | None) -> dict[str, Fact]:
    """What decides how positions are encoded into keys, out of a Hugging Face config.

    Nested configs (`text_config`) are included under dotted names. Numbers become floats, so that
    10000 and 10000.0 are one fact. Lengths are included only where the encoding depends on them:
    with any rope type other than default, linear and llama3.

    Args:
        hf_config: the config as a dictionary.
        max_model_len: the engine's, in tokens.

    Raises:
        NamespaceError: the encoding depends on the length and `max_model_len` is None.
    """
    found = dict(sorted(_named(hf_config, _ROPE_NAME)))
    types = set(_rope_types(found))
    if types <= _LENGTH_FREE_ROPE:
        return found
    if max_model_len is None:
        raise NamespaceError(
            f"rope of type {', '.join(sorted(types))} depends on max_model_len, which is not known"
        )
    return found | dict(sorted(_named(hf_config, _LIMIT_NAME))) | {"max_model_len": max_model_len}


def _named(
    config: Mapping[str, object], pattern: re.Pattern[str], prefix: str = ""
) -> Iterator[tuple[str, Fact]]:
    """Entries whose name matches, from nested configs too, under dotted names."""
    for key, value in config.items():
        name = str(key)  # tables of labels have numbers as keys
        if pattern.search(name):
            if value is not None:
                yield prefix + name, _floats(value, prefix + name)
        elif isinstance(value, Mapping):
            yield from _named(value, pattern, f"{prefix}{name}.")


def _floats(value: object, path: str) -> Fact:
    """A copy with its numbers as floats."""
    if isinstance(value, Mapping):
        return {str(key): _floats(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_floats(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if value is None or isinstance(value, bool | str):
        return value
    raise NamespaceError(
        f"{path} of the model's config is a {type(value).__name__}, not plain data"
    )


def _rope_types(fact: Fact) -> Iterator[str]:
    """Rope types named anywhere, also in one parameter table per kind of layer."""
    if not isinstance(fact, Mapping):
        return
    for name, item in fact.items():
        if name.rpartition(".")[2] in ("rope_type", "type") and isinstance(item, str):
            yield item
        yield from _rope_types(item)


_X86_FLAGS = "avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_tile amx_bf16 amx_int8"
_ARM_FLAGS = "asimd neon bf16 i8mm sve sve2"
_OTHER_FLAGS = "vx vxd vxe vxe2 altivec vsx"
_CPU_FLAGS = frozenset(f"{_X86_FLAGS} {_ARM_FLAGS} {_OTHER_FLAGS}".split())
_FLAG_LINES = ("flags", "features", "isa")


def cpu_facts(cpuinfo: str = "/proc/cpuinfo") -> dict[str, Fact]:
    """Architecture, and the CPU flags from which vLLM's CPU attention chooses how it encodes pages.

    Only flags that all processors have count.

    Raises:
        NamespaceError: the flags cannot be read.
    """
    machine = platform.machine()
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            flags = [_known_flags(line) for line in file if _is_flag_line(line)]
    except OSError as error:
        raise NamespaceError(f"the CPU's flags cannot be read: {error}") from error
    if not flags and machine in ("x86_64", "aarch64", "riscv64", "s390x"):
        raise NamespaceError(f"{cpuinfo} names no CPU flags, so page encoding cannot be known")
    common = frozenset.intersection(*flags) if flags else frozenset()
    return {"machine": machine, "flags": sorted(common)}


def _is_flag_line(line: str) -> bool:
    return line.partition(":")[0].strip().lower() in _FLAG_LINES


def _known_flags(line: str) -> frozenset[str]:
    words = line.partition(":")[2].split()
    vector = {"rvv" for word in words if re.match(r"rv\d+[a-uw-y]*v", word)}
    return _CPU_FLAGS & frozenset(words) | vector
