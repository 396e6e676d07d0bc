"""Choose and tokenise the prompts of an iteration."""

from fp8core.config.steps import NoOptions
from fp8core.run.context import RunContext
from fp8core.run.rollouts import prompt_table
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={}, outputs={"prompts": "prompts"})
def prompts(run: RunContext, index: int, options: NoOptions) -> dict[str, Ref]:
    """The prompts of iteration `index`: a function of the run's seed and the index, so data position needs no state."""
    problems = run.source.training(index, run.config.rollout.drawn_prompts, run.config.seed)
    return {"prompts": run.directory.store.put_table("prompts", prompt_table(run, problems))}
