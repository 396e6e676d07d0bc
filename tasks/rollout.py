"""Generate the completions of an iteration; finished groups, and finished episodes, are durable as they come."""

from collections.abc import Sequence

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.rollout.stream import Row, Stream, StreamLimits
from fp8core.run.context import RunContext
from fp8core.run.rollouts import answers, check_episodes, row_tables, stored_endings
from fp8core.run.stream_writer import StreamPrompts, StreamWriter
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"rollouts": "rollouts"},
)
def rollout(run: RunContext, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Policy and scales order the steps and enter the key: the last sync gave both to the engine."""
    rollouts, _ = _generate(run, index, prompts)
    return {"rollouts": run.directory.store.put_table("rollouts", rollouts)}


@step(
    inputs={"prompts": "prompts", "policy": "policy", "scales": "scales"},
    outputs={"turns": "turns", "rollouts": "rollouts"},
)
def episodes(run: RunContext, index: int, options: NoOptions, prompts: Ref, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Raises UserError: every episode ended before the policy's first turn, or by a failure of the environment."""
    store, (rollouts, turns) = run.directory.store, _generate(run, index, prompts)
    assert turns is not None, "an environment answered"
    check_episodes(run, index, turns)
    return {"turns": store.put_table("turns", turns), "rollouts": store.put_table("rollouts", rollouts)}


def _generate(run: RunContext, index: int, prompts: Ref) -> tuple[pa.Table, pa.Table | None]:
    asked = run.directory.store.get_table(prompts)
    source, questions = StreamPrompts(run, {index: asked}), asked.drop_columns(["tokens"]).to_pylist()

    def verify(rows: Sequence[Row]) -> None:
        """The verifier may begin while others are generated."""
        endings = stored_endings(*row_tables(rows, run.config, run.tokenizer))
        run.verifier.begin(answers(questions, endings))

    writer = StreamWriter(run, index, source, [], verify)
    rows = Stream([], StreamLimits(len(asked), 0, None), index - 1).complete(index, None, writer, source.enter)
    writer.attach_turns(rows)
    run.sleep_engine()
    return row_tables(rows, run.config, run.tokenizer)
