"""Optional step: log-probs under the frozen reference policy, for the KL penalty of `loss.reference_kl`."""

from fp8core.config.steps import NoOptions
from fp8core.run.batches import SCORED_COLUMNS, logprob_table, read_scales, token_batch
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={"rollouts": "rollouts", "scales": "scales"}, outputs={"reference": "logprobs"})
def reference(run: StepContext, index: int, options: NoOptions, rollouts: Ref, scales: Ref) -> dict[str, Ref]:
    """The reference is the policy the run started GRPO from: after the warm start, or the checkpoint itself."""
    run.sleep_engine()
    if run.workers.reference is None:
        run.workers.reference = run.build_reference()
    table = run.store.get_table(rollouts, SCORED_COLUMNS)
    current = read_scales(run, scales).layers
    score = run.workers.reference.logprobs(token_batch(table), run.config.rollout.temperature, current)
    run.workers.reference.rest()
    return {"reference": run.store.put_table("logprobs", logprob_table(table, score))}
