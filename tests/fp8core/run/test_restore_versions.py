"""A resume hands trainer and engine the versions of the policy that the next tasks expect."""

import json
import shutil

import pytest

from fp8core.errors import UserError
from fp8core.run.verify import verify
from fp8core.store.layout import LEDGER
from fp8core.store.run_view import RunView

AHEAD = {
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.verified_share": 1.0,
    "warm_start.steps": 20,
    "training.learning_rate": 0.01,
}


def cut_before(run, index):
    """Before the first task of a step, whose rollout then asks for older policies."""
    run.cut_after(index, "rollout")
    path = run.folder / LEDGER
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(run.folder / "shards", ignore_errors=True)


@pytest.mark.parametrize("source", ["pass", "rollout"])
def test_completions_of_a_policy_that_was_replaced_begin_anew(loop_run, tmp_path, source):
    """No pass gives the log-probs of their tokens, which would end the run at every attempt."""
    correction = "none" if source == "rollout" else "token_tis"
    learning = {"logprobs.source": source, "correction.method": correction}
    run = loop_run("redone", **AHEAD, **learning, checkpoint={"every": 100, "keep": 1}).copy(tmp_path)
    cut_before(run, 4)
    run.change_rewards(2)
    begun = run.store.get_table(run.ledger.artifacts(3)["next_stream"]).to_pylist()
    assert any(2 in row["versions"] for row in begun)

    run.resume(**{"replay.level": "tolerant"})
    stream = run.store.get_table(run.ledger.effective_outputs(3)["next_stream"]).to_pylist()
    assert stream == [
        {**row, "tokens": [], "logprobs": [], "versions": [], "finish": "", "ended": 0} if 2 in row["versions"] else row
        for row in begun
    ]
    assert set(run.metric("alignment/tokens_differing").values()) == {0}
    assert {2, 3} <= {step for step in range(5) if run.ledger.redone(step)}
    wrong = [found for found in verify(RunView.read(run.folder)) if found.severity != "note"]
    assert all("rewards" in found.problem for found in wrong), "but for the reward that was changed"
    (verdict,) = run.replayed([4])
    assert verdict.outcome == "equal", verdict


def test_a_data_file_with_other_problems_is_refused_before_a_command_starts_anything(
    loop_run, small_checkpoint, tmp_path, capsys
):
    """Their order would be another, and other ones would be held out."""
    from flows.cli import main

    def write(answer):
        rows = [{"question": f"{i} + 1", "answer": f"#### {answer + i}"} for i in range(60)]
        (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write(1)
    data = {"source": str(tmp_path / "sums.jsonl"), "template": "{question}"}
    shape = {"architecture": None, "warm_start": None, "reward.verifier": "integer", "data": data, "steps": 1}
    run = loop_run("summed", model=str(small_checkpoint), **shape, evaluation={"prompts": 2})
    write(2)
    with pytest.raises(UserError, match=r"sums\.jsonl: the problems are others than the run began with \(\w{12}, then"):
        run.resume(steps=2)
    assert main(["resume", str(run.folder), "--set", "steps=2"]) == 2
    assert "sums.jsonl: the problems are others than the run began with" in capsys.readouterr().err
    write(1)
    run.resume(steps=2)
