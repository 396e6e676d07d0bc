"""The trainers there are, each registered once: its settings, what it refuses, needs and holds, and how it is built.

Code outside this package takes the entry of a configuration (`trainer_of`) and calls what it holds. Only
`fp8core.config`, which is imported without torch, compares names. `build` imports what a trainer needs: Megatron is
optional, and Transformer Engine reads its environment when it is imported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel
from torch import Tensor

from fp8core.config.capability import Environment, Node
from fp8core.config.run import RunConfig
from fp8core.config.training import MegatronConfig, TrainingConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.plan.kernels import Product
from fp8core.plan.memory import Machine, longest_sequence
from fp8core.rl.objective import Objective
from fp8core.rollout.registry import Arithmetic, engine_entry
from fp8core.training.lora import check_adapters
from fp8core.training.megatron import requirements as megatron
from fp8core.training.memory import SHARDED, Parallel, TrainerMemory
from fp8core.training.packed import requirements as packed
from fp8core.training.ranks import ALONE, Ranks
from fp8core.training.trainer import LocalTrainer, SftTrainer

if TYPE_CHECKING:
    from fp8core.training.packed.trainer import PackedTrainer


@dataclass(frozen=True)
class TrainerEntry:
    """A trainer as the rest of the program sees it.

    Attributes:
        name: unique.
        settings: the section that it alone reads, or all of `training`.
        chosen: whether a configuration selects it.
        packages: distributions whose versions `check_machine` asks for (`Node.version`).
        build: a trainer that starts from weights by Hugging Face name, or the part of it that a process has.
        arithmetic: `exact`: the operations of the embedded engine. `kernels`: those of the packed kernels, which
            aligned models of engines run too; on a CPU their references. `own`: neither.
        scores_updates: whether an update gives the log-probs of its forward, and passes those of older policies
            (`trainer.ScoringTrainer`).
        device: where it computes here.
        build_sft: a trainer for the warm start; None: the reference decoder makes it, in FP32 (`run.start`).
        check_machine: raises UserError for what a machine has not installed, for GPUs that are missing, and for formats
            that it does not compute there.
        check_model: raises UserError for a model that it cannot hold, cut or multiply.
        environment: what must be set before it is built.
        grid: the GPUs that it trains on, on a machine that has some; None where it computes on the host.
        needs_gpu: whether a machine without a GPU cannot run the configuration.
        memory: what it holds on each GPU of a grid.
        advice: what to change where its memory does not fit.
        products: those of DeepGEMM on a GPU, whose kernels `fp8-grpo compile` builds.
        packs: the numbers of tokens of the packs that its own kernels may meet; none: it has none that are compiled.
    """

    name: str
    settings: type[BaseModel]
    chosen: Callable[[TrainingConfig], bool]
    build: Callable[[RunConfig, Architecture, Mapping[str, Tensor], Ranks], LocalTrainer]
    arithmetic: Arithmetic
    scores_updates: bool
    device: Callable[[TrainingConfig], str]
    build_sft: Callable[[RunConfig, Architecture, Mapping[str, Tensor]], SftTrainer] | None
    check_machine: Callable[[RunConfig, Node], None]
    check_model: Callable[[RunConfig, Architecture], None]
    environment: Callable[[RunConfig], Environment]
    grid: Callable[[RunConfig], Parallel | None]
    needs_gpu: Callable[[RunConfig], bool]
    memory: Callable[[TrainingConfig], TrainerMemory]
    advice: Callable[[RunConfig], str]
    products: Callable[[RunConfig, Architecture], Iterable[Product]] = lambda *_: ()
    packs: Callable[[RunConfig, Architecture], range] = lambda *_: range(0)
    packages: tuple[str, ...] = ()


_entries: dict[str, TrainerEntry] = {}


def register_trainer(entry: TrainerEntry) -> None:
    """Add a trainer; of several that a configuration selects, the last one is taken."""
    assert entry.name not in _entries, f"trainer {entry.name} is registered twice"
    _entries[entry.name] = entry


def trainers() -> tuple[TrainerEntry, ...]:
    """All entries, in the order of their registration."""
    return tuple(_entries.values())


def trainer_of(training: TrainingConfig) -> TrainerEntry:
    """The entry that a configuration selects."""
    return next(entry for entry in reversed(_entries.values()) if entry.chosen(training))


def trainer_grid(config: RunConfig, machine: Machine) -> Parallel | None:
    """The GPUs of a machine that the configuration trains on; None where training computes on the host."""
    return None if machine.gpu is None else trainer_of(config.training).grid(config)


def _on_gpu(training: TrainingConfig) -> bool:
    return training.device == "cuda"


def _build_exact(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks) -> LocalTrainer:
    from fp8core.training.exact import ExactTrainer

    return ExactTrainer(
        arch,
        masters,
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        config.training,
        Objective(config.loss, config.correction),
        ranks,
        config.seed,
    )


register_trainer(
    TrainerEntry(
        name="exact",
        settings=TrainingConfig,
        chosen=lambda training: training.trainer == "torch" and not packed.chosen(training),
        build=_build_exact,
        arithmetic="exact",
        scores_updates=True,
        device=lambda _: "cpu",
        build_sft=None,
        check_machine=lambda *_: None,
        check_model=lambda config, arch: check_adapters(arch, config.training.lora),
        environment=lambda _: Environment(),
        grid=lambda _: None,
        needs_gpu=lambda _: False,
        memory=lambda _: SHARDED,
        advice=lambda _: "train on more GPUs, or lower training.micro_batch",
    )
)


def _check_packed(config: RunConfig, node: Node) -> None:
    if config.cluster.ranks > 1 and not _on_gpu(config.training):
        raise UserError(
            f"cluster.ranks={config.cluster.ranks}: on a CPU training.packed trains in one process; set it to 1, or "
            "training.packed to false"
        )
    packed.check_contract_fits(config.precision, config.training.device, node.platform)


def _check_packed_model(config: RunConfig, arch: Architecture) -> None:
    packed.check_architecture_fits(arch, config.precision, config.training.device)
    check_adapters(arch, config.training.lora)


def _build_packed(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks = ALONE
) -> "PackedTrainer":
    from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

    formats = PackedFormats(
        training_formats(config.precision, arch.num_layers),
        rollout_formats(config.precision, arch.num_layers),
        longest=engine_entry(config).longest(config, arch),
        amax_only=config.calibration.statistic == "amax",
    )
    objective = Objective(config.loss, config.correction)
    device = torch.device(config.training.device)
    return PackedTrainer(arch, masters, formats, config.training, objective, device, ranks, config.seed)


register_trainer(
    TrainerEntry(
        name="packed",
        settings=TrainingConfig,
        chosen=packed.chosen,
        build=_build_packed,
        arithmetic="kernels",
        scores_updates=True,
        device=lambda training: training.device,
        build_sft=_build_packed,
        check_machine=_check_packed,
        check_model=_check_packed_model,
        environment=lambda config: Environment(packed.required_environment(config.training)),
        grid=lambda config: Parallel(config.cluster.ranks) if _on_gpu(config.training) else None,
        needs_gpu=lambda config: _on_gpu(config.training),
        memory=lambda training: packed.MEMORY if _on_gpu(training) else SHARDED,
        advice=packed.advice,
        products=packed.products,
        packs=packed.packs,
    )
)


def _build_megatron(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks) -> LocalTrainer:
    from fp8core.training.megatron.trainer import process_trainer

    return process_trainer(config, arch, masters, ranks)


def _megatron_grid(config: RunConfig) -> Parallel:
    spread = config.training.megatron
    return Parallel(config.cluster.ranks, spread.tensor_parallel, spread.pipeline_parallel, spread.expert_parallel)


register_trainer(
    TrainerEntry(
        name="megatron",
        packages=("megatron-core", "transformer-engine"),
        settings=MegatronConfig,
        chosen=lambda training: training.trainer == "megatron",
        build=_build_megatron,
        arithmetic="own",
        scores_updates=False,
        device=lambda _: "cuda" if torch.cuda.is_available() else "cpu",
        build_sft=None,
        check_machine=megatron.check_machine,
        check_model=lambda config, arch: megatron.check_grid(
            arch, config.training.megatron, config.precision, longest_sequence(config, arch)
        ),
        environment=lambda config: Environment(
            megatron.required_environment(config), megatron.suggested_environment(config)
        ),
        grid=_megatron_grid,
        needs_gpu=lambda config: config.cluster.ranks > 1,
        memory=lambda _: megatron.MEMORY,
        advice=megatron.advice,
    )
)
