"""Weights of a test as ranks take them, and as they have them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.cluster.workers import RankedTrainer
from fp8core.models.safetensors_files import FileTensors, read_header


def stored(path: Path, masters: Mapping[str, Tensor]) -> FileTensors:
    save_file({name: tensor.detach().contiguous() for name, tensor in masters.items()}, path)
    places = read_header(path)
    return FileTensors({name: places[name] for name in masters})


def write_masters(part: Any, path: Path) -> None:
    """What a rank's part has of the masters, from rank 0."""
    masters = part._trainer.masters
    if part._ranks.rank == 0:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in masters.items()}, path)


def masters_of(trainer: RankedTrainer, path: Path) -> dict[str, Tensor]:
    """The masters of all ranks, by way of a file."""
    workers, key = trainer._workers, trainer._key
    workers.gather([rank.send("build", "written", write_masters, (key,), path) for rank in workers.ranks])
    return load_file(path)
