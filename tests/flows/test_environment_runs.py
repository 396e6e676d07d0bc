"""Runs whose policy speaks with an environment: exact, resumable in mid-episode, replayed from recorded answers."""

import json
import shutil
import signal
import zlib
from pathlib import Path

import pyarrow.compute as pc
import pytest
from episode_life import exit_code_of_life

from flows.cli import main
from fp8core.errors import UserError
from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
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


def test_calls_of_the_tool_are_counted_and_its_results_are_told(called):
    assert metrics_of(called, 2)["environment/tool_calls"] > 0.5
    turns = called.store.get_table(called.ledger.artifacts(2)["turns"]).to_pylist()
    answered = [row for row in turns if json.loads(row["calls"] or "[]") and not row["failed"] and row["said"]]
    for row in answered:
        (call,), (said,) = json.loads(row["calls"]), json.loads(row["said"])
        assert f"[{call['arguments']['expression']}]" in row["text"]
        assert said["role"] == "tool"
        assert said["content"] in "0123456789"
    heldout = called.store.get_json(called.ledger.artifacts(2)["evaluation"])
    assert heldout["episodes"]["tool_calls"] > 0


def test_the_reward_is_that_of_all_turns_and_of_the_verifier(talked):
    artifacts = talked.ledger.artifacts(1)
    turns, rewards = (talked.store.get_table(artifacts[name]).to_pylist() for name in ("turns", "rewards"))
    for row in rewards:
        own = [turn for turn in turns if (turn["group"], turn["sample"]) == (row["group"], row["sample"])]
        if own[-1]["outcome"] == "judge":
            assert row["reward"] == sum(turn["reward"] for turn in own) + (row["outcome"] == "right")
        else:
            assert row["outcome"] == own[-1]["outcome"] == "unparsed"
            assert row["reward"] == sum(turn["reward"] for turn in own)
    assert {turn["outcome"] for turn in turns} > {"", "judge"} - {"judge"}


def test_a_manifest_has_the_seconds_of_each_answer(talked):
    artifacts = talked.ledger.artifacts(2)
    turns, rollouts = (talked.store.get_table(artifacts[name]).to_pylist() for name in ("turns", "rollouts"))
    observed = talked.store.get_json(talked.ledger.steps()[2].manifest)["observed"]
    assert observed["answers"].keys() == {f"2/{row['group']}/{row['sample']}" for row in rollouts}
    # One opens the episode, and each turn of the policy has one, unless the budget ended with it.
    for episode, seconds in observed["answers"].items():
        played = [row for row in turns if f"2/{row['group']}/{row['sample']}" == episode]
        assert len(played) - 1 <= len(seconds) <= len(played)
    assert sum(map(len, observed["answers"].values())) == observed["environment"]["answers"]


def test_the_report_shows_an_episode_as_a_conversation(talked):
    data = read_run(talked.folder, "talked")
    asked = data.examples.late[0]
    turns = talked.store.get_table(talked.ledger.artifacts(asked.step)["turns"]).to_pylist()
    conversations = {}
    for turn in turns:
        parts = conversations.setdefault((turn["group"], turn["sample"]), [])
        if turn["turn"]:
            parts += [(f"policy, turn {turn['turn']}", turn["text"])]
            parts += [("environment", json.loads(turn["said"])[0]["content"])] if turn["said"] else []
    for done in asked.completions:
        shown = [(part.heading.partition(" (")[0], "".join(piece.text for piece in part.pieces)) for part in done.turns]
        assert len([speaker for speaker, _ in shown if speaker == "environment"]) > 1
        # The template has marks around what the environment says.
        assert any(
            len(told) == len(shown)
            and all(one[0] == other[0] and other[1] in one[1] for one, other in zip(shown, told, strict=True))
            for told in conversations.values()
        )
        of_policy = [part for part in done.turns if part.heading != "environment"]
        assert all("largest difference 0, 0 tokens differ" in part.heading for part in of_policy)
        assert "reward 0.25" in of_policy[0].heading
        assert {piece.level for part in of_policy for piece in part.pieces} == {0}
        told = [part for part in done.turns if part.heading == "environment"]
        assert {piece.level for part in told for piece in part.pieces} == {None}
    page = report_html([data])
    assert page.count("policy, turn 2") >= len(asked.completions)


def test_episodes_without_a_turn_of_the_policy_end_the_run(loop_run, tmp_path):
    place = tmp_path / "mute.py"
    mute = 'return Outcome("wrong", detail="no")\n        self._question = task.question'
    place.write_text(DIGITS.replace("self._question = task.question", mute))
    settings = {"environment": {"name": f"{place}:Digits"}, "rollout.max_new_tokens": 32, "runs": str(tmp_path)}
    said = r"all 8 episodes ended before the policy's first turn, the first of them as wrong: no"
    with pytest.raises(UserError, match=rf"step 0, task evaluate: environment\.name=.*mute\.py:Digits: {said}"):
        loop_run("mute", **settings)


def test_episodes_whose_environment_fails_are_not_learnt_from(loop_run, tmp_path):
    place = tmp_path / "weak.py"
    fails = 'assert task.seed % 3, "a bug"\n        self._question = task.question'
    place.write_text(DIGITS.replace("self._question = task.question", fails))
    settings = {"environment": {"name": f"{place}:Digits"}, "rollout.max_new_tokens": 32, "runs": str(tmp_path)}
    run = loop_run("weak", **settings, steps=1)
    rows = run.store.get_table(run.ledger.artifacts(1)["rewards"]).to_pylist()
    assert {row["outcome"] == "crashed" for row in rows} == {False, True}
    assert all(row["keep"] == (row["outcome"] != "crashed") for row in rows)


def test_an_environment_whose_words_have_no_tokens_is_refused_before_a_step(loop_run, tmp_path):
    """The rules of the game have letters, and this tokenizer has none."""
    settings = {"environment": {"name": "guess"}, "rollout.max_new_tokens": 32, "runs": str(tmp_path), "steps": 1}
    with pytest.raises(UserError, match=r"environment\.name=guess begins with: the tokenizer has no token for"):
        loop_run("no words", **settings)


SPOILED = {
    "start": ('return Outcome("wrong", detail="no")', "before the policy's first turn, the first of them as wrong: no"),
    "step": (
        'raise ValueError("a bug")',
        r"in the environment, the first of them as crashed: ValueError: a bug .shy.py",
    ),
}


@pytest.mark.parametrize(
    ("method", "mode"), [("start", "synchronous"), pytest.param("step", "one_step_off", marks=pytest.mark.slow)]
)
def test_a_step_whose_episodes_all_fail_plays_them_again_once_they_do_not(method, mode, loop_run, talked, tmp_path):
    place, broken = tmp_path / "shy.py", tmp_path / "broken"
    settings = {"rollout.max_new_tokens": 32, "rollout.prompts_per_step": 2, "steps": 2}
    # The stream's second batch is played beside the first update.
    batch = 2 if mode == "one_step_off" else 1
    seeds = [sample_seed(0, batch, group, sample) % 2**64 for group in range(32) for sample in range(8)]
    wrong, said = SPOILED[method]
    spoil = f"if pathlib.Path({str(broken)!r}).exists() and self._seed in {seeds}: {wrong}\n        "
    text = DIGITS.replace(
        "self._question = task.question", "self._seed = task.seed\n        self._question = task.question"
    )
    before = 'return Turn((Said("user", task' if method == "start" else "said, self._next ="
    place.write_text("import pathlib\n" + text.replace(before, spoil + before))
    broken.touch()
    settings |= {"environment": {"name": f"{place}:Digits", "max_turns": 12, "turn_tokens": 3}, "pipeline.mode": mode}
    task = "ahead" if mode == "one_step_off" else "rollout"
    with pytest.raises(
        UserError, match=rf"step 1, task {task}: environment\.name=.*shy\.py:Digits: all \d+ episodes ended {said}"
    ):
        loop_run("shy", **settings, runs=str(tmp_path))
    assert not list((tmp_path / "shy" / "shards").rglob("*.parquet")), "a resume would not play them again"
    broken.unlink()
    mended = type(talked)(tmp_path / "shy")
    mended.resume()
    assert len(mended.records) == 3


def test_what_an_environment_begins_with_is_stored(talked):
    turns = talked.store.get_table(talked.ledger.artifacts(1)["turns"]).to_pylist()
    assert {(row["reward"], row["info"]) for row in turns if not row["turn"]} == {(0.0625, '{"began": 1.0}')}
    assert metrics_of(talked, 1)["environment/info_began"] == 1


def test_episodes_have_seeds_of_their_own_when_held_out(loop_run, tmp_path):
    """An environment that draws its problem would else ask all held-out episodes the same."""
    place = tmp_path / "drawn.py"
    place.write_text(DIGITS.replace('"began": 1', '"began": task.seed % 1000'))
    settings = {"environment": {"name": f"{place}:Digits"}, "rollout.max_new_tokens": 32}
    run = loop_run("drawn", **settings, **{"rollout.prompts_per_step": 1, "steps": 1})
    turns = run.store.get_table(run.ledger.artifacts(0)["heldout_turns"]).to_pylist()
    drawn = [row["info"] for row in turns if not row["turn"]]
    assert len({*drawn}) > len(drawn) // 2


def test_held_out_episodes_are_judged_by_their_last_turn(loop_run, tmp_path):
    """By a verifier that tells one text from any other."""
    place = tmp_path / "three.py"
    place.write_text(DIGITS.replace("len(action.text) % 3", "1"))
    (tmp_path / "own.py").write_text(
        "import zlib\n"
        "def score(prompt, completion, reference, finish):\n"
        "    return zlib.crc32(completion.encode()) / 2**32\n"
    )
    settings = {"environment": {"name": f"{place}:Digits", "turn_tokens": 3}, "rollout.max_new_tokens": 32, "steps": 1}
    run = loop_run("judged", **settings, **{"reward.verifier": f"{tmp_path / 'own.py'}:score", "reward.workers": 1})
    artifacts = run.ledger.artifacts(1)
    turns = run.store.get_table(artifacts["heldout_turns"]).to_pylist()
    last = {row["group"]: row for row in turns}
    first = {row["group"]: row for row in turns if row["turn"] == 1}
    assert {row["outcome"] for row in last.values()} == {"judge"}
    found = [*run.store.get_json(artifacts["evaluation"])["scores"].values()]
    scores = [[zlib.crc32(row["text"].encode()) / 2**32 for row in rows.values()] for rows in (last, first)]
    assert sorted(found) == sorted(scores[0]) != sorted(scores[1])


def test_an_edited_environment_is_told_when_a_run_goes_on(talked, place, tmp_path):
    shutil.copytree(talked.folder.parent, tmp_path / "loop")
    copy, text = type(talked)(tmp_path / "loop" / "talked"), place.read_text()
    place.write_text(f"{text}\n# edited\n")
    begun = RolloutShards(copy.folder / "shards" / "00003", made_by="the environment before")
    before = copy.store.get_table(copy.ledger.artifacts(2)["rollouts"])
    begun.append(before)
    try:
        copy.resume(steps=3)
        # Episodes of a group are all of one environment.
        assert not copy.store.get_table(copy.ledger.artifacts(3)["rollouts"]).equals(before)
        assert "environment.name: its code or libraries are others than at step 2" in copy.said
        copy.resume(steps=4)
        assert "environment.name" not in copy.said
    finally:
        place.write_text(text)


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


def test_restoring_a_step_calls_no_environment_edited_whose_answers_are_recorded(talked, capsys, tmp_path):
    """Neither for an export of a step without a checkpoint, nor for a replay under other settings."""
    assert not (talked.folder / "checkpoints" / "00001").exists()
    code = main(["export", str(talked.folder), str(tmp_path / "policy"), "--step", "1", "--trust"])
    assert (code, "others than at" in capsys.readouterr().err) == (0, False)
    code, lines, errors = replayed(capsys, talked.folder, "--step", 2, "--set", "training.learning_rate=2e-4")
    assert (code, "others than at" in errors) == (1, False)
    assert "configuration differs: training.learning_rate" in "\n".join(lines)


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
