"""Parts that the members of a run hold: an engine, or a rank's share of a trainer."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8core.cluster.transport import GroupRanks, Link
from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.safetensors_files import TensorSource
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import ShippedTensors
from fp8core.numerics.fingerprint import fingerprint
from fp8core.rollout.engine import (
    Completion,
    MemoryReader,
    PolicyScales,
    PromptGroup,
    Sampling,
    Session,
    StreamingEngine,
    SyncReport,
    draft_counts,
)
from fp8core.rollout.registry import engine_entry
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec, share_weights, specs_of
from fp8core.training.ranks import RankWeights
from fp8core.training.registry import trainer_of
from fp8core.training.trainer import ScoredBatch, ScoringTrainer, SftTrainer, TrainReport

# A call to a session ends after as long: further requests wait behind it.
_MOMENT_SECONDS = 0.02


class EnginePart:
    def __init__(self, config: RunConfig, arch: Architecture) -> None:
        self._engine = engine_entry(config).build(config, arch)
        self._session: Session | None = None

    def reads_memory(self) -> bool:
        return isinstance(self._engine, MemoryReader)

    def expect(self, layouts: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> None:
        if isinstance(self._engine, MemoryReader):
            self._engine.expect(layouts, scales, version)

    def read(self, weights: SharedWeights, scales: PolicyScales, version: int) -> SyncReport:
        assert isinstance(self._engine, MemoryReader), "routes lead to memory for such engines alone"
        self._engine.write(weights)
        return self._engine.finish(scales, version)

    def receive(self, link: Link, layouts: Mapping[str, TensorSpec], scales: PolicyScales, version: int) -> SyncReport:
        if not isinstance(self._engine, MemoryReader):
            whole = {name: tensor for part in link.receive(layouts) for name, tensor in part.items()}
            return self._engine.update(whole, scales, version)
        for part in link.receive(layouts):
            with share_weights(part) as handles:
                self._engine.write(handles)
            # Its memory is the next one's.
            part.clear()
        # The engine has the memory of what was received, where that was on its GPU.
        torch.cuda.empty_cache()
        return self._engine.finish(scales, version)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._engine, method)(*arguments)

    def draft_counts(self) -> Counter[str]:
        return draft_counts(self._engine)

    def open_session(self, sampling: Sampling) -> None:
        if not isinstance(self._engine, StreamingEngine):
            raise UserError("rollout.engine: it has no open_session, which takes requests while others are in flight")
        self._session = self._engine.open_session(sampling)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        assert self._session is not None, "open_session() comes before add()"
        self._session.add(groups)

    def step(self) -> list[Completion]:
        assert self._session is not None, "open_session() comes before step()"
        completions = list[Completion]()
        until = time.monotonic() + _MOMENT_SECONDS
        while self._session.busy and not completions and time.monotonic() < until:
            completions = self._session.step()
        return completions

    def close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def close(self) -> None:
        self._engine.close()


class PolicyExport(NamedTuple):
    digest: str
    layouts: dict[str, TensorSpec]
    on_gpu: bool


def build_sft(config: RunConfig, arch: Architecture, initial: TensorSource) -> SftTrainer:
    build = trainer_of(config.training).build_sft
    assert build is not None, "this process is asked for trainers of warm starts alone"
    return build(config, arch, initial)


class FingerprintedTensors(Mapping[str, Tensor]):
    """Notes what was read: `digest_of` has from `prints` the `masters_digest`, once all of it was read."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self.prints: dict[str, tuple[str, tuple[int, ...], str]] = {}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name not in self.prints:
            self.prints[name] = "float32", tuple(tensor.shape), fingerprint(tensor.to(self._device).float())
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class TrainerPart:
    def __init__(self, ranks: GroupRanks, config: RunConfig, arch: Architecture, masters: TensorSource) -> None:
        entry = trainer_of(config.training)
        self._ranks = ranks
        read = FingerprintedTensors(masters, torch.device(entry.device(config.training)))
        self._trainer = entry.build(config, arch, read, ranks)
        self._read = read.prints
        self._export: dict[str, Tensor] = {}
        self._shares = ExitStack()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the trainer: its value where this is rank 0, None elsewhere."""
        result = getattr(self._trainer, method)(*arguments)
        return result if self._ranks.rank == 0 else None

    def step(self, *arguments: Any) -> TrainReport:
        return self._trainer.step(*arguments)

    def scored_step(self, *arguments: Any) -> tuple[TrainReport, ScoredBatch | None]:
        assert isinstance(self._trainer, ScoringTrainer), "the configuration was checked"
        report, scores = self._trainer.scored_step(*arguments)
        return report, scores if self._ranks.rank == 0 else None

    def exported_policy(self) -> RankWeights:
        assert isinstance(self._trainer, ScoringTrainer), "the configuration was checked"
        weights: RankWeights = self._trainer.keep(ShippedTensors(self._export))
        return weights

    def logprobs_of(self, weights: RankWeights, *arguments: Any) -> ScoredBatch | None:
        assert isinstance(self._trainer, ScoringTrainer), "the configuration was checked"
        scores = self._trainer.logprobs_of(weights, *arguments)
        return scores if self._ranks.rank == 0 else None

    def mix(self, policy: "TrainerPart", share: float) -> None:
        self._trainer.mix(policy._trainer, share)

    def version(self) -> int:
        return self._trainer.version

    def read(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        return self._read

    def digest(self) -> str:
        return self._trainer.digest()

    def save_policy(self, folder: Path, tokenizer: Tokenizer) -> None:
        masters = self._trainer.masters
        if self._ranks.rank == 0:
            save_checkpoint(folder, self._trainer.arch, masters, tokenizer)

    def export(self) -> PolicyExport | None:
        """Make the weights for the engines and keep them until `release`; None where other ranks have them."""
        weights = self._trainer.export()
        self._export = tensors = {name: weights[name] for name in weights.keys()}  # noqa: SIM118
        if not tensors:
            return None
        return PolicyExport(weights.digest(), specs_of(tensors), all(tensor.is_cuda for tensor in tensors.values()))

    def share_weights(self) -> SharedWeights:
        # Engines that wake on this GPU need the memory that torch only keeps.
        torch.cuda.empty_cache()
        return self._shares.enter_context(share_weights(self._export))

    def send(self, link: Link) -> None:
        torch.cuda.empty_cache()
        link.send(self._export)

    def release(self) -> None:
        self._export = {}
        self._shares.close()
        torch.cuda.empty_cache()

    def close(self) -> None:
        self.release()
        self._trainer.close()
