"""Choose and tokenise the prompts of an iteration."""

import pyarrow as pa

from fp8core.config.steps import NoOptions
from fp8core.data.encode import encode_prompt
from fp8core.data.prompt import Problem
from fp8core.store.artifacts import Ref
from fp8core.store.tables import PROMPTS
from fp8core.workers.live import LiveRun
from tasks.step import step


@step(inputs={}, outputs={"prompts": "prompts"})
def prompts(run: LiveRun, index: int, options: NoOptions) -> dict[str, Ref]:
    """The prompts of iteration `index`: a function of the run's seed and the index, so data position needs no state."""
    problems = run.source.training(index, run.config.rollout.drawn_prompts, run.config.seed)
    return {"prompts": run.directory.store.put_table("prompts", prompt_table(run, problems))}


def prompt_table(run: LiveRun, problems: list[Problem]) -> pa.Table:
    """Tokenised problems as a table of kind `prompts`."""
    encoded = [encode_prompt(problem, run.config, run.tokenizer, run.arch.max_positions) for problem in problems]
    columns = {
        "group": list(range(len(problems))),
        "prompt_id": [problem.prompt_id for problem in problems],
        "text": [text for text, _ in encoded],
        "tokens": [tokens for _, tokens in encoded],
        "reference": [problem.reference for problem in problems],
    }
    return pa.table(columns, schema=PROMPTS)
