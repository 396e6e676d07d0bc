"""Optional step: log-probs under the reference policy, for the KL penalty of `loss.reference_kl`."""

from fp8core.config.steps import NoOptions
from fp8core.run.batches import SCORED_COLUMNS, logprob_table, read_scales, token_batch
from fp8core.run.context import StepContext
from fp8core.run.reference import reference_trainer
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"rollouts": "rollouts", "scales": "scales"},
    inputs_where={"mixed_reference": {"reference_policy": "reference_policy"}},
    outputs={"reference": "logprobs"},
)
def reference(
    run: StepContext, index: int, options: NoOptions, rollouts: Ref, scales: Ref, reference_policy: Ref | None = None
) -> dict[str, Ref]:
    """The reference is the policy the run started GRPO from: after the warm start, or the checkpoint itself. With
    `loss.reference` it follows the policy."""
    run.sleep_engine()
    trainer = reference_trainer(run, reference_policy)
    table = run.store.get_table(rollouts, SCORED_COLUMNS)
    batch = token_batch(table, run.config)
    score = trainer.logprobs(batch, run.config.rollout.temperature, read_scales(run, scales).layers)
    trainer.rest()
    return {"reference": run.store.put_table("logprobs", logprob_table(table, score))}
