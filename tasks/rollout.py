"""Generate the completions of an iteration; finished groups are durable as they come."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.models.tokenizer import Tokenizer
from fp8core.rl.columns import routes_column
from fp8core.rollout.engine import Completion, PromptGroup, Sampling
from fp8core.rollout.seeds import sample_seed
from fp8core.store.artifacts import Ref
from fp8core.store.shards import RolloutShards
from fp8core.store.tables import ORDER, ROLLOUTS, ROUTED_ROLLOUTS
from fp8core.workers.live import LiveRun
from tasks.reward import answers_of
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"rollouts": "rollouts"},
)
def rollout(run: LiveRun, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete every prompt `group_size` times under the given policy and scales.

    Groups that an interrupted run has finished are read from its shards, those of a damaged shard are generated again.
    The shards go when the step is committed: until then they are the only copy the ledger can rebuild from. The
    verifier may begin with finished groups while others are generated; its verdicts are the reward step's to store.
    """
    asked = run.directory.store.get_table(prompts)
    groups = prompt_groups(run, index, asked)
    shards = RolloutShards(shard_folder(run, index))
    for error in shards.discard_damaged():
        run.console.note(f"step {index}: {error}; its completions are generated again")
    done = shards.read()
    finished = set(done["group"].to_pylist()) if done is not None else set()
    config = run.config.rollout
    sampling = Sampling(config.temperature, config.max_new_tokens, run.tokenizer.eos_ids, config.router_replay)
    schema = ROUTED_ROLLOUTS if config.router_replay else ROLLOUTS
    tables = [done.cast(schema)] if done is not None else []
    for completions in run.ready_engine().generate([g for g in groups if g.group not in finished], sampling):
        table = rollout_table(completions, groups, run.tokenizer, schema)
        shards.append(table)
        tables.append(table)
        run.verifier.begin(answers_of(asked, table))
    run.ready_engine().rest()
    rollouts = pa.concat_tables(tables).sort_by(ORDER).combine_chunks()
    return {"rollouts": run.directory.store.put_table("rollouts", rollouts)}


def shard_folder(run: LiveRun, index: int) -> Path:
    """Where the finished groups of an iteration wait for its commit."""
    return run.directory.path / "shards" / f"{index:05d}"


def prompt_groups(run: LiveRun, index: int, prompts: pa.Table) -> list[PromptGroup]:
    """Requests of an iteration, with one seed a sample; `prompts` is of kind `prompts`."""
    samples = tuple(range(run.config.rollout.group_size))
    return [
        PromptGroup(
            group=row["group"],
            prompt_id=row["prompt_id"],
            prompt=tuple(row["tokens"]),
            samples=samples,
            seeds=tuple(sample_seed(run.config.seed, index, row["group"], sample) for sample in samples),
        )
        for row in prompts.to_pylist()
    ]


def rollout_table(
    completions: Sequence[Completion], groups: list[PromptGroup], tokenizer: Tokenizer, schema: pa.Schema
) -> pa.Table:
    """Completions as a table of kind `rollouts`, with the columns of the schema; groups are indexed by their number."""
    by_number = {group.group: group for group in groups}
    rows = [
        {
            "group": done.group,
            "sample": done.sample,
            "prompt_id": by_number[done.group].prompt_id,
            "seed": by_number[done.group].seeds[done.sample],
            "prompt_tokens": list(by_number[done.group].prompt),
            "tokens": done.tokens,
            "logprobs": done.logprobs,
            "written": [True] * len(done.tokens),
            "finish": done.finish,
            "text": completion_text(done, tokenizer),
        }
        for done in completions
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    if "experts" not in schema.names:
        return table
    chosen = [done.experts for done in completions if done.experts is not None]
    assert len(chosen) == len(completions), "the engine was asked for experts and reported none"
    return table.append_column(schema.field("experts"), routes_column(chosen))


def completion_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """The completion as text, without its stop token."""
    stopped = completion.finish == "stop"
    return tokenizer.decode(completion.tokens[:-1] if stopped else completion.tokens)
