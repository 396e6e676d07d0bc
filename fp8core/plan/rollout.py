"""Memory of a rollout engine."""

from collections.abc import Callable
from dataclasses import dataclass

from fp8core.config.precision import CacheFormat, PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.weights import rollout_formats
from fp8core.plan.memory import Need, StoredBytes, stored_bytes
from fp8core.rollout.registry import engine_entry

_CACHE_WIDTH: dict[CacheFormat, int] = {"fp8": 1, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class CacheRoom:
    """The KV cache of an engine.

    Attributes:
        bytes: its size.
        bytes_per_token: of all layers.
        tokens: that it holds.
        sequence: tokens of the longest prompt and completion that the configuration allows.
        sequences: of these that it holds.
        wanted: sequences that one engine would decode together.
        engines: that have such a cache each.
    """

    bytes: int
    bytes_per_token: int
    tokens: int
    sequence: int
    sequences: int
    wanted: int
    engines: int


@dataclass(frozen=True)
class EngineMemory:
    """The memory that one engine takes of a GPU, or all engines take of the host.

    Attributes:
        needs: while it generates.
        asleep: while a training has the GPU; None for an engine that keeps everything.
        limit: bytes of the GPU that it may take; None where nothing bounds it.
        advice: what to change where it takes more.
        advice_beside: what to change where it takes more beside a trainer that leaves this share of the GPU; None:
            only the trainer can take less.
        cache: its KV cache; None where that grows as it generates.
        refusal: why it would not start with this cache.
    """

    needs: tuple[Need, ...]
    asleep: tuple[Need, ...] | None = None
    limit: int | None = None
    advice: str = ""
    advice_beside: Callable[[float], str | None] = lambda share: None
    cache: CacheRoom | None = None
    refusal: str | None = None


def shipped_bytes(arch: Architecture, contract: PrecisionContract) -> StoredBytes:
    """The bytes that one sync sends, which the engine then holds."""
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    return stored_bytes(parameter_shapes(arch), formats)


def cache_bytes_per_token(arch: Architecture, form: CacheFormat) -> int:
    """K and V of one token in all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * _CACHE_WIDTH[form]


def engine_weights(shipped: StoredBytes) -> Need:
    """The engine's copy of the policy."""
    return Need("engine weights", shipped.total, "as they are sent")


def longest_sequence(config: RunConfig, arch: Architecture) -> int:
    """Tokens of the longest prompt with its completion."""
    longest = engine_entry(config).longest(config, arch)
    return min(config.data.max_prompt_tokens + config.rollout.max_new_tokens, longest)
