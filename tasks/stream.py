"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.rl.batch import column, pad
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, sample_seed
from fp8core.rollout.stream import Pace, Row, Stream, run_ahead
from fp8core.rollout.stream import finish as finish_step
from fp8core.run.behaviour import behaviour_logprobs, verified_rows
from fp8core.run.context import RunContext
from fp8core.run.rollouts import prompt_table, rollout_table
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS, ROLLOUTS, STREAM, VERSIONS
from tasks.logprobs import token_batch
from tasks.step import step


@step(
    inputs={"stream": "stream", "policy": "policy", "scales": "scales"},
    outputs={"prompts": "prompts", "rollouts": "rollouts", "left": "stream", "behaviour": "logprobs"},
)
def finish(run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete the prompts of a step under the newest policy; what else is in flight writes as long.

    `behaviour` has the log-probs of a share of the completions, by the weights of the version that wrote each token.
    """
    store = run.directory.store
    opened = _opened(run, stream, index - 1)
    rows = finish_step(opened, index, _generate(run), _entering(run))
    prompts = prompt_table(run, run.source.training(index, run.config.rollout.drawn_prompts, run.config.seed))
    rollouts = _rollouts(run, rows)
    return {
        "prompts": store.put_table("prompts", prompts),
        "rollouts": store.put_table("rollouts", rollouts),
        "left": store.put_table("stream", _table(opened.rows)),
        "behaviour": store.put_table("logprobs", _behaviour(run, index, rollouts, rows)),
    }


@step(
    inputs={"left": "stream", "policy": "policy", "scales": "scales"},
    outputs={"next_stream": "stream"},
)
def ahead(run: RunContext, index: int, options: NoOptions, left: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Write beside the update, under the policy that it starts from: it runs while reward, log-probs and train do."""
    opened = _opened(run, left, index)
    pipeline = run.config.pipeline
    tokens = None if pipeline.mode == "one_step_off" else pipeline.ahead_tokens
    run_ahead(opened, index - 1, tokens, _generate(run), _entering(run))
    return {"next_stream": run.directory.store.put_table("stream", _table(opened.rows))}


def _opened(run: RunContext, stream: Ref, left: int) -> Stream:
    pipeline = run.config.pipeline
    pace = Pace(run.config.rollout.drawn_prompts, pipeline.max_staleness, pipeline.max_inflight_prompts)
    rows = [Row(**row) for row in run.directory.store.get_table(stream).to_pylist()]
    return Stream(rows, pace, left)


def _entering(run: RunContext):  # type: ignore[no-untyped-def]
    """The completions of a prompt that enters, with the seeds that a synchronous run has."""
    asked: dict[int, list[dict[str, object]]] = {}

    def enter(batch: int, group: int) -> list[Row]:
        if batch not in asked:
            problems = run.source.training(batch, run.config.rollout.drawn_prompts, run.config.seed)
            asked[batch] = prompt_table(run, problems).to_pylist()
        row, seed = asked[batch][group], run.config.seed
        return [
            Row(batch, group, i, row["prompt_id"], sample_seed(seed, batch, group, i), row["tokens"])
            for i in range(run.config.rollout.group_size)
        ]

    return enter


def _generate(run: RunContext):  # type: ignore[no-untyped-def]
    rollout = run.config.rollout
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, run.tokenizer.eos_ids)

    def generate(groups: Sequence[PromptGroup]) -> Iterable[list[Completion]]:
        return run.ready_engine().generate(groups, sampling)

    return generate


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=STREAM)


def _rollouts(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    """The completions of a step as a table of kind `rollouts`; versions only where they can differ."""
    completions = [Completion(row.group, row.sample, row.tokens, row.logprobs, row.finish) for row in rows]
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    asked = [
        PromptGroup(
            group=group,
            prompt_id=each[0].prompt_id,
            prompt=tuple(each[0].prompt_tokens),
            samples=tuple(row.sample for row in each),
            seeds=tuple(row.seed for row in each),
        )
        for group, each in groups.items()
    ]
    table = rollout_table(run, completions, asked, ROLLOUTS)
    if run.config.pipeline.max_staleness == 0:
        return table
    return table.append_column(VERSIONS, pa.array([row.versions for row in rows], VERSIONS.type))


def _behaviour(run: RunContext, index: int, rollouts: pa.Table, rows: Sequence[Row]) -> pa.Table:
    chosen = verified_rows(run, index, len(rows))
    versions = pad([rows[i].versions for i in chosen], torch.int64, -1)
    scored = behaviour_logprobs(run, token_batch(rollouts.take(chosen)), versions)
    lengths = (versions >= 0).sum(dim=1).numpy()
    columns = {
        "group": pa.array([rows[i].group for i in chosen], pa.int32()),
        "sample": pa.array([rows[i].sample for i in chosen], pa.int32()),
        "logprobs": column(scored[0], lengths),
        "entropy": column(scored[1], lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
