"""Greedy accuracy on held-out prompts, answered by the rollout engine in its own precision."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.rewards.scorer import Answer
from fp8core.rewards.verdict import OUTCOMES, Verdict
from fp8core.rollout.engine import Completion, PromptGroup, Sampling
from fp8core.store.artifacts import Ref
from fp8core.workers.live import LiveRun
from tasks.prompts import prompt_table
from tasks.reward import tell_failures
from tasks.rollout import completion_text
from tasks.step import step


@step(
    inputs={"sync_report": "sync_report", "next_policy": "policy", "next_scales": "scales"},
    outputs={"evaluation": "evaluation"},
)
def evaluate(
    run: LiveRun, index: int, options: NoOptions, sync_report: Ref, next_policy: Ref, next_scales: Ref
) -> dict[str, Ref]:
    """Every `evaluation.every` steps and at the last; the evaluation of other steps is empty."""
    due = index % run.config.evaluation.every == 0 or index == run.config.steps
    content = heldout_accuracy(run) if due else {}
    return {"evaluation": run.directory.store.put_json("evaluation", content)}


def heldout_accuracy(run: LiveRun) -> dict[str, Any]:
    """Accuracy, count and mean length over the held-out prompts."""
    prompts = prompt_table(run, run.source.heldout(run.config.evaluation.prompts))
    sampling = Sampling(0.0, run.config.rollout.max_new_tokens, run.tokenizer.eos_ids)
    groups = [
        PromptGroup(
            group=row["group"], prompt_id=row["prompt_id"], prompt=tuple(row["tokens"]), samples=(0,), seeds=(0,)
        )
        for row in prompts.to_pylist()
    ]
    completions = [done for batch in run.ready_engine().generate(groups, sampling) for done in batch]
    verdicts = judge(run, prompts, completions)
    tell_failures(run, "held-out prompts", verdicts)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    return {
        "accuracy": sum(verdict.score for verdict in verdicts) / len(verdicts),
        "prompts": len(verdicts),
        "length_mean": sum(len(done.tokens) for done in completions) / len(completions),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
    }


def judge(run: LiveRun, prompts: pa.Table, completions: Sequence[Completion]) -> list[Verdict]:
    """The verdict on each completion; `prompts` is a table of kind `prompts`, in order of group."""
    asked = prompts.select(["text", "reference"]).to_pylist()
    return run.verifier.verify(
        [
            Answer(asked[done.group]["text"], text, asked[done.group]["reference"], done.finish)
            for done in completions
            for text in [completion_text(done, run.tokenizer)]
        ]
    )
