"""What the demo and its engine process say to each other: one JSON object a line.

The demo writes an `Order`, the engine process answers each with exactly one `Answer`. The first
order is `Start`; end of input ends the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start the engine. Answered with `Done`."""

    model: str
    max_len: int
    """Longest sequence, tokens."""
    tokens_per_block: int
    device_blocks: int
    """Size of the device cache, in GPU blocks."""
    tensor_parallel: int
    dtype: str
    """Type of activations and KV cache; `auto` leaves it to vLLM, which avoids float32."""
    connector: dict[str, Any]
    """The connector's extra configuration."""


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Continue a prompt greedily. Answered with `Generated`."""

    prompt: list[int]
    tokens: int


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Wait until every store and cascade is complete. Answered with `Done`."""

    timeout_s: float


class DropPool(msgspec.Struct, frozen=True, tag="drop_pool"):
    """Empty the device cache and the DRAM pool. Answered with `Done`."""

    timeout_s: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """The continuation of one prompt."""

    tokens: list[int]
    ttft_s: float
    """Time to first token by the engine's own clock, seconds."""
    hit_tokens: dict[str, int]
    """Prompt tokens that were not computed, by vLLM's name of their source; zeros included."""
    tier_tokens: dict[str, int]
    """Those of them that kvtier gave, by its own count and name of the tier; zeros included."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. The engine process ends after this."""

    reason: str


Order = Start | Generate | Settle | DropPool
Answer = Done | Generated | Failed
