"""Does a training fit? Memory on every device it uses, phase by phase, and the bytes of a sync, from shapes alone."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8core.config.derived import sft_config
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.errors import UserError, refuse
from fp8core.evaluation.measure import compared_prompts
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.plan.frozen_trainers import FrozenTrainers, frozen_trainers
from fp8core.plan.step_time import StepTime, step_time
from fp8core.resources.memory import (
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
from fp8core.rollout.registry import engine_entry, longest_sequence
from fp8core.rollout.shared_weights import RECEIVED_BYTES
from fp8core.training.memory import Parallel, host_needs, host_state, most_activations
from fp8core.training.registry import gpu_memory, trainer_of

_BF16 = 2
# Token, log-prob and version.
_STREAMED = 12
# Of what stays between steps, the part that a checkpoint has.
_SAVED = ("master weights", "optimiser states")
_MORE_MEMORY = "choose a machine with more memory"
_CLOSE = 0.03
"""Share of a device: a training of 139.8 of 140.4 GiB by plan ran out of memory (qwen3-8b beside its engine, H200)."""
_HOST = "what computes on the CPU lies there: choose a smaller model, or a machine with more memory"


class CheckpointSpace(NamedTuple):
    """The disk that checkpoints take: bytes of one, steps from one to the next, and how many are kept."""

    bytes: int
    every: int
    kept: int


class AheadSpace(NamedTuple):
    """Generation beside the update: the mode, how old a token may be, what may be begun, and what is kept for it.

    Attributes:
        completions: in flight or waiting between two steps, at most.
        writing: completions of one engine that write at the same time, at most.
        stream: bytes of all their tokens, at most; a step stores them twice.
        policies: kept in main memory to score the tokens that they wrote.
        policy: bytes of one.
    """

    mode: str
    staleness: int
    completions: int
    writing: int
    stream: int
    policies: int
    policy: int


@dataclass(frozen=True)
class RunPlan:
    """The memory that a training takes, and its disk.

    Attributes:
        parameters: of the model.
        devices: with what lies on each.
        cache: the engine's KV cache; None for one whose cache grows as it generates.
        sync: what one update of the engine sends.
        checkpoint: its checkpoints; a run that ends in between writes one more.
        precision_gap: held-out prompts that step 0 answers in BF16 too, 0 where it does not.
        ahead: None for a run whose generation waits for the update.
        step: its time; None where it does not run, or no measured step is like it.
        refusals: a line for each reason why it cannot run.
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
    """Plan a training.

    Args:
        config: the training.
        arch: shape of its model.
        machine: what there is; an engine generates on its GPUs, or on the host of a machine without.
        parallel: GPUs that train; colocated, those that generate are among them, in turn. None trains on the host.

    Raises:
        UserError: the engine cannot hold the model, it cannot be cut into `parallel`, or there is no GPU to train on.
    """
    entry = engine_entry(config)
    refuse(entry.check_model(config, arch))
    if parallel is not None:
        parallel.check(arch)
    sync = shipped_bytes(arch, config.precision)
    gpus = 0 if machine.gpu is None else entry.gpus(config)
    engine = entry.memory(config, arch, machine.gpu if gpus else None)
    if not gpus:
        engine = replace(engine, needs=_times(math.ceil(config.cluster.engines / machine.hosts), engine.needs))
    ahead = _ahead(config, arch)
    devices = _devices(config, arch, machine, parallel, sync, engine, gpus, frozen_trainers(config, arch, parallel))
    devices = _with_warm_start(devices, config, arch, machine.gpu)
    if ahead is not None:
        devices = _with_policies(devices, machine.host, ahead)
    refusals = [refusal for device in devices for refusal in device.refusals()]
    # A cache that is too small because nothing fits is no reason of its own.
    if engine.refusal is not None and not refusals:
        refusals.append(engine.refusal)
    space = _checkpoint(config, arch)
    gap = compared_prompts(config)
    step = None if refusals else step_time(config, arch, machine.gpu, engine.cache)
    return RunPlan(count_parameters(arch), devices, engine.cache, sync, space, gap, ahead, step, tuple(refusals))


def _ahead(config: RunConfig, arch: Architecture) -> AheadSpace | None:
    pipeline, rollout = config.pipeline, config.rollout
    if pipeline.mode == "synchronous":
        return None
    completions = pipeline.max_staleness * rollout.drawn_prompts * rollout.group_size
    # The prompts of a step that ends, and those that staleness lets in beside them.
    prompts = min(pipeline.max_inflight_prompts or math.inf, (1 + pipeline.max_staleness) * rollout.drawn_prompts)
    writing = math.ceil(prompts / config.cluster.engines) * rollout.group_size
    tokens = min(rollout.max_new_tokens, longest_sequence(config, arch))
    formats = training_formats(config.precision, arch.num_layers).stored_names()
    return AheadSpace(
        *(pipeline.mode, pipeline.max_staleness, completions, writing, completions * tokens * _STREAMED),
        *(pipeline.kept_policies, stored_bytes(parameter_shapes(arch), formats).total),
    )


def _with_warm_start(
    devices: tuple[DevicePlan, ...], config: RunConfig, arch: Architecture, gpu: Device | None
) -> tuple[DevicePlan, ...]:
    """The devices, with the phase of the one GPU that trains the warm start; nothing else lies there by then.

    On a host it takes less than the training after it: the reference decoder has no operands that are made ready.
    """
    settings = sft_config(config)
    trainer = trainer_of(settings.training)
    if config.warm_start is None or gpu is None or trainer.build_sft is None or trainer.grid(settings) is None:
        return devices
    memory, alone = gpu_memory(settings.training), Parallel()
    needs = (*memory.state(settings, arch, alone), *memory.step(settings, arch, alone))
    phase = Phase("warm start", needs, gpu.memory, _lower_warm_start(settings.training))
    if devices[0].device != gpu or devices[0].count > 1:
        return (*devices, DevicePlan(gpu, 1, (phase,)))
    return replace(devices[0], phases=(*devices[0].phases, phase)), *devices[1:]


def _lower_warm_start(training: TrainingConfig) -> str:
    """The settings that lower the memory of a warm start, which more GPUs do not."""
    lower = {
        "set training.optimiser_state=bf16": training.optimiser_state == "fp32",
        "set training.activation_checkpointing=true": not training.activation_checkpointing,
    }
    return ", ".join([*(setting for setting, left in lower.items() if left), "lower training.tokens_per_pass"])


def _with_policies(devices: tuple[DevicePlan, ...], host: Device | None, ahead: AheadSpace) -> tuple[DevicePlan, ...]:
    """The kept policies lie in main memory, beside all that the host holds at any time."""
    need = Need("policies kept for scores", ahead.policies * ahead.policy, f"{ahead.policies} versions")
    if any(device.device == host for device in devices):
        return tuple(
            replace(device, phases=tuple(replace(phase, needs=(*phase.needs, need)) for phase in device.phases))
            if device.device == host
            else device
            for device in devices
        )
    phase = Phase("generating ahead", (need,), None if host is None else host.memory, _MORE_MEMORY)
    return devices if host is None else (*devices, DevicePlan(host, 1, (phase,)))


def _checkpoint(config: RunConfig, arch: Architecture) -> CheckpointSpace:
    """Masters and moments, however many GPUs share them, and the policy in BF16."""
    memory = trainer_of(config.training).memory(config.training)
    state = host_state(config, arch) if memory is None else memory.state(config, arch, Parallel())
    saved = sum(need.bytes for need in state if need.item in _SAVED)
    size = saved + count_parameters(arch).total * _BF16
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
    """In words, for a plan that is not refused."""
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


def _devices(
    config: RunConfig,
    arch: Architecture,
    machine: Machine,
    parallel: Parallel | None,
    sync: StoredBytes,
    engine: EngineMemory,
    engine_gpus: int,
    scoring: FrozenTrainers,
) -> tuple[DevicePlan, ...]:
    gpu, plans, on_host = machine.gpu, list[DevicePlan](), dict[str, tuple[Need, ...]]()
    shared = engine_gpus > 0 and config.cluster.placement == "colocated"
    ranks = math.ceil(config.cluster.ranks / machine.hosts)
    if gpu is None or not engine_gpus:
        on_host["generating"] = engine.needs
    elif parallel is not None and shared:
        plans += _sharing(config, arch, gpu, parallel, sync, engine, engine_gpus, scoring)
    elif parallel is not None:
        plans.append(DevicePlan(gpu, engine_gpus, (_generating(engine), _receiving(engine, gpu, arch, sync))))
    else:
        plans.append(DevicePlan(gpu, engine_gpus, (_generating(engine),)))
    if parallel is None:
        on_host["training"] = _times(ranks, (*host_needs(config, arch), *scoring.on_host))
    elif gpu is None:
        raise UserError("there is no GPU to train on")
    elif not shared:
        plans.append(DevicePlan(gpu, parallel.gpus, _training(config, arch, gpu, parallel, sync, scoring)))
    if parallel is not None and scoring.on_host:
        on_host["scoring"] = _times(ranks, scoring.on_host)
    gathered = () if parallel is None else _gathered(config, arch)
    if gathered and (on_host or machine.host is not None):
        on_host["saving"] = gathered
    if on_host:
        needs = tuple(itertools.chain.from_iterable(on_host.values()))
        exact = parallel is None and trainer_of(config.training).arithmetic == "exact"
        more = most_activations(config, arch) if exact else None
        if more is not None:
            (more,) = _times(ranks, (more,))
        several = max(config.cluster.engines, config.cluster.ranks) > 1
        limit = None if machine.host is None or (several and _scattered(config, machine)) else machine.host.memory
        advice = _MORE_MEMORY if on_host.keys() == {"saving"} else _HOST
        plans.append(DevicePlan(machine.host, 1, (Phase(" and ".join(on_host), needs, limit, advice, more),)))
    return tuple(plans)


def _times(processes: int, needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """The needs of so many processes of one host, none of which share memory."""
    if processes == 1:
        return needs
    of_all = f"in {processes} processes"
    return tuple(
        replace(need, bytes=processes * need.bytes, note=f"{need.note}, {of_all}" if need.note else of_all)
        for need in needs
    )


def _scattered(config: RunConfig, machine: Machine) -> bool:
    """True where the hosts of an address are not counted: how many processes one of them has is not known."""
    return machine.hosts == 1 and config.cluster.address is not None


def _gathered(config: RunConfig, arch: Architecture) -> tuple[Need, ...]:
    """The policy of a checkpoint in the main memory of rank 0's host, where several ranks put it together."""
    if config.cluster.ranks == 1:
        return ()
    return (Need("policy to save", count_parameters(arch).total * _BF16, "BF16: rank 0 writes it"),)


def _with_largest(phases: tuple[Phase, ...], *others: Phase) -> tuple[Phase, ...]:
    """The phases of a GPU, and of others that are short or rare those that take more than all of these."""
    most = max(phase.total for phase in phases)
    return *phases, *(phase for phase in others if phase.total > most)


def _scoring(
    config: RunConfig, arch: Architecture, parallel: Parallel, scoring: FrozenTrainers, beside: tuple[Need, ...]
) -> tuple[Need, ...]:
    """The needs of a GPU while others than the trainer score, whose weights are ready too; nothing is kept for a
    backward pass."""
    step = gpu_memory(config.training).step(config, arch, parallel)
    kept = ("gradients", "activations")
    return *beside, *(need for need in step if need.item not in kept), *scoring.in_passes


def _generating(engine: EngineMemory) -> Phase:
    """The phase of GPUs that only generate."""
    return Phase("generating", engine.needs, engine.limit, engine.advice)


def _receiving(engine: EngineMemory, gpu: Device, arch: Architecture, sync: StoredBytes) -> Phase:
    """The phase of GPUs that only generate in which a policy arrives, beside the one that the engine holds."""
    held = max(RECEIVED_BYTES, arch.vocab_size * arch.hidden_size * _BF16)
    received = Need("weights received", min(sync.total, held), "at a time, on the first GPU of an engine")
    share = math.floor(100 * (gpu.memory - received.bytes) / gpu.memory) / 100
    return Phase("syncing", (*engine.needs, received), gpu.memory, engine.advice_beside(share) or engine.advice)


def _training(
    config: RunConfig,
    arch: Architecture,
    gpu: Device,
    parallel: Parallel,
    sync: StoredBytes,
    scoring: FrozenTrainers,
) -> tuple[Phase, ...]:
    """Phases of GPUs that only train."""
    memory, advice = gpu_memory(config.training), trainer_of(config.training).advice(config)
    state = (*memory.state(config, arch, parallel), *scoring.on_gpu)
    sent = memory.exported(config, arch, parallel, sync)
    phases = (
        Phase("training", (*state, *memory.step(config, arch, parallel)), gpu.memory, advice),
        Phase("syncing", (*state, *_larger(sent, _keeping(config, arch, sent))), gpu.memory, advice),
    )
    saved, scored = memory.saved(config, arch, parallel), _scoring(config, arch, parallel, scoring, state)
    return _with_largest(
        phases, Phase("scoring", scored, gpu.memory, advice), Phase("saving", (*state, *saved), gpu.memory, advice)
    )


def _keeping(config: RunConfig, arch: Architecture, sent: tuple[Need, ...]) -> tuple[Need, ...]:
    """The weights to send, and beside them the policy to keep, which the trainer makes in its own formats.

    Where these are the engine's, it keeps what it sends.
    """
    ahead, contract, layers = _ahead(config, arch), config.precision, arch.num_layers
    if ahead is None:
        return sent
    if training_formats(contract, layers).stored_names() == rollout_formats(contract, layers).stored_names():
        return sent
    # The weights come first; the buffers of the export are free by then.
    return *sent[:1], Need("policy to keep", ahead.policy, "in the trainer's formats, on its way to main memory")


def _larger(one: tuple[Need, ...], other: tuple[Need, ...]) -> tuple[Need, ...]:
    """Of needs that are not there at the same time, those that take more."""
    return max(one, other, key=lambda needs: sum(need.bytes for need in needs))


def _sharing(
    config: RunConfig,
    arch: Architecture,
    gpu: Device,
    parallel: Parallel,
    sync: StoredBytes,
    engine: EngineMemory,
    engine_gpus: int,
    scoring: FrozenTrainers,
) -> list[DevicePlan]:
    """The GPUs that generate and train in turn, and those that do one of both where there are more of them."""
    both = min(engine_gpus, parallel.gpus)
    plans = [DevicePlan(gpu, both, _in_turn(config, arch, gpu, parallel, sync, engine, scoring))]
    if engine_gpus > both:
        plans.append(DevicePlan(gpu, engine_gpus - both, (_generating(engine),)))
    if parallel.gpus > both:
        alone = _training(config, arch, gpu, parallel, sync, scoring)
        plans.append(DevicePlan(gpu, parallel.gpus - both, alone))
    return plans


def _in_turn(
    config: RunConfig,
    arch: Architecture,
    gpu: Device,
    parallel: Parallel,
    sync: StoredBytes,
    engine: EngineMemory,
    scoring: FrozenTrainers,
) -> tuple[Phase, ...]:
    """Phases of a GPU that generates and trains: masters and optimiser states stay, an engine may sleep."""
    memory, lower = gpu_memory(config.training), trainer_of(config.training).advice(config)
    state = (*memory.state(config, arch, parallel), *scoring.on_gpu)
    sent = memory.exported(config, arch, parallel, sync)
    keeping = _keeping(config, arch, sent)
    if engine.asleep is None:
        sent = _larger(sent, keeping)
    beside = engine.needs if engine.asleep is None else engine.asleep
    saved = memory.saved(config, arch, parallel)
    # An engine that wakes has its cache again before the update is over, and keeps it while a checkpoint is saved.
    stays = (*state, Need("trainer at rest", memory.at_rest, "CUDA context, communication; estimate"))
    left = gpu.memory - sum(need.bytes for need in (*stays, *_larger(sent, saved)))
    advice = engine.advice_beside(math.floor(100 * left / gpu.memory) / 100) or lower
    phases = (
        Phase("generating", (*engine.needs, *stays), gpu.memory, advice),
        Phase("training", (*beside, *state, *memory.step(config, arch, parallel)), gpu.memory, lower),
        Phase("syncing", _larger((*engine.needs, *stays, *sent), (*beside, *stays, *keeping)), gpu.memory, advice),
    )
    scored = _scoring(config, arch, parallel, scoring, (*beside, *state))
    return _with_largest(
        phases,
        Phase("scoring", scored, gpu.memory, lower),
        Phase("saving", (*engine.needs, *stays, *saved), gpu.memory, advice),
    )
