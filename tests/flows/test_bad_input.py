"""Bad input ends a run with one clear line, as failed in Prefect and in MLflow, and loses nothing that was done."""

import json
import shutil
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

from flows import cli

STEPS = """\
from pathlib import Path

from tasks import reward as ours
from tasks.step import step

BROKEN = Path(__file__).with_name("broken")


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def sometimes(run, index, options, prompts, rollouts):
    if index == 2 and BROKEN.exists():
        said = "\\x1b]0;mine\\x07\\u202e https://me:hunter2@judge"
        raise ConnectionError(f"the judge does not answer {said}\\nfor reasons of its own {said}")
    return ours.reward(run, index, options, prompts, rollouts)
"""
FOUR = "prompt, completion, answer, finish"
MISTAKES = {
    "no-tokenizer": (lambda model, data: (model / "tokenizer.json").unlink(), {}, "model/tokenizer.json: no such file"),
    "no-answer": (
        lambda model, data: data.write_text(data.read_text().replace("#### 9", "nine")),
        {},
        "problems.jsonl:3: reward.verifier=integer: the reference",
    ),
    "no-room": (
        lambda model, data: None,
        {"rollout.max_new_tokens": 512},
        "rollout.max_new_tokens=512: no prompt fits beside it into the 512 positions of model",
    ),
    "signature": (
        lambda model, data: None,
        {"reward.verifier": "verifiers.py:two"},
        f"verifiers.py:two: it is called as two({FOUR}), and is defined as two(prompt, completion): too many",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(small_checkpoint, tmp_path, capsys, monkeypatch, mistake):
    model, data = tmp_path / "model", tmp_path / "problems.jsonl"
    shutil.copytree(small_checkpoint, model)
    rows = [{"question": f"{i} apples and 7 more. How many?", "answer": f"#### {i + 7}"} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change, changed, message = MISTAKES[mistake]
    change(model, data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "verifiers.py").write_text("def two(prompt, completion): ...\n")
    before = set(tmp_path.iterdir())
    sizes = {"rollout.prompts_per_step": 2, "rollout.max_new_tokens": 4, "evaluation.prompts": 1}
    settings = {"model": str(model), "data.source": str(data), "steps": 1, **sizes, **changed}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert cli.main(["run", "gsm8k", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1), err
    assert message in err
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


@pytest.mark.slow
def test_an_exception_in_a_step_is_shown_escaped_and_the_run_goes_on_without_its_cause(
    launch, tmp_path, caplog, capfd, monkeypatch
):
    (tmp_path / "bad_input_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    broken = tmp_path / "broken"
    broken.touch()
    step = {"reward": {"uses": "bad_input_steps:sometimes", "needs": ["prompts", "rollouts"]}}
    failed = launch("bad-step", overrides={"pipeline.replace": step})
    message = failed.state.message
    assert "step 2, task reward: ConnectionError: the judge does not answer \\x1b]0;mine\\x07\\u202e" in message
    with get_client(sync_client=True) as client:
        shown = client.read_flow_run(failed.state.state_details.flow_run_id).state
        of_steps = FlowRunFilter(parent_flow_run_id={"any_": [failed.state.state_details.flow_run_id]})
        states = [run.state.message or "" for run in client.read_task_runs(flow_run_filter=of_steps)]
    assert (shown.is_failed(), shown.message) == (True, message)
    logged = failed.mlflow_run()
    assert (logged.info.status, logged.data.tags["error"]) == ("FAILED", message)
    texts = ["".join(capfd.readouterr()), caplog.text, (failed.folder / "tracking.json").read_text(), *states]
    assert "for reasons of its own \\x1b]0;mine\\x07\\u202e" in caplog.text, "the traceback"
    assert not any(set("\x1b\x07\u202e") & set(text) or "hunter2" in text for text in texts)
    rollout = failed.ledger.tasks(2)["rollout"]
    broken.unlink()
    continued = launch("bad-step", overrides={"pipeline.replace": step})
    assert continued.state.is_completed(), continued.state.message
    assert continued.ledger.tasks(2)["rollout"] == rollout, "generated once"
    assert continued.summary["weights_digest"] == launch("not-bad").summary["weights_digest"]
