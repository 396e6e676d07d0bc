"""A verifier that fails costs its own verdict at most, with a reason; tests of environments show the rest of a pool."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fp8core.errors import UserError
from fp8core.rewards.scorer import RIGHT, Verdict
from fp8core.rewards.verifier import ScoreRequest, VerifierPool

StartPool = Callable[..., VerifierPool]


@pytest.fixture(scope="module")
def pool(start_pool: StartPool, hostile_file: Path) -> VerifierPool:
    # The machine may be busy: time limits are met by what never ends, and by nothing else.
    return start_pool(f"{hostile_file}:score", timeout_seconds=8, memory_mb=256)


@pytest.fixture(scope="module")
def impatient(start_pool: StartPool, hostile_file: Path) -> VerifierPool:
    return start_pool(f"{hostile_file}:score", timeout_seconds=0.5, workers=1)


def ask(pool: VerifierPool, *completions: str) -> list[Verdict]:
    return pool.verify([ScoreRequest("?", completion, "18", "stop") for completion in completions])


def test_verdicts_come_in_the_order_of_the_answers(pool: VerifierPool) -> None:
    said = [str(number % 50) for number in range(500)] + ["'" + "9" * 3_000_000 + "'"]
    verdicts = ask(pool, *(f"{number} == 18" for number in said))
    assert [verdict.outcome == "right" for verdict in verdicts] == [number == "18" for number in said]
    assert pool.verify([]) == []


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("True", RIGHT),
        ("0.25", Verdict(0.25, "wrong", "reward 0.25")),
        ("2", Verdict(2.0, "right", "reward 2")),
        ("__import__('numpy').float32(0.25)", Verdict(0.25, "wrong", "reward 0.25")),
        ("None", Verdict(0.0, "unparsed", "no answer found")),
        ("Verdict(0.5, 'right', 'nearly')", Verdict(0.5, "right", "nearly")),
        ("Verdict(1, 'fine', '')", "InvalidReply: the verifier returned the outcome 'fine'; there are: "),
        ("float('nan')", "ValueError: the verifier returned nan; rewards are from -1e+09 to 1e+09"),
        ("'yes'", "InvalidReply: the verifier returned str, not a number, None or a Verdict"),
        ("fail(chr(0xd800))", "ValueError: no good: \\ud800"),
        ("fail('long ' * 100_000)", "ValueError: no good: long long"),
        ("os._exit(3)", "its process ended (exit code 3)"),
    ],
)
def test_what_a_function_returns_or_raises(pool: VerifierPool, completion: str, verdict: Verdict | str) -> None:
    said, after = ask(pool, completion, "True")
    assert after == RIGHT
    if isinstance(verdict, Verdict):
        assert said == verdict
    else:
        assert (said.score, said.outcome) == (0.0, "crashed")
        assert verdict in said.detail
        assert len(said.detail.encode()) <= 220
        assert "\n" not in said.detail


def test_those_behind_one_that_hangs_are_checked_by_another(impatient: VerifierPool) -> None:
    verdicts = ask(impatient, "1", "time.sleep(99)", *(f"{n} == 18" for n in range(10, 40)))
    assert verdicts[1] == Verdict(0.0, "timeout", "no reply after 0.5 s")
    assert [verdict.outcome for verdict in verdicts[2:]] == ["right" if n == 18 else "wrong" for n in range(10, 40)]


def test_closing_ends_the_processes(start_pool: StartPool, hostile_file: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    pool = start_pool(f"{hostile_file}:score", workers=3)
    ask(pool, "True", "False")
    started = {*psutil.Process().children(recursive=True)} - before
    pool.close()
    pool.close()
    assert len(started) >= 2
    assert not any(process.is_running() for process in started)


def test_what_was_begun_is_checked_once(pool: VerifierPool, tmp_path: Path) -> None:
    noted = [f"open({str(tmp_path / str(number))!r}, 'a').write('x') == 1" for number in range(20)]
    answers = [ScoreRequest("?", completion, "18", "stop") for completion in noted]
    pool.begin(answers[:10])
    pool.begin(answers)
    assert pool.verify([*answers, *answers]) == [RIGHT] * 40
    assert [(tmp_path / str(number)).read_text() for number in range(20)] == ["x"] * 20


def test_a_file_has_options_and_neighbours_and_a_module_is_looked_for_where_python_looks(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbers_of_mine.py").write_text("ANSWER = 18")
    (tmp_path / "my_verifier.py").write_text(
        "import numbers_of_mine\ndef score(*_, plus): return numbers_of_mine.ANSWER + plus"
    )
    by_file = start_pool(f"{tmp_path / 'my_verifier.py'}:score", options={"plus": 2}, workers=1)
    monkeypatch.syspath_prepend(str(tmp_path))
    by_module = start_pool("my_verifier:score", options={"plus": 2}, workers=1)
    assert ask(by_file, "") == ask(by_module, "") == [Verdict(20.0, "right", "reward 20")]
    assert by_file.describe()["source"] == by_module.describe()["source"]
    assert by_file.faults([("?", "18"), ("?", "")]) == [None, None]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there_is_none.py cannot be read: No such file"),
        ("import no_such_library", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def score(:", "cannot be imported: SyntaxError"),
        ("import os; os._exit(7)", "its process ended while it was imported"),
        ("score = 3", "has no function score"),
        ("def score(prompt): ...", "it is called as score(prompt, completion, answer, finish), and is defined as"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line_at_the_start(
    start_pool: StartPool, tmp_path: Path, source: str | None, message: str
) -> None:
    path = tmp_path / "there_is_none.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError, match=r"^reward\.verifier=.*there_is_none\.py:score: ") as caught:
        start_pool(f"{path}:score")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BY_NAME = """
def reward(completion, answer, unit, factor=1.0, **columns):
    assert columns["prompt"] == "?" and columns["finish"] == "stop" and columns["hard"]
    return factor if completion == f"{answer} {unit}" else 0.0
"""


def test_a_function_that_begins_with_the_completion_is_called_by_names(start_pool: StartPool, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(BY_NAME)
    pool = start_pool(f"{tmp_path / 'my_reward.py'}:reward", options={"factor": 0.5}, workers=1)
    row = '{"unit": "kg", "hard": true}'
    right, wrong, lacking = pool.verify(
        [
            ScoreRequest("?", "18 kg", "18", "stop", row),
            ScoreRequest("?", "18", "18", "stop", row),
            ScoreRequest("?", "18", "18", "stop"),
        ]
    )
    assert (right.score, wrong.score) == (0.5, 0.0)
    assert lacking.outcome == "crashed"
    assert "the row has no column unit; name it in data.columns" in lacking.detail


def test_an_option_that_a_function_called_by_names_lacks_is_refused(start_pool: StartPool, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text("def reward(completion, answer): ...")
    with pytest.raises(UserError, match=r"strict\.py:reward: it is called as reward\(.*unexpected keyword argument"):
        start_pool(f"{tmp_path / 'strict.py'}:reward", options={"factor": 0.5})
