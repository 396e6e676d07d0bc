"""The trainers that score and never learn: the reference of `loss.reference_kl`, the teacher of `loss.distillation`.

Each is built as a whole trainer at its first step, and keeps from then on what a pass has made ready.
"""

from dataclasses import dataclass

from fp8core.config.beside import teacher_settings
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.hub import model_shape
from fp8core.plan.memory import Need
from fp8core.training.memory import Parallel, host_scorer
from fp8core.training.registry import trainer_of

_REFERENCE, _TEACHER = "tasks.reference:reference", "tasks.teacher:teacher"


@dataclass(frozen=True)
class Scorers:
    """The memory of all of them, which stays between steps.

    Attributes:
        on_gpu: on each GPU that trains.
        on_host: of one process that trains on a CPU.
    """

    on_gpu: tuple[Need, ...]
    on_host: tuple[Need, ...]


def scorers(config: RunConfig, arch: Architecture, parallel: Parallel | None) -> Scorers:
    """Those of the pipeline's steps.

    Args:
        config: the training.
        arch: shape of its model.
        parallel: GPUs that train; None trains on the host.
    """
    steps, on_gpu, on_host = {step.uses for step in config.pipeline.steps}, list[Need](), list[Need]()
    if _REFERENCE in steps:
        place = on_host if parallel is None else on_gpu
        place.append(Need("reference", _held(config, arch, parallel), _held_note(parallel)))
    if _TEACHER in steps and config.loss.distillation.teacher is not None:
        scoring = teacher_settings(config)
        shape, note = _teacher_shape(config, arch)
        grid = None if parallel is None or trainer_of(scoring.training).grid(scoring) is None else parallel.gpus
        spread = None if grid is None else Parallel(grid)
        place = on_host if spread is None else on_gpu
        place.append(Need("teacher", _held(scoring, shape, spread), _held_note(spread) + note))
    return Scorers(tuple(on_gpu), tuple(on_host))


def _held(config: RunConfig, arch: Architecture, parallel: Parallel | None) -> int:
    """Bytes on a GPU, or of a process on a CPU."""
    if parallel is None:
        return host_scorer(config, arch)
    memory = trainer_of(config.training).memory(config.training)
    needs = (*memory.state(config, arch, parallel), *memory.made_ready(config, arch, parallel))
    return sum(need.bytes for need in needs)


def _held_note(parallel: Parallel | None) -> str:
    return "masters, and weights made ready" if parallel is None else "masters, moments, and weights made ready"


def _teacher_shape(config: RunConfig, arch: Architecture) -> tuple[Architecture, str]:
    """Its shape, or the policy's where that cannot be read: a run refuses such a teacher by itself."""
    teacher = config.loss.distillation
    named = {"model": teacher.teacher, "revision": teacher.revision, "architecture": None}
    try:
        return model_shape(config.model_copy(update=named)), ""
    except UserError:
        return arch, "; as large as the policy, because its config.json cannot be read"
