"""The names that MLflow shows a training's metrics by; records, reports and bounds have the names of the tasks.

MLflow draws one section of charts for each word before a slash, sorted by that word. So headline metrics come first, as
`core/...`. Every other one is below `detail/`.
"""

from collections.abc import Mapping

from fp8core.store import metrics

CORE, DETAIL = "core/", "detail/"
ERROR = f"{CORE}error_minus_1"
K3 = f"{CORE}k3"
ACCURACY = f"{CORE}heldout"
MEAN_REWARD = f"{CORE}reward"
SECONDS, OVERHEAD = f"{CORE}seconds", f"{CORE}overhead_ms"
TIMED = (SECONDS, metrics.TOKENS_PER_SECOND, OVERHEAD, f"{DETAIL}time/", "system/")
"""Beginnings of the names of metrics that two equal trainings need not share."""
_HEADLINE = {
    metrics.REWARD: MEAN_REWARD,
    metrics.HELDOUT: ACCURACY,
    metrics.SIGNAL: f"{CORE}groups_with_signal",
    metrics.LENGTH: f"{CORE}length",
    metrics.ENTROPY: f"{CORE}entropy",
    metrics.TMPE: ERROR,
    "alignment/k3_kl": K3,
    "alignment/ess": f"{CORE}ess",
    "train/clip_fraction": f"{CORE}clip",
    metrics.GRAD_NORM: f"{CORE}grad_norm",
    metrics.STALENESS: f"{CORE}staleness",
    metrics.LAG_ESS: f"{CORE}staleness_ess",
}
_OF_MODEL = (ERROR, K3, ACCURACY, MEAN_REWARD, f"{DETAIL}{metrics.TOKENS_DIFFERING}")


def shown_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics by MLflow's names; the multiplicative error becomes its distance from 1."""
    return {shown_name(name): value - 1.0 if shown_name(name) == ERROR else value for name, value in measured.items()}


def shown_name(name: str) -> str:
    return _HEADLINE.get(name, f"{DETAIL}{name}")


def model_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a checkpoint, from those of its step, alignment first, by the names of the run's own."""
    shown = shown_metrics(measured)
    return {name: shown[name] for name in _OF_MODEL if name in shown}
