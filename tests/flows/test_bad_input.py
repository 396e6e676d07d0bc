"""Bad input ends a run with one clear line, as failed in Prefect and in MLflow, and loses nothing that was done."""

import json
import shutil
import sys

import pytest
from manifest_chain import first_broken_link
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

from flows import cli
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.manifest import StepManifest

TINY_GSM8K = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "evaluation.prompts": 1,
}

STEPS = """\
import math
from pathlib import Path

import pyarrow as pa

from fp8core.store.tables import LOGPROBS, REWARDS
from tasks import logprobs as ours
from tasks.reward import reward_table
from tasks.step import step

BROKEN = Path(__file__).with_name("broken")


def scored(run, prompts, rollouts):
    store = run.directory.store
    return reward_table(run, store.get_table(prompts), store.get_table(rollouts)).to_pylist()


def stored(run, rows):
    return {"rewards": run.directory.store.put_table("rewards", pa.Table.from_pylist(rows, schema=REWARDS))}


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def nan_reward(run, index, options, prompts, rollouts):
    rows = scored(run, prompts, rollouts)
    rows[-1]["reward"] = math.nan if index == 2 else 0.0
    return stored(run, rows)


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def sometimes(run, index, options, prompts, rollouts):
    if index == 2 and BROKEN.exists():
        said = "\\x1b]0;mine\\x07\\u202e https://me:hunter2@judge"
        raise ConnectionError(f"the judge does not answer {said}\\nfor reasons of its own {said}")
    return stored(run, scored(run, prompts, rollouts))


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def of_another_kind(run, index, options, prompts, rollouts):
    return {"rewards": rollouts}


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def without_mlflow(run, index, options, prompts, rollouts):
    if index == 2:
        Path(run.config.tracking.uri.removeprefix("sqlite:///")).write_text("no database")
    return stored(run, scored(run, prompts, rollouts))


@step(inputs=ours.logprobs.spec.inputs, outputs=ours.logprobs.spec.outputs)
def nan_logprobs(run, index, options, rollouts, policy, scales):
    outputs = ours.logprobs(run, index, options, rollouts, policy, scales)
    rows = run.directory.store.get_table(outputs["logprobs"]).to_pylist()
    rows[3]["logprobs"][0] = math.nan
    table = pa.Table.from_pylist(rows, schema=LOGPROBS)
    return {**outputs, "logprobs": run.directory.store.put_table("logprobs", table)}
"""


def reward(uses):
    return {"pipeline.replace": {"reward": {"uses": f"bad_input_steps:{uses}", "needs": ["prompts", "rollouts"]}}}


@pytest.fixture(scope="module")
def steps_module(tmp_path_factory):
    """A module with steps of the user's own; returns its folder."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "bad_input_steps.py").write_text(STEPS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def assert_failed(finished, message):
    """One line, the same in the returned state, in Prefect and in MLflow."""
    assert finished.state.is_failed()
    assert message in finished.state.message
    assert len(finished.state.message.splitlines()) == 1
    with get_client(sync_client=True) as client:
        shown = client.read_flow_run(finished.state.state_details.flow_run_id).state
    assert shown.is_failed()
    assert shown.message == finished.state.message
    logged = finished.mlflow_run()
    assert logged.info.status == "FAILED"
    assert logged.data.tags["error"] == finished.state.message


def assert_intact(finished, steps):
    """The ledger ends with the given step, its manifests are a chain, every artifact it names can be read."""
    store, ledger = ArtifactStore(finished.folder), finished.ledger
    assert sorted(ledger.steps()) == list(range(steps + 1))
    manifests = [store.get_json(ledger.steps()[index].manifest) for index in range(steps + 1)]
    assert first_broken_link([StepManifest.model_validate_json(json.dumps(content)) for content in manifests]) is None
    readers = {"json": store.get_json, "parquet": store.get_table, "safetensors": store.get_tensors}
    for index in range(steps + 2):
        for entry in ledger.tasks(index).values():
            for ref in entry.outputs.values():
                readers[ref.uri.rpartition(".")[2]](ref)


# --- a checkpoint or data that cannot be used ---


@pytest.fixture
def gsm8k(small_checkpoint, tmp_path):
    """A checkpoint and data that may be broken: `model`, `data`."""
    model, data = tmp_path / "model", tmp_path / "problems.jsonl"
    shutil.copytree(small_checkpoint, model)
    rows = [
        {"question": f"Tom has {i} apples and buys 7 more. How many?", "answer": f"#### {i + 7}"} for i in range(24)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, data


@pytest.fixture
def train(launch, gsm8k):
    model, data = gsm8k

    def run(name, **settings):
        overrides = {"model": str(model), "data.source": str(data), **TINY_GSM8K, **settings}
        return launch(name, steps=1, config="gsm8k", overrides=overrides)

    return run


def change_text(name, old, new):
    def damage(model, data):
        path = data if name == "data" else model / name
        path.write_text(path.read_text().replace(old, new))

    return damage


def nothing(model, data):
    return


VERIFIERS = "def two(prompt, completion): ...\n"
FOUR = "prompt, completion, reference, finish"
MISTAKES = {
    "no-tokenizer": (lambda model, data: (model / "tokenizer.json").unlink(), {}, "model/tokenizer.json: no such file"),
    "no-answer": (
        change_text("data", "#### 9", "nine"),
        {},
        "problems.jsonl:3: reward.verifier=integer: the reference",
    ),
    "failing-chat": (
        lambda model, data: (model / "chat_template.jinja").write_text("{{ 1 / 0 }}"),
        {},
        "model: the chat template failed: division by zero",
    ),
    "no-room": (
        nothing,
        {"rollout.max_new_tokens": 512},
        "rollout.max_new_tokens=512: no prompt fits beside it into the 512 positions of model",
    ),
    "few-rows": (nothing, {"rollout.prompts_per_step": 24}, "a step takes 24 prompts, but there are only"),
    "signature": (
        nothing,
        {"reward.verifier": "verifiers.py:two"},
        f"verifiers.py:two: it is called as f({FOUR}), and is defined as f(prompt, completion): too many",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(gsm8k, tmp_path, capsys, monkeypatch, mistake):
    model, data = gsm8k
    change, changed, message = MISTAKES[mistake]
    change(model, data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    before = set(tmp_path.iterdir())
    settings = {"model": str(model), "data.source": str(data), "steps": 1, **TINY_GSM8K, **changed}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert cli.main(["run", "gsm8k", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1), err
    assert message in err
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


# --- a place that cannot be written ---


def test_a_deployed_run_whose_verifier_is_not_there_leaves_nothing(launch, runs, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "00000000-0000-0000-0000-000000000000")
    failed = launch("no-verifier", overrides={"reward.verifier": "nowhere:score"})
    assert failed.state.is_failed()
    assert "nowhere" in failed.state.message
    assert not (runs / "no-verifier").exists()
    assert "MLflow" not in capsys.readouterr().out, "it has no run there"


# --- what goes wrong in the middle ---


def test_a_nan_reward_is_refused_before_it_is_learnt_from(launch, steps_module):
    failed = launch("bad-nan-reward", steps=3, overrides=reward("nan_reward"))
    assert_failed(failed, "step 2, task train: the reward of group 3, sample 3 is nan; rewards must be finite")
    assert_intact(failed, steps=1)
    assert set(failed.ledger.tasks(2)) == {"prompts", "rollout", "reward", "logprobs"}
    history = failed.mlflow.get_metric_history(failed.mlflow_run().info.run_id, "core/reward")
    assert [metric.step for metric in history] == [1]


@pytest.mark.slow
def test_an_exception_in_a_step_keeps_what_was_done_and_the_run_goes_on_without_its_cause(
    launch, steps_module, caplog, capfd
):
    broken = steps_module / "broken"
    broken.touch()
    failed = launch("bad-step", overrides=reward("sometimes"))
    assert_failed(failed, "step 2, task reward: ConnectionError: the judge does not answer \\x1b]0;mine\\x07\\u202e")
    with get_client(sync_client=True) as client:
        of_steps = FlowRunFilter(parent_flow_run_id={"any_": [failed.state.state_details.flow_run_id]})
        states = [run.state.message or "" for run in client.read_task_runs(flow_run_filter=of_steps)]
    assert any("the judge does not answer" in message for message in states)
    shown = ["".join(capfd.readouterr()), caplog.text, (failed.folder / "tracking.json").read_text(), *states]
    assert "for reasons of its own \\x1b]0;mine\\x07\\u202e" in caplog.text, "the traceback"
    assert not any(set("\x1b\x07\u202e") & set(text) or "hunter2" in text for text in shown)
    assert_intact(failed, steps=1)
    rollout = failed.ledger.tasks(2)["rollout"]
    broken.unlink()
    continued = launch("bad-step", overrides=reward("sometimes"))
    assert continued.state.is_completed(), continued.state.message
    assert continued.ledger.tasks(2)["rollout"] == rollout, "generated once"
    assert continued.summary["weights_digest"] == launch("not-bad").summary["weights_digest"]
