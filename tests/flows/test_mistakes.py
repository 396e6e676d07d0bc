"""A user's mistake is one line and exit code 2, before a command prints, makes or starts anything."""

import sys

import pytest

from flows.cli import main

REWARD = "pipeline.replace={reward: {uses: 'raising:score', needs: [prompts, rollouts]}}"
BEGIN = ["run", "tiny", "--set"]
PASSWORD = "tracking.uri=postgresql://me:hunter2@host/db"
EPISODES = [*BEGIN, "environment.name=calculator", "--set", "warm_start.steps=1", "--set"]
RESUME, REPLAY, EXPORT, GC = (["resume", "RUN"], ["replay", "RUN"], ["export", "RUN"], ["gc", "RUN", "--set"])
OTHER = "run whole exists with another configuration: "

MISTAKES = [
    ([*BEGIN, "stpes=3"], "stpes: unknown key; did you mean steps? (--set)"),
    ([*BEGIN, "learning_rate=1"], "did you mean warm_start.learning_rate or training.learning_rate?"),
    ([*BEGIN, REWARD], "raising cannot be imported: KeyError: 'API_KEY' (HERE/raising.py:3)"),
    ([*BEGIN, "tracking.uri=http://127.0.0.1:1"], "no server answers there (Connection refused)"),
    ([*BEGIN, PASSWORD], "tracking.uri: postgresql://me:***@host/db has a password"),
    (["parity", "--variant", "fp4"], "variants: fp4 is none of bf16, fp8-rollout, "),
    ([*EPISODES, "environment.name=nobody"], "nobody is none of calculator, python"),
    ([*EPISODES, "rollout.stop_strings=['#']"], "no episodes with rollout.stop_strings"),
    ([*EPISODES, "warm_start.tool_share=0.5"], "needs environment.name=calculator with options"),
    (["resume", "HERE/absent"], "HERE/absent: no run (no run.json in HERE/absent)"),
    ([*RESUME, "--set", "seed=4"], f"{OTHER}seed: 0 -> 4; begin another one for that: fp8-grpo run ... --set run=NAME"),
    ([*RESUME, "--set", "steps=1"], f"{OTHER}steps: 4 -> 1 (a run may get more steps, not fewer)"),
    ([*RESUME, "--set", "run=other"], "run: RUN is continued under its name and where it lies; leave run as it is"),
    ([*REPLAY, "--step", "9"], "run whole: step 9 is not committed; steps 0 to 4 are"),
    ([*REPLAY, "--from", "9"], "--from 9: the last step is 4"),
    ([*EXPORT, "HERE", "--step", "4"], "already exists; an export is never written over something else"),
    ([*GC, "steps=4"], "--set steps=4: gc takes settings of artifacts.keep alone"),
    (["report", "RUN", "--out", "HERE"], "--out HERE: cannot be written"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(words)[:60] for words, _ in MISTAKES])
def test_a_mistake_is_one_line(run_copy, tmp_path, monkeypatch, capsys, arguments, said):
    here = tmp_path / "here"
    here.mkdir()
    (here / "raising.py").write_text("import os\n\nkey = os.environ['API_KEY']\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def placed(text: str) -> str:
        return text.replace("HERE", str(here)).replace("RUN", str(run_copy.folder))

    code = main([placed(word) for word in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    assert line.startswith("fp8-grpo: ")
    assert placed(said) in line
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"raising.py"}
