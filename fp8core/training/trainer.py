"""What every trainer does: score rollouts, update the policy, hand out its weights, and survive on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.batch import RolloutBatch, TokenBatch


class NotFiniteError(ValueError):
    """A loss or gradient became NaN or infinite; the update was not applied."""


@dataclass(frozen=True)
class ScoredBatch:
    """Log-probs of a batch's completion tokens under the trainer's policy.

    Attributes:
        logprobs: FP32 [B, C], NaN on padding (C the longest completion).
        entropy: FP32 [B, C], likewise.
        statistics: of Q, K and V per layer over all valid tokens, and their saturation by the scales in force.
    """

    logprobs: Tensor
    entropy: Tensor
    statistics: KvStatistics


@dataclass(frozen=True)
class TrainReport:
    """One call of `Trainer.step`: means over its optimiser updates."""

    version: int
    digest: str
    loss: float
    grad_norm: float
    clip_fraction: float
    ratio_mean: float
    weight_mean: float
    reference_kl: float
    learning_rate: float
    tokens: int
    rows: int
    correction: dict[str, float]


class Trainer(Protocol):
    """A resident policy that learns."""

    @property
    def version(self) -> int:
        """Updates of the policy."""
        ...

    @property
    def arch(self) -> Architecture:
        """Shape of the policy."""
        ...

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The weights that learn, by Hugging Face name, at least as exact as the BF16 that is saved of them."""
        ...

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """Score completion tokens under the current policy."""
        ...

    def statistics(self, batch: TokenBatch) -> KvStatistics:
        """Statistics of Q, K and V under the current policy, without any scales."""
        ...

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None) -> TrainReport:
        """Learn from a batch: version v becomes v + 1."""
        ...

    def describe(self) -> dict[str, object]:
        """What really runs: formats by layer."""
        ...

    def export(self) -> Mapping[str, Tensor]:
        """Weights for the rollout engine, in its stored formats."""
        ...

    def digest(self) -> str:
        """Digest of the FP32 master weights."""
        ...

    def save(self, folder: Path) -> None:
        """Write optimiser state and version; weights are saved beside it by the caller."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def close(self) -> None:
        """Give devices and processes back; a second call does nothing."""
        ...
