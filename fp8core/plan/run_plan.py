"""The memory of a training: devices phase by phase, disk and the bytes of a sync, from shapes alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp8core.config.derived import sft_config, teacher_config
from fp8core.config.reward import RewardModelOptions
from fp8core.config.run import RunConfig
from fp8core.config.shipped import REFERENCE, TEACHER
from fp8core.errors import UserError, refuse
from fp8core.models.architecture import Architecture
from fp8core.models.hub import model_shape
from fp8core.models.safetensors_files import read_header
from fp8core.resources.memory import (
    BF16_BYTES,
    FP32_BYTES,
    CacheRoom,
    Device,
    DevicePlan,
    EngineMemory,
    Machine,
    Need,
    ParameterCounts,
    Phase,
    StoredBytes,
    count_parameters,
    shipped_bytes,
)
from fp8core.rollout.registry import engine_entry
from fp8core.training.memory import MASTER_WEIGHTS, MOMENTS, Parallel, host_needs, host_state
from fp8core.training.registry import gpu_memory, trainer_grid, trainer_of

_CLOSE = 0.03
"""Share of a device: a training of 139.8 of 140.4 GiB by plan ran out of memory (qwen3-8b beside its engine, H200)."""
_MORE_GPUS = "train on more GPUs"
_HOST = "choose a smaller model, or a machine with more memory"
Needs = tuple[Need, ...]


class CheckpointSpace(NamedTuple):
    """The disk that checkpoints take: bytes of one, steps from one to the next, and how many are kept."""

    bytes: int
    every: int
    kept: int


@dataclass(frozen=True)
class RunPlan:
    """`cache` is None for an engine whose cache grows as it generates; `refusals`: a line for each reason why it cannot
    run."""

    parameters: ParameterCounts
    devices: tuple[DevicePlan, ...]
    cache: CacheRoom | None
    sync: StoredBytes
    checkpoint: CheckpointSpace
    refusals: tuple[str, ...]


def plan_run(config: RunConfig, arch: Architecture, machine: Machine) -> RunPlan:
    """Raises UserError: the engine cannot hold the model."""
    entry = engine_entry(config)
    refuse(entry.check_model(config, arch))
    gpus = 0 if machine.gpu is None else entry.gpus(config)
    engine = entry.memory(config, arch, machine.gpu if gpus else None)
    devices = [
        *([] if machine.gpu is None else _gpu_plans(config, arch, machine.gpu, engine, gpus)),
        *_host_plan(config, arch, machine, () if gpus else engine.needs),
    ]
    refusals = [refusal for device in devices for refusal in device.refusals()]
    # A cache that is too small because nothing fits is no reason of its own.
    if engine.refusal is not None and not refusals:
        refusals.append(engine.refusal)
    return RunPlan(
        parameters=count_parameters(arch),
        devices=tuple(devices),
        cache=engine.cache,
        sync=shipped_bytes(arch, config.precision),
        checkpoint=_checkpoint(config, arch),
        refusals=tuple(refusals),
    )


def _frozen_scorers(config: RunConfig, arch: Architecture) -> Needs:
    """The memory of reference policy and teacher on each GPU that trains."""
    steps = {step.uses for step in config.pipeline.steps}
    scorers = dict[str, tuple[RunConfig, Architecture]]()
    if REFERENCE in steps:
        scorers["reference"] = config, arch
    distillation = config.loss.distillation
    if TEACHER in steps and distillation.teacher is not None:
        teacher = {"model": distillation.teacher, "revision": distillation.revision, "architecture": None}
        try:
            shape = model_shape(config.model_copy(update=teacher))
        except UserError:  # a run refuses such a teacher by itself; until then it counts as large as the policy
            shape = arch
        scorers["teacher"] = teacher_config(config), shape
    sums = list[Need]()
    for name, (settings, shape) in scorers.items():
        if (grid := trainer_of(settings.training).grid(settings)) is not None:
            needs = gpu_memory(settings.training).scoring(settings, shape, grid)
            sums.append(Need(name, sum(need.bytes for need in needs), " and ".join(need.item for need in needs)))
    return tuple(sums)


def _reward_models(config: RunConfig, gpus: int) -> Needs:
    """Weights of those on the first `gpus` GPUs, or with 0 on the host, as far as their folders are on this machine."""
    needs = list[Need]()
    models = (each.options for each in config.verifiers if each.name == "reward_model")
    for options in map(RewardModelOptions.model_validate, models):
        kind, _, index = options.device.partition(":")
        if (kind == "cuda" and int(index or 0) < gpus) or (kind == "cpu" and gpus == 0):
            files = Path(options.model).expanduser().glob("*.safetensors")
            numbers = sum(math.prod(part.spec.shape) for file in files for part in read_header(file).values())
            width = FP32_BYTES if options.dtype == "float32" else BF16_BYTES
            needs.append(Need("reward model", numbers * width, f"weights in {options.dtype}"))
    return tuple(needs)


def _gpu_plans(
    config: RunConfig, arch: Architecture, gpu: Device, engine: EngineMemory, engine_gpus: int
) -> Iterator[DevicePlan]:
    """The GPUs that generate and train in turn, and those that do one of both."""
    parallel = trainer_of(config.training).grid(config)
    trainer_gpus = 0 if parallel is None else parallel.gpus
    gpus = max(engine_gpus, trainer_gpus)
    scorers = (*_frozen_scorers(config, arch), *(_reward_models(config, gpus) if gpus else ()))
    both = min(engine_gpus, trainer_gpus) if config.cluster.placement == "colocated" else 0
    if parallel is not None and both:
        yield DevicePlan(gpu, both, _trainer_phases(config, arch, gpu, parallel, scorers, engine))
    if engine_gpus > both:
        generating = Phase("generating", engine.needs, engine.limit, engine.advice)
        yield DevicePlan(gpu, engine_gpus - both, (generating,))
    if parallel is not None and trainer_gpus > both:
        yield DevicePlan(gpu, trainer_gpus - both, _trainer_phases(config, arch, gpu, parallel, scorers, None))
    if (warm := _warm_start(config, arch, gpu)) is not None:
        yield DevicePlan(gpu, 1, (warm,))


def _trainer_phases(
    config: RunConfig, arch: Architecture, gpu: Device, parallel: Parallel, scorers: Needs, engine: EngineMemory | None
) -> tuple[Phase, ...]:
    """Phases of a GPU that trains, and may generate in turn: masters and optimiser states stay, an engine may sleep."""
    memory = gpu_memory(config.training)
    limit = gpu.memory
    state = (*memory.state(config, arch, parallel), *scorers)
    step = memory.step(config, arch, parallel)
    export = memory.exported(config, arch, parallel, shipped_bytes(arch, config.precision))
    advice = f"{memory.advice} or {_MORE_GPUS}"
    if engine is None:
        return Phase("training", (*state, *step), limit, advice), Phase("syncing", (*state, *export), limit, _MORE_GPUS)
    asleep = engine.needs if engine.asleep is None else engine.asleep
    stays = (*state, Need("trainer at rest", memory.at_rest, "CUDA context, communication; estimate"))
    engine_advice = f"{engine.advice}, or {_MORE_GPUS}"
    return (
        Phase("generating", (*engine.needs, *stays), limit, engine_advice),
        Phase("training", (*asleep, *state, *step), limit, advice),
        Phase("syncing", (*engine.needs, *stays, *export), limit, engine_advice),
    )


def _warm_start(config: RunConfig, arch: Architecture, gpu: Device) -> Phase | None:
    settings = sft_config(config)
    trainer = trainer_of(settings.training)
    if config.warm_start is None or trainer.build_sft is None or trainer.grid(settings) is None:
        return None
    memory = gpu_memory(settings.training)
    alone = Parallel()
    needs = (*memory.state(settings, arch, alone), *memory.step(settings, arch, alone))
    return Phase("warm start", needs, gpu.memory, f"{memory.advice} or choose a GPU with more memory")


def _host_plan(config: RunConfig, arch: Architecture, machine: Machine, engine: Needs) -> Iterator[DevicePlan]:
    """The host, with one engine and one rank where these compute there."""
    training = host_needs(config, arch) if trainer_grid(config, machine) is None else ()
    if engine or training:
        phase = " and ".join(name for name, part in (("generating", engine), ("training", training)) if part)
        limit = None if machine.host is None else machine.host.memory
        needs = (*engine, *training, *_reward_models(config, 0))
        yield DevicePlan(machine.host, 1, (Phase(phase, needs, limit, _HOST),))


def _checkpoint(config: RunConfig, arch: Architecture) -> CheckpointSpace:
    """Masters and moments, however many GPUs share them, and the policy in BF16."""
    memory = trainer_of(config.training).memory(config.training)
    state = host_state(config, arch) if memory is None else memory.state(config, arch, Parallel())
    masters, moments = (sum(need.bytes for need in state if need.item == item) for item in (MASTER_WEIGHTS, MOMENTS))
    weights = masters + count_parameters(arch).total * BF16_BYTES
    # A reference that follows is stored beside the policy, without moments.
    size = moments + weights * (1 if config.loss.reference is None else 2)
    return CheckpointSpace(size, config.checkpoint.every, config.checkpoint.keep + 1)


def check_fit(plan: RunPlan) -> None:
    """Raises UserError, in one line, when the plan does not fit."""
    if plan.refusals:
        raise UserError(f"memory: {'; also '.join(plan.refusals)}")


def fit_summary(plan: RunPlan) -> str:
    """A line about a plan that fits. An engine may fill its share of a GPU with its cache, and stays in it."""
    phases = [phase for device in plan.devices for phase in device.phases if phase.free_share > 0]
    closest = min(phases, key=lambda phase: phase.free_share, default=None)
    if closest is None or closest.free_share >= _CLOSE:
        return "fits"
    return (
        f"fits closely: {closest.free_share:.1%} is left while {closest.name}, and estimates err by more; if memory "
        f"runs out, {closest.advice}"
    )
