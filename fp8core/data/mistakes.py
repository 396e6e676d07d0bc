"""Mistakes in the data, found before the first step and not when a step draws the row."""

from collections.abc import Sequence

from fp8core.config.run import RunConfig
from fp8core.data.encode import refuse_too_long
from fp8core.data.prompt import Problem, PromptSource
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.verifier import Verifier


def check_problems(
    source: PromptSource, config: RunConfig, tokenizer: Tokenizer, max_positions: int, verifier: Verifier
) -> None:
    """Raises UserError, with the place (file:line), on a reference that is no answer and a prompt that does not fit."""
    problems = list(source.to_check())
    check_references(problems, verifier)
    for problem in problems:
        refuse_too_long(problem, config, tokenizer, max_positions)


def check_references(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Raises UserError, with the place (file:line), on the first reference that is no answer."""
    faults = verifier.faults([(problem.question, problem.reference) for problem in problems])
    for problem, fault in zip(problems, faults, strict=True):
        if fault is not None:
            raise UserError(f"{problem.place}: {fault}" if problem.place else fault)
