"""The command as a person meets it: what it prints, its exit codes, one line for a mistake, Ctrl-C and kill."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import cli
from flows.termination import TOLD
from flows.tracking.store import default_tracking_uri

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("fp8-grpo")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "flows.cli"]

# Steps of a user's own, in the folder where the command is called.
MINE = """\
import math
import time
from pathlib import Path

import pyarrow as pa

from fp8core.store.tables import REWARDS
from tasks.reward import reward_table
from tasks.step import step


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def nan_at_step_2(run, index, options, prompts, rollouts):
    store = run.directory.store
    rows = reward_table(run, store.get_table(prompts), store.get_table(rollouts)).to_pylist()
    rows[5]["reward"] = math.nan if index == 2 else 0.0
    return {"rewards": store.put_table("rewards", pa.Table.from_pylist(rows, schema=REWARDS))}


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def absent_file(run, index, options, prompts, rollouts):
    return Path("absent.txt").read_text()


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def held_at_step_3(run, index, options, prompts, rollouts):
    while index == 3 and not Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    store = run.directory.store
    return {"rewards": store.put_table("rewards", reward_table(run, *map(store.get_table, (prompts, rollouts))))}
"""

OWN_LOSS = """\
from pydantic import Field

from fp8core.config.section import Section
from fp8core.rl.user_loss import policy_loss


class Power(Section):
    power: float = Field(1.0, ge=0)


@policy_loss(options=Power)
def soft(tokens, options):
    return -tokens.ratio * tokens.advantages
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, small_file) -> Path:
    """A user's folder: a configuration of their own and a module with steps."""
    folder = tmp_path_factory.mktemp("workplace")
    small_file(folder)
    (folder / "cli_steps.py").write_text(MINE)
    (folder / "cli_loss.py").write_text(OWN_LOSS)
    (folder / "raising.py").write_text("import os\n\nkey = os.environ['API_KEY']\n")
    return folder


@pytest.fixture(scope="module")
def environment(workplace: Path, prefect_home: Callable[[Path], Path]) -> dict[str, str]:
    """No Prefect server is configured, so the command starts its own."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "PREFECT_HOME": str(prefect_home(workplace / "prefect")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }


@pytest.fixture(scope="module")
def trained(workplace: Path, mlflow_store: Callable[[Path], Path]) -> Path:
    """The folder of runs. It is there only for tests that train: others see whether something makes it."""
    return mlflow_store(workplace / "runs")


@pytest.fixture(scope="module")
def with_server(environment: dict[str, str], prefect_server: None) -> dict[str, str]:
    """The same with the tests' own Prefect server, which is up already."""
    return {**environment, "PREFECT_API_URL": PREFECT_API_URL.value()}


def files(folder: Path) -> set[Path]:
    """What is in a folder, but for what Python leaves of the modules it imports."""
    return {path for path in folder.iterdir() if path.name != "__pycache__"}


def flags(*settings: str) -> list[str]:
    return [flag for setting in settings for flag in ("--set", setting)]


def shell(workplace: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=workplace, env=environment, capture_output=True, text=True, timeout=300
    )


def mlflow_run(runs: Path, name: str):
    from mlflow import MlflowClient

    client = MlflowClient(default_tracking_uri(runs))
    experiment = client.get_experiment_by_name("fp8-grpo")
    (found,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return found


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workplace: Path):
    """Call the command in this process; it must refuse with one line, before it prints or makes anything."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = files(workplace)

    def call(*arguments: str) -> str:
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("fp8-grpo: ")
        assert files(workplace) == before
        return line

    return call


# --- looking around ---


def test_config_names_the_origin_of_every_value(capsys, workplace):
    assert cli.main(["config", str(workplace / "small.yaml"), *flags("training.learning_rate=2e-4")]) == 0
    lines = capsys.readouterr().out.splitlines()
    origin = r"default|default of the exact contract: .+|--set|\S+:\d+"
    assert all(re.fullmatch(rf"[\w.]+ = .+  # ({origin})", line) for line in lines)
    assert "training.learning_rate = 0.0002  # --set" in lines
    assert f"warm_start.steps = 3  # {workplace / 'small.yaml'}:3" in lines
    assert "correction.cap = 2.0  # default" in lines
    resolved = "engine and trainer compute the same operations in equal formats"
    assert f"alignment.stop.tokens_differing = 0  # default of the exact contract: {resolved}" in lines


# --- mistakes ---

REWARD = "pipeline.replace={reward: {uses: 'USES', needs: [prompts, rollouts]}}"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("stpes=3", "stpes: unknown key; did you mean steps? (--set)"),
        (
            "learning_rate=1",
            "did you mean warm_start.learning_rate or training.learning_rate?",
        ),
        ("model=somewhere", "exactly one of `model`"),
        (REWARD.replace("USES", "no_such_module:score"), "step reward: uses no_such_module:score: there is no module"),
        (REWARD.replace("USES", "raising:score"), "uses raising:score: WORKPLACE/raising.py:3: KeyError: 'API_KEY'"),
    ],
)
def test_a_wrong_setting_is_one_line(refused, workplace, setting, reason):
    """What else is refused is in tests/fp8core/config."""
    assert reason.replace("WORKPLACE", str(workplace)) in refused("run", "small.yaml", *flags(setting))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resum", "tiny"], r"fp8-grpo: argument COMMAND: there is no 'resum'; did you mean resume\?"),
        (["evaluate", "x", "--precision", "bf17"], r"fp8-grpo evaluate: .* no 'bf17'; did you mean bf16\?"),
        (["run", "tiny", "--steps", "6"], r"fp8-grpo: .*: --steps 6; did you mean --set steps=6\?"),
        (["run", "tiny", "--max-grad-norm=2"], r"fp8-grpo: .*; did you mean --set training.max_grad_norm=2\?"),
        (["run"], "fp8-grpo run: the following arguments are required: CONFIG"),
        (["parity", "--variant", "foo"], r"fp8-grpo parity: argument --variant: foo is none of bf16, .*"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert re.fullmatch(f"{said}\n", capsys.readouterr().err)


def test_graph_draws_an_iteration_whose_model_is_open(capsys):
    assert cli.main(["graph", "gsm8k"]) == 0
    # What runs on a GPU can be drawn where there is none.
    assert cli.main(["graph", "qwen3"]) == 0
    assert "flowchart LR" in capsys.readouterr().out


def test_an_mlflow_server_that_does_not_answer_is_refused_before_a_run_has_a_folder(refused):
    said = refused("run", "small.yaml", *flags("tracking.uri=http://127.0.0.1:1"))
    assert said == "fp8-grpo: tracking.uri http://127.0.0.1:1: no server answers there (Connection refused)"
    said = refused("run", "small.yaml", *flags("tracking.uri=http://127.0.0.1:port"))
    assert said.startswith("fp8-grpo: tracking.uri http://127.0.0.1:port: no server of MLflow answers there (")


def test_a_prefect_server_that_does_not_answer_is_one_line(workplace, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert cli.main(["run", str(workplace / "small.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fp8-grpo: Prefect's server at http://127.0.0.1:9/api/ does not answer (")
    assert "unset PREFECT_API_URL" in line


# --- training ---


@pytest.fixture(scope="module")
def first(workplace: Path, trained: Path, with_server: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return shell(workplace, with_server, "run", "small.yaml", *flags("run=first", "steps=2"), "--json", "first.json")


def test_a_run_shows_progress_and_says_where_things_are(first, workplace):
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    out = first.stdout
    assert out.startswith("starting Prefect and MLflow\nfp8-grpo run first\n")
    assert re.search(r"^warm start: loss \d\.\d{4} after 3 steps$", out, re.MULTILINE)
    assert re.search(
        r"^after the warm start step_by_step has accuracy \d\.\d{3}, the target is 0\.900", out, re.MULTILINE
    )
    assert re.search(r"^step +reward +held-out +length +tmpe +differ +seconds +left +slowest task$", out, re.MULTILINE)
    for step in ("1/2", "2/2"):
        # Where the rewards of every group were equal, a mark comes first.
        assert re.search(rf"^{step} .* 1 exactly +0 +\d+\.\d\d +\d+:\d\d +(! )?\w+ \d+%$", out, re.MULTILINE), out
    early, late = re.findall(r"^([12])/2 .*\n  wrote  \S.* reward [01]$", out, re.MULTILINE)
    assert (early, late) == ("1", "2")
    assert "─ first: done ─" in out
    for name, file in (("report", "report.html"), ("curves", "curves.png")):
        (path,) = re.findall(rf"^  {name} +(.+)$", out, re.MULTILINE)
        assert path == str(workplace / "runs" / "first" / file)
        assert Path(path).is_file()
    (command,) = re.findall(r"^  MLflow UI +(.+)$", out, re.MULTILINE)
    assert command.endswith(f"ui --backend-store-uri {default_tracking_uri(workplace / 'runs')}")


def test_another_configuration_of_an_existing_run_names_every_key(first, refused):
    line = refused("run", "small.yaml", *flags("run=first", "steps=2", "training.learning_rate=1e-3", "seed=4"))
    assert "run first exists with another configuration: " in line
    assert "training.learning_rate: 0.0001 -> 0.001" in line
    assert "seed: 0 -> 4" in line
    assert "steps: 2 -> 1" in refused("run", "small.yaml", *flags("run=first", "steps=1"))


@pytest.mark.parametrize(
    ("uses", "reason"),
    [
        ("nan_at_step_2", "step 2, task train: the reward of group 1, sample 1 is nan; rewards must be finite"),
        (
            "absent_file",
            "step 1, task reward: FileNotFoundError: [Errno 2] No such file or directory: 'absent.txt'",
        ),
    ],
)
def test_a_failed_training_ends_with_its_reason_and_exit_code_1(
    workplace, trained, prefect_server, capsys, monkeypatch, uses, reason
):
    """The step is a module in the working directory; a traceback is only shown of a failure without a known cause."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = flags(f"run={uses}", "steps=2", REWARD.replace("USES", f"cli_steps:{uses}"))
    assert cli.main(["run", "small.yaml", *settings, "--json", "n.json"]) == 1
    *traceback, last = capsys.readouterr().err.splitlines()
    assert last == f"fp8-grpo: {reason}"
    ours = [line for line in traceback if line.startswith(f'  File "{workplace}/cli_steps.py"')]
    assert bool(traceback) == bool(ours) == (uses == "absent_file")
    assert not (workplace / "n.json").exists()
    logged = mlflow_run(trained, uses)
    assert (logged.info.status, logged.data.tags["error"]) == ("FAILED", reason)


# --- interrupted ---

STEPS = 4
HELD = REWARD.replace("USES", "cli_steps:held_at_step_3")
# As a terminal starts it: where the tests run behind an `&`, Ctrl-C is ignored by all that they start.
WITH_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def interrupt(workplace: Path, environment: dict[str, str], name: str, number: signal.Signals) -> tuple[int, str]:
    """Start a run, signal the whole process group after the first step, as a terminal does; exit code and stderr.

    The run waits in its third step until it has the signal, so it cannot end before.
    """
    (workplace / "go").unlink(missing_ok=True)
    command = [sys.executable, "-c", WITH_CTRL_C, *COMMAND, "run", "small.yaml"]
    unbuffered = {**environment, "PYTHONUNBUFFERED": "1"}
    with (workplace / f"{name}.err").open("w+") as errors:
        process = subprocess.Popen(
            [*command, *flags(f"run={name}", f"steps={STEPS}", HELD)],
            cwd=workplace,
            env=unbuffered,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        too_long = threading.Timer(240, os.killpg, (process.pid, signal.SIGKILL))
        too_long.start()
        try:
            assert any(line.strip().startswith(f"1/{STEPS} ") for line in process.stdout), Path(errors.name).read_text()
            os.killpg(process.pid, number)
            (workplace / "go").touch()
            process.communicate()
        finally:
            too_long.cancel()
            process.kill()
        return process.returncode, Path(errors.name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "word", "server"),
    [(signal.SIGINT, "interrupted", "environment"), (signal.SIGTERM, "terminated", "with_server")],
)
def test_a_signal_to_every_process_of_the_command_ends_it_in_good_order(
    workplace, trained, request, number, word, server
):
    """As a terminal, `timeout` and batch schedulers send it: the command's own Prefect server must hear the end.

    That this server outlives SIGTERM as well is in test_prefect_server.py.
    """
    code, errors = interrupt(workplace, request.getfixturevalue(server), word, number)
    assert code == 128 + number
    told = TOLD if number == signal.SIGTERM else ""
    assert errors == f"{told}fp8-grpo: {word}; fp8-grpo resume {word} --trust continues the run\n"
    assert mlflow_run(trained, word).info.status == "KILLED"
