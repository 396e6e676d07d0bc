"""Megatron trainers on as many GPUs as `training.megatron.gpus` says: in this process and a child for each further one.

A process is part of one grid at a time, which all of its trainers share (the policy and the frozen reference).
"""

import atexit
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.training.megatron.children import Children
from fp8core.training.megatron.trainer import MegatronTrainer
from fp8core.training.trainer import ScoredBatch, TrainReport


class _Grid:
    """The processes that trainers share, from the first of them to the last."""

    def __init__(self) -> None:
        self._users = 0
        self._folder: TemporaryDirectory[str] | None = None
        self._children: Children | None = None

    def enter(self, config: RunConfig) -> Children:
        """The other processes; started for the first trainer."""
        if self._children is None:
            self._folder = TemporaryDirectory(prefix="fp8-grpo-")
            self._children = Children(Path(self._folder.name), config.training.megatron.gpus, config.threads)
        self._users += 1
        return self._children

    def leave(self) -> None:
        """One trainer less."""
        self._users -= 1
        if self._users == 0:
            self.end()

    def end(self) -> None:
        """Give everything back; a second call does nothing."""
        if self._children is not None and self._folder is not None:
            self._children.end()
            self._folder.cleanup()
        self._children = self._folder = None


_grid = _Grid()
_keys = count()
atexit.register(_grid.end)


class GridTrainer:
    """A trainer in all processes of the grid; this one's part gives the answers."""

    def __init__(self, config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor]) -> None:
        """Close it before a trainer on another grid is started."""
        self.arch, self._key, self._children = arch, next(_keys), _grid.enter(config)
        self._own: MegatronTrainer | None = self._children.build(self._key, config, arch, masters)

    @property
    def version(self) -> int:
        """Updates of the policy."""
        return self._part().version

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """As `MegatronTrainer.masters`."""
        found: Mapping[str, Tensor] = self._call("whole_policy")
        return found

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """As `MegatronTrainer.logprobs`."""
        found: ScoredBatch = self._call("logprobs", batch, temperature, scales)
        return found

    def statistics(self, batch: TokenBatch) -> KvStatistics:
        """As `MegatronTrainer.statistics`."""
        found: KvStatistics = self._call("statistics", batch)
        return found

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None) -> TrainReport:
        """As `MegatronTrainer.step`."""
        found: TrainReport = self._call("step", batch, temperature, scales)
        return found

    def describe(self) -> dict[str, object]:
        """As `MegatronTrainer.describe`."""
        return self._part().describe()

    def export(self) -> Mapping[str, Tensor]:
        """As `MegatronTrainer.export`."""
        found: Mapping[str, Tensor] = self._call("export")
        return found

    def digest(self) -> str:
        """As `MegatronTrainer.digest`."""
        found: str = self._call("digest")
        return found

    def save(self, folder: Path) -> None:
        """As `MegatronTrainer.save`."""
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        """As `MegatronTrainer.load`."""
        self._call("load", folder)

    def close(self) -> None:
        """Forget the policy in every process; the last trainer ends the others. A second call does nothing."""
        if self._own is not None:
            self._own = None
            self._children.drop(self._key)
            _grid.leave()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._children.call(self._key, self._part(), method, arguments)

    def _part(self) -> MegatronTrainer:
        assert self._own is not None, "the trainer is closed"
        return self._own
