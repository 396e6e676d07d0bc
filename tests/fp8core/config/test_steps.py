"""The pipeline as a graph, every way in which it is refused, and steps found by their import paths."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from fp8core.config.load import load_config
from fp8core.config.pipeline import PipelineConfig
from fp8core.config.section import Section
from fp8core.config.step_graph import StepGraph, check_pipeline
from fp8core.config.steps import StepSpec, import_spec, import_step
from fp8core.errors import UserError

ITERATION = str(Path(__file__).with_name("iteration.yaml"))
CARRIED = {"policy": "policy", "scales": "scales"}


class RolloutOptions(Section):
    depth: int = Field(1, ge=1, le=4)
    label: str = "plain"


def ports(*names: str) -> dict[str, str]:
    """Ports whose kind is their name, but for the artifacts handed to the next iteration."""
    return {name: name.removeprefix("next_") for name in names}


SPECS = {
    "rollout": StepSpec("rollout", ports("policy", "scales"), ports("rollouts"), options=RolloutOptions),
    "reward": StepSpec("reward", ports("rollouts"), ports("rewards")),
    "keep": StepSpec("keep", ports("rewards"), ports("rewards")),
    "logprobs": StepSpec("logprobs", ports("rollouts", "policy", "scales"), ports("logprobs", "kv_statistics")),
    "train": StepSpec(
        "train",
        ports("rewards", "logprobs", "policy"),
        ports("next_policy", "train_report"),
        optional_inputs={"reference": "logprobs"},
    ),
    "calibrate": StepSpec("calibrate", ports("kv_statistics", "next_policy"), ports("next_scales")),
    "record": StepSpec("record", ports("rewards", "train_report", "next_scales"), ports("metrics")),
    "source": StepSpec("source", {}, ports("prompts")),
}


def resolve(uses: str) -> StepSpec:
    return SPECS[uses.partition(":")[2]]


def graph_of(*overrides: str) -> StepGraph:
    return check_pipeline(load_config(ITERATION, overrides).pipeline, CARRIED, resolve)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        graph_of(*overrides)
    return str(caught.value)


def names(steps: Any) -> list[str]:
    return [step.name for step in steps]


def insert(after: str, step: str) -> str:
    return f"pipeline.insert=[{{after: {after}, step: {{{step}}}}}]"


KEEP = insert("reward", "name: keep, uses: 'fake:keep', needs: [rewards], provides: {rewards: kept}")


def test_the_plan_keeps_the_order_of_the_file_where_it_can_run() -> None:
    graph = graph_of()
    assert names(graph.steps) == ["rollout", "reward", "logprobs", "train", "calibrate", "record"]
    levels = [["rollout"], ["reward", "logprobs"], ["train"], ["calibrate"], ["record"]]
    assert [names(level) for level in graph.levels()] == levels
    assert graph.carries == {"policy": "next_policy", "scales": "next_scales"}


def test_a_planned_step_has_its_ports_connected_and_its_options_validated() -> None:
    graph = graph_of("pipeline.steps.rollout.with.depth=3", KEEP, "pipeline.rewire={train: {rewards: kept}}")
    steps = {step.name: step for step in graph.steps}
    assert steps["rollout"].options == RolloutOptions(depth=3)
    assert steps["keep"].outputs == {"rewards": "kept"}
    assert steps["train"].inputs["rewards"] == "kept"
    assert names(graph.levels()[1]) == ["reward", "logprobs"]
    assert names(graph.levels()[2]) == ["keep"]


@given(st.permutations([step.model_dump(by_alias=True) for step in load_config(ITERATION).pipeline.steps]))
def test_any_order_of_declaration_gives_an_order_that_can_run(steps: list[dict[str, Any]]) -> None:
    graph = check_pipeline(PipelineConfig.model_validate({"steps": steps}), CARRIED, resolve)
    available = set(CARRIED)
    for step in graph.steps:
        assert available.issuperset(step.inputs.values())
        available |= set(step.outputs.values())
    assert sorted(names(graph.steps)) == sorted(step["name"] for step in steps)


TRAIN_READS = "pipeline.rewire={{train: {{rewards: {}}}}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            insert("reward", "name: reward, uses: 'fake:keep', needs: [rewards]"),
            "step reward: two steps have this name",
        ),
        (insert("reward", "name: keep, uses: 'fake:keep', needs: [rewards]"), "rewards: provided by two steps, reward"),
        (
            TRAIN_READS.format("rewardz"),
            "step train: input rewards: there is no artifact rewardz; did you mean rewards?",
        ),
        (TRAIN_READS.format("null"), "step train: needs does not name the required input rewards"),
        (TRAIN_READS.format("rollouts"), "rewards wants kind rewards, but artifact rollouts is of kind rollouts"),
        (
            "pipeline.rewire={reward: {rolouts: rollouts}}",
            "reward: it has no input port rolouts; did you mean rollouts?",
        ),
        ("pipeline.steps.reward.provides.rewards=a b", "step reward: output rewards: 'a b' is not a name for"),
        (
            "pipeline.steps.train.provides.next_policy=policy",
            "provides policy, which the previous iteration hands over",
        ),
        ("pipeline.steps.rollout.with.depht=3", "steps.rollout.with.depht: unknown key; did you mean depth?"),
        ("pipeline.steps.rollout.with.depth=9", "rollout.with.depth: must be less than or equal to 4, got 9"),
        (
            "pipeline.carries.policy=next_polic",
            "carries.policy: no step provides next_polic; did you mean next_policy?",
        ),
        ("pipeline.carries.policy=next_scales", "wants kind policy, but artifact next_scales is of kind scales"),
        (
            "pipeline.carries.optimizer=train_report",
            "optimizer: nothing of this name exists before the first iteration",
        ),
    ],
)
def test_a_broken_pipeline_is_refused_with_place_and_reason(override: str, message: str) -> None:
    assert message in refused(override)


def test_a_cycle_is_refused_by_name() -> None:
    message = refused(
        KEEP,
        insert("keep", "name: again, uses: 'fake:keep', needs: {rewards: kept}, provides: {rewards: again}"),
        "pipeline.rewire={keep: {rewards: again}}",
    )
    assert message in ("pipeline: cycle keep -> again -> keep", "pipeline: cycle again -> keep -> again")


MODULE = """
from fp8core.config.steps import StepSpec

def score(): return 3
score.spec = StepSpec("score", inputs={}, outputs={"rewards": "rewards"})

def plain(): return 3
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_step_of_the_users_own_is_found(modules: Path) -> None:
    (modules / "own_steps_found.py").write_text(MODULE)
    assert import_step("own_steps_found:score")() == 3


@pytest.mark.parametrize(
    ("uses", "source", "message"),
    [
        ("own_absent:score", None, "own_absent cannot be imported: ModuleNotFoundError"),
        ("own_a:absent", MODULE, "module own_a has no absent"),
        ("own_b:plain", MODULE, "plain is not a step"),
        (
            "own_f:score",
            "ready = True\nlimit = 1 / 0\n",
            "own_f cannot be imported: ZeroDivisionError: division by zero (",
        ),
    ],
)
def test_what_is_no_step_is_refused_with_the_reason(modules: Path, uses: str, source: str | None, message: str) -> None:
    if source is not None:
        (modules / f"{uses.partition(':')[0]}.py").write_text(source)
    with pytest.raises(UserError) as caught:
        import_spec(uses)
    assert str(caught.value).startswith(f"uses {uses}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
