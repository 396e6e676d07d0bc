"""SIGTERM: the step it comes in is committed and a checkpoint written; a second one, or Ctrl-C, stops at once."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from waiting import wait_for

from flows import cli
from flows.termination import STOP_MESSAGE
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import read_description

REWARD = "stopping_steps:reward"
STEPS = """\
import os
import signal
import time
from pathlib import Path

from tasks import reward as ours
from tasks.step import step


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def reward(run, index, options, prompts, rollouts):
    signals = Path(__file__).with_name("signals")
    if index == 2 and signals.exists():
        for _ in range(int(signals.read_text())):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # Two at a time would be taken for one.
    return ours.reward(run, index, options, prompts, rollouts)


@step(inputs=ours.reward.spec.inputs, outputs=ours.reward.spec.outputs)
def interrupts(run, index, options, prompts, rollouts):
    if index == 2:
        signal.raise_signal(signal.SIGINT)
    return ours.reward(run, index, options, prompts, rollouts)
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, small_file: Any, mlflow_store: Callable[[Path], Path]) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    mlflow_store(folder / "runs")
    stopping = {"uses": REWARD, "needs": ["prompts", "rollouts"]}
    small_file(folder, steps=4, checkpoint={"every": 100}, pipeline={"replace": {"reward": stopping}})
    (folder / "stopping_steps.py").write_text(STEPS)
    return folder


@pytest.fixture
def command(
    workplace: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """Call fp8-grpo in this process; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)

    def call(*arguments: str) -> tuple[Any, str, str]:
        try:
            code: Any = cli.main(arguments)
        except SystemExit as left:
            code = left.code
        return code, *capfd.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])
    (workplace / "signals").unlink(missing_ok=True)


def status(folder: Path) -> str:
    tracking = json.loads((folder / "tracking.json").read_text())["services"]["mlflow"]
    return str(MlflowClient(tracking["uri"]).get_run(tracking["run_id"]).info.status)


def completed_steps(folder: Path) -> list[str]:
    """Names of the completed flow runs that the steps of a training have in Prefect."""
    tag = f"run-{read_description(folder).id}"
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))
    return sorted(run.name for run in found if run.state_name == "Completed")


def test_the_step_is_committed_and_continuing_redoes_nothing(command: Any, workplace: Path, whole_run: Any) -> None:
    (workplace / "signals").write_text("1")
    code, out, err = command("run", "small.yaml", "--set", "run=once")
    assert code == 128 + signal.SIGTERM
    assert err == f"{STOP_MESSAGE}fp8-grpo: terminated; fp8-grpo resume once --trust continues the run\n"
    assert out.splitlines()[-1] == "stopped after step 2"
    folder = workplace / "runs" / "once"
    ledger = LedgerView.read(folder / LEDGER)
    assert (ledger.last_step(), ledger.tasks(3)) == (2, {})
    assert [entry.step for entry in ledger.checkpoints()] == [2]
    assert status(folder) == "KILLED"
    wait_for(lambda: completed_steps(folder) == ["step 1", "step 2"], "the steps in Prefect", 30)
    (workplace / "signals").unlink()
    code, out, err = command("resume", "once", "--trust", "--json", "once.json")
    assert code == 0
    names = f"pipeline.steps.reward.uses={REWARD}"
    assert err.splitlines() == [f"{folder}: uses code or servers that its run.json names: {names}"]
    assert "continues after step 2; 0 updates redone from rollouts" in out
    never_stopped = whole_run.ledger.steps()[4].weights_digest
    assert json.loads((workplace / "once.json").read_text())["weights_digest"] == never_stopped
    assert status(folder) == "FINISHED"


@pytest.mark.parametrize(
    ("name", "uses", "code", "told"),
    [
        ("twice", REWARD, 128 + signal.SIGTERM, f"{STOP_MESSAGE}fp8-grpo: terminated"),
        ("ctrl-c", "stopping_steps:interrupts", 128 + signal.SIGINT, "fp8-grpo: interrupted"),
    ],
)
def test_a_second_signal_and_ctrl_c_stop_within_the_step(
    command: Any, workplace: Path, name: str, uses: str, code: int, told: str
) -> None:
    (workplace / "signals").write_text("2")
    step = f"pipeline.replace={{reward: {{uses: '{uses}', needs: [prompts, rollouts]}}}}"
    ended, _, err = command("run", "small.yaml", "--set", f"run={name}", "--set", step)
    assert (ended, err) == (code, f"{told}; fp8-grpo resume {name} --trust continues the run\n")
    ledger = LedgerView.read(workplace / "runs" / name / LEDGER)
    assert ledger.last_step() == 1
    assert "train" not in ledger.tasks(2)
    assert status(workplace / "runs" / name) == "KILLED"
