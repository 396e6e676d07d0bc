"""Optional step: log-probs under the teacher of `loss.distillation`."""

from fp8core.config.steps import NoOptions
from fp8core.run.batches import SCORED_COLUMNS, logprob_table, token_batch
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={"rollouts": "rollouts"}, outputs={"teacher": "logprobs", "teacher_checkpoint": "teacher_checkpoint"})
def teacher(run: StepContext, index: int, options: NoOptions, rollouts: Ref) -> dict[str, Ref]:
    """The identity of the teacher's weights is in each step's record."""
    run.sleep_engine()
    if run.workers.teacher is None:
        run.workers.teacher = run.build_teacher()
        run.workers.teacher_digest = run.workers.teacher.digest()
    store = run.store
    settings = run.config.loss.distillation
    table = store.get_table(rollouts, SCORED_COLUMNS)
    batch = token_batch(table, run.config)
    score = run.workers.teacher.logprobs(batch, run.config.rollout.temperature, ())
    run.workers.teacher.rest()
    checkpoint = {
        "model": settings.teacher,
        "revision": settings.revision,
        "weights_digest": run.workers.teacher_digest,
    }
    return {
        "teacher": store.put_table("logprobs", logprob_table(table, score)),
        "teacher_checkpoint": store.put_json("teacher_checkpoint", checkpoint),
    }
