"""The trainer in plain torch: FP32 master weights, AdamW, the forward and backward of the contract."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import TOP_K, Decoder, FullContext
from fp8core.models.experts import ReplayedRouting
from fp8core.models.formats import Formats
from fp8core.models.weights import PolicyWeights, load_policy, stored_weights
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.numerics.logprobs import token_logprobs
from fp8core.rl.aggregation import Denominator
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.trainer import NotFiniteError, ScoredBatch, TrainReport

_MASTERS = "masters.safetensors"
_OPTIMISER = "optimiser.safetensors"
_STATE = "trainer.json"


@dataclass(frozen=True)
class _Scored:
    """Flat log-probs and entropies of a micro-batch's completion tokens, in row order."""

    logprobs: Tensor
    entropy: Tensor


class TorchTrainer:
    """Holds the masters of one policy; `version` counts its updates."""

    def __init__(
        self,
        arch: Architecture,
        masters: Mapping[str, Tensor],
        formats: Formats,
        rollout_formats: Formats,
        training: TrainingConfig,
        objective: Objective,
    ) -> None:
        self.version = 0
        self.arch = arch
        self.masters = {name: tensor.float().clone().requires_grad_(True) for name, tensor in masters.items()}
        self._decoder = Decoder(arch, formats)
        self._unscaled = Decoder(arch, formats.with_attention(Bf16Attention(formats.points.weights)))
        self._rollout_formats = rollout_formats
        self._config, self._objective = training, objective
        self._optimiser = torch.optim.AdamW(
            list(self.masters.values()),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )
        self._updates = 0

    def describe(self) -> dict[str, object]:
        """Formats by layer, and how sums are accumulated."""
        return {"trainer": "torch", "accumulation": "exact", **self._decoder.formats.describe()}

    def export(self) -> dict[str, Tensor]:
        """Weights for the rollout engine, quantised here and nowhere else."""
        formats = self._rollout_formats
        return stored_weights(self.masters, formats.stored_names(), formats.scale_rule)

    def digest(self) -> str:
        """Digest of the FP32 master weights."""
        return policy_digest({name: tensor.detach() for name, tensor in self.masters.items()})

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """Score completion tokens and collect the statistics of Q, K and V in the same pass."""
        weights = self._inference_weights()
        statistics = KvStatistics(self.arch.num_layers)
        shape = (len(batch), int(batch.completion.sum(-1).max()))
        logprobs, entropy = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for rows, part in batch.slices(self._config.micro_batch):
            scored = self._score(weights, part, temperature, scales, statistics)
            mask = _left_aligned(part.completion, shape[1])
            logprobs[rows] = logprobs[rows].masked_scatter(mask, scored.logprobs)
            entropy[rows] = entropy[rows].masked_scatter(mask, scored.entropy)
        return ScoredBatch(logprobs, entropy, statistics)

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        """Statistics of Q, K and V per layer over all valid tokens, without any scales: attention in BF16."""
        weights = self._inference_weights()
        statistics = KvStatistics(self.arch.num_layers)
        for _, part in batch.slices(self._config.micro_batch):
            observe = _observer(statistics, part.valid, None)
            self._unscaled.hidden(weights, part.tokens, part.positions, FullContext.of(part.valid), None, observe)
        return statistics

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None) -> TrainReport:
        """One update per minibatch, in row order; gradients are clipped by their global norm.

        Raises:
            NotFiniteError: the loss or the gradient norm is NaN or infinite; that update is not applied.
        """
        batch, correction = self._objective.corrected(batch)
        reports = [
            self._update(batch.rows(rows), temperature, scales)
            for rows in _shares(len(batch.keep), self._config.minibatches)
        ]
        self.version += 1
        return TrainReport(
            version=self.version,
            digest=self.digest(),
            learning_rate=float(self._optimiser.param_groups[0]["lr"]),
            tokens=int(batch.mask.sum()),
            rows=int(batch.mask.any(dim=1).sum()),
            correction=correction,
            **{key: sum(report[key] for report in reports) / len(reports) for key in reports[0]},
        )

    def _update(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """One optimiser update; whatever happens, no gradient is left for the next."""
        try:
            totals = self._accumulate(batch, temperature, scales)
            totals["grad_norm"] = self._apply()
        except GroupNotFinite as error:
            raise self._not_finite("an FP8 linear met NaN or infinity") from error
        finally:
            self._optimiser.zero_grad(set_to_none=True)
        return totals

    def _accumulate(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales] | None
    ) -> dict[str, float]:
        """Add up the gradients of all micro-batches; returns the batch's statistics."""
        denominator = Denominator.of(batch.mask)
        totals: dict[str, float] = {}
        weights = self._training_weights()
        parts = list(batch.sequences.slices(self._config.micro_batch))
        for rows, part in parts:
            scored = self._score(weights, part, temperature, scales)
            mask = _left_aligned(part.completion, batch.mask.shape[1])
            current = torch.zeros(mask.shape).masked_scatter(mask, scored.logprobs)
            terms = self._objective(current, batch.rows(rows), denominator)
            statistics = terms.statistics()
            if not math.isfinite(statistics["loss"]):
                raise self._not_finite(f"the loss is {statistics['loss']}")
            # Quantised weights are shared by all micro-batches, so their graph is kept until the last.
            terms.loss.backward(retain_graph=rows is not parts[-1][0])
            for key, value in statistics.items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def _apply(self) -> float:
        """Clip and apply the accumulated gradient; returns its norm."""
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self._config.max_grad_norm))
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}")
        self._updates += 1
        warm = min(1.0, self._updates / max(1, self._config.warmup_steps))
        self._optimiser.param_groups[0]["lr"] = self._config.learning_rate * warm
        self._optimiser.step()
        return norm

    def _not_finite(self, problem: str) -> NotFiniteError:
        where = f"update {self._updates} of policy {self.version}"
        return NotFiniteError(f"{where}: {problem}; the update was not applied")

    def _score(
        self,
        weights: PolicyWeights,
        batch: TokenBatch,
        temperature: float,
        scales: Sequence[LayerScales] | None,
        statistics: KvStatistics | None = None,
    ) -> _Scored:
        observe = None
        if statistics is not None:
            observe = _observer(statistics, batch.valid, scales)
        context = FullContext.of(batch.valid)
        routing = TOP_K if batch.experts is None else ReplayedRouting(batch.experts)
        hidden = self._decoder.hidden(weights, batch.tokens, batch.positions, context, scales, observe, routing)
        written = batch.completion[:, 1:]
        logprobs, entropy = token_logprobs(
            hidden[:, :-1][written],
            weights.head,
            self._decoder.formats.head,
            batch.tokens[:, 1:][written],
            temperature,
        )
        return _Scored(logprobs, entropy)

    def _stored(self) -> dict[str, Tensor]:
        formats = self._decoder.formats
        return stored_weights(self.masters, formats.stored_names(), formats.scale_rule)

    def _inference_weights(self) -> PolicyWeights:
        return load_policy(self.arch, self._stored())

    def _training_weights(self) -> PolicyWeights:
        return load_policy(self.arch, self._stored(), self.masters)

    def save(self, folder: Path) -> None:
        """Write FP32 masters, optimiser moments, counters; the folder exists."""
        save_file({name: tensor.detach() for name, tensor in self.masters.items()}, folder / _MASTERS)
        moments = {
            f"{key}/{name}": state[key].contiguous()
            for name, tensor in self.masters.items()
            if (state := self._optimiser.state.get(tensor))
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        save_file(moments, folder / _OPTIMISER)
        state = {"version": self.version, "updates": self._updates, "digest": self.digest()}
        (folder / _STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the masters must be this model's."""
        state = json.loads((folder / _STATE).read_text())
        saved, moments = load_file(folder / _MASTERS), load_file(folder / _OPTIMISER)
        assert saved.keys() == self.masters.keys(), f"{folder} holds another model"
        self._optimiser.state.clear()
        for name, tensor in self.masters.items():
            tensor.data.copy_(saved[name])
            if f"step/{name}" in moments:
                self._optimiser.state[tensor] = {
                    key: moments[f"{key}/{name}"] for key in ("exp_avg", "exp_avg_sq", "step")
                }
        self.version, self._updates = state["version"], state["updates"]
        assert self.digest() == state["digest"], f"{folder} does not hold the weights it was saved with"

    def close(self) -> None:
        """Nothing to give back."""


def _observer(
    statistics: KvStatistics, valid: Tensor, scales: Sequence[LayerScales] | None
) -> Callable[[int, tuple[Tensor, Tensor, Tensor]], None]:
    return lambda layer, qkv: statistics.observe(layer, qkv, valid, scales[layer] if scales else None)


def _shares(rows: int, count: int) -> list[slice]:
    """`count` shares of the rows, in order, that differ by one row at most."""
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _left_aligned(completion: Tensor, columns: int) -> Tensor:
    """bool [B, columns]: as many leading True values in a row as it has completion tokens."""
    return torch.arange(columns) < completion.sum(-1, keepdim=True)
