"""Scales of Q, K and V for the next policy."""

from typing import Any

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.numerics.kv_scales import (
    LayerAmax,
    LayerHistograms,
    LayerScales,
    average_amax,
    covered_amax,
    scale_distance,
    scales_from_statistics,
)
from fp8core.numerics.magnitudes import MagnitudeHistogram
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import PolicyScales
from fp8core.store.artifacts import Ref
from fp8core.workers.live import LiveRun
from tasks.step import step


@step(
    inputs={"kv_statistics": "kv_statistics", "scales": "scales", "next_policy": "policy"},
    optional_inputs={"rollouts": "rollouts"},
    outputs={"next_scales": "scales"},
)
def calibrate(
    run: LiveRun,
    index: int,
    options: NoOptions,
    kv_statistics: Ref,
    scales: Ref,
    next_policy: Ref,
    rollouts: Ref | None = None,
) -> dict[str, Ref]:
    """s_{i+1}: the average over steps of what the log-prob pass saw under v_i, or of a fresh pass under v_{i+1}."""
    store = run.directory.store
    version = store.get_json(next_policy)["version"]
    previous = [LayerAmax(**layer) for layer in store.get_json(scales)["amax"]]
    if run.config.calibration.source == "logprob_pass":
        current = covered(run.config, read_histograms(store.get_json(kv_statistics)))
    else:
        if rollouts is None:
            raise UserError("calibration.source=fresh_pass needs the rollouts: add them to the needs of calibrate")
        table = spread(store.get_table(rollouts, ["prompt_tokens", "tokens"]), run.config.calibration.sequences)
        sequences = TokenBatch.of(table["prompt_tokens"].to_pylist(), table["tokens"].to_pylist())
        current = covered(run.config, run.ready_trainer().statistics(sequences).histograms())
    averaged = average_amax(previous, current, run.config.calibration.average)
    return {"next_scales": store_scales(run, version, averaged)}


def spread(rollouts: pa.Table, count: int | None) -> pa.Table:
    """At most `count` rows, evenly spaced from the first on; all of them for None."""
    rows = len(rollouts)
    kept = rows if count is None else min(count, rows)
    return rollouts.take([i * rows // kept for i in range(kept)])


def covered(config: RunConfig, histograms: list[LayerHistograms]) -> list[LayerAmax]:
    """The magnitudes of one step that the run's scales shall cover."""
    return covered_amax(histograms, config.calibration.covered_percentile)


def scales_of(config: RunConfig, amax: list[LayerAmax]) -> list[LayerScales]:
    """The run's scales for the given magnitudes."""
    return scales_from_statistics(amax, config.calibration.margin, config.precision.scale_rule)


def store_scales(run: LiveRun, version: int, amax: list[LayerAmax]) -> Ref:
    """Scales for one version of the policy, with the magnitudes the next average starts from."""
    content: dict[str, Any] = {
        "version": version,
        "rule": run.config.precision.scale_rule,
        "layers": [vars(layer) for layer in scales_of(run.config, amax)],
        "amax": [vars(layer) for layer in amax],
    }
    return run.directory.store.put_json("scales", content)


def read_scales(run: LiveRun, scales: Ref) -> PolicyScales:
    """Stored scales as the engine and the decoder take them."""
    content = run.directory.store.get_json(scales)
    return PolicyScales(content["version"], tuple(LayerScales(**layer) for layer in content["layers"]))


def lag_error(config: RunConfig, in_force: PolicyScales, statistics: dict[str, Any]) -> float:
    """How far the scales of a step are from those its own statistics give, in powers of two (`scale_distance`).

    The scales in force come from earlier steps and their average; this is what that costs.
    """
    fresh = scales_of(config, covered(config, read_histograms(statistics)))
    return scale_distance(in_force.layers, fresh)


def read_histograms(statistics: dict[str, Any]) -> list[LayerHistograms]:
    """Histograms of an artifact of kind `kv_statistics`."""
    return [
        LayerHistograms(**{name: _histogram(**stored) for name, stored in layer.items()})
        for layer in statistics["histograms"]
    ]


def _histogram(amax: float, first: int, counts: list[int]) -> MagnitudeHistogram:
    return MagnitudeHistogram(amax, first, tuple(counts))
