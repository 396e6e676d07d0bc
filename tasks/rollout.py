"""Generate the completions of an iteration; finished groups, and finished episodes, are durable as they come."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.progress import tell_progress
from fp8core.rollout.episode import Episode
from fp8core.run.context import RunContext
from fp8core.run.episodes import EpisodePlayer, seconds_of, turns_table
from fp8core.run.rollouts import (
    check_episodes,
    environment_of,
    prompt_groups,
    rollout_table,
    shards_of,
    while_going,
)
from fp8core.run.verdicts import answers, stored_endings
from fp8core.store.artifacts import Ref
from fp8core.store.tables import (
    ORDER,
    ROLLOUTS,
    ROUTED_ROLLOUTS,
    SHARD_TURNS,
    TURN_ORDER,
    keys_of,
    nested_turns,
    unnested_turns,
)
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"rollouts": "rollouts"},
)
def rollout(run: RunContext, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Complete every prompt `group_size` times under the given policy and scales.

    The last sync gave both to the engine: as inputs they order the steps and enter the key. Finished groups are read
    from shards after a kill; the verifier may begin with them while others are generated."""
    return {"rollouts": run.directory.store.put_table("rollouts", _generate(run, index, prompts))}


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"turns": "turns", "rollouts": "rollouts"},
)
def episodes(run: RunContext, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """As `rollout`, with an environment that answers. Episodes that were cut begin again with the same seeds.

    Raises UserError: every episode ended before the policy's first turn, or by a failure of the environment."""
    store, played = run.directory.store, _generate(run, index, prompts)
    turns = unnested_turns(played).sort_by(TURN_ORDER).combine_chunks()
    check_episodes(run, index, "rollouts", turns)
    return {
        "turns": store.put_table("turns", turns),
        "rollouts": store.put_table("rollouts", played.drop_columns([SHARD_TURNS])),
    }


def _generate(run: RunContext, index: int, prompts: Ref) -> pa.Table:
    """All completions of the step, in order; with an environment, each with its turns (`SHARD_TURNS`)."""
    asked = run.directory.store.get_table(prompts)
    groups, rows = prompt_groups(run, index, asked), asked.drop_columns(["tokens"]).to_pylist()
    shards = shards_of(run, index)
    for error in shards.discard_damaged():
        run.console.note(f"step {index}: {error}; its completions are generated again")
    done = shards.read()
    finished = defaultdict[int, set[int]](set)
    for group, sample in [] if done is None else keys_of(done):
        finished[group].add(sample)
    player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
    sampling = replace(player.sampling(), report_experts=run.config.rollout.router_replay)
    schema = ROUTED_ROLLOUTS if sampling.report_experts else ROLLOUTS
    tables = []

    def table_of(batch: Sequence[Episode]) -> pa.Table:
        table = rollout_table(run, [one.completion for one in batch], groups, schema, [one.prompt for one in batch])
        if run.config.environment is None:
            return table
        return table.append_column(SHARD_TURNS, nested_turns(table, turns_table(batch, run.tokenizer)))

    if done is not None:
        tables.append(done.cast(schema) if run.config.environment is None else done)
    # Of a group that the environment had begun, some episodes may be there.
    open_groups = [left for group in groups if (left := group.without(finished[group.group])).samples]
    with environment_of(run, index, "turns") as pool:
        played = player.play(run.ready_engine(), open_groups, rows, sampling, pool)
        finished_now, missing = 0, sum(len(group.samples) for group in open_groups)
        tell_progress(finished_now, missing)
        for batch in while_going(run, played):
            finished_now += len(batch)
            tell_progress(finished_now, missing)
            table = table_of(batch)
            shards.append(table)
            tables.append(table)
            turns = None
            if run.config.environment is not None:
                turns = unnested_turns(table)
                run.environment_seconds.setdefault(index, []).extend(
                    second for one in batch for second in seconds_of(one)
                )
            run.verifier.begin(answers(rows, stored_endings(table, turns)))
    run.sleep_engine()
    return pa.concat_tables(tables).sort_by(ORDER).combine_chunks()
