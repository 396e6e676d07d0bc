"""All declared metrics, by group and in the order in which people see them."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain

from fp8core.metric import Curve, Metric
from fp8core.metrics import drafts, episodes, reward, rollout, scales, time
from fp8core.rl import alignment_metrics, correction, staleness
from fp8core.store import metrics as start
from fp8core.training import trainer

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "reward": (
        *reward.METRICS,
        *start.OF_START["evaluation"].values(),
        start.HELDOUT_OF_SOURCE,
        *reward.SOURCE_METRICS,
    ),
    "start": tuple(start.OF_START["precision_gap"].values()),
    "rollout": (*rollout.METRICS, *rollout.DRAW_METRICS, *drafts.METRICS),
    "environment": episodes.METRICS,
    "ahead": (*staleness.METRICS, *rollout.STREAM_METRICS),
    "training": (*trainer.METRICS, *correction.METRICS),
    "alignment": alignment_metrics.METRICS,
    "sync": scales.SYNC_METRICS,
    "scales": scales.METRICS,
    "time": time.METRICS,
}
METRICS = tuple(chain.from_iterable(GROUPS.values()))
_BY_NAME = {metric.name: metric for metric in METRICS}
assert len(_BY_NAME) == len(METRICS), "two metrics of one name"
# The longer one of two that fit is the more precise one.
_PATTERNS = sorted((metric for metric in METRICS if "*" in metric.name), key=lambda metric: -len(metric.name))


def find_metric(name: str) -> Metric:
    """The declaration of a metric; one that a step of the user's own measured has a chart alone."""
    own = Metric(name, curve=Curve("own"))
    return _BY_NAME.get(name) or next((metric for metric in _PATTERNS if fnmatchcase(name, metric.name)), own)
