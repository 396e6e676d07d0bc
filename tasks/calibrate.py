"""Scales of Q, K and V for the next policy."""

from typing import Any

from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.numerics.kv_scales import LayerAmax, LayerScales, average_amax, scales_from_statistics
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
        current = [LayerAmax(**layer) for layer in store.get_json(kv_statistics)["amax"]]
    else:
        if rollouts is None:
            raise UserError("calibration.source=fresh_pass needs the rollouts: add them to the needs of calibrate")
        table = store.get_table(rollouts)
        sequences = TokenBatch.of(table["prompt_tokens"].to_pylist(), table["tokens"].to_pylist())
        current = run.ready_trainer().statistics(sequences)
    averaged = average_amax(previous, current, run.config.calibration.average)
    return {"next_scales": store_scales(run, version, averaged)}


def store_scales(run: LiveRun, version: int, amax: list[LayerAmax]) -> Ref:
    """Scales for one version of the policy, with the statistics the next average starts from."""
    rule = run.config.precision.scale_rule
    layers = scales_from_statistics(amax, run.config.calibration.margin, rule)
    content: dict[str, Any] = {
        "version": version,
        "rule": rule,
        "layers": [vars(layer) for layer in layers],
        "amax": [vars(layer) for layer in amax],
    }
    return run.directory.store.put_json("scales", content)


def read_scales(run: LiveRun, scales: Ref) -> PolicyScales:
    """Stored scales as the engine and the decoder take them."""
    content = run.directory.store.get_json(scales)
    return PolicyScales(content["version"], tuple(LayerScales(**layer) for layer in content["layers"]))
