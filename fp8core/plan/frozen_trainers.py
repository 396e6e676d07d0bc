"""The trainers that score and never learn: the reference of `loss.reference_kl`, the teacher of `loss.distillation`.

Each is built as a whole trainer at its first step. On a GPU what its passes make ready is there while it scores; on a
CPU it stays.
"""

from dataclasses import dataclass, replace

from fp8core.config.derived import teacher_config
from fp8core.config.run import RunConfig
from fp8core.config.shipped import REFERENCE, TEACHER
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.hub import model_shape
from fp8core.resources.memory import Need
from fp8core.training.memory import Parallel, host_scorer
from fp8core.training.registry import gpu_memory, trainer_of


@dataclass(frozen=True)
class FrozenTrainers:
    """The memory of all of them, which stays between steps.

    Attributes:
        on_gpu: on each GPU that trains.
        in_passes: beside it, while they score, which two may do at the same time.
        on_host: of one process that trains on a CPU.
    """

    on_gpu: tuple[Need, ...]
    in_passes: tuple[Need, ...]
    on_host: tuple[Need, ...]


def frozen_trainers(config: RunConfig, arch: Architecture, parallel: Parallel | None) -> FrozenTrainers:
    """The memory of those that the pipeline's steps need; without `parallel` they compute on the host."""
    steps, found = {step.uses for step in config.pipeline.steps}, FrozenTrainers((), (), ())
    if REFERENCE in steps:
        found = _with(found, "reference", config, arch, parallel)
    if TEACHER in steps and config.loss.distillation.teacher is not None:
        scoring = teacher_config(config)
        shape, note = _teacher_shape(config, arch)
        grid = None if parallel is None or trainer_of(scoring.training).grid(scoring) is None else parallel.gpus
        found = _with(found, "teacher", scoring, shape, None if grid is None else Parallel(grid), note)
    return found


def _with(
    others: FrozenTrainers, name: str, config: RunConfig, arch: Architecture, parallel: Parallel | None, note: str = ""
) -> FrozenTrainers:
    """One more, by the configuration of its trainer; without `parallel` it computes on the host."""
    if parallel is None:
        need = Need(name, host_scorer(config, arch), f"masters, and weights made ready{note}")
        return replace(others, on_host=(*others.on_host, need))
    memory = gpu_memory(config.training)
    held, ready = memory.held_to_score(config, arch, parallel), memory.made_ready(config, arch, parallel)
    items = " and ".join(need.item for need in held)
    stays = Need(name, sum(need.bytes for need in held), f"{items}{note}")
    passing = Need(f"weights of the {name}", sum(need.bytes for need in ready), "as they are multiplied")
    return replace(others, on_gpu=(*others.on_gpu, stays), in_passes=(*others.in_passes, passing))


def _teacher_shape(config: RunConfig, arch: Architecture) -> tuple[Architecture, str]:
    """Its shape, or the policy's where that cannot be read: a run refuses such a teacher by itself."""
    teacher = config.loss.distillation
    named = {"model": teacher.teacher, "revision": teacher.revision, "architecture": None}
    try:
        return model_shape(config.model_copy(update=named)), ""
    except UserError:
        return arch, "; as large as the policy, because its config.json cannot be read"
