"""Score completions with the verifier of the configuration."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import StepContext
from fp8core.run.rollouts import reward_tables
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COMPLETION_KEY
from tasks.step import step


@step(
    inputs={"prompts": "prompts", "rollouts": "rollouts"},
    optional_inputs={"turns": "turns"},
    outputs={"rewards": "rewards"},
    outputs_where={"judge": {"judgements": "judgements"}},
)
def reward(
    run: StepContext, index: int, options: NoOptions, prompts: Ref, rollouts: Ref, turns: Ref | None = None
) -> dict[str, Ref]:
    store = run.store
    completions = store.get_table(rollouts, [*COMPLETION_KEY, "text", "finish"])
    turn_table = None if turns is None else store.get_table(turns)
    rewards, judgements = reward_tables(run, index, store.get_table(prompts), completions, turn_table)
    outputs = {"rewards": store.put_table("rewards", rewards)}
    return outputs if judgements is None else {**outputs, "judgements": store.put_table("judgements", judgements)}
