"""Every command of the README is run by a test: here, by the deployment test, or by CI itself."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fp8core.config.load import SHIPPED, load_config

REPOSITORY = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# CI is `make test`; `make demo` is `fp8-grpo run tiny`, which test_learning runs at full size.
RUN_BY_OTHERS = {"make demo", "make test", "source .venv/bin/activate"}

# Appended to the README's trainings, so that each of them ends in seconds.
SMALLER = [
    "steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "evaluation.prompts=4",
]
SMALLER_WARM_START = ["warm_start.steps=3", "warm_start.batch_size=16"]


# They look at the runs that the trainings before them leave.
OF_RUNS = ("verify ", "replay ", "compare ", "evaluate ", "report ", "export ", "gc ")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("newcomer")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_every_command_is_known_to_a_test(readme_commands: list[str]) -> None:
    ours = {line for line in readme_commands if line.startswith("fp8-grpo ")}
    deployment = {line for line in readme_commands if line.startswith(("prefect ", "export PREFECT_API_URL="))}
    assert set(readme_commands) == ours | deployment | RUN_BY_OTHERS


def test_make_demo_runs_the_main_job() -> None:
    planned = subprocess.run(["make", "-n", "demo"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    # Below another make there are lines about folders around it.
    assert ".venv/bin/fp8-grpo run tiny" in planned.stdout.splitlines()


@pytest.mark.slow
def test_commands_that_only_look(readme_commands: list[str], workplace: Path) -> None:
    # `up` stays: tests/flows/test_deployment.py starts it.
    of_runs = ("run ", "resume ", "up", *OF_RUNS)
    ours = (line for line in readme_commands if line.startswith("fp8-grpo "))
    for command in (line for line in ours if not line.removeprefix("fp8-grpo ").startswith(of_runs)):
        done = run(shlex.split(command), workplace)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout, command


@pytest.mark.slow
def test_trainings(readme_commands: list[str], workplace: Path, small_checkpoint: Path) -> None:
    rows = "".join(
        f'{{"question": "What is {i} plus 1?", "answer": "It is {i + 1}.\\n#### {i + 1}"}}\n'.replace("\n#", "\\n#")
        for i in range(80)
    )
    (workplace / "problems.jsonl").write_text(rows)
    for command in (line for line in readme_commands if line.startswith("fp8-grpo run")):
        own_model = "gsm8k" in command
        filled = command.replace("path/to/checkpoint", str(small_checkpoint)).replace("path/to/", f"{workplace}/")
        smaller = SMALLER if own_model else SMALLER + SMALLER_WARM_START
        done = run([*shlex.split(filled), *(flag for setting in smaller for flag in ("--set", setting))], workplace)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    for command in (line for line in readme_commands if line.startswith("fp8-grpo resume")):
        done = run([*shlex.split(command), "--set", "steps=3"], workplace)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert "3/3" in done.stdout
    ours = (line for line in readme_commands if line.startswith("fp8-grpo "))
    for command in (line for line in ours if line.removeprefix("fp8-grpo ").startswith(OF_RUNS)):
        done = run(shlex.split(command), workplace)
        assert done.returncode == (1 if " compare " in command else 0), (command, done.stdout, done.stderr)
        assert done.stdout, command


def test_the_configuration_it_shows_is_the_shipped_one() -> None:
    text = (REPOSITORY / "README.md").read_text()
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == yaml.safe_load((SHIPPED / "careful.yaml").read_text())
    assert load_config("careful").loss.reference_kl == 0.05


def test_files_it_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for target in {part.split(")")[0] for part in text.split("](")[1:]}:
        assert target.startswith("https://") or (REPOSITORY / target).is_file(), target
