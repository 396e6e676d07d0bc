"""Scales of Q, K and V for the next policy."""

from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.numerics.kv_scales import average_amax
from fp8core.run.batches import read_amax, store_scales, token_batch
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"kv_statistics": "kv_statistics", "scales": "scales", "next_policy": "policy"},
    optional_inputs={"rollouts": "rollouts"},
    outputs={"next_scales": "scales"},
)
def calibrate(
    run: StepContext,
    index: int,
    options: NoOptions,
    kv_statistics: Ref,
    scales: Ref,
    next_policy: Ref,
    rollouts: Ref | None = None,
) -> dict[str, Ref]:
    """s_{i+1}: the average over steps of amax in the log-prob pass under v_i, or in a fresh pass under v_{i+1}."""
    store = run.store
    version = store.get_json(next_policy)["version"]
    previous = read_amax(store.get_json(scales))
    if run.config.calibration.source == "logprob_pass":
        current = read_amax(store.get_json(kv_statistics))
    else:
        if rollouts is None:
            raise UserError("calibration.source=fresh_pass needs the rollouts: add them to the needs of calibrate")
        table = store.get_table(rollouts, ["prompt_tokens", "tokens"])
        current = run.trainer.statistics(token_batch(table, run.config)).amax()
    amax = average_amax(previous, current, run.config.calibration.average)
    return {"next_scales": store_scales(run, version, amax)}
