"""Does a training fit? Its devices, its disk and the bytes of a sync, from shapes alone."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8core.config.run import RunConfig
from fp8core.errors import UserError, refuse
from fp8core.evaluation.measure import compared_prompts
from fp8core.models.architecture import Architecture
from fp8core.plan.devices import AheadSpace, Demand, ahead_space, device_plans, times
from fp8core.plan.frozen_trainers import frozen_trainers
from fp8core.plan.step_time import StepTime, step_time
from fp8core.resources.memory import (
    BF16_BYTES,
    CacheRoom,
    DevicePlan,
    Machine,
    ParameterCounts,
    StoredBytes,
    count_parameters,
    shipped_bytes,
)
from fp8core.rollout.registry import engine_entry
from fp8core.training.memory import MASTER_WEIGHTS, MOMENTS, Parallel, host_state
from fp8core.training.registry import trainer_of

_CLOSE = 0.03
"""Share of a device: a training of 139.8 of 140.4 GiB by plan ran out of memory (qwen3-8b beside its engine, H200)."""


class CheckpointSpace(NamedTuple):
    """The disk that checkpoints take: bytes of one, steps from one to the next, and how many are kept."""

    bytes: int
    every: int
    kept: int


@dataclass(frozen=True)
class RunPlan:
    """The memory that a training takes, and its disk.

    `cache` is None for an engine whose cache grows as it generates, `ahead` for a run whose generation waits for the
    update. `step` is None where it does not run, or no measured step is like it. A run that ends between checkpoints
    writes one more. `precision_gap`: held-out prompts that step 0 answers in BF16 too. `refusals`: a line for each
    reason why it cannot run.
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
    sync = shipped_bytes(arch, config.precision)
    gpus = 0 if machine.gpu is None else entry.gpus(config)
    engine = entry.memory(config, arch, machine.gpu if gpus else None)
    if not gpus:
        engine = replace(engine, needs=times(math.ceil(config.cluster.engines / machine.hosts), engine.needs))
    ahead, scoring = ahead_space(config, arch), frozen_trainers(config, arch, parallel)
    devices = device_plans(Demand(config, arch, parallel, sync, engine, gpus, scoring, ahead), machine)
    refusals = [refusal for device in devices for refusal in device.refusals()]
    # A cache that is too small because nothing fits is no reason of its own.
    if engine.refusal is not None and not refusals:
        refusals.append(engine.refusal)
    space = _checkpoint(config, arch)
    gap = compared_prompts(config)
    step = None if refusals else step_time(config, arch, machine.gpu, engine.cache)
    return RunPlan(count_parameters(arch), devices, engine.cache, sync, space, gap, ahead, step, tuple(refusals))


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
    asked = cluster.model_copy(update={"engines": engines, "ranks": ranks})
    if sum(asked.bundles(shared)) > gpus:
        raise UserError(asked.too_small(shared, "GPU", f"--gpus is {gpus}"))
    return config.model_copy(update={"cluster": asked})


def refuse_unfit(plan: RunPlan) -> None:
    """Raises UserError, in one line, when the plan does not fit."""
    if plan.refusals:
        raise UserError(f"memory: {'; also '.join(plan.refusals)}")


def verdict(plan: RunPlan) -> str:
    phases = [phase for device in plan.devices for phase in device.phases]
    if all(phase.surely_fits for phase in phases):
        # An engine may fill its share of a GPU with its cache, and stays in it: nothing is left, and all fits.
        judged = (phase for phase in phases if phase.left > 0)
        closest = min(judged, key=lambda phase: phase.left, default=None)
        if closest is None or closest.left >= _CLOSE:
            return "fits"
        return (
            f"fits closely: {closest.left:.1%} is left while {closest.name}, and estimates err by more; if memory runs "
            f"out, {closest.advice}"
        )
    return (
        "fits while sequences are short: with activations of the longest configured ones it does not; lower "
        "training.micro_batch, data.max_prompt_tokens or rollout.max_new_tokens if memory runs out"
    )
