"""The memory of a training on each device that it uses, phase by phase."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fp8core.config.derived import sft_config
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.plan.frozen_trainers import FrozenTrainers
from fp8core.resources.memory import (
    BF16_BYTES,
    Device,
    DevicePlan,
    EngineMemory,
    Machine,
    Need,
    Phase,
    StoredBytes,
    count_parameters,
    stored_bytes,
)
from fp8core.rollout.registry import longest_sequence
from fp8core.rollout.shared_weights import RECEIVED_BYTES
from fp8core.training.memory import Parallel, host_needs, most_activations
from fp8core.training.registry import gpu_memory, trainer_of

# Token, log-prob and version.
_STREAMED = 12
# A GPU that only trains has this one.
_NO_ENGINE = EngineMemory(())
_MORE_GPUS = "train on more GPUs"
_MORE_MEMORY = "choose a machine with more memory"
_HOST = "what computes on the CPU lies there: choose a smaller model, or a machine with more memory"


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


def ahead_space(config: RunConfig, arch: Architecture) -> AheadSpace | None:
    """The space of a run that generates beside its updates; None where generation waits for them."""
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


@dataclass(frozen=True)
class Demand:
    """The memory that a training takes, whichever device holds it.

    Without `parallel` it trains on the host, with `engine_gpus` 0 engines generate there. `sync` is bytes of one
    update of the engine. `scoring` are trainers that score and never learn. Without `ahead` generation waits for the
    update.
    """

    config: RunConfig
    arch: Architecture
    parallel: Parallel | None
    sync: StoredBytes
    engine: EngineMemory
    engine_gpus: int
    scoring: FrozenTrainers
    ahead: AheadSpace | None


def device_plans(demand: Demand, machine: Machine) -> tuple[DevicePlan, ...]:
    """The devices of a machine that a training uses, with the phases of each.

    Raises UserError: there is no GPU to train on.
    """
    devices = _with_warm_start(_devices(demand, machine), demand, machine.gpu)
    return devices if demand.ahead is None else _with_policies(devices, machine.host, demand.ahead)


def _devices(demand: Demand, machine: Machine) -> tuple[DevicePlan, ...]:
    config, arch, parallel, engine = demand.config, demand.arch, demand.parallel, demand.engine
    gpu, plans, on_host = machine.gpu, list[DevicePlan](), dict[str, tuple[Need, ...]]()
    shared = demand.engine_gpus > 0 and config.cluster.placement == "colocated"
    ranks = math.ceil(config.cluster.ranks / machine.hosts)
    if gpu is None or not demand.engine_gpus:
        on_host["generating"] = engine.needs
    elif parallel is not None and shared:
        plans += _sharing(demand, gpu, parallel)
    elif parallel is not None:
        plans.append(DevicePlan(gpu, demand.engine_gpus, (_generating(engine), _receiving(demand, gpu))))
    else:
        plans.append(DevicePlan(gpu, demand.engine_gpus, (_generating(engine),)))
    if parallel is None:
        on_host["training"] = times(ranks, (*host_needs(config, arch), *demand.scoring.on_host))
    elif gpu is None:
        raise UserError("there is no GPU to train on")
    elif not shared:
        plans.append(DevicePlan(gpu, parallel.gpus, _trainer_phases(demand, gpu, parallel)))
    if parallel is not None and demand.scoring.on_host:
        on_host["scoring"] = times(ranks, demand.scoring.on_host)
    gathered = () if parallel is None else _gathered(config, arch)
    if gathered and (on_host or machine.host is not None):
        on_host["saving"] = gathered
    if on_host:
        needs = tuple(itertools.chain.from_iterable(on_host.values()))
        exact = parallel is None and trainer_of(config.training).arithmetic == "exact"
        more = most_activations(config, arch) if exact else None
        if more is not None:
            (more,) = times(ranks, (more,))
        several = max(config.cluster.engines, config.cluster.ranks) > 1
        limit = None if machine.host is None or (several and _scattered(config, machine)) else machine.host.memory
        advice = _MORE_MEMORY if on_host.keys() == {"saving"} else _HOST
        plans.append(DevicePlan(machine.host, 1, (Phase(" and ".join(on_host), needs, limit, advice, more),)))
    return tuple(plans)


def _with_warm_start(devices: tuple[DevicePlan, ...], demand: Demand, gpu: Device | None) -> tuple[DevicePlan, ...]:
    """The devices, with the phase of the one GPU that trains the warm start; nothing else lies there by then.

    On a host it takes less than the training after it: the reference decoder has no operands that are made ready.
    """
    config, arch = demand.config, demand.arch
    settings = sft_config(config)
    trainer = trainer_of(settings.training)
    if config.warm_start is None or gpu is None or trainer.build_sft is None or trainer.grid(settings) is None:
        return devices
    memory, alone = gpu_memory(settings.training), Parallel()
    needs = (*memory.state(settings, arch, alone), *memory.step(settings, arch, alone))

    def changed(one: RunConfig) -> tuple[Need, ...]:
        return (*memory.state(one, arch, alone), *memory.step(one, arch, alone))

    advice = _smaller(
        settings, _lower_warm_start(settings.training), changed, gpu.memory, "choose a GPU with more memory"
    )
    phase = Phase("warm start", needs, gpu.memory, advice)
    if devices[0].device != gpu or devices[0].count > 1:
        return (*devices, DevicePlan(gpu, 1, (phase,)))
    return replace(devices[0], phases=(*devices[0].phases, phase)), *devices[1:]


def _lower_warm_start(training: TrainingConfig) -> dict[str, dict[str, Any]]:
    """Changes of `training` that lower the memory of a warm start, which more GPUs do not."""
    lower: dict[str, dict[str, Any]] = {
        "set training.optimiser_state=bf16": {"optimiser_state": "bf16"},
        "set training.activation_checkpointing=true": {"activation_checkpointing": True},
        "lower training.tokens_per_pass": {"tokens_per_pass": 128},
    }
    present = training.model_dump()
    return {said: change for said, change in lower.items() if any(present[key] != change[key] for key in change)}


def _smaller(
    config: RunConfig,
    changes: Mapping[str, dict[str, Any]],
    needs: Callable[[RunConfig], tuple[Need, ...]],
    limit: int,
    otherwise: str,
) -> str:
    """Advice of the changes that help where needs exceed a limit: of any that suffices alone, else of all together."""

    def total(update: dict[str, Any]) -> int:
        changed = config.model_copy(update={"training": config.training.model_copy(update=update)})
        return sum(need.bytes for need in needs(changed))

    now, together = total({}), {key: value for change in changes.values() for key, value in change.items()}
    helping = [said for said, change in changes.items() if total(change) < now]
    alone = [said for said in helping if total(changes[said]) <= limit]
    if alone:
        return " or ".join([*alone, otherwise])
    return " and ".join(helping) + f", or {otherwise}" if total(together) <= limit else otherwise


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


def times(processes: int, needs: tuple[Need, ...]) -> tuple[Need, ...]:
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
    return (Need("policy to save", count_parameters(arch).total * BF16_BYTES, "BF16: rank 0 writes it"),)


def _with_largest(phases: tuple[Phase, ...], *others: Phase) -> tuple[Phase, ...]:
    """The phases of a GPU, and of others that are short or rare those that take more than all of these."""
    most = max(phase.total for phase in phases)
    return *phases, *(phase for phase in others if phase.total > most)


def _scoring(demand: Demand, parallel: Parallel, beside: tuple[Need, ...]) -> tuple[Need, ...]:
    """The needs of a GPU while others than the trainer score, whose weights are ready too; nothing is kept for a
    backward pass."""
    step = gpu_memory(demand.config.training).step(demand.config, demand.arch, parallel)
    kept = ("gradients", "activations")
    return *beside, *(need for need in step if need.item not in kept), *demand.scoring.in_passes


def _generating(engine: EngineMemory) -> Phase:
    return Phase("generating", engine.needs, engine.limit, engine.advice)


def _receiving(demand: Demand, gpu: Device) -> Phase:
    """The phase of GPUs that only generate in which a policy arrives, beside the one that the engine holds."""
    engine, arch = demand.engine, demand.arch
    held = max(RECEIVED_BYTES, arch.vocab_size * arch.hidden_size * BF16_BYTES)
    received = Need("weights received", min(demand.sync.total, held), "at a time, on the first GPU of an engine")
    share = math.floor(100 * (gpu.memory - received.bytes) / gpu.memory) / 100
    return Phase("syncing", (*engine.needs, received), gpu.memory, engine.advice_beside(share) or engine.advice)


def _keeping(demand: Demand, sent: tuple[Need, ...]) -> tuple[Need, ...]:
    """The weights to send, and beside them the policy to keep, which the trainer makes in its own formats.

    Where these are the engine's, it keeps what it sends.
    """
    ahead, contract, layers = demand.ahead, demand.config.precision, demand.arch.num_layers
    if ahead is None:
        return sent
    if training_formats(contract, layers).stored_names() == rollout_formats(contract, layers).stored_names():
        return sent
    # The weights come first; the buffers of the export are free by then.
    return *sent[:1], Need("policy to keep", ahead.policy, "in the trainer's formats, on its way to main memory")


def _larger(one: tuple[Need, ...], other: tuple[Need, ...]) -> tuple[Need, ...]:
    """Of needs that are not there at the same time, those that take more."""
    return max(one, other, key=lambda needs: sum(need.bytes for need in needs))


def _sharing(demand: Demand, gpu: Device, parallel: Parallel) -> list[DevicePlan]:
    """The GPUs that generate and train in turn, and those that do one of both where there are more of them."""
    engine_gpus = demand.engine_gpus
    both = min(engine_gpus, parallel.gpus)
    plans = [DevicePlan(gpu, both, _trainer_phases(demand, gpu, parallel, demand.engine))]
    if engine_gpus > both:
        plans.append(DevicePlan(gpu, engine_gpus - both, (_generating(demand.engine),)))
    if parallel.gpus > both:
        plans.append(DevicePlan(gpu, parallel.gpus - both, _trainer_phases(demand, gpu, parallel)))
    return plans


def _trainer_phases(
    demand: Demand, gpu: Device, parallel: Parallel, engine: EngineMemory = _NO_ENGINE
) -> tuple[Phase, ...]:
    """Phases of a GPU that trains, and may generate in turn: masters and optimiser states stay, an engine may sleep."""
    config, arch, scoring = demand.config, demand.arch, demand.scoring
    memory, changes = gpu_memory(config.training), trainer_of(config.training).smaller(config)
    state = (*memory.state(config, arch, parallel), *scoring.on_gpu)
    sent = memory.exported(config, arch, parallel, demand.sync)
    keeping = _keeping(demand, sent)
    if engine.asleep is None:
        sent = _larger(sent, keeping)
    beside = engine.needs if engine.asleep is None else engine.asleep
    saved = memory.saved(config, arch, parallel)
    # An engine that wakes has its cache again before the update is over, and keeps it while a checkpoint is saved.
    at_rest = Need("trainer at rest", memory.at_rest, "CUDA context, communication; estimate")
    stays = (*state, at_rest) if engine.needs else state
    left = gpu.memory - sum(need.bytes for need in (*stays, *_larger(sent, saved)))
    advice = engine.advice_beside(math.floor(100 * left / gpu.memory) / 100) or _MORE_GPUS
    generating = (Phase("generating", (*engine.needs, *stays), gpu.memory, advice),) if engine.needs else ()

    def trained(one: RunConfig) -> tuple[Need, ...]:
        return (*beside, *state, *memory.step(one, arch, parallel))

    def scored(one: RunConfig) -> tuple[Need, ...]:
        return _scoring(replace(demand, config=one), parallel, (*beside, *state))

    phases = (
        *generating,
        Phase("training", trained(config), gpu.memory, _smaller(config, changes, trained, gpu.memory, _MORE_GPUS)),
        Phase("syncing", _larger((*engine.needs, *stays, *sent), (*beside, *stays, *keeping)), gpu.memory, advice),
    )
    return _with_largest(
        phases,
        Phase("scoring", scored(config), gpu.memory, _smaller(config, changes, scored, gpu.memory, _MORE_GPUS)),
        Phase("saving", (*engine.needs, *stays, *saved), gpu.memory, advice),
    )
