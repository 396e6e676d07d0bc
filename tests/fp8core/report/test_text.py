"""Text that people read: evaluations, pipelines and progress."""

import pytest

from fp8core.config.steps import PipelineConfig, Plan, StepSpec, check_pipeline
from fp8core.evaluation.measure import Counting, EvaluationResult, measure, paired_differences, score_prompt
from fp8core.report.text import evaluation_text, pipeline_mermaid, pipeline_text, progress_markdown
from fp8core.rewards.scorer import RIGHT, crashed, wrong


def test_columns_are_aligned_and_say_everything():
    counting = Counting((1, 2), 0.9, 0)
    first, second = (
        measure(
            [score_prompt(f"p{i}", verdicts, counting.k) for i, verdicts in enumerate(prompts)], [3, 4, 5, 6], counting
        )
        for prompts in (
            [[RIGHT, RIGHT], [wrong("answer 1"), RIGHT]],
            [[RIGHT, wrong("answer 2")], [wrong("answer 1"), crashed("oops")]],
        )
    )
    result = EvaluationResult(
        target="mine", step=7, weights_digest=None, config="tiny", data="chain", data_digest="0", prompts=2, samples=2,
        temperature=0.5, max_new_tokens=8, seed=0, confidence=0.9, verifier={"verifier": "chain"},
        precisions={"bf16": first, "fp8": second}, engines={},
        differences={"fp8": paired_differences(first, second, counting)},
    )  # fmt: skip
    lines = evaluation_text(result).splitlines()
    assert lines[0] == "mine, step 7: 2 prompts of chain, 2 at temperature 0.5; 90% intervals"
    assert lines[2].split() == ["precision", "pass@1", "pass@2", "maj@2"]
    assert lines[3].startswith("bf16 ")
    assert "0.7500 [0.5000, 1.0000]" in lines[3]
    assert lines[5].startswith("fp8 - bf16  -0.5000 [-0.5000, -0.5000]")
    assert lines[7].split() == ["precision", "right", "wrong", "unparsed", "timeout", "crashed", "tokens"]
    assert lines[9].split() == ["fp8", "1", "2", "0", "0", "1", "4.5"]
    assert len({len(line) for line in lines[2:6]}) == len({len(line) for line in lines[7:10]}) == 1


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


def row(step: int, reward: float) -> dict[str, float]:
    return {"step": step, "reward/mean": reward, "alignment/token_mult_prob_error": 1.0}


def test_the_newest_steps_stand_beside_those_before_them() -> None:
    text = progress_markdown(
        "mine", 9, [row(3, 0.5), row(4, 0.7)], [row(1, 0.1), row(2, 0.3)], {"train": 3, "rollout": 1}
    )
    lines = text.splitlines()
    assert lines[0] == "**mine**: step 4 of 9"
    assert "|  | mean of steps 1 to 2 | mean of steps 3 to 4 |" in lines
    assert "| Reward (mean reward of the step) | 0.2 | 0.6 |" in lines
    assert "| Held-out accuracy (share of unseen prompts right) | - | - |" in lines
    assert lines[-1] == "2 s of tasks a step: train 75%, rollout 25%."
    table = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {4}


def test_the_first_report_has_one_column() -> None:
    lines = progress_markdown("mine", 9, [row(1, 0.5)], [], {}).splitlines()
    assert "|  | step 1 |" in lines
    assert not any("tasks a step" in line for line in lines)
