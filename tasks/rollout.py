"""Generate the completions of an iteration; finished groups are durable as they come."""

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.numerics.logprobs import Truncation
from fp8core.rollout.engine import Sampling
from fp8core.rollout.stop_strings import generated
from fp8core.run.context import RunContext
from fp8core.run.rollouts import answers_of, prompt_groups, rollout_table, shard_folder
from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.tables import ORDER, ROLLOUTS, ROUTED_ROLLOUTS
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"rollouts": "rollouts"},
)
def rollout(run: RunContext, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
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
    truncation = Truncation.of(config.top_k, config.top_p)
    sampling = Sampling(
        config.temperature, config.max_new_tokens, run.tokenizer.eos_ids, config.router_replay, truncation
    )
    schema = ROUTED_ROLLOUTS if config.router_replay else ROLLOUTS
    tables = [done.cast(schema)] if done is not None else []
    open_groups = [group for group in groups if group.group not in finished]
    for completions in generated(run.ready_engine(), open_groups, sampling, run.tokenizer, config.stop_strings):
        table = rollout_table(run, completions, groups, schema)
        shards.append(table)
        tables.append(table)
        run.verifier.begin(answers_of(asked, table))
    run.ready_engine().sleep()
    rollouts = pa.concat_tables(tables).sort_by(ORDER).combine_chunks()
    return {"rollouts": run.directory.store.put_table("rollouts", rollouts)}
