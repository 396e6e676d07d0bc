"""Generate ahead of the update: the stream of completions, and what leaves it for a step (`rollout.stream`)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

import pyarrow as pa
import torch

from fp8core.config.steps import NoOptions
from fp8core.rl.batch import column, pad
from fp8core.rollout.engine import Completion, Finish, PromptGroup, Sampling, sample_seed
from fp8core.rollout.stream import Enter, Pace, Place, Row, Stream, run_ahead
from fp8core.rollout.stream import finish as finish_step
from fp8core.run.behaviour import behaviour_logprobs, verified_rows
from fp8core.run.context import RunContext
from fp8core.run.rollouts import prompt_table, rollout_table, shard_folder
from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.tables import LOGPROBS, ROLLOUTS, STREAM, VERSIONS
from tasks.logprobs import token_batch
from tasks.step import step


@step(
    inputs={"stream": "stream", "policy": "policy", "scales": "scales"},
    outputs={"prompts": "prompts", "rollouts": "rollouts", "left": "stream", "behaviour": "behaviour"},
)
def finish(run: RunContext, index: int, options: NoOptions, stream: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete the prompts of a step under the newest policy; what else is in flight writes as long.

    `behaviour` has the log-probs of a share of the completions, by the weights of the version that wrote each token.
    """
    store = run.directory.store
    opened = _opened(run, stream, index - 1)
    rows = finish_step(opened, index, _Written(run, index), _entering(run))
    prompts = prompt_table(run, run.source.training(index, run.config.rollout.drawn_prompts, run.config.seed))
    rollouts = _rollouts(run, rows)
    return {
        "prompts": store.put_table("prompts", prompts),
        "rollouts": store.put_table("rollouts", rollouts),
        "left": store.put_table("stream", _table(opened.rows)),
        "behaviour": store.put_table("behaviour", _behaviour(run, index, rollouts, rows)),
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
    run_ahead(opened, index - 1, tokens, _Written(run, index), _entering(run))
    return {"next_stream": run.directory.store.put_table("stream", _table(opened.rows))}


def _opened(run: RunContext, stream: Ref, left: int) -> Stream:
    pipeline = run.config.pipeline
    pace = Pace(run.config.rollout.drawn_prompts, pipeline.max_staleness, pipeline.max_inflight_prompts)
    rows = [Row(**row) for row in run.directory.store.get_table(stream).to_pylist()]
    return Stream(rows, pace, left)


def _entering(run: RunContext) -> Enter:
    """The completions of a prompt that enters, with the seeds that a synchronous run has."""
    asked: dict[int, list[dict[str, Any]]] = {}

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


class _Written:
    """Generation by the run's engine; what is complete is durable as it comes, and is not generated again.

    All of it is of one policy. So of what a killed process wrote, any part from any token on is what would be written.
    """

    def __init__(self, run: RunContext, index: int) -> None:
        rollout = run.config.rollout
        self._run, self._version = run, index - 1
        self._sampling = Sampling(rollout.temperature, rollout.max_new_tokens, run.tokenizer.eos_ids)
        self._shards = RolloutShards(shard_folder(run, index), "stream")
        for error in self._shards.discard_damaged():
            run.console.note(f"step {index}: {error}; its completions are generated again")
        kept = self._shards.read()
        rows = [] if kept is None else [Row(**row) for row in kept.to_pylist()]
        self._kept = {(row.batch, row.group, row.sample): row for row in rows}

    def __call__(self, groups: Sequence[PromptGroup], places: Sequence[Place]) -> Iterator[list[Completion]]:
        asked = list[PromptGroup]()
        for group in groups:
            found = self._found(group, places[group.group])
            if found is None:
                asked.append(group)
            else:
                yield found
        for finished in self._run.ready_engine().generate(asked, self._sampling) if asked else ():
            by_number = {group.group: group for group in asked}
            rows = [self._row(done, by_number[done.group], places[done.group]) for done in finished]
            self._shards.append(_table(rows))
            yield finished

    def _found(self, group: PromptGroup, place: Place) -> list[Completion] | None:
        """The completions of a group from what was kept, if all of them are there."""
        found = list[Completion]()
        for i, sample in enumerate(group.samples):
            row = self._kept.get((*place, sample))
            begun = len(group.begun[i]) if group.begun else 0
            room = group.room[i] if group.room else self._sampling.max_new_tokens
            if row is None or (not row.finish and len(row.tokens) < begun + room):
                return None
            end = min(len(row.tokens), begun + room)
            finish = cast(Finish, row.finish) if end == len(row.tokens) and row.finish else "open"
            found.append(Completion(group.group, sample, row.tokens[begun:end], row.logprobs[begun:end], finish))
        return found

    def _row(self, done: Completion, group: PromptGroup, place: Place) -> Row:
        """A completion with what it went on from, whose log-probs are not asked for again: the stream has them."""
        i = group.samples.index(done.sample)
        begun = list(group.begun[i]) if group.begun else []
        finish = "" if done.finish == "open" else done.finish
        unknown = [0.0] * len(begun)
        return Row(
            *(*place, done.sample, group.prompt_id, group.seeds[i], list(group.prompt)),
            *(begun + done.tokens, unknown + done.logprobs),
            *([self._version] * (len(begun) + len(done.tokens)), finish),
        )


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=STREAM)


def _rollouts(run: RunContext, rows: Sequence[Row]) -> pa.Table:
    """The completions of a step as a table of kind `rollouts`; versions only where they can differ."""
    completions = [
        Completion(row.group, row.sample, row.tokens, row.logprobs, cast(Finish, row.finish)) for row in rows
    ]
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
