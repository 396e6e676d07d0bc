"""Environments of the library `verifiers`: those that are played in turns, and a rubric gives them a reward.

    environment: {name: "fp8core.environments.verifiers_hub:Verifiers", options: {environment: NAME_OR_FILE}}

The environment's own loop runs in the episode's process. At each call of a model it waits, and the policy answers. The
loop repeats the whole conversation each time, and could change what was said. Token for token equality holds only where
it adds messages at the end. Anything else ends the episode as `crashed`, with `RewrittenHistory` in its detail.

Not promised: the text of a policy holds its thoughts and tool calls as they were written, for the environment too. A
malformed call is a text. Identifiers of calls, rewards of single turns and counts of tokens are not passed on. Cleanup
handlers run at the end of every episode; teardown handlers do not, for all episodes share what was loaded.
"""

import asyncio
import contextlib
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from fp8core.environments.protocol import Action, Outcome, Said, Task, Tool, Turn
from fp8core.errors import UserError, described_error
from fp8core.user_code import find_neighbours, load_code

VERSION = "0.3.1"
"""The last one whose environments are played in turns; any other may ask its client otherwise."""


def _refuse_version() -> None:
    """Raises UserError: another version of the library is installed, or none."""
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise UserError(f"it needs verifiers {VERSION}, and {found} is installed: pip install 'fp8-grpo[verifiers]'")


_refuse_version()

import datasets  # noqa: E402
import tqdm  # noqa: E402
import verifiers  # noqa: E402

_MOST_METRICS = 32
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RewrittenHistory(Exception):
    """A call of the model has another conversation than the one that the policy has had."""


class ScoringFailed(Exception):
    """A function of the rubric raised, which the rubric itself would count as 0."""


class _Request(NamedTuple):
    """A call of the model, as plain JSON, and the future of its answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: "asyncio.Future[Any]"


class Verifiers:
    """An episode of an environment that was loaded once, before the processes of episodes were forked.

    Its data set is not used. The prompt of an episode is that of our row, `answer` is its reference, and other columns
    (`info`, say) are those of `data.columns`. An action with tool calls answers as a model with an OpenAI interface.
    """

    @classmethod
    def prepare(
        cls, *, environment: str, arguments: Mapping[str, Any] | None = None
    ) -> "tuple[Callable[[], Verifiers], str]":
        """Load the environment; the maker of its episodes, and the digest of its source.

        Downloading or converting a data set starts threads, which a fork lacks, so the environment is refused. The next
        start finds the data in the cache. `environment`: an installed module with a function `load_environment`, or
        `module:function`, or `path/to/file.py:function`. `arguments`: of that function. Raises UserError: there is no
        such function, it fails, or what it makes cannot be played here.
        """
        if not isinstance(environment, str) or not isinstance(arguments, Mapping | None):
            raise UserError("environment is a name, and arguments is a mapping")
        name = environment if ":" in environment else f"{environment.replace('-', '_')}:load_environment"
        find_neighbours(name)
        load, _, source = load_code(name, "function")
        # Their threads would keep this process from forking.
        tqdm.tqdm.monitor_interval = 0
        datasets.disable_progress_bars()
        # An environment takes signals over for the whole process.
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            loaded = load(**(arguments or {}))
        except (Exception, SystemExit) as error:
            raise UserError(f"{name} fails: {described_error(error)}") from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        _refuse(loaded, name)
        return lambda: cls(loaded), source

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._loop = asyncio.new_event_loop()
        self._policy = _Policy(None)
        self._rollout: asyncio.Task[Any] | None = None
        self._told: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = None
        self._asked: _Request | None = None
        self._turns = 0

    def start(self, task: Task) -> Turn | Outcome:
        asked = [*task.before, Said("user", task.question)]
        row = {
            "example_id": 0,
            **task.columns,
            "prompt": [said._asdict() for said in asked],
            "answer": task.reference,
        }
        self._rollout = self._loop.create_task(self._play(row))
        return self._next(0)

    def step(self, action: Action) -> Turn | Outcome:
        assert self._asked is not None, "an action answers a turn"
        self._turns += 1
        response = self._policy.response(action, self._turns)
        said = response.message
        self._told.append(_plain(verifiers.types.AssistantMessage(content=said.content, tool_calls=said.tool_calls)))
        self._asked.answer.set_result(response)
        return self._next(max(1, len(action.calls)) if action.malformed else 0)

    def close(self) -> None:
        """Let the environment clean up, also where the policy has left in the middle."""
        if self._rollout is not None:
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(self._rollout)
        self._loop.close()

    async def _play(self, row: Mapping[str, Any]) -> Any:
        state = await self._environment.rollout(row, self._policy, "policy", {})
        if state["error"] is not None:
            raise state["error"]
        with _errors_raised():
            await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return state

    def _next(self, failed: int) -> Turn | Outcome:
        """Run the loop to its next call of the policy, or to its end."""
        assert self._rollout is not None, "it was started"
        request = self._loop.create_task(self._policy.requests.get())
        waiting = asyncio.wait({self._rollout, request}, return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(waiting)
        if request.done():
            self._asked = request.result()
            return self._turn(self._asked, failed)
        request.cancel()
        state = self._rollout.result()
        reward = float(state["reward"])
        passed = reward >= self._environment.pass_threshold
        return Outcome("right" if passed else "wrong", reward, failed, info=_metrics(state["metrics"] or {}))

    def _turn(self, request: _Request, failed: int) -> Turn:
        """The messages that are new. Raises RewrittenHistory."""
        first = self._tools is None
        told = len(self._told)
        if request.messages[:told] != self._told:
            pairs = zip(request.messages, self._told, strict=False)
            place = next((i for i, (now, before) in enumerate(pairs) if now != before), len(request.messages))
            raise RewrittenHistory(f"it rewrites its history: message {place + 1} of {told} is not as it was")
        if not first and request.tools != self._tools:
            raise RewrittenHistory("it rewrites its history: its tools are not those of the start")
        self._told, self._tools = request.messages, request.tools
        tools = tuple(Tool(tool["name"], tool["description"], tool["parameters"]) for tool in request.tools)
        return Turn(tuple(map(_said, request.messages[told:])), tools if first else (), failed=failed)


class _Policy(verifiers.Client):
    """The model as an environment sees it: each question waits in `requests` until it is answered."""

    def __init__(self, config: None) -> None:
        super().__init__(config)
        self.requests: asyncio.Queue[_Request] = asyncio.Queue()

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: object
    ) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(_Request([*map(_plain, prompt)], [*map(_plain, tools or ())], answer))
        return await answer

    def response(self, action: Action, turn: int) -> Any:
        """An action as the answer of a model; its calls are numbered over the episode."""
        types = verifiers.types
        calls = [
            types.ToolCall(id=f"call_{turn}_{number}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for number, call in enumerate(action.calls, start=1)
        ]
        cut = action.finish == "length"
        message = types.ResponseMessage(
            content=action.text,
            tool_calls=calls or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
        )
        return types.Response(id=f"turn_{turn}", created=0, model="policy", message=message)

    def setup_client(self, config: object) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def raise_from_native_response(self, response: Any) -> None:
        return None

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def close(self) -> None:
        return None


def _refuse(loaded: Any, name: str) -> None:
    """Raises UserError on what cannot be played an episode at a time."""
    if not isinstance(loaded, verifiers.MultiTurnEnv | verifiers.EnvGroup):
        raise UserError(f"{name} makes {type(loaded).__name__}, no environment of verifiers that is played in turns")
    if loaded.requires_group_rollouts or loaded.provides_advantages:
        raise UserError(f"the rubric of {name} scores all episodes of a prompt together; here each is scored alone")
    if not loaded.score_rollouts:
        raise UserError(f"{name} makes an environment with score_rollouts=False, which has no reward")
    for member in _members(loaded):
        if (seconds := getattr(member, "timeout_seconds", None)) is not None:
            raise UserError(
                f"{name} makes {type(member).__name__} with timeout_seconds={seconds!r}, which the policy's own time "
                "would use up; set it to None, and environment.timeout_seconds to bound each answer"
            )


def _members(loaded: Any) -> Iterator[Any]:
    """The environment itself, and those of a group at any depth."""
    yield loaded
    if isinstance(loaded, verifiers.EnvGroup):
        for member in loaded.envs:
            yield from _members(member)


@contextlib.contextmanager
def _errors_raised() -> Iterator[None]:
    """Raises ScoringFailed at the end if the library has logged an error: it goes on with a reward of 0."""
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verifiers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if logged:
        raise ScoringFailed(logged[0])


def _plain(value: Any) -> dict[str, Any]:
    """A message or a tool of the library as JSON; the environment may change the object later."""
    found: dict[str, Any] = value.model_dump(mode="json", exclude_none=True)
    return found


def _said(message: Mapping[str, Any]) -> Said:
    """A message for the policy. Raises ValueError: it is not text alone."""
    if message.get("tool_calls"):
        raise ValueError("a message before the policy's first has tool calls, which no prompt can hold")
    content = message.get("content", "")
    if isinstance(content, str):
        return Said(message["role"], content)
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("a message has a part that is no text")
    return Said(message["role"], "".join(part["text"] for part in content))


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The first 32 functions of the rubric, by names that metrics can have."""
    named = {re.sub(r"[^a-z0-9_]", "_", name.lower()).lstrip("_0123456789")[:40]: found[name] for name in found}
    return {name: float(named[name]) for name in [*filter(None, named)][:_MOST_METRICS]}
