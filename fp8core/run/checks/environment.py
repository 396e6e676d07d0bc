"""Trials of an environment: its first messages and an answer, before a policy is asked."""

from collections.abc import Sequence
from contextlib import suppress

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, prompt_text, refuse_length
from fp8core.environments.chat import ObservationError, Talk, tool_calls_of
from fp8core.environments.protocol import Action, Outcome, ToolCall, Turn
from fp8core.environments.tool_calls import uncallable
from fp8core.errors import InvalidReply, UserError, printable
from fp8core.models.tokenizer import Tokenizer
from fp8core.rollout.engine import sample_seed
from fp8core.rollout.episodes import Pool
from fp8core.run.turns import messages_of, task_of
from fp8core.run.verdicts import UNCHECKED_OUTCOMES, ended_as


def check_opening(
    problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    """Begin an episode of the longest problem, with the seed of the episodes to be played.

    Raises UserError, with the place (file:line): its environment makes it too long to be a prompt. Another one that
    gets too long ends when it is played.
    """
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
    """The first answer to a problem; its episode stays open."""
    asked = {"messages": messages_of(problem, config), "reference": problem.reference, "columns": problem.columns}
    pool.begin((0, 0), task_of(asked, sample_seed(seed, 0, 0, 0)))
    ((_, reply, _),) = pool.replies(wait=True)
    refuse_invalid([reply], config)
    return reply


Trial = list[Turn | Outcome]


def trial(problem: Problem, config: RunConfig, pool: Pool) -> Trial:
    """The first answer to a problem, and the one to an empty answer of the policy if it is asked for one."""
    return _answered(Action(""), problem, config, pool)


def call_trial(problem: Problem, first: Turn | Outcome, config: RunConfig, pool: Pool) -> Trial:
    """As `trial`, with a call of the first tool, after which many an environment goes on; empty without a tool."""
    if not isinstance(first, Turn) or not first.tools:
        return []
    tool = first.tools[0]
    call = ToolCall(tool.name, dict.fromkeys(tool.parameters.get("properties", {}), "1"))
    return _answered(Action("", (call,)), problem, config, pool)


def _answered(action: Action, problem: Problem, config: RunConfig, pool: Pool) -> Trial:
    replies = [_begun(problem, config, pool, config.seed)]
    if isinstance(replies[0], Turn):
        pool.act((0, 0), action)
        replies += [reply for _, reply, _ in pool.replies(wait=True)]
    pool.end((0, 0))
    return replies


def failed_trial(replies: Trial, config: RunConfig) -> str | None:
    """The failure of an environment in its `trial`, in a line; None: it does not fail.

    So a bug in `step` shows before the warm start. It is for people: an environment may be unable to read nothing.
    """
    assert config.environment is not None, "a trial is of an environment"
    *_, reply = replies
    if isinstance(reply, Turn) or reply.outcome not in UNCHECKED_OUTCOMES:
        return None
    how = ended_as(reply.outcome, reply.detail)
    when = "at its start" if len(replies) == 1 else "after an empty answer"
    return f"environment.name={config.environment.name}: an episode ends {when} as {how}"


def refuse_invalid(replies: Trial, config: RunConfig) -> None:
    """Raises UserError: what an environment returned in its `trial` is no reply, whatever it was asked."""
    assert config.environment is not None, "a trial is of an environment"
    *_, reply = replies
    if isinstance(reply, Outcome) and (invalid := InvalidReply.read(reply.detail)) is not None:
        asked = "start" if len(replies) == 1 else "step, with an empty answer"
        raise UserError(f"environment.name={config.environment.name}: {asked}: {invalid}")


def refuse_uncallable(replies: Trial, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: a tool that an environment told in its `trial` has no valid call in the format of calls."""
    assert config.environment is not None, "a trial is of an environment"
    first, tool_calls = replies[0], tool_calls_of(config.environment, tokenizer)
    if isinstance(first, Turn) and (found := uncallable(tool_calls, first.tools)) is not None:
        tool, why = (printable(text) for text in found)
        raise UserError(
            f"environment.name={config.environment.name}: environment.format={config.environment.format}: no call of "
            f"the tool {tool} can be valid in the format {tool_calls}: {why}"
        )


def check_observation(replies: Trial, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError: the chat template cannot go on after a `trial`, as at the first observation of a step."""
    assert config.environment is not None, "a trial is of an environment"
    if not tokenizer.has_template or config.environment.max_turns == 1:
        return
    match replies:
        case [Turn() as first, Turn() as reply]:
            with suppress(ObservationError):  # It ends an episode, and no run.
                Talk.of(config, tokenizer).open(first).observe(reply.messages, tokenizer.end_id)
