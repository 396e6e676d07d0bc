import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.diff import (
    Comparison,
    MetricDifference,
    compare,
    first_difference,
    metric_differences,
    table_difference,
    tensor_difference,
    value_difference,
)
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.manifest import Content, StepRecord
from fp8core.store.run_view import RunView

# Not the order of the alphabet.
ORDER = ("rollout", "train", "calibrate")


def content(digit: str, size: int = 10) -> Content:
    return Content(digest=digit * 64, size=size)


BASE = StepRecord(
    step=3,
    predecessor="p",
    config_digest="c" * 64,
    code_version="v" * 64,
    steps=5,
    inputs={
        "rollout": {"policy": content("0")},
        "train": {"rollouts": content("1")},
        "calibrate": {"next_policy": content("2")},
    },
    outputs={
        "rollout": {"rollouts": content("1")},
        "train": {"next_policy": content("2"), "train_report": content("3")},
        "calibrate": {"next_scales": content("4")},
    },
    model_revision=None,
    seeds={"run": 7, "step": 3},
    scales_digest="5" * 64,
    precision=PrecisionContract().model_dump(mode="json"),
    executed={"rollout": {"engine": "embedded"}},
    level="exact",
    weights_digest="6" * 64,
    versions={"torch": "2.11", "numpy": "2.0"},
)


def changed(**fields: object) -> StepRecord:
    return BASE.model_copy(update=fields)


def with_content(field: str, task: str, name: str, value: Content, record: StepRecord = BASE) -> StepRecord:
    contents = getattr(record, field)
    return record.model_copy(update={field: {**contents, task: {**contents[task], name: value}}})


@pytest.mark.parametrize(
    ("theirs", "path"),
    [
        (changed(step=4), "step"),
        (changed(seeds={"run": 8, "step": 3}), "seeds.run"),
        (with_content("inputs", "train", "rollouts", content("9")), "inputs.train.rollouts"),
        (with_content("outputs", "train", "train_report", content("9")), "outputs.train.train_report"),
        (with_content("outputs", "train", "train_report", content("3", size=11)), "outputs.train.train_report"),
        (with_content("outputs", "train", "more", content("9")), "outputs.train.more"),
        (changed(scales_digest=None), "scales_digest"),
        (changed(weights_digest="7" * 64), "weights_digest"),
    ],
)
def test_each_computed_field_is_found(theirs: StepRecord, path: str) -> None:
    found = first_difference(BASE, theirs, ORDER)
    assert found is not None
    assert found.path == path


def test_the_first_difference_is_the_earliest_in_the_pipeline_and_inputs_precede_outputs() -> None:
    theirs = changed(weights_digest="7" * 64)
    for field, task, name in [
        ("outputs", "calibrate", "next_scales"),
        ("inputs", "calibrate", "next_policy"),
        ("outputs", "train", "next_policy"),
        ("inputs", "train", "rollouts"),
        ("outputs", "rollout", "rollouts"),
    ]:
        theirs = with_content(field, task, name, content("9"), theirs)
        found = first_difference(BASE, theirs, ORDER)
        assert found is not None
        assert found.path == f"{field}.{task}.{name}"


def test_metrics_differ_in_the_order_of_the_iteration_and_by_how_much() -> None:
    ours = {"train/loss": 1.0, "alignment/k3": 0.5, "reward/mean": 2.0}
    theirs = {"train/loss": 1.25, "alignment/k3": 0.5, "reward/mean": 2.5, "own/metric": 0.0}
    found = metric_differences(ours, theirs)
    assert [metric.name for metric in found] == ["reward/mean", "train/loss", "own/metric"]
    assert str(found[1]) == "train/loss: 1.0 against 1.25 (by 0.25)"
    assert found[2] == MetricDifference("own/metric", None, 0.0)
    assert str(found[2]) == "own/metric: absent against 0.0"
    assert metric_differences(ours, ours) == []


def test_metrics_agree_within_either_bound() -> None:
    ours, theirs = {"a/large": 100.0, "a/small": 1e-3}, {"a/large": 104.0, "a/small": 2e-3}
    assert metric_differences(ours, theirs, relative=0.04, absolute=1e-3) == []
    assert [metric.name for metric in metric_differences(ours, theirs, relative=0.04)] == ["a/small"]
    assert [metric.name for metric in metric_differences(ours, theirs, absolute=1e-3)] == ["a/large"]
    assert [metric.name for metric in metric_differences(ours, {"a/large": 100.0}, 1.0, 1.0)] == ["a/small"]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"b": [1, {"c": 2.5}], "a": 1}, None),
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"a": 1, "b": [1, {"c": 2.0}]}, "b[1].c: 2.5 against 2.0"),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, "a: 1 against 2"),
        ({"a": 1}, {"a": 1, "b": 1}, "b is absent on this side"),
        ({"a": {"x": None}}, {"a": {}}, "a.x is absent on the other side"),
        ({"a": [1, 2]}, {"a": [1]}, "a: 2 items against 1"),
        ({"a": "x" * 100}, {"a": 1}, f"a: '{'x' * 59}... against 1"),
    ],
)
def test_the_first_key_that_differs_is_named_with_both_values(ours: Any, theirs: Any, said: str | None) -> None:
    assert value_difference(ours, theirs) == said


def test_the_first_row_and_column_that_differ_are_named() -> None:
    table = pa.table({"group": [0, 1], "tokens": [[1, 2], [3]]})
    assert table_difference(table, table) is None
    assert table_difference(table, pa.table({"group": [0, 1], "tokens": [[1, 2], [4]]})) == (
        "row 1, column tokens[0]: 3 against 4"
    )
    assert table_difference(table, table.slice(0, 1)) == "2 rows against 1"
    assert table_difference(table, table.drop_columns("tokens")) == "columns group, tokens against group"


def test_the_first_tensor_that_differs_is_named() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    assert tensor_difference(tensors, dict(tensors)) is None
    assert tensor_difference(tensors, {**tensors, "b": torch.eye(2)}) == "tensor b: 2 of 4 elements differ"
    assert tensor_difference(tensors, {"b": tensors["b"]}) == "tensor a is absent on the other side"
    assert tensor_difference(tensors, {**tensors, "a": torch.zeros(4)}) == (
        "tensor a: torch.float32 [3] against torch.float32 [4]"
    )


@pytest.fixture
def copy(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def faster(trained: Callable[..., Path]) -> Path:
    """The small run with another learning rate and one step less."""
    return trained("faster", **{"training.learning_rate": 5e-2, "training.warmup_steps": 0, "steps": 2})


def compared(ours: Path, theirs: Path) -> Comparison:
    return compare(RunView.read(ours), RunView.read(theirs))


def change_record(run: Path, step: int, **fields: Any) -> None:
    """Give a committed step another record."""
    file, ledger = run / f"manifests/{step:05d}.json", run / LEDGER
    content = json.loads(file.read_bytes())
    content["record"] |= fields
    file.write_text(json.dumps(content))
    old = LedgerView.read(ledger).steps()[step].manifest
    ref = ArtifactStore(run).put_json("manifest", content)
    ledger.write_text(ledger.read_text().replace(old.model_dump_json(), ref.model_dump_json()))


def change_setting(run: Path, key: str, value: object) -> None:
    content = json.loads((run / "run.json").read_bytes())
    content["config"][key] = value
    (run / "run.json").write_text(json.dumps(content))


def test_a_run_equals_its_copy(small_run: Path, copy: Path) -> None:
    found = compared(small_run, copy)
    assert found.equal
    assert found.common == [0, 1, 2, 3]
    assert (found.notes, found.first_step, found.first_metric, found.last) == ([], None, None, (3, 3))


def test_settings_that_make_no_numbers_are_notes(small_run: Path, copy: Path) -> None:
    change_setting(copy, "run", "copy")
    change_setting(copy, "steps", 9)
    for step in range(4):
        change_record(copy, step, steps=9, level="tolerant")
    found = compared(small_run, copy)
    assert found.equal
    assert [str(note) for note in found.notes] == [
        "run: small against copy",
        "steps: 3 against 9",
        "level: exact against tolerant",
    ]


def test_a_setting_that_makes_numbers_is_named_with_the_first_field_and_metric_it_changed(
    small_run: Path, faster: Path
) -> None:
    found = compared(small_run, faster)
    assert not found.equal
    assert [difference.path for difference in found.configuration] == [
        "training.learning_rate",
        "training.warmup_steps",
    ]
    assert found.circumstances == [], "the configuration's digest differs because the configuration does"
    assert found.first_step is not None
    step, difference = found.first_step
    assert (step, difference.path.rpartition(".")[0]) == (1, "outputs.train"), "what precedes does not depend on it"
    assert found.first_metric is not None
    step, metric = found.first_metric
    assert (step, metric.name) == (1, "train/learning_rate")
    assert metric.theirs == 5e-2
    assert (found.common, found.last) == ([0, 1, 2], (3, 2))


def test_code_precision_and_libraries_are_named_with_the_first_step(small_run: Path, copy: Path) -> None:
    record = json.loads((copy / "manifests/00002.json").read_bytes())["record"]
    precision = {**record["precision"], "scale_rule": "fp32", "bf16_first_layers": 1}
    versions = {**record["versions"], "torch": "0", "numpy": "0"}
    change_record(copy, 2, code_version="v", versions=versions)
    change_record(copy, 3, code_version="w", versions=versions, precision=precision, config_digest="c")
    found = compared(small_run, copy)
    assert not found.equal
    assert [(step, difference.path) for step, difference in found.circumstances] == [
        (2, "code_version"),
        (2, "versions.numpy"),
        (2, "versions.torch"),
        (3, "config_digest"),
        (3, "precision.bf16_first_layers"),
    ]
    assert found.first_step is None, "what they computed is equal"


def test_a_manifest_that_cannot_be_read_is_a_refusal(small_run: Path, copy: Path) -> None:
    (copy / LedgerView.read(copy / LEDGER).steps()[2].manifest.uri).unlink()
    assert compared(small_run, copy).equal, "the second copy serves"
    (copy / "manifests/00002.json").unlink()
    with pytest.raises(UserError, match=r"step 2: the manifest is lost: .*: the file is missing"):
        compared(small_run, copy)
