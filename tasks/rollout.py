"""Generate the completions of an iteration; finished groups, and finished episodes, are durable as they come."""

from collections.abc import Sequence

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.rl.batch import column, pad, pad_column
from fp8core.rollout.engine import Completion
from fp8core.run.batches import token_batch
from fp8core.run.context import StepContext
from fp8core.run.draws import Draws
from fp8core.run.refill import select, stored_selection
from fp8core.run.resume import behaviour_logprobs, verified_rows
from fp8core.run.rollouts import check_episodes, row_tables
from fp8core.run.stream import Stream, StreamLimits, StreamWriter, complete_step, open_stream, table_in_flight
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS
from fp8core.training.trainer import LogprobError, first_differing
from tasks.step import step


@step(
    inputs={"policy": "policy", "scales": "scales"},
    inputs_where={"prompts_first": {"prompts": "prompts"}, "ahead": {"stream": "stream"}, "by_use": {"draws": "draws"}},
    outputs={"rollouts": "rollouts"},
    outputs_where={
        "environment": {"turns": "turns"},
        "ahead": {"prompts": "prompts", "left": "stream", "behaviour": "behaviour"},
        "by_use": {"prompts": "prompts", "rewards": "rewards", "visits": "visits", "drawn": "draws"},
        "refill": {"dropped": "dropped"},
        "judge_by_use": {"judgements": "judgements"},
    },
    carries={"draws": "drawn"},
)
def rollout(
    run: StepContext,
    index: int,
    options: NoOptions,
    policy: Ref,
    scales: Ref,
    prompts: Ref | None = None,
    stream: Ref | None = None,
    draws: Ref | None = None,
) -> dict[str, Ref]:
    """Answer the prompts, or what `stream` has of this step; what else is in flight there writes as long.

    With `draws` the step chooses its prompts itself, and others by the rewards of the first.

    Policy and scales order the steps and enter the key: the last sync gave both to the engine. Raises UserError: every
    episode ended before the policy's first turn, or by a failure of the environment."""
    store = run.store
    config = run.config
    prompt_tables = {} if prompts is None else {index: store.get_table(prompts)}
    if stream is None:
        count = config.rollout.drawn_prompts if prompts is None else len(prompt_tables[index])
        open_rows = Stream([], StreamLimits(count, 0, None), index - 1)
    else:
        open_rows = open_stream(run, stream, index - 1)
    order = None if draws is None else Draws(run, draws)
    writer = StreamWriter(run, index, open_rows.rows, prompt_tables, order)
    judged_batches = open_rows.whole()
    rows = complete_step(run, index, open_rows, writer)
    # Before the log-probs are verified: some episode must have a token for that.
    if index not in judged_batches:
        check_episodes(run, index, rows)
    outputs = dict[str, Ref]()
    if order is not None:
        selection = select(run, index, rows, open_rows, writer, order)
        rows = selection.rows
        outputs = stored_selection(run, index, selection, order)
    run.sleep_engine()
    rollouts, turns = row_tables(rows, config, run.tokenizer)
    outputs["rollouts"] = store.put_table("rollouts", rollouts)
    if turns is not None:
        outputs["turns"] = store.put_table("turns", turns)
    if prompts is None:
        groups = sorted({row.group for row in rows})
        outputs["prompts"] = store.put_table("prompts", writer.prompts(index).take(groups))
    if stream is None:
        return outputs
    return outputs | {
        "left": store.put_table("stream", table_in_flight(run, open_rows.rows)),
        "behaviour": store.put_table("behaviour", behaviour_table(run, index, rollouts, rows)),
    }


def behaviour_table(run: StepContext, index: int, rollouts: pa.Table, rows: Sequence[Completion]) -> pa.Table:
    """Raises LogprobError: the loss takes the rollout's log-probs as they are, and one of these is not equal."""
    rows_to_verify = verified_rows(run, index, pad_column(rollouts["written"], torch.bool, False))
    versions = pad([rows[i].versions for i in rows_to_verify], torch.int64, -1)
    sample_table = rollouts.take(rows_to_verify)
    score = behaviour_logprobs(run, token_batch(sample_table, run.config), versions)
    if run.config.logprobs.source == "rollout":
        for row, ours in zip(sample_table.to_pylist(), score[0], strict=True):
            theirs = torch.tensor(row["logprobs"])
            policy_mask = torch.tensor(row["written"])
            if differing := first_differing(theirs, ours[: len(theirs)], policy_mask):
                raise LogprobError(f"group {row['group']}, sample {row['sample']}, {differing}; no update was begun")
    lengths = (versions >= 0).sum(dim=1).numpy()
    columns = {
        "group": pa.array([rows[i].group for i in rows_to_verify], pa.int32()),
        "sample": pa.array([rows[i].sample for i in rows_to_verify], pa.int32()),
        "logprobs": column(score[0], lengths),
        "entropy": column(score[1], lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
