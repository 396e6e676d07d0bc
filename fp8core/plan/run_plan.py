"""Does a training fit? Its devices phase by phase, its disk and the bytes of a sync, from shapes alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fp8core.config.derived import sft_config, teacher_config
from fp8core.config.run import RunConfig
from fp8core.config.shipped import REFERENCE, TEACHER
from fp8core.errors import UserError, refuse
from fp8core.evaluation.measure import compared_prompts
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.hub import model_shape
from fp8core.models.weights import training_formats
from fp8core.plan.step_time import StepTime, step_time
from fp8core.resources.memory import (
    BF16_BYTES,
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
    stored_bytes,
)
from fp8core.rollout.registry import engine_entry
from fp8core.training.memory import MASTER_WEIGHTS, MOMENTS, Parallel, host_needs, host_scorer, host_state
from fp8core.training.registry import gpu_memory, trainer_of

_CLOSE = 0.03
"""Share of a device: a training of 139.8 of 140.4 GiB by plan ran out of memory (qwen3-8b beside its engine, H200)."""
_MORE_GPUS = "train on more GPUs"
_HOST = "choose a smaller model, or a machine with more memory"


class CheckpointSpace(NamedTuple):
    """The disk that checkpoints take: bytes of one, steps from one to the next, and how many are kept."""

    bytes: int
    every: int
    kept: int


class AheadSpace(NamedTuple):
    """Generation beside the update: its mode, how old a token may be, and the policies kept to score such tokens.

    `policy`: bytes of one of the `policies`, which lie in main memory.
    """

    mode: str
    staleness: int
    policies: int
    policy: int


@dataclass(frozen=True)
class RunPlan:
    """The memory that a training takes, and its disk.

    `cache` is None for an engine whose cache grows as it generates, `ahead` for a run whose generation waits for the
    update. `step` is None where no measured step is like it. A run that ends between checkpoints writes one more.
    `precision_gap`: held-out prompts that step 0 answers in BF16 too. `refusals`: a line for each reason why it
    cannot run.
    """

    parameters: ParameterCounts
    devices: tuple[DevicePlan, ...]
    cache: CacheRoom | None
    sync: StoredBytes
    checkpoint: CheckpointSpace
    precision_gap: int
    ahead: AheadSpace | None
    step: StepTime | None
    refusals: tuple[str, ...]


def plan_run(config: RunConfig, arch: Architecture, machine: Machine, parallel: Parallel | None = None) -> RunPlan:
    """Plan a training; an engine generates on the machine's GPUs, or on the host of a machine without.

    `parallel`: GPUs that train; colocated, those that generate are among them, in turn. None trains on the host.
    Raises UserError: the engine cannot hold the model, it cannot be cut into `parallel`, or there is no GPU to train
    on.
    """
    entry = engine_entry(config)
    refuse(entry.check_model(config, arch))
    if parallel is not None:
        parallel.check(arch)
        if machine.gpu is None:
            raise UserError("there is no GPU to train on")
    gpus = 0 if machine.gpu is None else entry.gpus(config)
    engine = entry.memory(config, arch, machine.gpu if gpus else None)
    scorers = tuple(_frozen_scorers(config, arch, parallel))
    devices = [
        *_gpu_plans(config, arch, machine.gpu, engine, gpus, parallel, scorers),
        *_host_plan(config, arch, machine, engine, gpus, parallel, scorers),
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
        precision_gap=compared_prompts(config),
        ahead=_ahead(config, arch),
        step=None if refusals else step_time(config, arch, machine.gpu),
        refusals=tuple(refusals),
    )


@dataclass(frozen=True)
class _Scorer:
    """A trainer that scores and never learns: what stays on each GPU, what its pass adds, or all of it on the host."""

    stays: tuple[Need, ...]
    in_passes: tuple[Need, ...]
    on_host: tuple[Need, ...]


def _frozen_scorers(config: RunConfig, arch: Architecture, parallel: Parallel | None) -> Iterator[_Scorer]:
    """The reference policy and the teacher, where the pipeline's steps need them."""
    steps = {step.uses for step in config.pipeline.steps}
    if REFERENCE in steps:
        yield _scorer("reference", config, arch, parallel)
    distillation = config.loss.distillation
    if TEACHER in steps and distillation.teacher is not None:
        scoring = teacher_config(config)
        named = {"model": distillation.teacher, "revision": distillation.revision, "architecture": None}
        try:
            shape = model_shape(config.model_copy(update=named))
        except UserError:  # a run refuses such a teacher by itself; until then it counts as large as the policy
            shape = arch
        on_host = parallel is None or trainer_of(scoring.training).grid(scoring) is None
        yield _scorer("teacher", scoring, shape, None if on_host or parallel is None else Parallel(parallel.gpus))


def _scorer(name: str, config: RunConfig, arch: Architecture, parallel: Parallel | None) -> _Scorer:
    if parallel is None:
        return _Scorer((), (), (Need(name, host_scorer(config, arch), "masters, and weights made ready"),))
    memory = gpu_memory(config.training)
    ready = sum(need.bytes for need in memory.made_ready(config, arch, parallel))
    stays = memory.held_to_score(config, arch, parallel)
    note = " and ".join(need.item for need in stays)
    return _Scorer(
        (Need(name, sum(need.bytes for need in stays), note),),
        (Need(f"weights of the {name}", ready, "as they are multiplied"),),
        (),
    )


def _gpu_plans(
    config: RunConfig,
    arch: Architecture,
    gpu: Device | None,
    engine: EngineMemory,
    engine_gpus: int,
    parallel: Parallel | None,
    scorers: tuple[_Scorer, ...],
) -> Iterator[DevicePlan]:
    """The GPUs that generate and train in turn, and those that do one of both."""
    if gpu is None:
        return
    shared = parallel is not None and config.cluster.placement == "colocated"
    both = min(engine_gpus, parallel.gpus) if parallel is not None and shared else 0
    if both and parallel is not None:
        yield DevicePlan(gpu, both, _trainer_phases(config, arch, gpu, parallel, scorers, engine))
    if engine_gpus > both:
        generating = Phase("generating", engine.needs, engine.limit, engine.advice)
        yield DevicePlan(gpu, engine_gpus - both, (generating,))
    if parallel is not None and parallel.gpus > both:
        yield DevicePlan(gpu, parallel.gpus - both, _trainer_phases(config, arch, gpu, parallel, scorers, None))
    if (warm := _warm_start(config, arch, gpu)) is not None:
        yield DevicePlan(gpu, 1, (warm,))


def _trainer_phases(
    config: RunConfig,
    arch: Architecture,
    gpu: Device,
    parallel: Parallel,
    scorers: tuple[_Scorer, ...],
    engine: EngineMemory | None,
) -> tuple[Phase, ...]:
    """Phases of a GPU that trains, and may generate in turn: masters and optimiser states stay, an engine may sleep.

    Scoring and saving are told only where they take more than all others.
    """
    memory, limit = gpu_memory(config.training), gpu.memory
    scorer_needs = tuple(need for scorer in scorers for need in scorer.stays)
    state = (*memory.state(config, arch, parallel), *scorer_needs)
    step = memory.step(config, arch, parallel)
    sent = memory.exported(config, arch, parallel, shipped_bytes(arch, config.precision))
    awake = () if engine is None else engine.needs
    beside = awake if engine is None or engine.asleep is None else engine.asleep
    at_rest = Need("trainer at rest", memory.at_rest, "CUDA context, communication; estimate")
    stays = state if engine is None else (*state, at_rest)
    training_advice = _training_advice(config, arch, parallel, _MORE_GPUS)
    engine_advice = _MORE_GPUS if engine is None else f"{engine.advice}, or {_MORE_GPUS}"
    phases = [
        *([] if engine is None else [Phase("generating", (*awake, *stays), limit, engine_advice)]),
        Phase("training", (*beside, *state, *step), limit, training_advice),
        Phase("syncing", (*awake, *stays, *sent), limit, engine_advice),
    ]
    # Nothing is kept for a backward pass while others score.
    passes = [need for need in step if need.item not in ("gradients", "activations")]
    passes += [need for scorer in scorers for need in scorer.in_passes]
    most = max(phase.total for phase in phases)
    rare = (
        Phase("scoring", (*beside, *state, *passes), limit, training_advice),
        Phase("saving", (*awake, *stays, *memory.saved(config, arch, parallel)), limit, engine_advice),
    )
    return *phases, *(phase for phase in rare if phase.total > most)


def _warm_start(config: RunConfig, arch: Architecture, gpu: Device) -> Phase | None:
    """The one GPU that trains the warm start; nothing else lies there by then."""
    settings = sft_config(config)
    trainer = trainer_of(settings.training)
    if config.warm_start is None or trainer.build_sft is None or trainer.grid(settings) is None:
        return None
    memory, alone = gpu_memory(settings.training), Parallel()
    needs = (*memory.state(settings, arch, alone), *memory.step(settings, arch, alone))
    advice = _training_advice(settings, arch, alone, "choose a GPU with more memory")
    return Phase("warm start", needs, gpu.memory, advice)


def _training_advice(config: RunConfig, arch: Architecture, parallel: Parallel, otherwise: str) -> str:
    """The settings whose change lowers the memory of an update, and what else helps."""

    def size(update: dict[str, Any]) -> int:
        changed = config.model_copy(update={"training": config.training.model_copy(update=update)})
        return sum(need.bytes for need in gpu_memory(config.training).step(changed, arch, parallel))

    smaller = trainer_of(config.training).smaller(config)
    return " or ".join([*(words for words, update in smaller.items() if size(update) < size({})), otherwise])


def _host_plan(
    config: RunConfig,
    arch: Architecture,
    machine: Machine,
    engine: EngineMemory,
    engine_gpus: int,
    parallel: Parallel | None,
    scorers: tuple[_Scorer, ...],
) -> Iterator[DevicePlan]:
    """One host, with all that computes there, the policy to save and the kept policies, as if at the same time."""
    cluster, on_host = config.cluster, dict[str, tuple[Need, ...]]()
    scoring, ranks = tuple(need for scorer in scorers for need in scorer.on_host), cluster.ranks
    if not engine_gpus:
        on_host["generating"] = _times(math.ceil(cluster.engines / machine.hosts), engine.needs)
    if parallel is None:
        on_host["training"] = _times(math.ceil(ranks / machine.hosts), (*host_needs(config, arch), *scoring))
    elif scoring:
        on_host["scoring"] = _times(math.ceil(ranks / machine.hosts), scoring)
    if parallel is not None and ranks > 1 and machine.host is not None:
        size = count_parameters(arch).total * BF16_BYTES
        on_host["saving"] = (Need("policy to save", size, "BF16: rank 0 writes it"),)
    ahead = _ahead(config, arch)
    if ahead is not None and (on_host or machine.host is not None):
        size, place = ahead.policies * ahead.policy, next(reversed(on_host), "keeping")
        kept = Need("policies kept for scores", size, f"{ahead.policies} versions")
        on_host[place] = (*on_host.get(place, ()), kept)
    if on_host:
        # An address may lead to several hosts, and the processes of one of them are not counted.
        scattered = max(cluster.engines, ranks) > 1 and machine.hosts == 1 and cluster.address is not None
        limit = None if machine.host is None or scattered else machine.host.memory
        needs = tuple(need for part in on_host.values() for need in part)
        yield DevicePlan(machine.host, 1, (Phase(" and ".join(on_host), needs, limit, _HOST),))


def _times(processes: int, needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """The needs of so many processes of one host, none of which share memory."""
    if processes == 1:
        return needs
    note = f"in {processes} processes"
    return tuple(replace(n, bytes=processes * n.bytes, note=f"{n.note}, {note}" if n.note else note) for n in needs)


def _ahead(config: RunConfig, arch: Architecture) -> AheadSpace | None:
    pipeline = config.pipeline
    if pipeline.mode == "synchronous":
        return None
    formats = training_formats(config.precision, arch.num_layers).stored_names()
    size = stored_bytes(parameter_shapes(arch), formats).total
    return AheadSpace(pipeline.mode, pipeline.max_staleness, pipeline.kept_policies, size)


def _checkpoint(config: RunConfig, arch: Architecture) -> CheckpointSpace:
    """Masters and moments, however many GPUs share them, and the policy in BF16."""
    memory = trainer_of(config.training).memory(config.training)
    state = host_state(config, arch) if memory is None else memory.state(config, arch, Parallel())
    saved = sum(need.bytes for need in state if need.item in (MASTER_WEIGHTS, MOMENTS))
    size = saved + count_parameters(arch).total * BF16_BYTES
    return CheckpointSpace(size, config.checkpoint.every, config.checkpoint.keep + 1)


def spread_over(config: RunConfig, gpus: int) -> RunConfig:
    """The configuration on so many GPUs: where it leaves engines or ranks at 1, they take what others leave.

    Colocated, that is all of them. Separate ones get halves where both are left.

    Raises:
        UserError: the engines and ranks of the configuration need more GPUs.
    """
    cluster, shared = config.cluster, engine_entry(config).tensor_parallel(config)
    engines, ranks = cluster.engines, cluster.ranks
    if cluster.placement == "colocated":
        engines, ranks = (gpus if each == 1 else each for each in (engines, ranks))
    elif engines > 1 and ranks == 1:
        ranks = max(1, gpus - engines * shared)
    elif engines == 1:
        ranks = ranks if ranks > 1 else max(1, min(gpus // 2, gpus - shared))
        engines = max(1, (gpus - ranks) // shared)
    spread = cluster.model_copy(update={"engines": engines, "ranks": ranks})
    if sum(spread.bundles(shared)) > gpus:
        raise UserError(spread.too_small(shared, "GPU", f"--gpus is {gpus}"))
    return config.model_copy(update={"cluster": spread})


def check_fit(plan: RunPlan) -> None:
    """Raises UserError, in one line, when the plan does not fit."""
    if plan.refusals:
        raise UserError(f"memory: {'; also '.join(plan.refusals)}")


def verdict(plan: RunPlan) -> str:
    """A line about a plan that fits. An engine may fill its share of a GPU with its cache, and stays in it."""
    phases = [phase for device in plan.devices for phase in device.phases if phase.left > 0]
    closest = min(phases, key=lambda phase: phase.left, default=None)
    if closest is None or closest.left >= _CLOSE:
        return "fits"
    return (
        f"fits closely: {closest.left:.1%} is left while {closest.name}, and estimates err by more; if memory runs "
        f"out, {closest.advice}"
    )
