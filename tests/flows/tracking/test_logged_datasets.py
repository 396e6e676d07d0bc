"""Data is told apart by what is in it, and entered once."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.tracking.publish import heldout_prompts, log_datasets, training_prompts
from flows.tracking.tracker import Tracker
from fp8core.config.data import DataConfig
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.data.source import RowSource, build_source


def config_of(**settings: object) -> RunConfig:
    return load_config("tiny", {"evaluation.prompts": 4, **settings})


def of_file(path: Path, rows: int, **settings: object) -> RunConfig:
    problems = [{"question": f"{number} plus one?", "answer": str(number + 1)} for number in range(rows)]
    path.write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
    return config_of(**{"data.source": str(path), "warm_start": None, "reward.verifier": "integer", **settings})


def test_generated_prompts_are_named_by_their_settings() -> None:
    config = config_of()
    source = build_source(config.data, config.evaluation)
    training, heldout = training_prompts(config, source), heldout_prompts(config, source)
    assert (training.name, heldout.name) == ("chain-training", "chain-heldout")
    settings = {"min_operands": 5, "max_operands": 5, "modulus": 10, "operations": "+-*"}
    assert json.loads(training.source) == {"generator": "fp8core.data.chain", **settings}
    assert json.loads(training.profile) == {"num_rows": "generated", "prompts_per_step": 32}
    assert json.loads(heldout.profile) == {"num_rows": 4}
    columns = json.loads(training.schema)["mlflow_colspec"]
    assert [(column["name"], column["type"]) for column in columns] == [("question", "string"), ("reference", "string")]
    other = config_of(**{"data.chain.min_operands": 3})
    assert training_prompts(other, build_source(other.data, other.evaluation)).digest != training.digest
    more = config_of(**{"evaluation.prompts": 5})
    assert heldout_prompts(more, source).digest != heldout.digest
    assert training_prompts(config_of(seed=1), source) == training


def test_rows_of_a_file_are_named_by_their_content(tmp_path: Path) -> None:
    config = of_file(tmp_path / "problems.v2.jsonl", 80)
    source = build_source(config.data, config.evaluation)
    training = training_prompts(config, source)
    assert (training.name, training.source_type) == ("problems-training", "local")
    assert json.loads(training.source) == {"uri": str(tmp_path / "problems.v2.jsonl")}
    count = json.loads(training.profile)["num_rows"]
    assert 0 < count < 80, "some are held out"
    longer = of_file(tmp_path / "problems.v2.jsonl", 81)
    digests = {training_prompts(each, build_source(each.data, each.evaluation)).digest for each in (config, longer)}
    assert len(digests) == 1, "both read the file as it is now"
    assert digests != {training.digest}


def test_held_out_rows_of_a_file_of_their_own(tmp_path: Path) -> None:
    of_file(tmp_path / "test.jsonl", 4)
    config = of_file(tmp_path / "train.jsonl", 40, **{"evaluation.source": str(tmp_path / "test.jsonl")})
    heldout = heldout_prompts(config, build_source(config.data, config.evaluation))
    assert json.loads(heldout.source) == {"uri": str(tmp_path / "test.jsonl")}


def test_rows_of_the_hub_are_named_by_their_revision(tmp_path: Path) -> None:
    config = of_file(tmp_path / "rows.jsonl", 80)
    source = build_source(config.data, config.evaluation)
    assert isinstance(source, RowSource)
    hub = DataConfig(source="openai/gsm8k", subset="main", revision="abc")
    dataset = training_prompts(config.model_copy(update={"data": hub}), source)
    assert (dataset.name, dataset.source_type) == ("openai-gsm8k-training", "hugging_face")
    place = {"path": "openai/gsm8k", "config_name": "main", "split": "train", "revision": "abc"}
    assert json.loads(dataset.source) == place


@pytest.mark.parametrize("times", [1, 3])
def test_data_is_entered_once(tracker: Tracker, times: int) -> None:
    config = config_of()
    source = build_source(config.data, config.evaluation)
    for _ in range(times):
        log_datasets(tracker, config, source)
    inputs = tracker.client.get_run(tracker.run_id).inputs.dataset_inputs
    entered = {each.dataset.name: {tag.key: tag.value for tag in each.tags} for each in inputs}
    assert len(inputs) == 2
    assert entered == {
        "chain-training": {"mlflow.data.context": "training"},
        "chain-heldout": {"mlflow.data.context": "evaluation"},
    }


def test_runs_that_enter_new_data_at_once_share_it(open_tracker: Callable[..., Tracker]) -> None:
    trackers = [open_tracker(experiment="at-once") for _ in range(4)]
    for prompts in range(5, 15):
        config = config_of(**{"evaluation.prompts": prompts})
        source = build_source(config.data, config.evaluation)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(log_datasets, each, config, source) for each in trackers]:
                done.result()
    for each in trackers:
        inputs = each.client.get_run(each.run_id).inputs.dataset_inputs
        assert len({entered.dataset.digest for entered in inputs}) == len(inputs) == 11
