"""Scales of Q, K and V: from magnitudes, as artifacts, and back."""

from typing import Any

from fp8core.config.run import RunConfig
from fp8core.errors import StoredFileError
from fp8core.numerics.kv_scales import LayerAmax, LayerScales, scale_distance, scales_from_statistics
from fp8core.rollout.engine import PolicyScales
from fp8core.run.context import RunContext
from fp8core.store.artifacts import Ref


def scales_of(config: RunConfig, amax: list[LayerAmax]) -> list[LayerScales]:
    return scales_from_statistics(amax, config.calibration.margin, config.precision.recipe.cache)


def lag_error(config: RunConfig, in_force: PolicyScales, statistics: dict[str, Any]) -> float:
    """Distance of a step's scales from those its own statistics give, in powers of two (`scale_distance`).

    The scales in force come from earlier steps and their average; this is the error of that.
    """
    fresh = scales_of(config, read_amax(statistics))
    return scale_distance(in_force.layers, fresh)


def store_scales(run: RunContext, version: int, amax: list[LayerAmax]) -> Ref:
    """Scales for one version of the policy, with the magnitudes the next average starts from."""
    content: dict[str, Any] = {
        "version": version,
        "rule": run.config.precision.recipe.cache,
        "layers": [vars(layer) for layer in scales_of(run.config, amax)],
        "amax": [vars(layer) for layer in amax],
    }
    return run.directory.store.put_json("scales", content)


def read_scales(run: RunContext, scales: Ref) -> PolicyScales:
    store = run.directory.store
    content = store.get_json(scales)
    if len(content["layers"]) != run.arch.num_layers:
        raise StoredFileError(
            f"{store.path(scales)}: layers: {len(content['layers'])}, but the model has {run.arch.num_layers}"
        )
    return PolicyScales(content["version"], tuple(LayerScales(**layer) for layer in content["layers"]))


def read_amax(content: dict[str, Any]) -> list[LayerAmax]:
    """Of stored statistics, or scales."""
    return [LayerAmax(**layer) for layer in content["amax"]]
