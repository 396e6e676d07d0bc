"""The command as a person meets it: what it prints, its exit codes, and one line for a mistake."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import cli
from flows.tracking.store import default_tracking_uri

# A step of the user's own, in the folder where the command is called.
MINE = """\
from pathlib import Path

from tasks.step import step


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def absent_file(run, index, options, prompts, rollouts):
    return Path("absent.txt").read_text()
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, small_file) -> Path:
    """A user's folder: a configuration of their own and a module with steps."""
    folder = tmp_path_factory.mktemp("workplace")
    small_file(folder)
    (folder / "cli_steps.py").write_text(MINE)
    return folder


@pytest.fixture(autouse=True)
def _here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path])


def flags(*settings: str) -> list[str]:
    return [flag for setting in settings for flag in ("--set", setting)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resum", "tiny"], r"fp8-grpo: argument COMMAND: there is no 'resum'; did you mean resume\?"),
        (["evaluate", "x", "--precision", "bf17"], r"fp8-grpo evaluate: .* no 'bf17'; did you mean bf16\?"),
        (["compare", "one"], "fp8-grpo compare: the following arguments are required: RUN"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert re.fullmatch(f"{said}\n", capsys.readouterr().err)


def test_a_prefect_server_that_does_not_answer_is_one_line(capsys):
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert cli.main(["run", "small.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fp8-grpo: Prefect's server at http://127.0.0.1:9/api/ does not answer this client (")


def test_a_run_shows_progress_and_says_where_things_are_and_why_it_failed(
    workplace: Path, mlflow_store: Callable[[Path], Path], prefect_server: None, capsys
):
    runs = mlflow_store(workplace / "runs")
    assert cli.main(["run", "small.yaml", *flags("run=first", "steps=2")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "starting Prefect and MLflow\nfp8-grpo run first\n" in out
    for step in ("1/2", "2/2"):
        # Where the rewards of every group were equal, a mark comes first.
        assert re.search(rf"^{step} .* 1 exactly +0 +\d+\.\d\d +\d+:\d\d +(! )?\w+ \d+%$", out, re.MULTILINE), out
    # The report's place stands at the start, too.
    for name, file, lines in (("report", "report.html", 2), ("curves", "curves.png", 1)):
        assert re.findall(rf"^  {name} +(.+)$", out, re.MULTILINE) == lines * [str(runs / "first" / file)]
        assert (runs / "first" / file).is_file()
    at_start, command = re.findall(r"^  MLflow UI +(.+)$", out, re.MULTILINE)
    assert at_start == command
    assert command.endswith(f"ui --backend-store-uri {default_tracking_uri(runs)}")

    changed = flags("run=first", "steps=2", "training.learning_rate=1e-3", "seed=4")
    assert cli.main(["run", "small.yaml", *changed]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for difference in ("training.learning_rate: 0.0001 -> 0.001", "seed: 0 -> 4"):
        assert difference in line

    # The step is a module in the working directory; of an exception in it the traceback is shown, too.
    step = "pipeline.replace={reward: {uses: 'cli_steps:absent_file', needs: [prompts, rollouts]}}"
    settings = flags("run=absent", "steps=2", step)
    assert cli.main(["run", "small.yaml", *settings]) == 1
    *traceback, last = capsys.readouterr().err.splitlines()
    reason = "step 1, task reward: FileNotFoundError: [Errno 2] No such file or directory: 'absent.txt'"
    assert last == f"fp8-grpo: {reason}"
    assert any(line.startswith(f'  File "{workplace}/cli_steps.py"') for line in traceback)
    client = MlflowClient(default_tracking_uri(runs))
    experiment = client.get_experiment_by_name("fp8-grpo").experiment_id
    (logged,) = client.search_runs([experiment], "attributes.run_name = 'absent'")
    assert (logged.info.status, logged.data.tags["error"]) == ("FAILED", reason)


def test_a_plan_that_does_not_fit_is_printed_and_refused_in_one_line(capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert cli.main(["plan", "qwen3-aligned", "--gpu", "h100", "--json", str(file)]) == 2
    out, err = capsys.readouterr()
    assert "does not fit:" in out
    (line,) = err.splitlines()
    assert line.startswith("fp8-grpo: memory: generating on NVIDIA H100 80 GB needs ")
    assert "there are 79.6; lower training.tokens_per_pass or train on more GPUs" in line
    assert json.loads(file.read_text())["fits"] is False
