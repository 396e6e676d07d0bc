"""The parity flow on real trainings: what it trains, judges, writes, posts and logs; and what it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)
from prefect.states import Cancelled, Completed, Failed

from flows.cli import main
from flows.parity import parity
from fp8core.config.load import load_config
from fp8core.parity import VARIANTS, variant_settings
from fp8core.run.refusals import graph_of


@pytest.fixture(scope="module")
def shelf(mlflow_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlflow_store(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def judge_small(prefect_server: None, small: dict[str, Any], shelf: Path) -> Callable[..., Any]:
    """Run the flow on small trainings that share a warm start: judge_small(seeds=[0], variants=[...])."""

    def run(overrides: dict[str, Any] | None = None, **parameters: Any) -> Any:
        settings = {**small, "runs": str(shelf), "tracking.system_metrics": False, **(overrides or {})}
        return parity(config="tiny", overrides=settings, return_state=True, **parameters)

    return run


@pytest.mark.parametrize("name", ["tiny", "gsm8k", "llama-aligned", "qwen3-aligned"])
@pytest.mark.parametrize("of", VARIANTS)
def test_every_variant_of_shipped_configurations_is_a_checked_configuration(name: str, of: str) -> None:
    variant = VARIANTS[of]
    here = {"rollout.engine": "embedded", "training.device": "cpu", "model": None, "architecture": {}}
    settings = variant_settings(variant, load_config(name, here), seed=5)
    own = load_config(name, {**here, **settings})
    graph_of(own)
    assert own.seed == 5
    assert (own.precision.rollout.linear == "bf16") == (variant.rollout == "bf16")
    assert (own.precision.training.kv_cache == "fp8") == (variant.training == "fp8+kv")
    assert (own.correction.method == "none") == (of == "fp8-rollout")


def test_a_night_is_cut_short_continued_judged_and_compared(
    judge_small: Callable[..., Any], shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge_small({"steps": 2}, name="night", seeds=[0], variants=["bf16"]).is_completed()
    before = (shelf / "parity-night-bf16-0" / "ledger.jsonl").read_bytes()
    capsys.readouterr()
    state = judge_small({"steps": 2}, name="night", seeds=[0], variants=["fp8-end-to-end", "bf16"])
    assert "1 of 2, bf16, seed 0: done before" in capsys.readouterr().out
    assert (shelf / "parity-night-bf16-0" / "ledger.jsonl").read_bytes() == before
    # Prefect's UI shows these in grey: neither green nor red.
    assert (state.type.value, state.name) == ("CANCELLED", "NOT ENOUGH DATA")
    assert "fp8-end-to-end: held-out accuracy minus BF16 1 pairs of seeds" in state.message
    folder = shelf / "parity" / "night"
    night = json.loads((folder / "verdict.json").read_text())
    assert (night["outcome"], night["variants"]) == ("NOT ENOUGH DATA", ["bf16", "fp8-end-to-end"])
    assert len(list((shelf / "warm_starts").glob("*.json"))) == 1
    page = (folder / "report.html").read_text()
    assert page.count("<figure") >= 4, "charts of one value are sentences"
    _is_posted(night["headline"])
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        assert [run.name for run in client.read_flow_runs(flow_run_filter=below)] == ["fp8-end-to-end, seed 0"]


def _is_posted(headline: str) -> None:
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["night-verdict"])))
    assert all(one.type == "markdown" for one in artifacts)
    assert any(headline in one.data and "| bf16 |" in one.data for one in artifacts)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (Completed(message="PASS"), 0),
        (Failed(message="FAIL: bf16: memory slope 3 MiB a step"), 1),
        (Cancelled(name="NOT ENOUGH DATA", message="NOT ENOUGH DATA: bf16: complete 1 of 2"), 4),
        # Somebody cancelled the flow run.
        (Cancelled(message="stopped"), 1),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else None,
)
def test_each_outcome_has_an_exit_code(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Any, code: int
) -> None:
    @flow(name="judged", persist_result=False)
    def judged(config: str = "") -> Any:
        return state

    monkeypatch.setattr("flows.parity.parity", judged)
    assert main(["parity", "tiny-nightly"]) == code
    assert state.message in "".join(capsys.readouterr())
