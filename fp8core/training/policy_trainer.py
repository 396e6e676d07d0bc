"""What trainers share: updates from the GRPO objective and, in one process, scoring and imitation part by part.

A trainer brings how gradients are added up and applied. One that computes by itself (`PartwiseTrainer`) brings its
forward pass over parts of a batch that fit its memory, and its weights made ready.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.aggregation import Denominator
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.trainer import NotFiniteError, ScoredBatch, TrainReport

Weights = TypeVar("Weights")
"""What a forward pass multiplies with, made ready once for all parts of a batch."""


@dataclass(frozen=True)
class Scored:
    """Flat log-probs and entropies of the completion tokens of some rows, in row order, FP32 on the CPU."""

    logprobs: Tensor
    entropy: Tensor


class PolicyTrainer(ABC):
    """Counts the updates of one policy: `version` those that rollouts see."""

    def __init__(self, training: TrainingConfig, objective: Objective) -> None:
        self.version = 0
        self._config, self._objective = training, objective
        self._updates = 0

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None) -> TrainReport:
        """One update per minibatch, in row order; gradients are clipped by their global norm.

        Raises:
            NotFiniteError: the loss or the gradient norm is NaN or infinite; that update is not applied.
        """
        batch, correction = self._objective.corrected(batch)
        reports = [
            self._update(batch.rows(rows), temperature, scales)
            for rows in shares(len(batch.keep), self._config.minibatches)
        ]
        self.version += 1
        return TrainReport(
            version=self.version,
            digest=self.digest(),
            learning_rate=self._learning_rate(self._updates),
            tokens=int(batch.mask.sum()),
            rows=int(batch.mask.any(dim=1).sum()),
            correction=correction,
            **{key: sum(report[key] for report in reports) / len(reports) for key in reports[0]},
        )

    def close(self) -> None:  # noqa: B027 - most trainers hold nothing that would have to be given back
        """Nothing to give back."""

    @abstractmethod
    def digest(self) -> str:
        """Digest of the FP32 master weights."""

    @abstractmethod
    def _accumulate(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """Add up the gradients of a batch; returns its statistics.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """

    @abstractmethod
    def _step(self, learning_rate: float) -> float:
        """Clip the accumulated gradient and apply it if its norm is finite; returns the norm before clipping."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Leave nothing for the next update."""

    def _learning_rate(self, update: int) -> float:
        """Of an update, from 1."""
        return self._config.learning_rate * min(1.0, update / max(1, self._config.warmup_steps))

    def _update(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """One optimiser update; returns its statistics."""
        with self._guarded():
            totals = self._accumulate(batch, temperature, scales)
            totals["grad_norm"] = self._apply(self._learning_rate(self._updates + 1))
        return totals

    def _apply(self, learning_rate: float) -> float:
        norm = self._step(learning_rate)
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}")
        self._updates += 1
        return norm

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever happens inside, no gradient is left for the next update."""
        try:
            yield
        except GroupNotFinite as error:
            raise self._not_finite("an FP8 linear met NaN or infinity") from error
        finally:
            self._drop_gradients()

    def _not_finite(self, problem: str) -> NotFiniteError:
        where = f"update {self._updates} of policy {self.version}"
        return NotFiniteError(f"{where}: {problem}; the update was not applied")


class PartwiseTrainer(PolicyTrainer, Generic[Weights]):
    """Computes a batch part by part, in the order of the rows, in this process."""

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """Score completion tokens and collect the statistics of Q, K and V in the same pass."""
        weights, statistics = self._inference_weights(), self._no_statistics()
        shape = (len(batch), int(batch.completion.sum(-1).max()))
        logprobs, entropy = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for rows, part in self._slices(batch):
            scored = self._score(weights, part, temperature, scales, statistics)
            mask = left_aligned(part.completion, shape[1])
            logprobs[rows] = logprobs[rows].masked_scatter(mask, scored.logprobs)
            entropy[rows] = entropy[rows].masked_scatter(mask, scored.entropy)
        return ScoredBatch(logprobs, entropy, statistics)

    def imitate(self, batch: TokenBatch, learning_rate: float) -> float:
        """One update on the mean cross-entropy of the completion tokens, at temperature 1; returns it (nats a token).

        For warm starts, whose formats need no scales; `version` stays.

        Raises:
            NotFiniteError: as for `step`.
        """
        with self._guarded():
            tokens, total, weights = int(batch.completion.sum()), 0.0, self._training_weights()
            parts = list(self._slices(batch))
            for _, part in parts:
                logprobs = self._score(weights, part, 1.0, None).logprobs
                loss = -logprobs.double().sum() / tokens
                self._backward(loss, part is parts[-1][1])
                total += float(loss.detach())
            self._apply(learning_rate)
        return total

    @abstractmethod
    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        """Rows of a batch that are computed at once, in order, trimmed to their longest."""

    @abstractmethod
    def _inference_weights(self) -> Weights:
        """Weights for passes without gradients."""

    @abstractmethod
    def _training_weights(self) -> Weights:
        """Weights whose gradients reach the masters."""

    @abstractmethod
    def _score(
        self,
        weights: Weights,
        batch: TokenBatch,
        temperature: float,
        scales: Sequence[LayerScales] | None,
        statistics: KvStatistics | None = None,
    ) -> Scored:
        """The forward pass over a part of a batch; `statistics` observes Q, K and V."""

    @abstractmethod
    def _no_statistics(self) -> KvStatistics:
        """Statistics that nothing was observed for yet, where the passes run."""

    def _accumulate(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """Add up the gradients of all parts; returns the batch's statistics."""
        denominator = Denominator.of(batch.mask)
        totals: dict[str, float] = {}
        weights = self._training_weights()
        parts = list(self._slices(batch.sequences))
        for rows, part in parts:
            scored = self._score(weights, part, temperature, scales)
            mask = left_aligned(part.completion, batch.mask.shape[1])
            current = torch.zeros(mask.shape).masked_scatter(mask, scored.logprobs)
            terms = self._objective(current, batch.rows(rows), denominator)
            statistics = terms.statistics()
            if not math.isfinite(statistics["loss"]):
                raise self._not_finite(f"the loss is {statistics['loss']}")
            self._backward(terms.loss, part is parts[-1][1])
            for key, value in statistics.items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def _backward(self, loss: Tensor, last: bool) -> None:
        # Quantised weights are shared by all parts, so their graph is kept until the last.
        torch.autograd.backward(loss, retain_graph=not last)


def shares(rows: int, count: int) -> list[slice]:
    """`count` shares of the rows, in order, that differ by one row at most."""
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def left_aligned(completion: Tensor, columns: int) -> Tensor:
    """bool [B, columns]: as many leading True values in a row as it has completion tokens."""
    return torch.arange(columns) < completion.sum(-1, keepdim=True)
