"""Records answer in place of an environment, and name what differs."""

import pytest

from fp8core.environments.protocol import Action, Outcome, Said, Task, ToolCall, Turn
from fp8core.environments.recorded import RecordedEpisode, RecordedPool, difference
from fp8core.errors import UserError

TASK = Task("1+1", "2", 5)
TURN, RESULT = Turn((Said("user", "1+1"),)), Turn((Said("tool", "2"),), failed=1)
CALL, ANSWER = Action("[1+1]", (ToolCall("calculate", {"expression": "1+1"}),)), Action("2")


@pytest.fixture
def pool() -> RecordedPool:
    whole = RecordedEpisode((TURN, RESULT, Outcome("judge")), (CALL, ANSWER), TASK)
    cut = RecordedEpisode((TURN,), ())
    return RecordedPool({(0, 0): whole, (0, 1): cut}, {"environment": "calculator"})


def test_the_replies_are_those_of_the_records(pool: RecordedPool) -> None:
    pool.begin((0, 0), TASK)
    pool.begin((0, 1), Task("another", "", 0))
    assert pool.replies(wait=True) == [((0, 0), TURN, 0.0), ((0, 1), TURN, 0.0)]
    pool.act((0, 0), CALL)
    assert pool.replies(wait=False) == [((0, 0), RESULT, 0.0)]
    pool.act((0, 0), ANSWER)
    assert pool.replies(wait=True) == [((0, 0), Outcome("judge"), 0.0)]
    pool.end((0, 0))
    pool.begin((0, 0), TASK)
    pool.end((0, 0))
    assert pool.replies(wait=True) == []
    with pytest.raises(UserError, match="group 0, sample 1, turn 0: the recorded episode ended before it"):
        pool.act((0, 1), CALL)
    pool.close()


def test_the_first_difference_is_named(pool: RecordedPool) -> None:
    with pytest.raises(UserError, match="group 3, sample 1: no such episode was recorded"):
        pool.begin((3, 1), TASK)
    with pytest.raises(UserError, match="group 0, sample 0: its task differs: seed was 5, and is 6"):
        pool.begin((0, 0), Task("1+1", "2", 6))
    pool.begin((0, 0), TASK)
    pool.act((0, 0), CALL)
    with pytest.raises(UserError, match="sample 0, turn 1: the action differs: text was '2', and is '3'"):
        pool.act((0, 0), Action("3", finish="length"))


def test_a_difference_shows_where_values_part() -> None:
    assert difference(TURN, TURN) == ""
    assert difference(TURN, Outcome("judge")) == "Turn was recorded, and now it is Outcome"
    long = "x" * 500
    said = difference(Turn((Said("tool", long + "a"),)), Turn((Said("tool", long + "b"),)))
    assert said.startswith("messages was ...xxx")
    assert "a'),), and is ...xxx" in said
    assert len(said) < 200
