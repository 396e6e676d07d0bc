"""Runs whose policy speaks with an environment: exact, resumable in mid-episode, replayed from recorded answers."""

import signal
from pathlib import Path

import pyarrow.compute as pc
import pytest
from episode_life import exit_code_of_life

from flows.cli import main
from fp8core.rollout.engine import sample_seed
from fp8core.store.artifacts import RolloutShards

DIGITS = (Path(__file__).parents[1] / "parts" / "digits_environment.py").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "digits.py"
    path.write_text(DIGITS)
    return path


@pytest.fixture(scope="module")
def settings(place):
    return {
        "environment": {"name": f"{place}:Digits", "max_turns": 12, "turn_tokens": 3},
        "rollout.max_new_tokens": 28,
        "rollout.group_size": 4,
        "rollout.prompts_per_step": 2,
        "steps": 2,
    }


@pytest.fixture(scope="module")
def talked(loop_run, settings):
    return loop_run("talked", **settings)


@pytest.fixture(scope="module")
def called(loop_run):
    """The calculator, by a policy that was shown how to call it and little else."""
    return loop_run(
        "called",
        **{
            "environment": {"name": "calculator", "options": {"modulus": 10, "left_to_right": True}, "max_turns": 3},
            "environment.advantage": "turn",
            "warm_start.steps": 40,
            "warm_start.step_by_step_share": 0.0,
            "warm_start.tool_share": 1.0,
            "rollout.max_new_tokens": 32,
            "steps": 2,
        },
    )


def metrics_of(run, step):
    return run.store.get_json(run.ledger.artifacts(step)["metrics"])


@pytest.mark.parametrize("name", ["talked", "called"])
def test_both_policies_are_equal_over_all_turns(name, request):
    run = request.getfixturevalue(name)
    for step in (1, 2):
        metrics = metrics_of(run, step)
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["train/mask_differing"] == 0
        assert metrics["environment/turns"] > 1
        assert metrics["alignment/logprob_abs_diff_max_turn_1"] == 0
        assert metrics["alignment/tokens_differing_turn_2_3"] == 0
        rollouts = run.store.get_table(run.ledger.artifacts(step)["rollouts"])
        assert pc.any(pc.invert(pc.list_flatten(rollouts["written"]))).as_py(), "no token of the environment"
        assert metrics["train/tokens"] == sum(sum(row) for row in rollouts["written"].to_pylist())
    assert main(["verify", str(run.folder)]) == 0


def test_a_kill_in_mid_episode_ends_with_equal_bytes(talked, tmp_path):
    assert exit_code_of_life(talked.folder / "run.json", tmp_path, after=90) == -signal.SIGKILL
    assert exit_code_of_life(talked.folder / "run.json", tmp_path) == 0
    killed = type(talked)(tmp_path / "killed")
    ours, theirs = ([record["outputs"] for record in run.records] for run in (killed, talked))
    assert ours == theirs


# All episodes are over after a turn, but those with some seeds. Of these the fourth turn waits for a shard.
UNEVEN = """
import pathlib
import time

from fp8core.environments.protocol import Outcome, Said, Turn


class Uneven:
    def __init__(self, *, folder, long):
        self._folder, self._long = pathlib.Path(folder), long

    def start(self, task):
        with (self._folder / "begun").open("a") as file:
            file.write(f"{task.seed}\\n")
        self._left, self._shards = 8 if task.seed in self._long else 1, self._stored()
        return Turn((Said("user", task.question),))

    def step(self, action):
        self._left -= 1
        if self._left == 4 and (self._folder / "armed").exists():
            end = time.monotonic() + 5
            while self._stored() == self._shards and time.monotonic() < end:
                time.sleep(0.01)
            (self._folder / "kill").touch()
        return Turn((Said("user", "1"),)) if self._left else Outcome("judge", reward=len(action.text))

    def _stored(self):
        return len([*self._folder.glob("killed/shards/*/0*.parquet")])

    def close(self):
        pass
"""


@pytest.mark.parametrize("mode", ["synchronous", pytest.param("one_step_off", marks=pytest.mark.slow)])
def test_a_resumed_run_begins_no_finished_episode_again(loop_run, settings, mode, tmp_path):
    """Not even one whose group was unfinished when the run was killed."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    # The stream's second batch is played beside the first update.
    step, batch = (1, 2) if mode == "one_step_off" else (1, 1)
    seeds = {(group, sample): sample_seed(0, batch, group, sample) % 2**64 for group in range(2) for sample in range(4)}
    options = {"folder": str(tmp_path), "long": [seeds[0, 0], seeds[1, 2]]}
    environment = {"name": f"{tmp_path / 'uneven.py'}:Uneven", "options": options, "max_turns": 12, "turn_tokens": 2}
    whole = loop_run("whole", **settings | {"environment": environment, "pipeline.mode": mode, "steps": step})
    (tmp_path / "armed").touch()
    died = exit_code_of_life(whole.folder / "run.json", tmp_path, till=tmp_path / "kill")
    assert died == -signal.SIGKILL
    (tmp_path / "kill").unlink()
    (tmp_path / "armed").unlink()
    kind = "episodes" if mode == "one_step_off" else "rollouts"
    over = RolloutShards(tmp_path / "killed" / "shards" / f"{step:05d}", kind).read()
    rows = [] if over is None else [row for row in over.to_pylist() if row.get("batch", batch) == batch]
    over = {(row["group"], row["sample"]) for row in rows}
    assert {(0, 0), (1, 2)}.isdisjoint(over)
    (tmp_path / "begun").unlink()
    assert exit_code_of_life(whole.folder / "run.json", tmp_path) == 0
    begun = (tmp_path / "begun").read_text().split()
    again = [key for key, seed in seeds.items() for one in begun if int(one) == seed]
    assert sorted(again) == sorted(seeds.keys() - over)
    assert over, "no episode was over when the run was killed"
    killed = type(whole)(tmp_path / "killed")
    ours, theirs = ([record["outputs"] for record in run.records] for run in (killed, whole))
    assert ours == theirs


def replayed(capsys, *arguments):
    code = main(["replay", *map(str, arguments), "--trust"])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def test_a_replay_takes_recorded_answers_or_asks_again(talked, place, capsys):
    code, lines, _ = replayed(capsys, talked.folder, "--from", 0)
    assert code == 0
    assert not any("asked again" in line for line in lines)
    code, lines, _ = replayed(capsys, talked.folder, "--step", 2, "--rerun-environments")
    assert code == 0
    turns = [talked.store.get_table(ref) for ref in talked.ledger.artifacts(2).values() if ref.kind == "turns"]
    assert f", {sum(map(len, turns))} answers of environments asked again, " in lines[0]
    place.write_text(DIGITS.replace("% 3", "% 2"))
    try:
        assert replayed(capsys, talked.folder, "--step", 2)[0] == 0
        code, lines, _ = replayed(capsys, talked.folder, "--step", 2, "--rerun-environments")
    finally:
        place.write_text(DIGITS)
    assert code == 1
    said = "\n".join(lines)
    assert "executed differs: environment.source" in said
    assert "first difference: outputs.rollout.turns" in said
    assert "there: row 2 (group 0, sample 0, turn 2), column said" in said


MISTAKES = {
    "environment.name=nobody": "nobody is none of calculator, guess, python",
    "environment={name: calculator, options: {modulo: 3}}": "environment.name=calculator: it is called as",
    "environment={name: missing.py:Digits}": "missing.py cannot be read",
    "environment={name: calculator, max_turns: 0}": "environment.max_turns",
    "rollout.stop_strings=['#']": "no episodes with rollout.stop_strings",
    "rollout.router_replay=true": "no episodes with rollout.router_replay",
    "rollout.top_k=3": "no episodes with rollout.top_k=3",
    "pipeline={mode: asynchronous, drop_or_wait: drop}": "no episodes with pipeline.drop_or_wait=drop",
    "environment.turn_tokens=1000": "environment.turn_tokens=1000 is more than rollout.max_new_tokens=",
    "environment.observation_tokens=1000": "environment.observation_tokens=1000 is more than rollout.max_new_tokens=",
    "warm_start.tool_share=0.5": "warm_start.tool_share=0.5 needs environment.name=calculator with options",
}


@pytest.mark.parametrize(("setting", "said"), MISTAKES.items(), ids=[*MISTAKES])
def test_mistakes_are_one_line(setting, said, tmp_path, capsys):
    begun = ["run", "tiny", "--set", f"runs={tmp_path}", "--set", "environment.name=calculator"]
    code = main([*begun, "--set", setting, "--set", "warm_start.steps=1"])
    errors = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert said in errors[-1]
    assert sum(line.startswith("fp8-grpo") for line in errors) <= 1
