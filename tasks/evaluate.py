"""Greedy accuracy on held-out prompts, answered by the rollout engine in its own precision."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import RunContext
from fp8core.run.rollouts import heldout_accuracy
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"sync_report": "sync_report", "next_policy": "policy", "next_scales": "scales"},
    outputs={"evaluation": "evaluation"},
)
def evaluate(
    run: RunContext, index: int, options: NoOptions, sync_report: Ref, next_policy: Ref, next_scales: Ref
) -> dict[str, Ref]:
    """Every `evaluation.every` steps and at the last; the evaluation of other steps is empty."""
    due = index % run.config.evaluation.every == 0 or index == run.config.steps
    content = heldout_accuracy(run, run.ready_engine(), run.config.evaluation.prompts) if due else {}
    return {"evaluation": run.directory.store.put_json("evaluation", content)}
