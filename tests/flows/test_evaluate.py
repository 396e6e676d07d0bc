"""The evaluation flow on real runs: what it measures, what MLflow shows of it, what it refuses."""

import re
from collections import Counter
from statistics import fmean

import pytest
from mlflow import MlflowClient

from flows.cli import main
from flows.evaluate import evaluate
from flows.tracking.store import default_tracking_uri
from fp8core.evaluation.measure import EvaluationResult, pass_at_k


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
    difference = result.differences["fp8"]["majority"]
    assert found.data.metrics["evaluation/fp8_minus_bf16/majority_low"] == difference.low
    (model_input,) = found.inputs.model_inputs
    model = store.get_logged_model(model_input.model_id)
    assert (model.source_run_id, model.tags["step"]) == (run.mlflow_run().info.run_id, "3")
    metrics = {metric.key: metric for metric in model.metrics}
    assert "evaluation/bf16/pass_at_1" in metrics
    files = {file.path for file in store.list_artifacts(found.info.run_id)}
    assert {"evaluation.json", "evaluation.txt"} <= files


def test_a_failure_while_it_runs_fails_the_flow_run(run, ask, tmp_path):
    (tmp_path / "broken.py").write_text("def score(*_): return 1 / 0")
    overrides = {"reward.verifier": f"{tmp_path / 'broken.py'}:score"}
    state = ask(run.folder, prompts=2, overrides=overrides)
    assert state.is_failed()
    assert "2 of 2 answers could not be checked (2 crashed): broken.py:1: ZeroDivisionError" in state.message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["no-such-run"], "no-such-run: no run"),
        (["{run}", "--step", "9"], "step 9 is not committed; steps 0 to 3 are"),
        (["{run}", "--k", "2"], "k=2 needs as many samples of a prompt, but samples=1; give --samples 2\n"),
        (["{run}", "--set", "rollout.max_new_tokens=10000"], "rollout.max_new_tokens=10000: no prompt fits beside it"),
        (["{run}", "--step", "1", "--set", "reward.verifier=integer"], "reward.verifier=integer: the reference of "),
        (["{policy}"], "is a checkpoint; name the configuration to evaluate it with by --config: "),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(run, capsys, parameters, message):
    places = {"run": str(run.folder), "policy": str(run.folder / "checkpoints" / "00003" / "policy")}
    assert main(["evaluate", *(text.format(**places) for text in parameters)]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


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
