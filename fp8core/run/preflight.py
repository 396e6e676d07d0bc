"""Refusals of a model, data, verifiers and an environment that cannot be used together.

`check_inputs` is called before a run has a folder or a server. `run.open.open_run` repeats its parts.
"""

import re
from collections.abc import Sequence
from contextlib import closing, suppress

from fp8core.config.run import RunConfig
from fp8core.data.demonstrations import own_demonstrations
from fp8core.data.prompt import Problem, PromptSource, longest_prompt, prompt_text, refuse_length
from fp8core.data.source import CheckedSource, build_source, check_problems
from fp8core.environments.chat import ObservationError, Talk
from fp8core.environments.protocol import Action, Outcome, Turn
from fp8core.errors import InvalidReply, UserError
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.rollout.engine import sample_seed
from fp8core.rollout.episodes import Pool
from fp8core.rollout.registry import longest_row
from fp8core.run.build import BaseModel, build_environment, find_base, find_teacher, members_node
from fp8core.run.continuation import refuse_conflict, refuse_other_data, stored_ledger
from fp8core.run.episodes import messages_of, task_of
from fp8core.run.refusals import check_cluster, check_memory, graph_of
from fp8core.run.verdicts import UNCHECKED_OUTCOMES, ended_as
from fp8core.store.ledger import START


def refuse_unrunnable(config: RunConfig, *, new_code: bool = False) -> None:
    """Refuse a named training that cannot run to its end here; `new_code`: as of `open_directory`. Raises UserError."""
    refuse_unrunnable_settings(config, new_code=new_code)
    check_inputs(config)


def refuse_unrunnable_settings(config: RunConfig, *, new_code: bool = False) -> None:
    """The part of `refuse_unrunnable` that reads no data and starts no verifier or environment."""
    assert config.run is not None, "the command or the flow names the run"
    graph_of(config)
    refuse_conflict(config, new_code=new_code)
    node = members_node(config)
    check_memory(config, node, stored_ledger(config))
    check_cluster(config, node)


def check_inputs(config: RunConfig) -> None:
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
        source = check_data(config, base, source, verifier).source
    if ledger is not None:
        refuse_other_data(config, ledger, source.digest())
    if base.checkpoint is not None:
        base.checkpoint.check_head()
    if config.environment is not None:
        with closing(build_environment(config.environment)) as pool:
            check_environment(pool, config, base, list(source.to_check()))


def check_data(config: RunConfig, base: BaseModel, source: PromptSource, verifier: Verifier) -> CheckedSource:
    check_stop_strings(config, base.tokenizer)
    check_template_arguments(config, base.tokenizer)
    if config.loss.distillation.teacher is not None:
        refuse_small_teacher(config, base.arch, find_teacher(config, base.tokenizer).architecture)
    return check_problems(source, config, base.tokenizer, longest_row(config, base.arch), verifier)


def check_stop_strings(config: RunConfig, tokenizer: Tokenizer) -> None:
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
    template = tokenizer.template if config.data.chat else ""
    for name in config.data.template_arguments:
        if not re.search(rf"\b{name}\b", template):
            raise UserError(f"data.template_arguments: {name}: the chat template of the model does not read it")


def refuse_small_teacher(config: RunConfig, arch: Architecture, teacher: Architecture) -> None:
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


def check_environment(pool: Pool, config: RunConfig, base: BaseModel, problems: Sequence[Problem]) -> str | None:
    """Try an environment; returns a line on an episode that fails, since it may be unable to read an empty answer.

    Raises UserError: as `check_opening`, it returned no reply, or the chat template cannot go on after it."""
    assert config.environment is not None, "a pool is of an environment"
    check_opening(problems, config, base.tokenizer, longest_row(config, base.arch), pool, config.seed)
    name, first = f"environment.name={config.environment.name}", _begun(problems[0], config, pool, config.seed)
    reply, when = first, "start"
    if isinstance(first, Turn):
        when = "step, with an empty answer"
        pool.act((0, 0), Action(""))
        ((_, reply, _),) = pool.replies(wait=True)
    pool.end((0, 0))
    if isinstance(reply, Outcome):
        if (invalid := InvalidReply.read(reply.detail)) is not None:
            raise UserError(f"{name}: {when}: {invalid}")
        failed = reply.outcome in UNCHECKED_OUTCOMES
        return f"{name}: {when}: an episode ends as {ended_as(reply.outcome, reply.detail)}" if failed else None
    if isinstance(first, Turn) and base.tokenizer.has_template and config.environment.max_turns != 1:
        with suppress(ObservationError):  # It ends an episode, and no run.
            Talk.of(config, base.tokenizer).open(first).observe(reply.messages, base.tokenizer.end_id)
    return None


def check_opening(
    problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    """Begin an episode of the longest problem.
    Raises UserError, with the place: its environment makes it too long to be a prompt."""
    assert config.environment is not None, "a pool is of an environment"
    problem = max(problems, key=lambda row: len(prompt_text(row, config, tokenizer)[0].encode()))
    turn = _begun(problem, config, pool, seed)
    pool.end((0, 0))
    # An episode that ends at once is for its step to tell.
    if isinstance(turn, Turn):
        name = config.environment.name
        try:
            count = len(Talk.of(config, tokenizer).open(turn).prompt)
        except ObservationError as error:
            place = problem.place or problem.prompt_id
            raise UserError(f"{place}: environment.name={name} begins with: {error}") from error
        refuse_length(problem, count, f"tokens as environment.name={name} begins it", config, max_positions)


def _begun(problem: Problem, config: RunConfig, pool: Pool, seed: int) -> Turn | Outcome:
    asked = {"messages": messages_of(problem, config), "reference": problem.reference, "columns": problem.columns}
    pool.begin((0, 0), task_of(asked, sample_seed(seed, 0, 0, 0)))
    ((_, reply, _),) = pool.replies(wait=True)
    assert config.environment is not None, "a pool is of an environment"
    if isinstance(reply, Outcome) and (invalid := InvalidReply.read(reply.detail)) is not None:
        raise UserError(f"environment.name={config.environment.name}: start: {invalid}")
    return reply
