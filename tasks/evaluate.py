"""Greedy accuracy on held-out prompts, answered by the rollout engine in its own precision."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import RunContext
from fp8core.run.execute import stored_manifest
from fp8core.run.rollouts import heldout_artifacts, stored_evaluation
from fp8core.store.artifacts import Ref
from fp8core.store.tables import TURNS
from tasks.step import step

_INPUTS = {"sync_report": "sync_report", "next_policy": "policy", "next_scales": "scales"}


@step(inputs=_INPUTS, outputs={"evaluation": "evaluation"})
def evaluate(
    run: RunContext, index: int, options: NoOptions, sync_report: Ref, next_policy: Ref, next_scales: Ref
) -> dict[str, Ref]:
    """Every `evaluation.every` steps and at the last; the evaluation of other steps is empty."""
    return heldout_artifacts(run, index) if _due(run, index) else stored_evaluation(run, {}, None)


@step(inputs=_INPUTS, outputs={"heldout_turns": "turns", "evaluation": "evaluation"})
def evaluate_episodes(
    run: RunContext, index: int, options: NoOptions, sync_report: Ref, next_policy: Ref, next_scales: Ref
) -> dict[str, Ref]:
    return heldout_artifacts(run, index) if _due(run, index) else stored_evaluation(run, {}, TURNS.empty_table())


def _due(run: RunContext, index: int) -> bool:
    """True every so many steps, and for the last one; what was the last when it was committed stays so."""
    committed = run.directory.ledger.step(index) is not None
    last = stored_manifest(run, index).record.steps if committed else run.config.steps
    return index % run.config.evaluation.every == 0 or index == last
