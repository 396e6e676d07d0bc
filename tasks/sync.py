"""Ship weights and scales to the rollout engine, read them back, and compare; then score a probe on both sides."""

from fp8core.config.steps import NoOptions
from fp8core.run.batches import read_scales
from fp8core.run.context import StepContext
from fp8core.run.policy import push
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"next_policy": "policy", "next_scales": "scales"},
    optional_inputs={"next_stream": "stream"},
    outputs={"sync_report": "sync_report"},
)
def sync(
    run: StepContext, index: int, options: NoOptions, next_policy: Ref, next_scales: Ref, next_stream: Ref | None = None
) -> dict[str, Ref]:
    """`next_stream`: what was generated beside the update, which has ended."""
    expected = run.store.get_json(next_policy)
    trainer = run.trainer
    assert trainer.version == expected["version"], "the trainer does not hold the policy of this step"
    report = push(run, read_scales(run, next_scales))
    return {"sync_report": run.store.put_json("sync_report", report)}
