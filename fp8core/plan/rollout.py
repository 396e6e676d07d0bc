"""Memory of a rollout engine."""

import math
from dataclasses import dataclass

from fp8core.config.precision import CacheFormat, PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.formats import rollout_formats
from fp8core.plan.needs import GIB, Need
from fp8core.plan.weights import StoredBytes, stored_bytes
from fp8core.rollout.vllm_settings import CPU_CACHE_GIB

# CUDA context, activations, captured graphs. An estimate: vLLM measures its own when it starts.
WORKSPACE = 4_000_000_000
# What an engine that sleeps leaves on its GPU: CUDA context and captured graphs. An estimate.
ASLEEP = 2_000_000_000

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


def shipped_bytes(arch: Architecture, contract: PrecisionContract) -> StoredBytes:
    """What one sync sends, which is what the engine then holds."""
    formats = rollout_formats(contract, arch.num_layers).stored_names()
    return stored_bytes(parameter_shapes(arch), formats)


def cache_bytes_per_token(arch: Architecture, form: CacheFormat) -> int:
    """K and V of one token in all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * _CACHE_WIDTH[form]


def engine_weights(shipped: StoredBytes) -> Need:
    """The engine's copy of the policy."""
    return Need("engine weights", shipped.total, "as they are sent")


def vllm_limit(config: RunConfig, memory: int) -> int:
    """Bytes that vLLM takes of a device; with a cache of a given size it takes what it needs."""
    options = config.rollout.vllm
    return memory if options.kv_cache_gib is not None else int(memory * options.gpu_memory_utilization)


def cache_room(config: RunConfig, arch: Architecture, free: int) -> CacheRoom:
    """The KV cache of vLLM: the configured size, or the bytes that are free."""
    gib = config.rollout.vllm.kv_cache_gib
    size = max(0, free) if gib is None else int(gib * GIB)
    per_token = cache_bytes_per_token(arch, config.precision.rollout.kv_cache)
    tokens, sequence = size // per_token, longest_sequence(config, arch)
    engines = config.rollout.vllm.gpus
    batch = math.ceil(config.rollout.drawn_prompts / engines) * config.rollout.group_size
    wanted = min(batch, config.rollout.max_batch)
    return CacheRoom(size, per_token, tokens, sequence, tokens // sequence, wanted, engines)


def cpu_cache_room(config: RunConfig, arch: Architecture) -> CacheRoom:
    """The KV cache of vLLM for CPUs, which has a size of its own where none is configured."""
    return cache_room(config, arch, int(CPU_CACHE_GIB * GIB))


def longest_sequence(config: RunConfig, arch: Architecture) -> int:
    """Tokens of the longest prompt with its completion."""
    positions = arch.max_positions if config.rollout.engine != "vllm" else longest_model_len(config, arch)
    return min(config.data.max_prompt_tokens + config.rollout.max_new_tokens, positions)


def longest_model_len(config: RunConfig, arch: Architecture) -> int:
    """vLLM's max_model_len: it wants room for one sequence of this length."""
    return config.rollout.vllm.max_model_len or arch.max_positions


def cache_refusal(config: RunConfig, arch: Architecture, room: CacheRoom) -> str | None:
    """Why vLLM would not start with this cache; None when it does."""
    wanted = longest_model_len(config, arch)
    if room.tokens >= wanted:
        return None
    size = "gpu_memory_utilization" if config.rollout.vllm.kv_cache_gib is None else "kv_cache_gib"
    return (
        f"the KV cache has room for {room.tokens:,} tokens, rollout.vllm.max_model_len is {wanted:,}; raise "
        f"rollout.vllm.{size}, or lower max_model_len"
    )
