"""Greedy accuracy on held-out prompts, answered by the rollout engine in its own precision."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import StepContext
from fp8core.run.execute import stored_manifest
from fp8core.run.heldout import heldout_artifacts, stored_evaluation
from fp8core.run.rollouts import judgement_table, turn_table
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"sync_report": "sync_report", "next_policy": "policy", "next_scales": "scales"},
    outputs={"evaluation": "evaluation"},
    outputs_where={"environment": {"heldout_turns": "turns"}, "judge": {"heldout_judgements": "judgements"}},
)
def evaluate(
    run: StepContext, index: int, options: NoOptions, sync_report: Ref, next_policy: Ref, next_scales: Ref
) -> dict[str, Ref]:
    """Every `evaluation.every` steps and at the last; the evaluation of other steps is empty."""
    if _due(run, index):
        return heldout_artifacts(run, index)
    return stored_evaluation(run, {}, turn_table([], run.config), judgement_table(run.config, []))


def _due(run: StepContext, index: int) -> bool:
    """True every so many steps, and for the last one; what was the last when it was committed stays so."""
    is_committed = run.ledger.step(index) is not None
    last = stored_manifest(run, index).record.steps if is_committed else run.config.steps
    return index % run.config.evaluation.every == 0 or index == last
