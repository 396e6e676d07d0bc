"""The parts that members hold: an engine, or a rank's part of a trainer, with an end of the path of weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8core.cluster.transport import GroupRanks, Layout, Link
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import Shipped
from fp8core.rollout.engine import Completion, PolicyScales, Probe, PromptGroup, Sampling, SyncReport
from fp8core.rollout.registry import engine_entry
from fp8core.training.registry import trainer_of
from fp8core.training.trainer import Trainer, TrainReport


class PackedTensor(NamedTuple):
    """A tensor that a member starts from: Ray shares the bytes between the processes of a node."""

    layout: Layout
    bytes: "np.ndarray[Any, np.dtype[np.uint8]]"


def pack(tensors: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Tensors as bytes."""
    found = {}
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        found[name] = PackedTensor(Layout.of(held), held.view(-1).view(torch.uint8).numpy())
    return found


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """The tensors, in memory of this process."""
    return {
        name: torch.from_numpy(each.bytes.copy()).view(getattr(torch, each.layout.dtype)).view(each.layout.shape)
        for name, each in packed.items()
    }


class EnginePart:
    """An engine that takes its weights from rank 0."""

    def __init__(self, link: Link, config: RunConfig, arch: Architecture) -> None:
        self._link, self._engine = link, engine_entry(config).build(config, arch)

    def update(self, layouts: Mapping[str, Layout], scales: PolicyScales, version: int) -> SyncReport:
        """As `RolloutEngine.update`, with the tensors of these layouts that rank 0 sends meanwhile."""
        return self._engine.update(self._link.receive(layouts), scales, version)

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        return self._engine.generate(groups, sampling)

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        return self._engine.score(probes, temperature)

    def fingerprint(self) -> str:
        return self._engine.fingerprint()

    def describe(self) -> dict[str, object]:
        return self._engine.describe()

    def sleep(self) -> None:
        self._engine.sleep()

    def close(self) -> None:
        self._engine.close()


class Exported(NamedTuple):
    """Weights that wait in rank 0 for the engines."""

    digest: str
    layouts: dict[str, Layout]


class TrainerPart:
    """A trainer's part on one rank; what it exports waits here until it is sent."""

    def __init__(
        self, ranks: GroupRanks, config: RunConfig, arch: Architecture, masters: Mapping[str, PackedTensor]
    ) -> None:
        self._ranks = ranks
        self._trainer: Trainer = trainer_of(config.training).build(config, arch, unpack(masters), ranks)
        self._shipped: Shipped | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the trainer: its value where this is rank 0, None elsewhere."""
        found = getattr(self._trainer, method)(*arguments)
        return found if self._ranks.rank == 0 else None

    def step(self, *arguments: Any) -> TrainReport:
        """As `Trainer.step`, whose report is the same in all ranks."""
        return self._trainer.step(*arguments)

    def version(self) -> int:
        return self._trainer.version

    def masters(self) -> dict[str, PackedTensor] | None:
        """The weights, which all ranks put together for rank 0."""
        found = self._trainer.masters
        return pack(found) if self._ranks.rank == 0 else None

    def export(self) -> Exported | None:
        """Make the weights for the engines; rank 0 keeps them until `send`."""
        self._shipped = self._trainer.export()
        if self._ranks.rank == 0:
            layouts = {name: Layout.of(self._shipped[name]) for name in self._shipped.keys()}  # noqa: SIM118
            return Exported(self._shipped.digest(), layouts)
        self._shipped = None
        # Memory that torch keeps here for later would be missing to an engine that now wakes on this GPU.
        torch.cuda.empty_cache()
        return None

    def send(self, link: Link) -> None:
        """Send the exported weights to all engines."""
        assert self._shipped is not None, "export() comes before send()"
        link.send({name: self._shipped[name] for name in self._shipped.keys()})  # noqa: SIM118
        self._shipped = None
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._trainer.close()
