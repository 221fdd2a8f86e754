"""Which kinds of tiers there are, and how an installed package adds one.

A kind is found by the `type` of a tier's settings, in this order:

1. `pkg.mod:Class`: imported as it is;
2. a name in `TIER_TYPES`;
3. the name of an entry point in the group `kvtier.tiers`.

Nothing is imported before its `type` is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint

    from kvtier.tiers.base import Tier

ENTRY_POINT_GROUP = "kvtier.tiers"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_SECRET = re.compile("password|secret|token|credential|key", re.IGNORECASE)
"""What an option is called that may hold one."""


@runtime_checkable
class TierType(Protocol):
    """One kind of tier. Registered as an instance, or as a class that takes no arguments.

    Attributes:
        settings_type: frozen `msgspec.Struct` with `forbid_unknown_fields`; decides what a user may
            write beside `type`. Passed to the methods below.
        default_name: name of a tier whose settings give none.
        medium: what events call the medium, e.g. `STORAGE`.
        locality: `LOCAL` or `REMOTE`, as events say it.

    A type may have `in_process = True`: its tiers run on threads of the engine's process then,
    instead of in a process of their own. It may have `check_block`, see `ChecksBlock`.
    """

    settings_type: type[msgspec.Struct]
    default_name: str
    medium: str
    locality: str

    def num_threads(self, settings: Any) -> int:
        """Threads that call the tier, at least 2."""
        ...

    def preflight(self, settings: Any, setting: str) -> None:
        """Check at start what can be checked before a namespace is known.

        Args:
            settings: of `settings_type`.
            setting: path of this tier's settings, e.g. `secondary_tiers[0]`.

        Raises:
            ConfigError: the tier can never work with these settings.
        """
        ...

    def open(self, settings: Any, namespace: str, facts: Mapping[str, object]) -> Tier:
        """Open one namespace; called on a tier thread, may block and raise.

        Args:
            settings: of `settings_type`.
            namespace: hex digest, 64 characters.
            facts: what the namespace stands for, JSON-able, without secrets.
        """
        ...


@runtime_checkable
class ChecksBlock(Protocol):
    """Optional ability of a `TierType`."""

    def check_block(self, settings: Any, setting: str, block_bytes: int) -> None:
        """Check at start what depends on the size of a block.

        Args:
            settings: of `settings_type`.
            setting: path of this tier's settings.
            block_bytes: header and row together.

        Raises:
            ConfigError: the tier can never keep a block of that size.
        """
        ...


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where one of our own kinds lives.

    Attributes:
        target: module and class.
        extra: of this package, that it needs.
        schemes: of the URLs that lead to one.
    """

    target: str
    extra: str = ""
    schemes: tuple[str, ...] = ()


TIER_TYPES: Mapping[str, BuiltIn] = {
    "fs": BuiltIn("kvtier.tiers.fs.tier_type:FsTierType"),
    "memory": BuiltIn("kvtier.tiers.memory:MemoryTierType"),
    "object": BuiltIn("kvtier.tiers.object.tier_type:ObjectTierType", "object", ("s3", "gs", "az")),
    "valkey": BuiltIn(
        "kvtier.tiers.valkey.tier_type:ValkeyTierType",
        "valkey",
        ("valkey", "valkeys", "redis", "rediss"),
    ),
}


def tier_type_names() -> list[str]:
    """Every name that `type` may have, sorted; `pkg.mod:Class` comes on top of them."""
    return sorted({*TIER_TYPES, *(point.name for point in _entry_points())})


def is_url(text: str) -> bool:
    """Whether a text is meant to be a URL, and not a path."""
    return _SCHEME.match(text) is not None


def kind_of_url(url: str) -> str:
    """The `type` of the tier that a URL leads to, by its scheme.

    Raises:
        ConfigError: there is none; the message repeats nothing of the URL but its scheme.
    """
    scheme = url.partition("://")[0]
    for kind, built_in in TIER_TYPES.items():
        if scheme in built_in.schemes:
            return kind
    schemes = [f"{each}://" for built_in in TIER_TYPES.values() for each in built_in.schemes]
    raise ConfigError(
        f"{scheme}:// leads to no tier: a URL begins with {', '.join(schemes)}; the place of an fs "
        f"tier is a directory"
    )


def load_tier_type(name: str, setting: str) -> TierType:
    """The kind of tier that a `type` names.

    Args:
        name: the `type`.
        setting: path of the setting that names it, e.g. `secondary_tiers[0].type`.

    Raises:
        ConfigError: unknown, not importable, or not a `TierType`.
    """
    target, install = _find(name, setting)
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError) as error:  # an empty module name is a ValueError
        raise ConfigError(
            f"{setting} is {name!r}, which cannot be imported ({error}){install}"
        ) from (error)
    except AttributeError as error:
        raise ConfigError(
            f"{setting} is {name!r}, but the module {module_name!r} has no {attribute!r}"
        ) from error
    if isinstance(found, type):
        found = found()
    if not isinstance(found, TierType):
        raise ConfigError(
            f"{setting} is {name!r}, which is not a kvtier.tiers.registry.TierType: it needs "
            f"settings_type, default_name, medium, locality, num_threads, preflight and open"
        )
    return found


def decode_settings(
    tier_type: TierType, options: Mapping[str, object], setting: str
) -> msgspec.Struct:
    """A tier's own options, checked strictly.

    Args:
        tier_type: the kind of tier.
        options: what the user wrote, without the keys that all tiers share (`type`, `name`, ...).
        setting: path of this tier's settings, e.g. `secondary_tiers[0]`.

    Raises:
        ConfigError: an option is unknown, missing, or has a value that is not allowed.
    """
    allowed = tier_type.settings_type.__struct_encode_fields__
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"{setting}.{option} is no option of this tier"
                f"{_suggestion(option, allowed)}; its options are {', '.join(sorted(allowed))}"
            )
    try:
        return msgspec.convert(options, tier_type.settings_type, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting}: {error}{_given(options, error)}") from None


def _given(options: Mapping[str, object], error: msgspec.ValidationError) -> str:
    """The value that was refused, unless it may be, or may hold, a secret."""
    path = re.search(r"at `\$\.(\w+)`", str(error))
    if path is None or _SECRET.search(path[1]):
        return ""
    value = options.get(path[1])
    if not isinstance(value, str | int | float) or (isinstance(value, str) and "@" in value):
        return ""
    return f" (given: {path[1]} = {value!r})"


def _find(name: str, setting: str) -> tuple[str, str]:
    """Import target of a `type`, and what to install if its import fails."""
    if ":" in name:
        return name, ": is its package installed in this environment?"
    if built_in := TIER_TYPES.get(name):
        extra = f"[{built_in.extra}]" if built_in.extra else ""
        return built_in.target, f": pip install 'kvtier{extra}'"
    for point in _entry_points():
        if point.name == name:
            extras = f"[{','.join(point.extras)}]" if point.extras else ""
            package = point.dist.name if point.dist else point.module
            return f"{point.module}:{point.attr}", f": pip install '{package}{extras}'"
    names = tier_type_names()
    raise ConfigError(
        f"{setting} is {name!r}, which is no kind of tier{_suggestion(name, names)}; "
        f"there are {', '.join(names)}, and 'package.module:Class' for one of your own"
    )


def _entry_points() -> Iterable[EntryPoint]:
    """What installed packages add."""
    # parses e-mail headers and archives: 15 ms that an I/O process of our own kinds is spared
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=ENTRY_POINT_GROUP)


def _suggestion(word: str, among: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, among, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
