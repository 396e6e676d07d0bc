"""The interface of trainers, and what they share: updates from the GRPO objective, scoring and supervised steps.

A trainer brings how gradients are added up and applied (`PolicyTrainer`). One that computes in this process
(`MicroBatchTrainer`) brings its forward pass over parts of a batch that fit its memory, and its weights made ready.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import Shipped
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective, merged
from fp8core.training.ranks import KeptWeights, Ranks, shared_out

AVERAGED = (
    "loss",
    "grad_norm",
    "clip_fraction",
    "ratio_mean",
    "weight_mean",
    "zero_weight_fraction",
    "reference_kl",
    "teacher_kl",
)
"""Fields of a report that are means over its updates."""
REPORTED = (
    "first_ratio_bias",
    "first_ratio_deviation",
    "first_clip_fraction",
    "mask_differing",
    *AVERAGED,
    "learning_rate",
    "tokens",
    "rows",
)
"""Fields of a report that are metrics of a step under `train/`."""


class UpdateError(ValueError):
    """An update was not applied; the message has the reason."""


class NotFiniteError(UpdateError):
    """A loss or gradient became NaN or infinite."""


class LogprobError(UpdateError):
    """A forward gave a token another log-prob than the rollout, or left out one that the rollout has drawn."""


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
    """One call of `Trainer.step`: means over its optimiser updates.

    Fields that begin with `first` are of the first update alone, made by the policy whose old log-probs the batch
    holds. The importance ratio of every token is 1 there, but for rounding. `mask_differing` counts tokens that are in
    the loss and not written by the policy, and the other way round. `first_reward_slope` is
    `rl.objective.reward_slope`, None where rewards are not known.
    """

    version: int
    digest: str
    loss: float
    grad_norm: float
    clip_fraction: float
    ratio_mean: float
    weight_mean: float
    zero_weight_fraction: float
    reference_kl: float
    teacher_kl: float
    first_ratio_bias: float
    first_ratio_deviation: float
    first_clip_fraction: float
    first_reward_slope: float | None
    mask_differing: int
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
        """Report what really runs: formats by layer."""
        ...

    def export(self) -> Shipped:
        """Weights for the rollout engine, in its stored formats."""
        ...

    def digest(self) -> str:
        """Digest of the FP32 master weights, or of a policy with adapters (`training.lora`)."""
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


@runtime_checkable
class ScoringTrainer(Protocol):
    """A trainer whose update scores its rows (`TrainerEntry.scores_updates`), and which scores under older policies."""

    def scored_step(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> tuple[TrainReport, ScoredBatch]:
        """Learn from a batch by one update, and score its rows in the forward of that update."""
        ...

    def keep(self, shipped: Shipped) -> Any:
        """A copy of what `export` gave last, in main memory, for `logprobs_of`; an engine has not taken it yet.

        It outlives the trainer, until `forget`.
        """
        ...

    def forget(self, kept: Any) -> None:
        """Give the memory of a kept policy back."""
        ...

    def logprobs_of(
        self, kept: Any, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> ScoredBatch:
        """As `logprobs`, under a policy that was kept, of which engine and trainer have one format."""
        ...


Weights = TypeVar("Weights")
"""What a forward pass multiplies with, made ready once for all parts of a batch."""


@dataclass(frozen=True)
class Scored:
    """Flat log-probs and entropies of the completion tokens of some rows, in row order, FP32 on the CPU."""

    logprobs: Tensor
    entropy: Tensor


class SftTrainer(Protocol):
    """A trainer that learns from demonstrations too."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """FP32 weights, on any device."""
        ...

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        """One update on the mean cross-entropy of the completion tokens, which it returns (nats a token)."""
        ...

    def close(self) -> None:
        """Give its device back."""
        ...


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
        corrected, correction = self._objective.corrected(batch)
        reports = [
            self._update(self._selected(corrected.rows(rows), update, temperature, scales), temperature, scales)
            for update, rows in enumerate(shares(len(batch.keep), self._config.minibatches))
        ]
        return self._reported(batch, corrected, correction, reports)

    def _reported(
        self,
        batch: RolloutBatch,
        corrected: RolloutBatch,
        correction: dict[str, float],
        reports: Sequence[Mapping[str, float]],
    ) -> TrainReport:
        """The updates of a step were applied: the policy is the next version."""
        written = left_aligned(batch.sequences.completion, batch.mask.shape[1])
        if batch.observed is not None:
            written = written & ~batch.observed
        first = reports[0]
        self.version += 1
        return TrainReport(
            version=self.version,
            digest=self.digest(),
            learning_rate=self._learning_rate(self._updates),
            tokens=int(corrected.mask.sum()),
            rows=int(corrected.mask.any(dim=1).sum()),
            correction=correction,
            first_ratio_bias=first["ratio_bias"],
            first_ratio_deviation=first["ratio_deviation"],
            first_clip_fraction=first["clip_fraction"],
            first_reward_slope=None if batch.centred_rewards is None else first["reward_slope"],
            mask_differing=int((batch.mask != written).sum()),
            **{key: sum(report[key] for report in reports) / len(reports) for key in AVERAGED},
        )

    @abstractmethod
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """Score completion tokens and collect the statistics of Q, K and V in the same pass."""

    def close(self) -> None:  # noqa: B027 - most trainers hold nothing to release
        """Releases memory and processes; most trainers hold none."""

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
        """Of an update, from 1: a function of its number and the configuration alone.

        It rises to its peak at the last update of the warm-up, or is there at the first, and falls from there. After
        `over_steps` steps it has fallen to the final share, and stays there.
        """
        config, schedule = self._config, self._config.learning_rate_schedule
        peak = max(1, config.warmup_steps)
        if schedule.kind == "constant" or update <= peak:
            return config.learning_rate * min(1.0, update / peak)
        assert schedule.over_steps is not None, "RunConfig sets it"
        done = min(1.0, (update - peak) / (schedule.over_steps * config.minibatches - peak + 1))
        left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return config.learning_rate * (schedule.final_share + (1 - schedule.final_share) * left)

    def _update(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """One optimiser update; returns its statistics."""
        with self._guarded():
            totals = self._accumulate(batch, temperature, scales)
            totals["grad_norm"] = self._apply(self._learning_rate(self._updates + 1))
        return totals

    def _selected(
        self, batch: RolloutBatch, update: int, temperature: float, scales: Sequence[LayerScales] | None
    ) -> RolloutBatch:
        """A minibatch with what the loss singles out of it, so that this does not depend on how it is cut into passes.

        The first update of a step starts from the policy that `old_logprobs` are of; others cost one more scoring pass.
        """
        if not self._objective.selects:
            return batch
        if update == 0:
            assert batch.old_logprobs is not None, "whole_batch_setting names losses that select"
            return self._objective.selected(batch, batch.old_logprobs, update)
        current = self.logprobs(batch.sequences, temperature, scales).logprobs
        padding = torch.zeros(len(current), batch.mask.shape[1] - current.shape[1])
        return self._objective.selected(batch, torch.cat([current, padding], dim=1), update)

    def _apply(self, learning_rate: float) -> float:
        norm = self._step(learning_rate)
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}")
        self._updates += 1
        return norm

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Leave no gradient for the next update, whatever happens inside."""
        try:
            yield
        except GroupNotFinite as error:
            raise self._not_finite("an FP8 linear met NaN or infinity") from error
        finally:
            self._drop_gradients()

    def _not_finite(self, problem: str) -> NotFiniteError:
        return NotFiniteError(self._not_applied(problem))

    def _not_applied(self, problem: str) -> str:
        return f"update {self._updates} of policy {self.version}: {problem}; the update was not applied"


class MicroBatchTrainer(PolicyTrainer, Generic[Weights]):
    """Computes a batch part by part, in the order of the rows; several processes share the parts out."""

    def __init__(self, training: TrainingConfig, objective: Objective, ranks: Ranks) -> None:
        super().__init__(training, objective)
        self._ranks = ranks

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """As every trainer. Raises LogprobError: the batch's truncation leaves out one of its tokens."""
        return self._scored_under(self._inference_weights(), batch, temperature, scales)

    def keep(self, shipped: Shipped) -> KeptWeights:
        """As `ScoringTrainer.keep`."""
        return KeptWeights({name: shipped[name] for name in shipped.keys()}, self._ranks)  # noqa: SIM118

    def forget(self, kept: KeptWeights) -> None:
        """As `ScoringTrainer.forget`."""
        kept.close()

    @torch.no_grad()
    def logprobs_of(
        self,
        kept: KeptWeights,
        batch: TokenBatch,
        temperature: float,
        scales: Sequence[LayerScales] | None,
    ) -> ScoredBatch:
        try:
            return self._scored_under(self._shipped_weights(kept.whole()), batch, temperature, scales)
        finally:
            self._drop_shipped()

    def _scored_under(
        self, weights: Weights, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> ScoredBatch:
        statistics, slices = self._no_statistics(), list(self._slices(batch))
        scores = shared_out(
            self._ranks, slices, lambda each: self._drawn(weights, each[1], temperature, scales, statistics)
        )
        self._ranks.combine_counts(statistics.combine)
        return ScoredBatch(*_laid_out(batch, slices, scores), statistics)

    def scored_step(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> tuple[TrainReport, ScoredBatch]:
        """As `step`, by one update, whose forward also scores every row and collects the statistics of Q, K and V.

        The forward goes over all rows, also over those that no loss reads. Old log-probs that the batch does not have
        are those of this forward, which no backward has changed.

        Raises:
            NotFiniteError: as `step`.
            LogprobError: the first audited token that differs, or as `logprobs`; the update is not applied.
        """
        corrected, correction = self._objective.corrected(batch)
        corrected = self._selected(corrected, 0, temperature, scales)
        statistics, own = self._no_statistics(), list[Scored]()

        def score(weights: Weights, part: TokenBatch) -> Scored:
            scored = self._drawn(weights, part, temperature, scales, statistics)
            own.append(Scored(scored.logprobs.detach(), scored.entropy.detach()))
            return scored

        with self._guarded():
            totals = self._learnt(corrected, score)
            slices = list(self._slices(batch.sequences))
            logprobs, entropy = _laid_out(batch.sequences, slices, self._ranks.joined(own))
            self._refuse_differing(batch, logprobs)
            totals["grad_norm"] = self._apply(self._learning_rate(self._updates + 1))
        self._ranks.combine_counts(statistics.combine)
        if batch.old_logprobs is None:
            corrected, correction = self._objective.corrected(replace(batch, old_logprobs=logprobs))
        return self._reported(batch, corrected, correction, [totals]), ScoredBatch(logprobs, entropy, statistics)

    def _refuse_differing(self, batch: RolloutBatch, logprobs: Tensor) -> None:
        """Raises LogprobError: an audited token has not the bits of the rollout's log-prob."""
        for row, name in sorted(batch.audited.items()):
            ours, theirs = logprobs[row], batch.rollout_logprobs[row]
            differing = (batch.mask[row] & (ours.view(torch.int32) != theirs.view(torch.int32))).nonzero()
            if len(differing):
                token = int(differing[0])
                found = f"the rollout gave the log-prob {float(theirs[token])!r}, this forward {float(ours[token])!r}"
                raise LogprobError(self._not_applied(f"{name}, token {token}: {found}"))

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        """One update on the mean cross-entropy of the completion tokens, at temperature 1; returns it (nats a token).

        For warm starts, whose formats need no scales; `version` stays.

        Raises:
            NotFiniteError: as for `step`.
        """
        with self._guarded():
            tokens, weights, slices = int(batch.completion.sum()), self._training_weights(), list(self._slices(batch))

            def learn(rows_and_part: tuple[slice, TokenBatch]) -> float:
                logprobs = self._score(weights, rows_and_part[1], 1.0, None).logprobs
                loss = -logprobs.double().sum() / tokens
                self._backward(loss, rows_and_part is slices[self._ranks.own(len(slices))[-1]])
                return float(loss.detach())

            losses = shared_out(self._ranks, slices, learn, self._end_parts)
            self._finish_gradients()
            self._apply(learning_rate)
        return sum(losses)

    @abstractmethod
    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        """Rows of a batch that are computed at once, in order, trimmed to their longest."""

    @abstractmethod
    def _inference_weights(self) -> Weights:
        """Weights for passes without gradients."""

    @abstractmethod
    def _shipped_weights(self, shipped: Mapping[str, Tensor]) -> Weights:
        """Those of a policy that was exported, for a pass without gradients, until `_drop_shipped`."""

    def _drop_shipped(self) -> None:
        """The policy that was exported is not needed any more."""

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
        return self._learnt(batch, lambda weights, part: self._drawn(weights, part, temperature, scales))

    def _drawn(
        self,
        weights: Weights,
        batch: TokenBatch,
        temperature: float,
        scales: Sequence[LayerScales] | None,
        statistics: KvStatistics | None = None,
    ) -> Scored:
        """`_score` of tokens that were drawn; one with probability 0 has no importance ratio, and is refused."""
        scored = self._score(weights, batch, temperature, scales, statistics)
        if batch.truncation is not None and bool(torch.isneginf(scored.logprobs).any()):
            raise LogprobError(
                self._not_applied(
                    f"top_k={batch.truncation.top_k}, top_p={batch.truncation.top_p} leave out a token of a completion "
                    "by this policy's logits"
                )
            )
        return scored

    def _learnt(self, batch: RolloutBatch, score: Callable[[Weights, TokenBatch], Scored]) -> dict[str, float]:
        """Add up the gradients of all parts; returns the batch's statistics."""
        denominator, weights = Denominator.of(batch.mask), self._training_weights()
        slices = list(self._slices(batch.sequences))

        def learn(rows_and_part: tuple[slice, TokenBatch]) -> dict[str, float]:
            rows, part = rows_and_part
            scored = score(weights, part)
            mask = left_aligned(part.completion, batch.mask.shape[1])
            current, entropy = (
                torch.zeros(mask.shape).masked_scatter(mask, values) for values in (scored.logprobs, scored.entropy)
            )
            terms = self._objective(current, batch.rows(rows), denominator, entropy)
            statistics = terms.statistics()
            if not math.isfinite(statistics["loss"]):
                raise self._not_finite(f"the loss is {statistics['loss']}")
            self._backward(terms.loss, rows_and_part is slices[self._ranks.own(len(slices))[-1]])
            return statistics

        found = shared_out(self._ranks, slices, learn, self._end_parts)
        self._finish_gradients()
        totals: dict[str, float] = {}
        for statistics in found:
            totals = merged(totals, statistics)
        return totals

    def _end_parts(self, parts: int) -> None:
        """Of so many parts this process has computed its own, or failed in one; others may still compute."""

    @abstractmethod
    def _finish_gradients(self) -> None:
        """All parts are computed: complete the gradients over all processes."""

    def _backward(self, loss: Tensor, last: bool) -> None:
        # Quantised weights are shared by all parts, so their graph is kept until the last.
        torch.autograd.backward(loss, retain_graph=not last)


def _laid_out(
    batch: TokenBatch, slices: Sequence[tuple[slice, TokenBatch]], scores: Sequence[Scored]
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of parts as FP32 [B, C], NaN on padding."""
    shape = (len(batch), int(batch.completion.sum(-1).max()))
    logprobs, entropy = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for (rows, part), scored in zip(slices, scores, strict=True):
        mask = left_aligned(part.completion, shape[1])
        logprobs[rows] = logprobs[rows].masked_scatter(mask, scored.logprobs)
        entropy[rows] = entropy[rows].masked_scatter(mask, scored.entropy)
    return logprobs, entropy


def shares(rows: int, count: int) -> list[slice]:
    """`count` shares of the rows, in order, that differ by one row at most."""
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def left_aligned(completion: Tensor, columns: int) -> Tensor:
    """bool [B, columns]: as many leading True values in a row as it has completion tokens."""
    return torch.arange(columns) < completion.sum(-1, keepdim=True)
