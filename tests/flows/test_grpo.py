"""The whole loop through real Prefect and MLflow, at reduced size."""

import json
import time
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import pyarrow as pa
import pytest
from manifest_chain import first_broken_link
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)

from flows.tracking.store import default_tracking_uri
from flows.tracking.traces import log_traces
from flows.tracking.tracker import Completions, Table
from flows.training_pages import STEP_FLOW
from fp8core.config.load import load_config
from fp8core.run.checks.settings import graph_of
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.manifest import StepManifest

ERROR, DIFFERING = "alignment/token_mult_prob_error", "alignment/tokens_differing"


@pytest.fixture(scope="module")
def three_steps(launch):
    return launch("three", steps=3)


def manifests(finished):
    store, steps = ArtifactStore(finished.folder), finished.ledger.steps()
    return [StepManifest.model_validate_json(json.dumps(store.get_json(steps[i].manifest))) for i in sorted(steps)]


def metric(finished, key):
    return {m.step: m.value for m in finished.mlflow.get_metric_history(finished.mlflow_run().info.run_id, key)}


def records(finished):
    return [manifest.record.model_dump() for manifest in manifests(finished)]


def test_a_flow_that_generates_beside_the_update_makes_the_records_of_one_that_takes_turns(launch, loop_run):
    """Engine and trainer compute at the same time, in two threads."""
    settings = {"pipeline": {"mode": "asynchronous", "ahead_tokens": 3, "verified_share": 1.0}}
    beside, turns = launch("ahead", overrides=settings), loop_run("ahead", steps=2, **settings)
    assert [manifest.record.model_dump(mode="json") for manifest in manifests(beside)] == turns.records


def test_exact_contract_gives_a_mismatch_of_exactly_one(three_steps):
    assert three_steps.summary["tmpe_max"] == 1.0
    assert three_steps.summary["tokens_differing"] == 0
    assert metric(three_steps, "core/error_minus_1") == {1: 0.0, 2: 0.0, 3: 0.0}
    assert metric(three_steps, "detail/alignment/tokens_differing") == {1: 0.0, 2: 0.0, 3: 0.0}


def test_ledger_and_manifests_hold_every_step(three_steps):
    assert sorted(three_steps.ledger.steps()) == [0, 1, 2, 3]
    chain = manifests(three_steps)
    assert first_broken_link(chain) is None
    assert chain[-1].record.weights_digest == three_steps.summary["weights_digest"]
    outputs = {name for task in chain[-1].record.outputs.values() for name in task}
    assert {"prompts", "rollouts", "rewards", "logprobs", "next_policy", "next_scales", "metrics"} <= outputs
    assert chain[1].record.outputs["train"]["next_policy"] == chain[2].record.inputs["rollout"]["policy"]
    on_disk = json.loads((three_steps.folder / "manifests" / "00003.json").read_text())
    assert on_disk == chain[-1].model_dump(mode="json")


def test_every_artifact_is_named_by_its_content(three_steps):
    store = ArtifactStore(three_steps.folder)
    refs = [
        ref for step in range(1, 4) for task in three_steps.ledger.tasks(step).values() for ref in task.outputs.values()
    ]
    assert {ref.uri.rpartition(".")[2] for ref in refs} == {"parquet", "json"}
    for ref in refs:
        read = store.get_table if ref.uri.endswith("parquet") else store.get_json
        read(ref)
    rollouts = store.get_table(three_steps.ledger.tasks(3)["rollout"].outputs["rollouts"])
    assert isinstance(rollouts, pa.Table)
    assert rollouts.num_rows == 16
    assert not list((three_steps.folder / "shards").iterdir()), "shards of a committed step are gone"


def test_mlflow_shows_the_run(three_steps):
    run = three_steps.mlflow_run()
    assert run.info.status == "FINISHED"
    assert run.data.params["training.learning_rate"] == "0.0001"
    assert run.data.params["precision.rollout.kv_cache"].strip('"') == "fp8"
    core = {"reward", "length", "entropy", "error_minus_1", "k3", "ess", "clip", "grad_norm", "seconds",
            "tokens_per_second", "overhead_ms", "groups_with_signal"}  # fmt: skip
    detail = {"time/rollout_seconds", "time/rollout_share", "kv/saturated_share", "kv/lag_error"}
    groups = {key.partition("/")[0] for key in run.data.metrics}
    assert {"core", "detail"} == groups - {"system"}, "a model's metrics are those of the run"
    assert {key for key in run.data.metrics if key.startswith("core/")} == {f"core/{key}" for key in {*core, "heldout"}}
    for key in [*(f"core/{name}" for name in core), *(f"detail/{name}" for name in detail)]:
        assert set(metric(three_steps, key)) == {1, 2, 3}, key
    assert set(metric(three_steps, "core/heldout")) == {0, 2, 3}
    files = {file.path for folder in ("", "pictures", "samples") for file in
             three_steps.mlflow.list_artifacts(run.info.run_id, folder)}  # fmt: skip
    assert {"config.yaml", "graph.md", "graph.txt", "summary.json", "pictures/curves.png"} <= files
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
        rewards = [row["reward"] for row in group]
        spread = stdev(rewards) + 1e-4
        expected = [(reward - mean(rewards)) / spread for reward in rewards]
        assert [row["advantage"] for row in group] == pytest.approx(expected, rel=1e-3)


def test_mlflow_has_held_out_prompts_at_the_first_and_the_last_evaluation(three_steps, tmp_path):
    run = three_steps.mlflow_run()
    path = three_steps.mlflow.download_artifacts(run.info.run_id, "heldout.json", tmp_path)
    table = json.loads(Path(path).read_text())
    assert {"path": "heldout.json", "type": "table"} in json.loads(run.data.tags["mlflow.loggedArtifacts"])
    store = ArtifactStore(three_steps.folder)
    first, last = (store.get_json(three_steps.ledger.artifacts(step)["evaluation"])["samples"] for step in (0, 3))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert rows == [
        {
            **{"prompt": before["prompt"], "first_step": 0, "last_step": 3},
            **{"first": before["text"], "first_reward": before["score"], "first_length": before["length"]},
            **{"last": after["text"], "last_reward": after["score"], "last_length": after["length"]},
        }
        for before, after in zip(first, last, strict=True)
    ]


def test_mlflow_has_a_trace_of_a_completion_of_each_group_once(three_steps):
    """Also when the end of the run is delivered twice."""
    run = three_steps.mlflow_run().info
    table = json.loads(Path(three_steps.mlflow.download_artifacts(run.run_id, "completions.json")).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    first = {(row["step"], row["group"]): row for row in reversed(rows)}
    times = {number: entry.committed_ms for number, entry in three_steps.ledger.steps().items()}
    again = Completions(Table(table["columns"], table["data"]), {}, times)
    log_traces(default_tracking_uri(three_steps.runs), run.experiment_id, run.run_id, again)
    traces = three_steps.mlflow.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    shown = [
        (trace.data.spans[0].inputs, trace.data.spans[0].outputs, trace.data.spans[0].attributes) for trace in traces
    ]
    assert sorted(
        (inputs, outputs, found["reward"], found["advantage"], found["step"]) for inputs, outputs, found in shown
    ) == sorted(
        (row["prompt"], row["completion"], row["reward"], row["advantage"], row["step"]) for row in first.values()
    )


# ---- Prefect's pages ----


def edges_of_step(graph, index):
    """The same of a step's page, from the graph."""
    producers = {artifact: step.name for step in graph.steps for artifact in step.outputs.values()}
    tasks = {
        f"{step.name}-{index}": {f"{producers[read]}-{index}" for read in step.inputs.values() if read in producers}
        for step in graph.steps
    }
    return {**tasks, f"commit-{index}": tasks.keys() - set().union(*tasks.values())}


def eventually(found, expected):
    """What `found` returns when it is as expected, or after a while: the server records tasks when it can."""
    deadline = time.monotonic() + 30
    while (last := found()) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return last


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


def test_prefect_shows_progress_a_report_and_the_way_to_mlflow(three_steps):
    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[three_steps.state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        found = {artifact.key: artifact.data for artifact in client.read_artifacts(artifact_filter=mine)}
    assert set(found) == {"three-1-progress", "three-2-report", "three-3-mlflow"}
    assert found["three-1-progress"] == 100
    assert three_steps.mlflow_run().info.run_id in found["three-3-mlflow"]
    assert found["three-2-report"].splitlines()[0] == "**three**: step 3 of 3"


def test_prefect_s_log_of_a_training_has_the_lines_of_the_console(three_steps):
    of_training = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[three_steps.state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:

        def lines():
            return [log.message for log in client.read_logs(of_training)]

        assert eventually(lambda: any("three: done" in line for line in lines()), True)
        logged = lines()
    assert len([line for line in logged if line.strip().startswith(("1/3 ", "2/3 ", "3/3 "))]) == 3
    assert any(line.startswith("warm start") for line in logged)
    assert not any("\x1b" in line or "\\x1b" in line for line in logged)


def test_a_run_that_is_continued_equals_one_that_was_not_cut_and_no_run_of_another_seed(three_steps, launch, loop_run):
    assert launch("short", steps=2).state.is_completed()
    continued = launch("short", steps=3)
    assert continued.summary["weights_digest"] == three_steps.summary["weights_digest"]
    # The evaluation of a last step is an extra measurement: the cut run made one more.
    assert [r["weights_digest"] for r in records(continued)] == [r["weights_digest"] for r in records(three_steps)]
    assert metric(continued, "core/reward") == metric(three_steps, "core/reward")
    starts = {entry.step: entry.task for entry in continued.ledger.tasks(1).values()}
    assert starts, "the ledger is whole"
    other = loop_run("other", steps=1, seed=1)
    assert other.records[1]["weights_digest"] != records(three_steps)[1]["weights_digest"]


def test_continuing_a_finished_run_does_nothing_again(three_steps, launch):
    before = (three_steps.folder / "ledger.jsonl").read_text().count('"event":"task"')
    again = launch("three", steps=3)
    assert again.summary["weights_digest"] == three_steps.summary["weights_digest"]
    assert (three_steps.folder / "ledger.jsonl").read_text().count('"event":"task"') == before
    assert len(again.mlflow.get_metric_history(again.mlflow_run().info.run_id, "core/reward")) == 3


def test_fp8_rollout_with_bf16_training_differs(loop_run):
    mixed = loop_run("mixed", steps=2, **{"precision.training.linear": "bf16"})
    assert 1.0 < max(mixed.metric(ERROR).values()) < 1.1
    assert sum(mixed.metric(DIFFERING).values()) > 0
