"""A restart asks environments of episodes in flight the same again; what differs begins anew."""

import pytest

from fp8core.errors import UserError
from fp8core.run.execute import carried, run_step
from fp8core.run.loop import begin
from fp8core.run.verify import verify
from fp8core.store.layout import LEDGER
from fp8core.store.run_view import RunView

DICE = """
import os
from fp8core.environments.protocol import Outcome, Said, Turn


class Dice:
    def start(self, task):
        self.thrown = 0
        return Turn((Said("user", task.question),))

    def step(self, action):
        self.thrown += 1
        said = self.thrown if os.path.exists(FIXED) else int.from_bytes(os.urandom(3))
        return Turn((Said("user", str(said)),)) if self.thrown < 4 else Outcome("judge")

    def close(self):
        pass
"""

SETTINGS = {
    **{"rollout.max_new_tokens": 60, "rollout.group_size": 4, "rollout.prompts_per_step": 2, "steps": 3},
    **{"pipeline.mode": "asynchronous", "pipeline.max_staleness": 2},
    **{"pipeline.ahead_tokens": 4, "pipeline.chunk_tokens": 2},
}


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """Where it exists, the dice show how often they were thrown."""
    return tmp_path_factory.mktemp("environment") / "fixed"


@pytest.fixture(scope="module")
def environment(fixed):
    path = fixed.with_name("dice.py")
    path.write_text(f"FIXED = {str(fixed)!r}\n{DICE}")
    return {"name": f"{path}:Dice", "max_turns": 6, "turn_tokens": 2}


@pytest.fixture(scope="module")
def thrown(loop_run, environment):
    """For reading only."""
    return loop_run("thrown", **SETTINGS, environment=environment)


def stream(run, ref):
    return run.store.get_table(ref).to_pylist()


def drop_last_line(run):
    path = run.folder / LEDGER
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def errors(run):
    return [found for found in verify(RunView.read(run.folder)) if found.severity != "note"]


def outcomes(run, step):
    turns = run.store.get_table(run.ledger.artifacts(step)["turns"]).to_pylist()
    return {turn["outcome"] for turn in turns if turn["outcome"]}


def anew(rows):
    """As a stream has them, where all that are in flight begin anew."""
    nothing = {"tokens": [], "logprobs": [], "versions": [], "written": [], "turns": []}
    return [row if row["finish"] else {**row, **nothing} for row in rows]


def test_a_run_is_continued_whose_environment_never_answers_the_same_twice(thrown, copy_of):
    run = copy_of(thrown)
    before = stream(run, run.ledger.artifacts(3)["next_stream"])
    begun = sum(not row["finish"] and bool(row["turns"]) for row in before)
    run.resume(steps=5)
    assert len(run.records) == 6
    assert "crashed" not in outcomes(run, 4) | outcomes(run, 5)
    # Each was asked for a second answer, or it has begun with the question alone, which is equal.
    after = stream(run, run.ledger.effective_outputs(3)["next_stream"])
    asked = [len(row["turns"]) > 1 for row in before]
    assert after == [anew([row])[0] if more else row for row, more in zip(before, asked, strict=True)]
    count = sum(more and not row["finish"] for row, more in zip(before, asked, strict=True))
    assert count > 0
    assert f"step 4: {count} of {begun} episodes in flight begin anew: environment.name=" in run.said
    assert run.ledger.inexact_steps() == [3]
    assert errors(run) == []
    assert [verdict.outcome for verdict in run.replayed([4])] == ["equal"]


@pytest.mark.parametrize(("task", "artifact"), [("rollout", "left"), ("ahead", "next_stream")])
def test_episodes_begin_anew_within_a_step_that_was_cut(thrown, copy_of, task, artifact):
    """The task that left them is not run again: what it finished is kept."""
    run = copy_of(thrown)
    run.cut_after(2, task)
    stored = run.ledger.tasks(2)["rollout"].outputs
    before = run.ledger.artifacts(2)[artifact]
    run.resume()
    assert len(run.records) == 4
    assert run.ledger.artifacts(2)["rollouts"] == stored["rollouts"]
    assert run.ledger.artifacts(2)[artifact] != before
    assert "crashed" not in outcomes(run, 3)
    assert errors(run) == []
    (verdict,) = run.replayed([2])
    assert verdict.outcome == "different"
    assert "episodes began anew within step 2: after a restart an environment answered otherwise" in verdict.causes
    assert [verdict.outcome for verdict in run.replayed([3])] == ["equal"]


def test_episodes_that_are_over_and_durable_are_not_asked_again(loop_run, environment, fixed, copy_of):
    """A kill has left all of a step and no task of it; then the environment begins to answer otherwise."""
    fixed.touch()
    run = copy_of(loop_run("fixed", **SETTINGS, environment=environment))
    assert run.ledger.inexact_steps() == []
    run.cut_after(2, "rollout")
    kept = run.ledger.artifacts(2)["rollouts"]
    drop_last_line(run)
    with run.opened() as live:
        begin(live)
        planned = next(each for each in live.graph.steps if each.name == "rollout")
        inputs = carried(live, 2)
        run_step(live, 2, planned, {port: inputs[artifact] for port, artifact in planned.inputs.items()})
    assert run.ledger.artifacts(2)["rollouts"] == kept, "an equal answer changes nothing"
    assert run.ledger.inexact_steps() == []
    drop_last_line(run)
    fixed.unlink()
    run.resume()
    assert run.ledger.artifacts(2)["rollouts"] == kept
    assert run.ledger.inexact_steps() == [1], "episodes of the next step are in flight"
    assert errors(run) == []


def test_a_run_without_a_step_to_do_is_left_as_it_is(thrown, copy_of):
    run = copy_of(thrown)
    records = run.records
    run.resume()
    assert run.records == records
    assert run.ledger.inexact_steps() == []


def test_where_others_need_the_processes_the_failure_names_the_setting(loop_run, environment):
    with pytest.raises(UserError, match=r"all 8 episodes ended in .*the same again.*environment\.at_once"):
        loop_run("few", **SETTINGS, environment=environment | {"at_once": 2})
