"""Small policies, with the trainer and the rollout engine that hold them, and the order in which files are stored."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_trainer import packed
from torch import Tensor

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.kv_scales import LayerScales, scales_from_statistics
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask, pad
from fp8core.rl.objective import Objective
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, Sampling, sample_seed
from fp8core.training.exact import ExactTrainer
from fp8core.training.packed.trainer import PackedTrainer

# No dimension is a multiple of 128, and heads * head_dim is not hidden_size.
_SHAPE: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 40,
    "hidden_size": 80,
    "intermediate_size": 160,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_positions": 64,
    "rope_scaling": None,
    "tie_embeddings": False,
}


def _architecture(**changes: Any) -> Architecture:
    return Architecture(**{**_SHAPE, **changes})


def _masters(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = initial_weights(arch, seed)
    norms = {name: w + 0.2 * torch.randn(w.shape, generator=generator) for name, w in weights.items() if w.dim() == 1}
    return weights | norms


@dataclass(frozen=True)
class Pair:
    """A trainer, and an engine that was given its policy and first scales."""

    arch: Architecture
    trainer: ExactTrainer
    engine: EmbeddedEngine
    scales: PolicyScales

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[Completion]:
        """All completions, by group and sample."""
        found = [completion for finished in self.engine.generate(groups, sampling) for completion in finished]
        return sorted(found, key=lambda completion: (completion.group, completion.sample))

    def log_ratios(self, groups: Sequence[PromptGroup], found: Sequence[Completion], temperature: float) -> Tensor:
        """FP32 log-prob under the trainer minus that under the engine, of every token the engine wrote."""
        prompts = {group.group: group.prompt for group in groups}
        tokens = [completion.tokens for completion in found]
        sequences = TokenBatch.of([prompts[completion.group] for completion in found], tokens)
        scored = self.trainer.logprobs(sequences, temperature, self.scales.layers)
        rollout = pad([completion.logprobs for completion in found], torch.float32, 0.0)
        return (scored.logprobs - rollout)[length_mask(tokens)]


def _trainer(
    contract: PrecisionContract,
    arch: Architecture,
    training: TrainingConfig | None = None,
    objective: Objective | None = None,
    masters: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> ExactTrainer:
    return ExactTrainer(
        arch,
        _masters(arch, seed) if masters is None else masters,
        training_formats(contract, arch.num_layers),
        rollout_formats(contract, arch.num_layers),
        training or TrainingConfig(),
        objective or Objective(LossConfig(), CorrectionConfig()),
    )


def _first_scales(trainer: ExactTrainer, contract: PrecisionContract) -> PolicyScales:
    prompts = _prompts(6, trainer.arch.vocab_size, seed=100)
    amax = trainer.statistics(TokenBatch.of(prompts, [[2]] * len(prompts))).amax()
    return PolicyScales(trainer.version, tuple(scales_from_statistics(amax, 2.0, contract.recipe.cache)))


def _pair(contract: PrecisionContract, arch: Architecture, max_batch: int = 64, seed: int = 0) -> Pair:
    trainer = _trainer(contract, arch, seed=seed)
    engine = EmbeddedEngine(arch, rollout_formats(contract, arch.num_layers), max_batch)
    scales = _first_scales(trainer, contract)
    engine.update(trainer.export(), scales, trainer.version)
    return Pair(arch, trainer, engine, scales)


def _prompts(count: int, vocab_size: int, seed: int = 0, longest: int = 13) -> list[list[int]]:
    """Ragged prompts; the first two have the smallest and the largest length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    lengths[:2] = [1, longest][:count]
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _groups(prompts: Sequence[Sequence[int]], size: int) -> list[PromptGroup]:
    return [
        PromptGroup(
            group=i,
            prompt_id=f"prompt-{i}",
            prompt=tuple(prompt),
            samples=tuple(range(size)),
            seeds=tuple(sample_seed(0, 0, i, sample) for sample in range(size)),
        )
        for i, prompt in enumerate(prompts)
    ]


def _rollout_batch(trainer: ExactTrainer, scales: PolicyScales, rows: int = 6, seed: int = 0) -> RolloutBatch:
    """Random completions with the trainer's log-probs, a noisy rollout policy and random advantages."""
    vocabulary = trainer.arch.vocab_size
    completions = _prompts(rows, vocabulary, seed + 1, longest=7)
    sequences = TokenBatch.of(_prompts(rows, vocabulary, seed + 2), completions)
    mask = length_mask(completions)
    old = trainer.logprobs(sequences, 1.0, scales.layers).logprobs.nan_to_num()
    generator = torch.Generator().manual_seed(seed)
    return RolloutBatch(
        sequences=sequences,
        policy_mask=mask,
        rollout_logprobs=torch.where(mask, old + 0.1 * torch.randn(old.shape, generator=generator), 0.0),
        old_logprobs=old,
        reference_logprobs=None,
        advantages=torch.randn(rows, generator=generator),
        row_mask=torch.ones(rows, dtype=torch.bool),
    )


@pytest.fixture(scope="session")
def architecture() -> Callable[..., Architecture]:
    return _architecture


@pytest.fixture(scope="session")
def masters_of() -> Callable[..., dict[str, Tensor]]:
    """(architecture, seed) to random FP32 weights whose norms are not all 1."""
    return _masters


@pytest.fixture(scope="session")
def trainer_of() -> Callable[..., ExactTrainer]:
    """(contract, architecture) to a trainer; equal arguments give equal trainers."""
    return _trainer


@pytest.fixture(scope="session")
def packed_of() -> Callable[..., PackedTrainer]:
    """(contract, architecture, training, objective, masters) to a packed trainer, as `trainer_of`."""

    def trainer(contract: PrecisionContract, arch: Architecture, *given: Any, masters: Any = None) -> PackedTrainer:
        return packed(_masters(arch) if masters is None else masters, contract, arch, *given)

    return trainer


@pytest.fixture(scope="session")
def pair_of() -> Callable[..., Pair]:
    """(contract, architecture, max_batch) to a trainer and an engine of one policy."""
    return _pair


@pytest.fixture(scope="session")
def first_scales() -> Callable[[ExactTrainer, PrecisionContract], PolicyScales]:
    """Scales of a trainer's policy, calibrated on a few prompts."""
    return _first_scales


@pytest.fixture(scope="session")
def ragged_prompts() -> Callable[..., list[list[int]]]:
    """(count, vocabulary) to prompts of 1 to 13 tokens, none of them token 0 or 1."""
    return _prompts


@pytest.fixture(scope="session")
def groups_of() -> Callable[[Sequence[Sequence[int]], int], list[PromptGroup]]:
    return _groups


@pytest.fixture(scope="session")
def rollout_batch() -> Callable[..., RolloutBatch]:
    """(trainer, scales, rows, seed) to something to learn from."""
    return _rollout_batch


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """("sync", path) of each fsync and ("name", path) of each rename to it, in the order in which they came."""
    events: list[tuple[str, Path]] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def named(how: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(path: Path, target: Path) -> Path:
            events.append(("name", target))
            return how(path, target)

        return moved

    monkeypatch.setattr(os, "fsync", synced)
    for how in ("rename", "replace"):
        monkeypatch.setattr(Path, how, named(getattr(Path, how)))
    return events


@pytest.fixture(scope="session")
def batch_of() -> Callable[[PrecisionContract, Architecture], tuple[RolloutBatch, Sequence[LayerScales]]]:
    """(contract, architecture) to a batch of 12 rows, and the scales of its policy."""

    def batch(contract: PrecisionContract, arch: Architecture) -> tuple[RolloutBatch, Sequence[LayerScales]]:
        trainer = _trainer(contract, arch)
        scales = _first_scales(trainer, contract)
        return _rollout_batch(trainer, scales, rows=12), scales.layers

    return batch
