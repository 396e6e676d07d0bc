"""Runs that generate ahead end, whatever is slow or missing; every test has a bound on its time."""

import json
import signal

import pytest

LIMIT_SECONDS = 60
SETTINGS = {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 3, "steps": 3}


@pytest.fixture(autouse=True)
def bound():
    """What has not ended by itself is interrupted, locks and waits included."""

    def late(*_):
        raise TimeoutError(f"it has not ended after {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def written(run):
    """Of each step, the prompts that were answered, in their order."""
    steps = [run.store.get_table(run.ledger.artifacts(step)["rollouts"]) for step in range(1, 4)]
    return [list(dict.fromkeys(rollouts["prompt_id"].to_pylist())) for rollouts in steps]


@pytest.mark.parametrize(
    ("mode", "staleness"),
    [
        ("one_step_off", 1),
        ("asynchronous", 3),
        pytest.param("one_step_off", 0, marks=pytest.mark.slow),
        pytest.param("asynchronous", 0, marks=pytest.mark.slow),
    ],
)
def test_one_prompt_at_a_time_ends(loop_run, mode, staleness):
    settings = {"max_inflight_prompts": 1, "max_staleness": staleness}
    ahead = {"ahead_tokens": 3} if mode == "asynchronous" else {}
    run = loop_run("narrow", steps=3, pipeline={"mode": mode, **ahead, **settings})
    assert [len(prompts) for prompts in written(run)] == [4, 4, 4]
    for step in range(1, 4):
        metrics = run.store.get_json(run.ledger.artifacts(step)["metrics"])
        assert metrics["rollout/staleness_max"] <= staleness
        assert metrics["alignment/tokens_differing"] == 0


def test_data_that_end_within_the_staleness_begin_again(loop_run, small_checkpoint, tmp_path):
    """Five problems, four prompts a step, and prompts of four steps in flight."""
    for name, first in (("train", 1), ("heldout", 6)):
        rows = [{"question": f"What is {i} + 2?", "answer": f"#### {i + 2}"} for i in range(first, first + 5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **{"model": str(small_checkpoint), "architecture": None, "warm_start": None},
        **{"data": {"source": str(tmp_path / "train.jsonl")}, "reward.verifier": "integer"},
        "evaluation": {"source": str(tmp_path / "heldout.jsonl"), "prompts": 5},
        "pipeline.max_staleness": 3,
    }
    run = loop_run("short", **SETTINGS | settings)
    assert len({prompt for prompts in written(run) for prompt in prompts}) == 5


def test_a_verifier_that_may_never_end_is_bounded_beside_generation(loop_run, tmp_path):
    verifier = tmp_path / "endless.py"
    verifier.write_text(
        "import time, zlib\n\n\ndef score(prompt, completion, reference, finish):\n"
        "    while zlib.crc32(completion.encode()) % 2:\n        time.sleep(1)\n    return 1.0\n"
    )
    reward = {"verifier": f"{verifier}:score", "timeout_seconds": 0.2}
    run = loop_run("slow", **SETTINGS | {"steps": 2, "reward": reward})
    rewards = run.store.get_table(run.ledger.artifacts(2)["rewards"])
    assert {"timeout"} < set(rewards["outcome"].to_pylist())
