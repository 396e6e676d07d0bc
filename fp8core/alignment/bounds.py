"""Bounds that every training is held to: what its contract promises, and which step breaks the promise.

docs/concepts/precision.md has the contracts. A setting of `alignment.stop` replaces its contract's default, and `none`
removes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8core.config.loss import SHIPPED_LOSSES
from fp8core.config.run import RunConfig
from fp8core.config.shipped import ENGINES
from fp8core.errors import UserError
from fp8core.metrics.scales import PROBE_DIFFERING, PROBE_ERROR
from fp8core.rl.alignment_metrics import ESS, K3, TMPE, TOKENS_DIFFERING
from fp8core.rl.correction import correction_rule
from fp8core.rollout.registry import engine_entry
from fp8core.training.registry import trainer_of
from fp8core.training.trainer import CLIP_FRACTION, MASK_DIFFERING, RATIO_BIAS, RATIO_DEVIATION, REWARD_SLOPE

Contract = Literal["exact", "aligned", "matched", "mismatched", "accepted"]
Action = Literal["none", "warn", "pause", "fail"]

EQUAL: frozenset[Contract] = frozenset({"exact", "aligned"})

BOUND_METRICS = {
    "error": TMPE,
    "tokens_differing": TOKENS_DIFFERING,
    "k3": K3,
    "effective_sample_size": ESS,
    "ratio_bias": RATIO_BIAS,
    "ratio_deviation": RATIO_DEVIATION,
    "ratio_clipped": CLIP_FRACTION,
    "reward_slope": REWARD_SLOPE,
    "mask_differing": MASK_DIFFERING,
    "probe_differing": PROBE_DIFFERING,
    "probe_error": PROBE_ERROR,
}
"""Setting below `alignment.stop` -> the metric that it bounds."""

_LOWER = frozenset(name for name, metric in BOUND_METRICS.items() if metric.better == "higher")
# As the console and the report name them; the bias has a sign, and its size is bounded.
_METRIC_NAMES = {"error": "tmpe", "ratio_bias": "|ratio_bias|"}
_EQUAL = {"error": 1.0, "tokens_differing": 0.0, "probe_differing": 0.0, "probe_error": 1.0}
_ERROR = 1.1
_NEAR = {"error": _ERROR, "k3": 1e-2, "probe_error": 1.5}
_SAME_RATIO = {"ratio_bias": 0.0, "ratio_deviation": 0.0, "ratio_clipped": 0.0}
_NEAR_RATIO = {"ratio_bias": _ERROR - 1, "ratio_deviation": _ERROR - 1, "ratio_clipped": 0.05}
_PATIENCE = 3


@dataclass(frozen=True)
class StopBounds:
    """`limits`: bound -> limit; a bound that is absent is not judged. `sources`: every bound, `action` and `patience`
    -> `configuration` or the contract. `patience`: steps in a row beyond a bound before the action."""

    contract: Contract
    reason: str
    limits: Mapping[str, float]
    sources: Mapping[str, str]
    action: Action
    patience: int

    @property
    def judges(self) -> bool:
        return self.action != "none" and bool(self.limits)

    def settings(self) -> dict[str, float | int | str]:
        limits = {name: int(limit) if limit.is_integer() else limit for name, limit in self.limits.items()}
        return {name: limits.get(name, "none") for name in BOUND_METRICS} | {
            "patience": self.patience,
            "action": self.action,
        }

    def description(self) -> dict[str, str]:
        texts = {n: f"{value:g}" if isinstance(value, float) else str(value) for n, value in self.settings().items()}
        return {f"alignment.stop.{name}": f"{value} ({self.sources[name]})" for name, value in texts.items()}

    @property
    def summary(self) -> str:
        if not self.judges:
            return f"nothing is bounded (alignment.stop, {self.contract} contract)"
        crossings = ", ".join(
            f"{_METRIC_NAMES.get(name, name)} {'<' if name in _LOWER else '>'} {limit:g}"
            for name, limit in self.limits.items()
        )
        lasting = "" if self.patience == 1 else f"for {self.patience} steps in a row "
        return f"{self.contract} contract, {self.action}s if {lasting}{crossings}"


@dataclass(frozen=True)
class Crossing:
    """A bound (`alignment.stop.k3`) that steps in a row were beyond; `values` of its metric, oldest first."""

    bound: str
    limit: float
    values: tuple[float, ...]

    @property
    def reason(self) -> str:
        side = "below" if self.bound.rpartition(".")[2] in _LOWER else "above"
        steps = "1 step" if len(self.values) == 1 else f"{len(self.values)} steps in a row"
        return f"{self.bound}={self.limit:g}: {side} it for {steps} ({', '.join(f'{v:.4g}' for v in self.values)})"


def stop_bounds(config: RunConfig) -> StopBounds:
    contract, reason = contract_of(config)
    given = config.alignment.stop
    # A loss mask has no rounding, and a gradient against the rewards is wrong in every format.
    limits = {"mask_differing": 0.0}
    ratio = _ratio_limits(config, contract)
    # Each advantage has the sign of reward - mean reward of the group, so no part of a batch has a negative slope.
    if config.loss.policy in SHIPPED_LOSSES and not config.loss.distillation.weight:
        limits["reward_slope"] = 0.0
    defaults = limits | (_EQUAL if contract in EQUAL else _NEAR) | ratio
    chosen = {name: getattr(given, name) for name in BOUND_METRICS}
    chosen = {name: defaults.get(name, "none") if value is None else value for name, value in chosen.items()}
    sources = {
        name: f"{contract} contract" if getattr(given, name) is None else "configuration"
        for name in (*BOUND_METRICS, "action", "patience")
    }
    return StopBounds(
        contract,
        reason,
        {name: float(value) for name, value in chosen.items() if value != "none"},
        sources,
        given.action or ("warn" if contract == "accepted" else "fail"),
        given.patience or (1 if contract in EQUAL else _PATIENCE),
    )


def stored_bounds(config: RunConfig | None) -> StopBounds | None:
    """Of a run that is only read; None where they are unknown, as `is_known` has it."""
    return stop_bounds(config) if config is not None and has_evidence(config) else None


def has_evidence(config: RunConfig) -> bool:
    """False where the contract is up to an engine that the configuration imports, which a stranger may have written."""
    return config.rollout.engine in ENGINES or bool(config.precision.differing)


def unverifiable(config: RunConfig) -> str | None:
    """The reason why no pass gives the bits of what was sampled, in a run that generates ahead; None elsewhere."""
    if config.pipeline.mode == "synchronous":
        return None
    contract, reason = contract_of(config)
    return None if contract in EQUAL else reason


def contract_of(config: RunConfig) -> tuple[Contract, str]:
    if differing := config.precision.differing:
        has_correction = config.correction.method != "none" or not config.precision.accept_mismatch
        sides = ", ".join(f"{part} {a} and {b}" for part, a, b in differing)
        return "mismatched" if has_correction else "accepted", f"the sides compute {sides}"
    kernels = config.precision.rounding_points == "kernels"
    engine = engine_entry(config).arithmetic(config)
    trainer = trainer_of(config.training)
    if engine == "exact" and trainer.arithmetic == "exact":
        return "exact", "engine and trainer compute the same operations in equal formats"
    by_kernels = kernels and trainer.arithmetic == "kernels"
    device = trainer.device(config.training)
    if engine == "exact" and by_kernels and device == "cpu":
        return "exact", "engine and packed trainer round at the same points in equal formats"
    if engine == "kernels" and by_kernels and device == "cuda" and config.training.deterministic:
        return "aligned", "the engine's aligned model and the packed trainer run the same kernels in equal formats"
    return "matched", "engine and trainer compute equal formats with different kernels"


def _ratio_limits(config: RunConfig, contract: Contract) -> dict[str, float]:
    if contract in EQUAL:
        return {} if ratio_holds_age(config) else _SAME_RATIO
    if correction_rule(config.correction).mode == "bypass":
        # The loss takes the rollout's log-probs for the old ones, so the ratio of a token holds its mismatch.
        return {} if ratio_holds_age(config) else {"ratio_bias": _NEAR_RATIO["ratio_bias"]}
    same_trainer = trainer_of(config.training).arithmetic == "exact"
    return _SAME_RATIO if same_trainer else _NEAR_RATIO


def ratio_holds_age(config: RunConfig) -> bool:
    """True if importance ratios are over the policy that wrote a token, and that may be an older one."""
    rollout_for_old = config.logprobs.source == "rollout" or correction_rule(config.correction).mode == "bypass"
    return rollout_for_old and config.pipeline.mode != "synchronous" and config.pipeline.max_staleness > 0


def beyond(bounds: StopBounds, name: str, value: float) -> bool:
    limit = bounds.limits[name]
    # Not a number is beyond every bound.
    return not (value >= limit if name in _LOWER else abs(value) <= limit)


def first_crossing(bounds: StopBounds, history: Sequence[Mapping[str, float]]) -> Crossing | None:
    """The first bound that each of these consecutive steps was beyond.

    Raises UserError: no step measures what is bounded.
    """
    for name, limit in bounds.limits.items():
        metric = BOUND_METRICS[name].name
        bound = f"alignment.stop.{name}"
        if metric not in history[-1]:
            raise UserError(
                f"{bound}: no step of the pipeline measures {metric}; add tasks.record:record, or set {bound} to none"
            )
        values = tuple(metrics[metric] for metrics in history if metric in metrics)
        if len(values) == len(history) and all(beyond(bounds, name, value) for value in values):
            return Crossing(bound, limit, values)
    return None
