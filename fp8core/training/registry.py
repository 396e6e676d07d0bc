"""The trainers: each is registered once, with all that code outside its folder may ask of it.

Its `build` imports the trainer: Megatron is optional, and Transformer Engine reads its environment when it is
imported."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fp8core.rollout.registry import Arithmetic, engine_entry, no_environment, nothing
from fp8core.user_code import import_attribute

if TYPE_CHECKING:
    from torch import Tensor

    from fp8core.config.capability import Environment, Node
    from fp8core.config.run import RunConfig
    from fp8core.config.training import TrainingConfig
    from fp8core.models.architecture import Architecture
    from fp8core.resources.kernels import Product
    from fp8core.resources.memory import Machine
    from fp8core.training.memory import Parallel, TrainerMemory
    from fp8core.training.ranks import Ranks
    from fp8core.training.trainer import LocalTrainer, SftTrainer

TRAINERS: Final[Mapping[str, str]] = {
    "exact": "fp8core.training.exact:TRAINER",
    "packed": "fp8core.training.packed.entry:TRAINER",
    "megatron": "fp8core.training.megatron.entry:TRAINER",
}
"""Name -> import path of its entry; of several that a configuration selects, the last one is taken."""


@dataclass(frozen=True, kw_only=True)
class TrainerEntry:
    """A trainer as the rest of the program sees it.

    Attributes:
        packages: distributions whose versions `check` asks for (`Node.version`).
        build: a trainer that starts from weights by Hugging Face name, or the part of it that a process has.
        arithmetic: `exact`: the operations of the embedded engine. `kernels`: those of the packed kernels, which
            aligned models of engines run too; on a CPU their references. `own`: neither.
        scores_updates: whether it is a `trainer.ScoringTrainer`.
        truncates: whether it scores with `TokenBatch.truncation`.
        build_sft: a trainer for the warm start; None: the reference decoder makes it, in FP32 (`run.start`).
        check, check_model: why a machine, or a model, does not fit, a message each.
        requirements: what of it is installed, in words; UserError where something is missing.
        environment: variables that are set before it is built.
        grid: the GPUs that it trains on, on a machine that has some; None where it computes on the host.
        memory: what it holds on each GPU of its grid; None where it computes on the host (`memory.host_needs`).
        products: those of DeepGEMM on a GPU, whose kernels `fp8-grpo compile` builds.
        packs: the numbers of tokens of the packs that its own kernels may meet; none: it has none that are compiled.
    """

    name: str
    is_chosen: Callable[["TrainingConfig"], bool]
    build: Callable[["RunConfig", "Architecture", "Mapping[str, Tensor]", "Ranks"], "LocalTrainer"]
    arithmetic: Arithmetic
    scores_updates: bool
    device: Callable[["TrainingConfig"], str]
    requirements: Callable[[], str]
    build_sft: Callable[["RunConfig", "Architecture", "Mapping[str, Tensor]"], "SftTrainer"] | None = None
    check: Callable[["RunConfig", "Node"], Iterable[str]] = nothing
    check_model: Callable[["RunConfig", "Architecture"], Iterable[str]] = nothing
    environment: Callable[["RunConfig"], "Environment"] = no_environment
    grid: Callable[["RunConfig"], "Parallel | None"] = lambda _: None
    needs_gpu: Callable[["RunConfig"], bool] = lambda _: False
    memory: Callable[["TrainingConfig"], "TrainerMemory | None"] = lambda _: None
    products: Callable[["RunConfig", "Architecture"], "Iterable[Product]"] = nothing
    packs: Callable[["RunConfig", "Architecture"], range] = lambda *_: range(0)
    packages: tuple[str, ...] = ()
    truncates: bool = True


def find_trainer(name: str) -> TrainerEntry:
    entry = import_attribute(TRAINERS[name], f"trainer {name}")
    assert isinstance(entry, TrainerEntry), TRAINERS[name]
    return entry


def trainers() -> tuple[TrainerEntry, ...]:
    return tuple(map(find_trainer, TRAINERS))


def trainer_of(training: "TrainingConfig") -> TrainerEntry:
    return next(entry for entry in reversed(trainers()) if entry.is_chosen(training))


def packages_of(config: "RunConfig") -> tuple[str, ...]:
    return (*engine_entry(config).packages, *trainer_of(config.training).packages)


def trainer_grid(config: "RunConfig", machine: "Machine") -> "Parallel | None":
    return None if machine.gpu is None else trainer_of(config.training).grid(config)


def gpu_memory(training: "TrainingConfig") -> "TrainerMemory":
    memory = trainer_of(training).memory(training)
    assert memory is not None, "a trainer without a grid computes on the host"
    return memory
