"""Refusals of a model, data, verifiers and an environment that cannot be used together.

`check_inputs` is called before a run has a folder or a server. `run.open.open_run` repeats its parts.
"""

import re
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from fp8core.config.run import RunConfig
from fp8core.data.demonstrations import own_demonstrations
from fp8core.data.prompt import Problem, PromptSource, longest_prompt
from fp8core.data.source import CheckedSource, build_source, check_problems, check_turns
from fp8core.environments.chat import tool_calls_of
from fp8core.environments.pool import EnvironmentPool
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.console import Console
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.rollout.registry import longest_row
from fp8core.run.build import BaseModel, FoundModel, build_environment, find_base, find_teacher
from fp8core.run.checks.continuation import refuse_other_data, stored_ledger
from fp8core.run.checks.environment import (
    call_trial,
    check_observation,
    check_opening,
    failed_trial,
    refuse_invalid,
    refuse_uncallable,
    trial,
)
from fp8core.store.ledger import START


def check_inputs(config: RunConfig) -> None:
    """Refuse a model, data, verifiers and an environment that cannot be used, before a run has a folder or a server.
    Raises UserError."""
    source = build_source(config.data, config.evaluation)
    # With `skip` the verifier decides which rows are read.
    if (ledger := stored_ledger(config)) is not None and config.data.unreadable == "refuse":
        refuse_other_data(config, ledger, source.digest())
    base = find_base(config)
    # A run that goes on has its warm start behind it, and reads them no more.
    trained = ledger is not None and "warm_start" in ledger.tasks(START)
    if config.warm_start is not None and config.warm_start.demonstrations is not None and not trained:
        own_demonstrations(config, config.warm_start, base.tokenizer, base.arch.max_positions)
    with closing(build_verifier(config.reward)) as verifier:
        (source, *_), teacher = check_opened(config, base, source, verifier)
    if ledger is not None:
        refuse_other_data(config, ledger, source.digest())
    # As `open_run` judges it: a run that was killed in its warm start may still be refused.
    is_new = ledger is None or not ledger.holds_work()
    if is_new:
        check_new(config, base, source, teacher)
        if base.checkpoint is not None:
            base.checkpoint.check_head()
    if config.environment is not None:
        tool_calls_of(config.environment, base.tokenizer)
        with closing(build_environment(config.environment)) as pool:
            try_environment(pool, config, base, list(source.to_check()), None, is_new=is_new)


class Opened(NamedTuple):
    """The data that a run uses, and the shape of its teacher, if it has one."""

    data: CheckedSource
    teacher: Architecture | None


def check_opened(config: RunConfig, base: FoundModel | BaseModel, source: PromptSource, verifier: Verifier) -> Opened:
    """Refuse parts of any run that do not go together.

    Raises:
        UserError: as `check_stop_strings`, `check_template_arguments`, `find_teacher` and `check_problems`.
    """
    check_stop_strings(config, base.tokenizer)
    check_template_arguments(config, base.tokenizer)
    distils = config.loss.distillation.teacher is not None
    teacher = find_teacher(config, base.tokenizer).architecture if distils else None
    return Opened(check_problems(source, config, base.tokenizer, longest_row(config, base.arch), verifier), teacher)


def check_new(
    config: RunConfig, base: FoundModel | BaseModel, source: PromptSource, teacher: Architecture | None
) -> None:
    """Refuse what a run that has begun goes on with.
    Raises UserError: as `refuse_small_teacher` and `check_turns`."""
    if teacher is not None:
        refuse_small_teacher(config, base.arch, teacher)
    check_turns(source, config, base.tokenizer)


def check_stop_strings(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: the tokenizer cannot write one of `rollout.stop_strings`, or leaves a part out of texts."""
    for string in config.rollout.stop_strings:
        try:
            tokens = tokenizer.encode(string, add_special_tokens=False)
        except UserError as error:
            raise UserError(f"rollout.stop_strings: {error}") from error
        if tokenizer.decode(tokens) != tokenizer.decode(tokens, special=True):
            raise UserError(
                f"rollout.stop_strings: {string!r} has a special token, which the text of a completion leaves out; "
                "name its id as eos_token_id in the model's generation_config.json instead"
            )


def check_template_arguments(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: the chat template reads one of `data.template_arguments` nowhere, or there is none."""
    template = tokenizer.template if config.data.chat else ""
    for name in config.data.template_arguments:
        if not re.search(rf"\b{name}\b", template):
            raise UserError(f"data.template_arguments: {name}: the chat template of the model does not read it")


def refuse_small_teacher(config: RunConfig, arch: Architecture, teacher: Architecture) -> None:
    """Refuse a teacher that cannot score all that a policy of shape `arch` may write.
    Raises UserError: it has fewer positions than the longest row, or no embedding of a token."""
    named = f"loss.distillation.teacher={config.loss.distillation.teacher}"
    positions = longest_row(config, arch)
    longest = longest_prompt(config, positions) + config.rollout.max_new_tokens
    if teacher.max_positions < longest:
        raise UserError(
            f"{named}: it has {teacher.max_positions} positions, and a prompt with its completion may have {longest} "
            "tokens; lower data.max_prompt_tokens or rollout.max_new_tokens, or take another teacher"
        )
    if teacher.vocab_size < arch.vocab_size:
        raise UserError(
            f"{named}: its vocab_size={teacher.vocab_size} is below the model's {arch.vocab_size}, of which every "
            "token may be written; take another teacher"
        )


def try_environment(
    environment: EnvironmentPool,
    config: RunConfig,
    base: FoundModel | BaseModel,
    problems: Sequence[Problem],
    console: Console | None,
    *,
    is_new: bool,
) -> None:
    """Begin an episode of the longest of these problems, and play one; a failure there is told, not refused.
    Raises UserError: it is too long; of a new run also what chat template and format of calls cannot go on with."""
    check_opening(problems, config, base.tokenizer, longest_row(config, base.arch), environment, config.seed)
    if not is_new and console is None:
        return
    replies = trial(problems[0], config, environment)
    if console is not None and (failure := failed_trial(replies, config)) is not None:
        console.note(failure)
    if is_new:
        refuse_invalid(replies, config)
        refuse_uncallable(replies, config, base.tokenizer)
        check_observation(replies, config, base.tokenizer)
        check_observation(call_trial(problems[0], replies[0], config, environment), config, base.tokenizer)
