"""A training of a parity run in a process of its own: how it ends, when it dies, and when who started it stops."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL

from flows.parity import parity
from flows.parity_training import train_apart
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

pytestmark = pytest.mark.slow

# A step of the user's own, in the working directory: what the file `how` says happens in step 2.
STEPS = """\
import os
import signal
from pathlib import Path

from tasks import reward as ours
from tasks.step import step


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def reward(run, index, options, prompts, rollouts):
    how = Path("how").read_text()
    if index == 2 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return ours.reward(run, index, options, prompts, rollouts)
"""


@pytest.fixture
def settings(
    prefect_server: None,
    small: dict[str, Any],
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Overrides of a small training with that step, and the surroundings of a process that knows the tests' server."""
    mlflow_store(tmp_path)
    (tmp_path / "apart_steps.py").write_text(STEPS)
    (tmp_path / "how").write_text("ends")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", PREFECT_API_URL.value())
    replaced = {"reward": {"uses": "apart_steps:reward", "needs": ["prompts", "rollouts"]}}
    return {**small, "runs": str(tmp_path), "tracking.system_metrics": False, "pipeline.replace": replaced}


@pytest.fixture
def apart(settings: dict[str, Any], tmp_path: Path) -> Callable[[], Any]:
    """Train three steps in a process of its own, from a flow; returns the state."""

    @flow(name="caller", persist_result=False)
    def caller() -> Any:
        parameters = {"config": "tiny", "run": "one", "steps": 3, "overrides": settings}
        state = train_apart("bf16, seed 0", parameters)
        return {"type": state.type.value, "message": state.message}

    return caller


def last_step(folder: Path) -> int:
    return (LedgerView.read(folder / LEDGER).last_step() or 0) if (folder / LEDGER).exists() else 0


def trainer(folder: Path) -> int:
    """The process that trains."""
    segment = LedgerView.read(folder / LEDGER).last_segment()
    assert segment is not None
    return segment.pid


def test_it_ends_below_its_caller_in_a_process_of_its_own(apart: Callable[[], Any], tmp_path: Path) -> None:
    ended = apart(return_state=True)
    assert ended.result() == {"type": "COMPLETED", "message": None}
    assert last_step(tmp_path / "one") == 3
    assert trainer(tmp_path / "one") != os.getpid()
    with get_client(sync_client=True) as client:
        # Runs of other tests are there too, with parameters of every kind.
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
        (run,) = [run for run in newest if str(tmp_path) in str(run.parameters.get("overrides"))]
        parent = client.read_task_run(run.parent_task_run_id)
    assert parent.flow_run_id == ended.state_details.flow_run_id
    assert run.name == "bf16, seed 0"


def test_one_that_dies_makes_the_night_red(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "how").write_text("dies")
    monkeypatch.setattr(
        "flows.parity.train_one",
        lambda name, training: train_apart(name, training.parameters),
    )
    night = parity("tiny", name="dies", seeds=[0], steps=3, variants=["bf16"], overrides=settings, return_state=True)
    assert night.is_failed()
    assert "bf16: complete seed 0: its process ended with -9" in night.message
    assert last_step(tmp_path / "parity-dies-bf16-0") == 1
