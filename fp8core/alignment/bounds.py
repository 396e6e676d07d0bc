"""Bounds on the alignment of rollout and training policy: which one a training has been beyond for too long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8core.config.run import StopConfig
from fp8core.errors import UserError

BOUNDED = {
    "error": "alignment/token_mult_prob_error",
    "k3": "alignment/k3_kl",
    "effective_sample_size": "alignment/ess",
}
"""Setting below `alignment.stop` -> the metric that it bounds."""

_LOWER = frozenset({"effective_sample_size"})


@dataclass(frozen=True)
class Crossing:
    """A bound that `patience` steps in a row were beyond.

    `bound` is the setting (`alignment.stop.k3`), `limit` its value; `values` are the metric's, oldest first.
    """

    bound: str
    limit: float
    values: tuple[float, ...]

    @property
    def reason(self) -> str:
        """The bound, where the metric was, and for how long."""
        side = "below" if self.bound.rpartition(".")[2] in _LOWER else "above"
        steps = "1 step" if len(self.values) == 1 else f"{len(self.values)} steps in a row"
        return f"{self.bound}={self.limit:g}: {side} it for {steps} ({', '.join(f'{v:.4g}' for v in self.values)})"


def crossed(stop: StopConfig, history: Sequence[Mapping[str, float]]) -> Crossing | None:
    """The first bound that each of the last `stop.patience` steps was beyond; None when there is none.

    Args:
        stop: the bounds.
        history: metrics of consecutive steps, oldest first; earlier ones than the last `patience` change nothing.

    Raises:
        UserError: no step of the pipeline measures what is bounded.
    """
    recent = history[-stop.patience :]
    if len(recent) < stop.patience:
        return None
    for name, metric in BOUNDED.items():
        limit = getattr(stop, name)
        if limit is None:
            continue
        bound = f"alignment.stop.{name}"
        if any(metric not in metrics for metrics in recent):
            raise UserError(f"{bound}: no step of the pipeline measures {metric}; add tasks.record:record")
        values = tuple(metrics[metric] for metrics in recent)
        if all(value < limit if name in _LOWER else value > limit for value in values):
            return Crossing(bound, limit, values)
    return None
