"""Settings: vLLM's `kv_connector_extra_config` decoded once, strictly, into frozen structs.

Nothing below this module sees the dictionary. An unknown key, a wrong type, a figure out of range
or two settings that contradict each other are a `ConfigError` at start. Components (clocks,
clients, policies) are never settings. The options of a tier are kept as they came; the tier
decodes them.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvtier.core.policies import POLICIES
from kvtier.errors import ConfigError

PRIMARY_NAME = "primary"
"""What metrics and events call the primary tier, so that no other tier may be called so."""

MAX_POOL_SHARE = 0.9
"""What promotions and cascades may pin together; the rest is always left to running stores."""

_SIZE_MAX = 2**63 - 1
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"": 1, "B": 1, **_BINARY, **_DECIMAL}
_SIZE = re.compile(r"(-?[0-9]{1,30}(?:\.[0-9]{1,30})?)[ \t]*([A-Za-z]*)")
_SIZE_ALLOWED = 'a whole number of bytes, or text such as "8GiB", "512MiB", "8GB" or "1.5 TB"'

_TIER_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_OF_EVERY_TIER = ("type", "name", "promote_to")
_TIER_NAME_ALLOWED = "1 to 64 characters out of a-z, 0-9, `_` and `-`"

_Count = Annotated[int, Meta(gt=0, description="a whole number above 0")]
_Milliseconds = Annotated[int, Meta(gt=0, description="a whole number of milliseconds above 0")]
_Share = Annotated[float, Meta(gt=0, lt=1, description="a share of the pool between 0 and 1")]
_ShareOrNone = Annotated[
    float, Meta(ge=0, lt=1, description="a share of the pool from 0 to below 1")
]
_Switch = Annotated[bool, Meta(description="true or false")]
_Label = Annotated[
    str,
    Meta(
        pattern=r"\A(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z",
        description="text of 1 to 64 letters, digits, `.`, `_` and `-` that begins with a letter "
        "or a digit and has no `..`",
    ),
]
_Fingerprint = Annotated[
    str,
    Meta(
        pattern=r"\A(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z",
        description="text of 1 to 128 hex digits or other letters, digits, `.`, `_` and `-` that "
        "begins with a letter or a digit and has no `..`",
    ),
]
_Rate = Annotated[
    float | Literal["measure", "unknown"],
    Meta(description='tokens per second above 0, "measure" or "unknown"'),
]
_Filter = Annotated[
    Literal["always", "second_touch"], Meta(description='"always" or "second_touch"')
]
_Policy = Annotated[
    str,
    Meta(
        description="the name of an eviction policy, or text such as "
        "`package.module:Class` for one of your own"
    ),
]
_Text = Annotated[str, Meta(min_length=1, description="text that is not empty")]


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `secondary_tiers`.

    Attributes:
        type: which tier it is.
        name: unique among the tiers; labels its metrics and events.
        promote_to: names of the tiers that get what is found in this one; None: the faster ones.
        options: everything else of the entry, read-only to the leaves (lists became tuples). May
            hold credentials, so `repr` shows no value of it.
    """

    type: str
    name: str
    options: Mapping[str, object]
    promote_to: tuple[str, ...] | None = None

    def plain_options(self) -> dict[str, object]:
        """The options as fresh dictionaries and lists, for the tier to decode strictly.

        Decode this and not `options`: msgspec refuses unknown fields of dictionaries only.
        """
        return {key: _thawed(value) for key, value in self.options.items()}

    def __repr__(self) -> str:
        shown = ", ".join(f"{option}=..." for option in self.options)
        to = f", promote_to={self.promote_to!r}" if self.promote_to is not None else ""
        return f"TierSettings(type={self.type!r}, name={self.name!r}{to}, options=<{shown}>)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("type", self.type), ("name", self.name), ("options", tuple(self.options))]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of kvtier. Made by `decode` and by nothing else.

    Attributes:
        cpu_bytes_to_use: bytes of the primary pool. Given as a number or as text (`parse_size`).
        spec_name: consumed by vLLM.
        spec_module_path: consumed by vLLM.
        block_size: tokens per block; consumed by vLLM. Excludes `blocks_per_chunk`.
        blocks_per_chunk: GPU blocks per block; consumed by vLLM. Excludes `block_size`.
        eviction_policy: of the primary pool: one of `kvtier.core.policies.POLICIES`, or
            `package.module:Class`, which `kvtier.policies` imports.
        offload_prompt_only: leave blocks made by decoding on the GPU, as stock vLLM does.
        self_describing_kv_events: events carry token ids, parent hash and extra keys.
        canonical_layout: always true.
        secondary_tiers: in the configured order.
        namespace: operator's label; blocks are shared only under the same one.
        weights_epoch: operator's label of the weights' state, for weights that change while the
            engine runs. With it, a cache reset keeps blocks that were stored under the same epoch.
        weights_fingerprint: replaces the fingerprint that is computed from the weight files.
        max_wait_ms: a request's whole wait for tiers, from its first lookup over all rounds.
        hold_ms: how long a request may hold promoted blocks that it does not load. At most
            `max_wait_ms`: requests whose turn has not come wait for that budget, and a hold that
            outlives their whole wait would turn one stuck request into everybody's misses. Hence
            the default is 10,000 or `max_wait_ms`, whichever is less.
        job_deadline_ms: a job of a tier that takes longer is abandoned. May exceed `max_wait_ms`:
            blocks that come too late for one request are good for the next.
        promotion_share: share of the pool that promotions and holds may take.
        cascade_share: share of the pool that running cascades may pin, over all tiers.
        lending_share: share of the pool that tiers may borrow for others, peers for instance.
        store_filter: `always` writes every block to the tiers; `second_touch` only those that were
            met before, so that prompts that never come again cost no writes.
        prefill_tokens_per_s: how fast the engine computes prompts. What takes longer to read is
            computed. `measure` learns it from the engine's steps; `unknown` always reads.
        tier_failures_max: jobs of a tier in a row that may fail before it is left alone.
        tier_stall_ms: how long a tier may answer nothing at all while it has jobs.
        tier_backoff_ms: before a tier that was left alone is tried again; doubles each time.
        tier_backoff_max_ms: bound of that.
        absent_ttl_ms: how long a tier is believed not to hold a block before it is asked again.
    """

    cpu_bytes_to_use: int
    spec_name: _Text | None = None
    spec_module_path: _Text | None = None
    block_size: _Count | None = None
    blocks_per_chunk: _Count | None = None
    eviction_policy: _Policy = "lru"
    offload_prompt_only: _Switch = True
    self_describing_kv_events: _Switch = False
    canonical_layout: _Switch = True
    secondary_tiers: tuple[TierSettings, ...] = ()
    namespace: _Label | None = None
    weights_epoch: _Label | None = None
    weights_fingerprint: _Fingerprint | None = None
    max_wait_ms: _Milliseconds = 30_000  # a wait is worth it only while recomputing takes longer
    hold_ms: _Milliseconds = 10_000  # many engine steps, long prefills included
    job_deadline_ms: _Milliseconds = 30_000
    promotion_share: _Share = 0.5
    cascade_share: _Share = 0.25
    lending_share: _ShareOrNone = 0.0
    store_filter: _Filter = "always"
    prefill_tokens_per_s: _Rate = "measure"
    tier_failures_max: _Count = 3
    tier_stall_ms: _Milliseconds = 10_000
    tier_backoff_ms: _Milliseconds = 1_000
    tier_backoff_max_ms: _Milliseconds = 60_000
    absent_ttl_ms: _Milliseconds = 10_000

    @classmethod
    def decode(cls, extra_config: Mapping[str, object]) -> Self:
        """Settings from the dictionary that vLLM passes through.

        Raises:
            ConfigError: naming the setting, its value, what is allowed and what to do.
        """
        _refuse_unknown(extra_config, cls.__struct_fields__)
        values = dict(extra_config)
        values["cpu_bytes_to_use"] = _pool_size(extra_config.get("cpu_bytes_to_use"))
        values["secondary_tiers"] = _decode_tiers(extra_config.get("secondary_tiers", ()))
        try:
            settings = msgspec.convert(values, cls, strict=True)
        except msgspec.ValidationError as error:
            raise _explained(error, values, cls) from None
        if "hold_ms" not in extra_config:
            hold_ms = min(settings.hold_ms, settings.max_wait_ms)
            settings = msgspec.structs.replace(settings, hold_ms=hold_ms)
        _refuse_unknown_policy(settings.eviction_policy)
        _refuse_contradictions(settings)
        return settings


def parse_size(value: object, setting: str) -> int:
    """Bytes from a whole number or text such as "8GiB", "8 GB", "1.5GiB".

    KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB powers of 1000; a bare number is
    bytes. A fraction of a byte is dropped.

    Args:
        value: what the operator wrote.
        setting: its path, for the message.

    Raises:
        ConfigError: not a size, an ambiguous unit, less than 1 byte, or 8 EiB and more.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _refused(setting, value, _SIZE_ALLOWED)
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise _refused(setting, value, _SIZE_ALLOWED)
        number, unit = match.groups()
        if unit not in _UNITS:
            raise ConfigError(f"{setting} = {value!r}: {_unit_advice(number, unit)}")
        size = int(Fraction(number) * _UNITS[unit])
    if not 1 <= size <= _SIZE_MAX:
        raise ConfigError(
            f"{setting} = {_shown(value)} is {size} bytes: it must be "
            f"between 1 and {_SIZE_MAX} bytes"
        )
    return size


def check_pool(pool_bytes: int, row_bytes: int, available_bytes: int, setting: str) -> int:
    """How many slots a pool has, once its size is known to make sense.

    Args:
        pool_bytes: size that was asked for.
        row_bytes: bytes of one slot, above 0.
        available_bytes: what the host can give.
        setting: path of the setting that asked, for the message.

    Raises:
        ConfigError: the pool is smaller than one block, or larger than what is available.
    """
    assert row_bytes > 0, "a slot has bytes"
    if pool_bytes < row_bytes:
        raise ConfigError(
            f"{setting} = {_figure(pool_bytes)} cannot hold one block, which takes "
            f"{_figure(row_bytes)}: set {setting} to at least {row_bytes} (one block), and to many "
            "times that for a useful pool, or make blocks smaller (block_size, blocks_per_chunk)"
        )
    if pool_bytes > available_bytes:
        most = available_bytes // row_bytes * row_bytes
        lower = f"lower {setting} to at most {most}, or " if most else ""
        raise ConfigError(
            f"{setting} = {_figure(pool_bytes)} is more than the {_figure(available_bytes)} of "
            f"memory that are available to the pool: {lower}raise the memory limit of this "
            "machine or container (the size of /dev/shm does not matter)"
        )
    return pool_bytes // row_bytes


def _pool_size(value: object) -> int:
    if value is None:
        raise ConfigError(
            "cpu_bytes_to_use is not set, so the CPU pool has no size: set it in "
            'kv_connector_extra_config, for example {"cpu_bytes_to_use": "8GiB"}'
        )
    return parse_size(value, "cpu_bytes_to_use")


def _refuse_unknown_policy(name: str) -> None:
    if name in POLICIES or ":" in name:
        return
    close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
    advice = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(
        f"eviction_policy = {_shown(name)} is no eviction policy{advice}: there are "
        f"{', '.join(POLICIES)}, and 'package.module:Class' for one of your own"
    )


def _refuse_contradictions(settings: Settings) -> None:
    if settings.block_size is not None and settings.blocks_per_chunk is not None:
        raise ConfigError(
            f"block_size = {settings.block_size} and blocks_per_chunk = "
            f"{settings.blocks_per_chunk} both set the size of a block: remove one of them"
        )
    if not settings.canonical_layout:
        raise ConfigError(
            "canonical_layout = False is not allowed: kvtier always keeps the canonical layout, so "
            "that any tensor-parallel size can read it; remove the setting or set it to true"
        )
    if settings.hold_ms > settings.max_wait_ms:
        raise ConfigError(
            f"hold_ms = {settings.hold_ms} is more than max_wait_ms = {settings.max_wait_ms}: a "
            "request could hold blocks for longer than others wait for their turn; lower hold_ms "
            f"to at most {settings.max_wait_ms} or raise max_wait_ms"
        )
    shares = settings.promotion_share + settings.cascade_share + settings.lending_share
    if shares > MAX_POOL_SHARE + 1e-9:  # 0.34 + 0.56 must count as 0.9
        raise ConfigError(
            f"promotion_share = {settings.promotion_share}, cascade_share = "
            f"{settings.cascade_share} and lending_share = {settings.lending_share} add up to "
            f"{shares:.4g}: together they may take at most {MAX_POOL_SHARE} of the pool, since "
            "running stores need the rest; lower one of them"
        )
    if settings.tier_backoff_ms > settings.tier_backoff_max_ms:
        raise ConfigError(
            f"tier_backoff_ms = {settings.tier_backoff_ms} is more than tier_backoff_max_ms = "
            f"{settings.tier_backoff_max_ms}, which bounds it; lower the one or raise the other"
        )
    rate = settings.prefill_tokens_per_s
    if isinstance(rate, float) and not 0 < rate < float("inf"):
        raise ConfigError(
            f"prefill_tokens_per_s = {rate} is not allowed: give tokens per second above 0, "
            '"measure" or "unknown"'
        )


def _decode_tiers(value: object) -> tuple[TierSettings, ...]:
    if not isinstance(value, list | tuple):
        raise _refused("secondary_tiers", value, "a list with one table per tier", secret=True)
    entries = [_decode_tier(entry, f"secondary_tiers[{i}]") for i, entry in enumerate(value)]
    taken = {PRIMARY_NAME: "the primary tier"}
    for i, entry in enumerate(entries):
        if entry.name in taken:
            raise ConfigError(
                f"secondary_tiers[{i}].name = {entry.name!r} is already the name of "
                f"{taken[entry.name]}: names label metrics and events and must be unique"
            )
        if entry.name:
            taken[entry.name] = f"secondary_tiers[{i}]"
    free = _free_names(entries, taken)
    named = tuple(msgspec.structs.replace(e, name=e.name or next(free)) for e in entries)
    _refuse_unknown_targets(named)
    return named


def _refuse_unknown_targets(tiers: Collection[TierSettings]) -> None:
    """`promote_to` names other tiers of this engine, each once."""
    names = [tier.name for tier in tiers]
    for i, tier in enumerate(tiers):
        setting = f"secondary_tiers[{i}].promote_to"
        others = [name for name in names if name != tier.name]
        for place, target in enumerate(tier.promote_to or ()):
            if target in others and target not in (tier.promote_to or ())[:place]:
                continue
            why = "is no tier"
            if target == tier.name:
                why = "is the tier itself"
            elif target in others:
                why = "is there twice"
            close = difflib.get_close_matches(target, others, n=1)
            advice = f" (did you mean {close[0]!r}?)" if close and why == "is no tier" else ""
            raise ConfigError(
                f"{setting} names {_shown(target)}, which {why}{advice}: it is a list of the "
                f"names of other tiers, of which there are {', '.join(others) or 'none'}; [] to "
                "write to none"
            )


def _free_names(entries: Collection[TierSettings], taken: Collection[str]) -> Iterator[str]:
    """Default names, in order: the type, then type-2, type-3, past those that are taken."""
    used = set(taken)
    for entry in entries:
        if entry.name:
            continue
        base = re.sub(r"[^a-z0-9_-]+", "-", entry.type.lower()).strip("-")[:60] or "tier"
        name, number = base, 1
        while name in used:
            number += 1
            name = f"{base}-{number}"
        used.add(name)
        yield name


def _decode_tier(entry: object, path: str) -> TierSettings:
    """One entry; the name stays empty where a default is to be found."""
    if not isinstance(entry, Mapping):
        raise _refused(path, entry, "a table with `type` and the tier's options", secret=True)
    for key in entry:
        if not isinstance(key, str):
            raise _refused(f"{path}: key", key, "text")
    kind = entry.get("type")
    if kind is None:
        close = difflib.get_close_matches("type", entry, n=1)
        advice = f"; is {close[0]!r} meant to be `type`?" if close else ""
        raise ConfigError(f'{path}.type is not set: say which tier it is, e.g. "fs"{advice}')
    if not isinstance(kind, str) or not kind:
        raise _refused(f"{path}.type", kind, "text that names a tier")
    name = entry.get("name")
    if name is not None and not (isinstance(name, str) and _TIER_NAME.fullmatch(name)):
        raise _refused(f"{path}.name", name, _TIER_NAME_ALLOWED)
    raised = entry.get("promote_to")
    if raised is not None and not (
        isinstance(raised, list | tuple) and all(isinstance(each, str) for each in raised)
    ):
        raise _refused(f"{path}.promote_to", raised, "a list of names of other tiers")
    return TierSettings(
        type=kind,
        name=name or "",
        promote_to=tuple(raised) if raised is not None else None,
        options=MappingProxyType(
            {key: _frozen(value) for key, value in entry.items() if key not in _OF_EVERY_TIER}
        ),
    )


def _frozen(value: object) -> object:
    """A read-only copy of plain data."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def _thawed(value: object) -> object:
    """A plain copy of read-only data."""
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_thawed(item) for item in value]
    return value


def _refuse_unknown(given: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in given:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key).lower(), known, n=1, cutoff=0.5)
        advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}."
        raise ConfigError(
            f"{key} is not a setting of kvtier and would do nothing: {advice} Correct or remove it"
        )


def _explained(
    error: msgspec.ValidationError, values: Mapping[str, object], owner: type[Settings]
) -> ConfigError:
    """The decoder's refusal in the operator's words: setting, value, what is allowed."""
    path = re.search(r"at `\$\.(\w+)", str(error))
    assert path is not None, "keys are known and checked, so only a field can be refused"
    hint = get_type_hints(owner, include_extras=True)[path[1]]
    return _refused(path[1], values[path[1]], _description(hint))


def _description(hint: object) -> str:
    """What the `Meta` of a field says; for an optional field, that of its other member."""
    candidates = (hint,) if get_origin(hint) is Annotated else get_args(hint)
    notes = [note for each in candidates for note in get_args(each)[1:] if isinstance(note, Meta)]
    assert notes, "every setting that the decoder may refuse has a description"
    return str(notes[0].description)


def _refused(setting: str, value: object, allowed: str, *, secret: bool = False) -> ConfigError:
    """Args: secret: the value may hold credentials, so only its type is told."""
    shown = f"a {type(value).__name__}" if secret else _shown(value)
    return ConfigError(f"{setting} = {shown} is not allowed: it must be {allowed}")


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__}"  # it may hold anything, credentials too
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _figure(size: int) -> str:
    for unit, factor in reversed(_BINARY.items()):
        if size >= factor:
            return f"{size} bytes ({size / factor:.2f} {unit})"
    return f"{size} bytes"


def _unit_advice(number: str, unit: str) -> str:
    letter = unit[0]
    near = [u for u in (*_BINARY, *_DECIMAL) if u[0].lower() == letter.lower()]
    if not near:
        return f"{unit!r} is not a unit; there are B, {', '.join((*_BINARY, *_DECIMAL))}"
    return (
        f"{unit!r} is not a unit; write {number}{near[0]} (powers of 1024) or {number}{near[1]} "
        "(powers of 1000)"
    )
