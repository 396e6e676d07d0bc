"""Score rollouts under the trainer's policy, and collect the statistics its KV scales are calibrated from."""

from fp8core.config.steps import NoOptions
from fp8core.run.batches import SCORED_COLUMNS, policy_batch, read_scales, stored_scores, trainer_of_policy
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"rollouts": "rollouts", "policy": "policy", "scales": "scales"},
    outputs={"logprobs": "logprobs", "kv_statistics": "kv_statistics"},
)
def logprobs(
    run: StepContext, index: int, options: NoOptions, rollouts: Ref, policy: Ref, scales: Ref
) -> dict[str, Ref]:
    trainer = trainer_of_policy(run, policy)
    table = run.store.get_table(rollouts, SCORED_COLUMNS)
    current = read_scales(run, scales)
    batch = policy_batch(table, run.config)
    score = trainer.logprobs(batch, run.config.rollout.temperature, current.layers)
    return stored_scores(run, trainer.version, table, score)
