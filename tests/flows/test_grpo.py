"""The whole loop through real Prefect and MLflow, at reduced size."""

import json
from itertools import groupby
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
)
from waiting import wait_for

from flows.training_pages import STEP_FLOW
from fp8core.config.load import load_config
from fp8core.run.refusals import graph_of
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.manifest import StepManifest


@pytest.fixture(scope="module")
def three_steps(launch):
    return launch("three", steps=3)


def manifests(finished):
    store, steps = ArtifactStore(finished.folder), finished.ledger.steps()
    return [StepManifest.model_validate_json(json.dumps(store.get_json(steps[i].manifest))) for i in sorted(steps)]


def metric(finished, key):
    return {m.step: m.value for m in finished.mlflow.get_metric_history(finished.mlflow_run().info.run_id, key)}


def test_a_flow_that_generates_beside_the_update_makes_the_records_of_one_that_takes_turns(launch, loop_run):
    """Engine and trainer compute at the same time, in two threads."""
    settings = {"pipeline": {"mode": "asynchronous", "ahead_tokens": 3, "verified_share": 1.0}}
    beside, turns = launch("ahead", overrides=settings), loop_run("ahead", steps=2, **settings)
    assert [manifest.record.model_dump(mode="json") for manifest in manifests(beside)] == turns.records


def test_exact_contract_gives_a_mismatch_of_exactly_one(three_steps):
    assert three_steps.summary["tmpe_max"] == 1.0
    assert three_steps.summary["tokens_differing"] == 0
    assert metric(three_steps, "core/3_error_minus_1") == {1: 0.0, 2: 0.0, 3: 0.0}
    assert metric(three_steps, "detail/alignment/tokens_differing") == {1: 0.0, 2: 0.0, 3: 0.0}


def test_mlflow_shows_the_run(three_steps):
    run = three_steps.mlflow_run()
    assert run.info.status == "FINISHED"
    assert run.data.params["training.learning_rate"] == "0.0001"
    assert run.data.params["precision.rollout.kv_cache"].strip('"') == "fp8"
    first = ["1_reward", "2_heldout", "3_error_minus_1", "4_k3", "5_tokens_per_second"]
    core = {"length", "entropy", "ess", "clip", "grad_norm", "seconds", "overhead_ms", "groups_with_signal"}
    shown = sorted(key for key in run.data.metrics if key.startswith("core/"))
    assert (shown[:5], set(shown[5:])) == ([f"core/{key}" for key in first], {f"core/{key}" for key in core})
    for key in (*(f"core/{name}" for name in core), "detail/time/rollout_seconds", "detail/kv/lag_error"):
        assert set(metric(three_steps, key)) == {1, 2, 3}, key
    assert set(metric(three_steps, "core/2_heldout")) == {0, 2, 3}
    files = {file.path for folder in ("", "pictures", "samples") for file in
             three_steps.mlflow.list_artifacts(run.info.run_id, folder)}  # fmt: skip
    assert {"config.yaml", "graph.txt", "summary.json", "pictures/curves.png"} <= files
    assert any(file.startswith("samples/") for file in files)


def test_mlflow_has_whole_groups_of_completions_early_and_late(three_steps, tmp_path):
    run = three_steps.mlflow_run()
    table = json.loads(
        Path(three_steps.mlflow.download_artifacts(run.info.run_id, "completions.json", tmp_path)).read_text()
    )
    assert {"path": "completions.json", "type": "table"} in json.loads(run.data.tags["mlflow.loggedArtifacts"])
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    groups = [list(rows) for _, rows in groupby(rows, lambda row: (row["step"], row["group"]))]
    assert any(row["advantage"] for row in rows)
    assert {group[0]["step"] for group in groups} == {1, 3}
    for group in groups:
        ledger = three_steps.ledger.artifacts(group[0]["step"])
        stored = ArtifactStore(three_steps.folder).get_table(ledger["rollouts"]).to_pylist()
        asked = [row for row in stored if row["group"] == group[0]["group"]]
        assert [(row["sample"], row["completion"]) for row in group] == [(row["sample"], row["text"]) for row in asked]
        assert len({row["prompt"] for row in group}) == 1
        assert {row["mismatch"] for row in group} == {0.0}


def edges_of_step(graph, index):
    """The same of a step's page, from the graph."""
    producers = {artifact: step.name for step in graph.steps for artifact in step.outputs.values()}
    tasks = {
        f"{step.name}-{index}": {f"{producers[read]}-{index}" for read in step.inputs.values() if read in producers}
        for step in graph.steps
    }
    return {**tasks, f"commit-{index}": tasks.keys() - set().union(*tasks.values())}


def test_prefect_shows_each_step_as_a_flow_run_with_the_edges_of_the_plan(three_steps, graph_as):
    last = three_steps.summary["steps"]
    numbers = range(1, last + 1)
    start = ["warm_start-0", "first_scales-0", "first_evaluation-0", "precision_gap-0"]
    chain = [*start, *(f"{STEP_FLOW} / step {index}" for index in numbers)]
    page = three_steps.state.state_details.flow_run_id
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[page]))
    graph = graph_of(load_config("tiny", {}))
    after = {label: set(chain[:place][-1:]) for place, label in enumerate(chain)}
    assert graph_as(page, after) == after
    with get_client(sync_client=True) as client:
        steps = {run.name: run for run in client.read_flow_runs(flow_run_filter=below)}
    assert sorted(steps) == sorted(f"step {index}" for index in numbers), "none that was not reached"
    assert {run.state_type.value for run in steps.values()} == {"COMPLETED"}
    saved = {checkpoint.step for checkpoint in three_steps.ledger.checkpoints()}
    for index in {1, 2, last // 2, last}:
        expected = edges_of_step(graph, index)
        if index in saved:
            expected[f"checkpoint-{index}"] = {f"commit-{index}"}
        assert graph_as(steps[f"step {index}"].id, expected) == expected


def test_prefect_shows_the_way_to_mlflow(three_steps):
    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[three_steps.state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        found = {artifact.key: artifact.data for artifact in client.read_artifacts(artifact_filter=mine)}
    assert set(found) == {"three-mlflow"}
    assert three_steps.mlflow_run().info.run_id in found["three-mlflow"]


def test_the_page_of_a_step_has_its_line_and_its_sample(three_steps):
    with get_client(sync_client=True) as client:
        steps = FlowRunFilter(tags=FlowRunFilterTags(all_=["three"]))
        (first,) = (run for run in client.read_flow_runs(flow_run_filter=steps) if run.name == "step 1")
        of_step = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[first.id]))
        wait_for(lambda: client.read_logs(of_step), "its log", 30)
        lines = [log.message.strip() for log in client.read_logs(of_step)]
    assert [line.split()[0] for line in lines[-2:]] == ["1/3", "reward"]
