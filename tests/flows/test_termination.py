"""SIGTERM: the step it comes in is committed and a checkpoint written; a second one, or Ctrl-C, stops at once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterParentFlowRunId
from prefect.client.schemas.sorting import FlowRunSort

from flows import cli
from flows.termination import TOLD, stop_on_sigterm
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView

# ---- the request ----


class Reached(BaseException):
    """What the handler that was there before raises, as Prefect's does."""


@pytest.fixture
def before() -> Iterator[Any]:
    """A handler of SIGTERM that raises."""

    def handler(number: int, frame: object) -> None:
        raise Reached

    earlier = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, earlier)


def test_the_first_signal_is_a_request_and_the_second_acts(before: Any) -> None:
    with stop_on_sigterm() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(Reached):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT does what it does at a terminal, wherever the tests run."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, earlier)


# As pyarrow makes of Ctrl-C in an import of pandas: nothing.
LOST = """
import signal, sys

class Loses:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Loses())
from flows.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [
        ("flows.cli.commands", ["config", "tiny"], "interrupted"),
        ("pydantic", ["config", "tiny"], "interrupted"),
        ("fp8core.alignment.bounds", ["config", "tiny"], "interrupted"),
        ("flows.grpo", ["run", "tiny"], "interrupted before the run had begun"),
    ],
)
def test_ctrl_c_in_an_import_is_not_lost(tmp_path: Path, module: str, words: list[str], told: str) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    program = [sys.executable, "-c", LOST, module, *words]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, f"fp8-grpo: {told}\n")
    assert "learning_rate" not in done.stdout


# ---- a training ----

REWARD = "stopping_steps:reward"
STEPS = """\
import os
import signal
import time
from pathlib import Path

from fp8core.errors import EngineLost
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


@step(inputs={"rewards": "rewards"}, outputs={"seen": "rewards"})
def loses_its_engine(run, index, options, rewards):
    if index == 2 and Path(__file__).with_name("signals").exists():
        raise EngineLost("the engine has ended")
    return {"seen": rewards}


@step(inputs={"rewards": "rewards"}, outputs={"seen": "rewards"})
def interrupts(run, index, options, rewards):
    if index == 2:
        signal.raise_signal(signal.SIGINT)
    return {"seen": rewards}
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
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> tuple[Any, str, str]:
        try:
            code: Any = cli.main(arguments)
        except SystemExit as left:
            code = left.code
        return code, *capfd.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before)
    (workplace / "signals").unlink(missing_ok=True)


def status(folder: Path) -> str:
    tracking = json.loads((folder / "tracking.json").read_text())
    return str(MlflowClient(tracking["uri"]).get_run(tracking["run_id"]).info.status)


def shown_in_prefect(name: str) -> list[str]:
    """Completed flow runs of the steps, below the newest flow run with the name of a training."""
    with get_client(sync_client=True) as client:
        of_training = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        training, *_ = client.read_flow_runs(flow_run_filter=of_training, sort=FlowRunSort.START_TIME_DESC)
        below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[training.id]))
        found = client.read_flow_runs(flow_run_filter=below)
    return sorted(run.name for run in found if run.state_name == "Completed")


def test_the_step_is_committed_and_continuing_redoes_nothing(command: Any, workplace: Path, whole_run: Any) -> None:
    (workplace / "signals").write_text("1")
    code, out, err = command("run", "small.yaml", "--set", "run=once")
    assert code == 128 + signal.SIGTERM
    assert err == f"{TOLD}fp8-grpo: terminated; fp8-grpo resume once --trust continues the run\n"
    assert out.splitlines()[-1] == "stopped after step 2"
    folder = workplace / "runs" / "once"
    ledger = LedgerView.read(folder / LEDGER)
    assert ledger.last_step() == 2
    assert not ledger.tasks(3)
    assert [entry.step for entry in ledger.checkpoints()] == [2]
    assert status(folder) == "KILLED"
    until = time.monotonic() + 30
    while shown_in_prefect("once") != ["step 1", "step 2"] and time.monotonic() < until:
        time.sleep(0.2)
    assert shown_in_prefect("once") == ["step 1", "step 2"]
    (workplace / "signals").unlink()
    code, out, err = command("resume", "once", "--trust", "--json", "once.json")
    assert code == 0
    assert err.splitlines() == [f"{folder}: importing what its run.json names: pipeline.steps.reward.uses={REWARD}"]
    assert "continues after step 2; 0 updates redone from rollouts" in out
    never_stopped = whole_run.ledger.steps()[4].weights_digest
    assert json.loads((workplace / "once.json").read_text())["weights_digest"] == never_stopped
    assert status(folder) == "FINISHED"


@contextmanager
def signal_when(reached: Callable[[], bool], seconds: float = 0.0) -> Iterator[None]:
    """Send SIGTERM to this process so many seconds after that is so."""

    def stop() -> None:
        until = time.monotonic() + 120
        while not reached() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    yield
    thread.join()


SLOW = """
import time

def score(prompt, completion, reference, finish):
    time.sleep(0.2)
    return len(completion) % 2 == 0
"""


def test_a_start_is_left_after_the_part_that_runs_and_continues_after_it(
    command: Any, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "slow.py").write_text(SLOW)
    ledger = workplace / "runs" / "begun" / LEDGER
    generate, evaluation = EmbeddedEngine.generate, threading.Event()

    def noted(engine: EmbeddedEngine, *arguments: Any) -> Iterator[Any]:
        if "calibrate" in LedgerView.read(ledger).tasks(START):
            evaluation.set()
        yield from generate(engine, *arguments)

    monkeypatch.setattr(EmbeddedEngine, "generate", noted)
    with signal_when(evaluation.is_set):
        slow = ("--set", "steps=1", "--set", "reward.verifier=slow.py:score")
        code, out, err = command("run", "small.yaml", "--set", "run=begun", *slow)
    assert code == 128 + signal.SIGTERM
    assert err == f"{TOLD}fp8-grpo: terminated; fp8-grpo resume begun --trust continues the run\n"
    assert out.splitlines()[-1] == "stopped before precision_gap of step 0"
    found = LedgerView.read(ledger)
    assert (found.last_step(), [*found.tasks(START)]) == (None, ["warm_start", "calibrate", "evaluate"])
    code, *_ = command("resume", "begun", "--trust")
    assert code == 0
    again = LedgerView.read(ledger)
    assert again.last_step() == 1
    assert all(again.tasks(START)[name] == entry for name, entry in found.tasks(START).items())


def test_a_second_signal_stops_within_the_step(command: Any, workplace: Path) -> None:
    (workplace / "signals").write_text("2")
    code, _, err = command("run", "small.yaml", "--set", "run=twice")
    assert code == 128 + signal.SIGTERM
    assert err == f"{TOLD}fp8-grpo: terminated; fp8-grpo resume twice --trust continues the run\n"
    ledger = LedgerView.read(workplace / "runs" / "twice" / LEDGER)
    assert ledger.last_step() == 1
    assert "train" not in ledger.tasks(2)
    assert status(workplace / "runs" / "twice") == "KILLED"


def test_ctrl_c_ends_a_training_within_the_step(command: Any, workplace: Path, ctrl_c: None) -> None:
    step = "{name: interrupts, uses: 'stopping_steps:interrupts', needs: [rewards]}"
    settings = (
        "run=interrupted",
        f"pipeline.insert=[{{after: reward, step: {step}}}]",
        "pipeline.rewire.train.rewards=seen",
    )
    code, _, err = command("run", "small.yaml", *(word for setting in settings for word in ("--set", setting)))
    assert code == 128 + signal.SIGINT
    assert err == "fp8-grpo: interrupted; fp8-grpo resume interrupted --trust continues the run\n"
    assert LedgerView.read(workplace / "runs" / "interrupted" / LEDGER).last_step() == 1
    assert status(workplace / "runs" / "interrupted") == "KILLED"
