"""Bad input ends a run with one clear line, as failed in Prefect and in MLflow, and loses nothing that was done."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from manifest_chain import first_broken_link
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from safetensors.torch import load_file, save_file

from flows import cli
from fp8core.config.load import load_config
from fp8core.config.run import public_dump
from fp8core.errors import UserError
from fp8core.run.checks.inputs import check_inputs
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.ledger import START, SegmentEntry, TaskEntry
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import RunDirectory

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


def change_tensors(change):
    def damage(model, data):
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")

    return damage


def transpose(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous()


def change_line(number, line):
    def damage(model, data):
        lines = data.read_text().splitlines()
        lines[number - 1] = line
        data.write_text("\n".join(lines))

    return damage


# What else can be wrong with either is in tests/fp8core: models/test_checkpoint.py, data/test_source.py.
DAMAGES = {
    "shape": (
        change_tensors(transpose),
        "model.safetensors: tensor model.layers.0.mlp.up_proj.weight: expected shape [256, 128], found [128, 256]",
    ),
    "pipe": (lambda model, data: (data.unlink(), os.mkfifo(data)), "{data}: is a pipe; only regular files are read"),
    "no-json": (change_line(3, '{"question": "What'), "{data}:3: not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_or_data_names_the_place(train, gsm8k, damage):
    model, data = gsm8k
    change, message = DAMAGES[damage]
    change(model, data)
    assert_failed(train(f"bad-{damage}"), message.format(model=model, data=data))


def test_a_hub_model_that_cannot_be_had_says_so(train):
    failed = train("bad-hub", model="no-owner-of-this-name/no-model-of-this-name")
    assert_failed(failed, "model=no-owner-of-this-name/no-model-of-this-name: n")


@pytest.mark.slow
def test_a_run_that_never_found_its_data_may_be_begun_with_other_data(train, gsm8k):
    _, data = gsm8k
    misled = train("corrected", **{"data.source": str(data.with_name("problem.jsonl"))})
    assert_failed(misled, "problem.jsonl: no such file")
    corrected = train("corrected")
    assert corrected.state.is_completed(), corrected.state.message
    logged = corrected.mlflow_run()
    assert logged.info.status == "FINISHED"
    assert "error" not in logged.data.tags
    assert json.loads((corrected.folder / "run.json").read_text())["config"]["data"]["source"] == str(data)
    elsewhere = data.with_name("others.jsonl")
    shutil.copy(data, elsewhere)
    refused = train("corrected", **{"data.source": str(elsewhere)})
    assert refused.state.message.startswith("run corrected exists with another configuration: data.source: ")


def change_text(name, old, new):
    def damage(model, data):
        path = data if name == "data" else model / name
        path.write_text(path.read_text().replace(old, new))

    return damage


def nothing(model, data):
    return


VERIFIERS = """\
def two(prompt, completion): ...
def wanting(prompt, completion, reference, finish, *, tolerance): ...
async def awaited(prompt, completion, reference, finish): return True
def by_column(prompt, completion, reference, finish, columns): return columns["unit"] in completion
"""
FOUR = "prompt, completion, reference, finish"
MISTAKES = {
    "no-tokenizer": (lambda model, data: (model / "tokenizer.json").unlink(), {}, "model/tokenizer.json: no such file"),
    "other-weights": (
        change_text("config.json", '"intermediate_size": 256', '"intermediate_size": 384'),
        {},
        "tensor model.layers.0.mlp.down_proj.weight: expected shape [128, 384], found [128, 256]",
    ),
    "other-head": (
        change_text("config.json", '"tie_word_embeddings": false', '"tie_word_embeddings": true'),
        {},
        "tensor lm_head.weight: expected the values of model.embed_tokens.weight",
    ),
    "no-answer": (
        change_text("data", "#### 9", "nine"),
        {},
        "problems.jsonl:3: reward.verifier=integer: the reference",
    ),
    "no-question": (nothing, {"data.template": "Answer it."}, "data.template: the text has no {question}"),
    "no-question-in-chat": (
        lambda model, data: (model / "chat_template.jinja").write_text("Answer."),
        {},
        "problems.jsonl:1: the chat template of the model leaves out message 1, the user's",
    ),
    "failing-chat": (
        lambda model, data: (model / "chat_template.jinja").write_text("{{ 1 / 0 }}"),
        {},
        "model: the chat template failed: division by zero",
    ),
    "no-heldout": (nothing, {"evaluation.source": ""}, "evaluation.source: must have at least 1 "),
    "lone-completions": (nothing, {"rollout.group_size": 1}, "rollout.group_size=1: loss.advantage=grpo compares"),
    "no-room": (
        nothing,
        {"rollout.max_new_tokens": 512},
        "rollout.max_new_tokens=512: no prompt fits beside it into the 512 positions of model",
    ),
    "few-rows": (nothing, {"rollout.prompts_per_step": 24}, "a step takes 24 prompts, but there are only"),
    "blocked": (nothing, {"runs": "problems.jsonl/runs"}, "problems.jsonl: File exists"),
    "signature": (
        nothing,
        {"reward.verifier": "verifiers.py:two"},
        f"verifiers.py:two: it is called as f({FOUR}), and is defined as f(prompt, completion): too many",
    ),
    "options": (
        nothing,
        {"reward.verifier": "verifiers.py:wanting", "reward.options": {"slack": 1}},
        f"it is called as f({FOUR}, slack=...), and is defined as f({FOUR}, *, tolerance): missing a required",
    ),
    "special-stop": (
        nothing,
        {"rollout.stop_strings": ["<|im_start|>"]},
        "rollout.stop_strings: '<|im_start|>' has a special token, which the text of a completion leaves out",
    ),
    "coroutine": (
        nothing,
        {"reward.verifier": "verifiers.py:awaited"},
        "verifiers.py:awaited: it is a coroutine or a generator; a plain function returns its answer",
    ),
    "columns": (
        nothing,
        {"reward.verifier": "verifiers.py:by_column"},
        "verifiers.py:by_column: it has a parameter `columns` without a default, and data.columns names no field",
    ),
    "columns-of-others": (
        nothing,
        {"reward.others": [{"name": "unit", "verifier": "verifiers.py:by_column"}]},
        "verifiers.py:by_column: it has a parameter `columns` without a default",
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


def test_a_run_that_was_begun_keeps_prompts_that_lack_a_turn(gsm8k, tmp_path):
    model, data = gsm8k
    (model / "chat_template.jinja").write_text("Answer.")
    place = {"runs": str(tmp_path / "runs"), "run": "begun"}
    config = load_config("gsm8k", {"model": str(model), "data.source": str(data), **TINY_GSM8K, **place})
    with pytest.raises(UserError, match="the chat template of the model leaves out message 1"):
        check_inputs(config)
    with RunDirectory.create_or_open(config.runs / "begun") as directory:
        directory.write_description(public_dump(config), "")
        begun = SegmentEntry(pid=1, host="here", code_version="0" * 64, started=1.0)
        work = TaskEntry(step=START, task="warm_start", key="0" * 64, outputs={}, started=1.0, seconds=0.0)
        directory.ledger.append(begun, work)
    check_inputs(config)


# --- a place that cannot be written ---


def test_a_setting_with_two_values(launch, runs):
    failed = launch("two-values", steps=1, overrides={"steps": 2})
    assert failed.state.message == "steps: 1 and 2 are both given, the second in overrides; omit one"
    assert not (runs / "two-values").exists()


def test_a_deployed_run_whose_verifier_is_not_there_leaves_nothing(launch, runs, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "00000000-0000-0000-0000-000000000000")
    failed = launch("no-verifier", overrides={"reward.verifier": "nowhere:score"})
    assert failed.state.is_failed()
    assert "nowhere" in failed.state.message
    assert not (runs / "no-verifier").exists()
    assert "MLflow" not in capsys.readouterr().out, "it has no run there"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_runs_that_cannot_be_a_folder(launch, tmp_path, below):
    blocked = tmp_path / "runs"
    blocked.write_text("")
    failed = launch("unwritable", overrides={"runs": str(blocked / below)})
    assert failed.state.is_failed()
    assert failed.state.message == f"cannot create the folder {blocked}: File exists"


def test_a_run_whose_folder_is_blocked(launch, tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "artifacts").write_text("")
    failed = launch("blocked", overrides={"runs": str(tmp_path)})
    assert failed.state.is_failed()
    assert failed.state.message == f"cannot create the folder {tmp_path}/blocked/artifacts: File exists"


# --- what goes wrong in the middle ---


def test_a_nan_reward_is_refused_before_it_is_learnt_from(launch, steps_module):
    failed = launch("bad-nan-reward", steps=3, overrides=reward("nan_reward"))
    assert_failed(failed, "step 2, task train: the reward of group 3, sample 3 is nan; rewards must be finite")
    assert_intact(failed, steps=1)
    assert set(failed.ledger.tasks(2)) == {"prompts", "rollout", "reward", "logprobs"}
    history = failed.mlflow.get_metric_history(failed.mlflow_run().info.run_id, "core/reward")
    assert [metric.step for metric in history] == [1]


def test_a_nan_loss_is_not_applied(launch, steps_module):
    step = {"uses": "bad_input_steps:nan_logprobs", "needs": ["rollouts", "policy", "scales"]}
    failed = launch("bad-nan-loss", overrides={"pipeline.replace": {"logprobs": step}})
    assert_failed(failed, "step 1, task train: update 0 of policy 0: the loss is nan; the update was not applied")
    assert_intact(failed, steps=0)


def test_an_artifact_of_another_kind_is_refused(launch, steps_module):
    failed = launch("bad-kind", overrides=reward("of_another_kind"))
    assert_failed(failed, "step 1, task reward: bad_input_steps:of_another_kind returned {'rewards': 'rollouts'}")


@pytest.mark.slow
def test_an_mlflow_store_that_fails_is_one_line_and_no_failed_training(launch, runs, steps_module, tmp_path, capfd):
    launch("not-bad")  # Makes the store that is copied.
    shutil.copy(runs / "mlflow.db", tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    capfd.readouterr()
    finished = launch("bad-store", overrides={"tracking.uri": uri, **reward("without_mlflow")})
    assert finished.state.is_completed()
    _, last = (line for line in capfd.readouterr().out.splitlines() if "file is not a database" in line)
    assert f"fp8-grpo resume {finished.folder}" in last


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


def test_a_configuration_that_is_not_there_is_said_before_torch_is_imported():
    """Whose import takes seconds."""
    program = "import sys; from flows.cli import main; print(main(['run', 'missing']), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "2 False"
    assert "missing" in found.stderr
