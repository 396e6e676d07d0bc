"""The drawn pipeline."""

import pytest

from fp8core.config.check import Plan, check_pipeline
from fp8core.config.pipeline import PipelineConfig
from fp8core.config.steps import StepSpec
from fp8core.report.graph import pipeline_mermaid, pipeline_text

SPECS = {
    "m:end": StepSpec("end", {"policy": "policy"}, {"rollouts": "rollouts", "statistics": "statistics"}),
    "m:score": StepSpec("score", {"rollouts": "rollouts"}, {"rewards": "rewards"}),
    "m:measure": StepSpec("measure", {"statistics": "statistics"}, {"report": "report"}),
    "m:train": StepSpec("train", {"rewards": "rewards", "rollouts": "rollouts"}, {"next_policy": "policy"}),
}


@pytest.fixture
def plan() -> Plan:
    steps = [
        {"name": "end", "uses": "m:end", "needs": ["policy"]},
        {"name": "score", "uses": "m:score", "needs": ["rollouts"], "provides": {"rewards": "scores"}},
        {"name": "measure", "uses": "m:measure", "needs": ["statistics"]},
        {"name": "train", "uses": "m:train", "needs": {"rewards": "scores", "rollouts": "rollouts"}},
    ]
    pipeline = PipelineConfig.model_validate({"steps": steps, "carries": {"policy": "next_policy"}})
    return check_pipeline(pipeline, {"policy": "policy"}, SPECS.__getitem__)


def test_the_text_shows_levels_connections_and_what_runs_side_by_side(plan: Plan) -> None:
    assert pipeline_text(plan).splitlines() == [
        "level  step     needs                     provides",
        "-----  -------  ------------------------  --------------------",
        "0      end      policy*                   rollouts, statistics",
        "1      score    rollouts                  rewards=scores",
        "1      measure  statistics                report",
        "2      train    rewards=scores, rollouts  next_policy",
        "",
        "* from the previous iteration: policy (was next_policy)",
        "side by side: score, measure",
    ]


def test_a_long_list_of_needs_is_wrapped_and_the_columns_stay_aligned() -> None:
    outputs = [f"artifact_number_{number}" for number in range(9)]
    specs = {
        "m:make": StepSpec("make", {}, {name: "x" for name in outputs}),
        "m:read": StepSpec("read", {name: "x" for name in outputs}, {}),
    }
    steps = [{"name": "make", "uses": "m:make"}, {"name": "read", "uses": "m:read", "needs": outputs}]
    pipeline = PipelineConfig.model_validate({"steps": steps, "carries": {}})
    lines = pipeline_text(check_pipeline(pipeline, {}, specs.__getitem__)).splitlines()
    assert max(map(len, lines)) < 150
    assert {line.find("artifact_number") for line in lines if line.startswith(" ")} <= {13, lines[0].find("provides")}
    assert "side by side: nothing" in lines[-1]


def test_mermaid_has_a_node_a_step_and_dashed_edges_for_what_is_carried(plan: Plan) -> None:
    assert pipeline_mermaid(plan).splitlines() == [
        "flowchart LR",
        '    step_end["end"]',
        '    step_score["score"]',
        '    step_measure["measure"]',
        '    step_train["train"]',
        '    step_end -->|"rollouts"| step_score',
        '    step_end -->|"statistics"| step_measure',
        '    step_end -->|"rollouts"| step_train',
        '    step_score -->|"scores"| step_train',
        '    step_train -.->|"next_policy as policy"| step_end',
    ]


def test_mermaid_shows_the_seconds_that_are_known(plan: Plan) -> None:
    lines = pipeline_mermaid(plan, {"train": 0.314}).splitlines()
    assert '    step_train["train<br/>0.31 s"]' in lines
    assert '    step_end["end"]' in lines
