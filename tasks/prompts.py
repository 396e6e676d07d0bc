"""Choose and tokenise the prompts of an iteration."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import StepContext
from fp8core.run.rollouts import prompt_table
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={}, outputs={"prompts": "prompts"})
def prompts(run: StepContext, index: int, options: NoOptions) -> dict[str, Ref]:
    problems = run.source.training(index, run.config.rollout.drawn_prompts, run.config.seed)
    return {"prompts": run.store.put_table("prompts", prompt_table(run, problems))}
