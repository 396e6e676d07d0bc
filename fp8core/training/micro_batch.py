"""Trainers that compute in this process, or in several that share it out: forward passes over parts of a batch."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8core.config.training import TrainingConfig
from fp8core.models.router_losses import RouterLosses, router_metrics
from fp8core.models.weights import EngineWeights, ShippedTensors
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.progress import progress_round
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective, merge_totals
from fp8core.training.ranks import Ranks, RankWeights, shared_out
from fp8core.training.trainer import (
    LogprobError,
    PolicyTrainer,
    ScoredBatch,
    TrainReport,
    align_left,
    first_differing,
    minibatches,
)

Weights = TypeVar("Weights")
"""What a forward pass multiplies with."""


Scores = tuple[Tensor, Tensor]
"""Log-probs and entropy of the completion tokens of some rows, in row order: FP32 [tokens] on the CPU."""


class MicroBatchTrainer(PolicyTrainer, Generic[Weights]):
    def __init__(self, training: TrainingConfig, objective: Objective, ranks: Ranks, seed: int) -> None:
        super().__init__(training, objective, seed)
        self._ranks = ranks
        # Those that share the parts of a batch out.
        self._teams = ranks
        self._export_version: int | None = None

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        return self._scored_under(self._inference_weights(), batch, temperature, scales)

    def export(self) -> ShippedTensors:
        self._export_version = self.version
        return self._to_ship()

    def keep(self, shipped: EngineWeights) -> RankWeights:
        assert self._export_version == self.version, "the trainer holds another policy than the exported one"
        own = self._other_weights()
        return RankWeights({name: shipped[name] for name in shipped.keys()} if own is None else own, self._ranks)  # noqa: SIM118

    def forget(self, policy: RankWeights) -> None:
        policy.close()

    @torch.no_grad()
    def logprobs_of(self, policy: RankWeights, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        try:
            return self._scored_under(self._engine_weights(policy.whole()), batch, temperature, scales)
        finally:
            self._drop_engine_weights()

    def _scored_under(self, weights: Weights, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        statistics = self._no_statistics()
        slices = list(self._slices(batch))
        scores = shared_out(
            self._teams, slices, lambda each: self._score(weights, each[1], temperature, scales, statistics)
        )
        self._ranks.combine_counts(statistics.combine)
        return ScoredBatch(*_pad_scores(batch, slices, scores), statistics)

    def scored_step(self, batch: RolloutBatch, temperature: float, scales: Scales) -> tuple[TrainReport, ScoredBatch]:
        """As `step`; the forwards of its first pass also score every row and collect the statistics of Q, K and V.

        With one minibatch and no stored old log-probs, the first forward's are the old ones. A pass before the first
        update scores the audited rows of later ones, and those with stale tokens.

        Raises: NotFiniteError: as `step`. LogprobError: the first audited token that differs; no update is applied."""
        corrected, correction = self._objective.corrected(batch)
        updates = minibatches(corrected.loss_mask, corrected.row_mask, self._config.minibatches)
        assert batch.old_logprobs is not None or len(updates) <= 1, "the configuration was checked"
        passed = self._pass_scores(batch, updates[0].stop if updates else 0, temperature, scales)
        reports = list[dict[str, float]]()
        if updates:
            reports, scored = self._scored_updates(batch, corrected, updates, passed, temperature, scales)
        else:
            scored = self.logprobs(batch.sequences, temperature, scales)
        if batch.old_logprobs is None:
            old = scored.logprobs.nan_to_num()
            corrected, correction = self._objective.corrected(replace(batch, old_logprobs=old))
        elif batch.stale_mask is not None:
            _, correction = self._objective.corrected(replace(batch, old_logprobs=scored.logprobs))
        reports += self._later_passes(corrected, len(updates), temperature, scales)
        return self._report(batch, corrected, correction, reports), scored

    def _scored_updates(
        self,
        batch: RolloutBatch,
        corrected: RolloutBatch,
        updates: Sequence[slice],
        passed: Mapping[int, Tensor],
        temperature: float,
        scales: Scales,
    ) -> tuple[list[dict[str, float]], ScoredBatch]:
        statistics = self._no_statistics()
        reports = list[dict[str, float]]()
        scores_by_update = list[tuple[Tensor, Tensor]]()
        for update, rows in enumerate(updates):
            part = corrected.rows(rows)
            with self._guarded(), progress_round(update, self._config.updates):
                totals, own = self._accumulate_with_scores(part, temperature, scales, statistics)
                slices = list(self._slices(part.sequences))
                scores = _pad_scores(part.sequences, slices, self._teams.joined(own))
                if update == 0:
                    self._check_agreement(
                        batch, {row: scores[0][row] for row in batch.audited if row < rows.stop}, passed
                    )
                totals["grad_norm"] = self._apply(self._learning_rate(self._updates + 1, update + 1))
            reports.append(totals)
            scores_by_update.append(scores)
        self._ranks.combine_counts(statistics.combine)
        logprobs, entropy = (_concatenate(parts) for parts in zip(*scores_by_update, strict=True))
        return reports, ScoredBatch(logprobs, entropy, statistics)

    def _pass_scores(self, batch: RolloutBatch, first: int, temperature: float, scales: Scales) -> dict[int, Tensor]:
        """Log-probs of audited rows beyond the `first` of the first update, or with stale tokens: row -> FP32 [C].
        Raises LogprobError: one of a token of this policy has not the bits of the rollout."""
        stale = [row for row in batch.audited if batch.stale_mask is not None and batch.stale_mask[row].any()]
        rows = sorted({*stale, *(row for row in batch.audited if row >= first)})
        if not rows:
            return {}
        passed = dict(zip(rows, self.logprobs(batch.sequences.part(rows), temperature, scales).logprobs, strict=True))
        self._check_agreement(batch, passed, {})
        return passed

    def _check_agreement(
        self, batch: RolloutBatch, audited: Mapping[int, Tensor], passed: Mapping[int, Tensor]
    ) -> None:
        """Raises LogprobError: the first token whose bits differ from the rollout, or where stale from a pass."""
        for row in sorted(audited):
            ours = audited[row]
            longest = len(ours)
            own = batch.fresh_mask[row, :longest]
            difference = first_differing(batch.rollout_logprobs[row, :longest], ours, own)
            if difference is None and row in passed and batch.stale_mask is not None:
                # Each is as wide as the longest of the rows that were computed with it.
                columns = slice(min(longest, len(passed[row])))
                stale = (batch.policy_mask & batch.stale_mask)[row, columns]
                difference = first_differing(passed[row][columns], ours[columns], stale, "a pass")
            if difference:
                raise LogprobError(self._update_problem(f"{batch.audited[row]}, {difference}"))

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        with self._guarded():
            tokens = int(batch.response_mask.sum())
            slices = list(self._slices(batch))
            weights = self._training_weights()

            def learn(rows_and_part: tuple[slice, TokenBatch]) -> float:
                logprobs, _ = self._score(weights, rows_and_part[1], 1.0, ())
                loss = -logprobs.double().sum() / tokens
                self._backward(loss, rows_and_part is slices[self._teams.own(len(slices))[-1]])
                return float(loss.detach())

            losses = shared_out(self._teams, slices, learn, self._end_parts)
            self._finish_gradients()
            self._apply(learning_rate)
        return sum(losses)

    @abstractmethod
    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        """Rows of a batch that are computed at once, in order, trimmed to their longest."""

    @abstractmethod
    def _inference_weights(self) -> Weights: ...

    @abstractmethod
    def _to_ship(self) -> ShippedTensors: ...

    @abstractmethod
    def _other_weights(self) -> Mapping[str, Tensor] | None:
        """The policy stored as the passes read it, where the engine's weights have other formats; else None."""

    @abstractmethod
    def _engine_weights(self, shipped: Mapping[str, Tensor]) -> Weights:
        """Those of a policy that was kept, for a pass without gradients, until `_drop_shipped`."""

    def _drop_engine_weights(self) -> None: ...

    @abstractmethod
    def _training_weights(self) -> Weights:
        """Weights whose gradients reach the masters."""

    @abstractmethod
    def _score(
        self,
        weights: Weights,
        batch: TokenBatch,
        temperature: float,
        scales: Scales,
        statistics: KvStatistics | None = None,
        losses: RouterLosses | None = None,
    ) -> Scores: ...

    @abstractmethod
    def _no_statistics(self) -> KvStatistics: ...

    def _accumulate(self, batch: RolloutBatch, temperature: float, scales: Scales) -> dict[str, float]:
        return self._accumulate_with_scores(batch, temperature, scales, None)[0]

    def _accumulate_with_scores(
        self, batch: RolloutBatch, temperature: float, scales: Scales, statistics: KvStatistics | None
    ) -> tuple[dict[str, float], list[Scores]]:
        """The scores are those of this process's parts."""
        denominator = Denominator.of(batch.loss_mask)
        weights = self._training_weights()
        own = list[Scores]()
        slices = list(self._slices(batch.sequences))
        routers = self._router_objective(batch)

        def learn(rows_and_part: tuple[slice, TokenBatch]) -> tuple[dict[str, float], Tensor]:
            rows, part = rows_and_part
            losses = routers.part(rows)
            scored = self._score(weights, part, temperature, scales, statistics, losses)
            own.append((scored[0].detach(), scored[1].detach()))
            mask = align_left(part.response_mask, batch.loss_mask.shape[1])
            current, entropy = (torch.zeros(mask.shape).masked_scatter(mask, values) for values in scored)
            terms = self._objective(current, batch.rows(rows), denominator, entropy)
            part_statistics = terms.statistics()
            if not math.isfinite(part_statistics["loss"]):
                raise self._not_finite(f"the loss is {part_statistics['loss']}")
            self._backward(terms.loss, rows_and_part is slices[self._teams.own(len(slices))[-1]])
            return part_statistics, losses.statistics()

        statistics_by_part, of_routers = zip(*shared_out(self._teams, slices, learn, self._end_parts), strict=True)
        self._finish_gradients()
        totals: dict[str, float] = {}
        for part_statistics in statistics_by_part:
            totals = merge_totals(totals, part_statistics)
        return totals | router_metrics(torch.stack(of_routers).sum(0)), own

    def _end_parts(self, parts: int) -> None:
        """Of so many parts this process has computed its own, or failed in one; others may still compute."""

    @abstractmethod
    def _finish_gradients(self) -> None:
        """All parts are computed: complete the gradients over all processes."""

    def _backward(self, loss: Tensor, last: bool) -> None:
        # Quantised weights are shared by all parts, so their graph is kept until the last.
        torch.autograd.backward(loss, retain_graph=not last)


def _pad_scores(
    batch: TokenBatch, slices: Sequence[tuple[slice, TokenBatch]], scores: Sequence[Scores]
) -> tuple[Tensor, Tensor]:
    """FP32 [B, C] of each, NaN on padding."""
    shape = (len(batch), int(batch.response_mask.sum(-1).max()))
    logprobs = torch.full(shape, torch.nan)
    entropy = torch.full(shape, torch.nan)
    for (rows, part), scored in zip(slices, scores, strict=True):
        mask = align_left(part.response_mask, shape[1])
        logprobs[rows] = logprobs[rows].masked_scatter(mask, scored[0])
        entropy[rows] = entropy[rows].masked_scatter(mask, scored[1])
    return logprobs, entropy


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    columns = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, columns - part.shape[1]), value=torch.nan) for part in parts])
