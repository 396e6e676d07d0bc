"""SGLang as a registered engine: its checks, its environment, its memory, and how it is built."""

from collections.abc import Iterator

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, padded_vocabulary
from fp8core.resources.kernels import Product, layer_products
from fp8core.resources.memory import (
    Device,
    EngineMemory,
    Need,
    cache_refusal,
    cache_room,
    engine_weights,
    gpu_engine_memory,
    shipped_bytes,
)
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import EngineEntry, longest_refusals, longest_sequence
from fp8core.rollout.sglang.requirements import (
    SglangBuild,
    contract_refusals,
    find_build,
    model_refusals,
    temperature_refusals,
)
from fp8core.rollout.sglang.settings import required_environment, suggested_environment

# CUDA context, activations, captured graphs. An estimate: SGLang measures its own when it starts.
_WORKSPACE = 5_000_000_000
# Memory that a sleeping engine leaves on its GPU: CUDA context, workspaces. An estimate.
_ASLEEP = 2_000_000_000


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    rollout = config.rollout
    # SGLang is optional.
    from fp8core.rollout.sglang.engine import SglangEngine

    settings = config.precision, rollout.sglang, rollout.max_batch, find_build(this_platform())
    return SglangEngine(arch, *settings, routes=rollout.router_replay)


def _build_on(node: Node) -> SglangBuild:
    return find_build(node.platform, node.version)


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    build = _build_on(node)
    yield from contract_refusals(config.precision, config.rollout.sglang, build)
    yield from temperature_refusals(config.rollout.temperature)


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    yield from longest_refusals("rollout.sglang.context_length", config.rollout.sglang.context_length, arch)
    yield from model_refusals(arch, config.precision, config.rollout.sglang)


def _requirements() -> str:
    return f"{find_build(this_platform()).described}, block FP8 and BF16"


def _environment(config: RunConfig, node: Node) -> Environment:
    _build_on(node)
    return Environment(required_environment(), suggested_environment())


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    """Of one GPU with one engine; there is none for a host."""
    options = config.rollout.sglang
    weights = engine_weights(shipped_bytes(arch, config.precision))
    if gpu is None:
        return EngineMemory((weights,))
    share = options.mem_fraction_static if options.kv_cache_gib is None else None
    size = "rollout.sglang." + ("kv_cache_gib" if share is None else "mem_fraction_static")
    # Its share is of weights and cache alone. With a cache of a given size it takes what it needs.
    static = gpu.memory if share is None else int(gpu.memory * share)
    workspace = Need("engine workspace", _WORKSPACE, "CUDA context, activations, graphs; estimate")
    asleep = (Need("engine asleep", _ASLEEP, "CUDA context; estimate"),) if options.sleep else None
    room = cache_room(config, arch, longest_sequence(config, arch), options.kv_cache_gib, static - weights.bytes)
    refusal = cache_refusal(room, "rollout.sglang.context_length", _longest(config, arch), size)
    limit = min(gpu.memory, static + _WORKSPACE)
    return gpu_engine_memory((weights, workspace), asleep, limit, room, refusal, size=size, share=share)


def _longest(config: RunConfig, arch: Architecture) -> int:
    """SGLang's context: it needs room for one sequence of this length."""
    return config.rollout.sglang.context_length or arch.max_positions


def _products(config: RunConfig, arch: Architecture) -> Iterator[Product]:
    """A step reads prompts, or decodes one token a request."""
    rollout, head = config.rollout, config.precision.rollout.head
    if config.precision.rollout.linear == "fp8_block":
        rows = range(1, max(rollout.sglang.chunked_prefill_size, rollout.max_batch) + 1)
        yield from layer_products(arch, rows)
    if head == "fp32":
        yield Product("bf16", padded_vocabulary(arch.vocab_size), arch.hidden_size, range(1, rollout.max_batch + 1))


ENGINE = EngineEntry(
    name="sglang",
    packages=("sglang",),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=_requirements,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines,
    longest=_longest,
    arithmetic=lambda config: "kernels" if config.rollout.sglang.model == "aligned" else "own",
    products=_products,
    continues=lambda config: "equal" if config.rollout.sglang.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.sglang.sleep,
    # Its own model rounds where no points of a contract do.
    stock={"rollout.sglang.model": "stock", "precision.rounding_points": "stepwise"},
)
