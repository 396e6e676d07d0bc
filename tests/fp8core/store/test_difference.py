import pytest

from fp8core.config.precision import PrecisionContract
from fp8core.store.difference import (
    CAUSES,
    Difference,
    MetricDifference,
    causes,
    first_difference,
    metric_differences,
    value_differences,
)
from fp8core.store.manifest import Content, StepRecord

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


def test_equal_records_have_no_difference() -> None:
    assert first_difference(BASE, BASE, ORDER) is None
    assert causes(BASE, BASE) == []


def test_the_circumstances_and_the_predecessor_are_no_differences_of_what_was_computed() -> None:
    other = changed(
        predecessor="q",
        config_digest="d",
        code_version="w",
        steps=9,
        model_revision="r",
        precision={},
        executed={},
        level="tolerant",
        versions={},
    )
    assert first_difference(BASE, other, ORDER) is None


def test_every_field_is_computed_or_a_cause_or_the_chain() -> None:
    computed = {"step", "seeds", "inputs", "outputs", "scales_digest", "weights_digest"}
    assert computed.isdisjoint(CAUSES)
    assert {*computed, *CAUSES, "predecessor"} == set(StepRecord.model_fields)


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


def test_both_values_are_named() -> None:
    found = first_difference(BASE, with_content("outputs", "train", "next_policy", content("9", size=12)), ORDER)
    assert found == Difference(
        "outputs.train.next_policy", {"digest": "2" * 64, "size": 10}, {"digest": "9" * 64, "size": 12}
    )
    assert str(found) == f"outputs.train.next_policy: {'2' * 16} (10 bytes) against {'9' * 16} (12 bytes)"


def test_an_artifact_or_a_task_that_one_side_lacks_is_a_difference() -> None:
    without = changed(outputs={name: outputs for name, outputs in BASE.outputs.items() if name != "train"})
    found = first_difference(BASE, without, ORDER)
    assert found is not None
    assert found.path == "outputs.train.next_policy"
    assert found.theirs is None
    assert str(first_difference(without, BASE, ORDER)).startswith("outputs.train.next_policy: absent against 2222")


def test_the_tasks_of_the_start_have_their_own_order() -> None:
    outputs = {"calibrate": {"scales": content("1")}, "warm_start": {"policy": content("2")}}
    other = {"calibrate": {"scales": content("3")}, "warm_start": {"policy": content("4")}}
    ours, theirs = (changed(step=0, inputs={}, outputs=found) for found in (outputs, other))
    found = first_difference(ours, theirs, ORDER)
    assert found is not None
    assert found.path == "outputs.warm_start.policy"


def test_causes_name_code_precision_and_library() -> None:
    precision = PrecisionContract(scale_rule="fp32").model_dump(mode="json")
    theirs = changed(versions={"torch": "2.12", "numpy": "2.0"}, precision=precision, code_version="w" * 64)
    assert [str(found) for found in causes(BASE, theirs)] == [
        f"code_version: {'v' * 16} against {'w' * 16}",
        "precision.scale_rule: pow2 against fp32",
        "versions.torch: 2.11 against 2.12",
    ]
    assert [found.path for found in causes(BASE, changed(steps=6, config_digest="d"))] == ["config_digest", "steps"]
    assert causes(BASE, with_content("outputs", "train", "next_policy", content("9"))) == []


def test_the_scales_that_an_engine_uses_are_a_result_and_no_cause() -> None:
    theirs = changed(executed={"rollout": {"engine": "vllm", "scales": [1.0]}, "training": "none"})
    assert [found.path for found in causes(BASE, theirs)] == ["executed.rollout.engine", "executed.training"]


def test_nested_values_differ_leaf_by_leaf() -> None:
    ours, theirs = {"a": {"b": 1, "c": [1, 2]}, "d": None}, {"a": {"b": 1, "c": [1, 3]}, "e": "x"}
    assert list(value_differences("root", ours, theirs)) == [
        Difference("root.a.c", [1, 2], [1, 3]),
        Difference("root.e", None, "x"),
    ]


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
