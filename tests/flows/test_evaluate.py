"""The evaluation flow on real runs: what it measures, what MLflow shows of it, what it refuses."""

import inspect
import json
import re
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, LogFilter, LogFilterFlowRunId

from flows.cli import main
from flows.evaluate import evaluate
from flows.evaluation import EvaluationRequest
from flows.tracking.store import default_tracking_uri
from fp8core.evaluation.measure import EvaluationResult, pass_at_k
from fp8core.rollout.engine import sample_seed

DIGITS = (Path(__file__).parents[1] / "parts" / "digits_environment.py").read_text()


@pytest.fixture(scope="module")
def run(launch):
    finished = launch("evaluated", steps=3)
    assert finished.state.is_completed(), finished.state.message
    return finished


@pytest.fixture(scope="module")
def ask(prefect_server):
    """Run the flow: ask(target, **parameters) returns its state."""
    return lambda target, **parameters: evaluate(target=str(target), return_state=True, **parameters)


@pytest.fixture(scope="module")
def compared(run, ask, tmp_path_factory):
    """The last policy of the run, in two precisions: the result, and the file it was written to."""
    file = tmp_path_factory.mktemp("evaluation") / "result.json"
    state = ask(run.folder, prompts=8, samples=4, precisions=("bf16", "fp8"), output=str(file))
    assert state.is_completed(), state.message
    return EvaluationResult.model_validate(state.result()), file


@pytest.fixture
def store(runs):
    return MlflowClient(default_tracking_uri(runs))


def logged(store, name):
    experiment = store.get_experiment_by_name("fp8-grpo").experiment_id
    found = store.search_runs([experiment], f"tags.`fp8_grpo.evaluation` = '{name}'")
    return [store.get_run(each.info.run_id) for each in found]  # A search leaves models out.


def test_the_result_follows_from_its_prompts(compared, run):
    result, file = compared
    assert EvaluationResult.model_validate_json(file.read_text()) == result
    assert (result.step, result.prompts, result.samples, result.temperature) == (3, 8, 4, 1.0)
    assert result.weights_digest == run.summary["weights_digest"]
    assert list(result.precisions) == ["bf16", "fp8"]
    for name, measured in result.precisions.items():
        assert result.engines[name]["linear"] == ["bf16" if name == "bf16" else "fp8_block"] * 2
        assert len(measured.prompts) == 8
        assert Counter(measured.outcomes).total() == 32
        for k in (1, 4):
            values = [pass_at_k(4, prompt.outcomes.get("right", 0), k) for prompt in measured.prompts]
            estimate = measured.estimates[f"pass@{k}"]
            assert estimate.value == pytest.approx(fmean(values))
            assert estimate.low <= estimate.value <= estimate.high
    first, second = result.precisions.values()
    for key, difference in result.differences["fp8"].items():
        assert difference.value == pytest.approx(second.estimates[key].value - first.estimates[key].value)


def test_mlflow_links_it_to_the_model_of_the_checkpoint(compared, run, store):
    result, _ = compared
    (found,) = logged(store, "evaluated-00003")
    assert (found.info.status, found.info.run_name) == ("FINISHED", "evaluate-evaluated-00003")
    assert found.data.params["samples"] == "4"
    assert found.data.metrics["evaluation/fp8/pass_at_4"] == result.precisions["fp8"].estimates["pass@4"].value
    difference = result.differences["fp8"]["maj@4"]
    assert found.data.metrics["evaluation/fp8_minus_bf16/maj_at_4_low"] == difference.low
    (model_input,) = found.inputs.model_inputs
    model = store.get_logged_model(model_input.model_id)
    assert (model.source_run_id, model.tags["step"]) == (run.mlflow_run().info.run_id, "3")
    metrics = {metric.key: metric for metric in model.metrics}
    assert metrics["evaluation/bf16/pass_at_1"].dataset_name == "chain-heldout"
    assert [each.dataset.name for each in found.inputs.dataset_inputs] == ["chain-heldout"]
    files = {file.path for file in store.list_artifacts(found.info.run_id)}
    assert {"evaluation.json", "evaluation.txt"} <= files


def test_prefect_has_it_as_a_table_and_in_the_log(compared):
    result, _ = compared
    value = f"{result.precisions['fp8'].estimates['pass@4'].value:.4f}"
    with get_client(sync_client=True) as client:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["evaluated-evaluation"]))
        (shown,) = [one for one in client.read_artifacts(artifact_filter=key) if "4 at temperature" in one.description]
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[shown.flow_run_id]))
        deadline = time.monotonic() + 30
        while not any(value in log.message for log in client.read_logs(mine)):
            assert time.monotonic() < deadline, "Prefect's log lacks the result"
            time.sleep(0.2)
    (row,) = (line for line in shown.data.splitlines() if line.startswith("| fp8 |") and "[" in line)
    assert value in row


def test_a_step_without_a_checkpoint_is_restored_and_asked_greedily(run, ask, capfd):
    state = ask(run.folder, step=1, prompts=4)
    assert state.is_completed(), state.message
    result = EvaluationResult.model_validate(state.result())
    assert (result.step, result.temperature) == (1, 0.0)
    assert set(result.precisions["configured"].estimates) == {"pass@1"}
    assert result.engines["configured"]["linear"] == ["fp8_block"] * 2
    printed = capfd.readouterr().out
    assert "step 1: 4 prompts of chain, greedy; 95% intervals" in printed
    assert "logged as MLflow run" in printed


def test_an_exported_folder_on_a_file_of_rows(run, ask, runs, tmp_path, store):
    assert main(["export", str(run.folder), str(tmp_path / "exported"), "--step", "2"]) == 0
    rows = [{"question": f"{n}+1+{m}=", "answer": str((n + 1 + m) % 10)} for n in range(5) for m in range(2)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    asked = {"config": "tiny", "data": str(data), "overrides": {"runs": str(runs)}, "samples": 3, "k": [2]}
    states = [ask(tmp_path / "exported", **asked) for _ in range(2)]
    first, second = (EvaluationResult.model_validate(state.result()) for state in states)
    assert first == second
    assert (first.step, first.prompts, first.data) == (None, 10, str(data))
    assert set(first.precisions["configured"].estimates) == {"pass@2", "maj@2"}
    origin = json.loads((tmp_path / "exported" / "fp8_grpo.json").read_text())
    assert first.weights_digest == origin["weights_digest"]
    found = logged(store, "exported")
    assert len(found) == 2
    assert [each.model_id for each in found[0].inputs.model_inputs] == [origin["mlflow_model_id"]]
    assert [each.dataset.name for each in found[0].inputs.dataset_inputs] == ["sums-rows"]


def test_a_run_that_mlflow_does_not_know_is_evaluated_all_the_same(whole_run, ask, capfd):
    state = ask(whole_run.folder, prompts=2)
    assert state.is_completed(), state.message
    assert "the run was never tracked in MLflow: the evaluation is not logged" in capfd.readouterr().out


def test_a_failure_while_it_runs_fails_the_flow_run(run, ask, tmp_path):
    (tmp_path / "broken.py").write_text("def score(*_): return 1 / 0")
    overrides = {"reward.verifier": f"{tmp_path / 'broken.py'}:score"}
    state = ask(run.folder, prompts=2, overrides=overrides)
    assert state.is_failed()
    assert "2 of 2 answers could not be checked (2 crashed): ZeroDivisionError" in state.message


LOSING = """
from fp8core.errors import EngineLost
from fp8core.models.weights import rollout_formats
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.registry import EngineEntry


class Losing(EmbeddedEngine):
    def generate(self, groups, sampling):
        raise EngineLost("the engine's core ended")


def build(config, arch):
    return Losing(arch, rollout_formats(config.precision, arch.num_layers), config.rollout.max_batch)


ENTRY = EngineEntry(name="losing", build=build)
"""


def test_the_loss_of_the_engine_is_one_line(run, prefect_server, tmp_path, monkeypatch, capfd):
    (tmp_path / "losing_engine.py").write_text(LOSING)
    monkeypatch.syspath_prepend(tmp_path)
    engine = "rollout.engine=losing_engine:ENTRY"
    assert main(["evaluate", str(run.folder), "--prompts", "2", "--set", engine, "--trust"]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("fp8-grpo", "Traceback"))]
    assert said == ["fp8-grpo: the engine's core ended"]


@pytest.fixture
def speaking(tmp_path):
    """Settings of an environment of digits that begins a task so: speaking(begins)."""

    def settings(begins):
        (tmp_path / "own.py").write_text(DIGITS.replace("self._question = task.question", begins))
        return {"environment.name": f"{tmp_path / 'own.py'}:Digits", "rollout.max_new_tokens": 32}

    return settings


LONG = 'return Turn((Said("user", "1" * 400),))'


def test_a_problem_that_its_environment_makes_too_long_is_refused(run, ask, speaking, capsys):
    """In the flow, and by the command before anything is started."""
    overrides = speaking(LONG)
    state = ask(run.folder, prompts=2, overrides=overrides)
    assert state.is_failed()
    assert re.search(r"has 400 tokens as environment\.name=.*own\.py:Digits begins it", state.message)
    capsys.readouterr()
    changes = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    assert main(["evaluate", str(run.folder), *changes, "--trust"]) == 2
    errors = capsys.readouterr().err
    assert re.search(r"has 400 tokens as environment\.name=.*own\.py:Digits begins it", errors)
    assert errors.count("\n") == 1


def test_episodes_in_which_the_policy_never_spoke_are_told(run, ask, speaking, capfd):
    """All of them are no measurement. The problems fit as the first sample of each begins."""
    seeds = [sample_seed(0, 0, group, 0) % 2**64 for group in range(2)]
    overrides = speaking(f"if task.seed not in {seeds}: {LONG}\n        self._question = task.question")
    state = ask(run.folder, prompts=2, samples=4, overrides=overrides)
    assert state.is_completed(), state.message
    said = "6 of 8 episodes ended before the policy's first turn, the first of them as unparsed: the first messages"
    assert f"configured: {said} are 400 tokens" in capfd.readouterr().out
    overrides = speaking('return Outcome("wrong", detail="no")')
    state = ask(run.folder, prompts=2, samples=4, overrides=overrides)
    assert state.is_failed()
    assert "own.py:Digits: all 8 episodes ended before the policy's first turn, the first of them as" in state.message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["no-such-run"], "no-such-run: no run"),
        (["{run}", "--step", "9"], "step 9 is not committed; steps 0 to 3 are"),
        (["{run}", "--k", "2"], "k=2 needs as many samples of a prompt, but samples=1; give --samples 2\n"),
        (["{run}", "--samples", "2", "--temperature", "0"], "temperature=0 is greedy"),
        (["{run}", "--precision", "fp8", "--precision", "fp8"], "precisions: fp8, fp8 names one twice"),
        (["{run}", "--set", "rollout.groups=1"], "rollout.groups: unknown key"),
        (["{run}", "--json", "/no/such/folder/r.json"], "--json /no/such/folder/r.json: cannot be written"),
        (["{run}", "--set", "steps=9"], "steps: an evaluation does not use it"),
        (
            ["{run}", "--max-new-tokens", "9", "--set", "rollout.max_new_tokens=8"],
            "rollout.max_new_tokens: 9 and 8 are both given, the second in --set; omit one",
        ),
        (["{run}", "--split", "test"], "split=test: data.source=chain has no splits"),
        (["{run}", "--max-new-tokens", "10000"], "rollout.max_new_tokens=10000: no prompt fits beside it"),
        (["{policy}", "--config", "tiny", "--max-new-tokens", "10000"], "rollout.max_new_tokens=10000: no prompt fits"),
        (["{run}", "--step", "1", "--set", "reward.verifier=integer"], "reward.verifier=integer: the reference of "),
        (["{run}", "--set", "rollout.engine=sglang"], "rollout.engine=sglang"),
        (["{run}", "--set", "rollout.stop_strings=[Q]"], "rollout.stop_strings: the tokenizer has no token for 'Q'"),
        (["{policy}"], "is a checkpoint; name the configuration to evaluate it with by --config: "),
        (["{policy}", "--config", "tiny", "--step", "1"], "is a checkpoint, which has no steps"),
        (["{policy}", "--config", "none"], "configuration none: there is no such shipped configuration"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(run, capsys, parameters, message):
    places = {"run": str(run.folder), "policy": str(run.folder / "checkpoints" / "00003" / "policy")}
    assert main(["evaluate", *(text.format(**places) for text in parameters)]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--k", "0", "expected a number from 1, found '0'"),
        ("--temperature", "-1", "expected a number from 0 to 10, found '-1'"),
        ("--confidence", "95", "expected a share between 0 and 1, found '95'"),
        ("--seed", "-1", "expected a number from 0, found '-1'"),
    ],
)
def test_a_number_that_cannot_be_is_refused_as_it_is_read(capsys, option, value, expected):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "any", option, value])
    said = capsys.readouterr().err
    assert (ended.value.code, said) == (2, f"fp8-grpo evaluate: argument {option}: {expected}\n")


def test_parameters_have_the_defaults_of_the_command():
    defaults = {field.name: field.default for field in fields(EvaluationRequest) if field.name != "target"}
    signature = inspect.signature(evaluate.fn).parameters
    assert {name: signature[name].default for name in defaults} == defaults


def test_parts_of_fp8_stand_beside_accuracy(run, ask, tmp_path, store, capfd):
    assert main(["export", str(run.folder), str(tmp_path / "parted"), "--step", "3"]) == 0
    state = ask(tmp_path / "parted", config="tiny", prompts=6, parts=True, overrides={"runs": str(run.folder.parent)})
    assert state.is_completed(), state.message
    result = EvaluationResult.model_validate(state.result())
    costs = result.parts["configured"]
    assert (costs.texts, costs.answers) == (6, 6)
    assert {"rounding", "activations", "weights", "cache", "all"} <= {*costs.parts}
    assert 0 < costs.parts["rounding"].nats < costs.parts["all"].nats
    # The engine scores right answers as the decoder does.
    scored = result.answer_logprobs["configured"]
    assert scored == pytest.approx(costs.answer_logprob + costs.parts["all"].answer_shift, abs=1e-5)
    printed = capfd.readouterr().out
    assert re.search(r"configured from BF16 +KL +median +worst text", printed)
    assert re.search(rf"all +{costs.parts['all'].nats:.4f}", printed)
    (found,) = logged(store, "parted")
    assert found.data.metrics["evaluation/configured/part_weights_nats"] == costs.parts["weights"].nats


def test_parts_need_fp8_and_prompts_of_the_data(run, capsys):
    wrong = {
        "parts: bf16 has no FP8; add --precision fp8": ["--precision", "bf16"],
        "parts: KL is measured on prompts of the data": ["--set", "environment.name=calculator"],
    }
    for message, words in wrong.items():
        assert main(["evaluate", str(run.folder), "--parts", *words]) == 2
        assert message in capsys.readouterr().err
