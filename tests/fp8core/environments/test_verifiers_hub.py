"""Environments of the library `verifiers`, which are real ones; without the library only its absence is tested."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fp8core.environments.loading import load_environment
from fp8core.environments.pool import EnvironmentPool, EpisodeLimits
from fp8core.environments.protocol import Action, Outcome, Said, Task, ToolCall, Turn
from fp8core.errors import UserError
from tests.fp8core.environments.conftest import collect

NAME = "fp8core.environments.verifiers_hub:Verifiers"
LIMITS = EpisodeLimits(timeout_seconds=20.0, cpu_seconds=10.0, memory_mb=512, processes=8)
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs the extra verifiers, which dev has"
)

# The column `info` names what an environment does beside its game.
ENVIRONMENTS = """
import os
import verifiers as vf
from datasets import Dataset

DATA = Dataset.from_list([{"question": "unused", "answer": "unused"}])


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and self.number(state["trajectory"][-1]["completion"]) == int(state["answer"])

    @vf.cleanup
    async def note(self, state):
        if path := state["info"].get("note"):
            with open(path, "a") as file:
                file.write(f"{state['tries']} ")

    async def env_response(self, messages, state):
        state["tries"] += 1
        fault = state["info"].get("fault")
        if fault == "shortens":
            del messages[1:-1]
        elif fault == "edits":
            messages[-1]["content"] = "42"
        elif fault == "silent":
            return []
        elif fault == "fails":
            raise vf.InfraError("the server is gone")
        elif fault == "asks again":
            await self.get_model_response(state, state["prompt"])
        elif fault == "picture":
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        elif fault == "tools":
            state["tool_defs"] = [vf.Tool(name="late", description="", parameters={})]
        low = self.number(messages) < int(state["answer"])
        return [{"role": "user", "content": [{"type": "text", "text": "higher" if low else "lower"}]}]

    def number(self, messages):
        return int(messages[-1]["content"])


def share(state):
    if state["info"].get("fault") == "rubric":
        raise KeyError("no such column")
    return 1 / len(state["trajectory"]) if state["stop_condition"] == "found" else 0.0


def guess(turns=3, seconds=None):
    return Guess(dataset=DATA, rubric=vf.Rubric(funcs=[share]), max_turns=turns, timeout_seconds=seconds)


def group(seconds=None):
    return vf.EnvGroup([vf.EnvGroup([guess(), guess(seconds=seconds)])])


def add(a: int, b: int) -> int:
    '''Add two integers.'''
    return a + b


def solved(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment():
    return vf.ToolEnv(tools=[add], dataset=DATA, rubric=vf.Rubric(funcs=[solved]))


def single():
    return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[solved], weights=[0.25]))


def ranked():
    def rank(completions) -> list[float]:
        return [0.0 for _ in completions]
    return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[rank]))


def nothing():
    return None
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifiers") / "games.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., EnvironmentPool], file: Path) -> Iterator[EnvironmentPool]:
    return start_pool(NAME, limits=LIMITS, environment=f"{file}:guess", arguments={"turns": 3})


def task(answer: str, **info: str) -> Task:
    return Task("Find it.", answer, 7, before=(Said("system", "Be brief."),), columns={"info": info})


def replies(pool: EnvironmentPool, count: int) -> list[Any]:
    return [*collect(pool, count).values()]


@needs_library
def test_episodes_of_several_turns_side_by_side(pool: EnvironmentPool) -> None:
    begun = Turn((Said("system", "Be brief."), Said("user", "Find it.")))
    for sample in range(3):
        pool.begin((0, sample), task("5"))
    assert replies(pool, 3) == [begun] * 3
    for sample in range(3):
        pool.act((0, sample), Action("3"))
    assert replies(pool, 3) == [Turn((Said("user", "higher"),))] * 3
    pool.act((0, 0), Action("5"))
    assert replies(pool, 1) == [Outcome("right", 0.5, info={"share": 0.5, "num_turns": 2.0})]
    pool.act((0, 1), Action("7"))
    assert replies(pool, 1) == [Turn((Said("user", "lower"),))]
    pool.act((0, 1), Action("6"))
    assert replies(pool, 1) == [Outcome("wrong", 0.0, info={"share": 0.0, "num_turns": 3.0})]
    pool.end((0, 2))


@needs_library
@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("edits", "RewrittenHistory: it rewrites its history: message 3 of 3 is not as it was"),
        ("asks again", "RewrittenHistory: it rewrites its history: message 3 of 3 is not as it was"),
        ("tools", "RewrittenHistory: it rewrites its history: its tools are not those of the start"),
        ("picture", "ValueError: a message has a part that is no text"),
        ("silent", "ValueError: messages are empty"),
        ("fails", "InfraError: the server is gone"),
        ("rubric", "ScoringFailed: Error calling reward function share: 'no such column'"),
    ],
)
def test_what_is_not_token_for_token_the_same_ends_the_episode(pool: EnvironmentPool, fault: str, detail: str) -> None:
    pool.begin((0, 0), task("5", fault=fault))
    replies(pool, 1)
    pool.act((0, 0), Action("5" if fault == "rubric" else "3"))
    (reply,) = replies(pool, 1)
    assert isinstance(reply, Outcome)
    assert (reply.outcome, reply.detail[: len(detail)]) == ("crashed", detail)


@needs_library
def test_a_conversation_that_gets_shorter_is_found_in_the_second_turn(pool: EnvironmentPool) -> None:
    pool.begin((0, 0), task("5", fault="shortens"))
    replies(pool, 1)
    pool.act((0, 0), Action("3"))
    (reply,) = replies(pool, 1)
    assert reply.detail == "RewrittenHistory: it rewrites its history: message 2 of 3 is not as it was"


@needs_library
def test_an_episode_that_is_left_is_cleaned_up(pool: EnvironmentPool, tmp_path: Path) -> None:
    note = tmp_path / "note"
    pool.begin((0, 0), task("5", note=str(note)))
    replies(pool, 1)
    pool.act((0, 0), Action("3"))
    replies(pool, 1)
    pool.end((0, 0))
    # A later one has its answer when the earlier one has ended.
    pool.begin((0, 1), task("5", note=str(note)))
    replies(pool, 1)
    pool.act((0, 1), Action("5"))
    replies(pool, 1)
    until = time.monotonic() + 60
    while not note.exists() or len(note.read_text().split()) < 2:
        assert time.monotonic() < until
        pool.replies(wait=False)
    assert sorted(note.read_text().split()) == ["0", "1"]


def played(options: dict[str, Any], task: Task, *actions: Action) -> list[Turn | Outcome]:
    """In this process, with the replies of one episode."""
    environment = load_environment(NAME, options).create()
    said = [environment.start(task), *(environment.step(action) for action in actions)]
    environment.close()
    return said


@needs_library
def test_tools_are_told_called_and_answered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    calls = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("take", {}))
    first, answered, outcome = played({"environment": "games"}, task("5"), Action("I add.", calls), Action("5"))
    assert isinstance(first, Turn)
    (tool,) = first.tools
    assert (tool.name, tool.description, list(tool.parameters["properties"])) == (
        "add",
        "Add two integers.",
        ["a", "b"],
    )
    assert answered == Turn((Said("tool", "5"), Said("tool", "'take'")))
    assert outcome == Outcome("right", 1.0, info={"solved": 1, "num_turns": 2, "total_tool_calls": 2, "add_calls": 1})


@needs_library
def test_a_malformed_call_is_text_and_counts_as_failed(file: Path) -> None:
    _, outcome = played({"environment": f"{file}:load_environment"}, task("5"), Action("<tool", (), "not closed"))
    assert isinstance(outcome, Outcome)
    assert (outcome.outcome, outcome.failed, outcome.info["total_tool_calls"]) == ("wrong", 1, 0)


@needs_library
def test_an_episode_of_one_turn_with_its_threshold(file: Path) -> None:
    first, outcome = played({"environment": f"{file}:single"}, task("5"), Action("5", finish="length"))
    assert first == Turn((Said("system", "Be brief."), Said("user", "Find it.")))
    assert outcome == Outcome("wrong", 0.25, info={"solved": 1.0, "num_turns": 1.0})


@needs_library
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"environment": "absent-game"}, "absent_game cannot be imported: ModuleNotFoundError"),
        ({"environment": "FILE:guess", "arguments": {"turn": 3}}, "guess fails: TypeError: .*'turn'"),
        ({"environment": "FILE:ranked"}, "ranked scores all episodes of a prompt together"),
        ({"environment": "FILE:nothing"}, "nothing makes NoneType, no environment of verifiers that is played"),
        (
            {"environment": "FILE:guess", "arguments": {"seconds": 600.0}},
            r"guess makes Guess with timeout_seconds=600\.0, .* set it to None, and environment\.timeout_seconds to",
        ),
        ({"environment": "FILE:group", "arguments": {"seconds": 5}}, r"group makes Guess with timeout_seconds=5, "),
        ({"environment": 3}, "environment is a name"),
        ({"name": "games"}, r"it is called as Verifiers\(name=...\)"),
    ],
)
def test_mistakes_are_one_line(file: Path, options: dict[str, Any], said: str) -> None:
    given = {
        name: value.replace("FILE", str(file)) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(UserError, match=said) as caught:
        load_environment(NAME, given)
    assert str(caught.value).isprintable()


@needs_library
def test_a_group_without_timeouts_is_loaded(file: Path) -> None:
    assert load_environment(NAME, {"environment": f"{file}:group"}).description["environment"] == NAME


@pytest.mark.parametrize("version", ["", "0.4.0"])
def test_another_version_or_none_is_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.delitem(sys.modules, NAME.partition(":")[0], raising=False)
    monkeypatch.setattr(metadata, "version", found)
    shown = version or "none"
    with pytest.raises(
        UserError, match=rf"^it needs verifiers 0\.3\.1, and {shown} is installed: pip install 'fp8-grpo\[ve"
    ):
        load_environment(NAME, {"environment": "games"})
