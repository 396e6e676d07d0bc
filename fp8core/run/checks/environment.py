"""Trials of an environment: its first messages and an answer, before a policy is asked."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fp8core.config.run import RunConfig
from fp8core.data.prompt import ADDED_TOKENS, Problem, encode_prompt, longest_prompt, prompt_text, refuse_length
from fp8core.environments.chat import ObservationError, Talk, tool_calls_of
from fp8core.environments.protocol import Action, Outcome, ToolCall, Turn
from fp8core.environments.tool_calls import uncallable
from fp8core.errors import InvalidReply, UserError, printable
from fp8core.models.tokenizer import Tokenizer
from fp8core.rollout.engine import sample_seed
from fp8core.rollout.episodes import Pool
from fp8core.run.turns import messages_of, task_of
from fp8core.run.verdicts import UNCHECKED_OUTCOMES, ended_as


def check_openings(
    problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    """Raises UserError, with the place (file:line), on a problem that its environment makes too long to be a prompt.

    `seed` is that of the episodes to be played. Each costs a process, so few begin. The longest problem shows how many
    tokens the environment adds, and each problem begins that is too long with as many. An episode that gets more ends
    when it is played.
    """
    assert config.environment is not None, "a pool is of an environment"
    name, talk = config.environment.name, Talk.of(config, tokenizer)
    lengths = [len(prompt_text(row, config, tokenizer)[0].encode()) for row in problems]

    def opened(place: int) -> int | None:
        """Tokens of an episode's first messages; None: it ended at once, which is for its step to tell."""
        row = problems[place]
        turn = _begun(place, row, config, pool, seed)
        pool.end((place, 0))
        if not isinstance(turn, Turn):
            return None
        try:
            return len(talk.open(turn).prompt)
        except ObservationError as error:
            raise UserError(f"{row.place or row.prompt_id}: environment.name={name} begins with: {error}") from error

    longest = max(range(len(problems)), key=lengths.__getitem__)
    if (most := opened(longest)) is None:
        return
    added = most - len(encode_prompt(problems[longest], config, tokenizer, max_positions)[1])
    room = longest_prompt(config, max_positions) - added
    for place, row in enumerate(problems):
        if place == longest:
            count: int | None = most
        elif lengths[place] + ADDED_TOKENS <= room:
            continue
        else:
            long = len(encode_prompt(row, config, tokenizer, max_positions)[1]) > room
            count = opened(place) if long else None
        if count is not None:
            refuse_length(row, count, f"tokens as environment.name={name} begins it", config, max_positions)


def _begun(place: int, problem: Problem, config: RunConfig, pool: Pool, seed: int) -> Turn | Outcome:
    """The first answer of episode `place`, which stays open, to a problem."""
    asked = {"messages": messages_of(problem, config), "reference": problem.reference, "columns": problem.columns}
    pool.begin((place, 0), task_of(asked, sample_seed(seed, 0, place, 0)))
    ((_, reply, _),) = pool.replies(wait=True)
    return reply


Trial = list[Turn | Outcome]


def trial(problem: Problem, config: RunConfig, pool: Pool) -> Trial:
    """The first answer to a problem, and the one to an empty answer of the policy if it is asked for one."""
    replies = [_begun(0, problem, config, pool, config.seed)]
    if isinstance(replies[0], Turn):
        pool.act((0, 0), Action(""))
        replies += [reply for _, reply, _ in pool.replies(wait=True)]
    pool.end((0, 0))
    return replies


_OF_TYPE: dict[Any, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}


def call_trial(problem: Problem, replies: Trial, config: RunConfig, pool: Pool) -> Trial:
    """The first answer of a `trial`, and the one to a call of the first tool that is answered with a turn.

    Empty where there is none. Many an environment ends with an answer that has no call, and goes on after one.
    """
    for tool in replies[0].tools if isinstance(replies[0], Turn) else ():
        given = {name: _argument(about) for name, about in tool.parameters.get("properties", {}).items()}
        first = _begun(0, problem, config, pool, config.seed)
        reply: Turn | Outcome | None = None
        if isinstance(first, Turn):
            pool.act((0, 0), Action("", (ToolCall(tool.name, given),)))
            ((_, reply, _),) = pool.replies(wait=True)
        pool.end((0, 0))
        if isinstance(reply, Turn):
            return [first, reply]
    return []


def _argument(about: object) -> Any:
    """A value of a JSON schema, as far as its type goes."""
    if not isinstance(about, Mapping):
        return "1"
    choices = about.get("enum")
    kind = about.get("type")
    return choices[0] if choices else _OF_TYPE.get(kind if isinstance(kind, str) else None, "1")


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
