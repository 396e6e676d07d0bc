"""The interface of trainers, and what they share: updates from the GRPO objective and their reports."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from fp8core.config.training import TrainingConfig
from fp8core.metric import Curve, Metric
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.router_losses import RouterObjective
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import EngineWeights
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.progress import progress_round
from fp8core.rl.batch import RolloutBatch, TokenBatch, shuffled
from fp8core.rl.objective import Objective
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.training.update_gain import UpdateGain

_MEAN_METRICS = (
    Metric("train/loss", "means little alone"),
    Metric(
        "train/grad_norm",
        "before clipping at `training.max_grad_norm`. *Grows over many steps: a smaller learning rate.*",
        unit="norm before clipping",
        headline="grad_norm",
        curve=Curve("learning", "Gradient norm", include=(0.0,)),
    ),
    Metric(
        "train/clip_fraction",
        "clipped tokens; 0 with one update per rollout. *Grows: fewer `training.minibatches` or `epochs`.*",
        headline="clip",
    ),
    Metric("train/ratio_mean", "new over old probability of tokens, about 1; `gspo`: below"),
    Metric(
        "train/weight_mean",
        "importance weight of the correction; about 1. *Far from 1: see [the mismatch](#alignment-and-its-bounds).*",
    ),
    Metric("train/zero_weight_fraction", "tokens in the loss's denominator with weight 0. *Near 1: no gradient.*"),
    Metric("train/reference_kl", "divergence from the reference policy; 0 without the reference step"),
    Metric(
        "train/teacher_kl",
        "mean of log policy - log teacher before the update; 0 without a teacher. *Does not fall: more steps, a larger "
        "learning rate.*",
    ),
)
"""Means over the updates."""
_FIRST = "of the first update, whose training forward should give the old log-probs"
RATIO_BIAS, RATIO_DEVIATION, CLIP_FRACTION = (
    Metric(f"train/first_{name}", _FIRST, better="lower", ideal=0.0)
    for name in ("ratio_bias", "ratio_deviation", "clip_fraction")
)
REWARD_SLOPE = Metric(
    "train/first_reward_slope", "below 0 where the update makes rewarded completions less likely", better="higher"
)
MASK_DIFFERING = Metric(
    "train/mask_differing", "tokens only in the loss, or only written by the policy", better="lower", ideal=0.0
)
_LAST_PASS = tuple(
    Metric(f"train/last_{name}", "mean over the updates of the last pass; with `training.epochs` alone")
    for name in ("clip_fraction", "ratio_deviation", "reference_kl")
)
_ROUTER = (
    Metric(
        "train/router_load",
        "tokens of the busiest expert over those of a mean one, in the worst layer; 1 is even. *Grows: set "
        "`loss.router.load_balancing`.*",
        better="lower",
        ideal=1.0,
    ),
    Metric("train/router_load_balancing", "load-balancing loss without its weight, mean over layers; 1 is even"),
    Metric("train/router_z", "router z-loss without its weight, mean over layers. *Grows: set `loss.router.z`.*"),
)
"""Means over the updates, of a mixture of experts alone."""
_FIRST_UPDATE = (RATIO_BIAS, RATIO_DEVIATION, CLIP_FRACTION, REWARD_SLOPE)
METRICS = (
    *_MEAN_METRICS,
    Metric(
        "train/update_gain",
        "[share of the intended change](#what-arrives-of-an-update) that the shipped policy has. *Below 0.3 after 15 "
        "steps: see there.*",
    ),
    Metric("train/learning_rate", "of this update"),
    Metric("train/tokens", "tokens of the loss's denominator"),
    Metric("train/rows", "rows of the loss's denominator. *Few rows: see `correction/`.*"),
    *_FIRST_UPDATE,
    *_LAST_PASS,
    *_ROUTER,
    MASK_DIFFERING,
)
"""Fields of `TrainReport`, there without `train/`."""


class UpdateError(ValueError):
    """An update was not applied."""


class NotFiniteError(UpdateError):
    """A loss or gradient became NaN or infinite."""


class LogprobError(UpdateError):
    """A forward gave a token another log-prob than the rollout."""


@dataclass(frozen=True)
class ScoredBatch:
    """Log-probs and entropy of completion tokens, FP32 [B, C], NaN on padding; `statistics` of Q, K and V by layer."""

    logprobs: Tensor
    entropy: Tensor
    statistics: KvStatistics


@dataclass(frozen=True)
class TrainReport:
    """One call of `Trainer.step`: means over its optimiser updates, or 0 where no row was left for one.

    Fields that begin with `first` are of the first update, made by the policy whose old log-probs the batch holds.
    `mask_differing` counts tokens that are in the loss and not written by the policy, and the other way round."""

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
    update_gain: float | None
    last_clip_fraction: float | None = None
    last_ratio_deviation: float | None = None
    last_reference_kl: float | None = None
    router_load: float | None = None
    router_load_balancing: float | None = None
    router_z: float | None = None

    def content(self) -> dict[str, Any]:
        """As it is stored: without the last pass where there is but one, and without routers where there are none."""
        absent = {metric.key for metric in (*_LAST_PASS, *_ROUTER) if getattr(self, metric.key) is None}
        return {name: value for name, value in asdict(self).items() if name not in absent}


class Trainer(Protocol):
    """A resident policy that learns; `scales` are those of each layer, none where attention has none."""

    @property
    def version(self) -> int: ...

    @property
    def arch(self) -> Architecture: ...

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch: ...

    def statistics(self, batch: TokenBatch) -> KvStatistics: ...

    def step(self, batch: RolloutBatch, temperature: float, scales: Scales) -> TrainReport: ...

    def mix(self, policy: Any, share: float) -> None:
        """Become (1 - share) * itself + share * the policy of an equal trainer, of its version."""

    def describe(self) -> dict[str, object]: ...

    def export(self) -> EngineWeights: ...

    def digest(self) -> str:
        """Digest of the FP32 masters, or of a policy with adapters."""

    def save(self, folder: Path) -> None:
        """Write what learns, optimiser states and counters (`saved_state`), without the policy; the folder exists."""

    def save_policy(self, folder: Path, tokenizer: Tokenizer) -> None: ...

    def load(self, folder: Path) -> None: ...

    def rest(self) -> None:
        """Free prepared weights where they are cheap to rebuild."""

    def close(self) -> None:
        """A second call does nothing."""


class LocalTrainer(Trainer, Protocol):
    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The weights that learn, by Hugging Face name, at least as exact as BF16. Only to be read."""


@runtime_checkable
class ScoringTrainer(Protocol):
    """A trainer whose update scores its rows, and which scores under older policies."""

    def scored_step(
        self, batch: RolloutBatch, temperature: float, scales: Scales
    ) -> tuple[TrainReport, ScoredBatch]: ...

    def keep(self, engine_weights: EngineWeights) -> Any:
        """The policy that `export` gave last, in main memory, for `logprobs_of`; an engine has not taken it yet."""

    def forget(self, policy: Any) -> None: ...

    def logprobs_of(self, policy: Any, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch: ...


class SftTrainer(Protocol):
    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        """One update on the mean cross-entropy of the completion tokens, which it returns (nats a token)."""

    def store_weights(self, store: ArtifactStore) -> Ref:
        """Raises UserError when the disk refuses."""

    def close(self) -> None: ...


class PolicyTrainer(ABC):
    """Counts the updates of one policy: `version` those that rollouts see."""

    arch: Architecture
    _gain: UpdateGain | None = None

    def __init__(self, training: TrainingConfig, objective: Objective, seed: int) -> None:
        self.version = 0
        self._config = training
        self._objective = objective
        self._seed = seed
        self._updates = 0

    def step(self, batch: RolloutBatch, temperature: float, scales: Scales) -> TrainReport:
        """One update per minibatch (`minibatches`), in row order, then the later passes; gradients are clipped by their
        global norm.
        Raises NotFiniteError: the loss or the gradient norm is NaN or infinite; that update is not applied."""
        corrected, correction = self._objective.corrected(batch)
        parts = minibatches(corrected.loss_mask, corrected.row_mask, self._config.minibatches)
        reports = [self._update(corrected.rows(rows), update, temperature, scales) for update, rows in enumerate(parts)]
        reports += self._later_passes(corrected, len(parts), temperature, scales)
        return self._report(batch, corrected, correction, reports)

    def _later_passes(
        self, batch: RolloutBatch, first: int, temperature: float, scales: Scales
    ) -> list[dict[str, float]]:
        """After `first` updates, those of the other passes; each draws its minibatches of the active rows."""
        rows = active_rows(batch.loss_mask, batch.row_mask)
        orders = [shuffled(rows, f"pass/{self._seed}/{self.version}/{each}") for each in range(1, self._config.epochs)]
        count = min(first, len(rows))
        # In row order: a minibatch is a set.
        parts = [sorted(order[share]) for order in orders for share in shares(len(rows), count)]
        return [
            self._update(batch.rows(part), update, temperature, scales)
            for update, part in enumerate(parts, start=first)
        ]

    def _report(
        self,
        batch: RolloutBatch,
        corrected: RolloutBatch,
        correction: dict[str, float],
        reports: Sequence[Mapping[str, float]],
    ) -> TrainReport:
        expected_mask = align_left(batch.sequences.response_mask, batch.policy_mask.shape[1])
        if batch.observation_mask is not None:
            expected_mask = expected_mask & ~batch.observation_mask
        first = reports[0] if reports else {metric.key.removeprefix("first_"): 0.0 for metric in _FIRST_UPDATE}
        last = reports[len(reports) - len(reports) // self._config.epochs :]
        # Of the last update, whichever the step made.
        learning_rate = self._learning_rate(self._updates, len(reports))
        self.version += 1
        return TrainReport(
            version=self.version,
            digest=self.digest(),
            learning_rate=learning_rate,
            tokens=int(corrected.loss_mask.sum()),
            rows=int(corrected.loss_mask.any(dim=1).sum()),
            correction=correction,
            first_ratio_bias=first["ratio_bias"],
            first_ratio_deviation=first["ratio_deviation"],
            first_clip_fraction=first["clip_fraction"],
            first_reward_slope=None if batch.centred_rewards is None else first["reward_slope"],
            mask_differing=int((batch.policy_mask != expected_mask).sum()),
            update_gain=None if self._gain is None else self._gain.measured(),
            **{metric.key: mean_of(reports, metric.key) for metric in _MEAN_METRICS},
            **{metric.key: mean_of(reports, metric.key) for metric in _ROUTER if metric.key in first},
            **(
                {metric.key: mean_of(last, metric.key.removeprefix("last_")) for metric in _LAST_PASS}
                if self._config.epochs > 1
                else {}
            ),
        )

    @torch.no_grad()
    def mix(self, policy: Self, share: float) -> None:
        """In FP32, two roundings, so that no cut of the tensors shows (TRL's `SyncRefModelCallback`)."""
        theirs = policy._trainable()
        for name, own in self._trainable().items():
            if share == 1:
                own.copy_(theirs[name])
            else:
                own.mul_(1 - share).add_(theirs[name] * share)
        self._changed()
        self.version = policy.version

    @abstractmethod
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch: ...

    @property
    @abstractmethod
    def masters(self) -> Mapping[str, Tensor]: ...

    def save_policy(self, folder: Path, tokenizer: Tokenizer) -> None:
        save_checkpoint(folder, self.arch, self.masters, tokenizer)

    def rest(self) -> None:  # noqa: B027 - on a CPU it takes longer to make than memory is worth
        ...

    def close(self) -> None:  # noqa: B027 - most trainers hold nothing to release
        ...

    @abstractmethod
    def digest(self) -> str: ...

    @abstractmethod
    def _accumulate(self, batch: RolloutBatch, temperature: float, scales: Scales) -> dict[str, float]:
        """Add up the gradients of a batch; returns its statistics. Raises NotFiniteError."""

    def _router_objective(self, batch: RolloutBatch) -> RouterObjective:
        return RouterObjective.of(self._objective.router, batch.sequences.valid, batch.loss_mask)

    @abstractmethod
    def _step(self, learning_rate: float) -> float:
        """Clip the accumulated gradient and apply it if its norm is finite; returns the norm before clipping."""

    @abstractmethod
    def _trainable(self) -> Mapping[str, Tensor]:
        """This process's FP32 tensors that learn."""

    @abstractmethod
    def _changed(self) -> None:
        """After a change of these tensors: all that is made of them is outdated."""

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    def _learning_rate(self, update: int, of_step: int) -> float:
        """Of an update, from 1 in all and in its step. A step with fewer than `updates` passes over the places of the
        others."""
        config = self._config
        schedule = self._config.learning_rate_schedule
        peak = max(1, config.warmup_steps)
        if schedule.kind == "constant" or update <= peak:
            return config.learning_rate * min(1.0, update / peak)
        assert schedule.over_steps is not None, "RunConfig sets it"
        place = self.version * config.updates + of_step
        progress = min(1.0, (place - peak) / (schedule.over_steps * config.updates - peak + 1))
        factor = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return config.learning_rate * (schedule.final_share + (1 - schedule.final_share) * factor)

    def _update(self, batch: RolloutBatch, update: int, temperature: float, scales: Scales) -> dict[str, float]:
        with self._guarded(), progress_round(update, self._config.updates):
            totals = self._accumulate(batch, temperature, scales)
            totals["grad_norm"] = self._apply(self._learning_rate(self._updates + 1, update + 1))
        return totals

    def _apply(self, learning_rate: float) -> float:
        norm = self._step(learning_rate)
        if not math.isfinite(norm):
            raise self._not_finite(f"the gradient norm is {norm}")
        self._updates += 1
        return norm

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except GroupNotFinite as error:
            raise self._not_finite("an FP8 linear met NaN or infinity") from error
        finally:
            self._drop_gradients()

    def _not_finite(self, problem: str) -> NotFiniteError:
        return NotFiniteError(self._update_problem(problem))

    def _update_problem(self, problem: str) -> str:
        return f"update {self._updates} of policy {self.version}: {problem}; the update was not applied"


def first_differing(theirs: Tensor, ours: Tensor, mask: Tensor, origin: str = "the rollout") -> str | None:
    """The first token in the mask with other bits, in words; log-probs are FP32 [C]."""
    differing = (mask & (ours.view(torch.int32) != theirs.view(torch.int32))).nonzero()
    if not len(differing):
        return None
    token = int(differing[0])
    text = f"{origin} gave the log-prob {float(theirs[token])!r}, this forward {float(ours[token])!r}"
    return f"token {token}: {text}"


def shares(rows: int, count: int) -> list[slice]:
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def minibatches(loss_mask: Tensor, row_mask: Tensor, count: int) -> list[slice]:
    """The consecutive rows of each update of a step, cut so that each has as many active rows, but for one.

    Fewer active rows than `count` make fewer updates: one without a token would move the policy by its moments
    alone."""
    active = active_rows(loss_mask, row_mask)
    firsts = [active[share.start] for share in shares(len(active), min(count, len(active)))]
    return [slice(*pair) for pair in pairwise([0, *firsts[1:], len(loss_mask)])] if active else []


def active_rows(loss_mask: Tensor, row_mask: Tensor) -> list[int]:
    """Those with a token in `loss_mask`, bool [B, C], that are in `row_mask`, bool [B]."""
    rows: list[int] = (loss_mask.any(dim=1) & row_mask).nonzero()[:, 0].tolist()
    return rows


def mean_of(reports: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(report[name] for report in reports) / max(len(reports), 1)


def align_left(response_mask: Tensor, columns: int) -> Tensor:
    """bool [B, columns]: as many leading True values in a row as it has tokens in the mask."""
    return torch.arange(columns) < response_mask.sum(-1, keepdim=True)
