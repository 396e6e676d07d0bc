"""Verdicts of a function of the user's own, from the pool to the record, the metrics and the console."""

import zlib
from collections import Counter

import pytest

from fp8core.errors import UserError
from fp8core.store.ledger import stored_metrics

# An answer of the untrained policy is noise; a hash decides.
FUNCTION = """
import zlib

def score(prompt, completion, answer, finish, unit=1.0):
    kind = zlib.crc32(f"{prompt}{completion}".encode()) % 3
    if kind == 0:
        raise ValueError(f"no good: {completion}")
    return None if kind == 1 else unit
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "lengths.py"
    path.write_text(FUNCTION)
    return path


@pytest.fixture(scope="module")
def scored(loop_run, function):
    settings = {"steps": 2, "reward.verifier": f"{function}:score", "reward.options": {"unit": 0.5}}
    return loop_run("scored", **settings, **{"reward.workers": 1})


def test_every_verdict_is_recorded_with_its_reason(scored):
    line = next(number for number, text in enumerate(FUNCTION.splitlines(), start=1) if "no good" in text)
    for index in (1, 2):
        artifacts = scored.ledger.artifacts(index)
        rows = scored.store.get_table(artifacts["rewards"]).to_pylist()
        prompts = scored.store.get_table(artifacts["prompts"])["text"].to_pylist()
        answered = scored.store.get_table(artifacts["rollouts"]).to_pylist()
        for row, answer in zip(rows, answered, strict=True):
            kind = zlib.crc32(f"{prompts[answer['group']]}{answer['text']}".encode()) % 3
            assert (row["outcome"], row["reward"], row["detail"]) == {
                0: ("crashed", 0.0, f"lengths.py:{line}: ValueError: no good: {answer['text']}"),
                1: ("unparsed", 0.0, "no answer found"),
                2: ("wrong", 0.5, "reward 0.5"),
            }[kind]
        shares = Counter(row["outcome"] for row in rows)
        metrics = stored_metrics(scored.ledger, scored.store, index)
        for outcome in ("right", "wrong", "unparsed", "timeout", "crashed"):
            assert metrics[f"reward/outcome_{outcome}"] == shares[outcome] / len(rows)


def test_failures_are_told_and_a_step_goes_on(scored, tmp_path):
    run = scored.copy(tmp_path)
    run.resume(steps=3)
    crashed = stored_metrics(run.ledger, run.store, 3)["reward/outcome_crashed"]
    assert f"rewards: {round(16 * crashed)} of 16 answers could not be checked (" in run.said
    assert "crashed): lengths.py:7: ValueError: no good: " in run.said
    assert "held-out prompts: " in run.said


def test_a_step_in_which_nothing_can_be_checked_fails(loop_run, tmp_path):
    (tmp_path / "broken.py").write_text("def score(*_): return 1 / 0")
    with pytest.raises(UserError, match=r"8 of 8 answers could not be checked \(8 crashed\): broken\.py:1: Zero"):
        loop_run("broken", **{"reward.verifier": f"{tmp_path / 'broken.py'}:score", "reward.workers": 1})
