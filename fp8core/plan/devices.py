"""Memory there is: of this machine, and of GPUs that a plan is made for without having one."""

import os
from dataclasses import dataclass

import torch

from fp8core.errors import UserError

_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """Where tensors lie; `memory` in bytes."""

    name: str
    memory: int


# As nvidia-smi prints their memory.
GPUS = {
    "h100": Device("NVIDIA H100 80 GB", 81_559 * _MIB),
    "h200": Device("NVIDIA H200", 143_771 * _MIB),
    "b200": Device("NVIDIA B200", 183_359 * _MIB),
}


@dataclass(frozen=True)
class Machine:
    """What a run is to fit.

    Attributes:
        gpu: each of its GPUs; None for a machine without.
        host: its own memory; None where that is not known, and nothing is refused by it.
    """

    gpu: Device | None
    host: Device | None


def named_gpu(name: str) -> Device:
    """A GPU of the table; raises UserError with the names there are."""
    if name not in GPUS:
        raise UserError(f"--gpu {name}: unknown; known: {', '.join(GPUS)}")
    return GPUS[name]


def this_machine() -> Machine:
    """The first GPU here, if any, and all memory of the host."""
    return Machine(_this_gpu(), Device("host", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def _this_gpu() -> Device | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Device(found.name, found.total_memory)
