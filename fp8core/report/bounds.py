"""The bounds on alignment that runs are configured to stop at (`alignment.stop`), as lines of their charts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fp8core.alignment.bounds import BOUNDED
from fp8core.config.load import leaves
from fp8core.report.axis import short
from fp8core.report.charts import Bound
from fp8core.report.run_charts import ALIGNMENT
from fp8core.report.run_data import RunData

Bounds = Mapping[str, Sequence[Bound]]
"""By metric, in the units of its curve; they replace those of the curve."""

_STOPS = {metric: f"alignment.stop.{name}" for name, metric in BOUNDED.items()}


def configured_bounds(runs: Sequence[RunData]) -> Bounds:
    """A line for each bound that a run has; one that not all runs have names those that do."""
    found: dict[str, list[Bound]] = {}
    for curve in ALIGNMENT:
        holders: dict[float, list[str]] = defaultdict(list)
        for run in runs:
            value = leaves(run.evidence.description.config).get(_STOPS.get(curve.metric, ""))
            if value is not None:
                holders[float(value)].append(run.label)
        for value, labels in holders.items():
            whose = "" if len(labels) == len(runs) else f" of {', '.join(labels)}"
            line = Bound(f"stop{whose}: {short(value)}", curve.of({curve.metric: value}))
            found.setdefault(curve.metric, []).append(line)
    return found
