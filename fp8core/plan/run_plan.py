"""Does a training fit? Memory on every device it uses, phase by phase, and the bytes of a sync, from shapes alone."""

import itertools
import math
from dataclasses import dataclass

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.plan.devices import Device, Machine
from fp8core.plan.needs import DevicePlan, Need, Phase
from fp8core.plan.rollout import (
    ASLEEP,
    WORKSPACE,
    CacheRoom,
    cache_refusal,
    cache_room,
    cpu_cache_room,
    engine_weights,
    shipped_bytes,
    vllm_limit,
)
from fp8core.plan.training import (
    EMULATED,
    Parallel,
    at_rest,
    emulated_bytes,
    exported,
    gpu_step,
    host_needs,
    resident_state,
)
from fp8core.plan.weights import ParameterCounts, StoredBytes, count_parameters

_HOST = "what computes on the CPU lies there: choose a smaller model, or a machine with more memory"


@dataclass(frozen=True)
class RunPlan:
    """What a training takes.

    Attributes:
        parameters: of the model.
        devices: with what lies on each.
        cache: the KV cache of vLLM; None for the embedded engine, whose cache grows as it generates.
        sync: what one update of the engine sends.
        refusals: a line for each reason why it cannot run.
    """

    parameters: ParameterCounts
    devices: tuple[DevicePlan, ...]
    cache: CacheRoom | None
    sync: StoredBytes
    refusals: tuple[str, ...]


def plan_run(config: RunConfig, arch: Architecture, machine: Machine, parallel: Parallel | None = None) -> RunPlan:
    """Plan a training.

    Args:
        config: the training.
        arch: shape of its model.
        machine: what there is; vLLM generates on `rollout.vllm.gpus` of its GPUs, or on the host of a machine without.
        parallel: GPUs that train; with `rollout.vllm.sleep` those that generate are among them, in turn. None trains on
            the host, as the torch trainer does.

    Raises:
        UserError: the model cannot be cut into `parallel`, or there is no GPU to train on.
    """
    if parallel is not None:
        parallel.check(arch)
    sync = shipped_bytes(arch, config.precision)
    devices, cache = _devices(config, arch, machine, parallel, sync)
    refusals = [refusal for device in devices for refusal in device.refusals()]
    # A cache that is too small because nothing fits is no reason of its own.
    if cache is not None and not refusals and (refusal := cache_refusal(config, arch, cache)) is not None:
        refusals.append(refusal)
    return RunPlan(count_parameters(arch), devices, cache, sync, tuple(refusals))


def refuse_unfit(plan: RunPlan) -> None:
    """Raises UserError, in one line, when the plan does not fit."""
    if plan.refusals:
        raise UserError(f"memory: {'; also '.join(plan.refusals)}")


def _devices(
    config: RunConfig, arch: Architecture, machine: Machine, parallel: Parallel | None, sync: StoredBytes
) -> tuple[tuple[DevicePlan, ...], CacheRoom | None]:
    gpu, plans, on_host = machine.gpu, list[DevicePlan](), dict[str, tuple[Need, ...]]()
    # The torch trainer has the engine's GPU beside it, asleep or awake.
    shared = config.rollout.engine == "vllm" and (config.rollout.vllm.sleep or config.training.packs_on_gpu)
    if config.rollout.engine == "embedded" or gpu is None:
        on_host["generating"], cache = _generating_on_host(config, arch, sync)
    elif parallel is not None and shared:
        found, cache = _sharing(config, arch, gpu, parallel, sync)
        plans += found
    else:
        phase, cache = _generating_alone(config, arch, gpu, sync)
        plans.append(DevicePlan(gpu, config.rollout.vllm.gpus, (phase,)))
    if parallel is None:
        on_host["training"] = host_needs(config, arch)
    elif gpu is None:
        raise UserError("there is no GPU to train on")
    elif not shared:
        plans.append(DevicePlan(gpu, parallel.gpus, _training(config, arch, gpu, parallel, sync)))
    if on_host:
        needs = tuple(itertools.chain.from_iterable(on_host.values()))
        limit = None if machine.host is None else machine.host.memory
        plans.append(DevicePlan(machine.host, 1, (Phase(" and ".join(on_host), needs, limit, _HOST),)))
    return tuple(plans), cache


def _generating_on_host(
    config: RunConfig, arch: Architecture, sync: StoredBytes
) -> tuple[tuple[Need, ...], CacheRoom | None]:
    if config.rollout.engine == "embedded":
        return (engine_weights(sync), Need("engine weights, ready", emulated_bytes(arch), EMULATED)), None
    cache = cpu_cache_room(config, arch)
    each = engine_weights(sync), _cache(cache)
    return tuple(Need(need.item, cache.engines * need.bytes, need.note) for need in each), cache


def _generating(
    config: RunConfig, arch: Architecture, gpu: Device, sync: StoredBytes
) -> tuple[tuple[Need, ...], CacheRoom]:
    needs = engine_weights(sync), Need("engine workspace", WORKSPACE, "CUDA context, activations, graphs; estimate")
    cache = cache_room(config, arch, vllm_limit(config, gpu.memory) - sum(need.bytes for need in needs))
    return (*needs, _cache(cache)), cache


def _generating_alone(config: RunConfig, arch: Architecture, gpu: Device, sync: StoredBytes) -> tuple[Phase, CacheRoom]:
    """The phase of GPUs that only generate."""
    needs, cache = _generating(config, arch, gpu, sync)
    return Phase("generating", needs, vllm_limit(config, gpu.memory), _room(config)), cache


def _training(
    config: RunConfig, arch: Architecture, gpu: Device, parallel: Parallel, sync: StoredBytes
) -> tuple[Phase, ...]:
    """Phases of GPUs that only train."""
    state = resident_state(config, arch, parallel)
    return (
        Phase("training", (*state, *gpu_step(config, arch, parallel)), gpu.memory, _spread(config)),
        Phase("syncing", (*state, *exported(config, arch, parallel, sync)), gpu.memory, _spread(config)),
    )


def _sharing(
    config: RunConfig, arch: Architecture, gpu: Device, parallel: Parallel, sync: StoredBytes
) -> tuple[list[DevicePlan], CacheRoom]:
    """The GPUs that generate and train in turn, and those that do one of both where there are more of them."""
    engines = config.rollout.vllm.gpus
    phases, cache = _in_turn(config, arch, gpu, parallel, sync)
    plans = [DevicePlan(gpu, min(engines, parallel.gpus), phases)]
    if engines > parallel.gpus:
        plans.append(DevicePlan(gpu, engines - parallel.gpus, (_generating_alone(config, arch, gpu, sync)[0],)))
    if engines < parallel.gpus:
        plans.append(DevicePlan(gpu, parallel.gpus - engines, _training(config, arch, gpu, parallel, sync)))
    return plans, cache


def _in_turn(
    config: RunConfig, arch: Architecture, gpu: Device, parallel: Parallel, sync: StoredBytes
) -> tuple[tuple[Phase, ...], CacheRoom]:
    """Phases of a GPU that generates and trains: masters and optimiser states stay, an engine may sleep."""
    state = resident_state(config, arch, parallel)
    engine, cache = _generating(config, arch, gpu, sync)
    sent = exported(config, arch, parallel, sync)
    asleep = (Need("engine asleep", ASLEEP, "CUDA context, graphs; estimate"),)
    beside = asleep if config.rollout.vllm.sleep else engine
    # An engine that wakes has its cache again before the update is over.
    stays = (*state, at_rest(config, parallel))
    left = gpu.memory - sum(need.bytes for need in (*stays, *sent))
    share = math.floor(100 * left / gpu.memory) / 100
    lower = f"lower rollout.vllm.gpu_memory_utilization to {share}" if share > 0 else _spread(config)
    lower = lower if config.rollout.vllm.kv_cache_gib is None else _room(config)
    return (
        Phase("generating", (*engine, *stays), gpu.memory, lower),
        Phase("training", (*beside, *state, *gpu_step(config, arch, parallel)), gpu.memory, _spread(config)),
        Phase("syncing", (*engine, *stays, *sent), gpu.memory, lower),
    ), cache


def _spread(config: RunConfig) -> str:
    if config.training.trainer == "megatron":
        # Nothing else gives as much back as the scores that repeatable attention holds.
        first = "set training.deterministic=false, " if config.training.deterministic else ""
        return f"{first}train on more GPUs, or lower training.megatron.micro_batch_tokens"
    return f"train on more GPUs, or lower training.{'tokens_per_pass' if config.training.packs else 'micro_batch'}"


def _room(config: RunConfig) -> str:
    if config.rollout.vllm.kv_cache_gib is not None:
        return "lower rollout.vllm.kv_cache_gib, or choose a GPU with more memory"
    return "raise rollout.vllm.gpu_memory_utilization, or choose a GPU with more memory"


def _cache(room: CacheRoom) -> Need:
    return Need("KV cache", room.bytes, f"{room.bytes_per_token:,} bytes a token")
